"""The recurrences of the scan families as loops of a few lines, and random captures to test against them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ga_utils.mixers.base import Captured

F64 = torch.float64


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


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x) and 0 not in x.stride():  # an expanded view takes no memory
                self.numel = max(self.numel, x.numel())
        return out
