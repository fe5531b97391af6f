"""Logits of one tiny model by plain torch on the CPU, in a process that hides the kernels: reference.py NAME FILE."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def prompt_ids() -> torch.Tensor:
    """Two prompts of 37 tokens, longer than every chunk of the tiny models."""
    return torch.randint(3, 320, (2, 37), generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    from ga_utils import kernels

    with kernels.hidden():
        from zoo import build

        model, _ = build(sys.argv[1])
    with torch.no_grad():
        np.save(sys.argv[2], model.eval()(prompt_ids()).logits.float().numpy())
