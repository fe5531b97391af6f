"""On which layers and heads do letters hang? What Figures 2 and 3 and Table 1 of the paper measure, on one model.

Letters (multiple choice answered by the letter) need retrieval and knowledge, the knowledge score needs no retrieval,
key-value pairs need no knowledge: all three are asked of a model that is cut from the top, of its *minimal model* with
one layer out, and of the minimal model with heads masked. The minimal model is found by rule, not by eye: the fewest
layers at which letters keep at least `FLAT` of their score above chance, there and at every larger cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from .claims_layers import Answers
from .claims_rules import above_chance
from .concentration import others
from .discover import DiscoverSettings, discover
from .errors import GAError, TaskError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .layers_shown import KEPT, TASKS, LayersPage, paper_numbers
from .live_heads import random_beside
from .measure import Condition, check_fits, score_under
from .records import Record, Store
from .roles import AtChance
from .surgery import drop_layers, truncate
from .task_choice import Asked
from .tasks import Task

__all__ = ["LayersPage", "Settings", "measure", "minimal_layers", "paper_numbers"]

#: share of the letter score above chance that a cut may not fall below
FLAT = 0.9


@dataclass(frozen=True)
class Settings:
    """How many questions, from which seed; how heads are found; n_random heads stand beside each masked one."""

    n_examples: int
    seed: int
    find: DiscoverSettings
    n_random: int = 3
    n_pairs: int = 8

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work.

        A model that cannot be asked letters is no error: the page says so (`why_not`).
        """
        if self.n_examples < 10 or self.n_random < 1:
            raise GAError("n_examples must be 10 or more and n_random 1 or more, or nothing can be compared.")
        if self.seed in self.find.seeds:
            raise GAError(f"seed={self.seed} is among find_seeds: heads must be found on other questions.")
        if not self.why_not(lm):
            self.find.check(lm)
            for task in self.tasks(lm):
                check_fits(lm, task)

    def tasks(self, lm: LanguageModel) -> list[Task]:
        """The questions of each of `TASKS`."""
        return [Asked(kind, self.n_pairs).task(lm, self.n_examples, self.seed) for kind in TASKS]

    def why_not(self, lm: LanguageModel) -> str:
        """Why `lm` cannot be asked letters, in a sentence; empty if it can."""
        try:
            for kind in ("letter", "knowledge"):
                Asked(kind).task(lm, 1, self.seed)
        except TaskError as error:
            return str(error)
        return ""


def measure(store: Store, lm: LanguageModel, settings: Settings, progress: bool = True) -> LayersPage:
    """Measure one model; what the store holds is not measured again."""
    settings.check(lm)
    full = lm.n_layers
    page = LayersPage(lm.name, lm.title, lm.source, lm.revision, full)
    if why := settings.why_not(lm):
        return replace(page, why=why)
    records: list[Record] = []
    tasks = settings.tasks(lm)

    def ask(model: LanguageModel, *heads: Head) -> Answers:
        found = [score_under(store, model, task, Condition("", heads)) for task in tasks]
        records.extend(found)
        return tuple(r.arrays["correct"] for r in found)

    cuts = {full: ask(lm)}
    for k in tqdm(range(full - 1, 0, -1), desc=f"{lm.name}: layers kept", disable=not progress):
        with truncate(lm, k) as cut:
            cuts[k] = ask(cut)
    chances = tuple(t.chance for t in tasks)
    gather, aggregate, minimal = (), (), full
    if above_chance(cuts[full][0], chances[0]):
        minimal = minimal_layers({k: v[0] for k, v in cuts.items()}, chances[0])
        gather, aggregate, why = _heads(store, lm, settings, minimal, records, progress)
    else:
        why = f"Letters are at chance ({100 * chances[0]:.0f}%), so there is no minimal model and no head to be found."
    dropped, rows, single, controls, random = {}, {}, {}, {}, {}
    with truncate(lm, minimal) as cut:
        for layer in tqdm(range(minimal if minimal > 1 else 0), desc=f"{lm.name}: layers out", disable=not progress):
            with drop_layers(cut, layer) as less:
                dropped[layer] = ask(less)
        for label, heads in tqdm(_table(cut, gather, aggregate).items(), f"{lm.name}: heads", disable=not progress):
            rows[label] = ask(cut, *heads)
        named = [(f"{h[0]} ({role})", h[0]) for role, h in (("Gather", gather), ("Aggregate", aggregate)) if h]
        for name, head in named:
            single[name] = rows[_masked(name)]
            controls[name] = random_beside(cut, head, settings.n_random, settings.seed, [h for _, h in named])
            drawn = [ask(cut, h) for h in controls[name]]
            random[name] = np.array([a[0] for a in drawn])
            rows |= {f"{h} masked (random, beside {head})": a for h, a in zip(controls[name], drawn, strict=True)}
    return replace(
        page, why=why, chances=chances, cuts=cuts, minimal=minimal, dropped=dropped, gather=gather,
        aggregate=aggregate, rows=rows, single=single, controls=controls, random=random, records=tuple(records),
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


def _heads(
    store: Store, lm: LanguageModel, settings: Settings, minimal: int, records: list[Record], progress: bool
) -> tuple[tuple[Head, ...], tuple[Head, ...], str]:
    """Gather and Aggregate heads of the first `minimal` layers, found in the intact model, and why none was."""
    try:
        found = discover(store, lm, settings.find, progress)
    except AtChance as error:
        return (), (), str(error)
    records.extend(found.records)
    heads, why = [], []
    for role in ("gather", "aggregate"):
        try:
            every = tuple(parse_heads(found.roles.heads(role)))
        except TaskError as error:
            heads.append(())
            why.append(str(error))
            continue
        heads.append(tuple(h for h in every if h.layer < minimal))
        if not heads[-1]:
            why.append(
                f"The {role.capitalize()} heads found ({', '.join(map(str, every))}) lie above the minimal model."
            )
    return heads[0], heads[1], " ".join(why)


def _table(lm: LanguageModel, gather: Sequence[Head], aggregate: Sequence[Head]) -> dict[str, tuple[Head, ...]]:
    """Table 1's rows: label -> the heads that are masked.

    Two layers alone are touched, as in the paper: those of the strongest Gather and of the strongest Aggregate head.
    """
    rows: dict[str, tuple[Head, ...]] = {"minimal model": ()}
    two = {h.layer for h in (*gather[:1], *aggregate[:1])}
    gather, aggregate = (tuple(h for h in heads if h.layer in two) for heads in (gather, aggregate))
    named = tuple(dict.fromkeys((*gather, *aggregate)))
    if not named:
        return rows
    every = others(lm, named) + named
    rows["all heads of their layers masked"] = every
    if gather:
        rows[KEPT["gather"]] = tuple(h for h in every if h not in gather)
    if aggregate:
        rows[KEPT["aggregate"]] = tuple(h for h in every if h not in aggregate)
    if gather and aggregate:
        rows[KEPT["both"]] = others(lm, named)
    for role, heads in (("Gather", gather), ("Aggregate", aggregate)):
        rows |= {_masked(f"{head} ({role})"): (head,) for head in heads}
    return rows


def _masked(name: str) -> str:
    head, role = name.split(" ", 1)
    return f"{head} masked {role}"
