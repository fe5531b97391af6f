"""Is the Llamba in this package the published Llamba, in every way of running it?"""

import copy
import importlib.util
import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from llamba_oracle import SIZES, config_json, logits, mixer_heads, norm, recurrence, weights, write
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast

from ga_utils.errors import ModelError
from ga_utils.llamba import LlambaForCausalLM
from ga_utils.llamba_cache import LayerState, LlambaCache
from ga_utils.llamba_config import LlambaConfig
from ga_utils.llamba_load import is_llamba, load_llamba
from ga_utils.llamba_mixer import (
    BLOCK,
    QUADRATIC_MAX,
    LlambaMixer,
    padding_from_mask,
    scan_chunked,
    scan_quadratic,
    scan_triton,
    segment_sums,
)
from ga_utils.mixers import matrix
from ga_utils.models import load

LENGTHS = (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, QUADRATIC_MAX, QUADRATIC_MAX + 1, 300)


def build(size="8B", dtype=torch.float32, seed=0):
    model = LlambaForCausalLM(LlambaConfig(**config_json(size))).to(dtype).eval()
    problems = model.load_state_dict(weights(size, seed, dtype), strict=False)
    assert problems.unexpected_keys == [] and problems.missing_keys in ([], ["lm_head.weight"])
    return model


def tokens(b, t, seed=0):
    return torch.randint(0, 104, (b, t), generator=torch.Generator().manual_seed(seed))


def scan_inputs(t, dtype, b=2, h=3, p=5, n=4):
    g = torch.Generator().manual_seed(t)
    x, B, C, a = (torch.randn(b, t, *s, generator=g, dtype=torch.float64) for s in ((h, p), (h, n), (h, n), (h,)))
    state = torch.randn(b, h, p, n, generator=g, dtype=torch.float64)
    # decays between nearly 1 and nearly 0, so that long and short memories are both tested
    return tuple(v.to(dtype) for v in (x, B / n**0.5, C, -F.softplus(3 * a - 3), state))


def worst(got, want):
    return ((got - want).abs().max() / want.abs().max().clamp_min(1)).item()


# --- the scan


@pytest.mark.parametrize("scan", [scan_quadratic, scan_chunked])
@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_scan_is_the_recurrence(scan, t, dtype, tolerance):
    *inputs, state = scan_inputs(t, torch.float64)
    for initial in (None, state):
        want, want_state = recurrence(*inputs, initial)
        got, got_state = scan(*(v.to(dtype) for v in inputs), initial=None if initial is None else initial.to(dtype))
        assert got.dtype == got_state.dtype == dtype
        assert worst(got, want) < tolerance
        assert worst(got_state, want_state) < tolerance


def test_block_length_never_changes_the_scan():
    *inputs, state = scan_inputs(130, torch.float64)
    want, want_state = scan_quadratic(*inputs, initial=state)
    for block in (1, 3, 16, 64, 65, 200):
        got, got_state = scan_chunked(*inputs, initial=state, block=block)
        assert worst(got, want) < 1e-12 and worst(got_state, want_state) < 1e-12


def test_segment_sums_keep_the_digits_of_short_spans():
    log_decay = -F.softplus(torch.randn(2048, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    sums = segment_sums(log_decay.float())
    assert torch.isneginf(sums[3, 4]) and sums[5, 5] == 0
    last = torch.arange(1, 2048)
    torch.testing.assert_close(sums[last, last - 1].double(), log_decay[1:], rtol=1e-6, atol=0)


def test_scan_gradients():
    inputs = [v.requires_grad_() for v in scan_inputs(6, torch.float64, b=1, h=2, p=2, n=2)]
    assert torch.autograd.gradcheck(lambda *v: scan_quadratic(*v), inputs)
    assert torch.autograd.gradcheck(lambda *v: scan_chunked(*v, block=4), inputs)


def test_triton_wrapper_undoes_the_kernels_step_size():
    """The kernel's contract in torch stands in for it: x is scaled by dt, and the state decays by dt * A."""

    def kernel(x, dt, A, B, C, chunk_size, initial_states, return_final_states):
        assert return_final_states and chunk_size == 128
        return recurrence(x * dt[..., None], B, C, dt * A, initial_states)

    x, B, C, log_decay, state = scan_inputs(20, torch.float64)
    x[:, :4], B[:, :4], log_decay[:, :4] = 0, 0, 0  # what padding looks like
    want, want_state = recurrence(x, B, C, log_decay, state)
    got, got_state = scan_triton(kernel, x, B, C, log_decay, state)
    assert worst(got, want) < 1e-12 and worst(got_state, want_state) < 1e-12


@pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("mamba_ssm")),
    reason="needs a CUDA device and mamba-ssm; the pure torch scan is tested everywhere",
)
@pytest.mark.parametrize("t", [7, 128, 300])
def test_triton_kernel_is_the_recurrence(t):
    size = dict(b=2, h=4, p=64, n=64)
    x, B, C, log_decay, state = scan_inputs(t, torch.float64, **size)
    x, B, C = (v.bfloat16().double() for v in (x, B, C))
    want, want_state = recurrence(x, B, C, log_decay, state)
    mixer = LlambaMixer(256, 4, 64).cuda()
    memory = LayerState(ssm=state.float().cuda())
    got = mixer.scan(*(v.bfloat16().cuda() for v in (x, B, C)), log_decay.float().cuda(), memory)
    assert mixer.last_path == "kernel"
    assert worst(got.double().cpu(), want) < 2e-2 and worst(memory.ssm.double().cpu(), want_state) < 2e-2


def test_mixer_says_which_path_ran():
    model = build()
    for t, path in ((QUADRATIC_MAX, "quadratic"), (QUADRATIC_MAX + 1, "chunked")):
        model(tokens(1, t))
        assert {layer.mixer.last_path for layer in model.backbone.layers} == {path}


# --- the whole model against the oracle, from a checkpoint in the published layout


@pytest.mark.parametrize("size", SIZES)
def test_published_checkpoint_equals_the_oracle(tmp_path, size):
    model = load_llamba(write(tmp_path / size, size))
    assert model.dtype == torch.float32 and not model.training
    assert model.config.tie_word_embeddings == (size == "3B")
    assert (model.lm_head.weight is model.backbone.embedding.weight) == (size == "3B")
    wide = copy.deepcopy(model).double()
    stored = {name: value.double() for name, value in weights(size).items()}
    for t in (1, 7, 70, 150):
        ids = tokens(2, t)
        want = logits(ids, stored, size)
        with torch.no_grad():
            got, got_wide = model(ids).logits, wide(ids).logits
        assert got.dtype == torch.float32 and got_wide.dtype == torch.float64
        assert worst(got_wide, want) < 1e-10
        assert worst(got, want) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_published_checkpoint_loads_like_any_model(tmp_path, size):
    folder = write(tmp_path / size, size)
    names = {"<unk>": 0} | {chr(97 + i): i + 1 for i in range(26)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(names, "<unk>")), unk_token="<unk>").save_pretrained(
        folder
    )
    lm = load(folder)  # with the self-check: contributions, masks, padding, causality
    assert {s.kind for s in lm.sites} == {"llamba"} and lm.n_layers == SIZES[size]["n_layer"]
    ids = tokens(2, 40)
    stored = {name: value.double() for name, value in weights(size).items()}
    with torch.no_grad():
        assert worst(lm.model(ids).logits, logits(ids, stored, size)) < 1e-5
    matrices = matrix(lm, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "L1H0")
    assert matrices["L1H0"].shape == (2, 40, 40)  # checked against the model's own output before it is returned


def test_config_reads_and_renames_the_published_keys():
    config = LlambaConfig(**config_json("3B"))
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (24, 2, True)
    assert config.ssm_cfg["d_conv"] == 4 and config.ssm_cfg["conv_bias"] is True
    assert not hasattr(config, "max_position_embeddings")
    eight = LlambaConfig()
    assert (eight.d_model, eight.n_layer, eight.vocab_size, eight.d_inner) == (4096, 32, 128256, 4096)
    assert LlambaConfig(vocab_size=101).vocab_size == 104


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n_qk_heads": 2}, "n_qk_heads"),
        ({"activation": "silu"}, "silu"),
        ({"n_v_heads": 5, "n_qk_heads": 5}, "5 heads"),
    ],
)
def test_config_refuses_what_it_cannot_run(change, word):
    keys = config_json("8B")
    keys["ssm_cfg"] |= change
    with pytest.raises(ModelError, match=word):
        LlambaConfig(**keys)


def test_true_sizes_are_the_published_ones():
    with torch.device("meta"):
        small = LlambaForCausalLM(
            LlambaConfig(
                d_model=3072,
                n_layer=28,
                tie_embeddings=True,
                mlp_cfg={"intermediate_size": 8192, "bias": False},
            )
        )
        large = LlambaForCausalLM(LlambaConfig())
    assert round(sum(p.numel() for p in large.parameters()) / 1e9, 3) == 8.841
    assert round(sum(p.numel() for p in small.parameters()) / 1e9, 3) == 3.657
    mixer = large.backbone.layers[0].mixer
    assert mixer.in_proj.weight.shape == (12320, 4096) and mixer.conv1d.weight.shape == (8192, 1, 4)
    mixer = small.backbone.layers[0].mixer
    assert mixer.in_proj.weight.shape == (10272, 3072) and mixer.head_dim == 96


def test_each_misfit_is_named(tmp_path):
    state = weights("8B")
    gone = "backbone.layers.1.mixer.z_bias"
    state["backbone.lm_head.weight"] = state.pop("lm_head.weight")
    state["backbone.layers.0.mixer.dt_bias"] = torch.zeros(4)
    state["backbone.layers.2.mixer.D"] = torch.zeros(5)
    del state[gone]
    with pytest.raises(ModelError) as error:
        load_llamba(write(tmp_path, "8B", state))
    for words in (
        f"{gone} is missing",
        "lm_head.weight is missing",
        "backbone.lm_head.weight is unknown",
        "backbone.layers.0.mixer.dt_bias is unknown",
        "backbone.layers.2.mixer.D has shape [5] where [4] is needed",
    ):
        assert words in str(error.value)


def test_tied_config_with_a_stored_head_is_refused(tmp_path):
    state = weights("3B")
    state["lm_head.weight"] = state["backbone.embedding.weight"].clone()
    with pytest.raises(ModelError, match="lm_head.weight is stored although"):
        load_llamba(write(tmp_path, "3B", state))


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no config.json"):
        load_llamba(tmp_path)
    write(tmp_path, "8B", config=config_json("8B") | {"model_type": "llama"})
    assert not is_llamba(tmp_path)
    with pytest.raises(ModelError, match="does not describe a Llamba"):
        load_llamba(tmp_path)
    keys = config_json("8B")
    del keys["model_type"]
    write(tmp_path, "8B", config=keys)
    assert is_llamba(tmp_path)
    assert load_llamba(tmp_path / "model.safetensors").config.model_type == "llamba"
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        load_llamba(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        load_llamba(tmp_path)


def test_shards_are_read_and_a_lost_one_is_named(tmp_path):
    write(tmp_path, "8B")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights("8B"))
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights("8B")[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = tokens(1, 9)
    torch.testing.assert_close(load_llamba(tmp_path)(ids).logits, build()(ids).logits, rtol=0, atol=0)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors is named"):
        load_llamba(tmp_path)


@pytest.mark.parametrize("size", SIZES)
def test_save_and_auto_load_round_trip(tmp_path, size):
    model = build(size)
    model.save_pretrained(tmp_path)
    ids = tokens(2, 12)
    assert type(AutoConfig.from_pretrained(tmp_path)) is LlambaConfig
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path), load_llamba(tmp_path)):
        assert type(again) is LlambaForCausalLM
        assert again.config.ssm_cfg == model.config.ssm_cfg
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert load_llamba(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


# --- padding, caches, generation


@pytest.mark.parametrize("t", [2, 40, 140])
@pytest.mark.parametrize("side", ["left", "right", "gaps"])
def test_padding_changes_nothing(side, t):
    model, ids, pad = build(dtype=torch.float64), tokens(2, t), 11
    batch, mask = torch.full((2, t + pad), 7), torch.zeros(2, t + pad, dtype=torch.long)
    places = {
        "left": torch.arange(pad, pad + t),
        "right": torch.arange(t),
        "gaps": torch.randperm(t + pad, generator=torch.Generator().manual_seed(1))[:t].sort().values,
    }[side]
    batch[0, places], mask[0, places] = ids[0], 1  # the second row is full, so the rows differ in length
    batch[1], mask[1] = tokens(1, t + pad, seed=3)[0], 1
    with torch.no_grad():
        out = model(batch, attention_mask=mask, use_cache=True)
        alone = model(ids[:1], use_cache=True)
        assert worst(out.logits[0, places], alone.logits[0]) < 1e-12
        assert worst(out.logits[1], model(batch[1:]).logits[0]) < 1e-12
        # the states are those of the real tokens too, whatever the side of the padding
        for got, want in zip(out.cache.layers, alone.cache.layers, strict=True):
            assert worst(got.ssm[0], want.ssm[0]) < 1e-12 and worst(got.conv[0], want.conv[0]) < 1e-12


def test_left_padding_in_float32():
    model, ids = build(), tokens(1, 30)
    batch = torch.cat([torch.full((1, 9), 7), ids], 1)
    mask = torch.cat([torch.zeros(1, 9), torch.ones(1, 30)], 1)
    assert worst(model(batch, attention_mask=mask).logits[:, 9:], model(ids).logits) < 1e-5


@pytest.mark.parametrize("cuts", [(1,) * 9, (4, 1, 1, 3), (2, 7), (1, 140, 3), (130, 5, 131)])
def test_any_continuation_equals_the_full_forward(cuts):
    model, ids = build(dtype=torch.float64), tokens(2, sum(cuts))
    want = model(ids).logits
    cache, parts = LlambaCache(3), []
    for part in ids.split(cuts, 1):
        parts.append(model(part, cache=cache).logits)
    assert cache.get_seq_length() == sum(cuts) and cache.batch_size == 2
    assert worst(torch.cat(parts, 1), want) < 1e-12


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_padded_prefix_continues_exactly(name):
    model, ids, more = build(dtype=torch.float64), tokens(1, 8), tokens(1, 5, seed=5)
    want = model(torch.cat([ids, more], 1)).logits[:, -5:]
    for left in (True, False):
        zeros, ones = torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)
        padded = torch.cat([zeros, ids] if left else [ids, zeros], 1)
        mask = torch.cat([zeros, ones] if left else [ones, zeros], 1)
        out = model(padded, attention_mask=mask, use_cache=True)
        assert out.past_key_values is out.cache
        full = torch.cat([mask, torch.ones(1, 5, dtype=torch.long)], 1)
        got = model(more, attention_mask=full, **{name: copy.deepcopy(out.cache)}).logits
        assert worst(got, want) < 1e-12
        assert out.cache.get_seq_length() == 14  # the copy moved on, the original did not


def test_cache_branches_reorders_and_widens():
    model, ids, more = build(dtype=torch.float64), tokens(3, 10), tokens(3, 4, seed=9)
    cache = model(ids, use_cache=True).cache
    branch = copy.deepcopy(cache)
    model(tokens(3, 6, seed=4), cache=branch)
    order = torch.tensor([2, 0, 0])
    moved, wide = copy.deepcopy(cache), copy.deepcopy(cache)
    moved.reorder_cache(order)
    wide.batch_repeat_interleave(2)
    assert worst(model(more, cache=moved).logits, model(torch.cat([ids[order], more], 1)).logits[:, 10:]) < 1e-12
    twice = more.repeat_interleave(2, 0)
    both = torch.cat([ids.repeat_interleave(2, 0), twice], 1)
    assert worst(model(twice, cache=wide).logits, model(both).logits[:, 10:]) < 1e-12
    assert worst(model(more, cache=cache).logits, model(torch.cat([ids, more], 1)).logits[:, 10:]) < 1e-12
    picked = model(ids, use_cache=True).cache
    picked.batch_select_indices(torch.tensor([1]))
    assert picked.batch_size == 1
    assert worst(model(more[1:2], cache=picked).logits, model(torch.cat([ids, more], 1)).logits[1:2, 10:]) < 1e-12
    picked.reset()
    assert picked.get_seq_length() == 0 and worst(model(ids, cache=picked).logits, model(ids).logits) < 1e-12


def test_generate_with_cache_equals_without():
    model, lengths = build(dtype=torch.float64), (3, 12, 7)
    prompts = [tokens(1, n, seed=n) for n in lengths]
    width, steps = max(lengths), 12
    batch = torch.cat([F.pad(p, (width - p.shape[1], 0), value=0) for p in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (width - p.shape[1], 0)) for p in prompts])
    kw = dict(max_new_tokens=steps, do_sample=False, pad_token_id=0)
    cached = model.generate(batch, attention_mask=mask, **kw)
    calls = []
    hook = model.backbone.register_forward_pre_hook(lambda m, args: calls.append(args[0].shape[1]))
    assert torch.equal(model.generate(batch, attention_mask=mask, **kw), cached)
    hook.remove()
    assert calls == [width] + [1] * (steps - 1)  # the cache was really used
    assert torch.equal(model.generate(batch, attention_mask=mask, use_cache=False, **kw), cached)
    for row, prompt in enumerate(prompts):  # each prompt by itself, and a greedy loop without generate
        assert torch.equal(model.generate(prompt, **kw)[0, prompt.shape[1] :], cached[row, width:])
        ids = prompt
        for _ in range(steps):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(ids[0, prompt.shape[1] :], cached[row, width:])
    beams = [model.generate(prompts[1], num_beams=3, use_cache=use, **kw) for use in (True, False)]
    assert torch.equal(*beams)


def test_generate_continues_from_a_given_cache():
    from ga_utils.llamba import CACHE_NAME

    model, ids = build(dtype=torch.float64), tokens(1, 10)
    kw = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    prefix = model(ids[:, :7], use_cache=True).cache
    got = model.generate(ids, **{CACHE_NAME: copy.deepcopy(prefix)}, **kw)
    assert torch.equal(got, model.generate(ids, **kw))
    with pytest.raises(ModelError, match="cache_implementation"):
        model.generate(ids, cache_implementation="static", **kw)


def test_inputs_that_do_not_fit_are_refused():
    model, ids = build(), tokens(2, 5)
    cache = model(ids, use_cache=True).cache
    for words, kw in {
        "not from a DynamicCache": dict(input_ids=ids, cache=DynamicCache()),
        "more than one name": dict(input_ids=ids, cache=cache, past_key_values=cache),
        "batch of 2": dict(input_ids=ids[:1], cache=cache),
        "2 layers": dict(input_ids=ids, cache=LlambaCache(2)),
        "shape \\[2, 4\\]": dict(input_ids=ids, attention_mask=torch.ones(2, 4)),
        "exactly one of": dict(),
        "empty input": dict(input_ids=ids[:, :0]),
        "no attention probabilities": dict(input_ids=ids, output_attentions=True),
    }.items():
        with pytest.raises(ModelError, match=words):
            model(**kw)
    with pytest.raises(TypeError):
        model(ids, cache_parms=cache)  # a misspelt name must not run without its cache


# --- what other parts of the package rely on


def test_project_and_scan_are_what_the_forward_used():
    model, ids, seen = build(dtype=torch.float64), tokens(2, 9), {}
    mixer = model.backbone.layers[1].mixer
    mixer.register_forward_hook(lambda m, a, out: seen.update(inputs=a, out=out))
    mixer.out_proj.register_forward_pre_hook(lambda m, a: seen.update(heads=a[0]))
    mask = torch.ones(2, 9)
    mask[0, :3] = 0
    model(ids, attention_mask=mask)
    x, B, C, log_decay, z = mixer.project(*seen["inputs"])
    assert x.shape == (2, 9, 4, 8) and B.shape == C.shape == (2, 9, 4, 8) and z.shape == (2, 9, 32)
    assert log_decay.shape == (2, 9, 4) and (log_decay <= 0).all()
    assert not x[0, :3].any() and not B[0, :3].any() and not log_decay[0, :3].any()
    y, _ = recurrence(x, B, C, log_decay)
    assert worst(mixer.scan(x, B, C, log_decay), y) < 1e-12
    matrix = torch.einsum("bthn,bshn->bhts", C, B) * segment_sums(log_decay.transpose(1, 2)).exp()
    assert worst(torch.einsum("bhts,bshp->bthp", matrix, x), y) < 1e-12
    gated = (y + mixer.D[:, None] * x).flatten(2) * F.silu(z + mixer.z_bias)
    assert worst(seen["heads"], gated) < 1e-12
    assert padding_from_mask(torch.ones(2, 3)) is None and padding_from_mask(None) is None


def test_heads_are_contiguous_slices_that_sum_to_the_output():
    model, ids, seen = build("3B", torch.float64), tokens(2, 9), {}
    layer, p = model.backbone.layers[0], 6
    layer.mixer.register_forward_hook(lambda m, a, out: seen.update(out=out))
    layer.mixer.out_proj.register_forward_pre_hook(lambda m, a: seen.update(heads=a[0]))
    model(ids)
    w = weights("3B", dtype=torch.float64)
    u = norm(w["backbone.embedding.weight"][ids], w["backbone.layers.0.input_layernorm.weight"])
    assert worst(seen["heads"], mixer_heads(u, w, "backbone.layers.0.mixer.", 4, 8)) < 1e-12
    parts = [
        F.linear(seen["heads"][..., i * p : i * p + p], layer.mixer.out_proj.weight[:, i * p : i * p + p])
        for i in range(4)
    ]
    assert worst(sum(parts), seen["out"]) < 1e-12
    whole, before = seen["out"], seen["heads"]
    with torch.no_grad():
        layer.mixer.D[2] += 1  # a parameter of head 2 moves head 2's slice and no other
    model(ids)
    moved = (seen["heads"] != before).any(0).any(0).nonzero().flatten().tolist()
    assert moved == list(range(12, 18)) and worst(seen["out"], whole) > 1e-3


def test_out_proj_hook_fires_at_every_decoding_step():
    model, ids, widths = build(), tokens(1, 6), []
    model.backbone.layers[2].mixer.out_proj.register_forward_pre_hook(lambda m, a: widths.append(a[0].shape[1]))
    model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train()(ids)
    assert widths == [6, 1, 1, 1, 6]


def test_half_precision_keeps_decays_and_states_wide():
    model, ids = build(), tokens(2, 140)
    half = copy.deepcopy(model).bfloat16()
    out = half(ids, use_cache=True)
    assert out.logits.dtype == torch.float32 and torch.isfinite(out.logits).all()
    layer = out.cache.layers[0]
    assert layer.ssm.dtype == torch.float32 and layer.conv.dtype == torch.bfloat16
    x, _, _, log_decay, _ = half.backbone.layers[0].mixer.project(half.backbone.embedding(ids))
    assert x.dtype == torch.bfloat16 and log_decay.dtype == torch.float32
    a = half.backbone.layers[0].mixer.in_proj(half.backbone.embedding(ids))[..., -4:]
    torch.testing.assert_close(log_decay, -F.softplus(a.float()), rtol=0, atol=0)
    want = model(ids).logits
    assert ((out.logits - want).pow(2).mean() / want.pow(2).mean()).sqrt() < 0.1


def test_gradients_reach_every_weight():
    for t in (9, 140):
        model = build().train()
        model(tokens(2, t), attention_mask=torch.ones(2, t)).logits.pow(2).mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any(), name


def test_gradients_match_the_oracle():
    ids, w = tokens(1, 12), {k: v.requires_grad_() for k, v in weights("8B", dtype=torch.float64).items()}
    logits(ids, w, "8B").pow(2).mean().backward()
    model = build(dtype=torch.float64)
    model(ids).logits.pow(2).mean().backward()
    for name, parameter in model.named_parameters():
        assert worst(parameter.grad, w[name].grad) < 1e-10, name


def test_logits_to_keep_hidden_states_and_embeddings():
    model, ids = build(), tokens(2, 9)
    full = model(ids, output_hidden_states=True)
    for keep, at in ((1, slice(-1, None)), (4, slice(-4, None)), (torch.tensor([0, 5]), [0, 5])):
        torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, full.logits[:, at])
    assert len(full.hidden_states) == 4 and full.cache is None
    torch.testing.assert_close(model.lm_head(full.hidden_states[-1]), full.logits)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), return_dict=False)
    torch.testing.assert_close(embedded[0], full.logits, rtol=0, atol=0)


def test_what_an_evaluation_harness_asks_for():
    model = build("3B")
    model.tie_weights()
    assert model.lm_head.weight is model.backbone.embedding.weight
    assert model.device.type == "cpu" and model.config.vocab_size == 104
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(tokens(2, 5)).logits.shape == (2, 5, 104)
