"""How does one Llamba layer mix tokens, exactly, on any device?

The mixer is the discrete Mamba-2 of the Llamba checkpoints: one decay per head and step, no step size on the
input, a short convolution without nonlinearity, and a gate just before the output projection. For every head

    S_t = exp(log_decay_t) S_{t-1} + x_t B_t^T,    y_t = S_t C_t + D x_t,    out = out_proj(y * silu(z +
    z_bias))

Axis letters: b batch, t tokens, h heads, p channels of a head, n state width, w width of the convolution.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import say_once
from .llamba_cache import LayerState

BLOCK = 64  # tokens in one block of the chunked scan: it changes the speed, never the result
QUADRATIC_MAX = 128  # up to here the whole [t, t] matrix costs less than the block decomposition


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: the dtype of decays, states, scan outputs and logits."""
    return torch.promote_types(dtype, torch.float32)


class Padding(NamedTuple):
    """Where the real tokens of a batch are: `order` moves those of each row to its front, `back` undoes it.

    A captured mixer call carries it as `padding`; to make one from an attention mask, use
    `padding_from_mask`.
    """

    real: Tensor  # [b, t] bool
    order: Tensor  # [b, t] long
    back: Tensor  # [b, t] long
    count: Tensor  # [b] long


def padding_from_mask(mask: Tensor | None) -> Padding | None:
    """Read an attention mask [b, t] (1 = real, on either side or with gaps); None when nothing is padded."""
    if mask is None or bool((real := mask != 0).all()):
        return None
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    return Padding(real, order, order.argsort(dim=1), real.sum(1))


def segment_sums(log_decay: Tensor) -> Tensor:
    """[..., t] -> [..., t, t] with entry [t, s] = sum of log_decay over s < k <= t, and -inf where s > t.

    Each entry is summed by itself: the difference of two long cumulative sums would lose a short span's
    digits.
    """
    t = log_decay.shape[-1]
    on_or_below = torch.ones(t, t, dtype=torch.bool, device=log_decay.device).tril()
    steps = log_decay.unsqueeze(-1).expand(*log_decay.shape, t)
    return steps.masked_fill(~on_or_below.tril(-1), 0).cumsum(-2).masked_fill(~on_or_below, -torch.inf)


def _within(x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """A block that starts from an empty state: y [..., t, p] and the state it leaves [..., p, n]."""
    decay = segment_sums(log_decay).exp()
    return ((C @ B.mT) * decay) @ x, (x * decay[..., -1, :, None]).mT @ B


def scan_quadratic(x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, initial: Tensor | None = None):
    """The recurrence as one lower-triangular matrix per head, y = ((C B^T) * decay) x.

    x [b, t, h, p]; B, C [b, t, h, n]; log_decay [b, t, h]; initial state [b, h, p, n]
    -> y [b, t, h, p], last state [b, h, p, n].
    """
    x, B, C, log_decay = (v.transpose(1, 2) for v in (x, B, C, log_decay))
    y, state = _within(x, B, C, log_decay)
    if initial is not None:
        y = y + log_decay.cumsum(-1).exp().unsqueeze(-1) * (C @ initial.mT)
        state = state + log_decay.sum(-1).exp()[..., None, None] * initial
    return y.transpose(1, 2), state


def scan_chunked(x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, initial: Tensor | None = None, block: int = BLOCK):
    """The same recurrence cut into blocks: the quadratic form inside each, and a state handed on.

    Shapes as in `scan_quadratic`; the cost grows with t * block instead of t * t.
    """
    b, t, h, p = x.shape
    gap = -t % block  # filled with steps that add nothing and do not decay, so the last state stays right

    def fold(v: Tensor) -> Tensor:  # [b, t, h, ...] -> [b, blocks, h, block, ...]
        v = F.pad(v, (0, 0) * (v.dim() - 2) + (0, gap))
        return v.unflatten(1, (-1, block)).transpose(2, 3)

    x, B, C, log_decay = fold(x), fold(B), fold(C), fold(log_decay)
    y, added = _within(x, B, C, log_decay)
    kept = log_decay.sum(-1).exp()[..., None, None]
    state = torch.zeros_like(added[:, 0]) if initial is None else initial
    entering = []
    for i in range(added.shape[1]):
        entering.append(state)
        state = kept[:, i] * state + added[:, i]
    y = y + log_decay.cumsum(-1).exp().unsqueeze(-1) * (C @ torch.stack(entering, 1).mT)
    return y.transpose(2, 3).reshape(b, t + gap, h, p)[:, :t], state


def triton_scan():
    """mamba-ssm's `mamba_chunk_scan_combined`, or None (said once) where it cannot be imported."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        say_once(
            "llamba-kernel-missing",
            f"Llamba on this GPU runs the pure torch scan, because mamba-ssm cannot be imported ({error}).",
        )
        return None
    return mamba_chunk_scan_combined


def scan_triton(
    kernel,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    log_decay: Tensor,
    initial: Tensor | None = None,
    block: int = 128,
):
    """The same recurrence in mamba-ssm's Triton kernel, shapes as in `scan_quadratic`; x, B, C are bfloat16.

    The kernel multiplies its input by a step size that also sets the decay (A = -1), so x is divided by it
    first. The floor keeps that division finite where nothing decays (padding), and exp(-floor) is 1 all the
    same.
    """
    step = (-log_decay).clamp_min(1e-30)
    decay_rate = -torch.ones(x.shape[2], device=x.device, dtype=step.dtype)
    y, state = kernel(
        (x / step.unsqueeze(-1)).to(x.dtype),
        step,
        decay_rate,
        B,
        C,
        block,
        initial_states=initial,
        return_final_states=True,
    )
    return y.to(step.dtype), state


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values [b, t, c] at positions index [b, k] -> [b, k, c]."""
    return values.gather(1, index.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


class LlambaMixer(nn.Module):
    """One discrete Mamba-2 mixer. The input of `out_proj` is [b, t, h*p], head-major: heads are masked there.

    `last_path` says how the latest scan ran: "quadratic", "chunked" or "kernel" (None before the first).
    `use_kernel = False` keeps a mixer on pure torch even where mamba-ssm is installed.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_state: int,
        *,
        d_inner: int | None = None,
        d_conv: int = 4,
        conv_bias: bool = True,
        chunk_size: int = 128,
        layer_idx: int | None = None,
    ):
        super().__init__()
        self.d_inner = d_inner or d_model
        self.n_heads, self.head_dim, self.d_state = n_heads, self.d_inner // n_heads, d_state
        self.d_conv, self.chunk_size, self.layer_idx = d_conv, chunk_size, layer_idx
        self.conv_dim = self.d_inner + 2 * n_heads * d_state
        self.in_proj = nn.Linear(d_model, self.conv_dim + self.d_inner + n_heads, bias=False)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, d_conv, groups=self.conv_dim, bias=conv_bias)
        self.z_bias = nn.Parameter(torch.zeros(self.d_inner))
        self.D = nn.Parameter(torch.ones(n_heads))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)
        self.use_kernel = True
        self.last_path: str | None = None

    def forward(self, hidden_states: Tensor, padding: Padding | None = None, state: LayerState | None = None) -> Tensor:
        """hidden_states [b, t, d_model] (already normed) -> [b, t, d_model]; a given `state` is moved on."""
        x, B, C, log_decay, z = self.project(hidden_states, padding, state)
        y = self.scan(x, B, C, log_decay, state)
        y = y + self.D.to(y.dtype).unsqueeze(-1) * x
        gated = y.flatten(2) * F.silu(z.to(y.dtype) + self.z_bias.to(y.dtype))
        return self.out_proj(gated.to(hidden_states.dtype))

    def project(
        self, hidden_states: Tensor, padding: Padding | None = None, state: LayerState | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors that the scan uses, after the convolution: x, B, C, log_decay, z.

        Takes what `forward` takes. x [b, t, h, p]; B, C [b, t, h, n]; log_decay [b, t, h] = -softplus(a),
        float32 (or float64); z [b, t, h*p], the gate before its bias. Padded tokens have x, B and log_decay
        zero: they add nothing to the state and let it pass unchanged. With `state`, its `conv` is moved on.
        """
        xBC, z, a = self.in_proj(hidden_states).split([self.conv_dim, self.d_inner, self.n_heads], dim=-1)
        xBC = self._short_conv(xBC, padding, state)
        log_decay = -F.softplus(a.to(work_dtype(a.dtype)))
        x, B, C = xBC.split([self.d_inner, self.n_heads * self.d_state, self.n_heads * self.d_state], dim=-1)
        if padding is not None:
            hidden = ~padding.real.unsqueeze(-1)
            x, B, log_decay = (v.masked_fill(hidden, 0) for v in (x, B, log_decay))
        x, B, C = (v.unflatten(-1, (self.n_heads, -1)) for v in (x, B, C))
        return x, B, C, log_decay, z

    def scan(self, x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, state: LayerState | None = None) -> Tensor:
        """y [b, t, h, p] of the recurrence without the D term; float32, or float64 for float64.

        Takes what `project` gives. With `state`, the scan starts from its `ssm` and leaves the last one
        there.
        """
        initial = None if state is None else state.ssm
        t = x.shape[1]
        kernel = None
        if x.is_cuda and self.use_kernel and t > 1 and x.dtype == torch.bfloat16:
            kernel = triton_scan()
        elif x.is_cuda and self.use_kernel and x.dtype != torch.bfloat16:
            say_once(
                "llamba-kernel-dtype",
                f"Llamba in {x.dtype} runs the pure torch scan on the GPU: the Triton kernel would round a "
                "float32 model to TF32 and can overflow in float16, so it is kept for bfloat16.",
            )
        if kernel is not None:
            say_once("llamba-kernel", "Llamba runs mamba-ssm's Triton scan on this GPU.")
            self.last_path = "kernel"
            y, last = scan_triton(kernel, x, B, C, log_decay, initial, self.chunk_size)
        else:
            x, B, C = (v.to(log_decay.dtype) for v in (x, B, C))
            self.last_path = "quadratic" if t <= QUADRATIC_MAX else "chunked"
            y, last = (scan_quadratic if t <= QUADRATIC_MAX else scan_chunked)(x, B, C, log_decay, initial)
        if state is not None:
            state.ssm = last
        return y

    def _short_conv(self, xBC: Tensor, padding: Padding | None, state: LayerState | None) -> Tensor:
        """Causal depthwise convolution [b, t, channels] over the real tokens, as if no padding were there."""
        b, t, channels = xBC.shape
        if padding is not None:
            xBC = _take(xBC, padding.order)
        past = None if state is None else state.conv
        if past is None:
            past = xBC.new_zeros(b, self.d_conv - 1, channels)
        window = torch.cat([past.to(xBC.dtype), xBC], dim=1)
        if state is not None:
            first = torch.full((b,), t, device=xBC.device) if padding is None else padding.count
            offsets = torch.arange(self.d_conv - 1, device=xBC.device)
            state.conv = _take(window, first.unsqueeze(-1) + offsets)
        out = self.conv1d(window.mT).mT
        return out if padding is None else _take(out, padding.back)
