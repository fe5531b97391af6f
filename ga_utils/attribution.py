"""What would masking each head cost, estimated for all heads at once? For models with too many to mask one by one.

To first order, masking a head costs the gradient of the answer's log-probability at the head's output, times what the
mask takes away there: one forward and one backward pass tell it of every head (attribution patching, as it is called
where the change is a patch). Falcon-Mamba has 524,288 channels; the exact sweep of `sweep.py` would take as many
variants of the model. An estimate chooses which heads to measure: `verify` masks the strongest of them in earnest, and
`ranking_quality` says how well the estimate ranks heads whose exact effect is known.

Two corrections; `tests/benchmarks/bench_attribution.py` prints what each gains.

- The softmax of the answer (`corrections`). A model that is sure has almost no gradient of its log-probability left,
  though a mask may overturn the answer. The log-odds of each answer token against all others have no such plateau:
  their change is estimated, and the log-probability follows from it exactly. One backward pass for each answer token.
- Curvature along the mask (`layerwise`, off by default): norms that hide a small change of a strong head but not its
  loss, saturated attention patterns further up, later heads that stand in. The gradient is taken halfway, where all
  heads of one mixer are at half strength: a forward and backward pass for each mixer. It ranks the few strong heads of
  the embedded models far better, and the many weak ones of SmolLM2-135M worse, because the halfway point moves a
  head's neighbours too.

Not corrected without `layerwise`: effects through attention patterns that are saturated, and direct and indirect
effects that cancel to first order. Integrating over more steps, moving all mixers at once, and averaging over dropped
layers helped in some cases and harmed in others, so they are not here. A model of a few dozen heads is better swept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from .discovery import ALPHA
from .errors import GAError, TaskError, say_once
from .gradient_checks import check_differentiable, check_gradients
from .head_gradients import Gradients
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .masking import mask_heads
from .scoring import _check_length
from .sites import HeadSite
from .sweep import Sweep, _answer_alone, sweep_heads
from .tasks.base import Example, Task, as_task
from .tasks.tokens import EncodedExample, encode_whole
from .variants import out_of_memory

#: tokens in one batch, whose activations are all kept for the backward pass
TOKENS_PER_BATCH = {"cpu": 1_024}  # other devices: 2,048
#: how far towards their masks `layerwise` moves the heads of a mixer: to the middle (midpoint rule)
HALFWAY = 0.5


@dataclass(frozen=True)
class Attribution:
    """The result of `attribute`: an estimate of what masking each of h heads alone costs, on n examples.

    effect: float32 [h, n], nats, intact minus masked (positive: the head helps), or None where only means were kept;
    mean [h] and se [h]: mean over examples and its standard error (NaN for one example). forwards and backwards:
    passes made, those that check the gradients included; tokens: token positions fed.
    """

    heads: tuple[Head, ...]
    effect: np.ndarray | None
    mean: np.ndarray
    se: np.ndarray
    n: int
    positions: str
    fill: str
    reference: tuple[str, ...] | None
    corrections: bool
    layerwise: bool
    forwards: int
    backwards: int
    tokens: int

    def top(self, k: int = 20) -> tuple[Head, ...]:
        """The `k` heads that masking should cost most, strongest first."""
        return tuple(self.heads[i] for i in np.argsort(-self.mean, kind="stable")[:k])

    def to_table(self) -> pd.DataFrame:
        """One row for each head, strongest first, with the columns of `discovery.effects` except accuracy.

        loss (nats), se, z: loss / se; significant: z beyond the one-sided normal quantile of `ALPHA` divided by the
        number of heads. It tells that the estimate is not chance, not that it is right: `estimate` is True throughout.
        """
        z = self.mean / np.maximum(self.se, 1e-12)
        table = pd.DataFrame(
            {
                "head": [str(h) for h in self.heads],
                "layer": [h.layer for h in self.heads],
                "index": [h.index for h in self.heads],
                "loss": self.mean,
                "se": self.se,
                "z": z,
                "significant": z > NormalDist().inv_cdf(1 - ALPHA / len(self.heads)),
                "estimate": True,
            }
        )
        return table.sort_values("loss", ascending=False, ignore_index=True, kind="stable")


def attribute(
    lm: LanguageModel,
    task: Task | Sequence[Example],
    heads: object = None,
    positions: str = "answer",
    fill: str = "zero",
    corrections: bool = True,
    batch_size: int | None = None,
    progress: bool = False,
    *,
    layerwise: bool = False,
    keep: str = "examples",
    reference: Sequence[str] | None = None,
    recompute: bool = False,
) -> Attribution:
    """Estimate what masking each of `heads` (default: all) alone costs of the answer's log-probability, in nats.

    positions: "answer", "last" or "all", and fill: "zero" or "mean" (of the `reference` prompts), as in `mask_heads`.
    corrections and layerwise: see the module's docstring. keep: "examples" keeps every effect [h, n], "mean" only the
    mean and its standard error. batch_size: most examples in a pass; by default as many as 1,024 tokens hold on a CPU,
    2,048 elsewhere, and half as many once memory runs out. recompute: each layer runs again in the backward pass, which
    saves the memory of all other layers' activations for about a third more time.

    Raises `ModelError` for a model that gives no gradients or, by a finite difference on one example, wrong ones (not
    checked in half precision, whose rounding hides the step), `HeadError` for a head that does not exist, `TaskError`
    for positions that are unknown and examples that are too long, and `GAError` for a wrong `fill`, `keep` or
    `batch_size` and for effects that are not finite.
    """
    if positions not in ("answer", "last", "all"):
        raise TaskError(f"positions={positions!r} is unknown in an attribution: use 'answer', 'last' or 'all'.")
    if fill not in ("zero", "mean"):
        raise GAError(f"fill={fill!r} is unknown in an attribution: use 'zero' or 'mean'.")
    if keep not in ("examples", "mean"):
        raise GAError(f"keep={keep!r} is unknown: use 'examples' or 'mean'.")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise GAError(f"batch_size={batch_size!r} must be an integer of 1 or more.")
    check_differentiable(lm)
    chosen, sites, rows = _chosen(lm, heads)
    encoded = encode_whole(lm.tokenizer, as_task(task))
    encoded = replace(encoded, items=tuple(map(_answer_alone, encoded.items)))
    _check_length(lm, encoded)
    with mask_heads(lm, chosen[0], positions, fill, reference):
        pass  # complains about fill and reference before any long work starts
    items = encoded.items
    gradients = Gradients(lm, sites, positions, fill, reference, corrections, recompute)
    shortest = min(range(len(items)), key=lambda i: items[i].longest)
    try:
        check_gradients(gradients, items[shortest], shortest)
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise _too_long(items[shortest]) from error
        raise
    ask = _by_site(gradients) if layerwise else gradients.ask
    kept = np.empty((len(chosen), len(items)), np.float32) if keep == "examples" else None
    sums, squares = np.zeros(len(chosen)), np.zeros(len(chosen))
    most = TOKENS_PER_BATCH.get(lm.device.type, 2_048)
    with tqdm(total=len(items), unit="question", disable=not progress, desc=f"{len(chosen)} heads") as bar:
        for numbers, values, changes in _batches(lm, items, ask, batch_size, most):
            effect = _losses(values.double(), changes.double(), corrections).numpy()[rows]
            if not np.isfinite(effect).all():
                raise GAError(f"Effects on example {numbers[0]} are not finite; check the model's dtype and mask.")
            if kept is not None:
                kept[:, numbers] = effect
            sums += effect.sum(1)
            squares += (effect**2).sum(1)
            bar.update(len(numbers))
    n = len(items)
    mean = sums / n
    variance = np.maximum(squares - n * mean**2, 0) / (n - 1) if n > 1 else np.full(len(chosen), np.nan)
    forward = gradients.forward
    return Attribution(
        chosen, kept, mean, np.sqrt(variance / n), n, positions, fill, None if reference is None else tuple(reference),
        corrections, layerwise, forward.calls, gradients.backwards, forward.tokens,
    )  # fmt: skip


def _chosen(lm: LanguageModel, heads: object) -> tuple[tuple[Head, ...], list[HeadSite], np.ndarray]:
    """(the heads, their sites, and each head's row among all heads of these sites)."""
    if heads is None:
        every = tuple(lm.head_list())
        return every, list(lm.sites), np.arange(len(every))
    chosen = parse_heads(heads)
    if not chosen:
        raise GAError("heads names no head: give names such as 'L17H24', or None for all.")
    where = [lm.site(h) for h in chosen]
    sites = [s for s in lm.sites if s in set(where)]
    first = dict(zip(sites, np.cumsum([0, *(s.n_heads for s in sites[:-1])]), strict=True))
    return chosen, sites, np.array([first[s] + h.index for s, h in zip(where, chosen, strict=True)])


Ask = Callable[[Sequence[EncodedExample], Sequence[int]], tuple[Tensor, Tensor]]


def _by_site(gradients: Gradients) -> Ask:
    def ask(items: Sequence[EncodedExample], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        values = gradients.values(items, numbers)
        parts = [gradients.ask(items, numbers, site, HALFWAY)[1] for site in gradients.sites]
        return values, torch.cat(parts)

    return ask


def _batches(
    lm: LanguageModel, items: Sequence[EncodedExample], ask: Ask, rows: int | None, tokens: int
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """(numbers, values, changes) of examples of like length together; smaller batches once memory has run out."""
    order = sorted(range(len(items)), key=lambda i: (items[i].longest, i))
    start, most = 0, rows
    while start < len(order):
        stop = start + 1
        while stop < len(order) and (
            (stop - start + 1) * items[order[stop]].longest <= tokens if most is None else stop - start < most
        ):
            stop += 1
        numbers = order[start:stop]
        try:
            answer = ask([items[i] for i in numbers], numbers)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if len(numbers) == 1:
                raise _too_long(items[numbers[0]]) from error
            answer, most = None, len(numbers) // 2
        if answer is None:
            if lm.device.type == "cuda":
                torch.cuda.empty_cache()
            say_once(
                f"attribution memory {lm.family}",
                f"Memory ran out with {len(numbers)} examples of {lm.name} at once; attribution goes on with {most}.",
            )
            continue
        yield numbers, *answer
        start = stop


def _too_long(item: EncodedExample) -> GAError:
    return GAError(
        f"Memory ran out on one example of {item.longest} tokens: recompute=True needs less, and so do shorter prompts."
    )


def _losses(values: Tensor, changes: Tensor, margins: bool) -> Tensor:
    """What each head costs of the answer's log-probability [h, b], from `Gradients.ask`.

    A token with log-odds m has log-probability -softplus(-m).
    """
    if not margins:
        return changes.sum(-1)
    softplus = torch.nn.functional.softplus
    return (softplus(changes - values) - softplus(-values)).nansum(-1)


def verify(
    lm: LanguageModel, task: Task | Sequence[Example], attribution: Attribution, top: int = 20, **sweep: object
) -> Sweep:
    """The exact effects of the `top` heads of an attribution, by `sweep_heads` (which takes the rest of the arguments).

    Masks are those of the attribution. Raises `GAError` if `top` is not a number of heads of the attribution.
    """
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= len(attribution.heads):
        raise GAError(
            f"top={top!r} must be an integer from 1 to the {len(attribution.heads)} heads of the attribution."
        )
    return sweep_heads(
        lm, task, attribution.top(top), attribution.positions,
        fill=attribution.fill, reference=attribution.reference, **{"scored": "answer", **sweep},
    )  # fmt: skip


def ranking_quality(attribution: Attribution, sweep: Sweep, top: int = 20) -> dict[str, float]:
    """How well does the estimate rank heads? Over the heads of the sweep that the attribution has too.

    heads: how many these are; top: `top`; recall: share of the exact `top` heads among the estimated `top`; spearman:
    correlation of the ranks, ties at their mean rank; largest: the strongest head's exact loss (nats). Raises `GAError`
    unless both are about equally many examples and share more than `top` heads.
    """
    if sweep.logprob.shape[1] != attribution.n:
        raise GAError(
            f"The sweep is over {sweep.logprob.shape[1]} examples, the attribution over {attribution.n}: compare them "
            "on the same task."
        )
    row = {h: i for i, h in enumerate(attribution.heads)}
    both = [(row[h], i) for i, h in enumerate(sweep.heads) if h in row]
    if not isinstance(top, int) or not 1 <= top < len(both):
        raise GAError(
            f"{len(both)} heads are in both, and top={top!r} must be an integer from 1 to fewer than that: sweep more "
            "heads, or compare fewer."
        )
    here, there = (list(x) for x in zip(*both, strict=True))
    estimate = pd.Series(attribution.mean[here])
    exact = pd.Series((sweep.intact_logprob[None] - sweep.logprob[there]).mean(1))
    found = set(estimate.nlargest(top).index) & set(exact.nlargest(top).index)
    return {
        "heads": len(both),
        "top": top,
        "recall": len(found) / top,
        "spearman": float(estimate.rank().corr(exact.rank())),
        "largest": float(exact.max()),
    }
