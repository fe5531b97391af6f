"""What holds on every seed? Each finding of the page on the embedded models, by a rule, from measured numbers alone.

One model shows an accident as readily as a mechanism. Something is called a finding only if its rule holds on every
seed that was measured, and on three or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ga_utils.stats import Interval, paired_gain
from ga_utils.tiny.panel import Member, jump, of_family
from ga_utils.tiny.panel_heads import KEPT, LOST, Found

#: seeds that a finding needs
SEEDS = 3
LETTERS = ("letter", "copy-letter")
SWAPPED = ("letter", "kv-8")


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
        text = [f"{t} {_percent(r['left'])} ({_percent(r['left random'])})" for t, r in each.items()]
        numbers[seed] = f"{', '.join(map(str, one.heads[role]))}: {', '.join(text)}, knowledge {_percent(known)}"
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
        numbers[m.seed] = ", ".join(f"{t} {_percent(s)}" for t, (s, _) in shares.items())
    rule = (
        "of the teacher's score above chance the student keeps more in knowledge than in each retrieval task, by two "
        "standard errors"
    )
    return Finding(
        "The student that was distilled layer by layer keeps knowledge and loses retrieval.", rule, holds, numbers
    )


def swapped_layer(frame: pd.DataFrame, found: Sequence[Found]) -> Finding:
    """A swapped layer that holds an Aggregate head brings back more than any other.

    frame: as `panel_students.swaps` gives it, for all seeds.
    """
    holds, numbers = {}, {}
    for one in found:
        here = frame[frame.seed == one.member.seed]
        if here.empty:
            continue
        layers = {h.layer for h in one.heads["Aggregate"]}
        blocks = here[(here.part == "block") & here.task.isin(SWAPPED)]
        best = int(blocks.groupby("layer").accuracy.mean().idxmax())
        gains = {}
        for name in SWAPPED:
            student = here[(here.part == "student") & (here.task == name)].correct.iloc[0]
            swap = blocks[(blocks.layer == best) & (blocks.task == name)].correct.iloc[0]
            gains[name] = paired_gain(student, swap)
        holds[one.member.seed] = best in layers and all(g.above for g in gains.values())
        where = f"Aggregate in {_layers(layers)}" if layers else "no Aggregate head was found"
        text = ", ".join(f"{t} {_points(g)}" for t, g in gains.items())
        numbers[one.member.seed] = f"best is layer {best} ({text}); {where}"
    rule = (
        "of all layers of the unaligned student, swapped whole one at a time, the one with the best mean score holds "
        "an Aggregate head of the teacher, and gains on letters and on key-value pairs (paired 95% intervals above 0)"
    )
    return Finding(
        "The teacher's layer with an Aggregate head brings retrieval back to the student.", rule, holds, numbers
    )


def not_the_fit(frame: pd.DataFrame) -> Finding:
    """The layer that helps most is not the one that was fitted worst."""
    holds, numbers = {}, {}
    for seed, here in frame.groupby("seed"):
        blocks = here[(here.part == "block") & here.task.isin(SWAPPED)]
        best = int(blocks.groupby("layer").accuracy.mean().idxmax())
        errors = here[here.layer >= 0].groupby("layer").error.first()
        worst = int(errors.idxmax())
        holds[int(seed)] = best != worst
        numbers[int(seed)] = (
            f"best swap: layer {best}, error {errors[best]:.3f}; worst fit: layer {worst}, {errors[worst]:.3f}"
        )
    rule = "the layer with the best mean score when swapped is not the layer whose mixer has the largest error"
    return Finding("The layer whose swap helps most is not the one that was fitted worst.", rule, holds, numbers)


def attention_at_the_answer(frame: pd.DataFrame) -> Finding:
    """The hybrid's attention retrieves where the answer is given. frame: as `panel_students.attention_off` gives it."""
    holds, numbers = {}, {}
    for seed, here in frame.groupby("seed"):
        left = _left(here, "every answer position")
        retrieval = {t: x for t, x in left.items() if t != "knowledge"}
        known = left.get("knowledge", 0.0)
        holds[int(seed)] = bool(retrieval) and known >= KEPT and all(x <= 1 - LOST for x in retrieval.values())
        numbers[int(seed)] = ", ".join(f"{t} {_percent(x)}" for t, x in left.items())
    rule = (
        f"with all attention off at every answer position at most {100 * (1 - LOST):.0f}% of the score above chance is "
        f"left in each retrieval task that was learned, and of knowledge at least {100 * KEPT:.0f}%"
    )
    return Finding(
        "tiny-zamba2's attention retrieves where the answer is given, and holds no knowledge there.",
        rule,
        holds,
        numbers,
    )


def attention_elsewhere(frame: pd.DataFrame) -> Finding:
    """Elsewhere the hybrid's attention matters less."""
    holds, numbers = {}, {}
    for seed, here in frame.groupby("seed"):
        learned = [t for t in dict.fromkeys(here[here.learned].task) if t != "knowledge"]
        gaps = {}
        for name in learned:
            by = here[here.task == name].set_index("place").correct
            gaps[name] = paired_gain(by["every answer position"], by["everywhere else"])
        holds[int(seed)] = bool(gaps) and all(g.above for g in gaps.values())
        numbers[int(seed)] = ", ".join(f"{t} {_points(g)}" for t, g in gaps.items()) or "no retrieval task was learned"
    rule = (
        "in each retrieval task that was learned the score with attention off everywhere else is above that with it "
        "off at every answer position (paired 95% interval)"
    )
    return Finding(
        "tiny-zamba2's attention matters more where the answer is given than everywhere else.", rule, holds, numbers
    )


def smoother(frame: pd.DataFrame) -> Finding:
    """The student's Aggregate rows are less sharp. frame: as `panel_students.sharpness` gives it, for all seeds."""
    holds, numbers = {}, {}
    for seed, here in frame.groupby("seed"):
        first = here[here["head"] == here["head"].iloc[0]].drop_duplicates("task")
        holds[int(seed)] = bool((first.low > 0).all())
        text = ", ".join(
            f"{r.task} {_signed(r.more)} [{_signed(r.low)}, {_signed(r.high)}]" for r in first.itertuples()
        )
        numbers[int(seed)] = f"{first['head'].iloc[0]}: {text} nats"
    rule = (
        "the entropy of the student's last row, in the head that was fitted to the teacher's strongest Aggregate head, "
        "is above that of the teacher's on letters and on key-value pairs (paired 95% interval)"
    )
    return Finding(
        "An SSM's Aggregate row is less sharp than the attention row that it was fitted to.", rule, holds, numbers
    )


def _left(here: pd.DataFrame, place: str) -> dict[str, float]:
    """Share of the score above chance that is left in each learned task."""
    found = {}
    for name in dict.fromkeys(here[here.learned].task):
        by = here[here.task == name].set_index("place")
        chance = float(by.chance.iloc[0])
        found[name] = float((by.accuracy[place] - chance) / (by.accuracy["nowhere"] - chance))
    return found


def _percent(x: float) -> str:
    return f"{round(100 * x)}%".replace("-", "−")


def _signed(x: float, digits: int = 2) -> str:
    return f"{x:+.{digits}f}".replace("-", "−")


def _points(gap: Interval) -> str:
    return f"{_signed(100 * gap.value, 0)} [{_signed(100 * gap.low, 0)}, {_signed(100 * gap.high, 0)}] points"


def _layers(layers: set[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, sorted(layers)))}"


def _share(scores: pd.DataFrame, student: str, teacher: str, task: str) -> tuple[float, float]:
    """The student's score above chance as a share of the teacher's, and its standard error (of both scores)."""
    a, b = (scores[(scores.model == n) & (scores.task == task)].iloc[0] for n in (student, teacher))
    room = max(b.accuracy - b.chance, 1e-9)
    share = (a.accuracy - a.chance) / room
    return share, float(np.hypot(a.stderr, share * b.stderr) / room)
