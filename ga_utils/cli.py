"""What can be asked for at the command line? ``ga`` models, check, heads, run, build, book, tiny."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from typing import Annotated

import typer

from .console import interruptible, print_table
from .errors import GAError
from .heads_cli import heads
from .tiny.cli import app as tiny

# Everything else is imported where it is used: help and lists answer at once, without torch.

app = typer.Typer(
    name="ga",
    help="Gather and Aggregate heads: run the notebooks, build the book, check a model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(tiny, name="tiny")
app.command()(heads)

_NOTEBOOKS = typer.Argument(
    metavar="NOTEBOOK",
    help="Names of notebooks, as in notebooks/NAME.ipynb; all of them if none is named.",
)
_MODELS = typer.Option(
    "--models",
    metavar="A,B",
    help="Models to run, separated by commas: names from `ga models`, panel:NAME, Hugging Face ids or "
    "folders. Without it each notebook runs its own.",
)
_SETS = typer.Option(
    "--set",
    metavar="KEY=VALUE",
    help="A parameter of the notebooks; VALUE is JSON or a text. Can be repeated.",
)
_STORE = typer.Option(
    "--store", metavar="DIR", envvar="GA_STORE", help="Where records are kept.", show_default="results"
)
_OUT = typer.Option(
    "--out", metavar="DIR", help="Where executed notebooks go; a folder seen from the project's.", show_default=True
)
_JOBS = typer.Option(
    "--jobs", metavar="N", min=1, help="So many notebooks run at once and share the cores; leave it at 1 on a GPU."
)
_BOOK_JOBS = "So many notebooks run at once and share the cores; up to four, by the number of cores, if not given."
_STALE = typer.Option("--allow-stale", help="Build even if a page was made by other code than today's, and say so.")


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"ga_utils {_version()}")
        raise typer.Exit


@app.command()
def models() -> None:
    """List the models and panels that have a name.

    The last column says whether a model's weights are on this machine, or what is missing.
    """
    from .registry import panels, registry

    rows = [("NAME", "TITLE", "KIND", "LAYERS", "PARAMS", "DOWNLOAD", "GATED", "HERE")]
    for spec in registry().values():
        params = f"{spec.params:g} B" if spec.params else "-"
        size = f"{spec.size_gb:g} GB" if spec.size_gb else "-"
        gated = "yes" if spec.gated else "no"
        layers = str(spec.layers or "-")
        rows.append((spec.name, spec.title, spec.family, layers, params, size, gated, spec.available()))
    print_table(rows)
    print()
    for name, members in panels().items():
        print(f"panel:{name} = {', '.join(members)}")
    print("Any other Hugging Face id or a folder can be named too; try it with `ga check`.")


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A name from `ga models`, a Hugging Face id, or a folder.")],
) -> None:
    """Load a model and check its heads.

    Shows each kind of head that was found, and whether masking one takes away exactly what that head adds.
    """
    from .registry import resolve_models

    names = resolve_models(model)
    from .models import load
    from .selfcheck import self_check

    every = True
    for name in names:
        print(f"{name}:", flush=True)
        with interruptible():
            report = self_check(load(name, check=False))
        rows = [dict(row) for row in report.rows]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        print_table([tuple(c.upper() for c in columns)] + [tuple(_cell(r.get(c)) for c in columns) for r in rows])
        print("passed" if report.ok else "FAILED")
        every = every and report.ok
    if not every:
        raise typer.Exit(1)


@app.command()
def run(
    notebook: Annotated[list[str] | None, _NOTEBOOKS] = None,
    models: Annotated[str | None, _MODELS] = None,
    set_: Annotated[list[str] | None, _SETS] = None,
    store: Annotated[str | None, _STORE] = None,
    jobs: Annotated[int, _JOBS] = 1,
    out: Annotated[str, _OUT] = "book/executed",
) -> None:
    """Run notebooks into book/executed, or into another folder.

    Everything is checked before the first one starts. What has been measured before is taken from the
    records, so a run that was stopped goes on where it stood. A notebook that fails does not stop the
    others.
    """
    _run(notebook, models, set_, store, jobs, out=out)


@app.command()
def build(allow_stale: Annotated[bool, _STALE] = False) -> None:
    """Build the book; any warning is an error.

    The pages are the executed notebooks of book/_toc.yml, and each must have been made by today's code.
    """
    from .book import build_book

    with interruptible():
        print(f"The book begins at {build_book(allow_stale=allow_stale)}")


@app.command()
def book(
    store: Annotated[str | None, _STORE] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", metavar="N", min=1, help=_BOOK_JOBS)] = None,
) -> None:
    """Run all notebooks, then build the book.

    Each notebook runs on its own models, which are embedded ones: they need no GPU and no network.
    """
    from .book import build_book

    _run(None, None, None, store, jobs or min(4, os.cpu_count() or 1))
    with interruptible():
        print(f"The book begins at {build_book()}")


def _run(
    names: list[str] | None, models: str | None, sets: list[str] | None, store: str | None, jobs: int, **where: str
) -> None:
    from .runner import run_notebooks

    with interruptible():
        runs = run_notebooks(names, models, sets or (), store, jobs=jobs, **where)
    failed = [r for r in runs if r.error is not None]
    for result in failed:
        print(f"ga: {result.name}: {result.error}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def _version() -> str:
    try:
        return importlib.metadata.version("ga_utils")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line.

    Exit status: 0 done, 1 a notebook or a check failed, 2 bad input or a book with warnings, 130 interrupted.
    """
    for stop in {"SIGTERM", "SIGHUP"} & set(dir(signal)):  # a scheduler's stop is as orderly as Ctrl-C
        signal.signal(getattr(signal, stop), _interrupt)
    try:
        app(prog_name="ga")
    except GAError as error:
        print(f"ga: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
