"""Does one head feed another, and by what: the other's queries, its keys or its values?

Path patching (Wang et al. 2022, section 3.1): a sender head's output is replaced by its output on the swapped prompt
(`counterfactual.py`), while all other heads up to the receiver are held at what they gave on the intact prompt. What
the receiver would then read is recorded; the model runs once more on the intact prompt with only that put in the
receiver's place, or only its queries, its keys or its values; and the change of the logit difference is the effect of
the path. An Aggregate head that takes from Gather heads *where* to look shows it in its keys, one that passes on *what*
they wrote in its values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .caches import Forward
from .counterfactual import Pairs, _two_candidates, check_pairs
from .errors import GAError, HeadError, ModelError
from .head_inputs import parts_of, reading
from .heads import Head, parse_heads
from .interactions import at_least_two, mean_se
from .language_model import LanguageModel
from .masking import capture_inputs
from .measure import check_fits
from .patches import Edit, edited, find_mlps, held, kept, put
from .positions import Positions, Where
from .sites import HeadSite
from .tasks.tokens import encode

#: tokens in one batch, of which every head's output is kept
TOKENS_PER_BATCH = {"cpu": 4_096}  # other devices: 16,384


def path_effects(
    lm: LanguageModel,
    pairs: Pairs,
    senders: object,
    receiver: object,
    parts: Sequence[str] | None = None,
    positions: tuple[Positions, Positions] = ("all", "answer"),
    fill: str = "swapped",
    freeze_mlps: bool = False,
    together: bool = False,
) -> pd.DataFrame:
    """What of each sender's effect on the answer goes straight to `receiver`, in all and by each part that it reads.

    One row for each sender and path: effect is the mean loss of the logit difference (nats; positive: the path speaks
    for the answer), se its standard error (paired over examples). The paths are

    - "total": the sender replaced and everything after it recomputed, whatever head that goes through;
    - "all": the receiver's output as it would be if the sender's change reached only it;
    - "q", "k", "v" (attention) or "x", "B", "C", "dt", "z" (Mamba-2, Llamba): the same, where the receiver reads the
      change only in that part. Parts need not add up to "all": a changed pattern times changed values is in "all" only.

    senders: heads in layers below the receiver's, adjacent or not, each on its own; with `together` all at once, in one
    set of rows. parts: some of those above; None means all. positions: where the senders' outputs are replaced, and
    where the receiver's output is; for what these mean see `masking`. fill: "swapped" puts the sender's output on the
    swapped prompt in place, position by position, "zero" nothing. freeze_mlps: MLPs (and experts) between sender and
    receiver are recomputed by default, as in Wang et al., so that what they make of the sender's change is part of the
    path; True holds them at their intact outputs too, and the path is the residual stream alone.

    Exact for heads that share keys and values: only the receiver's own output changes. Mamba-2's norm couples heads:
    there, a change of a group's B or C also reaches the receiver's output through the group's other heads and the norm.

    Raises `HeadError` for heads that do not exist, a sender not below the receiver or parts that it lacks, `ModelError`
    for a receiver whose parts cannot be told apart, `TaskError` for prompts that are no pairs.
    """
    target = _one(lm, receiver)
    site = lm.site(target)
    chosen = parts_of(site, parts)
    groups = _groups(lm, senders, target, together)
    if fill not in ("swapped", "zero"):
        raise GAError(f"fill={fill!r} is unknown: use 'swapped' or 'zero'.")
    if not isinstance(positions, tuple) or len(positions) != 2:
        raise HeadError(f"positions={positions!r:.60} must be a pair: for the senders and for the receiver.")
    if lm.model.training or any(s.mixer.training for s in lm.sites):
        raise ModelError("The model is in training mode, where dropout changes scores: call lm.model.eval() first.")
    mlps = find_mlps(lm, site.layer) if freeze_mlps else []
    both = Pairs(_two_candidates(pairs, "task"), _two_candidates(pairs, "swapped"), pairs.places)
    check_pairs(lm, both)
    at_least_two(len(pairs))
    check_fits(lm, both.task)

    patching = _Patching(lm, target, chosen, positions, fill, mlps)
    differences: dict[tuple[int, str], np.ndarray] = {}  # (group, path), and (-1, "intact"), to [n]
    for batch in _batches(lm, both):
        for key, values in patching.run(batch, groups).items():
            total = differences.setdefault(key, np.zeros(len(pairs)))
            np.add.at(total, [row.example for row in batch], values)
    intact, rows = differences[-1, "intact"], []
    for (number, path), values in differences.items():
        if number >= 0:
            effect, se = mean_se(intact - values)
            name = " ".join(map(str, groups[number]))
            rows.append((number, {"sender": name, "receiver": str(target), "path": path, "effect": effect, "se": se}))
    return pd.DataFrame([row for _, row in sorted(rows, key=lambda r: r[0])])


def _one(lm: LanguageModel, receiver: object) -> Head:
    heads = parse_heads(receiver)
    if len(heads) != 1:
        raise HeadError(f"The receiver must be one head, not {len(heads)}: ask for each in turn.")
    return lm.site(heads[0]).head(heads[0].index)


def _groups(lm: LanguageModel, senders: object, target: Head, together: bool) -> list[tuple[Head, ...]]:
    heads = tuple(dict.fromkeys(lm.site(h).head(h.index) for h in parse_heads(senders)))
    if not heads:
        raise HeadError("No sender was named: give names such as 'L16H20'.")
    for head in heads:
        if head.layer >= target.layer:
            raise HeadError(
                f"{head} cannot send to {target}: a sender must lie in an earlier layer than the receiver, whose layer "
                f"is {target.layer}."
            )
    return [heads] if together else [(h,) for h in heads]


@dataclass(frozen=True)
class _Row:
    """One sequence: an example's prompt and the tokens of a candidate but its last, and what is read from it.

    reads: (candidate, position, token); candidate 0 is the answer, 1 the swapped prompt's.
    """

    example: int
    context: int
    tokens: tuple[int, ...]
    swapped: tuple[int, ...]
    reads: tuple[tuple[int, int, int], ...]


def _batches(lm: LanguageModel, pairs: Pairs) -> Iterator[list[_Row]]:
    """Rows of like length together; candidates that differ only in their last token share a row."""
    rows = []
    items = zip(encode(lm.tokenizer, pairs.task).items, encode(lm.tokenizer, pairs.swapped).items, strict=True)
    for number, (a, b) in enumerate(items):
        n = len(a.context)
        for start in dict.fromkeys(c[:-1] for c in a.continuations):
            reads = [
                (i, n - 1 + d, token)
                for i, c in enumerate(a.continuations)
                if c[:-1] == start
                for d, token in enumerate(c)
            ]
            rows.append(_Row(number, n, a.context + start, b.context + start, tuple(reads)))
    rows.sort(key=lambda r: (len(r.tokens), r.example))
    most, batch = TOKENS_PER_BATCH.get(lm.device.type, 16_384), []
    for row in rows:
        if batch and (len(batch) + 1) * len(row.tokens) > most:
            yield batch
            batch = []
        batch.append(row)
    yield batch


class _Patching:
    """The runs on one batch: swapped, intact, and for each group of senders its total, its path and the parts."""

    def __init__(self, lm: LanguageModel, target: Head, parts: Sequence[str], positions, fill: str, mlps):
        self.lm, self.target, self.parts, self.fill, self.mlps = lm, target, parts, fill, mlps
        self.site = lm.site(target)
        self.before = [s for s in lm.sites if s.layer <= self.site.layer]
        self.forward = Forward(lm)
        self.where = [Where(lm, p, indexed=True) for p in positions]

    def run(self, batch: list[_Row], groups: list[tuple[Head, ...]]) -> dict[tuple[int, str], np.ndarray]:
        """Each row's part of the logit difference, ``[b]``, under each (group, path)."""
        other: dict[HeadSite, Tensor] = {}
        if self.fill == "swapped":
            with capture_inputs(list({self.lm.site(h): 0 for g in groups for h in g})) as other:
                self._ask(batch, swapped=True)
        with capture_inputs(self.before) as intact, self._located(), kept(self.mlps) as outputs:
            result = {(-1, "intact"): self._ask(batch)}
        sent, received = (w.mask for w in self.where)
        channels = self.site.channels(self.target.index)
        for number, group in enumerate(groups):
            patches = self._patches(group, other, sent)
            with edited(patches):
                result[number, "total"] = self._ask(batch)
            # the path: all heads but the receiver as in the intact run, and the senders patched on top of that
            frozen = {s: _path(intact[s], patches.get(s)) for s in self.before if s != self.site}
            with reading(self.site, self.target) as reader, edited(frozen), held(outputs):
                with capture_inputs([self.site]) as reached:
                    self._ask(batch)
                if reader.calls != 1:
                    raise ModelError(
                        f"{type(self.site.mixer).__name__} in layer {self.site.layer} ran {reader.calls} times in one "
                        "forward pass where the parts that its heads read are computed, so they cannot be told."
                    )
            taken = dict(reader.taken)
            paste = _paste(intact[self.site], channels, received)
            if self.site.kind == "attention":  # may read more than its parts, such as an output gate
                with edited({self.site: lambda x, new=reached[self.site], paste=paste: paste(new)}):
                    result[number, "all"] = self._ask(batch)
            with reading(self.site, self.target) as reader, edited({self.site: paste}):
                if self.site.kind != "attention":  # a norm over heads would bring in what the others read
                    reader.given = taken
                    result[number, "all"] = self._ask(batch)
                for part in self.parts:
                    reader.given = {part: taken[part]}
                    result[number, part] = self._ask(batch)
        return result

    def _ask(self, batch: list[_Row], swapped: bool = False) -> np.ndarray:
        most = max(len(r.reads) for r in batch)
        positions = [[p for _, p, _ in r.reads] + [r.reads[0][1]] * (most - len(r.reads)) for r in batch]
        tokens = [r.swapped if swapped else r.tokens for r in batch]
        logits, _ = self.forward(tokens, positions, [r.example for r in batch], [r.context for r in batch])
        logp = logits.double().log_softmax(-1)
        asked = torch.tensor([[t for *_, t in r.reads] + [0] * (most - len(r.reads)) for r in batch])
        values = logp.gather(-1, asked.to(logp.device)[..., None])[..., 0].cpu().numpy()
        signs = np.array([[1 - 2 * c for c, *_ in r.reads] + [0] * (most - len(r.reads)) for r in batch])
        if not np.isfinite(values[signs != 0]).all():
            raise GAError("The model's log-probabilities of the answers are not finite; check its dtype.")
        return np.where(signs == 0, 0.0, values * signs).sum(1)

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        """Work out where positions are: each `Where.mask` is then that of the forward call inside the block."""
        backbone = self.lm.backbone
        handles = [backbone.register_forward_pre_hook(w.before_forward, with_kwargs=True) for w in self.where]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _patches(self, group: Sequence[Head], other: dict[HeadSite, Tensor], sent: Tensor | None) -> dict:
        """For each site of the group, what replaces the senders' outputs in the projection's input."""
        channels: dict[HeadSite, list[slice]] = {}
        for head in group:
            site = self.lm.site(head)
            channels.setdefault(site, []).append(site.channels(head.index))
        return {
            s: lambda x, s=s, cs=cs: put(x, torch.zeros_like(x) if self.fill == "zero" else other[s], cs, sent)
            for s, cs in channels.items()
        }


def _path(intact: Tensor, patch: Edit | None) -> Edit:
    return lambda x: intact if patch is None else patch(intact)


def _paste(intact: Tensor, channels: slice, mask: Tensor | None) -> Edit:
    return lambda x: put(intact, x, [channels], mask)
