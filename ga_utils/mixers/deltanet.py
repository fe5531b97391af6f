"""What does a head of a gated delta net do to the sequence? (Qwen3-Next, Qwen3.5, LaraMini, OLMo-Hybrid)

The gated delta rule (Yang et al. 2024, "Gated Delta Networks", section 3.1) first decays the state, then
erases what it holds at the new key, then writes the new value there:

    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,     y_t = S_t q_t.

The erase term makes every token's write depend on the earlier ones, so the matrix is not the masked product
of q and k: with D[t, s] = prod_{j=s+1..t} a_j and 0 above the diagonal,

    M = (Q K^T * D) (I + L)^{-1} diag(b),     L = strictly lower part of diag(b) (K K^T * D),

one solve with a unit lower triangular matrix. A row needs no square: it is the query carried backwards
through the transposed transitions, M[t, s] = b_s (u . k_s), then u <- a_s (u - b_s k_s (k_s . u)).

Grouped heads, the l2 norm of q and k, the scale 1/sqrt(k) and b in [0, 2] (OLMo-Hybrid) are as in the
model's own call.

Letters: b batch, h head, t and s positions, r chosen rows, k key dimension, p value dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import GAError
from ..sites import HeadSite
from .base import Captured, Family, calls, finish, pick, register, wide, wide_dtype
from .mamba1 import refuse_packed, segment_sums

#: the epsilon inside the square root of the l2 norm of q and k, a constant in the models' code
_L2_EPS = 1e-6
_GATES = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def delta_matrix(reads: Tensor, overlaps: Tensor, beta: Tensor) -> Tensor:
    """The exact matrix of the delta rule.

    reads ``[..., t, s]``: decayed q_t . k_s; overlaps ``[..., t, s]``: decayed k_t . k_s; beta ``[...,
    t]``. Only the lower triangles are used. Returns ``[..., t, s]``, 0 above the diagonal.
    """
    erase = (beta[..., None] * overlaps).tril(-1)
    written = torch.linalg.solve_triangular(erase, reads.tril(), upper=False, left=False, unitriangular=True)
    return written * beta[..., None, :]


def delta_rows(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, positions: Tensor) -> Tensor:
    """Rows of the same matrix by a scan from right to left.

    q, k ``[b, h, t, k]``; g ``[b, h, t, k]`` or ``[b, h, t, 1]`` log decays; beta ``[b, h, t]``; positions
    ``[b, r]``. Returns ``[b, h, r, s]``, 0 after each row's position. Memory O(r x (t + k)).
    """
    batch, n_heads, length, width = q.shape
    u = q.new_zeros(batch, n_heads, positions.shape[1], width)
    decay = g.exp()
    last = int(positions.max())
    columns = []
    for s in range(last, -1, -1):
        starts = (positions == s)[:, None, :, None]  # u is still 0 there
        u = torch.where(starts, q[:, :, s, None], u)
        entry = beta[:, :, s, None] * (u * k[:, :, s, None]).sum(-1)  # [b, h, r]
        columns.append(entry)
        u = decay[:, :, s, None] * (u - entry[..., None] * k[:, :, s, None])
    rows = torch.stack(columns[::-1], dim=-1)
    return F.pad(rows, (0, length - 1 - last))


class DeltaNet(Family):
    """Gated delta nets: one decay for each head and token."""

    kind = "deltanet"
    functions: tuple[str, ...] = ("torch_chunk_gated_delta_rule",)

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record the arguments and the result of the delta rule, and the gate given to the output norm."""
        cap = Captured(site)

        def record(name: str, args: dict, result: tuple[Tensor, Tensor | None]) -> None:
            if args["initial_state"] is not None:
                raise continued(site)
            refuse_packed(args)
            cap.tensors.update({n: args[n].transpose(1, 2) for n in ("query", "key", "g", "beta")})
            cap.tensors["l2norm"] = args["use_qk_l2norm_in_kernel"]
            cap.value = args["value"].transpose(1, 2)
            cap.output = result[0].transpose(1, 2)

        def gate(module, args, kwargs):
            value = kwargs.get("gate", args[1] if len(args) > 1 else None)
            if value is not None and cap.output is not None:
                batch, n_heads, length, width = cap.output.shape
                cap.tensors["gate"] = value.reshape(batch, length, n_heads, width).transpose(1, 2)

        norm = output_norm(site)
        handle = norm.register_forward_pre_hook(gate, with_kwargs=True) if norm is not None else None
        try:
            with calls(site, self.functions, record):
                yield cap
        finally:
            if handle is not None:
                handle.remove()

    def ingredients(self, cap: Captured, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k, g, beta) of `heads` in float32 or better, normalised and scaled as the rule does it.

        q, k ``[b, h, t, k]``; g ``[b, h, t, 1 or k]``; beta ``[b, h, t]``.
        """
        x, dtype = cap.tensors, wide_dtype(cap.value.dtype)
        share = cap.site.n_heads // x["key"].shape[1]  # value heads that share a query and key head
        grouped = [h // share for h in heads]
        q, k = (pick(x[n], grouped).to(dtype) for n in ("query", "key"))
        if x["l2norm"]:
            q, k = (v * torch.rsqrt(v.square().sum(-1, keepdim=True) + _L2_EPS) for v in (q, k))
        g = pick(x["g"], heads).to(dtype)
        g = g[..., None] if g.ndim == 3 else g
        return q * q.shape[-1] ** -0.5, k, g, pick(x["beta"], heads).to(dtype)

    def scores(self, q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Decayed q_t . k_s and k_t . k_s, both ``[b, h, t, s]``; above the diagonal not meaningful."""
        rows = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
        decay = segment_sums(g[..., 0], rows).exp()
        return (q @ k.transpose(-1, -2)) * decay, (k @ k.transpose(-1, -2)) * decay

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Matrices ``[b, h, t, s]``, one head at a time: only one head's temporaries lie in memory."""
        out = []
        for head in heads:
            q, k, g, beta = self.ingredients(cap, [head])
            reads, overlaps = self.scores(q, k, g)
            out.append(finish(delta_matrix(reads, overlaps, beta), cap.real))
        return torch.cat(out, dim=1)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` at `positions` ``[b, r]``, by the backward scan."""
        positions = positions.to(cap.output.device)
        return finish(delta_rows(*self.ingredients(cap, heads), positions), cap.real, positions)

    def after(self, cap: Captured, heads: Sequence[int]) -> Tensor:
        """activation(gate) x weight / rms of the head, ``[b, h, t, p]``.

        For a norm that does not name its epsilon and activation (a fused kernel's) it is the ratio of the
        recorded tensors, the same factor up to rounding.
        """
        norm = output_norm(cap.site)
        act = _GATES.get(getattr(norm, "activation", None))
        eps = getattr(norm, "variance_epsilon", None)
        if act is None or eps is None or "gate" not in cap.tensors:
            return super().after(cap, heads)
        output, gate = wide(pick(cap.output, heads)), wide(pick(cap.tensors["gate"], heads))
        return torch.rsqrt(output.square().mean(-1, keepdim=True) + eps) * wide(norm.weight) * act(gate)

    def bytes_needed(self, cap: Captured, n_heads: int, n_rows: int) -> int:
        """The result before and after it is joined, eight squares of one head, and q and k twice."""
        item = wide_dtype(cap.output.dtype).itemsize
        one = cap.output.shape[0] * n_rows * cap.length * item
        inputs = cap.output.shape[0] * n_heads * cap.length * cap.tensors["key"].shape[-1] * item
        return 2 * one * n_heads + 8 * one + 4 * inputs


def continued(site: HeadSite) -> GAError:
    """The error for a forward pass that does not start from an empty state."""
    return GAError(
        f"{site.path} continues from a cached state, which no matrix over this call's tokens can show: pass "
        "the whole text in one call without a cache."
    )


def output_norm(site: HeadSite) -> torch.nn.Module | None:
    """The gated norm between the delta rule and the projection."""
    return getattr(site.mixer, "norm", None) or getattr(site.mixer, "o_norm", None)


register(DeltaNet())
