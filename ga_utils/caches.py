"""How is one forward pass made for many rows, and which models can be continued exactly from a cache?

Classes differ in the keyword of their cache, in what they make of an attention mask, and in whether a cached
step gives what a full forward gives. A wrong keyword is swallowed in silence, so names are read from the
signature, and no cache is trusted before it agreed with a full forward on the spot (`candidates.py` does that
check). Axes: b row, t token, v vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ga_utils.language_model import LanguageModel

# One-token steps from the cache agreed with full forwards within 1e-4 of the logits' spread (transformers
# 5.24, fp32).
EXACT = frozenset(
    """
    gpt2 gpt_neox llama qwen2 qwen3 mistral gemma2 gemma3 gemma3_text olmo2 phi3 zaya inkling inkling_text
    mamba falcon_mamba mamba2 llamba zamba jamba bamba falcon_h1 granitemoehybrid
    qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text olmo_hybrid lara_mini
    kimi_linear bailing_hybrid lfm2 lfm2_moe lfm3
    """.split()
)
# Never continued from a cache, and why.
INEXACT = {
    "zamba2": "its prefill clamps the step size dt and its cached steps do not",
    "nemotron_h": "its prefill clamps the step size dt and its cached steps do not",
    "rwkv": "its cached steps are wrong for more than one row",
    "recurrent_gemma": "its recurrent state lives in the modules, not in the cache",
    "minimax": "the cache of its lightning attention ignores a reordering of rows",
}
# A full-length mask beside a cache broadcasts wrongly, without an error (4 logit standard deviations off).
NO_MASK_IN_STEPS = frozenset({"mamba", "falcon_mamba", "mamba2"})
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass
class Forward:
    """Forward passes of one model at chosen positions, counted.

    calls: forward passes; tokens: token positions fed, padding included.
    """

    lm: LanguageModel
    calls: int = 0
    tokens: int = 0
    accepts: frozenset[str] = field(init=False)
    cache_name: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.accepts = frozenset(inspect.signature(self.lm.model.forward).parameters)
        self.cache_name = next((n for n in CACHE_NAMES if n in self.accepts), None)

    @torch.no_grad()
    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
        examples: Sequence[int],
        contexts: Sequence[int],
        past: int = 0,
        cache: object = None,
        keep_cache: bool = False,
        mask: bool = True,
    ) -> tuple[torch.Tensor, object]:
        """Logits [b, k, v] (float32 or better) at `positions` [b][k] of the tokens fed, and the cache.

        examples: [b] number of each row's example in the task; contexts: [b] how many tokens of it are
        prompt; past: tokens of each row in the cache. Masks that mean a position of the prompt need these.
        Rows are padded on the right, which is exact for causal models; with a cache they must be equally
        long.
        """
        width, device = max(map(len, sequences)), self.lm.device
        ids = torch.tensor([[*s, *[self.lm.pad_id] * (width - len(s))] for s in sequences], device=device)
        args = {"input_ids": ids}
        if mask and "attention_mask" in self.accepts:
            real = [[1] * (past + len(s)) + [0] * (width - len(s)) for s in sequences]
            args["attention_mask"] = torch.tensor(real, device=device)
        if "position_ids" in self.accepts:
            args["position_ids"] = torch.arange(past, past + width, device=device).repeat(len(sequences), 1)
        if "use_cache" in self.accepts:
            args["use_cache"] = keep_cache
        if cache is not None:
            args[self.cache_name] = cache
        at = torch.tensor([list(p) for p in positions], device=device)
        ends, before = torch.tensor(contexts) - 1, torch.full((len(sequences),), past)
        with self.lm.asking(ends, before, list(examples)), _head_at(self.lm.model, at, ids.shape) as done:
            out = self.lm.model(**args)
        logits = out.logits if done else _take(out.logits, at)
        self.calls += 1
        self.tokens += ids.numel()
        new = getattr(out, self.cache_name, None) if keep_cache and self.cache_name else None
        return (logits if logits.dtype == torch.float64 else logits.float()), new


def _take(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """x [b, t, d] at positions at [b, k] -> [b, k, d]."""
    return x[torch.arange(len(at), device=x.device)[:, None], at.to(x.device)]


@contextlib.contextmanager
def _head_at(model: torch.nn.Module, at: torch.Tensor, shape: torch.Size) -> Iterator[list]:
    """Let the output embedding see only the positions asked for: 32 x 300 x 128k logits are 5 GB.

    Yields a list that is non-empty once that happened; for a model without a plain head the caller takes the
    positions.
    """
    done: list[bool] = []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        yield done
        return

    def select(module, args):
        if args and args[0].shape[:2] == shape:
            done.append(True)
            return (_take(args[0], at), *args[1:])
        return None

    handle = head.register_forward_pre_hook(select)
    try:
        yield done
    finally:
        handle.remove()


def structure_key(model: torch.nn.Module) -> int:
    """Changes when modules are cut, swapped or hooked, after which a cache must prove itself again."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hash((hooks, *(id(m) for m in model.modules())))
