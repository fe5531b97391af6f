"""What role does each head play? Verdicts from what masking it costs and from where it looks, on several seeds.

The paper's authors found their heads by looking at attention maps and name an automatic finder as future work. Here a
head is called Gather or Aggregate only if both kinds of evidence agree, by the rule below, on questions of several
seeds; what it takes to disagree stays in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pandas as pd

from .discovery import ALPHA
from .errors import TaskError
from .heads import Head

RULE = (
    "A head matters if masking it costs more log-probability of the right answer than a random head does (the "
    "median of all heads on the same question), beyond doubt: paired over questions, one-sided, 5% divided by the"
    " number of heads. A head that matters at the positions that predict the answer is called *Aggregate* if the "
    "segment that its last row weighs most is the right one more often than by chance, beyond doubt in the same "
    "sense. One that matters at the other positions is called *Gather* if its rows at the segments' ends, or at "
    "their values' ends, put at least half of their weight on the rest of the same segment. One that matters with"
    " neither pattern *matters otherwise*. The rule is applied to the questions of all seeds together; beside it "
    "stands on how many seeds apart the head gets the same role."
)
#: share of a row's weight that a Gather head puts on its own segment at least
OWN = 0.5


@dataclass(frozen=True)
class Evidence:
    """What was measured on the questions of one seed: h heads, n questions.

    aggregate, gather: [h, n] nats lost when the head is masked at the answer's positions, or everywhere else;
    exact_aggregate, exact_gather [h]: whether that was measured with the head masked (else it is a first-order
    estimate). right [h]: how often the segment that the last row weighs most is the right one; chance: how often it
    would be by guessing; aggregate_mass, gather_mass [h]: mass of the last row on the segments' ends, and from a
    segment's end to the rest of its segment, at the line's end or the value's, whichever is larger.
    """

    seed: int
    heads: tuple[Head, ...]
    aggregate: np.ndarray
    gather: np.ndarray
    exact_aggregate: np.ndarray
    exact_gather: np.ndarray
    right: np.ndarray
    chance: float
    aggregate_mass: np.ndarray
    gather_mass: np.ndarray


class AtChance(TaskError):
    """The intact model does not do the task, so no head can be found by it."""


def check_testable(correct: np.ndarray, chance: float, name: str, task: str) -> None:
    """Raise `AtChance` if the model is not above chance on the task: ranking its heads would rank noise.

    correct [n]: whether the intact model answered each question. The bound is one-sided, 5%, on the proportion.
    """
    n = len(correct)
    if n < 10:
        raise TaskError(f"{n} examples tell too little about heads: give 10 or more.")
    bound = chance + NormalDist().inv_cdf(1 - ALPHA) * np.sqrt(chance * (1 - chance) / n)
    if correct.mean() <= bound:
        raise AtChance(
            f"{name} gets {100 * correct.mean():.0f}% of {n} questions of {task} right, guessing {100 * chance:.0f}%: "
            "it does not do this task (or too few questions were asked to tell), so no head can be found by it."
        )


def judge(evidence: Evidence) -> pd.DataFrame:
    """One row a head, in the model's order: effects, their errors, masses, and the role by `RULE` on this seed."""
    h, n = evidence.aggregate.shape
    table = pd.DataFrame({"head": [str(x) for x in evidence.heads], "layer": [x.layer for x in evidence.heads]})
    table["index"] = [x.index for x in evidence.heads]
    bound = NormalDist().inv_cdf(1 - ALPHA / h)
    matters = {}
    for role, loss, mass, exact in (
        ("aggregate", evidence.aggregate, evidence.aggregate_mass, evidence.exact_aggregate),
        ("gather", evidence.gather, evidence.gather_mass, evidence.exact_gather),
    ):
        beyond = loss - np.median(loss, axis=0)  # what it costs more than a random head, question by question
        table[f"{role} loss"], table[f"{role} se"], table[f"{role} mass"] = loss.mean(1), _errors(loss), mass
        matters[role] = (beyond.mean(1) > bound * _errors(beyond)) & exact
    table["right"] = evidence.right
    table["exact"] = evidence.exact_aggregate & evidence.exact_gather
    spread = np.sqrt(evidence.chance * (1 - evidence.chance) / n)
    aggregate = matters["aggregate"] & (evidence.right > evidence.chance + bound * spread)
    gather = matters["gather"] & (evidence.gather_mass >= OWN)
    names = np.full(h, "", dtype=object)
    names[matters["aggregate"] | matters["gather"]] = "matters otherwise"
    names[gather] = "Gather"
    names[aggregate] = "Aggregate"
    names[gather & aggregate] = "Gather and Aggregate"
    table["role"] = names
    return table


def _errors(values: np.ndarray) -> np.ndarray:
    """Standard errors of the means over questions; values [h, n]."""
    return values.std(axis=1, ddof=1) / np.sqrt(values.shape[1])


@dataclass(frozen=True)
class Roles:
    """The verdicts on one model. table: one row a head, strongest first; tables: one a seed, in the model's order."""

    model: str
    tables: dict[int, pd.DataFrame]
    table: pd.DataFrame
    stability: dict[str, float]

    def heads(self, role: str, most: int = 8) -> list[str]:
        """Names of the heads with this role ("aggregate" or "gather"), strongest first, at most `most`.

        Raises `TaskError` if there are none.
        """
        if role not in ("aggregate", "gather"):
            raise TaskError(f"role={role!r} is unknown: use 'aggregate' or 'gather'.")
        rows = self.table[self.table.role.str.contains(role.capitalize())]
        if rows.empty:
            called = "an Aggregate" if role == "aggregate" else "a Gather"
            raise TaskError(
                f"By the rule no head of {self.model} is {called} head: no mask of a single head costs enough beyond "
                "doubt, or those that do look elsewhere."
            )
        return list(rows.sort_values(f"{role} loss", ascending=False)["head"][:most])


def verdicts(model: str, seeds: Sequence[Evidence]) -> Roles:
    """Apply `RULE` to the questions of all seeds together, and to each seed's apart for the count beside it."""
    tables = {e.seed: judge(e) for e in seeds}
    table = judge(_pooled(seeds))
    same = np.stack([t["role"] for t in tables.values()], axis=1) == table["role"].to_numpy()[:, None]
    table.insert(3, "seeds", [f"{k} of {len(seeds)}" for k in same.sum(1)])
    table.insert(3, "role", table.pop("role"))
    strongest = table[["aggregate loss", "gather loss"]].max(axis=1).sort_values(ascending=False, kind="stable")
    return Roles(model, tables, table.loc[strongest.index].reset_index(drop=True), _stability(list(tables.values())))


def _pooled(seeds: Sequence[Evidence]) -> Evidence:
    n = [e.aggregate.shape[1] for e in seeds]

    def mean(name: str) -> np.ndarray:
        return np.average([getattr(e, name) for e in seeds], axis=0, weights=n)

    return Evidence(
        seed=-1,
        heads=seeds[0].heads,
        aggregate=np.concatenate([e.aggregate for e in seeds], 1),
        gather=np.concatenate([e.gather for e in seeds], 1),
        exact_aggregate=np.all([e.exact_aggregate for e in seeds], axis=0),
        exact_gather=np.all([e.exact_gather for e in seeds], axis=0),
        right=mean("right"),
        chance=float(mean("chance")),
        aggregate_mass=mean("aggregate_mass"),
        gather_mass=mean("gather_mass"),
    )


def _stability(frames: Sequence[pd.DataFrame]) -> dict[str, float]:
    """How far the seeds agree on the order of the heads: mean over pairs of seeds of the rank correlation of all
    heads' losses, and of the share that two seeds' top tenths (at least 5 heads) have in common."""
    if len(frames) < 2:
        return {}
    found: dict[str, list[float]] = {}
    for role in ("aggregate", "gather"):
        for i, a in enumerate(frames):
            for b in frames[i + 1 :]:
                x, y = a[f"{role} loss"], b[f"{role} loss"]
                top = min(len(x), max(5, len(x) // 10))
                common = len(set(x.nlargest(top).index) & set(y.nlargest(top).index)) / top
                found.setdefault(f"{role}: rank correlation", []).append(float(x.rank().corr(y.rank())))
                found.setdefault(f"{role}: top {top} in common", []).append(common)
    return {name: float(np.mean(values)) for name, values in found.items()}
