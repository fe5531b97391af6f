"""What does the page on idealised masks say of one model? Tables, sentences and a verdict from answers alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from .claims import Verdict
from .claims_rules import Check, above_chance, judge, share
from .heads import Head
from .records import Record
from .stats import stderr

#: what is asked, in the order of the table
TASKS = ("letter", "kv", "knowledge")
NAMES = {"letter": "letters", "kv": "key-value questions", "knowledge": "knowledge"}
BASE, ALLOWED, WRONG = "(b) others of their layers off", "(c) allowed entries alone", "(c) … one wrong end alone"
RULE = (
    "All other heads of the Gather and Aggregate heads' layers are off. Cut down to the entries that the theory "
    "allows, not renormalised, the Gather and Aggregate heads keep at least 0.8 of the score above chance that they "
    "have with their whole matrices; when the last token may read one wrong segment's end instead, they keep under "
    "0.3. Judged on letters, or on key-value questions where letters are at chance or cannot be asked."
)


@dataclass(frozen=True)
class IdealisedPage:
    """What was measured on one model.

    how: how the heads were found; why: which questions could not be asked. chances: by task. rows: condition -> task ->
    answers [n] (means over draws where heads were drawn); tasks without segments have no answers under (c). allowed:
    task -> role -> share of each head's weight that the theory allows ``[h, n]``.
    """

    model: str
    title: str
    source: str
    revision: str | None
    gather: tuple[Head, ...]
    aggregate: tuple[Head, ...]
    how: str
    why: str
    chances: dict[str, float]
    rows: dict[str, dict[str, np.ndarray]] | None = None
    allowed: dict[str, dict[str, np.ndarray]] | None = None
    records: tuple[Record, ...] = ()

    def dose(self) -> pd.DataFrame:
        """How much of each head's weight the cut leaves: one row a head, its mean share on each task."""
        rows = []
        for role, heads in (("gather", self.gather), ("aggregate", self.aggregate)):
            for i, head in enumerate(heads):
                cells = {t: f"{100 * a[role][i].mean():.0f}%" for t, a in (self.allowed or {}).items() if role in a}
                rows.append({"model": self.model, "head": f"{head} ({role.capitalize()})", **cells})
        return pd.DataFrame(rows)

    def sentence(self) -> str:
        """Which heads are meant and where they come from."""
        if not self.gather and not self.aggregate:
            return f"No Gather or Aggregate head is known, so there is nothing to keep. {self.how}"
        roles = (("Gather", self.gather), ("Aggregate", self.aggregate))
        heads = [f"{role}: {', '.join(map(str, h)) if h else 'none'}" for role, h in roles]
        return f"{'; '.join(heads)} ({self.how.rstrip('.')}). {self.why}".strip()

    def frame(self) -> pd.DataFrame:
        """One row a condition and task: model, condition, task, accuracy, stderr, chance."""
        rows = [
            (self.model, label, task, float(correct.mean()), stderr(correct), self.chances[task])
            for label, answers in (self.rows or {}).items()
            for task, correct in answers.items()
        ]
        return pd.DataFrame(rows, columns=["model", "condition", "task", "accuracy", "stderr", "chance"])

    def table(self) -> pd.DataFrame:
        """Accuracy in percent ± standard error, one row a condition; a dash where theory says nothing."""
        rows = []
        for label, answers in (self.rows or {}).items():
            cells = {t: _percent(answers[t]) if t in answers else "–" for t in TASKS if t in self.chances}
            rows.append({"condition": label, **cells})
        return pd.DataFrame(rows)

    def judged_on(self) -> str:
        """The task that the rule is applied to, "" if none is above chance."""
        intact = (self.rows or {}).get("(a) intact", {})
        asked = [t for t in ("letter", "kv") if t in intact and t in self.rows.get(ALLOWED, intact)]
        return next((t for t in asked if above_chance(intact[t], self.chances[t])), "")

    def verdict(self) -> Verdict:
        """Whether the allowed entries suffice, by `RULE`."""
        claim, task = "sections 4.2 and 4.3", self.judged_on()
        if not task or BASE not in self.rows:
            why = "No retrieval task is above chance." if not task else "No Gather or Aggregate head is known."
            return Verdict(claim, self.model, "not testable", why, {})
        chance, base = self.chances[task], self.rows[BASE][task]
        if not above_chance(base, chance):
            why = f"With all other heads of their layers off, {NAMES[task]} are at chance already."
            return Verdict(claim, self.model, "not testable", why, {})
        kept = share(self.rows[ALLOWED][task], base, chance)
        checks = [Check("share kept with allowed entries alone", kept, least=0.8, there=kept.low > 0)]
        wrong = "" if WRONG in self.rows else "Without an Aggregate head there is no control."
        if not wrong:
            checks.append(Check("share kept, one wrong end", share(self.rows[WRONG][task], base, chance), most=0.3))
        said = (
            f"On {NAMES[task]}, {100 * kept.value:.0f}% of the score above chance is kept with allowed entries alone."
        )
        held = [float(a.mean()) for a in (self.allowed or {}).get(task, {}).values()]
        if held and min(held) > 0.95:
            said += f" Little was cut: the allowed entries held at least {100 * min(held):.0f}% of the weight already."
        return judge(claim, self.model, said, checks, wrong)


def _percent(correct: np.ndarray) -> str:
    return f"{100 * correct.mean():.1f} ± {100 * stderr(correct):.1f}"
