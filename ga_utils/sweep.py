"""What does every head do? The effect of masking each head alone on the answers to a task.

Masks that begin at the prompt's last token (the position from which an Aggregate head reads) leave all earlier
positions as in the intact run, so their keys and values can be shared: the prompt runs once, then every head's variant
is a row of one batch over the last token and the candidates' tokens. A plain loop costs one full forward for each head.
The shared way is taken only on architectures whose caches continue exactly, and only after it agreed on this model with
the plain way.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .caches import Forward
from .candidates import Node, Tree, cache_policy
from .errors import TaskError, say_once
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .masking import check_input, mask_heads
from .scoring import Scores, score
from .sites import HeadSite
from .tasks.base import Example, Task, as_task
from .tasks.tokens import EncodedExample, encode

#: bytes of keys and values that the variants of one example may hold at once
CACHE_BUDGET = 2_000_000_000
#: largest difference between the two ways, in units of log-probability
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Sweep:
    """The result of `sweep_heads`: h heads, n examples in the task's order.

    intact_correct [n] and intact_logprob [n] (the answer's log-probability, nats); correct [h, n] and logprob [h, n]
    with that head masked. scored: what `correct` means, see `sweep_heads`. shared: whether the prompt's forward was
    shared; calls and tokens: forward passes and token positions that it took.
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
) -> Sweep:
    """Mask each of `heads` (default: all) alone, with zero, and score every example of `task`.

    scored: with "candidates" an answer is correct if it is the likeliest candidate, which costs a step for each
    branching point of the candidates' tokens; with "answer" if greedy choice over the whole vocabulary says it,
    which costs a step for each token of the answer. The answer's log-probability is the same in both.

    positions: "answer" (the prompt's last token and the tokens of the candidates) or "last" (the prompt's last token
    only), as in `masking`; "all" works, one full forward for each head. shared: None shares the prompt's forward
    where that is exact; False never; True insists. Raises `HeadError` for a head that does not exist and `TaskError`
    for positions that are not known, or if `shared` is insisted on where it is not exact.
    """
    chosen = tuple(lm.head_list()) if heads is None else parse_heads(heads)
    for head in chosen:
        lm.site(head)
    if positions not in ("answer", "last", "all"):
        raise TaskError(f"positions={positions!r} is unknown in a sweep: use 'answer', 'last' or 'all'.")
    if scored not in ("candidates", "answer"):
        raise TaskError(f"scored={scored!r} is unknown in a sweep: use 'candidates' or 'answer'.")
    if not chosen:
        raise TaskError("No head was named to sweep.")
    task = as_task(task)
    encoded = encode(lm.tokenizer, task)
    why = "masks at all positions change the whole prompt" if positions == "all" else ""
    items = encoded.items
    forward = Forward(lm)
    steps_take_mask = True
    if not why and shared is not False:
        shortest = min(range(len(items)), key=lambda i: len(items[i].context))
        _, how = cache_policy(lm, Tree(shortest, items[shortest]))
        why = "its cache does not continue exactly" if how is None else ""
        steps_take_mask = bool(how)
        if not why:
            worst = _disagreement(lm, forward, task, items[shortest], shortest, chosen, positions, steps_take_mask)
            if not worst <= TOLERANCE:
                why = f"shared and plain sweeps differ by {worst:.1e} in log-probability (bound {TOLERANCE:g})"
    if why and shared:
        raise TaskError(f"The prompt's forward cannot be shared on {lm.name}: {why}.")
    if why or shared is False:
        if why:
            say_once(f"sweep {lm.family} {why[:20]}", f"The sweep takes one full forward a head on {lm.name}: {why}.")
        return _plain(lm, task, chosen, positions, scored, progress)
    masks = _RowMasks(lm, chosen)
    h, n = len(chosen), len(items)
    correct, logprob = np.zeros((h + 1, n), bool), np.zeros((h + 1, n))
    for i in tqdm(range(n), unit="question", disable=not progress, desc=f"sweep of {h} heads"):
        item = items[i] if scored == "candidates" else _answer_alone(items[i])
        sums, greedy = _variants(forward, masks, i, item, positions, steps_take_mask)
        correct[:, i] = greedy if scored == "answer" else sums.argmax(1) == item.answer
        logprob[:, i] = sums[:, item.answer]
    return Sweep(chosen, correct[0], logprob[0], correct[1:], logprob[1:], scored, True, forward.calls, forward.tokens)


def _answer_alone(item: EncodedExample) -> EncodedExample:
    return replace(item, continuations=(item.continuations[item.answer],), answer=0)


def _plain(lm: LanguageModel, task: Task, heads: Sequence[Head], positions: str, scored: str, progress: bool) -> Sweep:
    def correct(s: Scores) -> np.ndarray:
        return s.full_vocab_correct if scored == "answer" else s.correct

    intact = score(lm, task)
    results, calls, tokens = [], intact.calls, intact.tokens
    for head in tqdm(heads, unit="head", disable=not progress, desc=f"sweep of {len(heads)} heads"):
        with mask_heads(lm, head, positions):
            one = score(lm, task)
        results.append(one)
        calls, tokens = calls + one.calls, tokens + one.tokens
    return Sweep(
        tuple(heads), correct(intact), intact.answer_logprob, np.stack([correct(r) for r in results]),
        np.stack([r.answer_logprob for r in results]), scored, False, calls, tokens,
    )  # fmt: skip


class _RowMasks:
    """Row 0 of a batch is intact and row i + 1 lacks head i, at every position of the forward calls inside."""

    def __init__(self, lm: LanguageModel, heads: Sequence[Head]):
        self.heads = heads
        self.sites: dict[HeadSite, list[tuple[int, int]]] = {}
        for row, head in enumerate(heads, 1):
            self.sites.setdefault(lm.site(head), []).append((row, head.index))

    @contextlib.contextmanager
    def on(self, rows: range) -> Iterator[None]:
        """Mask inside the block; the batch holds the given rows, in order."""
        handles = []
        try:
            for site, pairs in self.sites.items():
                here = [(row - rows.start, index) for row, index in pairs if row in rows]
                if here:
                    handles.append(site.proj.register_forward_pre_hook(self._hook(site, here)))
            yield
        finally:
            for h in handles:
                h.remove()

    @staticmethod
    def _hook(site: HeadSite, here: list[tuple[int, int]]):
        def mask(module, args):
            x, *rest = args
            check_input(site, x)
            x = x.clone()
            for row, index in here:
                x[row, :, site.channels(index)] = 0
            return (x, *rest)

        return mask


def _variants(
    forward: Forward, masks: _RowMasks, number: int, item: EncodedExample, positions: str, steps_take_mask: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each candidate in each variant, [h + 1, candidates] float64, and whether the greedy
    continuation is the answer, [h + 1]."""
    tree = Tree(number, item)
    context = item.context
    cache = None
    most = len(masks.heads) + 1
    if len(context) > 1:
        _, cache = forward([context[:-1]], [[len(context) - 2]], [number], [len(context)], keep_cache=True)
        most = max(1, min(most, CACHE_BUDGET // (2 * _cache_bytes(cache) or 1)))
    sums, greedy = [], []
    answer = item.continuations[item.answer]
    for start in range(0, len(masks.heads) + 1, most):
        rows = range(start, min(start + most, len(masks.heads) + 1))
        branch = copy.deepcopy(cache)
        if branch is not None:
            branch.reorder_cache(torch.zeros(len(rows), dtype=torch.long, device=forward.lm.device))
        logprob: dict[tuple[Node, int | None], Tensor] = {}
        with masks.on(rows):
            state = _step(forward, tree, (), context[-1], rows, branch, len(context) - 1, steps_take_mask, logprob)
        with masks.on(rows) if positions == "answer" else contextlib.nullcontext():
            _below(forward, tree, (), rows, state, len(context), steps_take_mask, logprob)
        sums.append(torch.stack([sum(logprob[c[:d], c[d]] for d in range(len(c))) for c in item.continuations], dim=1))
        greedy.append(torch.stack([logprob[answer[:d], None] == answer[d] for d in range(len(answer))]).all(0))
    return torch.cat(sums).cpu().numpy(), torch.cat(greedy).cpu().numpy()


def _step(forward, tree, node, token, rows, cache, past, steps_take_mask, logprob):
    """Feed one token to every row and return the cache.

    Keeps the log-probabilities [rows] of the tokens that may follow `node`, and under None the likeliest token of all.
    """
    count = len(rows)
    # the first token of a text has no cache to be passed a mask beside
    mask = steps_take_mask or cache is None
    logits, cache = forward(
        [[token]] * count,
        [[0]] * count,
        [tree.number] * count,
        [len(tree.item.context)] * count,
        past,
        cache,
        True,
        mask,
    )
    logits = logits[:, 0]
    total = logits.logsumexp(-1).double()
    for following in tree.nodes[node]:
        logprob[node, following] = logits[:, following].double() - total
    logprob[node, None] = logits.argmax(-1)
    return cache


def _below(forward, tree, node, rows, cache, past, steps_take_mask, logprob):
    """Walk down the candidates' tree; each child continues from its own copy of the cache."""
    children = tree.children(node)
    for child in children:
        branch = cache if child is children[-1] else copy.deepcopy(cache)
        state = _step(forward, tree, child, child[-1], rows, branch, past, steps_take_mask, logprob)
        _below(forward, tree, child, rows, state, past + 1, steps_take_mask, logprob)


def _cache_bytes(cache: object) -> int:
    """Bytes of the tensors that a cache holds, wherever it keeps them."""
    seen: set[int] = set()

    def count(value: object, depth: int) -> int:
        if isinstance(value, Tensor):
            return value.numel() * value.element_size()
        if id(value) in seen or depth > 4:
            return 0
        seen.add(id(value))
        if isinstance(value, dict):
            return sum(count(v, depth + 1) for v in value.values())
        if isinstance(value, (list, tuple)):
            return sum(count(v, depth + 1) for v in value)
        return count(vars(value), depth + 1) if hasattr(value, "__dict__") else 0

    return count(cache, 0)


def _disagreement(lm, forward, task, item, number, heads, positions, steps_take_mask) -> float:
    """Largest difference in the candidates' log-probabilities between the shared and the plain way, on one example.

    Tried on the intact model and on a first, a middle and a last head.
    """
    few = tuple(dict.fromkeys([heads[0], heads[len(heads) // 2], heads[-1]]))
    shared, _ = _variants(forward, _RowMasks(lm, few), number, item, positions, steps_take_mask)
    example = [task.examples[number]]
    special = task.special_tokens
    plain = [score(lm, example, special_tokens=special).logprobs[0]]
    for head in few:
        with mask_heads(lm, head, positions):
            plain.append(score(lm, example, special_tokens=special).logprobs[0])
    return float(np.abs(shared - np.stack(plain)).max())
