"""Which positions of a forward call does a mask reach?

Positions are counted in the tokens of an example's own prompt, so they mean the same under left padding,
right padding and none, and the same in one full forward and in cached steps. What cannot be told for sure is
an error: a mask one token off measures something else, with plausible numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from .errors import HeadError
from .heads import as_integer
from .language_model import LanguageModel, Layout

Positions = str | Sequence[Sequence[int]] | None
_CACHES = ("cache", "past_key_values", "cache_params")


class Where:
    """Which positions of the forward call in progress are masked: None for all, else a boolean tensor [b, t].

    indexed: whether each column's position in its example is needed even where all are masked.
    """

    def __init__(self, lm: LanguageModel, positions: Positions, indexed: bool = False):
        self.lm, self.positions = lm, _read(positions)
        self.indexed = indexed or self.positions != "all"
        self.calls = 0  # forward calls that were completed
        self.mask: Tensor | None = None
        self.index: Tensor | None = None  # [b, t] position of each column in its example, -1 at pads
        self.rows: list[int] = []
        self._told = False  # whether rows were named by the asker
        self._ends: Tensor | None = None  # [b, 1] last token of each prompt, by the latest call that began them
        self._seen: Tensor | None = None  # [b, 1] tokens of each example up to and with the latest call
        self._moved: dict[torch.device, Tensor] = {}

    def __deepcopy__(self, memo: dict) -> Where:
        raise HeadError(_NO_COPY)

    @property
    def at_end(self) -> bool:
        """Whether what is masked begins at the prompt's last token."""
        return self.positions in ("last", "answer")

    def before_forward(self, module, args, kwargs) -> None:
        """Pre-hook of the model below its language-model head."""
        self._moved.clear()
        if not self.indexed:
            return
        layout = self.lm.layout or Layout()
        given = _by_name(module, args, kwargs)
        real = real_tokens(self.lm, given, told=layout.past is not None)
        b, t = real.shape
        self._told = layout.rows is not None
        self.rows = list(layout.rows) if self._told else list(range(b))
        if len(self.rows) != b:
            raise HeadError(f"lm.asking names {len(self.rows)} rows, but the batch has {b}.")
        past = self._past(layout, given, b, t)
        self.index = torch.where(real, real.long().cumsum(1) - 1 + past, -1)
        self._seen = past + real.sum(1, keepdim=True)
        if self.positions != "all":
            self.mask = self._masked(real, self._prompt_ends(layout, past, b, t))

    def after_forward(self, module, args, output) -> None:
        """Hook of the same module: counts the calls that went through."""
        self.calls += 1

    def on(self, device: torch.device) -> Tensor | None:
        """The mask [b, t] on `device`, or None where every position is masked."""
        if self.mask is None:
            return None
        if device not in self._moved:
            self._moved[device] = self.mask.to(device)
        return self._moved[device]

    def require_rows(self, count: int, what: str) -> None:
        """Raise `HeadError` unless `count` of `what` fit the batch: one for each example."""
        if max(self.rows) >= count if self._told else len(self.rows) != count:
            has = f"an example {max(self.rows)}" if self._told else f"{len(self.rows)} examples"
            raise HeadError(f"There are {count} {what}, but the batch has {has}: give one for each example.")

    def _past(self, layout: Layout, given: dict, b: int, t: int) -> Tensor:
        """[b, 1] tokens of each example that came before this call."""
        if layout.past is not None:
            return _column(layout.past, b, "past")
        attention = given.get("attention_mask")
        if isinstance(attention, Tensor) and attention.ndim == 2 and attention.shape[1] > t:
            return attention[:, :-t].bool().sum(1, keepdim=True).cpu()
        if not any(_holds_tokens(given.get(name)) for name in _CACHES):
            return torch.zeros(b, 1, dtype=torch.long)
        if t == 1 and self._seen is not None and len(self._seen) == b:
            return self._seen
        raise HeadError(
            "The forward call continues a cache, and it cannot be told how many tokens of each example that "
            "holds: pass an attention_mask over all tokens, or use lm.asking(past=..., prompt_ends=...)."
        )

    def _prompt_ends(self, layout: Layout, past: Tensor, b: int, t: int) -> Tensor:
        """[b, 1] position of each prompt's last token; by default a call without a past is a whole prompt."""
        if layout.prompt_ends is not None:
            return _column(layout.prompt_ends, b, "prompt_ends")
        if not past.any():
            self._ends = self._seen - 1
        elif t > 1 or self._ends is None or len(self._ends) != b:
            raise HeadError(
                "The forward call continues a cache, and it cannot be told where the prompts ended: use "
                "lm.asking(prompt_ends=...), or begin the prompts inside the mask and go on token by token."
            )
        return self._ends

    def _masked(self, real: Tensor, ends: Tensor) -> Tensor:
        if isinstance(self.positions, str):
            return real & (self.index == ends if self.positions == "last" else self.index >= ends)
        self.require_rows(len(self.positions), "lists of positions")
        mask = torch.zeros_like(real)
        for b, row in enumerate(self.rows):
            n = int(ends[b]) + 1
            for p in self.positions[row]:
                if not -n <= p < n:
                    raise HeadError(f"Position {p} lies outside example {row}, whose prompt has {n} tokens.")
                mask[b] |= self.index[b] == p % n
        return mask


_NO_COPY = "The model was copied inside a mask_heads block, where the copy would stay masked: copy it before."


def _by_name(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments of a call of `module`, by name: a mask that is passed by position is still the mask."""
    if not args:
        return kwargs
    names = inspect.signature(module.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


def real_tokens(lm: LanguageModel, given: dict[str, object], told: bool = False) -> Tensor:
    """Which columns of a forward call with arguments `given` hold real tokens: boolean [b, t], on the CPU.

    Raises `HeadError` where that cannot be told: no two-dimensional attention mask, and a batch that begins
    or ends with the pad token or has no ids. told: the asker vouches that columns without a mask are real.
    """
    ids = given.get("input_ids")
    attention = given.get("attention_mask")
    b, t = (given["inputs_embeds"] if ids is None else ids).shape[:2]
    if isinstance(attention, Tensor) and attention.ndim == 2:
        return attention[:, -t:].bool().cpu()
    if attention is not None:
        raise HeadError(
            "The attention mask is not [batch, time], so real tokens cannot be told from padding: pass one "
            "that is, with 1 at real tokens."
        )
    if not told and _may_hold_pads(lm, ids, b):
        raise HeadError(
            "The batch may hold pad tokens but came without an attention mask, so the examples' tokens "
            "cannot be told: pass attention_mask."
        )
    return torch.ones(b, t, dtype=torch.bool)


def _may_hold_pads(lm: LanguageModel, ids: Tensor | None, b: int) -> bool:
    if ids is None:
        return b > 1
    tok = lm.tokenizer
    # one prompt alone may well begin with a BOS, or end with an EOS, that also serves as padding
    if b == 1 and lm.pad_id in (tok.bos_token_id, tok.eos_token_id):
        return False
    return bool((ids[:, [0, -1]] == lm.pad_id).any())


def _holds_tokens(cache: object) -> bool:
    """Whether a cache that is handed to a forward call has seen tokens; one that cannot say has."""
    if cache is None:
        return False
    layers = range(len(cache)) if hasattr(cache, "__len__") else ()
    answers = []
    for method in ("get_seq_length", "has_previous_state"):
        for args in [(), *((i,) for i in layers)]:
            try:
                answers.append(bool(getattr(cache, method)(*args)))
            except (
                AttributeError,
                TypeError,
                ValueError,
            ):  # attention layers have no state, others no length
                continue
    return any(answers) or not answers


def _column(values: object, b: int, name: str) -> Tensor:
    column = torch.as_tensor(values).view(-1, 1).cpu()
    if len(column) != b:
        raise HeadError(f"lm.asking({name}=...) holds {len(column)} numbers, but the batch has {b} rows.")
    return column


def _read(positions: Positions) -> str | list[list[int]]:
    if positions is None or isinstance(positions, str):
        if positions not in (None, "all", "last", "answer"):
            raise HeadError(
                f"positions={positions!r} is unknown: use 'all', 'last', 'answer' or one list for each example."
            )
        return positions or "all"
    try:
        if isinstance(positions, (Mapping, Set)):
            raise TypeError
        rows = [[as_integer(p) for p in row] for row in positions]
    except TypeError:
        rows = [[None]]
    if any(p is None for row in rows for p in row):
        raise HeadError(
            f"positions={' '.join(repr(positions).split())[:60]} cannot be read: give one list of integers "
            "for each example of the batch."
        )
    return rows
