"""What else falls with the retrieval heads? Benchmarks in English, intact and masked, beside random heads.

The heads are those that key-value questions of another seed find (as for Figure 4), masked at all positions, so that
the dose is the same for every task: every token of prompt and answer is hit. Every condition answers the same
questions, so differences are paired. (The paper's table of other tasks; its knowledge score is the mean over six.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from .claims import Verdict
from .claims_rules import above_chance
from .discovery import select_heads
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
from .stats import bootstrap, paired_gain, stderr
from .task_choice import speaks_tiny
from .tasks import Task, kv_task
from .tasks.benchmarks import BENCHMARKS, KNOWLEDGE, benchmark_task
from .tasks.world_facts import world_task

#: the tasks of the page, in its order
TASKS = (*KNOWLEDGE, "lambada", "mmlu-cloze", "mmlu", "world-cloze", "world-letter", "kv")
#: the paper's other tasks: they generate text or their questions are on the hub, and run through lm-eval
HARNESS = {
    "gsm8k": "generates up to some hundred tokens a question",
    "bbh_cot_fewshot": "its questions are on the hub; generates",
    "arc_challenge_chat": "generates",
    "ifeval": "its questions are on the hub; generates",
    "swde": "its questions are on the hub; generates",
    "squad_completion": "its questions are on the hub; generates",
}
CLAIM = "The bottleneck reaches beyond multiple choice: other tasks fall with the Gather and Aggregate heads too."
BEYOND = ("lambada",)
RULE = (
    "LAMBADA, whose last word mostly stands in the passage before it, is judged; the knowledge tasks are the control, "
    "not part of the rule. The loss with the found heads masked, less the mean loss with random heads (paired). "
    "Reproduced: its interval lies above 0; partly: its estimate does; not: neither; not testable: the intact model "
    "does not do the task."
)


@dataclass(frozen=True)
class Settings:
    """Questions of each task and their seed; how heads are found ("sweep", "registry" or names); random draws."""

    n_examples: int
    seed: int
    tasks: Sequence[str] = TASKS
    heads: str = "sweep"
    n_random: int = 2
    n_pairs: int = 10
    sweep_examples: int = 64
    sweep_seed: int = 1

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work."""
        if speaks_tiny(lm):
            raise GAError(f"{lm.name} knows only the tiny language, and these questions are in English: leave it out.")
        if self.n_examples < 5 or self.n_random < 1:
            raise GAError("n_examples must be 5 or more and n_random 1 or more, or nothing can be compared.")
        if self.sweep_seed == self.seed:
            raise GAError(f"sweep_seed and seed are both {self.seed}: heads must be found on other questions.")
        unknown = [t for t in self.tasks if t not in TASKS]
        if unknown or not self.tasks:
            raise GAError(f"tasks={list(self.tasks)} must be some of {', '.join(TASKS)}.")
        for name in self.tasks:
            check_fits(lm, self.task(lm, name))

    def task(self, lm: LanguageModel, name: str) -> Task:
        """The questions of one of `TASKS`."""
        if name == "kv":
            return kv_task(self.n_pairs, self.n_examples, self.seed, "terse", "10-99", lm.tokenizer)
        if name.startswith("world-"):
            return world_task(name.removeprefix("world-"), self.n_examples, self.seed)
        return benchmark_task(name, self.n_examples, self.seed)


@dataclass(frozen=True)
class Answers:
    """One task's answers [n] as 0 or 1: intact, with the found heads masked, and [draws, n] with random ones.

    nats: what each mask takes off the right answer's log-probability, [n] for the found heads and [n] for the mean over
    random draws. normed: intact and masked acc_norm, the best log-probability a character, where lm-eval reports it.
    calibrated: for letters, after each letter's mean score is taken off, in the same order. chance: guessing, 0 for
    LAMBADA.
    """

    name: str
    chance: float
    intact: np.ndarray
    masked: np.ndarray
    random: np.ndarray
    nats: tuple[np.ndarray, np.ndarray] | None = None
    normed: tuple[float, float] | None = None
    calibrated: tuple[float, float] | None = None
    perplexity: tuple[float, float] | None = None

    @property
    def testable(self) -> bool:
        """Whether the intact model is above chance."""
        return above_chance(self.intact, self.chance)


@dataclass(frozen=True)
class BenchmarksPage:
    """What was measured on one model."""

    model: str
    title: str
    source: str
    revision: str | None
    heads: tuple[Head, ...]
    how: str
    answers: tuple[Answers, ...]
    records: tuple[Record, ...]
    conditions: tuple[Condition, ...]

    def knowledge(self) -> Answers | None:
        """The six knowledge tasks together, if all of them were asked: equal numbers, so the mean over the six."""
        six = [a for a in self.answers if a.name in KNOWLEDGE]
        if len(six) < len(KNOWLEDGE):
            return None
        joined = [np.concatenate([getattr(a, n) for a in six], axis=-1) for n in ("intact", "masked", "random")]
        nats = tuple(np.concatenate([a.nats[i] for a in six]) for i in (0, 1)) if all(a.nats for a in six) else None
        return Answers("knowledge (mean of the six)", float(np.mean([a.chance for a in six])), *joined, nats)

    def rows(self) -> tuple[Answers, ...]:
        """The tasks in the page's order, with the six knowledge tasks together behind them."""
        pooled = self.knowledge()
        return (*self.answers[: len(KNOWLEDGE)], pooled, *self.answers[len(KNOWLEDGE) :]) if pooled else self.answers

    def table(self) -> pd.DataFrame:
        """One row for each task: accuracies in percent with standard errors, and the paired difference to random."""
        rows = []
        for a in self.rows():
            drawn = 100 * a.random.mean(1)
            gap = extra_loss(a)
            rows.append(
                {
                    "task": a.name,
                    "guessing": f"{100 * a.chance:.0f}",
                    "intact": _percent(a.intact),
                    "found heads off": _percent(a.masked),
                    "random heads off": f"{drawn.mean():.0f} ({drawn.min():.0f} to {drawn.max():.0f})",
                    "random minus found": f"{gap.value:+.0f} [{gap.low:+.0f}, {gap.high:+.0f}]",
                }
            )
        return pd.DataFrame(rows)

    def readings(self) -> pd.DataFrame:
        """One row for each task: nats lost with found and with random heads off, and what the rules read from it."""
        return pd.DataFrame(
            [
                {
                    "task": a.name,
                    "nats lost, found heads off": _nats(a, 0),
                    "random heads off": _nats(a, 1),
                    "accuracy": reading(a),
                }
                for a in self.rows()
            ]
        )

    def other_metrics(self) -> pd.DataFrame:
        """acc_norm, calibrated letters and LAMBADA's perplexity, intact and masked."""
        rows = []
        for a in self.answers:
            for metric, pair, scale in (
                ("acc_norm, %", a.normed, 100),
                ("calibrated letters, %", a.calibrated, 100),
                ("perplexity of the last word", a.perplexity, 1),
            ):
                if pair:
                    found = {"intact": scale * pair[0], "found heads masked": scale * pair[1]}
                    rows.append({"task": a.name, "metric": metric, **found})
        return pd.DataFrame(rows)

    def verdict(self) -> Verdict:
        """Claim C14 on this model."""
        asked = [a for a in self.answers if a.name in BEYOND]
        return beyond_multiple_choice(self.model, asked)


def measure(store: Store, lm: LanguageModel, settings: Settings, progress: bool = True) -> BenchmarksPage:
    """Measure one model; what the store holds is not measured again."""
    settings.check(lm)
    heads, how, records = _heads(store, lm, settings, progress)
    conditions = [Condition("intact"), Condition("found heads masked", heads)]
    draws = random_draws(lm, heads, settings.n_random)
    conditions += [Condition(f"random heads masked, draw {i}", drawn) for i, drawn in enumerate(draws)]
    answers = []
    for name in tqdm(settings.tasks, desc=f"{lm.name}: tasks", disable=not progress):
        task = settings.task(lm, name)
        found = [score_under(store, lm, task, c) for c in conditions]
        records.extend(found)
        answers.append(_answers(name, task, found))
    return BenchmarksPage(
        lm.name, lm.title, lm.source, lm.revision, heads, how, tuple(answers), tuple(records), tuple(conditions)
    )


def extra_loss(a: Answers):
    """Points that masking the found heads costs beyond masking random ones (mean over draws), with its interval."""
    stacked = np.concatenate([a.masked[None], a.random]).astype(float)
    return bootstrap(lambda g: 100 * (g[1:].mean() - g[0].mean()), stacked)


def reading(a: Answers) -> str:
    """What a row of the table says, by fixed rules, in a few words."""
    if not a.testable:
        return "at chance: not testable"
    gap, cost = extra_loss(a), paired_gain(a.masked.astype(float), a.intact.astype(float))
    if gap.above and cost.above:
        return "falls"
    return "falls no further than with random heads" if cost.above else "stays, within the interval"


def beyond_multiple_choice(model: str, asked: Sequence[Answers]) -> Verdict:
    """C14 by `RULE`."""
    tested = [a for a in asked if a.testable]
    if not tested:
        return Verdict("C14", model, "not testable", "No task beyond multiple choice is above chance.", {})
    gaps = {a.name: extra_loss(a) for a in tested}
    word = "reproduced" if all(g.above for g in gaps.values()) else "not"
    if word == "not" and all(g.value > 0 for g in gaps.values()):
        word = "partly"
    said = "; ".join(f"{n}: {g} points lost beyond random heads" for n, g in gaps.items())
    return Verdict("C14", model, word, f"{said}.", {f"random minus found, {n} (points)": g for n, g in gaps.items()})


def not_run() -> pd.DataFrame:
    """The paper's other tasks, which this page does not run by itself, and why."""
    return pd.DataFrame(
        [{"task": name, "why not run here": f"{why}, too slow on a CPU"} for name, why in HARNESS.items()]
    )


def benchmark_notes(names: Sequence[str]) -> pd.DataFrame:
    """Each benchmark's questions and form, for the page."""
    return pd.DataFrame(
        [
            {"task": n, "shots": 0, "metric": BENCHMARKS[n].metric, "form": BENCHMARKS[n].note}
            for n in names
            if n in BENCHMARKS
        ]
    )


def _heads(store, lm, settings: Settings, progress: bool) -> tuple[tuple[Head, ...], str, list[Record]]:
    records: list[Record] = []
    if settings.heads == "sweep":
        task = kv_task(settings.n_pairs, settings.sweep_examples, settings.sweep_seed, "terse", "10-99", lm.tokenizer)
        sweep = sweep_under(store, lm, task, progress=progress, records=records)
        try:
            heads = leave_controls(lm, select_heads(sweep))
        except TaskError as error:
            raise TaskError(f"{lm.name}: {error}") from None
        how = f"found by masking each head alone on {settings.sweep_examples} key-value questions of another seed"
        return tuple(heads), how, records
    if settings.heads == "registry":
        return tuple(known_heads(lm)), "named by the registry", records
    return tuple(named_heads(lm, settings.heads)), "named by the user", records


def _answers(name: str, task: Task, found: Sequence[Record]) -> Answers:
    greedy = name == "lambada"
    right = [r.arrays["full_vocab_correct" if greedy else "correct"].astype(float) for r in found]
    normed = calibrated = perplexity = None
    if name in ("hellaswag", "piqa", "openbookqa", "arc-easy", "arc-challenge"):
        normed = tuple(_normed(task, r) for r in found[:2])
    if name in ("mmlu", "world-letter"):
        calibrated = tuple(_calibrated(task, r) for r in found[:2])
    if greedy:
        perplexity = tuple(float(np.exp(-r.arrays["answer_logprob"].mean())) for r in found[:2])
    chance = 0.0 if greedy else task.chance
    nats = [found[0].arrays["answer_logprob"] - r.arrays["answer_logprob"] for r in found[1:]]
    lost = (nats[0], np.mean(nats[1:], axis=0))
    return Answers(name, chance, right[0], right[1], np.stack(right[2:]), lost, normed, calibrated, perplexity)


def _normed(task: Task, record: Record) -> float:
    """lm-eval's acc_norm: the best log-probability for each character of the option, its leading space left out."""
    best = [
        np.argmax([lp / len(c.lstrip()) for lp, c in zip(row, e.candidates, strict=False)])
        for row, e in zip(record.arrays["logprobs"], task.examples, strict=True)
    ]
    return float(np.mean([b == e.answer for b, e in zip(best, task.examples, strict=True)]))


def _calibrated(task: Task, record: Record) -> float:
    """Accuracy after each letter's mean score over the questions is taken off: a model may just prefer one letter."""
    scores = record.arrays["logprobs"] - record.arrays["logprobs"].mean(0)
    return float(np.mean(scores.argmax(1) == [e.answer for e in task.examples]))


def _nats(a: Answers, which: int) -> str:
    return "" if a.nats is None else f"{a.nats[which].mean():+.2f} ± {stderr(a.nats[which]):.2f}"


def _percent(correct: np.ndarray) -> str:
    return f"{100 * correct.mean():.1f} ± {100 * stderr(correct):.1f}"
