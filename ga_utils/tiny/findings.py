"""What holds on every seed? Each finding of the page on the embedded models, by a rule, from measured numbers alone.

One model shows an accident as readily as a mechanism. Something is called a finding only if its rule holds on every
seed that was measured, and on three or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ga_utils.tiny.panel import Member, jump, of_family
from ga_utils.tiny.panel_heads import KEPT, LOST, Found

#: seeds that a finding needs
SEEDS = 3
LETTERS = ("letter", "copy-letter")


@dataclass(frozen=True)
class Finding:
    """A sentence, the rule by which it is judged, whether it holds on each seed, and the numbers behind that."""

    says: str
    rule: str
    holds: dict[int, bool]
    numbers: dict[int, str]

    @property
    def verdict(self) -> str:
        """Finding or not, in a few words."""
        if not self.holds:
            return "not measured"
        failed = [s for s, ok in self.holds.items() if not ok]
        if failed:
            seeds = "seed" if len(failed) == 1 else "seeds"
            return f"no finding: fails on {seeds} {', '.join(map(str, failed))}"
        if len(self.holds) < SEEDS:
            return f"no finding: holds, but on {len(self.holds)} seed{'s' * (len(self.holds) > 1)} only"
        return "finding"


def as_text(finding: Finding) -> str:
    """A statement with its verdict, its rule and its numbers, in Markdown."""
    numbers = [f"seed {s}: {text}{'' if finding.holds[s] else ' (fails)'}" for s, text in finding.numbers.items()]
    return f"**{finding.says}** *Verdict: {finding.verdict}.*\n\nRule: {finding.rule}.\n\n" + "\n".join(
        f"- {n}" for n in numbers
    )


def in_words(findings: Sequence[Finding]) -> str:
    """Which statements are findings, in one sentence."""
    held = [f.says for f in findings if f.verdict == "finding"]
    if not held:
        return f"None of these {len(findings)} statements holds on {SEEDS} seeds or more and on all of them."
    every = "; ".join(h[0].lower() + h[1:].rstrip(".") for h in held)
    return f"{len(held)} of {len(findings)} statements hold on every seed: {every}."


def suddenness(members: Sequence[Member], curves: pd.DataFrame) -> Finding:
    """Retrieval is learned in a jump."""
    holds, numbers = {}, {}
    for m in of_family(members, "tiny-llama"):
        found = jump(curves, m.lm.name, "kv")
        if found:
            holds[m.seed] = found.share >= 0.5
            numbers[m.seed] = f"{found.low:.2f} to {found.high:.2f} within {found.steps} steps, at step {found.at}"
    rule = "in tiny-llama's first stage one interval between checks brings half or more of the best score reached there"
    return Finding("Key-value retrieval appears suddenly while tiny-llama learns.", rule, holds, numbers)


def heads(role: str, found: Sequence[Found], shares: pd.DataFrame, tasks: Sequence[str]) -> Finding:
    """Masking the heads found on letters takes retrieval away, random heads do not, and knowledge stays.

    shares: as `panel_heads.shares` gives them, of the models of `found`. A model without such heads fails.
    """
    holds, numbers = {}, {}
    for one in found:
        seed = one.member.seed
        if not one.heads[role]:
            holds[seed], numbers[seed] = False, "no such head was found"
            continue
        by = shares[(shares.role == role) & (shares.seed == seed)].set_index("task")
        known = float(by.loc["knowledge", "left"])
        each = {t: by.loc[t] for t in tasks}
        holds[seed] = bool(known >= KEPT and all(r["left"] <= 1 - LOST and r["high"] < 0 for r in each.values()))
        text = [f"{t} {100 * r['left']:.0f}% ({100 * r['left random']:.0f}%)" for t, r in each.items()]
        numbers[seed] = f"{', '.join(map(str, one.heads[role]))}: {', '.join(text)}, knowledge {100 * known:.0f}%"
    serve = "letters" if set(tasks) <= set(LETTERS) else "key-value pairs too, though they were found on letters"
    rule = (
        f"with them masked at most {100 * (1 - LOST):.0f}% of the score above chance is left (random heads in "
        f"brackets), less than with random heads (paired 95% interval), and of knowledge at least {100 * KEPT:.0f}%"
    )
    spare = "and not knowledge" if serve == "letters" else ""
    return Finding(f"tiny-llama's {role} heads serve {serve} {spare}".strip() + ".", rule, holds, numbers)


def skill_gap(members: Sequence[Member], scores: pd.DataFrame, tasks: Sequence[str]) -> Finding:
    """The unaligned student lost more retrieval than knowledge."""
    holds, numbers = {}, {}
    for m in of_family(members, "tiny-llamba-unaligned"):
        teacher = [t for t in of_family(members, "tiny-llama") if t.seed == m.seed]
        if not teacher:
            continue
        shares = {t: _share(scores, m.lm.name, teacher[0].lm.name, t) for t in ("knowledge", *tasks)}
        known, error = shares["knowledge"]
        holds[m.seed] = all(known - shares[t][0] > 2 * float(np.hypot(error, shares[t][1])) for t in tasks)
        numbers[m.seed] = ", ".join(f"{t} {100 * s:.0f}%" for t, (s, _) in shares.items())
    rule = (
        "of the teacher's score above chance the student keeps more in knowledge than in each retrieval task, by two "
        "standard errors"
    )
    return Finding(
        "The student that was distilled layer by layer keeps knowledge and loses retrieval.", rule, holds, numbers
    )


def _share(scores: pd.DataFrame, student: str, teacher: str, task: str) -> tuple[float, float]:
    """The student's score above chance as a share of the teacher's, and its standard error (of both scores)."""
    a, b = (scores[(scores.model == n) & (scores.task == task)].iloc[0] for n in (student, teacher))
    room = max(b.accuracy - b.chance, 1e-9)
    share = (a.accuracy - a.chance) / room
    return share, float(np.hypot(a.stderr, share * b.stderr) / room)
