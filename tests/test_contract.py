"""The contract of the package, over every supported architecture with tiny random weights.

Clause 1: head contributions sum to the mixer's output. Clause 2: a zero mask is the output minus that head, at the
chosen positions of the chosen site only, for each example; outside the block everything is as before. Clause 5: scores
do not depend on batching, padding or companions. Clause 7: what does not exist is an error that names what does.
"""

import pytest
import torch
import zoo

from ga_utils.errors import HeadError
from ga_utils.heads import Head
from ga_utils.masking import capture_inputs, mask_heads
from ga_utils.scoring import score
from ga_utils.selfcheck import self_check
from ga_utils.tasks import kv_task

every_architecture = pytest.mark.parametrize("name", zoo.NAMES)
PROMPTS = ["Memorize: fox:17, owl:23. fox:", "x:4. x:", "A longer line of text than the two others, b:9. b:"]


def mixer_outputs(lm, batch):
    """(projection inputs, mixer outputs) of every site in one forward."""
    outputs = {}

    def keep(site):
        def hook(module, args, output):
            outputs[site] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [s.mixer.register_forward_hook(keep(s)) for s in lm.sites]
    try:
        with torch.no_grad(), capture_inputs(lm.sites) as inputs:
            logits = lm.model(**batch).logits
    finally:
        [h.remove() for h in handles]
    return inputs, outputs, logits


def gap(found, expected):
    return float((found - expected).abs().max() / expected.pow(2).mean().sqrt())


def test_enough_architectures():
    assert len(zoo.NAMES) >= 25


@every_architecture
def test_contributions_sum_to_the_mixers_output(name):
    lm = zoo.lm(name)
    inputs, outputs, _ = mixer_outputs(lm, lm.encode(PROMPTS))
    assert set(outputs) == set(lm.sites)
    with torch.no_grad():
        for site in lm.sites:
            parts = site.contributions(inputs[site], list(range(site.n_heads)))
            bias = site.proj(torch.zeros_like(inputs[site][:1, :1]))
            assert gap(parts.sum(0) + bias, outputs[site].reshape(parts.shape[1:])) < 1e-5
            # and each contribution comes from its own channels only
            assert float(parts.abs().amax(dim=(1, 2, 3)).min()) > 0


@every_architecture
def test_a_zero_mask_removes_one_head_at_one_position_of_one_site(name):
    lm = zoo.lm(name)
    batch = lm.encode(PROMPTS)
    lengths = batch["attention_mask"].sum(1)
    before_in, before_out, before_logits = mixer_outputs(lm, batch)
    for site in lm.sites:
        head = site.head(site.n_heads - 1)
        positions = [[2], [0], [-1]]
        with mask_heads(lm, head, positions):
            # the capture lies behind the mask, so it sees what the projection sees
            inputs, outputs, logits = mixer_outputs(lm, batch)
        expected = before_out[site].clone().reshape(*before_in[site].shape[:2], -1)
        with torch.no_grad():
            part = site.contributions(before_in[site], [head.index])[0]
        for b, (p,) in enumerate(positions):
            at = p % int(lengths[b])
            expected[b, at] -= part[b, at]
        assert gap(outputs[site].reshape(expected.shape), expected) < 1e-5
        for other in lm.sites:
            if other.layer < site.layer:  # nothing below the masked layer moves
                assert torch.equal(outputs[other], before_out[other])
        assert torch.equal(logits[0, :2], before_logits[0, :2])  # nor anything before the masked position
        assert not torch.allclose(logits[0, 2], before_logits[0, 2], atol=1e-6)
    assert torch.equal(mixer_outputs(lm, batch)[2], before_logits)


@every_architecture
def test_the_model_is_as_before_after_an_exception_and_after_nesting(name):
    lm = zoo.lm(name)
    batch = lm.encode(PROMPTS)
    hooks = {id(m): dict(m._forward_pre_hooks) for m in lm.model.modules()}
    intact = lm.model(**batch).logits
    heads = lm.head_list()
    with pytest.raises(RuntimeError, match="mid-way"), mask_heads(lm, heads[:2]), mask_heads(lm, heads[-1], "last"):
        lm.model(**batch)
        raise RuntimeError("mid-way")
    assert torch.equal(lm.model(**batch).logits, intact)
    with mask_heads(lm, heads[0]):
        outer = lm.model(**batch).logits
        with mask_heads(lm, heads[-1]):
            inner = lm.model(**batch).logits
        assert torch.equal(lm.model(**batch).logits, outer)
    with mask_heads(lm, [heads[0], heads[-1]]):
        assert gap(lm.model(**batch).logits, inner) < 1e-5
    assert torch.equal(lm.model(**batch).logits, intact)
    assert {id(m): dict(m._forward_pre_hooks) for m in lm.model.modules()} == hooks


@every_architecture
def test_scores_do_not_depend_on_batching_or_companions(name):
    lm = zoo.lm(name)
    task = kv_task(3, 5, seed=1, format="terse", tokenizer=lm.tokenizer)
    heads = [lm.head_list()[0], lm.head_list()[-1]]
    for mask, where in (([], "all"), (heads, "all"), (heads, "last"), (heads, "answer")):
        with mask_heads(lm, mask, where):
            together = score(lm, task, batch_size=5).logprobs
            alone = score(lm, task, batch_size=1).logprobs
        assert abs(together - alone).max() < 1e-4, (name, where)


@every_architecture
def test_left_and_right_padding_agree(name):
    lm = zoo.lm(name)
    right = lm.encode(PROMPTS)
    mask = right["attention_mask"]
    left = {
        k: torch.stack([r.roll(int((1 - m).sum())) for r, m in zip(v, mask, strict=True)]) for k, v in right.items()
    }
    position_ids = (left["attention_mask"].cumsum(1) - 1).clamp_min(0)
    import inspect

    if "position_ids" in inspect.signature(lm.model.forward).parameters:
        left["position_ids"] = position_ids
    heads = [s.head(0) for s in lm.sites]
    for where in ("all", "last", [[1], [0, -1], [4, 7]]):
        with torch.no_grad(), mask_heads(lm, heads, where):
            a, b = lm.model(**right).logits, lm.model(**left).logits
        for i in range(len(PROMPTS)):
            n = int(mask[i].sum())
            assert gap(b[i, -n:], a[i, :n]) < 1e-4, (name, where)


@every_architecture
def test_heads_that_do_not_exist_are_named_with_those_that_do(name):
    lm = zoo.lm(name)
    for site in lm.sites:
        beyond = Head(site.layer, site.n_heads, None if site.primary else site.kind)
        with pytest.raises(HeadError, match=f"0-{site.n_heads - 1}"):
            lm.site(beyond)
    with pytest.raises(HeadError, match="layers with heads are"), mask_heads(lm, f"L{lm.n_layers}H0"):
        pass
    site = lm.sites[0]
    with pytest.raises(HeadError, match="not retention"):
        lm.site(Head(site.layer, 0, "retention"))
    with pytest.raises(HeadError, match="tokens"), mask_heads(lm, site.head(0), [[0], [0], [999]]):
        lm.model(**lm.encode(PROMPTS))


@every_architecture
def test_the_self_check_passes(name):
    report = self_check(zoo.lm(name))
    assert report.ok, report.rows


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_architectures_that_ignore_the_mask_are_refused(name):
    from ga_utils.errors import ModelError
    from ga_utils.models import wrap

    with pytest.raises(ModelError, match="not supported"):
        wrap(*zoo.build(name))


def test_zamba2_shares_weights_but_each_depth_is_its_own_site():
    lm = zoo.lm("zamba2")
    first, second = (s for s in lm.sites if s.kind == "attention")
    assert first.proj.weight is second.proj.weight  # really shared
    batch = lm.encode(PROMPTS)
    before_in, before_out, _ = mixer_outputs(lm, batch)
    with mask_heads(lm, first.head(1)):
        inputs, outputs, _ = mixer_outputs(lm, batch)
    assert float(inputs[first][..., first.channels(1)].abs().max()) == 0
    assert float(inputs[second][..., second.channels(1)].abs().min(-1).values.max()) > 0
    with mask_heads(lm, second.head(1)):
        inputs, outputs, _ = mixer_outputs(lm, batch)
    assert torch.equal(outputs[first], before_out[first])
    assert float(inputs[second][..., second.channels(1)].abs().max()) == 0
