"""What is Llamba, in the fewest lines? A slow second writing of it, to hold the fast one against.

It works on a plain state dict with the published names, one token at a time, with no padding, cache or block.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

SIZES = {  # the published models, scaled down; heads x head width, as in theirs: 4 x 8 (8B) and 4 x 6 (3B)
    "8B": dict(vocab_size=104, d_model=32, n_layer=3, tie_embeddings=False, inner=48, n_heads=4, d_state=8),
    "3B": dict(vocab_size=104, d_model=24, n_layer=2, tie_embeddings=True, inner=40, n_heads=4, d_state=8),
}


def recurrence(x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor, state: Tensor | None = None):
    """x [b, t, h, p], B and C [b, t, h, n], log_decay [b, t, h] -> y [b, t, h, p], state [b, h, p, n]."""
    b, t, h, p = x.shape
    state = x.new_zeros(b, h, p, B.shape[-1]) if state is None else state
    ys = []
    for i in range(t):
        state = log_decay[:, i].exp()[..., None, None] * state + x[:, i, :, :, None] * B[:, i, :, None, :]
        ys.append((state * C[:, i, :, None, :]).sum(-1))
    return torch.stack(ys, 1), state


def config_json(size: str) -> dict:
    """A config.json with the published keys and no others."""
    s = SIZES[size]
    return {
        "model_type": "llamba",
        **{k: s[k] for k in ("vocab_size", "d_model", "n_layer", "tie_embeddings")},
        "pad_vocab_size_multiple": 8,
        "lm_head_bias": False,
        "resid_dropout": 0.0,
        "norm_epsilon": 1e-5,
        "mlp_cfg": {"intermediate_size": s["inner"], "bias": False, "act_fn": "silu"},
        "ssm_cfg": {
            "d_state": s["d_state"],
            "n_v_heads": s["n_heads"],
            "n_qk_heads": s["n_heads"],
            "expand": 1,
            "chunk_size": 128,
            "activation": "identity",
            "bias": False,
        },
    }


def weights(size: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights under the published names: matrices with std 1/sqrt(fan_in), all else random too."""
    s, g = SIZES[size], torch.Generator().manual_seed(seed)
    d, m, h, n = s["d_model"], s["inner"], s["n_heads"], s["d_state"]
    conv = d + 2 * h * n

    def draw(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return (mean + std * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)

    out = {"backbone.embedding.weight": draw(s["vocab_size"], d)}
    for i in range(s["n_layer"]):
        layer = f"backbone.layers.{i}."
        out |= {
            layer + "input_layernorm.weight": draw(d, std=0.3, mean=1),
            layer + "post_attention_layernorm.weight": draw(d, std=0.3, mean=1),
            layer + "mixer.in_proj.weight": draw(conv + d + h, d, std=d**-0.5),
            layer + "mixer.conv1d.weight": draw(conv, 1, 4, std=0.5),
            layer + "mixer.conv1d.bias": draw(conv, std=0.3),
            layer + "mixer.z_bias": draw(d, std=0.5),
            layer + "mixer.D": draw(h),
            layer + "mixer.out_proj.weight": draw(d, d, std=d**-0.5),
            layer + "mlp.gate_proj.weight": draw(m, d, std=d**-0.5),
            layer + "mlp.up_proj.weight": draw(m, d, std=d**-0.5),
            layer + "mlp.down_proj.weight": draw(d, m, std=m**-0.5),
        }
    out["backbone.final_layernorm.weight"] = draw(d, std=0.3, mean=1)
    if not s["tie_embeddings"]:
        out["lm_head.weight"] = draw(s["vocab_size"], d, std=d**-0.5)
    return out


def write(folder: Path, size: str, state: dict[str, Tensor] | None = None, config: dict | None = None) -> Path:
    """A checkpoint folder as published: one model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(size) if state is None else state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(size) if config is None else config))
    return folder


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def mixer_heads(u: Tensor, w: dict[str, Tensor], at: str, h: int, n: int) -> Tensor:
    """Gated heads, [b, t, h*p], that the output projection reads; u [b, t, d] is already normed."""
    (b, t, _), d = u.shape, w[at + "z_bias"].numel()
    projected = u @ w[at + "in_proj.weight"].T
    xBC, z, a = projected[..., : -d - h], projected[..., -d - h : -h], projected[..., -h:]
    kernel = w[at + "conv1d.weight"][:, 0]
    conv = torch.zeros_like(xBC) + w[at + "conv1d.bias"]
    for back in range(4):
        conv[:, back:] += kernel[:, 3 - back] * xBC[:, : t - back]
    x = conv[..., :d].reshape(b, t, h, d // h)
    B, C = conv[..., d : d + h * n].reshape(b, t, h, n), conv[..., d + h * n :].reshape(b, t, h, n)
    y, _ = recurrence(x, B, C, -F.softplus(a))
    y = (y + w[at + "D"][:, None] * x).reshape(b, t, d)
    gate = z + w[at + "z_bias"]
    return y * gate * torch.sigmoid(gate)


def logits(ids: Tensor, w: dict[str, Tensor], size: str) -> Tensor:
    """Next-token logits [b, t, vocab] of the whole model."""
    s = SIZES[size]
    r = w["backbone.embedding.weight"][ids]
    for i in range(s["n_layer"]):
        layer = f"backbone.layers.{i}."
        u = norm(r, w[layer + "input_layernorm.weight"])
        heads = mixer_heads(u, w, layer + "mixer.", s["n_heads"], s["d_state"])
        r = r + heads @ w[layer + "mixer.out_proj.weight"].T
        u = norm(r, w[layer + "post_attention_layernorm.weight"])
        gate = u @ w[layer + "mlp.gate_proj.weight"].T
        up = u @ w[layer + "mlp.up_proj.weight"].T
        r = r + (gate * torch.sigmoid(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
    head = w["backbone.embedding.weight" if s["tie_embeddings"] else "lm_head.weight"]
    return norm(r, w["backbone.final_layernorm.weight"]) @ head.T
