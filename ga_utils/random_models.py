"""What does every supported architecture look like in small? Tiny random models, for the contract and for pages.

Weights are drawn again with standard deviation 1/sqrt(fan_in): the libraries' default of 0.02 makes tiny models so
linear that a wrong head or a leaking pad hardly shows in the logits.
"""

from __future__ import annotations

import functools
import math

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

COMMON = dict(vocab_size=320, hidden_size=64, num_attention_heads=4, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA = dict(COMMON, intermediate_size=96, num_hidden_layers=3, num_key_value_heads=2, max_position_embeddings=2048)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"], num_hidden_layers=4,
)  # fmt: skip
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=8, mamba_chunk_size=16)
LATENT = dict(
    kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, linear_head_dim=16, linear_num_heads=4,
    num_experts=4, moe_intermediate_size=32, num_experts_per_token=2, num_key_value_heads=4, num_expert_group=1,
    topk_group=1, num_hidden_layers=4, intermediate_size=96,
    layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
)  # fmt: skip
_MAMBA1 = {
    k: v for k, v in COMMON.items() if k != "num_attention_heads"
} | dict(num_hidden_layers=3, state_size=8, expand=2)  # fmt: skip
_ZAMBA2 = dict(
    LLAMA, num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
    num_mem_blocks=1, mamba_d_state=8, n_mamba_heads=8, mamba_ngroups=2, chunk_size=16, adapter_rank=4,
    num_key_value_heads=4, use_mem_rope=True, hybrid_layer_ids=[1, 3],
)  # fmt: skip

#: name -> (class stem, config arguments)
CONFIGS: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2", dict(
        vocab_size=320, n_embd=64, n_head=4, n_layer=3, n_positions=2048, bos_token_id=1, eos_token_id=2,
    )),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}),
    "llama": ("Llama", LLAMA),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", dict(LLAMA, head_dim=32)),
    "mistral": ("Mistral", dict(LLAMA, sliding_window=24)),
    "gemma2": ("Gemma2", dict(LLAMA, head_dim=32, sliding_window=24, query_pre_attn_scalar=16)),
    "gemma3": ("Gemma3", dict(LLAMA, head_dim=32, sliding_window=24)),
    "olmo2": ("Olmo2", LLAMA),
    "phi3": ("Phi3", LLAMA),
    "mamba": ("Mamba", _MAMBA1),
    "falcon_mamba": ("FalconMamba", _MAMBA1),
    "mamba2": ("Mamba2", dict(_MAMBA1, num_heads=8, head_dim=16, n_groups=2, chunk_size=16)),
    "mamba2_g1": ("Mamba2", dict(_MAMBA1, num_heads=8, head_dim=16, n_groups=1, chunk_size=16)),
    "zamba": ("Zamba", dict(
        LLAMA, num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        num_key_value_heads=4, mamba_d_state=8, mamba_dt_rank=4, attention_hidden_size=128, attention_head_dim=32,
    )),
    "zamba2": ("Zamba2", _ZAMBA2),
    "jamba": ("Jamba", dict(
        LLAMA, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4,
        num_experts=2, num_experts_per_tok=1,
    )),
    "bamba": ("Bamba", dict(LLAMA, **MAMBA, num_hidden_layers=4, attn_layer_indices=[1, 3])),
    "falcon_h1": ("FalconH1", dict(LLAMA, **MAMBA, mamba_d_ssm=128)),
    "falcon_h1_norm": ("FalconH1", dict(LLAMA, **MAMBA, mamba_d_ssm=128, mamba_rms_norm=True)),
    "nemotron_h": ("NemotronH", dict(
        LLAMA, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        num_hidden_layers=5, head_dim=16, ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=16, n_groups=2,
        chunk_size=16,
    )),
    "granitemoehybrid": ("GraniteMoeHybrid", dict(
        LLAMA, **MAMBA, num_hidden_layers=4, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )),
    "qwen3_next": ("Qwen3Next", dict(LLAMA, **DELTA, **MOE)),
    "qwen3_5": ("Qwen3_5", dict(LLAMA, **DELTA)),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(LLAMA, **DELTA, **MOE)),
    "lara_mini": ("LaraMini", dict(LLAMA, **DELTA, **MOE, sliding_window=24)),
    "olmo_hybrid": ("OlmoHybrid", dict(LLAMA, **{k: v for k, v in DELTA.items() if k != "head_dim"} | dict(
        linear_num_key_heads=4, linear_value_head_dim=24))),
    "kimi_linear": ("KimiLinear", dict(COMMON, **LATENT, num_shared_experts=1)),
    "bailing_hybrid": ("BailingHybrid", dict(COMMON, **LATENT, num_shared_experts=1)),
    "minimax": ("MiniMax", dict(
        LLAMA, num_hidden_layers=4, block_size=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
    )),
    "lfm2": ("Lfm2", dict(
        LLAMA, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"],
    )),
    "lfm2_moe": ("Lfm2Moe", dict(
        LLAMA, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"], num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1,
    )),
    "lfm3": ("Lfm3", dict(
        LLAMA, num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "sliding_attention"], head_dim=16,
        sliding_window=24,
    )),
    "zaya": ("Zaya", dict(LLAMA, head_dim=16, num_experts=4, moe_intermediate_size=32, router_hidden_size=16)),
    "inkling": ("Inkling", dict(
        LLAMA, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, d_rel=4,
        sliding_window_size=24, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=32, layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"], num_hidden_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse"], logits_mup_width_multiplier=1.0,
    )),
    "llamba": ("Llamba", dict(
        vocab_size=320, d_model=64, n_layer=3, tie_embeddings=False, mlp_cfg=dict(intermediate_size=96),
        ssm_cfg=dict(d_state=8, n_v_heads=4, n_qk_heads=4, expand=1, chunk_size=16),
    )),
}  # fmt: skip
NAMES = tuple(CONFIGS)
#: architectures that must be refused, with their configurations
REFUSED = {
    "rwkv": ("Rwkv", dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, context_length=64)),
    "xlstm": ("xLSTM", dict(vocab_size=320, hidden_size=64, num_hidden_layers=2, num_heads=4)),
    "recurrent_gemma": ("RecurrentGemma", dict(LLAMA, lru_width=64, num_hidden_layers=3)),
}


def tokenizer(bos: bool = True, pad: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 4 specials and 256 bytes: it splits numbers into digits; `bos` prepends <s>."""
    specials = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    alphabet = {c: i + 4 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tok = Tokenizer(models.BPE(vocab=specials | alphabet, merges=[], unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    if bos:
        tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>") | (dict(pad_token="<pad>") if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=tok, **names)


def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Draw every matrix again with std 1/sqrt(fan_in) and shake biases and gains, in place."""
    gen = torch.Generator().manual_seed(seed)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.add_(0.3 * torch.randn(p.shape, generator=gen))
            elif name.endswith("dt_bias") or name.endswith("dt_proj.bias"):
                p.copy_(torch.randn(p.shape, generator=gen) - 1.5)  # memories of several tokens, not of one
            elif p.ndim >= 2:
                conv1d = p.ndim == 2 and type(_owner(model, name)).__name__ == "Conv1D"
                fan_in = p.shape[0] if conv1d else math.prod(p.shape[1:]) if p.ndim < 4 else p.shape[-1]
                embedding = "embed" in name or name.endswith("wte.weight")
                std = (0.15 if tied else 1.0) if embedding else 1 / math.sqrt(fan_in)
                p.copy_(std * torch.randn(p.shape, generator=gen))
            else:
                p.add_(0.1 * torch.randn(p.shape, generator=gen))


def _owner(model, name):
    return model.get_submodule(name.rsplit(".", 1)[0])


def build(name: str, seed: int = 0, **overrides):
    """A tiny random model of architecture `name` in evaluation mode and fp32, and its tokenizer."""
    stem, kwargs = (CONFIGS | REFUSED)[name]
    if stem == "Llamba":
        from .llamba import LlambaConfig, LlambaForCausalLM

        config, cls = LlambaConfig(**kwargs | overrides), LlambaForCausalLM
    else:
        for suffix in ("Config", "TextConfig"):
            cls = getattr(transformers, f"{stem}ForCausalLM", None) or getattr(transformers, f"{stem}LMHeadModel")
            config_cls = getattr(transformers, stem + suffix, None)
            if config_cls is not None and cls.config_class is config_cls:
                break
        config = cls.config_class(**kwargs | overrides)
    torch.manual_seed(seed)
    model = cls(config).eval()
    redraw(model, seed)
    return model, tokenizer()


@functools.cache
def lm(name: str, seed: int = 0):
    """The same as a `LanguageModel`, built once in a process: leave it as it was."""
    from .language_model import wrap

    model, tok = build(name, seed)
    return wrap(model, tok, name=f"random-{name}")
