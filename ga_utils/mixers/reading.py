"""How are the ingredients of M collected from a forward pass, one layer at a time?

`visit` runs the model once and hands each wanted site's `Captured` to a function as soon as the site's layer
is done, so that only one layer's tensors are alive at a time. Around it: what counts as input, which column
of a padded batch a position is, whether the request fits into memory, and whether M reproduces the recorded
output.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ..errors import GAError, HeadError
from ..heads import Head, parse_heads
from ..language_model import LanguageModel
from ..sites import HeadSite, find_layers
from .base import FAMILIES, Captured, pick, wide, wide_dtype

#: temporaries are kept near this many bytes by taking a few heads at a time
SCRATCH = 2**28
#: largest relative difference between M x value and the recorded output that rounding explains
BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_CUDA_BOUND = 1e-2  # fused kernels multiply float32 in TF32


def by_site(lm: LanguageModel, heads: object) -> dict[HeadSite, list[Head]]:
    """The heads named by `heads`, by site, in the order of the model's layers.

    Raises `HeadError` for a head that does not exist and `GAError` for one whose mixer has no matrix here.
    """
    chosen: dict[HeadSite, list[Head]] = {}
    for head in parse_heads(heads):
        chosen.setdefault(lm.site(head), []).append(head)
    if not chosen:
        raise HeadError("No heads were named: name at least one, such as 'L0H0'.")
    for site in chosen:
        check_kind(site)
    return dict(sorted(chosen.items(), key=lambda item: lm.sites.index(item[0])))


def check_kind(site: HeadSite) -> None:
    """Raise `GAError` if sites of this kind have no matrix."""
    if site.kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise GAError(
            f"Layer {site.layer}'s {type(site.mixer).__name__} is a mixer of kind {site.kind}, which has no "
            f"matrix in this package; these have: {known}."
        )


def encode(lm: LanguageModel, inputs: object) -> dict[str, Tensor]:
    """input_ids, attention_mask and, where some column is a pad, position_ids, each ``[b, t]``.

    inputs: a prompt, a list of prompts, or a dict with input_ids ``[b, t]`` and perhaps attention_mask,
    padded on either side. Raises `GAError` for anything else, for an empty text and for one that is too long.
    """
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, (list, tuple)) and inputs and all(isinstance(p, str) for p in inputs):
        batch = lm.encode(list(inputs))
    elif hasattr(inputs, "keys") and "input_ids" in inputs.keys():
        ids = torch.as_tensor(inputs["input_ids"])
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
        if ids.ndim != 2 or ids.shape != mask.shape:
            raise GAError(
                f"input_ids and attention_mask must both be [batch, tokens], not {list(ids.shape)} and "
                f"{list(mask.shape)}."
            )
        batch = {"input_ids": ids.to(lm.device), "attention_mask": mask.to(lm.device).long()}
    else:
        raise GAError(
            "inputs must be a prompt, a list of prompts, or a dict with input_ids and attention_mask, not "
            f"{type(inputs).__name__}."
        )
    real = batch["attention_mask"].bool()
    length = int(real.sum(1).max()) if real.numel() else 0
    if not real.numel() or not real.any(1).all():
        raise GAError("An input without tokens has no matrix: give each prompt at least one token.")
    if (real.long().diff(dim=1).abs().sum(1) > 1).any():
        raise GAError("attention_mask has gaps inside a text; pads must stand on its left or right.")
    if lm.max_length and length > lm.max_length:
        raise GAError(f"The longest input has {length} tokens, but {lm.name} takes at most {lm.max_length}.")
    if not real.all() and "position_ids" in inspect.signature(lm.backbone.forward).parameters:
        # GPT-2 needs to be told where a left-padded text begins; to the others it makes no difference
        batch["position_ids"] = (real.long().cumsum(1) - 1).clamp_min(0)
    return batch


def columns(positions: object, real: Tensor) -> Tensor:
    """Columns ``[b, r]`` of the batch at `positions`, which count an example's own tokens.

    positions: "last", one integer, a list of integers for all examples, or a list of integers for each
    example (equally many); negative ones count from the end. Pads are not counted, so no position falls on
    one. Raises `HeadError` for a position outside an example.
    """
    if isinstance(positions, str) and positions == "last":
        positions = [-1]
    if isinstance(positions, Tensor):
        positions = positions.tolist()
    if isinstance(positions, int) and not isinstance(positions, bool):
        positions = [positions]
    if not isinstance(positions, (list, tuple, range)):
        raise HeadError(f"positions={positions!r} is unknown: use 'last' or lists of token positions.")
    positions = list(positions)
    if all(isinstance(p, int) for p in positions):
        positions = [positions] * len(real)
    if len(positions) != len(real) or not all(isinstance(p, (list, tuple, range)) for p in positions):
        raise HeadError(f"positions must hold one list for each of the {len(real)} examples.")
    if len({len(p) for p in positions}) != 1 or not len(positions[0]):
        raise HeadError("positions must name equally many tokens, at least one, in every example.")
    out = torch.zeros(len(real), len(positions[0]), dtype=torch.long, device=real.device)
    for i, own in enumerate(positions):
        where = real[i].nonzero().flatten()
        for j, p in enumerate(own):
            if not -len(where) <= p < len(where):
                raise HeadError(f"Position {p} lies outside example {i}, which has {len(where)} tokens.")
            out[i, j] = where[p]
    return out


def guard(lm: LanguageModel, what: str, result: int, scratch: int, advice: str) -> None:
    """Raise `GAError` if `result` + `scratch` bytes do not fit into the free memory of the model's device."""
    device = lm.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if result + scratch > free:
        raise GAError(
            f"{what} would take {(result + scratch) / 1e9:.3g} GB, but {free / 1e9:.3g} GB of memory are "
            f"free on {device}: {advice}."
        )


def itemsize(lm: LanguageModel) -> int:
    """Bytes of one entry of M."""
    return wide_dtype(lm.dtype).itemsize


def blocks(cap: Captured, indices: Sequence[int], n_rows: int) -> list[list[int]]:
    """`indices` cut into lists whose matrices or rows need about `SCRATCH` bytes each, or hold one head."""
    family = FAMILIES[cap.site.kind]
    one = family.bytes_needed(cap, 1, n_rows)
    each = family.bytes_needed(cap, 2, n_rows) - one
    step = max(1, int((SCRATCH - one) // max(each, 1)))
    return [list(indices[i : i + step]) for i in range(0, len(indices), step)]


def visit(
    lm: LanguageModel,
    batch: dict[str, Tensor],
    sites: Sequence[HeadSite],
    see: Callable[[Captured], None],
    grad: bool = False,
) -> None:
    """Run the model on `batch` and call ``see(captured)`` for each site when its layer is done.

    Raises `GAError` for a model in training mode (dropout, and fused kernels that bypass the projection) and
    for a mixer whose computation was not seen.
    """
    args: dict[str, Any] = dict(batch)
    if "use_cache" in inspect.signature(lm.backbone.forward).parameters:
        args["use_cache"] = False
    with watching(lm, sites, batch["attention_mask"].bool(), see), torch.set_grad_enabled(grad):
        # the backbone alone: logits over the vocabulary would be the largest tensor of all
        lm.backbone(**args)


@contextlib.contextmanager
def watching(
    lm: LanguageModel, sites: Sequence[HeadSite], real: Tensor, see: Callable[[Captured], None]
) -> Iterator[None]:
    """Within the block, call ``see(captured)`` for each site when its layer has run; one forward pass.

    Nothing that the model computes is changed. real ``[b, t]``: False at pads. Raises as `visit`.
    """
    if lm.model.training:
        raise GAError("The model is in training mode, where dropout changes its mixers: call model.eval() first.")
    seen: set[HeadSite] = set()

    def report(cap: Captured) -> None:
        if cap.output is None or cap.projected is None:
            raise GAError(
                f"What {type(cap.site.mixer).__name__} ({cap.site.path}) computed was not seen: it ran by "
                "another path than its modelling file's own, so its matrices are not available."
            )
        cap.real = real.to(cap.output.device)
        cap.projected = cap.projected.unflatten(-1, (cap.site.n_heads, -1)).transpose(1, 2)
        seen.add(cap.site)
        see(cap)

    with contextlib.ExitStack() as stack:
        layers = find_layers(lm.model)[1]
        for index in sorted({s.layer for s in sites}):
            here = [s for s in sites if s.layer == index]
            stack.enter_context(_layer_watched(layers[index], here, report))
        yield
    missed = [s for s in sites if s not in seen]
    if missed:
        raise GAError(f"The forward pass never ran {missed[0].path}, so its matrices are not available.")


@contextlib.contextmanager
def _layer_watched(layer: nn.Module, sites: list[HeadSite], report: Callable[[Captured], None]) -> Iterator[None]:
    """Watch the sites of one decoder layer while it runs, and report them when it has run."""
    open_now: list[contextlib.ExitStack] = []
    caps: list[Captured] = []

    def enter(module, args, kwargs) -> None:
        stack = contextlib.ExitStack()
        open_now.append(stack)
        for site in sites:
            cap = stack.enter_context(FAMILIES[site.kind].watch(site))
            caps.append(cap)

            def keep(module, args, cap=cap) -> None:
                cap.projected = args[0]

            stack.callback(site.proj.register_forward_pre_hook(keep).remove)

    def close() -> None:
        while open_now:
            open_now.pop().close()

    def leave(module, args, output) -> None:
        close()
        while caps:
            report(caps.pop(0))

    def failed(module, args, output) -> None:
        close()

    handles = [
        layer.register_forward_pre_hook(enter, with_kwargs=True),
        layer.register_forward_hook(leave),
        layer.register_forward_hook(failed, always_call=True),
    ]
    try:
        yield
    finally:
        close()
        for handle in handles:
            handle.remove()


def verify(cap: Captured, heads: Sequence[int], m: Tensor, positions: Tensor | None = None) -> None:
    """Raise `GAError` unless M x value is the output that the model computed, at the rows of `m`.

    m: ``[b, h, t, s]`` with D, or its rows ``[b, h, r, s]`` at `positions` ``[b, r]``. The measure is the
    relative error of a head's output over the batch, against a hundredth of the sum of the terms' absolute
    values where the terms cancel to less than that.
    """
    value, output = wide(pick(cap.value, heads)).to(m.dtype), wide(pick(cap.output, heads)).to(m.dtype)
    value, m = value.detach(), m.detach()
    if positions is None:
        keep = cap.real[:, None, :, None]
    else:
        output = output.gather(2, positions[:, None, :, None].expand(-1, len(heads), -1, output.shape[-1]))
        keep = torch.ones_like(positions, dtype=torch.bool)[:, None, :, None]
    # values at pads may be anything, NaN included; M is 0 there
    value = torch.where(cap.real[:, None, :, None], value, 0.0)
    off = torch.where(keep, m @ value - output.detach(), 0.0).pow(2).sum((0, 2, 3)).sqrt()
    size = torch.where(keep, output.detach(), 0.0).pow(2).sum((0, 2, 3)).sqrt()
    bound = max(BOUNDS[cap.output.dtype], BOUNDS[cap.projected.dtype], _CUDA_BOUND if m.is_cuda else 0.0)
    bad = ~(off <= bound * size)
    if bad.any():
        size = torch.maximum(size, 1e-2 * (m.abs() @ value.abs()).pow(2).sum((0, 2, 3)).sqrt())
        bad = ~(off <= bound * size + torch.finfo(m.dtype).tiny)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise GAError(
            f"The matrix of {cap.site.head(heads[i])} does not reproduce what "
            f"{type(cap.site.mixer).__name__} computed (relative error {float(off[i] / size[i]):.1e}): this "
            f"architecture's {cap.site.kind} has a part that M does not know, so none is returned."
        )


def span_columns(spans: Sequence[Sequence[tuple[int, int]]], real: Tensor) -> Tensor:
    """Which columns lie in each span: boolean ``[b, k, s]``; spans as in `row_statistics`."""
    spans = [list(s) for s in spans] or [[] for _ in real]
    if len(spans) != len(real) or len({len(s) for s in spans}) != 1:
        raise HeadError(f"spans must hold one list for each of the {len(real)} examples, all equally long.")
    own = torch.where(real, real.long().cumsum(1) - 1, -1)
    out = torch.zeros(len(real), len(spans[0]), real.shape[1], dtype=torch.bool, device=real.device)
    for i, row in enumerate(spans):
        n = int(real[i].sum())
        for k, (start, end) in enumerate(row):
            if not 0 <= start < end <= n:
                raise HeadError(f"Span ({start}, {end}) does not lie inside example {i}, which has {n} tokens.")
            out[i, k] = (own[i] >= start) & (own[i] < end)
    return out
