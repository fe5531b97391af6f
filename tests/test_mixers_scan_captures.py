"""Are the scan families exact on what real forward passes used, and is the model left as it was?"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys

import pytest
import torch
import zoo
from scan_oracles import F64, positions

from ga_utils.errors import GAError
from ga_utils.mixers import FAMILIES
from ga_utils.mixers.base import namespace
from ga_utils.sites import find_sites

MODELS = {
    "mamba": "mamba1", "falcon_mamba": "mamba1", "jamba": "mamba1", "zamba": "mamba1",
    "qwen3_next": "deltanet", "qwen3_5": "deltanet", "qwen3_5_moe": "deltanet", "lara_mini": "deltanet",
    "olmo_hybrid": "deltanet", "kimi_linear": "kda", "bailing_hybrid": "kda", "minimax": "lightning",
}  # fmt: skip


@contextlib.contextmanager
def watched(model, kind):
    """Captures of all sites of `kind`, with the projections' inputs, filled by the next forward pass."""
    caps = []
    with contextlib.ExitStack() as stack:
        for site in find_sites(model):
            if site.kind == kind:
                cap = stack.enter_context(FAMILIES[kind].watch(site))

                def before(module, args, cap=cap):
                    cap.projected = args[0].reshape(*args[0].shape[:2], cap.site.n_heads, -1).transpose(1, 2)

                stack.callback(site.proj.register_forward_pre_hook(before).remove)
                caps.append(cap)
        yield caps


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 320, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(a, b, tol):
    """Largest error relative to the largest entry of each head."""
    return ((a - b).abs().amax((-1, -2)) <= tol * b.abs().amax((-1, -2))).all()


def check(cap, tol=1e-5):
    """M x value == output and after x output == projected, at real positions, for chosen heads."""
    family, n = FAMILIES[cap.site.kind], cap.site.n_heads
    heads = sorted({0, 1, n // 2, n - 1})
    real = cap.real[:, None, :, None] if cap.real is not None else torch.ones(1, 1, 1, 1, dtype=torch.bool)
    m = family.matrix(cap, heads, True)
    assert m.dtype == torch.float32 or cap.value.dtype == F64
    y = m @ cap.value[:, heads].to(m.dtype)
    assert close(y * real, cap.output[:, heads] * real, tol)
    after = family.after(cap, heads)
    assert close(after * cap.output[:, heads] * real, cap.projected[:, heads] * real, tol)
    return m


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    net = zoo.build(request.param)[0]
    net.name, net.kind = request.param, MODELS[request.param]
    return net


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 16, 65, 150])
def test_matrix_times_value_is_the_output(model, length):
    x = ids(2, length)
    plain = model(x, use_cache=False).logits
    with watched(model, model.kind) as caps:
        seen = model(x, use_cache=False).logits
    assert torch.equal(plain, seen)
    assert len(caps) >= 2
    for cap in caps:
        m = check(cap)
        assert torch.equal(m, m.tril())
        where = positions(2, length)
        rows = FAMILIES[model.kind].rows(cap, [1, 0], where, True)
        want = FAMILIES[model.kind].matrix(cap, [1, 0], True)
        assert close(rows, want.gather(2, where[:, None, :, None].expand(-1, 2, -1, length)), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_give_the_matrices_of_each_text_alone(model, side):
    lengths, longest = (9, 21, 14), 21
    texts = [ids(1, n, seed=n) for n in lengths]
    batch, mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.long)
    spans = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in lengths]
    for i, (text, span) in enumerate(zip(texts, spans, strict=True)):
        batch[i, span], mask[i, span] = text[0], 1
    with watched(model, model.kind) as caps:
        model(batch, attention_mask=mask, use_cache=False)
    for cap in caps:
        cap.real = mask.bool()
    for i, (text, span) in enumerate(zip(texts, spans, strict=True)):
        with watched(model, model.kind) as alone:
            model(text, use_cache=False)
        for cap, single in zip(caps, alone, strict=True):
            m = check(cap)[i]
            want = check(single)[0]
            # later layers see earlier ones through attention and norms: rounding grows a little
            assert close(m[:, span, span], want, 1e-4)
            outside = m.clone()
            outside[:, span, span] = 0
            assert torch.all(outside == 0)


@torch.no_grad()
def test_everything_is_restored_also_after_an_exception(model):
    site = next(s for s in find_sites(model) if s.kind == model.kind)
    scope = vars(sys.modules[type(site.mixer).__module__])
    before = {k: v for k, v in scope.items() if callable(v)}
    x = ids(1, 6)
    plain = model(x, use_cache=False).logits

    def hooks():
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    counts = hooks()
    with pytest.raises(RuntimeError, match="stop"), watched(model, model.kind):

        def stop(module, args, output):
            raise RuntimeError("stop")

        handle = site.proj.register_forward_hook(stop)
        try:
            model(x, use_cache=False)
        finally:
            handle.remove()
    assert all(scope[k] is v for k, v in before.items())
    assert hooks() == counts
    assert torch.equal(model(x, use_cache=False).logits, plain)


@torch.no_grad()
def test_half_precision_models_give_float32_matrices(model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    with watched(half, model.kind) as caps:
        half(ids(1, 40), use_cache=False)
    for cap in caps:
        check(cap, tol=3e-2)


@torch.no_grad()
def test_a_forward_that_continues_from_a_state_is_refused_or_exact(model):
    cache = model(ids(1, 8), use_cache=True)
    cache = cache.get("cache", cache.get("past_key_values"))
    new = dict(input_ids=ids(1, 3, seed=2), cache=cache)
    if model.name not in ("mamba", "falcon_mamba"):
        new["position_ids"] = torch.arange(8, 11)[None]
    if model.kind == "mamba1":  # these scans always start from zero, so M over the new tokens is all there is
        with watched(model, model.kind) as caps:
            model(**new)
        assert all(check(cap).shape[-1] == 3 for cap in caps)
    else:
        with pytest.raises(GAError, match="cached state"), watched(model, model.kind):
            model(**new)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "zamba"])
def test_a_compiled_scan_with_other_argument_names_is_read_too(name, monkeypatch):
    """transformers drops keywords that a kernel does not know; mamba-ssm names the first five otherwise."""
    net = zoo.build(name)[0]
    scope = namespace(next(s for s in find_sites(net) if s.kind == "mamba1"))
    torch_scan = inspect.unwrap(scope["mamba_selective_scan"])

    def kernel(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        return torch_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)

    @functools.wraps(torch_scan)
    def as_transformers_calls_it(*args, **kwargs):
        known = inspect.signature(kernel).parameters
        return kernel(*args, **{k: v for k, v in kwargs.items() if k in known})

    monkeypatch.setitem(scope, "mamba_selective_scan", as_transformers_calls_it)
    with watched(net, "mamba1") as caps:
        net(ids(2, 11), use_cache=False)
    for cap in caps:
        check(cap)


@torch.no_grad()
def test_a_batch_that_failed_half_way_leaves_nothing_behind():
    """Zamba runs two scans a layer; an exception between them must not shift the groups of the next pass."""
    net = zoo.build("zamba")[0]
    site = next(s for s in find_sites(net) if s.kind == "mamba1")
    scope, runs = namespace(site), []
    scan = scope["mamba_selective_scan"]

    def fails_once(*args, **kwargs):
        runs.append(1)
        if len(runs) == 3:  # the model's second call; the watcher's own come between
            raise RuntimeError("stop")
        return scan(*args, **kwargs)

    functools.update_wrapper(fails_once, scan)
    scope["mamba_selective_scan"] = fails_once
    try:
        with watched(net, "mamba1") as caps:
            with pytest.raises(RuntimeError, match="stop"):
                net(ids(1, 5), use_cache=False)
            net(ids(1, 12, seed=3), use_cache=False)
        assert caps[0].length == 12
        check(caps[0])
    finally:
        scope["mamba_selective_scan"] = scan


@torch.no_grad()
def test_olmo_hybrid_was_seen_with_negative_eigenvalues():
    """beta above 1 reflects the state instead of shrinking it; the checks above must have met that."""
    net = zoo.build("olmo_hybrid")[0]
    with watched(net, "deltanet") as caps:
        net(ids(1, 50), use_cache=False)
    assert all(cap.tensors["beta"].max() > 1.2 for cap in caps)
    for cap in caps:
        check(cap)
