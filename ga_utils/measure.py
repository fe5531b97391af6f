"""Which measurements make a figure? Each is one record, found in the store or measured once.

This is where models, tasks and masks meet the store: everything that a number depends on goes into the record's key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .codehash import code_hash
from .errors import GAError, TaskError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .masking import mask_heads
from .records import Record, Store
from .registry import find_spec
from .scoring import score
from .sites import HeadSite
from .sweep import Sweep, sweep_heads
from .tasks.base import Task
from .tasks.tokens import encode

#: examples in one record of a sweep: a killed run loses at most this many
SHARD = 16


@dataclass(frozen=True)
class Condition:
    """What is done to the model: a label, and the heads that are masked, where and with what."""

    label: str
    heads: tuple[Head, ...] = ()
    positions: str = "all"
    fill: str = "zero"

    def key(self) -> dict[str, object]:
        """Plain values for a record's key; the label is not among them, since it changes nothing that is measured."""
        if not self.heads:
            return {"heads": []}
        return {"heads": sorted(map(str, self.heads)), "positions": self.positions, "fill": self.fill}


def score_under(store: Store, lm: LanguageModel, task: Task, condition: Condition) -> Record:
    """Accuracy and log-probabilities of `lm` on `task` under `condition`, as a record (see `Scores`)."""
    for head in condition.heads:
        lm.site(head)
    key = {
        "kind": "score",
        "model": lm.describe(),
        "task": task.key(),
        "condition": condition.key(),
        "code": _code("scoring", "masking"),
    }
    meta: dict[str, object] = {"model": lm.name, "source": lm.source, "revision": lm.revision}

    def run():
        with mask_heads(lm, condition.heads, condition.positions, condition.fill):
            result = score(lm, task)
        meta.update(calls=result.calls, tokens=result.tokens)
        return result.to_values(), result.arrays()

    return store.compute(key, run, meta)


def sweep_under(
    store: Store,
    lm: LanguageModel,
    task: Task,
    positions: str = "answer",
    scored: str = "answer",
    progress: bool = True,
    heads: Sequence[Head] | None = None,
    records: list[Record] | None = None,
) -> Sweep:
    """The sweep over `heads` (default: all) of `lm` on `task`, kept as one record for each `SHARD` examples.

    The records are added to `records` where a list is given.
    """
    from tqdm import tqdm

    every = heads is None
    heads = tuple(lm.head_list() if heads is None else heads)
    parts: list[Sweep] = []
    starts = range(0, len(task.examples), SHARD)
    for start in tqdm(starts, desc=f"sweep of {len(heads)} heads", unit="shard", disable=not progress):
        shard = _shard(task, start)
        key = {
            "kind": "sweep",
            "model": lm.describe(),
            "task": shard.key(),
            "positions": positions,
            "scored": scored,
            "heads": "all" if every else [str(h) for h in heads],
            "code": _code("sweep"),
        }
        meta: dict[str, object] = {"model": lm.name, "source": lm.source, "revision": lm.revision}

        def run(shard=shard, meta=meta):
            result = sweep_heads(lm, shard, None if every else heads, positions=positions, scored=scored)
            meta.update(calls=result.calls, tokens=result.tokens, shared=result.shared)
            return {"heads": [str(h) for h in result.heads], "shared": result.shared}, result.arrays()

        record = store.compute(key, run, meta)
        if records is not None:
            records.append(record)
        parts.append(
            Sweep(
                heads,
                *(record.arrays[n] for n in ("intact_correct", "intact_logprob", "correct", "logprob")),
                scored,
                record.values["shared"],
                0,
                0,
            )  # fmt: skip
        )
    return Sweep(
        heads,
        np.concatenate([p.intact_correct for p in parts]),
        np.concatenate([p.intact_logprob for p in parts]),
        np.concatenate([p.correct for p in parts], axis=1),
        np.concatenate([p.logprob for p in parts], axis=1),
        scored,
        all(p.shared for p in parts),
        0,
        0,
    )


def _shard(task: Task, start: int) -> Task:
    """Examples `start` to `start + SHARD`; its settings do not tell how long the task is, so a longer one shares it."""
    examples = task.examples[start : start + SHARD]
    settings = {**task.settings, "n_examples": len(examples), "first": start}
    return dataclasses.replace(task, examples=examples, settings=settings)


def random_draws(lm: LanguageModel, heads: tuple[Head, ...], n: int, seed: int = 0) -> list[tuple[Head, ...]]:
    """Up to `n` different draws of as many random heads as `heads`, from the other heads of the same layers.

    The same layers, mixer for mixer, because a head's depth alone decides much of what its loss does. Small layers
    allow fewer different draws than asked for; then all of them are returned. Raises `GAError` if a layer has too
    few others.
    """
    rng = np.random.default_rng([seed, 20_250_418])
    pools: list[tuple[HeadSite, list[int], int]] = []
    for site in dict.fromkeys(lm.site(h) for h in heads):
        taken = {h.index for h in heads if lm.site(h) == site}
        others = [i for i in range(site.n_heads) if i not in taken]
        if len(others) < len(taken):
            raise GAError(
                f"Layer {site.layer} has {site.n_heads} heads, of which {len(taken)} are masked: too few others "
                "are left to draw random ones from."
            )
        pools.append((site, others, len(taken)))
    possible = math.prod(math.comb(len(others), k) for _, others, k in pools)
    draws: dict[tuple[Head, ...], None] = {}
    while len(draws) < min(n, possible):
        drawn = [site.head(int(i)) for site, others, k in pools for i in sorted(rng.choice(others, k, replace=False))]
        draws[tuple(drawn)] = None
    return list(draws)


def leave_controls(lm: LanguageModel, heads: Sequence[Head]) -> tuple[Head, ...]:
    """The first of `heads` such that no layer loses more than half of its heads: so many random ones can be drawn."""
    kept: list[Head] = []
    for head in heads:
        site = lm.site(head)
        if 2 * (1 + sum(lm.site(h) == site for h in kept)) <= site.n_heads:
            kept.append(head)
    return tuple(kept)


def known_heads(lm: LanguageModel, role: str = "aggregate") -> tuple[Head, ...]:
    """The heads that the registry names for this model. Raises `GAError` if it names none."""
    spec = find_spec(lm.source)  # not by its label: a folder may carry the name of a published model
    names = getattr(spec, role) if spec else ()
    if not names:
        raise GAError(
            f"The registry names no {role} heads for {lm.name}: use heads='sweep' to find them, or name them yourself "
            "('L17H24')."
        )
    return named_heads(lm, list(names))


def named_heads(lm: LanguageModel, heads: object) -> tuple[Head, ...]:
    """The heads that `heads` names, each once, under the short name where it has one.

    Raises `HeadError` for one that does not exist, and `GAError` if none is named.
    """
    found = dict.fromkeys(lm.site(h).head(h.index) for h in parse_heads(heads))
    if not found:
        raise GAError("heads names no head: give names such as 'L17H24'.")
    return tuple(found)


def check_fits(lm: LanguageModel, task: Task) -> None:
    """Raise `TaskError`, before any forward, if an example is longer than the model's context."""
    longest = max(item.longest for item in encode(lm.tokenizer, task).items)
    if lm.max_length is not None and longest > lm.max_length:
        raise TaskError(
            f"{task.name} with settings {task.settings} needs {longest} tokens, but {lm.name} takes "
            f"{lm.max_length}: use shorter questions (fewer pairs, another task)."
        )


@functools.cache
def _code(*modules: str) -> str:
    return code_hash(*modules)
