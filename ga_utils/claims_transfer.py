"""Where do the heads look, and can retrieval be moved? Claims C7, C8, C11, C12 and C13, by stated rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .claims import Verdict
from .claims_rules import Check, above_chance, judge, lost
from .stats import Interval, bootstrap, paired_gain

C7 = "Gather heads collect a segment into its last token, Aggregate heads fetch the right segment's (attention maps)."
C7_RULE = (
    "The strongest Gather head's mass from segment ends to their own segment, and the strongest Aggregate head's mass "
    "from the last token to the right segment's end, exceed those of 95% of all other heads; with fewer than 40 heads "
    "of all others, which is a weak test."
)
C8 = "SSM heads gather and aggregate with smoother patterns than attention heads (maps, section 4.2)."
C8_RULE = "On the same prompts the SSM's Aggregate rows have a higher entropy and a smaller largest entry."
C11 = "Hybrids give the Aggregate role to their attention layers (section 6.3)."
C11_RULE = (
    "With attention masked at the positions that predict the answer, retrieval loses over half of its score above "
    "chance "
    "and knowledge, under the same mask, under a fifth; with the SSM heads masked at the same positions, retrieval "
    "loses "
    "under a fifth."
)
C12 = "Putting the teacher's layer with the Aggregate head into the SSM restores retrieval (Figure 7)."
C12_RULE = (
    "Each layer of the unaligned student is replaced by the teacher's, one at a time: the layer that helps most "
    "holds the "
    "Aggregate head, and closes at least a third of the gap to the teacher."
)
C13 = "The Aggregate head alone does it (rebuttal)."
C13_RULE = "Grafting the teacher's Aggregate head alone brings at least three quarters of the best layer's gain."
#: below so many heads C7 asks for all others
FEW = 40


def looks_alike(model: str, masses: Mapping[str, tuple[np.ndarray, int]]) -> Verdict:
    """Claim C7. masses: role -> ([h, n] mass of every head on each question, number of the head with the role)."""
    if not masses:
        return Verdict("C7", model, "not testable", "No head has a role.", {})
    checks = []
    for role, (mass, head) in masses.items():
        few = len(mass) < FEW
        found = bootstrap(lambda g, head=head: exceeded(g.mean(-1), head), mass)
        checks.append(
            Check(
                f"share of other heads below the {role} head", found, least=1.0 if few else 0.95, there=found.low > 0.5
            )
        )
    weak = f" With {len(mass)} heads this is a weak test." if few else ""
    missing = "" if len(masses) == 2 else "Only one of the two roles is held by a head."
    return judge("C7", model, f"Roles: {', '.join(masses)}.{weak}", checks, missing)


def exceeded(values: np.ndarray, one: int) -> float:
    """Share of the other values that `values[one]` exceeds."""
    return float((np.delete(values, one) < values[one]).mean())


def smoother(model: str, attention: Sequence[np.ndarray], ssm: Sequence[np.ndarray]) -> Verdict:
    """Claim C8. attention, ssm: (entropy [n] in nats, largest entry [n]) of the last row, on the same prompts."""
    entropy = paired_gain(attention[0], ssm[0])
    top = paired_gain(attention[1], ssm[1])
    said = f"Entropy {np.mean(attention[0]):.2f} and {np.mean(ssm[0]):.2f} nats, largest entry "
    said += f"{np.mean(attention[1]):.2f} and {np.mean(ssm[1]):.2f} (Transformer and SSM)."
    checks = [
        Check("entropy, SSM minus Transformer (nats)", entropy, least=0.0, there=entropy.low > 0),
        Check("largest entry, SSM minus Transformer", top, most=0.0, there=top.high < 0),
    ]
    return judge("C8", model, said, checks)


def delegated(
    model: str,
    intact: tuple[np.ndarray, np.ndarray],
    attention_off: tuple[np.ndarray, np.ndarray],
    ssm_off: tuple[np.ndarray, np.ndarray],
    chances: tuple[float, float],
) -> Verdict:
    """Claim C11. Each pair: answers on the retrieval task [n], on knowledge [m]."""
    if not all(above_chance(c, chance) for c, chance in zip(intact, chances, strict=True)):
        return Verdict("C11", model, "not testable", "The intact model is at chance on retrieval or knowledge.", {})
    retrieval = lost(attention_off[0], intact[0], chances[0])
    checks = [
        Check("retrieval lost, attention off", retrieval, least=0.5, there=retrieval.above),
        Check("knowledge lost, attention off", lost(attention_off[1], intact[1], chances[1]), most=0.2),
        Check("retrieval lost, SSM heads off", lost(ssm_off[0], intact[0], chances[0]), most=0.2),
    ]
    known = lost(ssm_off[1], intact[1], chances[1])
    said = f"With the SSM heads off, knowledge loses {100 * known.value:.0f}%."
    return judge("C11", model, said, checks)


def restored(
    model: str,
    student: np.ndarray,
    teacher: np.ndarray,
    swaps: Mapping[int, np.ndarray],
    named: Sequence[int],
    chance: float,
) -> Verdict:
    """Claim C12. Answers [n] of the student, the teacher, and the student with one layer replaced; named: layers of
    the teacher's Aggregate heads."""
    if not above_chance(teacher, chance) or not named:
        return Verdict("C12", model, "not testable", "The teacher is at chance, or has no Aggregate head.", {})
    gap = paired_gain(student, teacher)
    if not gap.above:
        return Verdict("C12", model, "not testable", "The student has no gap to the teacher to close.", {"gap": gap})
    best = max(swaps, key=lambda layer: swaps[layer].mean())
    closes = closed(student, teacher, swaps[best])
    said = f"Layer {best} helps most; the Aggregate head sits in layer {', '.join(map(str, named))}."
    checks = [
        Check(f"share of the gap closed by layer {best}", closes, least=1 / 3, there=closes.above and best in named)
    ]
    wrong = "" if best in named else "The best layer is not the Aggregate head's."
    return judge("C12", model, said, checks, wrong)


def head_alone(model: str, student: np.ndarray, layer: np.ndarray, head: np.ndarray, names: tuple[str, int]) -> Verdict:
    """Claim C13. Answers [n] of the student, with the best layer replaced, with the head alone grafted; names: the
    head's and the layer's."""
    gain = paired_gain(student, layer)
    if not gain.above:
        return Verdict("C13", model, "not testable", "The best layer brings no gain to compare with.", {"gain": gain})
    part = closed(student, layer, head)
    said = f"{names[0]} alone, against layer {names[1]} whole."
    return judge("C13", model, said, [Check("share of the layer's gain", part, least=0.75, there=part.above)])


def closed(student: np.ndarray, teacher: np.ndarray, swap: np.ndarray) -> Interval:
    """Share of the gap between student and teacher that a swap closes; all [n], on the same questions."""
    both = np.stack([student, teacher, swap]).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return bootstrap(lambda g: (g[2].mean() - g[0].mean()) / (g[1].mean() - g[0].mean()), both)
