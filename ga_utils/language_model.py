"""What is a loaded model? The transformers model, its tokenizer, where its heads are, and who it is.

Axes, here and everywhere: b batch, t query position, s key position, l layer, h head, p head dimension, n state size,
c channel, v vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .errors import GAError, ModelError
from .heads import Head
from .sites import HeadSite, find_sites, resolve

#: packages whose CUDA kernels transformers uses when they are installed
_KERNELS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}


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
    layout: Layout | None = field(default=None, repr=False)

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
    def pad_id(self) -> int:
        """The id that fills padded columns; any id does, since padding is masked."""
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return token
        return 0

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over the names, shapes and bytes of all weights and buffers, and the configuration's numbers."""
        return _fingerprint(self.model)

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
        """Token ids and attention mask ``[b, t]`` of prompts, padded on the right, with the tokenizer's special tokens."""
        ids = [self.tokenizer(p)["input_ids"] for p in prompts]
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
        before, self.layout = self.layout, Layout(prompt_ends, past, rows)
        try:
            yield
        finally:
            self.layout = before

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
        """Fast-kernel packages that transformers uses for this model, with versions; none on the CPU."""
        if self.device.type != "cuda":
            return []
        found = []
        for module, package in _KERNELS.items():
            if importlib.util.find_spec(module):
                found.append(f"{package} {importlib.metadata.version(package)}")
        return found


def wrap(model: nn.Module, tokenizer: object, name: str = "model", title: str | None = None) -> LanguageModel:
    """A `LanguageModel` of a transformers model that is already in memory; puts it in evaluation mode."""
    model.eval()
    return LanguageModel(model, tokenizer, name, title or name)


def _fingerprint(model: nn.Module) -> str:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    meta = [n for n, t in tensors.items() if t.device.type == "meta"]
    if meta:
        raise ModelError(
            f"{meta[0]} is offloaded, so the weights cannot be fingerprinted: load the model on devices that hold it whole."
        )

    def digest(item: tuple[str, Tensor]) -> str:
        name, tensor = item
        raw = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()
        return f"{name} {tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw).hexdigest()}"

    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(digest, sorted(tensors.items())))
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    return hashlib.sha256("\n".join([*parts, repr(sorted(config.items(), key=lambda kv: kv[0]))]).encode()).hexdigest()[:24]


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
