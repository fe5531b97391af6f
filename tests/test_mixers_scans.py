"""Are the matrices of the scan families exact? Loop oracles of a few lines, and what real forward passes recorded."""

from __future__ import annotations

import contextlib
import copy
import sys
from types import SimpleNamespace

import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode

from ga_utils.errors import GAError
from ga_utils.mixers import deltanet, kda, lightning, mamba1  # noqa: F401  (register their families)
from ga_utils.mixers.base import FAMILIES, Captured
from ga_utils.sites import find_sites

LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 300)
F64 = torch.float64
SCANS = ("mamba1", "deltanet", "kda", "lightning")
MODELS = {
    "mamba": "mamba1", "falcon_mamba": "mamba1", "jamba": "mamba1", "zamba": "mamba1", "qwen3_next": "deltanet",
    "qwen3_5": "deltanet", "qwen3_5_moe": "deltanet", "lara_mini": "deltanet", "olmo_hybrid": "deltanet",
    "kimi_linear": "kda", "bailing_hybrid": "kda", "minimax": "lightning",
}  # fmt: skip


# ---- loop oracles: one impulse at a time through the recurrence as it is written in the papers ----


def impulse_matrix(step, length: int) -> torch.Tensor:
    """M of `step(state, t, x_t) -> (state, y_t)`, by feeding every unit impulse at once: [t, s]."""
    rows, state = [], None
    for t in range(length):
        x = torch.zeros(length, dtype=F64)
        x[t] = 1
        state, y = step(state, t, x)
        rows.append(y)
    return torch.stack(rows)


def mamba1_oracle(delta, a, b, c, d):
    """delta [t], a [n], b, c [n, t], d a number."""

    def step(h, t, x):
        h = torch.zeros(len(a), len(x), dtype=F64) if h is None else h
        h = torch.exp(delta[t] * a)[:, None] * h + delta[t] * b[:, t, None] * x
        return h, c[:, t] @ h + d * x

    return impulse_matrix(step, len(delta))


def delta_oracle(q, k, g, beta):
    """q, k [t, k]; g [t, 1] or [t, k]; beta [t]: decay, erase, write, read."""

    def step(state, t, x):
        state = torch.zeros(q.shape[1], len(x), dtype=F64) if state is None else state
        state = torch.exp(g[t])[:, None] * state
        state = state - beta[t] * torch.outer(k[t], k[t] @ state) + beta[t] * torch.outer(k[t], x)
        return state, q[t] @ state

    return impulse_matrix(step, len(q))


def lightning_oracle(q, k, slope):
    def step(state, t, x):
        state = torch.zeros(q.shape[1], len(x), dtype=F64) if state is None else state
        state = torch.exp(-slope) * state + torch.outer(k[t], x)
        return state, q[t] @ state

    return impulse_matrix(step, len(q))


# ---- captures made by hand, in float64 ----


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def positions(batch: int, length: int, count: int = 3) -> torch.Tensor:
    return torch.linspace(0, length - 1, count).long().flip(0).expand(batch, -1)


def made_by_hand(kind: str, length: int, strength: float = 1.0):
    """(capture, oracle of head h of example b) with decays multiplied by `strength`."""
    if kind == "mamba1":
        groups, size, n = 2, 2, 5
        delta = torch.nn.functional.softplus(draw(2, 4, length) - 1)
        a = -strength * draw(4, n, seed=1).abs()
        b, c, d = draw(2, groups, n, length, seed=2), draw(2, groups, n, length, seed=3), draw(4, seed=4)
        site = SimpleNamespace(n_heads=4, head_dim=1, kind=kind)
        tensors = dict(delta=delta, A=a, B=b, C=c, D=d, gate=None, group_size=size)
        oracle = lambda e, h: mamba1_oracle(delta[e, h], a[h], b[e, h // size], c[e, h // size], d[h])  # noqa: E731
    elif kind == "lightning":
        q, k = draw(2, 4, length, 6), draw(2, 4, length, 6, seed=1)
        slope = strength * torch.tensor([0.03, 0.2, 0.5, 1.1], dtype=F64)[:, None, None]
        u = torch.arange(16, dtype=F64) + 1
        gap = u[:, None] - u
        mixer = SimpleNamespace(
            block_size=16, slope_rate=slope, query_decay=torch.exp(-slope * u[:, None]),
            key_decay=torch.exp(-slope * (16 - u[:, None])),
            diagonal_decay=torch.exp(torch.where(gap >= 0, -slope * gap, -torch.inf))[None],
        )  # fmt: skip
        site, tensors = SimpleNamespace(n_heads=4, head_dim=6, kind=kind, mixer=mixer), dict(q=q, k=k)
        oracle = lambda e, h: lightning_oracle(q[e, h], k[e, h], slope[h, 0, 0])  # noqa: E731
    else:
        share, width = (2, 8) if kind == "deltanet" else (1, 8)
        q, k = draw(2, 4 // share, length, width), draw(2, 4 // share, length, width, seed=1)
        shape = (2, 4, length) if kind == "deltanet" else (2, 4, length, width)
        g, beta = -strength * draw(*shape, seed=2).abs(), 2 * draw(2, 4, length, seed=3).sigmoid()
        site = SimpleNamespace(n_heads=4, head_dim=3, kind=kind)
        tensors = dict(query=q, key=k, g=g, beta=beta, l2norm=True)
        unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
        unit[0] = unit[0] / width**0.5
        gs = g[..., None] if kind == "deltanet" else g
        oracle = lambda e, h: delta_oracle(  # noqa: E731
            unit[0][e, h // share], unit[1][e, h // share], gs[e, h], beta[e, h]
        )
    p = site.head_dim
    cap = Captured(site, tensors, None, draw(2, 4, length, p, seed=7), torch.zeros(2, 4, length, p, dtype=F64))
    return cap, oracle


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
    names = {"mamba1": ("delta", "B", "C", "A"), "lightning": ("q", "k")}.get(kind, ("query", "key", "g", "beta"))
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
    """Falcon-Mamba's width: what grows with channels is the result; temporaries stay at the size of a block."""
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


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x) and 0 not in x.stride():  # an expanded view takes no memory
                self.numel = max(self.numel, x.numel())
        return out


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
    assert close(y * real, cap.output[:, heads] * real, tol), (y * real - cap.output[:, heads] * real).abs().max()
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
