"""What became of each claim of the paper? Verdicts as records, and the page that lists them: none is written by hand.

A page hands its verdicts to `keep`; the scoreboard collects those that today's code made. A claim for which there is
none is *not run*.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from . import benchmarks_page, claims_heads, claims_layers, claims_transfer
from .claims import KV_CLAIM, Verdict
from .codehash import folder_hash
from .errors import GAError
from .records import Record, Store
from .report import reported

PACKAGE = Path(__file__).resolve().parent
NOT_RUN = "not run"


@dataclass(frozen=True)
class Claim:
    """One claim: its sentence, where the paper makes it, and the item of ``reported.csv`` with its numbers, if any."""

    id: str
    says: str
    where: str
    item: str = ""


CLAIMS = (
    Claim("C1", claims_layers.C1, "Figure 2", "fig2"),
    Claim("C2", claims_layers.C2, "Figure 2", "fig2"),
    Claim("C3", claims_layers.C3, "Figure 3"),
    Claim("C4", claims_layers.C4, "Table 1", "table1"),
    Claim("C5", claims_layers.C5, "Table 1"),
    Claim("C6", KV_CLAIM, "Figure 4"),
    Claim("C7", claims_transfer.C7, "attention maps"),
    Claim("C8", claims_transfer.C8, "attention maps"),
    Claim("C9", claims_heads.SPREAD_CLAIM, "sections 5 and 6", "head_removal"),
    Claim("C10", claims_heads.FEW_CLAIM, "throughout"),
    Claim("C11", claims_transfer.C11, "section 6.3", "hybrid_delegation"),
    Claim("C12", claims_transfer.C12, "Figure 7", "fig7"),
    Claim("C13", claims_transfer.C13, "rebuttal", "head_replacement"),
    Claim("C14", benchmarks_page.CLAIM, "table of other tasks"),
    Claim("C15", "The heads sit in the middle layers.", "rebuttal"),
)
#: the paper's figures and tables, and the notebook that reproduces each; empty where there is none yet
ITEMS = (
    ("Gather and Aggregate on one question (schematic)", "head_discovery"),
    ("attention maps, Transformer and SSM", "attention_maps"),
    ("Figure 2: letters and knowledge against layers kept", "layers_and_heads"),
    ("Figure 2, transition point", "layers_and_heads"),
    ("Figure 3: one layer taken out of the minimal model", "layers_and_heads"),
    ("Table 1: single heads of the minimal model", "layers_and_heads"),
    ("Figure 4: key-value retrieval against the number of pairs", "fig4_kv_retrieval"),
    ("masking table of sections 4.2 and 4.3: idealised matrices", "idealised_masks"),
    ("distribution of retrieval over heads", "head_discovery"),
    ("hybrid delegation (section 6.3)", "hybrid_delegation"),
    ("Figure 7: layers of the unaligned student replaced", "tiny_panel"),
    ("replacement of the Aggregate head alone", "tiny_panel"),
    ("table of other tasks (GSM8K, BBH, dialogue, ...)", "other_tasks"),
    ("table at the scale of 3B", ""),
)


def keep(store: Store, page: str, verdicts: Iterable[Verdict], records: Sequence[Record]) -> list[Record]:
    """Record the verdicts that `page` (a notebook's name) reached from `records`.

    Raises `GAError` for a claim that is not in `CLAIMS`.
    """
    known = {c.id for c in CLAIMS}
    rests_on, package = sorted({r.hash for r in records}), folder_hash(PACKAGE)
    kept = []
    for verdict in verdicts:
        if verdict.claim not in known:
            raise GAError(f"There is no claim {verdict.claim!r}: use one of {', '.join(sorted(known))}.")
        key = {
            "kind": "verdict",
            "claim": verdict.claim,
            "model": verdict.model,
            "page": page,
            "package": package,
            "rests_on": rests_on,
        }
        values = {
            "verdict": verdict.verdict,
            "because": verdict.because,
            "intervals": {name: [i.value, i.low, i.high] for name, i in verdict.intervals.items()},
        }
        record = store.compute(key, lambda values=values: values)
        os.utime(record.path)  # found or made: this is what the page says now
        kept.append(record)
    return kept


def collect(store: Store) -> pd.DataFrame:
    """One row for each claim and model: the newest verdict of today's code; claims without one are "not run"."""
    found: dict[tuple[str, str, str], Record] = {}
    records = store.find("verdict", package=folder_hash(PACKAGE))
    for record in sorted(records, key=lambda r: r.path.stat().st_mtime_ns):
        found[record.key["claim"], record.key["model"], record.key["page"]] = record
    rows = []
    for claim in CLAIMS:
        here = [(place, record) for place, record in sorted(found.items()) if place[0] == claim.id]
        for (_, model, page), record in here:
            rows.append({"claim": claim.id, "model": model, "page": page, **_words(record)})
        if not here:
            rows.append({"claim": claim.id, "model": "", "page": "", "verdict": NOT_RUN, "because": ""})
    return pd.DataFrame(rows)


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """One row for each claim: where the paper makes it, and the models by verdict."""
    rows = []
    for claim in CLAIMS:
        here = found[found.claim == claim.id]
        verdicts = {v: list(rows_.model) for v, rows_ in here.groupby("verdict", sort=False)}
        said = "; ".join(f"{v}: {', '.join(m)}" if m != [""] else v for v, m in verdicts.items())
        rows.append({"claim": claim.id, "in the paper": claim.where, "verdicts here": said})
    return pd.DataFrame(rows)


def numbers(claim: Claim) -> str:
    """The paper's numbers on this claim with their confidence, quoted from ``reported.csv``; empty if none is known."""
    if not claim.item:
        return ""
    rows = reported(claim.item)
    return "; ".join(f"{r.condition}: {r.metric} {r.value:g} {r.unit} ({r.confidence} confidence)" for r in rows)


def _words(record: Record) -> dict[str, str]:
    return {"verdict": record.values["verdict"], "because": record.values["because"]}
