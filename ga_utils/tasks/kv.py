"""Can the model look up a value by its key? The paper's key-value retrieval task (Figure 4).

A dictionary of n pairs is read out, then one key is asked for; the candidates are all n values. The default
format is the paper's own. Examples are drawn from streams that depend only on the seed, the number of pairs
and the example's own number, through `random.Random(text).random()`, the one part of Python's generator that
is promised to stay: so the first 50 examples of 200 are the 50 of a shorter task, in every process.
"""

import functools
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from ga_utils.errors import TaskError
from ga_utils.tasks.base import Example, Segment, Task
from ga_utils.tasks.tokens import encode_examples

VALUES: dict[str, range] = {"0-99": range(100), "10-99": range(10, 100), "0-9": range(10)}
MAX_PAIRS = 100
DAY = "26 Jul 2024"  # the date that Llama 3.1's template falls back to
FIXED_DATE = "{%- macro strftime_now(form) %}" + DAY + "{% endmacro %}"  # hides the clock that templates may ask


@dataclass(frozen=True)
class KVFormat:
    """How a dictionary is written down: head + one line a pair + tail, and what a candidate looks like.

    line(key, value, last) and tail(key) give text; a line ends in its newline.
    """

    head: str
    line: Callable[[str, str, bool], str]
    tail: Callable[[str], str]
    candidate: Callable[[str], str] = str


def _quoted(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


_PAPER = (
    "Memorize the following dictionary:\n",
    lambda key, value, last: f"{key}:{value}\n",
    lambda key: f"The value of the key '{key}' is",
)
FORMATS: dict[str, KVFormat] = {
    "paper": KVFormat(*_PAPER),
    "paper-space": KVFormat(*_PAPER, candidate=lambda value: f" {value}"),
    "terse": KVFormat("", lambda key, value, last: f"{key}:{value}\n", lambda key: f"{key}:"),
    "json": KVFormat(
        "{\n",
        lambda key, value, last: f"{_quoted(key)}: {value}{'' if last else ','}\n",
        lambda key: f"}}\n{{\n{_quoted(key)}:",
        lambda value: f" {value}",
    ),
    "question": KVFormat(
        "",
        lambda key, value, last: f"The value of {key} is {value}.\n",
        lambda key: f"Question: What is the value of {key}?\nAnswer:",
        lambda value: f" {value}",
    ),
}


@functools.cache
def words() -> tuple[str, ...]:
    """The 8,169 words that keys are drawn from: wonderwords 2.2.0's pool, sorted (see WORDS-LICENSE.txt)."""
    return tuple(resources.files("ga_utils.tasks").joinpath("words.txt").read_text(encoding="utf-8").splitlines())


def _draw(rng: random.Random, pool: Sequence, k: int) -> list:
    """k distinct items of pool, by a Fisher-Yates shuffle cut short; one rng.random() an item."""
    pool = list(pool)
    for i in range(k):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:k]


def _example(style: KVFormat, keys: list[str], values: list[str], right: int) -> Example:
    prompt, segments = style.head, []
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        line = style.line(key, value, i == len(keys) - 1)
        start = len(prompt)
        at = start + line.rindex(value)  # the value is the last number of its line; keys hold no digits
        segments.append(Segment((start, start + len(line)), (at, at + len(value)), i == right))
        prompt += line
    candidates = tuple(style.candidate(v) for v in values)
    return Example(prompt + style.tail(keys[right]), candidates, right, tuple(segments), {"key": keys[right]})


def chat_example(tokenizer, example: Example) -> Example:
    """The example with its prompt as a user's turn in the tokenizer's chat template, up to the assistant's
    turn.

    Templates that print today's date get a fixed one, so that the same task has the same bytes tomorrow.
    Raises TaskError if the tokenizer has no chat template or the template changes the prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TaskError("chat=True needs a tokenizer with a chat template; this one has none, so use chat=False.")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": example.prompt}],
        chat_template=FIXED_DATE + tokenizer.get_chat_template(),
        tokenize=False,
        add_generation_prompt=True,
        date_string=DAY,
    )
    if text.count(example.prompt) != 1:
        raise TaskError("The tokenizer's chat template does not hold the prompt once and unchanged; use chat=False.")
    shift = text.index(example.prompt)
    moved = tuple(
        Segment((s.span[0] + shift, s.span[1] + shift), (s.value[0] + shift, s.value[1] + shift), s.right)
        for s in example.segments
    )
    return Example(text, example.candidates, example.answer, moved, example.meta)


def unequal_values(tokenizer, style: KVFormat, values: Sequence[int], chat: bool = False) -> bool:
    """Whether the tokenizer gives these values unequal numbers of tokens, so that shorter ones score higher.

    With digits split, "5" is a token prefix of "57" and can never score below it (the official code's values
    are biased so on such tokenizers).
    """
    probe = _example(style, ["apple", "river"], ["10", "11"], 0)
    probe = Example(probe.prompt, tuple(style.candidate(str(v)) for v in values), 0)
    probe = chat_example(tokenizer, probe) if chat else probe
    rest = encode_examples(tokenizer, [probe], "none" if chat else "tokenizer")[0].continuations
    return len({len(c) for c in rest}) > 1


def _choose_values(values: str | None, style: KVFormat, tokenizer, chat: bool) -> tuple[str, bool, str]:
    """The name of the range, whether it is biased, and the sentence that says so."""
    if values not in (None, "auto", *VALUES):
        raise TaskError(f"values={values!r} is unknown; it must be 'auto' or one of {', '.join(VALUES)}.")
    if values in (None, "auto"):
        if tokenizer is None:
            values = "10-99"  # equal numbers of tokens under digit-splitting and whole-number tokenizers alike
        else:
            values = "10-99" if unequal_values(tokenizer, style, VALUES["0-99"], chat) else "0-99"
    if tokenizer is not None and unequal_values(tokenizer, style, VALUES[values], chat):
        return (
            values,
            True,
            (
                f"Values {values} have unequal numbers of tokens under this tokenizer, so shorter ones score "
                "higher whatever the model knows; values='10-99' avoids it where digits are split."
            ),
        )
    if tokenizer is None and values == "0-99":
        return (
            values,
            True,
            (
                "Values 0-99 are biased under tokenizers that split digits, and no tokenizer was given to "
                "check; pass tokenizer=lm.tokenizer."
            ),
        )
    return values, False, ""


def kv_task(
    n_pairs: int,
    n_examples: int,
    seed: int,
    format: str = "paper",
    values: str | None = "auto",
    tokenizer=None,
    chat: bool = False,
) -> Task:
    """Key-value retrieval with n_pairs pairs (1 to 100) and n_examples questions (Figure 4).

    format: a name in FORMATS; "paper" is the paper's prompt, candidates without a space.
    values: "auto" (the paper's 0-99 if the tokenizer gives all of them equally many tokens, else 10-99; 10-99
    without a tokenizer), or "0-99", "10-99" (at most 90 pairs), "0-9" (at most 10 pairs) as asked; the task
    is marked `biased`, with a `note`, where the range is known or feared to favour short values.
    chat: put the prompt through the tokenizer's chat template; it is then scored with no further special
    tokens.

    The same arguments give the same dictionaries whatever the format and value range, example by example.
    Raises TaskError for an unknown format or range, more pairs than the range holds, or a tokenizer without
    template.
    """
    if format not in FORMATS:
        raise TaskError(f"format={format!r} is unknown; it must be one of {', '.join(FORMATS)}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TaskError(f"seed={seed!r} must be an integer.")
    if isinstance(n_pairs, bool) or not isinstance(n_pairs, int) or not 1 <= n_pairs <= MAX_PAIRS:
        raise TaskError(f"n_pairs={n_pairs!r} must be an integer from 1 to {MAX_PAIRS}.")
    if not isinstance(n_examples, int) or n_examples < 1:
        raise TaskError(f"n_examples={n_examples!r} must be an integer of 1 or more.")
    if chat and tokenizer is None:
        raise TaskError("chat=True needs the tokenizer whose chat template is meant: pass tokenizer=lm.tokenizer.")
    style = FORMATS[format]
    chosen, biased, note = _choose_values(values, style, tokenizer, chat)
    if n_pairs > len(VALUES[chosen]):
        hint = " (chosen because values 0-99 are not equally long)" if values in (None, "auto") else ""
        raise TaskError(
            f"n_pairs={n_pairs} needs more distinct values than {chosen} has{hint}: at most "
            f"{len(VALUES[chosen])} pairs, or values='0-99', which takes 100."
        )
    examples = []
    for number in range(n_examples):
        rng = random.Random(f"kv/{seed}/{n_pairs}/{number}")
        keys = _draw(rng, words(), n_pairs)
        numbers = [str(v) for v in _draw(rng, VALUES[chosen], n_pairs)]
        example = _example(style, keys, numbers, int(rng.random() * n_pairs))
        examples.append(chat_example(tokenizer, example) if chat else example)
    settings = {
        "n_pairs": n_pairs,
        "n_examples": n_examples,
        "seed": seed,
        "format": format,
        "values": chosen,
        "chat": chat,
        "words": hashlib.sha256("\n".join(words()).encode()).hexdigest(),
    }
    return Task("kv", tuple(examples), format, "none" if chat else "tokenizer", biased, note, settings)
