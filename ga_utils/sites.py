"""Where are the heads of a model?

A *site* is one call of one mixer in one layer: the module that mixes tokens, and its output projection. A head is a
contiguous slice of the projection's *input* ``[b, t, n_heads * head_dim]``; nothing upstream of that point separates
heads cleanly (Mamba-2's grouped norm couples them), and nothing downstream does at all.

Sites are found from the structure of the modules (which parameters and children a mixer has), not from a list of
class names. A module that looks like a mixer but fits no known structure is an error: a model must never be measured
with part of its heads unseen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .errors import HeadError, ModelError, say_once
from .heads import Head

#: names that transformers gives to the output projection of a mixer
PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "linear_out")
#: children that only attention has
_QUERIES = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "q_a_proj", "kv_b_proj")
_LOOKS_LIKE_A_MIXER = re.compile(
    r"(Attention|Mixer|Mamba|DeltaNet|LinearAttn|SSM|Recurrent|LSTM|Rwkv|Retention|ShortConv|Hyena|Griffin)"
    r"(?!.*(Norm\w*|ShortConvolution|MLP|Rotary\w*|Embedding)$)"
)
#: depthwise convolutions beside the mixers (Inkling): they mix neighbouring tokens, hold no heads, and no mask
# reaches them
_BESIDE = re.compile(r"ShortConvolution$")
#: architectures whose forward ignores the attention mask: padding changes their scores, with no error
REFUSED = {
    "rwkv": "its forward pass ignores the attention mask, so padded tokens enter the state",
    "xlstm": "its forward pass ignores the attention mask, so padded tokens enter the state",
    "recurrent_gemma": "its recurrent blocks ignore the attention mask and keep their state inside the modules",
}


@dataclass(frozen=True)
class HeadSite:
    """One call of one mixer in one layer, and the slice arithmetic of its heads.

    kind: attention, mamba1, mamba2, llamba, deltanet, kda, lightning or shortconv; a head of mamba1 and of shortconv
    is a channel (head_dim 1). primary: whether the short name ``L5H3`` means this site.
    """

    layer: int
    kind: str
    path: str
    n_heads: int
    head_dim: int
    primary: bool
    mixer: nn.Module = field(repr=False, compare=False)
    proj: nn.Module = field(repr=False, compare=False)

    @property
    def width(self) -> int:
        """Width of the projection's input: n_heads * head_dim."""
        return self.n_heads * self.head_dim

    def channels(self, index: int) -> slice:
        """Channels of head `index` in the projection's input."""
        return slice(index * self.head_dim, (index + 1) * self.head_dim)

    def head(self, index: int) -> Head:
        """The name of head `index` of this site."""
        return Head(self.layer, index, None if self.primary else self.kind)

    def contributions(self, x: Tensor, indices: list[int]) -> Tensor:
        """What each head adds to the mixer's output.

        x: the projection's input ``[b, t, width]``. Returns ``[len(indices), b, t, hidden]``; over all heads these
        sum to the projection's output less its bias.
        """
        zero = self.proj(torch.zeros_like(x[:1, :1]))
        out = []
        for i in indices:
            only = torch.zeros_like(x)
            only[..., self.channels(i)] = x[..., self.channels(i)]
            out.append(self.proj(only) - zero)
        return torch.stack(out)


def find_sites(model: nn.Module) -> tuple[HeadSite, ...]:
    """Return every site of `model`, by layer and then in the order in which the modules are declared.

    Raises `ModelError` for an architecture that ignores padding, for a model without a layer list, and for a layer
    whose mixer is not understood.
    """
    config = _text_config(model)
    family = getattr(config, "model_type", type(model).__name__)
    if family in REFUSED:
        raise ModelError(f"{type(model).__name__} is not supported: {REFUSED[family]}.")
    path, layers = find_layers(model)
    sites: list[HeadSite] = []
    owner: dict[int, int] = {}
    for index, layer in enumerate(layers):
        found = _mixers(layer, config, f"{type(model).__name__}, layer {index}")
        attention = any(kind == "attention" for _, _, kind, *_ in found)
        for name, module, kind, proj, n_heads, head_dim in found:
            if owner.setdefault(id(proj), index) != index:
                raise ModelError(
                    f"{type(model).__name__} calls one {type(module).__name__} object in layers {owner[id(proj)]} and "
                    f"{index}; heads are addressed by layer, which needs a module object for each."
                )
            primary = kind == "attention" if attention else True
            full = f"{path}.{index}.{name}" if name else f"{path}.{index}"
            sites.append(HeadSite(index, kind, full, n_heads, head_dim, primary, module, proj))
    if not sites:
        raise ModelError(f"{type(model).__name__} has no mixer that this package knows in any layer.")
    return tuple(sites)


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The dotted path and the ModuleList of the model's decoder layers."""
    count = getattr(_text_config(model), "num_hidden_layers", None)
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    named = [x for x in lists if x[0].rsplit(".", 1)[-1] in ("layers", "h", "blocks")]
    if not named:
        raise ModelError(f"{type(model).__name__} has no list of {count} decoder layers that this package can find.")
    return min(named, key=lambda x: x[0].count("."))


def resolve(sites: tuple[HeadSite, ...], head: Head) -> HeadSite:
    """The site that holds `head`. Raises `HeadError` that names the layers, mixers or heads that do exist."""
    here = [s for s in sites if s.layer == head.layer]
    if not here:
        layers = sorted({s.layer for s in sites})
        raise HeadError(f"There is no head {head}: the layers with heads are {_ranges(layers)}.")
    if head.mixer:
        match = [s for s in here if s.kind == head.mixer]
        if not match:
            kinds = " and ".join(sorted({s.kind for s in here}))
            raise HeadError(f"There is no head {head}: layer {head.layer} holds {kinds}, not {head.mixer}.")
    else:
        match = [s for s in here if s.primary]
    if len(match) > 1:
        raise HeadError(f"{head} is ambiguous: layer {head.layer} holds {len(match)} mixers of the same kind.")
    if head.index >= match[0].n_heads:
        what = "channels" if match[0].head_dim == 1 else "heads"
        raise HeadError(
            f"There is no head {head}: the {match[0].kind} mixer of layer {head.layer} has {what} "
            f"0-{match[0].n_heads - 1}."
        )
    return match[0]


def _text_config(model: nn.Module):
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _mixers(layer: nn.Module, config, where: str) -> list[tuple]:
    """(name, module, kind, projection, n_heads, head_dim) of every mixer in `layer`."""
    found, unknown = [], []
    for name, module in layer.named_modules():
        if any(name == f[0] or name.startswith(f[0] + ".") for f in found if f[0]):
            continue  # inside a mixer that is already known
        match = _recognise(module, config)
        if match:
            found.append((name, module, *match))
        elif _BESIDE.search(type(module).__name__):
            say_once(
                f"beside {where.split(',')[0]}",
                f"{where.split(',')[0]} also mixes neighbouring tokens in short convolutions beside its heads; "
                "masking heads leaves those on.",
            )
        elif _LOOKS_LIKE_A_MIXER.search(type(module).__name__):
            unknown.append((name, module))
    for name, module in unknown:
        # a decoder layer or a wrapper may carry such a name; it is understood if a known mixer lies inside
        if not any(f[0] == name or f[0].startswith(name + ".") or not name for f in found):
            raise ModelError(
                f"{where}: {type(module).__name__} ({name}) looks like a mixer, but its structure fits none that "
                "this package knows, so its heads could not be measured."
            )
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    if not found and not any(k in ("mlp", "moe") for k in kinds):
        raise ModelError(f"{where} holds no mixer that this package knows.")
    return found


def _recognise(module: nn.Module, config) -> tuple[str, nn.Module, int, int] | None:
    """(kind, projection, n_heads, head_dim) if `module` has the structure of a mixer, else None."""
    children = dict(module.named_children())
    proj = next((children[p] for p in PROJECTIONS if p in children), None)
    width = None if proj is None else _in_features(proj)
    if width is None:
        return None
    a_log = getattr(module, "A_log", None)
    inner_a_log = any(n.endswith(".A_log") for n, _ in module.named_parameters())
    if type(module).__name__ == "LlambaMixer":
        kind, n_heads = "llamba", module.n_heads
    elif hasattr(module, "num_v_heads") and hasattr(module, "head_v_dim"):
        kind, n_heads = "deltanet", module.num_v_heads
    elif "conv1d" in children and a_log is None and inner_a_log:
        kind, n_heads = "kda", module.num_heads
    elif "conv1d" in children and a_log is not None and a_log.ndim == 1:
        kind, n_heads = "mamba2", module.num_heads
    elif "conv1d" in children and a_log is not None:
        kind, n_heads = "mamba1", width  # one recurrence for each channel
    elif hasattr(module, "slope_rate"):
        kind, n_heads = "lightning", module.num_attention_heads
    elif isinstance(children.get("conv"), nn.Conv1d) and "in_proj" in children:
        kind, n_heads = "shortconv", width
    elif any(c in children for c in _QUERIES):
        kind, n_heads = "attention", _attention_heads(module, config)
    else:
        return None
    if width % n_heads:
        raise ModelError(
            f"{type(module).__name__} names {n_heads} heads, which do not divide the {width} inputs of its output "
            "projection."
        )
    return kind, proj, n_heads, width // n_heads


def _attention_heads(module: nn.Module, config) -> int:
    for owner in (module, config):
        for name in ("num_attention_heads", "num_heads", "n_head"):
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    raise ModelError(f"{type(module).__name__} does not say how many heads it has.")


def _in_features(proj: nn.Module) -> int | None:
    if hasattr(proj, "in_features"):
        return proj.in_features
    weight = getattr(proj, "weight", None)
    # GPT-2's Conv1D stores its weight as [in, out]
    return weight.shape[0] if type(proj).__name__ == "Conv1D" and weight is not None else None


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    out: list[str] = []
    start = last = None
    for n in [*numbers, None]:
        if start is not None and n != last + 1:
            out.append(str(start) if start == last else f"{start}-{last}")
            start = None
        if start is None:
            start = n
        last = n
    return ", ".join(out)
