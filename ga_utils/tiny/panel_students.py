"""What do layers, depths and rows of the embedded models tell?

swaps        each layer of the unaligned student replaced by its teacher's, whole or the mixer alone, beside how well
             that layer's mixer was fitted (paper, Figure 7)
attention    the hybrid's attention off at some positions or at one depth (the authors' rebuttal on Zamba2)
sharpness    how the teacher's Aggregate rows and those of the student's same heads spread their weight
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from ga_utils.codehash import code_hash
from ga_utils.heads import Head
from ga_utils.masking import mask_heads
from ga_utils.measure import Condition, score_under
from ga_utils.records import Record, Store
from ga_utils.scoring import score
from ga_utils.stats import paired_gain, stderr
from ga_utils.surgery import graft_layers
from ga_utils.tasks.base import Task
from ga_utils.tasks.tokens import encode
from ga_utils.tiny import distil
from ga_utils.tiny.lessons import batch
from ga_utils.tiny.panel import Member, task
from ga_utils.tiny.panel_heads import patterns

SWAP_TASKS = ("letter", "kv-8")
#: lessons on which mixers are compared: their mixture, and how many
LESSONS, N_LESSONS = {"cloze": 0.08, "kv": 0.12, "letters": 0.6, "long-keys": 0.2}, 64
#: where the hybrid's attention is off: what it is called -> (positions, depth or None for all)
PLACES = {
    "last position": "last",
    "every answer position": "answer",
    "everywhere else": "before",
    "everywhere": "all",
}
ATTENTION_TASKS = ("letter", "copy-letter", "kv-8", "knowledge")
ROW_TASKS = ("letter", "kv-8")


def mixer_errors(store: Store, student: Member, teacher: Member, seed: int) -> Record:
    """How far each student mixer is from its teacher's on the teacher's own inputs: values error, one a layer.

    Squared error as a share of the variance of the teacher's output, over `N_LESSONS` lessons.
    """
    key = {
        "kind": "mixer_errors", "model": student.lm.describe(), "teacher": teacher.lm.describe(),
        "task": {"task": "lessons", "mixture": LESSONS, "n": N_LESSONS, "settings": {"seed": seed}},
        "code": code_hash("tiny.distil", "tiny.lessons"),
    }  # fmt: skip

    def run():
        lesson = batch(LESSONS, N_LESSONS, f"mixer errors {seed}")
        with torch.no_grad():
            errors = distil.layer_errors(student.lm.model, distil._Watch(teacher.lm.model), lesson, "mixers")
        return {"error": [float(e) for e in errors]}

    return store.compute(key, run, {"model": student.lm.name, "source": student.lm.source, "revision": None})


def swaps(
    store: Store, student: Member, teacher: Member, n: int, seed: int, progress: bool = True
) -> tuple[pd.DataFrame, list[Record]]:
    """The student's scores with each of its layers swapped, one at a time.

    Columns seed, layer (-1: none), part ("student", "teacher", "block" or "mixer"), task, accuracy, stderr, chance,
    error (of the layer's mixer), correct (the array).
    """
    fitted = mixer_errors(store, student, teacher, seed)
    rows, records = [], [fitted]

    def add(layer: int, part: str, name: str, record: Record) -> None:
        records.append(record)
        correct = record.arrays["correct"]
        rows.append(
            {
                "seed": student.seed, "layer": layer, "part": part, "task": name, "accuracy": float(correct.mean()),
                "stderr": stderr(correct), "chance": record.values["chance"],
                "error": fitted.values["error"][layer] if layer >= 0 else np.nan, "correct": correct,
            }
        )  # fmt: skip

    for name in (*SWAP_TASKS, "knowledge"):
        for part, member in (("student", student), ("teacher", teacher)):
            add(-1, part, name, score_under(store, member.lm, task(name, n, seed), Condition("intact")))
    work = [(layer, part) for layer in range(student.lm.n_layers) for part in ("block", "mixer")]
    for layer, part in tqdm(work, desc=f"{student.lm.name}: swaps", disable=not progress):
        names = (*SWAP_TASKS, "knowledge") if part == "block" else SWAP_TASKS
        with graft_layers(student.lm, teacher.lm, layer, mixer_only=part == "mixer") as changed:
            for name in names:
                add(layer, part, name, score_under(store, changed, task(name, n, seed), Condition("intact")))
    return pd.DataFrame(rows), records


def swaps_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a layer of one student: the mixer's error and the scores with the layer swapped, in percent."""

    def cell(layer: int, part: str, name: str) -> str:
        one = frame[(frame.layer == layer) & (frame.part == part) & (frame.task == name)]
        return "".join(f"{100 * r.accuracy:.0f}\u00a0±\u00a0{100 * r.stderr:.0f}" for r in one.itertuples())

    rows = []
    for layer in sorted(set(frame.layer)):
        for part, label in (("student", "none"), ("teacher", "all: the teacher")) if layer < 0 else (("block", layer),):
            row = {"swapped": f"layer {label}" if layer >= 0 else label}
            error = frame[frame.layer == layer].error.iloc[0]
            row["mixer's error"] = "" if layer < 0 else f"{error:.3f}"
            for name in SWAP_TASKS:
                row[f"{name}, block"] = cell(layer, part, name)
                row[f"{name}, mixer"] = cell(layer, "mixer", name) if layer >= 0 else ""
            row["knowledge, block"] = cell(layer, part, "knowledge")
            rows.append(row)
    return pd.DataFrame(rows)


def masked_before(store: Store, member: Member, asked: Task, heads: Sequence[Head]) -> Record:
    """Scores with heads masked at every token of the prompt but its last, as a record like `score_under`'s."""
    lm = member.lm
    key = {
        "kind": "score", "model": lm.describe(), "task": asked.key(),
        "condition": {"heads": sorted(map(str, heads)), "positions": "before", "fill": "zero"},
        "code": code_hash("scoring", "masking"),
    }  # fmt: skip

    def run():
        ends = [len(item.context) - 1 for item in encode(lm.tokenizer, asked).items]
        with mask_heads(lm, heads, [list(range(end)) for end in ends]):
            result = score(lm, asked)
        return result.to_values(), result.arrays()

    return store.compute(key, run, {"model": lm.name, "source": lm.source, "revision": lm.revision})


def attention_off(
    store: Store, member: Member, n: int, seed: int, progress: bool = True
) -> tuple[pd.DataFrame, list[Record]]:
    """A hybrid's scores with all its attention heads off at some positions, and at one depth.

    Columns seed, place ("nowhere", the keys of `PLACES`, or "every answer position, depth 1"), task, accuracy, stderr,
    chance, learned (whether the intact score is above chance by three standard errors), correct (the array).
    """
    lm, rows, records = member.lm, [], []
    every = lm.head_list("attention")
    depths = sorted({h.layer for h in every})
    places = [("nowhere", "all", ())] + [(name, where, every) for name, where in PLACES.items()]
    for depth in depths:
        here = [h for h in every if h.layer == depth]
        places.append((f"every answer position, depth {depth}", "answer", here))
    learned = {}
    work = [(name, place) for name in ATTENTION_TASKS for place in places]
    for name, (place, where, heads) in tqdm(work, desc=f"{lm.name}: attention off", disable=not progress):
        asked = task(name, n, seed)
        if heads and where == "before":
            record = masked_before(store, member, asked, heads)
        else:
            record = score_under(store, lm, asked, Condition(place, tuple(heads), where))
        records.append(record)
        correct, chance = record.arrays["correct"], record.values["chance"]
        if place == "nowhere":
            learned[name] = bool(correct.mean() - 3 * stderr(correct) > chance)
        rows.append(
            {
                "seed": member.seed, "place": place, "task": name, "accuracy": float(correct.mean()),
                "stderr": stderr(correct), "chance": chance, "learned": learned[name], "correct": correct,
            }
        )  # fmt: skip
    return pd.DataFrame(rows), records


def attention_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a place, in percent ± standard error, one line a seed; a dash where the task was not learned."""
    rows = []
    for place in dict.fromkeys(frame.place):
        row = {"attention off": place}
        for name in ATTENTION_TASKS:
            here = frame[(frame.place == place) & (frame.task == name)].sort_values("seed")
            row[name] = "<br>".join(
                f"{100 * r.accuracy:.0f}\u00a0±\u00a0{100 * r.stderr:.0f}" if r.learned else "–"
                for r in here.itertuples()
            )
        rows.append(row)
    return pd.DataFrame(rows)


def sharpness(
    store: Store, teacher: Member, student: Member, heads: Sequence[Head], n: int, seed: int
) -> tuple[pd.DataFrame, list[Record]]:
    """Entropy and top-1 mass of Aggregate rows, the teacher's heads beside the student's of the same layer and number.

    Columns seed, head, task, model, entropy, entropy se, top1, top1 se, right (share of questions in which the row
    prefers the right line), more, low, high: the student's entropy less the teacher's, with its paired 95% interval.
    """
    rows, records = [], []
    for name in ROW_TASKS:
        found = {m.family: patterns(store, m.lm, task(name, n, seed)) for m in (teacher, student)}
        records += found.values()
        for head in heads:
            at = {m.family: m.lm.head_list().index(head) for m in (teacher, student)}
            gap = paired_gain(*(found[m.family].arrays["entropy"][at[m.family]] for m in (teacher, student)))
            for m in (teacher, student):
                here = {k: v[at[m.family]].astype(float) for k, v in found[m.family].arrays.items()}
                rows.append(
                    {
                        "seed": m.seed, "head": str(head), "task": name, "model": m.lm.name, "family": m.family,
                        "entropy": here["entropy"].mean(), "entropy se": stderr(here["entropy"]),
                        "top1": here["top1"].mean(), "top1 se": stderr(here["top1"]), "right": here["right"].mean(),
                        "more": gap.value, "low": gap.low, "high": gap.high,
                    }
                )  # fmt: skip
    return pd.DataFrame(rows), records


def sharpness_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`sharpness` as the page shows it."""
    return pd.DataFrame(
        {
            "model": frame.model,
            "head": frame["head"],
            "task": frame.task,
            "entropy (nats)": [
                f"{a:.2f}\u00a0±\u00a0{b:.2f}" for a, b in zip(frame.entropy, frame["entropy se"], strict=True)
            ],
            "top-1 mass": [f"{a:.2f}\u00a0±\u00a0{b:.2f}" for a, b in zip(frame.top1, frame["top1 se"], strict=True)],
            "prefers the right line": [f"{100 * r:.0f}%" for r in frame.right],
        }
    )
