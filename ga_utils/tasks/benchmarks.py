"""What do the paper's benchmarks ask? Their questions as tasks, by lm-eval's templates, each seed its own draw.

MMLU is asked in two forms, as in the paper's comparison of retrieval and knowledge: by the letter, which has to be
looked up among the options, and as cloze, where the options are not shown (paper, section 3; lm-eval's `mmlu` and
`mmlu_continuation`). No examples come before a question (0-shot), and special tokens are what the tokenizer adds by
default, which is what lm-eval 0.4.13 does; version 0.4.7, which the paper used, left BOS out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ga_utils.errors import TaskError
from ga_utils.tasks.base import Example, Segment, Task
from ga_utils.tasks.benchmark_data import (
    BENCHMARKS,
    KNOWLEDGE,
    Benchmark,
    find_benchmark,
    installed,
    read_rows,
    requests,
    rows_of,
)

__all__ = ["BENCHMARKS", "KNOWLEDGE", "benchmark_task", "installed", "knowledge_task", "letter_segments"]

#: questions are dealt into so many hands, so that seeds that differ modulo DRAWS never share a question
DRAWS = 4


def benchmark_task(name: str, n_examples: int | None = None, seed: int = 0, shuffle_options: bool = False) -> Task:
    """`n_examples` questions of the benchmark `name` (see BENCHMARKS), or with None every one that there is.

    Questions are dealt once into DRAWS hands; seed s draws from hand s modulo DRAWS, so that heads can be found on
    one and judged on another. MMLU's subjects come in proportion to their size, as in the paper's mean.
    shuffle_options puts the options of MMLU in another order, drawn from the seed: a model that prefers a letter, or
    knows an order, is found out.
    Raises TaskError for an unknown name, more questions than the hand holds, or data that are not installed.
    """
    benchmark = find_benchmark(name)
    if shuffle_options and name not in ("mmlu", "mmlu-cloze"):
        raise TaskError(f"shuffle_options is for mmlu and mmlu-cloze, whose options have an order, not {name!r}.")
    chosen = _draw(benchmark, n_examples, seed)
    made: dict[tuple[str, int], Example] = {}
    for subject in dict.fromkeys(s for s, _ in chosen):
        numbers = [i for s, i in chosen if s == subject]
        rows = read_rows(benchmark, subject, numbers)
        if shuffle_options:
            rows = [_shuffled(row, f"{seed} {subject} {i}") for row, i in zip(rows, numbers, strict=True)]
        for number, row, (asked, gold) in zip(numbers, rows, requests(benchmark, subject, rows), strict=True):
            made[subject, number] = _example(benchmark, row, asked, gold, f"{subject}/{number}")
    settings = {"n_examples": len(chosen), "seed": seed, "shuffle_options": shuffle_options, "shots": 0}
    return Task(
        name,
        tuple(made[c] for c in chosen),
        prompt_format="lm-eval",
        note=f"{benchmark.note}; 0-shot by lm-eval's template",
        settings=settings,
    )


def knowledge_task(n_examples: int, seed: int = 0) -> Task:
    """Questions of the paper's six knowledge tasks in turn, as one task: its accuracy is the mean over the six.

    What is left over a multiple of six is asked of the first ones.
    """
    each = -(-n_examples // len(KNOWLEDGE))
    parts = [benchmark_task(name, each, seed).examples for name in KNOWLEDGE]
    examples = [e for turn in zip(*parts, strict=True) for e in turn][:n_examples]
    note = f"in turn {', '.join(KNOWLEDGE)}; 0-shot by lm-eval's templates"
    return Task("knowledge", examples, "lm-eval", note=note, settings={"n_examples": n_examples, "seed": seed})


def letter_segments(prompt: str, options: Sequence[str], letters: Sequence[str], right: int) -> tuple[Segment, ...]:
    """Where the lines "A. option" lie in `prompt`, the last ones of that look; the value is the option's text."""
    block = "".join(f"{letter}. {option}\n" for letter, option in zip(letters, options, strict=True))
    at = prompt.rfind("\n" + block) + 1
    if not at:
        raise TaskError("The prompt does not list its options one to a line.")
    found = []
    for number, (letter, option) in enumerate(zip(letters, options, strict=True)):
        value = at + len(letter) + 2
        found.append(Segment((at, value + len(option) + 1), (value, value + len(option)), number == right))
        at = value + len(option) + 1
    return tuple(found)


def _draw(benchmark: Benchmark, n_examples: int | None, seed: int) -> list[tuple[str, int]]:
    every = list(rows_of(benchmark))
    if n_examples is None:
        return every
    random.Random("the hands of every seed").shuffle(every)
    hand = every[seed % DRAWS :: DRAWS]
    if not 1 <= n_examples <= len(hand):
        raise TaskError(
            f"{benchmark.name} has {len(every)} questions, of which a seed draws from {len(hand)}: n_examples must be "
            f"1 to {len(hand)}, or None for all, not {n_examples}."
        )
    return random.Random(f"{benchmark.name.partition('-cloze')[0]} {seed}").sample(hand, n_examples)


def _shuffled(row: dict, seed: str) -> dict:
    order = list(range(len(row["choices"])))
    random.Random(seed).shuffle(order)
    return {**row, "choices": [row["choices"][i] for i in order], "answer": order.index(row["answer"])}


def _example(benchmark: Benchmark, row: dict, asked: list[tuple[str, str]], gold: int, where: str) -> Example:
    contexts, continuations = [c for c, _ in asked], [c for _, c in asked]
    meta = {"from": where}
    if len(set(contexts)) > 1:  # the option is part of the context, and what follows it is scored
        shared = _common_start(contexts)
        options = [c[shared:] for c in contexts]
        return Example(
            contexts[0][:shared],
            tuple(o + c for o, c in zip(options, continuations, strict=True)),
            gold,
            meta=meta,
            counted=tuple(map(len, options)),
        )
    segments = ()
    if benchmark.name == "mmlu":
        segments = letter_segments(contexts[0], row["choices"], [c.strip() for c in continuations], gold)
    gold_text, kept = continuations[gold], list(dict.fromkeys(continuations))
    return Example(contexts[0], tuple(kept), kept.index(gold_text), segments, meta)


def _common_start(texts: list[str]) -> int:
    """Characters that all texts share, up to the last space among them, so that no word is cut."""
    n = next((i for i, c in enumerate(zip(*texts, strict=False)) if len(set(c)) > 1), min(map(len, texts)))
    return texts[0].rfind(" ", 0, n) + 1
