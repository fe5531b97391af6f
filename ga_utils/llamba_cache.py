"""What does Llamba remember between two calls of forward, and how is it copied, reordered and widened?"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LayerState:
    """What one mixer remembers: `conv` [b, w-1, channels], its last real inputs, and `ssm` [b, h, p, n]."""

    conv: Tensor | None = None
    ssm: Tensor | None = None


class LlambaCache:
    """The state of every mixer after the tokens seen so far; its size does not grow with their number.

    `forward` moves it on in place: `copy.deepcopy` it before each branch. Its tensors are replaced, never
    written into.
    """

    is_compileable = False
    is_linear = (False,)  # so that generate skips the tokens which a cache handed to it has seen
    is_croppable = False  # a state cannot be wound back

    def __init__(self, n_layers: int):
        self.layers = [LayerState() for _ in range(n_layers)]
        self.seen = 0

    def __len__(self) -> int:
        return len(self.layers)

    def __deepcopy__(self, memo) -> "LlambaCache":
        return self._map(lambda v: v.clone(), LlambaCache(len(self)))

    def _map(self, fn, out: "LlambaCache") -> "LlambaCache":
        out.seen = self.seen
        for source, target in zip(self.layers, out.layers, strict=True):
            target.conv = None if source.conv is None else fn(source.conv)
            target.ssm = None if source.ssm is None else fn(source.ssm)
        return out

    @property
    def batch_size(self) -> int | None:
        """Rows held, or None before the first forward."""
        return None if self.layers[0].ssm is None else self.layers[0].ssm.shape[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Token positions seen, padding included."""
        return self.seen

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices` [k] (repeats widen the batch), in that order."""
        self._map(lambda v: v.index_select(0, torch.as_tensor(indices, device=v.device)), self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """`batch_select_indices` under the name that beam search calls."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        self._map(lambda v: v.repeat_interleave(repeats, dim=0), self)

    def reset(self) -> None:
        """Forget everything seen."""
        self.__init__(len(self))
