"""What does a gated short convolution (LFM2) do to the sequence? A band of weights below the diagonal.

One layer computes (B, C, x) = in_proj(u), z = B * x, y[t] = sum_{j<k} w[j] z[t - k + 1 + j] for each channel
and out_proj(C * y). A channel counts as a head: its value is z, its output y, and

    M[t, s] = w[k - 1 - (t - s)]   for 0 <= t - s < k,   0 elsewhere,

the same at every position of every text. What depends on the text lies in the gates: B in the value, C in
`after`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import GAError
from ..sites import HeadSite
from .base import Captured, Family, calls, finish, pick, register, wide


class ShortConv(Family):
    """LFM2's, LFM2-MoE's and LFM3's convolution layers."""

    kind = "shortconv"

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record the convolution's input, weight and result."""
        cap = Captured(site)
        name = type(site.mixer).__name__

        def record(_: str, args: dict, result: Tensor) -> None:
            if cap.output is not None:
                raise GAError(f"{name} ({site.path}) ran twice in one forward pass: one run has one matrix.")
            if args.get("bias") is not None and bool((args["bias"] != 0).any()):
                raise GAError(f"{name} ({site.path}) adds a bias to its convolution, so its output is not M x value.")
            if args.get("activation") is not None:
                raise GAError(f"{name} ({site.path}) is not linear: {args['activation']} follows it.")
            # the first argument is called x by causal-conv1d and hidden_states by transformers
            x = args["hidden_states"] if "hidden_states" in args else args["x"]
            if result.shape != x.shape:
                raise GAError(f"{name} ({site.path}) ran with a cache; its matrices need the whole text.")
            cap.tensors = {"weight": args["weight"]}
            cap.value, cap.output = x[..., None], result[..., None]

        with calls(site, ("causal_conv1d_fn",), record):
            yield cap

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Banded Toeplitz matrices ``[b, h, t, s]`` of the channels `heads`."""
        positions = torch.arange(cap.length, device=cap.output.device)[None]
        band = self._band(cap, heads, positions).expand(len(cap.output), -1, -1, -1)
        return finish(band, cap.real)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` of the channels' matrices at `positions` ``[b, r]``."""
        return finish(self._band(cap, heads, positions), cap.real, positions)

    def _band(self, cap: Captured, heads: Sequence[int], positions: Tensor) -> Tensor:
        weight = wide(pick(cap.tensors["weight"], heads, 0))
        width = weight.shape[-1]
        distance = positions[..., None] - torch.arange(cap.length, device=weight.device)
        tap = weight[:, (width - 1 - distance).clamp(0, width - 1)].transpose(0, 1)
        return torch.where(((distance >= 0) & (distance < width))[:, None], tap, 0.0)


register(ShortConv())
