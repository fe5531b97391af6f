"""Which language do the embedded models speak?

A synthetic language in which knowledge and retrieval can be told apart. It has 181 words, one token each,
written with spaces between them, and 96 facts: every entity has a name of five syllables.

    fact Ban is lo ki ge ma du      Ban's name. It stands nowhere in a prompt: it can only come from the
    weights.

A name is ``start m m m end``. The three middle syllables belong to the category (8 categories of 12
entities), so they tell no two options of one category apart. ``start`` and ``end`` come from a 4 x 4 grid
of the category's own symbols, of which 12 cells are taken: each start and each end occurs in three names of
the category, so neither alone identifies one. From the newline after a name, ``start`` lies five tokens
back, out of reach of one convolution of width 4 (two stacked ones do reach it: claims of gathering need a
convolution-off ablation as well).

The five tasks on it are in `questions.py`, what models are trained on in `lessons.py`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, NEWLINE = "<pad>", "\n"
MARKS = ("options", "ask", "match", "pairs", "value", "fact", "is", "list", "repeat")
LETTERS = ("A", "B", "C", "D", "E")
SYLLABLES = tuple(c + v for c in "bdgklmnr" for v in "aeio")
ENTITIES = tuple(c + v for c in "BDFGHJKLMNPRSTVZ" for v in ("an", "el", "ix", "or", "um", "ys"))
NUMBERS = tuple(str(i) for i in range(32))
#: token id -> word
VOCABULARY = (PAD, NEWLINE, "<unk>", *MARKS, *LETTERS, *SYLLABLES, *ENTITIES, *NUMBERS)
N_CATEGORIES, PER_CATEGORY, MIDDLE, GRID = 8, 12, 3, 4
WORLD_SEED = 0  # the facts are the same for every model; seeds of models and tasks are others

#: cells (start, end) of the 4 x 4 grid that no name of a category takes: one in each row and column
_FREE = {(i, i) for i in range(GRID)}


def draw(rng: random.Random, pool: Sequence, k: int) -> list:
    """k distinct items of pool. Uses rng.random() alone, the part of Python's generator that is promised to
    stay."""
    pool = list(pool)
    for i in range(k):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:k]


def pick(rng: random.Random, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


@dataclass(frozen=True)
class World:
    """The facts. entities: all 96, category by category (12 each); names: entity -> its five syllables."""

    entities: tuple[str, ...]
    names: dict[str, tuple[str, ...]]

    def category(self, entity: str) -> int:
        """Number of the category, 0 to 7."""
        return self.entities.index(entity) // PER_CATEGORY

    def siblings(self, entity: str) -> tuple[str, ...]:
        """The other 11 entities of the category."""
        start = self.category(entity) * PER_CATEGORY
        return tuple(e for e in self.entities[start : start + PER_CATEGORY] if e != entity)

    def sharing(self, entity: str, start: bool, end: bool) -> tuple[str, ...]:
        """Siblings whose names share the start (or do not), and share the end (or do not)."""
        name = self.names[entity]
        return tuple(
            e
            for e in self.siblings(entity)
            if (self.names[e][0] == name[0]) == start and (self.names[e][-1] == name[-1]) == end
        )


@functools.cache
def world() -> World:
    """The facts of the shipped models, always the same."""
    rng = random.Random(f"world {WORLD_SEED}")
    entities = draw(rng, ENTITIES, len(ENTITIES))
    names: dict[str, tuple[str, ...]] = {}
    for c in range(N_CATEGORIES):
        symbols = draw(rng, SYLLABLES, MIDDLE + 2 * GRID)
        middle, starts, ends = symbols[:MIDDLE], symbols[MIDDLE : MIDDLE + GRID], symbols[MIDDLE + GRID :]
        cells = [(i, j) for i in range(GRID) for j in range(GRID) if (i, j) not in _FREE]
        members = entities[c * PER_CATEGORY : (c + 1) * PER_CATEGORY]
        for entity, (i, j) in zip(members, draw(rng, cells, PER_CATEGORY), strict=True):
            names[entity] = (starts[i], *middle, ends[j])
    return World(tuple(entities), names)


@functools.cache
def token_ids() -> dict[str, int]:
    """word -> token id."""
    return {word: i for i, word in enumerate(VOCABULARY)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words apart at spaces, every newline a token of its own, nothing added in front or behind."""
    tok = Tokenizer(models.WordLevel(token_ids(), unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.Split(" ", "removed")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token=PAD,
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
