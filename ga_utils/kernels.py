"""Which fast CUDA kernels does a model run?

transformers binds the functions of mamba-ssm, causal-conv1d and flash-linear-attention when it first imports
the code of an architecture, for all models of that architecture in the process, whatever device they are on.
On the CPU such a kernel cannot run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Iterator

from torch import nn

#: packages whose kernels transformers uses where they can be imported: module -> PyPI name
PACKAGES = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Code of architectures that is first imported inside the block is bound to pure torch."""
    before = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    sys.modules.update(dict.fromkeys(PACKAGES))  # None: importing it fails
    try:
        yield
    finally:
        for name in PACKAGES:
            if name in before:
                sys.modules[name] = before[name]
            else:
                sys.modules.pop(name, None)


def bound(model: nn.Module) -> list[str]:
    """PyPI names of the packages whose functions the code of `model` calls."""
    return sorted({PACKAGES[root] for root, wanted in _functions(model) if root == wanted})


def unused(model: nn.Module) -> list[str]:
    """PyPI names of installed packages that the code of `model` could call and does not."""
    idle = {wanted for root, wanted in _functions(model) if root != wanted}
    return sorted(PACKAGES[name] for name in idle if _installed(name))


def versions(packages: list[str]) -> list[str]:
    """The packages with their versions, for records."""
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} of unknown version")
    return found


def _functions(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(package of the function that runs, package of the kernel that it stands for), for each in the code."""
    for module in {type(m).__module__ for m in model.modules()}:
        for value in list(vars(sys.modules.get(module, sys)).values()):
            if not callable(value):
                continue
            if _root(value) in PACKAGES:  # bound directly
                yield _root(value), _root(value)
            elif inspect.isfunction(value) and value.__closure__:
                # transformers keeps the function that runs, and its package's name, in the wrapper's closure
                names = value.__code__.co_freevars
                cells = dict(zip(names, value.__closure__, strict=True))
                if {"package", "implementation"} <= cells.keys():
                    package = cells["package"].cell_contents
                    if package in PACKAGES:
                        yield _root(cells["implementation"].cell_contents), package


def _root(function: object) -> str:
    return str(getattr(function, "__module__", "")).split(".")[0]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module made by hand, without a spec
        return True
