"""The page on heads and SSM attention: exactness records, honest pictures, heads chosen by rule, and bad input."""

import json
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo

from ga_utils import exactness, head_rows, head_views
from ga_utils import figures_mixers as draw
from ga_utils.errors import GAError, HeadError
from ga_utils.heads import Head
from ga_utils.mixers.base import FAMILIES
from ga_utils.notebooks import read_notebook
from ga_utils.records import Store

ROOT = Path(__file__).parents[1]
#: one architecture for each family of mixers
EVERY_FAMILY = ["llama", "mamba", "mamba2", "llamba", "qwen3_next", "kimi_linear", "minimax", "lfm2"]
SETTINGS = head_views.ViewSettings(3, 12, 0, 10, 1)
TEXT = "ab:1\ncd:2\nab:"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def records(store):
    return exactness.measure(store, EVERY_FAMILY, [1, 7, 17], progress=False)


def stamps(store):
    return {p: p.stat().st_mtime_ns for p in store.root.rglob("*") if p.is_file() and p.suffix != ".lock"}


# ---- exactness ----


def test_every_family_is_measured_and_within_the_contract(records):
    frame = exactness.frame(records)
    assert set(frame.kind) == set(FAMILIES) == set(exactness.NAMES)
    assert (frame[["mixer", "row"]] <= exactness.BOUND).all().all() and (frame.above == 0).all()
    assert 0 < frame.mixer.max()  # measured, not assumed
    assert list(exactness.table(records).family) == list(exactness.NAMES.values())
    shown = exactness.signs(records).set_index("family")
    assert tuple(shown.loc["softmax attention"]) == ("0%", "1") and (shown["negative weight"] != "0%").sum() == 7
    assert exactness.verdict(records).startswith(f"All {len(frame)} comparisons are within 10⁻⁵")
    attention = frame[frame.kind == "attention"]
    assert (attention.negative == 0).all() and np.allclose(attention[["least_sum", "greatest_sum"]], 1, atol=1e-5)
    assert (frame[(frame.kind != "attention") & (frame.length == 17)].negative > 0).all()
    # leaving the erase term out is a mistake that can be seen
    delta = frame[frame.kind.isin(["deltanet", "kda"]) & (frame.length > 1)]
    assert (delta.no_erase > 1e-3).all() and "would be off by" in exactness.without_erase(records)
    assert exactness.without_erase(records[:3]) == ""


def test_exactness_is_measured_once_and_depends_on_lengths_and_seed(store, records):
    before = stamps(store)
    again = exactness.measure(store, EVERY_FAMILY, [1, 7, 17], progress=False)
    assert stamps(store) == before and [r.values for r in again] == [r.values for r in records]
    hashes = {r.hash for r in records}
    for lengths, seed in (([1, 7], 0), ([1, 7, 17], 1)):
        assert exactness.measure(store, ["llama"], lengths, seed, progress=False)[0].hash not in hashes


def test_an_inexact_matrix_is_seen_and_said(tmp_path, monkeypatch):
    family = FAMILIES["lightning"]
    right = type(family).matrix
    monkeypatch.setattr(type(family), "matrix", lambda self, *a: right(self, *a) * (1 + 1e-3))
    records = exactness.measure(Store(tmp_path), ["minimax"], [7], progress=False)
    frame = exactness.frame(records)
    assert frame[frame.kind == "lightning"].mixer.min() == pytest.approx(1e-3, rel=1e-2)
    assert exactness.verdict(records).startswith("2 of 4 comparisons miss 10⁻⁵")


def test_the_measured_error_is_that_of_the_models_own_output():
    rows = exactness.errors(zoo.lm("mamba2"), [17], seed=3)
    lm = zoo.lm("mamba2")
    ids = torch.randint(4, 260, (1, 17), generator=torch.Generator().manual_seed(3017))
    from ga_utils import mixers

    with torch.no_grad():
        for row, (site, cap) in zip(rows, mixers.capture(lm, {"input_ids": ids}).items(), strict=True):
            m = FAMILIES["mamba2"].matrix(cap, list(range(site.n_heads)), True)
            gap = (m @ cap.value - cap.output).double().norm() / cap.output.double().norm()
            assert row["mixer"] == pytest.approx(float(gap), rel=1e-9)
            assert row["least_sum"] == pytest.approx(float(m.sum(-1).min()))


def test_with_a_gpu_the_cpu_models_run_in_a_process_of_their_own(tmp_path, monkeypatch, records):
    store = Store(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(exactness, "errors", lambda *a: pytest.fail("measured in this process"))
    found = exactness.measure(store, ["mamba2"], [1, 7, 17], progress=False)
    assert found[0].hash == records[EVERY_FAMILY.index("mamba2")].hash


@pytest.mark.parametrize(
    ("x", "shown"), [(0, "0"), (1e-5, "10⁻⁵"), (1.84e-7, "1.8 × 10⁻⁷"), (9.99e-6, "10⁻⁵"), (2.5, "2.5 × 10⁰")]
)
def test_powers_are_written_out(x, shown):
    assert exactness.power(x).replace("\u00a0", " ") == shown


# ---- pictures ----


def a_matrix(n=12, seed=0):
    return np.tril(np.random.default_rng(seed).normal(0.3, 1, (n, n)))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_zero_is_white_and_limits_are_symmetric(scale):
    m = scale * a_matrix()
    image = draw.matrix_figure(m, list("abcdefghijkl"), "right").axes[0].images[0]
    low, high = image.get_clim()
    assert low == -high == -np.abs(m).max()
    rgba = image.to_rgba(np.array([[0.0, m.min(), m.max()]]))[0]
    assert (rgba[0] == 1).all()
    assert rgba[1][2] > rgba[1][0] and rgba[2][0] > rgba[2][2]  # blue below zero, orange above
    drawn = image.to_rgba(m)
    assert (drawn[np.triu_indices(12, 1)] == 1).all() and image.get_interpolation() == "none"


def test_the_wrong_drawing_gives_zero_a_colour_and_says_which():
    m = a_matrix()
    fig = draw.matrix_figure(m, list("abcdefghijkl"), "wrong", minmax=True)
    image = fig.axes[0].images[0]
    assert image.get_clim() == (m.min(), m.max())
    assert not (image.to_rgba(np.zeros((1, 1)))[0, 0] == 1).all()
    zero = draw.minmax_zero(m)
    assert zero == pytest.approx(-m.min() / (m.max() - m.min())) and 0.1 < zero < 0.9
    assert f"zero lands at {zero:.2f}" in [t.get_text() for t in fig.axes[1].texts]
    caption = draw.minmax_caption(m, "A head")
    share = (m[np.tril_indices(12)] < 0).mean()
    assert f"{100 * share:.0f}% of its entries" in caption and f"zero at {zero:.2f}" in caption
    assert "the 66 entries above" in caption


@pytest.mark.parametrize("m", [np.zeros((4, 4)), np.ones((1, 1)), -np.tril(np.ones((4, 4)))])
def test_flat_matrices_are_drawn_too(m):
    for minmax in (False, True):
        draw.beside(draw.matrix_figure(m, list("abcd")[: len(m)], "flat", minmax))
    assert draw.symmetric_limit(m) == 1
    draw.beside(draw.prompt_figure(m[-1], list("abcd")[: len(m)]))


def test_whitespace_is_visible_and_long_tokens_are_cut():
    assert draw.visible(" the\n") == "␣the↵" and draw.visible("\t\r") == "⇥␍"
    assert draw.visible("") == "∅" and draw.visible("\x07") == "\\x07"
    assert draw.visible("incomprehensibilities") == "incompreh…"


def test_the_row_is_drawn_over_the_text_and_nothing_overlaps():
    tokens = ["<s>", " en", "tertain", ":", "9", "5", "\n", "send", ":", "1", "3", "\n", "send", ":"] * 4
    row = np.linspace(-0.099, 0.099, len(tokens))
    row[[0, -1]] = -1.0, 1.0
    fig = draw.prompt_figure(row, tokens, [(9, 11)])
    fig.canvas.draw()
    ax = fig.axes[0]
    labels = [t for t in ax.texts if t.get_text() in {draw.visible(t) for t in tokens}]
    numbers = [t for t in ax.texts if t not in labels]
    assert len(labels) == len(tokens) and {n.get_text() for n in numbers} >= {"−1.00", "1.00"}
    boxes = [t.get_window_extent() for t in ax.texts]
    width, height = fig.canvas.get_width_height()
    assert all(b.x0 >= 0 and b.x1 <= width and b.y0 >= 0 and b.y1 <= height for b in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    patches = [p for p in ax.patches if p.get_fill()]
    assert patches[0].get_facecolor() == draw.SIGNED(0.0)
    assert np.allclose(patches[-1].get_facecolor(), draw.SIGNED(1.0))
    assert len([p for p in ax.patches if not p.get_fill()]) == 1


def test_pictures_are_the_same_bytes_each_time_and_carry_their_text():
    def page():
        return draw.beside(draw.matrix_figure(a_matrix(), list("abcdefghijkl"), "x"), texts=['a "b"']).data

    assert page() == page() and 'alt="a &quot;b&quot;"' in page()
    assert 'class="dark-light"' in page()  # a dark page must not dim white to grey
    data = page().split("base64,")[1].split('"')[0]
    assert ET.fromstring(b64decode(data)).tag.endswith("svg")


def test_numbers_have_two_digits():
    shown = {0.853: "0.85", -0.0134: "−0.013", 12.4: "12", 0.0: "0", 1.0: "1.00", -9.94: "−9.94", 1234.0: "1234"}
    assert {x: draw.number(x) for x in shown} == shown


# ---- heads ----


def test_the_rule_finds_the_head_that_looks_at_the_right_value(store, monkeypatch):
    lm = zoo.lm("llama")
    real = head_rows.mixers.row_statistics

    def planted(lm, prompts, heads, ends, spans, **kwargs):
        found = real(lm, prompts, heads, ends, spans, **kwargs)
        at = [str(h) for h in heads].index("L1H2") if "L1H2" in map(str, heads) else None
        if at is not None:
            found.mass[at] = 0.3  # on every value, the right one too
        return found

    monkeypatch.setattr(head_rows.mixers, "row_statistics", planted)
    (head, how, records), *rest = head_views.choose(store, lm, SETTINGS)
    assert head == Head(1, 2) and not rest and "of all 12 attention heads" in how and "30% on average" in how
    assert records[0].key["task"]["settings"]["seed"] == SETTINGS.select_seed


@pytest.mark.parametrize("name", ["mamba", "zamba2", "llamba"])
def test_each_kind_of_mixer_is_shown_whatever_the_model_has(store, name):
    lm = zoo.lm(name)
    views = head_views.show_heads(store, lm, SETTINGS)
    assert [v.kind for v in views] == list(dict.fromkeys(s.kind for s in lm.sites))
    for view in views:
        n = len(lm.encode([view.example.prompt])["input_ids"][0])
        assert view.m.shape == (n, n) == (len(view.tokens), n) and (np.triu(view.m, 1) == 0).all()
        value = view.example.candidates[view.right]
        assert "".join(view.tokens[slice(*view.spans[view.right])]) == value and value in view.caption()
        assert view.right_share.shape == (SETTINGS.n_examples,)
        assert ("without D" in view.caption()) == FAMILIES[view.kind].has_d == ("without D" in view.statistics())
        # the first of the questions over which is averaged is the one shown
        assert view.right_share[0] == pytest.approx(view.shares()[view.right], abs=1e-5)
        assert (view.negative > 0).any() == (view.kind != "attention") == bool((view.m < 0).any())
        draw.beside(draw.prompt_figure(view.row, view.tokens, [view.spans[view.right]]))


def test_what_is_shown_is_measured_once(store):
    lm = zoo.lm("mamba2")
    head_views.show_heads(store, lm, SETTINGS)
    before = stamps(store)
    handle = lm.model.register_forward_pre_hook(lambda *a: pytest.fail("a forward ran"))
    try:
        head_views.show_heads(store, lm, SETTINGS)
    finally:
        handle.remove()
    assert stamps(store) == before


def test_records_of_matrices_depend_on_head_text_and_reading(store):
    lm, head = zoo.lm("mamba2"), Head(1, 2)
    found = [
        head_rows.matrix_record(store, lm, TEXT, head),
        head_rows.matrix_record(store, lm, TEXT, Head(1, 3)),
        head_rows.matrix_record(store, lm, TEXT + "1", head),
        head_rows.matrix_record(store, lm, TEXT, head, with_d=False),
        head_rows.matrix_record(store, lm, TEXT, head, "effective"),
    ]
    assert len({r.hash for r in found}) == len(found)
    skip = found[0].arrays["m"] - found[3].arrays["m"]
    d = lm.model.backbone.layers[1].mixer.D[2].item()
    assert np.allclose(np.diagonal(skip), d, atol=1e-6) and not skip[~np.eye(len(skip), dtype=bool)].any()
    assert (np.sign(found[4].arrays["m"]) == np.sign(found[0].arrays["m"])).all()
    assert head_rows.farthest_back(store, lm, TEXT) in lm.head_list("mamba2")


def test_named_heads_are_shown_in_their_order(store):
    lm = zoo.lm("zamba2")
    views = head_views.show_heads(store, lm, replace(SETTINGS, heads="L3H1,L0H2"))
    assert [str(v.head) for v in views] == ["L3H1", "L0H2"] and {v.how for v in views} == {"named by the user"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": "L9H0"}, "layers with heads are"),
        ({"heads": "seventeen"}, "not the name of a head"),
        ({"n_pairs": 1}, "2 or more"),
        ({"n_pairs": 91}, "at most 90 pairs"),
        ({"n_examples": 3}, "10 or more"),
        ({"select_examples": 3}, "10 or more"),
        ({"select_seed": 0}, "other questions"),
        ({"format": "xml"}, "format"),
    ],
)
def test_bad_settings_are_one_sentence_before_any_forward(store, change, says):
    lm = zoo.lm("llama")
    handle = lm.model.register_forward_pre_hook(lambda *a: pytest.fail("a forward ran"))
    try:
        with pytest.raises(GAError, match=says) as error:
            head_views.show_heads(store, lm, replace(SETTINGS, **change))
    finally:
        handle.remove()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: exactness.check(["mamba9"], [1]), "no architecture"),
        (lambda: exactness.check([], [1]), "one name or more"),
        (lambda: exactness.check("mamba", [1]), "a list"),
        (lambda: exactness.check("all", []), "one or more numbers"),
        (lambda: exactness.check("all", [0]), "from 1 to 1024"),
        (lambda: exactness.check("all", [True]), "from 1 to 1024"),
        (lambda: head_views.random_model("llama", TEXT), "attention alone"),
        (lambda: head_views.random_model("mamba2", "a"), "4 to 48"),
        (lambda: head_views.random_model("mamba2", "a" * 60), "4 to 48"),
        (lambda: head_rows.farthest_back(Store(), zoo.lm("llama"), TEXT), "attention heads alone"),
    ],
)
def test_bad_parameters_are_one_sentence(call, says):
    with pytest.raises((GAError, HeadError), match=says) as error:
        call()
    assert "\n" not in str(error.value)


# ---- the notebook ----


@pytest.mark.slow
def test_the_notebook_shows_an_ssm_in_place_of_the_transformer(tmp_path):
    """The whole page with small parameters, on a folder that holds a random Mamba-2, and again from records alone."""
    from ga_utils.runner import run_notebooks

    model, tokenizer = zoo.build("mamba2")
    model.save_pretrained(tmp_path / "ssm")
    tokenizer.save_pretrained(tmp_path / "ssm")
    sets = dict(n_pairs=2, n_examples=10, select_examples=10, architectures=["llama", "qwen3_next"], lengths=[1, 7])
    runs = []
    for _ in range(2):
        out = tmp_path / f"out{len(runs)}"
        [run] = run_notebooks(
            ["ssm_attention"], [str(tmp_path / "ssm")], sets, tmp_path / "store", out, project_root=ROOT
        )
        assert run.error is None
        runs.append(json.loads(run.path.read_text()))
    cells = [c for c in runs[0]["cells"] if c["cell_type"] == "code"]
    text = json.dumps(runs[0], ensure_ascii=False)
    assert "ga run ssm_attention" in text and "last_rows/" in text  # provenance of a folder, too
    assert "Mamba-2 (SSD)" in text and "of all 24 mamba2 heads" in text and "zero lands" not in text.split("base64")[0]
    assert text.count("data:image/svg+xml") >= 3 + 2 + 1 + 2
    assert "comparisons are within 10⁻⁵" in text and "would be off by" in text
    assert all("hide-input" in c["metadata"]["tags"] for c in cells)

    assert pages(runs[0]) == pages(runs[1])  # from records, the same page


def pages(notebook):
    """Every sentence and picture that the executed notebook shows."""
    outputs = [o for c in notebook["cells"] if c["cell_type"] == "code" for o in c["outputs"]]
    shown = [o["data"] for o in outputs if o["output_type"] == "display_data"]
    found = [d.get("text/markdown", d.get("text/html", "")) for d in shown]
    # the style of tables has names of its own in each run
    return ["".join(f) for f in found if "<table" not in "".join(f)]


def test_the_page_takes_models_and_explains_every_family():
    notebook = read_notebook(ROOT, "ssm_attention")
    assert notebook.defaults["models"] == ["smollm2-135m"] and notebook.defaults["heads"] == "auto"
    assert notebook.defaults["lengths"] == list(exactness.LENGTHS)
    prose = "\n".join(source for kind, source in notebook.cells if kind == "markdown")
    for family in exactness.NAMES.values():
        assert family.lower() in prose.lower(), family
    bib = (ROOT / "book" / "references.bib").read_text()
    import re

    keys = {k for group in re.findall(r"\{cite:[pt]\}`([^`]+)`", prose) for k in group.split(",")}
    assert len(keys) >= 8 and all(f"{{{key}," in bib for key in keys)
    longest = max(len(s.splitlines()) for kind, s in notebook.cells if kind == "code")
    assert longest <= 30  # the page shows, the package measures
