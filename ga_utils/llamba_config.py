"""Which numbers describe a Llamba model, and which variants of it can be run?"""

from transformers import PretrainedConfig

from .errors import ModelError

_SSM_DEFAULTS = {
    "d_state": 64,
    "n_v_heads": 32,
    "n_qk_heads": 32,
    "expand": 1,
    "d_conv": 4,
    "conv_bias": True,
    "chunk_size": 128,
    "activation": "identity",
    "bias": False,
}
_MLP_DEFAULTS = {"intermediate_size": 14336, "bias": False, "act_fn": "silu"}


class LlambaConfig(PretrainedConfig):
    """The published config.json: its keys, with Llamba-8B's values as defaults.

    `hidden_size`, `num_hidden_layers` and `tie_word_embeddings` are other names of `d_model`, `n_layer` and
    `tie_embeddings`. There is no `max_position_embeddings`: the model has no positions and no longest
    input, so tools fall back to the tokenizer's limit. `vocab_size` is rounded up to
    `pad_vocab_size_multiple`; `resid_dropout` is read and kept, never applied (nor is it in the published
    code). Raises ModelError for a variant that the published models do not use.
    """

    model_type = "llamba"
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "tie_word_embeddings": "tie_embeddings",
    }

    vocab_size: int = 128256
    d_model: int = 4096
    n_layer: int = 32
    tie_embeddings: bool = False
    pad_vocab_size_multiple: int = 8
    lm_head_bias: bool = False
    resid_dropout: float = 0.0
    norm_epsilon: float = 1e-5
    mlp_cfg: dict | None = None
    ssm_cfg: dict | None = None
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.ssm_cfg = _SSM_DEFAULTS | (self.ssm_cfg or {})
        self.mlp_cfg = _MLP_DEFAULTS | (self.mlp_cfg or {})
        self.vocab_size += -self.vocab_size % max(self.pad_vocab_size_multiple, 1)
        ssm = self.ssm_cfg
        if ssm["n_qk_heads"] != ssm["n_v_heads"] or ssm["activation"] != "identity" or ssm["bias"]:
            raise ModelError(
                f"This Llamba has ssm_cfg {ssm}, but only equal n_qk_heads and n_v_heads, activation "
                "'identity' and no bias (as in every published Llamba) can be run."
            )
        if self.d_inner % ssm["n_v_heads"]:
            raise ModelError(
                f"Llamba's inner width {self.d_inner} (expand x d_model) is not a multiple of its "
                f"{ssm['n_v_heads']} heads."
            )

    @property
    def d_inner(self) -> int:
        """Width of the heads side by side (n_v_heads x head_dim)."""
        return self.ssm_cfg["expand"] * self.d_model
