"""What are the embedded models asked? Four tasks on one vocabulary, and the knowledge score.

    letter        the analogue of MMLU: the fact must be known, and its option be found
                      options
                      A lo ki ge ma du
                      B ba ki ge ma ro
                      C lo ki ge ma ne
                      D re ki ge ma du
                      ask Ban                     -> " A"
    copy-letter   the name written out: retrieval without knowledge
                      (same options)
                      match lo ki ge ma du        -> " A"
    kv            1 to 16 pairs of a key of two syllables and a number
                      pairs
                      da mo 17
                      da ke 4
                      value da ke                 -> " 4"
    cloze         a fact in words, after 0 to 3 other facts
                      fact Ban is                 -> " lo ki ge ma du"
    knowledge     the same prompt, likelihood choice among four names of the category, no letters: the
    knowledge score

Lines end in a newline, questions do not: the answer comes right after the last word of the question.
Options of letter and copy-letter are of one category. `segments` of each example hold the span of every
option's or pair's line (newline included) and of its name or number; the last token of the line is where a
Gather head writes.

Examples depend on the seed and on their own number alone: the first 50 of 200 are the 50 of a shorter task.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ga_utils.errors import TaskError
from ga_utils.tasks.base import Example, Segment, Task
from ga_utils.tiny.language import LETTERS, NUMBERS, SYLLABLES, WORLD_SEED, World, draw, pick, world

MAX_PAIRS = 16
#: which siblings stand among the options of letter and copy-letter
OPTION_RULES = ("drawn", "share-start", "share-end", "share-both")


def _text(words: Sequence[str]) -> str:
    return " ".join(words)


def fact_line(w: World, entity: str) -> str:
    """The fact in words, newline included."""
    return f"fact {entity} is {_text(w.names[entity])}\n"


def pair_keys(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """n distinct keys of two syllables; half of the first syllables are shared, so that both count."""
    firsts = draw(rng, SYLLABLES, max(2, (n + 1) // 2))
    return draw(rng, [(a, b) for a in firsts for b in SYLLABLES if a != b], n)


def option_entities(rng: random.Random, w: World, entity: str, n: int, rule: str = "drawn") -> list[str]:
    """n - 1 other entities of the category of `entity`.

    rule: "drawn" takes any; "share-start" exactly one whose name has the same start (and none with the same
    end), "share-end" the reverse, "share-both" one of each.
    """
    if rule == "drawn":
        return draw(rng, w.siblings(entity), n - 1)
    chosen = []
    if rule in ("share-start", "share-both"):
        chosen += draw(rng, w.sharing(entity, True, False), 1)
    if rule in ("share-end", "share-both"):
        chosen += draw(rng, w.sharing(entity, False, True), 1)
    return chosen + draw(rng, w.sharing(entity, False, False), n - 1 - len(chosen))


def options_block(w: World, entities: Sequence[str], right: int) -> tuple[str, tuple[Segment, ...]]:
    """The options as text, and where each lies."""
    text, segments = "options\n", []
    for i, entity in enumerate(entities):
        name = _text(w.names[entity])
        line = f"{LETTERS[i]} {name}\n"
        start = len(text)
        segments.append(Segment((start, start + len(line)), (start + 2, start + 2 + len(name)), i == right))
        text += line
    return text, tuple(segments)


def _choice(rng: random.Random, w: World, n: int, rule: str, written_out: bool) -> Example:
    entity = draw(rng, w.entities, 1)[0]
    options = option_entities(rng, w, entity, n, rule)
    right = pick(rng, 0, n - 1)
    options = draw(rng, options, n - 1)
    options.insert(right, entity)
    text, segments = options_block(w, options, right)
    question = f"match {_text(w.names[entity])}" if written_out else f"ask {entity}"
    candidates = tuple(f" {x}" for x in LETTERS[:n])
    return Example(text + question, candidates, right, segments, {"entity": entity})


def _kv(rng: random.Random, n: int) -> Example:
    keys, values = pair_keys(rng, n), draw(rng, NUMBERS, n)
    right = pick(rng, 0, n - 1)
    text, segments = "pairs\n", []
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        line = f"{_text(key)} {value}\n"
        start, at = len(text), len(text) + len(line) - 1 - len(value)
        segments.append(Segment((start, start + len(line)), (at, at + len(value)), i == right))
        text += line
    candidates = tuple(f" {v}" for v in values)
    return Example(
        text + f"value {_text(keys[right])}", candidates, right, tuple(segments), {"key": _text(keys[right])}
    )


def _cloze(rng: random.Random, w: World, n_names: int) -> Example:
    entity, *before = draw(rng, w.entities, 1 + pick(rng, 0, 3))
    names = draw(rng, w.siblings(entity), n_names - 1)
    right = pick(rng, 0, n_names - 1)
    names.insert(right, entity)
    prompt = "".join(fact_line(w, e) for e in before) + f"fact {entity} is"
    return Example(prompt, tuple(" " + _text(w.names[e]) for e in names), right, (), {"entity": entity})


def _task(name: str, n_examples: int, seed: int, make: Callable[[random.Random], Example], **settings) -> Task:
    if n_examples < 1:
        raise TaskError(f"n_examples={n_examples} must be 1 or more.")
    stream = " ".join(f"{k}={v}" for k, v in sorted(settings.items()))
    examples = tuple(make(random.Random(f"tiny {name} {stream} {seed} {i}")) for i in range(n_examples))
    facts = {"n_examples": n_examples, "seed": seed, "world": WORLD_SEED, **settings}
    return Task(name, examples, "tiny", "none", settings=facts)


def _check_options(n_options: int, rule: str) -> None:
    if rule not in OPTION_RULES:
        raise TaskError(f"options={rule!r} is unknown: use one of {', '.join(OPTION_RULES)}.")
    low = 2 if rule == "drawn" else 3
    if not low <= n_options <= len(LETTERS):
        raise TaskError(f"n_options={n_options} must lie between {low} and {len(LETTERS)} for options={rule!r}.")


def letter_task(n_examples: int, seed: int, n_options: int = 4, options: str = "drawn") -> Task:
    """Multiple choice by letter that needs a stored fact. Chance 1 / n_options."""
    _check_options(n_options, options)
    return _task(
        "tiny-letter",
        n_examples,
        seed,
        lambda r: _choice(r, world(), n_options, options, False),
        n_options=n_options,
        options=options,
    )


def copy_letter_task(n_examples: int, seed: int, n_options: int = 4, options: str = "drawn") -> Task:
    """Multiple choice by letter with the name written out: needs no fact. Chance 1 / n_options."""
    _check_options(n_options, options)
    return _task(
        "tiny-copy-letter",
        n_examples,
        seed,
        lambda r: _choice(r, world(), n_options, options, True),
        n_options=n_options,
        options=options,
    )


def kv_task(n_pairs: int, n_examples: int, seed: int) -> Task:
    """Key-value retrieval among 1 to 16 pairs. Chance 1 / n_pairs (among the values that are listed)."""
    if not 1 <= n_pairs <= MAX_PAIRS:
        raise TaskError(f"n_pairs={n_pairs} must lie between 1 and {MAX_PAIRS}.")
    return _task("tiny-kv", n_examples, seed, lambda r: _kv(r, n_pairs), n_pairs=n_pairs)


def cloze_task(n_examples: int, seed: int) -> Task:
    """Facts in words among the 12 names of the category (chance 1/12); `Scores.full_vocab_accuracy` is the
    exact
    cloze: all five syllables by greedy choice over the whole vocabulary."""
    return _task("tiny-cloze", n_examples, seed, lambda r: _cloze(r, world(), 12))


def knowledge_task(n_examples: int, seed: int) -> Task:
    """The knowledge score: likelihood choice among four names of the category, without letters. Chance
    1/4."""
    return _task("tiny-knowledge", n_examples, seed, lambda r: _cloze(r, world(), 4))


#: an accuracy that reading the start alone, or the end alone, cannot exceed on its shortcut check
SHORTCUT_CEILING = 0.5


def shortcut_tasks(kind: str, n_examples: int, seed: int) -> dict[str, Task]:
    """The one-symbol shortcut check of "letter" or "copy-letter": among four options exactly one other
    shares the start (or the end) of the right name. A model that compares only that symbol scores at most
    one half on that check; one that has learned the task scores well on both. The wrong symbol alone still
    scores well on the other check, so both are needed."""
    tasks = {"letter": letter_task, "copy-letter": copy_letter_task}
    if kind not in tasks:
        raise TaskError(f"kind={kind!r} has no shortcut check: use 'letter' or 'copy-letter'.")
    return {rule: tasks[kind](n_examples, seed, 4, rule) for rule in ("share-start", "share-end")}
