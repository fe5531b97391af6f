"""Does the tiny language separate knowledge from retrieval, and can no question be answered from one word
alone?"""

import random
import subprocess
import sys

import pytest
import torch

from ga_utils.errors import TaskError
from ga_utils.tasks.tokens import encode, segment_tokens
from ga_utils.tiny import questions
from ga_utils.tiny.language import (
    GRID,
    LETTERS,
    PER_CATEGORY,
    SYLLABLES,
    VOCABULARY,
    token_ids,
    tokenizer,
    world,
)
from ga_utils.tiny.lessons import KINDS, batch, lesson

TASKS = {
    "letter": lambda n, seed: questions.letter_task(n, seed),
    "copy-letter": lambda n, seed: questions.copy_letter_task(n, seed),
    "kv": lambda n, seed: questions.kv_task(8, n, seed),
    "cloze": lambda n, seed: questions.cloze_task(n, seed),
    "knowledge": lambda n, seed: questions.knowledge_task(n, seed),
}


def _options(example):
    return [example.prompt[a:b].split() for a, b in (s.value for s in example.segments)]


def test_words_are_distinct_and_one_token_each():
    tok = tokenizer()
    assert len(set(VOCABULARY)) == len(VOCABULARY) == tok.vocab_size
    for i, word in enumerate(VOCABULARY):
        assert tok(word, add_special_tokens=False)["input_ids"] == [i]


def test_every_name_is_of_its_entity_alone_and_no_syllable_identifies_it():
    w = world()
    assert len(set(w.names.values())) == len(w.entities) == 96
    for c in range(8):
        names = [w.names[e] for e in w.entities[c * PER_CATEGORY : (c + 1) * PER_CATEGORY]]
        assert len({n[1:4] for n in names}) == 1
        for place in (0, 4):
            symbols = [n[place] for n in names]
            assert sorted(symbols.count(s) for s in set(symbols)) == [3] * GRID
        assert all(len(set(n)) == 5 for n in names)


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_questions_and_shorter_tasks_are_prefixes(name):
    long, short, other = TASKS[name](20, 3), TASKS[name](8, 3), TASKS[name](20, 4)
    assert long.take(8).digest == short.digest
    assert long.digest != other.digest


def test_questions_do_not_depend_on_the_process():
    code = "from ga_utils.tiny.questions import letter_task; print(letter_task(5, 1).digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": h, "PATH": ""},
        ).stdout
        for h in ("1", "2")
    }
    assert found == {questions.letter_task(5, 1).digest + "\n"}


@pytest.mark.parametrize("name", TASKS)
def test_prompt_and_candidates_are_whole_words_of_the_vocabulary(name):
    task, tok = TASKS[name](30, 0), tokenizer()
    for example, item in zip(task.examples, encode(tok, task).items, strict=True):
        words = example.prompt.replace("\n", " \n ").split(" ")
        assert [VOCABULARY[i] for i in item.context] == [x for x in words if x]
        assert not item.moved and not item.has_prefix
        assert token_ids()["<unk>"] not in item.context
        assert all("<unk>" not in tok.convert_ids_to_tokens(tok(c)["input_ids"]) for c in example.candidates)


def test_letters_and_written_names_ask_for_the_option_that_is_right():
    w = world()
    for task in (questions.letter_task(50, 0), questions.copy_letter_task(50, 0)):
        for e in task.examples:
            name = w.names[e.meta["entity"]]
            options = _options(e)
            assert [tuple(o) == name for o in options] == [i == e.answer for i in range(4)]
            assert len({w.category(x) for x in w.entities if list(w.names[x]) in options}) == 1
            last = e.prompt.strip().rsplit("\n", 1)[1].split()
            assert last == (["ask", e.meta["entity"]] if task.name == "tiny-letter" else ["match", *name])


def test_the_answers_of_letter_are_not_in_the_prompt_and_of_cloze_neither():
    for e in questions.cloze_task(30, 0).examples:
        assert e.candidates[e.answer].strip() not in e.prompt
    for e in questions.letter_task(200, 0).examples:
        assert " ".join(world().names[e.meta["entity"]]) in e.prompt  # found there only through the fact


def test_answers_are_spread_over_the_places():
    for task in (
        questions.letter_task(400, 0),
        questions.kv_task(4, 400, 0),
        questions.knowledge_task(400, 0),
    ):
        counts = [sum(e.answer == i for e in task.examples) for i in range(4)]
        assert min(counts) > 65, counts  # 100 expected, 8.7 standard deviation


@pytest.mark.parametrize("n", [1, 2, 8, 16])
def test_pairs_have_distinct_keys_and_values_and_half_keys_do_not_suffice(n):
    ambiguous = 0
    for e in questions.kv_task(n, 40, 0).examples:
        pairs = [e.prompt[a:b].split() for a, b in (s.span for s in e.segments)]
        keys = [tuple(p[:2]) for p in pairs]
        assert len(set(keys)) == len({p[2] for p in pairs}) == n
        assert e.candidates == tuple(f" {p[2]}" for p in pairs)
        assert " ".join(keys[e.answer]) == e.meta["key"]
        ambiguous += sum(k[0] == keys[e.answer][0] for k in keys) > 1
    assert n == 1 or ambiguous > 3


@pytest.mark.parametrize("name", ["letter", "copy-letter", "kv"])
def test_segments_are_the_lines_and_end_at_newlines(name):
    tok = tokenizer()
    for e in TASKS[name](20, 0).examples:
        ids = tok(e.prompt)["input_ids"]
        assert [s.right for s in e.segments].index(True) == e.answer and sum(s.right for s in e.segments) == 1
        for (a, b), (c, d) in segment_tokens(tok, e, "none"):
            assert VOCABULARY[ids[b - 1]] == "\n" and a < c < d == b - 1
            assert d - c == (1 if name == "kv" else 5)


def _one_symbol_reader(example, place):
    """Answers by comparing only the start (0) or the end (-1) of the names; expected accuracy of a fair
    draw."""
    name = world().names[example.meta["entity"]]
    hits = [i for i, o in enumerate(_options(example)) if o[place] == name[place]]
    return (example.answer in hits) / len(hits)


@pytest.mark.parametrize("kind", ["letter", "copy-letter"])
def test_a_reader_of_one_symbol_fails_its_shortcut_check(kind):
    checks = questions.shortcut_tasks(kind, 200, 0)
    for rule, place in (("share-start", 0), ("share-end", -1)):
        own = [_one_symbol_reader(e, place) for e in checks[rule].examples]
        other = [_one_symbol_reader(e, -1 - place) for e in checks[rule].examples]
        assert max(own) == questions.SHORTCUT_CEILING and sum(other) == 200
    drawn = questions.letter_task(400, 0).examples
    assert sum(_one_symbol_reader(e, -1) for e in drawn) / 400 < 0.85  # drawn options do not punish it enough


@pytest.mark.parametrize(
    "make",
    [
        lambda: questions.kv_task(0, 5, 0),
        lambda: questions.kv_task(17, 5, 0),
        lambda: questions.letter_task(0, 0),
        lambda: questions.letter_task(5, 0, n_options=6),
        lambda: questions.letter_task(5, 0, n_options=2, options="share-both"),
        lambda: questions.letter_task(5, 0, options="shared"),
        lambda: questions.shortcut_tasks("kv", 5, 0),
    ],
)
def test_what_cannot_be_asked_is_said(make):
    with pytest.raises(TaskError, match="must|use"):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_lessons_are_marked_where_they_can_be_known(kind):
    rng = random.Random(5)
    w = world()
    for _ in range(20):
        words, marks = lesson(kind, rng)
        assert len(words) == len(marks) and any(marks) and not marks[0]
        for i, (word, mark) in enumerate(zip(words, marks, strict=True)):
            if mark and kind in ("letter", "letters") and words[i - 2] == "ask":
                at = words.index(word)  # the option's own line
                assert tuple(words[at + 1 : at + 6]) == w.names[words[i - 1]]
            if mark and kind == "copy-letter":
                at = words.index(word)
                assert words[at + 1 : at + 6] == words[i - 5 : i]
            if mark and kind == "kv":
                assert (
                    words[1:].index(word) < i and words[words.index(word) - 2 : words.index(word)] == words[i - 2 : i]
                )
            if mark and kind == "repeat":
                assert word in words[:i] and words[words.index(word) - 1] in (words[i - 1], "list")
            if mark and kind in ("letter", "copy-letter"):
                assert word in LETTERS


def test_batches_depend_on_the_seed_alone_and_mark_the_next_word():
    mixture = {"kv": 0.5, "letters": 0.5}
    a, b, c = batch(mixture, 16, "s"), batch(mixture, 16, "s"), batch(mixture, 16, "t")
    assert torch.equal(a.ids, b.ids) and torch.equal(a.answers, b.answers)
    assert a.ids.shape != c.ids.shape or not torch.equal(a.ids, c.ids)
    assert not (a.answers & a.other).any() and not a.answers[:, -1].any()
    following = {VOCABULARY[i] for i in a.ids[:, 1:][a.answers[:, :-1]].tolist()}
    assert following and not following & set(SYLLABLES)
    padded = a.ids[:, 1:] == 0
    assert not ((a.answers | a.other)[:, :-1] & padded).any()
