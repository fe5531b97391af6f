"""Which jobs make a run on a cluster, and what does each need? One job for each notebook and model.

workflow/Snakefile asks here and starts them. Nothing of torch is imported: the answer comes from the notebooks' files
and the registry.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import GAError
from .notebooks import Notebook, find_notebooks, parameters, parse_settings, read_notebook
from .registry import find_spec, resolve_models

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: MB that python, torch and a notebook's own arrays take, whatever the model
_BASE_MB = 3000
#: activations and buffers beside the weights, as a share of them; generous, since a job that is killed runs twice
_BESIDE = 0.35


@dataclass(frozen=True)
class Job:
    """One call of ``ga run``: a `notebook`, its `model` (None: its own parameters), and `settings` (KEY=VALUE)."""

    notebook: str
    model: str | None
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name for files: NOTEBOOK or NOTEBOOK--MODEL, with only letters, digits, dots, - and _."""
        return self.notebook if self.model is None else f"{self.notebook}--{_slug(self.model)}"

    def arguments(self) -> list[str]:
        """The words after ``ga run``."""
        words = [self.notebook]
        if self.model is not None:
            words += ["--models", self.model]
        return words + [word for text in self.settings for word in ("--set", text)]


def jobs(
    root: Path, notebooks: Sequence[str] = (), models: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[Job]:
    """Return the jobs that measure `notebooks` (all if none is named) on `models` (each notebook's own if none).

    A notebook that takes no models is one job. Those that only gather what others measured (``last``) are left to the
    pages that are made at the end. A setting goes to the notebooks that take it. Raises `GAError` for a notebook, model
    or setting that does not exist, and for two models whose names differ only by signs that files cannot carry.
    """
    chosen = [read_notebook(root, name) for name in dict.fromkeys(notebooks or find_notebooks(root))]
    given = parse_settings(tuple(settings))
    for key in given:
        if not any(key in n.defaults for n in chosen):
            raise GAError(f"No notebook of this run takes the setting {key!r}.")
    if "models" in given:
        raise GAError("Models are named by models, not by a setting: each becomes a job of its own.")
    wanted = resolve_models([_absolute(m) for m in models]) if models else []
    found: list[Job] = []
    for notebook in (n for n in chosen if not n.last):
        own = {key: text for key, text in given.items() if key in notebook.defaults}
        parameters(notebook, own)
        texts = tuple(f"{key}={text}" for key, text in own.items())
        if "models" in notebook.defaults:
            found += [Job(notebook.name, m, texts) for m in wanted or resolve_models(notebook.defaults["models"])]
        else:
            found.append(Job(notebook.name, None, texts))
    named: dict[str, Job] = {}
    for job in found:
        if (other := named.setdefault(job.name, job)) is not job:
            raise GAError(f"The models {other.model} and {job.model} would share the file name {job.name}: rename one.")
    return found


def page_arguments(
    root: Path, notebooks: Sequence[str] = (), models: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[list[str]]:
    """Return the words after ``ga run`` that make each page from the records of `jobs`, all its models together.

    Pages that gather what the others measured come last.
    """
    chosen = [read_notebook(root, name) for name in dict.fromkeys(notebooks or find_notebooks(root))]
    given = parse_settings(tuple(settings))
    return [_page(n, models, given) for n in sorted(chosen, key=lambda n: n.last)]


def resources(job: Job, attempt: int = 1, gpus: int = 0, minutes: int = 60) -> dict[str, Any]:
    """Return what `job` needs: ``mem_mb``, ``runtime`` (minutes) and, with `gpus`, ``gpu``.

    Memory is that of the weights (fp32 on a CPU, bf16 on a GPU, where the host only holds them while they load), a
    third beside them and a base; it and the time grow by half with each `attempt`. A model of unknown size gets the
    base and 16 GB. These are bounds for a queue and no measurement.
    """
    spec = find_spec(job.model) if job.model else None
    billions = spec.params if spec is not None else None
    per_weight = _BYTES["bfloat16" if gpus else "float32"]
    weights = 16_000.0 if job.model and billions is None else (billions or 0) * 1000 * per_weight
    grown = 1 + 0.5 * (attempt - 1)
    need: dict[str, Any] = {
        "mem_mb": math.ceil((_BASE_MB + weights * (1 + _BESIDE)) * grown),
        "runtime": math.ceil(minutes * grown),
    }
    return {**need, "gpu": gpus} if gpus else need


def _page(notebook: Notebook, models: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    words = [notebook.name]
    if models and "models" in notebook.defaults:
        words += ["--models", ",".join(models)]
    return words + [w for k, v in given.items() if k in notebook.defaults for w in ("--set", f"{k}={v}")]


def _absolute(model: str) -> str:
    """A folder as an absolute path, since jobs may start elsewhere; other names as they are."""
    path = Path(model).expanduser()
    is_folder = not model.startswith("panel:") and find_spec(model) is None and path.is_dir()
    return os.path.abspath(path) if is_folder else model


def _slug(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", model.strip("/"))
