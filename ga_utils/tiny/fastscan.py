"""How are Falcon-Mamba and Zamba2 trained on a CPU in minutes? With scans that suit short lessons.

Mamba-1: transformers' loop over tokens leaves autograd hundreds of small steps. Here the loop runs in place over one
tensor, and the gradient is the same recurrence backwards. Mamba-2: transformers' chunks move tensors with axes for
position, position, head and channel at once; a lesson of some 60 words is faster as one matrix a head.
Used in training alone: measurements run transformers' own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ga_utils.errors import GAError


class _Scan(torch.autograd.Function):
    """y_t = h_t C_t with h_t = exp(dt_t A) h_{t-1} + (dt_t x_t) B_t, from h_0 = 0, and the last h (which has no
    gradient).

    dt, x [t, b, c]; A [c, n]; B, C [t, b, n] -> [t, b, c], [b, c, n]. Few passes over [t, b, c, n], which is where the
    time goes.
    """

    @staticmethod
    def forward(ctx, dt: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
        decay = (dt.unsqueeze(-1) * A).exp_()
        h = (dt * x).unsqueeze(-1) * B.unsqueeze(-2)
        for t in range(1, len(h)):
            h[t].addcmul_(decay[t], h[t - 1])
        ctx.save_for_backward(dt, x, A, B, C, decay, h)
        last = h[-1].clone()
        ctx.mark_non_differentiable(last)
        return (h @ C.unsqueeze(-1)).squeeze(-1), last

    @staticmethod
    def backward(ctx, to_y: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        dt, x, A, B, C, decay, h = ctx.saved_tensors
        to_c = (to_y.unsqueeze(-2) @ h).squeeze(-2)
        to_h = to_y.unsqueeze(-1) * C.unsqueeze(-2)
        for t in range(len(h) - 2, -1, -1):
            to_h[t].addcmul_(decay[t + 1], to_h[t + 1])
        to_written = (to_h @ B.unsqueeze(-1)).squeeze(-1)
        to_b = ((dt * x).unsqueeze(-2) @ to_h).squeeze(-2)
        to_power = to_h[1:].mul_(h[:-1]).mul_(decay[1:])  # gradient of dt A, in the place of to_h, which is done with
        to_dt = to_written * x
        to_dt[1:] += torch.einsum("tbcn,cn->tbc", to_power, A)
        return to_dt, to_written * dt, torch.einsum("tbcn,tbc->cn", to_power, dt[1:]), to_b, to_c


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
    y, last = _Scan.apply(dt_t, x, A.to(dt_t.dtype), B.permute(2, 0, 1), C.permute(2, 0, 1))
    if D is not None:
        y = y + x * D
    y = y.permute(1, 2, 0)
    if z is not None:
        y = y * F.silu(z)
    return (y, last) if return_last_state else y


def matrix_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    initial_states: Tensor | None = None,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan, y = ((C B^T) * decay) (dt x), with the arguments of transformers' `mamba2_chunk_scan`.

    hidden_states [b, t, h, p]; dt [b, t, h]; A, D, dt_bias [h]; B, C [b, t, g, n] with g groups of heads -> y
    [b, t, h, p] (and the last state [b, h, p, n], without a gradient). `chunk_size` changes nothing. Raises GAError
    where an earlier state is to go in.
    """
    if initial_states is not None:
        raise GAError("The fast scan starts from an empty state: use it on whole lessons only.")
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit).transpose(1, 2)  # [b, h, t]
    x = hidden_states.transpose(1, 2)
    so_far = (dt * A[:, None]).cumsum(-1)
    later = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).triu(1)
    decay = (so_far.unsqueeze(-1) - so_far.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    reads = C.transpose(1, 2) @ B.permute(0, 2, 3, 1)  # [b, g, t, s]
    reads = reads.repeat_interleave(x.shape[1] // reads.shape[1], dim=1)
    y = (reads * decay) @ (x * dt.unsqueeze(-1))
    if D is not None:
        y = y + x * D[:, None, None]
    y = y.transpose(1, 2)
    if not return_final_states:
        return y
    with torch.no_grad():
        left = x * (dt * (so_far[..., -1:] - so_far).exp()).unsqueeze(-1)
        written = B.transpose(1, 2).repeat_interleave(x.shape[1] // B.shape[2], dim=1)
        return y, left.mT @ written


@contextlib.contextmanager
def fast_training() -> Iterator[None]:
    """Inside the block, Falcon-Mamba models run `scan` and Zamba2 models `matrix_scan`."""
    from transformers.models.falcon_mamba import modeling_falcon_mamba
    from transformers.models.zamba2 import modeling_zamba2

    ours = ((modeling_falcon_mamba, "mamba_selective_scan", scan), (modeling_zamba2, "mamba2_chunk_scan", matrix_scan))
    before = [getattr(module, name) for module, name, _ in ours]
    for module, name, function in ours:
        setattr(module, name, function)
    try:
        yield
    finally:
        for (module, name, _), function in zip(ours, before, strict=True):
            setattr(module, name, function)
