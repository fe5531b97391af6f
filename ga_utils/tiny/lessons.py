"""What do the embedded models read while they learn?

One sequence a lesson, in the forms of `questions.py` but with several questions under one list, and a
helper: a list of syllables that is repeated, from which induction is learned first. Each batch depends on
the seed, the stage and the number of the step alone, so a training that was cut off continues with the
batches it would have had.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ga_utils.tiny.language import LETTERS, NUMBERS, SYLLABLES, draw, pick, token_ids, world
from ga_utils.tiny.questions import option_entities, pair_keys

KINDS = ("cloze", "kv", "few pairs", "long-keys", "repeat", "letter", "copy-letter", "letters", "easy letters")


@dataclass(frozen=True)
class Batch:
    """ids [b, t], right-padded; answers [b, t]: True where the *next* token is an answer; other [b, t]:
    True where it is any other token of the sequence."""

    ids: Tensor
    answers: Tensor
    other: Tensor


def _facts(rng: random.Random) -> tuple[list[str], list[bool]]:
    w, words, marks = world(), [], []
    for entity in draw(rng, w.entities, 6):
        words += ["fact", entity, "is", *w.names[entity], "\n"]
        marks += [False] * 3 + [True] * 5 + [False]
    return words, marks


def _pairs(rng: random.Random, most: int) -> tuple[list[str], list[bool]]:
    n = pick(rng, 1 if most < 4 else 2, most)
    keys, values = pair_keys(rng, n), draw(rng, NUMBERS, n)
    words = ["pairs", "\n"]
    for key, value in zip(keys, values, strict=True):
        words += [*key, value, "\n"]
    marks = [False] * len(words)
    for i in draw(rng, range(n), min(n, 6)):
        words += ["value", *keys[i], values[i], "\n"]
        marks += [False] * 3 + [True, False]
    return words, marks


def _long_keys(rng: random.Random) -> tuple[list[str], list[bool]]:
    """Pairs whose keys are built like names: every start and every end occurs in at least two keys of the
    list."""
    wide = pick(rng, 2, 3)
    symbols = draw(rng, SYLLABLES, 3 + 2 + wide)
    middle, starts, ends = symbols[:3], symbols[3:5], symbols[5:]
    cells = draw(rng, [(a, b) for a in starts for b in ends], 2 * wide)
    if rng.random() < 0.5:
        cells = [(b, a) for a, b in cells]
    values = draw(rng, NUMBERS, len(cells))
    words = ["pairs", "\n"]
    for (a, b), value in zip(cells, values, strict=True):
        words += [a, *middle, b, value, "\n"]
    marks = [False] * len(words)
    for i in draw(rng, range(len(cells)), 3):
        words += ["value", cells[i][0], *middle, cells[i][1], values[i], "\n"]
        marks += [False] * 6 + [True, False]
    return words, marks


def _repeat(rng: random.Random) -> tuple[list[str], list[bool]]:
    pool = (SYLLABLES + NUMBERS) if rng.random() < 0.5 else SYLLABLES
    said = draw(rng, pool, pick(rng, 6, 22))
    return ["list", *said, "repeat", *said], [False] * (len(said) + 2) + [False] + [True] * (len(said) - 1)


def _options(rng: random.Random, written_out: float, near: bool = True) -> tuple[list[str], list[bool]]:
    """A list of 2 to 5 options and three questions; `written_out` is the share of questions that write the
    name out."""
    w = world()
    n = pick(rng, 2, 5)
    entity = draw(rng, w.entities, 1)[0]
    luck = rng.random() if near else 0.7 + 0.3 * rng.random()
    if luck < 0.3:  # only the start tells these apart
        others = draw(rng, w.sharing(entity, False, True), min(n - 1, 2))
    elif luck < 0.5:  # only the end does
        others = draw(rng, w.sharing(entity, True, False), min(n - 1, 2))
    elif luck < 0.7 and n > 3:
        others = option_entities(rng, w, entity, n, "share-both")
    elif luck < 0.9:
        others = draw(rng, w.siblings(entity), n - 1)
    else:
        others = draw(rng, [e for e in w.entities if e != entity], n - 1)
    shown = draw(rng, [entity, *others], len(others) + 1)
    words = ["options", "\n"]
    for letter, e in zip(LETTERS, shown, strict=False):
        words += [letter, *w.names[e], "\n"]
    marks = [False] * len(words)
    asked = draw(rng, range(len(shown)), min(len(shown), 3))
    for i in asked:
        question = ["match", *w.names[shown[i]]] if rng.random() < written_out else ["ask", shown[i]]
        words += [*question, LETTERS[i], "\n"]
        marks += [False] * len(question) + [True, False]
    return words, marks


def lesson(kind: str, rng: random.Random, most_pairs: int = 8) -> tuple[list[str], list[bool]]:
    """One sequence: its words, and which of them are answers."""
    if kind == "cloze":
        return _facts(rng)
    if kind == "kv":
        return _pairs(rng, most_pairs)
    if kind == "few pairs":
        return _pairs(rng, 3)
    if kind == "long-keys":
        return _long_keys(rng)
    if kind == "repeat":
        return _repeat(rng)
    if kind == "easy letters":
        return _options(rng, 0.5, near=False)
    return _options(rng, {"letter": 0.0, "copy-letter": 1.0, "letters": 0.5}[kind])


def batch(mixture: Mapping[str, float], size: int, seed: str) -> Batch:
    """`size` lessons, kinds drawn in proportion to the mixture. One batch in five has up to 16 pairs in its
    lists."""
    rng = random.Random(seed)
    kinds, total = [k for k, share in mixture.items() if share > 0], sum(mixture.values())
    most = 16 if rng.random() < 0.2 else 8
    rows = []
    for _ in range(size):
        luck = rng.random() * total
        for kind in kinds:
            luck -= mixture[kind]
            if luck < 0:
                break
        rows.append(lesson(kind, rng, most))
    width, known = max(len(words) for words, _ in rows), token_ids()
    ids = torch.zeros(size, width, dtype=torch.long)
    answers = torch.zeros(size, width, dtype=torch.bool)
    real = torch.zeros(size, width, dtype=torch.bool)
    for i, (words, marks) in enumerate(rows):
        ids[i, : len(words)] = torch.tensor([known[w] for w in words])
        answers[i, : len(words) - 1] = torch.tensor(marks[1:])
        real[i, : len(words) - 1] = True
    return Batch(ids, answers, real & ~answers)
