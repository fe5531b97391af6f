"""Where does a hybrid's attention have to work? Its heads off at chosen places, beside the SSM heads at the same ones.

The sources name several masks behind the paper's numbers on Zamba2 (all attention heads at the last position; chosen
heads at key tokens; eight indices in two layers), and a mask of the last position alone hits the one letter of a
multiple-choice answer but a small share of an answer in words. So each mask is shown with its *dose*, the share of the
scored predictions that it hits, and every task is asked under the same masks. (Paper, section 6.3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from tqdm import tqdm

from . import transfer
from .claims import Verdict
from .claims_rules import above_chance
from .codehash import code_hash
from .errors import GAError
from .heads import Head
from .language_model import LanguageModel
from .masking import mask_heads
from .measure import Condition, check_fits, score_under
from .records import Record, Store
from .scoring import score
from .stats import paired_gain, stderr
from .task_choice import Asked
from .tasks import Task, encode, segment_tokens

#: what is asked: retrieval, then what is known
KINDS = ("kv", "letter", "knowledge", "cloze")
#: place -> positions, as `mask_heads` takes them; "before" and "keys" are worked out for each prompt
PLACES = {
    "last token of the prompt": "last",
    "every position that predicts the answer": "answer",
    "everywhere else": "before",
    "ends of segments (key tokens)": "keys",
    "everywhere": "all",
}
#: the mask that heads and fills are compared under
JUDGED = "every position that predicts the answer"


@dataclass(frozen=True)
class Row:
    """One mask: which heads, where, with what in their place, and its answers [n] by task; dose by task."""

    heads: str
    n_heads: int
    place: str
    fill: str
    answers: dict[str, np.ndarray]
    dose: dict[str, float]


@dataclass(frozen=True)
class HybridPage:
    """What was measured on one model; why: why the page does not apply to it, "" if it does."""

    model: str
    title: str
    source: str
    revision: str | None
    why: str = ""
    intact: dict[str, np.ndarray] | None = None
    chances: dict[str, float] | None = None
    rows: tuple[Row, ...] = ()
    verdict: Verdict | None = None
    records: tuple[Record, ...] = ()

    def table(self) -> pd.DataFrame:
        """One row a mask: accuracies in percent with standard errors, and the dose of the knowledge score."""
        rows = [{"heads off": "none", "where": "", **{k: self._cell(k, a) for k, a in self.intact.items()}}]
        for row in self.rows:
            name = f"{row.heads} ({row.n_heads}{', mean fill' if row.fill == 'mean' else ''})"
            cells = {k: self._cell(k, a) for k, a in row.answers.items()}
            dose = "; ".join(f"{k} {100 * d:.0f}%" for k, d in row.dose.items())
            rows.append({"heads off": name, "where": row.place, **cells, "dose": dose})
        return pd.DataFrame(rows).fillna("")

    def frame(self) -> pd.DataFrame:
        """All attention heads off at each place, as `figures_tiny.scores` draws it: a row for each task and place."""
        every = [("nowhere", self.intact)]
        every += [(r.place, r.answers) for r in self.rows if r.heads == "attention" and r.fill == "zero"]
        name, rows = "all attention heads off", []
        for place, answers in every:
            for kind, a in answers.items():
                score = {"accuracy": float(a.mean()), "stderr": stderr(a), "chance": self.chances[kind]}
                rows.append({"family": kind, "task": place, "seed": name, **score})
        return pd.DataFrame(rows)

    def sentence(self) -> str:
        """What the judged mask costs, of attention and of as many random SSM heads, in points with intervals."""
        said = []
        for row in self.rows:
            if row.place != JUDGED or row.fill != "zero":
                continue
            costs = [f"{k} {100 * paired_gain(row.answers[k], a).value:+.0f}" for k, a in self.intact.items()]
            said.append(f"{row.heads} ({row.n_heads} heads): {', '.join(costs)}")
        return f"Points lost at {JUDGED}: {'; '.join(said)}."

    def _cell(self, kind: str, answers: np.ndarray) -> str:
        if not above_chance(self.intact[kind], self.chances[kind]):
            return "at chance"
        return f"{100 * answers.mean():.1f} ± {100 * stderr(answers):.1f}"


@dataclass(frozen=True)
class Settings:
    """Questions of each kind, their seed, pairs in the key-value questions, chosen attention heads ("" for none)."""

    n_examples: int
    seed: int
    n_pairs: int = 8
    chosen: str = ""

    def tasks(self, lm: LanguageModel) -> dict[str, Task]:
        """The questions of each of `KINDS`."""
        return {kind: Asked(kind, self.n_pairs).task(lm, self.n_examples, self.seed) for kind in KINDS}

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work."""
        if self.n_examples < 10:
            raise GAError("n_examples must be 10 or more, or no standard error means anything.")
        if why_not(lm):
            return
        self.heads(lm)
        for task in self.tasks(lm).values():
            check_fits(lm, task)

    def heads(self, lm: LanguageModel) -> tuple[Head, ...]:
        """The chosen attention heads; `GAError` for one that is none."""
        from .measure import known_heads, named_heads

        if not self.chosen:
            return ()
        found = tuple(known_heads(lm) if self.chosen == "registry" else named_heads(lm, self.chosen))
        wrong = [h for h in found if lm.site(h).kind != "attention"]
        if wrong:
            raise GAError(f"{wrong[0]} of {lm.name} is no attention head: choose among its attention heads.")
        return found


def why_not(lm: LanguageModel) -> str:
    """Why `lm` is no hybrid, in a sentence; empty if it is one."""
    kinds = {site.kind == "attention" for site in lm.sites}
    if kinds == {True, False}:
        return ""
    return f"{lm.name} has {'attention alone' if kinds == {True} else 'no attention'}, and this page is about hybrids."


def measure(store: Store, lm: LanguageModel, settings: Settings, progress: bool = True) -> HybridPage:
    """Measure one model; what the store holds is not measured again."""
    settings.check(lm)
    page = (lm.name, lm.title, lm.source, lm.revision)
    if why := why_not(lm):
        return HybridPage(*page, why)
    tasks, records = settings.tasks(lm), []
    attention = tuple(h for h in lm.head_list() if lm.site(h).kind == "attention")
    others = tuple(h for h in lm.head_list() if lm.site(h).kind != "attention")
    draw = np.random.default_rng([settings.seed, len(others)]).permutation(len(others))[: len(attention)]
    groups = [("attention", attention, place, "zero") for place in PLACES]
    groups.append(("attention", attention, JUDGED, "mean"))
    depths = sorted({h.layer for h in attention})
    groups += [(f"attention of layer {d}", tuple(h for h in attention if h.layer == d), JUDGED, "zero") for d in depths]
    if chosen := settings.heads(lm):
        groups += [
            ("chosen attention heads", chosen, place, "zero") for place in (JUDGED, "ends of segments (key tokens)")
        ]
        rest = tuple(h for h in attention if h not in chosen)
        if len(rest) >= len(chosen):
            picked = np.random.default_rng(settings.seed).permutation(len(rest))[: len(chosen)]
            groups.append(("random attention heads", tuple(rest[i] for i in sorted(picked)), JUDGED, "zero"))
    groups.append(("SSM heads", others, JUDGED, "zero"))
    groups.append(("random SSM heads", tuple(others[i] for i in sorted(draw)), JUDGED, "zero"))

    def ask(kind: str, heads: Sequence[Head], place: str, fill: str) -> np.ndarray:
        record = _score_at(store, lm, tasks[kind], tuple(heads), PLACES.get(place, "all"), fill, settings.seed)
        records.append(record)
        return record.arrays["correct"].astype(float)

    intact = {kind: ask(kind, (), "everywhere", "zero") for kind in tasks}
    rows = []
    for name, heads, place, fill in tqdm(groups, desc=f"{lm.name}: masks", disable=not progress):
        answers = {
            k: ask(k, heads, place, fill) for k in tasks if place != "ends of segments (key tokens)" or _has(tasks[k])
        }
        dose = {k: _dose(lm, tasks[k], PLACES[place]) for k in answers}
        rows.append(Row(name, len(heads), place, fill, answers, dose))
    kind = "letter" if above_chance(intact["letter"], tasks["letter"].chance) else "kv"
    verdict, more = transfer.delegation(store, lm, Asked(kind, settings.n_pairs), settings.n_examples, settings.seed)
    chances = {k: t.chance for k, t in tasks.items()}
    return HybridPage(*page, "", intact, chances, tuple(rows), verdict, (*records, *more))


def _has(task: Task) -> bool:
    return all(e.segments for e in task.examples)


def _dose(lm: LanguageModel, task: Task, where: str) -> float:
    """Share of the right answers' predicted tokens whose prediction is made at a masked position."""
    if where in ("answer", "all"):
        return 1.0
    if where != "last":
        return 0.0
    items = encode(lm.tokenizer, task).items
    return len(items) / sum(len(i.continuations[i.answer]) - (i.counted or [0] * 99)[i.answer] for i in items)


def _score_at(
    store: Store, lm: LanguageModel, task: Task, heads: tuple[Head, ...], where: str, fill: str, seed: int
) -> Record:
    if where not in ("before", "keys") and fill == "zero":
        return score_under(store, lm, task, Condition("", heads, where if heads else "all"))
    key = {
        "kind": "score", "model": lm.describe(), "task": task.key(),
        "condition": {"heads": sorted(map(str, heads)), "positions": where, "fill": fill},
        "code": code_hash("scoring", "masking"),
    }  # fmt: skip
    reference = [e.prompt for e in task.examples] if fill == "mean" else None

    def run():
        positions = where
        if where == "before":
            positions = [list(range(len(item.context) - 1)) for item in encode(lm.tokenizer, task).items]
        elif where == "keys":
            spans = [segment_tokens(lm.tokenizer, e, task.special_tokens) for e in task.examples]
            positions = [sorted({line[1] - 1 for line, _ in each}) for each in spans]
        with mask_heads(lm, heads, positions, fill, reference):
            result = score(lm, task)
        return result.to_values(), result.arrays()

    return store.compute(key, run, {"model": lm.name, "source": lm.source, "revision": lm.revision})
