"""Where does the prompt end and the candidate begin, counted in tokens?

Prompt and candidate are tokenised jointly, as a model would meet them; the split is then made on tokens: the
context is what all of them share. That is right for tokenizers that merge across the boundary, where the
tokens of the prompt alone are not a prefix of those of the full text. The paper's official scorer counts the
prompt's tokens without BOS and the full text's with it, so that its scored span starts one token early.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ga_utils.errors import TaskError
from ga_utils.tasks.base import Example, Span, Task

SPECIAL_TOKENS = ("tokenizer", "none")


@dataclass(frozen=True)
class EncodedExample:
    """Token ids: the shared context, and each candidate's continuation of it (each at least one token
    long)."""

    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    answer: int
    moved: bool  # the boundary moved into the prompt: some continuation starts with the prompt's own text
    counted: tuple[int, ...] = ()  # of each continuation, the first token that counts; () for all of it

    @property
    def longest(self) -> int:
        """Tokens of the context and the longest continuation."""
        return len(self.context) + max(map(len, self.continuations))

    @property
    def has_prefix(self) -> bool:
        """Whether one candidate's tokens begin another's, which can then never score above it."""
        every = set(self.continuations)
        return any(c[:d] in every for c in every for d in range(1, len(c)))


@dataclass(frozen=True)
class EncodedTask:
    """A task in one tokenizer's ids; `scoring.score` takes it in place of the task."""

    task: Task
    items: tuple[EncodedExample, ...]
    special_tokens: str


def common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all sequences share."""
    low, high = min(sequences), max(sequences)  # lexicographic extremes share exactly what all share
    n = 0
    while n < min(len(low), len(high)) and low[n] == high[n]:
        n += 1
    return n


def leading_specials(tokenizer, probe: str) -> list[int]:
    """The ids that the tokenizer puts before a text by default, such as BOS; [] if it adds none.

    What it puts after a text (EOS) is left out on purpose: it would stand between prompt and candidate.
    """
    plain = _ids(tokenizer, [probe])[0]
    full = list(tokenizer(probe, add_special_tokens=True, verbose=False)["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    raise TaskError(
        "The tokenizer gives a text different tokens with and without special tokens, so that prompt and "
        "candidate cannot be told apart; pass special_tokens='none'."
    )


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    out = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
    return [list(ids) for ids in out["input_ids"]]


def encode_examples(tokenizer, examples: Sequence[Example], special_tokens: str) -> list[EncodedExample]:
    """Tokenise each prompt alone and with each candidate, and split at the longest common token prefix.

    Raises TaskError if no context is left, or if two candidates have the same tokens (an unknown token,
    mostly).
    """
    if special_tokens not in SPECIAL_TOKENS:
        raise TaskError(f"special_tokens={special_tokens!r} is unknown; it must be one of {', '.join(SPECIAL_TOKENS)}.")
    prefix = leading_specials(tokenizer, examples[0].prompt) if special_tokens == "tokenizer" else []
    ids = iter(_ids(tokenizer, [e.prompt + c for e in examples for c in ("", *e.candidates)]))
    uncounted = [e.prompt + c[:n] for e in examples for c, n in zip(e.candidates, e.counted, strict=bool(e.counted))]
    before = iter(_ids(tokenizer, uncounted) if uncounted else [])
    items = []
    for number, example in enumerate(examples):
        prompt = prefix + next(ids)
        full = [prefix + next(ids) for _ in example.candidates]
        cut = common_prefix([prompt, *full])
        if cut == 0:
            raise TaskError(
                f"Example {number} has no token of context before its candidates; the tokenizer adds no BOS "
                "and merges the whole prompt with a candidate, so give it a longer prompt."
            )
        rest = tuple(tuple(f[cut:]) for f in full)
        if len(set(rest)) < len(rest) or not all(rest):
            clash = [c for c, r in zip(example.candidates, rest, strict=True) if not r or rest.count(r) > 1]
            raise TaskError(f"Example {number}: the tokenizer gives the candidates {clash[:4]} the same ids, or none.")
        # split as lm-eval does: by the number of tokens that the uncounted text has alone
        counted = tuple(min(max(len(prefix + next(before)) - cut, 0), len(r) - 1) for r in rest if example.counted)
        items.append(EncodedExample(tuple(prompt[:cut]), rest, example.answer, cut < len(prompt), counted))
    return items


_memo: dict[tuple, tuple[object, EncodedTask]] = {}


def encode(tokenizer, task: Task, special_tokens: str | None = None) -> EncodedTask:
    """The task in token ids, as `score` will feed it. `special_tokens` None takes what the task says.

    The last few results are kept, because a sweep asks the same task hundreds of times; the first example is
    tokenised anew each time and must agree, so that a changed tokenizer is noticed.
    """
    chosen = task.special_tokens if special_tokens is None else special_tokens
    if task.special_tokens == "none" and chosen != "none":
        raise TaskError(
            f"Task {task.name!r} holds its own special tokens (chat template); score it without adding more."
        )
    key = (id(tokenizer), task.digest, chosen)
    first = encode_examples(tokenizer, task.examples[:1], chosen)
    if key in _memo and _memo[key][1].items[:1] == tuple(first):
        return EncodedTask(task, _memo[key][1].items, chosen)
    encoded = EncodedTask(task, tuple(encode_examples(tokenizer, task.examples, chosen)), chosen)
    if len(_memo) >= 8:
        _memo.pop(next(iter(_memo)))
    _memo[key] = (tokenizer, encoded)  # holding the tokenizer keeps its id from being reused
    return encoded


def encode_whole(tokenizer, task: Task) -> EncodedTask:
    """`encode`, for measurements that take the whole of each candidate. Raises TaskError if a part of one counts."""
    encoded = encode(tokenizer, task)
    if any(item.counted for item in encoded.items):
        raise TaskError(
            f"Only a part of each candidate of {task.name!r} counts (WinoGrande's form): `score` can do that, sweeps, "
            "attribution and pairs cannot; use another task."
        )
    return encoded


def token_spans(encoding, spans: Sequence[Span]) -> list[Span]:
    """Character spans as token spans (first, one past the last): every token that overlaps the span.

    encoding: what tokenizer(text, return_offsets_mapping=True) gives, or a list of (start, stop) character
    offsets. The last token of a segment is then `stop - 1`, the place where a Gather head writes. Special
    tokens have width 0 and belong to no span. Raises TaskError if there are no offsets or no token overlaps a
    span.
    """
    if isinstance(encoding, Mapping):
        if "offset_mapping" not in encoding:
            raise TaskError("The encoding has no offsets; call a fast tokenizer with return_offsets_mapping=True.")
        encoding = encoding["offset_mapping"]
    offsets = [(int(a), int(b)) for a, b in encoding]
    found = []
    for start, stop in spans:
        hits = [i for i, (a, b) in enumerate(offsets) if a < b and a < stop and b > start]
        if not hits:
            raise TaskError(f"No token overlaps characters {start} to {stop}; the span lies outside the encoded text.")
        found.append((hits[0], hits[-1] + 1))
    return found


def segment_tokens(tokenizer, example: Example, special_tokens: str = "tokenizer") -> list[tuple[Span, Span]]:
    """For each segment of the example: the token spans of its line and of its value, counted as `score`
    counts them (leading special tokens included)."""
    if not getattr(tokenizer, "is_fast", False):
        raise TaskError("Segment positions need a fast tokenizer, because only those report character offsets.")
    shift = len(leading_specials(tokenizer, example.prompt)) if special_tokens == "tokenizer" else 0
    plain = tokenizer(example.prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    lines = token_spans(plain, [s.span for s in example.segments])
    values = token_spans(plain, [s.value for s in example.segments])
    return [((a + shift, b + shift), (c + shift, d + shift)) for (a, b), (c, d) in zip(lines, values, strict=True)]
