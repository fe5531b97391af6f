"""Which entries of their matrices do Gather and Aggregate heads need, by their theory? And what is left of the scores.

A Gather head sums up a segment (an option, a pair) at the segment's end, an Aggregate head reads those ends at the
prompt's last token (the paper, section 4). All else that these heads read can then be cut (`entries`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import mixers
from .codehash import code_hash
from .entries import Reads, only_entries
from .errors import GAError, TaskError
from .heads import Head
from .language_model import LanguageModel
from .masking import mask_heads
from .records import Record, Store
from .scoring import score
from .tasks import Task
from .tasks.tokens import encode, segment_tokens

#: which ends of segments the last token may read
READ = ("all", "right", "wrong")
ENDS = ("either", "line", "value")


@dataclass(frozen=True)
class Theory:
    """What Gather and Aggregate heads may read.

    Gather heads, at a segment's end: the tokens of that segment. Aggregate heads, at the prompt's last token and at
    those of the answer after it: the segments' ends; with read="right" that of the right segment alone (an oracle: it
    knows the answer), with "wrong" that of one other alone, drawn from `seed`. ends: which token is a segment's end:
    the last of its line, of its value, or either. Rows that are not named stay whole, or with `strict` give nothing.
    """

    gather: tuple[Head, ...] = ()
    aggregate: tuple[Head, ...] = ()
    ends: str = "either"
    read: str = "all"
    renormalise: bool = False
    strict: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ends not in ENDS or self.read not in READ:
            raise GAError(f"ends must be one of {', '.join(ENDS)} and read one of {', '.join(READ)}.")

    def key(self) -> dict[str, object]:
        """Plain values for a record's key; the seed only where something is drawn."""
        key = {k: getattr(self, k) for k in ("ends", "read", "renormalise", "strict")}
        key |= {role: sorted(map(str, getattr(self, role))) for role in ("gather", "aggregate")}
        return key | ({"seed": self.seed} if self.read == "wrong" else {})


def theory(lm: LanguageModel, task: Task, rule: Theory) -> dict[Head, list[Reads]]:
    """What each head of `rule` may read in each example of `task`; a head with both roles may read for both.

    Raises `TaskError` for a task whose examples have no segments: there is nothing to gather.
    """
    encoded = encode(lm.tokenizer, task)
    heads = tuple(dict.fromkeys((*rule.gather, *rule.aggregate)))
    found: dict[Head, list[Reads]] = {h: [] for h in heads}
    for number, (example, item) in enumerate(zip(task.examples, encoded.items, strict=True)):
        if len(example.segments) < 2:
            raise TaskError(f"Examples of task {task.name!r} have no segments, so theory allows no entries there.")
        segments = segment_tokens(lm.tokenizer, example, encoded.special_tokens)
        ends = [_ends(line, value, rule.ends) for line, value in segments]
        rows = {end: range(line[0], end + 1) for (line, _), here in zip(segments, ends, strict=True) for end in here}
        right = [s.right for s in example.segments].index(True)
        chosen = range(len(segments))
        if rule.read == "right":
            chosen = [right]
        elif rule.read == "wrong":
            rng = np.random.default_rng([rule.seed, number, 20_250_418])
            chosen = [int(rng.choice([i for i in chosen if i != right]))]
        answer = sorted({end for i in chosen for end in ends[i] if end < len(item.context)})
        for head in heads:
            gathers, fetches = head in rule.gather, head in rule.aggregate
            found[head].append(Reads(rows if gathers else {}, answer if fetches else None))
    return found


def _ends(line: tuple[int, int], value: tuple[int, int], which: str) -> list[int]:
    return sorted({"line": {line[1] - 1}, "value": {value[1] - 1}}.get(which, {line[1] - 1, value[1] - 1}))


def score_theory(store: Store, lm: LanguageModel, task: Task, off: Sequence[Head], rule: Theory | None) -> Record:
    """Answers of `lm` on `task` with heads `off` at all positions, and those of `rule` reading only what it allows."""
    key = {
        "kind": "score",
        "model": lm.describe(),
        "task": task.key(),
        "condition": {"heads": sorted(map(str, off)), "theory": rule.key() if rule else None},
        "code": code_hash("scoring", "masking", "entries", "theory"),
    }

    def run():
        with contextlib.ExitStack() as stack:
            if off:
                stack.enter_context(mask_heads(lm, off))
            if rule:
                stack.enter_context(only_entries(lm, theory(lm, task, rule), rule.renormalise, rule.strict))
            result = score(lm, task, cached=rule is None)
        return result.to_values(), result.arrays()

    return store.compute(key, run, {"model": lm.name, "source": lm.source, "revision": lm.revision})


def allowed_share(store: Store, lm: LanguageModel, task: Task, rule: Theory) -> Record:
    """How much of the heads' weight the theory allows already: arrays "gather" ``[h, n]`` and "aggregate" ``[h, n]``.

    Shares of the sum of |M| without D, means over the rows that are named; heads in the order of `rule`. Near 1, the
    cut takes little away.
    """
    key = {
        "kind": "allowed_share",
        "model": lm.describe(),
        "task": task.key(),
        "theory": rule.key(),
        "code": code_hash("theory"),
    }

    def run():
        encoded = encode(lm.tokenizer, task)
        shares = {"gather": [], "aggregate": []}
        for role, heads in (("gather", rule.gather), ("aggregate", rule.aggregate)):
            reads = theory(lm, task, rule) if heads else {}
            for number, item in enumerate(encoded.items if heads else ()):
                one = reads[heads[0]][number]
                rows = dict(one.rows) if role == "gather" else {len(item.context) - 1: one.answer}
                m = mixers.rows(lm, {"input_ids": [item.context]}, heads, [list(rows)], with_d=False)
                keep = torch.zeros(len(rows), len(item.context), dtype=torch.bool)
                for i, allowed in enumerate(rows.values()):
                    keep[i, list(allowed)] = True
                share = [(w * keep).sum(-1) / w.sum(-1).clamp_min(1e-30) for w in (m[h][0].abs().cpu() for h in heads)]
                shares[role].append([float(s.mean()) for s in share])
        return {}, {role: np.array(found).reshape(len(found), -1).T for role, found in shares.items()}

    return store.compute(key, run, {"model": lm.name, "source": lm.source, "revision": lm.revision})
