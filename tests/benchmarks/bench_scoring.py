"""How much work does scoring save? One forward a question against one forward a candidate.

    python tests/benchmarks/bench_scoring.py --pairs 10 30 50 --examples 4 2 1

Both methods score the same key-value questions on the same model in the same run: the paper's way feeds
prompt + candidate once for each candidate (a batch of questions at a time, padded right, logits of the whole
vocabulary at every position), `ga_utils.scoring.score` feeds each prompt once and steps through the
candidates' tokens. Prints forward calls, token positions fed, seconds, their ratio, and the largest
difference between the log-probabilities of the two.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
import torch

from ga_utils.language_model import LanguageModel
from ga_utils.models import load
from ga_utils.scoring import score
from ga_utils.tasks import Task, kv_task


@dataclass
class Run:
    """One method's cost and result; logprobs [n, candidates]."""

    calls: int
    tokens: int
    seconds: float
    logprobs: np.ndarray


@torch.no_grad()
def one_forward_a_candidate(lm: LanguageModel, task: Task, batch: int = 256) -> Run:
    """The paper's protocol, for tokenizers without BOS: log-probability of the tokens after the prompt's."""
    start = time.perf_counter()
    calls = tokens = 0
    scores = np.zeros((len(task), len(task.examples[0].candidates)))
    for first in range(0, len(task), batch):
        examples = task.examples[first : first + batch]
        ends = [len(lm.tokenizer(e.prompt)["input_ids"]) for e in examples]
        for c in range(scores.shape[1]):
            inputs = lm.encode([e.prompt + e.candidates[c] for e in examples])
            logp = torch.log_softmax(lm.model(**inputs, use_cache=False).logits.float(), dim=-1)
            calls, tokens = calls + 1, tokens + inputs["input_ids"].numel()
            for r, end in enumerate(ends):
                stop = int(inputs["attention_mask"][r].sum())
                said = inputs["input_ids"][r, end:stop]
                picked = logp[r, end - 1 : stop - 1].gather(1, said[:, None])
                scores[first + r, c] = picked.double().sum().item()
    return Run(calls, tokens, time.perf_counter() - start, scores)


def ours(lm: LanguageModel, task: Task) -> Run:
    """`score` on the same task."""
    start = time.perf_counter()
    result = score(lm, task)
    return Run(result.calls, result.tokens, time.perf_counter() - start, result.logprobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, nargs="+", default=[10, 30, 50])
    parser.add_argument("--examples", type=int, nargs="+", default=[4, 2, 1], help="questions for each --pairs")
    parser.add_argument("--values", default="auto", help="auto, 0-99, 10-99 or 0-9")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="also write the numbers to this file")
    args = parser.parse_args()
    if len(args.examples) != len(args.pairs):
        parser.error("--examples needs one number for each of --pairs")
    torch.set_num_threads(args.threads)
    lm = load(args.model)
    if lm.tokenizer("a")["input_ids"] != lm.tokenizer("a", add_special_tokens=False)["input_ids"]:
        parser.error(f"{lm.name} adds special tokens, with which the paper's scored span starts one token early")
    warm = kv_task(2, 1, seed=1, tokenizer=lm.tokenizer)
    one_forward_a_candidate(lm, warm), ours(lm, warm)  # the second also proves the cache, once a model
    rows = []
    for n_pairs, n in zip(args.pairs, args.examples, strict=True):
        task = kv_task(n_pairs, n, seed=0, values=args.values, tokenizer=lm.tokenizer)
        new, old = ours(lm, task), one_forward_a_candidate(lm, task)
        row = {
            "pairs": n_pairs,
            "questions": n,
            "values": task.settings["values"],
            "calls": [old.calls, new.calls],
            "tokens": [old.tokens, new.tokens],
            "seconds": [round(old.seconds, 3), round(new.seconds, 3)],
            "speedup": round(old.seconds / new.seconds, 1),
            "max_difference": float(np.abs(old.logprobs - new.logprobs).max()),
        }
        rows.append(row)
        print(
            f"{n_pairs:3d} pairs, {n} questions, values {row['values']}: calls {old.calls} -> {new.calls}, "
            f"tokens {old.tokens} -> {new.tokens}, seconds {old.seconds:.2f} -> {new.seconds:.2f} "
            f"({row['speedup']}x), largest |difference| {row['max_difference']:.1e} nat",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"model": lm.name, "threads": args.threads, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
