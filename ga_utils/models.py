"""How is a model loaded?

By a name of the registry, a hub id or a local folder, with the same few rules: no remote code, safetensors only
(GGUF for the embedded model), strict about missing weights, and self-checked before anything is measured.

Devices and dtypes. CUDA is used where there is one (bf16, as in the paper), then Apple's MPS, then the CPU (both fp32).
MPS has no float64 and runs no fp64 oracle: asking for it is an error. ``device="auto"`` splits a model over all GPUs.
Fast kernels of installed packages are for CUDA only; elsewhere models run in pure torch (`kernels.py`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from . import kernels
from .errors import GAError, ModelError, say_once
from .fetch import Files, folder_files, hub_files, hub_tokenizer, own_files, packaged_files
from .language_model import LanguageModel, parse_dtype, wrap
from .registry import ModelSpec, find_spec, panel, registry, resolve_models
from .selfcheck import require

__all__ = ["LanguageModel", "labels", "load", "wrap"]


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    check: bool = True,
    label: str | None = None,
) -> LanguageModel:
    """Load a causal language model and find its heads.

    name: a name of the registry (``ga models``), a hub id such as "ORG/NAME", or a folder. dtype: "float32",
    "bfloat16", "float16" or "float64"; None chooses by device. device: "cpu", "cuda", "cuda:1", "mps" or "auto".
    revision: the hub's branch, tag or commit. attn_implementation: "sdpa" or "eager"; None lets transformers choose.
    check: run the self-check (a few forwards over a dozen tokens). label: the model's name on pages (see `labels`).

    Raises `ModelError` (or `GAError` for a dtype or device that is not there) in one sentence that says what to do.
    """
    if not str(name).strip():
        raise ModelError("No model was named: give a name of the registry, a hub id (ORG/NAME) or a folder.")
    place = _choose_device(device)
    number = _choose_dtype(dtype, place)
    spec = find_spec(str(name))
    on_cuda = place == "auto" or place.type == "cuda"
    with _quiet(), contextlib.nullcontext() if on_cuda else kernels.hidden():
        files = _locate(name, spec, revision)
        model = _build(files, place, number, attn_implementation)
        _check_kernels(model, files, on_cuda)
        tokenizer = _tokenizer(spec.tokenizer if spec and spec.tokenizer else files.folder, files)
    label = label or labels([name])[str(name)]
    model.eval().requires_grad_(False)
    lm = LanguageModel(model, tokenizer, label, spec.title if spec else label, files.source, files.revision)
    _check_tokenizer(lm)
    if check:
        try:
            require(lm)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(
                f"{lm.name} ({type(model).__name__}) fails in its first forward passes: {_first_line(error)}"
            ) from error
    return lm


def labels(names: Iterable[str | Path]) -> dict[str, str]:
    """What each of several models is called on a page, by the name under which it was asked for: no two alike.

    A model of the registry goes by its name there, a hub id by itself, and a folder by its last part, with as many
    parts before it as tell it from the others; panel:NAME stands for all models of a panel. Raises `ModelError` if
    there is none, or if two names mean one model.
    """
    if isinstance(names, str):
        raise ModelError(f"models={names!r} must be a list of models, such as ['smollm2-135m'].")
    parts = [[m.name for m in panel(str(n))] if str(n).startswith("panel:") else [str(n)] for n in names]
    asked = list(dict.fromkeys(name for part in parts for name in part))
    if not asked:
        raise ModelError("No model was named: give a name of the registry, a hub id (ORG/NAME) or a folder.")
    folders = {n: Path(n).expanduser().resolve() for n in asked if not find_spec(n) and Path(n).expanduser().is_dir()}
    found = {n: getattr(find_spec(n), "name", n) for n in asked if n not in folders}
    taken = {*found.values(), *registry()}
    for name, path in folders.items():
        others = [p for n, p in folders.items() if n != name]
        if path in others:
            raise ModelError(f"The folder {path} is named twice: name each model once.")
        for length in range(1, len(path.parts)):
            short = "/".join(path.parts[-length:])
            if short not in taken and not any("/".join(p.parts[-length:]) == short for p in others):
                break
        found[name] = short
    if len(set(found.values())) < len(found):
        twice = next(v for v in found.values() if list(found.values()).count(v) > 1)
        raise ModelError(f"{twice} is named twice: name each model once.")
    return {n: found[n] for n in asked}


def _locate(name: str | Path, spec: ModelSpec | None, revision: str | None) -> Files:
    if spec and (spec.package or spec.folder):
        if revision:
            whose = "a PyPI package" if spec.package else "this package"
            raise ModelError(f"{spec.name} comes from {whose}, which has no revision {revision!r}.")
        return packaged_files(spec) if spec.package else own_files(spec)
    if spec is None and Path(name).expanduser().exists():
        if revision:
            raise ModelError(f"{name} is a local folder, which has no revision {revision!r}.")
        return folder_files(Path(name).expanduser())
    if spec is None:
        name = resolve_models(str(name))[0]  # raises, naming close matches, for what is neither a name nor an id
        if str(name).startswith(("/", "./", "../", "~")):
            raise ModelError(f"There is no folder {name}.")
    return hub_files(spec.id if spec else str(name), revision, bool(spec and spec.gated))


def _build(files: Files, place: torch.device | str, dtype: torch.dtype, attention: str | None) -> torch.nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    from .llamba_load import is_llamba, load_llamba

    if is_llamba(files.folder):
        if place == "auto":
            raise ModelError("Llamba is loaded on one device: give device='cuda:0' or another, not 'auto'.")
        return load_llamba(files.folder, dtype=dtype).to(place)  # strict by itself
    try:
        config = AutoConfig.from_pretrained(files.folder, trust_remote_code=False)
    except Exception as error:  # whatever the architecture's own checks raise
        raise ModelError(
            f"{files.source} has a config.json that this version of transformers cannot use: {_first_line(error)}"
        ) from error
    options = {"attn_implementation": attention} if attention else {}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            files.folder, config=config, dtype=dtype, device_map=None if place == torch.device("cpu") else place,
            trust_remote_code=False, use_safetensors=True, local_files_only=True, output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below, by name
            **options,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{files.source} could not be loaded: {_first_line(error)}") from error
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(what):
            first = sorted(map(str, report[what]))[0]
            raise ModelError(
                f"{files.source} is not a whole {type(model).__name__}: {len(report[what])} "
                f"{what.replace('_', ' ')}, first {first}; it would have run with random weights there."
            )
    if report.get("unexpected_keys"):
        first = sorted(report["unexpected_keys"])[0]
        say_once(
            f"unexpected {files.source}",
            f"{files.source} holds {len(report['unexpected_keys'])} tensors that {type(model).__name__} does "
            f"not use, first {first}.",
        )
    return model


def _check_kernels(model: torch.nn.Module, files: Files, on_cuda: bool) -> None:
    if not on_cuda and (found := kernels.bound(model)):
        raise ModelError(
            f"{files.source} cannot run on this device in this process: the code of {type(model).__name__} was "
            f"imported earlier with the CUDA kernels of {' and '.join(found)}. Load it in a process of its own."
        )
    if on_cuda and (idle := kernels.unused(model)):
        say_once(
            f"kernels {type(model).__name__}",
            f"{type(model).__name__} runs without the fast kernels of {' and '.join(idle)}: that package cannot "
            "be used, or a model of this architecture was loaded for the CPU earlier in this process.",
        )


def _check_tokenizer(lm: LanguageModel) -> None:
    known = lm.model.get_input_embeddings().weight.shape[0]
    if lm.tokenizer.vocab_size > known:
        raise ModelError(
            f"The tokenizer of {lm.name} has {lm.tokenizer.vocab_size} tokens and the model embeds {known}: it "
            "belongs to another model."
        )


def _tokenizer(source: str | Path, files: Files) -> object:
    from transformers import AutoTokenizer

    if isinstance(source, str):  # another repository's tokenizer: Llamba's checkpoints carry none
        source = hub_tokenizer(source, gated=source.startswith("meta-llama/"))
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"{files.source} has no tokenizer that can be loaded: {_first_line(error)}") from error


def _choose_device(device: str | torch.device | None) -> torch.device | str:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device == "auto":
        if not torch.cuda.is_available():
            raise GAError("device='auto' splits a model over CUDA GPUs, and this machine has none: leave device out.")
        return "auto"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise GAError(f"device={device!r} is unknown: use 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'.") from error
    if place.type not in ("cpu", "cuda", "mps"):
        raise GAError(f"device={device!r} is not supported: use 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise GAError(f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA GPUs.")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise GAError("device='mps': this machine has no Apple GPU that torch can use.")
    return place


def _choose_dtype(dtype: str | torch.dtype | None, place: torch.device | str) -> torch.dtype:
    kind = place if isinstance(place, str) else place.type
    if dtype is None:
        return torch.bfloat16 if kind in ("cuda", "auto") else torch.float32
    number = parse_dtype(dtype)
    if kind == "mps" and number == torch.float64:
        raise GAError("Apple's MPS has no float64: use device='cpu', or dtype='float32'.")
    return number


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    line = text[0].strip() if text else type(error).__name__
    return line if line.endswith(".") else line + "."


@contextlib.contextmanager
def _quiet():
    """transformers' notices about absent kernels and progress are said by us, once, where they matter."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
