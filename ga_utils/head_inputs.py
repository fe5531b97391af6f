"""What does a head read, part by part, and what if one part were another? For paths between heads (`paths.py`).

An attention head reads queries, keys and values: the tensors that the model hands to its attention function, after
projection, norms and rotation. A head of a Mamba-2 mixer reads x (its values), B and C (what keys and queries are to
attention), dt (steps and decays) and z (its gate): columns of the mixer's input projection. What an attention layer
computes from its input besides, such as an output gate, belongs to no part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .errors import GAError, HeadError, ModelError
from .heads import Head
from .mixers.attention import _REGISTRY, StandIn
from .mixers.base import namespace, replaced, running
from .sites import HeadSite

#: what heads of each kind of mixer read
PARTS = {
    "attention": ("q", "k", "v"),
    "mamba2": ("x", "B", "C", "dt", "z"),
    "llamba": ("x", "B", "C", "dt", "z"),
}


@dataclass
class Reader:
    """The parts that one head read in the latest forward call, and those that are put in their place.

    taken: for each part what the model computed, ``[b, t, channels]`` or ``[b, t, p]``, never an edited part. given:
    parts of the same shapes that the head is to read instead, in all forward calls until it is cleared. calls: how many
    times the mixer ran.
    """

    taken: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0


def parts_of(site: HeadSite, parts: object = None) -> tuple[str, ...]:
    """The `parts` of a head of `site`, by default all. Raises `ModelError` for a mixer that has none, `HeadError` for
    parts that it lacks."""
    known = PARTS.get(site.kind)
    if known is None:
        raise ModelError(
            f"What the heads of a {site.kind} mixer read is not told apart here, so layer {site.layer} cannot be a "
            f"receiver: only heads of {', '.join(PARTS)} mixers can."
        )
    if parts is None:
        return known
    chosen = tuple(dict.fromkeys([parts] if isinstance(parts, str) else parts))
    if not chosen or not all(p in known for p in chosen):
        raise HeadError(f"parts={parts!r:.60} must be some of {', '.join(known)}, which a {site.kind} head reads.")
    return chosen


@contextlib.contextmanager
def reading(site: HeadSite, head: Head) -> Iterator[Reader]:
    """Record what `head` of `site` reads, and let it read what `Reader.given` holds, inside a ``with`` block.

    Keys and values (B and C) that a group of heads shares are replaced for the whole group: take from the mixer's
    output this head's slice alone. Raises `ModelError` or `GAError` for a mixer whose parts cannot be told apart.
    """
    parts_of(site)
    reader = Reader()
    how = _attention if site.kind == "attention" else _projection
    with how(site, head.index, reader):
        yield reader


@contextlib.contextmanager
def _attention(site: HeadSite, index: int, reader: Reader) -> Iterator[None]:
    scope, name = namespace(site), type(site.mixer).__name__
    if _REGISTRY not in scope:
        raise GAError(
            f"{name} ({site.path}) does not take its attention function from transformers' registry, so what its heads "
            "read cannot be seen."
        )

    def edit(query: Tensor, key: Tensor, value: Tensor, kwargs: dict) -> list[Tensor]:
        heads, groups, length = query.shape[1], key.shape[1], query.shape[2]
        if heads != site.n_heads or heads % groups or value.shape[1] != groups or length != key.shape[2]:
            raise GAError(
                f"{name} ({site.path}) mixed {length} queries of {heads} heads with {key.shape[2]} keys of {groups}: a "
                f"receiver needs {site.n_heads} heads and no cache."
            )
        if kwargs.get("position_bias") is not None:
            raise GAError(
                f"{name} ({site.path}) adds a bias to its attention that may depend on the queries, so q, k and v are "
                "not all that its heads read."
            )
        reader.calls += 1
        edited = []
        for part, x in zip("qkv", (query, key, value), strict=True):
            h = index // (heads // x.shape[1])
            reader.taken[part] = x[:, h].detach()
            if part in reader.given:
                x = x.clone()
                x[:, h] = reader.given[part]
            edited.append(x)
        return edited

    with contextlib.ExitStack() as stack:
        state = stack.enter_context(running(site))
        stack.enter_context(replaced(scope, _REGISTRY, _Editing(scope[_REGISTRY], state, edit)))
        yield


class _Editing(StandIn):
    """Edits what one mixer hands to its attention function."""

    def __init__(self, registry: Any, state: dict, edit: Callable):
        super().__init__(registry)
        self._state, self._edit = state, edit

    def get_interface(self, name: str | None, default: Callable) -> Callable:
        function = self._registry.get_interface(name, default)

        def editing(module, query, key, value, *args, **kwargs):
            if self._state["now"]:
                query, key, value = self._edit(query, key, value, kwargs)
            return function(module, query, key, value, *args, **kwargs)

        return editing


@contextlib.contextmanager
def _projection(site: HeadSite, index: int, reader: Reader) -> Iterator[None]:
    columns = _columns(site, index)

    def edit(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        reader.calls += 1
        reader.taken = {part: output[..., where].detach().clone() for part, where in columns.items()}
        if reader.given:
            output = output.clone()
            for part, x in reader.given.items():
                output[..., columns[part]] = x
        return output

    handle = site.mixer.in_proj.register_forward_hook(edit)
    try:
        yield
    finally:
        handle.remove()


def _columns(site: HeadSite, index: int) -> dict[str, slice]:
    """Which columns of the input projection hold the parts of head `index`.

    The short convolution that follows works on each column apart, so it may come after the edit.
    """
    mixer, h, p = site.mixer, site.n_heads, site.head_dim
    llamba = site.kind == "llamba"
    groups, n = (h, mixer.d_state) if llamba else (getattr(mixer, "n_groups", 0), getattr(mixer, "ssm_state_size", 0))
    widths = {"x": h * p, "B": groups * n, "C": groups * n}
    widths = {**widths, "z": h * p, "dt": h} if llamba else {"z": h * p, **widths, "dt": h}
    projection = getattr(mixer, "in_proj", None)
    if sum(widths.values()) != getattr(projection, "out_features", None) or not groups or h % groups:
        raise ModelError(
            f"{type(mixer).__name__} ({site.path}) does not project its input to x, B, C, dt and z in the usual order, "
            "so what its heads read cannot be told apart."
        )
    own = {"x": (index, p), "z": (index, p), "dt": (index, 1), **dict.fromkeys("BC", (index // (h // groups), n))}
    found, start = {}, 0
    for part, width in widths.items():
        number, size = own[part]
        found[part] = slice(start + number * size, start + (number + 1) * size)
        start += width
    return found
