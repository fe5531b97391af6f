"""What falls with the retrieval heads: the rule's verdicts, the metrics, the harness under masks, and the page."""

import json
from pathlib import Path

import numpy as np
import pytest
import zoo
from test_harness import QUESTIONS, a_task

from ga_utils import benchmarks_page
from ga_utils.benchmarks_page import Answers, Settings, beyond_multiple_choice, reading
from ga_utils.errors import GAError, TaskError
from ga_utils.measure import Condition
from ga_utils.models import load
from ga_utils.records import Store
from ga_utils.tasks import Example, Task, harness
from ga_utils.tasks.benchmarks import installed

ROOT = Path(__file__).resolve().parent.parent
needs_data = pytest.mark.skipif(not installed(), reason="the benchmarks' data package is not installed")


def answers(intact: float, masked: float, random: float, chance: float = 0.25, n: int = 200, name: str = "lambada"):
    of = [(np.arange(n) < round(share * n)).astype(float) for share in (intact, masked, random)]
    return Answers(name, chance, of[0], of[1], np.stack([of[2], of[2]]))


@pytest.mark.parametrize(
    ("given", "verdict", "read"),
    [
        (answers(0.9, 0.5, 0.88), "reproduced", "falls"),
        (answers(0.9, 0.885, 0.89), "partly", "stays, within the interval"),
        (answers(0.9, 0.9, 0.9), "not", "stays, within the interval"),
        (answers(0.9, 0.6, 0.6), "not", "falls no further than with random heads"),
        (answers(0.26, 0.1, 0.26), "not testable", "at chance: not testable"),
    ],
)
def test_the_rule_of_c14(given, verdict, read):
    assert beyond_multiple_choice("m", [given]).verdict == verdict
    assert reading(given) == read


class Scored:
    def __init__(self, logprobs):
        self.arrays = {"logprobs": np.asarray(logprobs, float)}


def test_length_and_letters_are_taken_off():
    task = Task("t", tuple(Example("p", (" a", " abcdefghi"), 1) for _ in range(2)))
    record = Scored([[-2.0, -9.0], [-0.5, -9.0]])  # a character of the long one costs 1
    assert benchmarks_page._normed(task, record) == 0.5
    letters = Task("l", (Example("p", (" A", " B"), 0), Example("q", (" A", " B"), 1)))
    biased = Scored([[-1.0, -5.0], [-1.2, -2.0]])  # it prefers A, but less where B is right
    assert benchmarks_page._calibrated(letters, biased) == 1.0


def test_the_harness_runs_under_masks_and_each_condition_is_a_record(tmp_path):
    lm, store = zoo.lm("llama"), Store(tmp_path)
    task = a_task("multiple_choice", QUESTIONS)
    conditions = [Condition("intact"), Condition("all off", tuple(lm.head_list()))]
    table = harness.under_masks(store, lm, [task], conditions)
    assert list(table.condition) == ["intact", "all off"] and table.metric.str.startswith("acc").all()
    assert len(list(store.find("harness"))) == 2
    handle = lm.model.register_forward_pre_hook(lambda *a: pytest.fail("a forward ran"))
    try:
        assert harness.under_masks(store, lm, [task], conditions).equals(table)
    finally:
        handle.remove()
    with pytest.raises(TaskError, match="over all positions alone, not 'last'"):
        harness.under_masks(store, lm, [task], [Condition("x", tuple(lm.head_list()[:1]), "last")])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_examples": 4}, "n_examples must be 5 or more"),
        ({"n_random": 0}, "n_random 1 or more"),
        ({"sweep_seed": 0}, "found on other questions"),
        ({"tasks": ("mmul",)}, "must be some of winogrande"),
        ({"tasks": ()}, "must be some of winogrande"),
    ],
)
def test_bad_settings_are_one_sentence(change, says):
    with pytest.raises(GAError, match=says):
        Settings(**{"n_examples": 10, "seed": 0, **change}).check(zoo.lm("llama"))
    with pytest.raises(GAError, match="these questions are in English"):
        Settings(10, 0).check(load("tiny-llama"))


@needs_data
@pytest.mark.slow
def test_the_page_runs_on_a_folder_with_an_english_model(tmp_path):
    from ga_utils.runner import run_notebooks

    model, tokenizer = zoo.build("llama")
    model.save_pretrained(tmp_path / "english")
    tokenizer.save_pretrained(tmp_path / "english")
    sets = dict(n_examples=6, heads="L1H0", n_random=1, tasks=["winogrande", "lambada", "world-letter", "kv"])
    names = [str(tmp_path / "english")]
    [run] = run_notebooks(["other_tasks"], names, sets, tmp_path / "store", tmp_path / "out", project_root=ROOT)
    assert run.error is None, run.error
    text = json.dumps(json.loads(run.path.read_text()), ensure_ascii=False)
    assert "Claim C14" in text and "calibrated letters" in text and "gsm8k" in text and "perplexity" in text
    assert len(list(Store(tmp_path / "store").find("verdict"))) == 1
