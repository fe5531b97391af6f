"""The page on hybrids: every mask is where it says, its dose is counted, and a model of one kind is said."""

import json
from pathlib import Path

import numpy as np
import pytest
import zoo

from ga_utils import hybrid_page
from ga_utils.errors import GAError
from ga_utils.hybrid_page import JUDGED, Settings, _dose
from ga_utils.masking import mask_heads
from ga_utils.models import load
from ga_utils.records import Store
from ga_utils.scoring import score
from ga_utils.tasks import Example, Task, encode

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def zamba():
    return load("tiny-zamba2", dtype="float32", device="cpu")


def test_masks_are_where_the_table_says(zamba, tmp_path):
    settings = Settings(20, 0)
    page = hybrid_page.measure(Store(tmp_path), zamba, settings, progress=False)
    rows = {(r.heads, r.place, r.fill): r for r in page.rows}
    attention = zamba.head_list("attention")
    task = settings.tasks(zamba)["kv"]
    with mask_heads(zamba, attention, "answer"):
        assert np.array_equal(rows["attention", JUDGED, "zero"].answers["kv"], score(zamba, task).correct)
    ends = [len(i.context) - 1 for i in encode(zamba.tokenizer, task).items]
    with mask_heads(zamba, attention, [list(range(e)) for e in ends]):
        assert np.array_equal(rows["attention", "everywhere else", "zero"].answers["kv"], score(zamba, task).correct)
    assert rows["attention", JUDGED, "zero"].answers["kv"].mean() < 0.5 < page.intact["kv"].mean()
    assert rows["attention", "everywhere else", "zero"].dose["kv"] == 0
    assert rows["attention", "last token of the prompt", "zero"].dose == pytest.approx(
        {k: _dose(zamba, t, "last") for k, t in settings.tasks(zamba).items()}
    )
    assert rows["random SSM heads", JUDGED, "zero"].n_heads == len(attention)
    assert page.verdict.claim == "C11" and (page.table()["heads off"] == "none").sum() == 1
    handle = zamba.model.register_forward_pre_hook(lambda *a: pytest.fail("a forward ran"))
    try:
        hybrid_page.measure(Store(tmp_path), zamba, settings, progress=False)
    finally:
        handle.remove()


def test_the_dose_is_the_share_of_predictions_that_a_mask_hits(zamba):
    words = zamba.tokenizer.convert_ids_to_tokens([20, 21, 22, 23])
    answer = " ".join(words[1:])
    task = Task("t", (Example(f"{words[0]} ", (answer, words[1]), 0),), special_tokens="none")
    n = len(encode(zamba.tokenizer, task).items[0].continuations[0])
    assert _dose(zamba, task, "last") == pytest.approx(1 / n) and n >= 3
    assert _dose(zamba, task, "answer") == 1 and _dose(zamba, task, "before") == 0


def test_a_model_of_one_kind_is_said_and_not_run(tmp_path):
    for name, word in (("llama", "attention alone"), ("mamba2", "no attention")):
        lm = zoo.lm(name)
        page = hybrid_page.measure(Store(tmp_path), lm, Settings(10, 0), progress=False)
        assert word in page.why and not page.rows and not list(Store(tmp_path).find("score"))


@pytest.mark.parametrize(
    ("change", "says"),
    [({"n_examples": 9}, "10 or more"), ({"chosen": "L0H0"}, "L0H0"), ({"n_pairs": 17}, "between 1 and 16")],
)
def test_bad_settings_are_one_sentence(zamba, change, says):
    with pytest.raises(GAError, match=says):
        Settings(**{"n_examples": 10, "seed": 0, **change}).check(zamba)


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    from ga_utils.runner import run_notebooks

    sets = {"n_examples": 12, "chosen": "L1H0"}
    names = ["tiny-zamba2", "tiny-llama"]
    [run] = run_notebooks(["hybrid_delegation"], names, sets, tmp_path / "s", tmp_path / "out", project_root=ROOT)
    assert run.error is None, run.error
    text = json.dumps(json.loads(run.path.read_text()), ensure_ascii=False)
    assert "Claim C11" in text and "tiny-llama has attention alone" in text and "chosen attention heads" in text
