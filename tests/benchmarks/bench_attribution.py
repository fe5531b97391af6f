"""How well does an estimate rank heads, and what does it save? Attribution against the exact sweep.

    python tests/benchmarks/bench_attribution.py --examples 8 --small 32

On SmolLM2-135M (key-value retrieval with 10 pairs, positions "answer") and on the embedded models (key-value retrieval
and letters, positions "answer" and "all"): for plain first order, with the correction for the answer's softmax, and
with the gradient taken halfway mixer by mixer, the recall of the exact top heads, Spearman's rank correlation with the
exact effects, the passes made and the seconds, each beside the sweep's.
"""

from __future__ import annotations

import argparse
import time

import torch

from ga_utils.attribution import attribute, ranking_quality
from ga_utils.language_model import LanguageModel
from ga_utils.models import load
from ga_utils.sweep import sweep_heads
from ga_utils.tasks import Task, kv_task
from ga_utils.tiny import questions, shipping

WAYS = {
    "first order": {"corrections": False},
    "corrections": {},
    "layerwise": {"layerwise": True},
}


def compare(lm: LanguageModel, task: Task, positions: str, top: int, ways: list[str]) -> None:
    """Print one line for the sweep and one for each way to estimate."""
    start = time.perf_counter()
    exact = sweep_heads(lm, task, positions=positions, scored="answer")
    seconds = time.perf_counter() - start
    print(
        f"{lm.name}, {task.name} ({task.prompt_format}), {len(task)} questions, positions {positions}, "
        f"{len(exact.heads)} heads, intact {exact.intact_logprob.mean():.2f} nats\n"
        f"  {'sweep':12s} {exact.calls:5d} forwards ({exact.way}), {seconds:7.1f} s",
        flush=True,
    )
    for way in ways:
        start = time.perf_counter()
        found = attribute(lm, task, positions=positions, **WAYS[way])
        seconds = time.perf_counter() - start
        quality = ranking_quality(found, exact, top)
        print(
            f"  {way:12s} {found.forwards:5d} forwards, {found.backwards:4d} backwards, {seconds:7.1f} s, "
            f"recall@{top} {quality['recall']:.2f}, Spearman {quality['spearman']:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=8, help="questions for the real model; 0 leaves it out")
    parser.add_argument("--small", type=int, default=32, help="questions for each embedded model; 0 leaves them out")
    parser.add_argument("--formats", nargs="+", default=["paper", "json"], help="formats of the real model's questions")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in ("tiny-llama", "tiny-llamba") if args.small else ():
        lm = load(shipping.folder(name), dtype="float32", device="cpu")
        for task in (questions.kv_task(8, args.small, 11), questions.letter_task(args.small, 11)):
            for positions in ("answer", "all"):
                compare(lm, task, positions, 8, args.ways)
    if args.examples:
        lm = load(args.model)
        for style in args.formats:
            task = kv_task(10, args.examples, seed=0, format=style, tokenizer=lm.tokenizer)
            compare(lm, task, "answer", 20, args.ways)


if __name__ == "__main__":
    main()
