"""What does the page on finding heads measure and say? One `ModelPage` for each model, every sentence from numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from . import claims_heads, concentration
from .claims import Verdict
from .concentration import Curve
from .discover import DiscoverSettings, discover
from .errors import GAError
from .head_views import Shown, show_head
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .measure import check_fits
from .records import Record, Store
from .registry import find_spec
from .roles import AtChance, Roles

#: heads whose depth is told
MOST = 8
#: what the columns of a head table are called on the page
COLUMNS = {
    "aggregate loss": "loss at the answer (nats)",
    "aggregate se": "s.e.",
    "right": "right segment weighed most",
    "gather loss": "loss elsewhere (nats)",
    "gather se": "s.e. ",
    "gather mass": "weight on its own segment",
}


@dataclass(frozen=True)
class Settings:
    """How heads are found, and the questions on which they are removed."""

    find: DiscoverSettings
    n_examples: int
    seed: int
    n_random: int

    def check(self, lm: LanguageModel) -> None:
        """Raise `GAError` in one sentence if anything here cannot be done with `lm`, before any long work."""
        if self.seed in self.find.seeds:
            raise GAError(f"seed={self.seed} is among find_seeds: heads must be found on other questions.")
        if self.n_examples < 10 or self.n_random < 1:
            raise GAError("n_examples must be 10 or more and n_random 1 or more, or nothing can be compared.")
        self.find.check(lm)
        check_fits(lm, self.find.asked.task(lm, self.n_examples, self.seed))


@dataclass(frozen=True)
class ModelPage:
    """What is shown of one model. roles, curve and shown are None where the model is at chance (`why`) or no head has
    the role."""

    model: str
    title: str
    source: str
    revision: str | None
    family: str
    n_layers: int
    kinds: dict[str, str]
    said: str
    why: str
    roles: Roles | None
    ranking: pd.DataFrame
    curve: Curve | None
    shown: Shown | None
    records: list[Record]

    def sentence(self) -> str:
        """How many heads have a role, or why none can be found."""
        if self.roles is None:
            return f"Not testable: {self.why}"
        table = self.roles.table
        counts = {r: int(table.role.str.contains(r).sum()) for r in ("Gather", "Aggregate")}
        other = int((table.role == "matters otherwise").sum())
        names = [
            f"{counts[r]} {r} head{'s' * (counts[r] != 1)}"
            + (f" ({', '.join(self.roles.heads(r.lower()))})" if 0 < counts[r] <= 8 else "")
            for r in counts
        ]
        exact = int(table.exact.sum())
        how = "all measured exactly" if exact == len(table) else f"{exact} measured exactly at all positions"
        return (
            f"{self.said} By the rule it has {names[0]} and {names[1]}; {other} more matter otherwise, of {len(table)} "
            f"heads in all, {how}."
        )

    def top(self, n: int) -> pd.DataFrame:
        """The n heads that cost most, as the page shows them."""
        table = self.roles.table.head(n).drop(columns=["layer", "index", "aggregate mass"])
        if len(set(self.kinds.values())) > 1:
            table.insert(1, "mixer", table["head"].map(self.kinds))
        return table.rename(columns=COLUMNS)

    def stability(self) -> str:
        """How far the seeds agree."""
        found = self.roles.stability
        if not found:
            return "*One seed only, so nothing is said of how stable the order is.*"
        said = "; ".join(f"{name} {value:.2f}" for name, value in found.items())
        return f"*Between seeds, all heads: {said}.*"

    def map(self, role: str) -> tuple[pd.DataFrame, list[str]]:
        """The table to draw, and the names of the heads to ring."""
        table = self.roles.table.assign(kind=self.roles.table["head"].map(self.kinds))
        return table, list(table[table.role.str.contains(role.capitalize())]["head"])

    def map_caption(self, role: str) -> str:
        """What the map shows, from the numbers in it."""
        table, ringed = self.map(role)
        losses = table[f"{role} loss"]
        place = "at the positions that predict the answer" if role == "aggregate" else "at all other positions"
        best = table.loc[losses.idxmax()]
        share = losses.clip(lower=0).nlargest(max(1, len(losses) // 20)).sum() / max(losses.clip(lower=0).sum(), 1e-9)
        estimated = int((~table.exact).sum())
        note = f" {estimated} heads are estimates to first order." if role == "gather" and estimated else ""
        return (
            f"*{self.title}, masks {place}: the strongest is {best['head']} with {losses.max():.2f} nats; the top 5% "
            f"of heads hold {100 * share:.0f}% of all losses. Ringed: {', '.join(ringed) or 'none'}.{note}*"
        )


def measure(store: Store, lm: LanguageModel, settings: Settings, progress: bool = True) -> ModelPage:
    """Measure one model; what the store holds is not measured again."""
    settings.check(lm)
    kinds = {str(h): lm.site(h).kind for h in lm.head_list()}
    asked = settings.find.asked
    spec = find_spec(lm.source) or find_spec(lm.name)
    family = spec.family if spec else ""
    about = (lm.name, lm.title, lm.source, lm.revision, family, lm.n_layers, kinds)
    try:
        found = discover(store, lm, settings.find, progress)
    except AtChance as error:
        return ModelPage(*about, asked.said(), str(error), None, pd.DataFrame(), None, None, [])
    task = asked.task(lm, settings.n_examples, settings.seed)
    by_name: dict[str, Head] = {str(h): h for h in lm.head_list()}
    table = found.roles.table
    everywhere = table["aggregate loss"] + table["gather loss"]
    ranked = [by_name[name] for name in table.loc[everywhere.sort_values(ascending=False, kind="stable").index, "head"]]
    curve = concentration.measure(store, lm, task, ranked, n_random=settings.n_random, progress=progress)
    fetching = table[table.role.str.contains("Aggregate")]
    shown = None
    if len(fetching):
        best = by_name[fetching.loc[fetching["aggregate loss"].idxmax(), "head"]]
        shown = show_head(store, lm, task, best, "the strongest Aggregate head found")
    said = f"Intact, {lm.name} gets {found.accuracy} of {asked.said()} right (guessing {100 * found.chance:.0f}%)."
    records = [*found.records, *curve.records, *(shown.records if shown else [])]
    return ModelPage(*about, said, "", found.roles, found.ranking, curve, shown, records)


def concentration_table(curves: Sequence[Curve]) -> pd.DataFrame:
    """One row a model: accuracies in percent with the top heads removed, kept, and random ones, at 5% of the heads."""
    rows = []
    for c in curves:
        k = c.under_share or min(c.removed)
        half = c.half()
        rows.append(
            {
                "model": c.model,
                "heads": c.n_heads,
                "guessing": 100 * c.chance,
                "intact": 100 * c.intact.mean(),
                "removed": k,
                "top removed": 100 * c.removed[k].mean(),
                "random removed": 100 * c.random[k].mean() if k in c.random else np.nan,
                "half": f"{100 * half:.1f}%" if half is not None else f"over {100 * max(c.width.values()):.0f}%",
            }
        )
    return pd.DataFrame(rows)


def ranking_table(found: Sequence[ModelPage]) -> pd.DataFrame:
    """How well first-order estimates rank the heads of each model, where the exact effects of all are known."""
    return pd.concat(
        [m.ranking.assign(model=m.model).set_index("model").reset_index() for m in found if len(m.ranking)]
    )


def spreads(found: Sequence[ModelPage]) -> list[Verdict]:
    """Claim C9 for each pair of a Transformer and an SSM that answered the same questions in the same language."""
    told = [m for m in found if m.curve is not None]
    pairs = [
        (a, b)
        for a in told
        for b in told
        if a.family == "transformer" and b.family.startswith("mamba") and _language(a) == _language(b)
    ]
    return [claims_heads.spread(a.curve, b.curve) for a, b in pairs]


def depths(found: Sequence[ModelPage]) -> str:
    """Claim C15, reported only: the depth of each head that has a role."""
    parts = []
    for m in found:
        if m.roles is None:
            continue
        table = m.roles.table[m.roles.table.role.str.contains("Gather|Aggregate")].head(MOST)
        if len(table):
            named = {str(h): h for h in parse_heads(list(table["head"]))}
            deep = claims_heads.depths(list(named.values()), m.n_layers)
            roles = dict(zip(table["head"], table["role"], strict=True))
            parts.append(f"{m.title}: " + ", ".join(f"{n} ({roles[n]}) {d:.2f}" for n, d in deep.items()))
    listed = ". ".join(parts) or "no head has a role"
    return (
        "> **Claim C15**, reported only: the heads sit in the middle layers.\n\n"
        f"Depth of the {MOST} strongest heads with a role, from 0 (first layer) to 1 (last): {listed}."
    )


def _language(page: ModelPage) -> str:
    return page.curve.records[0].key["task"]["task"]
