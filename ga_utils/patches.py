"""What if mixers gave something else? Edits of projection inputs and of MLPs in forward passes, for `paths.py`.

All are hooks that are gone after the block; no weight is touched.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .errors import ModelError
from .language_model import LanguageModel
from .masking import check_input
from .sites import HeadSite
from .surgery.changes import layers_of

_MLP = re.compile(r"mlp|moe|feed_?forward|ffn|experts|sparse", re.IGNORECASE)
Edit = Callable[[Tensor], Tensor]


def put(x: Tensor, new: Tensor, channels: Sequence[slice], mask: Tensor | None) -> Tensor:
    """x ``[b, t, width]`` with `channels` of `new` where mask ``[b, t]`` is True (None: everywhere)."""
    out = x.clone()
    for c in channels:
        out[..., c] = new[..., c] if mask is None else torch.where(mask.to(x.device)[..., None], new[..., c], x[..., c])
    return out


@contextlib.contextmanager
def edited(edits: dict[HeadSite, Edit]) -> Iterator[None]:
    """Edit the input of each site's output projection. Raises `ModelError` where a forward pass does not call it."""
    seen = dict.fromkeys(edits, 0)

    def hook(site: HeadSite, edit: Edit):
        def change(module, args):
            check_input(site, args[0])
            seen[site] += 1
            return (edit(args[0]), *args[1:])

        return change

    handles = [s.proj.register_forward_pre_hook(hook(s, e)) for s, e in edits.items()]
    try:
        yield
        for site, calls in seen.items():
            if not calls:
                raise ModelError(
                    f"{type(site.mixer).__name__} in layer {site.layer} does not call its output projection as a "
                    "module, so its heads cannot be patched."
                )
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, object]]:
    """Collect what the modules give in the forward call inside the block."""
    outputs: dict[nn.Module, object] = {}
    handles = [m.register_forward_hook(lambda m, args, out: outputs.__setitem__(m, out)) for m in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def held(outputs: dict[nn.Module, object]) -> Iterator[None]:
    """Let the modules give these outputs, whatever they compute."""
    handles = [m.register_forward_hook(lambda m, args, out: outputs[m]) for m in outputs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_mlps(lm: LanguageModel, last: int) -> list[nn.Module]:
    """The MLPs and expert blocks of the layers up to `last`. Raises `ModelError` for a block that it cannot place."""
    mixers = {id(s.mixer) for s in lm.sites}
    found = []

    def look(module: nn.Module, where: str) -> None:
        for name, child in module.named_children():
            inside = list(child.modules())
            if id(child) in mixers or not any(p.ndim > 1 for p in child.parameters()):
                continue
            if any(id(m) in mixers for m in inside):
                look(child, where)
            elif _MLP.search(name) or _MLP.search(type(child).__name__):
                found.append(child)
            elif not isinstance(child, nn.Linear):  # a plain projection only passes the residual stream on
                raise ModelError(
                    f"freeze_mlps=True: {type(child).__name__} ({name}) in layer {where} of {lm.name} is neither a "
                    "mixer nor an MLP that this package knows: use freeze_mlps=False."
                )

    for layer, module in layers_of(lm).items():
        if layer <= last:
            look(module, str(layer))
    return found
