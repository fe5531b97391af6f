"""Do letters hang on single layers and single heads? Claims C1 to C5 (Figures 2 and 3, Table 1), by stated rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .claims import Verdict
from .claims_rules import Check, above_chance, judge, lost, share

C1 = "Letter accuracy hangs on one layer: cutting layers from the top leaves it flat until one layer goes (Figure 2)."
C1_RULE = (
    "Of the intact model's score above chance, letters keep at least 0.9 at every cut down to the minimal model; the "
    "next "
    "cut loses at least half of it, while knowledge loses under a fifth in that step."
)
C2 = "Little knowledge suffices for the letter task: in the paper about 30% of the original score (Figure 2, abstract)."
C2_RULE = (
    "In the minimal model the letter share is at least 0.9, and the knowledge share, reported with its interval "
    "beside the "
    "paper's 0.3, is at most 0.6."
)
C3 = "Two layers matter together, and only for the letter (Figure 3)."
C3_RULE = (
    "From the minimal model one layer is taken out at a time. The layers of the Gather and Aggregate heads, found "
    "elsewhere, each cost over half of the letter share and under a fifth of knowledge; no other layer does."
)
C4 = "One Gather or one Aggregate head decides (Table 1)."
C4_RULE = (
    "In the minimal model, masking the strongest Gather head, or the strongest Aggregate head, costs over half of "
    "the letter "
    "share and under a fifth of knowledge; one random head of the same layers costs under a tenth."
)
C5 = "The Gather and Aggregate heads alone suffice in their layers (Table 1, section 4.3)."
C5_RULE = (
    "In the minimal model, with all other heads of their layers masked, both kinds together keep at least 0.8 of the "
    "letter "
    "share, each kind alone under 0.3."
)

#: (letters correct [n], knowledge correct [m]) of one condition
Pair = tuple[np.ndarray, np.ndarray]


def one_layer(model: str, cuts: Mapping[int, Pair], minimal: int, chances: tuple[float, float]) -> Verdict:
    """Claim C1. cuts: layers kept -> the answers; the largest number is the intact model."""
    full = max(cuts)
    if not above_chance(cuts[full][0], chances[0]):
        return Verdict("C1", model, "not testable", "The intact model is at chance on letters.", {})
    if minimal - 1 not in cuts:
        return Verdict("C1", model, "not", "Even the smallest cut keeps the letters.", {})
    flat = [
        Check(f"letter share, {k} layers", share(cuts[k][0], cuts[full][0], chances[0]), least=0.9)
        for k in sorted(cuts, reverse=True)
        if minimal <= k < full
    ]
    before, after = cuts[minimal], cuts[minimal - 1]
    drop = lost(after[0], before[0], chances[0])
    said = f"Letters hold down to {minimal} layers and lose {100 * drop.value:.0f}% with the next one."
    checks = [
        *flat,
        Check("letters lost in that step", drop, least=0.5, there=drop.above),
        Check("knowledge lost in that step", lost(after[1], before[1], chances[1]), most=0.2),
    ]
    return judge("C1", model, said, checks)


def little_knowledge(model: str, cuts: Mapping[int, Pair], minimal: int, chances: tuple[float, float]) -> Verdict:
    """Claim C2."""
    full = max(cuts)
    if not above_chance(cuts[full][0], chances[0]) or not above_chance(cuts[full][1], chances[1]):
        return Verdict("C2", model, "not testable", "The intact model is at chance on letters or knowledge.", {})
    known = share(cuts[minimal][1], cuts[full][1], chances[1])
    letters = share(cuts[minimal][0], cuts[full][0], chances[0])
    said = (
        f"The minimal model has {minimal} of {full} layers and keeps {100 * known.value:.0f}% of the knowledge score."
    )
    checks = [
        Check("letter share", letters, least=0.9),
        Check("knowledge share (paper: about 0.3)", known, most=0.6, there=known.high < 1),
    ]
    return judge("C2", model, said, checks)


def two_layers(
    model: str, intact: Pair, dropped: Mapping[int, Pair], named: Sequence[int], chances: tuple[float, float]
) -> Verdict:
    """Claim C3. dropped: layer -> the answers without it; named: layers of the Gather and Aggregate heads."""
    named = [layer for layer in named if layer in dropped]
    if not above_chance(intact[0], chances[0]) or not named:
        return Verdict("C3", model, "not testable", "Letters are at chance, or no head has a role.", {})
    checks, alike = [], []
    for layer, (letters, known) in dropped.items():
        a, b = lost(letters, intact[0], chances[0]), lost(known, intact[1], chances[1])
        if layer in named:
            checks.append(Check(f"letters lost without layer {layer}", a, least=0.5, there=a.above))
            checks.append(Check(f"knowledge lost without layer {layer}", b, most=0.2))
        elif a.value > 0.5 and b.value < 0.2:
            alike.append(layer)
    wrong = f"Layers {', '.join(map(str, alike))} do the same without such a head." if alike else ""
    return judge("C3", model, f"The heads' layers are {', '.join(map(str, named))}.", checks, wrong)


def one_head(
    model: str, intact: Pair, masked: Mapping[str, Pair], random: np.ndarray, chances: tuple[float, float]
) -> Verdict:
    """Claim C4. masked: name of the head and its role -> the answers; random [draws, n]: letters without one random
    head of the same layers."""
    if not above_chance(intact[0], chances[0]) or not masked:
        return Verdict("C4", model, "not testable", "Letters are at chance, or no head has a role.", {})
    checks = []
    for name, (letters, known) in masked.items():
        a = lost(letters, intact[0], chances[0])
        checks.append(Check(f"letters lost without {name}", a, least=0.5, there=a.above))
        checks.append(Check(f"knowledge lost without {name}", lost(known, intact[1], chances[1]), most=0.2))
    drawn = lost(random.astype(float).mean(0), intact[0], chances[0])
    checks.append(Check("letters lost without a random head", drawn, most=0.1))
    wrong = "" if len(masked) == 2 else "Only one of the two roles is held by a head."
    return judge("C4", model, f"Masked alone: {', '.join(masked)}.", checks, wrong)


def heads_suffice(model: str, intact: Pair, kept: Mapping[str, Pair], chances: tuple[float, float]) -> Verdict:
    """Claim C5. kept: "both", "gather", "aggregate" -> the answers with only these kept in their layers."""
    if not above_chance(intact[0], chances[0]) or len(kept) < 3:
        return Verdict("C5", model, "not testable", "Letters are at chance, or a role is held by no head.", {})
    both = share(kept["both"][0], intact[0], chances[0])
    checks = [Check("letter share, both kept", both, least=0.8, there=both.above)]
    for name in ("gather", "aggregate"):
        checks.append(Check(f"letter share, only {name} kept", share(kept[name][0], intact[0], chances[0]), most=0.3))
    return judge("C5", model, "", checks)
