"""Figure 4 from its settings to its verdict: selection, controls, intervals, the rule, and bad input."""

import json
from dataclasses import replace

import numpy as np
import pytest
import zoo
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ga_utils import claims, figures, kv_curve
from ga_utils.discovery import effects, select_heads
from ga_utils.errors import GAError, HeadError, TaskError
from ga_utils.heads import Head
from ga_utils.measure import leave_controls, random_draws, score_under, sweep_under
from ga_utils.records import Store
from ga_utils.report import reported
from ga_utils.stats import bootstrap, slope
from ga_utils.sweep import Sweep

SETTINGS = kv_curve.KVSettings(
    pairs=[2, 4], n_examples=12, seed=0, format="terse", values="10-99", chat=False, heads="L1H1,L2H0",
    positions="all", n_random=2, sweep_pairs=3, sweep_examples=10, sweep_seed=1, other_formats=["paper"],
)  # fmt: skip


def a_sweep(losses, noise=0.1, n=40, seed=0):
    """A sweep whose heads cost `losses` nats on average."""
    rng = np.random.default_rng(seed)
    intact = rng.normal(-2, 1, n)
    logprob = intact - np.array(losses)[:, None] + noise * rng.normal(size=(len(losses), n))
    heads = tuple(Head(i // 4, i % 4) for i in range(len(losses)))
    yes = np.ones(n, bool)
    return Sweep(heads, yes, intact, np.ones((len(losses), n), bool), logprob, "answer", True, 0, 0)


def test_selection_takes_what_stands_out_and_nothing_else():
    losses = [0.0] * 16
    losses[5], losses[9], losses[12] = 1.0, 0.5, 0.2  # 0.2 is beyond doubt, but under a third of the strongest
    sweep = a_sweep(losses)
    assert select_heads(sweep) == [Head(1, 1), Head(2, 1)]
    table = effects(sweep)
    assert set(table[table.significant]["head"]) == {"L1H1", "L2H1", "L3H0"}
    assert select_heads(sweep, most=1) == [Head(1, 1)]


def test_noise_alone_selects_no_head():
    found = 0
    for seed in range(20):
        try:
            select_heads(a_sweep([0.0] * 100, noise=1.0, seed=seed))
            found += 1
        except TaskError as error:
            assert "No head stands out among 100 on 40 examples" in str(error)
    assert found <= 3  # 5% of sweeps, corrected for the 100 heads


def test_random_heads_match_layer_for_layer_and_are_different_draws():
    lm = zoo.lm("llama")
    found = (Head(1, 1), Head(2, 0))
    draws = random_draws(lm, found, 9)
    assert len(set(draws)) == 9  # all of 3 x 3
    for drawn in draws:
        assert [h.layer for h in drawn] == [1, 2] and not set(drawn) & set(found)
    assert random_draws(lm, found, 4) == draws[:4]
    # two of four heads leave one other pair, however many draws are asked for
    assert random_draws(lm, (Head(1, 0), Head(1, 1)), 5) == [(Head(1, 2), Head(1, 3))]
    with pytest.raises(GAError, match="too few others"):
        random_draws(lm, (Head(1, 0), Head(1, 1), Head(1, 2)), 1)
    every = [Head(1, i) for i in (2, 0, 3, 1)] + [Head(2, 1)]
    assert leave_controls(lm, every) == (Head(1, 2), Head(1, 0), Head(2, 1))


def test_a_head_named_twice_is_one_head():
    lm = zoo.lm("llama")
    for names in ("L1H2,L1.attention.H2", [[1, 2], "L1H2"], "[[1, 2]]", "(1, 2)", "L1H2,"):
        assert replace(SETTINGS, heads=names).given(lm) == (Head(1, 2),)


def test_known_heads_go_with_the_model_and_not_with_its_label():
    lm = replace(zoo.lm("llama"), name="llama-3.1-8b-instruct")
    with pytest.raises(GAError, match="registry names no aggregate heads"):
        replace(SETTINGS, heads="registry").check(lm)


def test_bootstrap_intervals_cover_and_pair():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(60):
        x = rng.normal(0.3, 1, 50)
        i = bootstrap(lambda g: g.mean(), x)
        covered += i.low <= 0.3 <= i.high
    assert covered >= 50
    base = rng.random(200) < 0.5
    pair = np.stack([base, base]).astype(float)  # identical conditions: the paired difference is exactly 0
    i = bootstrap(lambda g: g[0].mean() - g[1].mean(), pair)
    assert i.low == i.high == 0
    assert slope([1, 2, 3], [2, 4, 6]) == pytest.approx(2)


def points(intact, masked, random, n=400, seed=0):
    """KVPoints whose accuracies are as given, at 5, 10, 20 pairs; all conditions answer the same questions."""
    rng = np.random.default_rng(seed)
    out = []
    for pairs, a, m, r in zip((5, 10, 20), intact, masked, random, strict=True):
        u = rng.random(n)
        out.append(claims.KVPoint(pairs, 1 / pairs, u < a, u < m, u < (a + m) / 2, np.stack([u < r, u < r])))
    return out


@pytest.mark.parametrize(
    ("intact", "masked", "random", "verdict"),
    [
        ((0.9, 0.9, 0.9), (0.7, 0.5, 0.2), (0.9, 0.88, 0.85), "reproduced"),
        ((0.9, 0.9, 0.9), (0.4, 0.5, 0.6), (0.9, 0.88, 0.85), "partly"),  # the loss shrinks with more pairs
        ((0.9, 0.9, 0.9), (0.88, 0.8, 0.5), (0.8, 0.85, 0.85), "partly"),  # fails at one size
        ((0.9, 0.9, 0.9), (0.9, 0.9, 0.9), (0.9, 0.9, 0.9), "not"),
        ((0.9, 0.9, 0.9), (0.9, 0.8, 0.7), (0.5, 0.5, 0.5), "not"),
        ((0.2, 0.1, 0.05), (0.2, 0.1, 0.05), (0.2, 0.1, 0.05), "not testable"),
    ],
)
def test_the_rule_gives_each_verdict(intact, masked, random, verdict):
    found = claims.kv_retrieval("m", points(intact, masked, random))
    assert found.verdict == verdict and found.because.endswith(".")


def test_a_loss_without_room_to_grow_is_said_and_changes_no_verdict():
    at_chance = (0.2, 0.1, 0.05)
    found = claims.kv_retrieval("m", points((0.9, 0.9, 0.9), at_chance, (0.9, 0.88, 0.85)))
    assert found.verdict == "partly" and "no room to grow" in found.because
    assert "the same slope with the strongest head alone masked" in found.intervals


def test_measured_once_and_found_again(tmp_path):
    lm, store = zoo.lm("llama"), Store(tmp_path)
    first = kv_curve.measure(store, lm, SETTINGS, progress=False)
    files = {p: p.read_bytes() for p in tmp_path.rglob("*.json") if not p.name.endswith("meta.json")}
    assert len(files) == 2 * (3 + 2) + 2  # sizes x conditions, and the other format twice
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".lock"}
    again = kv_curve.measure(store, lm, SETTINGS, progress=False)
    assert stamps == {p: p.stat().st_mtime_ns for p in stamps}
    assert first.summary().equals(again.summary())
    # a longer curve measures only what is missing
    kv_curve.measure(store, lm, replace(SETTINGS, pairs=[2, 3, 4]), progress=False)
    assert files == {p: p.read_bytes() for p in files}


def test_a_record_depends_on_weights_task_and_condition(tmp_path):
    store = Store(tmp_path)
    lm, other = zoo.lm("llama"), zoo.lm("llama", 1)
    task = SETTINGS.task(lm, 2)
    condition = kv_curve.Condition("one", (Head(1, 1),))
    records = [
        score_under(store, lm, task, condition),
        score_under(store, other, task, condition),
        score_under(store, lm, SETTINGS.task(lm, 4), condition),
        score_under(store, lm, task, replace(condition, heads=(Head(1, 2),))),
        score_under(store, lm, task, replace(condition, positions="last")),
        score_under(store, lm, task, kv_curve.Condition("intact")),
    ]
    assert len({r.hash for r in records}) == len(records)
    # labels name things, they do not change what was measured
    assert score_under(store, lm, task, replace(condition, label="another")).hash == records[0].hash
    with pytest.raises(HeadError):
        score_under(store, lm, task, kv_curve.Condition("none", (Head(9, 0),)))


def test_sweeps_are_kept_in_shards_and_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("ga_utils.measure.SHARD", 4)
    lm, store = zoo.lm("llama"), Store(tmp_path)
    short = sweep_under(store, lm, SETTINGS.sweep_task(lm), progress=False)
    before = set(tmp_path.rglob("*.npz"))
    longer = sweep_under(store, lm, replace(SETTINGS, sweep_examples=12).sweep_task(lm), progress=False)
    assert (longer.logprob[:, :8] == short.logprob[:, :8]).all() and longer.logprob.shape[1] == 12
    assert len(set(tmp_path.rglob("*.npz")) - before) == 1  # the last shard only


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": "L9H0"}, "layers with heads are 0-2"),
        ({"heads": "seventeen"}, "not the name of a head"),
        ({"heads": "registry"}, "registry names no aggregate heads"),
        ({"pairs": []}, "one or more"),
        ({"pairs": [4, 2]}, "ascending"),
        ({"pairs": [2, 91]}, "at most 90 pairs"),
        ({"pairs": [2, 101]}, "from 1 to 100"),
        ({"positions": "first"}, "positions"),
        ({"n_random": 0}, "control"),
        ({"n_examples": 3}, "10 or more"),
        ({"heads": "sweep", "sweep_seed": 0}, "other questions"),
        ({"format": "xml"}, "format"),
        ({"other_formats": ["xml"]}, "format"),
        ({"chat": True}, "chat"),
    ],
)
def test_bad_input_is_one_sentence_before_any_forward(tmp_path, change, says):
    lm = zoo.lm("llama")

    def forward(*args):
        raise AssertionError("a forward ran")

    handle = lm.model.register_forward_pre_hook(forward)
    try:
        with pytest.raises(GAError, match=says) as error:
            kv_curve.measure(Store(tmp_path), lm, replace(SETTINGS, **change), progress=False)
    finally:
        handle.remove()
    assert "\n" not in str(error.value)


def test_prompts_longer_than_the_context_are_refused_before_any_forward(tmp_path):
    from ga_utils.language_model import wrap

    lm = wrap(*zoo.build("llama", max_position_embeddings=64), name="short")
    with pytest.raises(TaskError, match="takes 64"):
        kv_curve.measure(Store(tmp_path), lm, replace(SETTINGS, pairs=[2, 40]), progress=False)


def test_the_figure_names_every_line_and_no_label_overlaps(tmp_path):
    curve = kv_curve.measure(Store(tmp_path), zoo.lm("llama"), SETTINGS, progress=False)
    labels = {"intact": "intact", "random": "random heads off", "strongest": "L1H1 off", "masked": "both off"}
    fig = figures.kv_curves(curve.table, labels)
    FigureCanvasAgg(fig).draw()
    texts = [t for t in fig.axes[0].texts]
    assert {t.get_text() for t in texts} == {*labels.values(), "guessing"}
    boxes = [t.get_window_extent() for t in texts]
    width, _ = fig.canvas.get_width_height()
    assert all(b.x1 <= width for b in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_papers_numbers_on_the_first_page_are_reported_ones():
    from pathlib import Path

    text = (Path(__file__).parents[1] / "book" / "index.md").read_text()
    for item, condition, shown in [
        ("table1", "minimal model (layers 0-17)", "66.32%"),
        ("table1", "minimal model without L17H24", "about 25%"),
        ("hybrid_delegation", "intact", "64.3%"),
        ("hybrid_delegation", "aggregate attention masked", "34.9%"),
        ("fig7", "intact", "33%"),
        ("fig7", "layer 17 from Llama-3.1-8B-Instruct", "50%"),
    ]:
        row = reported(item, condition=condition, metric="mmlu")[0]
        assert float(shown.removeprefix("about ").rstrip("%")) == row.value
        assert shown in text


def test_the_notebook_is_clean_and_has_parameters():
    from pathlib import Path

    for path in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"):
        notebook = json.loads(path.read_text())
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        assert all(not c["outputs"] and c["execution_count"] is None for c in cells), path
        assert "parameters" in cells[0]["metadata"]["tags"], path
