"""The page on attention maps: where rows look, claims C7 and C8 on it, and the convolution against the state."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo

from ga_utils import conv_state, head_maps, idealised, mixers
from ga_utils.discover import DiscoverSettings
from ga_utils.heads import Head
from ga_utils.models import load
from ga_utils.notebooks import read_notebook
from ga_utils.records import Store
from ga_utils.task_choice import Asked
from ga_utils.tasks.tokens import encode, segment_tokens

ROOT = Path(__file__).parents[1]
SETTINGS = idealised.Settings(10, 0, DiscoverSettings(Asked("letter"), 10, (1, 2)), 2)
HEADS = {"tiny-llama": ((Head(2, 2),), (Head(4, 3),)), "tiny-llamba": ((Head(0, 0),), (Head(4, 3),))}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Both models' pages, their heads told rather than found."""
    store, found = Store(tmp_path_factory.mktemp("maps")), {}
    with pytest.MonkeyPatch.context() as patch:
        for name, heads in HEADS.items():
            lm = load(name, dtype="float32", device="cpu")
            patch.setattr(idealised, "find_heads", lambda *a, heads=heads: (*heads, "told"))
            found[name] = head_maps.measure(store, lm, SETTINGS, progress=False)
    return found


@pytest.mark.parametrize("name", list(HEADS))
def test_masses_are_those_of_the_whole_matrix(name, pages):
    """Mass on the right segment's end and sharpness, taken anew from each question's whole matrix."""
    lm, page = load(name, dtype="float32", device="cpu"), pages[name]
    task, head = SETTINGS.tasks(lm)[0]["letter"], page.heads["Aggregate"]
    number = page.every.index(head)
    for i in (0, 7):
        example = task.examples[i]
        m = mixers.matrix(lm, example.prompt, head, with_d=False)[head][0].abs()
        row = (m[-1] / m[-1].sum()).double().numpy()
        line, value = segment_tokens(lm.tokenizer, example, "none")[example.answer]
        assert len(row) == len(encode(lm.tokenizer, task).items[i].context)
        assert page.masses["Aggregate"][number, i] == pytest.approx(row[value[1] - 1 : line[1]].sum(), abs=1e-5)
        assert page.sharp["Aggregate"]["top"][i] == pytest.approx(row.max(), abs=1e-5)
        entropy = -sum(x * np.log(x) for x in row if x > 0)
        assert page.sharp["Aggregate"]["entropy"][i] == pytest.approx(entropy, abs=1e-4)


def test_the_gather_row_is_the_end_that_looks_at_its_own_segment(pages):
    for page in pages.values():
        [one] = [x for x in page.maps if x.role == "Gather"]
        assert one.right[0] < one.row < one.right[1] and one.m.shape == (len(one.tokens), len(one.tokens))
        assert page.sharp["Gather"]["mass"].shape == (10,)
        said = head_maps.caption(one, page.kinds["Gather"])
        assert said.startswith(f"Gather {one.head}: the right segment's end takes ")


def test_the_ssm_is_compared_with_the_transformer_on_the_same_questions(pages):
    verdicts = head_maps.smoother(list(pages.values()))
    assert list(verdicts) == ["tiny-llamba"] and verdicts["tiny-llamba"].claim == "C8"
    assert verdicts["tiny-llamba"].verdict == "reproduced"
    other = replace(pages["tiny-llama"], questions="others")
    assert head_maps.smoother([other, pages["tiny-llamba"]])["tiny-llamba"].verdict == "not testable"
    assert pages["tiny-llama"].alike().claim == "C7"


def test_a_head_that_copies_the_token_before_is_told(pages):
    """The tiny Llama's Gather head does, so its mass on its own segment proves nothing; the tiny Llamba's does not."""
    assert "says little about it" in pages["tiny-llama"].warning() and pages["tiny-llamba"].warning() == ""
    lm = load("tiny-llama", dtype="float32", device="cpu")
    [one] = [x for x in pages["tiny-llama"].maps if x.role == "Gather"]
    row = np.abs(one.m[one.row])
    found = pages["tiny-llama"].sharp["Gather"]["before"][0]
    assert lm.site(one.head).kind == "attention" and found == pytest.approx(row[one.row - 1], abs=0.01) and found > 0.5


def test_a_page_without_heads_says_so(tmp_path):
    page = head_maps.measure(Store(tmp_path), zoo.lm("llama"), SETTINGS, progress=False)
    assert page.sentence().startswith("No Gather or Aggregate head") and not page.maps and page.table().empty
    assert page.alike().verdict == "not testable" and head_maps.smoother([page]) == {}


def test_convolution_and_state_are_switched_off_where_they_are(tmp_path):
    lm = load("tiny-llamba", dtype="float32", device="cpu")
    tasks = {k: t for k, t in replace(SETTINGS, n_examples=16).tasks(lm)[0].items() if k != "knowledge"}
    found = conv_state.measure(Store(tmp_path), lm, tasks, {"Gather": Head(0, 0), "Aggregate": Head(4, 3)})
    assert found.layers == {"Gather": 0, "Aggregate": 4} and len(found.rows) == 7 and not found.why
    letters = {label: answers["letter"].mean() for label, answers in found.rows.items()}
    assert letters["intact"] > 0.9 and letters["state not carried, all layers"] < 0.6
    assert "In the Gather head's layer (0), letters lose" in found.sentence()


def test_attention_alone_has_neither(tmp_path):
    lm = load("tiny-llama", dtype="float32", device="cpu")
    found = conv_state.measure(Store(tmp_path), lm, {}, {"Gather": Head(2, 2)})
    assert not found.rows and "attention alone" in found.sentence()


def test_the_page_takes_panels():
    notebook = read_notebook(ROOT, "attention_maps")
    assert notebook.defaults["models"] == ["tiny-llama", "tiny-llamba"] and notebook.defaults["heads"] == "auto"
    assert max(len(s.splitlines()) for kind, s in notebook.cells if kind == "code") <= 30


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    from ga_utils.runner import run_notebooks

    sets = dict(n_examples=12, find_examples=16, find_seeds=[1], n_pairs=4)
    store = tmp_path / "store"
    [run] = run_notebooks(["attention_maps"], ["tiny-llama"], sets, store, tmp_path / "out", project_root=ROOT)
    assert run.error is None
    text = json.dumps(json.loads(run.path.read_text()), ensure_ascii=False)
    assert "attention alone" in text and "**Claim C7" in text.replace("> ", "") and "ga run attention_maps" in text
    assert text.count("data:image/svg+xml") == 4 and len(list(Store(store).find("verdict"))) == 1
