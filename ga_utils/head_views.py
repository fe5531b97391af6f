"""Which head is shown on a page, on which questions, and what is said of it?

The measurements are those of `head_rows`; the sentences here are made from their numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from . import discover, exactness
from .errors import GAError
from .head_rows import last_rows, last_token, matrix_record, shares_on_right, value_spans
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .measure import check_fits
from .mixers import reading
from .mixers.base import FAMILIES
from .records import Record, Store
from .registry import find_spec
from .stats import stderr
from .task_choice import Asked
from .tasks import Example, Task, kv_task

#: key-value pairs in the questions that heads="discover" finds heads on, as in `ga heads`
DISCOVER_PAIRS = Asked().n_pairs


@dataclass(frozen=True)
class ViewSettings:
    """Which questions heads are chosen and shown on, and which heads: "auto", "discover" or names."""

    n_pairs: int
    n_examples: int
    seed: int
    select_examples: int
    select_seed: int
    format: str = "terse"
    values: str = "10-99"
    heads: object = "auto"

    def task(self, lm: LanguageModel) -> Task:
        """The questions that heads are shown on."""
        return kv_task(self.n_pairs, self.n_examples, self.seed, self.format, self.values, lm.tokenizer)

    def select_task(self, lm: LanguageModel) -> Task:
        """The questions that heads are chosen on."""
        return kv_task(self.n_pairs, self.select_examples, self.select_seed, self.format, self.values, lm.tokenizer)

    @property
    def asked(self) -> Asked:
        """The questions on which heads="discover" finds heads."""
        return Asked("kv", DISCOVER_PAIRS, self.format, self.values)

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be shown for `lm`, before any long work."""
        if self.n_pairs < 2:
            raise GAError(f"n_pairs={self.n_pairs} must be 2 or more: with one value there is no wrong one.")
        if self.n_examples < 10 or self.select_examples < 10:
            raise GAError("n_examples and select_examples must be 10 or more, or no standard error means anything.")
        if self.heads == "auto" and self.seed == self.select_seed:
            raise GAError(f"seed and select_seed are both {self.seed}: heads must be chosen on other questions.")
        if not getattr(lm.tokenizer, "is_fast", False):
            raise GAError(f"{lm.name} has no fast tokenizer, so where a value's tokens are is not known.")
        check_fits(lm, self.task(lm))
        if self.heads == "discover":
            discover.check_seed(self.seed)
            discover.DiscoverSettings(self.asked).check(lm)
        elif self.heads == "auto":
            check_fits(lm, self.select_task(lm))
            for site in lm.sites:
                reading.check_kind(site)
        else:
            reading.by_site(lm, self.heads)


@dataclass(frozen=True)
class Shown:
    """One head on one question, and its last row over all questions.

    how: why this head. m ``[t, s]``, without D, and tokens: its matrix on `example` and the tokens' text; spans: the
    tokens of each value, right: which of them is asked for; last: the prompt's last token. right_share, wrong_share
    ``[n]``: share of the last row's absolute weight on the right value's tokens, and the mean over the others; hit
    ``[n]``: whether the heaviest token is one of the right value's; negative ``[n]``: share of the weight with a
    negative sign.
    """

    name: str
    title: str
    source: str
    revision: str | None
    head: Head
    kind: str
    how: str
    example: Example
    m: np.ndarray
    tokens: list[str]
    spans: list[tuple[int, int]]
    last: int
    right_share: np.ndarray
    wrong_share: np.ndarray
    hit: np.ndarray
    negative: np.ndarray
    records: list[Record]

    @property
    def right(self) -> int:
        """Which value is asked for."""
        return self.example.answer

    @property
    def without(self) -> str:
        """The words that say that a skip term D was left out, where the mixer has one."""
        return ", without D" if FAMILIES[self.kind].has_d else ""

    @property
    def row(self) -> np.ndarray:
        """The last token's row of `m`, ``[s]``."""
        return self.m[self.last]

    def shares(self) -> np.ndarray:
        """Share of the row's absolute weight on each value's tokens, ``[values]``."""
        weight = np.abs(self.row)
        return np.array([weight[a:b].sum() for a, b in self.spans]) / _total(weight)

    def caption(self) -> str:
        """What the picture of the last row shows, from the numbers in it."""
        shares = self.shares()
        others = np.delete(shares, self.right)
        value = self.example.candidates[self.right].strip()
        at = int(np.abs(self.row).argmax())
        inside = self.spans[self.right][0] <= at < self.spans[self.right][1]
        return (
            f"{self.head} of {self.title}, last row on one question{self.without}: how much the last token takes from "
            f"each token. Boxed: the value that belongs to the key, {value}. It gets {100 * shares[self.right]:.0f}% "
            f"of the row's absolute weight, the {len(others)} other values together {100 * others.sum():.0f}%; the "
            f"heaviest token, {100 * np.abs(self.row[at]) / _total(self.row):.0f}%, is "
            f"{'one of the boxed' if inside else 'another'}. {_signs(self.row)}"
        )

    def statistics(self) -> str:
        """The same over all questions, with standard errors."""
        n = len(self.right_share)
        return (
            f"Over {n} questions{self.without}, {self.head} puts {100 * self.right_share.mean():.1f}% ± "
            f"{100 * stderr(self.right_share):.1f} of its last row's absolute weight on the right value and "
            f"{100 * self.wrong_share.mean():.1f}% ± {100 * stderr(self.wrong_share):.1f} on each wrong one; its "
            f"heaviest token lies in the right value in {100 * self.hit.mean():.0f}% of them. "
            f"{_negative(self.negative)}"
        )


def random_model(name: str, text: str) -> LanguageModel:
    """The tiny random model of architecture `name` for pictures on `text`.

    Raises `GAError` for an architecture that is not there or has attention alone, and for a text that is too short or
    too long for a picture.
    """
    lm = exactness.random_model(exactness.check([name], [1])[0])
    if all(s.kind == "attention" for s in lm.sites):
        raise GAError(
            f"random_architecture={name!r} has attention alone, whose weights are never negative: try 'mamba2'."
        )
    n = lm.encode([text])["input_ids"].shape[1] if isinstance(text, str) else 0
    if not 4 <= n <= 48:
        raise GAError(f"text={text!r:.60} has {n} tokens for the random model (bytes); a picture takes 4 to 48.")
    return lm


def kind_name(lm: LanguageModel, head: Head) -> str:
    """What the head's mixer is called on pages."""
    return exactness.NAMES[lm.site(head).kind]


def heads_table(lm: LanguageModel) -> pd.DataFrame:
    """One row for each kind of mixer: in how many layers it is, its heads, their size, the projection's input."""
    rows = []
    for kind in dict.fromkeys(s.kind for s in lm.sites):
        here = [s for s in lm.sites if s.kind == kind]
        counts, sizes = (sorted({getattr(s, n) for s in here}) for n in ("n_heads", "head_dim"))
        rows.append(
            {
                "mixer": exactness.NAMES[kind],
                "in layers": len(here),
                "heads in each": " or ".join(map(str, counts)),
                "a head's width": " or ".join(map(str, sizes)),
                "projection's input": " or ".join(str(w) for w in sorted({s.width for s in here})),
            }
        )
    return pd.DataFrame(rows)


def show_heads(store: Store, lm: LanguageModel, settings: ViewSettings) -> list[Shown]:
    """The heads to show of `lm`, each on the first question and over all; what is stored is not measured again."""
    settings.check(lm)
    task = settings.task(lm)
    return [show_head(store, lm, task, head, how, chosen) for head, how, chosen in choose(store, lm, settings)]


def show_head(
    store: Store, lm: LanguageModel, task: Task, head: Head, how: str, records: Sequence[Record] = ()
) -> Shown:
    """One head on the first question of `task` and over all; `how` says why this one, `records` what that rests on."""
    example = task.examples[0]
    drawn = matrix_record(store, lm, example.prompt, head, with_d=False)
    rows = last_rows(store, lm, task, head)
    mass, right = rows.arrays["mass"], np.array([e.answer for e in task.examples])
    right_share = mass[np.arange(len(mass)), right]
    wrong_share = (mass.sum(1) - right_share) / (mass.shape[1] - 1)
    return Shown(
        lm.name, lm.title, lm.source, lm.revision, head, lm.site(head).kind, how, example, drawn.arrays["m"],
        drawn.values["tokens"], value_spans(lm, example), last_token(lm, example), right_share, wrong_share,
        rows.arrays["hit"], rows.arrays["negative"], [*records, drawn, rows],
    )  # fmt: skip


def choose(store: Store, lm: LanguageModel, settings: ViewSettings) -> list[tuple[Head, str, list[Record]]]:
    """Which heads to show, why, and the records behind that.

    "auto" takes one for each kind of mixer that the model has: the Aggregate head that the registry names, else the
    head whose last row puts the largest share of its absolute weight on the right value.
    """
    if settings.heads == "discover":
        heads, found = discover.discovered(store, lm, settings.asked, settings.seed)
        return [(heads[0], "the strongest Aggregate head that `ga heads` finds", found.records)]
    if settings.heads != "auto":
        return [(head, "named by the user", []) for head in parse_heads(settings.heads)]
    spec = find_spec(lm.name)
    named = parse_heads(list(spec.aggregate)) if spec and spec.aggregate else ()
    known = {lm.site(h).kind: h for h in reversed(named)}
    found = []
    for kind in dict.fromkeys(s.kind for s in lm.sites):
        if kind in known:
            found.append((known[kind], "the Aggregate head that the paper names", []))
            continue
        record = shares_on_right(store, lm, settings.select_task(lm), kind)
        best = int(record.arrays["right"].argmax())
        n, skipped = len(record.values["heads"]), record.values["of"]
        which = f"all {n}" if n == skipped else f"{n} of {skipped}, evenly spaced,"
        how = (
            f"of {which} {kind} heads the one whose last row puts most of its absolute weight on the right value, "
            f"{100 * record.arrays['right'][best]:.0f}% on average over {settings.select_examples} other questions"
        )
        found.append((parse_heads(record.values["heads"][best])[0], how, [record]))
    return found


def _total(values: np.ndarray) -> float:
    return float(np.abs(values).sum()) or 1.0


def _negative(shares: np.ndarray) -> str:
    return f"{100 * shares.mean():.0f}% of the weight is negative." if shares.any() else "No weight is negative."


def _signs(values: np.ndarray) -> str:
    negative = -values[values < 0].sum() / _total(values)
    if negative == 0:
        return f"No weight is negative, and they sum to {values.sum():.2f}."
    return f"{100 * negative:.0f}% of the weight is negative, and the row sums to {values.sum():.2f}.".replace("-", "−")
