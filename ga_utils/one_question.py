"""How is one question answered, step by step? The book's opening: one question, two heads, four letters.

The Gather head is read at the token of the right option that the Aggregate head reads most, the Aggregate head at the
prompt's last token. Then each is switched off. One question is an illustration; the pages that follow ask hundreds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from . import head_rows
from .errors import TaskError
from .heads import Head
from .language_model import LanguageModel
from .live_heads import random_beside, training_record
from .measure import Condition, named_heads, score_under
from .records import Record, Store
from .task_choice import Asked
from .tasks import segment_tokens


@dataclass(frozen=True)
class OneQuestion:
    """What was seen: token texts; `right` [first, past the last) of the right option's line; rows ``[s]`` by role.

    at: role -> the token whose row it is. letters: the answers. shares: condition -> probability of each letter among
    the letters.
    """

    model: str
    title: str
    prompt: str
    tokens: tuple[str, ...]
    right: tuple[int, int]
    answer: str
    heads: dict[str, Head]
    at: dict[str, int]
    rows: dict[str, np.ndarray]
    letters: tuple[str, ...]
    shares: dict[str, np.ndarray]
    records: tuple[Record, ...]

    def caption(self, role: str) -> str:
        """Where the head of this role looks, from its row."""
        row, (first, end) = np.abs(self.rows[role]), self.right
        top = int(row.argmax())
        where = "the last token" if role == "Aggregate" else f"token {self.at[role]} ({self.tokens[self.at[role]]!r})"
        return (
            f"{role} head {self.heads[role]} of {self.model}, row of {where}: "
            f"{100 * row[first:end].sum() / row.sum():.0f}% of its weight lies in the right option (boxed), most "
            f"({100 * row[top] / row.sum():.0f}%) on token {top} ({self.tokens[top]!r})."
        )

    def table(self) -> pd.DataFrame:
        """Probability of each letter among the letters, in percent, under each condition."""
        rows = []
        for condition, shares in self.shares.items():
            chosen = self.letters[int(shares.argmax())].strip()
            each = {
                f"{letter.strip()}{' (right)' if letter == self.answer else ''}": f"{100 * share:.1f}"
                for letter, share in zip(self.letters, shares, strict=True)
            }
            rows.append({"condition": condition, **each, "answer": chosen})
        return pd.DataFrame(rows)


def heads_of(lm: LanguageModel, gather: str, aggregate: str) -> dict[str, Head]:
    """The two heads: as named, or with "recorded" those that the embedded model's training record names.

    Raises `TaskError` for a model whose record names none.
    """
    found = {}
    for role, name in (("Gather", gather), ("Aggregate", aggregate)):
        if name == "recorded":
            name = _recorded(lm, role)
            if not name:
                raise TaskError(
                    f"{lm.name} has no record that names its {role} head: name one, such as {role.lower()}=L2H2."
                )
        found[role] = named_heads(lm, name)[0]
    return found


def measure(store: Store, lm: LanguageModel, gather: str, aggregate: str, seed: int, number: int = 0) -> OneQuestion:
    """One letter question, drawn from `seed`, and what two heads do in it."""
    heads = heads_of(lm, gather, aggregate)
    task = Asked("letter").task(lm, number + 1, seed)
    example = task.examples[number]
    alone = type(task)(task.name, (example,), task.prompt_format, task.special_tokens)
    right = segment_tokens(lm.tokenizer, example, task.special_tokens)[example.answer][0]
    made = {r: head_rows.matrix_record(store, lm, example.prompt, h, with_d=False) for r, h in heads.items()}
    records, tokens = list(made.values()), tuple(made["Aggregate"].values["tokens"])
    last = made["Aggregate"].arrays["m"][-1]
    at = {"Aggregate": len(tokens) - 1, "Gather": right[0] + int(np.abs(last[right[0] : right[1]]).argmax())}
    rows = {role: record.arrays["m"][at[role]] for role, record in made.items()}
    beside = random_beside(lm, heads["Aggregate"], 1, seed, list(heads.values()))
    conditions = [
        Condition("intact"),
        Condition(f"Gather head {heads['Gather']} off", (heads["Gather"],)),
        Condition(f"Aggregate head {heads['Aggregate']} off", (heads["Aggregate"],)),
        *(Condition(f"another head, {h}, off", (h,)) for h in beside),
    ]
    shares = {}
    for condition in conditions:
        record = score_under(store, lm, alone, condition)
        records.append(record)
        odds = np.exp(record.arrays["logprobs"][0] - record.arrays["logprobs"][0].max())
        shares[condition.label] = odds / odds.sum()
    return OneQuestion(
        lm.name, lm.title, example.prompt, tokens, tuple(right), example.candidates[example.answer], heads, at, rows,
        example.candidates, shares, tuple(records),
    )  # fmt: skip


def _recorded(lm: LanguageModel, role: str) -> str:
    looks = (training_record(lm.source) or {}).get("pruning") or []
    if not looks:
        return ""
    return (looks[0]["kept"] if role == "Aggregate" else looks[0]["gather"]["kept"]) or ""
