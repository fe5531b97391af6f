"""What is a head called?

A head is a contiguous slice of the *input of a mixer's output projection*, addressed by (layer, index), both
zero-based as in the paper. ``L17H24`` is layer 17, head 24. For Mamba-1 a head is a channel. Where a layer holds
two mixers (Falcon-H1, Zamba2's hybrid layers) the short form means the attention head and the long form, for
example ``L17.mamba2.H3``, names the other.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from .errors import HeadError

_SHORT = re.compile(r"\s*L([0-9]{1,9})\s*(?:\.\s*([a-z][a-z0-9_]*)\s*\.)?\s*H([0-9]{1,9})\s*$", re.IGNORECASE)
_FORMS = "write it as 'L17H24' (layer 17, head 24), 'L17.mamba2.H3', or the pair (17, 24)"


@dataclass(frozen=True)
class Head:
    """One head: zero-based `layer` and `index`, and `mixer` (a site's kind) where the short name is not enough."""

    layer: int
    index: int
    mixer: str | None = None

    def __post_init__(self) -> None:
        layer, index = as_integer(self.layer), as_integer(self.index)
        if layer is None or index is None:
            raise HeadError(f"({self.layer!r}, {self.index!r}) is not a head: {_FORMS}.")
        if min(layer, index) < 0:  # a negative index would name an empty slice of channels, without an error
            raise HeadError(f"({layer}, {index}) is not a head: layers and heads are counted from 0.")
        object.__setattr__(self, "layer", layer)
        object.__setattr__(self, "index", index)

    def __str__(self) -> str:
        return f"L{self.layer}.{self.mixer}.H{self.index}" if self.mixer else f"L{self.layer}H{self.index}"

    def __lt__(self, other: Head) -> bool:
        return self._key() < other._key()

    def _key(self) -> tuple[int, str, int]:
        return (self.layer, self.mixer or "", self.index)


def parse_heads(heads: object) -> tuple[Head, ...]:
    """Return the heads named by `heads`, in the order given, each once.

    Accepts a `Head`, a string of one or more names separated by commas or spaces, a pair ``(layer, index)``, or an
    iterable of any of these. Raises `HeadError` for anything else, naming the part that could not be read.
    """
    found = list(_parse(heads))
    return tuple(dict.fromkeys(found))


def _parse(item: object) -> Iterable[Head]:
    if isinstance(item, Head):
        yield item
    elif isinstance(item, str) and item.strip()[:1] in ("[", "("):  # a list or pair, written out at the command line
        try:
            parts = ast.literal_eval(item.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise HeadError(f"{item[:60]!r} is not the name of a head: {_FORMS}.") from None
        yield from _parse(parts)
    elif isinstance(item, str):
        for name in re.split(r"[,;\s]+", item.strip().strip(",;")):
            match = _SHORT.match(name)
            if not match:
                raise HeadError(f"{name!r} is not the name of a head: {_FORMS}.")
            yield Head(int(match[1]), int(match[3]), match[2].lower() if match[2] else None)
    elif isinstance(item, Iterable) and not isinstance(item, (bytes, bytearray, Mapping)):
        if getattr(item, "ndim", 1) == 0:  # a single number of numpy or torch says that it is iterable
            raise HeadError(f"{item!r} is not a head: {_FORMS}.")
        parts = list(item)
        if parts and all(as_integer(p) is not None for p in parts):
            if len(parts) != 2 or isinstance(item, Set):  # a set has no order
                raise HeadError(f"{item!r} is not a head: {_FORMS}.")
            yield Head(*parts)
        else:
            for part in parts:
                yield from _parse(part)
    else:
        raise HeadError(f"{item!r} is not a head: {_FORMS}.")


def as_integer(value: object) -> int | None:
    """`value` as an int if it is one number of an integer type, numpy's and torch's included; None for True or 1.0."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool") or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
