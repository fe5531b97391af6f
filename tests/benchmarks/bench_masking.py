"""What does a mask cost? Forwards with and without masks in one run, in turns, on one thread.

    python tests/benchmarks/bench_masking.py

SmolLM2-135M without its vocabulary, 8 prompts of 128 tokens; the conditions take turns, and times are CPU
times. Two measures: the time spent inside the mask's own hooks as a share of the forward that they are in
(best of the repeats), which the aim is for, and the median ratio of masked to plain forwards. On a busy
machine that ratio swings by more than a mask costs: the first line shows by how much. Aim: below 3%. A
minute or two; REPEATS=3 for fewer.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))

from ga_utils import masking  # noqa: E402
from ga_utils.masking import mask_heads  # noqa: E402
from ga_utils.models import load  # noqa: E402

AIM = 0.03
REPEATS = int(os.environ.get("REPEATS", "5"))


inside = [0.0]  # seconds spent in the mask's hooks during the forward in progress


def timed(function):
    """`function`, adding its CPU time to `inside`."""

    def run(*args, **kwargs):
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            inside[0] += time.process_time() - start

    return run


masking._SiteMask.__call__ = timed(masking._SiteMask.__call__)
masking.Where.before_forward = timed(masking.Where.before_forward)


def main() -> None:
    lm = load("smollm2-135m", device="cpu", check=False)
    ids = torch.randint(10, 40_000, (8, 128), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    heads = lm.head_list()
    few, many = [heads[40], heads[130], heads[220]], heads[::3]
    texts = [lm.tokenizer.decode(row[:64]) for row in ids]
    conditions = {
        "3 heads, all positions": dict(heads=few),
        "3 heads, last position": dict(heads=few, positions="last"),
        "3 heads, lists": dict(heads=few, positions=[[3, -1]] * 8),
        "90 heads, all positions": dict(heads=many),
        "90 heads, last position": dict(heads=many, positions="last"),
        "3 heads, mean fill": dict(heads=few, fill="mean", reference=texts),
    }

    @torch.no_grad()
    def forward() -> tuple[float, float]:
        inside[0] = 0.0
        start = time.process_time()
        lm.backbone(**batch, use_cache=False)  # without the vocabulary, whose cost would hide a mask's
        spent = time.process_time() - start
        return spent, inside[0] / spent

    forward()
    names = ["no mask", "no mask again (noise)", *conditions]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(REPEATS):
        for name in names:
            with mask_heads(lm, **conditions.get(name, dict(heads=[]))):
                times[name].append(forward())
    plain = times.pop("no mask")
    for name, found in times.items():
        share = min(share for _, share in found)
        median = statistics.median(f / p for (f, _), (p, _) in zip(found, plain, strict=True))
        verdict = "reached" if share < AIM else "MISSED"
        print(f"{name:<24} hooks {share:7.2%}   forward x {median:.3f}   aim: hooks < {AIM:.0%}   {verdict}")


if __name__ == "__main__":
    main()
