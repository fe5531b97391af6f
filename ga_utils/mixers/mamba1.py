"""What does a channel of a Mamba-1 mixer do to the sequence? (Mamba, Falcon-Mamba, Jamba, Zamba-1)

A Mamba-1 mixer has no heads: each channel c is a recurrence of its own, with n states (Gu & Dao 2023,
Algorithm 2),

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t,     y_t = C_t . h_t + D x_t

so a channel counts as a head, and its matrix is (Ali et al. 2024, "The Hidden Attention of Mamba Models")

    M[t, s] = delta_s sum_n C_t[n] B_s[n] exp(A[c, n] sum_{k=s+1..t} delta_k)   for s <= t,   D on diagonal

delta, B and C are taken from the scan's own arguments, that is after convolution, activation and whatever
norms the family puts on them (Falcon-Mamba's have no weights to learn, Jamba's do). Zamba-1 runs one scan
for each of its `n_mamba_heads` groups; a group's channels share B and C, and are numbered as in the
projection's input.

Letters: b batch, c all channels, h chosen channels, g groups, n states, t and s positions, r chosen rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import GAError
from ..sites import HeadSite
from .base import Captured, Family, calls, finish, namespace, pick, register, wide, wide_dtype

_SCAN = "mamba_selective_scan"
#: the arguments that the mixers pass by position: a compiled scan gives them other names
_BY_POSITION = ("hidden_states", "dt", "A", "B", "C")
#: working memory of one block of channels; only the result itself grows with the number of channels
_BLOCK_BYTES = 32 * 2**20


def everywhere(cap: Captured) -> Tensor:
    """Every position as a row, ``[b, t]``."""
    return torch.arange(cap.length, device=cap.output.device).expand(cap.output.shape[0], cap.length)


def segment_sums(x: Tensor, positions: Tensor) -> Tensor:
    """Sums of `x` over the positions after s, up to and with t.

    x: ``[b, h, t]``; positions: ``[b, r]``, the t's. Returns ``[b, h, r, s]`` with the sum of x[s+1..t],
    which is 0 for s >= t. Every entry is a sum of the numbers themselves: differences of running totals
    lose digits.
    """
    after = F.pad(x[..., 1:], (0, 1))  # after[s] = x[s + 1]
    last = torch.arange(1, x.shape[-1] + 1, device=x.device) <= positions[..., None]  # s + 1 <= t
    terms = torch.where(last[:, None], after[:, :, None], 0.0)
    return terms.flip(-1).cumsum(-1).flip(-1)


def scan_rows(delta: Tensor, a: Tensor, b: Tensor, c: Tensor, group: Tensor, positions: Tensor) -> Tensor:
    """Rows of the matrices of Mamba-1 channels, without D; entries after a row's position are not meaningful.

    delta ``[b, h, t]`` step sizes; a ``[h, n]`` negative rates; b, c ``[b, g, n, t]``; group ``[h]`` the
    group of each channel; positions ``[b, r]``. Returns ``[b, h, r, s]``. Memory O(r x t) for each channel,
    time n times that: the states are taken one at a time.
    """
    sums = segment_sums(delta, positions)
    total = torch.zeros_like(sums)
    for n in range(a.shape[-1]):
        b_n = b[:, group, n]
        c_n = c[:, group, n].gather(-1, positions[:, None].expand(-1, len(group), -1))
        # every exponent is at most 0 and nothing is divided by a decay: strong decays only underflow to 0
        total = total + c_n[..., None] * b_n[:, :, None] * torch.exp(a[:, n, None, None] * sums)
    return total * delta[:, :, None]


class Mamba1(Family):
    """Mamba-1 scans; a head is a channel."""

    kind = "mamba1"
    has_d = True

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record the scan's arguments, and its result without the gate.

        The scan multiplies its output by the gate itself, so it is asked a second time with the same
        arguments and no gate; the model receives the result of its own call.
        """
        cap = Captured(site)
        scan = namespace(site).get(_SCAN)
        groups = getattr(site.mixer, "n_mamba_heads", 1)
        parts: list[tuple[dict, Tensor]] = []

        def record(name: str, args: dict, result) -> None:
            refuse_packed(args)
            rest = {k: v for k, v in args.items() if k not in _BY_POSITION}
            rest |= {"z": None, "return_last_state": False}
            parts.append((args, scan(*(args[n] for n in _BY_POSITION), **rest)))
            if len(parts) == groups:
                _fill(cap, parts)

        # a forward pass that failed half-way leaves parts behind
        start = site.mixer.register_forward_pre_hook(lambda module, args: parts.clear())
        try:
            with calls(site, (_SCAN,), record):
                yield cap
        finally:
            start.remove()

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Matrices of channels ``[b, h, t, s]``: the rows at all positions."""
        return self.rows(cap, heads, everywhere(cap), with_d)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` at `positions` ``[b, r]``, by blocks of channels."""
        x, dtype = cap.tensors, wide_dtype(cap.value.dtype)
        b, c = x["B"].to(dtype), x["C"].to(dtype)
        positions = positions.to(b.device)
        width = max(1, _BLOCK_BYTES // (positions.numel() * cap.length * dtype.itemsize))
        here = F.one_hot(positions, cap.length).to(dtype)[:, None]  # [b, 1, r, s], where D goes
        out = []
        for i in range(0, len(heads), width):
            block = list(heads[i : i + width])
            group = torch.as_tensor(block, device=b.device) // x["group_size"]
            delta, a = pick(x["delta"], block).to(dtype), pick(x["A"], block, dim=0).to(dtype)
            m = scan_rows(delta, a, b, c, group, positions)
            if with_d and x["D"] is not None:
                m = m + here * pick(x["D"], block, dim=0).to(dtype)[:, None, None]
            out.append(finish(m, cap.real, positions))
        return torch.cat(out, dim=1)

    def after(self, cap: Captured, heads: Sequence[int]) -> Tensor:
        """silu(gate), ``[b, h, t, 1]``."""
        gate = cap.tensors["gate"]
        if gate is None:
            return torch.ones_like(wide(pick(cap.output, heads)))
        return F.silu(wide(pick(gate, heads)))[..., None]

    def bytes_needed(self, cap: Captured, n_heads: int, n_rows: int) -> int:
        """The result, its blocks before they are joined, and six temporaries of one block."""
        one = cap.output.shape[0] * n_rows * cap.length * wide_dtype(cap.output.dtype).itemsize
        return 2 * one * n_heads + 6 * max(one, min(one * n_heads, _BLOCK_BYTES))


def refuse_packed(args: dict) -> None:
    """Raise `GAError` if the call holds several texts in one row of the batch."""
    if args.get("seq_idx") is not None or args.get("cu_seqlens") is not None:
        raise GAError("Packed sequences have no single matrix: pass one text in each row of the batch.")


def _fill(cap: Captured, parts: list[tuple[dict, Tensor]]) -> None:
    """Put the scans of all groups side by side, in the order of the projection's input."""
    args = [a for a, _ in parts]
    cap.tensors = {
        "delta": torch.cat([_step(a) for a in args], dim=1),  # [b, c, t]
        "A": torch.cat([a["A"] for a in args]),  # [c, n]
        "B": torch.stack([a["B"] for a in args], dim=1),  # [b, g, n, t]
        "C": torch.stack([a["C"] for a in args], dim=1),
        "D": None if args[0]["D"] is None else torch.cat([a["D"] for a in args]),  # [c]
        "gate": None if args[0]["z"] is None else torch.cat([a["z"] for a in args], dim=1),  # [b, c, t]
        "group_size": args[0]["A"].shape[0],
    }
    cap.value = torch.cat([a["hidden_states"] for a in args], dim=1)[..., None]
    cap.output = torch.cat([y for _, y in parts], dim=1)[..., None]


def _step(args: dict) -> Tensor:
    """The step size as the scan takes it: bias, then softplus, in the precision of its own argument."""
    dt = args["dt"]
    if args["delta_bias"] is not None:
        dt = dt + args["delta_bias"].to(dt.dtype)[..., None]
    return F.softplus(dt) if args["delta_softplus"] else dt


register(Mamba1())
