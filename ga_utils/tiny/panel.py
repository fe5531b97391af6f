"""What are the embedded models, how were they made, and what can they do? The numbers of the page on them.

Nothing here plots. Scores are records; stages, steps and learning curves come from the training record that lies beside
each model's weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from ga_utils.errors import GAError, ModelError
from ga_utils.language_model import LanguageModel
from ga_utils.measure import Condition, score_under
from ga_utils.models import labels, load
from ga_utils.records import Record, Store
from ga_utils.registry import find_spec, resolve_models
from ga_utils.stats import stderr
from ga_utils.tasks.base import Example, Task
from ga_utils.tiny import questions
from ga_utils.tiny.language import world

#: families in the order in which pages show them
FAMILIES = ("tiny-llama", "tiny-llamba-unaligned", "tiny-llamba", "tiny-zamba2", "tiny-falcon-mamba")
RECORD = "training.json"
#: the tasks of the table of scores
TASKS = ("cloze", "knowledge", "letter", "copy-letter", "kv-2", "kv-4", "kv-8", "kv-16")
RULES = ("share-start", "share-end")


@dataclass(frozen=True)
class Member:
    """One embedded model: its family (the recipe's name), its seed, its training record, the bytes of its weights."""

    lm: LanguageModel
    family: str
    seed: int
    record: dict
    size: int


def load_members(names: Sequence[str], device: str = "cpu") -> list[Member]:
    """Load the models in 32 bit, by family and seed.

    names: names of shipped models, panels, or folders that `ga tiny train` has written. Raises `ModelError` for a model
    that has no training record, or if two are of one family and seed.
    """
    found = []
    called = labels(resolve_models(names))
    for name, label in called.items():
        spec = find_spec(name)
        folder = (spec.own_folder() if spec else None) or Path(name).expanduser()
        if not (folder / RECORD).is_file():
            raise ModelError(f"{name} is no embedded model: it has no {RECORD}. This page shows models of `ga tiny`.")
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        family = record["name"].partition("-seed")[0]
        if family not in FAMILIES:
            raise ModelError(
                f"{name} is of the family {family!r}, which this page does not know: {', '.join(FAMILIES)}."
            )
        lm = load(name, dtype="float32", device=device, label=label)
        size = (folder / "model.safetensors").stat().st_size
        found.append(Member(lm, family, int(record["seed"]), record, size))
    if len({(m.family, m.seed) for m in found}) < len(found):
        raise ModelError("Two of the models are of one family and one seed: name each once.")
    return sorted(found, key=lambda m: (FAMILIES.index(m.family), m.seed))


def of_family(members: Sequence[Member], family: str) -> list[Member]:
    """The members of one family, by seed."""
    return [m for m in members if m.family == family]


def missing(members: Sequence[Member]) -> str:
    """Which families the page goes without, as a sentence; empty if there are none."""
    absent = [f for f in FAMILIES if not of_family(members, f)]
    return f"Not among the models of this page, and so not measured: {', '.join(absent)}." if absent else ""


def check(n_examples: int, select_examples: int, seed: int, select_seed: int, n_random: int) -> None:
    """Raise `GAError` in one sentence if the page's parameters make no sense, before any long work."""
    if n_examples < 10 or select_examples < 10:
        raise GAError(
            "n_examples, n_changed and select_examples must be 10 or more, or no standard error means anything."
        )
    if seed == select_seed:
        raise GAError(f"seed and select_seed are both {seed}: heads must be found on other questions.")
    if n_random < 1:
        raise GAError(f"n_random={n_random} must be 1 or more: without random heads there is no control.")


def task(name: str, n: int, seed: int) -> Task:
    """The task that pages call `name`. Raises `GAError` for another name."""
    kind, _, rule = name.partition(" ")
    if rule:
        return questions.shortcut_tasks(kind, n, seed)[rule]
    if name.startswith("kv-"):
        return questions.kv_task(int(name[3:]), n, seed)
    makers = {
        "cloze": questions.knowledge_task,  # the same prompts; the exact cloze does not look at the candidates
        "knowledge": questions.knowledge_task,
        "letter": questions.letter_task,
        "copy-letter": questions.copy_letter_task,
    }
    if name not in makers:
        raise GAError(f"There is no task {name!r}: use one of {', '.join(TASKS)}.")
    return makers[name](n, seed)


@dataclass(frozen=True)
class Grid:
    """How the names of one category are built: (start, end) -> entity; between them always the same `middle`."""

    starts: tuple[str, ...]
    middle: tuple[str, ...]
    ends: tuple[str, ...]
    cells: dict[tuple[str, str], str]


def name_grid(entity: str) -> Grid:
    """The grid of the category that `entity` belongs to."""
    w = world()
    names = {e: w.names[e] for e in (entity, *w.siblings(entity))}
    starts, ends = (tuple(sorted({n[i] for n in names.values()})) for i in (0, -1))
    return Grid(starts, names[entity][1:-1], ends, {(n[0], n[-1]): e for e, n in names.items()})


def examples(seed: int) -> dict[str, Example]:
    """One question of each kind, to be read."""
    asked = {n: task(n, 1, seed).examples[0] for n in ("knowledge", "letter", "copy-letter", "kv-4")}
    return {"cloze": asked["knowledge"], **asked}


def as_text(name: str, example: Example) -> str:
    """A question as the page shows it: the prompt with its newlines, ``▁`` where the answer goes, and the answer."""
    right = example.candidates[example.answer].strip()
    if name == "cloze":
        return f"{example.prompt} ▁\n\n→ {right}"
    choice = [c.strip() for c in example.candidates]
    return f"{example.prompt} ▁\n\n→ {right}\nof: {' | '.join(choice)}"


def models_table(members: Sequence[Member]) -> pd.DataFrame:
    """One row a model: what it is."""
    rows = []
    for m in members:
        kinds = {s.kind: 0 for s in m.lm.sites}
        for s in m.lm.sites:
            kinds[s.kind] += s.n_heads
        rows.append(
            {
                "model": m.lm.name,
                "class": type(m.lm.model).__name__,
                "layers": m.lm.n_layers,
                "heads": ", ".join(f"{n} {k}" for k, n in kinds.items()),
                "parameters": f"{m.record['parameters']:,}",
                "bytes (16 bit)": f"{m.size:,}",
            }
        )
    return pd.DataFrame(rows)


def made_table(members: Sequence[Member]) -> pd.DataFrame:
    """One row a model: from what, in which stages with how many steps, which heads were pruned, in what time."""
    rows = []
    for m in members:
        lines = [f"{name} ({n:,})" for name, n in stage_steps(m).items()]
        off = pruned(m)
        for i in range(0, len(off), 4):  # a long line would push the table off the page
            lines.append(("pruned: " if i == 0 else "") + ", ".join(off[i : i + 4]))
        lines.append(f"in {m.record['cpu_seconds']:,} CPU seconds")
        start = m.record["recipe"].get("start") or "random weights"
        rows.append({"model": m.lm.name, "made from": start, "stages (steps)": "<br>".join(lines)})
    return pd.DataFrame(rows)


def stage_steps(member: Member) -> dict[str, int]:
    """Steps that each stage took, in order, by the training record."""
    steps: dict[str, int] = {}
    for row in member.record["history"]:
        steps[row["stage"]] = max(steps.get(row["stage"], 0), row["step"])
    return steps


def pruned(member: Member) -> list[str]:
    """Heads that were switched off for good in training, by the training record."""
    return [head for look in member.record.get("pruning", []) for head in look.get("pruned", [])]


def notes(members: Sequence[Member]) -> list[str]:
    """What the training records say beside the numbers."""
    return [f"`{m.lm.name}`: {m.record['note']}" for m in members if m.record.get("note")]


def scores(
    store: Store, members: Sequence[Member], n: int, seed: int, progress: bool = True
) -> tuple[pd.DataFrame, dict[str, list[Record]]]:
    """Scores on fresh questions: one row for each model and task, and the records by model.

    Columns model, family, seed, task, accuracy, stderr, chance. The row "cloze" is the exact cloze: greedy choice over
    the whole vocabulary, so its chance is 0. Shortcut checks are called "letter share-start" and so on.
    """
    names = [*TASKS, *(f"{kind} {rule}" for kind in ("letter", "copy-letter") for rule in RULES)]
    rows, records = [], {m.lm.name: [] for m in members}
    for m, name in tqdm([(m, t) for m in members for t in names], desc="scores", disable=not progress):
        record = score_under(store, m.lm, task(name, n, seed), Condition("intact"))
        records[m.lm.name].append(record)
        exact = name == "cloze"
        correct = record.arrays["full_vocab_correct" if exact else "correct"]
        rows.append(
            {
                "model": m.lm.name, "family": m.family, "seed": m.seed, "task": name,
                "accuracy": float(correct.mean()), "stderr": stderr(correct),
                "chance": 0.0 if exact else record.values["chance"],
            }
        )  # fmt: skip
    return pd.DataFrame(rows), records


def scores_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Percent ± standard error: one row a task, one column a family, one line a seed."""
    rows = []
    for name in TASKS:
        here = frame[frame.task == name]
        row = {"task": name, "guessing": f"{100 * here.chance.iloc[0]:.3g}"}
        for family in (f for f in FAMILIES if f in set(here.family)):
            row[family] = _lines(here[here.family == family])
        rows.append(row)
    return pd.DataFrame(rows)


def shortcut_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The shortcut checks in percent, and whether both are passed; one row for each model and kind of question."""
    rows = []
    for model, here in frame[frame.task.str.contains(" ")].groupby("model", sort=False):
        for kind in ("letter", "copy-letter"):
            row = {"model": model, "question": kind}
            for rule in RULES:
                one = here[here.task == f"{kind} {rule}"]
                row[f"another option {rule.replace('share-', 'shares the ')}"] = _lines(one)
            row["reads both ends"] = reads_both_ends(frame, model, kind)
            rows.append(row)
    return pd.DataFrame(rows)


def reads_both_ends(frame: pd.DataFrame, model: str, kind: str) -> bool:
    """Whether the model is above what one symbol alone can give, by three standard errors, on both checks."""
    here = frame[(frame.model == model) & frame.task.isin([f"{kind} {rule}" for rule in RULES])]
    return bool((here.accuracy - 3 * here.stderr > questions.SHORTCUT_CEILING).all())


def curves(members: Sequence[Member]) -> pd.DataFrame:
    """Learning curves: columns model, family, seed, stage, step (counted over all stages), kind, accuracy.

    Accuracies are those of the training record: shares of answer words that greedy choice over the whole vocabulary
    gets right on fresh lessons.
    """
    rows = []
    for m in members:
        before, stage, last = 0, None, 0
        for row in m.record["history"]:
            if row["stage"] != stage:
                before, stage = before + last, row["stage"]
            last = row["step"]
            for kind, accuracy in row.items():
                if kind not in ("stage", "step", "loss"):
                    rows.append(
                        {
                            "model": m.lm.name, "family": m.family, "seed": m.seed, "stage": stage,
                            "step": before + last, "kind": kind, "accuracy": accuracy,
                        }
                    )  # fmt: skip
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Jump:
    """The steepest rise of one learning curve: from `low` to `high` within `steps` steps before step `at`.

    share: of the curve's whole rise, from 0 to its best.
    """

    low: float
    high: float
    steps: int
    at: int
    share: float


def jump(frame: pd.DataFrame, model: str, kind: str) -> Jump | None:
    """The steepest rise between two checks in the stage where `kind` was first checked; None if it never was twice."""
    here = frame[(frame.model == model) & (frame.kind == kind)]
    here = here[here.stage == here.stage.iloc[0]] if len(here) else here
    if len(here) < 2:
        return None
    step, accuracy = here.step.to_numpy(), here.accuracy.to_numpy()
    i = int(np.diff(accuracy).argmax())
    rise = accuracy[i + 1] - accuracy[i]
    best = max(float(accuracy.max()), 1e-9)
    return Jump(float(accuracy[i]), float(accuracy[i + 1]), int(step[i + 1] - step[i]), int(step[i + 1]), rise / best)


def provenance(records: dict[str, list[Record]], members: Sequence[Member]) -> pd.DataFrame:
    """What each model's numbers rest on: one row a model."""
    rows = []
    for m in members:
        mine = list({r.hash: r for r in records.get(m.lm.name, [])}.values())
        if mine:
            seconds = sum(r.meta.get("seconds", 0) for r in mine)
            rows.append(
                {
                    "model": m.lm.name, "weights from": m.lm.source, "weights' fingerprint": m.lm.fingerprint,
                    "records": f"{len(mine)}: {mine[0].path.parent.name}/{mine[0].hash[:10]} …",
                    "measured in": f"{seconds:.0f} s",
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def runs_on(members: Sequence[Member]) -> str:
    """Dtype, device and versions of the models on this page, in one line."""
    info = members[0].lm.describe()
    return f"All in {info['dtype']} on {info['device']}, torch {info['torch']}, transformers {info['transformers']}."


def _lines(rows: pd.DataFrame) -> str:
    return "<br>".join(f"{100 * r.accuracy:.1f}\u00a0±\u00a0{100 * r.stderr:.1f}" for r in rows.itertuples())
