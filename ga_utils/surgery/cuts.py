"""What is left of a model without some of its layers? (Figures 2 and 3)

`truncate` keeps the first layers, with the final norm and the language-model head (Figure 2: accuracy against the
number of layers kept); `drop_layers` takes single layers out (Figure 3: the minimal model less one layer).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from ..errors import GAError
from ..heads import as_integer
from ..language_model import LanguageModel
from .changes import Changes, OperatedModel, Operation, changed, layers_of


@contextlib.contextmanager
def truncate(lm: LanguageModel, keep: int | None = None, *, layers: int | None = None) -> Iterator[OperatedModel]:
    """Keep layers 0 to keep - 1, the final norm and the head, inside the block (paper, Figure 2).

    `layers` is another name of `keep`: how many layers are kept. Yields the changed model; heads keep their names.
    Keeping all layers changes nothing, and the model's records are those of the intact one. Raises `GAError` unless
    `keep` is between 1 and the number of layers, and where layers that an outer block took out are among them.
    """
    given = [n for n in (keep, layers) if n is not None]
    if len(given) != 1:
        raise GAError("truncate needs the number of layers to keep, once: truncate(lm, 18).")
    count, here = as_integer(given[0]), list(layers_of(lm))
    if count is None or not 1 <= count <= here[-1] + 1:
        raise GAError(f"keep={given[0]!r} must be a number of layers from 1 to {here[-1] + 1}.")
    if not any(i < count for i in here):
        raise GAError(f"keep={count} leaves no layer: of the first {count}, all are taken out already.")
    with changed(lm, _cut([i for i in here if i >= count])) as out:
        yield out


@contextlib.contextmanager
def drop_layers(lm: LanguageModel, layers: int | Iterable[int]) -> Iterator[OperatedModel]:
    """Take `layers` out inside the block: what enters a dropped layer leaves it unchanged (paper, Figure 3).

    Yields the changed model; the layers that stay keep their numbers. An empty list changes nothing. Raises `GAError`
    for a layer that is not there, and if none would be left.
    """
    here = list(layers_of(lm))
    out_of_it = sorted(set(parse_layers(layers, here)))
    if len(out_of_it) == len(here):
        raise GAError(f"Dropping layers {out_of_it} leaves none: keep one layer at least.")
    with changed(lm, _cut(out_of_it)) as out:
        yield out


def _cut(layers: list[int]) -> Operation:
    def apply(changes: Changes) -> None:
        # blocks may end in any order, so another one may have taken a layer out as well
        changes.kept = [i for i in changes.kept if i not in layers]

    return Operation(apply)


def parse_layers(layers: object, here: Iterable[int]) -> list[int]:
    """Layers' numbers as a list of ints. Raises `GAError` for one that is not among `here`."""
    here = list(here)
    one = as_integer(layers)
    if one is None and (isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable)):
        raise GAError(f"layers={layers!r:.60} must be a layer's number or a list of them.")
    numbers = [one] if one is not None else [as_integer(i) for i in layers]
    for number, given in zip(numbers, [layers] if one is not None else list(layers), strict=True):
        if number is None or number not in here:
            raise GAError(f"There is no layer {given!r}: the model has the layers {', '.join(map(str, here))}.")
    return numbers
