"""How does the answer's log-probability change as heads are masked a little? Gradients at every head's output, at once.

One forward pass reads the examples with their right answers (teacher forcing), one backward pass brings the gradient
of what was read to the input of every site's output projection, and there each head's part is multiplied by the change
that a mask would make. Only these products are kept, so memory holds one layer's gradients at a time.
Axes: b batch, t token, k token of the answer, w width of a projection's input, h head, v vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .caches import CACHE_NAMES, Forward
from .errors import ModelError
from .language_model import LanguageModel
from .masking import _measure_fills, _prompts, _SiteMask, check_input
from .positions import Where
from .sites import HeadSite, find_layers
from .tasks.tokens import EncodedExample
from .variants import out_of_memory


class Gradients:
    """Gradients of one model at the heads of `sites`, for masks at `positions` with `fill` (as in `mask_heads`).

    margins: whether what is differentiated is, for each token of the answer, its log-odds against all other tokens
    (a backward pass for each token); else the answer's log-probability (one backward pass). recompute: whether layers
    run again in the backward pass, so that memory holds the activations of one layer instead of all.

    `forward.calls` and `backwards` count the passes made.
    """

    def __init__(
        self,
        lm: LanguageModel,
        sites: Sequence[HeadSite],
        positions: str,
        fill: str = "zero",
        reference: Sequence[str] | None = None,
        margins: bool = True,
        recompute: bool = False,
    ):
        self.lm, self.sites, self.margins, self.recompute = lm, list(sites), margins, recompute
        self.where, self.forward, self.backwards = Where(lm, positions, indexed=True), Forward(lm), 0
        self.fills: dict[HeadSite, Tensor] = {}
        if fill == "mean":
            masks = [_SiteMask(s, list(range(s.n_heads)), self.where) for s in self.sites]
            _measure_fills(lm, masks, fill, _prompts(reference), self.where)
            self.fills = {m.site: m.fill for m in masks}

    def ask(
        self, items: Sequence[EncodedExample], numbers: Sequence[int], site: HeadSite | None = None, way: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(values [b, k], changes [h, b, k]) for examples `items`, which are `numbers` in the task.

        values: what is differentiated, nats (k = 1 unless `margins`), NaN behind an answer's last token; changes: what
        masking each head costs of it, to first order (0 behind the last token), for the heads of all sites in order.
        With `site`, for the heads of that site alone, in a model in which these are moved together by `way` (from 0 to
        1) of the way to their masks; nothing below that site is differentiated. On the CPU, float32 or better.
        """
        sites = self.sites if site is None else [site]
        found: dict[HeadSite, Tensor] = {}

        def watch(s: HeadSite, x: Tensor) -> Tensor:
            if site is not None:
                leaf[:] = [(x - way * self._change(s, x)).detach().requires_grad_()]
                x, of = leaf[0].view_as(x), x.detach()
            elif not x.requires_grad:
                raise ModelError(self._no_gradient(s))
            else:
                of = x.detach()
            rows, columns = self._reached(x.device).nonzero(as_tuple=True)
            change = self._change(s, of)[rows, columns]  # [m, w], all that is kept of x

            def arrived(gradient: Tensor | None) -> None:
                if gradient is None:  # what lies above gives none
                    return
                products = gradient[rows, columns] * change
                products = products.to(torch.promote_types(products.dtype, torch.float32))
                per_head = products.view(len(rows), s.n_heads, s.head_dim).sum(2)
                found[s] = per_head.new_zeros(len(items), s.n_heads).index_add_(0, rows, per_head).T

            x.register_hook(arrived)
            return x

        changes: list[Tensor] = []
        with _differentiable(self.lm, site is None) as leaf, self._at(sites, watch), self._recomputing(site):
            values, real = self._read(items, numbers)
            total = values.where(real, 0).sum(0)  # rows do not meet, so their gradients come apart
            if not total.requires_grad:
                raise ModelError(self._no_gradient(sites[-1]))
            for k, value in enumerate(total):
                found.clear()
                try:
                    torch.autograd.grad(value, leaf, retain_graph=k + 1 < len(total), allow_unused=True)
                except (RuntimeError, NotImplementedError) as error:
                    if out_of_memory(error):
                        raise
                    why = f" ({str(error).splitlines()[0]})"
                    raise ModelError(self._no_gradient(sites[0]) + why) from error
                self.backwards += 1
                lost = next((s for s in sites if s not in found), None)
                if lost is not None:
                    raise ModelError(self._no_gradient(lost))
                changes.append(torch.cat([found[s].cpu() for s in sites]))
        return values.detach().masked_fill(~real, float("nan")).cpu(), torch.stack(changes, 2)

    @torch.no_grad()
    def values(self, items: Sequence[EncodedExample], numbers: Sequence[int], steps: Tensor | None = None) -> Tensor:
        """values [b, k] of `ask`, with each head moved by `steps` [h] of the way to its mask, without gradients."""
        parts = (
            {} if steps is None else dict(zip(self.sites, steps.split([s.n_heads for s in self.sites]), strict=True))
        )

        def move(site: HeadSite, x: Tensor) -> Tensor:
            step = parts[site].repeat_interleave(site.head_dim).to(x.device, x.dtype)
            return x - step * self._change(site, x)

        with self._at(list(parts), move):
            values, real = self._read(items, numbers)
        return values.masked_fill(~real, float("nan")).cpu()

    def _no_gradient(self, site: HeadSite) -> str:
        return (
            f"{self.lm.name} gives no gradient at the heads of {type(site.mixer).__name__} in layer {site.layer}, and "
            "attribution needs one: load the weights in a floating-point dtype and without kernels that are made for "
            "inference only, or use sweep_heads"
        )

    def _reached(self, device: torch.device) -> Tensor:
        """Which positions the mask reaches, boolean [b, t]; never a pad."""
        reached = self.where.on(device)
        return (self.where.index >= 0).to(device) if reached is None else reached

    def _change(self, site: HeadSite, x: Tensor) -> Tensor:
        """What a mask takes away from the projection's input `x` [b, t, w]: 0 where it does not reach."""
        fill = self.fills.get(site)
        change = x if fill is None else x - fill.to(x.device, x.dtype)
        return change * self._reached(x.device).unsqueeze(-1)

    def _read(self, items: Sequence[EncodedExample], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(what is differentiated [b, k], which entries are real [b, k])."""
        answers = [item.continuations[item.answer] for item in items]
        longest = max(map(len, answers))
        start = [len(item.context) - 1 for item in items]
        at = [[s + min(d, len(a) - 1) for d in range(longest)] for s, a in zip(start, answers, strict=True)]
        fed = [[*item.context, *a[:-1]] for item, a in zip(items, answers, strict=True)]
        # the plain call is without gradients for all its other callers
        call = inspect.unwrap(Forward.__call__)
        logits, _ = call(self.forward, fed, at, list(numbers), [len(i.context) for i in items])
        device = logits.device
        said = torch.tensor([[*a, *[a[-1]] * (longest - len(a))] for a in answers], device=device).unsqueeze(-1)
        real = torch.tensor([[d < len(a) for d in range(longest)] for a in answers], device=device)
        if not self.margins:
            logp = logits.log_softmax(-1).gather(-1, said).squeeze(-1).where(real, 0).sum(1, keepdim=True)
            return logp, torch.ones_like(logp, dtype=torch.bool)
        others = logits.scatter(-1, said, float("-inf")).logsumexp(-1)
        return logits.gather(-1, said).squeeze(-1) - others, real

    @contextlib.contextmanager
    def _at(self, sites: Sequence[HeadSite], act: Callable[[HeadSite, Tensor], Tensor]) -> Iterator[None]:
        """Let ``act(site, x)`` replace the projection's input at `sites`, once in the forward pass."""
        seen: set[HeadSite] = set()

        def hook(site: HeadSite):
            def pre(module, args):
                check_input(site, args[0])
                if site in seen:  # a layer that runs again in the backward pass
                    return None
                seen.add(site)
                return (act(site, args[0]), *args[1:])

            return pre

        handles = [self.lm.backbone.register_forward_pre_hook(self.where.before_forward, with_kwargs=True)]
        handles += [s.proj.register_forward_pre_hook(hook(s)) for s in sites]
        try:
            yield
        finally:
            for h in handles:
                h.remove()
        lost = next((s for s in sites if s not in seen), None)
        if lost is not None:
            raise ModelError(
                f"{type(lost.mixer).__name__} in layer {lost.layer} does not call its output projection as a module "
                "(a fused kernel may do its work), so its heads cannot be reached."
            )

    @contextlib.contextmanager
    def _recomputing(self, site: HeadSite | None) -> Iterator[None]:
        """Layers (those above `site`) keep only their inputs and run again in the backward pass."""
        with contextlib.ExitStack() as stack:
            if self.recompute:
                for layer in find_layers(self.lm.model)[1][0 if site is None else site.layer + 1 :]:
                    stack.enter_context(_running_twice(layer))
            yield


@contextlib.contextmanager
def _running_twice(layer: nn.Module) -> Iterator[None]:
    own = layer.__dict__.get("forward")
    forward = layer.forward

    def twice(*args, **kwargs):
        # some models hand a cache to their layers unasked, and the second run would find what the first left there
        kwargs |= {n: None for n in CACHE_NAMES if n in kwargs}
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    layer.forward = twice
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


@contextlib.contextmanager
def _differentiable(lm: LanguageModel, embeddings: bool) -> Iterator[list[Tensor]]:
    """Gradients may flow, and none goes to weights, for whose sake activations would be kept.

    Yields a list for the tensor where gradients end; it is that of the tokens' `embeddings`, if so wanted.
    """
    wanted = [p for p in lm.model.parameters() if p.requires_grad]
    leaf: list[Tensor] = []

    def begin(module, args, output):
        leaf[:] = [output.detach().requires_grad_()]
        return leaf[0]

    handles = [lm.model.get_input_embeddings().register_forward_hook(begin)] if embeddings else []
    try:
        for p in wanted:
            p.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield leaf
    finally:
        for h in handles:
            h.remove()
        for p in wanted:
            p.requires_grad_(True)
