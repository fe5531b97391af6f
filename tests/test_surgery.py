"""Models without some of their layers: against the intact model with those layers made to pass their input on."""

import contextlib

import pytest
import torch
import zoo

from ga_utils.caches import NO_MASK_IN_STEPS, Forward
from ga_utils.errors import GAError, HeadError
from ga_utils.masking import mask_heads
from ga_utils.scoring import score
from ga_utils.selfcheck import self_check
from ga_utils.sites import find_layers
from ga_utils.surgery import drop_layers, truncate
from ga_utils.tasks import kv_task

every_architecture = pytest.mark.parametrize("name", zoo.NAMES)
PROMPTS = ["Memorize: fox:17, owl:23. fox:", "x:4. x:"]
#: hybrids whose caches count tokens by an attention layer, which may be taken out
HYBRIDS = {
    "zamba",
    "zamba2",
    "jamba",
    "bamba",
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
}
HYBRIDS |= {"olmo_hybrid", "kimi_linear", "bailing_hybrid", "lfm2", "lfm2_moe"}


def logits(lm, batch, **kwargs):
    with torch.no_grad():
        return lm.model(**batch, **kwargs).logits


def state(lm):
    """Everything that a block may have changed: modules by name, what they remember of layers, configuration, hooks."""
    modules = {n: id(m) for n, m in lm.model.named_modules()}
    numbers = {n: (vars(m).get("layer_idx"), vars(m).get("layer_dic")) for n, m in lm.model.named_modules()}
    hooks = {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in lm.model.named_modules()}
    return modules, numbers, hooks, type(lm.config), lm.config.to_dict(), list(lm.model.state_dict())


@contextlib.contextmanager
def passing_on(lm, layers):
    """The oracle: the intact model, but each of `layers` gives back what it was given."""

    def hook(module, args, kwargs, output):
        given = args[0] if args else kwargs["hidden_states"]
        if type(module).__name__.startswith("Zaya"):  # its layers also hand on the router's state
            return given, args[1]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    found = find_layers(lm.model)[1]
    handles = [found[i].register_forward_hook(hook, with_kwargs=True) for i in layers]
    try:
        yield
    finally:
        [h.remove() for h in handles]


def steps_gap(lm, tokens, start=10):
    """Largest difference in the logits between one-token steps from a cache and one full forward."""
    forward = Forward(lm)
    full = logits(lm, {"input_ids": torch.tensor([tokens])}, use_cache=False)[0]
    found, cache = forward([tokens[:start]], [[start - 1]], [0], [start], keep_cache=True)
    worst = float((found[0, 0] - full[start - 1]).abs().max())
    for t in range(start, len(tokens)):
        mask = lm.family not in NO_MASK_IN_STEPS
        found, cache = forward([[tokens[t]]], [[0]], [0], [start], t, cache, True, mask)
        worst = max(worst, float((found[0, 0] - full[t]).abs().max()))
    return worst


def cuts(lm):
    """(block, layers that are out) of the shapes that a cut can have."""
    n = lm.n_layers
    yield lambda: truncate(lm, 1), range(1, n)
    yield lambda: truncate(lm, layers=2), range(2, n)
    yield lambda: drop_layers(lm, 0), [0]
    yield lambda: drop_layers(lm, [1]), [1]
    yield lambda: drop_layers(lm, [n - 1, 0]), [0, n - 1]


@every_architecture
def test_a_cut_model_is_the_intact_one_with_layers_that_pass_on(name):
    lm = zoo.lm(name)
    batch, before, intact = lm.encode(PROMPTS), state(lm), logits(lm, lm.encode(PROMPTS))
    prints = {lm.fingerprint}
    for block, out in cuts(lm):
        with passing_on(lm, out):
            expected = logits(lm, batch, use_cache=False)
        left = tuple(i for i in range(lm.n_layers) if i not in out)
        with block() as cut:
            assert torch.equal(logits(cut, batch, use_cache=False), expected)
            assert torch.allclose(logits(cut, batch), expected, atol=1e-5)  # whatever the default is
            assert cut.layers == left and cut.n_layers == len(left) == len(find_layers(cut.model)[1])
            assert {s.layer for s in cut.sites} <= set(left)
            assert cut.describe()["surgery"]["layers"] == list(left)
            assert lm.describe()["weights"] == cut.fingerprint and cut.fingerprint not in prints
            prints.add(cut.fingerprint)
            for site in cut.sites:
                assert cut.model.get_submodule(site.path) is site.mixer
        assert state(lm) == before
        assert torch.equal(logits(lm, batch), intact)
    assert "surgery" not in lm.describe()


@every_architecture
def test_caches_of_a_cut_model_continue_as_full_forwards_do(name):
    lm = zoo.lm(name)
    tokens = lm.encode(PROMPTS[:1])["input_ids"][0].tolist()[:16]
    for block, _ in cuts(lm):
        with block() as cut:
            if name in HYBRIDS and all(s.kind != "attention" for s in cut.sites):
                # nothing is left to count the tokens: then no cache, by default
                assert cut.config.use_cache is False
                continue
            # Zamba2 and Nemotron-H clamp their step size in the first pass and not in steps
            assert steps_gap(cut, tokens) < (1e-3 if name in ("zamba2", "nemotron_h") else 5e-5)


@every_architecture
def test_scores_and_masks_inside_a_cut(name):
    lm = zoo.lm(name)
    task = kv_task(3, 3, seed=1, format="terse", tokenizer=lm.tokenizer)
    for keep in (1, 2):
        out = range(keep, lm.n_layers)
        with passing_on(lm, out):
            expected = score(lm, task)
        with truncate(lm, keep) as cut:
            assert abs(score(cut, task).logprobs - expected.logprobs).max() < 1e-4
            assert self_check(cut).ok
    with drop_layers(lm, 0) as cut:
        report = self_check(cut)
        assert report.ok, report.rows
        head = cut.head_list()[-1]  # a head goes by the number that its layer has in the whole model
        assert cut.site(head).mixer is lm.site(head).mixer
        batch, plain = cut.encode(PROMPTS), logits(cut, lm.encode(PROMPTS), use_cache=False)
        with mask_heads(cut, head, "last"):
            masked = logits(cut, batch, use_cache=False)
        assert not torch.equal(masked, plain)
        with pytest.raises(HeadError, match="the layers with heads are"):
            cut.site(lm.head_list()[0])
    with passing_on(lm, [0]), mask_heads(lm, head, "last"):
        assert torch.equal(logits(lm, batch, use_cache=False), masked)


@pytest.mark.parametrize("name", ["llama", "zamba2", "jamba", "qwen3_next", "llamba"])
def test_blocks_nest_and_end_in_any_order(name):
    lm = zoo.lm(name)
    batch, before, count = lm.encode(PROMPTS), state(lm), lm.n_layers
    with truncate(lm, 3) as outer, drop_layers(outer, 1) as inner:
        assert inner.layers == outer.layers == (0, 2)
        with pytest.raises(GAError, match=r"no layer 1: .* 0, 2\."), drop_layers(inner, 1):
            pass
        nested = logits(inner, batch, use_cache=False)
    with passing_on(lm, [1, *range(3, lm.n_layers)]):
        assert torch.equal(logits(lm, batch, use_cache=False), nested)
    first, second = truncate(lm, 3), drop_layers(lm, 1)
    cut, dropped = first.__enter__(), second.__enter__()
    assert cut.layers == (0, 2)
    first.__exit__(None, None, None)
    assert dropped.layers == tuple(i for i in range(count) if i != 1)
    assert {s.layer for s in dropped.sites} == {s.layer for s in lm.sites} - {1}
    with pytest.raises(GAError, match="after its block has ended"):
        cut.describe()
    with pytest.raises(GAError, match="after its block has ended"), truncate(cut, 1):
        pass
    got = logits(dropped, batch, use_cache=False)
    second.__exit__(None, None, None)
    assert state(lm) == before
    with passing_on(lm, [1]):
        assert torch.equal(logits(lm, batch, use_cache=False), got)
    with pytest.raises(RuntimeError, match="mid-way"), truncate(lm, 2), drop_layers(lm, 0):
        raise RuntimeError("mid-way")
    assert state(lm) == before


def test_what_cannot_be_cut_is_said():
    lm = zoo.lm("llama")
    before = state(lm)
    for keep in (0, 4, -1, 1.5, True, "2"):
        with pytest.raises(GAError, match="from 1 to 3"), truncate(lm, keep):
            pass
    for bad in ((), (1, 2)):
        with pytest.raises(GAError, match="once"), truncate(lm, *bad[:1], layers=bad[1] if bad else None):
            pass
    for layers in (3, [0, 7], -1, ["0"]):
        with pytest.raises(GAError, match="has the layers 0, 1, 2"), drop_layers(lm, layers):
            pass
    with pytest.raises(GAError, match="leaves none"), drop_layers(lm, [0, 1, 2]):
        pass
    with pytest.raises(GAError, match="a layer's number or a list"), drop_layers(lm, "01"):
        pass
    with drop_layers(lm, [0, 1]), pytest.raises(GAError, match="leaves no layer"), truncate(lm, 2):
        pass
    assert state(lm) == before


def test_a_whole_model_is_recorded_as_intact():
    lm = zoo.lm("llama")
    with truncate(lm, 3) as whole:
        assert whole.describe() == lm.describe()
    with drop_layers(lm, []) as whole:
        assert whole.describe() == lm.describe()
