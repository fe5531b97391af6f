"""Where does a head look? Its matrix on a text and its last row over questions, each a record.

Rows are looked at without the skip term D: it passes a token its own value and says nothing about other tokens.
Questions are key-value questions, so that "where does the last token look" has a right answer: the value that
belongs to the key. A page that is drawn again finds its records and runs no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from . import mixers
from .codehash import code_hash
from .errors import HeadError
from .heads import Head, parse_heads
from .language_model import LanguageModel
from .records import Record, Store
from .tasks import Example, Task, token_spans

#: at most so many heads of a kind are looked at when one is chosen; channels beyond are skipped evenly
MOST = 4096
#: questions in one forward pass
_BATCH = 16


def matrix_record(
    store: Store, lm: LanguageModel, text: str, head: Head, variant: str = "scan", with_d: bool = True
) -> Record:
    """The matrix of `head` on `text` as a record: array m ``[t, s]``, values tokens and meaning."""
    key = _key("matrix", lm, {"task": "text", "text": text, "settings": {}})
    key |= {"head": str(head), "variant": variant, "with_d": with_d}

    def run():
        found = mixers.matrix(lm, text, head, variant=variant, with_d=with_d)
        m, tokens = found.example(head, 0)
        return {"tokens": tokens, "meaning": found.meaning}, {"m": m.double().cpu().numpy()}

    return store.compute(key, run, _meta(lm))


def last_rows(store: Store, lm: LanguageModel, task: Task, head: Head) -> Record:
    """Where the last row of `head` looks in every question of `task`, as a record.

    Arrays: mass ``[n, values]``, top ``[n]``, hit ``[n]``, negative ``[n]`` (see `RowStatistics`).
    """
    key = {**_key("last_rows", lm, task.key()), "head": str(head)}

    def run():
        mass, top, at, negative = (a[0] for a in _statistics(lm, task, [head]))
        spans = [value_spans(lm, e)[e.answer] for e in task.examples]
        hit = np.array([a <= p < b for p, (a, b) in zip(at, spans, strict=True)])
        return {}, {"mass": mass, "top": top, "hit": hit, "negative": negative}

    return store.compute(key, run, _meta(lm))


def shares_on_right(store: Store, lm: LanguageModel, task: Task, kind: str) -> Record:
    """Mean share of the last row's weight on the right value for the heads of one kind, as a record."""
    every = lm.head_list(kind)
    heads = every[:: -(-len(every) // MOST)]
    key = {**_key("head_choice", lm, task.key()), "mixer": kind, "heads": len(heads)}

    def run():
        mass = _statistics(lm, task, heads)[0]
        right = np.array([e.answer for e in task.examples])
        share = mass[:, np.arange(len(right)), right].mean(1)
        return {"heads": [str(h) for h in heads], "of": len(every)}, {"right": share}

    return store.compute(key, run, _meta(lm))


def farthest_back(store: Store, lm: LanguageModel, text: str) -> Head:
    """Of the heads of the first kind of `lm` that is no attention, the one that looks farthest back on `text`.

    That is the greatest mean distance from row to column, weighted by M's absolute entries without D.
    """
    kinds = [s.kind for s in lm.sites if s.kind != "attention"]
    if not kinds:
        raise HeadError(f"{lm.name} has attention heads alone, whose weights are never negative.")
    heads = lm.head_list(kinds[0])
    key = _key("farthest_back", lm, {"task": "text", "text": text, "settings": {}})

    def run():
        distances = []
        for m in mixers.matrix(lm, text, heads, with_d=False).values():
            at = torch.arange(m.shape[-1], device=m.device)
            weight = m[0].abs()
            distances.append(float((weight * (at[:, None] - at)).sum() / weight.sum()))
        return {"head": str(heads[int(np.argmax(distances))]), "distance": max(distances)}

    return parse_heads(store.compute(key, run, _meta(lm)).values["head"])[0]


def value_spans(lm: LanguageModel, example: Example) -> list[tuple[int, int]]:
    """The tokens of each value in the example's prompt: (first, one past the last)."""
    encoding = lm.tokenizer(example.prompt, return_offsets_mapping=True)
    return token_spans(encoding, [s.value for s in example.segments])


def last_token(lm: LanguageModel, example: Example) -> int:
    """Where the prompt's last own token is: some tokenizers put a special token after it."""
    offsets = lm.tokenizer(example.prompt, return_offsets_mapping=True)["offset_mapping"]
    return max(i for i, (a, b) in enumerate(offsets) if a < b)


def _statistics(lm: LanguageModel, task: Task, heads: Sequence[Head]) -> list[np.ndarray]:
    """mass ``[h, n, values]``, top, top_position and negative ``[h, n]`` of the rows of the prompts' last tokens."""
    parts = []
    for start in range(0, len(task.examples), _BATCH):
        examples = task.examples[start : start + _BATCH]
        ends = [[last_token(lm, e)] for e in examples]
        spans = [value_spans(lm, e) for e in examples]
        s = mixers.row_statistics(lm, [e.prompt for e in examples], heads, ends, spans, with_d=False)
        parts.append((s.mass[:, :, 0], s.top[..., 0], s.top_position[..., 0], s.negative[..., 0]))
    return [torch.cat([p[i] for p in parts], 1).double().numpy() for i in range(4)]


def _key(kind: str, lm: LanguageModel, task: dict) -> dict:
    return {"kind": kind, "model": lm.describe(), "task": task, "code": code_hash("head_rows")}


def _meta(lm: LanguageModel) -> dict[str, object]:
    return {"model": lm.name, "source": lm.source, "revision": lm.revision}
