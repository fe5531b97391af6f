"""What does a head of lightning attention do to the sequence? (MiniMax)

Linear attention with one fixed decay for each head (Qin et al. 2024, "Lightning Attention-2"):

    M[t, s] = (q_t . k_s) exp(-slope (t - s))     for s <= t.

q, k and v are what the mixer splits from its projection, after activation and after pads are set to zero; q
is not scaled. The decay is put together from the mixer's own tables (for queries and keys within a block,
and for a whole block), because a model in half precision holds rounded tables that are not powers of one
number.

Letters: b batch, h head, t and s positions, r chosen rows, d and p head dimension, u place in a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..sites import HeadSite
from .base import Captured, Family, calls, finish, pick, register, wide, wide_dtype
from .deltanet import continued
from .mamba1 import everywhere

_MASKED = "apply_mask_to_padding_states"  # the one function between the projection and the split into q, k, v


def table_decay(mixer: nn.Module, heads: Sequence[int], t: Tensor, length: int) -> Tensor:
    """The decay from position s to position t that the mixer's tables amount to.

    t: ``[b, r]`` positions. Returns ``[b, h, r, s]``; entries after t are not meaningful. Within a block a
    table holds exp(-slope (t - s)); across blocks it is what is left of the key at the end of its block,
    times the blocks between, times what the query's place adds.
    """
    size = mixer.block_size
    tables = (mixer.diagonal_decay, mixer.query_decay, mixer.key_decay, mixer.slope_rate)
    within, query, key, slope = (wide(pick(x.reshape(x.shape[-3:]), heads, dim=0)) for x in tables)
    s = torch.arange(length, device=t.device)
    t = t[..., None]
    between = (t // size - s // size - 1).clamp(min=0)[:, None]  # whole blocks, [b, 1, r, s]
    per_block = torch.exp(-slope * size)  # [h, 1, 1]
    from_query = query[:, t % size, 0].movedim(0, 1)  # [b, h, r, 1]
    to_end = key[:, None, s % size, 0]  # [h, 1, s]
    inside = within[:, t % size, s % size].movedim(0, 1)  # [b, h, r, s]
    return torch.where((t // size == s // size)[:, None], inside, from_query * per_block**between * to_end)


class Lightning(Family):
    """MiniMax's lightning attention."""

    kind = "lightning"

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record q, k and v as the mixer splits them, the input of its norm (the output) and its gate."""
        cap = Captured(site)
        mixer = site.mixer

        def record(name: str, args: dict, result: Tensor) -> None:
            qkv = result.reshape(*result.shape[:2], site.n_heads, 3, site.head_dim).permute(3, 0, 2, 1, 4)
            cap.tensors.update(q=qkv[0], k=qkv[1])  # [b, h, t, d]
            cap.value = qkv[2]

        def start(module, args, kwargs):
            cache = kwargs.get("cache")
            if cache is not None and cache.get_linear_cache(mixer.layer_idx) is not None:
                raise continued(site)

        def norm_input(module, args):
            cap.output = _split(args[0], site)

        def gate(module, args, result):
            cap.tensors["gate"] = _split(result, site)

        handles = [
            mixer.register_forward_pre_hook(start, with_kwargs=True),
            mixer.norm.register_forward_pre_hook(norm_input),
            mixer.output_gate.register_forward_hook(gate),
        ]
        try:
            with calls(site, (_MASKED,), record):
                yield cap
        finally:
            for handle in handles:
                handle.remove()

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Matrices ``[b, h, t, s]``: the rows at all positions."""
        return self.rows(cap, heads, everywhere(cap), with_d)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` at `positions` ``[b, r]``, in closed form."""
        dtype = wide_dtype(cap.value.dtype)
        q, k = (pick(cap.tensors[n], heads).to(dtype) for n in "qk")
        positions = positions.to(q.device)
        q = q.gather(2, positions[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[-1]))
        decay = table_decay(cap.site.mixer, heads, positions, cap.length).to(dtype)
        return finish(q @ k.transpose(-1, -2) * decay, cap.real, positions)

    def after(self, cap: Captured, heads: Sequence[int]) -> Tensor:
        """sigmoid(gate) x weight / rms, ``[b, h, t, p]``; the rms is over all heads of a position."""
        norm, output = cap.site.mixer.norm, wide(cap.output)
        square = output.square().mean((1, 3), keepdim=True)  # [b, 1, t, 1]
        scale = torch.rsqrt(square + norm.variance_epsilon)
        weight = wide(norm.weight).reshape(cap.site.n_heads, 1, cap.site.head_dim)
        return pick(torch.sigmoid(wide(cap.tensors["gate"])) * weight * scale, heads)

    def bytes_needed(self, cap: Captured, n_heads: int, n_rows: int) -> int:
        """The result, the scores, and four temporaries of the decay."""
        one = cap.output.shape[0] * n_rows * cap.length * wide_dtype(cap.output.dtype).itemsize
        return 6 * one * n_heads


def _split(x: Tensor, site: HeadSite) -> Tensor:
    """``[b, t, h * p]`` -> ``[b, h, t, p]``."""
    return x.reshape(*x.shape[:2], site.n_heads, site.head_dim).transpose(1, 2)


register(Lightning())
