"""Is M x really what the mixer computed? Measured on every architecture in small, kept as records.

The models are tiny and random (`random_models`), in float32 on the CPU: the question is one of arithmetic, and
weights that were never trained hide nothing. For each text three errors are taken,

    mixer: || M x - y || / || y || over all heads of one mixer,    head: the same over one head alone,
    row:   || row - M's row || / || M's row || over all heads, for rows computed without the square.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from . import kernels, mixers, random_models
from .codehash import code_hash
from .errors import GAError
from .language_model import LanguageModel
from .mixers.base import FAMILIES, Captured, wide
from .mixers.deltanet import DeltaNet
from .records import Record, Store

#: the tiny models' chunks are 16 tokens: before, at and after a boundary, and over many
LENGTHS = (1, 7, 15, 16, 17, 300)
LONGEST = 1024
#: the contract: relative error in float32
BOUND = 1e-5
#: a mixer of channels is compared at every eighth of them in texts longer than this, in all of them otherwise
MANY = 100
NAMES = {
    "attention": "softmax attention", "mamba1": "Mamba-1", "mamba2": "Mamba-2 (SSD)", "llamba": "Llamba",
    "deltanet": "gated delta rule", "kda": "Kimi delta attention", "lightning": "lightning attention",
    "shortconv": "gated short convolution",
}  # fmt: skip


def check(architectures: str | Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Names of the architectures to measure; ``"all"`` is every one that the package supports.

    Raises `GAError` for an architecture that does not exist and for a length that is not a number from 1 to 1024.
    """
    names = list(random_models.NAMES) if architectures in ("all", ["all"]) else architectures
    if isinstance(names, str) or not names:
        raise GAError(f"architectures={architectures!r} must be 'all' or a list of one name or more.")
    unknown = [n for n in names if n not in random_models.NAMES]
    if unknown:
        raise GAError(f"{unknown[0]!r} is no architecture of the package; there are {', '.join(random_models.NAMES)}.")
    wrong = [n for n in lengths if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= LONGEST]
    if wrong or not lengths:
        raise GAError(f"lengths={list(lengths)} must be one or more numbers of tokens, each from 1 to {LONGEST}.")
    return list(dict.fromkeys(names))


def random_model(name: str) -> LanguageModel:
    """The tiny random model of an architecture, in pure torch whatever kernels are installed."""
    with kernels.hidden():
        return random_models.lm(name)


def measure(
    store: Store,
    architectures: str | Sequence[str] = "all",
    lengths: Sequence[int] = LENGTHS,
    seed: int = 0,
    progress: bool = True,
) -> list[Record]:
    """One record for each architecture; what the store holds is not measured again. `seed` draws the texts."""
    names = check(architectures, lengths)
    if torch.cuda.is_available():
        _measure_apart(store, names, lengths, seed)
    records = []
    for name in tqdm(names, desc="exactness", unit="architecture", disable=not progress):
        lm = random_model(name)
        key = {
            "kind": "exactness",
            "model": lm.describe(),
            "task": {"task": "random tokens", "settings": {"lengths": list(lengths), "seed": seed}},
            "code": code_hash("exactness"),
        }
        meta: dict[str, object] = {"model": lm.name, "source": f"drawn at random ({name})"}
        records.append(store.compute(key, lambda lm=lm: {"rows": errors(lm, lengths, seed)}, meta))
    return records


def _measure_apart(store: Store, names: Sequence[str], lengths: Sequence[int], seed: int) -> None:
    """Fill the store from a process that sees no GPU.

    In this one, a model loaded on the GPU may have bound its architecture's code to kernels that do not run on the CPU.
    """
    code = "import json, sys; from ga_utils import exactness, records; a = json.load(sys.stdin)"
    code += "; exactness.measure(records.Store(a[0]), *a[1:], progress=False)"
    given = json.dumps([str(store.root.resolve()), list(names), list(lengths), seed])
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, text=True, capture_output=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GAError(f"Exactness could not be measured in a process without a GPU: {last}")


@torch.no_grad()
def errors(lm: LanguageModel, lengths: Sequence[int], seed: int = 0) -> list[dict]:
    """One dict for each site of `lm` and length: the errors, and what signs and row sums M has."""
    found = []
    for length in lengths:
        gen = torch.Generator().manual_seed(1000 * seed + length)
        vocabulary = lm.model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(4, min(260, vocabulary), (1, length), generator=gen)
        for site, cap in mixers.capture(lm, {"input_ids": ids}).items():
            step = 8 if site.head_dim == 1 and length > MANY else 1
            heads = list(range(0, site.n_heads, step))
            found.append({"kind": site.kind, "layer": site.layer, "length": length, **_errors(cap, heads)})
    return found


def _errors(cap: Captured, heads: list[int]) -> dict:
    family = FAMILIES[cap.site.kind]
    m = family.matrix(cap, heads, True)
    value, output = wide(cap.value)[:, heads], wide(cap.output)[:, heads]
    at = torch.tensor([sorted({0, cap.length // 3, cap.length // 2, cap.length - 1})])
    sums, total = m.sum(-1), m.abs().sum()
    each = [_relative(m[:, i] @ value[:, i], output[:, i]) for i in range(len(heads))]
    worst = int(np.argmax(each))
    size = output.double().pow(2).sum((0, 2, 3)).sqrt()
    values = {
        "heads": len(heads),
        "mixer": _relative(m @ value, output),
        "head": each[worst],
        # how much smaller than a head's usual output that head's is: its error is relative to that
        "smaller": float(size.median() / (size[worst] or 1.0)),
        "row": _relative(family.rows(cap, heads, at, True), m[:, :, at[0]]),
        "above": float(m.triu(1).abs().max()),
        "negative": float(m.clamp(max=0).abs().sum() / total),
        "least_sum": float(sums.min()),
        "greatest_sum": float(sums.max()),
    }
    if isinstance(family, DeltaNet):
        values["no_erase"] = _relative(_without_erase(family, cap, heads) @ value, output)
    return values


def _without_erase(family: DeltaNet, cap: Captured, heads: list[int]) -> Tensor:
    """The delta rule's matrix as if nothing were ever erased: a common mistake, measured as a warning."""
    q, k, g, beta = family.ingredients(cap, heads)
    return family.scores(q, k, g)[0].tril() * beta[..., None, :]


def _relative(found: Tensor, expected: Tensor) -> float:
    """|| found - expected || / || expected ||; the plain difference where nothing is expected (Zaya's first token)."""
    size = float(expected.double().norm())
    return float((found - expected).double().norm()) / (size or 1.0)


# ---- what a page shows ----


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each architecture, site and length; column `class` is the model's class."""
    rows = []
    for record in records:
        name = record.key["model"]["architecture"]
        short = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        rows += [{"class": short, **row} for row in record.values["rows"]]
    return pd.DataFrame(rows)


def table(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each family: how much was compared, and the worst errors."""
    return pd.DataFrame(
        {
            "family": name,
            "classes": here["class"].nunique(),
            "mixers": len(here.drop_duplicates(["class", "layer"])),
            "whole mixer": power(here.mixer.max()),
            "worst head": power(here["head"].max()),
            "row alone": power(here.row.max()),
        }
        for name, here in _by_family(records)
    )


def signs(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each family: the negative share of the weight and the row sums, on the longest text."""
    rows = []
    for name, here in _by_family(records):
        long = here[here.length == here.length.max()]  # of one token there is one weight, which says little
        low, high = long.least_sum.min(), long.greatest_sum.max()
        negative = _span(100 * long.negative.min(), 100 * long.negative.max(), "%")
        sums = _span(low, high, digits=1 if high - low > 1e-4 else 0)
        rows.append({"family": name, "negative weight": negative, "row sums": sums})
    return pd.DataFrame(rows)


def _by_family(records: Sequence[Record]) -> list[tuple[str, pd.DataFrame]]:
    everything = frame(records)
    parts = [(name, everything[everything.kind == kind]) for kind, name in NAMES.items()]
    return [(name, here) for name, here in parts if not here.empty]


def classes(records: Sequence[Record]) -> dict[str, list[str]]:
    """The model classes that were measured, by family."""
    everything = frame(records)
    found = {NAMES[k]: sorted(set(everything[everything.kind == k]["class"])) for k in NAMES}
    return {family: names for family, names in found.items() if names}


def verdict(records: Sequence[Record]) -> str:
    """A sentence: whether every mixer at every length is within `BOUND`, and the worst of all."""
    everything = frame(records)
    worst = everything.loc[everything[["mixer", "row"]].max(axis=1).idxmax()]
    size = max(worst.mixer, worst.row)
    bad = everything[(everything[["mixer", "row"]].max(axis=1) > BOUND) | (everything.above != 0)]
    where = f"{worst['class']}, layer {worst.layer}, {worst.length} tokens"
    if bad.empty:
        return (
            f"All {len(everything)} comparisons are within {power(BOUND)}; the largest error of a whole mixer or of a "
            f"row is {power(size)} ({where}). Above the diagonal every M is exactly 0."
        )
    return (
        f"{len(bad)} of {len(everything)} comparisons miss {power(BOUND)}; the largest error is {power(size)} "
        f"({where})."
    )


def caption(records: Sequence[Record]) -> str:
    """What the table of `table` shows."""
    lengths = records[0].key["task"]["settings"]["lengths"]
    return (
        f"Worst relative errors at {', '.join(map(str, lengths))} tokens, tiny random models in float32. Chunked scans "
        f"have chunks of 16 tokens. In texts of more than {MANY} tokens, every eighth channel where heads are channels."
    )


def without_erase(records: Sequence[Record]) -> str:
    """A sentence on how wrong a delta rule's matrix is without its erase term; empty where none was measured."""
    everything = frame(records)
    if "no_erase" not in everything:
        return ""
    here = everything.dropna(subset=["no_erase"])
    here = here[here.length == here.length.max()]
    return (
        "A delta rule's matrix without its erase term (with L = 0 in the formula) would be off by "
        f"{100 * here.no_erase.min():.0f}% to {100 * here.no_erase.max():.0f}% on the longest of these texts."
    )


def provenance(records: Sequence[Record]) -> str:
    """One sentence on what the records rest on; each model's fingerprint is in its record."""
    model, settings = records[0].key["model"], records[0].key["task"]["settings"]
    versions = f"torch {model['torch']}, transformers {model['transformers']}"
    seconds = sum(r.meta.get("seconds", 0) for r in records)
    threads = sorted({r.meta.get("threads") for r in records} - {None})
    where = f"{model['dtype']} on {model['device']}"
    return (
        f"Exactness: {len(records)} records, one for each architecture (`{records[0].path.parent.name}/`), on tiny "
        f"random models, {where}, {versions}, texts drawn with "
        f"seed {settings['seed']}; measured in {seconds:.0f} s on {' or '.join(map(str, threads)) or 'unknown'} "
        "threads."
    )


def worst_head(records: Sequence[Record]) -> str:
    """A sentence on the single head whose output is reproduced worst, and why."""
    everything = frame(records)
    worst = everything.loc[everything["head"].idxmax()]
    where = f"{worst['class']}, layer {worst.layer}"
    tokens = f"{worst.length} token{'s' if worst.length > 1 else ''}"
    return (
        f"The worst single head is off by {power(worst['head'])} ({where}, {tokens}): "
        f"on that text its output is {worst.smaller:,.0f} times smaller than the median head's."
    )


def power(x: float) -> str:
    """1.2e-07 as 1.2 × 10⁻⁷, on one line; 0 where two numbers agree in every bit."""
    if x == 0:
        return "0"
    digits, exponent = f"{x:.1e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{digits}\u00a0×\u00a010{raised}" if digits != "1.0" else f"10{raised}"


def _span(low: float, high: float, unit: str = "", digits: int = 0) -> str:
    a, b = (f"{x:.{digits}f}".replace("-", "−") for x in (low, high))
    return f"{a}{unit}" if a == b else f"{a} to {b}{unit}"
