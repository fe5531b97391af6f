"""The page on idealised masks: what theory allows, each condition, the verdict's rule, and the page."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ga_utils import figures_idealised, idealised, mixers
from ga_utils.discover import DiscoverSettings
from ga_utils.errors import GAError, TaskError
from ga_utils.heads import Head
from ga_utils.idealised import Settings
from ga_utils.idealised_shown import ALLOWED, BASE, WRONG, IdealisedPage
from ga_utils.models import load
from ga_utils.notebooks import read_notebook
from ga_utils.records import Store
from ga_utils.task_choice import Asked
from ga_utils.theory import Theory, allowed_share, theory
from ga_utils.tiny import questions

ROOT = Path(__file__).parents[1]
G, A = Head(2, 2), Head(4, 3)
SETTINGS = Settings(10, 0, DiscoverSettings(Asked("letter"), 10, (1, 2)), 2)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny-llama", dtype="float32", device="cpu")


# ---- what theory allows ----


def words(lm, example, positions):
    tokens = [lm.tokenizer.decode([i]) for i in lm.tokenizer(example.prompt)["input_ids"]]
    return [tokens[p] for p in positions]


def test_gather_reads_its_own_line_and_aggregate_the_ends(tiny):
    task = questions.letter_task(3, 5)
    example = task.examples[1]
    reads = theory(tiny, task, Theory((G,), (A,)))
    gather, fetch = reads[G][1], reads[A][1]
    assert gather.answer is None and fetch.rows == {}
    lines = example.prompt.split("\n")[1:5]
    assert len(gather.rows) == 8 and len(fetch.answer) == 8  # each option's last syllable and its newline
    for line, (value, end) in zip(lines, zip(*[iter(sorted(gather.rows))] * 2, strict=True), strict=True):
        assert words(tiny, example, gather.rows[end]) == [*line.split(), "\n"]
        assert words(tiny, example, gather.rows[value]) == line.split()
    assert sorted(fetch.answer) == sorted(gather.rows)


@pytest.mark.parametrize(("ends", "word"), [("line", "\n"), ("value", None)])
def test_ends_can_be_those_of_lines_or_of_values(tiny, ends, word):
    task = questions.kv_task(4, 2, 5)
    [reads, _] = theory(tiny, task, Theory((), (A,), ends=ends))[A]
    values = [line.split()[-1] for line in task.examples[0].prompt.split("\n")[1:5]]
    assert words(tiny, task.examples[0], reads.answer) == ([word] * 4 if word else values)


def test_the_oracle_and_its_control_read_one_end(tiny):
    task = questions.kv_task(4, 20, 5)
    every, right, wrong = (
        theory(tiny, task, Theory((), (A,), ends="value", read=read))[A] for read in ("all", "right", "wrong")
    )
    seen = set()
    for number, example in enumerate(task.examples):
        answer = example.candidates[example.answer].strip()
        assert words(tiny, example, right[number].answer) == [answer]
        [other] = wrong[number].answer
        assert other in every[number].answer and words(tiny, example, [other]) != [answer]
        seen.add(sorted(every[number].answer).index(other))
    assert len(seen) > 2  # drawn, not always the same


def test_a_task_without_segments_and_bad_rules_are_refused(tiny):
    with pytest.raises(TaskError, match="no segments"):
        theory(tiny, questions.knowledge_task(2, 0), Theory((G,), (A,)))
    with pytest.raises(GAError, match="ends must be"):
        Theory(read="both")


def test_the_allowed_share_is_that_of_the_matrix(tiny, tmp_path):
    task = questions.letter_task(3, 5)
    found = allowed_share(Store(tmp_path), tiny, task, Theory((G,), (A,))).arrays
    m = mixers.matrix(tiny, task.examples[1].prompt, A, with_d=False)[A][0]
    ends = sorted(theory(tiny, task, Theory((), (A,)))[A][1].answer)
    assert found["aggregate"].shape == found["gather"].shape == (1, 3)
    assert found["aggregate"][0, 1] == pytest.approx(float(m[-1, ends].sum()), abs=1e-5)


# ---- the rule ----

CHANCE = {"letter": 0.25, "kv": 0.125}


def page(base, allowed, wrong, letter=1.0, n=200):
    def right(share):
        return np.arange(n) < round(share * n)

    rows = {"(a) intact": letter, BASE: base, ALLOWED: allowed, WRONG: wrong}
    rows = {label: {"letter": right(share), "kv": right(0.9)} for label, share in rows.items()}
    return IdealisedPage("m", "M", "somewhere", None, (G,), (A,), "named", "", CHANCE, rows)


@pytest.mark.parametrize(
    ("base", "allowed", "wrong", "verdict", "says"),
    [
        (1.0, 1.0, 0.25, "reproduced", "100% of the score above chance is kept"),
        (0.6, 0.6, 0.1, "reproduced", "letters"),  # what (b) leaves is what counts
        (1.0, 0.6, 0.25, "partly", "at least 0.8"),
        (1.0, 1.0, 0.9, "partly", "at most 0.3"),
        (1.0, 0.25, 0.25, "not", "at least 0.8"),
        (0.25, 0.25, 0.25, "not testable", "at chance already"),
    ],
)
def test_the_verdict_follows_its_rule(base, allowed, wrong, verdict, says):
    found = page(base, allowed, wrong).verdict()
    assert found.verdict == verdict and says in found.because


def test_a_verdict_on_a_cut_that_takes_little_says_so():
    found = replace(page(1.0, 1.0, 0.25), allowed={"letter": {"gather": np.full((1, 9), 0.98)}})
    assert "Little was cut: the allowed entries held at least 98%" in found.verdict().because
    found = replace(found, allowed={"letter": {"gather": np.full((1, 9), 0.98), "aggregate": np.full((1, 9), 0.5)}})
    assert "Little was cut" not in found.verdict().because


def test_key_value_questions_stand_in_for_letters_at_chance():
    found = page(1.0, 1.0, 1.0, letter=0.25)
    assert found.judged_on() == "kv" and found.verdict().because.startswith("On key-value questions")
    none = replace(found, rows={"(a) intact": {"letter": np.arange(99) % 4 == 0}})
    assert none.verdict().verdict == "not testable"


# ---- measuring ----


def test_allowed_entries_matter_on_a_trained_model(tiny, tmp_path, monkeypatch):
    """The pruned tiny Llama keeps its letters with allowed entries alone and loses them with one wrong end."""
    monkeypatch.setattr(idealised, "find_heads", lambda *a: ((G,), (A,), "told"))
    found = idealised.measure(Store(tmp_path), tiny, replace(SETTINGS, n_examples=24), progress=False)
    letters = {label: answers["letter"].mean() for label, answers in found.rows.items()}
    assert letters["(a) intact"] > 0.9 and letters[BASE] > 0.9 and letters[ALLOWED] > 0.9
    assert letters["G&A heads off, others on"] < 0.6 and letters[WRONG] < 0.6
    assert "knowledge" in found.rows[BASE] and "knowledge" not in found.rows[ALLOWED]
    assert list(found.table().columns) == ["condition", "letter", "kv", "knowledge"]
    assert (found.table().knowledge == "–").sum() == 6
    assert list(found.dose()["head"]) == ["L2H2 (Gather)", "L4H3 (Aggregate)"]
    handle = tiny.model.register_forward_pre_hook(lambda *a: pytest.fail("a forward ran"))
    try:
        again = idealised.measure(Store(tmp_path), tiny, replace(SETTINGS, n_examples=24), progress=False)
    finally:
        handle.remove()
    assert again.table().equals(found.table())


def test_a_model_without_heads_with_a_role_is_said(tmp_path):
    lm = zoo.lm("llama")
    found = idealised.measure(Store(tmp_path), lm, SETTINGS, progress=False)
    assert not found.gather and not found.aggregate and list(found.rows) == ["(a) intact"]
    assert found.sentence().startswith("No Gather or Aggregate head is known") and "\n" not in found.sentence()
    assert found.verdict().verdict == "not testable"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": "all"}, "use 'auto' or 'discover'"),
        ({"n_examples": 9}, "10 or more"),
        ({"seed": 2}, "other questions"),
        ({"ends": "both"}, "ends must be"),
    ],
)
def test_bad_settings_are_one_sentence(tiny, change, says):
    with pytest.raises(GAError, match=says) as error:
        replace(SETTINGS, **change).check(tiny)
    assert "\n" not in str(error.value)


# ---- the page ----


def test_no_label_overlaps():
    frame = page(0.6, 0.6, 0.1).frame()
    fig = figures_idealised.conditions(frame)
    FigureCanvasAgg(fig).draw()
    [ax] = fig.axes
    boxes = [t.get_window_extent() for t in (*ax.get_yticklabels(), ax._left_title, *ax.get_legend().get_texts())]
    assert not [(i, j) for i, a in enumerate(boxes) for j in range(i) if a.overlaps(boxes[j])]
    width, _ = fig.canvas.get_width_height()
    assert all(b.x0 >= 0 and b.x1 <= width for b in boxes)


def test_the_page_takes_panels():
    notebook = read_notebook(ROOT, "idealised_masks")
    assert notebook.defaults["models"] == ["tiny-llama", "tiny-llamba"] and notebook.defaults["heads"] == "auto"
    assert max(len(s.splitlines()) for kind, s in notebook.cells if kind == "code") <= 30


@pytest.mark.slow
def test_the_page_runs(tmp_path):
    from ga_utils.runner import run_notebooks

    sets = dict(n_examples=16, find_examples=16, find_seeds=[1], n_random=1, n_pairs=4)
    [run] = run_notebooks(
        ["idealised_masks"], ["tiny-llama"], sets, tmp_path / "store", tmp_path / "out", project_root=ROOT
    )
    assert run.error is None
    text = json.dumps(json.loads(run.path.read_text()), ensure_ascii=False)
    assert "redundant heads were pruned" in text and "(c) allowed entries alone" in text and "**Rule.**" in text
    assert text.count('"image/svg+xml"') == 1 and "ga run idealised_masks" in text
