"""How is the book built? Strictly, and only from pages that today's code has made."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import GAError
from .notebooks import find_notebooks, find_project, read_notebook, source_hash

_JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
_EXECUTED = "book/executed/"


def build_book(project_root: Path | None = None, allow_stale: bool = False) -> Path:
    """Build the book and return the path of its first page.

    Every warning is an error, and every page is read anew, because an incremental build forgets the
    warnings of pages that have not changed. Raises `GAError` if a page of book/_toc.yml has not been run,
    if a page was made by other code than today's (`allow_stale` only says so), or if the build fails.
    """
    root = find_project(project_root)
    for module, package in (("yaml", "pyyaml"), ("jupyter_book", "jupyter-book")):
        if importlib.util.find_spec(module) is None:
            raise GAError(f"Building the book needs the package {package}: pip install -e '.[book]'")
    pages = executed_pages(root)
    missing = [name for name in pages if not _page(root, name).is_file()]
    if missing:
        names = " ".join(missing)
        raise GAError(f"The book needs executed notebooks that are not there yet: run `ga run {names}` first.")
    stale = [name for name in pages if not is_current(root, name)]
    if stale:
        names = " ".join(stale)
        what = f"Not made by today's code and notebooks: {', '.join(stale)}; `ga run {names}` makes them anew"
        if not allow_stale:
            raise GAError(f"{what}, `ga build --allow-stale` builds the book all the same.")
        print(f"ga: {what}; building the book all the same.", file=sys.stderr, flush=True)
    options = ["--config", "_config.yml", "--toc", "book/_toc.yml", "-W", "-n", "--keep-going", "--all"]
    command = [sys.executable, "-c", _JUPYTER_BOOK, "build", ".", *options]
    status = subprocess.run(command, cwd=root, check=False).returncode
    if status:
        raise GAError("The book has warnings or errors, named above: none is let through.")
    return root / "_build" / "html" / "index.html"


def executed_pages(project_root: Path) -> list[str]:
    """Return the names of the executed notebooks that book/_toc.yml asks for."""
    import yaml

    path = project_root / "book" / "_toc.yml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise GAError(f"The table of contents {path} cannot be read ({error}).") from error
    files = [str(file).removesuffix(".ipynb") for file in _files(content)]
    return [file.removeprefix(_EXECUTED) for file in files if file.startswith(_EXECUTED)]


def is_current(project_root: Path, name: str) -> bool:
    """Say whether the executed notebook `name` was made by today's package, notebook and reported numbers."""
    if name not in find_notebooks(project_root):
        raise GAError(f"book/_toc.yml asks for {_EXECUTED}{name}, but there is no notebooks/{name}.ipynb.")
    try:
        content = json.loads(_page(project_root, name).read_text(encoding="utf-8"))
        made_by = content["metadata"].get("ga", {}).get("code_hash")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return made_by == source_hash(project_root, read_notebook(project_root, name))


def _page(root: Path, name: str) -> Path:
    return root / _EXECUTED / f"{name}.ipynb"


def _files(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("file", "root"):
                yield value
            else:
                yield from _files(value)
    elif isinstance(node, list):
        for item in node:
            yield from _files(item)
