"""What is a task: which questions are asked, what may be answered, and what would guessing get?

An example is a prompt and a list of candidate continuations, one of them right. `scoring.score` asks a model
for the log-probability of each. Everything here is plain data: no model and no tokenizer.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ga_utils.errors import TaskError

Span = tuple[int, int]  # first character, and one past the last


@dataclass(frozen=True)
class Segment:
    """One piece of the context that a Gather head could sum up: where it and its value lie in
    `Example.prompt`.

    span: the whole line, its newline included; value: the value within it; right: whether it holds the
    answer.
    """

    span: Span
    value: Span
    right: bool = False


@dataclass(frozen=True)
class Example:
    """One question: `candidates[answer]` is right. Candidates follow the prompt with nothing in between.

    counted: for each candidate, the character from which its log-probability counts; () for all of it. So are options
    scored by the same words behind them (WinoGrande).
    Raises TaskError if there is no prompt, a candidate is empty or repeated, `answer` is not one of them, or `counted`
    does not fit the candidates.
    """

    prompt: str
    candidates: tuple[str, ...]
    answer: int
    segments: tuple[Segment, ...] = ()
    meta: Mapping = field(default_factory=dict, hash=False)
    counted: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.candidates, str) or not all(isinstance(c, str) for c in self.candidates):
            raise TaskError(f"An example's candidates are a list of texts, not {self.candidates!r}.")
        if isinstance(self.answer, bool) or not isinstance(self.answer, int):
            raise TaskError(f"answer={self.answer!r} must be the number of the right candidate (an integer).")
        object.__setattr__(self, "candidates", tuple(self.candidates))
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.prompt:
            raise TaskError("An example has an empty prompt; scoring needs at least one token of context.")
        if not self.candidates or not all(self.candidates):
            raise TaskError(f"An example needs candidates that are not empty; got {list(self.candidates)}.")
        if len(set(self.candidates)) != len(self.candidates):
            twice = next(c for c in self.candidates if self.candidates.count(c) > 1)
            raise TaskError(f"Candidate {twice!r} occurs twice in one example; candidates must be distinct.")
        if not 0 <= self.answer < len(self.candidates):
            raise TaskError(f"answer={self.answer} is not one of the {len(self.candidates)} candidates (zero-based).")
        object.__setattr__(self, "counted", tuple(self.counted))
        if self.counted and (
            len(self.counted) != len(self.candidates)
            or not all(0 <= n < len(c) for n, c in zip(self.counted, self.candidates, strict=True))
        ):
            raise TaskError(f"counted={self.counted} must be one character of each candidate, from which it counts.")


@dataclass(frozen=True)
class Task:
    """A named list of examples.

    prompt_format: the name of the format that drew up the prompts.
    special_tokens: "tokenizer" (BOS as the tokenizer adds it by default) or "none" (chat prompts hold their
    own).
    biased, note: whether the form of the candidates alone favours some of them, and the sentence that says
    why.
    settings: JSON-safe facts from which the task was made.
    """

    name: str
    examples: tuple[Example, ...]
    prompt_format: str = "plain"
    special_tokens: str = "tokenizer"
    biased: bool = False
    note: str = ""
    settings: Mapping = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "examples", tuple(self.examples))
        if not self.examples:
            raise TaskError(f"Task {self.name!r} has no examples.")

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def candidates(self) -> tuple[tuple[str, ...], ...]:
        """The candidates of each example."""
        return tuple(e.candidates for e in self.examples)

    @property
    def chance(self) -> float:
        """Expected accuracy of a uniform guess: the mean of 1 / number of candidates."""
        return sum(1 / len(e.candidates) for e in self.examples) / len(self.examples)

    @property
    def digest(self) -> str:
        """sha256 of every prompt, candidate and answer, in order: equal exactly if the questions are
        equal."""
        # what does not apply is left out, so that the digests of other tasks are what they were
        body = [[e.prompt, e.candidates, e.answer, *([e.counted] if e.counted else [])] for e in self.examples]
        return hashlib.sha256(json.dumps([self.special_tokens, body]).encode()).hexdigest()

    def key(self) -> dict:
        """What a result on this task depends on, JSON-safe: for a record's key."""
        return {
            "task": self.name,
            "n": len(self.examples),
            "prompt_format": self.prompt_format,
            "special_tokens": self.special_tokens,
            "digest": self.digest,
            "settings": dict(self.settings),
        }

    def take(self, n: int) -> "Task":
        """The first n examples as a task of their own. Raises TaskError if there are fewer."""
        if not 1 <= n <= len(self.examples):
            raise TaskError(f"Task {self.name!r} has {len(self.examples)} examples; cannot take {n}.")
        settings = {**self.settings, "n_examples": n} if "n_examples" in self.settings else self.settings
        return dataclasses.replace(self, examples=self.examples[:n], settings=settings)


def as_task(task: "Task | Example | Sequence[Example]") -> Task:
    """A Task as it is; one example or a list of examples under the name "examples"."""
    if isinstance(task, Task):
        return task
    examples = (task,) if isinstance(task, Example) else tuple(task)
    wrong = next((e for e in examples if not isinstance(e, Example)), None)
    if wrong is not None:
        raise TaskError(f"A task is a Task or a list of Example; got a {type(wrong).__name__}.")
    return Task("examples", examples)
