"""Is the key-value task the paper's, the same everywhere, and fair to every tokenizer?"""

import hashlib
import os
import re
import subprocess
import sys
from importlib import resources

import pytest
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ga_utils.errors import TaskError
from ga_utils.tasks import FORMATS, Example, Task, encode, kv_task, segment_tokens, token_spans, words

CHAT = (
    "{{ bos_token }}{{ strftime_now('%d %B %Y') }} {{ date_string }}|"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def whole_numbers() -> PreTrainedTokenizerFast:
    """Characters, and each of 0 to 99 as one token."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(a, b) for a in "0123456789" for b in "0123456789"]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(pairs)}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tok)


def test_word_list_is_the_papers_pool() -> None:
    data = resources.files("ga_utils.tasks").joinpath("words.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() == "10feb3d31855a30984bf97fb0f252cb16a2c20ab3e832360ae9b122c28273b10"
    assert len(words()) == len(set(words())) == 8169
    assert list(words()) == sorted(words())
    assert not [w for w in words() if re.search(r"[\d:\n]", w)]  # a value is the only number of its line
    licence = resources.files("ga_utils.tasks").joinpath("WORDS-LICENSE.txt").read_text()
    assert "MIT License" in licence and "Copyright (c) 2020 mrmaxguns" in licence


def test_prompt_is_the_papers() -> None:
    example = kv_task(3, 1, seed=0).examples[0]
    keys = [line.split(":")[0] for line in example.prompt.split("\n")[1:4]]
    lines = [f"{k}:{v}" for k, v in zip(keys, example.candidates, strict=True)]
    asked = keys[example.answer]
    expected = ["Memorize the following dictionary:", *lines, f"The value of the key '{asked}' is"]
    assert example.prompt == "\n".join(expected)
    assert all(re.fullmatch(r"\d\d", c) for c in example.candidates)


def test_same_bytes_in_every_process() -> None:
    code = (
        "import hashlib; from ga_utils.tasks import kv_task; tasks = [kv_task(20, 9, 3),"
        "kv_task(100, 2, 7, values='0-99')]; print(hashlib.sha256(repr(tasks).encode()).hexdigest())"
    )
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        env = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_same_bytes_as_ever() -> None:
    # pinned: a change of the generator would change every result without a change of any setting
    assert kv_task(10, 5, seed=0).digest == "c94209b454ce96ae2c5b80afa7c6e87890d8046fb61af102504e275e306ca52a"
    assert (
        kv_task(100, 2, seed=7, values="0-99").digest
        == "e4bf827836ef2d96139de2f5007bb83a45a728fc2eda9ce71a59c1090ef7051e"
    )


def test_a_longer_task_begins_with_the_shorter_one() -> None:
    long, short = kv_task(10, 200, seed=5), kv_task(10, 50, seed=5)
    assert long.examples[:50] == short.examples
    assert long.take(50).key() == short.key()
    assert kv_task(10, 50, seed=6).examples[0] != short.examples[0]
    assert len({e.prompt for e in long.examples}) == 200


@pytest.mark.parametrize("n_pairs", [1, 2, 37, 90])
def test_keys_and_values_are_distinct_and_the_answer_is_anywhere(n_pairs: int) -> None:
    task = kv_task(n_pairs, 60, seed=1)
    for e in task.examples:
        keys = [e.prompt[slice(*s.span)].rstrip("\n").rsplit(":", 1)[0] for s in e.segments]
        assert len(set(keys)) == len(set(e.candidates)) == n_pairs
        assert keys[e.answer] == e.meta["key"]
    assert task.chance == pytest.approx(1 / n_pairs)
    if n_pairs == 2:
        assert {e.answer for e in task.examples} == {0, 1}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_and_their_segments(name: str) -> None:
    task = kv_task(7, 4, seed=2, format=name)
    paper = kv_task(7, 4, seed=2)
    for e, p in zip(task.examples, paper.examples, strict=True):
        assert [c.strip() for c in e.candidates] == list(p.candidates) and e.answer == p.answer
        assert [e.prompt[slice(*s.value)] for s in e.segments] == list(p.candidates)
        assert [s.right for s in e.segments] == [i == e.answer for i in range(7)]
        assert all(e.prompt[slice(*s.span)].endswith("\n") for s in e.segments)
        assert all(a.span[1] == b.span[0] for a, b in zip(e.segments, e.segments[1:], strict=False))
        assert e.prompt.count(e.meta["key"]) >= 2 and e.prompt[e.segments[-1].span[1] :].count(e.meta["key"]) == 1
        assert not e.prompt[-1].isspace()
    assert task.prompt_format == task.settings["format"] == name


def test_json_keys_are_quoted() -> None:
    assert '"apple": 10,\n"river": 11\n}' in _render("json", ["apple", "river"])
    assert '"jalape\u00f1o": 10,\n' in _render("json", ["jalape\u00f1o", "x"])


def _render(name: str, keys: list[str]) -> str:
    from ga_utils.tasks.kv import _example

    return _example(FORMATS[name], keys, ["10", "11"], 0).prompt


def test_values_follow_the_tokenizer() -> None:
    digits, whole = zoo.tokenizer(), whole_numbers()
    split = kv_task(5, 3, 0, tokenizer=digits)
    assert (split.settings["values"], split.biased, split.note) == ("10-99", False, "")
    one = kv_task(5, 3, 0, tokenizer=whole)
    assert (one.settings["values"], one.biased, one.note) == ("0-99", False, "")
    asked = kv_task(5, 3, 0, values="0-99", tokenizer=digits)
    assert asked.biased and "10-99" in asked.note and asked.settings["values"] == "0-99"
    assert not kv_task(5, 3, 0, values="0-99", tokenizer=whole).biased
    unknown = kv_task(5, 3, 0, values="0-99")
    assert unknown.biased and "tokenizer" in unknown.note
    assert kv_task(5, 3, 0).settings["values"] == "10-99"
    single = kv_task(10, 3, 0, values="0-9", tokenizer=digits)
    assert not single.biased and {len(c) for e in single.examples for c in e.candidates} == {1}


def test_values_0_to_99_reach_100_pairs() -> None:
    task = kv_task(100, 1, 0, tokenizer=whole_numbers())
    assert sorted(map(int, task.examples[0].candidates)) == list(range(100))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (dict(n_pairs=91), "at most 90 pairs"),
        (dict(n_pairs=11, values="0-9"), "at most 10 pairs"),
        (dict(n_pairs=101), "from 1 to 100"),
        (dict(n_pairs=0), "from 1 to 100"),
        (dict(n_pairs=2.5), "from 1 to 100"),
        (dict(n_examples=0), "n_examples=0"),
        (dict(seed="a"), "seed='a'"),
        (dict(format="prose"), "paper, paper-space"),
        (dict(values="1-5"), "'auto' or one of"),
        (dict(chat=True), "pass tokenizer"),
        (dict(chat=True, tokenizer=zoo.tokenizer()), "no"),
    ],
)
def test_what_cannot_be_asked_is_said(kwargs: dict, said: str) -> None:
    with pytest.raises(TaskError, match=re.escape(said)):
        kv_task(**{"n_pairs": 5, "n_examples": 2, "seed": 0, **kwargs})


def test_chat_prompt_goes_through_the_template() -> None:
    tok = zoo.tokenizer()
    tok.chat_template = CHAT
    task, plain = kv_task(4, 3, 0, tokenizer=tok, chat=True), kv_task(4, 3, 0, tokenizer=tok)
    assert task.special_tokens == "none" and task.settings["chat"]
    for e, p in zip(task.examples, plain.examples, strict=True):
        # a fixed date: the same task has the same bytes on every day
        assert e.prompt == f"<s>26 Jul 2024 26 Jul 2024|<user>{p.prompt}<assistant>"
        assert [e.prompt[slice(*s.span)] for s in e.segments] == [p.prompt[slice(*s.span)] for s in p.segments]
    encoded = encode(tok, task)
    assert encoded.items[0].context.count(tok.bos_token_id) == 1
    with pytest.raises(TaskError, match="special tokens"):
        encode(tok, task, special_tokens="tokenizer")
    tok.chat_template = "{{ messages[0]['content'][:10] }}"
    with pytest.raises(TaskError, match="unchanged"):
        kv_task(4, 3, 0, tokenizer=tok, chat=True)


@pytest.mark.parametrize("tokenizer", [zoo.tokenizer(bos=True), zoo.tokenizer(bos=False), whole_numbers()])
@pytest.mark.parametrize("name", FORMATS)
def test_segment_tokens_decode_to_the_segments(tokenizer, name: str) -> None:
    task = kv_task(4, 2, 0, format=name)
    for e, item in zip(task.examples, encode(tokenizer, task).items, strict=True):
        ids = list(item.context)
        for segment, (line, value) in zip(e.segments, segment_tokens(tokenizer, e), strict=True):
            assert tokenizer.decode(ids[slice(*line)]) == e.prompt[slice(*segment.span)]
            assert tokenizer.decode(ids[slice(*value)]) == e.prompt[slice(*segment.value)]


def test_token_spans_take_every_token_that_overlaps() -> None:
    offsets = [(0, 0), (0, 3), (3, 4), (4, 8), (8, 8)]
    assert token_spans(offsets, [(0, 3), (2, 4), (5, 6), (0, 8)]) == [(1, 2), (1, 3), (3, 4), (1, 4)]
    assert token_spans({"offset_mapping": offsets}, [(3, 4)]) == [(2, 3)]
    with pytest.raises(TaskError, match="8 to 9"):
        token_spans(offsets, [(8, 9)])
    with pytest.raises(TaskError, match="return_offsets_mapping"):
        token_spans({"input_ids": [1]}, [(0, 1)])


def test_examples_that_make_no_sense_are_refused() -> None:
    for bad in (("", ("a",), 0), ("p", ("a", "a"), 0), ("p", ("a", ""), 0), ("p", (), 0), ("p", ("a",), 1)):
        with pytest.raises(TaskError):
            Example(*bad)
    with pytest.raises(TaskError, match="no examples"):
        Task("t", ())
    with pytest.raises(TaskError, match="cannot take 3"):
        kv_task(2, 2, 0).take(3)


def test_key_tells_tasks_apart() -> None:
    keys = [
        kv_task(5, 4, 0),
        kv_task(5, 4, 1),
        kv_task(6, 4, 0),
        kv_task(5, 3, 0),
        kv_task(5, 4, 0, format="terse"),
        kv_task(5, 4, 0, values="0-99"),
    ]
    assert len({repr(sorted(t.key().items(), key=str)) for t in keys}) == len(keys)
    assert len({t.digest for t in keys}) == len(keys)
