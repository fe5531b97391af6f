"""What do Gather and Aggregate heads look like, and how sharp are they? Claims C7 and C8, on one model at a time.

Every head is looked at on the same questions: the mass that segments' ends take from their own segment (Gather), and
that the prompt's last token takes from the right segment's end (Aggregate). The two heads themselves are drawn on the
first question. As in `patterns`, rows of mixers other than attention are read from |M| without D, divided by their sum.
A segment's end is the last token of its value and all up to the last of its line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from . import claims_transfer, head_rows, idealised, mixers
from .claims import Verdict
from .codehash import code_hash
from .heads import Head
from .language_model import LanguageModel
from .patterns import is_signed, measure_patterns
from .records import Record, Store
from .stats import stderr
from .task_choice import Asked
from .tasks import Task
from .tasks.tokens import encode, segment_tokens

ROLES = ("Gather", "Aggregate")
#: a row that gives the token before more than this share gathers nothing by itself
PREVIOUS = 0.5
#: questions in one forward pass
_BATCH = 16


@dataclass(frozen=True)
class Map:
    """One head on the first question: its matrix m ``[t, s]`` without D, and the tokens; row: the token that looks."""

    role: str
    head: Head
    m: np.ndarray
    tokens: list[str]
    row: int
    right: tuple[int, int]


@dataclass(frozen=True)
class MapsPage:
    """What was measured on one model.

    heads: role -> its strongest head. kinds: role -> that head's mixer. masses: role -> [h, n] of every head.
    sharp: role -> {entropy, top, mass, before: [n]} of that head's row on each question. asked: what was asked;
    questions: their digest, equal for models that answered the same ones.
    """

    model: str
    title: str
    source: str
    revision: str | None
    said: str
    asked: str
    questions: str
    every: tuple[Head, ...]
    heads: dict[str, Head]
    kinds: dict[str, str]
    masses: dict[str, np.ndarray]
    sharp: dict[str, dict[str, np.ndarray]]
    maps: tuple[Map, ...]
    records: tuple[Record, ...]

    def table(self) -> pd.DataFrame:
        """One row a role: sharpness, and mass beside the mean of all other heads."""
        rows = []
        for role, head in self.heads.items():
            number, look = self.every.index(head), self.sharp[role]
            mass = self.masses[role]
            rows.append(
                {
                    "model": self.model, "role": role, "head": str(head), "mixer": self.kinds[role],
                    "mass": _cell(mass[number]), "other heads' mass": f"{np.delete(mass, number, 0).mean():.2f}",
                    "entropy (nats)": _cell(look["entropy"]), "largest entry": _cell(look["top"]),
                    "token before": _cell(look["before"]),
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def sentence(self) -> str:
        """Which heads are shown, how they were found, and on which questions."""
        if not self.heads:
            return f"No Gather or Aggregate head is known, so there is no map to show. {self.said}"
        heads = "; ".join(f"{role}: {head}" for role, head in self.heads.items())
        return f"{heads} ({self.said.rstrip('.')}), looked at on {self.asked}."

    def warning(self) -> str:
        """What to mind if the Gather head does little but copy the token before; empty if it does not."""
        share = float(self.sharp["Gather"]["before"].mean()) if "Gather" in self.sharp else 0.0
        if share <= PREVIOUS:
            return ""
        return (
            f"{self.heads['Gather']} of {self.model} gives {100 * share:.0f}% of that row's weight to the token just "
            "before. Such a head stays within its own segment whatever it is for, so C7's mass says little about it: "
            "by itself it moves one token on, and what it collects was put together there by the layers before it."
        )

    def alike(self) -> Verdict:
        """Claim C7 on this model."""
        found = {role: (self.masses[role], self.every.index(head)) for role, head in self.heads.items()}
        return claims_transfer.looks_alike(self.model, found)


def measure(store: Store, lm: LanguageModel, settings: idealised.Settings, progress: bool = True) -> MapsPage:
    """Measure one model's maps, on letters where it can be asked them, else on key-value questions."""
    settings.check(lm)
    records: list[Record] = []
    gather, aggregate, said = idealised.find_heads(store, lm, settings, records, progress)
    tasks, _ = settings.tasks(lm)
    kind = "kv" if "key-value" in said or "letter" not in tasks else "letter"
    kind = kind if tasks[kind].examples[0].segments else "kv"
    task, every = tasks[kind], tuple(lm.head_list())
    heads = {role: some[0] for role, some in zip(ROLES, (gather, aggregate), strict=True) if some}
    masses, sharp, maps = {}, {}, []
    if heads:
        seen = _patterns(store, lm, task)
        rows = _rows(store, lm, task, every, "Aggregate")
        records += [seen, rows]
        masses = {
            "Gather": np.maximum(seen.arrays["gather_end"], seen.arrays["gather_value"]),
            "Aggregate": rows.arrays["mass"],
        }
    for role, head in heads.items():
        record = _rows(store, lm, task, (head,), role)
        records.append(record)
        sharp[role] = {name: record.arrays[name][0] for name in ("entropy", "top", "mass", "before")}
        maps.append(_map(store, lm, task, role, head, records))
    kinds, asked = {role: lm.site(h).kind for role, h in heads.items()}, Asked(kind, settings.n_pairs).said()
    return MapsPage(
        lm.name, lm.title, lm.source, lm.revision, said, asked, task.digest, every, heads, kinds, masses, sharp,
        tuple(maps), tuple(records),
    )  # fmt: skip


def smoother(pages: Sequence[MapsPage]) -> dict[str, Verdict]:
    """Claim C8: each model whose Aggregate head is no attention head, against the first whose is, on the same
    questions; by the model's name. A model without such a partner on the page is not testable."""
    found = {}
    for page in pages:
        if page.kinds.get("Aggregate", "attention") == "attention":
            continue
        partners = [p for p in pages if p.kinds.get("Aggregate") == "attention" and p.questions == page.questions]
        if not partners:
            why = "No model of this page answers the same questions with an attention head as its Aggregate head."
            found[page.model] = Verdict("C8", page.model, "not testable", why, {})
            continue
        rows = [(p.sharp["Aggregate"]["entropy"], p.sharp["Aggregate"]["top"]) for p in (partners[0], page)]
        found[page.model] = claims_transfer.smoother(page.model, *rows)
    return found


def _patterns(store: Store, lm: LanguageModel, task: Task) -> Record:
    """Pattern scores of all heads, the record that `discover` makes."""
    key = {"kind": "patterns", "model": lm.describe(), "task": task.key(), "code": code_hash("patterns")}
    return store.compute(key, lambda: ({"heads": len(lm.head_list())}, measure_patterns(lm, task).arrays()), _meta(lm))


def _rows(store: Store, lm: LanguageModel, task: Task, heads: Sequence[Head], role: str) -> Record:
    """One row of each head on each question: arrays entropy, top, mass, before (the token before), ``[h, n]``.

    Aggregate: the prompt's last token, mass on the right segment's end. Gather: the right segment's end where the row
    looks most at its own segment (the value's last token or the line's), mass on that segment.
    """
    key = {"kind": "map_rows", "model": lm.describe(), "task": task.key(), "role": role, "code": code_hash("head_maps")}
    key["heads"] = [str(h) for h in heads] if len(heads) < len(lm.head_list()) else "all"

    def run():
        parts = [_statistics(lm, task, heads, role, start) for start in range(0, len(task.examples), _BATCH)]
        return {}, {k: np.concatenate([p[k] for p in parts], 1) for k in parts[0]}

    return store.compute(key, run, _meta(lm))


def _statistics(lm: LanguageModel, task: Task, heads: Sequence[Head], role: str, start: int) -> dict[str, np.ndarray]:
    items = encode(lm.tokenizer, task)
    some = range(start, min(start + _BATCH, len(task.examples)))
    contexts = [items.items[i].context for i in some]
    spots = [_right(lm, task, i, items.special_tokens) for i in some]
    longest = max(map(len, contexts))
    batch = {
        "input_ids": torch.tensor([[*c, *[lm.pad_id] * (longest - len(c))] for c in contexts]),
        "attention_mask": torch.tensor([[1] * len(c) + [0] * (longest - len(c)) for c in contexts]),
    }
    if role == "Aggregate":
        positions = [[len(c) - 1] for c in contexts]
        spans = [
            [(value[1] - 1, line[1]), (len(c) - 2, len(c) - 1)]
            for (line, value), c in zip(spots, contexts, strict=True)
        ]
    else:
        positions = [[value[1] - 1, line[1] - 1] for line, value in spots]
        spans = [[line, *((p - 1, p) for p in here)] for (line, _), here in zip(spots, positions, strict=True)]
    found = mixers.row_statistics(lm, batch, heads, positions, spans, with_d=False)
    mass, entropy, top = found.mass[..., 0], found.entropy, found.top  # [h, b, r]
    before = torch.diagonal(found.mass[..., 1:], dim1=-2, dim2=-1)  # on the token before each row
    best = mass.mean(1, keepdim=True).argmax(-1, keepdim=True).expand(-1, mass.shape[1], -1)
    return {
        name: values.gather(-1, best)[..., 0].double().numpy()
        for name, values in (("mass", mass), ("entropy", entropy), ("top", top), ("before", before))
    }


def _right(lm: LanguageModel, task: Task, number: int, special: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Token spans of the right segment's line and of its value."""
    example = task.examples[number]
    return segment_tokens(lm.tokenizer, example, special)[[s.right for s in example.segments].index(True)]


def _map(store: Store, lm: LanguageModel, task: Task, role: str, head: Head, records: list[Record]) -> Map:
    example = task.examples[0]
    record = head_rows.matrix_record(store, lm, example.prompt, head, with_d=False)
    records.append(record)
    m, tokens = record.arrays["m"], record.values["tokens"]
    line, value = _right(lm, task, 0, task.special_tokens)
    row = len(encode(lm.tokenizer, task).items[0].context) - 1
    if role == "Gather":
        weight = np.abs(m) / np.maximum(np.abs(m).sum(-1, keepdims=True), 1e-30)
        row = max((value[1] - 1, line[1] - 1), key=lambda t: weight[t, line[0] : line[1]].sum())
    return Map(role, head, m, tokens, row, line)


def caption(found: Map, kind: str) -> str:
    """What a picture shows, and how the row that matters looks."""
    row = np.abs(found.m[found.row])
    own = row[found.right[0] : found.right[1]].sum() / max(row.sum(), 1e-30)
    who = "the right segment's end" if found.role == "Gather" else "the last token"
    signed = "absolute weight, D left out" if is_signed(kind) else "weight"
    return f"{found.role} {found.head}: {who} takes {100 * own:.0f}% of its {signed} from the right segment (boxed)."


def _cell(values: np.ndarray) -> str:
    return f"{values.mean():.2f} ± {stderr(values):.2f}"


def _meta(lm: LanguageModel) -> dict[str, object]:
    return {"model": lm.name, "source": lm.source, "revision": lm.revision}
