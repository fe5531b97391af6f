"""What only a GPU can show: fast kernels give torch's numbers, how noisy bf16 is, how fast the sweep runs.

`make gpu-check` runs these. Without CUDA they are skipped; GA_GPU_CHECK=cpu runs them on the CPU at small widths, which
proves that this code runs and nothing about kernels.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from reference import prompt_ids

DEVICE = os.environ.get("GA_GPU_CHECK", "cuda")
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("no CUDA device (GA_GPU_CHECK=cpu tries this code on the CPU)", allow_module_level=True)

import zoo  # noqa: E402  binds the kernels, which a machine without CUDA should not see

from ga_utils import kernels  # noqa: E402
from ga_utils.models import wrap  # noqa: E402
from ga_utils.sweep import sweep_heads  # noqa: E402
from ga_utils.tasks import kv_task  # noqa: E402

HERE = Path(__file__).resolve().parent
FAST = [
    "mamba",
    "falcon_mamba",
    "mamba2",
    "zamba2",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "llamba",
    "qwen3_next",
    "llama",
]
#: fp32 on a GPU against the CPU; TF32 is switched off, which alone would cost 1e-3
TOLERANCE = 2e-4


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", [n for n in FAST if n in zoo.CONFIGS])
def test_fast_kernels_give_the_numbers_of_plain_torch(name, tmp_path):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]))
    subprocess.run(
        [sys.executable, str(HERE / "reference.py"), name, str(tmp_path / "reference.npy")], check=True, env=environment
    )
    model = zoo.build(name)[0].eval().to(DEVICE)
    with torch.no_grad():
        ours = model(prompt_ids().to(DEVICE)).logits.float().cpu().numpy()
    error = relative(ours, np.load(tmp_path / "reference.npy"))
    print(f"{name}: {', '.join(kernels.versions(kernels.bound(model))) or 'plain torch'}, relative error {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.parametrize("name", [n for n in ("llama", "falcon_mamba", "mamba2", "llamba") if n in zoo.CONFIGS])
def test_bf16_noise_is_a_few_percent(name):
    model = zoo.build(name)[0].eval().to(DEVICE)
    ids = prompt_ids().to(DEVICE)
    with torch.no_grad():
        exact = model(ids).logits.float().cpu().numpy()
        rough = model.to(torch.bfloat16)(ids).logits.float().cpu().numpy()
    error = relative(rough, exact)
    print(f"{name}: noise floor of bf16 {error:.1e} of the logits")
    assert 1e-4 < error < 0.1


def test_throughput_of_the_sweep_at_the_widths_of_8b():
    """Two layers of Llama-3.1-8B's widths, random weights: every head masked alone at the answer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, heads, kv, dtype = (4096, 14336, 32, 8, torch.bfloat16)
    if DEVICE == "cpu":
        width, inner, heads, kv, dtype = (128, 256, 4, 2, torch.float32)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv, num_hidden_layers=2, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype).to(DEVICE)
    lm = wrap(model, zoo.tokenizer(), name="two layers of 8B's widths")
    task = kv_task(10, 4, seed=0, format="terse", tokenizer=lm.tokenizer)
    clock = time.perf_counter()
    found = sweep_heads(lm, task)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - clock
    print(
        f"{len(found.heads)} heads x {len(task)} questions in {seconds:.2f} s: {found.tokens / seconds:,.0f} tokens a s"
    )
    assert found.logprob.shape == (2 * heads, 4) and np.isfinite(found.logprob).all()
