"""What if heads are off?

`mask_heads` edits the *input* of each mixer's output projection, where a head is a contiguous slice, through forward
pre-hooks. No weight is touched: Zamba2 uses one attention block's weights at many depths, and an edit of the weights
would switch the head off at all of them. Masks nest, leave the hooks of others alone and are gone after the block,
also after an exception.

Positions are counted in an example's own tokens, so they mean the same under left padding, right padding and none:

    all      every position (the paper's protocol, which zeroes columns of the output projection)
    last     the last token of the prompt: the position that an Aggregate head reads from
    answer   the last token of the prompt and every later one: each position that predicts a token of the answer
    lists    one list of token positions for each example of the batch, negative ones from the end
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .errors import GAError, HeadError, ModelError
from .heads import Head, parse_heads
from .language_model import LanguageModel, Layout
from .sites import HeadSite, resolve

Positions = str | Sequence[Sequence[int]] | None


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
    - "resample": the head's output on another prompt, at the same position: `reference` holds one prompt for each
      example, in the examples' order.

    Raises `HeadError` for a head that does not exist (naming what does) or a position outside an example, and
    `ModelError` if the model ran but never called a masked projection as a module (a fused kernel did its work): such
    a mask would have done nothing. Warns if a mask changed nothing. Reference activations are measured on entry, with
    outer masks in force.
    """
    chosen = _by_site(lm, parse_heads(heads))
    if lm.model.training:
        raise ModelError("The model is in training mode, where fused kernels can pass masks by: call model.eval() first.")
    if fill not in ("zero", "mean", "resample"):
        raise GAError(f"fill={fill!r} is unknown: use 'zero', 'mean' or 'resample'.")
    if (fill == "zero") != (reference is None):
        need = "takes no reference prompts" if fill == "zero" else "needs reference prompts (reference=[...])"
        raise GAError(f"fill={fill!r} {need}.")
    where = _Where(lm, positions)
    masks = [_SiteMask(s, i, where) for s, i in chosen.items()]
    if fill != "zero" and masks:
        _measure_fills(lm, masks, fill, list(reference), where)
    handles = [lm.backbone.register_forward_pre_hook(where.on_forward, with_kwargs=True)]
    handles += [m.site.proj.register_forward_pre_hook(m) for m in masks]
    try:
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


class _Where:
    """Which positions of the forward call in progress are masked: None for all, else a boolean tensor [b, t]."""

    def __init__(self, lm: LanguageModel, positions: Positions):
        if isinstance(positions, str) and positions not in ("all", "last", "answer"):
            raise HeadError(f"positions={positions!r} is unknown: use 'all', 'last', 'answer' or one list for each example.")
        if positions is not None and not isinstance(positions, str):
            positions = [list(p) if isinstance(p, (list, tuple, range)) else p for p in positions]
            if not all(isinstance(p, list) and all(isinstance(i, int) for i in p) for p in positions):
                raise HeadError("positions as lists must be one list of integers for each example of the batch.")
        self.lm, self.positions = lm, "all" if positions is None else positions
        self.calls = 0
        self.mask: Tensor | None = None
        self.index: Tensor | None = None  # [b, t] position of each column in its example, -1 at pads
        self.rows: list[int] = []
        self._moved: dict[torch.device, Tensor] = {}

    def on_forward(self, module, args, kwargs) -> None:
        self.calls += 1
        self._moved.clear()
        layout = self.lm.layout or Layout()
        real = real_tokens(self.lm, args, kwargs, strict=self.positions != "all")
        past = torch.zeros(real.shape[0], 1, dtype=torch.long) if layout.past is None else layout.past.view(-1, 1).cpu()
        index = real.long().cumsum(1) - 1 + past
        self.index = torch.where(real, index, -1)
        self.rows = list(range(real.shape[0])) if layout.rows is None else list(layout.rows)
        self.mask = None if self.positions == "all" else self._masked(real, layout)

    def _masked(self, real: Tensor, layout: Layout) -> Tensor:
        total = self.index.amax(1, keepdim=True) + 1  # tokens of each example up to this call
        if isinstance(self.positions, str):
            ends = total - 1 if layout.prompt_ends is None else layout.prompt_ends.view(-1, 1).cpu()
            return real & (self.index == ends if self.positions == "last" else self.index >= ends)
        if max(self.rows) >= len(self.positions):
            raise HeadError(
                f"positions holds {len(self.positions)} lists, but the batch has an example {max(self.rows)} (of "
                f"{len(self.rows)} rows): give one list for each example."
            )
        mask = torch.zeros_like(real)
        for b, row in enumerate(self.rows):
            n = int(total[b])
            for p in self.positions[row]:
                if not -n <= p < n:
                    raise HeadError(f"Position {p} lies outside example {row}, which has {n} tokens.")
                mask[b] |= self.index[b] == p % n
        return mask

    def on(self, device: torch.device) -> Tensor | None:
        if self.mask is None:
            return None
        if device not in self._moved:
            self._moved[device] = self.mask.to(device)
        return self._moved[device]


class _SiteMask:
    """The forward pre-hook of one site's output projection."""

    def __init__(self, site: HeadSite, indices: list[int], where: _Where):
        self.site, self.indices, self.where = site, indices, where
        self.channels = torch.zeros(site.width, dtype=torch.bool)
        for i in indices:
            self.channels[site.channels(i)] = True
        self.fill: Tensor | None = None  # [width], or [n, t, width] for resampling; None means zero
        self.seen, self.changed = 0, False
        self._moved: dict[tuple, Tensor] = {}

    def __call__(self, module, args):
        x, *rest = args
        check_input(self.site, x)
        self.seen += 1
        positions = self.where.on(x.device)
        if positions is not None:
            if positions.shape != x.shape[:2]:
                raise ModelError(
                    f"{type(self.site.mixer).__name__} saw a batch of {tuple(x.shape[:2])} where the model was given "
                    f"{tuple(positions.shape)}: positions cannot be told."
                )
            if not positions.any():
                return None
        mask = self._on("channels", self.channels, x)
        if positions is not None:
            mask = mask & positions.unsqueeze(-1)
        fill = x.new_zeros(()) if self.fill is None else self._filling(x)
        new = torch.where(mask, fill, x)
        if not self.changed:
            self.changed = bool((new != x).any())
        return (new, *rest)

    def _on(self, name: str, tensor: Tensor, x: Tensor) -> Tensor:
        key = (name, x.device, x.dtype)
        if key not in self._moved:
            self._moved[key] = tensor.to(x.device, tensor.dtype if tensor.dtype == torch.bool else x.dtype)
        return self._moved[key]

    def _filling(self, x: Tensor) -> Tensor:
        fill = self._on("fill", self.fill, x)
        if fill.ndim == 1:
            return fill
        rows = torch.tensor(self.where.rows, device=x.device)
        if int(rows.max()) >= fill.shape[0]:
            raise GAError(f"reference holds {fill.shape[0]} prompts, but the batch has an example {int(rows.max())}.")
        fill = fill[rows]
        if fill.shape[1] == 1:  # the reference's last token, wherever the mask lies
            return fill
        index = self.where.index.to(x.device)
        at = index.clamp(0, fill.shape[1] - 1).unsqueeze(-1).expand(-1, -1, fill.shape[2])
        filling = torch.gather(fill, 1, at)
        masked = index >= 0 if self.where.mask is None else self.where.on(x.device)
        if bool((masked & ((index >= fill.shape[1]) | filling[..., 0].isnan())).any()):
            raise GAError(
                "A reference prompt has fewer tokens than its example: resampling needs, at each masked position, the same "
                "position of the reference."
            )
        return torch.where(masked.unsqueeze(-1), filling, x)  # pads stay as they are

    def report(self, calls: int) -> None:
        names = ", ".join(str(self.site.head(i)) for i in self.indices[:4]) + (" ..." if len(self.indices) > 4 else "")
        if calls and not self.seen:
            raise ModelError(
                f"The mask on {names} was never reached: {type(self.site.mixer).__name__} does not call its output "
                "projection as a module (a fused kernel may do its work)."
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
            f"{type(site.mixer).__name__} in layer {site.layer} hands its projection an input of shape {tuple(x.shape)}, "
            f"not [batch, time, {site.width}]: its heads cannot be told apart."
        )


def real_tokens(lm: LanguageModel, args: tuple, kwargs: dict, strict: bool = True) -> Tensor:
    """Which columns of a forward call hold real tokens: boolean [b, t], on the CPU.

    Raises `HeadError` where that cannot be told and `strict` asks for it: a batch without an attention mask that
    begins or ends with the pad token.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    attention = kwargs.get("attention_mask")
    b, t = ids.shape[:2]
    if isinstance(attention, Tensor) and attention.ndim == 2:
        return attention[:, -t:].bool().cpu()
    pad = lm.tokenizer.pad_token_id
    if strict and b > 1 and ids.ndim == 2 and pad is not None and bool((ids[:, [0, -1]] == pad).any()):
        raise HeadError(
            "The batch holds pad tokens but came without an attention mask, so the examples' last tokens cannot be told: "
            "pass attention_mask."
        )
    return torch.ones(b, t, dtype=torch.bool)


def _measure_fills(lm: LanguageModel, masks: list[_SiteMask], fill: str, reference: list[str], where: _Where) -> None:
    """Run the reference prompts once and give each site its fill."""
    at_end = where.positions in ("last", "answer")
    kept: dict[HeadSite, list[Tensor]] = {m.site: [] for m in masks}
    for start in range(0, len(reference), 16):
        batch = lm.encode(reference[start : start + 16])
        real = batch["attention_mask"].bool().cpu()
        with capture_inputs([m.site for m in masks]) as inputs, torch.no_grad():
            lm.model(**batch)
        for m in masks:
            x = inputs[m.site].cpu()
            for row, mask in zip(x, real, strict=True):
                kept[m.site].append(row[mask][-1:] if at_end else row[mask])
    for m in masks:
        if fill == "mean":
            m.fill = torch.cat(kept[m.site]).double().mean(0).to(kept[m.site][0].dtype)
        else:
            longest = max(len(x) for x in kept[m.site])
            m.fill = torch.full((len(reference), longest, m.site.width), float("nan"), dtype=kept[m.site][0].dtype)
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
