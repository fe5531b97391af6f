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
    "A head is called *Aggregate* if masking it at the positions that predict the answer costs log-probability of"
    " the right answer beyond doubt (one-sided, 5%, divided by the number of heads) and more than 95% of all "
    "other heads' masks do, and if its last row's mass on the segments' ends or values exceeds that of 95% of all"
    " other heads. It is called *Gather* if masking it everywhere else costs in the same way, and if the mass "
    "from a segment's end or value to the rest of its own segment exceeds that of 95% of all other heads. Heads "
    "that cost so much without the pattern *matter otherwise*. The rule is applied to each seed's questions "
    "apart; a head has the role that it has on most of them. In a model of fewer than 40 heads this is a weak "
    "test of patterns: one or two heads exceed 95% of the others whatever they do."
)
#: what share of all other heads a head must exceed
ABOVE = 0.95


@dataclass(frozen=True)
class Evidence:
    """What was measured on the questions of one seed: h heads, n questions.

    aggregate, gather: [h, n] nats lost when the head is masked at the answer's positions, or everywhere else; exact
    [h]: whether gather was measured with the head masked (else it is a first-order estimate). aggregate_mass [h]: mass
    of the last row on the segments' ends or values (the larger of the two); gather_mass [h]: mass from a segment's end
    or value to the rest of its own segment (the larger of the two).
    """

    seed: int
    heads: tuple[Head, ...]
    aggregate: np.ndarray
    gather: np.ndarray
    exact: np.ndarray
    aggregate_mass: np.ndarray
    gather_mass: np.ndarray


def check_testable(correct: np.ndarray, chance: float, name: str, task: str) -> None:
    """Raise `TaskError` if the model is not above chance on the task: ranking its heads would rank noise.

    correct [n]: whether the intact model answered each question. The bound is one-sided, 5%, on the proportion.
    """
    n = len(correct)
    if n < 10:
        raise TaskError(f"{n} examples tell too little about heads: give 10 or more.")
    bound = chance + NormalDist().inv_cdf(1 - ALPHA) * np.sqrt(chance * (1 - chance) / n)
    if correct.mean() <= bound:
        raise TaskError(
            f"{name} gets {100 * correct.mean():.0f}% of {n} questions of {task} right, guessing {100 * chance:.0f}%: "
            "it does not do this task (or too few questions were asked to tell), so no head can be found by it."
        )


def judge(evidence: Evidence) -> pd.DataFrame:
    """One row a head, in the model's order: effects, their errors, masses, and the role by `RULE` on this seed."""
    h, n = evidence.aggregate.shape
    table = pd.DataFrame({"head": [str(x) for x in evidence.heads], "layer": [x.layer for x in evidence.heads]})
    table["index"] = [x.index for x in evidence.heads]
    bound = NormalDist().inv_cdf(1 - ALPHA / h)
    held = {}
    for role, loss, mass in (
        ("aggregate", evidence.aggregate, evidence.aggregate_mass),
        ("gather", evidence.gather, evidence.gather_mass),
    ):
        mean, se = loss.mean(1), loss.std(axis=1, ddof=1) / np.sqrt(n)
        z = mean / np.maximum(se, 1e-12)
        table[f"{role} loss"], table[f"{role} se"], table[f"{role} mass"] = mean, se, mass
        causes = (z > bound) & above_others(mean)
        if role == "gather":
            causes &= evidence.exact
        held[role] = causes, causes & above_others(mass)
    table["gather exact"] = evidence.exact
    names = np.full(h, "", dtype=object)
    names[held["aggregate"][0] | held["gather"][0]] = "matters otherwise"
    names[held["gather"][1]] = "Gather"
    names[held["aggregate"][1]] = "Aggregate"
    names[held["gather"][1] & held["aggregate"][1]] = "Gather and Aggregate"
    table["role"] = names
    return table


def above_others(values: np.ndarray) -> np.ndarray:
    """For each of [h] values, whether it exceeds `ABOVE` of all the others: under 21 heads, every other."""
    values = np.asarray(values, float)
    if len(values) < 2:
        return np.ones(len(values), bool)
    below = (values[None, :] < values[:, None]).sum(1)
    return below >= ABOVE * (len(values) - 1)


@dataclass(frozen=True)
class Roles:
    """The verdicts on one model. table: one row a head, strongest first; tables: one a seed, in the model's order."""

    model: str
    tables: dict[int, pd.DataFrame]
    table: pd.DataFrame
    stability: dict[str, float]

    def heads(self, role: str, most: int = 8) -> list[str]:
        """Names of the heads with this role ("aggregate" or "gather") on most seeds, strongest first.

        Raises `TaskError` if there are none.
        """
        if role not in ("aggregate", "gather"):
            raise TaskError(f"role={role!r} is unknown: use 'aggregate' or 'gather'.")
        rows = self.table[self.table.role.str.contains(role.capitalize())]
        if rows.empty:
            raise TaskError(f"No head of {self.model} is a {role.capitalize()} head by the rule on most seeds.")
        return list(rows.sort_values(f"{role} loss", ascending=False)["head"][:most])


def combine(model: str, tables: dict[int, pd.DataFrame]) -> Roles:
    """Put the seeds' verdicts together: mean effects, pooled errors, the role that most seeds agree on."""
    frames = list(tables.values())
    table = frames[0][["head", "layer", "index"]].copy()
    for name in ("aggregate loss", "aggregate mass", "gather loss", "gather mass"):
        table[name] = np.mean([f[name] for f in frames], axis=0)
    for name in ("aggregate se", "gather se"):
        table[name] = np.sqrt(np.sum([f[name] ** 2 for f in frames], axis=0)) / len(frames)
    table["gather exact"] = np.all([f["gather exact"] for f in frames], axis=0)
    votes = np.stack([f["role"] for f in frames], axis=1)
    roles, shares = zip(*(_most(row) for row in votes), strict=True)
    table["role"], table["seeds"] = roles, [f"{s} of {len(frames)}" for s in shares]
    table["loss"] = table[["aggregate loss", "gather loss"]].max(axis=1)
    table = table.sort_values("loss", ascending=False, ignore_index=True)
    columns = "head layer index role seeds loss".split()
    rest = [c for c in table.columns if c not in columns]
    return Roles(model, tables, table[columns + rest], _stability(frames))


def _most(votes: Sequence[str]) -> tuple[str, int]:
    """The role held on more than half of the seeds and on how many; none otherwise (the count is then of the head's
    most frequent role)."""
    counted = {v: list(votes).count(v) for v in votes}
    role = max(counted, key=lambda v: (counted[v], v))
    if 2 * counted[role] > len(votes):
        return role, counted[role]
    return "", max((c for v, c in counted.items() if v), default=0)


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
