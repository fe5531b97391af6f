"""How are notebooks run? One process for each, checked before any kernel starts, published only when whole.

An executed notebook appears under ``book/executed`` in one step when its last cell has run. What failed
lies beside the records as ``NAME.failed.ipynb``. The book is built from what was published, by
`build_book`.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .book import build_book
from .codehash import folder_hash
from .errors import GAError
from .executed import error_of, stamp, why_not_whole
from .notebook_process import Kernels
from .notebooks import (
    PACKAGE_FOLDER,
    Notebook,
    check_needs,
    command_for,
    find_notebooks,
    find_project,
    parameters,
    parse_settings,
    read_notebook,
    source_hash,
)
from .records import Store, why_not_written
from .registry import resolve_models

__all__ = ["NotebookRun", "build_book", "find_project", "run_notebooks"]


@dataclass(frozen=True)
class NotebookRun:
    """How one notebook went: where it lies now, the one-sentence `error` (None if it ran), its seconds."""

    name: str
    path: Path
    error: str | None
    seconds: float


def run_notebooks(
    names: Sequence[str] | None = None,
    models: str | Sequence[str] | None = None,
    sets: Mapping[str, Any] | Sequence[str] = (),
    store: Store | str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "book/executed",
    project_root: Path | None = None,
    jobs: int = 1,
) -> list[NotebookRun]:
    """Run the notebooks `names` (all of the project if None) and return how each went.

    `models` (as in `registry.resolve_models`) becomes the parameter ``models``; `sets` holds other
    parameters, as a dict or as ``key=value`` texts. Where notebooks are named, each must take every
    parameter given; where all are run, a parameter goes to those that take it, and one that none takes is
    an error. Records go to `store` (GA_STORE, else ``results`` in the project), executed notebooks to `out`
    (relative to the project).

    `jobs` notebooks run at once and share the cores; those that gather what the others measured (``last`` in
    their metadata) run after them. Everything that can be checked is checked before the first kernel starts,
    and raises `GAError`. A notebook that fails does not stop the others.
    """
    root = find_project(project_root)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise GAError(f"jobs={jobs!r} must be a whole number from 1 up: so many notebooks run at once.")
    if not isinstance(store, Store):
        store = Store(Path(store or os.environ.get("GA_STORE") or root / "results").expanduser().resolve())
    plan = _plan(root, names, models, parse_settings(sets))
    _check_environment(root)
    store.check_writable()
    out_folder = root / out
    _check_output(out_folder, [notebook.name for notebook, _ in plan])
    _remove_leftovers(out_folder)
    kernels = Kernels(store, max(1, min(jobs, len(plan))))
    numbered = [
        (f"[{number}/{len(plan)}] {notebook.name}", notebook, v) for number, (notebook, v) in enumerate(plan, 1)
    ]

    def one(work: tuple[str, Notebook, dict[str, Any]]) -> NotebookRun:
        title, notebook, values = work
        given = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items()) or "its own parameters"
        print(f"{title} with {given}", flush=True)
        result = _run(root, notebook, values, kernels, out_folder)
        done = f"done in {result.seconds:.0f} s" if result.error is None else f"failed: {result.error}"
        print(f"{title} {done}", flush=True)
        return result

    runs: list[NotebookRun] = []
    for at_once in ([w for w in numbered if not w[1].last], [w for w in numbered if w[1].last]):
        with ThreadPoolExecutor(kernels.jobs) as pool:
            try:
                runs += pool.map(one, at_once)
            except BaseException:
                kernels.stop()
                raise
    return runs


def _plan(
    root: Path, names: Sequence[str] | None, models: str | Sequence[str] | None, settings: dict[str, Any]
) -> list[tuple[Notebook, dict[str, Any]]]:
    """Each notebook with its parameters, all checked."""
    if models is not None:
        if "models" in settings:
            raise GAError("The models are named twice, by --models and by --set models=...: give one of them.")
        settings = {"models": resolve_models(models), **settings}
    everything = not names
    notebooks = [read_notebook(root, name) for name in dict.fromkeys(names or find_notebooks(root))]
    if not notebooks:
        raise GAError(f"There are no notebooks in {root / 'notebooks'}.")
    for key in settings:
        takers = [n.name for n in notebooks if key in n.defaults]
        if everything and not takers:
            raise GAError(f"No notebook takes the parameter {key!r}.")
        if everything and len(takers) < len(notebooks):
            print(f"{key} goes to {', '.join(takers)}; the other notebooks do not take it.")
    plan = []
    for notebook in notebooks:
        own = {k: v for k, v in settings.items() if not everything or k in notebook.defaults}
        values = parameters(notebook, own)
        check_needs(notebook, values)
        plan.append((notebook, values))
    return plan


def _check_environment(root: Path) -> None:
    for module in ("papermill", "ipykernel"):
        if importlib.util.find_spec(module) is None:
            raise GAError(f"Running notebooks needs the package {module}: pip install {module}")
    own = root / "ga_utils"
    # a kernel that runs in the checkout imports the checkout's package, whatever is installed
    if own.is_dir() and own.resolve() != PACKAGE_FOLDER and folder_hash(own) != folder_hash(PACKAGE_FOLDER):
        raise GAError(
            f"The installed ga_utils ({PACKAGE_FOLDER}) differs from the checkout's ({own}): install the "
            "checkout with pip install -e . so that what runs is what you see."
        )


def _check_output(folder: Path, names: Sequence[str]) -> None:
    """Raise `GAError` if pages of these names could not be written to `folder`, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            file.write(b"0" * 4096)
    except OSError as error:
        raise GAError(f"Executed notebooks cannot be written to {folder}: {why_not_written(folder, error)}.") from error
    for name in names:
        if (page := folder / f"{name}.ipynb").is_dir():
            raise GAError(f"The executed notebook cannot be written to {page}: it is a folder, not a file.")


def _run(root: Path, notebook: Notebook, values: dict[str, Any], kernels: Kernels, out: Path) -> NotebookRun:
    made_from = {
        "code_hash": source_hash(root, notebook),
        "parameters": values,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    partial = out / f".{notebook.name}.{os.getpid()}.ipynb"
    request = {
        "input_path": str(notebook.path),
        "output_path": str(partial),
        "parameters": values,
        "kernel_name": "python3",
        "cwd": str(root),
    }
    clock = time.perf_counter()
    published, failed = out / f"{notebook.name}.ipynb", kernels.store.root / f"{notebook.name}.failed.ipynb"
    try:
        status, log = kernels.run(notebook.name, request, root, command_for(notebook, values))
        seconds = time.perf_counter() - clock
        kept = failed if partial.exists() else failed.with_suffix(".log")
        if status:
            error = error_of(partial, log, kept)
        elif early := why_not_whole(partial):
            error = f"{early} The full account is in {kept}."
        else:
            stamp(partial, made_from, notebook.name)
            os.replace(partial, published)
            for old in (failed, failed.with_suffix(".log")):
                with contextlib.suppress(OSError):
                    old.unlink()
            return NotebookRun(notebook.name, published, None, seconds)
        try:
            failed.with_suffix(".log").write_text(log, encoding="utf-8")
            if partial.exists():
                shutil.move(partial, failed)
        except OSError as full:
            error += f" It could not be kept there: {full.strerror}."
        return NotebookRun(notebook.name, kept, error, seconds)
    except OSError as error:  # the disk is full, or the page's place was taken meanwhile
        why = f"It could not be run or its page not be written: {error}."
        return NotebookRun(notebook.name, published, why, time.perf_counter() - clock)
    finally:
        with contextlib.suppress(OSError):  # what went wrong before matters more
            partial.unlink()


def _remove_leftovers(out: Path) -> None:
    """Remove what runs that were killed have left; those of living processes stay."""
    for path in out.glob(".*.ipynb"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not _alive(int(owner)):
            with contextlib.suppress(OSError):
                path.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
