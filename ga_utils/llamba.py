"""How are the published Llamba checkpoints run as an ordinary transformers model?

Llamba is Llama with its attention replaced by a discrete Mamba-2 mixer (ga_utils/llamba_mixer.py). Importing
this module registers `LlambaConfig` and `LlambaForCausalLM` with transformers' AutoConfig and
AutoModelForCausalLM. Parameters carry the names of the published files, which
`ga_utils.llamba_load.load_llamba` loads strictly.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput

from .errors import ModelError
from .llamba_cache import LayerState, LlambaCache
from .llamba_config import LlambaConfig
from .llamba_mixer import LlambaMixer, Padding, padding_from_mask, work_dtype

# transformers renamed generate's keyword for the cache from `past_key_values` to `cache`; forward takes both
_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAME = "cache" if "cache" in _ARGUMENTS else "past_key_values"


class LlambaRMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, normalised in float32 (float64 stays float64)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(work_dtype(x.dtype))
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LlambaMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, d_model: int, intermediate_size: int, bias: bool, act_fn: str):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(d_model, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, d_model, bias=bias)
        self.act_fn = ACT2FN[act_fn]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlambaBlock(nn.Module):
    """x <- x + mixer(norm(x)); x <- x + mlp(norm(x)), with [b, t, d_model] in and out."""

    def __init__(self, config: LlambaConfig, layer_idx: int):
        super().__init__()
        ssm = config.ssm_cfg
        # the blocks' epsilon is fixed in the published code; norm_epsilon belongs to the final norm
        self.input_layernorm = LlambaRMSNorm(config.d_model, 1e-5)
        self.mixer = LlambaMixer(
            config.d_model,
            ssm["n_v_heads"],
            ssm["d_state"],
            d_inner=config.d_inner,
            d_conv=ssm["d_conv"],
            conv_bias=ssm["conv_bias"],
            chunk_size=ssm["chunk_size"],
            layer_idx=layer_idx,
        )
        self.post_attention_layernorm = LlambaRMSNorm(config.d_model, 1e-5)
        mlp = config.mlp_cfg
        self.mlp = LlambaMLP(config.d_model, mlp["intermediate_size"], mlp["bias"], mlp["act_fn"])

    def forward(self, hidden_states: Tensor, padding: Padding | None = None, state: LayerState | None = None) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.input_layernorm(hidden_states), padding, state)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@dataclass
class LlambaOutput(ModelOutput):
    """What a forward gives back; fields that were not asked for are None.

    logits [b, kept, vocab] (language model) or last_hidden_state [b, t, d_model] (backbone); the cache; and
    with `output_hidden_states` n_layer + 1 tensors [b, t, d_model]: the embeddings, then each block's
    output, the last one normed.
    """

    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    cache: LlambaCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> LlambaCache | None:
        """The cache, under the name that older transformers releases read."""
        return self.cache


class LlambaPreTrainedModel(PreTrainedModel):
    """Shared by the backbone and the language model."""

    config_class = LlambaConfig
    base_model_prefix = "backbone"
    _no_split_modules = ["LlambaBlock"]
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LlambaMixer):
            init.zeros_(module.z_bias)
            init.ones_(module.D)


class LlambaModel(LlambaPreTrainedModel):
    """Embedding, blocks and final norm; see LlambaForCausalLM for the arguments."""

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(LlambaBlock(config, i) for i in range(config.n_layer))
        self.final_layernorm = LlambaRMSNorm(config.d_model, config.norm_epsilon)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: LlambaCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> LlambaOutput:
        """input_ids [b, t] or inputs_embeds [b, t, d_model] -> last_hidden_state [b, t, d_model], cache."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ModelError("Llamba needs exactly one of input_ids and inputs_embeds.")
        hidden = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        b, t = hidden.shape[:2]
        if t == 0:
            raise ModelError("Llamba was given an empty input; pass at least one token.")
        if cache is None and use_cache:
            cache = LlambaCache(len(self.layers))
        self._check_cache(cache, b)
        padding = padding_from_mask(self._recent(attention_mask, b, t, 0 if cache is None else cache.seen))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        seen_states = [hidden]
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, padding, None if cache is None else cache.layers[i])
            if output_hidden_states:
                seen_states.append(hidden)
        hidden = self.final_layernorm(hidden)
        if cache is not None:
            cache.seen += t
        return LlambaOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=(*seen_states[:-1], hidden) if output_hidden_states else None,
        )

    def _check_cache(self, cache: LlambaCache | None, b: int) -> None:
        if cache is None:
            return
        if not isinstance(cache, LlambaCache):
            raise ModelError(f"Llamba continues from a LlambaCache, not from a {type(cache).__name__}.")
        if len(cache) != len(self.layers) or cache.batch_size not in (None, b):
            raise ModelError(
                f"The cache holds {len(cache)} layers and a batch of {cache.batch_size}, but the model has "
                f"{len(self.layers)} layers and the input a batch of {b}."
            )

    @staticmethod
    def _recent(mask: Tensor | None, b: int, t: int, seen: int) -> Tensor | None:
        """The part of the mask that belongs to these t tokens; earlier ones are already in the cache."""
        if mask is not None and tuple(mask.shape) not in {(b, t), (b, seen + t)}:
            raise ModelError(
                f"attention_mask has shape {list(mask.shape)}, but {[b, t]} (these tokens) or "
                f"{[b, seen + t]} (with those in the cache) is needed."
            )
        return None if mask is None else mask[:, -t:]


class LlambaForCausalLM(LlambaPreTrainedModel, GenerationMixin):
    """Llamba with its language-model head, tied to the embedding or not, as config.tie_embeddings says."""

    _tied_weights_keys = {"lm_head.weight": "backbone.embedding.weight"}

    def __init__(self, config: LlambaConfig):
        super().__init__(config)
        self.backbone = LlambaModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.embedding = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: LlambaCache | None = None,
        past_key_values: LlambaCache | None = None,
        cache_params: LlambaCache | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> LlambaOutput | tuple:
        """Next-token logits, float32 (float64 for float64).

        input_ids [b, t]; attention_mask [b, t], or [b, seen + t] with a cache, 1 for real tokens: padding
        on either side changes nothing at the real ones. The cache goes by any of its three names, continues
        with any number of tokens and is moved on in place; `use_cache=True` without one starts one.
        `logits_to_keep`: only the last k positions (0 = all), or the positions in a tensor. `position_ids`
        is taken and unused: the model has no positions. Raises ModelError for inputs that do not fit each
        other, and for output_attentions (there are none to give).
        """
        given = [c for c in (cache, past_key_values, cache_params) if c is not None]
        if len(given) > 1:
            raise ModelError("Llamba was given its cache under more than one name; pass it once.")
        if output_attentions:
            raise ModelError("Llamba has no attention probabilities; its mixing matrices come from mixer.project().")
        out = self.backbone(
            input_ids,
            attention_mask,
            inputs_embeds,
            cache=given[0] if given else None,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, keep])
        out = LlambaOutput(logits=logits.to(work_dtype(logits.dtype)), cache=out.cache, hidden_states=out.hidden_states)
        return out.to_tuple() if return_dict is False else out

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs) -> None:
        """Give generate a LlambaCache under the name that this transformers release uses."""
        if generation_config.cache_implementation is not None:
            raise ModelError("Llamba has a state cache of its own: leave cache_implementation unset.")
        given = [model_kwargs.pop(name, None) for name in ("cache", "past_key_values", "cache_params")]
        given = [c for c in given if c is not None]
        if given:
            given[0]._is_user_defined = True
        elif generation_config.use_cache is not False:
            given = [LlambaCache(self.config.n_layer)]
        if given:
            model_kwargs[CACHE_NAME] = given[0]


AutoConfig.register("llamba", LlambaConfig)
AutoModelForCausalLM.register(LlambaConfig, LlambaForCausalLM)
