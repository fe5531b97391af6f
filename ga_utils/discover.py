"""Which are the Gather and Aggregate heads of a model? One call: sweeps, patterns and verdicts, all of them records.

Effects at the answer's positions (the Aggregate role) are exact for every head that a sweep can afford. Effects at all
other positions (the Gather role) cost a prompt for each head; beyond `exact_gather` heads they are estimated to first
order, and the strongest are then measured exactly: only those can be called Gather. Models with more than
`exact_aggregate` heads (channels, mostly) take the same way for both roles, and the table says for each head which it
was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import roles
from .attribution import attribute
from .codehash import code_hash
from .errors import GAError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .measure import check_fits, sweep_under
from .patterns import measure_patterns
from .records import Record, Store
from .stats import bootstrap
from .sweep import Sweep
from .task_choice import Asked
from .tasks import Task


@dataclass(frozen=True)
class DiscoverSettings:
    """What is asked and how much is measured.

    n_examples questions for each of `seeds`; exact_aggregate, exact_gather: numbers of heads up to which every head is
    masked exactly; top: how many of the strongest estimates are then measured exactly.
    """

    asked: Asked = Asked()
    n_examples: int = 32
    seeds: Sequence[int] = (1, 2, 3)
    exact_aggregate: int = 4096
    exact_gather: int = 128
    top: int = 20

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if this cannot be done with `lm`, before any long work."""
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise GAError(f"seeds={list(self.seeds)} must be one or more different numbers.")
        if self.n_examples < 10:
            raise GAError(f"n_examples={self.n_examples} is too few to tell heads apart: give 10 or more.")
        if self.top < 1:
            raise GAError(f"top={self.top} must be 1 or more: without exact effects no head can be named.")
        for seed in self.seeds:
            check_fits(lm, self.asked.task(lm, self.n_examples, seed))


@dataclass(frozen=True)
class Discovery:
    """What was found: the verdicts, the questions that were asked, and every record used."""

    roles: roles.Roles
    settings: DiscoverSettings
    chance: float
    intact: np.ndarray
    records: list[Record]

    @property
    def accuracy(self) -> str:
        """The intact model's accuracy on the questions of all seeds, in percent with its interval."""
        found = bootstrap(lambda g: 100 * g.mean(), self.intact.astype(float))
        return f"{found.value:.0f}% [{found.low:.0f}, {found.high:.0f}]"


def discover(
    store: Store, lm: LanguageModel, settings: DiscoverSettings | None = None, progress: bool = True
) -> Discovery:
    """Find the Gather and Aggregate heads of `lm` by `roles.RULE`.

    Raises `GAError` in one sentence before any long work for settings that cannot be had, and `TaskError` if the model
    is not above chance on the questions.
    """
    settings = settings or DiscoverSettings()
    settings.check(lm)
    records: list[Record] = []
    evidence, intact, chance = [], [], 0.0
    for seed in settings.seeds:
        task = settings.asked.task(lm, settings.n_examples, seed)
        probe = sweep_under(store, lm, task, "answer", "candidates", False, lm.head_list()[:1], records)
        chance = task.chance
        roles.check_testable(probe.intact_correct, chance, lm.name, task.name)
        intact.append(probe.intact_correct)
    for seed in settings.seeds:
        task = settings.asked.task(lm, settings.n_examples, seed)
        evidence.append(_evidence(store, lm, task, seed, settings, records, progress))
    return Discovery(roles.verdicts(lm.name, evidence), settings, chance, np.concatenate(intact), records)


def check_seed(reported: int) -> None:
    """Raise `GAError` if results are reported on a seed that heads="discover" finds heads on."""
    seeds = list(DiscoverSettings().seeds)
    if reported in seeds:
        raise GAError(f"seed={reported} is among the seeds {seeds} that heads='discover' finds heads on: take another.")


def discovered(
    store: Store, lm: LanguageModel, asked: Asked, reported: int, role: str = "aggregate", progress: bool = True
) -> tuple[tuple[Head, ...], Discovery]:
    """The heads with `role`, strongest first, by the settings of `ga heads`: what heads="discover" means in a notebook.

    reported: the seed that the notebook reports on, which must be none of those that heads are found on. Raises
    `GAError` if it is one, and `TaskError` if the model is at chance or no head has the role.
    """
    check_seed(reported)
    settings = DiscoverSettings(asked)
    found = discover(store, lm, settings, progress)
    return parse_heads(found.roles.heads(role)), found


def _evidence(store, lm, task: Task, seed: int, settings: DiscoverSettings, records, progress: bool) -> roles.Evidence:
    heads = tuple(lm.head_list())
    if len(heads) <= settings.exact_aggregate:
        answer, aggregate_exact = _loss(sweep_under(store, lm, task, "answer", "answer", progress, None, records)), None
    else:
        answer, aggregate_exact = _estimated(store, lm, task, "answer", settings.top, records, progress)
    if len(heads) <= settings.exact_gather:
        everywhere = _loss(sweep_under(store, lm, task, "all", "answer", progress, None, records))
        exact = np.ones(len(heads), bool)
    else:
        everywhere, exact = _estimated(store, lm, task, "all", settings.top, records, progress, answer)
    if aggregate_exact is not None:
        exact &= aggregate_exact
    found = _patterns(store, lm, task, records)
    chance = float(np.mean([1 / len(e.segments) for e in task.examples]))
    larger = {r: np.maximum(found[f"{r}_end"], found[f"{r}_value"]) for r in ("aggregate", "gather")}
    return roles.Evidence(
        seed, heads, answer, everywhere - answer, exact, found["right"], chance, larger["aggregate"], larger["gather"]
    )


def _loss(sweep: Sweep) -> np.ndarray:
    return sweep.intact_logprob[None] - sweep.logprob


def _estimated(
    store: Store,
    lm: LanguageModel,
    task: Task,
    positions: str,
    top: int,
    records: list[Record],
    progress: bool,
    less: np.ndarray | float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """First-order losses [h, n] of all heads with the exact ones of the strongest in their place, and which those are.

    Strongest is meant after `less` [h, n] is taken off.
    """
    heads = tuple(lm.head_list())
    key = {"kind": "attribution", "model": lm.describe(), "task": task.key(), "positions": positions}
    key["code"] = code_hash("attribution")

    def run():
        return {"heads": len(heads)}, {"effect": attribute(lm, task, positions=positions, progress=progress).effect}

    record = store.compute(key, run, _meta(lm))
    records.append(record)
    loss = record.arrays["effect"].astype(np.float64)
    order = np.argsort(-(loss - less).mean(1), kind="stable")[:top]
    chosen = sorted(order.tolist())
    exact = sweep_under(store, lm, task, positions, "answer", progress, [heads[i] for i in chosen], records)
    loss[chosen] = _loss(exact)
    measured = np.zeros(len(heads), bool)
    measured[chosen] = True
    return loss, measured


def _patterns(store: Store, lm: LanguageModel, task: Task, records: list[Record]) -> dict[str, np.ndarray]:
    """Means over the questions of every head's pattern scores, [h] by name."""
    key = {"kind": "patterns", "model": lm.describe(), "task": task.key(), "code": code_hash("patterns")}

    def run():
        return {"heads": len(lm.head_list())}, measure_patterns(lm, task).arrays()

    record = store.compute(key, run, _meta(lm))
    records.append(record)
    return {name: values.mean(1, dtype=float) for name, values in record.arrays.items()}


def _meta(lm: LanguageModel) -> dict[str, object]:
    return {"model": lm.name, "source": lm.source, "revision": lm.revision}
