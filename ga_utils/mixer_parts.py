"""Which part of a state space or delta-rule mixer does it: its short convolution or its state?

Between two tokens of a text such a mixer passes information in two ways: the short convolution mixes each token with
the few before it, and the recurrence carries a state along. `without_conv` and `without_state` switch either off in
chosen layers at chosen positions; what a head then still does there, it does by the other. With both off at all
positions the mixer treats every token as a text of its own.

Positions are those of `mask_heads` (masking.py). No weight is touched, nothing else is changed, and everything is as it
was after the block, also after an exception. The two nest, in each other and in `mask_heads`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import mixer_edits as edits
from .errors import HeadError, ModelError
from .heads import as_integer
from .language_model import LanguageModel
from .mixers.base import namespace, replaced
from .mixers.llamba import _uncover
from .positions import Positions, Where
from .sites import HeadSite


@contextlib.contextmanager
def without_conv(lm: LanguageModel, layers: object = None, positions: Positions = None) -> Iterator[None]:
    """Switch short convolutions off inside a ``with`` block: y_t = w_last x_t + bias, and what follows it as ever.

    All taps but the current token's are off, for every channel of the mixer (value, B and C, or query, key and value).
    layers: numbers of layers or sites of `lm`; None for all that have a short convolution. positions: "all", "last",
    "answer" or a list for each example, counted as in `mask_heads`; None means "all". At other positions the whole
    convolution is on. Convolutions in attention blocks are left on.

    Raises `HeadError` for layers without a short convolution and for positions that do not exist or cannot be told,
    `ModelError` for a model that has none, for one in training mode, and where a forward pass went past the edit.
    """
    sites = _chosen(lm, layers, _has_conv, "mixer with a short convolution")
    with _editing(lm, sites, positions) as (run, stack):
        for site in (s for s in sites if s.kind == "llamba"):
            stack.enter_context(_hidden(site.mixer, "_short_conv", functools.partial(edits.llamba_conv, run, site)))
        shared = [s for s in sites if s.kind != "llamba"]
        _replace(run, stack, shared, edits.CONVOLUTIONS, "short convolution")
        yield


@contextlib.contextmanager
def without_state(lm: LanguageModel, layers: object = None, positions: Positions = None) -> Iterator[None]:
    """Let no state reach the chosen positions inside a ``with`` block: y_t = M[t, t] x_t, with D x_t where there is D.

    M is the head's matrix (`mixers`): of its row, only the current token's own term stays. The state itself goes on
    through these positions unchanged, so that rows at other positions are whole. The short convolution stays on: x_t,
    and what M[t, t] is made of, still hold the few tokens before t (see `without_conv`). layers, positions and errors
    as in `without_conv`; kinds: Mamba-1, Mamba-2, Llamba, gated delta nets, Kimi delta attention and lightning
    attention. LFM's short convolutions have no state, and are an error here.
    """
    sites = _chosen(lm, layers, lambda s: s.kind in edits.STATES or s.kind == "llamba", "mixer with a recurrent state")
    with _editing(lm, sites, positions) as (run, stack):
        for site in sites:
            if site.kind == "llamba":
                stack.enter_context(_hidden(site.mixer, "scan", functools.partial(edits.llamba_scan, run, site)))
            elif site.kind == "lightning":
                handle = site.mixer.norm.register_forward_pre_hook(functools.partial(edits.lightning_output, run, site))
                stack.callback(handle.remove)
        for kind, stand_ins in edits.STATES.items():
            _replace(run, stack, [s for s in sites if s.kind == kind], stand_ins, "state")
        yield


# ---- which sites, when, and where ----


def _has_conv(site: HeadSite) -> bool:
    return site.kind != "attention" and any(
        isinstance(m, nn.Conv1d) and m.groups == m.in_channels > 1 and m.kernel_size[0] > 1
        for m in site.mixer.children()
    )


def _chosen(lm: LanguageModel, layers: object, able: Callable[[HeadSite], bool], what: str) -> list[HeadSite]:
    possible = [s for s in lm.sites if able(s)]
    if not possible:
        raise ModelError(f"{lm.name} has no {what}.")
    if layers is None:
        return possible
    items = [layers] if isinstance(layers, (HeadSite, str)) or as_integer(layers) is not None else list(layers)
    found: dict[HeadSite, None] = {}
    for item in items:
        number = item.layer if isinstance(item, HeadSite) else as_integer(item)
        here = [s for s in possible if (s == item if isinstance(item, HeadSite) else s.layer == number)]
        if not here:
            name = item.path if isinstance(item, HeadSite) else f"Layer {item!r}"
            have = ", ".join(map(str, sorted({s.layer for s in possible})))
            raise HeadError(f"{name} of {lm.name} is no {what}: layers {have} have one.")
        found.update(dict.fromkeys(here))
    if not found:
        raise HeadError(f"layers={layers!r} names no layer: give one or more, or None for all.")
    return list(found)


class Run:
    """Which site's mixer is running, and how often each was edited."""

    def __init__(self, lm: LanguageModel, positions: Positions):
        self.where = Where(lm, positions)
        self.now: HeadSite | None = None
        self.seen: Counter[HeadSite] = Counter()
        self.qkv: Tensor | None = None  # lightning attention's, between its projection and its norm

    def edit(self, full: Tensor, alone: Callable[[], Tensor], time: int | None) -> Tensor:
        """`alone()` at the chosen positions and `full` elsewhere; time: the axis of positions, None for one step.

        A cached step may see a few tokens before its own: the mask belongs to the last ones.
        """
        self.seen[self.now] += 1
        where, name = self.where, type(self.now.mixer).__name__
        if where.indexed and where.index is None:
            raise ModelError(f"{name} ran outside a forward call of the model, so positions cannot be told.")
        mask = where.on(full.device)
        if mask is None:
            return alone().to(full.dtype)
        length = 1 if time is None else full.shape[time]
        if len(mask) != len(full) or mask.shape[1] > length:
            raise ModelError(
                f"{name} saw {len(full)} rows of {length} tokens where the model was given {tuple(mask.shape)}: "
                "positions cannot be told."
            )
        if not mask.any():
            return full
        shape = [len(full)] + [1] * (full.ndim - 1)
        if time is not None:
            shape[time] = length
        mask = F.pad(mask, (length - mask.shape[1], 0)).view(shape)
        return torch.where(mask, alone().to(full.dtype), full)

    def check(self, sites: list[HeadSite]) -> None:
        for site in sites:
            if self.seen[site] < self.where.calls:
                raise ModelError(
                    f"{type(site.mixer).__name__} ({site.path}) was edited in {self.seen[site]} of {self.where.calls} "
                    "forward passes only: a fused kernel did its work, so it was measured whole."
                )


@contextlib.contextmanager
def _editing(
    lm: LanguageModel, sites: list[HeadSite], positions: Positions
) -> Iterator[tuple[Run, contextlib.ExitStack]]:
    """Follow the forward calls of the model and of the sites' mixers; on the way out, check that each was edited."""
    if lm.model.training or any(s.mixer.training for s in sites):
        raise ModelError(
            "The model is in training mode, where fused kernels can pass edits by: call model.eval() first."
        )
    run = Run(lm, positions)

    def enter(site: HeadSite, module, args) -> None:
        run.now = site

    def leave(module, args, output) -> None:
        run.now = None

    with contextlib.ExitStack() as stack:
        keep = [lm.backbone.register_forward_pre_hook(run.where.before_forward, with_kwargs=True)]
        keep.append(lm.backbone.register_forward_hook(run.where.after_forward))
        for site in sites:
            keep.append(site.mixer.register_forward_pre_hook(functools.partial(enter, site)))
            keep.append(site.mixer.register_forward_hook(leave, always_call=True))
        for handle in keep:
            stack.callback(handle.remove)
        yield run, stack
        run.check(sites)


def _replace(run: Run, stack: contextlib.ExitStack, sites: list[HeadSite], stand_ins: dict, what: str) -> None:
    """Put `stand_ins` (by name) before global functions that the sites' modelling files call; others' calls pass."""
    for site in sites:
        if not any(callable(namespace(site).get(name)) for name in stand_ins):
            raise ModelError(
                f"{type(site.mixer).__name__} ({site.path}) calls none of {', '.join(stand_ins)}, so its {what} cannot "
                "be switched off."
            )

    def edited(function: Callable, edit: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if run.now is None:
                return function(*args, **kwargs)
            return edit(run, function, args, kwargs)

        return wrapper

    for scope in {id(namespace(s)): namespace(s) for s in sites}.values():
        for name, edit in stand_ins.items():
            if callable(scope.get(name)):
                stack.enter_context(replaced(scope, name, edited(scope[name], edit)))


@contextlib.contextmanager
def _hidden(mixer: nn.Module, name: str, edit: Callable) -> Iterator[None]:
    """Hide a method of one mixer behind ``edit(method, ...)``."""
    before = getattr(mixer, name)
    setattr(mixer, name, functools.partial(edit, before))
    try:
        yield
    finally:
        _uncover(mixer, name, before)
