"""What does an attention head do to the sequence? Its softmax weights, from the very call that computed them.

Every attention of transformers asks `ALL_ATTENTION_FUNCTIONS.get_interface` for the function that mixes its
tokens and hands that function the queries and keys after projections, norms and rotation, the values, the
mask and the scale. That call is recorded here, so that grouped queries, latent attention, q/k norms, soft
caps, sliding windows and position biases need no code of their own, and eager and sdpa give the same matrix:

    M = softmax(cap(q k^T scale) + bias + mask),   output = M value, before any output gate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GAError
from ..sites import HeadSite
from .base import Captured, Family, finish, namespace, pick, register, replaced, running, wide

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
#: arguments of an attention function that change what it computes and that `Attention` puts into M
_KNOWN = {"scaling", "softcap", "position_bias", "is_causal", "sliding_window", "s_aux"}


class StandIn:
    """Stands in for transformers' registry of attention functions; what it does not define is the registry's own."""

    def __init__(self, registry: Any):
        self._registry = registry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)

    def __getitem__(self, name: str) -> Any:
        return self._registry[name]

    def __contains__(self, name: str) -> bool:
        return name in self._registry


class _Listening(StandIn):
    """Reports the calls made through the registry."""

    def __init__(self, registry: Any, report: Callable):
        super().__init__(registry)
        self._report = report

    def get_interface(self, name: str | None, default: Callable) -> Callable:
        function = self._registry.get_interface(name, default)

        def listening(module, query, key, value, attention_mask, *args, **kwargs):
            result = function(module, query, key, value, attention_mask, *args, **kwargs)
            self._report(name, (query, key, value, attention_mask, args, kwargs), result)
            return result

        return listening


class Attention(Family):
    """Softmax attention of any transformers model; M is its attention pattern."""

    kind = "attention"

    @contextlib.contextmanager
    def watch(self, site: HeadSite) -> Iterator[Captured]:
        """Record the one call that the site makes to its attention function."""
        cap, scope, name = Captured(site), namespace(site), type(site.mixer).__name__
        if _REGISTRY not in scope:
            raise GAError(
                f"{name} ({site.path}) does not take its attention function from transformers' registry, so "
                "what it computed cannot be read; its matrices are not available."
            )

        def report(implementation: str | None, call: tuple, result: Any) -> None:
            if not state["now"]:
                return
            query, key, value, mask, args, kwargs = call
            if cap.output is not None:
                raise GAError(f"{name} ({site.path}) ran twice in one forward pass: one run has one matrix.")
            if args or not isinstance(mask, Tensor | None):
                raise GAError(
                    f"{name} ran {implementation!r} attention with arguments that M cannot be read from: "
                    "load the model with attn_implementation='eager' or 'sdpa'."
                )
            heads = query.shape[1]
            if heads != site.n_heads or heads % key.shape[1] or query.shape[2] != key.shape[2]:
                raise GAError(
                    f"{name} ({site.path}) mixed {query.shape[2]} queries of {heads} heads with "
                    f"{key.shape[2]} keys of {key.shape[1]}: M needs {site.n_heads} heads and no cache."
                )
            cap.tensors = {"query": query, "key": key, "mask": mask, "implementation": implementation or ""}
            cap.tensors |= {k: v for k, v in kwargs.items() if k in _KNOWN}
            cap.tensors["group"] = heads // key.shape[1]
            cap.tensors["is_causal"] = kwargs.get("is_causal", getattr(site.mixer, "is_causal", True))
            cap.value = value.repeat_interleave(cap.tensors["group"], dim=1)
            output = result[0] if isinstance(result, tuple) else result
            cap.output = output.transpose(1, 2)

        with contextlib.ExitStack() as stack:
            state = stack.enter_context(running(site))
            stack.enter_context(replaced(scope, _REGISTRY, _Listening(scope[_REGISTRY], report)))
            yield cap

    def matrix(self, cap: Captured, heads: Sequence[int], with_d: bool) -> Tensor:
        """Attention patterns ``[b, h, t, s]``; rows of real tokens sum to 1 (less with attention sinks)."""
        query = pick(cap.tensors["query"], heads)
        return finish(self._weights(cap, heads, query, None), cap.real)

    def rows(self, cap: Captured, heads: Sequence[int], positions: Tensor, with_d: bool) -> Tensor:
        """Rows ``[b, h, r, s]`` of the attention patterns at `positions` ``[b, r]``."""
        query = _at(pick(cap.tensors["query"], heads), positions)
        return finish(self._weights(cap, heads, query, positions), cap.real, positions)

    def _weights(self, cap: Captured, heads: Sequence[int], query: Tensor, positions: Tensor | None) -> Tensor:
        t = cap.tensors
        key = wide(pick(t["key"], [h // t["group"] for h in heads]))
        scale = t.get("scaling")
        scores = wide(query) @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if t.get("softcap") is not None:
            scores = torch.tanh(scores / t["softcap"]) * t["softcap"]
        bias = t.get("position_bias")
        if bias is not None:
            scores = scores + wide(_part(bias, heads, positions))
        scores = self._masked(cap, heads, scores, positions)
        if t.get("s_aux") is None:
            return scores.softmax(-1)
        # a sink is a key without a value: it takes its share of the weights and is then dropped
        sink = wide(pick(t["s_aux"].flatten(), heads, 0)).view(1, -1, 1, 1)
        sink = sink.expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]

    def _masked(self, cap: Captured, heads: Sequence[int], scores: Tensor, positions: Tensor | None) -> Tensor:
        t, length = cap.tensors, scores.shape[-1]
        mask, lowest = t["mask"], torch.finfo(scores.dtype).min
        if mask is not None and mask.ndim == 4:
            mask = _part(mask, heads, positions)
            if mask.dtype == torch.bool:
                return scores.masked_fill(~mask, lowest)
            return scores + wide(mask)
        # flash attention and sdpa's fast path: no mask, or the padding alone
        keys = torch.arange(length, device=scores.device)
        queries = keys if positions is None else positions[:, :, None]
        queries = queries[:, None] if positions is None else queries
        keep = keys <= queries if t["is_causal"] else torch.ones_like(keys <= queries)
        if t.get("sliding_window") is not None and t["implementation"] not in ("eager", "sdpa"):
            keep = keep & (keys > queries - t["sliding_window"])
        keep = keep[None, None] if positions is None else keep[:, None]
        if mask is not None and mask.ndim == 2:
            keep = keep & mask[:, None, None, -length:].bool()
        return scores.masked_fill(~keep, lowest)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """x ``[b, h, t, d]`` at positions ``[b, r]``: ``[b, h, r, d]``."""
    index = positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.expand(len(positions), -1, -1, -1).gather(2, index)


def _part(x: Tensor, heads: Sequence[int], positions: Tensor | None) -> Tensor:
    """The part of a mask or bias ``[1 or b, 1 or h, t, s]`` for `heads` and the chosen rows."""
    x = x if x.shape[1] == 1 else pick(x, heads)
    return x if positions is None else _at(x, positions)


register(Attention())
