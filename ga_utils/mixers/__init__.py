"""What does a mixer do to the sequence? The matrix M of every head, with output = M x value.

value and output are the mixer's own: what the head mixes, and the mixture before gate, norm and output
projection. For attention M is the attention pattern; for a state space model, a delta rule or a short
convolution it is the matrix that its recurrence amounts to on this text: signed, and its rows do not sum
to 1.

    matrix(lm, "some text", "L3H2")               whole matrices
    rows(lm, texts, heads, "last")                some rows, at a cost linear in the text's length
    row_statistics(lm, texts, heads, "last", spans)   where those rows look, without keeping them
    capture(lm, texts)                            the ingredients: value, output, and the family's own

Every M is compared with the output that the model computed before it is returned; one that does not reproduce
it is an error, never an approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import GAError, HeadError
from ..heads import Head, parse_heads
from ..language_model import LanguageModel
from ..sites import HeadSite

# importing a family's module registers it
from . import attention, deltanet, kda, lightning, llamba, mamba1, mamba2, reading, shortconv  # noqa: F401
from .base import FAMILIES, Captured, Family, register
from .effective import effective

__all__ = [
    "FAMILIES", "Captured", "Family", "MixerMatrices", "RowStatistics", "capture", "matrix", "register",
    "row_statistics", "rows",
]  # fmt: skip

VARIANTS = {
    "scan": "M[t, s], with output = M x value (before gate, norm and output projection)",
    "effective": "M[t, s] x || W_h (after_t * value_s) ||: length of what s adds to the block's output at t, "
    "with M's sign",
}


@dataclass(frozen=True)
class MixerMatrices(Mapping[Head, Tensor]):
    """Matrices ``[b, t, s]`` or rows ``[b, r, s]`` by head; ``m["L3H2"]`` works too.

    variant and meaning: what an entry is (see `VARIANTS`). with_d: whether the skip term D stands on the
    diagonal, for mixers that have one. real ``[b, t]``: False at pads, whose rows and columns are 0.
    tokens: the text of every column. positions ``[b, r]``: the columns that the rows are of, or None for
    whole matrices.
    """

    values_by_head: dict[Head, Tensor] = field(repr=False)
    variant: str
    with_d: bool
    real: Tensor = field(repr=False)
    tokens: list[list[str]] = field(repr=False)
    positions: Tensor | None = field(default=None, repr=False)

    @property
    def meaning(self) -> str:
        """What an entry of these matrices is, for captions."""
        return VARIANTS[self.variant]

    def __getitem__(self, head: object) -> Tensor:
        found = parse_heads(head)
        if len(found) != 1 or found[0] not in self.values_by_head:
            raise HeadError(f"{head} is not among these matrices: {', '.join(map(str, self.values_by_head))}.")
        return self.values_by_head[found[0]]

    def __iter__(self) -> Iterator[Head]:
        return iter(self.values_by_head)

    def __len__(self) -> int:
        return len(self.values_by_head)

    def example(self, head: object, index: int) -> tuple[Tensor, list[str]]:
        """Example `index` without its pads: ``[n, n]`` (or ``[r, n]``) and the n tokens' text."""
        m, real = self[head][index], self.real[index].to(self[head].device)
        m = m[:, real] if self.positions is not None else m[real][:, real]
        return m, [t for t, keep in zip(self.tokens[index], real.tolist(), strict=True) if keep]


@dataclass(frozen=True)
class RowStatistics:
    """Where chosen rows look. All are read from |M|, each row divided by its sum: shares of absolute weight.

    Axes: heads in order, example b, row r, span k. mass ``[h, b, r, k]``: share on each span. entropy
    ``[h, b, r]`` in nats. top ``[h, b, r]``: largest share; top_position: the token that has it, counted in
    the example's own tokens. negative: share of the weight with a negative sign. total: the sum of |M| before
    the division; where it is 0, so are all shares.
    """

    heads: tuple[Head, ...]
    variant: str
    with_d: bool
    mass: Tensor
    entropy: Tensor
    top: Tensor
    top_position: Tensor
    negative: Tensor
    total: Tensor


def capture(
    lm: LanguageModel, inputs: object, sites: Sequence[HeadSite] | None = None, *, grad: bool = False
) -> dict[HeadSite, Captured]:
    """What the mixers of `sites` (default: all) used and produced in one forward pass over `inputs`.

    inputs: a prompt, a list of prompts, or a dict with input_ids and attention_mask ``[b, t]``, padded on
    either side. Raises `GAError` for other inputs and for a mixer that cannot be read.
    """
    sites = lm.sites if sites is None else tuple(sites)
    for site in sites:
        reading.check_kind(site)
    caps: dict[HeadSite, Captured] = {}
    reading.visit(lm, reading.encode(lm, inputs), sites, lambda cap: caps.update({cap.site: cap}), grad)
    return {site: caps[site] for site in sites}


def matrix(
    lm: LanguageModel,
    inputs: object,
    heads: object,
    *,
    with_d: bool = True,
    variant: str = "scan",
    grad: bool = False,
) -> MixerMatrices:
    """The matrix of each of `heads` over each text of `inputs`, in one forward pass.

    heads: anything that `parse_heads` reads. with_d: put the skip term D on the diagonal, where the mixer has
    one. variant: "scan" or "effective" (see `VARIANTS`). grad: keep the graph, to differentiate through M.
    Returns float32 (float64 for a float64 model), exactly 0 above the diagonal and at pads. Raises `GAError`
    if the matrices would not fit into memory, or if one does not reproduce the model's own output.
    """

    def build(family: Family, cap: Captured, part: list[int]) -> Tensor:
        m = family.matrix(cap, part, with_d)
        _check(family, cap, part, m, with_d, None)
        return m if variant == "scan" else effective(cap, part, m, None)

    batch, chosen = _prepare(lm, inputs, heads, variant)
    found: dict[Head, Tensor] = {}
    _each(lm, batch, chosen, None, build, lambda head, m: found.update({head: m}), grad)
    return _result(lm, batch, heads, found, variant, with_d, None)


def rows(
    lm: LanguageModel,
    inputs: object,
    heads: object,
    positions: object,
    *,
    with_d: bool = True,
    variant: str = "scan",
    grad: bool = False,
) -> MixerMatrices:
    """Rows of the same matrices ``[b, r, s]``, at O(s x state) time and memory each.

    positions: "last", integers for all examples, or one list for each example (equally many), counted in the
    example's own tokens, negative from the end. Raises `HeadError` for a position outside an example; else as
    `matrix`.
    """
    batch, chosen = _prepare(lm, inputs, heads, variant)
    where = reading.columns(positions, batch["attention_mask"].bool())
    found: dict[Head, Tensor] = {}
    build = _rows_of(where, with_d, variant)
    _each(lm, batch, chosen, where, build, lambda head, m: found.update({head: m}), grad)
    return _result(lm, batch, heads, found, variant, with_d, where)


def row_statistics(
    lm: LanguageModel,
    inputs: object,
    heads: object,
    positions: object,
    spans: Sequence[Sequence[tuple[int, int]]] = (),
    *,
    with_d: bool = True,
    variant: str = "scan",
) -> RowStatistics:
    """Where the rows at `positions` look: `RowStatistics`, a few heads at a time and without keeping M.

    spans: for each example equally many pairs (start, end) of its own token positions, end not included.
    """
    batch, chosen = _prepare(lm, inputs, heads, variant)
    real = batch["attention_mask"].bool()
    where = reading.columns(positions, real)
    inside = reading.span_columns(spans, real)
    own = real.long().cumsum(1) - 1
    found: dict[Head, tuple[Tensor, ...]] = {}

    def keep(head: Head, m: Tensor) -> None:
        total = m.abs().sum(-1)
        share = m.abs() / torch.where(total > 0, total, 1.0)[..., None]
        top, at = share.max(-1)
        entropy = -torch.special.xlogy(share, share).sum(-1)
        negative = torch.where(m < 0, share, 0.0).sum(-1)
        mass = share @ inside.to(share).mT
        found[head] = (mass, entropy, top, own.to(at.device).gather(1, at), negative, total)

    _each(lm, batch, chosen, where, _rows_of(where, with_d, variant), keep, False, kept=False)
    ordered = parse_heads(heads)
    return RowStatistics(
        ordered, variant, with_d, *(torch.stack([found[h][i].cpu() for h in ordered]) for i in range(6))
    )


def _rows_of(where: Tensor, with_d: bool, variant: str) -> Callable[[Family, Captured, list[int]], Tensor]:
    def build(family: Family, cap: Captured, part: list[int]) -> Tensor:
        at = where.to(cap.output.device)
        m = family.rows(cap, part, at, with_d)
        _check(family, cap, part, m, with_d, at)
        return m if variant == "scan" else effective(cap, part, m, at)

    return build


def _prepare(lm: LanguageModel, inputs: object, heads: object, variant: str) -> tuple[dict, dict]:
    if variant not in VARIANTS:
        raise GAError(f"variant={variant!r} is unknown: use {' or '.join(map(repr, VARIANTS))}.")
    chosen = reading.by_site(lm, heads)
    return reading.encode(lm, inputs), chosen


def _each(
    lm: LanguageModel,
    batch: dict[str, Tensor],
    chosen: dict[HeadSite, list[Head]],
    where: Tensor | None,
    build: Callable[[Family, Captured, list[int]], Tensor],
    keep: Callable[[Head, Tensor], None],
    grad: bool,
    kept: bool = True,
) -> None:
    """Build the matrices or rows of a few heads at a time and give each head's to `keep`."""
    b, length = batch["input_ids"].shape
    n_rows, size = length if where is None else where.shape[1], reading.itemsize(lm)
    n_heads = sum(map(len, chosen.values()))
    scratch = 4 * b * n_rows * length * size  # of one head; the family's own need is looked at when it is known
    what = f"The matri{'ces' if n_heads > 1 else 'x'} of {n_heads} head{'s' * (n_heads > 1)}"
    if where is None:
        advice = "name fewer heads or shorter texts, or ask rows() for the positions that matter"
    else:
        what, advice = f"{n_rows} rows of {n_heads} heads", "name fewer heads, positions or texts"
    what = f"{what} at {length} tokens (batch {b})"
    reading.guard(lm, what, (n_heads if kept else 1) * b * n_rows * length * size, scratch, advice)

    def see(cap: Captured) -> None:
        family, names = FAMILIES[cap.site.kind], {}
        for head in chosen[cap.site]:  # a head can be named in its short and its long form at once
            names.setdefault(head.index, []).append(head)
        for part in reading.blocks(cap, list(names), n_rows):
            reading.guard(lm, what, 0, family.bytes_needed(cap, len(part), n_rows), advice)
            m = build(family, cap, part)
            for i, index in enumerate(part):
                for head in names[index]:
                    keep(head, m[:, i])

    reading.visit(lm, batch, list(chosen), see, grad)


def _check(family: Family, cap: Captured, part: list[int], m: Tensor, with_d: bool, at: Tensor | None) -> None:
    if family.has_d and not with_d:
        # without D, M x value is not the output; the last rows with D stand for the matrix
        length = cap.length - 1 - cap.real.flip(1).long().argmax(1, keepdim=True)
        m, at = family.rows(cap, part, length, True), length
    reading.verify(cap, part, m, at)


def _result(
    lm: LanguageModel,
    batch: dict[str, Tensor],
    heads: object,
    found: dict[Head, Tensor],
    variant: str,
    with_d: bool,
    where: Tensor | None,
) -> MixerMatrices:
    tokens = [[lm.tokenizer.decode([i]) for i in row] for row in batch["input_ids"].tolist()]
    ordered = {head: found[head] for head in parse_heads(heads)}
    return MixerMatrices(ordered, variant, with_d, batch["attention_mask"].bool(), tokens, where)
