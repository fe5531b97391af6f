"""What do the embedded models look like? The paper's four architectures, as small as the tasks allow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from ga_utils.errors import ModelError
from ga_utils.tiny.language import VOCABULARY

if TYPE_CHECKING:
    # imported in the functions: a model's code binds CUDA kernels on import, and `load` must be able to hide them
    from transformers import FalconMambaForCausalLM, LlamaForCausalLM, Zamba2ForCausalLM

WIDTH, HEADS, HEAD_WIDTH = 64, 4, 32
_COMMON = dict(vocab_size=len(VOCABULARY), hidden_size=WIDTH, pad_token_id=0, bos_token_id=None, eos_token_id=None)


def tiny_llama(seed: int, layers: int = 6) -> LlamaForCausalLM:
    """Llama: `layers` layers of 4 heads of width 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            **_COMMON,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_WIDTH,
            max_position_embeddings=256,
            rope_theta=1000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            initializer_range=0.06,
        )
    )


def tiny_zamba2(seed: int) -> Zamba2ForCausalLM:
    """Zamba2: five Mamba-2 layers, one shared attention block that is called at two of them (depths 1 and 3).

    `tie_word_embeddings` stays True: transformers unties the shared block as well when it is switched off.
    """
    from transformers import Zamba2Config, Zamba2ForCausalLM

    torch.manual_seed(seed)
    model = Zamba2ForCausalLM(
        Zamba2Config(
            **_COMMON,
            num_hidden_layers=5,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            hybrid_layer_ids=[1, 3],
            num_mem_blocks=1,
            mamba_d_state=16,
            mamba_expand=2,
            n_mamba_heads=4,
            mamba_ngroups=1,
            chunk_size=16,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            intermediate_size=2 * WIDTH,
            use_mem_rope=True,
            rope_theta=1000.0,
            adapter_rank=8,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.06,
        )
    )
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "dt_bias") and hasattr(module, "A_log"):
                _long_memories(module.dt_bias)
    require_shared(model)
    return model


def tiny_falcon_mamba(seed: int, layers: int = 3) -> FalconMambaForCausalLM:
    """Falcon-Mamba: `layers` Mamba-1 layers of 128 channels with 16 states each.

    transformers' start gives a channel a step dt of 0.001 to 0.1 and its states the rates 1 to 16: they are written
    weakly and most are gone within a few words. Here dt starts at 0.02 to 0.2 and the rates at 0.01 to 1, so that
    states that last for a lesson are written about as strongly as the skip connection passes words on.
    """
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    torch.manual_seed(seed)
    model = FalconMambaForCausalLM(
        FalconMambaConfig(
            **_COMMON,
            num_hidden_layers=layers,
            state_size=16,
            expand=2,
            conv_kernel=4,
            tie_word_embeddings=False,
            initializer_range=0.06,
        )
    )
    with torch.no_grad():
        for block in model.backbone.layers:
            mixer = block.mixer
            _long_memories(mixer.dt_proj.bias, 0.02, 0.2)
            rates = torch.logspace(-2, 0, mixer.A_log.shape[1])
            mixer.A_log.copy_(rates.log().expand_as(mixer.A_log))
            for weight in (mixer.in_proj.weight, mixer.conv1d.weight):
                weight.normal_(std=math.prod(weight.shape[1:]) ** -0.5)
    return model


def _long_memories(dt_bias: torch.Tensor, shortest: float = 1e-3, longest: float = 1e-1) -> None:
    """Steps spread evenly in their logarithm: transformers' start of 1 forgets everything within a token or
    two."""
    steps = torch.logspace(math.log10(shortest), math.log10(longest), dt_bias.numel(), dtype=torch.float64)
    dt_bias.copy_(torch.log(torch.expm1(steps)).to(dt_bias))


def shared_blocks(model: Zamba2ForCausalLM) -> list[nn.Module]:
    """The attention block as each hybrid layer holds it."""
    return [layer.shared_transformer for layer in model.model.layers if hasattr(layer, "shared_transformer")]


def require_shared(model: Zamba2ForCausalLM) -> None:
    """Raise ModelError unless the attention and MLP weights of all depths are the same tensors (the
    adapters are not)."""
    blocks = [dict(b.named_parameters(remove_duplicate=False)) for b in shared_blocks(model)]
    names = [n for n in blocks[0] if "adapter" not in n]
    apart = [n for n in names if any(b[n] is not blocks[0][n] for b in blocks[1:])]
    if len(blocks) < 2 or apart:
        raise ModelError(
            f"Zamba2's block is not shared by its {len(blocks)} depths (tie_word_embeddings must stay True): "
            f"{len(apart)} tensors differ, first {apart[:1]}."
        )
