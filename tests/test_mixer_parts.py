"""Do `without_conv` and `without_state` switch off exactly what they say, where they say it, and nothing after?"""

import contextlib
import copy

import pytest
import torch
import zoo

from ga_utils import mixers
from ga_utils.candidates import TOKENS_A_CALL
from ga_utils.errors import GAError, HeadError, ModelError
from ga_utils.language_model import wrap
from ga_utils.masking import mask_heads
from ga_utils.mixer_parts import without_conv, without_state
from ga_utils.mixers.base import namespace
from ga_utils.scoring import score
from ga_utils.tasks import Example, Task

CONV = ("mamba1", "mamba2", "llamba", "deltanet", "kda", "shortconv")
STATE = ("mamba1", "mamba2", "llamba", "deltanet", "kda", "lightning")


def sites_of(name: str, kinds) -> list:
    return [s for s in zoo.lm(name).sites if s.kind in kinds]


def names_with(kinds) -> list[str]:
    return [n for n in zoo.NAMES if sites_of(n, kinds)]


def random_ids(batch: int = 2, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 260, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **kwargs) -> torch.Tensor:
    if "attention_mask" not in kwargs:
        kwargs["attention_mask"] = torch.ones_like(ids)
    return model(input_ids=ids, use_cache=False, **kwargs).logits


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 2e-4) -> bool:
    return float((found - expected).abs().max() / expected.std()) < bound


def taps_off(lm, layers=None):
    """A copy of the model whose convolutions' earlier taps are 0."""
    model = copy.deepcopy(lm.model)
    for site in wrap(model, lm.tokenizer).sites:
        if site.kind in CONV and (layers is None or site.layer in layers):
            conv = next(m for m in site.mixer.children() if isinstance(m, torch.nn.Conv1d))
            with torch.no_grad():
                conv.weight[..., :-1] = 0
    return model


def all_forgotten(lm, layers=None):
    """A copy of the model whose states decay to exactly 0 within one step."""
    model = copy.deepcopy(lm.model)
    for site in wrap(model, lm.tokenizer).sites:
        if site.kind not in STATE or (layers is not None and site.layer not in layers):
            continue
        if site.kind == "llamba":
            forget(site.mixer)
        elif site.kind == "lightning":
            site.mixer.slope_rate.fill_(1e9)
            tables = site.mixer.decay_factors(site.mixer.slope_rate)
            site.mixer.query_decay, site.mixer.key_decay, site.mixer.diagonal_decay = tables
        elif site.kind == "kda":  # its gate may be bounded from below, so its result is replaced
            gate = next(m for m in site.mixer.modules() if hasattr(m, "A_log"))
            gate.register_forward_hook(lambda module, args, output: torch.full_like(output, -1e4))
        else:
            site.mixer.A_log.data.fill_(30.0)
    return model


def forget(mixer) -> None:
    project = mixer.project

    def forgetting(*args):
        x, b, c, log_decay, z = project(*args)
        return x, b, c, torch.full_like(log_decay, -1e9), z

    mixer.project = forgetting


@pytest.mark.parametrize("name", names_with(CONV))
def test_without_conv_is_the_model_with_its_earlier_taps_at_zero(name):
    lm, ids = zoo.lm(name), random_ids()
    before = logits(lm.model, ids)
    with without_conv(lm):
        off = logits(lm.model, ids)
    assert close(off, logits(taps_off(lm), ids))
    assert not close(off, before, 1e-2)
    assert torch.equal(logits(lm.model, ids), before)
    layer = sites_of(name, CONV)[-1].layer
    expected = logits(taps_off(lm, [layer]), ids)
    with without_conv(lm, layer):
        assert close(logits(lm.model, ids), expected)


@pytest.mark.parametrize("name", names_with(STATE))
def test_without_state_is_the_model_that_forgets_at_once(name):
    lm, ids = zoo.lm(name), random_ids()
    before = logits(lm.model, ids)
    with without_state(lm):
        off = logits(lm.model, ids)
    assert close(off, logits(all_forgotten(lm), ids), 1e-3)
    assert not close(off, before, 1e-2)
    assert torch.equal(logits(lm.model, ids), before)
    layer = sites_of(name, STATE)[0].layer
    expected = logits(all_forgotten(lm, [layer]), ids)
    with without_state(lm, [layer]):
        assert close(logits(lm.model, ids), expected, 1e-3)


@pytest.mark.parametrize("name", names_with(set(CONV) | set(STATE)))
@torch.no_grad()
def test_with_both_off_every_token_is_a_text_of_its_own(name):
    lm = zoo.lm(name)
    for site in sites_of(name, set(CONV) | set(STATE))[:2]:
        extra = {"position_embeddings": None, "attention_mask": None} if site.kind == "lightning" else {}
        x = torch.randn(2, 9, lm.config.hidden_size, generator=torch.Generator().manual_seed(1))

        def run(x, site=site, extra=extra):
            out = site.mixer(x, **extra)
            return out[0] if isinstance(out, tuple) else out

        alone = run(x.flatten(0, 1)[:, None]).view(2, 9, -1)
        with contextlib.ExitStack() as stack:
            if site.kind in CONV:
                stack.enter_context(without_conv(lm, site))
            if site.kind in STATE:
                stack.enter_context(without_state(lm, site))
            together = run(x)
        assert close(together, alone, 1e-4), site.path
        assert not close(run(x), alone, 1e-2), site.path


def slow_conv(x, weight, bias, chosen, activation):
    """Convolution [b, t, c] tap by tap, with earlier taps left out where `chosen` [b][t]."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for j in range(weight.shape[1]):
                s = t - weight.shape[1] + 1 + j
                if s >= 0 and (s == t or not chosen[b][t]):
                    out[b, t] += weight[:, j] * x[b, s]
            if bias is not None:
                out[b, t] += bias
    return torch.nn.functional.silu(out) if activation else out


@pytest.mark.parametrize("name", ["mamba", "mamba2", "zamba", "qwen3_next", "kimi_linear", "lfm2", "falcon_h1"])
def test_without_conv_at_some_positions_is_the_convolution_by_hand(name, monkeypatch):
    lm, ids = zoo.lm(name), random_ids(length=8)
    positions = [[0, 3, -1], [5]]
    chosen = [[t in (0, 3, 7) for t in range(8)], [t == 5 for t in range(8)]]
    with without_conv(lm, positions=positions):
        off = logits(lm.model, ids)
    scope = namespace(sites_of(name, CONV)[0])

    def by_hand(x, weight, bias=None, activation=None, **kwargs):
        return slow_conv(x.transpose(1, 2), weight, bias, chosen, activation).transpose(1, 2)

    before = logits(lm.model, ids)
    monkeypatch.setitem(scope, "causal_conv1d_fn", by_hand)
    assert close(off, logits(lm.model, ids))
    assert not close(off, before, 1e-2)


def test_without_conv_at_some_positions_of_llamba_by_hand(monkeypatch):
    lm, ids = zoo.lm("llamba"), random_ids(length=8)
    with without_conv(lm, positions=[[0, 3, -1], [5]]):
        off = logits(lm.model, ids)
    chosen = [[t in (0, 3, 7) for t in range(8)], [t == 5 for t in range(8)]]

    def by_hand(self, x, padding, state):
        return slow_conv(x, self.conv1d.weight[:, 0], self.conv1d.bias, chosen, None)

    monkeypatch.setattr(type(lm.sites[0].mixer), "_short_conv", by_hand)
    assert close(off, logits(lm.model, ids))


@pytest.mark.parametrize("name", names_with(STATE))
def test_without_state_at_some_positions_changes_those_rows_of_the_mixer_alone(name):
    lm, ids = zoo.lm(name), random_ids()
    site = sites_of(name, STATE)[0]
    outputs = []

    def keep(module, args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handle = site.mixer.register_forward_hook(keep)
    try:
        logits(lm.model, ids)
        for positions in ("all", [[2, -1], [7]], "last"):
            with without_state(lm, site, positions):
                logits(lm.model, ids)
    finally:
        handle.remove()
    intact, everywhere, some, last = outputs
    where = torch.zeros(2, 20, dtype=torch.bool)
    where[0, [2, 19]] = where[1, 7] = True
    assert close(some[~where], intact[~where], 1e-5) and close(some[where], everywhere[where], 1e-5)
    assert close(last[:, :-1], intact[:, :-1], 1e-5) and close(last[:, -1], everywhere[:, -1], 1e-5)
    assert not close(everywhere[:, -1], intact[:, -1], 1e-3)


@pytest.mark.parametrize("part", [without_conv, without_state])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "llamba", "qwen3_next", "kimi_linear", "jamba"])
@pytest.mark.parametrize("left", [True, False])
def test_positions_mean_the_same_whatever_the_padding(name, part, left):
    lm = zoo.lm(name)
    rows = [random_ids(1, n, n)[0] for n in (6, 11)]
    ids, mask = torch.zeros(2, 11, dtype=torch.long), torch.zeros(2, 11, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(11 - len(row), 11) if left else slice(0, len(row))
        ids[i, at], mask[i, at] = row, 1
    for positions in ([[1, -1], [-4]], "last"):
        with part(lm, positions=positions):
            together = logits(lm.model, ids, attention_mask=mask)
        for i, row in enumerate(rows):
            with part(lm, positions=positions if isinstance(positions, str) else [positions[i]]):
                alone = logits(lm.model, row[None])[0]
            assert close(together[i][mask[i].bool()], alone, 1e-3)


@pytest.mark.parametrize("part", [without_conv, without_state])
@pytest.mark.parametrize("positions", ["all", "answer", "last"])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "llamba", "zamba", "qwen3_next", "kimi_linear", "lfm2"])
def test_cached_steps_score_as_full_forwards_do(name, positions, part, monkeypatch):
    monkeypatch.setitem(TOKENS_A_CALL, "cpu", 0)  # so that steps are taken, however short the texts are
    if name == "lfm2" and part is without_state:
        pytest.skip("a short convolution has no state")
    lm = zoo.lm(name)
    task = Task("words", tuple(Example(p, ("abcd", "abd", "xyz"), 0) for p in ("one two", "a little longer: ")))
    with part(lm, positions=positions):
        cached = score(lm, task)
        monkeypatch.setattr("ga_utils.scoring.cache_policy", lambda *args: (0, None))
        plain = score(lm, task)
    assert cached.cached and not plain.cached
    assert abs(cached.logprobs - plain.logprobs).max() < 2e-3
    assert abs(plain.logprobs - score(lm, task).logprobs).max() > 2e-2


def test_the_parts_nest_with_each_other_and_with_masks_and_leave_no_trace():
    lm, ids = zoo.lm("falcon_h1"), random_ids()
    site = sites_of("falcon_h1", STATE)[0]
    scope, before = dict(namespace(site)), logits(lm.model, ids)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules())
    with mask_heads(lm, "L1H0"), without_conv(lm), without_state(lm, positions="last"):
        all_three = logits(lm.model, ids)
    with without_state(lm, positions="last"), without_conv(lm), mask_heads(lm, "L1H0"):
        assert torch.equal(logits(lm.model, ids), all_three)
    with pytest.raises(RuntimeError, match="stop"), without_conv(lm), without_state(lm):
        raise RuntimeError("stop")
    assert dict(namespace(site)) == scope
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules())
    assert torch.equal(logits(lm.model, ids), before)
    llamba = zoo.lm("llamba")
    with pytest.raises(RuntimeError, match="stop"), without_conv(llamba), without_state(llamba):
        raise RuntimeError("stop")
    assert not {"scan", "_short_conv"} & set(vars(llamba.sites[0].mixer))


@pytest.mark.parametrize("name", ["mamba", "mamba2", "llamba", "qwen3_next"])
def test_matrices_are_those_of_the_edited_mixer_or_refused(name):
    lm = zoo.lm(name)
    head = sites_of(name, STATE)[0].head(1)
    intact = mixers.matrix(lm, "some words", head)[head]
    with without_conv(lm):
        edited = mixers.matrix(lm, "some words", head)[head]  # checked against the edited output
    assert not close(edited, intact, 1e-2)
    with without_state(lm), pytest.raises(GAError, match="does not reproduce"):
        mixers.matrix(lm, "some words", head)
    assert torch.equal(mixers.matrix(lm, "some words", head)[head], intact)


def test_impossible_requests_are_refused_in_a_sentence():
    mamba, llama, lfm = zoo.lm("mamba"), zoo.lm("llama"), zoo.lm("lfm2")
    with pytest.raises(ModelError, match="has no mixer with a short convolution"), without_conv(llama):
        pass
    with pytest.raises(ModelError, match="has no mixer with a recurrent state"), without_state(lfm):
        pass
    with pytest.raises(HeadError, match="Layer 1 of random-lfm2 is no mixer.*layers 0, 2 have one"):
        with without_conv(lfm, 1):
            pass
    with pytest.raises(HeadError, match="Layer 'L0' "), without_conv(mamba, "L0"):
        pass
    with pytest.raises(HeadError, match="names no layer"), without_state(mamba, []):
        pass
    with pytest.raises(HeadError, match="positions='first' is unknown"), without_conv(mamba, positions="first"):
        pass
    with pytest.raises(HeadError, match="Position 50 lies outside"), without_conv(mamba, positions=[[50], [0]]):
        logits(mamba.model, random_ids())
    model = wrap(*zoo.build("mamba"))
    model.model.train()
    with pytest.raises(ModelError, match="training mode"), without_state(model):
        pass
    with pytest.raises(ModelError, match="outside a forward call"), without_state(mamba, positions="last"):
        mamba.sites[0].mixer(torch.zeros(1, 3, 64))


def test_a_forward_that_goes_past_the_edit_is_an_error(monkeypatch):
    lm = wrap(*zoo.build("mamba"))
    site = lm.sites[1]
    monkeypatch.setattr(site.mixer, "forward", lambda hidden_states, **kwargs: hidden_states)
    with pytest.raises(ModelError, match="edited in 0 of 1 forward passes only"), without_conv(lm):
        logits(lm.model, random_ids())
