"""What does Figure 4 measure? Key-value retrieval against the number of pairs, with and without the retrieval heads.

Heads are found on one set of questions (another seed) and reported on another. Every condition answers the same
questions, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from . import discover
from .claims import KVPoint
from .discovery import effects, select_heads
from .errors import GAError, TaskError
from .heads import Head
from .language_model import LanguageModel
from .measure import (
    Condition,
    check_fits,
    known_heads,
    leave_controls,
    named_heads,
    random_draws,
    score_under,
    sweep_under,
)
from .records import Record, Store
from .stats import Interval, bootstrap, stderr
from .task_choice import Asked
from .tasks import Task, kv_task

SERIES = ("intact", "strongest", "masked", "random")


@dataclass(frozen=True)
class KVSettings:
    """The parameters of the Figure 4 notebook; see its parameters cell for what each means."""

    pairs: Sequence[int]
    n_examples: int
    seed: int
    format: str
    values: str
    chat: bool
    heads: object
    positions: str
    n_random: int
    sweep_pairs: int
    sweep_examples: int
    sweep_seed: int
    other_formats: Sequence[str] = ()

    def task(self, lm: LanguageModel, pairs: int, format: str | None = None) -> Task:
        """The questions on which results are reported, at one number of pairs."""
        return kv_task(pairs, self.n_examples, self.seed, format or self.format, self.values, lm.tokenizer, self.chat)

    def sweep_task(self, lm: LanguageModel) -> Task:
        """The questions on which heads are selected: none of those that results are reported on."""
        return kv_task(
            self.sweep_pairs, self.sweep_examples, self.sweep_seed, self.format, self.values, lm.tokenizer, self.chat
        )

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work."""
        if not self.pairs or list(self.pairs) != sorted(set(self.pairs)):
            raise GAError(f"pairs={list(self.pairs)} must be one or more different numbers, ascending.")
        if self.n_examples < 10 or self.sweep_examples < 10:
            raise GAError("n_examples and sweep_examples must be 10 or more, or no standard error means anything.")
        if self.n_random < 1:
            raise GAError(f"n_random={self.n_random} must be 1 or more: without random heads there is no control.")
        if self.positions not in ("all", "answer", "last"):
            raise GAError(f"positions={self.positions!r} is unknown: use 'all', 'answer' or 'last'.")
        if self.sweeps and self.sweep_seed == self.seed:
            raise GAError(f"sweep_seed and seed are both {self.seed}: heads must be selected on other questions.")
        for pairs in self.pairs:
            check_fits(lm, self.task(lm, pairs))
        for format in self.other_formats:
            check_fits(lm, self.task(lm, self.sweep_pairs, format))
        if self.sweeps:
            check_fits(lm, self.sweep_task(lm))
        elif self.discovers:
            discover.check_seed(self.seed)
            discover.DiscoverSettings(self.asked).check(lm)
        else:
            random_draws(lm, self.given(lm), 1)

    @property
    def sweeps(self) -> bool:
        """Whether heads are found by a sweep rather than given."""
        return isinstance(self.heads, str) and self.heads.strip().lower() == "sweep"

    @property
    def discovers(self) -> bool:
        """Whether heads are found by `discover`: effect and pattern, on several seeds."""
        return isinstance(self.heads, str) and self.heads.strip().lower() == "discover"

    @property
    def asked(self) -> Asked:
        """The questions on which `discover` finds heads."""
        return Asked("kv", self.sweep_pairs, self.format, self.values)

    def given(self, lm: LanguageModel) -> tuple[Head, ...]:
        """The heads that were named, or that the registry knows."""
        return known_heads(lm) if self.heads == "registry" else named_heads(lm, self.heads)


@dataclass(frozen=True)
class KVCurve:
    """What was measured on one model.

    table: one row for each series and number of pairs (random: for each draw). points: the same as arrays, for the
    verdict. formats: accuracy in other prompt formats. effects: the sweep's table, where there was one. records:
    every record used.
    """

    model: str
    title: str
    source: str
    revision: str | None
    heads: tuple[Head, ...]
    how: str
    table: pd.DataFrame
    points: list[KVPoint]
    formats: pd.DataFrame
    effects: pd.DataFrame | None
    records: list[Record]

    @property
    def draws(self) -> int:
        """Different draws of random heads: fewer than asked for where small layers allow no more."""
        return len(self.points[0].random)

    def summary(self) -> pd.DataFrame:
        """One row for each number of pairs: accuracies in percent with standard errors, and the paired difference."""
        rows = []
        for point in self.points:
            gap = bootstrap(lambda g: 100 * (g[2].mean() - g[1].mean()), point.stacked())
            here = self.table[self.table.pairs == point.pairs].set_index("series")
            drawn = 100 * point.random.mean(1)
            rows.append(
                {
                    "pairs": point.pairs,
                    "guessing": f"{100 * point.chance:.1f}",
                    "intact": _percent(point.intact),
                    "strongest head masked": _percent(here.loc["strongest", "correct"]),
                    "all found heads masked": _percent(point.masked),
                    "random heads masked": f"{drawn.mean():.1f} ({drawn.min():.0f} to {drawn.max():.0f})",
                    "random minus found, points": _points(gap),
                }
            )
        return pd.DataFrame(rows)


def measure(store: Store, lm: LanguageModel, settings: KVSettings, progress: bool = True) -> KVCurve:
    """Measure Figure 4 on one model; what the store holds is not measured again."""
    settings.check(lm)
    table, how = None, "named by the user"
    if settings.sweeps:
        sweep = sweep_under(store, lm, settings.sweep_task(lm), progress=progress)
        try:
            found = select_heads(sweep)
        except TaskError as error:
            raise TaskError(f"{lm.name}: {error}") from None
        heads = leave_controls(lm, found)
        if not heads:
            raise TaskError(
                f"{lm.name}: {found[0]} is the only head of its mixer, so there is no random head to compare."
            )
        table = effects(sweep)
        how = (
            f"found by masking each of {len(table)} heads alone on {settings.sweep_examples} other questions with "
            f"{settings.sweep_pairs} pairs"
        )
        if len(heads) < len(found):
            left_out = len(found) - len(heads)
            how += f" ({left_out} more stood out, but too few heads of their layers would be left to compare with)"
    elif settings.discovers:
        found, said = discover.discovered(store, lm, settings.asked, settings.seed, progress=progress)
        heads = leave_controls(lm, found)
        seeds = len(said.settings.seeds)
        how = f"Aggregate heads found by `ga heads` on {said.settings.n_examples} questions for each of {seeds} seeds"
    else:
        heads = settings.given(lm)
        if settings.heads == "registry":
            how = "named by the registry"
    conditions = [
        ("intact", 0, Condition("intact")),
        ("strongest", 0, Condition(f"{heads[0]} masked", heads[:1], settings.positions)),
        ("masked", 0, Condition("found heads masked", heads, settings.positions)),
    ]
    for draw, others in enumerate(random_draws(lm, heads, settings.n_random)):
        conditions.append(("random", draw, Condition(f"random heads masked, draw {draw}", others, settings.positions)))
    rows, records = [], []
    work = [(p, c) for p in settings.pairs for c in conditions]
    for pairs, (series, draw, condition) in tqdm(work, desc=f"{lm.name}: conditions", disable=not progress):
        record = score_under(store, lm, settings.task(lm, pairs), condition)
        records.append(record)
        rows.append({"model": lm.name, "pairs": pairs, "series": series, "draw": draw, **_row(condition, record)})
    formats = []
    for format in settings.other_formats:
        for _, _, condition in (conditions[0], conditions[2]):
            record = score_under(store, lm, settings.task(lm, settings.sweep_pairs, format), condition)
            records.append(record)
            formats.append({"format": format, "pairs": settings.sweep_pairs, **_row(condition, record)})
    frame = pd.DataFrame(rows)
    points = [_point(frame[frame.pairs == p]) for p in settings.pairs]
    return KVCurve(
        lm.name, lm.title, lm.source, lm.revision, heads, how, frame, points, pd.DataFrame(formats), table, records
    )


def _row(condition: Condition, record: Record) -> dict[str, object]:
    correct = record.arrays["correct"]
    return {
        "condition": condition.label,
        "heads": ", ".join(map(str, condition.heads)),
        "accuracy": float(correct.mean()),
        "stderr": stderr(correct),
        "full_vocab_accuracy": record.values["full_vocab_accuracy"],
        "chance": record.values["chance"],
        "biased": record.values["biased"],
        "correct": correct,
    }


def _point(rows: pd.DataFrame) -> KVPoint:
    by = {s: np.stack(list(rows[rows.series == s].correct)) for s in SERIES}
    return KVPoint(
        pairs=int(rows.pairs.iloc[0]),
        chance=float(rows.chance.iloc[0]),
        intact=by["intact"][0],
        masked=by["masked"][0],
        strongest=by["strongest"][0],
        random=by["random"],
    )


def _percent(correct: np.ndarray) -> str:
    return f"{100 * correct.mean():.1f} ± {100 * stderr(correct):.1f}"


def _points(gap: Interval) -> str:
    return f"{gap.value:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]"
