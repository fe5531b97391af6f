"""On which layers and heads do letters hang? What Figures 2 and 3 and Table 1 of the paper measure, on one model.

Letters (multiple choice answered by the letter) need retrieval and knowledge, the knowledge score needs no retrieval:
both are asked of a model that is cut from the top, of its *minimal model* with one layer out, and of the minimal model
with heads masked. The minimal model is found by rule, not by eye: the fewest layers at which letters keep at least
`FLAT` of their score above chance, there and at every larger cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from . import claims_layers
from .claims import Verdict
from .concentration import others
from .discover import DiscoverSettings, discover
from .errors import GAError, TaskError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .measure import Condition, random_draws, score_under
from .records import Record, Store
from .stats import stderr
from .surgery import drop_layers, truncate
from .task_choice import Asked

#: share of the letter score above chance that a cut may not fall below
FLAT = 0.9
TASKS = ("letter", "knowledge")


@dataclass(frozen=True)
class Settings:
    """How many questions, from which seeds; `letters` is the kind of letter questions."""

    n_examples: int
    seed: int
    find: DiscoverSettings
    n_random: int = 3

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work."""
        if self.n_examples < 10 or self.n_random < 1:
            raise GAError("n_examples must be 10 or more and n_random 1 or more, or nothing can be compared.")
        if self.seed in self.find.seeds:
            raise GAError(f"seed={self.seed} is among find_seeds: heads must be found on other questions.")
        for kind in TASKS:
            Asked(kind).task(lm, 1, self.seed)
        self.find.check(lm)


@dataclass(frozen=True)
class LayersPage:
    """What was measured on one model; answers are (letters [n], knowledge [m]).

    cuts: layers kept -> answers. minimal: the minimal model's number of layers. dropped: layer -> answers of the
    minimal
    model without it. gather, aggregate: the heads found in the intact model, strongest first, that are in the minimal
    model. rows: Table 1, label -> answers; single: masked head and role -> answers; random: [draws, n] letters with one
    random head masked.
    """

    model: str
    title: str
    source: str
    revision: str | None
    n_layers: int
    chances: tuple[float, float]
    cuts: dict[int, claims_layers.Pair]
    minimal: int
    dropped: dict[int, claims_layers.Pair]
    gather: tuple[Head, ...]
    aggregate: tuple[Head, ...]
    rows: dict[str, claims_layers.Pair]
    single: dict[str, claims_layers.Pair]
    random: np.ndarray
    records: list[Record]

    def curve(self) -> pd.DataFrame:
        """Figure 2: one row for each number of layers kept and task."""
        return self._frame({k: v for k, v in sorted(self.cuts.items())}, "layers kept")

    def drops(self) -> pd.DataFrame:
        """Figure 3: one row for each layer taken out of the minimal model, and task."""
        return self._frame(self.dropped, "layer taken out")

    def table(self) -> pd.DataFrame:
        """Table 1, in percent with standard errors."""
        return pd.DataFrame(
            [
                {"condition": label, **{t: _percent(c) for t, c in zip(TASKS, pair, strict=True)}}
                for label, pair in self.rows.items()
            ]
        )

    def verdicts(self) -> list[Verdict]:
        """Claims C1 to C5 on this model."""
        base = self.cuts[self.minimal]
        layers = dict.fromkeys(h.layer for h in (*self.gather[:1], *self.aggregate[:1]))
        kept = {k: self.rows[v] for k, v in KEPT.items() if v in self.rows}
        return [
            claims_layers.one_layer(self.model, self.cuts, self.minimal, self.chances),
            claims_layers.little_knowledge(self.model, self.cuts, self.minimal, self.chances),
            claims_layers.two_layers(self.model, base, self.dropped, list(layers), self.chances),
            claims_layers.one_head(self.model, base, self.single, self.random, self.chances),
            claims_layers.heads_suffice(self.model, base, kept, self.chances),
        ]

    def _frame(self, found: dict, name: str) -> pd.DataFrame:
        rows = []
        for key, pair in found.items():
            for task, correct, chance in zip(TASKS, pair, self.chances, strict=True):
                rows.append(
                    {
                        "model": self.model, name: key, "task": task, "accuracy": float(correct.mean()),
                        "stderr": stderr(correct), "chance": chance,
                    }
                )  # fmt: skip
        return pd.DataFrame(rows)


KEPT = {
    "both": "only Gather and Aggregate heads kept in their layers",
    "gather": "only Gather heads kept",
    "aggregate": "only Aggregate heads kept",
}


def measure(store: Store, lm: LanguageModel, settings: Settings, progress: bool = True) -> LayersPage:
    """Measure one model; what the store holds is not measured again."""
    settings.check(lm)
    records: list[Record] = []
    tasks = [Asked(kind).task(lm, settings.n_examples, settings.seed) for kind in TASKS]

    def ask(model: LanguageModel, condition: Condition) -> claims_layers.Pair:
        found = [score_under(store, model, task, condition) for task in tasks]
        records.extend(found)
        return tuple(r.arrays["correct"] for r in found)

    intact = Condition("intact")
    full = lm.n_layers
    cuts = {full: ask(lm, intact)}
    for k in tqdm(range(full - 1, 0, -1), desc=f"{lm.name}: layers kept", disable=not progress):
        with truncate(lm, k) as cut:
            cuts[k] = ask(cut, intact)
    chances = (tasks[0].chance, tasks[1].chance)
    minimal = minimal_layers({k: v[0] for k, v in cuts.items()}, chances[0])
    found = discover(store, lm, settings.find, progress).roles
    records_of = {}
    for role in ("gather", "aggregate"):
        try:
            names = found.heads(role)
        except TaskError:
            names = []
        records_of[role] = tuple(h for h in parse_heads(names) if h.layer < minimal) if names else ()
    gather, aggregate = records_of["gather"], records_of["aggregate"]
    dropped, rows, single, random = {}, {}, {}, np.zeros((0, settings.n_examples), bool)
    with truncate(lm, minimal) as cut:
        for layer in tqdm(range(minimal), desc=f"{lm.name}: one layer out", disable=not progress):
            if minimal > 1:
                with drop_layers(cut, layer) as less:
                    dropped[layer] = ask(less, intact)
        for label, heads in _table(cut, gather, aggregate).items():
            rows[label] = ask(cut, Condition(label, heads))
        for role, heads in (("Gather", gather), ("Aggregate", aggregate)):
            if heads:
                single[f"{heads[0]} ({role})"] = rows[f"{heads[0]} masked ({role})"]
        firsts = tuple(dict.fromkeys(h for heads in (gather, aggregate) for h in heads[:1]))
        drawn = [d for h in firsts for d in random_draws(cut, (h,), settings.n_random)]
        if drawn:
            random = np.stack([ask(cut, Condition("a random head masked", d))[0] for d in drawn])
            rows["a random head of the same layers masked"] = ask(cut, Condition("a random head masked", drawn[0]))
    return LayersPage(
        lm.name, lm.title, lm.source, lm.revision, full, chances, cuts, minimal, dropped, gather, aggregate, rows,
        single,
        random, records,
    )  # fmt: skip


def minimal_layers(letters: dict[int, np.ndarray], chance: float) -> int:
    """The fewest layers at which letters keep `FLAT` of their score above chance, there and at every larger cut.

    letters: layers kept -> answers [n].
    """
    full = max(letters)
    bound = chance + FLAT * (letters[full].mean() - chance)
    least = full
    for k in sorted(letters, reverse=True):
        if letters[k].mean() < bound:
            break
        least = k
    return least


def _table(lm: LanguageModel, gather: Sequence[Head], aggregate: Sequence[Head]) -> dict[str, tuple[Head, ...]]:
    """Table 1's rows: label -> the heads that are masked. The layers are those that hold heads with a role."""
    rows: dict[str, tuple[Head, ...]] = {"minimal model": ()}
    named = tuple(dict.fromkeys((*gather, *aggregate)))
    if not named:
        return rows
    every = others(lm, named) + named
    rows["all heads of these layers masked"] = every
    if gather:
        rows[KEPT["gather"]] = tuple(h for h in every if h not in gather)
    if aggregate:
        rows[KEPT["aggregate"]] = tuple(h for h in every if h not in aggregate)
    if gather and aggregate:
        rows[KEPT["both"]] = others(lm, named)
    for role, heads in (("Gather", gather), ("Aggregate", aggregate)):
        for head in heads:
            rows[f"{head} masked ({role})"] = (head,)
    return rows


def _percent(correct: np.ndarray) -> str:
    return f"{100 * correct.mean():.1f} ± {100 * stderr(correct):.1f}"
