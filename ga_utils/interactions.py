"""What do heads do to the answer of paired prompts, alone and two at a time?

Effects are losses of the logit difference between the answers of a prompt and of its swapped counterpart
(`counterfactual.py`), or of the answer's log-probability; all standard errors are of differences on the same examples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from .counterfactual import Pairs, check_pairs, logit_difference
from .errors import GAError, HeadError, TaskError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .masking import mask_heads
from .positions import Positions
from .scoring import score
from .tasks.base import Example, Task, as_task
from .tasks.tokens import encode

FILLS = ("zero", "mean", "swapped")


def paired_effects(
    lm: LanguageModel,
    pairs: Pairs,
    heads: object = None,
    positions: Positions = "answer",
    fill: str = "zero",
) -> pd.DataFrame:
    """One row for each of `heads` (default: all), strongest first: what masking it alone takes off `logit_difference`.

    effect: mean over examples of intact less masked (nats; positive: the head speaks for the answer), se: its standard
    error (paired), z: effect / se. fill: "zero", "mean" (the head's mean output over all prompts of both kinds) or
    "swapped" (its output at the same position of the swapped prompt: what the head adds beyond what it does on any such
    prompt; with positions="all", at all positions of the prompt, since the swapped prompt has no others).

    A model that is right in all examples, or wrong in most, shows no loss of accuracy where this shows one; and a head
    that raises one letter on every prompt has no effect here, since it raises it in the answer's term as often as in
    the other's.
    """
    chosen = _heads(lm, heads)
    check_pairs(lm, pairs)
    at_least_two(len(pairs))
    arguments = fill_arguments(lm, pairs, fill)
    if fill == "swapped" and positions in (None, "all"):
        positions = [range(len(item.context)) for item in encode(lm.tokenizer, pairs.task).items]
    intact, rows = logit_difference(lm, pairs), []
    for head in chosen:
        with mask_heads(lm, head, positions, **arguments):
            change = intact - logit_difference(lm, pairs)
        effect, se = mean_se(change)
        rows.append({"head": str(head), "layer": head.layer, "index": head.index, "effect": effect, "se": se})
    table = pd.DataFrame(rows)
    table["z"] = table.effect / np.maximum(table.se, 1e-12)
    return table.sort_values("effect", ascending=False, ignore_index=True)


def interaction(
    lm: LanguageModel,
    task: Task | Sequence[Example] | Pairs,
    gather_heads: object,
    aggregate_heads: object,
    positions: tuple[Positions, Positions] = ("all", "answer"),
) -> pd.DataFrame:
    """Do two heads work on one path? Each Gather and each Aggregate head masked alone, and every pair of them.

    gather_effect, aggregate_effect, joint: mean loss of the answer's log-probability (of the logit difference, where
    `task` is `Pairs`) with the first, the second and both masked with zero, in nats; interaction: joint less the sum of
    the two; each with its standard error (`_se`, paired over examples). positions: where the Gather and where the
    Aggregate head is masked. can_feed: whether the Gather head lies in an earlier layer, adjacent or not.

    0: the two work apart. Negative: the second loss costs less once the first is there, as when one head passes on what
    the other wrote. Positive: either stands in for the other. A negative number alone proves no path: where each loss
    takes nearly all there is to lose, both together cannot cost more than that. So compare random heads whose own
    effect is as large, and see `paths.path_effects`.
    """
    first, second = _heads(lm, gather_heads), _heads(lm, aggregate_heads)
    both = set(first) & set(second)
    if both:
        raise HeadError(f"{min(both)} is named as a Gather and as an Aggregate head: it cannot interact with itself.")
    if not isinstance(positions, tuple) or len(positions) != 2:
        raise HeadError(f"positions={positions!r:.60} must be a pair: for the Gather and for the Aggregate heads.")
    if isinstance(task, Pairs):
        check_pairs(lm, task)
    else:
        task = as_task(task)
    at_least_two(len(task))

    def measure() -> np.ndarray:
        return logit_difference(lm, task) if isinstance(task, Pairs) else score(lm, task).answer_logprob

    def masked(head: Head, where: Positions) -> np.ndarray:
        with mask_heads(lm, head, where):
            return intact - measure()

    intact = measure()
    alone = {head: masked(head, positions[1]) for head in second}
    rows = []
    for g in first:
        g_loss = masked(g, positions[0])
        for a in second:
            with mask_heads(lm, g, positions[0]):
                joint = masked(a, positions[1])
            row = {"gather_head": str(g), "aggregate_head": str(a), "can_feed": g.layer < a.layer}
            parts = {"gather_effect": g_loss, "aggregate_effect": alone[a], "joint": joint}
            for name, values in (parts | {"interaction": joint - g_loss - alone[a]}).items():
                row[name], row[f"{name.removesuffix('_effect')}_se"] = mean_se(values)
            rows.append(row)
    return pd.DataFrame(rows)


def mean_se(values: np.ndarray) -> tuple[float, float]:
    """Mean over examples ``[n]`` and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def fill_arguments(lm: LanguageModel, pairs: Pairs, fill: str) -> dict[str, object]:
    """The `fill` and `reference` that `mask_heads` takes for one of `FILLS`."""
    if fill not in FILLS:
        raise GAError(f"fill={fill!r} is unknown: use {', '.join(map(repr, FILLS[:-1]))} or {FILLS[-1]!r}.")
    if fill == "zero":
        return {"fill": "zero"}
    tasks = (pairs.swapped,) if fill == "swapped" else (pairs.task, pairs.swapped)
    for task in tasks:  # mask_heads tokenises its references by itself: they must come out as the questions do
        for number, item in enumerate(encode(lm.tokenizer, task).items):
            if tuple(lm.tokenizer(task.examples[number].prompt)["input_ids"]) != item.context:
                raise TaskError(
                    f"fill={fill!r} cannot be used with example {number} of task {task.name!r}: its prompt has other "
                    "tokens alone than as a question (special tokens of a chat template, or a merge with the answer); "
                    "use fill='zero'."
                )
    prompts = [e.prompt for task in tasks for e in task.examples]
    return {"fill": "resample" if fill == "swapped" else "mean", "reference": prompts}


def _heads(lm: LanguageModel, heads: object) -> tuple[Head, ...]:
    chosen = tuple(lm.head_list()) if heads is None else parse_heads(heads)
    if not chosen:
        raise HeadError("No head was named: give names such as 'L17H24'.")
    return tuple(dict.fromkeys(lm.site(h).head(h.index) for h in chosen))


def at_least_two(n: int) -> None:
    if n < 2:
        raise TaskError("One example tells nothing about chance: give two or more.")
