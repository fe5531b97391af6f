"""Are the matrices of the scan families exact on arguments drawn at random? Against float64 loops."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scan_oracles import F64, LargestTensor, made_by_hand, positions

from ga_utils.mixers import FAMILIES, Captured

LENGTHS = (1, 7, 15, 16, 17, 63, 64, 65, 300)
SCANS = ("mamba1", "deltanet", "kda", "lightning")


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
