"""How is each decoder layer run on only those rows of a batch that it changes?

A variant of a model whose first change lies in layer l equals the intact model below l. So the model is called with a
batch of variants, sorted by layer, and its layers are wrapped for the time of that call: layer l computes the rows
whose change lies at l or below, and the other rows get what the intact model gave there, kept from one run of it. The
batch grows from layer to layer, and so do the rows that each layer's part of the cache holds.

Nothing here depends on the architecture: a layer's arguments are cut where their first axis is the batch. What does
not fit that is found by comparing with the plain way (`sweep.py`), not believed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .language_model import LanguageModel
from .sites import find_layers


class LayerRows:
    """The decoder layers of one model, and what they computed inside this object's blocks.

    token_layers: tokens times layers, each layer's rows times their tokens added up as it ran.
    """

    def __init__(self, lm: LanguageModel):
        self.layers = list(find_layers(lm.model)[1])
        self.token_layers = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the layers compute inside the block."""
        with self._wrapped(lambda index, forward, args, kwargs: self._counted(forward, args, kwargs)):
            yield

    @contextlib.contextmanager
    def keeping(self) -> Iterator[list]:
        """Count, and keep what each layer gives back in the one call of the model, on one row, inside the block.

        Yields, for each layer, its output and the length of the first axis of each tensor among its arguments.
        """
        kept: list = [None] * len(self.layers)

        def run(index, forward, args, kwargs):
            firsts: list[int] = []
            map_tensors((args, kwargs), lambda x: firsts.append(x.shape[0] if x.ndim else 0) or x)
            out = self._counted(forward, args, kwargs)
            kept[index] = map_tensors(out, lambda x: x.detach().clone()), firsts  # a later layer may write into it
            return out

        with self._wrapped(run):
            yield kept

    @contextlib.contextmanager
    def growing(
        self, batch: int, counts: Sequence[int], kept: Sequence, cache: object = None, states: list | None = None
    ) -> Iterator[None]:
        """Let layer l compute only the first `counts[l]` of `batch` rows, in the one call inside the block.

        kept: what `keeping` gave for one row with the same tokens. cache, states: the cache that the model is called
        with and, for each layer, the part of it that holds `counts[l]` rows; it stands in while that layer runs, and
        is moved on in place.
        """

        def run(index, forward, args, kwargs):
            n, (intact, firsts) = counts[index], kept[index]
            if n == 0:
                return map_tensors(intact, lambda x: _repeat(x, batch))
            if n < batch:
                # an axis that is 1 for one row and `batch` here is the batch, and no other of the same length
                first = iter(firsts)
                args, kwargs = map_tensors((args, kwargs), lambda x: _first_rows(x, next(first), n, batch))
            with contextlib.nullcontext() if states is None else _standing_in(cache.layers[index], states[index]):
                out = self._counted(forward, args, kwargs)
            return out if n == batch else _join(out, intact, n, batch)

        with self._wrapped(run):
            yield

    def _counted(self, forward: Callable, args: tuple, kwargs: dict):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.token_layers += hidden.shape[0] * hidden.shape[1]
        return forward(*args, **kwargs)

    @contextlib.contextmanager
    def _wrapped(self, run: Callable) -> Iterator[None]:
        """Put `run(index, forward, args, kwargs)` in the place of each layer's forward, for the block only."""
        before = [vars(layer).get("forward") for layer in self.layers]
        try:
            for index, layer in enumerate(self.layers):
                layer.forward = functools.partial(_call, run, index, layer.forward)
            yield
        finally:
            for layer, old in zip(self.layers, before, strict=True):
                vars(layer).pop("forward", None)
                if old is not None:
                    layer.forward = old


def _call(run: Callable, index: int, forward: Callable, *args, **kwargs):
    return run(index, forward, args, kwargs)


def map_tensors(value, fn: Callable[[Tensor], Tensor]):
    """`value` with `fn` of each tensor in it; tuples, lists and dicts are looked into, anything else stays."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(v, fn) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        new = copy.copy(value)  # a model's output is a dict of a class of its own
        for key, v in value.items():
            new[key] = map_tensors(v, fn)
        return new
    return value


def _first_rows(x: Tensor, of_one: int, n: int, batch: int) -> Tensor:
    return x[:n] if of_one == 1 and x.shape[0] == batch else x


def _repeat(x: Tensor, times: int) -> Tensor:
    """One row's `x` for several rows; routers give [tokens, ...] rather than [rows, tokens, ...]."""
    if x.ndim == 0:
        return x
    return x.expand(times, *x.shape[1:]) if x.shape[0] == 1 else x.repeat(times, *[1] * (x.ndim - 1))


def _join(out, kept, n: int, batch: int):
    """What a layer gave for n rows, filled up to `batch` rows with what it gave for the intact row."""
    if isinstance(out, Tensor):
        if out.ndim == 0:
            return out
        if not isinstance(kept, Tensor) or out.shape[0] != n * kept.shape[0] or out.shape[1:] != kept.shape[1:]:
            raise TypeError(f"a layer gave a tensor of shape {list(out.shape)} for {n} rows")
        return torch.cat([out, _repeat(kept, batch - n)])
    if isinstance(out, (tuple, list)):
        parts = [_join(o, k, n, batch) for o, k in zip(out, kept, strict=True)]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    if isinstance(out, dict):
        new = copy.copy(out)
        for key in out:
            new[key] = _join(out[key], kept[key], n, batch)
        return new
    return out


@contextlib.contextmanager
def _standing_in(layer: object, state: object) -> Iterator[None]:
    """Let the object `layer` of a cache hold what `state` holds; afterwards `state` has what became of it."""
    layer.__dict__, state.__dict__ = state.__dict__, layer.__dict__
    try:
        yield
    finally:
        layer.__dict__, state.__dict__ = state.__dict__, layer.__dict__


def check_cache(cache: object, n_layers: int) -> None:
    """Raise `TypeError` unless the cache keeps a separate object for each layer."""
    layers = getattr(cache, "layers", None)
    if (
        not isinstance(layers, (list, tuple))
        or len(layers) != n_layers
        or not all(hasattr(x, "__dict__") for x in layers)
    ):
        raise TypeError(f"the {type(cache).__name__} does not keep one part for each of {n_layers} layers")


def widen(layer: object, rows: int) -> object:
    """A copy of one layer's part of a cache, from one row to `rows` equal ones of their own memory."""
    return _with_rows(layer, lambda x: x.repeat(rows, *[1] * (x.ndim - 1)))


def shell(cache: object, rows: int = 1) -> object:
    """A cache of `rows` rows that knows what `cache` (of one row) knows about lengths, and holds no numbers.

    Models read the number of past tokens from it; the layers' own parts stand in while they run.
    """
    new = copy.copy(cache)
    new.layers = type(cache.layers)(
        _with_rows(x, lambda v: v.new_zeros(()).expand(rows, *v.shape[1:])) for x in cache.layers
    )
    return new


def _with_rows(layer: object, fn: Callable[[Tensor], Tensor]) -> object:
    def of(x: Tensor) -> Tensor:
        if x.ndim < 2:  # a counter, not a state
            return x.clone()
        if x.shape[0] != 1:
            raise TypeError(f"a cache of one row holds a tensor of shape {list(x.shape)}")
        return fn(x)

    new = copy.copy(layer)
    for name, value in vars(layer).items():
        setattr(new, name, map_tensors(value, of))
    return new


def held_bytes(value: object, depth: int = 0) -> int:
    """Bytes of the tensors that an object holds, in its attributes and in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if depth > 4:
        return 0
    if isinstance(value, (tuple, list)):
        return sum(held_bytes(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return sum(held_bytes(v, depth + 1) for v in value.values())
    return held_bytes(vars(value), depth + 1) if hasattr(value, "__dict__") else 0
