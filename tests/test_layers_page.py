"""Figures 2 and 3 and Table 1: the minimal model's rule, each claim's verdict, models without letters, the page."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zoo
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ga_utils import claims_layers, figures_layers, layers_page, live_heads
from ga_utils.discover import DiscoverSettings
from ga_utils.errors import GAError, TaskError
from ga_utils.heads import Head
from ga_utils.layers_page import LayersPage, Settings
from ga_utils.models import load
from ga_utils.notebooks import read_notebook
from ga_utils.records import Store
from ga_utils.report import reported
from ga_utils.task_choice import Asked

ROOT = Path(__file__).parents[1]
CHANCES = (0.25, 0.25, 0.125)
FIND = DiscoverSettings(Asked("letter"), 10, (1, 2))
SETTINGS = Settings(10, 0, FIND, 1, 2)


def answers(letters, knowledge=1.0, kv=0.9, n=200):
    """Answers of which these shares are right, the same questions first in every condition."""
    return tuple(np.arange(n) < round(share * n) for share in (letters, knowledge, kv))


def curve(*letters, knowledge=1.0):
    """Cuts from 1 layer on, with these shares of letters right; knowledge one number, or one for each cut."""
    known = [knowledge] * len(letters) if isinstance(knowledge, float) else knowledge
    return {k: answers(a, b) for k, (a, b) in enumerate(zip(letters, known, strict=True), 1)}


# ---- the minimal model ----


@pytest.mark.parametrize(
    ("letters", "layers"),
    [
        ((0.25, 0.25, 1.0, 1.0), 3),
        ((0.25, 0.25, 0.25, 1.0), 4),
        ((1.0, 1.0, 1.0, 1.0), 1),
        ((0.95, 0.25, 0.95, 1.0), 3),  # a smaller cut that is good again does not count
        ((0.25, 0.92, 0.93, 1.0), 3),  # 0.925 is nine tenths of what lies above 0.25
    ],
)
def test_the_minimal_model_is_the_fewest_layers_that_keep_letters(letters, layers):
    assert layers_page.minimal_layers({k: a[0] for k, a in curve(*letters).items()}, 0.25) == layers


# ---- the rules ----


@pytest.mark.parametrize(
    ("cuts", "minimal", "verdict", "says"),
    [
        (curve(0.25, 0.25, 1.0, 1.0), 3, "reproduced", "down to 3 of 4 layers and lose 100%"),
        (curve(0.25, 0.85, 1.0, 1.0), 3, "partly", "letters lost in that step is 0.20"),  # it falls, but not by half
        (curve(0.25, 0.25, 0.93, 1.0), 3, "partly", "interval is too wide"),
        (curve(0.25, 0.25, 0.25, 1.0), 4, "partly", "nothing flat"),
        (curve(0.25, 0.25, 1.0, 1.0, knowledge=[0.25, 0.5, 1.0, 1.0]), 3, "partly", "knowledge lost in that step"),
        (curve(0.25, 0.25, 1.0, 1.0, knowledge=[0.25, 0.25, 0.25, 1.0]), 3, "partly", "cannot be told"),
        (curve(1.0, 1.0, 1.0, 1.0), 1, "not", "smallest cut"),
        (curve(0.25, 0.25, 0.25, 0.26), 3, "not testable", "Letters are at chance"),
    ],
)
def test_c1_asks_for_one_step_that_knowledge_does_not_take(cuts, minimal, verdict, says):
    found = claims_layers.one_layer("m", cuts, minimal, CHANCES)
    assert (found.claim, found.verdict) == ("C1", verdict) and says in found.because


@pytest.mark.parametrize(("known", "verdict"), [(0.45, "reproduced"), (0.69, "partly"), (0.85, "partly"), (1.0, "not")])
def test_c2_asks_for_little_knowledge(known, verdict):
    cuts = curve(0.25, 0.25, 1.0, 1.0, knowledge=[0.25, 0.3, known, 1.0])
    found = claims_layers.little_knowledge("m", cuts, 3, CHANCES)
    assert (found.claim, found.verdict) == ("C2", verdict)
    assert found.intervals["knowledge share (paper: about 0.3)"].value == pytest.approx((known - 0.25) / 0.75, abs=0.01)


def test_c2_needs_letters_and_knowledge():
    low = curve(0.25, 0.25, 1.0, 1.0, knowledge=0.25)
    assert claims_layers.little_knowledge("m", low, 3, CHANCES).because.startswith("Knowledge is at chance")
    assert claims_layers.little_knowledge("m", curve(0.25, 0.25), 2, CHANCES).verdict == "not testable"


SPARED, LOST, ALL = answers(1.0), answers(0.25), answers(0.25, 0.25)


@pytest.mark.parametrize(
    ("dropped", "named", "verdict", "says"),
    [
        ({0: ALL, 1: SPARED, 2: LOST, 3: LOST}, [2, 3], "reproduced", "2, 3"),
        ({0: LOST, 1: SPARED, 2: LOST, 3: LOST}, [2, 3], "partly", "Layer 0 also costs over half"),
        ({0: LOST, 1: LOST, 2: LOST, 3: LOST}, [2, 3], "partly", "Layers 0, 1 also cost over half"),
        ({0: ALL, 1: SPARED, 2: ALL, 3: LOST}, [2, 3], "partly", "knowledge lost without layer 2"),
        ({0: ALL, 1: SPARED, 2: SPARED, 3: SPARED}, [2, 3], "not", "letters lost without layer 2"),
        ({0: ALL, 1: SPARED, 2: LOST, 3: LOST}, [3], "not testable", "in layer 3 alone"),
        ({0: ALL, 1: SPARED, 2: LOST, 3: LOST}, [], "not testable", "are not there"),
    ],
)
def test_c3_asks_for_the_heads_layers_and_no_other(dropped, named, verdict, says):
    found = claims_layers.two_layers("m", SPARED, dropped, named, CHANCES)
    assert (found.claim, found.verdict) == ("C3", verdict) and says in found.because


@pytest.mark.parametrize(
    ("gather", "aggregate", "beside", "verdict", "says"),
    [
        (LOST, LOST, 1.0, "reproduced", "masking L2H2 (Gather) costs 100%, a random head beside it 0%"),
        (LOST, answers(0.8), 1.0, "partly", "letters lost without L4H3"),  # it costs, but under half
        (LOST, LOST, 0.7, "partly", "letters lost without a random head"),
        (ALL, LOST, 1.0, "partly", "knowledge lost without L2H2"),
        (answers(0.8), LOST, 0.8, "not", "costs 27%, a random head beside it 27%"),  # no more than any other
        (SPARED, LOST, 1.0, "not", "letters lost without L2H2"),
    ],
)
def test_c4_asks_for_more_than_a_random_head_costs(gather, aggregate, beside, verdict, says):
    masked = {"L2H2 (Gather)": gather, "L4H3 (Aggregate)": aggregate}
    random = {name: np.stack([answers(beside)[0]] * 2) for name in masked}
    found = claims_layers.one_head("m", SPARED, masked, random, CHANCES)
    assert (found.claim, found.verdict) == ("C4", verdict) and says in found.because


def test_c4_needs_both_roles_and_a_control():
    one = {"L4H3 (Aggregate)": LOST}
    found = claims_layers.one_head("m", SPARED, one, {"L4H3 (Aggregate)": SPARED[0][None]}, CHANCES)
    assert found.verdict == "partly" and "Only one of the two roles" in found.because
    alone = claims_layers.one_head("m", SPARED, one, {"L4H3 (Aggregate)": np.array([])}, CHANCES)
    assert alone.verdict == "not testable" and "no other live head" in alone.because
    assert claims_layers.one_head("m", SPARED, {}, {}, CHANCES).because.startswith("No head")
    assert claims_layers.one_head("m", LOST, one, {}, CHANCES).because.startswith("Letters are at chance")


@pytest.mark.parametrize(
    ("both", "gather", "aggregate", "verdict"),
    [
        (1.0, 0.25, 0.25, "reproduced"),
        (0.6, 0.25, 0.25, "partly"),
        (1.0, 1.0, 0.25, "partly"),
        (0.25, 0.25, 0.25, "not"),
    ],
)
def test_c5_asks_for_both_and_neither_alone(both, gather, aggregate, verdict):
    kept = {"both": answers(both), "gather": answers(gather), "aggregate": answers(aggregate)}
    assert claims_layers.heads_suffice("m", SPARED, kept, CHANCES).verdict == verdict
    kept.pop("gather")
    assert claims_layers.heads_suffice("m", SPARED, kept, CHANCES).verdict == "not testable"


def test_every_claim_has_its_rule_and_its_place():
    page = LayersPage("m", "M", "somewhere", None, 4, why="It cannot be asked.")
    found = page.verdicts()
    assert [v.claim for v in found] == list(claims_layers.RULES) == ["C1", "C2", "C3", "C4", "C5"]
    assert {v.verdict for v in found} == {"not testable"} and {v.because for v in found} == {page.why}
    assert page.curve().empty and page.drops().empty and page.base().empty and page.table().empty


# ---- measuring ----


def test_a_model_that_cannot_be_asked_letters_is_said_and_not_run(tmp_path, monkeypatch):
    lm = zoo.lm("llama")

    def missing(*_):
        raise TaskError("The data are not installed.")

    monkeypatch.setattr("ga_utils.task_choice.benchmark_task", missing)
    handle = lm.model.register_forward_pre_hook(lambda *a: pytest.fail("a forward ran"))
    try:
        page = layers_page.measure(Store(tmp_path), lm, SETTINGS, progress=False)
    finally:
        handle.remove()
    assert page.cuts is None and page.sentence() == "Not testable: The data are not installed."
    assert not page.testable and "\n" not in page.why


def test_a_model_at_chance_on_letters_has_its_curves_and_no_heads(tmp_path, monkeypatch):
    lm = load("tiny-llamba-unaligned", dtype="float32", device="cpu")
    monkeypatch.setattr(layers_page, "discover", lambda *a: pytest.fail("heads were looked for"))
    monkeypatch.setattr(layers_page, "above_chance", lambda correct, chance: False)
    page = layers_page.measure(Store(tmp_path), lm, SETTINGS, progress=False)
    assert set(page.cuts) == set(range(1, lm.n_layers + 1)) and page.minimal == lm.n_layers
    assert set(page.dropped) == set(range(lm.n_layers)) and not page.single and not page.gather
    assert "Letters are at chance (25%)" in page.why and list(page.table().condition) == ["minimal model"]
    assert len(page.curve()) == 3 * lm.n_layers


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_examples": 9}, "10 or more"),
        ({"n_random": 0}, "n_random 1 or more"),
        ({"seed": 2}, "other questions"),
        ({"n_pairs": 17}, "between 1 and 16"),
        ({"find": replace(FIND, n_examples=5)}, "too few"),
    ],
)
def test_bad_settings_are_one_sentence(tmp_path, change, says):
    lm = load("tiny-llama", dtype="float32", device="cpu")
    with pytest.raises(GAError, match=says) as error:
        layers_page.measure(Store(tmp_path), lm, replace(SETTINGS, **change), progress=False)
    assert "\n" not in str(error.value)


def test_controls_are_alive_and_as_near_as_can_be():
    lm = zoo.lm("llama")
    site = lm.site(Head(1, 0))
    assert live_heads.random_beside(lm, Head(1, 1), 9) == (Head(1, 0), Head(1, 2), Head(1, 3))
    weight = site.proj.weight.data
    before = weight.clone()
    try:
        for head in (0, 2):
            weight[:, site.channels(head)] = 0
        assert [live_heads.is_live(lm, Head(1, i)) for i in range(4)] == [False, True, False, True]
        assert live_heads.random_beside(lm, Head(1, 1), 9) == (Head(1, 3),)
        near = live_heads.random_beside(lm, Head(1, 1), 5, without=[Head(1, 3), Head(0, 0)])
        assert len(near) == 5 and {h.layer for h in near} <= {0, 2} and Head(0, 0) not in near
    finally:
        weight.copy_(before)


def test_pruning_is_told_from_the_training_records():
    told = {n: live_heads.made_so(load(n, dtype="float32", device="cpu")) for n in ("tiny-llama", "tiny-llamba")}
    lm = load("tiny-llama", dtype="float32", device="cpu")
    dead = [str(h) for h in lm.head_list() if not live_heads.is_live(lm, h)]
    assert dead and all(head in told["tiny-llama"] for head in dead)
    assert "built in" in told["tiny-llama"] and "distilled, head by head, from tiny-llama" in told["tiny-llamba"]
    assert live_heads.made_so(zoo.lm("llama")) == ""


# ---- figures ----


def frame(n, name):
    rows = [("m", k, t, 0.9 if k % 3 else 0.2, 0.02, c) for k in range(n)
            for t, c in zip(layers_page.TASKS, CHANCES, strict=True)]  # fmt: skip
    return pd.DataFrame(rows, columns=["model", name, "task", "accuracy", "stderr", "chance"])


@pytest.mark.parametrize(
    "marks",
    [
        {0: "Gather L0H1", 1: "Aggregate L1H2"},
        {2: "Gather L2H2", 4: "Aggregate L4H3"},
        {16: "Gather L16H22", 17: "Aggregate L17H24"},
        {3: "Gather L3H0, Aggregate L3H0"},
    ],
)
def test_no_label_overlaps_and_all_are_on_the_page(marks):
    n = max(max(marks) + 1, 6)
    kept = frame(n + 1, "layers kept").query("`layers kept` > 0")
    base = kept[kept["layers kept"] == n].assign(accuracy=[1.0, 1.0, 0.98])
    for fig, count in (
        (figures_layers.layers_kept(kept, {"m": max(marks)}), 6),
        (figures_layers.layer_out(frame(n, "layer taken out"), base, {"m": marks}), 5 + len(marks)),
    ):
        FigureCanvasAgg(fig).draw()
        [ax] = fig.axes
        assert len(ax.texts) == count
        boxes = [t.get_window_extent() for t in (*ax.texts, ax._left_title, *ax.get_xticklabels())]
        width, _ = fig.canvas.get_width_height()
        assert all(b.x0 >= 0 and b.x1 <= width for b in boxes)
        names = [t.get_text() for t in (*ax.texts, ax._left_title, *ax.get_xticklabels())]
        pairs = [(names[i], names[j]) for i, a in enumerate(boxes) for j in range(i) if a.overlaps(boxes[j])]
        assert not pairs


# ---- the notebook ----


def test_the_page_quotes_the_papers_numbers_and_takes_panels():
    notebook = read_notebook(ROOT, "layers_and_heads")
    assert notebook.defaults["models"] == ["tiny-llama", "tiny-llamba"] and notebook.defaults["n_examples"] == 150
    shown = layers_page.paper_numbers()
    assert len(shown) == len(reported("fig2")) + len(reported("table1")) and "66.32%" in set(shown["the paper's value"])
    prose = "\n".join(source for _, source in notebook.cells)
    assert "66.32" not in prose and "66%" not in prose  # quoted from the file, never typed
    assert max(len(s.splitlines()) for kind, s in notebook.cells if kind == "code") <= 30


@pytest.mark.slow
def test_the_page_runs_and_goes_on_past_a_model_at_chance(tmp_path):
    """The whole notebook with small parameters, on tiny-llama and on a folder that holds a random English model."""
    from ga_utils.runner import run_notebooks

    model, tokenizer = zoo.build("llama")
    model.config.max_position_embeddings = 16_384  # this tokenizer takes a token for each letter
    model.save_pretrained(tmp_path / "english")
    tokenizer.save_pretrained(tmp_path / "english")
    sets = dict(n_examples=20, find_examples=12, find_seeds=[1], n_random=1, n_pairs=4)
    names = [str(tmp_path / "english"), "tiny-llama"]
    [run] = run_notebooks(["layers_and_heads"], names, sets, tmp_path / "store", tmp_path / "out", project_root=ROOT)
    assert run.error is None
    text = json.dumps(json.loads(run.path.read_text()), ensure_ascii=False)
    assert "66.32%" in text and "The paper's numbers, not ours" in text and "redundant heads were pruned" in text
    assert "Letters are at chance (25%)" in text
    assert "The minimal model has 5 of 6 layers" in text and "ga run layers_and_heads" in text
    assert text.count('"image/svg+xml"') >= 2
    assert len(list(Store(tmp_path / "store").find("verdict"))) == 10
