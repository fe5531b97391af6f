"""How sure is a number? Standard errors, and intervals of differences on the same examples.

Conditions that share their examples are compared in pairs: the examples are resampled, not the two accuracies apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

#: resamples of a bootstrap, and the seed that makes an interval the same in every run
RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True)
class Interval:
    """A point estimate with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def above(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.low > 0


def stderr(values: np.ndarray) -> float:
    """Standard error of the mean of independent values [n]; for 0/1 values that of a proportion."""
    values = np.asarray(values, float)
    return float(values.std() / np.sqrt(len(values)))


def bootstrap(statistic: Callable[..., float], *groups: np.ndarray) -> Interval:
    """95% percentile interval of ``statistic(*groups)`` when the examples of each group are drawn again.

    groups: arrays [..., n] whose last axis is the examples; the arrays of one group are drawn together where they are
    stacked in one array, apart from other groups (other task sizes have other examples). A statistic that is not
    finite in some resamples takes its interval from the others.
    """
    rng = np.random.default_rng(SEED)
    draws = []
    for _ in range(RESAMPLES):
        again = [g[..., rng.integers(0, g.shape[-1], g.shape[-1])] for g in groups]
        draws.append(statistic(*again))
    draws = np.asarray(draws, float)
    low, high = np.percentile(draws[np.isfinite(draws)], [2.5, 97.5])
    return Interval(float(statistic(*groups)), float(low), float(high))


def paired_gain(before: np.ndarray, after: np.ndarray) -> Interval:
    """Mean of `after` less mean of `before`, with its interval; both [n], on the same examples, drawn together."""
    return bootstrap(lambda g: float(g[1].mean() - g[0].mean()), np.stack([before, after]).astype(float))


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Least-squares slope of y over x."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())
