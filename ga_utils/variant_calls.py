"""Which forward calls does one example of a sweep take, on the intact model and on each variant alike?

A prompt and its candidates are a small tree: the context, then steps down the candidates' tokens where a model's cache
continues exactly, or one call for each leaf of the candidates' tree where it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .candidates import Node, Tree


@dataclass(frozen=True)
class Way:
    """How an example is asked.

    prompt: the prompt runs once, intact, and variants continue its cache (masks that begin at its last token only).
    steps: candidates' tokens are fed one by one from a cache; otherwise each leaf of their tree is one call with all
    that leads to it. grow: variants join at their layer; otherwise all run in every layer.
    """

    name: str
    prompt: bool
    steps: bool
    grow: bool = True


@dataclass(eq=False)
class Call:
    """One forward call: tokens fed after `past` others, and (position, node) of what is read from it."""

    tokens: list[int]
    past: int
    reads: list[tuple[int, Node]]
    children: list[Call] = field(default_factory=list)
    kept: list = field(default_factory=list)  # what each layer gave in the intact run
    shell: object = None  # lengths of the cache that the call continues


def plan(tree: Tree, way: Way) -> tuple[int, list[Call]]:
    """(tokens of the context that are fed before, the calls that follow)."""
    context = tree.item.context
    end = len(context) - 1
    if way.steps and way.prompt:
        return end, [Call([context[-1]], end, [(0, ())], _below(tree, ()))]
    if way.steps:
        reads = [(end + d, tree.chain[:d]) for d in range(len(tree.chain) + 1)]
        return 0, [Call([*context, *tree.chain], 0, reads, _below(tree, tree.chain))]
    leaves = tree.leaves()
    # at least two tokens: models whose steps of one token differ from their full forwards continue chunks as these
    prefix = max(0, end - (leaves == [()])) if way.prompt else 0
    calls, seen = [], set()
    for leaf in leaves:
        reads = [(end - prefix + d, leaf[:d]) for d in range(len(leaf) + 1) if leaf[:d] not in seen]
        seen.update(node for _, node in reads)
        calls.append(Call([*context[prefix:], *leaf], prefix, reads))
    return prefix, calls


def _below(tree: Tree, node: Node) -> list[Call]:
    past = len(tree.item.context)
    return [Call([c[-1]], past + len(c) - 1, [(0, c)], _below(tree, c)) for c in tree.children(node)]


def flat(calls: list[Call]) -> Iterator[Call]:
    """The calls and all below them."""
    for call in calls:
        yield call
        yield from flat(call.children)


def depth(calls: list[Call]) -> int:
    """How many levels of calls lie below these."""
    return max((1 + depth(c.children) for c in calls if c.children), default=0)


def plain_tokens(tree: Tree, steps: bool) -> int:
    """Tokens that `scoring.score` feeds for the example alone; steps: whether it walks down from a cache."""
    if steps and len(tree.nodes) > len(tree.chain) + 1:
        return tree.length + len(tree.nodes) - len(tree.chain) - 1
    return sum(len(tree.item.context) + len(leaf) for leaf in tree.leaves())
