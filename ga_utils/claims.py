"""Does what was measured bear the paper's claim out? Verdicts by stated rules, never by hand.

Verdicts: *reproduced*, every threshold of the rule is cleared by the whole 95% interval; *partly*, the point estimates
clear all thresholds but an interval does not, or the direction holds and a threshold is missed; *not*, the direction is
wrong or absent within the interval; *not testable*, the score that should fall is at chance to begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .stats import Interval, bootstrap, slope

KV_CLAIM = (
    "The heads that answer multiple-choice questions serve key-value retrieval too, and matter more as the "
    "number of pairs grows (Figure 4)."
)
KV_RULE = (
    "At every number of pairs where the intact model is above chance, accuracy with the heads masked lies "
    "below accuracy with random heads of the same layers masked; and the loss relative to the intact model's "
    "accuracy above chance grows with the number of pairs (its least-squares slope is above 0). Differences are "
    "paired: all conditions answer the same questions."
)


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict on one model: the word, the sentence that says why, and the intervals it rests on."""

    claim: str
    model: str
    verdict: str
    because: str
    intervals: dict[str, Interval]


@dataclass(frozen=True)
class KVPoint:
    """One number of pairs: chance, and whether each of n questions was answered right.

    intact [n], masked [n] (all heads), strongest [n] (the first head alone); random [draws, n], one row for each draw
    of as many random heads as `masked` lacks.
    """

    pairs: int
    chance: float
    intact: np.ndarray
    masked: np.ndarray
    strongest: np.ndarray
    random: np.ndarray

    def stacked(self) -> np.ndarray:
        """[4, n]: intact, masked, the mean over the random draws, and strongest."""
        return np.stack([self.intact, self.masked, self.random.mean(0), self.strongest]).astype(float)


def kv_retrieval(model: str, points: Sequence[KVPoint]) -> Verdict:
    """Apply `KV_RULE` to one model's points (claim C6)."""
    points = sorted(points, key=lambda p: p.pairs)
    testable = [p for p in points if bootstrap(lambda g, c=p.chance: g[0].mean() - c, p.stacked()).above]
    if not testable:
        return Verdict("C6", model, "not testable", "The intact model is at chance at every number of pairs.", {})
    gaps = {
        f"random minus masked, {p.pairs} pairs": bootstrap(lambda g: g[2].mean() - g[1].mean(), p.stacked())
        for p in testable
    }
    groups = [p.stacked() for p in testable]
    overall = bootstrap(lambda *gs: float(np.mean([g[2].mean() - g[1].mean() for g in gs])), *groups)
    intervals = {**gaps, "random minus masked, mean": overall}
    if len(testable) < 2:
        if not overall.above:
            return Verdict("C6", model, "not", "The masked heads cost no more than random heads do.", intervals)
        return Verdict(
            "C6", model, "partly", "Only one number of pairs is above chance, so no slope can be told.", intervals
        )
    sizes = np.array([p.pairs for p in testable])
    chances = [p.chance for p in testable]

    def rise_of(row: int) -> Interval:
        """Slope of the relative loss per 10 pairs, for that row of `stacked`."""

        def statistic(*gs: np.ndarray) -> float:
            losses = [(g[0].mean() - g[row].mean()) / (g[0].mean() - c) for g, c in zip(gs, chances, strict=True)]
            return 10 * slope(sizes, np.array(losses))

        return bootstrap(statistic, *groups)

    rise, alone = rise_of(1), rise_of(3)
    intervals["slope of the relative loss, per 10 pairs"] = rise
    intervals["the same slope with the strongest head alone masked"] = alone
    verdict, because = _judge(gaps, overall, rise)
    left = bootstrap(lambda g: g[1].mean() - chances[0], groups[0])
    if not rise.above and left.low <= 0:
        because += (
            f" Already at {sizes[0]} pairs the masked model is not above chance, so the relative loss has no room to "
            "grow"
            + (
                "; with the strongest head alone masked, as in the paper's figure, it grows."
                if alone.above
                else "; with the strongest head alone masked it cannot be told to grow either."
            )
        )
    return Verdict("C6", model, verdict, because, intervals)


def _judge(gaps: dict[str, Interval], overall: Interval, rise: Interval) -> tuple[str, str]:
    clear = [i.above for i in gaps.values()]
    if not overall.above:
        return "not", "Masking the heads costs no more than masking random heads of the same layers."
    if all(clear) and rise.above:
        return "reproduced", "The masked heads cost more than random ones at every size, and more so with more pairs."
    parts = []
    if not all(clear):
        wrong = sum(i.value <= 0 for i in gaps.values())
        parts.append(
            f"the masked heads cost more than random ones beyond doubt at {sum(clear)} of {len(clear)} sizes"
            + (f" and less at {wrong}" if wrong else "")
        )
    else:
        parts.append("the masked heads cost more than random ones at every size")
    if not rise.above:
        parts.append(
            "the relative loss shrinks with the number of pairs" if rise.high < 0 else
            "whether the relative loss grows with the number of pairs cannot be told" if rise.value > 0 else
            "the relative loss does not grow with the number of pairs"
        )  # fmt: skip
    else:
        parts.append("the relative loss grows with the number of pairs")
    return "partly", (", but ".join(parts) if not rise.above else "; ".join(parts)).capitalize() + "."
