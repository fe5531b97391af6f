"""How is a claim judged by thresholds? Each quantity with its interval, its bound and the side it should lie on.

*Reproduced*: every quantity clears its bound with its whole 95% interval. *Partly*: all point estimates clear, or the
effect that the claim is about is there beyond doubt and a threshold is missed. *Not*: it is absent within the interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .claims import Verdict
from .stats import Interval, bootstrap


@dataclass(frozen=True)
class Check:
    """One quantity of a rule: it should lie at or above `least`, or at or below `most`.

    there: for the quantity that the claim is about, whether its interval shows the effect at all (a threshold apart).
    """

    name: str
    value: Interval
    least: float | None = None
    most: float | None = None
    there: bool | None = None

    def clears(self, whole: bool) -> bool:
        """Whether the point estimate, or with `whole` the whole interval, is on the right side."""
        low, high = (self.value.low, self.value.high) if whole else (self.value.value, self.value.value)
        return (self.least is None or low >= self.least) and (self.most is None or high <= self.most)

    def said(self) -> str:
        """What was missed, in words."""
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return f"{self.name} is {self.value}, {bound} was asked for"


def judge(claim: str, model: str, said: str, checks: Sequence[Check], wrong: str = "") -> Verdict:
    """The verdict by the rule at the top; `wrong` says which part that is no threshold fails."""
    intervals = {c.name: c.value for c in checks}
    missed = [c for c in checks if not c.clears(whole=False)]
    doubtful = [c for c in checks if c not in missed and not c.clears(whole=True)]
    there = [c.there for c in checks if c.there is not None]
    because = said.strip()
    if wrong:
        because += f" {wrong}"
    if missed:
        because += " Missed: " + "; ".join(c.said() for c in missed) + "."
    elif doubtful:
        because += " The interval is too wide: " + "; ".join(c.said() for c in doubtful) + "."
    if not missed and not doubtful and not wrong:
        return Verdict(claim, model, "reproduced", because, intervals)
    if (not missed and not wrong) or (there and all(there)):
        return Verdict(claim, model, "partly", because, intervals)
    return Verdict(claim, model, "not", because, intervals)


def share(changed: np.ndarray, intact: np.ndarray, chance: float) -> Interval:
    """Score above chance as a share of the intact one; both [n], on the same questions."""
    return ratio(lambda c, i: (c - chance) / (i - chance), changed, intact)


def lost(changed: np.ndarray, intact: np.ndarray, chance: float) -> Interval:
    """Share of the score above chance that is lost; both [n], on the same questions."""
    return ratio(lambda c, i: (i - c) / (i - chance), changed, intact)


def ratio(statistic: Callable[[float, float], float], changed: np.ndarray, intact: np.ndarray) -> Interval:
    """A statistic of the two accuracies, with its interval over questions (paired)."""
    both = np.stack([np.asarray(changed, float), np.asarray(intact, float)])

    def of(g: np.ndarray) -> float:
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(statistic(np.float64(g[0].mean()), np.float64(g[1].mean())))

    return bootstrap(of, both)


def above_chance(correct: np.ndarray, chance: float) -> bool:
    """Whether the accuracy of [n] answers lies above chance with its whole interval."""
    return bootstrap(lambda g: g.mean() - chance, np.asarray(correct, float)).above
