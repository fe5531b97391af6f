"""What if heads are off?

`mask_heads` edits the *input* of each mixer's output projection, where a head is a contiguous slice, through forward
pre-hooks. No weight is touched: Zamba2 uses one attention block's weights at many depths, and an edit of the weights
would switch the head off at all of them. Masks nest, leave the hooks of others alone and are gone after the block,
also after an exception.

Positions are counted in the tokens of an example's own prompt (`positions.py`), so they mean the same under left
padding, right padding and none:

    all      every position (the paper's protocol, which zeroes columns of the output projection)
    last     the last token of the prompt: the position that an Aggregate head reads from
    answer   the last token of the prompt and every later one: each position that predicts a token of the answer
    lists    one list of positions for each example of the batch, negative ones from the prompt's end
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .errors import GAError, ModelError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .positions import _NO_COPY, Positions, Where
from .sites import HeadSite, resolve


@contextlib.contextmanager
def mask_heads(
    lm: LanguageModel,
    heads: object,
    positions: Positions = None,
    fill: str = "zero",
    reference: Sequence[str] | None = None,
) -> Iterator[None]:
    """Switch heads off inside a ``with`` block.

    heads: anything that `parse_heads` reads; an empty list masks nothing. positions: see the module's docstring; None
    means "all". fill: what stands in place of a head's output ``[b, t, head_dim]``:

    - "zero": nothing (the paper, section 4);
    - "mean": the head's mean output over the real tokens of the `reference` prompts (over their last tokens where
      positions is "last" or "answer");
    - "resample": the head's output on another prompt, at the same position (at its last token where positions is
      "last" or "answer"): `reference` holds one prompt for each example, in the examples' order.

    Raises `HeadError` for a head that does not exist (naming what does), for a position outside a prompt and where
    positions cannot be told, and `ModelError` if a forward pass did not call a masked projection as a module (a
    fused kernel did its work): that mask would have done nothing. Warns if the mask at a site changed nothing.
    Reference activations are measured on entry, with outer masks in force. The model must not be copied inside the
    block.
    """
    chosen = _by_site(lm, parse_heads(heads))
    if lm.model.training or any(site.mixer.training for site in chosen):
        raise ModelError(
            "The model is in training mode, where fused kernels can pass masks by: call model.eval() first."
        )
    if fill not in ("zero", "mean", "resample"):
        raise GAError(f"fill={fill!r} is unknown: use 'zero', 'mean' or 'resample'.")
    if (fill == "zero") != (reference is None):
        need = "takes no reference prompts" if fill == "zero" else "needs reference prompts (reference=[...])"
        raise GAError(f"fill={fill!r} {need}.")
    where = Where(lm, positions, indexed=fill == "resample")
    masks = [_SiteMask(s, i, where) for s, i in chosen.items()]
    if fill != "zero":
        _measure_fills(lm, masks, fill, _prompts(reference), where)
    handles = []
    try:
        handles.append(lm.backbone.register_forward_pre_hook(where.before_forward, with_kwargs=True))
        handles.append(lm.backbone.register_forward_hook(where.after_forward))
        handles += [m.site.proj.register_forward_pre_hook(m) for m in masks]
        yield
        for m in masks:
            m.report(where.calls)
    finally:
        for h in handles:
            h.remove()


def _by_site(lm: LanguageModel, heads: tuple[Head, ...]) -> dict[HeadSite, list[int]]:
    chosen: dict[HeadSite, list[int]] = {}
    for head in heads:
        chosen.setdefault(resolve(lm.sites, head), []).append(head.index)
    return {site: sorted(set(indices)) for site, indices in chosen.items()}


class _SiteMask:
    """The forward pre-hook of one site's output projection."""

    def __init__(self, site: HeadSite, indices: list[int], where: Where):
        self.site, self.indices, self.where = site, indices, where
        self.channels = torch.cat([torch.arange(site.width)[site.channels(i)] for i in indices])
        # one value for each chosen channel [k], or [n, t, k] for resampling; None means zero
        self.fill: Tensor | None = None
        self.seen, self.changed = 0, False
        self._moved: dict[tuple, Tensor] = {}

    def __deepcopy__(self, memo: dict) -> _SiteMask:
        raise ModelError(_NO_COPY)

    def __call__(self, module, args):
        x, *rest = args
        check_input(self.site, x)
        self.seen += 1
        if self.where.indexed and self.where.index is None:
            raise ModelError(
                f"{type(self.site.mixer).__name__} ran outside a forward call of the model, so positions cannot be "
                "told: call the model, or mask all positions."
            )
        positions = self.where.on(x.device)
        if positions is not None:
            if positions.shape != x.shape[:2]:
                raise ModelError(
                    f"{type(self.site.mixer).__name__} saw a batch of {tuple(x.shape[:2])} where the model was given "
                    f"{tuple(positions.shape)}: positions cannot be told."
                )
            if not positions.any():
                return None
        channels = self._on("channels", self.channels, x)
        old = x.index_select(-1, channels)
        new = torch.zeros_like(old) if self.fill is None else self._filling(old).expand_as(old)
        if positions is not None:
            new = torch.where(positions.unsqueeze(-1), new, old)
        if not self.changed:
            self.changed = bool((new != old).any())
        return (x.index_copy(-1, channels, new), *rest)

    def _on(self, name: str, tensor: Tensor, x: Tensor) -> Tensor:
        key = (name, x.device, x.dtype)
        if key not in self._moved:
            self._moved[key] = tensor.to(x.device, x.dtype if tensor.is_floating_point() else tensor.dtype)
        return self._moved[key]

    def _filling(self, old: Tensor) -> Tensor:
        """The fill of the chosen channels, for `old` [b, t, k]."""
        fill = self._on("fill", self.fill, old)
        if fill.ndim == 1:
            return fill
        self.where.require_rows(fill.shape[0], "reference prompts")
        fill = fill[torch.tensor(self.where.rows, device=old.device)]
        if self.where.at_end:  # the reference's last token, wherever the mask lies
            return fill
        index = self.where.index.to(old.device)
        at = index.clamp(0, fill.shape[1] - 1).unsqueeze(-1).expand(-1, -1, fill.shape[2])
        filling = torch.gather(fill, 1, at)
        masked = index >= 0 if self.where.mask is None else self.where.on(old.device)
        if bool((masked & ((index >= fill.shape[1]) | filling[..., 0].isnan())).any()):
            raise GAError(
                "A reference prompt has fewer tokens than its example: resampling needs, at each masked "
                "position, the same position of the reference."
            )
        return torch.where(masked.unsqueeze(-1), filling, old)  # pads stay as they are

    def report(self, calls: int) -> None:
        names = ", ".join(str(self.site.head(i)) for i in self.indices[:4]) + (" ..." if len(self.indices) > 4 else "")
        if calls and not self.seen:
            raise ModelError(
                f"The mask on {names} was never reached: {type(self.site.mixer).__name__} does not call its output "
                "projection as a module (a fused kernel may do its work)."
            )
        if self.seen < calls:
            raise ModelError(
                f"The mask on {names} was reached in only {self.seen} of {calls} forward passes: "
                f"{type(self.site.mixer).__name__} does not always call its output projection as a module."
            )
        if calls and not self.changed:
            warnings.warn(
                f"The mask on {names} changed nothing: the heads already held the fill value at the masked positions.",
                UserWarning,
                stacklevel=4,
            )


def check_input(site: HeadSite, x: Tensor) -> None:
    """Raise `ModelError` unless `x` is a projection input ``[b, t, width]`` of `site`."""
    if x.ndim != 3 or x.shape[-1] != site.width:
        raise ModelError(
            f"{type(site.mixer).__name__} in layer {site.layer} hands its projection an input of shape "
            f"{tuple(x.shape)}, not [batch, time, {site.width}]: its heads cannot be told apart."
        )


def _prompts(reference: Sequence[str]) -> list[str]:
    prompts = [] if isinstance(reference, str) else list(reference)
    if not prompts or not all(isinstance(p, str) for p in prompts):
        raise GAError(f"reference={reference!r:.60} must be a list of one prompt or more.")
    return prompts


def _measure_fills(lm: LanguageModel, masks: list[_SiteMask], fill: str, reference: list[str], where: Where) -> None:
    """Run the reference prompts once and give each site its fill."""
    kept: dict[HeadSite, list[Tensor]] = {m.site: [] for m in masks}
    for start in range(0, len(reference), 16):
        batch = lm.encode(reference[start : start + 16])
        real = batch["attention_mask"].bool().cpu()
        if not real.any(1).all():
            raise GAError(f"A reference prompt has no tokens: {reference[start + int(real.any(1).int().argmin())]!r}.")
        # an outer mask sees each reference as the example that it stands for, and no layout of the caller's
        rows = range(start, start + len(real)) if fill == "resample" else None
        with capture_inputs([m.site for m in masks]) as inputs, torch.no_grad(), lm.asking(rows=rows):
            lm.model(**batch)
        for m in masks:
            x = inputs[m.site].cpu().index_select(-1, m.channels)
            for row, mask in zip(x, real, strict=True):
                kept[m.site].append(row[mask][-1:] if where.at_end else row[mask])
    for m in masks:
        if fill == "mean":
            m.fill = torch.cat(kept[m.site]).double().mean(0).to(kept[m.site][0].dtype)
        else:
            longest = max(len(x) for x in kept[m.site])
            m.fill = kept[m.site][0].new_full((len(reference), longest, len(m.channels)), float("nan"))
            for i, x in enumerate(kept[m.site]):
                m.fill[i, : len(x)] = x


@contextlib.contextmanager
def capture_inputs(sites: Sequence[HeadSite]) -> Iterator[dict[HeadSite, Tensor]]:
    """Collect the projection input ``[b, t, width]`` of each site during the last forward call inside the block."""
    inputs: dict[HeadSite, Tensor] = {}

    def hook(site: HeadSite):
        def keep(module, args):
            check_input(site, args[0])
            inputs[site] = args[0].detach()

        return keep

    handles = [s.proj.register_forward_pre_hook(hook(s)) for s in sites]
    try:
        yield inputs
    finally:
        for h in handles:
            h.remove()
