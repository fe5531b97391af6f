"""How do lm-eval's own tasks run under masks? For tasks that generate text, such as GSM8K and BBH.

Masks lie over all positions here: the harness pads prompts on the left and generates token by token, so that "the last
position" would mean another one at each step. Its response cache is off, since it does not know of masks. Settings are
lm-eval's defaults for each task: shots, metric, stop words.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pandas as pd

from ga_utils.codehash import code_hash
from ga_utils.errors import TaskError
from ga_utils.language_model import LanguageModel
from ga_utils.masking import mask_heads
from ga_utils.measure import Condition
from ga_utils.records import Record, Store


def check(names: Sequence[str]) -> None:
    """Raise `TaskError` if lm-eval, or one of the tasks `names`, is not there; reading its list takes seconds."""
    if not names:
        return
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskError("harness_tasks run through lm-eval, which is not installed: pip install lm-eval.")
    from lm_eval.tasks import TaskManager

    known = set(TaskManager().all_tasks)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise TaskError(f"lm-eval has no task {unknown[0]!r}: `lm-eval ls tasks` lists what it has.")


def under_masks(
    store: Store,
    lm: LanguageModel,
    tasks: Sequence[str | dict[str, Any]],
    conditions: Sequence[Condition],
    limit: int | None = None,
    records: list[Record] | None = None,
) -> pd.DataFrame:
    """One row for each task, metric and condition: the score and its standard error, as lm-eval gives them.

    tasks: names, or lm-eval's task configurations as dicts. limit: so many examples a task (of each subtask), None for
    all. Each condition is a record. Raises `TaskError` for a condition that is not over all positions.
    """
    rows = []
    for condition in conditions:
        if condition.heads and condition.positions != "all":
            raise TaskError(f"lm-eval runs under masks over all positions alone, not {condition.positions!r}.")
        for task in tasks:
            name = task if isinstance(task, str) else task["task"]
            key = {
                "kind": "harness",
                "model": lm.describe(),
                "task": name,
                "limit": limit,
                "condition": condition.key(),
                "lm_eval": _version(),
                "code": code_hash("masking"),
            }
            meta = {"model": lm.name, "source": lm.source, "revision": lm.revision}
            record = store.compute(key, lambda t=task, c=condition: _run(lm, t, c, limit), meta)
            if records is not None:
                records.append(record)
            for metric, (value, error) in record.values["scores"].items():
                rows.append(
                    {"task": name, "metric": metric, "condition": condition.label, "score": value, "s.e.": error}
                )
    return pd.DataFrame(rows)


def _run(lm: LanguageModel, task: str | dict[str, Any], condition: Condition, limit: int | None) -> dict[str, Any]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, device=str(lm.device), batch_size=8)
    with mask_heads(lm, condition.heads, "all", condition.fill):
        out = lm_eval.simple_evaluate(
            wrapped,
            tasks=[task],
            limit=limit,
            bootstrap_iters=0,
            cache_requests=False,
            task_manager=TaskManager(include_defaults=isinstance(task, str)),
        )
    scores: dict[str, tuple[float, float | None]] = {}
    for metrics in out["results"].values():
        for metric, value in metrics.items():
            name, _, filtered = metric.partition(",")
            if isinstance(value, (int, float)) and not name.endswith("_stderr") and name != "sample_len":
                error = metrics.get(f"{name}_stderr,{filtered}")
                scores[metric] = (float(value), float(error) if isinstance(error, (int, float)) else None)
    return {"scores": {k: list(v) for k, v in sorted(scores.items())}}


def _version() -> str:
    from importlib.metadata import version

    return version("lm_eval")
