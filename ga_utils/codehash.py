"""Which code was this measured with? A hash of the source that comments and docstrings do not change.

A record is only as good as its name: if a function that took part in a measurement changes, the old record
must not be found again. The hash covers the named modules and, through their imports, every other module of
this package that they use. It is taken over the syntax tree without docstrings, so comments, docstrings and
layout are free, and it does not depend on the Python version.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

from .errors import StoreError

PACKAGE = __name__.partition(".")[0]
_FOLDER = Path(__file__).resolve().parent
_NOT_CODE = {"__pycache__", ".ipynb_checkpoints"}
_INSTALLED = {".py", ".toml", ".txt", ".json", ".safetensors"}  # what a wheel carries
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Where results are kept has no part in what they are: a change there must not throw away what was measured.
_BOOKKEEPING = frozenset(f"{PACKAGE}.{name}" for name in ("codehash", "encoding", "records"))


def read_sources(folder: Path, package: str = PACKAGE) -> dict[str, bytes]:
    """Return the source of every module under `folder`, by its dotted name; `folder` itself is `package`."""
    sources = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if not _NOT_CODE.intersection(parts):
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            sources[".".join((package, *parts))] = path.read_bytes()
    return sources


# The code that runs is the code as it was when the process began, not what lies on disk an hour later.
_at_start = read_sources(_FOLDER)


def code_hash(*modules: str | ModuleType) -> str:
    """Return a 64-digit hash of the source of `modules` and of all that they import from this package.

    A module is named by itself or by its name, with or without the leading ``ga_utils.``. Imports inside
    functions count, and so does a string that is the full name of a module; a name put together at run time
    cannot be seen and must be passed here. The package's own ``__init__`` counts only where something is
    imported from it; the modules that keep records (this one, encoding, records) count only where they are
    named.

    Raises `StoreError` for a module that does not exist, and when the code on disk is no longer the code
    that this process started with: what it measures could then no longer be named.
    """
    names = [m.__name__ if isinstance(m, ModuleType) else str(m) for m in modules]
    names = [n if n == PACKAGE or n.startswith(PACKAGE + ".") else f"{PACKAGE}.{n}" for n in names]
    used = reachable(_at_start, names)
    now = read_sources(_FOLDER)
    for name in used:
        if now.get(name) != _at_start[name] and _tree_hash(now.get(name, b"")) != _tree_hash(_at_start[name]):
            raise StoreError(
                f"The code of {name} has changed on disk since this process began, so what it measures could "
                "not be named rightly: restart the kernel or the run. Nothing measured before is lost."
            )
    return hash_sources(_at_start, names)


def hash_sources(sources: dict[str, bytes], names: Iterable[str]) -> str:
    """Return the hash of the modules `names` of `sources` and of all that they import from `sources`."""
    total = hashlib.sha256()
    for name in reachable(sources, names):
        total.update(f"{name} {_tree_hash(sources[name])}\n".encode())
    return total.hexdigest()


def folder_hash(folder: Path) -> str:
    """Return a hash of a package folder: its code without comments, and the bytes of its data files."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        where = path.relative_to(folder)
        if path.suffix in _INSTALLED and path.is_file() and not _NOT_CODE.intersection(where.parts):
            content = path.read_bytes()
            digest = _tree_hash(content) if path.suffix == ".py" else hashlib.sha256(content).hexdigest()
            total.update(f"{where.as_posix()} {digest}\n".encode())
    return total.hexdigest()


def reachable(sources: dict[str, bytes], names: Iterable[str]) -> list[str]:
    """Return, sorted, the modules `names` and every module of `sources` that they import, directly or not."""
    found: set[str] = set()
    waiting = list(names)
    for name in waiting:
        if name not in sources:
            raise StoreError(f"There is no module {name} to hash; there are {', '.join(sorted(sources))}.")
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name, sources)
    return sorted(found)


def _imports(name: str, sources: dict[str, bytes]) -> set[str]:
    """The modules of `sources` that module `name` imports or names in full."""
    top = name.partition(".")[0]
    is_package = any(other.startswith(name + ".") for other in sources)
    wanted: set[str] = set()
    for node in ast.walk(_parse(sources[name])):
        if isinstance(node, ast.Import):
            wanted.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".") if is_package else name.split(".")[:-1]
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                # `from .tasks import kv` may name a module or something that the package's __init__ holds
                inner = f"{base}.{alias.name}"
                wanted.add(inner if inner in sources else base)
        elif _is_string(node):
            wanted.add(node.value)
    wanted = {w for w in wanted if w in sources and w not in _BOOKKEEPING}
    # importing a.b.c runs a.b's __init__ too; the top __init__ only gathers names, and would pull in all
    for module in list(wanted):
        while (module := module.rpartition(".")[0]) not in ("", top):
            wanted.add(module)
    return wanted - {name}


@cache
def _parse(source: bytes) -> ast.Module:
    return ast.parse(source)


@cache
def _tree_hash(source: bytes) -> str:
    try:
        text = _dump(_parse(source)).encode()
    except SyntaxError:  # a file that is just being edited: not what is running, whatever it says
        text = source
    return hashlib.sha256(text).hexdigest()


def _dump(node: object) -> str:
    """Write a syntax tree without docstrings and without empty fields (Python versions differ in those)."""
    if isinstance(node, ast.AST):
        fields = []
        for field, value in ast.iter_fields(node):
            if field == "body" and isinstance(node, _WITH_DOCSTRING):
                value = value[1:] if _is_text(value[0] if value else None) else value
            if value is not None and value != [] and field not in ("kind", "type_comment"):
                fields.append(f"{field}={_dump(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    return f"{type(node).__name__}:{node!r}"


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and _is_string(node.value)


def _is_string(node: object) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
