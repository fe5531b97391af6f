"""What does a model know of the world? Some two hundred facts of our own, asked by the letter and as cloze.

Capitals, currencies and chemical symbols, in ``world_facts.tsv``. The same question can be asked in both forms, with
the same four answers, so that what only the letter form needs is retrieval: the letter form lists the options and asks
for a letter, the cloze form asks for the answer itself and shows none. Wrong options are answers of the same kind.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

from ga_utils.errors import TaskError
from ga_utils.tasks.base import Example, Task
from ga_utils.tasks.benchmarks import DRAWS, letter_segments

LETTERS = ("A", "B", "C", "D")
_ASKED = {
    "capital": ("What is the capital of {}?", "The capital of {} is"),
    "currency": ("What is the currency of {} called?", "The currency of {} is called the"),
    "symbol": ("What is the chemical symbol of {}?", "The chemical symbol of {} is"),
}


@functools.cache
def facts() -> tuple[tuple[str, str, str], ...]:
    """Every fact as (kind, of what, answer)."""
    text = Path(__file__).with_name("world_facts.tsv").read_text(encoding="utf-8")
    return tuple(tuple(line.split("\t")) for line in text.splitlines() if not line.startswith("#"))


def world_task(form: str, n_examples: int, seed: int = 0) -> Task:
    """`n_examples` facts in the `form` "letter" or "cloze"; equal seeds ask the same facts with the same options.

    Seeds that differ modulo DRAWS share no fact. Raises TaskError for an unknown form or too many questions.
    """
    if form not in ("letter", "cloze"):
        raise TaskError(f"form={form!r} is unknown: use 'letter' or 'cloze'.")
    every = list(facts())
    random.Random("the hands of every seed").shuffle(every)
    hand = every[seed % DRAWS :: DRAWS]
    if not 1 <= n_examples <= len(hand):
        raise TaskError(f"A seed draws from {len(hand)} facts: n_examples={n_examples} must be 1 to {len(hand)}.")
    draw = random.Random(f"world {seed}")
    examples = []
    for kind, of, answer in draw.sample(hand, n_examples):
        options = [answer, *draw.sample(sorted({a for k, _, a in facts() if k == kind} - {answer}), 3)]
        draw.shuffle(options)
        examples.append(_example(form, kind, of, options, options.index(answer)))
    settings = {"n_examples": n_examples, "seed": seed, "form": form, "shots": 0}
    return Task(f"world-{form}", tuple(examples), "plain", settings=settings)


def _example(form: str, kind: str, of: str, options: list[str], right: int) -> Example:
    question, statement = _ASKED[kind]
    if form == "cloze":
        return Example(statement.format(of), tuple(f" {o}" for o in options), right, meta={"kind": kind})
    lines = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, options, strict=True))
    prompt = f"{question.format(of)}\n{lines}Answer:"
    segments = letter_segments(prompt, options, LETTERS, right)
    return Example(prompt, tuple(f" {letter}" for letter in LETTERS), right, segments, {"kind": kind})
