"""Do the found heads bear the paper's claims out? Verdicts on how few they are and how deep they sit (C9, C10, C15)."""

from __future__ import annotations

from collections.abc import Sequence

from .claims import Verdict
from .claims_rules import above_chance
from .concentration import Curve
from .heads import Head
from .stats import paired_gain

FEW_CLAIM = "Retrieval sits in a few heads (the paper's central claim)."
FEW_RULE = (
    "Removing fewer than 5% of all heads, the most important first, loses at least half of the score above chance, "
    "while as many random heads cost under a tenth of it. Heads are ranked on other questions. With fewer than 100 "
    "heads not testable: then 5% is fewer than five heads."
)
#: heads that a model must have for `FEW_RULE`
FEWEST = 100
SPREAD_CLAIM = "SSMs spread retrieval over many weak heads, Transformers do not."
SPREAD_RULE = (
    "Counted is the share of the mixers' output width that has to be removed, most important heads first, until half "
    "of the score above chance is lost: the SSM's is at least twice the Transformer's. Point estimates on the measured "
    "grid of head counts, so at most *partly*."
)


def few_heads(curve: Curve) -> Verdict:
    """Apply `FEW_RULE` to one model (claim C10)."""
    if not above_chance(curve.intact, curve.chance):
        return Verdict("C10", curve.model, "not testable", "The intact model is at chance.", {})
    k = curve.under_share
    if curve.n_heads < FEWEST or k is None:
        return Verdict("C10", curve.model, "not testable", f"The model has only {curve.n_heads} heads.", {})
    top, drawn = curve.share(curve.removed[k]), curve.share(curve.random[k])
    intervals = {f"share left without the top {k} heads": top, f"share left without {k} random heads": drawn}
    said = f"The top {k} of {curve.n_heads} heads ({100 * k / curve.n_heads:.1f}%) leave {100 * top.value:.0f}% of the "
    said += f"score above chance, {k} random heads {100 * drawn.value:.0f}%."
    if top.high <= 0.5 and drawn.low >= 0.9:
        return Verdict("C10", curve.model, "reproduced", said, intervals)
    gap = paired_gain(curve.removed[k], curve.random[k].mean(0))
    intervals["random minus top, accuracy"] = gap
    if gap.above:
        return Verdict("C10", curve.model, "partly", said, intervals)
    return Verdict("C10", curve.model, "not", said, intervals)


def spread(transformer: Curve, ssm: Curve) -> Verdict:
    """Apply `SPREAD_RULE` to a Transformer and an SSM that answered the same questions (claim C9)."""
    for curve in (transformer, ssm):
        if not above_chance(curve.intact, curve.chance):
            return Verdict("C9", ssm.model, "not testable", f"{curve.model} is at chance.", {})
    one, other = transformer.half(), ssm.half()
    if one is None:
        return Verdict("C9", ssm.model, "not testable", f"{transformer.model} does not lose half on the grid.", {})
    most = max(ssm.width.values())
    said = f"Half of the score is lost with {100 * one:.0f}% of the width in {transformer.model}, and in {ssm.model} "
    said += (
        f"with {100 * other:.0f}%." if other is not None else f"not with {100 * most:.0f}%, the most that was removed."
    )
    reached = (most if other is None else other) >= 2 * one
    if other is None and not reached:
        return Verdict("C9", ssm.model, "not testable", said + " More would have to be removed to tell.", {})
    return Verdict("C9", ssm.model, "partly" if reached else "not", said, {})


def depths(heads: Sequence[Head], n_layers: int) -> dict[str, float]:
    """Depth of each head (claim C15, reported only): its layer divided by the last layer's number, 0 to 1."""
    return {str(h): h.layer / max(1, n_layers - 1) for h in heads}
