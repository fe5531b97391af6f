"""What do the public functions return beside M, and what do they refuse?"""

import pytest
import torch
import zoo
from test_mixers import KINDS, error, inputs, random_ids, site_of

from ga_utils import mixers
from ga_utils.errors import GAError, HeadError
from ga_utils.language_model import wrap
from ga_utils.mixers import reading
from ga_utils.mixers.base import FAMILIES, namespace, wide
from ga_utils.mixers.effective import head_weight

# ---- variants and statistics ----


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_effective_entries_are_lengths_in_the_residual_stream(kind):
    lm, site = site_of(kind)
    batch, head = inputs(random_ids(12)), site.n_heads // 2
    cap = mixers.capture(lm, batch, [site])[site]
    m = mixers.matrix(lm, batch, site.head(head))[site.head(head)][0]
    found = mixers.matrix(lm, batch, site.head(head), variant="effective")
    assert "length" in found.meaning
    w, after = head_weight(site, head), FAMILIES[kind].after(cap, [head])[0, 0]
    for t, s in [(11, 0), (11, 11), (5, 4), (7, 7)]:
        length = (w @ (after[t] * wide(cap.value)[0, head, s])).norm()
        assert float(found[site.head(head)][0, t, s]) == pytest.approx(float(m[t, s] * length), rel=1e-4, abs=1e-7)
    row = mixers.rows(lm, batch, site.head(head), [5], variant="effective")[site.head(head)][0, 0]
    assert error(row, found[site.head(head)][0, 5]) <= 1e-5


def test_effective_contributions_of_one_head_sum_to_what_masking_removes():
    lm, site = site_of("mamba2")
    cap = mixers.capture(lm, inputs(random_ids(20)), [site])[site]
    m, after, w = (
        FAMILIES["mamba2"].matrix(cap, [3], True)[0, 0],
        FAMILIES["mamba2"].after(cap, [3])[0, 0],
        None,
    )
    w = head_weight(site, 3)
    whole = torch.einsum("ts,dp,tp,sp->td", m, w, after, cap.value[0, 3])
    flat = cap.projected.transpose(1, 2).flatten(2)
    with torch.no_grad():
        assert error(whole, site.contributions(flat, [3])[0, 0]) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_row_statistics_read_the_rows(kind):
    lm, site = site_of(kind)
    ids, mask = random_ids(30, batch=2), torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    batch, heads = {"input_ids": ids, "attention_mask": mask}, [site.head(0), site.head(site.n_heads - 1)]
    spans = [[(0, 25), (25, 30)], [(0, 20), (20, 23)]]
    found = mixers.row_statistics(lm, batch, heads, [10, -1], spans)
    rows = mixers.rows(lm, batch, heads, [10, -1])
    assert found.mass.shape == (2, 2, 2, 2)
    assert torch.allclose(found.mass.sum(-1), torch.ones(2, 2, 2), atol=1e-5)
    for i, head in enumerate(heads):
        for b in range(2):
            own = rows.example(head, b)[0]
            share = own.abs() / own.abs().sum(-1, keepdim=True)
            start, end = spans[b][1]
            assert torch.allclose(found.mass[i, b, :, 1], share[:, start:end].sum(-1), atol=1e-6)
            assert torch.allclose(found.entropy[i, b], -(share * share.clamp_min(1e-30).log()).sum(-1), atol=1e-5)
            assert torch.equal(found.top_position[i, b], share.argmax(-1))
            assert torch.allclose(found.negative[i, b], torch.where(own < 0, share, 0.0).sum(-1), atol=1e-6)
    with pytest.raises(HeadError, match=r"Span \(20, 24\) does not lie inside example 1, which has 23 tokens"):
        mixers.row_statistics(lm, batch, heads, "last", [[(0, 1)], [(20, 24)]])


def test_prompts_heads_and_names():
    lm = zoo.lm("falcon_h1")
    found = mixers.matrix(lm, ["one text", "another one"], ["L1H2", "L1.mamba2.H3"])
    assert [str(h) for h in found] == ["L1H2", "L1.mamba2.H3"] and len(found) == 2
    assert found["L1H2"].shape == (2, 12, 12) and found.tokens[0][1] == "o"
    assert found.example("L1H2", 0)[0].shape == (9, 9)  # <s> and eight bytes
    with pytest.raises(HeadError, match="L1H3 is not among these matrices"):
        found["L1H3"]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda lm: mixers.matrix(lm, "text", "L9H0"), "the layers with heads are 0-2"),
        (lambda lm: mixers.matrix(lm, "text", []), "No heads were named"),
        (lambda lm: mixers.matrix(lm, "text", "L0H0", variant="abs"), "variant='abs' is unknown"),
        (lambda lm: mixers.matrix(lm, 3, "L0H0"), "inputs must be a prompt"),
        (
            lambda lm: mixers.matrix(lm, {"input_ids": torch.zeros(3)}, "L0H0"),
            r"must both be \[batch, tokens\]",
        ),
        (lambda lm: mixers.matrix(lm, inputs(torch.zeros(1, 0, dtype=torch.long)), "L0H0"), "without tokens"),
        (lambda lm: mixers.matrix(lm, "x" * 3000, "L0H0"), "has 3001 tokens, but .* takes at most 2048"),
        (
            lambda lm: mixers.rows(lm, "text", "L0H0", 5),
            "Position 5 lies outside example 0, which has 5 tokens",
        ),
        (lambda lm: mixers.rows(lm, ["text", "t"], "L0H0", [[1], [2]]), "Position 2 lies outside example 1"),
        (lambda lm: mixers.rows(lm, ["text", "t"], "L0H0", [[1], [0, 1]]), "equally many"),
        (lambda lm: mixers.rows(lm, ["text", "t"], "L0H0", [[1]]), "one list for each of the 2 examples"),
        (lambda lm: mixers.rows(lm, "text", "L0H0", "first"), "positions='first' is unknown"),
    ],
)
def test_bad_requests_are_one_sentence(call, message):
    with pytest.raises(GAError, match=message) as caught:
        call(zoo.lm("llama"))
    assert "\n" not in str(caught.value)


def test_a_mask_with_gaps_is_refused():
    mask = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(GAError, match="gaps inside a text"):
        mixers.matrix(zoo.lm("llama"), {"input_ids": random_ids(4), "attention_mask": mask}, "L0H0")


def test_training_mode_is_refused():
    model, tokenizer = zoo.build("llama")
    lm = wrap(model, tokenizer)
    model.train()
    with pytest.raises(GAError, match="training mode"):
        mixers.matrix(lm, "text", "L0H0")


def test_a_mixer_without_a_family_is_named(monkeypatch):
    monkeypatch.delitem(FAMILIES, "deltanet")
    with pytest.raises(GAError, match="Qwen3NextGatedDeltaNet is a mixer of kind deltanet, which has no matrix"):
        mixers.matrix(zoo.lm("qwen3_next"), "text", "L0H0")


def test_what_does_not_fit_is_refused_before_the_forward_pass(monkeypatch):
    lm = zoo.lm("mamba2")
    free = type("Memory", (), {"available": 10**6})()
    monkeypatch.setattr(reading.psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(type(lm.backbone), "forward", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(GAError, match=r"8 heads at 501 tokens \(batch 1\) would take .* GB.*ask rows\(\)"):
        mixers.matrix(lm, "x" * 500, [(0, i) for i in range(8)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_that_misses_a_part_is_refused(kind, monkeypatch):
    lm, site = site_of(kind)
    for method in ("matrix", "rows"):
        right = getattr(FAMILIES[kind], method)
        monkeypatch.setattr(FAMILIES[kind], method, lambda *a, right=right, **k: 1.01 * right(*a, **k))
    ids = random_ids(20)
    for ask in (
        lambda: mixers.matrix(lm, inputs(ids), site.head(0)),
        lambda: mixers.matrix(lm, inputs(ids), site.head(0), with_d=False),
        lambda: mixers.rows(lm, inputs(ids), site.head(0), "last"),
    ):
        with pytest.raises(GAError, match=f"does not reproduce what {type(site.mixer).__name__} computed"):
            ask()


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_put_back_after_an_exception(kind):
    lm, site = site_of(kind)
    names, own = dict(namespace(site)), dict(vars(site.mixer))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules()]
    batch = inputs(random_ids(10))
    for fails_at in (site.mixer, site.proj):
        handle = fails_at.register_forward_pre_hook(lambda *a: (_ for _ in ()).throw(RuntimeError("midway")))
        try:
            with pytest.raises(RuntimeError, match="midway"):
                mixers.matrix(lm, batch, site.head(0))
        finally:
            handle.remove()
        assert namespace(site) == names
        assert vars(site.mixer).keys() == own.keys()
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules()] == hooks
    assert mixers.matrix(lm, batch, site.head(0))[site.head(0)].isfinite().all()


def test_an_attention_that_bypasses_the_registry_is_named():
    model, tokenizer = zoo.build("gpt2", reorder_and_upcast_attn=True)
    model.set_attn_implementation("eager")
    with pytest.raises(GAError, match="What GPT2Attention .* computed was not seen"):
        mixers.matrix(wrap(model, tokenizer), "text", "L0H0")


def test_one_head_under_two_names():
    found = mixers.matrix(zoo.lm("falcon_h1"), "some text", ["L1H2", "L1.attention.H2"])
    assert len(found) == 2 and torch.equal(found["L1H2"], found["L1.attention.H2"])


def test_masked_heads_upstream_change_the_matrix_and_masked_heads_bring_nothing():
    from ga_utils.masking import mask_heads

    lm, batch = zoo.lm("mamba2"), inputs(random_ids(20))
    before = mixers.matrix(lm, batch, "L1H0", variant="effective")
    with mask_heads(lm, ["L0H0", "L1H0"]):
        after = mixers.matrix(lm, batch, "L1H0")
        nothing = mixers.matrix(lm, batch, "L1H0", variant="effective")
    assert error(after["L1H0"], mixers.matrix(lm, batch, "L1H0")["L1H0"]) > 1e-3
    assert before["L1H0"].abs().max() > 0 and not nothing["L1H0"].any()
