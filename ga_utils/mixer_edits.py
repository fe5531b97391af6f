"""What does a mixer compute at a position that its convolution, or its state, is kept from? (see mixer_parts.py)

Each function here stands in for one that a mixer calls: it makes that call, so that caches and all other positions are
as ever, and puts at the chosen positions what the current token alone gives. That is computed from the call's own
arguments, in closed form: the last tap of the convolution, and the diagonal of the head's matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .errors import ModelError
from .mixers.base import bound, wide
from .mixers.deltanet import _L2_EPS
from .mixers.mamba1 import _step
from .mixers.mamba2 import _SCANS, _step_sizes
from .sites import HeadSite

if TYPE_CHECKING:
    from .mixer_parts import Run

# ---- short convolutions: the current token's tap alone ----


def conv(run: Run, function: Callable, args: tuple, kwargs: dict) -> Tensor:
    full, given = function(*args, **kwargs), bound(function, args, kwargs)
    # the first argument is called x by causal-conv1d and hidden_states by transformers
    x = given["hidden_states"] if "hidden_states" in given else given["x"]

    def alone() -> Tensor:
        weight, bias, activation = given["weight"], given.get("bias"), given.get("activation")
        y = x.to(weight.dtype) * weight[:, -1, None]
        y = y if bias is None else y + bias[:, None]
        return y if activation is None else ACT2FN[activation](y)

    return run.edit(full, alone, 2)


def llamba_conv(run: Run, site: HeadSite, method: Callable, x: Tensor, padding=None, state=None) -> Tensor:
    full, conv = method(x, padding, state), site.mixer.conv1d

    def alone() -> Tensor:
        y = x * conv.weight[:, 0, -1]
        return y if conv.bias is None else y + conv.bias

    return run.edit(full, alone, 1)


# ---- states: the diagonal of M alone, from the scan's own arguments ----


def _mamba1_scan(run: Run, function: Callable, args: tuple, kwargs: dict):
    result, given = function(*args, **kwargs), bound(function, args, kwargs)
    full = result[0] if isinstance(result, tuple) else result  # [b, c, t], the gate included

    def alone() -> Tensor:
        x, delta = wide(given["hidden_states"]), wide(_step(given))
        y = x * delta * (wide(given["B"]) * wide(given["C"])).sum(1, keepdim=True)
        y = y if given.get("D") is None else y + x * wide(given["D"])[:, None]
        return y if given.get("z") is None else y * F.silu(wide(given["z"]))

    return _with_first(result, run.edit(full, alone, 2))


def _mamba2_scan(run: Run, function: Callable, args: tuple, kwargs: dict):
    result, given = function(*args, **kwargs), bound(function, args, kwargs)
    full = result[0] if isinstance(result, tuple) else result  # [b, t, h, p]
    if given.get("z") is not None:
        raise ModelError(f"{type(run.now.mixer).__name__} gates inside its scan, so its state cannot be switched off.")

    def alone() -> Tensor:
        x = wide(given["hidden_states"] if "hidden_states" in given else given["x"])
        own = (wide(given["B"]) * wide(given["C"])).sum(-1)  # [b, t, g]
        own = own.repeat_interleave(x.shape[2] // own.shape[2], dim=2) * wide(_step_sizes(run.now, given))
        own = own if given.get("D") is None else own + wide(given["D"])
        return x * own[..., None]

    return _with_first(result, run.edit(full, alone, 1))


def _mamba_step(run: Run, function: Callable, args: tuple, kwargs: dict) -> Tensor:
    """One cached step: the same step from an empty state."""
    state, *rest = args
    full = function(state, *rest, **kwargs)
    return run.edit(full, lambda: function(torch.zeros_like(state), *rest, **kwargs), None)


def _delta_rule(run: Run, function: Callable, args: tuple, kwargs: dict):
    result, given = function(*args, **kwargs), bound(function, args, kwargs)

    def alone() -> Tensor:
        q, k, value, beta = (wide(given[n]) for n in ("query", "key", "value", "beta"))
        if given["use_qk_l2norm_in_kernel"]:
            q, k = (v * torch.rsqrt(v.square().sum(-1, keepdim=True) + _L2_EPS) for v in (q, k))
        own = (q * k).sum(-1) * q.shape[-1] ** -0.5
        own = own.repeat_interleave(value.shape[2] // own.shape[2], dim=2)
        return (beta * own)[..., None] * value

    return _with_first(result, run.edit(result[0], alone, 1))


def _with_first(result, first: Tensor):
    return (first, *result[1:]) if isinstance(result, tuple) else first


def llamba_scan(run: Run, site: HeadSite, method: Callable, x, B, C, log_decay, state=None) -> Tensor:
    full = method(x, B, C, log_decay, state)
    return run.edit(full, lambda: (wide(B) * wide(C)).sum(-1, keepdim=True) * wide(x), 1)


def _lightning_values(run: Run, function: Callable, args: tuple, kwargs: dict) -> Tensor:
    run.qkv = function(*args, **kwargs)
    return run.qkv


def lightning_output(run: Run, site: HeadSite, module: nn.Module, args: tuple) -> tuple:
    def alone() -> Tensor:
        b, t = args[0].shape[:2]
        q, k, value = wide(run.qkv).reshape(b, t, site.n_heads, 3, site.head_dim).unbind(3)
        return ((q * k).sum(-1, keepdim=True) * value).reshape(args[0].shape)

    return (run.edit(args[0], alone, 1), *args[1:])


_DELTA = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
_KIMI = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
#: name -> what stands in for the convolutions of transformers' modelling files
CONVOLUTIONS: dict[str, Callable] = {"causal_conv1d_fn": conv, "causal_conv1d_update": conv}
#: by kind, what stands in for which global function of its modelling file
STATES: dict[str, dict[str, Callable]] = {
    "mamba1": {"mamba_selective_scan": _mamba1_scan, "mamba_selective_state_update": _mamba_step},
    "mamba2": dict.fromkeys(_SCANS, _mamba2_scan) | {"mamba2_selective_state_update": _mamba_step},
    "deltanet": dict.fromkeys(_DELTA, _delta_rule),
    "kda": dict.fromkeys(_KIMI, _delta_rule),
    "lightning": {"apply_mask_to_padding_states": _lightning_values},
}
