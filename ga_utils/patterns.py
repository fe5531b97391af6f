"""Does a head look like Gather or like Aggregate? Where its rows look, measured on the task's own segments.

A Gather head sums up a segment (an option, a key and its value) at the segment's end; an Aggregate head reads, at the
prompt's last token, the segment that holds the answer (paper, section 3). Trained models often sum up at the value's
last token rather than at the line's, so both places are looked at, apart. Positions come from `Example.segments` and
are counted as `score` counts them. Only the rows that matter are computed; no matrix is kept.

Attention rows are taken as they are. All other mixers' matrices are signed and their rows sum to anything: there, the
skip term D is left out (it says nothing about other tokens), and the row's absolute values are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from .errors import TaskError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .mixers import _check, reading
from .mixers.base import FAMILIES, Captured
from .tasks.base import Example, Span, Task
from .tasks.tokens import encode, segment_tokens

#: what is measured of each head on each example, in the table's order
MEASURES = ("gather_end", "gather_value", "aggregate_end", "aggregate_value", "right", "entropy", "top1")
#: examples in one forward pass
_BATCH = 16


@dataclass(frozen=True)
class Patterns:
    """Scores of h heads on n examples, arrays [h, n].

    gather_end, gather_value: mass that a segment's last token, or its value's last token, takes from the other tokens
    of its own segment; itself and the text's first token are left out; mean over the segments. aggregate_end,
    aggregate_value: mass that the prompt's last token takes from the last tokens of all segments, or of all values.
    right: whether, of the segments, the right one's two places together have the largest mass in that row (a tie is no
    hit). entropy (nats) and top1 (largest mass): how sharp that row is. kinds: the mixer of each head.
    """

    heads: tuple[Head, ...]
    kinds: tuple[str, ...]
    gather_end: np.ndarray
    gather_value: np.ndarray
    aggregate_end: np.ndarray
    aggregate_value: np.ndarray
    right: np.ndarray
    entropy: np.ndarray
    top1: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """The scores by name, for a record."""
        return {name: getattr(self, name) for name in MEASURES}

    def table(self) -> pd.DataFrame:
        """One row a head: means over the examples, each with its standard error under "... se".

        signed: whether the mixer's matrix is signed, so that masses are shares of absolute weight without D.
        """
        n = self.right.shape[1]
        table = pd.DataFrame(
            {
                "head": [str(h) for h in self.heads],
                "layer": [h.layer for h in self.heads],
                "index": [h.index for h in self.heads],
                "kind": list(self.kinds),
                "signed": [is_signed(k) for k in self.kinds],
            }
        )
        for name, values in self.arrays().items():
            table[name] = values.mean(1, dtype=float)
            table[f"{name} se"] = values.std(1, dtype=float) / np.sqrt(n)
        table["n"] = n
        return table


def is_signed(kind: str) -> bool:
    """Whether matrices of mixers of this kind are signed: all but attention's."""
    return kind != "attention"


def pattern_scores(lm: LanguageModel, task: Task, heads: object = None, progress: bool = False) -> pd.DataFrame:
    """The table of `measure_patterns`: one row a head, in the order given."""
    return measure_patterns(lm, task, heads, progress).table()


def measure_patterns(lm: LanguageModel, task: Task, heads: object = None, progress: bool = False) -> Patterns:
    """Where `heads` (default: all) look on each example of `task`; one forward pass for every 16 examples.

    Memory grows with heads x examples for the result alone: rows are taken a few heads at a time. Raises `TaskError`
    for a task without segments, before any forward pass, and `GAError` for a mixer that has no matrix or whose rows do
    not reproduce its own output.
    """
    heads = tuple(lm.head_list()) if heads is None else parse_heads(heads)
    chosen = reading.by_site(lm, heads)
    layouts = _layouts(lm, task)
    row_of = {head: i for i, head in enumerate(heads)}
    out = {name: np.zeros((len(heads), len(layouts)), bool if name == "right" else np.float32) for name in MEASURES}
    order = sorted(range(len(layouts)), key=lambda i: len(layouts[i].ids))  # like lengths together: little padding
    for start in tqdm(range(0, len(order), _BATCH), desc="patterns", unit="batch", disable=not progress):
        numbers = order[start : start + _BATCH]
        batch = Places.of([layouts[i] for i in numbers])
        encoded = reading.encode(lm, batch.inputs(lm.pad_id))

        def see(cap: Captured, batch: Places = batch, numbers: list[int] = numbers) -> None:
            family, here = FAMILIES[cap.site.kind], chosen[cap.site]
            at = batch.rows.to(cap.output.device)
            for part in reading.blocks(cap, range(len(here)), at.shape[1]):
                indices = [here[i].index for i in part]
                m = family.rows(cap, indices, at, False)
                _check(family, cap, indices, m, False, at)
                found = score_rows(m, batch, is_signed(cap.site.kind))
                into = np.ix_([row_of[here[i]] for i in part], numbers)
                for name, values in found.items():
                    out[name][into] = values.T.cpu().numpy()

        reading.visit(lm, encoded, list(chosen), see)
    return Patterns(heads, tuple(lm.site(h).kind for h in heads), **out)


@dataclass(frozen=True)
class Layout:
    """One example in tokens: its context's ids, each segment's tokens and its value's, and which segment is right."""

    ids: tuple[int, ...]
    segments: Sequence[tuple[Span, Span]]
    right: int


@dataclass(frozen=True)
class Places:
    """Where a batch of examples is looked at, padded on the right.

    Axes: b example, k segment (up to the most of any), r row, s column. ids: [b][t]. rows ``[b, r]``: the prompt's last
    token, then each segment's last token, then each value's last token. there ``[b, k]``: whether there is such a
    segment. own ``[b, 2k, s]``: the tokens that a row may gather from. right ``[b]``: the right segment.
    """

    ids: list[tuple[int, ...]]
    rows: Tensor
    there: Tensor
    own: Tensor
    right: Tensor

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> Places:
        """The places of these examples."""
        b, length = len(layouts), max(len(x.ids) for x in layouts)
        k = max(len(x.segments) for x in layouts)
        last = torch.tensor([len(x.ids) - 1 for x in layouts])
        rows = last[:, None].repeat(1, 1 + 2 * k)  # where an example has fewer segments, its last token stands in
        there, own = torch.zeros(b, k, dtype=torch.bool), torch.zeros(b, 2 * k, length, dtype=torch.bool)
        for i, x in enumerate(layouts):
            for j, (line, value) in enumerate(x.segments):
                there[i, j] = True
                for place, end in ((j, line[1] - 1), (k + j, value[1] - 1)):
                    rows[i, 1 + place] = end
                    own[i, place, max(line[0], 1) : line[1]] = True
                    own[i, place, end] = False
        return cls([x.ids for x in layouts], rows, there, own, torch.tensor([x.right for x in layouts]))

    def inputs(self, pad: int) -> dict[str, Tensor]:
        """input_ids and attention_mask ``[b, t]``."""
        length = self.own.shape[-1]
        ids = torch.tensor([[*x, *[pad] * (length - len(x))] for x in self.ids])
        mask = torch.tensor([[1] * len(x) + [0] * (length - len(x)) for x in self.ids])
        return {"input_ids": ids, "attention_mask": mask}


def score_rows(m: Tensor, places: Places, signed: bool) -> dict[str, Tensor]:
    """The scores ``[b, h]`` by name of heads whose rows at ``places.rows`` are `m` ``[b, h, r, s]``.

    signed: take absolute values and divide each row by its sum (a row of zeros stays one).
    """
    if signed:
        m = m.abs()
        total = m.sum(-1, keepdim=True)
        m = m / torch.where(total > 0, total, 1.0)
    there, own, rows = (x.to(m.device) for x in (places.there, places.own, places.rows))
    k = there.shape[1]
    weight = there.to(m)[:, None] / there.sum(1)[:, None, None]  # a mean over the segments that are there
    gathered = torch.einsum("bhks,bks->bhk", m[:, :, 1:], own.to(m))
    last = m[:, :, 0]
    read = last.gather(-1, rows[:, None, 1:].expand(-1, m.shape[1], -1)) * there.repeat(1, 2)[:, None]
    ends, values = read[..., :k], read[..., k:]
    apart = (rows[:, 1 : 1 + k] != rows[:, 1 + k :])[:, None]  # a place that is both counts once
    both = ends + values * apart
    right = places.right.to(m.device)[:, None, None].expand(-1, m.shape[1], -1)
    others = both.masked_fill(~there[:, None], 0.0).scatter(-1, right, 0.0)
    return {
        "gather_end": (gathered[..., :k] * weight).sum(-1),
        "gather_value": (gathered[..., k:] * weight).sum(-1),
        "aggregate_end": ends.sum(-1),
        "aggregate_value": values.sum(-1),
        "right": both.gather(-1, right)[..., 0] > others.amax(-1),
        "entropy": -torch.special.xlogy(last, last).sum(-1),
        "top1": last.amax(-1),
    }


def _layouts(lm: LanguageModel, task: Task) -> list[Layout]:
    for number, example in enumerate(task.examples):
        _check_segments(task, number, example)
    encoded = encode(lm.tokenizer, task)
    found = []
    for number, (example, item) in enumerate(zip(task.examples, encoded.items, strict=True)):
        segments = segment_tokens(lm.tokenizer, example, encoded.special_tokens)
        if max(line[1] for line, _ in segments) > len(item.context):
            raise TaskError(
                f"Example {number} of task {task.name!r} has its last segment tokenised together with the candidates: "
                "it has no end of its own, so put a question after the segments."
            )
        found.append(Layout(item.context, segments, [s.right for s in example.segments].index(True)))
    return found


def _check_segments(task: Task, number: int, example: Example) -> None:
    if not example.segments:
        raise TaskError(
            f"Example {number} of task {task.name!r} has no segments, so where heads should look is not known: use a "
            "task whose examples say it, such as kv or letter."
        )
    right = sum(s.right for s in example.segments)
    if right != 1 or len(example.segments) < 2:
        raise TaskError(
            f"Example {number} of task {task.name!r} has {len(example.segments)} segments of which {right} are right: "
            "patterns need two segments or more, and exactly one that is right."
        )
