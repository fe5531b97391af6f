"""In how few heads does retrieval sit? Scores with the top heads removed, or kept alone, against random ones.

Heads are ranked on one set of questions (see `roles`) and removed on another. The same curve answers two questions of
the paper: how few heads carry retrieval (its central claim), and how much of the mixers' output has to go before half
of the score is lost, which can be compared between Transformers, SSMs and hybrids whose heads differ in width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from .errors import GAError
from .heads import Head
from .language_model import LanguageModel
from .measure import Condition, score_under
from .records import Record, Store
from .stats import Interval, bootstrap
from .tasks import Task

#: the share of the heads at which the claim is judged
SHARE = 0.05


@dataclass(frozen=True)
class Curve:
    """What was measured on one model; n examples.

    sizes: numbers of heads; removed, kept: {size: correct [n]} with the most important heads removed, or with all other
    heads of their layers removed; random: {size: correct [draws, n]} with as many random heads removed; random_kept:
    the same for keeping. width: {size: share of the mixers' output width that the removed heads hold}.
    """

    model: str
    title: str
    heads: tuple[Head, ...]
    n_heads: int
    chance: float
    intact: np.ndarray
    removed: dict[int, np.ndarray]
    kept: dict[int, np.ndarray]
    random: dict[int, np.ndarray]
    random_kept: dict[int, np.ndarray]
    width: dict[int, float]
    records: list[Record]

    @property
    def under_share(self) -> int | None:
        """The largest measured number of heads below `SHARE` of all; None if not even one head is so few."""
        fit = [k for k in self.removed if k < SHARE * self.n_heads]
        return max(fit) if fit else None

    def table(self) -> pd.DataFrame:
        """One row a series and size (random: a draw), as `figures_heads.concentration` draws it."""
        rows = []

        def add(series: str, size: int, draw: int, correct: np.ndarray) -> None:
            rows.append(
                {
                    "model": self.model, "series": series, "heads": size, "share": 100 * size / self.n_heads,
                    "draw": draw,
                    "accuracy": float(correct.mean()), "stderr": float(correct.std() / np.sqrt(len(correct))),
                    "chance": self.chance,
                }
            )  # fmt: skip

        add("intact", 0, 0, self.intact)
        for name, found in (("removed", self.removed), ("kept", self.kept)):
            for k, correct in found.items():
                add(name, k, 0, correct)
        for name, drawn in (("random", self.random), ("random kept", self.random_kept)):
            for k, draws in drawn.items():
                for number, correct in enumerate(draws):
                    add(name, k, number, correct)
        return pd.DataFrame(rows)

    def half(self) -> float | None:
        """The smallest measured share of the mixers' output width whose removal loses half of the score above
        chance; None if none does."""
        for k in sorted(self.removed):
            if self.removed[k].mean() - self.chance <= 0.5 * (self.intact.mean() - self.chance):
                return self.width[k]
        return None

    def share(self, correct: np.ndarray) -> Interval:
        """Score above chance as a share of the intact one, with its interval over examples (paired).

        correct: [n], or [draws, n], whose mean over draws is taken.
        """
        both = np.stack([self.intact.astype(float), np.atleast_2d(correct).astype(float).mean(0)])
        return bootstrap(lambda g: (g[1].mean() - self.chance) / (g[0].mean() - self.chance), both)


def sizes_for(n_heads: int, most: float = 0.1) -> list[int]:
    """Numbers of heads to remove: the last below `SHARE` of all, and 1, 2, 4, ... up to `most` of all (at least 4).

    Powers of two within a third of that last number are left out.
    """
    last = int(np.ceil(SHARE * n_heads)) - 1
    top = min(max(4, int(most * n_heads)), n_heads - 1)
    found = {2**i for i in range(20) if 2**i <= top and not (last > 4 and 0.75 < 2**i / last < 1.34)}
    return sorted(found | ({last} if last >= 1 else set()))


def measure(
    store: Store,
    lm: LanguageModel,
    task: Task,
    ranked: Sequence[Head],
    sizes: Sequence[int] | None = None,
    keep: Sequence[int] = (1, 4),
    n_random: int = 2,
    positions: str = "all",
    seed: int = 0,
    progress: bool = True,
) -> Curve:
    """Measure one model's curve on `task`; `ranked` are its heads, most important first, found on other questions.

    Random heads are drawn from all heads that are not among those they are compared with. Raises `GAError` for sizes
    that cannot be had.
    """
    n = len(lm.head_list())
    sizes = sizes_for(n) if sizes is None else sorted(sizes)
    if not sizes or sizes[0] < 1 or sizes[-1] > len(ranked) or sizes[-1] >= n:
        raise GAError(
            f"sizes={list(sizes)} must lie between 1 and {min(len(ranked), n - 1)}: {len(ranked)} heads are ranked."
        )
    keep = [k for k in keep if k <= len(ranked)]
    names = [("removed", k, 0, tuple(ranked[:k])) for k in sizes]
    names += [("random", k, d, heads) for k in sizes for d, heads in enumerate(_draws(lm, ranked[:k], n_random, seed))]
    names += [("kept", k, 0, others(lm, ranked[:k])) for k in keep if others(lm, ranked[:k])]
    for k in keep:
        for d, heads in enumerate(_draws(lm, ranked[:k], n_random, seed, same_layers=True)):
            if others(lm, heads):
                names.append(("random kept", k, d, others(lm, heads)))
    intact = score_under(store, lm, task, Condition("intact"))
    found: dict[str, dict[int, list[np.ndarray]]] = {s: {} for s in ("removed", "random", "kept", "random kept")}
    records = [intact]
    for series, k, draw, heads in tqdm(names, desc=f"{lm.name}: removing heads", disable=not progress):
        record = score_under(store, lm, task, Condition(f"{series} {k}, draw {draw}", heads, positions))
        records.append(record)
        found[series].setdefault(k, []).append(record.arrays["correct"])
    widths = {h: lm.site(h).head_dim for h in ranked}
    total = sum(s.n_heads * s.head_dim for s in lm.sites)
    return Curve(
        lm.name, lm.title, tuple(ranked[: max(sizes)]), n, intact.values["chance"], intact.arrays["correct"],
        {k: v[0] for k, v in found["removed"].items()}, {k: v[0] for k, v in found["kept"].items()},
        {k: np.stack(v) for k, v in found["random"].items()}, {k: np.stack(v) for k, v in found["random kept"].items()},
        {k: sum(widths[h] for h in ranked[:k]) / total for k in sizes}, records,
    )  # fmt: skip


def others(lm: LanguageModel, kept: Sequence[Head]) -> tuple[Head, ...]:
    """All other heads of the mixers that hold `kept`."""
    keep = set(kept)
    sites = dict.fromkeys(lm.site(h) for h in kept)
    return tuple(h for s in sites for h in (s.head(i) for i in range(s.n_heads)) if h not in keep)


def _draws(
    lm: LanguageModel, heads: Sequence[Head], n: int, seed: int, same_layers: bool = False
) -> list[tuple[Head, ...]]:
    """Up to n different draws of as many random heads that are not among `heads`; fewer where there are no more."""
    rng = np.random.default_rng([seed, len(heads), 20_250_418])
    pool = others(lm, heads) if same_layers else tuple(h for h in lm.head_list() if h not in set(heads))
    if len(pool) < len(heads):
        return []
    draws: dict[tuple[Head, ...], None] = {}
    for _ in range(20 * n):
        at = sorted(rng.choice(len(pool), len(heads), replace=False))
        draws[tuple(pool[i] for i in at)] = None
        if len(draws) == n:
            break
    return list(draws)
