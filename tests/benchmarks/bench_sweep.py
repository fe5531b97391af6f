"""How much work does a sweep over heads save against a loop of one full forward for each head?

    python tests/benchmarks/bench_sweep.py --model smollm2-135m --pairs 10

Both mask the same heads alone on the same key-value questions in the same run, and score the answer. The loop is run on
a sample of heads, spread evenly over the layers, and its seconds are scaled to all of them; the effects of that sample
are compared. Prints seconds of CPU time (which other programs on the machine change less than time on the wall),
token-layers (tokens times layers computed), their ratios and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from ga_utils.models import load
from ga_utils.sweep import sweep_heads
from ga_utils.tasks import kv_task


def compare(lm, task, positions: str, every: int, sample: int, fill: str) -> dict:
    """One sweep over every `every`-th head and one plain loop over `sample` of those."""
    heads = lm.head_list()[::every]
    sample = min(sample, len(heads))
    few = [heads[i] for i in np.linspace(0, len(heads) - 1, sample).round().astype(int)]
    extra = {"fill": fill, "reference": None if fill == "zero" else [e.prompt for e in task.examples]}
    # the comparison of the two ways, which a model pays once, is on these three heads
    check = sweep_heads(lm, task, [heads[0], heads[len(heads) // 2], heads[-1]], positions, "answer", **extra)
    times = [time.process_time()]
    fast = sweep_heads(lm, task, heads, positions, "answer", **extra)
    times.append(time.process_time())
    slow = sweep_heads(lm, task, few, positions, "answer", shared=False, **extra)
    times.append(time.process_time())
    ours, loop = times[1] - times[0], (times[2] - times[1]) / (sample + 1) * (len(heads) + 1)
    rows = [fast.heads.index(h) for h in few]
    return {
        "positions": positions,
        "way": fast.way,
        "heads": len(heads),
        "loop timed on": sample,
        "seconds": [round(loop, 2), round(ours, 2)],
        "speedup": round(loop / ours, 1),
        "token-layers": [fast.plain_token_layers, fast.token_layers],
        "saving": round(fast.plain_token_layers / fast.token_layers, 1),
        "forwards": round(fast.token_layers / (fast.plain_token_layers / (len(heads) + 1)), 2),
        "check": check.check_token_layers,
        "max_difference": float(np.abs(fast.logprob[rows] - slow.logprob).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--examples", type=int, default=1)
    parser.add_argument("--values", default="auto", help="auto, 0-99, 10-99 or 0-9")
    parser.add_argument("--positions", nargs="+", default=["answer", "all"], choices=["answer", "last", "all"])
    parser.add_argument("--fill", default="zero", choices=["zero", "mean"])
    parser.add_argument("--every", type=int, default=1, help="sweep only every so many heads")
    parser.add_argument("--sample", type=int, default=30, help="heads that the plain loop is timed on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the numbers to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lm = load(args.model)
    task = kv_task(args.pairs, args.examples, seed=0, values=args.values, tokenizer=lm.tokenizer)
    rows = []
    for positions in args.positions:
        row = compare(lm, task, positions, args.every, args.sample, args.fill)
        rows.append(row)
        (loop, ours), (loop_work, our_work) = row["seconds"], row["token-layers"]
        print(
            f"{positions}: {row['heads']} heads, {args.pairs} pairs, way '{row['way']}': CPU seconds {loop} (scaled "
            f"from {row['loop timed on']} heads) -> {ours} ({row['speedup']}x); token-layers {loop_work} -> {our_work} "
            f"({row['saving']}x, {row['forwards']} intact forwards); largest |difference| "
            f"{row['max_difference']:.1e} nat",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"model": lm.name, "threads": args.threads, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
