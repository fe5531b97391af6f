"""How much does each source position bring to a block's output through one head?

M alone compares positions as if every value and every gate had the same size. The *effective* matrix weighs

    E[t, s] = M[t, s] * || W_h (after_t * value_s) ||,

where W_h is the head's part of the output projection and after_t the gate and output norm at t, taken as
fixed. |E[t, s]| is the length of the vector that position s adds to the block's output at t through this
head (the norm-based analysis of attention by Kobayashi et al. 2020, with the gates of recurrent mixers), and
its sign is M's. A norm rather than a projection onto some direction, because it needs no choice of
direction, does not depend on the other positions, and leaves zeros of M zero. Entries of different heads,
layers and mixers are in one unit, that of the residual stream, where M's are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import GAError
from ..sites import HeadSite
from .base import FAMILIES, Captured, pick, wide

_SCRATCH = 2**26  # entries of temporaries at once


def effective(cap: Captured, heads: Sequence[int], m: Tensor, positions: Tensor | None) -> Tensor:
    """E of the same shape as `m`: ``[b, h, t, s]``, or the rows ``[b, h, r, s]`` at `positions` ``[b, r]``.

    Costs O(p x p) an entry where the gate varies over the head's channels, O(1) where there is none.
    """
    value = wide(pick(cap.value, heads)).to(m.dtype)
    value = torch.where(cap.real[:, None, :, None], value, 0.0)
    after = wide(FAMILIES[cap.site.kind].after(cap, heads)).to(m.dtype)
    if positions is not None:
        after = after.gather(2, positions[:, None, :, None].expand(-1, len(heads), -1, after.shape[-1]))
    else:
        after = torch.where(cap.real[:, None, :, None], after, 1.0)  # any finite number: M is 0 there
    plain = bool((after == 1).all())
    out = torch.empty_like(m)
    for i, head in enumerate(heads):
        # || W x || = || R x || with W = Q R: R has as many rows as the head has dimensions
        root = torch.linalg.qr(head_weight(cap.site, head).to(m), mode="r").R
        if plain:
            out[:, i] = m[:, i] * (value[:, i] @ root.mT).norm(dim=-1)[:, None, :]
            continue
        step = max(1, _SCRATCH // max(1, root.shape[0] * m.shape[-1] * len(m)))
        for start in range(0, m.shape[2], step):
            gated = root * after[:, i, start : start + step, None, :]  # [b, rows, rank, p]
            moved = gated @ value[:, i, None].mT  # [b, rows, rank, s]
            out[:, i, start : start + step] = m[:, i, start : start + step] * moved.norm(dim=2)
    return out


def head_weight(site: HeadSite, index: int) -> Tensor:
    """W_h ``[hidden, p]``: the columns of the output projection that head `index` feeds."""
    weight = getattr(site.proj, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise GAError(
            f"The output projection of {site.path} is a {type(site.proj).__name__} without a plain weight "
            "matrix: variant='effective' needs an unquantised model."
        )
    # GPT-2's Conv1D stores [in, out]
    weight = weight.T if type(site.proj).__name__ == "Conv1D" else weight
    return wide(weight[:, site.channels(index)].detach())
