"""Do Gather and Aggregate heads need more than their theory says? All other heads off, then all other entries off.

Three steps, of which the paper tells the results in words (sections 4.2 and 4.3): (a) the whole model; (b) all heads
but the Gather and Aggregate heads switched off, in the layers that hold them or in all; (c) on top of (b), the matrices
of the Gather and Aggregate heads cut down to the entries that the theory needs (`theory.py`), renormalised or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tqdm import tqdm

from .concentration import _draws, others
from .discover import DiscoverSettings, discover
from .errors import GAError, TaskError
from .heads import Head, parse_heads
from .idealised_shown import TASKS, IdealisedPage
from .language_model import LanguageModel
from .measure import check_fits, known_heads
from .records import Record, Store
from .registry import find_spec
from .task_choice import Asked
from .tasks import Task
from .theory import Theory, allowed_share, score_theory

__all__ = ["IdealisedPage", "Settings", "conditions", "find_heads", "measure"]


@dataclass(frozen=True)
class Settings:
    """How many questions of each kind, from which seed; how heads are found where the registry names none.

    heads: "auto" takes the registry's Gather and Aggregate heads, else finds them; "discover" always finds them.
    """

    n_examples: int
    seed: int
    find: DiscoverSettings = field(default_factory=lambda: DiscoverSettings(Asked("letter")))
    n_pairs: int = 8
    n_random: int = 2
    ends: str = "either"
    heads: str = "auto"

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work."""
        if self.heads not in ("auto", "discover"):
            raise GAError(f"heads={self.heads!r} is unknown: use 'auto' or 'discover'.")
        if self.n_examples < 10 or self.n_random < 1:
            raise GAError("n_examples must be 10 or more and n_random 1 or more, or nothing can be compared.")
        if self.seed in self.find.seeds:
            raise GAError(f"seed={self.seed} is among find_seeds: heads must be found on other questions.")
        Theory(ends=self.ends)
        tasks, why = self.tasks(lm)
        if not tasks:
            raise TaskError(f"{lm.name} can be asked nothing. {' '.join(why)}")

    def tasks(self, lm: LanguageModel) -> tuple[dict[str, Task], list[str]]:
        """The questions of each of `TASKS` that `lm` can be asked, and why it cannot be asked the others."""
        found, why = {}, []
        for kind in TASKS:
            try:
                task = Asked(kind, self.n_pairs).task(lm, self.n_examples, self.seed)
                check_fits(lm, task)
                found[kind] = task
            except TaskError as error:
                why.append(str(error))
        return found, why


def measure(store: Store, lm: LanguageModel, settings: Settings, progress: bool = True) -> IdealisedPage:
    """Measure one model; what the store holds is not measured again."""
    settings.check(lm)
    tasks, why = settings.tasks(lm)
    records: list[Record] = []
    gather, aggregate, how = find_heads(store, lm, settings, records, progress)
    page = IdealisedPage(
        lm.name, lm.title, lm.source, lm.revision, gather, aggregate, how, " ".join(why),
        {kind: t.chance for kind, t in tasks.items()},
    )  # fmt: skip
    work = conditions(lm, gather, aggregate, settings)
    rows: dict[str, dict[str, np.ndarray]] = {}
    for label, options in tqdm(work.items(), desc=f"{lm.name}: conditions", disable=not progress):
        rows[label] = {}
        for kind, task in tasks.items():
            if any(rule for _, rule in options) and not task.examples[0].segments:
                continue  # theory says nothing about questions without segments
            found = [score_theory(store, lm, task, off, rule) for off, rule in options]
            records += found
            rows[label][kind] = np.mean([r.arrays["correct"] for r in found], axis=0)
    allowed: dict[str, dict[str, np.ndarray]] = {}
    for kind, task in tasks.items():
        if task.examples[0].segments and (gather or aggregate):
            record = allowed_share(store, lm, task, Theory(gather, aggregate, settings.ends))
            records.append(record)
            allowed[kind] = {r: record.arrays[r] for r in ("gather", "aggregate") if record.arrays[r].size}
    return replace(page, rows=rows, allowed=allowed, records=tuple(records))


def conditions(
    lm: LanguageModel, gather: Sequence[Head], aggregate: Sequence[Head], settings: Settings
) -> dict[str, list[tuple[tuple[Head, ...], Theory | None]]]:
    """Label -> what is done, in order: heads that are off, and what the others may read; several where drawn."""
    named = tuple(dict.fromkeys((*gather, *aggregate)))
    work: dict[str, list] = {"(a) intact": [((), None)]}
    if not named:
        return work
    layer = others(lm, named)
    every = tuple(h for h in lm.head_list() if h not in named)
    work["G&A heads off, others on"] = [(named, None)]
    work["(b) others of their layers off"] = [(layer, None)]
    work["(b) others of all layers off"] = [(every, None)]
    drawn = _draws(lm, named, settings.n_random, settings.seed, same_layers=True)
    if drawn:
        work["random heads kept instead"] = [(others(lm, h), None) for h in drawn]
    rule = Theory(tuple(gather), tuple(aggregate), settings.ends, seed=settings.seed)
    work["(c) allowed entries alone"] = [(layer, rule)]
    work["(c) … renormalised"] = [(layer, replace(rule, renormalise=True))]
    work["(c) … nothing at other rows"] = [(layer, replace(rule, strict=True))]
    work["(c) … all other heads on"] = [((), rule)]
    if aggregate:
        work["(c) … right end alone (oracle)"] = [(layer, replace(rule, read="right"))]
        work["(c) … one wrong end alone"] = [(layer, replace(rule, read="wrong"))]
    return work


def find_heads(
    store: Store, lm: LanguageModel, settings: Settings, records: list[Record], progress: bool = True
) -> tuple[tuple[Head, ...], tuple[Head, ...], str]:
    """Gather and Aggregate heads of the two layers of the strongest of each, and how they were found, in a sentence.

    Where letters cannot be asked, or are at chance, heads are found on key-value questions.
    """
    spec = find_spec(lm.source)
    if settings.heads == "auto" and spec and spec.gather and spec.aggregate:
        named = known_heads(lm, "gather"), known_heads(lm, "aggregate")
        return *named, f"named by {spec.heads_source}"
    said = ""
    for asked in dict.fromkeys((settings.find.asked, Asked("kv", settings.n_pairs))):
        find = replace(settings.find, asked=asked)
        try:
            find.check(lm)
            found = discover(store, lm, find, progress)
        except TaskError as error:
            said += f"{error} "
            continue
        records += found.records
        heads = []
        for role in ("gather", "aggregate"):
            try:
                heads.append(tuple(parse_heads(found.roles.heads(role))))
            except TaskError as error:
                heads.append(())
                said += f"{error} "
        layers = {h[0].layer for h in heads if h}
        gather, aggregate = (tuple(h for h in some if h.layer in layers) for some in heads)
        if gather or aggregate:
            return gather, aggregate, f"{said}found on {asked.said()} of other seeds".strip()
    return (), (), said.strip()
