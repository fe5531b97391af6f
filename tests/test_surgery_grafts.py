"""Grafted layers, mixers and heads: against the donor's own modules called by hand in the host's forward pass."""

import contextlib

import pytest
import torch
import zoo
from test_surgery import passing_on, steps_gap

from ga_utils.errors import GAError, HeadError, ModelError
from ga_utils.heads import Head
from ga_utils.masking import capture_inputs, mask_heads
from ga_utils.mixers import matrix
from ga_utils.models import wrap
from ga_utils.scoring import score
from ga_utils.selfcheck import self_check
from ga_utils.sites import find_layers
from ga_utils.surgery import NoCacheError, drop_layers, graft_heads, graft_layers, truncate
from ga_utils.tasks import kv_task

every_architecture = pytest.mark.parametrize("name", zoo.NAMES)
PROMPTS = ["Memorize: fox:17, owl:23. fox:", "x:4. x:"]
DONORS = (
    "llama",
    "gpt2",
    "gpt_neox",
    "qwen3",
    "gemma3",
    "mistral",
    "phi3",
    "mamba2",
    "falcon_h1",
    "qwen3_next",
    "inkling",
)


def logits(lm, batch):
    with torch.no_grad():
        return lm.model(**batch, use_cache=False).logits


def intact(*models):
    """What a block may have changed, of host and donor."""
    out = []
    for lm in models:
        out += [{n: id(m) for n, m in lm.model.named_modules()}, lm.config.to_dict(), lm.fingerprint]
        out += [[(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in lm.model.modules()]]
        out += [[vars(m).get("layer_idx") for m in lm.model.modules()]]
    return out


@contextlib.contextmanager
def answering(ours, theirs):
    """The oracle: wherever one of `ours` is called, one of `theirs` gives the output for the same arguments."""
    handles = [
        a.register_forward_hook(lambda m, args, kwargs, out, b=b: b(*args, **kwargs), with_kwargs=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    try:
        yield
    finally:
        [h.remove() for h in handles]


@every_architecture
def test_a_graft_between_two_of_a_kind_is_the_donors_module_called_in_place(name):
    host, donor = zoo.lm(name), zoo.lm(name, 1)
    batch, before = host.encode(PROMPTS), intact(host, donor)
    ours, theirs = (find_layers(lm.model)[1] for lm in (host, donor))
    attention = [s.layer for s in host.sites if s.kind == "attention"] or [host.n_layers - 1]
    for i in sorted({0, attention[-1]}):
        mine, other = ([s for s in lm.sites if s.layer == i] for lm in (host, donor))
        with answering([ours[i]], [theirs[i]]):
            layer = logits(host, batch)
        with graft_layers(host, donor, i) as grafted:
            assert torch.equal(logits(grafted, batch), layer)
            assert [(s.layer, s.kind, s.n_heads, s.primary) for s in grafted.sites] == [
                (s.layer, s.kind, s.n_heads, s.primary) for s in host.sites
            ]
            assert host.fingerprint == grafted.describe()["weights"] != before[2]
        if mine:
            with answering([s.mixer for s in mine], [s.mixer for s in other]):
                mixer = logits(host, batch)
            with graft_layers(host, donor, [i], mixer_only=True) as grafted:
                assert torch.equal(logits(grafted, batch), mixer)
                assert {s.proj.weight.data_ptr() for s in grafted.sites if s.layer == i} == {
                    s.proj.weight.data_ptr() for s in other
                }
    assert intact(host, donor) == before
    task = kv_task(2, 2, seed=1, format="terse", tokenizer=host.tokenizer)
    with graft_layers(host, donor, 1) as grafted:
        assert self_check(grafted).ok
        assert score(grafted, task).cached == score(host, task).cached  # its caches are the host's
    assert intact(host, donor) == before


@every_architecture
def test_a_grafted_head_is_the_donors_contribution_in_place_of_the_hosts(name):
    host, donor = zoo.lm(name), zoo.lm(name, 1)
    batch, before = host.encode(PROMPTS), intact(host, donor)
    layers = find_layers(donor.model)[1]
    site = next(s for s in reversed(host.sites) if s.primary)
    other = next(s for s in donor.sites if s.path == site.path)
    mine, theirs = 1, site.n_heads - 1
    seen = {}

    def run_donor(module, args, kwargs):
        with capture_inputs([other]) as inputs:
            layers[site.layer](*args, **kwargs)
        seen["donor"] = inputs[other]

    def exchange(module, args, out):
        first = out[0] if isinstance(out, tuple) else out
        less = site.contributions(inputs[site], [mine])[0]
        more = other.contributions(seen["donor"], [theirs])[0]
        first = first + (more - less).reshape(first.shape)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    layer = find_layers(host.model)[1][site.layer]
    handles = [layer.register_forward_pre_hook(run_donor, with_kwargs=True), site.mixer.register_forward_hook(exchange)]
    with capture_inputs([site]) as inputs:
        expected = logits(host, batch)
    [h.remove() for h in handles]
    pair = {other.head(theirs): site.head(mine)}
    with graft_heads(host, donor, pair) as grafted:
        assert (logits(grafted, batch) - expected).abs().max() < 2e-5
        assert grafted.family.endswith("+graft") and grafted.fingerprint != before[2]
        assert self_check(grafted).ok
        surgery = grafted.describe()["surgery"]
    assert surgery["grafts"][0]["heads"] == [[str(other.head(theirs)), str(site.head(mine))]]
    assert intact(host, donor) == before


def by_hand(donor, layer, hidden, mask, mixer_only):
    """A Llama layer, or its attention, on hidden [b, t, d], with a causal mask [b, 1, t, s] that was built by hand."""
    t = hidden.shape[1]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    allowed = torch.ones(t, t, dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
    allowed = allowed | torch.eye(t, dtype=torch.bool)  # a padded row must see something
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    block, rotary = donor.model.model.layers[layer], donor.model.model.rotary_emb
    where = dict(attention_mask=added, position_embeddings=rotary(hidden, positions), position_ids=positions)
    return block.self_attn(hidden_states=hidden, **where)[0] if mixer_only else block(hidden, **where)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["right", "left", "none"])
def test_llamas_attention_in_llamba_is_causal_and_sees_no_padding(implementation, side):
    host = zoo.lm("llamba")
    model, tokenizer = zoo.build("llama", 1)
    model.set_attn_implementation(implementation)
    donor = wrap(model, tokenizer, name="donor")
    batch = host.encode(PROMPTS)
    if side == "left":
        turn = (1 - batch["attention_mask"]).sum(1).tolist()
        batch = {k: torch.stack([r.roll(n) for r, n in zip(v, turn, strict=True)]) for k, v in batch.items()}
    real = batch["attention_mask"] if side != "none" else torch.ones_like(batch["attention_mask"])
    given = batch if side != "none" else {"input_ids": batch["input_ids"]}
    before = intact(host, donor)
    for mixer_only in (False, True):
        block = host.backbone.layers[1]
        module = block.mixer if mixer_only else block
        handle = module.register_forward_hook(
            lambda m, args, out, only=mixer_only: by_hand(donor, 1, args[0], real, only)
        )
        expected = logits(host, given)
        handle.remove()
        with graft_layers(host, donor, 1, mixer_only=mixer_only) as grafted:
            found = logits(grafted, given)
            assert (found - expected)[real.bool()].abs().max() < 2e-5
            assert self_check(grafted).ok
            assert [s.kind for s in grafted.sites] == ["llamba", "attention", "llamba"]
            assert grafted.describe()["surgery"]["grafts"][0]["attention"] == implementation
    assert intact(host, donor) == before


def test_one_attention_head_in_llamba_goes_through_the_donors_norm_and_projection():
    host, donor = zoo.lm("llamba"), zoo.lm("llama", 1)
    batch = host.encode(PROMPTS)
    mask, block, mixer = batch["attention_mask"], donor.model.model.layers[1], host.backbone.layers[1].mixer
    source, site = donor.site(Head(1, 3)), host.site(Head(1, 2))
    entered = {}
    handles = [
        host.backbone.layers[1].register_forward_pre_hook(lambda m, args: entered.update(hidden=args[0])),
        mixer.out_proj.register_forward_pre_hook(lambda m, args: (without(args[0], site.channels(2)),)),
    ]

    def add(module, args, out):
        with capture_inputs([source]) as inputs:
            by_hand(donor, 1, block.input_layernorm(entered["hidden"]), mask, True)
        part = source.channels(3)
        return out + inputs[source][..., part] @ block.self_attn.o_proj.weight[:, part].T

    handles.append(mixer.register_forward_hook(add))
    expected = logits(host, batch)
    [h.remove() for h in handles]
    with graft_heads(host, donor, {"L1H3": "L1H2"}) as grafted:
        assert (logits(grafted, batch) - expected)[mask.bool()].abs().max() < 2e-5
        assert self_check(grafted).ok
        added = grafted.site(Head(1, 3, "attention"))
        assert added.mixer.o_proj.weight is source.proj.weight and grafted.site(Head(1, 2)).kind == "llamba"
        with mask_heads(grafted, "L1.attention.H3"):
            off = logits(grafted, batch)
    with mask_heads(host, "L1H2"):
        assert torch.allclose(logits(host, batch), off, atol=1e-5)
    with graft_heads(host, donor, {"L1H3": None}) as grafted, mask_heads(grafted, "L1.attention.H3"):
        assert torch.allclose(logits(grafted, batch), logits(host, batch), atol=1e-5)


def without(x, channels):
    x = x.clone()
    x[..., channels] = 0
    return x


@pytest.mark.parametrize("name", DONORS)
def test_layers_of_other_architectures_pass_the_self_check(name):
    donor = zoo.lm(name)
    for host in (zoo.lm("llamba"), zoo.lm("falcon_h1" if name != "falcon_h1" else "llama")):
        before = intact(host, donor)
        with graft_layers(host, donor, {2: 1}) as grafted:
            assert self_check(grafted).ok
            assert [s.kind for s in grafted.sites if s.layer == 2] == [s.kind for s in donor.sites if s.layer == 1]
        if host.family == "llamba" and name != "falcon_h1":
            with graft_layers(host, donor, [1], mixer_only=True) as grafted:
                assert self_check(grafted).ok
        assert intact(host, donor) == before


def test_matrices_and_scores_of_a_grafted_layer():
    host, donor = zoo.lm("llamba"), zoo.lm("llama")
    task = kv_task(3, 4, seed=1, format="terse", tokenizer=host.tokenizer)
    with graft_layers(host, donor, 1) as grafted:
        found = matrix(grafted, PROMPTS, ["L1H3", "L2H0"])
        result = score(grafted, task)
        alone = score(grafted, task, batch_size=1)
        assert not result.cached and abs(result.logprobs - alone.logprobs).max() < 1e-4
        with pytest.raises(NoCacheError, match="use_cache=False"):
            grafted.model(**grafted.encode(PROMPTS), use_cache=True)
    sums = found["L1H3"].sum(-1)[grafted.encode(PROMPTS)["attention_mask"].bool()]
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)  # attention, as no row of Llamba's own is
    assert score(host, task).cached


def test_grafts_nest_with_cuts_and_end_in_any_order():
    host, donor = zoo.lm("llamba"), zoo.lm("llama")
    batch, before = host.encode(PROMPTS), intact(host, donor)
    with graft_layers(host, donor, 2) as grafted, drop_layers(grafted, 0) as cut:
        together = logits(cut, batch)
        assert [(s.layer, s.kind) for s in cut.sites] == [(1, "llamba"), (2, "attention")]
    outer = drop_layers(host, 0)
    cut = outer.__enter__()
    inner = graft_layers(cut, donor, 2)
    grafted = inner.__enter__()
    assert torch.equal(logits(grafted, batch), together)
    outer.__exit__(None, None, None)
    assert grafted.layers == (0, 1, 2)
    with pytest.raises(GAError, match="holds a graft already"), graft_heads(grafted, donor, "L2H0"):
        pass
    kept = logits(grafted, batch)
    inner.__exit__(None, None, None)
    assert intact(host, donor) == before
    with graft_layers(host, donor, 2) as grafted:
        assert torch.equal(logits(grafted, batch), kept)
    with drop_layers(donor, 1) as short, graft_layers(host, short, 2) as grafted:  # layers go by original numbers
        assert torch.equal(logits(grafted, batch), kept)
    with truncate(host, 2) as cut, pytest.raises(GAError, match="no layer 2"), graft_layers(cut, donor, 2):
        pass
    with pytest.raises(RuntimeError, match="mid-way"), graft_layers(host, donor, [0, 1]):
        raise RuntimeError("mid-way")
    assert intact(host, donor) == before


@pytest.mark.parametrize("name", ["llama", "zamba", "zamba2", "jamba", "qwen3_next", "llamba"])
def test_grafts_between_two_of_a_kind_are_renumbered_in_a_cut_model(name):
    host, donor = zoo.lm(name), zoo.lm(name, 1)
    batch, before, last = host.encode(PROMPTS), intact(host, donor), host.n_layers - 1
    ours, theirs = (find_layers(lm.model)[1] for lm in (host, donor))
    with passing_on(host, [0]), answering([ours[last]], [theirs[last]]):
        expected = logits(host, batch)
    tokens = batch["input_ids"][0].tolist()[:14]
    with graft_layers(host, donor, last) as grafted, drop_layers(grafted, 0) as cut:
        assert torch.equal(logits(cut, batch), expected)
        assert steps_gap(cut, tokens) < (1e-3 if name == "zamba2" else 5e-5)
    head = next(s for s in host.sites if s.layer == last and s.primary).head(0)
    with graft_heads(host, donor, [head]) as grafted, drop_layers(grafted, 0) as cut:
        one = logits(cut, batch)
        assert not torch.equal(one, expected)
    with drop_layers(host, 0) as cut, graft_heads(cut, donor, [head]) as grafted:
        assert torch.equal(logits(grafted, batch), one)
    assert intact(host, donor) == before


def test_what_cannot_be_grafted_is_said():
    host, donor = zoo.lm("llamba"), zoo.lm("llama")
    before = intact(host, donor)
    wide = wrap(*zoo.build("llama", hidden_size=96), name="wide")
    half = wrap(zoo.build("llama")[0].half(), host.tokenizer, name="half")
    for bad, said in ((wide, "width 96"), (half, "dtype")):
        with pytest.raises(GAError, match=said), graft_layers(host, bad, 1):
            pass
    with pytest.raises(ModelError, match="LanguageModel"), graft_layers(host, donor.model, 1):
        pass
    for layers, said in ((3, "no layer 3"), ([], "names no layer"), ({1: 5}, "no layer 5"), ("1", "a list of them")):
        with pytest.raises(GAError, match=said), graft_layers(host, donor, layers):
            pass
    for heads, error in (("L1H9", HeadError), ("L9H0", HeadError), ([], GAError), ({"L1H0": "L1H7"}, HeadError)):
        with pytest.raises(error), graft_heads(host, donor, heads):
            pass
    with pytest.raises(HeadError, match="make room"), graft_heads(host, donor, {"L1H0": "L1H1", "L1H2": "L1H1"}):
        pass
    with pytest.raises(ModelError, match="more than hidden states"), graft_layers(host, zoo.lm("zamba2"), 1):
        pass
    with mask_heads(donor, "L1H0"), pytest.raises(GAError, match="mask_heads block"), graft_layers(host, donor, 1):
        pass
    with pytest.raises(GAError, match="2 mixers"), graft_layers(host, zoo.lm("falcon_h1"), 1, mixer_only=True):
        pass
    assert intact(host, donor) == before
