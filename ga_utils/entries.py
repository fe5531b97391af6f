"""What if a head may read only some tokens? Chosen entries of its matrix M are kept, all others of the row set to 0.

A head's output is y = M x (`mixers`). At chosen rows t this module puts y'[t] = sum over the allowed s of M[t, s] x[s]
in its place, times the gate and output norm that stood behind y[t] (`Family.after`), both as the model computed them on
the whole row. So what is cut is what the head *reads*, and nothing else. It is exact for attention, where nothing
stands behind y, and for mixers with a gate; a norm over several heads (Mamba-2) is taken as fixed. M is built anew in
every forward pass, from what that pass computed, and one that does not reproduce the mixer's output is an error.

M is taken with the skip term D on its diagonal, where there is one: a token that may not read itself loses D x[t], too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import GAError, HeadError, ModelError
from .heads import Head
from .language_model import LanguageModel
from .masking import check_input
from .mixers import reading
from .mixers.base import FAMILIES, Captured, pick, wide
from .positions import Where
from .sites import HeadSite, find_layers


@dataclass(frozen=True)
class Reads:
    """What one head may read in one example; positions count the prompt's tokens from 0.

    rows: row -> the positions that it may read (those after the row are never read). answer: what the prompt's last
    token, and each token of the answer after it, may read; None leaves those rows to `rows` and whole otherwise.
    """

    rows: Mapping[int, Collection[int]] = field(default_factory=dict)
    answer: Collection[int] | None = None

    def at(self, position: int, end: int) -> Collection[int] | None:
        """What the row at `position` may read in a prompt whose last token is `end`; None if all of it."""
        if self.answer is not None and position >= end:
            return self.answer
        return self.rows.get(position)


@contextlib.contextmanager
def only_entries(
    lm: LanguageModel,
    reads: Mapping[Head, Sequence[Reads]],
    renormalise: bool = False,
    strict: bool = False,
) -> Iterator[None]:
    """Let heads read only what `reads` allows inside a ``with`` block: head -> one `Reads` for each example.

    renormalise: scale what is left of a row so that the sum of its absolute entries (without D) is what it was; a row
    of which nothing is left stays 0. strict: rows that `reads` does not name give nothing at all; otherwise they are
    left as they are. Examples are told as in `mask_heads` (`positions.py`). Forward passes must see whole texts,
    without a cache: score with ``cached=False``.

    Raises `HeadError` for a head that does not exist or a position outside its prompt, `ModelError` for a model in
    training mode and where a forward pass went past the edit, `GAError` for a mixer that has no matrix.
    """
    if lm.model.training:
        raise ModelError("The model is in training mode, where fused kernels can pass edits by: call model.eval().")
    if not reads:
        raise HeadError("reads names no head: give one or more.")
    chosen = reading.by_site(lm, list(reads))
    where = Where(lm, None, indexed=True)
    edits = [_SiteEdit(site, {h.index: reads[h] for h in heads}, where, renormalise, strict)
             for site, heads in chosen.items()]  # fmt: skip
    layers, handles = find_layers(lm.model)[1], []
    try:
        handles.append(lm.backbone.register_forward_pre_hook(where.before_forward, with_kwargs=True))
        handles.append(lm.backbone.register_forward_hook(where.after_forward))
        for index in sorted({e.site.layer for e in edits}):
            handles += _around(layers[index], [e for e in edits if e.site.layer == index])
        yield
        for edit in edits:
            if edit.seen < where.calls:
                raise ModelError(
                    f"{type(edit.site.mixer).__name__} ({edit.site.path}) was edited in {edit.seen} of {where.calls} "
                    "forward passes only: a fused kernel did its work, so it was measured whole."
                )
    finally:
        for handle in handles:
            handle.remove()


def _around(layer: torch.nn.Module, edits: Sequence[_SiteEdit]) -> list:
    """Hooks that watch the layer's sites while it runs, and edit what enters their output projections."""
    open_now: list[contextlib.ExitStack] = []

    def enter(module, args, kwargs) -> None:
        stack = contextlib.ExitStack()
        open_now.append(stack)
        for edit in edits:
            edit.cap = stack.enter_context(FAMILIES[edit.site.kind].watch(edit.site))
            stack.callback(edit.site.proj.register_forward_pre_hook(edit).remove)

    def close(module, args, output) -> None:
        while open_now:
            open_now.pop().close()

    return [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(close, always_call=True),
    ]


class _SiteEdit:
    """The forward pre-hook of one site's output projection."""

    def __init__(
        self, site: HeadSite, reads: dict[int, Sequence[Reads]], where: Where, renormalise: bool, strict: bool
    ):
        self.site, self.where, self.renormalise, self.strict = site, where, renormalise, strict
        self.heads = list(reads)
        self.reads = list(reads.values())
        self.cap: Captured | None = None
        self.seen = 0

    def __call__(self, module, args):
        x, *rest = args
        check_input(self.site, x)
        cap, index = self.cap, self.where.index
        if cap is None or cap.output is None:
            raise GAError(
                f"What {type(self.site.mixer).__name__} ({self.site.path}) computed was not seen before its output "
                "projection: its entries cannot be chosen."
            )
        self.seen += 1
        cap.projected = x.unflatten(-1, (self.site.n_heads, -1)).transpose(1, 2)
        cap.real = (index >= 0).to(x.device)
        new = self._strict(x) if self.strict else x.clone()
        plan = self._plan(index)
        if not any(plan):
            return (new, *rest)
        at, keep, touched = (v.to(x.device) for v in _grid(plan, index.shape[1], len(self.heads)))
        y = self._read(cap, at, keep)  # [b, h, r, p]
        rows = torch.arange(len(x), device=x.device)[:, None]
        for i, head in enumerate(self.heads):
            here = new[..., self.site.channels(head)]
            here[rows, at] = torch.where(touched[:, i, :, None], y[:, i].to(x.dtype), here[rows, at])
        return (new, *rest)

    def _strict(self, x: Tensor) -> Tensor:
        x = x.clone()
        for head in self.heads:
            x[..., self.site.channels(head)] = 0
        return x

    def _plan(self, index: Tensor) -> list[dict[int, dict[int, list[int]]]]:
        """For each row of the batch: column -> number of the head -> columns that it may read there."""
        for reads in self.reads:
            self.where.require_rows(len(reads), "examples in reads")
        layout = self.where.lm.layout
        told = None if layout is None else layout.prompt_ends
        plan = []
        for b, example in enumerate(self.where.rows):
            column = {int(p): c for c, p in enumerate(index[b].tolist()) if p >= 0}
            end = int(torch.as_tensor(told).flatten()[b]) if told is not None else max(column)
            here: dict[int, dict[int, list[int]]] = {}
            for i, reads in enumerate(self.reads):
                self._inside(reads[example], end, example)
                for position, c in column.items():
                    allowed = reads[example].at(position, end)
                    if allowed is not None:
                        here.setdefault(c, {})[i] = [column[p] for p in allowed]
            plan.append(here)
        return plan

    def _inside(self, reads: Reads, end: int, example: int) -> None:
        named = {*reads.rows, *(p for r in reads.rows.values() for p in r), *(reads.answer or ())}
        outside = [p for p in named if not 0 <= p <= end]
        if outside:
            raise HeadError(f"Position {outside[0]} lies outside example {example}, whose prompt has {end + 1} tokens.")

    def _read(self, cap: Captured, at: Tensor, keep: Tensor) -> Tensor:
        """What the heads give at columns `at` ``[b, r]`` when they read only `keep` ``[b, h, r, s]``: [b, h, r, p]."""
        family, heads = FAMILIES[self.site.kind], self.heads
        m = family.rows(cap, heads, at, True)
        reading.verify(cap, heads, m, at)
        left = torch.where(keep, m, 0.0)
        if self.renormalise:
            mixed = family.rows(cap, heads, at, False) if family.has_d else m
            some = torch.where(keep, mixed, 0.0)
            total = some.abs().sum(-1, keepdim=True)
            scale = mixed.abs().sum(-1, keepdim=True) / torch.where(total > 0, total, torch.inf)
            left = left + (scale - 1) * some
        value = torch.where(cap.real[:, None, :, None], wide(pick(cap.value, heads)).to(m.dtype), 0.0)
        after = wide(family.after(cap, heads)).to(m.dtype)
        after = after.gather(2, at[:, None, :, None].expand(-1, len(heads), -1, after.shape[-1]))
        return after * (left @ value)


def _grid(plan: list[dict], length: int, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of all rows that are touched ``[b, r]``, what each head may read there ``[b, h, r, s]``, and whether
    that head is touched there at all ``[b, h, r]``.

    Examples with fewer rows repeat one of theirs, or name their first column without touching it.
    """
    b, r = len(plan), max(map(len, plan))
    at, touched = torch.zeros(b, r, dtype=torch.long), torch.zeros(b, n_heads, r, dtype=torch.bool)
    keep = torch.ones(b, n_heads, r, length, dtype=torch.bool)
    for row, here in enumerate(plan):
        columns = [*here] or [0]
        columns += [columns[0]] * (r - len(columns))
        at[row] = torch.tensor(columns)
        for j, column in enumerate(columns):
            for i, allowed in here.get(column, {}).items():
                touched[row, i, j] = True
                keep[row, i, j] = False
                keep[row, i, j, allowed] = True
    return at, keep, touched
