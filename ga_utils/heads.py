"""What is a head called?

A head is a contiguous slice of the *input of a mixer's output projection*, addressed by (layer, index), both
zero-based as in the paper. ``L17H24`` is layer 17, head 24. For Mamba-1 a head is a channel. Where a layer holds
two mixers (Falcon-H1, Zamba2's hybrid layers) the short form means the attention head and the long form, for
example ``L17.mamba2.H3``, names the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import HeadError

_SHORT = re.compile(r"\s*L(\d+)\s*(?:\.\s*([a-z][a-z0-9_]*)\s*\.)?\s*H(\d+)\s*$", re.IGNORECASE)
_FORMS = "write it as 'L17H24' (layer 17, head 24), 'L17.mamba2.H3', or the pair (17, 24)"


@dataclass(frozen=True)
class Head:
    """One head: zero-based `layer` and `index`, and `mixer` (a site's kind) where the short name is not enough."""

    layer: int
    index: int
    mixer: str | None = None

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
    elif isinstance(item, str):
        for name in re.split(r"[,;\s]+", item.strip()):
            match = _SHORT.match(name)
            if not match:
                raise HeadError(f"{name!r} is not the name of a head: {_FORMS}.")
            yield Head(int(match[1]), int(match[3]), match[2].lower() if match[2] else None)
    elif isinstance(item, Iterable) and not isinstance(item, (bytes, dict)):
        parts = list(item)
        if len(parts) == 2 and all(_is_int(p) for p in parts):
            if min(parts) < 0:
                raise HeadError(f"{tuple(parts)!r} is not a head: layers and heads are counted from 0.")
            yield Head(int(parts[0]), int(parts[1]))
        else:
            for part in parts:
                yield from _parse(part)
    else:
        raise HeadError(f"{item!r} is not a head: {_FORMS}.")


def _is_int(value: object) -> bool:
    # numpy and torch integers count; True and 1.0 do not
    return hasattr(value, "__index__") and not isinstance(value, bool)
