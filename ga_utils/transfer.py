"""Can retrieval be switched off in a hybrid's attention, or grafted into a student? What claims C11 to C13 rest on."""

from __future__ import annotations

from collections.abc import Sequence

from . import claims_transfer
from .claims import Verdict
from .errors import GAError
from .heads import Head
from .language_model import LanguageModel
from .measure import Condition, score_under
from .records import Record, Store
from .surgery import graft_heads, graft_layers
from .task_choice import Asked


def delegation(
    store: Store, lm: LanguageModel, asked: Asked, n_examples: int, seed: int
) -> tuple[Verdict, list[Record]]:
    """Claim C11 on a hybrid: its attention heads, or its other heads, masked where the answer is predicted.

    Raises `GAError` for a model that is no hybrid.
    """
    attention = tuple(h for h in lm.head_list() if lm.site(h).kind == "attention")
    others = tuple(h for h in lm.head_list() if lm.site(h).kind != "attention")
    if not attention or not others:
        raise GAError(f"{lm.name} is no hybrid: it has {'attention alone' if attention else 'no attention'}.")
    tasks = [a.task(lm, n_examples, seed) for a in (asked, Asked("knowledge"))]
    records, found = [], []
    for condition in (
        Condition("intact"),
        Condition("attention off", attention, "answer"),
        Condition("other heads off", others, "answer"),
    ):
        pair = [score_under(store, lm, task, condition) for task in tasks]
        records += pair
        found.append(tuple(r.arrays["correct"] for r in pair))
    verdict = claims_transfer.delegated(lm.name, *found, (tasks[0].chance, tasks[1].chance))
    return verdict, records


def replacement(
    store: Store,
    student: LanguageModel,
    teacher: LanguageModel,
    heads: Sequence[Head],
    asked: Asked,
    n_examples: int,
    seed: int,
) -> tuple[list[Verdict], list[Record]]:
    """Claims C12 and C13 on a student of `teacher`: every layer grafted whole, and the teacher's Aggregate head alone.

    heads: the teacher's Aggregate heads, strongest first. Raises `GAError` if there are none.
    """
    if not heads:
        raise GAError(f"{teacher.name} has no Aggregate head to graft.")
    task, intact, records = asked.task(student, n_examples, seed), Condition("intact"), []

    def ask(lm: LanguageModel):
        records.append(score_under(store, lm, task, intact))
        return records[-1].arrays["correct"]

    alone, taught, swaps = ask(student), ask(teacher), {}
    for layer in range(student.n_layers):
        with graft_layers(student, teacher, layer) as grafted:
            swaps[layer] = ask(grafted)
    with graft_heads(student, teacher, [heads[0]]) as grafted:
        one = ask(grafted)
    layers = list(dict.fromkeys(h.layer for h in heads))
    best = max(swaps, key=lambda layer: swaps[layer].mean())
    return [
        claims_transfer.restored(student.name, alone, taught, swaps, layers, task.chance),
        claims_transfer.head_alone(student.name, alone, swaps[best], one, (str(heads[0]), best)),
    ], records
