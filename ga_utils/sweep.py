"""What does every head do? The effect of masking each head alone on the answers to a task.

A plain loop costs one full forward for each head. Two facts save most of that, exactly. A variant with a head masked in
layer l equals the intact model below l. And masks that begin at the prompt's last token (the position from which an
Aggregate head reads) leave all earlier positions as they were. So the prompt runs once, and every variant is a row of
one batch over the last token that joins it at its own layer; masks at all positions reuse the intact model's hidden
states below theirs (`variants.py`, `layer_rows.py`).

A faster way is taken only after it agreed with the plain one on this very model, on one example and three heads.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from .caches import EXACT, INEXACT, structure_key
from .candidates import Tree, cache_policy
from .errors import GAError, TaskError, say_once
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .layer_rows import LayerRows
from .masking import mask_heads
from .scoring import Scores, _check_length, score
from .tasks.base import Example, Task, as_task
from .tasks.tokens import EncodedExample, EncodedTask, encode_whole
from .variant_calls import Way, plain_tokens
from .variants import Fills, Variants, out_of_memory

#: bytes that the variants in one batch may take, roughly, beside the model and one intact run
CACHE_BUDGET = 2_000_000_000
#: largest difference between a faster way and the plain one, in units of log-probability
TOLERANCE = 1e-4
#: the same in half precision, where rounding alone gives some hundredths: only for families whose ways were compared
# in float32
HALF_TOLERANCE = 0.1
#: families of `INEXACT` whose caches continue exactly by pieces of two tokens or more, which clamp as prefill does
PIECES = frozenset({"zamba2", "nemotron_h"})


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep_heads`: h heads, n examples in the task's order.

    intact_correct [n] and intact_logprob [n] (the answer's log-probability, nats); correct [h, n] and logprob [h, n]
    with that head masked. scored: what `correct` means, see `sweep_heads`. shared: whether the prompt's forward was
    shared; calls and tokens: forward passes and token positions that it took.

    way: "growing" (prompt shared, variants join at their layer), "shared" (prompt shared, variants in all layers),
    "reused" (hidden states below a variant's layer reused) or "plain". token_layers: tokens times layers that were
    computed, counted as the layers ran; check_token_layers: those of the comparison with the plain way, beside them;
    plain_token_layers: what a loop of one full forward for each head takes.
    """

    heads: tuple[Head, ...]
    intact_correct: np.ndarray
    intact_logprob: np.ndarray
    correct: np.ndarray
    logprob: np.ndarray
    scored: str
    shared: bool
    calls: int
    tokens: int
    way: str = ""
    token_layers: int = 0
    check_token_layers: int = 0
    plain_token_layers: int = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """What was measured for each head and example, for the arrays beside a record."""
        names = ("intact_correct", "intact_logprob", "correct", "logprob")
        return {name: getattr(self, name) for name in names}


def sweep_heads(
    lm: LanguageModel,
    task: Task | Sequence[Example],
    heads: object = None,
    positions: str = "answer",
    scored: str = "candidates",
    shared: bool | None = None,
    progress: bool = False,
    fill: str = "zero",
    reference: Sequence[str] | None = None,
    budget: int | None = None,
) -> Sweep:
    """Mask each of `heads` (default: all) alone and score every example of `task`.

    scored: with "candidates" an answer is correct if it is the likeliest candidate, which costs a step for each
    branching point of the candidates' tokens; with "answer" if greedy choice over the whole vocabulary says it,
    which costs a step for each token of the answer. The answer's log-probability is the same in both.

    positions: "answer" (the prompt's last token and the tokens of the candidates), "last" (the prompt's last token
    only) or "all", as in `masking`; fill and reference as in `mask_heads`. shared: None takes the fastest way that is
    exact on this model; False takes one full forward for each head; True insists on a shared prompt. budget: bytes
    that the variants in one batch may take, `CACHE_BUDGET` by default; when memory runs out, batches are halved.

    Raises `HeadError` for a head that does not exist, `TaskError` for positions that are not known, for a budget that
    holds not even one variant and where `shared` is insisted on but not exact, and `GAError` for a wrong `fill`.
    """
    chosen = tuple(lm.head_list()) if heads is None else parse_heads(heads)
    for head in chosen:
        lm.site(head)
    budget = CACHE_BUDGET if budget is None else budget
    _check_arguments(positions, scored, budget, chosen)
    task = as_task(task)
    encoded = encode_whole(lm.tokenizer, task)
    if scored == "answer":
        encoded = replace(encoded, items=tuple(map(_answer_alone, encoded.items)))
    _check_length(lm, encoded)
    items = encoded.items
    with mask_heads(lm, chosen[0], positions, fill, reference):
        pass  # complains about fill, reference and the model before any long work starts
    if fill == "resample" and len(reference) != len(items):
        raise GAError(f"There are {len(reference)} reference prompts for {len(items)} examples: give one for each.")
    trees = [Tree(i, item) for i, item in enumerate(items)]
    fills = Fills(lm, chosen, positions, fill, reference)
    fills.check_lengths(trees)
    if shared is False:
        return _plain(lm, encoded, chosen, positions, scored, fill, reference, progress)
    if shared and positions == "all":
        raise TaskError(
            f"The prompt's forward cannot be shared on {lm.name}: masks at all positions change the whole prompt."
        )
    branching = [t for t in trees if len(t.nodes) > len(t.chain) + 1]
    steps = False
    if branching or positions != "all":
        _, how = cache_policy(lm, min(branching or trees, key=lambda t: t.length))
        steps, mask_steps = how is not None, bool(how)
    else:
        mask_steps = True
    # where steps of one token are inexact, pieces of two or more may do, unless the cache itself is at fault
    pieces = lm.family not in INEXACT or lm.family in PIECES
    ways = _ways(positions, steps or (positions == "all" and not branching), pieces)
    if shared:
        ways = [w for w in ways if w.prompt]
        if not ways:
            raise TaskError(f"The prompt's forward cannot be shared on {lm.name}: {INEXACT[lm.family]}.")
    # the example that shows most: one with branches where there is one
    shown = min(branching or trees, key=lambda t: t.length)
    way, why, check = _judge(lm, encoded, shown, chosen, positions, fill, reference, ways, mask_steps, budget)
    if way is None:
        if shared:
            raise TaskError(f"The prompt's forward cannot be shared on {lm.name}: {why}.")
        say_once(f"sweep {lm.family} plain", f"The sweep takes one full forward a head on {lm.name}: {why}.")
        plain = _plain(lm, encoded, chosen, positions, scored, fill, reference, progress)
        return replace(plain, check_token_layers=check)
    _say(lm, positions, way, why)
    variants = Variants(lm, chosen, positions, fills, way, mask_steps, budget)
    h, n = len(chosen), len(items)
    correct, logprob = np.zeros((h + 1, n), bool), np.zeros((h + 1, n))
    for i in tqdm(range(n), unit="question", disable=not progress, desc=f"sweep of {h} heads"):
        sums, greedy = variants.ask(i, items[i])
        correct[:, i] = greedy if scored == "answer" else sums.argmax(1) == items[i].answer
        logprob[:, i] = sums[:, items[i].answer]
    return Sweep(
        chosen, correct[0], logprob[0], correct[1:], logprob[1:], scored, way.prompt, variants.forward.calls,
        variants.forward.tokens, way.name, variants.layers.token_layers, check,
        (h + 1) * lm.n_layers * sum(plain_tokens(t, steps) for t in trees),
    )  # fmt: skip


def _check_arguments(positions: str, scored: str, budget: int, heads: Sequence[Head]) -> None:
    if positions not in ("answer", "last", "all"):
        raise TaskError(f"positions={positions!r} is unknown in a sweep: use 'answer', 'last' or 'all'.")
    if scored not in ("candidates", "answer"):
        raise TaskError(f"scored={scored!r} is unknown in a sweep: use 'candidates' or 'answer'.")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise TaskError(f"budget={budget!r} must be a number of bytes, an integer of 1 or more.")
    if not heads:
        raise TaskError("No head was named to sweep.")


def _answer_alone(item: EncodedExample) -> EncodedExample:
    return replace(item, continuations=(item.continuations[item.answer],), answer=0)


def _plain(lm, encoded: EncodedTask, heads, positions, scored, fill, reference, progress) -> Sweep:
    def correct(s: Scores) -> np.ndarray:
        return s.full_vocab_correct if scored == "answer" else s.correct

    layers = LayerRows(lm)
    with layers.counting():
        intact = score(lm, encoded)
        results = []
        for head in tqdm(heads, unit="head", disable=not progress, desc=f"sweep of {len(heads)} heads"):
            with mask_heads(lm, head, positions, fill, reference):
                results.append(score(lm, encoded))
    every = [intact, *results]
    return Sweep(
        tuple(heads), correct(intact), intact.answer_logprob, np.stack([correct(r) for r in results]),
        np.stack([r.answer_logprob for r in results]), scored, False, sum(r.calls for r in every),
        sum(r.tokens for r in every), "plain", layers.token_layers, 0, layers.token_layers,
    )  # fmt: skip


def _ways(positions: str, steps: bool, pieces: bool) -> list[Way]:
    """The ways to try, fastest first; steps, pieces: whether the cache may be continued by one token, by several."""
    reused = [Way("reused", prompt=False, steps=True)] if steps and positions == "all" else []
    whole = [*reused, Way("reused", prompt=False, steps=False)]
    if positions == "all":
        return whole
    if steps:
        return [Way("growing", True, True), Way("shared", True, True, grow=False), *whole]
    return [Way("growing", True, False), *whole] if pieces else whole


_judged: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> {what was compared: (way, why)}


def _judge(
    lm, encoded: EncodedTask, shown: Tree, heads, positions, fill, reference, ways: list[Way], mask_steps: bool, budget
) -> tuple[Way | None, str, int]:
    """(the first way that agrees with the plain one, why those before it do not, token-layers that this took).

    Compared on the example `shown`, on the intact model and on a first, a middle and a last head, once for each model.
    """
    few = tuple(dict.fromkeys([heads[0], heads[len(heads) // 2], heads[-1]]))
    known = _judged.setdefault(lm.model, {})
    shape = (len(shown.nodes) > 1, len(shown.nodes) > len(shown.chain) + 1)
    key = (_state(lm), few, positions, fill, mask_steps, shape, tuple(ways))
    if key in known:
        return *known[key], 0
    number = shown.number
    if fill == "resample":
        reference = [reference[number]]
    examples = encoded.task.examples[number : number + 1]
    one = replace(encoded, task=replace(encoded.task, examples=examples), items=(shown.item,))
    layers = LayerRows(lm)
    with layers.counting():
        plain = [score(lm, one).logprobs[0]]
        for head in few:
            with mask_heads(lm, head, positions, fill, reference):
                plain.append(score(lm, one).logprobs[0])
    spent, why = layers.token_layers, ""
    half = lm.dtype not in (torch.float32, torch.float64)
    bound = HALF_TOLERANCE if half and lm.family in EXACT | INEXACT.keys() else TOLERANCE
    fills = Fills(lm, few, positions, fill, reference)
    for way in ways:
        variants = Variants(lm, few, positions, fills, way, mask_steps, budget)
        try:
            sums, _ = variants.ask(0, shown.item)
        except TaskError:
            raise  # the budget, which no other way fits better
        except (GAError, TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        else:
            worst = float(np.abs(sums - np.stack(plain)).max())
            reason = "" if worst <= bound else f"log-probabilities differ by {worst:.1e} (bound {bound:g})"
        spent += variants.layers.token_layers
        if not reason:
            known[key] = way, why
            return way, why, spent
        why = why or f"the faster way was compared with full forwards and not trusted: {reason}"
    known[key] = None, why
    return None, why, spent


def _state(lm: LanguageModel) -> tuple:
    """Changes when modules or hooks do; hooks by their handles' numbers, which are never given twice."""
    hooks = [k for m in lm.model.modules() for k in (*m._forward_pre_hooks, *m._forward_hooks)]
    return structure_key(lm.model), str(lm.device), lm.dtype, tuple(hooks)


def _say(lm: LanguageModel, positions: str, way: Way, why: str) -> None:
    """Say once where another way than usual is taken."""
    if positions != "all" and not way.prompt and not why:
        why = f"its cache does not continue exactly ({INEXACT[lm.family]})"
    if why:
        how = "in all layers" if way.name == "shared" else "over the whole prompt (above its masked layer)"
        say_once(f"sweep {lm.family} {way}", f"The sweep runs each variant of {lm.name} {how}: {why}.")
    elif positions != "all" and not way.steps and way.prompt:
        say_once(
            f"sweep {lm.family} {way}",
            f"The sweep feeds each variant of {lm.name} the prompt's last two tokens, or its last and a candidate's, "
            "as one piece, because steps of one token do not continue its cache exactly; this agreed with full "
            "forwards.",
        )
