"""Does a Llamba checkpoint hold exactly the weights that its config.json asks for?

transformers only reports a weight that is missing or left over, and goes on with a random one. Here it is an
error.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .errors import ModelError
from .llamba import LlambaForCausalLM
from .llamba_config import LlambaConfig

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_llamba(folder: str | Path) -> bool:
    """Whether the folder's config.json describes a Llamba: by model_type or, without one, by its keys."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    config = _read_json(path)
    if "model_type" in config:
        return config["model_type"] == "llamba"
    return {"d_model", "n_layer", "ssm_cfg", "mlp_cfg"} <= config.keys()


def load_llamba(path: str | Path, dtype: torch.dtype | str | None = None, **kwargs) -> LlambaForCausalLM:
    """Load a Llamba from a folder in the published layout (or from the model.safetensors in it), strictly.

    `dtype` None keeps the stored one (published files are float32). Other keywords (device_map, ...) go to
    from_pretrained. The model comes back in eval mode. Raises ModelError that names each weight that is
    missing, unknown or of the wrong shape, before any weight is read.
    """
    folder = Path(path)
    if folder.is_file():
        if folder.name not in (_WEIGHTS, _INDEX):
            raise ModelError(f"A Llamba is loaded from a folder or its {_WEIGHTS}, not from {folder.name}.")
        folder = folder.parent
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a Llamba checkpoint.")
    if not is_llamba(folder):
        raise ModelError(
            f"{config_path} does not describe a Llamba: its model_type must be 'llamba', or else its "
            "keys must include d_model, n_layer, ssm_cfg and mlp_cfg."
        )
    config = LlambaConfig.from_pretrained(folder)
    check_weights(config, stored_shapes(folder), str(folder))
    return LlambaForCausalLM.from_pretrained(
        folder, config=config, dtype="auto" if dtype is None else dtype, use_safetensors=True, **kwargs
    ).eval()


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every stored weight, read from the headers of the file or shards."""
    files = [folder / _WEIGHTS]
    if not files[0].is_file():
        index = folder / _INDEX
        if not index.is_file():
            raise ModelError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}.")
        files = [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    shapes = {}
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file.name} is named in {_INDEX} but is not in {folder}.")
        try:
            with safe_open(file, framework="pt") as handle:
                shapes |= {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
        except SafetensorError as error:
            raise ModelError(f"{file} is not a complete safetensors file ({error}).") from error
    return shapes


def check_weights(config: LlambaConfig, stored: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise ModelError unless the stored names and shapes are exactly those of a model with this config."""
    with torch.device("meta"):
        model = LlambaForCausalLM(config)
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.tie_embeddings:
        del wanted["lm_head.weight"]  # one tensor, stored under the embedding's name
    wrong = [f"{name} is missing" for name in wanted if name not in stored]
    for name, shape in stored.items():
        if name == "lm_head.weight" and config.tie_embeddings:
            wrong.append("lm_head.weight is stored although config.json says tie_embeddings")
        elif name not in wanted:
            wrong.append(f"{name} is unknown")
        elif wanted[name] != shape:
            wrong.append(f"{name} has shape {list(shape)} where {list(wanted[name])} is needed")
    if wrong:
        rest = f", and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise ModelError(f"The weights in {where} do not fit its config.json: {', '.join(wrong[:6])}{rest}.")


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}).") from error
