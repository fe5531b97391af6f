"""Which head of the teacher aggregates, and which others do the same work?

Training leaves the Aggregate role of so small a model with several heads at once: masking any one of them does
nothing, masking them all takes retrieval away. The paper's larger models have such backups too, but one head that
carries most of the role. The embedded teacher is brought to that state on purpose, and its training record says so:
of the heads that aggregate the one that serves best alone is kept, the others are switched off for good.

Heads are found by a rule, on fresh questions, never by name:

    aggregates   on average over letter, copy-letter and kv-8 the row of the prompt's last token puts SHARE more of its
                 weight on the line of the right answer than on a wrong one
    best alone   the highest mean accuracy on the three with the others masked at the last position
    pruned       its query weights and its columns of the output projection are zero and stay zero, at all positions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ga_utils.errors import ModelError
from ga_utils.heads import Head, parse_heads
from ga_utils.language_model import LanguageModel, wrap
from ga_utils.masking import mask_heads
from ga_utils.mixers import row_statistics
from ga_utils.scoring import score
from ga_utils.tasks.base import Task
from ga_utils.tasks.tokens import segment_tokens
from ga_utils.tiny import questions
from ga_utils.tiny.language import tokenizer

#: how much more of its weight a head that aggregates puts on the right line than on a wrong one
SHARE = 0.2
#: with the kept head masked, retrieval may exceed chance by this much; more means that another head still serves
ABOVE_CHANCE = 0.2
#: a layer gathers if retrieval falls to this (mean of the three) without its heads and knowledge stays at that
RETRIEVAL_LOST, KNOWLEDGE_KEPT = 0.5, 0.95
QUESTIONS = 100
#: said in each training record
RULE = (
    "Training left several heads that aggregate; this is not how a model ends by itself. Of the heads whose last row "
    f"puts {SHARE} more of its weight on the line of the right answer than on a wrong one (mean over letter, "
    "copy-letter and kv-8) the one that serves best alone, by mean accuracy with the others masked at the last "
    "position, was kept. In the layer below it whose heads cost retrieval most and spare knowledge when masked at all "
    "positions, the head that serves best alone was kept too. All others of both kinds were pruned: query weights and "
    "columns of the output projection zero from then on, while training went on."
)


def retrieval_tasks(n: int, seed: int) -> dict[str, Task]:
    """The tasks that an Aggregate head serves."""
    return {
        "letter": questions.letter_task(n, seed),
        "copy-letter": questions.copy_letter_task(n, seed),
        "kv-8": questions.kv_task(8, n, seed),
    }


def preferences(lm: LanguageModel, tasks: Mapping[str, Task]) -> dict[Head, float]:
    """head -> share of the last row's weight on the right line less that on a wrong one, mean over tasks, -1 to 1."""
    heads = lm.head_list()
    total = torch.zeros(len(heads), dtype=torch.float64)
    for task in tasks.values():
        lines = [[line for line, _ in segment_tokens(lm.tokenizer, e, "none")] for e in task.examples]
        mass = row_statistics(lm, [e.prompt for e in task.examples], heads, "last", lines).mass[:, :, 0].double()
        right = mass[:, torch.arange(len(lines)), torch.tensor([e.answer for e in task.examples])]
        wrong = (mass.sum(-1) - right) / (mass.shape[-1] - 1)
        total += (right - wrong).mean(1)
    return {h: float(x) / len(tasks) for h, x in zip(heads, total, strict=True)}


def accuracies(
    lm: LanguageModel, tasks: Mapping[str, Task], masked: Sequence[Head], positions: str = "last"
) -> dict[str, float]:
    """task -> accuracy among the candidates, with the heads masked (zero), by default at the prompt's last token."""
    with mask_heads(lm, masked, positions):
        return {name: round(score(lm, task).accuracy, 4) for name, task in tasks.items()}


def find(model: nn.Module, seed: int, kept: str | None = None) -> dict:
    """The head to keep and the others, with what was measured; plain values, for the training record.

    kept: the head that an earlier call chose, None to choose now. others: heads that aggregate besides it, in order.
    alone: head -> accuracies with the other heads that aggregate masked, where there was a choice. without: accuracies
    with the kept head masked, as the model is. gone: whether retrieval is near chance without it.
    """
    training, lm = model.training, wrap(model, tokenizer())
    tasks = retrieval_tasks(QUESTIONS, seed)
    liking = preferences(lm, tasks)
    best = max(liking, key=liking.__getitem__)
    found = [h for h in liking if liking[h] >= SHARE] or [best]
    alone: dict[str, dict[str, float]] = {}
    if kept is None:
        for head in found if len(found) > 1 else []:
            alone[str(head)] = accuracies(lm, tasks, [h for h in found if h != head])
        kept = max(alone, key=lambda h: sum(alone[h].values())) if alone else str(found[0])
    without = accuracies(lm, tasks, parse_heads(kept))
    model.train(training)
    return {
        "kept": kept,
        "others": [str(h) for h in found if str(h) != kept],
        "preference": {str(h): round(liking[h], 3) for h in {*found, *parse_heads(kept)}},
        "alone": alone,
        "without": without,
        "gone": all(without[t] <= task.chance + ABOVE_CHANCE for t, task in tasks.items()),
    }


def find_gather(model: nn.Module, seed: int, aggregate: str) -> dict:
    """The layer that gathers, the head of it to keep and the others; plain values, for the training record.

    layers: layer below the Aggregate head's -> accuracies with all its heads masked at all positions, knowledge among
    them. kept is None, and nothing is to be pruned, where no such layer costs much retrieval and spares knowledge.
    """
    training, lm = model.training, wrap(model, tokenizer())
    tasks = retrieval_tasks(QUESTIONS, seed)
    every = {**tasks, "knowledge": questions.knowledge_task(QUESTIONS, seed)}
    by_layer: dict[int, list[Head]] = {}
    for head in lm.head_list():
        by_layer.setdefault(head.layer, []).append(head)
    below = [layer for layer in by_layer if layer < parse_heads(aggregate)[0].layer]
    off = {layer: accuracies(lm, every, by_layer[layer], "all") for layer in below}
    spared = {n: sum(a[t] for t in tasks) for n, a in off.items() if a["knowledge"] >= KNOWLEDGE_KEPT}
    layer = min(spared, key=spared.__getitem__, default=None)
    found = {"layers": {str(n): a for n, a in off.items()}, "layer": layer, "kept": None, "alone": {}, "others": []}
    if layer is not None and spared[layer] / len(tasks) <= RETRIEVAL_LOST:
        heads = by_layer[layer]
        alone = {str(h): accuracies(lm, tasks, [x for x in heads if x != h], "all") for h in heads}
        kept = max(alone, key=lambda h: sum(alone[h].values()))
        found |= {"kept": kept, "alone": alone, "others": [str(h) for h in heads if str(h) != kept]}
    model.train(training)
    return found


def weights_of(model: nn.Module, heads: Sequence[str]) -> list[torch.Tensor]:
    """Views of the weights that make these heads of an attention model act: the rows of the query projection and the
    columns of the output projection. With both at zero a head attends evenly and adds nothing."""
    lm, found = wrap(model, tokenizer()), []
    for head in parse_heads(list(heads)):
        site = lm.site(head)
        if site.kind != "attention" or site.mixer.q_proj.weight.shape[0] != site.width:
            raise ModelError(f"{head} is no attention head with queries of its own: it cannot be pruned.")
        found.append(site.mixer.q_proj.weight.detach()[site.channels(head.index)])
        found.append(site.proj.weight.detach()[:, site.channels(head.index)])
    return found
