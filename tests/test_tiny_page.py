"""The page on the tiny models: what it measures, its controls, its rules for findings, its figures, itself."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ga_utils import figures_tiny as draw
from ga_utils.errors import GAError, ModelError
from ga_utils.heads import Head
from ga_utils.language_model import wrap
from ga_utils.masking import mask_heads
from ga_utils.notebooks import read_notebook
from ga_utils.records import Store
from ga_utils.scoring import score
from ga_utils.sweep import Sweep
from ga_utils.tiny import architectures, findings, panel, panel_heads, panel_students, shipping
from ga_utils.tiny.language import tokenizer

ROOT = Path(__file__).parents[1]
SETTINGS = panel_heads.HeadSettings(12, 0, 12, 1, 2)
RECORD = {"name": "tiny-llama", "seed": 0, "history": [], "recipe": {"start": None}, "parameters": 1, "cpu_seconds": 1}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def llama():
    return panel.load_members(["tiny-llama"])[0]


def a_member(model, family="tiny-llama", seed=0, **record):
    return panel.Member(wrap(model.float(), tokenizer(), f"{family}-{seed}"), family, seed, {**RECORD, **record}, 1)


# ---- the language and the models ----


def test_the_grid_holds_the_category_and_each_end_three_times():
    example = panel.examples(0)["letter"]
    grid = panel.name_grid(example.meta["entity"])
    assert len(grid.cells) == 12 and example.meta["entity"] in grid.cells.values()
    for place, symbols in ((0, grid.starts), (1, grid.ends)):
        assert all(sum(cell[place] == s for cell in grid.cells) == 3 for s in symbols) and len(symbols) == 4
    start, *middle, end = example.prompt.splitlines()[1 + example.answer].split()[1:]
    assert grid.cells[start, end] == example.meta["entity"] and tuple(middle) == grid.middle


def test_examples_show_prompt_and_answer_and_hide_nothing():
    shown = {name: panel.as_text(name, e) for name, e in panel.examples(0).items()}
    assert list(shown) == ["cloze", "knowledge", "letter", "copy-letter", "kv-4"]
    for name, example in panel.examples(0).items():
        right = example.candidates[example.answer].strip()
        assert f"▁\n\n→ {right}" in shown[name] and shown[name].startswith(example.prompt)
    assert "of:" not in shown["cloze"] and "of:" in shown["knowledge"]


def test_models_come_by_family_and_seed_and_need_a_record(tmp_path):
    names = [m.lm.name for m in panel.load_members(["tiny-llamba", "tiny-llama"])]
    assert names == ["tiny-llama", "tiny-llamba"]
    with pytest.raises(ModelError, match="of one family and one seed"):
        panel.load_members(["tiny-llama", str(shipping.folder("tiny-llama"))])
    with pytest.raises(ModelError, match=r"no embedded model: it has no training\.json"):
        panel.load_members([str(tmp_path)])
    (tmp_path / panel.RECORD).write_text(json.dumps({**RECORD, "name": "tiny-gpt"}))
    with pytest.raises(ModelError, match="family 'tiny-gpt'"):
        panel.load_members([str(tmp_path)])


@pytest.mark.parametrize(
    ("given", "says"),
    [((9, 12, 0, 1, 2), "10 or more"), ((12, 9, 0, 1, 2), "10 or more"), ((12, 12, 3, 3, 2), "other questions"),
     ((12, 12, 0, 1, 0), "control")],
)  # fmt: skip
def test_parameters_without_sense_are_one_sentence(given, says):
    with pytest.raises(GAError, match=says):
        panel.check(*given)


def test_absent_families_are_said(llama):
    said = panel.missing([llama])
    assert "tiny-zamba2" in said and "tiny-llama," not in said
    assert panel.missing([replace(llama, family=f) for f in panel.FAMILIES]) == ""


def test_steps_pruning_and_notes_are_those_of_the_record():
    history = [{"stage": "a", "step": 50, "loss": 1.0, "kv": 0.1}, {"stage": "a", "step": 90, "loss": 1.0, "kv": 0.8}]
    history += [{"stage": "b", "step": 50, "loss": 1.0, "kv": 0.9, "letter": 0.5}]
    pruning = [{"pruned": ["L3H0", "L3H1"]}, {"pruned": []}]
    m = a_member(architectures.tiny_llama(0, 2), history=history, pruning=pruning, note="By hand.")
    assert panel.stage_steps(m) == {"a": 90, "b": 50} and panel.pruned(m) == ["L3H0", "L3H1"]
    assert "pruned: L3H0, L3H1" in panel.made_table([m])["stages (steps)"][0]
    assert panel.notes([m]) == ["`tiny-llama-0`: By hand."]
    curves = panel.curves([m])
    assert list(curves[curves.kind == "kv"].step) == [50, 90, 140]
    found = panel.jump(curves, m.lm.name, "kv")
    assert (found.low, found.high, found.steps, found.at) == (0.1, 0.8, 40, 90)
    assert found.share == pytest.approx(0.7 / 0.8) and panel.jump(curves, m.lm.name, "letter") is None


# ---- scores ----


def test_scores_are_records_and_say_what_score_says(store, llama):
    frame, records = panel.scores(store, [llama], 12, 0, False)
    assert set(frame.task) > set(panel.TASKS) and len(records["tiny-llama"]) == len(frame)
    for name in ("letter", "kv-8", "letter share-end"):
        here = frame[frame.task == name].iloc[0]
        assert here.accuracy == score(llama.lm, panel.task(name, 12, 0)).accuracy
    cloze = frame[frame.task == "cloze"].iloc[0]
    assert cloze.accuracy == score(llama.lm, panel.task("knowledge", 12, 0)).full_vocab_accuracy and cloze.chance == 0
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("*.json")}
    panel.scores(store, [llama], 12, 0, False)
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert list(panel.scores_table(frame)["task"]) == list(panel.TASKS)
    assert len(panel.provenance(records, [llama])) == 1
    with pytest.raises(GAError, match="no task 'mmlu'"):
        panel.task("mmlu", 10, 0)


@pytest.mark.parametrize(("start", "end", "both"), [(0.9, 0.9, True), (0.9, 0.55, False), (0.6, 0.9, False)])
def test_both_ends_are_read_only_beyond_doubt_on_both_checks(start, end, both):
    rows = [("letter share-start", start), ("letter share-end", end)]
    frame = pd.DataFrame([{"model": "m", "task": t, "accuracy": a, "stderr": 0.04} for t, a in rows])
    assert panel.reads_both_ends(frame, "m", "letter") is both


# ---- heads ----


def planted(monkeypatch, answer, everywhere, facts):
    """Sweeps in which masking each of 24 heads costs the given nats, beyond doubt."""
    heads = tuple(Head(i // 4, i % 4) for i in range(24))

    def sweep_under(store, lm, task, positions, scored, progress, only, records):
        loss = facts if task.name == "tiny-knowledge" else {"answer": answer, "all": everywhere}[positions]
        n = len(task.examples)
        noise = 1e-3 * np.random.default_rng(0).normal(size=(24, n))
        yes = np.ones(n, bool)
        logprob = -np.array([loss.get(str(h), 0.0) for h in heads])[:, None] + noise - 1
        return Sweep(heads, yes, np.full(n, -1.0), np.ones((24, n), bool), logprob, scored, True, 0, 0)

    monkeypatch.setattr(panel_heads, "sweep_under", sweep_under)


def test_heads_that_facts_need_are_not_found_however_much_they_cost(monkeypatch, store, llama):
    planted(
        monkeypatch, answer={"L0H2": 3.0, "L4H3": 1.0, "L3H1": 0.2},
        everywhere={"L0H2": 6.0, "L4H3": 1.0, "L2H1": 0.8, "L3H1": 0.2}, facts={"L0H2": 5.0},
    )  # fmt: skip
    found = panel_heads.find(store, llama, SETTINGS)
    assert found.heads == {"Aggregate": (Head(4, 3),), "Gather": (Head(2, 1),)}
    assert "Aggregate: L4H3; Gather: L2H1." in panel_heads.heads_line(found)
    tables, ringed, _ = panel_heads.for_maps(found)
    served = tables["Aggregate"].set_index("head").serves_facts
    assert served["L0H2"] and not served["L4H3"] and ringed["Gather"] == ["L2H1"]


def test_a_model_without_such_heads_says_so(monkeypatch, store, llama):
    planted(monkeypatch, {}, {"L0H0": 1.0}, {"L0H0": 1.0})
    found = panel_heads.find(store, llama, SETTINGS)
    assert found.heads == {"Aggregate": (), "Gather": ()} and "Gather: none (" in panel_heads.heads_line(found)
    assert panel_heads.masked(store, found, SETTINGS, False)[0].empty
    assert panel_heads.look(store, found, SETTINGS).rows == []


def test_pruned_heads_are_no_control(llama):
    plain = replace(llama, record={**llama.record, "pruning": []})
    assert all(h.layer == 4 for draw_ in panel_heads.controls(plain, [Head(4, 3)], 3, 0) for h in draw_)
    off = ["L2H0", "L2H1", "L2H3", "L3H0", "L3H1", "L3H2"]
    m = replace(llama, record={**llama.record, "pruning": [{"pruned": off}]})
    draws = panel_heads.controls(m, [Head(2, 2)], 2, 0)
    assert len(set(draws)) == 2 and all(len(d) == 1 for d in draws)
    chosen = {h for d in draws for h in d}
    assert not chosen & {Head(2, 0), Head(2, 1), Head(2, 2), Head(2, 3)} and all(h.layer in (1, 3) for h in chosen)
    every = [str(h) for h in llama.lm.head_list() if h != Head(2, 2)]
    with pytest.raises(GAError, match="too few live heads"):
        panel_heads.controls(
            replace(llama, record={**llama.record, "pruning": [{"pruned": every}]}), [Head(2, 2)], 1, 0
        )


def test_masks_and_rows_are_those_of_the_found_heads(store, llama):
    heads = {"Aggregate": (Head(3, 0),), "Gather": (Head(2, 3),)}
    found = panel_heads.Found(llama, {}, heads, {"Aggregate": 0, "Gather": 0}, {"Aggregate": "", "Gather": ""}, [])
    frame, records = panel_heads.masked(store, found, SETTINGS, False)
    assert set(frame.condition) == {"intact", "found", "random"} and set(frame.task) == set(panel_heads.ASKED)
    where = {(r.key["task"]["task"], r.key["condition"].get("positions")) for r in records}
    assert where == {
        (t, p) for t in ("tiny-letter", "tiny-copy-letter", "tiny-kv") for p in (None, "answer", "all")
    } | {("tiny-knowledge", None), ("tiny-knowledge", "all")}  # fmt: skip
    with mask_heads(llama.lm, "L2H3", "all"):
        expected = score(llama.lm, panel.task("letter", 12, 0)).accuracy
    one = frame[(frame.role == "Gather") & (frame.task == "letter") & (frame.condition == "found")]
    assert one.accuracy.iloc[0] == expected
    seen = panel_heads.look(store, found, SETTINGS)
    (_, _, last, row, ((a, b),)), (_, _, read, other, _) = seen.rows
    assert last == len(seen.tokens) - 1 and a <= read < b and read == a + np.abs(row[a:b]).argmax()
    assert row.sum() == pytest.approx(1, abs=1e-4) and not other[read + 1 :].any()
    assert "Aggregate head L3H0 at the last token" in draw.look_caption(seen)
    table, _ = panel_heads.pattern_table(store, found, SETTINGS)
    assert list(table["head"]) == ["L3H0", "L2H3"] and table.mass.between(0, 1.001).all()


def a_mask_frame(intact, found, random, seed=0, n=200, role="Aggregate", **tasks):
    rows = []
    for name in panel_heads.ASKED:
        f = tasks.get(name.replace("-", "_"), found)
        for condition, share in (("intact", intact), ("found", f), ("random", random), ("random", random)):
            correct = np.arange(n) < share * n
            rows.append(
                {"model": f"m{seed}", "seed": seed, "role": role, "task": name, "condition": condition, "draw": 0,
                 "accuracy": correct.mean(), "stderr": 0.0, "chance": 0.25, "correct": correct}
            )  # fmt: skip
    return pd.DataFrame(rows)


def test_what_is_left_is_a_share_of_the_score_above_chance():
    left = panel_heads.shares(a_mask_frame(1.0, 0.4, 0.85)).iloc[0]
    assert left["left"] == pytest.approx(0.2) and left["left random"] == pytest.approx(0.8)
    assert left.gap == pytest.approx(-0.6) and left.low < -0.6 < left.high < 0
    assert "−60 [" in panel_heads.shares_table(panel_heads.shares(a_mask_frame(1.0, 0.4, 0.85)))["difference"][0]


# ---- findings ----


def as_found(seed, heads=("L4H3",)):
    named = tuple(Head(int(h[1]), int(h[3])) for h in heads)
    member = panel.Member(None, "tiny-llama", seed, RECORD, 1)
    return panel_heads.Found(member, {}, {"Aggregate": named, "Gather": ()}, {}, {}, [])


def test_a_finding_needs_every_seed_and_three_of_them():
    def verdict(*held):
        return findings.Finding("It is so.", "r", dict(enumerate(held)), {i: "x" for i in range(len(held))}).verdict

    assert verdict(True, True, True) == "finding"
    assert verdict(True, True) == "no finding: holds, but on 2 seeds only"
    assert verdict(True) == "no finding: holds, but on 1 seed only"
    assert verdict(True, False, True, False) == "no finding: fails on seeds 1, 3"
    assert verdict() == "not measured"
    good = findings.Finding("It is so.", "r", dict.fromkeys(range(3), True), {0: "x"})
    bad = findings.Finding("It is not.", "r", {0: False}, {0: "y"})
    assert findings.in_words([good, bad]) == "1 of 2 statements hold on every seed: it is so."
    assert findings.in_words([bad]).startswith("None of these 1")
    assert "- seed 0: y (fails)" in findings.as_text(bad) and "(fails)" not in findings.as_text(good)


@pytest.mark.parametrize(
    ("found", "random", "knowledge", "holds"),
    [(0.3, 1.0, 1.0, True), (0.7, 1.0, 1.0, False), (0.3, 0.3, 1.0, False), (0.3, 1.0, 0.8, False)],
)  # fmt: skip
def test_heads_must_take_retrieval_alone_and_more_than_random_ones(found, random, knowledge, holds):
    frame = panel_heads.shares(a_mask_frame(1.0, found, random, knowledge=knowledge))
    finding = findings.heads("Aggregate", [as_found(0)], frame, findings.LETTERS)
    assert finding.holds == {0: holds} and "L4H3: letter" in finding.numbers[0]


def test_a_seed_on_which_no_head_was_found_counts_against():
    frame = panel_heads.shares(a_mask_frame(1.0, 0.3, 1.0, knowledge=1.0))
    finding = findings.heads("Aggregate", [as_found(0), as_found(1, ())], frame, ["kv-8"])
    assert finding.holds == {0: True, 1: False} and finding.numbers[1] == "no such head was found"


def a_swap_frame(best, errors=(0.1, 0.5, 0.2), n=100):
    rows = []

    def add(layer, part, name, share):
        correct = np.arange(n) < share * n
        rows.append(
            {"seed": 0, "layer": layer, "part": part, "task": name, "accuracy": correct.mean(), "stderr": 0.01,
             "chance": 0.25, "error": errors[layer] if layer >= 0 else np.nan, "correct": correct}
        )  # fmt: skip

    for name in (*panel_students.SWAP_TASKS, "knowledge"):
        add(-1, "student", name, 0.4), add(-1, "teacher", name, 1.0)
        for layer in range(3):
            add(layer, "block", name, 0.9 if layer == best else 0.42)
            if name != "knowledge":
                add(layer, "mixer", name, 0.41)
    return pd.DataFrame(rows)


def test_the_swapped_layer_is_the_aggregate_heads_or_the_statement_fails():
    frame = a_swap_frame(best=2)
    assert findings.swapped_layer(frame, [as_found(0, ("L2H1",))]).holds == {0: True}
    wrong = findings.swapped_layer(frame, [as_found(0, ("L1H1",))])
    assert wrong.holds == {0: False} and "best is layer 2" in wrong.numbers[0] and "kv-8 +50" in wrong.numbers[0]
    assert findings.swapped_layer(a_swap_frame(best=None), [as_found(0, ("L0H0",))]).holds[0] is False
    assert findings.not_the_fit(frame).holds == {0: True}
    assert findings.not_the_fit(a_swap_frame(best=1)).holds == {0: False}
    table = panel_students.swaps_table(frame)
    assert list(table.swapped) == ["none", "all: the teacher", "layer 0", "layer 1", "layer 2"]
    assert table["letter, block"][4].startswith("90") and table["mixer's error"][3] == "0.500"


def test_the_student_must_lose_more_retrieval_than_knowledge_beyond_doubt(llama):
    members = [llama, replace(llama, family="tiny-llamba-unaligned", lm=replace(llama.lm, name="student"))]

    def frame(knowledge, kv):
        rows = [("tiny-llama", "knowledge", 1.0), ("tiny-llama", "kv-8", 1.0)]
        rows += [("student", "knowledge", knowledge), ("student", "kv-8", kv)]
        return pd.DataFrame(
            [{"model": m, "task": t, "accuracy": a, "stderr": 0.02, "chance": 0.25} for m, t, a in rows]
        )

    assert findings.skill_gap(members, frame(0.95, 0.4), ["kv-8"]).holds == {0: True}
    assert findings.skill_gap(members, frame(0.5, 0.48), ["kv-8"]).holds == {0: False}
    assert findings.skill_gap(members[1:], frame(0.9, 0.4), ["kv-8"]).verdict == "not measured"


# ---- swaps, the hybrid, rows ----


def test_swaps_are_those_of_the_teachers_layers(store):
    teacher, student = panel.load_members(["tiny-llama", "tiny-llamba-unaligned"])
    frame, records = panel_students.swaps(store, student, teacher, 10, 0, False)
    assert set(frame.layer) == {-1, *range(6)} and len({r.hash for r in records}) == len(records)
    errors = frame[frame.layer >= 0].groupby("layer").error.first()
    assert (errors > 0).all() and errors.max() < 2
    assert list(frame[frame.part == "teacher"].task) == ["letter", "kv-8", "knowledge"]
    one = frame[(frame.layer == 4) & (frame.part == "block") & (frame.task == "kv-8")].correct.iloc[0]
    from ga_utils.surgery import graft_layers

    with graft_layers(student.lm, teacher.lm, 4) as changed:
        assert (score(changed, panel.task("kv-8", 10, 0)).correct == one).all()


def test_a_hybrids_attention_is_off_where_it_is_said(store):
    hybrid = a_member(architectures.tiny_zamba2(0), "tiny-zamba2")
    frame, records = panel_students.attention_off(store, hybrid, 10, 0, False)
    assert set(frame.place) == {
        "nowhere", *panel_students.PLACES, "every answer position, depth 1", "every answer position, depth 3",
    }  # fmt: skip
    assert not frame[frame.task == "kv-8"].learned.any()  # random weights have learned nothing
    asked, heads = panel.task("knowledge", 10, 0), hybrid.lm.head_list("attention")
    record = panel_students.masked_before(store, hybrid, asked, heads)
    ends = [len(hybrid.lm.tokenizer(e.prompt)["input_ids"]) - 1 for e in asked.examples]
    with mask_heads(hybrid.lm, heads, [list(range(e)) for e in ends]):
        expected = score(hybrid.lm, asked).logprobs
    assert np.allclose(record.arrays["logprobs"], expected, atol=1e-5)
    by_place = {r.key["condition"].get("positions"): r for r in records if r.key["task"]["task"] == "tiny-knowledge"}
    assert not np.allclose(by_place["before"].arrays["logprobs"], by_place["answer"].arrays["logprobs"], atol=1e-3)
    table = panel_students.attention_table(frame)
    assert list(table["attention off"]) == list(dict.fromkeys(frame.place)) and table["kv-8"][0] == "–"
    assert findings.attention_at_the_answer(frame).holds == {0: False}


@pytest.mark.parametrize(("answer", "elsewhere", "holds"), [(0.3, 0.9, (True, True)), (0.9, 0.3, (False, False))])
def test_the_hybrids_statements_follow_the_numbers(answer, elsewhere, holds):
    rows = []
    for name, shares in (("kv-8", (1.0, answer, elsewhere)), ("knowledge", (1.0, 1.0, 0.9))):
        for place, share in zip(("nowhere", "every answer position", "everywhere else"), shares, strict=True):
            correct = np.arange(100) < 100 * share
            rows.append({"seed": 0, "place": place, "task": name, "accuracy": share, "chance": 0.125,
                         "learned": True, "correct": correct})  # fmt: skip
    frame = pd.DataFrame(rows)
    assert findings.attention_at_the_answer(frame).holds == {0: holds[0]}
    assert findings.attention_elsewhere(frame).holds == {0: holds[1]}


def test_an_ssms_row_is_compared_with_the_row_that_it_was_fitted_to(store):
    teacher, student = panel.load_members(["tiny-llama", "tiny-llamba"])
    frame, _ = panel_students.sharpness(store, teacher, student, [Head(4, 3)], 12, 0)
    assert list(frame.model) == ["tiny-llama", "tiny-llamba"] * 2 and set(frame["head"]) == {"L4H3"}
    by = frame[frame.task == "letter"].set_index("model")
    assert by.more.iloc[0] == pytest.approx(by.entropy["tiny-llamba"] - by.entropy["tiny-llama"])
    assert findings.smoother(frame).holds == {0: bool((frame.low > 0).all())}
    assert findings.smoother(frame.assign(low=-0.1)).holds == {0: False}
    assert len(panel_students.sharpness_table(frame)) == 4


# ---- figures ----


def figures():
    grid = panel.name_grid("Ban")
    scored = pd.DataFrame(
        [{"family": "f", "seed": s, "task": t, "accuracy": 0.9, "stderr": 0.02, "chance": 0.25}
         for s in range(3) for t in panel.TASKS]
    )  # fmt: skip
    curve = pd.DataFrame(
        [{"model": "m", "stage": st, "step": 100 * i, "kind": k, "accuracy": 0.5}
         for i, st in enumerate("aabbcc", 1) for k in ("cloze", "kv", "letter", "copy-letter", "easy letters")]
    )  # fmt: skip
    effects = pd.DataFrame(
        [{"head": f"L{layer}H{i}", "layer": layer, "number": i, "loss": 0.1 * i, "serves_facts": layer == 0,
          "pruned": layer == 3 and i < 2} for layer in range(6) for i in range(4)]
    )  # fmt: skip
    masks = pd.concat([a_mask_frame(1.0, 0.3, 0.9), a_mask_frame(1.0, 0.3, 0.9, role="Gather")])
    named = {"Aggregate": ["L4H3"], "Gather": []}
    return {
        "grid": draw.name_grid(grid.starts, grid.middle, grid.ends, grid.cells),
        "scores": draw.scores(scored, "f", panel.TASKS),
        "learning": draw.learning(curve, "m"),
        "maps": draw.head_maps({"Aggregate": effects, "Gather": effects}, named, "m"),
        "masks": draw.masks(masks, panel_heads.ASKED, "m"),
        "swaps": draw.swaps(a_swap_frame(2), [2], "m"),
    }


@pytest.mark.parametrize("name", ["grid", "scores", "learning", "maps", "masks", "swaps"])
def test_figures_fit_a_phone_and_no_label_overlaps_another(name):
    fig = figures()[name]
    FigureCanvasAgg(fig).draw()
    width, height = fig.canvas.get_width_height()
    assert fig.get_figwidth() * 96 <= 350
    for ax in fig.axes:
        low, high = sorted(ax.get_xlim())
        texts = [*(t for t in ax.get_xticklabels() if low <= t.get_position()[0] <= high), *ax.texts]
        boxes = [t.get_window_extent() for t in texts if t.get_text() and not t.get_rotation()]
        assert all(-1 <= b.x0 and b.x1 <= width + 1 and -1 <= b.y0 and b.y1 <= height + 1 for b in boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    for legend in fig.legends:
        box = legend.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1
        assert not any(box.overlaps(ax.get_tightbbox()) for ax in fig.axes)


# ---- the notebook ----


def test_the_page_names_its_models_so_that_a_run_on_others_leaves_it_alone():
    notebook = read_notebook(ROOT, "tiny_panel")
    assert "models" not in notebook.defaults and notebook.defaults["tiny_models"] == ["panel:tiny-seeds"]
    assert "executed/tiny_panel" in (ROOT / "book" / "_toc.yml").read_text()
    longest = max(len(s.splitlines()) for kind, s in notebook.cells if kind == "code")
    assert longest <= 30  # the page shows, the package measures


@pytest.mark.slow
def test_the_notebook_runs_and_again_from_records_alone(tmp_path):
    from ga_utils.runner import run_notebooks

    sets = dict(
        tiny_models=["tiny-llama", "tiny-llamba-unaligned", "tiny-llamba"], n_examples=10, select_examples=10,
        n_changed=10, n_random=1,
    )  # fmt: skip
    pages = []
    for number in range(2):
        out = tmp_path / f"out{number}"
        [run] = run_notebooks(["tiny_panel"], None, sets, tmp_path / "store", out, project_root=ROOT)
        assert run.error is None
        pages.append(json.loads(run.path.read_text()))
    shown = [
        ["".join(o["data"].get("text/markdown", [])) for c in p["cells"] for o in c.get("outputs", []) if "data" in o]
        for p in pages
    ]
    assert shown[0] == shown[1]
    text = "\n".join(shown[0])
    assert "ga run tiny_panel" in text and "Verdict: no finding" in text and "Verdict: finding" not in text
    assert "tiny-zamba2 is not among the models of this page" in text
