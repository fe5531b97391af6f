"""Are the matrices of the scan families exact? Against float64 loops, and on what real forward passes used."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
import zoo
from scan_oracles import F64, LargestTensor, made_by_hand, positions

from ga_utils.errors import GAError
from ga_utils.mixers import FAMILIES, Captured
from ga_utils.mixers.base import namespace
from ga_utils.sites import find_sites

LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 300)
SCANS = ("mamba1", "deltanet", "kda", "lightning")
MODELS = {
    "mamba": "mamba1", "falcon_mamba": "mamba1", "jamba": "mamba1", "zamba": "mamba1",
    "qwen3_next": "deltanet", "qwen3_5": "deltanet", "qwen3_5_moe": "deltanet", "lara_mini": "deltanet",
    "olmo_hybrid": "deltanet", "kimi_linear": "kda", "bailing_hybrid": "kda", "minimax": "lightning",
}  # fmt: skip


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", SCANS)
def test_matrix_is_the_recurrence_of_the_oracle(kind, length):
    cap, oracle = made_by_hand(kind, length)
    m = FAMILIES[kind].matrix(cap, range(4), True)
    assert m.dtype == F64 and m.shape == (2, 4, length, length)
    for e, h in ((0, 0), (1, 3), (0, 2)):
        want = oracle(e, h)
        assert (m[e, h] - want).abs().max() <= 1e-12 * want.abs().max()
    assert torch.equal(m, m.tril())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", SCANS)
def test_rows_are_the_matrix_rows(kind, length):
    cap, oracle = made_by_hand(kind, length)
    where = positions(2, length)
    where = torch.stack([where[0], (where[1] + 1) % length])  # each example its own rows
    rows = FAMILIES[kind].rows(cap, [3, 1], where, False)
    full = FAMILIES[kind].matrix(cap, [3, 1], False)
    want = full.gather(2, where[:, None, :, None].expand(-1, 2, -1, length))
    assert rows.shape == (2, 2, 3, length)
    assert (rows - want).abs().max() <= 1e-12 * want.abs().max()
    beyond = torch.arange(length) > where[:, None, :, None]
    assert torch.all(rows[beyond.expand_as(rows)] == 0)


@pytest.mark.parametrize("kind", SCANS)
def test_pads_are_exactly_zero(kind):
    cap, _ = made_by_hand(kind, 20)
    cap.real = torch.ones(2, 20, dtype=torch.bool)
    cap.real[0, :5] = False
    cap.real[1, 17:] = False
    m = FAMILIES[kind].matrix(cap, range(4), True)
    assert torch.all(m[0, :, :5] == 0) and torch.all(m[0, :, :, :5] == 0)
    assert torch.all(m[1, :, 17:] == 0) and torch.all(m[1, :, :, 17:] == 0)
    assert torch.all(m[0, :, 5:].abs().sum(-1) > 0)
    rows = FAMILIES[kind].rows(cap, range(4), torch.tensor([[4, 19], [16, 17]]), True)
    assert torch.all(rows[0, :, 0] == 0) and torch.all(rows[1, :, 1] == 0)
    assert torch.all(rows[0, :, 1, :5] == 0) and torch.all(rows[1, :, 0, :17].abs().sum(-1) > 0)


def test_skip_term_is_left_out_on_request():
    cap, _ = made_by_hand("mamba1", 9)
    family = FAMILIES["mamba1"]
    skip = family.matrix(cap, [0, 2], True) - family.matrix(cap, [0, 2], False)
    want = cap.tensors["D"][[0, 2], None, None] * torch.eye(9, dtype=F64)
    assert torch.allclose(skip, want.expand(2, -1, -1, -1), atol=1e-13)


def test_the_erase_term_matters():
    cap, _ = made_by_hand("deltanet", 40, strength=0.1)
    family = FAMILIES["deltanet"]
    q, k, g, beta = family.ingredients(cap, [0])
    naive = (family.scores(q, k, g)[0] * beta[..., None, :]).tril()
    exact = family.matrix(cap, [0], True)
    assert (naive - exact).norm() / exact.norm() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", SCANS)
def test_strong_decays_stay_finite_and_exact(kind, dtype):
    """Log decays down to about -200 a token next to tokens that hardly decay."""
    cap, oracle = made_by_hand(kind, 70, strength=60.0)
    wants = [oracle(0, h) for h in range(4)]
    for name, x in cap.tensors.items():
        if torch.is_tensor(x):
            cap.tensors[name] = x.to(dtype)
    cap.value = cap.value.to(dtype)
    if kind == "lightning":
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
            setattr(cap.site.mixer, name, getattr(cap.site.mixer, name).to(dtype))
    m = FAMILIES[kind].matrix(cap, range(4), True)
    rows = FAMILIES[kind].rows(cap, range(4), positions(2, 70), True)
    assert m.isfinite().all() and rows.isfinite().all()
    tol = 1e-12 if dtype == F64 else 1e-5
    for h, want in enumerate(wants):
        assert (m[0, h] - want).abs().max() <= tol * want.abs().max()
        assert (rows[0, h] - want[positions(2, 70)[0]]).abs().max() <= tol * want.abs().max()


@pytest.mark.parametrize("kind", SCANS)
def test_long_rows_match_and_build_no_square(kind):
    """T = 2000: the row path in fp32 against float64 closed forms, and no tensor of the square's size."""
    length = 2000
    cap, oracle = made_by_hand(kind, length, strength=0.02)
    where = torch.tensor([[length - 1], [700]])
    exact = FAMILIES[kind].rows(cap, range(4), where, True)
    for name, x in cap.tensors.items():
        if torch.is_tensor(x):
            cap.tensors[name] = x.float()
    cap.value = cap.value.float()
    with LargestTensor() as seen:
        rows = FAMILIES[kind].rows(cap, range(4), where, True)
    assert rows.isfinite().all()
    assert (rows - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert seen.numel <= 2 * 4 * length * 8 < length**2 / 10  # b x h x t x width of the inputs
    if kind in ("deltanet", "kda"):  # two different algorithms
        square = FAMILIES[kind].matrix(cap, [2], True)
        assert (rows[0, 2] - square[0, 0, -1]).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("kind", SCANS)
def test_gradients_are_finite_and_right(kind):
    cap, _ = made_by_hand(kind, 9)
    family = FAMILIES[kind]
    names = {"mamba1": ("delta", "B", "C", "A"), "lightning": ("q", "k")}
    names = names.get(kind, ("query", "key", "g", "beta"))
    inputs = [cap.tensors[n].clone().requires_grad_() for n in names]

    def both(*xs):
        cap.tensors.update(zip(names, xs, strict=True))
        return family.matrix(cap, [1], True), family.rows(cap, [1], positions(2, 9, 2), True)

    assert torch.autograd.gradcheck(both, inputs, fast_mode=True)
    strong, _ = made_by_hand(kind, 70, strength=60.0)
    inputs = [strong.tensors[n].float().requires_grad_() for n in names]
    strong.tensors.update(zip(names, inputs, strict=True))
    m = family.matrix(strong, range(4), True)
    grads = torch.autograd.grad(m.square().sum(), inputs)
    assert all(x.isfinite().all() for x in grads) and all(x.abs().sum() > 0 for x in grads)


def test_rows_of_thousands_of_channels_stay_small():
    """Falcon-Mamba's width: only the result grows with the channels."""
    channels, n, length = 8192, 16, 64
    site = SimpleNamespace(n_heads=channels, head_dim=1, kind="mamba1")
    tensors = dict(
        delta=torch.rand(1, channels, length), A=-torch.rand(channels, n), B=torch.randn(1, 1, n, length),
        C=torch.randn(1, 1, n, length), D=torch.randn(channels), gate=None, group_size=channels,
    )  # fmt: skip
    value = torch.randn(1, channels, length, 1)
    cap = Captured(site, tensors, None, value, value)
    with LargestTensor() as seen:
        rows = FAMILIES["mamba1"].rows(cap, range(channels), torch.tensor([[length - 1, 10]]), True)
    assert rows.shape == (1, channels, 2, length)
    assert seen.numel <= rows.numel()  # nothing like channels x states x positions
    few = FAMILIES["mamba1"].rows(cap, [17, 8000], torch.tensor([[length - 1, 10]]), True)
    assert torch.equal(few, rows[:, [17, 8000]])


# ---- real forward passes ----


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
    """transformers drops keywords that a kernel does not know; mamba-ssm has other names for the first five."""
    net = zoo.build(name)[0]
    scope = namespace(next(s for s in find_sites(net) if s.kind == "mamba1"))
    torch_scan = inspect.unwrap(scope["mamba_selective_scan"])

    def kernel(
        u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
    ):
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
