"""The book's opening: rows are the heads' own, the mask changes the answer, and a model without a record is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import zoo

from ga_utils import one_question
from ga_utils.errors import GAError, TaskError
from ga_utils.mixers import rows
from ga_utils.models import load
from ga_utils.records import Store

ROOT = Path(__file__).resolve().parent.parent


def test_what_is_shown_is_what_the_heads_do(tmp_path):
    lm = load("tiny-llama", dtype="float32", device="cpu")
    seen = one_question.measure(Store(tmp_path), lm, "recorded", "recorded", 0)
    for role, head in seen.heads.items():
        own = rows(lm, seen.prompt, head, [seen.at[role]], with_d=False)[str(head)][0, 0]
        assert np.allclose(seen.rows[role], own.numpy(), atol=1e-6)
    first, end = seen.right
    assert first <= seen.at["Gather"] < end and seen.at["Aggregate"] == len(seen.tokens) - 1
    right = seen.letters.index(seen.answer)
    shares = list(seen.shares.values())
    assert all(s.sum() == pytest.approx(1) for s in shares)
    assert shares[0][right] > 0.9 > shares[2][right] + 0.3  # intact, then without the Aggregate head
    assert list(seen.table().condition)[0] == "intact" and f"{seen.answer.strip()} (right)" in seen.table()


def test_heads_that_nobody_named_are_asked_for(tmp_path):
    with pytest.raises(TaskError, match="has no record that names its Gather head"):
        one_question.heads_of(zoo.lm("llama"), "recorded", "L1H0")
    with pytest.raises(GAError, match="L9H0"):
        one_question.heads_of(load("tiny-llama"), "recorded", "L9H0")


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    from ga_utils.runner import run_notebooks

    [run] = run_notebooks(["one_question"], None, {"number": 1}, tmp_path / "s", tmp_path / "out", project_root=ROOT)
    assert run.error is None, run.error
    text = json.dumps(json.loads(run.path.read_text()), ensure_ascii=False)
    assert text.count("<img") >= 2 or text.count("<svg") >= 2
    assert "Aggregate head" in text and "made again by" in text
