"""How is Falcon-Mamba trained on a CPU in minutes? With a scan whose backward pass is written by hand.

transformers' loop over tokens leaves autograd hundreds of small steps. Here the loop runs in place over one
tensor, and the gradient is the same recurrence backwards. Used in training alone: measurements run
transformers' own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


class _Recurrence(torch.autograd.Function):
    """h_t = a_t h_{t-1} + u_t along the first axis, from h_0 = 0."""

    @staticmethod
    def forward(ctx, a: Tensor, u: Tensor) -> Tensor:
        h = u.clone()
        for t in range(1, len(h)):
            h[t].addcmul_(a[t], h[t - 1])
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, h = ctx.saved_tensors
        grad = grad.clone()
        for t in range(len(h) - 2, -1, -1):
            grad[t].addcmul_(a[t + 1], grad[t + 1])
        to_a = torch.zeros_like(a)
        to_a[1:] = grad[1:] * h[:-1]
        return to_a, grad


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
):
    """Mamba-1's scan with the arguments of transformers' `mamba_selective_scan`.

    hidden_states, dt, z [b, c, t]; A [c, n]; B, C [b, n, t]; D, delta_bias [c] -> y [b, c, t] (and the last
    state).
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    if delta_softplus:
        dt = F.softplus(dt)
    dt_t, x = dt.permute(2, 0, 1), hidden_states.permute(2, 0, 1)  # [t, b, c]
    decay = torch.exp(dt_t.unsqueeze(-1) * A)
    h = _Recurrence.apply(decay, (dt_t * x).unsqueeze(-1) * B.permute(2, 0, 1).unsqueeze(2))
    y = (h @ C.permute(2, 0, 1).unsqueeze(-1)).squeeze(-1)
    if D is not None:
        y = y + x * D
    y = y.permute(1, 2, 0)
    if z is not None:
        y = y * F.silu(z)
    return (y, h[-1]) if return_last_state else y


@contextlib.contextmanager
def fast_training() -> Iterator[None]:
    """Inside the block, Falcon-Mamba models run `scan`."""
    from transformers.models.falcon_mamba import modeling_falcon_mamba as module

    before = module.mamba_selective_scan
    module.mamba_selective_scan = scan
    try:
        yield
    finally:
        module.mamba_selective_scan = before
