"""How does a layer of one model run inside another?

A copy of the donor's modules is taken that shares its tensors: the donor itself is never touched, and no memory is
spent. Where host and donor have the same architecture, the copy takes the host layer's place and is called as it was.
Otherwise it stays inside a copy of the donor's own backbone that has this one layer: the donor's code then builds
its rotary embeddings and its causal mask, padding included, for whatever attention implementation it was loaded with.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import Cache

from ..errors import GAError, ModelError
from ..language_model import LanguageModel
from ..llamba_cache import LayerState
from ..sites import HeadSite, find_layers
from .changes import cut_config, layers_of, renumber, sites_of

#: configuration entries that do not change how a layer is called or what it is given
_NOT_THE_LAYER = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "initializer_range", "label2id",
    "num_hidden_layers", "n_layer", "pad_token_id", "tie_embeddings", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache", "vocab_size",
}  # fmt: skip
#: architectures whose layers take or give more than hidden states (the embeddings; the router's state)
_MORE_THAN_STATES = {"zamba", "zamba2", "zaya"}
_HOOKS = (
    "_forward_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


class NoCacheError(ModelError, RuntimeError):
    """A model with grafted parts was asked to use a cache that cannot hold them."""


def refuse_cache(args: tuple, kwargs: dict) -> None:
    """Raise `NoCacheError` if a layer's arguments hold a cache."""
    if any(isinstance(a, (Cache, LayerState)) for a in (*args, *kwargs.values())):
        raise NoCacheError("Grafted parts keep no cache: call the model with use_cache=False.")


def shared_copy(module: nn.Module, instead: Iterable[tuple[object, object]]) -> nn.Module:
    """A copy of `module` without its hooks that shares its tensors, with the objects `instead` exchanged.

    Raises `ModelError` if heads of it are masked, since the copy would not be.
    """
    memo = {id(t): t for t in (*module.parameters(), *module.buffers())}
    memo |= {id(old): new for old, new in instead}
    out = copy.deepcopy(module, memo)
    for part in out.modules():
        for name in _HOOKS:
            getattr(part, name).clear()
    return out


def moved(site: HeadSite, old: nn.Module, new: nn.Module, layer: int) -> HeadSite:
    """`site` of the module `old`, as a site of layer `layer` in `new`, a copy of `old`."""
    names = {id(m): n for n, m in old.named_modules()}
    mixer, proj = (new.get_submodule(names[id(m)]) for m in (site.mixer, site.proj))
    return replace(site, layer=layer, mixer=mixer, proj=proj)


def alike(host: LanguageModel, donor: LanguageModel, i: int, j: int) -> bool:
    """Whether layer `j` of `donor` can be called with what layer `i` of `host` is given."""

    def numbers(config) -> dict:
        return {
            k: v
            for k, v in config.to_dict().items()
            if k not in _NOT_THE_LAYER and k[0] != "_" and not ("layer" in k and isinstance(v, (list, tuple)))
        }

    same = type(layers_of(host)[i]) is type(layers_of(donor)[j]) and type(host.model) is type(donor.model)
    return same and numbers(host.config) == numbers(donor.config) and _type(host, i) == _type(donor, j)


def _type(lm: LanguageModel, layer: int) -> str | None:
    types = getattr(lm.config, "layer_types", None)
    return types[list(layers_of(lm)).index(layer)] if types else None


def check_fit(host: LanguageModel, donor: LanguageModel) -> None:
    """Raise `GAError` unless parts of `donor` can sit in `host` at all."""
    for name, lm in (("host", host), ("donor", donor)):
        if not isinstance(lm, LanguageModel):
            raise ModelError(f"The {name} must be a LanguageModel (from load or wrap), not {type(lm).__name__}.")
        if lm.model.training:
            raise ModelError(f"The {name} is in training mode: call model.eval() first.")
    sizes = [lm.config.hidden_size for lm in (host, donor)]
    if sizes[0] != sizes[1]:
        raise GAError(
            f"{donor.name} has hidden states of width {sizes[1]} and {host.name} of width {sizes[0]}: parts of one "
            "cannot sit in the other."
        )
    for what, (a, b) in {"dtype": (host.dtype, donor.dtype), "device": (host.device, donor.device)}.items():
        if a != b:
            raise GAError(f"{host.name} has {what} {a} and {donor.name} {b}: load both alike.")


class Call:
    """Which of the columns that the host's forward call in progress was given are real, and their positions."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.positions: Tensor | None = None
        self.inside = False

    def listen(self, changes) -> None:
        """Read them from every forward call of the host, until its changes are undone."""
        for module in dict.fromkeys([changes.model, changes.owner]):
            changes.on_undo(
                module.register_forward_pre_hook(self._enter(module is changes.model), with_kwargs=True).remove
            )
        changes.on_undo(changes.model.register_forward_hook(self._leave, always_call=True).remove)

    def _enter(self, top: bool):
        def hook(module, args, kwargs):
            if top or not self.inside:
                given = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
                given = {**given, **given.get("kwargs", {})}
                self.mask, self.positions, self.inside = given.get("attention_mask"), given.get("position_ids"), top

        return hook

    def _leave(self, module, args, output):
        self.mask = self.positions = None
        self.inside = False

    def arguments(self, hidden: Tensor) -> dict[str, Tensor | None]:
        """attention_mask and position_ids for a forward over hidden [b, t, d]."""
        b, t = hidden.shape[:2]
        mask, positions = self.mask, self.positions
        if mask is not None and (not isinstance(mask, Tensor) or tuple(mask.shape) != (b, t)):
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ModelError(f"With grafted parts the attention mask must be {[b, t]}, a number a token, not {shape}.")
        if positions is None:
            real = torch.ones(b, t, dtype=torch.long, device=hidden.device) if mask is None else mask.long()
            positions = (real.cumsum(1) - 1).clamp_min(0)
        place = hidden.device
        return {
            "attention_mask": None if mask is None else mask.to(place),
            "position_ids": positions.to(place).expand(b, t),
        }


class Tap(nn.Module):
    """`part`, given other hidden states than it is called with where `given` is set; its output is kept."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part
        self.given: Tensor | None = None
        self.output: Tensor | None = None

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)  # model code reads attributes of its layers

    def forward(self, *args, **kwargs):
        if self.given is not None:
            if "hidden_states" in kwargs:
                kwargs["hidden_states"] = self.given
            else:
                args = (self.given, *args[1:])
        out = self.part(*args, **kwargs)
        self.output = out[0] if isinstance(out, tuple) else out
        return out

    def take(self) -> Tensor:
        """The output kept, which is then let go."""
        out, self.given, self.output = self.output, None, None
        return out


class DonorLayer(nn.Module):
    """Layer `j` of the donor, or the mixer `of` one of its sites, run for layer `i` of the host.

    as_called: whether the copy is called with what the host's layer is given (`alike`), else through a copy of the
    donor's backbone. sites: the layer's sites in the copy, numbered as the host's layer.
    """

    def __init__(self, host: LanguageModel, donor: LanguageModel, i: int, j: int, of: HeadSite | None, call: Call):
        super().__init__()
        self.as_called, self.call = alike(host, donor, i, j), call
        old = layers_of(donor)[j]
        if self.as_called:
            self.layer = new = shared_copy(old, [(donor.config, host.config)])
            for module in new.modules():
                renumber(module, j, i, dict.__setitem__)
        else:
            _check_plain(host, donor)
            self.backbone, new = _one_layer(donor, j)
        self.sites = [moved(s, old, new, i) for s in sites_of(donor, j)]
        outer = inner = Tap(new)
        if of is not None:
            inner = Tap(moved(of, old, new, i).mixer)
            exchange(new, inner.part, inner)
        if self.as_called:
            self.layer = outer
        else:
            _layer_list(self.backbone)[0] = outer
        self.taps = (outer, inner)  # in a tuple, so that no module is registered twice

    def run(self, hidden: Tensor, before_norm: Tensor | None, args: tuple, kwargs: dict) -> Tensor:
        """What the layer or mixer makes of `hidden` [b, t, d].

        before_norm: for a mixer, what its layer is to read in place of `hidden`, so that the donor's own norm comes
        before the mixer. args, kwargs: what the host's layer was called with.
        """
        outer, inner = self.taps
        if before_norm is not None:
            outer.given = before_norm
        else:
            inner.given = hidden
        states = hidden if before_norm is None else before_norm
        if self.as_called:
            outer(*args, **kwargs)
        else:
            given = {"inputs_embeds": states, "use_cache": False, **self.call.arguments(states)}
            accepted = inspect.signature(type(self.backbone).forward).parameters
            self.backbone(**{k: v for k, v in given.items() if k in accepted})
        out = inner.take()
        outer.take()
        return out


def _check_plain(host: LanguageModel, donor: LanguageModel) -> None:
    for lm in (host, donor):
        if lm.config.model_type in _MORE_THAN_STATES:
            raise ModelError(
                f"Layers of {lm.config.model_type} take more than hidden states: {donor.name} and {host.name} must "
                "have the same architecture and the same configuration of layers."
            )


def _one_layer(donor: LanguageModel, j: int) -> tuple[nn.Module, nn.Module]:
    """A copy of the donor's backbone with layer `j` alone, and that layer in it."""
    path, every = find_layers(donor.model)
    owner = donor.model.get_submodule(path.rpartition(".")[0])
    config = copy.copy(donor.config)
    cut_config(config, [list(layers_of(donor)).index(j)])
    layer = shared_copy(layers_of(donor)[j], [(donor.config, config)])
    for module in layer.modules():
        renumber(module, list(layers_of(donor)).index(j), 0, dict.__setitem__)
    instead = [(donor.config, config), (every, nn.ModuleList([layer]))]
    return shared_copy(owner, [*instead, (donor.model.get_input_embeddings(), nn.Identity())]), layer


def _layer_list(backbone: nn.Module) -> nn.ModuleList:
    return next(m for m in backbone.children() if isinstance(m, nn.ModuleList) and len(m) == 1)


def exchange(root: nn.Module, old: nn.Module, new: nn.Module, put=dict.__setitem__) -> None:
    """Put `new` where `old` is inside `root`."""
    path = next(n for n, m in root.named_modules() if m is old)
    parent, _, name = path.rpartition(".")
    put(root.get_submodule(parent)._modules, name, new)
