"""What does a head of Kimi delta attention do to the sequence? (Kimi Linear, Bailing's delta attention)

The delta rule of deltanet.py, but each key channel n decays at its own rate (Kimi Team 2025, "Kimi
Linear"):

    S_t = S_{t-1} Diag(a_t) (I - b_t k_t k_t^T) + b_t v_t k_t^T,     y_t = S_t q_t,

so the decayed scores are sums over channels, sum_n q_t[n] k_s[n] exp(sum_{j=s+1..t} g_j[n]). They are no
product of a matrix of queries and one of keys unless one divides by decays, and those underflow. Here
nothing is divided: within a block of positions the sum is taken as it stands; across blocks the decay is a
product of three factors, each at most 1 (from s to the end of its block, over the blocks between, from the
start of t's block to t), so a strong decay can only underflow to the 0 that it is.

Letters: b batch, h head, t and s positions, i and j blocks, u and v places in a block, n key channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import register, wide_dtype
from .deltanet import DeltaNet
from .mamba1 import segment_sums

_BLOCK = 32


def decayed_scores(queries: list[Tensor], k: Tensor, g: Tensor, block: int = _BLOCK) -> list[Tensor]:
    """For each q of `queries`, sum_n q_t[n] k_s[n] exp(sum of g_j[n] over s < j <= t).

    q, k and g (log decays, at most 0): ``[b, h, t, n]``. Returns ``[b, h, t, s]`` each; entries above the
    diagonal are not meaningful.
    """
    batch, n_heads, length, width = k.shape
    n_blocks = -(-length // block)
    pad = n_blocks * block - length
    g = F.pad(g, (0, 0, 0, pad)).reshape(batch, n_heads, n_blocks, block, width)
    k = F.pad(k, (0, 0, 0, pad)).reshape(batch, n_heads, n_blocks, block, width)
    to_t = g.cumsum(3).exp()  # from the block's start up to and with u
    later = F.pad(g[:, :, :, 1:], (0, 0, 0, 1))
    to_end = later.flip(3).cumsum(3).flip(3).exp()  # after v, to the block's end
    left = (k * to_end).reshape(batch, n_heads, n_blocks * block, width)
    # whole blocks strictly between j and i: the sum over blocks j+1 .. i-1
    whole = g.sum(3).movedim(-1, 2).flatten(1, 2)  # [b, h n, i]
    previous = (torch.arange(n_blocks, device=g.device) - 1).expand(batch, -1)
    between = segment_sums(whole, previous).exp().reshape(batch, n_heads, width, n_blocks, n_blocks)
    inside = _inside(g)  # [b, h, i, u, v, n]
    out = []
    for q in queries:
        q = F.pad(q, (0, 0, 0, pad)).reshape(batch, n_heads, n_blocks, block, width)
        strips = []
        for i in range(n_blocks):
            here = (q[:, :, i, :, None] * k[:, :, i, None] * inside[:, :, i]).sum(-1)  # [b, h, u, v]
            reach = between[..., i, :i].movedim(2, 3).repeat_interleave(block, 2)  # [b, h, j v, n]
            earlier = (q[:, :, i] * to_t[:, :, i]) @ (left[:, :, : i * block] * reach).transpose(-1, -2)
            strips.append(F.pad(torch.cat([earlier, here], -1), (0, (n_blocks - 1 - i) * block)))
        out.append(torch.cat(strips, dim=2)[:, :, :length, :length])
    return out


def _inside(g: Tensor) -> Tensor:
    """Decays between the places of each block: g ``[b, h, i, u, n]`` -> ``[b, h, i, u, v, n]``."""
    batch, n_heads, n_blocks, block, width = g.shape
    flat = g.movedim(-1, 3).flatten(1, 3)  # [b, h i n, u]
    everywhere = torch.arange(block, device=g.device).expand(batch, block)
    sums = segment_sums(flat, everywhere).reshape(batch, n_heads, n_blocks, width, block, block)
    return sums.exp().movedim(3, -1)


class KimiDelta(DeltaNet):
    """Kimi delta attention: one decay for each key channel and token."""

    kind = "kda"
    functions = ("chunk_kimi_delta_attention",)

    def scores(self, q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Decayed q_t . k_s and k_t . k_s, both ``[b, h, t, s]``."""
        reads, overlaps = decayed_scores([q, k], k, g)
        return reads, overlaps

    def bytes_needed(self, cap, n_heads: int, n_rows: int) -> int:
        """As for delta nets, and the decays within blocks of one head."""
        batch, width = cap.output.shape[0], cap.tensors["key"].shape[-1]
        inside = 3 * batch * cap.length * _BLOCK * width * wide_dtype(cap.output.dtype).itemsize
        return super().bytes_needed(cap, n_heads, n_rows) + inside


register(KimiDelta())
