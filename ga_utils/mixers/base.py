"""What must a family of mixers provide so that its heads can be read as matrices?

Every mixer of this package is linear in its own *value input* once its gates and decays are fixed:
``output[t] = sum over s <= t of M[t, s] * value[s]`` for each head. A `Family` says where in the model's
forward pass M's ingredients, the value and the output can be seen (`watch`), and builds M (`matrix`) or some
of its rows (`rows`) from the very tensors that the forward pass used. Nothing is recomputed from weights, so
a normalisation, a clamp or a rotation that the model applies is in M by construction; the public functions
compare M x value with the recorded output and refuse to return an M that does not reproduce it.

Shapes: b batch, h head, t query position (row), s key position (column), r chosen rows, p head dimension.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import GAError
from ..sites import HeadSite


@dataclass
class Captured:
    """What one site's mixer used and produced in one forward pass.

    tensors: the family's own ingredients, exactly as the forward pass used them.
    real ``[b, t]``: False at pads; set by `capture`.
    value ``[b, h, s, p]``: the mixer's value input of every head (grouped values expanded; p = 1 for
    channels).
    output ``[b, h, t, p]``: the mixer's output before gate, output norm and projection, as the model computed
    it. projected ``[b, h, t, p]``: the projection's input, where heads live; set by `capture`.
    """

    site: HeadSite
    tensors: dict[str, Any] = field(default_factory=dict)
    real: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    projected: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of positions, pads included."""
        return self.output.shape[2]


class Family:
    """One kind of mixer. `register` an instance; the public functions find it by the site's kind."""

    kind: str = ""
    has_d: bool = False  #: whether the mixer has a skip term D that `with_d` can leave out

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Yield a `Captured` whose tensors, value and output are filled when the model's forward pass runs.

        Whatever is patched to that end is restored on exit, also after an exception.
        """
        raise GAError(f"The heads of {type(site.mixer).__name__} have no matrix that this package can build.")
        yield

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """The matrices of `heads`, ``[b, len(heads), t, s]``, float32 or better.

        Exactly 0 above the diagonal and in the rows and columns of pads (see `finish`).
        """
        raise GAError(f"A {self.kind} mixer has no matrix.")

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, len(heads), r, s]`` of the same matrices at columns `positions` ``[b, r]``.

        Costs O(s x state) a row and never builds the square.
        """
        raise GAError(f"A {self.kind} mixer has no rows.")

    def after(self, cap: Captured, heads: Sequence[int]) -> Tensor:
        """The factor ``[b, len(heads), t, p]`` (gate x output norm) with projected = after * output.

        Taken as fixed, like the gates inside M. By default the ratio of the two recorded tensors, which is
        the factor up to rounding; where the output is exactly 0 it cannot be seen, and is 0.
        """
        output, projected = pick(cap.output, heads), pick(cap.projected, heads)
        if torch.equal(output, projected):
            return torch.ones_like(wide(output))
        output, projected = wide(output), wide(projected)
        zero = output == 0
        return torch.where(zero, 0.0, projected / torch.where(zero, 1.0, output))

    def bytes_needed(self, cap: Captured, n_heads: int, n_rows: int) -> int:
        """Peak memory in bytes of `matrix` (n_rows = length) or `rows` for `n_heads` heads, result included.

        The public functions take few heads at a time if this is large. Override where four tensors of the
        result's size are not enough.
        """
        size = wide_dtype(cap.output.dtype).itemsize
        return 4 * cap.output.shape[0] * n_heads * n_rows * cap.length * size


FAMILIES: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Make `family` the one for sites of its kind."""
    FAMILIES[family.kind] = family
    return family


# ---- seeing what a forward pass used ----


def bound(function: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The call's arguments by name, defaults filled in; what the signature lacks stays under its keyword."""
    signature = inspect.signature(function)
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    named = dict(call.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(name, {}))
    return named


@contextlib.contextmanager
def running(site: HeadSite) -> Iterator[dict]:
    """Yield a dict whose "now" is True exactly while the site's mixer is inside its forward pass."""
    state = {"now": False}

    def enter(module, args):
        state["now"] = True

    def leave(module, args, output):
        state["now"] = False

    handles = [
        site.mixer.register_forward_pre_hook(enter),
        site.mixer.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield state
    finally:
        for handle in handles:
            handle.remove()


def namespace(site: HeadSite) -> dict[str, Any]:
    """The global names that the mixer's forward method looks up: its modelling module's dictionary."""
    return inspect.unwrap(type(site.mixer).forward).__globals__


@contextlib.contextmanager
def replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """``names[name] = value`` within the block, the old value after it."""
    old = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = old


@contextlib.contextmanager
def calls(site: HeadSite, names: Sequence[str], record: Callable[[str, dict[str, Any], Any], None]) -> Iterator[None]:
    """Within the block, report each call that the site's mixer makes to global functions `names`.

    ``record(name, arguments by name, result)`` sees the very objects that the model passed and received; it
    must not change them. Calls by other mixers of the same module are not reported. A name that the module
    lacks is skipped; if it has none of them, `GAError` names the class.
    """
    scope = namespace(site)
    here = [n for n in names if callable(scope.get(n))]
    if not here:
        raise GAError(
            f"{type(site.mixer).__name__} ({site.path}) calls none of {', '.join(names)}, so what its heads "
            "computed cannot be read; its matrices are not available."
        )
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(running(site))

        def spy(name: str, function: Callable) -> Callable:
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                result = function(*args, **kwargs)
                if state["now"]:
                    record(name, bound(function, args, kwargs), result)
                return result

            return wrapper

        for name in here:
            stack.enter_context(replaced(scope, name, spy(name, scope[name])))
        yield


# ---- arithmetic that every family shares ----


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: no decay or product of M is taken in half precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> Tensor:
    """`x` in float32 or better."""
    return x.to(wide_dtype(x.dtype))


def pick(x: Tensor, heads: Sequence[int], dim: int = 1) -> Tensor:
    """The slices of `heads` along `dim`; the tensor itself if that is all of them in order."""
    if list(heads) == list(range(x.shape[dim])):
        return x
    return x.index_select(dim, torch.as_tensor(list(heads), device=x.device))


def causal(length: int, device) -> Tensor:
    """``[t, s]``, True where s <= t."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def finish(m: Tensor, real: Tensor | None, positions: Tensor | None = None) -> Tensor:
    """Set M to exactly 0 above the diagonal and in the rows and columns of pads.

    m: ``[b, h, t, s]``, or with `positions` ``[b, r]`` the rows ``[b, h, r, s]``. real: ``[b, t]`` or None.
    """
    length = m.shape[-1]
    if positions is None:
        keep = causal(length, m.device)[None]
        if real is not None:
            keep = keep & real[:, None, :] & real[:, :, None]
    else:
        keep = torch.arange(length, device=m.device) <= positions[..., None]
        if real is not None:
            keep = keep & real[:, None, :] & real.gather(1, positions)[..., None]
    return torch.where(keep[:, None], m, 0.0)
