"""What leaves a training? A folder that `ga_utils.models.load` reads, weights in 16 bit, with a record of
how it was made and what it can do.

Scores are measured on the folder as it was written, so the rounding to 16 bit is part of them.
"""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ga_utils.errors import ModelError
from ga_utils.language_model import LanguageModel
from ga_utils.models import load
from ga_utils.scoring import score
from ga_utils.tasks.base import Task
from ga_utils.tiny import pruning, questions
from ga_utils.tiny.language import tokenizer
from ga_utils.tiny.lessons import batch
from ga_utils.tiny.training import Run

WEIGHTS = Path(__file__).parent / "weights"
RECORD = "training.json"
MOST_BYTES = 2_000_000
TEST_SEED = 1_000_003  # no lesson and no notebook draws from it


def folder(name: str) -> Path:
    """Where the shipped model `name` lies. Raises ModelError, naming those that are shipped."""
    if not (WEIGHTS / name / "config.json").exists():
        raise ModelError(f"No embedded model is called {name!r}: use one of {', '.join(shipped())}.")
    return WEIGHTS / name


def shipped() -> list[str]:
    """Names of the embedded models, sorted."""
    return sorted(p.parent.name for p in WEIGHTS.glob("*/config.json"))


def record(name: str) -> dict:
    """The training record of the shipped model.

    Keys: name (the recipe's), seed, architecture, parameters, recipe, versions, cpu_seconds (of its own stages, not of
    the model that it starts from), pruning_rule and pruning (what was measured whenever heads were looked at, and which
    were pruned), rounding, history (loss curve), scores with errors.
    """
    return read_record(folder(name))


def read_record(folder: Path) -> dict:
    """The training record in a folder that `write` wrote."""
    return json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))


def shipped_name(name: str, seed: int) -> str:
    """What the model of recipe `name` and `seed` is called in the package: seed 0 bears the plain name."""
    return f"{name}-seed{seed}" if seed else name


def test_tasks(n: int = 1000, seed: int = TEST_SEED) -> dict[str, Task]:
    """The tasks that every embedded model is scored on."""
    tasks = {
        "cloze": questions.cloze_task(n, seed),
        "knowledge": questions.knowledge_task(n, seed),
        "letter": questions.letter_task(n, seed),
        "copy-letter": questions.copy_letter_task(n, seed),
        **{f"kv-{k}": questions.kv_task(k, n, seed) for k in (2, 4, 8, 16)},
    }
    for kind in ("letter", "copy-letter"):
        for rule, task in questions.shortcut_tasks(kind, n, seed).items():
            tasks[f"{kind} {rule}"] = task
    return tasks


def final_scores(lm: LanguageModel, n: int = 1000, seed: int = TEST_SEED) -> dict[str, dict]:
    """task -> accuracy among the candidates, by greedy choice over all words ("exact"), standard error,
    chance, n."""
    found = {}
    for name, task in test_tasks(n, seed).items():
        s = score(lm, task)
        found[name] = {
            "accuracy": s.accuracy,
            "stderr": s.stderr,
            "exact": s.full_vocab_accuracy,
            "chance": s.chance,
            "n": s.n,
        }
    return found


def write(model: torch.nn.Module, run: Run, out: Path, name: str, recipe: Mapping, n_test: int = 1000) -> dict:
    """Write the model to the folder `out` and score it there; returns the record, which lies beside the
    weights."""
    model.eval()
    probe = batch({"cloze": 1, "kv": 1, "letters": 2}, 64, f"probe {TEST_SEED}")
    with torch.no_grad():
        before = model(probe.ids).logits[probe.answers]
    dtype = next(model.parameters()).dtype
    model.to(torch.float16).save_pretrained(out)
    model.to(dtype)
    tokenizer().save_pretrained(out)
    size = (out / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        raise ModelError(f"{name} takes {size:,} bytes; an embedded model may take {MOST_BYTES:,}.")
    start = time.perf_counter()
    lm = load(out, dtype="float32", device="cpu")
    with torch.no_grad():
        after = lm.model(probe.ids).logits[probe.answers]
    rounding = {
        "largest_logit_change": float((after - before).abs().max()),
        "logit_deviation": float(before.std()),
        "answers_changed": int((after.argmax(-1) != before.argmax(-1)).sum()),
        "answers": len(before),
    }
    body = {
        "name": name,
        "seed": run.seed,
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": dict(recipe),
        "versions": {p: importlib.metadata.version(p).split("+")[0] for p in ("torch", "transformers")},
        "cpu_seconds": round(run.seconds),
        "pruning_rule": pruning.RULE if run.pruning else "",
        "pruning": run.pruning,
        "rounding": rounding,
        "history": run.history,
        "scores": final_scores(lm, n_test),
    }
    body["scoring_seconds"] = round(time.perf_counter() - start)
    (out / RECORD).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return body
