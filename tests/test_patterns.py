"""Are pattern scores the numbers that the full matrices hold? By hand, on a known head, and on every architecture."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import zoo
from tokenizers import models

from ga_utils import mixers
from ga_utils.errors import GAError, TaskError
from ga_utils.language_model import wrap
from ga_utils.mixers import reading
from ga_utils.patterns import MEASURES, Layout, Places, measure_patterns, pattern_scores, score_rows
from ga_utils.tasks import Example, Segment, Task, kv_task
from ga_utils.tiny import questions, shipping


def mixed_task() -> Task:
    """Five questions with two or three segments each, of several lengths."""
    few = [*kv_task(2, 3, 0, "terse", "10-99").examples, *kv_task(3, 2, 0, "terse", "10-99").examples]
    return Task("mixed", tuple(few))


def by_hand(m: np.ndarray, spans: list, right: int) -> dict[str, float]:
    """The scores of one head on one example from its whole matrix [t, s], entry by entry."""
    last = m[-1]
    ends, values = [line[1] - 1 for line, _ in spans], [value[1] - 1 for _, value in spans]
    both = [sum(last[p] for p in {e, v}) for e, v in zip(ends, values, strict=True)]
    own = [[s for s in range(*line) if s > 0] for line, _ in spans]
    others = max(x for i, x in enumerate(both) if i != right)
    return {
        "gather_end": np.mean([sum(m[e, s] for s in o if s != e) for e, o in zip(ends, own, strict=True)]),
        "gather_value": np.mean([sum(m[v, s] for s in o if s != v) for v, o in zip(values, own, strict=True)]),
        "aggregate_end": sum(last[e] for e in ends),
        "aggregate_value": sum(last[v] for v in values),
        "right": float(both[right] > others),
        "entropy": -sum(x * math.log(x) for x in last if x > 0),
        "top1": max(last),
    }


def token_places(example: Example) -> list:
    """Token spans of segments and values under the zoo's tokenizer: one token a byte, after one BOS."""
    return [(tuple(x + 1 for x in s.span), tuple(x + 1 for x in s.value)) for s in example.segments]


def test_exact_numbers_of_a_matrix_written_by_hand():
    layout = Layout((5, 6, 7, 8, 9, 10, 11), [((0, 3), (1, 2)), ((3, 6), (4, 5))], right=1)
    m = torch.zeros(7, 7)
    m[2, :3] = torch.tensor([0.5, 0.3, 0.2])  # end of the first segment: its first token is the text's
    m[1, :2] = torch.tensor([0.9, 0.1])  # the value's last token: nothing but the first token and itself
    m[5, 2:6] = torch.tensor([0.1, 0.2, 0.4, 0.3])
    m[4, 3:5] = torch.tensor([0.6, 0.4])
    m[6, :7] = torch.tensor([0.0, 0.125, 0.25, 0.0, 0.5, 0.0, 0.125])
    places = Places.of([layout])
    assert places.rows.tolist() == [[6, 2, 5, 1, 4]]
    found = {k: float(v) for k, v in score_rows(m[places.rows[0]][None, None], places, signed=False).items()}
    assert found == pytest.approx(
        {
            "gather_end": (0.3 + 0.6) / 2,
            "gather_value": (0.0 + 0.6) / 2,
            "aggregate_end": 0.25,
            "aggregate_value": 0.625,
            "right": 1.0,
            "entropy": 1.75 * math.log(2),
            "top1": 0.5,
        },
        abs=1e-6,
    )


def test_signed_rows_become_shares_and_ties_and_zeros_are_no_hits():
    layout = Layout((5, 6, 7, 8, 9), [((0, 2), (1, 2)), ((2, 4), (3, 4))], right=0)
    rows = torch.zeros(1, 3, 5, 5)
    rows[0, 0, 0] = torch.tensor([0.0, -3.0, 0.0, 1.0, 4.0])
    rows[0, 1, 0] = torch.tensor([0.0, -2.0, 0.0, 2.0, 0.0])  # a tie; head 2 looks nowhere
    found = score_rows(rows, Places.of([layout]), signed=True)
    assert found["right"].tolist() == [[True, False, False]]
    # end and value are one token here: its mass counts once for the segment, and under both names
    assert found["aggregate_end"].tolist() == found["aggregate_value"].tolist() == [[0.5, 1.0, 0.0]]
    assert found["top1"].tolist() == [[0.5, 0.5, 0.0]]
    assert torch.isfinite(found["entropy"]).all()


def test_a_head_that_attends_uniformly_has_the_scores_of_a_uniform_head():
    model, tok = zoo.build("llama")
    width = model.model.layers[1].self_attn.q_proj.weight.shape[0] // 4
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[width : 2 * width] = 0  # head 1: every score is 0
    lm, task = wrap(model, tok), mixed_task()
    found = measure_patterns(lm, task, "L1H1, L1H2")
    for i, example in enumerate(task.examples):
        places, t = token_places(example), len(example.prompt) + 1
        assert found.entropy[0, i] == pytest.approx(math.log(t), rel=1e-5)
        assert found.top1[0, i] == pytest.approx(1 / t, rel=1e-5)
        assert found.aggregate_end[0, i] == pytest.approx(len(places) / t, rel=1e-5)
        expected = np.mean([(b - a - 1) / b for (a, b), _ in places])  # row b - 1 sees b tokens
        assert found.gather_end[0, i] == pytest.approx(expected, rel=1e-5)
    assert abs(found.entropy[1] - found.entropy[0]).min() > 1e-3


@pytest.mark.parametrize("name", zoo.NAMES)
@torch.no_grad()
def test_scores_are_those_of_the_full_matrices(name):
    lm, task = zoo.lm(name), mixed_task()
    heads = [s.head(i) for s in lm.sites for i in {0, s.n_heads - 1}]
    found = measure_patterns(lm, task, heads)
    assert found.heads == tuple(heads) and found.kinds == tuple(lm.site(h).kind for h in heads)
    for i, example in enumerate(task.examples):
        whole = mixers.matrix(lm, example.prompt, heads, with_d=False)
        for row, head in enumerate(heads):
            m = whole.example(head, 0)[0].double().numpy()
            if lm.site(head).kind != "attention":
                total = np.abs(m).sum(1, keepdims=True)
                m = np.abs(m) / np.where(total > 0, total, 1)
            expected = by_hand(m, token_places(example), example.answer)
            for measure, value in expected.items():
                if measure != "right":
                    assert getattr(found, measure)[row, i] == pytest.approx(value, abs=2e-5), (head, measure)
            assert float(found.right[row, i]) == expected["right"], head


@pytest.mark.parametrize("name", ["mamba", "zamba2"])
def test_few_heads_at_a_time_give_the_same_scores(name, monkeypatch):
    lm, task = zoo.lm(name), mixed_task()
    whole = measure_patterns(lm, task)
    assert whole.heads == tuple(lm.head_list())
    parts = []
    blocks = reading.blocks
    monkeypatch.setattr(reading, "SCRATCH", 1)
    monkeypatch.setattr(reading, "blocks", lambda *a: parts.extend(blocks(*a)) or blocks(*a))
    again = measure_patterns(lm, task)
    assert max(map(len, parts)) == 1
    for name in MEASURES:
        np.testing.assert_allclose(again.arrays()[name], whole.arrays()[name], atol=1e-6)


def test_the_table_has_means_errors_and_says_what_is_signed():
    lm, task = zoo.lm("falcon_h1"), mixed_task()
    heads = ["L1.mamba2.H3", "L0H2"]
    found, table = measure_patterns(lm, task, heads), pattern_scores(lm, task, heads)
    assert list(table["head"]) == ["L1.mamba2.H3", "L0H2"]
    assert list(table["kind"]) == ["mamba2", "attention"] and list(table["signed"]) == [True, False]
    assert list(table["n"]) == [5, 5] and list(table["index"]) == [3, 2]
    for name in MEASURES:
        values = found.arrays()[name].astype(float)
        np.testing.assert_allclose(table[name], values.mean(1), rtol=1e-6)
        np.testing.assert_allclose(table[f"{name} se"], values.std(1) / math.sqrt(5), rtol=1e-5, atol=1e-9)


def test_scores_of_one_example_do_not_depend_on_its_company():
    lm, task = zoo.lm("gpt2"), mixed_task()
    together = measure_patterns(lm, task)
    for i in (0, 4):
        alone = measure_patterns(lm, Task("one", (task.examples[i],)))
        np.testing.assert_allclose(alone.gather_end[:, 0], together.gather_end[:, i], atol=1e-5)
        np.testing.assert_allclose(alone.entropy[:, 0], together.entropy[:, i], atol=1e-5)


def test_a_task_that_does_not_say_where_to_look_is_refused_before_any_forward(monkeypatch):
    lm = zoo.lm("llama")
    monkeypatch.setattr(reading, "visit", lambda *a, **k: pytest.fail("a forward pass was made"))
    with pytest.raises(TaskError, match="has no segments"):
        pattern_scores(lm, Task("plain", (Example("a b", ("c", "d"), 0),)))
    example = kv_task(2, 1, 0, "terse", "10-99").examples[0]
    unsaid = tuple(dataclasses.replace(s, right=False) for s in example.segments)
    with pytest.raises(TaskError, match="2 segments of which 0 are right"):
        pattern_scores(lm, Task("unsaid", (dataclasses.replace(example, segments=unsaid),)))
    with pytest.raises(TaskError, match="1 segments of which 1 are right"):
        pattern_scores(lm, kv_task(1, 1, 0, "terse", "10-99"))
    with pytest.raises(GAError, match="There is no head L9H0"):
        pattern_scores(lm, mixed_task(), "L9H0")


def test_a_segment_that_is_tokenised_with_the_candidates_has_no_end():
    model, tok = zoo.build("llama")
    vocab = tok.get_vocab()
    tok.backend_tokenizer.model = models.BPE(vocab=vocab | {"\u010a\u0120": len(vocab)}, merges=[("\u010a", "\u0120")])
    prompt = "a:1\nb:2\n"
    segments = (Segment((0, 4), (2, 3), True), Segment((4, 8), (6, 7)))
    with pytest.raises(TaskError, match="tokenised together with the candidates"):
        pattern_scores(wrap(model, tok), Task("ends", (Example(prompt, (" 1", " 2"), 0, segments),)))


def test_the_shipped_transformer_reads_the_right_segment_by_its_aggregate_head():
    """Training pruned all but one, which the record names."""
    from ga_utils.models import load

    lm = load(shipping.folder("tiny-llama"), dtype="float32", device="cpu")
    table = pattern_scores(lm, questions.letter_task(20, 5)).set_index("head")
    kept = shipping.record("tiny-llama")["pruning"][0]["kept"]
    assert table["right"].idxmax() == kept
    assert table.right[kept] > 0.9 and max(table.aggregate_end[kept], table.aggregate_value[kept]) > 0.8
    assert table["right"].median() < 0.5
