"""Are the matrices of every mixer what the model computed? (contract 3 and 4, every architecture and kind)"""

import math

import pytest
import torch
import zoo

from ga_utils import mixers
from ga_utils.language_model import wrap
from ga_utils.mixers import mamba2, reading
from ga_utils.mixers.base import FAMILIES, wide

CHUNK = 16  # of every chunked scan in the zoo
LENGTHS = (1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 300)
KINDS = {
    "attention": "llama", "mamba1": "mamba", "mamba2": "mamba2", "llamba": "llamba", "deltanet": "qwen3_next",
    "kda": "kimi_linear", "lightning": "minimax", "shortconv": "lfm2",
}  # fmt: skip


def random_ids(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 260, (batch, length), generator=torch.Generator().manual_seed(seed + length))


def inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def all_heads(site) -> list[int]:
    return list(range(site.n_heads))


def some_heads(lm, per_site: int = 3) -> list:
    """Heads of every site: the first, the last and one between."""
    return [s.head(i) for s in lm.sites for i in {0, s.n_heads // 2, s.n_heads - 1}]


def site_of(kind: str):
    lm = zoo.lm(KINDS[kind])
    return lm, next(s for s in lm.sites if s.kind == kind)


def test_the_zoo_covers_every_family():
    kinds = {s.kind for name in zoo.NAMES for s in zoo.lm(name).sites}
    assert kinds == set(FAMILIES) == set(KINDS)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", zoo.NAMES)
@torch.no_grad()
def test_matrix_times_value_is_the_output_and_rows_agree(name, length):
    lm = zoo.lm(name)
    caps = mixers.capture(lm, inputs(random_ids(length, batch=2)))
    assert len(caps) == len(lm.sites)
    positions = torch.tensor([[0, length // 2, length - 1], [length - 1, length // 3, 0]])
    for site, cap in caps.items():
        # of 128 channels, 16 are enough for the longest text
        family, heads = (
            FAMILIES[site.kind],
            all_heads(site)[:: 8 if site.kind == "mamba1" and length > 100 else 1],
        )
        m = family.matrix(cap, heads, True)
        assert m.shape == (2, len(heads), length, length) and m.dtype == torch.float32
        assert cap.value.shape == cap.output.shape == (2, site.n_heads, length, site.head_dim)
        value, output = wide(cap.value)[:, heads], wide(cap.output)[:, heads]
        assert torch.equal(m.triu(1), torch.zeros_like(m))
        assert error(m @ value, output) <= 1e-5, site.path
        rows = family.rows(cap, heads, positions, True)
        for b in range(2):
            at = positions[b]
            assert error(rows[b], m[b][:, at]) <= 1e-5, site.path
            assert error(rows[b] @ value[b], output[b][:, at]) <= 1e-5, site.path
        # what follows the output is a factor on each entry
        after = family.after(cap, heads)
        assert error(after * output, wide(cap.projected)[:, heads]) <= 1e-6, site.path
        if family.has_d:
            bare = family.matrix(cap, heads, False)
            skip = (m - bare).diagonal(dim1=-2, dim2=-1)
            assert torch.equal((m - bare).tril(-1), torch.zeros_like(m))
            assert torch.allclose(skip, skip[:, :, :1].expand_as(skip), atol=1e-4) and skip.abs().max() > 0.1


@pytest.mark.parametrize("name", zoo.NAMES)
def test_looking_changes_no_logit_and_leaves_no_trace(name):
    lm = zoo.lm(name)
    batch = inputs(random_ids(21, batch=2))
    seen = []
    with torch.no_grad():
        before = lm.model(**batch).logits
        with reading.watching(lm, lm.sites, batch["attention_mask"].bool(), lambda cap: seen.append(cap.site)):
            during = lm.model(**batch).logits
        after = lm.model(**batch).logits
    assert set(seen) == set(lm.sites)
    assert torch.equal(before, during) and torch.equal(before, after)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_padding_changes_no_row(name, side):
    lm = zoo.lm(name)
    texts = [random_ids(n, seed=n)[0] for n in (23, 9)]
    width = 29
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for i, text in enumerate(texts):
        part = slice(width - len(text), width) if side == "left" else slice(0, len(text))
        ids[i, part], mask[i, part] = text, 1
    heads = some_heads(lm)
    batch = {"input_ids": ids, "attention_mask": mask}
    padded = mixers.matrix(lm, batch, heads)
    rows = mixers.rows(lm, batch, heads, [[0, 4, -1], [-1, 8, -9]])
    pads = ~mask.bool()
    for i, text in enumerate(texts):
        alone = mixers.matrix(lm, inputs(text[None]), heads)
        at = [0, 4, len(text) - 1] if i == 0 else [8, 8, 0]
        for head in heads:
            own, tokens = padded.example(head, i)
            assert len(tokens) == len(text)
            assert error(own, alone[head][0]) <= 2e-5, (head, i)
            assert error(rows.example(head, i)[0], alone[head][0][at]) <= 2e-5, (head, i)
            assert not padded[head][i][pads[i]].any() and not padded[head][i][:, pads[i]].any()
            assert not rows[head][i][:, pads[i]].any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma3", "zamba2", "kimi_linear", "lfm3", "inkling"])
def test_every_attention_implementation_gives_the_same_pattern(name, implementation):
    lm, batch = zoo.lm(name), inputs(random_ids(40))
    sites = [s for s in lm.sites if s.kind == "attention"]
    heads = [s.head(1) for s in sites]
    other = wrap(zoo.build(name)[0], lm.tokenizer)
    other.model.set_attn_implementation(implementation)
    expected, found = mixers.matrix(lm, batch, heads), mixers.matrix(other, batch, heads)
    for head in heads:
        assert error(found[head], expected[head]) <= 1e-5
        assert torch.allclose(found[head].sum(-1), torch.ones(1, 40), atol=1e-5)
    if any(getattr(s.mixer, "sliding_window", None) for s in sites):
        assert any(m[0, 39, 0] == 0 for m in found.values())  # 39 tokens back is outside a window of 24


def test_attention_sinks_take_their_share():
    import transformers

    experts = dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**zoo.LLAMA, **experts))
    zoo.redraw(model)
    lm = wrap(model, zoo.tokenizer())
    # matrix() itself compares M x value with the output
    for m in mixers.matrix(lm, inputs(random_ids(30)), some_heads(lm)).values():
        assert m.sum(-1).min() < 0.9 and m.sum(-1).max() <= 1 + 1e-6


# ---- each recurrence as a loop, in float64 ----


def loop_attention(cap, h):
    """Weights of one head, one query and one key at a time; the masks and biases are the recorded ones."""
    t = cap.tensors
    q, k = t["query"][0, h], t["key"][0, h // t["group"]]
    m = torch.zeros(len(q), len(q), dtype=torch.float64)
    for i in range(len(q)):
        scores = torch.stack([q[i] @ k[j] for j in range(i + 1)]) * t["scaling"]
        m[i, : i + 1] = scores.exp() / scores.exp().sum()
    return m


def loop_mamba2(cap, h):
    t = cap.tensors
    per_group = cap.value.shape[1] // t["B"].shape[2]
    x, dt, rate = cap.value[0, h], t["dt"][0, :, h], t["A"][h].double()
    b, c = t["B"][0, :, h // per_group], t["C"][0, :, h // per_group]
    state, out = torch.zeros(x.shape[1], b.shape[1], dtype=torch.float64), []
    for i in range(len(x)):
        state = torch.exp(rate * dt[i]) * state + dt[i] * torch.outer(x[i], b[i])
        out.append(state @ c[i] + t["D"][h] * x[i])
    return torch.stack(out)


def loop_llamba(cap, h):
    t, x = cap.tensors, cap.value[0, h]
    state, out = torch.zeros(x.shape[1], t["B"].shape[-1], dtype=torch.float64), []
    for i in range(len(x)):
        state = t["log_decay"][0, i, h].exp() * state + torch.outer(x[i], t["B"][0, i, h])
        out.append(state @ t["C"][0, i, h] + t["D"][h] * x[i])
    return torch.stack(out)


def loop_shortconv(cap, h):
    w, x = cap.tensors["weight"][h], cap.value[0, h, :, 0]
    back = len(w) - 1
    sums = [sum(w[back - j] * x[i - j] for j in range(len(w)) if i >= j) for i in range(len(x))]
    return torch.stack(sums)[:, None]


@pytest.mark.parametrize(
    ("name", "kind", "loop"),
    [
        ("llama", "attention", lambda cap, h: loop_attention(cap, h) @ cap.value[0, h]),
        ("qwen3", "attention", lambda cap, h: loop_attention(cap, h) @ cap.value[0, h]),
        ("mamba2", "mamba2", loop_mamba2),
        ("mamba2_g1", "mamba2", loop_mamba2),
        ("zamba2", "mamba2", loop_mamba2),
        ("nemotron_h", "mamba2", loop_mamba2),
        ("llamba", "llamba", loop_llamba),
        ("lfm2", "shortconv", loop_shortconv),
    ],
)
def test_float64_matrix_is_the_recurrence(name, kind, loop):
    model, tokenizer = zoo.build(name)
    lm = wrap(model.double(), tokenizer)
    site = next(s for s in lm.sites if s.kind == kind)
    with torch.no_grad():
        cap = mixers.capture(lm, inputs(random_ids(70)), [site])[site]
        for h in (0, site.n_heads - 1):
            m = FAMILIES[kind].matrix(cap, [h], True)[0, 0]
            row = FAMILIES[kind].rows(cap, [h], torch.tensor([[69, 33]]), True)[0, 0]
            expected = loop(cap, h)
            assert m.dtype == torch.float64
            assert error(m @ cap.value[0, h], expected) <= 1e-10
            assert error(row @ cap.value[0, h], expected[[69, 33]]) <= 1e-10


def test_decays_keep_their_digits_over_8192_tokens():
    """Differences of running totals are off by up to 4e-3 here; each span's own sum is not."""
    length, gen = 8192, torch.Generator().manual_seed(0)
    steps = -torch.rand(length, generator=gen) * 2.0
    steps[torch.rand(length, generator=gen) < 0.97] *= 1e-3  # long memories between strong resets
    ones = torch.ones(1, 1, length, 1)
    at = [length - 1, 5000, 17]
    rows = mamba2.decayed_rows(ones, ones, None, steps[None, None], [0], torch.tensor([at]))[0, 0]
    short = slice(length - 3000, length)
    square = mamba2.decayed_products(ones[:, :, short], ones[:, :, short], None, steps[None, None, short], [0])[0, 0]
    exact = steps.double().tolist()
    checked = 0
    for i, t in enumerate(at):
        for s in range(t, max(t - 3000, -1), -7):
            true = math.exp(math.fsum(exact[s + 1 : t + 1]))
            if true > 1e-15:
                checked += 1
                assert abs(float(rows[i, s]) / true - 1) <= 1e-6
                if i == 0:
                    assert abs(float(square[-1, s - (length - 3000)]) / true - 1) <= 1e-6
    assert checked > 200


@torch.no_grad()
def test_bf16_step_sizes_are_the_models_own():
    """transformers' torch scan takes dt + bias and softplus in bf16; in float32 M would be 1e-3 off."""
    model, tokenizer = zoo.build("mamba2")
    lm = wrap(model.bfloat16(), tokenizer)
    for site, cap in mixers.capture(lm, inputs(random_ids(50))).items():
        m = FAMILIES["mamba2"].matrix(cap, all_heads(site), True)
        assert m.dtype == torch.float32
        assert error(m @ wide(cap.value), wide(cap.output)) <= 1e-5


@pytest.mark.parametrize("name", zoo.NAMES)
def test_half_precision_models_have_matrices(name):
    model, tokenizer = zoo.build(name)
    lm = wrap(model.bfloat16(), tokenizer)
    for m in mixers.matrix(lm, inputs(random_ids(33)), some_heads(lm)).values():
        assert m.dtype == torch.float32 and m.isfinite().all()


@pytest.mark.parametrize("name", zoo.NAMES)
def test_gradients_through_matrices_are_finite(name):
    model, tokenizer = zoo.build(name)
    lm = wrap(model, tokenizer)
    found = mixers.matrix(lm, inputs(random_ids(35)), some_heads(lm), grad=True)
    sum(m.pow(2).sum() for m in found.values() if m.requires_grad).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads and all(g.isfinite().all() for g in grads)
    assert any(g.abs().max() > 0 for g in grads)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e3, 1e30])
def test_extreme_decays_neither_overflow_nor_lose_gradients(size):
    gen = torch.Generator().manual_seed(0)
    c, b = (torch.randn(1, 1, 150, 4, generator=gen, requires_grad=True) for _ in range(2))
    steps = (-size * torch.rand(1, 2, 150, generator=gen)).requires_grad_()
    m = mamba2.decayed_products(c, b, None, steps, [0, 0])
    r = mamba2.decayed_rows(c, b, None, steps, [0, 0], torch.tensor([[149, 70]]))
    assert torch.allclose(r, m[:, :, [149, 70]], atol=1e-6)
    (m.pow(2).sum() + r.pow(2).sum()).backward()
    assert m.isfinite().all() and all(x.grad.isfinite().all() for x in (c, b, steps))
    assert torch.allclose(m.diagonal(dim1=-2, dim2=-1)[0, 0], (c * b).sum(-1)[0, 0], atol=1e-6)
