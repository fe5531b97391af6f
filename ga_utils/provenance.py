"""Where does a page's every number come from? Tables and sentences made from the records themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pandas as pd

from .language_model import LanguageModel
from .records import Record


def model_line(lm: LanguageModel) -> str:
    """One line that says which model this is and how it runs: shown by every notebook when a model is loaded."""
    info = lm.describe()
    kernels = ", ".join(info["kernels"]) or "pure torch"
    limit = f"context {lm.max_length}" if lm.max_length else "no context limit"
    heads = sum(s.n_heads for s in lm.sites)
    return (
        f"{lm.title}: {info['architecture']}, {lm.n_layers} layers, {heads} heads, {limit}; {info['dtype']} on "
        f"{info['device']} ({info['attention'] or 'no attention'}, {kernels})"
    )


def command(notebook: str) -> str:
    """The command that made this page, as `ga run` was given it; a plain one where the notebook was run by hand."""
    return os.environ.get("GA_COMMAND") or f"ga run {notebook}"


def table(records: Sequence[Record], name: str, source: str, revision: str | None, command: str) -> pd.DataFrame:
    """What a model's records rest on, and the command that makes them again: one row for each fact.

    name, source, revision: the model as it was loaded today; the records are those of its weights, whoever measured
    them.

    Times are those of the measurement, whenever it was; a record that was found in the store took no time today.
    """
    records = list({r.hash: r for r in records}.values())
    facts = {"model": name, "weights from": source, "revision": revision}
    facts |= {fact: ", ".join(values) for fact, values in _facts(records).items()}
    facts = {fact: text for fact, text in facts.items() if text}
    facts["made again by"] = command
    names = [f"{r.path.parent.name}/{r.hash[:10]}" for r in records[:3]]
    facts["records"] = f"{len(records)}: {', '.join(names)}" + (" …" if len(records) > 3 else "")
    return pd.DataFrame({"what": list(facts), "": list(facts.values())})


def _facts(records: Sequence[Record]) -> dict[str, list[str]]:
    def each(get) -> list[str]:
        return sorted({str(v) for r in records if (v := get(r)) not in (None, "", [])})

    seconds = sum(r.meta.get("seconds", 0) for r in records)
    began = each(lambda r: r.meta.get("began", "")[:10])
    facts = {
        "weights' fingerprint": each(lambda r: r.key["model"]["weights"]),
        "dtype, device": each(lambda r: f"{r.key['model']['dtype']} on {r.key['model']['device']}"),
        "attention": each(lambda r: r.key["model"]["attention"]),
        "kernels": each(lambda r: ", ".join(r.key["model"]["kernels"])) or ["none: pure torch"],
        "versions": each(lambda r: f"torch {r.key['model']['torch']}, transformers {r.key['model']['transformers']}"),
        "questions": each(lambda r: f"{r.key['task']['n']} a condition" if r.key["kind"] == "score" else None),
        "seed": each(lambda r: r.key["task"]["settings"].get("seed")),
        "measured": began if len(began) < 3 else [began[0], "to", began[-1]],
        "time taken": [
            f"{seconds / 60:.1f} minutes, threads: {threads}" for threads in each(lambda r: r.meta.get("threads"))
        ][:1],
    }
    return {label: values for label, values in facts.items() if values}
