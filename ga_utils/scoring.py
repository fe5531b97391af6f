"""How is an answer scored? The exact log-probability of every candidate given the prompt.

One forward pass a question where each candidate is a single token, however many candidates there are; else the tokens
of all candidates form a tree, and each branching point costs one cached one-token step, or one full forward: on models
whose caches do not continue exactly, and where that is cheaper (few long candidates). A node of the tree is a tuple of
candidate tokens that is not yet a whole candidate: at each the next-token distribution is needed. (Figure 4's
accuracies; the official code runs one full forward a candidate.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from ga_utils.caches import Forward
from ga_utils.candidates import TOKENS_A_CALL, Limit, Node, Tree, cache_policy, plain, walk
from ga_utils.errors import GAError, ModelError, TaskError, say_once
from ga_utils.language_model import LanguageModel
from ga_utils.tasks.base import Example, Task, as_task
from ga_utils.tasks.tokens import EncodedTask, encode

TOKENS_PER_BATCH = {"cpu": 8_192}  # other devices: 32,768


@dataclass(frozen=True)
class Scores:
    """The result of `score`, in the order of the task's examples (n of them, c = most candidates of any).

    logprobs: [n, c] natural log, float64; -inf where an example has fewer candidates.
    predicted: [n] index of the best candidate (the first of equals). correct: [n] bool.
    answer_logprob: [n]. full_vocab_correct: [n] bool, whether greedy choice over the whole vocabulary says
    the answer.
    boundary_moved: examples where a candidate merged with the prompt's last token. prefix_biased: examples
    where one candidate's tokens begin another's. calls, tokens: forward passes and token positions (padding
    included) that it took; checks: further calls, to prove the cache. cached: whether a cache was used.
    """

    task: Task
    logprobs: np.ndarray
    predicted: np.ndarray
    correct: np.ndarray
    answer_logprob: np.ndarray
    full_vocab_correct: np.ndarray
    boundary_moved: int
    prefix_biased: int
    special_tokens: str
    calls: int
    tokens: int
    checks: int
    cached: bool

    @property
    def n(self) -> int:
        return len(self.correct)

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    @property
    def stderr(self) -> float:
        """Standard error of the accuracy, sqrt(p (1 - p) / n)."""
        return float(np.sqrt(self.accuracy * (1 - self.accuracy) / self.n))

    @property
    def full_vocab_accuracy(self) -> float:
        return float(self.full_vocab_correct.mean())

    @property
    def chance(self) -> float:
        return self.task.chance

    def to_values(self) -> dict:
        """The summary as JSON-safe values, for a record."""
        return {
            "n": self.n,
            "accuracy": self.accuracy,
            "stderr": self.stderr,
            "chance": self.chance,
            "full_vocab_accuracy": self.full_vocab_accuracy,
            "answer_logprob": float(self.answer_logprob.mean()),
            "special_tokens": self.special_tokens,
            "boundary_moved": self.boundary_moved,
            "prefix_biased": self.prefix_biased,
            "biased": self.task.biased,
            "note": self.task.note,
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """What was measured for each example, for the arrays beside a record."""
        names = ("logprobs", "predicted", "correct", "answer_logprob", "full_vocab_correct")
        return {name: getattr(self, name) for name in names}


def score(
    lm: LanguageModel,
    task: Task | EncodedTask | Sequence[Example],
    batch_size: int | None = None,
    special_tokens: str | None = None,
    progress: bool = False,
    cached: bool = True,
) -> Scores:
    """Score every candidate of every example of the task with the model `lm` (a LanguageModel).

    batch_size: most rows a forward pass; by default as many as 8,192 tokens hold on a CPU, 32,768 elsewhere.
    Results do not depend on it beyond rounding.
    special_tokens: "tokenizer" adds what the tokenizer puts before a text by default (BOS) and nothing after
    it, "none" adds nothing; None takes what the task says. cached: False asks every candidate in full
    forwards, for edits that must see whole texts. Raises TaskError before any forward if an example
    is longer than the model allows, GAError if a score is not finite.
    """
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise TaskError(f"batch_size={batch_size!r} must be an integer of 1 or more.")
    if not isinstance(lm, LanguageModel):
        raise ModelError(f"score takes a LanguageModel (from load or wrap) first, not {type(lm).__name__}.")
    if lm.model.training:
        raise ModelError("The model is in training mode, where dropout changes scores; call lm.model.eval() first.")
    encoded = task if isinstance(task, EncodedTask) else encode(lm.tokenizer, as_task(task), special_tokens)
    _check_length(lm, encoded)
    trees = [Tree(i, item) for i, item in enumerate(encoded.items)]
    forward = Forward(lm)
    limit = Limit(batch_size, TOKENS_PER_BATCH.get(lm.device.type, 32_768))
    at_least = TOKENS_A_CALL.get(lm.device.type, 128)
    branching = [t for t in trees if len(t.nodes) > len(t.chain) + 1 and t.steps_pay(at_least)]
    checks, how = 0, None
    if branching and cached:
        checks, how = cache_policy(lm, min(branching, key=lambda t: (t.length, t.number)))
    walked = branching if how is not None else []
    in_walk = {t.number for t in walked}
    rows = [(t, leaf) for t in trees if t.number not in in_walk for leaf in t.leaves()]
    with tqdm(total=len(rows) + len(walked), unit="row", disable=not progress) as bar:
        for batch in _batches(rows, limit):
            plain(forward, batch)
            bar.update(len(batch))
        for group in _equal_lengths(walked, limit):
            walk(forward, group, how, limit)
            bar.update(len(group))
    return _gather(encoded, trees, forward, checks, bool(walked))


def _batches(rows: list[tuple[Tree, Node]], limit: Limit) -> Iterator[list[tuple[Tree, Node]]]:
    """Rows of like length together, so that little is spent on padding."""
    rows = sorted(rows, key=lambda r: (len(r[0].item.context) + len(r[1]), r[0].number, r[1]))
    batch: list[tuple[Tree, Node]] = []
    for row in rows:
        if batch and not limit.fits(len(batch) + 1, len(row[0].item.context) + len(row[1])):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _equal_lengths(trees: list[Tree], limit: Limit) -> Iterator[list[Tree]]:
    """Batches of examples whose context is exactly equally long: a cache then holds no padding."""
    group: list[Tree] = []
    for tree in sorted(trees, key=lambda t: (t.length, t.number)):
        if group and (tree.length != group[0].length or not limit.fits(len(group) + 1, tree.length)):
            yield group
            group = []
        group.append(tree)
    if group:
        yield group


def _check_length(lm: LanguageModel, encoded: EncodedTask) -> None:
    limit = lm.max_length
    longest = max(range(len(encoded.items)), key=lambda i: encoded.items[i].longest)
    need = encoded.items[longest].longest
    if limit is not None and need > limit:
        raise TaskError(
            f"Example {longest} of task {encoded.task.name!r} has {need} tokens with its longest candidate, "
            f"but the model takes {limit}; use shorter prompts (fewer pairs) or a longer context."
        )


def _gather(encoded: EncodedTask, trees: list[Tree], forward: Forward, checks: int, cached: bool) -> Scores:
    results = [t.result() for t in trees]
    logprobs = np.full((len(trees), max(len(r[0]) for r in results)), -np.inf)
    for i, (sums, _) in enumerate(results):
        logprobs[i, : len(sums)] = sums
        if not np.isfinite(sums).all():
            raise GAError(f"The model's log-probabilities of example {i} are not finite; check its dtype and mask.")
    answers = np.array([item.answer for item in encoded.items])
    predicted = logprobs.argmax(axis=1)
    biased = sum(item.has_prefix for item in encoded.items)
    if biased and not encoded.task.biased:
        say_once(
            f"scoring.prefix.{encoded.task.name}",
            f"In {biased} of {len(trees)} examples of {encoded.task.name!r} one candidate's tokens begin "
            "another's, which can then never score above it; accuracy is biased towards the shorter.",
        )
    return Scores(
        task=encoded.task,
        logprobs=logprobs,
        predicted=predicted,
        correct=predicted == answers,
        answer_logprob=logprobs[np.arange(len(trees)), answers],
        full_vocab_correct=np.array([greedy for _, greedy in results]),
        boundary_moved=sum(item.moved for item in encoded.items),
        prefix_biased=biased,
        special_tokens=encoded.special_tokens,
        calls=forward.calls,
        tokens=forward.tokens,
        checks=checks,
        cached=cached,
    )
