"""Which heads are the Aggregate heads? By what single-head masks cost, on examples that no result is reported on."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pandas as pd

from .errors import TaskError
from .heads import Head
from .sweep import Sweep

#: level of the test for one head, before correction for the number of heads tested
ALPHA = 0.05


def effects(sweep: Sweep) -> pd.DataFrame:
    """One row for each head, strongest first: what masking it alone costs.

    loss: mean loss of the answer's log-probability (nats); se: its standard error over examples (paired); z: loss / se;
    points: loss of accuracy in points; significant: z beyond the one-sided normal quantile of ALPHA divided by the
    number of heads (Bonferroni).
    """
    n = sweep.logprob.shape[1]
    if n < 2:
        raise TaskError("A sweep over one example tells nothing about chance: give two or more.")
    loss = sweep.intact_logprob[None] - sweep.logprob
    se = loss.std(axis=1, ddof=1) / np.sqrt(n)
    z = loss.mean(1) / np.maximum(se, 1e-12)
    bound = NormalDist().inv_cdf(1 - ALPHA / len(sweep.heads))
    table = pd.DataFrame(
        {
            "head": [str(h) for h in sweep.heads],
            "layer": [h.layer for h in sweep.heads],
            "index": [h.index for h in sweep.heads],
            "loss": loss.mean(1),
            "se": se,
            "z": z,
            "points": 100 * (sweep.intact_correct.mean() - sweep.correct.mean(1)),
            "significant": z > bound,
        }
    )
    return table.sort_values("loss", ascending=False, ignore_index=True)


def select_heads(sweep: Sweep, share: float = 1 / 3, most: int = 8) -> list[Head]:
    """The heads that a figure masks, strongest first, by a fixed rule.

    Those whose loss is significant after correction for all heads tested and at least `share` of the strongest
    head's, at most `most`. Raises `TaskError` if there are none: the model does not do this task by any single head,
    or there were too few examples to tell.
    """
    table = effects(sweep)
    chosen = table[table.significant & (table.loss >= share * table.loss.max())].head(most)
    if chosen.empty:
        raise TaskError(
            f"No head stands out among {len(table)} on {sweep.logprob.shape[1]} examples: the strongest, "
            f"{table['head'][0]}, costs {table.loss[0]:.3f} nats (z = {table.z[0]:.1f}). More examples may "
            "tell, or the model does not do this task by single heads."
        )
    by_name = {str(h): h for h in sweep.heads}
    return [by_name[name] for name in chosen["head"]]


def in_words(table: pd.DataFrame) -> str:
    """How many heads of an `effects` table matter, and whether one stands in the way, as a sentence or two."""
    text = f"{int(table.significant.sum())} of {len(table)} heads cost something beyond doubt."
    last = table.iloc[-1]
    if last.z < -NormalDist().inv_cdf(1 - ALPHA / len(table)):
        text += (
            f" Masking {last['head']} *raises* the right answer's log-probability by {-last.loss:.2f} nats, beyond "
            "doubt too: not every head that matters here helps."
        )
    return text
