"""What does a Mamba-2 head do to the sequence? Its matrix of decayed inner products (Dao & Gu 2024, eq. 3).

The scan's own arguments are recorded (x, dt, A, B, C, D and how dt is treated), from which

    M[t, s] = (C_t . B_s) dt_s exp(sum_{k=s+1..t} A dt_k)   for s <= t,   plus D on the diagonal if asked for;

value = x and output = y, before the gate, the grouped norm and the output projection. M is signed and its
rows do not sum to 1.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from ..errors import GAError
from ..sites import HeadSite
from .base import Captured, Family, calls, causal, finish, namespace, pick, register, wide

#: largest block whose segment sums are taken one by one; changes speed, never the result
BLOCK = 64
_SCANS = ("mamba2_chunk_scan", "mamba_chunk_scan_combined")


def decayed_products(c: Tensor, b: Tensor, scale: Tensor | None, log_decay: Tensor, group: Sequence[int]) -> Tensor:
    """``M[t, s] = (c_t . b_s) scale_s exp(sum_{k=s+1..t} log_decay_k)`` for s <= t, exactly 0 above.

    c, b ``[batch, g, t, n]``; scale (None for 1) and log_decay (<= 0) ``[batch, h, t]``; group: for each of
    the h heads, its row of c and b. Returns ``[batch, h, t, s]`` in c's dtype (float32 or float64).

    Exact, and nearly as cheap as the product c b^T alone, because no exponential is taken on the square. The
    triangle is cut in halves: two triangles and the square below the one and beside the other. Let e be the
    last position of the first half. For s <= e < t the decay is exp(sum_{s+1..e}), a vector over the
    square's columns, times exp(sum_{e+1..t}), a vector over its rows. Both lie in (0, 1], so nothing
    overflows, and where one underflows so does their product. In triangles of at most `BLOCK` positions the
    segment sums are taken one by one under the mask. Every exponent is thus the float64 sum of the steps of
    its own span, all of one sign, just as in a masked segment sum over the whole square; no two running
    totals are ever subtracted. Decays beyond the reach of the dtype's digits are 0 (see `_decay`).
    """
    c, b = pick(c, group), pick(b, group)
    steps = log_decay.double()
    out = c.new_zeros(len(c), len(group), c.shape[2], c.shape[2])

    def fill(start: int, end: int) -> None:
        if end - start <= BLOCK:
            both = slice(start, end)
            decay = _decay(_segment_sums(steps[..., both]), c.dtype)
            decay = decay if scale is None else decay * scale[..., None, both]
            out[..., both, both] = (c[:, :, both] @ b[:, :, both].mT) * decay
            return
        middle = (start + end) // 2
        first, second = slice(start, middle), slice(middle, end)
        fill(start, middle)
        fill(middle, end)
        to_middle = _decay(_reverse_sums(steps[..., first]), c.dtype)
        to_middle = to_middle if scale is None else to_middle * scale[..., first]
        from_middle = _decay(steps[..., second].cumsum(-1), c.dtype)
        out[..., second, first] = (c[:, :, second] * from_middle[..., None]) @ (
            b[:, :, first] * to_middle[..., None]
        ).mT

    fill(0, c.shape[2])
    return out


def decayed_rows(
    c: Tensor, b: Tensor, scale: Tensor | None, log_decay: Tensor, group: Sequence[int], positions: Tensor
) -> Tensor:
    """Rows ``[batch, h, r, s]`` of `decayed_products` at `positions` ``[batch, r]``; O(s x n) each.

    A reverse scan: the exponents are float64 sums that start at the row's own position and grow towards the
    text's beginning.
    """
    index = torch.as_tensor(list(group), device=c.device)
    at = positions[:, None, :, None].expand(-1, c.shape[1], -1, c.shape[-1])
    products = (c.gather(2, at) @ b.mT)[:, index]
    seen = torch.arange(c.shape[2], device=c.device) <= positions[..., None]  # [batch, r, s]
    steps = torch.where(seen[:, None], log_decay.double()[:, :, None], 0.0)
    rows = products * _decay(torch.where(seen[:, None], _reverse_sums(steps), -torch.inf), c.dtype)
    return rows if scale is None else rows * scale[:, :, None]


def _reverse_sums(steps: Tensor) -> Tensor:
    """``[..., s]``: the sum of the steps after s, to the end. Shifted first: nothing is subtracted."""
    return pad(steps[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)


def _segment_sums(steps: Tensor) -> Tensor:
    """``[..., t]`` to ``[..., t, s]``: the sum of steps s+1 to t, and -inf above the diagonal."""
    below = causal(steps.shape[-1], steps.device)
    spread = steps[..., :, None].expand(*steps.shape, steps.shape[-1]).masked_fill(~below.tril(-1), 0.0)
    return spread.cumsum(-2).masked_fill(~below, -torch.inf)


def _decay(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(exponent) in `dtype`; 0, with gradient 0, for -inf and below 1e-17 (1e-152 in float64).

    The product of two such factors, or of one with small c and b, would be denormal. Processors take a
    hundred times as long over denormal numbers, and next to the diagonal's decay of 1 they are beyond all
    digits.
    """
    gone = exponent < math.log(torch.finfo(dtype).tiny) / 2 + 4
    return exponent.masked_fill(gone, 0.0).exp().masked_fill(gone, 0.0).to(dtype)


class Mamba2(Family):
    """Mamba2, Zamba2, Bamba, Falcon-H1, Nemotron-H and GraniteMoeHybrid."""

    kind = "mamba2"
    has_d = True

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record the arguments and the result of the site's scan."""
        cap, name = Captured(site), type(site.mixer).__name__

        def record(_: str, args: dict, result: Tensor | tuple) -> None:
            if cap.output is not None:
                raise GAError(f"{name} ({site.path}) ran twice in one forward pass: one run has one matrix.")
            if args.get("initial_states") is not None or args.get("seq_idx") is not None:
                raise GAError(f"{name} ({site.path}) ran with a cache or packed texts: M needs one whole text.")
            if args.get("z") is not None:
                raise GAError(f"{name} ({site.path}) gates inside its scan, so its output cannot be read.")
            x = args["hidden_states"] if "hidden_states" in args else args["x"]
            y = result[0] if isinstance(result, tuple) else result
            cap.tensors = {k: args[k] for k in ("A", "B", "C", "D")} | {"dt": _step_sizes(site, args)}
            cap.value, cap.output = x.transpose(1, 2), y.transpose(1, 2)

        with calls(site, _SCANS, record):
            yield cap

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Matrices ``[b, h, t, s]`` of `heads`; see the module's docstring."""
        c, b, dt, log_decay, group = self._parts(cap, heads)
        m = decayed_products(c, b, dt, log_decay, group)
        if with_d and cap.tensors["D"] is not None:
            m = m + torch.diag_embed(_skip(cap, heads)[:, None].expand(-1, cap.length))
        return finish(m, cap.real)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` of the matrices at `positions` ``[b, r]``."""
        c, b, dt, log_decay, group = self._parts(cap, heads)
        m = decayed_rows(c, b, dt, log_decay, group, positions)
        if with_d and cap.tensors["D"] is not None:
            here = positions[..., None] == torch.arange(cap.length, device=m.device)
            m = m + torch.where(here[:, None], _skip(cap, heads)[:, None, None], 0.0)
        return finish(m, cap.real, positions)

    def _parts(self, cap: Captured, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
        t = cap.tensors
        per_group = cap.value.shape[1] // t["B"].shape[2]
        groups = sorted({h // per_group for h in heads})
        c, b = (wide(pick(t[k], groups, 2).transpose(1, 2)) for k in "CB")
        dt = pick(wide(t["dt"]), heads, 2).transpose(1, 2)
        rate = pick(t["A"], heads, 0)[:, None]
        dtype = torch.promote_types(c.dtype, rate.dtype)
        # the step A dt is rounded to the model's own precision, as in its scan; only the sums are wider
        log_decay = rate.to(dtype) * dt.to(dtype)
        return c, b, dt.to(c.dtype), log_decay, [groups.index(h // per_group) for h in heads]


def _skip(cap: Captured, heads: Sequence[int]) -> Tensor:
    return wide(pick(cap.tensors["D"], heads, 0)).to(cap.output.device)


def _step_sizes(site: HeadSite, args: dict) -> Tensor:
    """dt ``[b, t, h]`` as the scan uses it: bias, softplus and clamp are arguments of the scan."""
    dt, bias = args["dt"], args.get("dt_bias")
    if _fused(site):
        dt = wide(dt)  # mamba-ssm's kernel takes the sum in float32; transformers' own code in dt's dtype
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if args.get("dt_softplus"):
        dt = softplus(dt)
    low, high = args.get("dt_limit") or (0.0, math.inf)
    return dt.clamp(low, high)


def _fused(site: HeadSite) -> bool:
    """Whether the mixer's scan is a kernel of another package rather than transformers' torch code."""
    scope = namespace(site)
    scan = next(scope[n] for n in _SCANS if n in scope)
    while hasattr(scan, "__wrapped__"):
        inside = inspect.getclosurevars(scan).nonlocals
        if "is_new_implementation" in inside:
            return bool(inside["is_new_implementation"])
        scan = scan.__wrapped__
    return False


register(Mamba2())
