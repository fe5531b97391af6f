"""How are all candidates of a question read with the fewest forward passes?

The tokens of the candidates form a tree. A node is a tuple of candidate tokens that is not yet a whole
candidate; at each node the model's distribution of the next token is needed, once. `plain` reads nodes from
full forwards over context + node; `walk` feeds the context once and steps down the tree from the cache. Both
give the same numbers, and `cache_policy` lets `walk` be used only where that was seen on this very model.
Axes: b row, k position, v vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field, replace

import torch

from ga_utils.caches import EXACT, INEXACT, NO_MASK_IN_STEPS, Forward, structure_key
from ga_utils.errors import say_once
from ga_utils.language_model import LanguageModel
from ga_utils.tasks.tokens import EncodedExample, common_prefix

Node = tuple[int, ...]
# Largest difference between cached steps and full forwards, in standard deviations of the logits.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
HALF_TOLERANCE = 0.1  # rounding alone gives some hundredths
#: a forward takes at least as long as one over so many tokens, since all weights are read for it
TOKENS_A_CALL = {"cpu": 20}  # other devices: 128


@dataclass(frozen=True)
class Limit:
    """How many rows a forward pass may hold: `rows` if the user said so, else as many as `tokens` allow."""

    rows: int | None
    tokens: int

    def fits(self, rows: int, width: int) -> bool:
        """Whether `rows` rows of `width` tokens fit; one row always does."""
        return rows == 1 or (rows * width <= self.tokens if self.rows is None else rows <= self.rows)


@dataclass
class Tree:
    """One example's candidates as a tree. `nodes[node]` lists the tokens that may follow it."""

    number: int
    item: EncodedExample
    nodes: dict[Node, list[int]] = field(default_factory=dict)
    chain: Node = ()  # what every candidate begins with, fed along with the context
    logprob: dict[tuple[Node, int], float] = field(default_factory=dict)
    greedy: dict[Node, int] = field(default_factory=dict)
    kept: dict[Node, torch.Tensor] | None = None  # whole log-distributions, only while a cache is checked

    def __post_init__(self) -> None:
        every = self.item.continuations
        follow: dict[Node, set[int]] = {}
        for tokens in every:
            for d, token in enumerate(tokens):
                follow.setdefault(tokens[:d], set()).add(token)
        self.nodes = {node: sorted(follow[node]) for node in sorted(follow)}
        self.chain = every[0][: min(common_prefix(every), max(map(len, every)) - 1)]

    @property
    def length(self) -> int:
        return len(self.item.context) + len(self.chain)

    def children(self, node: Node) -> list[Node]:
        return [(*node, t) for t in self.nodes[node] if (*node, t) in self.nodes]

    def leaves(self) -> list[Node]:
        """Nodes that lead to no other node: feeding context + leaf passes through all their ancestors."""
        return [node for node in self.nodes if not self.children(node)]

    def steps_pay(self, tokens_a_call: int) -> bool:
        """Whether steps from a cache cost less than full forwards over context + leaf, a call counted as above."""
        depths: dict[int, int] = {}
        for node in self.nodes:
            if len(node) > len(self.chain):
                depths[len(node)] = depths.get(len(node), 0) + 1
        stepped = self.length + sum(max(tokens_a_call, n) for n in depths.values())
        return stepped < sum(len(self.item.context) + len(leaf) for leaf in self.leaves())

    def result(self) -> tuple[list[float], bool]:
        """Log-probability of what counts of each candidate, and whether the greedy continuation is the answer's."""
        every, start = self.item.continuations, self.item.counted or (0,) * len(self.item.continuations)
        sums = [sum(self.logprob[c[:d], c[d]] for d in range(n, len(c))) for c, n in zip(every, start, strict=True)]
        answer = every[self.item.answer]
        return sums, all(self.greedy[answer[:d]] == answer[d] for d in range(start[self.item.answer], len(answer)))


def plain(forward: Forward, rows: list[tuple[Tree, Node]]) -> None:
    """One full forward over context + node for each row; reads every node on the way, right-padded."""
    start = [len(t.item.context) - 1 for t, _ in rows]
    depth = max(len(node) for _, node in rows)
    positions = [[s + min(d, len(node)) for d in range(depth + 1)] for s, (_, node) in zip(start, rows, strict=True)]
    tokens = [[*t.item.context, *node] for t, node in rows]
    logits, _ = forward(tokens, positions, [t.number for t, _ in rows], [len(t.item.context) for t, _ in rows])
    reads = {}
    for r, (tree, leaf) in enumerate(rows):
        for d in range(len(leaf) + 1):
            if leaf[:d] not in tree.greedy:
                reads.setdefault((id(tree), leaf[:d]), (r, d, tree, leaf[:d]))
    _read(logits, list(reads.values()))


def walk(forward: Forward, trees: list[Tree], mask_steps: bool, limit: Limit) -> None:
    """One forward over equally long contexts, then one-token steps from its cache down the trees."""
    width = trees[0].length
    depth = max(len(t.chain) for t in trees)
    positions = [[width - 1 - max(len(t.chain) - d, 0) for d in range(depth + 1)] for t in trees]
    tokens = [[*t.item.context, *t.chain] for t in trees]
    numbers, contexts = [t.number for t in trees], [len(t.item.context) for t in trees]
    logits, cache = forward(tokens, positions, numbers, contexts, keep_cache=True)
    if not hasattr(cache, "reorder_cache"):
        raise TypeError("the forward pass returned no cache that can be reordered")
    _read(logits, [(r, d, t, t.chain[:d]) for r, t in enumerate(trees) for d in range(len(t.chain) + 1)])
    del logits
    steps = [(r, t, child) for r, t in enumerate(trees) for child in t.children(t.chain)]
    _descend(forward, cache, steps, width, mask_steps, limit)


def _descend(forward: Forward, cache, steps: list[tuple[int, Tree, Node]], past: int, mask: bool, limit: Limit) -> None:
    """Step every (row of the cache, tree, node), then the nodes below each."""
    most = max(1, limit.tokens * 2 // past) if limit.rows is None else max(limit.rows, 1)
    for start in range(0, len(steps), most):
        part = steps[start : start + most]
        # a step changes the cache in place, so all parts but the last take a copy
        branch = copy.deepcopy(cache) if start + most < len(steps) else cache
        branch.reorder_cache(torch.tensor([r for r, _, _ in part], device=forward.lm.device))
        numbers, contexts = [t.number for _, t, _ in part], [len(t.item.context) for _, t, _ in part]
        tokens = [[node[-1]] for _, _, node in part]
        logits, branch = forward(tokens, [[0]] * len(part), numbers, contexts, past, branch, True, mask)
        _read(logits, [(r, 0, t, node) for r, (_, t, node) in enumerate(part)])
        below = [(r, t, child) for r, (_, t, node) in enumerate(part) for child in t.children(node)]
        if below:
            _descend(forward, branch, below, past + 1, mask, limit)


def _read(logits: torch.Tensor, reads: list[tuple[int, int, Tree, Node]]) -> None:
    """Put the log-probabilities of the following tokens and the greedy token into the trees.

    logits [b, k, v]; each read names (row, which of the k positions, tree, node).
    """
    if not reads:
        return
    rows, spots = (torch.tensor([r[i] for r in reads], device=logits.device) for i in (0, 1))
    logp = torch.log_softmax(logits[rows, spots], dim=-1)  # [reads, v]
    most = max(len(t.nodes[node]) for _, _, t, node in reads)
    wanted = [t.nodes[node] for _, _, t, node in reads]
    index = torch.tensor([w + [w[0]] * (most - len(w)) for w in wanted], device=logits.device)
    values, greedy = logp.gather(1, index).cpu().double().tolist(), logp.argmax(-1).cpu().tolist()
    for i, (_, _, tree, node) in enumerate(reads):
        tree.greedy[node] = greedy[i]
        tree.logprob.update(((node, token), values[i][j]) for j, token in enumerate(wanted[i]))
        if tree.kept is not None:
            tree.kept[node] = logp[i].cpu().double()


_policies: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> {structure key: how}


def cache_policy(lm: LanguageModel, tree: Tree) -> tuple[int, bool | None]:
    """(calls spent on checking, how): how is None for full forwards, else whether cached steps take the mask.

    Full forwards are taken, and said once, where the cache is known to be inexact (`INEXACT`), where `tree`'s
    example walked and in full differ, and for an unknown family in half precision, where rounding hides the
    difference.
    """
    family = lm.family
    if family in INEXACT:
        return 0, _full(family, f"because {INEXACT[family].rstrip('.')}")
    if family not in EXACT and lm.dtype not in TOLERANCE:
        return 0, _full(family, "because its cache is unknown and cannot be checked in half precision")
    known = _policies.setdefault(lm.model, {})
    key = structure_key(lm.model)
    if key in known:
        return 0, known[key]
    forward, why = Forward(lm), ""
    for mask in [False] if family in NO_MASK_IN_STEPS else [True] if family in EXACT else [True, False]:
        why = _disagreement(forward, tree, mask)
        if not why:
            known[key] = mask
            return forward.calls, mask
    known[key] = None
    return forward.calls, _full(family, f"because its cached steps were checked and not trusted: {why}")


def _full(family: str, why: str) -> None:
    say_once(
        f"scoring.cache.{family}",
        f"Candidates of several tokens take a full forward each branch on {family}, {why}.",
    )


def _disagreement(forward: Forward, tree: Tree, mask: bool) -> str:
    """Why cached steps cannot be trusted to give what full forwards give on this example; "" if they can.

    A second row with the same context backwards shows a cache that does not reorder its rows.
    """
    context = tree.item.context
    items = (replace(tree.item, context=(context[0], *reversed(context[1:]))), tree.item)
    walked = [Tree(tree.number, item, kept={}) for item in items]
    full = [Tree(tree.number, item, kept={}) for item in items]
    try:
        walk(forward, walked, mask, Limit(None, 2**20))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    leaves = tree.leaves()
    plain(forward, [(full[0], leaves[-1]), (full[1], leaves[0])])
    pairs = [(w.kept[node], f.kept[node]) for w, f in zip(walked, full, strict=True) for node in f.kept]
    worst = max(float((w - f).abs().max() / f.std()) for w, f in pairs)
    bound = TOLERANCE.get(forward.lm.dtype, HALF_TOLERANCE)
    return "" if worst <= bound else f"{worst:.1e} logit standard deviations off (bound {bound:g})"
