"""What stands in the host's place where a layer, a mixer or heads of a donor are grafted?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .donors import DonorLayer, refuse_cache


class GraftedLayer(nn.Module):
    """A donor's layer that answers to the calls of the host's."""

    def __init__(self, donor: DonorLayer, instead: nn.Module, pair: bool):
        super().__init__()
        self.donor, self.pair = donor, pair
        vars(self)["instead"] = instead

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.instead, name)  # model code reads attributes of its layers

    def forward(self, hidden_states: Tensor, *args, **kwargs):
        refuse_cache(args, kwargs)
        out = self.donor.run(hidden_states, None, args, kwargs)
        return (out, None) if self.pair else out


class GraftedMixer(nn.Module):
    """A donor's mixer that answers to the calls of the host's."""

    def __init__(self, donor: DonorLayer, pair: bool):
        super().__init__()
        self.donor, self.pair = donor, pair

    def forward(self, *args, **kwargs):
        refuse_cache(args, kwargs)
        out = self.donor.run(kwargs.get("hidden_states", args[0] if args else None), None, args, kwargs)
        return (out, None) if self.pair else out


class GraftedHeads(nn.Module):
    """The host's mixer without some heads, and some of the donor's added to it.

    entered: what the host's layer was called with. mine, theirs: channels of the heads taken out of the host's
    projection's input, and of those taken from the donor's; buffers, so that they count in the fingerprint.
    """

    def __init__(self, mixer: nn.Module, donor: DonorLayer, proj: nn.Module, mine: Tensor, theirs: Tensor):
        super().__init__()
        self.mixer, self.donor, self.entered = mixer, donor, None
        self.register_buffer("mine", mine)
        self.register_buffer("theirs", theirs)
        vars(self)["proj"] = proj
        proj.register_forward_pre_hook(lambda module, args: (_only(args[0], theirs), *args[1:]))

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("mixer"), name)

    def enter(self, module, args, kwargs) -> None:
        """Forward pre-hook of the host's layer."""
        self.entered = (args, kwargs)

    def silence(self, module, args):
        """Forward pre-hook of the host's projection: its own heads of these numbers are off."""
        return (args[0].index_fill(-1, self.mine.to(args[0].device), 0), *args[1:])

    def forward(self, *args, **kwargs):
        refuse_cache(args, kwargs)
        out = self.mixer(*args, **kwargs)
        (given, named), self.entered = self.entered, None
        states = given[0] if given else named["hidden_states"]
        added = self.donor.run(states, states, given, named)
        bias = getattr(self.proj, "bias", None)
        added = added if bias is None else added - bias
        first = out[0] if isinstance(out, tuple) else out
        first = first + added.reshape(first.shape)
        return (first, *out[1:]) if isinstance(out, tuple) else first


def _only(x: Tensor, channels: Tensor) -> Tensor:
    channels = channels.to(x.device)
    return torch.zeros_like(x).index_copy(-1, channels, x.index_select(-1, channels))
