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
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .book import build_book
from .codehash import folder_hash
from .errors import GAError
from .executed import error_of, stamp, why_not_whole, without_colours
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

# papermill's own command line reads parameters as YAML, in which 1e-05 is a text
_PAPERMILL = """
import json, sys
try:
    import ctypes
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: end when `ga` is killed
except (ImportError, OSError, AttributeError):
    pass
import papermill
papermill.execute_notebook(**json.load(sys.stdin), stderr_file=sys.stderr)  # the cells' own progress bars
"""
_IGNORED = "ignore:IProgress not found"
_SECONDS_BETWEEN_LINES = 30  # of progress, where there is no terminal to draw a bar on


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
) -> list[NotebookRun]:
    """Run the notebooks `names` (all of the project if None) and return how each went.

    `models` (as in `registry.resolve_models`) becomes the parameter ``models``; `sets` holds other
    parameters, as a dict or as ``key=value`` texts. Where notebooks are named, each must take every
    parameter given; where all are run, a parameter goes to those that take it, and one that none takes is
    an error. Records go to `store` (GA_STORE, else ``results`` in the project), executed notebooks to `out`
    (relative to the project).

    Everything that can be checked is checked before the first kernel starts, and raises `GAError`. A
    notebook that fails does not stop the others.
    """
    root = find_project(project_root)
    if not isinstance(store, Store):
        store = Store(Path(store or os.environ.get("GA_STORE") or root / "results").expanduser().resolve())
    plan = _plan(root, names, models, parse_settings(sets))
    _check_environment(root)
    store.check_writable()
    out_folder = root / out
    _check_output(out_folder, [notebook.name for notebook, _ in plan])
    _remove_leftovers(out_folder)
    runs = []
    for number, (notebook, values) in enumerate(plan, 1):
        given = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items()) or "its own parameters"
        print(f"[{number}/{len(plan)}] {notebook.name} with {given}", flush=True)
        runs.append(_run(root, notebook, values, store, out_folder))
        done = f"done in {runs[-1].seconds:.0f} s" if runs[-1].error is None else f"failed: {runs[-1].error}"
        print(f"[{number}/{len(plan)}] {notebook.name} {done}", flush=True)
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


def _run(root: Path, notebook: Notebook, values: dict[str, Any], store: Store, out: Path) -> NotebookRun:
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
    published, failed = out / f"{notebook.name}.ipynb", store.root / f"{notebook.name}.failed.ipynb"
    try:
        with _kernel_environment(store, command_for(notebook, values)) as environment:
            status, log = _papermill(request, root, environment)
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


def _papermill(request: dict[str, Any], root: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run one notebook in a process of its own; return its exit status and what it said on stderr."""
    command = [sys.executable, "-c", _PAPERMILL]
    child = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes to this process alone, which stops the child in order
    )
    said, shown = bytearray(), time.monotonic()
    try:
        with contextlib.suppress(BrokenPipeError):  # it died early, and says so on stderr
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
        while chunk := os.read(child.stderr.fileno(), 4096):
            said += chunk
            shown = _show_progress(chunk.decode(errors="replace"), shown)
        if sys.stderr.isatty():
            sys.stderr.write("\n")
        return child.wait(), without_colours(said.decode(errors="replace"))
    except BaseException:
        child.terminate()  # its kernel watches it, and ends when it does
        try:
            child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    finally:
        child.stderr.close()


def _show_progress(text: str, shown: float) -> float:
    """Pass on the last progress bar in `text`: drawn over on a terminal, else a line now and then.

    `shown` is when a line was last printed, by the monotonic clock; returns the new time.
    """
    bars = [part.strip() for part in re.split(r"[\r\n]", without_colours(text)) if "%|" in part]
    if not bars:
        return shown
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write("\r" + bars[-1][:width].ljust(width))
        sys.stderr.flush()
    elif time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
        print(bars[-1], file=sys.stderr, flush=True)
        return time.monotonic()
    return shown


@contextlib.contextmanager
def _kernel_environment(store: Store, command: str) -> Iterator[dict[str, str]]:
    """The environment in which ``python3`` is this interpreter, whatever is installed or activated."""
    with tempfile.TemporaryDirectory(prefix="ga-kernel-", ignore_cleanup_errors=True) as folder:
        spec = Path(folder, "kernels", "python3")
        spec.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        text = json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"})
        (spec / "kernel.json").write_text(text, encoding="utf-8")
        environment = dict(os.environ, GA_STORE=str(store.root.resolve()), GA_COMMAND=command)
        # a page is no place for tqdm's wish for a widget library, and the warning shows this machine's paths
        # threads that spin while they wait halve the speed and worse as soon as another process wants a core
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), _IGNORED]))
        environment["JUPYTER_PATH"] = _prepend(folder, os.environ.get("JUPYTER_PATH"))
        if "site-packages" not in PACKAGE_FOLDER.parts:
            environment["PYTHONPATH"] = _prepend(str(PACKAGE_FOLDER.parent), os.environ.get("PYTHONPATH"))
        yield environment


def _prepend(folder: str, others: str | None) -> str:
    return os.pathsep.join([folder, *([others] if others else [])])


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
