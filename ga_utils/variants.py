"""How are many variants of a model, each with one head masked, asked one question with the least work?

Each example is a small tree of forward calls: the context, then steps down the candidates' tokens. The intact model
goes through them once, and what every layer gave is kept. Then batches of variants go through the same calls, each
variant joining its batch at the layer that its mask lies in (`layer_rows.py`).
Axes: h variant, b row, t token, k position read, v vocabulary, w width of a projection's input, p head dimension.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .caches import Forward
from .candidates import Tree
from .errors import GAError, TaskError, say_once
from .heads import Head
from .language_model import LanguageModel
from .layer_rows import LayerRows, check_cache, held_bytes, shell, widen
from .masking import _measure_fills, _prompts, _SiteMask, check_input
from .positions import Where
from .sites import HeadSite
from .tasks.tokens import EncodedExample
from .variant_calls import Call, Way, depth, flat, plan


class Fills:
    """What stands in place of masked heads, as `masking.mask_heads` would put it there."""

    def __init__(self, lm: LanguageModel, heads: Sequence[Head], positions: str, fill: str, reference):
        self.fill, self.where = fill, Where(lm, positions, indexed=True)
        sites = dict.fromkeys(lm.site(h) for h in heads)
        self.masks = {s: _SiteMask(s, list(range(s.n_heads)), self.where) for s in sites}
        if fill != "zero":
            _measure_fills(lm, list(self.masks.values()), fill, _prompts(reference), self.where)

    def check_lengths(self, trees: Sequence[Tree]) -> None:
        """Raise `GAError` where a reference prompt is shorter than what is fed of its example."""
        if self.fill != "resample" or self.where.at_end:
            return
        values = next(iter(self.masks.values())).fill
        for tree, has in zip(trees, (~values[..., 0].isnan()).sum(1).tolist(), strict=True):
            need = len(tree.item.context) + max(map(len, tree.nodes))
            if has < need:
                raise GAError(
                    f"The reference prompt of example {tree.number} has {has} tokens, but the example has {need} with "
                    "its candidates: resampling at all positions needs one that is as long."
                )

    def values(self, site: HeadSite, x: Tensor, number: int, past: int) -> Tensor:
        """[t or 1, w] for the projection's input `x` [b, t, w] of example `number` after `past` tokens."""
        if self.fill == "zero":
            return x.new_zeros(1, 1).expand(1, x.shape[-1])
        where, t = self.where, x.shape[1]
        where.rows, where._told = [number], True
        where.index = torch.arange(past, past + t)[None]
        values = self.masks[site]._filling(x[:1])
        return values[None] if values.ndim == 1 else values[0]


class Variants:
    """The variants of one model, each lacking one of `heads`, asked one example after the other."""

    def __init__(
        self,
        lm: LanguageModel,
        heads: Sequence[Head],
        positions: str,
        fills: Fills,
        way: Way,
        mask_steps: bool,
        budget: int,
    ):
        self.lm, self.positions, self.fills, self.way = lm, positions, fills, way
        self.mask_steps, self.budget = mask_steps, budget
        self.forward, self.layers = Forward(lm), LayerRows(lm)
        self.order = sorted(range(len(heads)), key=lambda i: heads[i].layer)
        self.sorted = [heads[i] for i in self.order]
        self.most = len(heads)  # fewer once memory ran out

    def ask(self, number: int, item: EncodedExample) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability of each candidate [h + 1, candidates], nats, float64, and whether the greedy continuation
        is the answer [h + 1]; row 0 is the intact model and row i + 1 lacks head i.

        Raises `TaskError` if the budget holds no variant, and `GAError` for a number that is not finite.
        """
        self.number, self.tree = number, Tree(number, item)
        prefix, calls = plan(self.tree, self.way)
        h = len(self.sorted)
        self.logprob = {n: torch.zeros(h + 1, len(f), dtype=torch.float64) for n, f in self.tree.nodes.items()}
        self.greedy = {n: torch.zeros(h + 1, dtype=torch.long) for n in self.tree.nodes}
        self.bytes = [0] * len(self.layers.layers)
        cache = None
        if prefix:
            context = item.context
            with self.layers.counting():
                _, cache = self.forward([context[:prefix]], [[prefix - 1]], [number], [len(context)], keep_cache=True)
            self._weigh(cache)
        # calls that share nothing but the prompt go one after the other, so that only one's layers are kept
        for group in [calls] if self.way.steps else [[c] for c in calls]:
            self._descend(group, copy.deepcopy(cache), self._intact)
            start = 0
            while start < h:
                size = self._batch(start, group)
                if self._fits_memory(range(start, start + size), group, cache):
                    start += size
            for call in flat(group):
                call.kept = []
        return self._gather(item)

    def _fits_memory(self, rows: range, calls: list[Call], cache: object) -> bool:
        """Run these variants; False if memory ran out, after which batches are half as large."""
        try:
            self._run(rows, calls, cache)
            return True
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or len(rows) == 1:
                raise
        self.most = len(rows) // 2
        if self.lm.device.type == "cuda":
            torch.cuda.empty_cache()
        say_once(
            f"sweep memory {self.lm.family}",
            f"Memory ran out with {len(rows)} variants of {self.lm.name} at once; the sweep goes on with batches of "
            f"{self.most}.",
        )
        return False

    def _run(self, rows: range, calls: list[Call], cache: object) -> None:
        heads = self.sorted[rows.start : rows.stop]
        batch = len(heads)
        grow = self.way.grow
        counts = [sum(h.layer <= i for h in heads) if grow else batch for i in range(len(self.layers.layers))]
        at = torch.tensor([self.order[r] + 1 for r in rows])

        def step(call: Call, states: list | None) -> list | None:
            given = None if call.shell is None else shell(call.shell, batch)
            self._now = call
            with self.layers.growing(batch, counts, call.kept, given, states):
                new = self._feed(call, batch, given, at)
            if states is None and new is not None:
                check_cache(new, len(counts))
                return list(new.layers)
            return states

        states = None
        if cache is not None:
            states = [widen(x, n) if n else x for x, n in zip(cache.layers, counts, strict=True)]
        with self._masks(heads):
            self._descend(calls, states, step)

    def _intact(self, call: Call, cache: object) -> object:
        if cache is not None:
            call.shell = shell(cache)
        with self.layers.keeping() as call.kept:
            new = self._feed(call, 1, cache, torch.tensor([0]))
        if new is not None:
            self._weigh(new)
        return new

    def _descend(self, calls: list[Call], state, step: Callable) -> None:
        """Make the calls and those below each; a call changes the state in place, so all but the last take a copy."""
        for i, call in enumerate(calls):
            new = step(call, copy.deepcopy(state) if i + 1 < len(calls) else state)
            if call.children:
                self._descend(call.children, new, step)

    def _feed(self, call: Call, batch: int, cache: object, at: Tensor) -> object:
        """One forward of `batch` rows; puts what is read into the rows `at` of the results. Returns the cache."""
        keep = cache is not None or bool(call.children)
        logits, cache = self.forward(
            [call.tokens] * batch,
            [[p for p, _ in call.reads]] * batch,
            [self.number] * batch,
            [len(self.tree.item.context)] * batch,
            call.past,
            cache,
            keep,
            self.mask_steps or cache is None,
        )
        for k, (_, node) in enumerate(call.reads):
            x = logits[:, k]
            following = x[:, self.tree.nodes[node]].double() - x.logsumexp(-1).double()[:, None]
            self.logprob[node][at] = following.cpu()
            self.greedy[node][at] = x.argmax(-1).cpu()
        return cache

    @contextlib.contextmanager
    def _masks(self, heads: Sequence[Head]) -> Iterator[None]:
        """Row i of every forward inside the block lacks `heads[i]` where its call's tokens are masked."""
        at: dict[HeadSite, list[tuple[int, int]]] = {}
        for row, head in enumerate(heads):
            at.setdefault(self.lm.site(head), []).append((row, head.index))
        handles = []
        try:
            handles += [s.proj.register_forward_pre_hook(self._hook(s, pairs)) for s, pairs in at.items()]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, site: HeadSite, pairs: list[tuple[int, int]]) -> Callable:
        channels = torch.tensor([list(range(site.width))[site.channels(i)] for _, i in pairs])  # [rows, p]
        rows = torch.tensor([r for r, _ in pairs])

        def mask(module, args):
            x, *rest = args
            check_input(site, x)
            call = self._now
            if x.shape[0] <= pairs[-1][0] or x.shape[1] != len(call.tokens):
                raise TypeError(f"layer {site.layer} saw a batch of shape {list(x.shape[:2])}")
            spots = torch.tensor(self._masked(call), device=x.device)
            if not len(spots):
                return None
            r, c = rows.to(x.device), channels.to(x.device)
            values = self.fills.values(site, x, self.number, call.past).to(x)
            values = (values if values.shape[0] == 1 else values[spots])[:, c].transpose(0, 1)  # [rows, t or 1, p]
            x = x.clone()
            x[r[:, None, None], spots[None, :, None], c[:, None, :]] = values
            return (x, *rest)

        return mask

    def _masked(self, call: Call) -> list[int]:
        """Which of a call's tokens are masked."""
        end, t = len(self.tree.item.context) - 1 - call.past, len(call.tokens)
        if self.positions == "last":
            return [end] if 0 <= end < t else []
        return list(range(0 if self.positions == "all" else max(0, end), t))

    def _weigh(self, cache: object) -> None:
        """Note how many bytes one row takes in each layer's part of the cache."""
        check_cache(cache, len(self.bytes))
        self.bytes = [max(b, held_bytes(x)) for b, x in zip(self.bytes, cache.layers, strict=True)]

    def _batch(self, start: int, calls: list[Call]) -> int:
        """How many variants from number `start` on the budget holds at once."""
        every = list(flat(calls))
        t, total = max(len(c.tokens) for c in every), max(len(c.tokens) + c.past for c in every)
        copies, passing = 1 + depth(calls), 2 * max(self.bytes)  # a layer's part is copied as it grows
        fixed = passing + self._working_bytes(t, total, max(len(c.reads) for c in every))
        need = size = 0
        limit = min(self.most, len(self.sorted) - start)
        for head in self.sorted[start : start + limit]:
            lowest = head.layer if self.way.grow else 0
            one = copies * sum(self.bytes[lowest:]) + fixed
            if one > self.budget:
                raise TaskError(
                    f"budget={self.budget} bytes holds no variant of example {self.number}, which needs about {one} "
                    "bytes: give a larger budget or shorter prompts."
                )
            if need + one > self.budget:
                break
            need, size = need + one, size + 1
        return size

    def _working_bytes(self, t: int, total: int, reads: int) -> int:
        """Rough bytes that one row's activations take while a layer and the output embedding run."""
        config = self.lm.config
        width = max(config.hidden_size, *(s.width for s in self.lm.sites))
        heads = max((s.n_heads for s in self.lm.sites if s.kind == "attention"), default=1)
        size = torch.finfo(self.lm.dtype).bits // 8
        return size * t * (24 * width + heads * total) + 12 * reads * config.vocab_size

    def _gather(self, item: EncodedExample) -> tuple[np.ndarray, np.ndarray]:
        follow = {node: {token: j for j, token in enumerate(f)} for node, f in self.tree.nodes.items()}
        sums = torch.stack(
            [sum(self.logprob[c[:d]][:, follow[c[:d]][c[d]]] for d in range(len(c))) for c in item.continuations], dim=1
        )
        if not sums.isfinite().all():
            raise GAError(
                f"The model's log-probabilities of example {self.number} are not finite; check its dtype and mask."
            )
        answer = item.continuations[item.answer]
        greedy = torch.stack([self.greedy[answer[:d]] == answer[d] for d in range(len(answer))]).all(0)
        return sums.numpy(), greedy.numpy()


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on the CPU or on a device."""
    text = str(error).lower()
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(w in text for w in words)
