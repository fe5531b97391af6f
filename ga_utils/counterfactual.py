"""What if another answer were right? Pairs of prompts that hold the same tokens, two of them swapped.

Each prompt is paired with the same prompt in which the answer's value (key-value retrieval) or the answer's option
(multiple choice) has changed places with a distractor's. The key then has the distractor's value, and the name the
distractor's letter: the right answer moves, and nothing else does. Measured is the *logit difference*, the
log-probability of the answer less that of the answer to the swapped prompt. Accuracies near 1 or near chance hide
effects that it shows; and what a model knows without reading the prompt, and its liking for some letter or number,
are the same in both terms and cancel.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import TaskError
from .language_model import LanguageModel
from .scoring import score
from .tasks.base import Example, Segment, Task, as_task
from .tasks.tokens import encode_whole, segment_tokens


@dataclass(frozen=True)
class Pairs:
    """Examples and their counterparts, in order: `swapped.examples[i]` is `task.examples[i]` with two values swapped.

    Both have the same candidates. places: for each pair, the numbers of the two segments whose values changed places,
    the one that holds the answer first; the second is also the number of the candidate that becomes right.
    """

    task: Task
    swapped: Task
    places: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.places)


def swapped(task: Task | Sequence[Example], seed: int = 0, tokenizer: object = None) -> Pairs:
    """Pair every example with the one in which the answer's value is swapped with a distractor's.

    Segment i must hold candidate i, as in key-value retrieval (whose segments' values are the candidates) and multiple
    choice (whose candidates are letters). The distractor is drawn for each example from its number and `seed` alone.
    With a `tokenizer`, only distractors with as many tokens as the answer's value are drawn; without, any, and
    `check_pairs` tells whether that went well. Raises `TaskError`, naming the example, if it has no segments, only one,
    not one for each candidate, or no distractor that fits.
    """
    task = as_task(task)
    made, places = [], []
    for number, example in enumerate(task.examples):
        right, others = _distractors(task, number, tokenizer)
        other = others[int(random.Random(f"swap {seed} {number}").random() * len(others))]
        made.append(_swap(example, right, other))
        places.append((right, other))
    settings = {**task.settings, "swapped": seed}
    other_task = dataclasses.replace(task, name=f"{task.name}-swapped", examples=tuple(made), settings=settings)
    return Pairs(task, other_task, tuple(places))


def swappable(task: Task | Sequence[Example], tokenizer: object) -> Task:
    """The examples of `task` that have a distractor with as many tokens as the answer's value, as a task of their own.

    Options of multiple choice differ in length: what is measured on these examples is not measured on the others, so
    say how many were kept. Raises `TaskError` if there are none, or an example cannot be swapped for another reason.
    """
    task = as_task(task)
    kept = tuple(e for n, e in enumerate(task.examples) if _distractors(task, n, tokenizer, none_is_wrong=False)[1])
    if not kept:
        raise TaskError(f"Task {task.name!r} has no example with a distractor as long in tokens as the answer's value.")
    settings = {**task.settings, "swappable": len(kept)}
    return dataclasses.replace(task, examples=kept, settings=settings)


def check_pairs(lm: LanguageModel, pairs: Pairs) -> None:
    """Raise `TaskError`, with the example and the reason, unless the model reads each pair as the same tokens swapped.

    Both prompts must have equally many tokens, the same ones in another order, and differ only in the tokens of the two
    swapped values; both must take the same tokens for their candidates.
    """
    if not isinstance(pairs, Pairs):
        raise TaskError(f"Pairs of prompts are needed, as swapped(task) makes them, not {type(pairs).__name__}.")
    first, second = encode_whole(lm.tokenizer, pairs.task), encode_whole(lm.tokenizer, pairs.swapped)
    for number, (a, b) in enumerate(zip(first.items, second.items, strict=True)):
        name = f"Example {number} of task {pairs.task.name!r} and its swapped prompt"
        if len(a.context) != len(b.context):
            raise TaskError(
                f"{name} have {len(a.context)} and {len(b.context)} tokens, so positions do not correspond: choose "
                "distractors by swapped(task, tokenizer=lm.tokenizer)."
            )
        if a.continuations != b.continuations:
            raise TaskError(f"{name} take different tokens for the same candidates, so they cannot be compared.")
        differ = {i for i, (x, y) in enumerate(zip(a.context, b.context, strict=True)) if x != y}
        allowed = set()
        for task in (pairs.task, pairs.swapped):
            spans = segment_tokens(lm.tokenizer, task.examples[number], task.special_tokens)
            allowed |= {i for place in pairs.places[number] for i in range(*spans[place][1])}
        if not differ:
            raise TaskError(f"{name} have the same tokens: the two values cannot be told apart.")
        if differ - allowed:
            raise TaskError(
                f"{name} also differ at token {min(differ - allowed)}, which belongs to neither of the swapped values."
            )
        if Counter(a.context) != Counter(b.context):
            raise TaskError(
                f"{name} hold different tokens: the tokenizer splits a value otherwise at its new place, so the swap "
                "changes more than the order."
            )


def logit_difference(lm: LanguageModel, pairs: Pairs, on: str = "task", batch_size: int | None = None) -> np.ndarray:
    """Log-probability of the answer less that of the swapped prompt's answer, for each example: ``[n]``, nats.

    on: the prompts that are asked, "task" or "swapped"; on the swapped ones a model that reads the prompt gives
    negative numbers. For candidates of several tokens these are sums over their tokens.
    """
    return score(lm, _two_candidates(pairs, on), batch_size).logprobs @ np.array([1.0, -1.0])


def _two_candidates(pairs: Pairs, on: str) -> Task:
    """The examples with the answer and the swapped prompt's answer as their candidates, in this order."""
    if not isinstance(pairs, Pairs):
        raise TaskError(f"Pairs of prompts are needed, as swapped(task) makes them, not {type(pairs).__name__}.")
    if on not in ("task", "swapped"):
        raise TaskError(f"on={on!r} is unknown: use 'task' or 'swapped'.")
    task: Task = getattr(pairs, on)
    examples = tuple(
        Example(e.prompt, tuple(e.candidates[i] for i in pair), 0, e.segments, e.meta)
        for e, pair in zip(task.examples, pairs.places, strict=True)
    )
    return dataclasses.replace(task, examples=examples)


def _value(example: Example, number: int) -> str:
    return example.prompt[slice(*example.segments[number].value)]


def _distractors(task: Task, number: int, tokenizer: object, none_is_wrong: bool = True) -> tuple[int, list[int]]:
    """The number of the segment that holds the answer, and those of the segments it may be swapped with."""
    example = task.examples[number]
    name = f"Example {number} of task {task.name!r}"
    count = len(example.segments)
    if count < 2:
        has = "no segments" if not count else "only one segment"
        raise TaskError(f"{name} has {has}, so there is no other value to swap the answer's with.")
    right = [i for i, s in enumerate(example.segments) if s.right]
    if count != len(example.candidates) or right != [example.answer]:
        raise TaskError(
            f"{name} has {count} segments (right: {right}) and {len(example.candidates)} candidates (answer: "
            f"{example.answer}): swapping needs one segment for each candidate, in the candidates' order."
        )
    own = _value(example, example.answer)
    others = [i for i in range(count) if _value(example, i) != own]
    if tokenizer is not None:
        spans = segment_tokens(tokenizer, example, task.special_tokens)
        widths = [stop - start for _, (start, stop) in spans]
        others = [i for i in others if widths[i] == widths[example.answer]]
    if not others and none_is_wrong:
        long = " of as many tokens" if tokenizer is not None else ""
        raise TaskError(
            f"{name} has no other value{long} to swap the answer's {own!r:.40} with: keep the examples that do, with "
            "swappable(task, tokenizer)."
        )
    return example.answer, others


def _swap(example: Example, right: int, other: int) -> Example:
    """The example with the values of the two segments swapped; character spans follow."""
    (a, b), (c, d) = sorted(example.segments[i].value for i in (right, other))
    text = example.prompt
    prompt = text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]
    longer = (d - c) - (b - a)

    def move(at: int) -> int:
        # everything between the two values shifts by the difference of their lengths, and nothing after them
        return at + longer if b <= at <= c else at

    values = [_value(example, i) for i in range(len(example.segments))]
    # where the values are the candidates, the key keeps its line; where letters are, the answer's name moves
    keyed = all(v == c.strip() for v, c in zip(values, example.candidates, strict=True))
    segments = [
        Segment(
            tuple(move(x) for x in s.span),
            tuple(move(x) for x in s.value),
            i == (right if keyed else other),
        )
        for i, s in enumerate(example.segments)
    ]
    meta = {**example.meta, "swapped": [right, other]}
    return Example(prompt, example.candidates, other, tuple(segments), meta)
