"""What does a Llamba head do to the sequence? Mamba-2's matrix without a step size on the input.

Llamba's discrete Mamba-2 has the state S_t = exp(-g_t) S_{t-1} + x_t B_t^T with g = softplus(a), one B and C
for each head, and y_t = S_t C_t + D x_t, so

    M[t, s] = (C_t . B_s) exp(-sum_{k=s+1..t} g_k)   for s <= t,   plus D on the diagonal if asked for;

value = x after the short convolution, output = y before the gate silu(z + z_bias) and the output projection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..errors import GAError
from ..sites import HeadSite
from .base import Captured, Family, finish, pick, register, wide
from .mamba2 import decayed_products, decayed_rows


class Llamba(Family):
    """This package's Llamba models."""

    kind = "llamba"
    has_d = True

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record what the mixer's `project` and `scan` return while its forward pass calls them."""
        cap, mixer = Captured(site), site.mixer
        project, scan = mixer.project, mixer.scan

        def projecting(hidden_states, padding=None, state=None):
            if cap.output is not None or state is not None:
                raise GAError(f"Llamba's layer {site.layer} ran twice or with a cache: M needs one whole text.")
            parts = project(hidden_states, padding, state)
            cap.tensors["z"] = parts[-1]
            return parts

        def scanning(x, B, C, log_decay, state=None):
            y = scan(x, B, C, log_decay, state)
            cap.tensors |= {"B": B, "C": C, "log_decay": log_decay, "D": mixer.D, "z_bias": mixer.z_bias}
            cap.value = x.transpose(1, 2)
            # forward adds the skip term outside the scan; this is the same sum
            cap.output = (y + mixer.D.to(y.dtype).unsqueeze(-1) * x).transpose(1, 2)
            return y

        # instance attributes hide the methods from the mixer's own calls
        mixer.project, mixer.scan = projecting, scanning
        try:
            yield cap
        finally:
            _uncover(mixer, "project", project)
            _uncover(mixer, "scan", scan)

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Matrices ``[b, h, t, s]`` of `heads`; see the module's docstring."""
        m = decayed_products(*self._parts(cap, heads))
        if with_d:
            m = m + torch.diag_embed(wide(pick(cap.tensors["D"], heads, 0))[:, None].expand(-1, cap.length))
        return finish(m, cap.real)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` of the matrices at `positions` ``[b, r]``."""
        m = decayed_rows(*self._parts(cap, heads), positions)
        if with_d:
            here = positions[..., None] == torch.arange(cap.length, device=m.device)
            m = m + torch.where(here[:, None], wide(pick(cap.tensors["D"], heads, 0))[:, None, None], 0.0)
        return finish(m, cap.real, positions)

    def after(self, cap: Captured, heads: Sequence[int]) -> Tensor:
        """The gate ``[b, h, t, p]``: silu(z + z_bias)."""
        dtype = cap.output.dtype
        gate = silu(cap.tensors["z"].to(dtype) + cap.tensors["z_bias"].to(dtype))
        return pick(gate.unflatten(-1, (cap.site.n_heads, -1)).transpose(1, 2), heads)

    def _parts(self, cap: Captured, heads: Sequence[int]) -> tuple[Tensor, Tensor, None, Tensor, list[int]]:
        c, b = (wide(pick(cap.tensors[k], heads, 2)).transpose(1, 2) for k in "CB")
        log_decay = pick(cap.tensors["log_decay"], heads, 2).transpose(1, 2)
        return c, b, None, log_decay, list(range(len(heads)))


def _uncover(mixer: torch.nn.Module, name: str, before: object) -> None:
    """Make `mixer.name` what it was: the class's own method, or an attribute that someone else had set."""
    delattr(mixer, name)
    if getattr(mixer, name) != before:
        setattr(mixer, name, before)


register(Llamba())
