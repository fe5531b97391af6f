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
import pandas as pd

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
from .task_choice import Asked
from .tasks import Task


@dataclass(frozen=True)
class DiscoverSettings:
    """What is asked and how much is measured.

    n_examples questions for each of `seeds`; exact_aggregate, exact_gather: numbers of heads up to which every head is
    masked exactly; top: how many of the strongest estimates are then measured exactly. layerwise: estimate with a pass
    for each mixer, which is far better in models of few strong heads (see `attribution`), else with one for all.
    """

    asked: Asked = Asked()
    n_examples: int = 32
    seeds: Sequence[int] = (1, 2, 3)
    exact_aggregate: int = 4096
    exact_gather: int = 128
    top: int = 20
    layerwise: bool = False

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
    """What was found: the verdicts, the questions that were asked, and every record used.

    ranking: how well first-order estimates rank the heads, one row for each place where every head was measured.
    """

    roles: roles.Roles
    settings: DiscoverSettings
    chance: float
    intact: np.ndarray
    ranking: pd.DataFrame
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
    tasks = [settings.asked.task(lm, settings.n_examples, seed) for seed in settings.seeds]
    intact = []
    for task in tasks:
        probe = sweep_under(store, lm, task, "answer", "candidates", False, lm.head_list()[:1], records)
        roles.check_testable(probe.intact_correct, task.chance, lm.name, task.name)
        intact.append(probe.intact_correct)
    effects = _estimates(store, lm, tasks, settings, records, progress)
    evidence = [
        _evidence(store, lm, task, seed, number, effects, records, progress)
        for number, (seed, task) in enumerate(zip(settings.seeds, tasks, strict=True))
    ]
    chance = tasks[0].chance
    return Discovery(
        roles.verdicts(lm.name, evidence),
        settings,
        chance,
        np.concatenate(intact),
        _ranking(effects, evidence),
        records,
    )


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


@dataclass(frozen=True)
class _Effects:
    """Estimated losses [h, n] of each task at the answer's positions and elsewhere, and the heads to measure exactly.

    fetch, collect: numbers of the heads that are measured at the answer's positions, and elsewhere as well. Where every
    head is measured, the estimates only tell how good they are.
    """

    answer: list[np.ndarray]
    elsewhere: list[np.ndarray]
    fetch: np.ndarray
    collect: np.ndarray


def _estimates(store, lm, tasks: Sequence[Task], settings: DiscoverSettings, records, progress: bool) -> _Effects:
    """Which heads to measure: all that can be afforded, else the strongest by their estimates on all tasks together."""
    every = np.arange(len(lm.head_list()))

    def estimated(positions: str) -> list[np.ndarray]:
        return [_estimated(store, lm, t, positions, settings.layerwise, records, progress) for t in tasks]

    def strongest(losses: list[np.ndarray]) -> np.ndarray:
        mean = np.concatenate(losses, axis=1).mean(1)
        return np.sort(np.argsort(-mean, kind="stable")[: settings.top])

    answer = estimated("answer")
    # both by estimates: the difference of an exact effect and an estimate would be neither
    elsewhere = [e - a for e, a in zip(estimated("all"), answer, strict=True)]
    collect = every if len(every) <= settings.exact_gather else strongest(elsewhere)
    fetch = every if len(every) <= settings.exact_aggregate else np.union1d(strongest(answer), collect)
    return _Effects(answer, elsewhere, fetch, collect)


def _ranking(effects: _Effects, evidence: Sequence[roles.Evidence]) -> pd.DataFrame:
    """Recall of the exact top heads and rank correlation of the estimates, where all heads were measured."""
    rows = []
    for place, chosen, estimates, name in (
        ("at the answer", effects.fetch, effects.answer, "aggregate"),
        ("elsewhere", effects.collect, effects.elsewhere, "gather"),
    ):
        exact = pd.Series(np.concatenate([getattr(e, name) for e in evidence], axis=1).mean(1))
        if len(chosen) < len(exact):
            continue
        estimate = pd.Series(np.concatenate(estimates, axis=1).mean(1))
        top = min(20, max(1, len(exact) // 4))
        common = len(set(exact.nlargest(top).index) & set(estimate.nlargest(top).index))
        rows.append(
            {
                "masked": place,
                "heads": len(exact),
                "top": top,
                "recall of the top": common / top,
                "rank correlation": float(exact.rank().corr(estimate.rank())),
            }
        )
    return pd.DataFrame(rows)


def _exact(store, lm, task: Task, positions: str, heads, which: np.ndarray, records, progress: bool) -> np.ndarray:
    """Losses [which, n] of the heads with the numbers `which`, each masked alone."""
    some = None if len(which) == len(heads) else [heads[i] for i in which]
    sweep = sweep_under(store, lm, task, positions, "answer", progress, some, records)
    return sweep.intact_logprob[None] - sweep.logprob


def _evidence(store, lm, task: Task, seed: int, number: int, effects: _Effects, records, progress: bool):
    """The evidence of one seed's questions, the task with this number."""
    heads = tuple(lm.head_list())
    answer, elsewhere = effects.answer[number].copy(), effects.elsewhere[number].copy()
    answer[effects.fetch] = _exact(store, lm, task, "answer", heads, effects.fetch, records, progress)
    everywhere = _exact(store, lm, task, "all", heads, effects.collect, records, progress)
    elsewhere[effects.collect] = everywhere - answer[effects.collect]
    found = _patterns(store, lm, task, records)
    larger = {r: np.maximum(found[f"{r}_end"], found[f"{r}_value"]) for r in ("aggregate", "gather")}
    return roles.Evidence(
        seed=seed,
        heads=heads,
        aggregate=answer,
        gather=elsewhere,
        exact_aggregate=np.isin(np.arange(len(heads)), effects.fetch),
        exact_gather=np.isin(np.arange(len(heads)), effects.collect),
        right=found["right"],
        chance=float(np.mean([1 / len(e.segments) for e in task.examples])),
        aggregate_mass=larger["aggregate"],
        gather_mass=larger["gather"],
    )


def _estimated(
    store: Store, lm: LanguageModel, task: Task, positions: str, layerwise: bool, records: list[Record], progress: bool
) -> np.ndarray:
    """First-order losses of all heads, [h, n] nats."""
    key = {"kind": "attribution", "model": lm.describe(), "task": task.key(), "positions": positions}
    key |= {"layerwise": layerwise, "code": code_hash("attribution")}

    def run():
        effect = attribute(lm, task, positions=positions, layerwise=layerwise, progress=progress).effect
        return {"heads": len(effect)}, {"effect": effect}

    record = store.compute(key, run, _meta(lm))
    records.append(record)
    return record.arrays["effect"].astype(np.float64)


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
