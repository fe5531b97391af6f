"""What is a loaded model? The transformers model, its tokenizer, where its heads are, and who it is.

Axes, here and everywhere: b batch, t query position, s key position, l layer, h head, p head dimension, n state size,
c channel, v vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import kernels
from .errors import GAError, ModelError
from .heads import Head
from .sites import HeadSite, find_sites, resolve

#: what the next forward calls of a model are; kept by model, since two LanguageModels may share one
_layouts: weakref.WeakKeyDictionary[nn.Module, Layout] = weakref.WeakKeyDictionary()
#: parts of a configuration that say where or how a model was stored, not what it computes
_NOT_THE_MODEL = ("architectures", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class Layout:
    """What the columns of the next forward calls are, where ids and attention mask do not tell.

    prompt_ends: [b] index of each prompt's last token in its own tokens; past: [b] tokens of each example that are
    already in the cache; rows: which examples of the task the batch's rows are.
    """

    prompt_ends: Tensor | None = None
    past: Tensor | None = None
    rows: Sequence[int] | None = None


@dataclass
class LanguageModel:
    """A causal language model in evaluation mode, with the addresses of its heads.

    name labels figures and records; title is what captions say; source is a hub id, a folder or "memory"; revision the
    hub's commit where there is one.
    """

    model: nn.Module
    tokenizer: object
    name: str
    title: str
    source: str = "memory"
    revision: str | None = None
    sites: tuple[HeadSite, ...] = field(default=(), repr=False)
    _hashed: tuple | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.sites = self.sites or find_sites(self.model)

    @property
    def backbone(self) -> nn.Module:
        """The model below its language-model head."""
        return getattr(self.model, self.model.base_model_prefix, self.model)

    @property
    def config(self):
        """The configuration of the text model."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where inputs go: the device of the embeddings."""
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.get_input_embeddings().weight.dtype

    @property
    def family(self) -> str:
        """transformers' name of the architecture, such as "llama"."""
        return self.config.model_type

    @property
    def n_layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @property
    def max_length(self) -> int | None:
        """Longest input in tokens, or None where the architecture sets no limit."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def layout(self) -> Layout | None:
        """What the columns of the next forward calls are, inside a block of `asking`."""
        return _layouts.get(self.model)

    @property
    def pad_id(self) -> int:
        """The id that fills padded columns; any id that the model has does, since padding is masked."""
        known = self.model.get_input_embeddings().weight.shape[0]
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None and token < known:
                return token
        return 0

    @property
    def fingerprint(self) -> str:
        """sha256 over the names, shapes and bytes of all weights and buffers, and the configuration's numbers.

        Computed anew when the weights have changed: a record of edited weights must not pass for one of the intact.
        """
        state = _state(self.model)
        if self._hashed is None or self._hashed[0] != state:
            self._hashed = (state, _fingerprint(self.model))
        return self._hashed[1]

    @functools.cached_property
    def tokenizer_fingerprint(self) -> str:
        """sha256 over the tokenizer's vocabulary, merges and rules, and its special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        special = repr(sorted((k, str(v)) for k, v in self.tokenizer.special_tokens_map.items()))
        return hashlib.sha256((text + special + str(self.tokenizer.chat_template)).encode()).hexdigest()[:24]

    def head_list(self, kind: str | None = None) -> list[Head]:
        """Every head, by layer; only those of mixers of `kind` where one is named."""
        return [s.head(i) for s in self.sites if kind in (None, s.kind) for i in range(s.n_heads)]

    def site(self, head: Head) -> HeadSite:
        """The site that holds `head`. Raises `HeadError` if there is none."""
        return resolve(self.sites, head)

    def encode(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids and attention mask ``[b, t]`` of prompts, padded on the right, special tokens included."""
        rows = [] if isinstance(prompts, str) or not isinstance(prompts, Iterable) else list(prompts)
        if not rows or not all(isinstance(p, str) for p in rows):
            raise GAError(f"prompts={prompts!r:.60} must be a list of one prompt or more.")
        ids = [self.tokenizer(p)["input_ids"] for p in rows]
        longest = max(map(len, ids))
        out = torch.full((len(ids), longest), self.pad_id)
        mask = torch.zeros(len(ids), longest, dtype=torch.long)
        for i, row in enumerate(ids):
            out[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        return {"input_ids": out.to(self.device), "attention_mask": mask.to(self.device)}

    @contextlib.contextmanager
    def asking(
        self, prompt_ends: Tensor | None = None, past: Tensor | None = None, rows: Sequence[int] | None = None
    ) -> Iterator[None]:
        """Say what the columns of the forward calls inside the block are (see `Layout`), for masks that need it."""
        before = self.layout
        _layouts[self.model] = Layout(prompt_ends, past, rows)
        try:
            yield
        finally:
            if before is None:
                del _layouts[self.model]
            else:
                _layouts[self.model] = before

    def describe(self) -> dict[str, object]:
        """Everything about the model that a measurement depends on, as plain JSON values; part of each record's key."""
        return {
            "weights": self.fingerprint,
            "tokenizer": self.tokenizer_fingerprint,
            "architecture": type(self.model).__name__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": getattr(self.model.config, "_attn_implementation", None),
            "kernels": self.kernels(),
            "torch": torch.__version__.split("+")[0],
            "transformers": importlib.metadata.version("transformers"),
        }

    def kernels(self) -> list[str]:
        """Fast-kernel packages that the model's code calls, with versions; none on the CPU."""
        return kernels.versions(kernels.bound(self.model)) if self.device.type == "cuda" else []


def wrap(model: nn.Module, tokenizer: object, name: str = "model", title: str | None = None) -> LanguageModel:
    """A `LanguageModel` of a transformers model that is already in memory; puts it in evaluation mode."""
    model.eval()
    return LanguageModel(model, tokenizer, name, title or name)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [n for n, t in tensors.items() if t.device.type == "meta"]
    if meta:
        raise ModelError(
            f"{meta[0]} is offloaded, so the weights cannot be fingerprinted: load the model on devices that hold it "
            "whole."
        )
    return tensors


@torch.no_grad()
def _state(model: nn.Module) -> tuple:
    """Changes when weights do: versions show edits in place, and sums those through ``.data``, which hide from them."""
    tensors = _tensors(model)
    sums = [t.sum(dtype=torch.float32 if t.is_floating_point() else None) for t in tensors.values()]
    versions = [(n, id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for n, t in tensors.items()]
    return repr(versions), repr([s.item() for s in sums]), _config_text(model)


def _config_text(model: nn.Module) -> str:
    def keep(config: dict) -> dict:
        return {
            k: keep(v) if isinstance(v, dict) else v
            for k, v in sorted(config.items(), key=lambda kv: str(kv[0]))
            if not str(k).startswith("_") and k not in _NOT_THE_MODEL
        }

    return repr(keep(model.config.to_dict()))


def _fingerprint(model: nn.Module) -> str:
    tensors = _tensors(model)

    def digest(item: tuple[str, Tensor]) -> str:
        name, tensor = item
        raw = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        return f"{name} {tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw).hexdigest()}"

    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(digest, sorted(tensors.items())))
    return hashlib.sha256("\n".join([*parts, _config_text(model)]).encode()).hexdigest()[:24]


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """torch's dtype of that name. Raises `GAError` that names the four that are possible."""
    names = {
        "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
        "float16": torch.float16, "fp16": torch.float16, "float64": torch.float64, "fp64": torch.float64,
    }  # fmt: skip
    if isinstance(dtype, str):
        dtype = names.get(dtype.lower().removeprefix("torch."), dtype)
    if dtype not in names.values():
        raise GAError(f"dtype={dtype!r} is unknown: use 'float32', 'bfloat16', 'float16' or 'float64'.")
    return dtype
