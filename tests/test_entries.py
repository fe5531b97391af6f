"""Does a head read exactly what it may, at the rows that are named, in every kind of mixer?"""

import numpy as np
import pytest
import torch
import zoo

from ga_utils import mixers
from ga_utils.entries import Reads, only_entries
from ga_utils.errors import GAError, HeadError
from ga_utils.mixers.base import FAMILIES
from ga_utils.scoring import score
from ga_utils.tasks import Example, Task

#: one architecture for each family of mixers, and the hybrids
NAMES = ["llama", "gpt2", "qwen3", "mamba", "falcon_mamba", "mamba2", "llamba", "zamba2", "qwen3_next", "kimi_linear",
         "minimax", "lfm2"]  # fmt: skip
T = 13


def ids(batch=2, seed=0):
    return torch.randint(4, 260, (batch, T), generator=torch.Generator().manual_seed(seed))


def heads_of(lm):
    """Two heads of each of two sites, of different kinds where there are any."""
    sites = list({s.kind: s for s in lm.sites if s.kind in FAMILIES}.values())
    return [s.head(i) for s in sites[:2] for i in (0, s.n_heads - 1)]


@torch.no_grad()
def logits(lm, tokens):
    return lm.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits


@torch.no_grad()
def entering(lm, tokens, site):
    """What the site's output projection is given ``[b, t, w]``, after all hooks."""
    seen, forward = [], site.proj.forward
    site.proj.forward = lambda x: seen.append(x) or forward(x)
    try:
        logits(lm, tokens)
    finally:
        del site.proj.forward
    return seen[0]


@pytest.mark.parametrize("name", [n for n in NAMES if n in zoo.NAMES])
@pytest.mark.parametrize("renormalise", [False, True])
def test_all_entries_change_nothing(name, renormalise):
    lm = zoo.lm(name)
    tokens, before = ids(), logits(lm, ids())
    every = Reads({t: range(t + 1) for t in range(T)}, range(T))
    reads = {h: [every] * 2 for h in heads_of(lm)}
    with only_entries(lm, reads, renormalise=renormalise):
        found = logits(lm, tokens)
    assert float((found - before).abs().max() / before.std()) < 1e-5
    assert torch.equal(logits(lm, tokens), before)  # nothing stays behind


@pytest.mark.parametrize("name", [n for n in NAMES if n in zoo.NAMES])
def test_kept_entries_are_those_of_the_matrix(name):
    """At the rows that are named y = M' x times what stood behind y; all else enters the projection as before."""
    lm = zoo.lm(name)
    tokens = ids()
    site = next(s for s in lm.sites if s.kind in FAMILIES)
    head, other = site.head(1), site.head(0)
    reads = {head: [Reads({5: [1, 2]}, [3]), Reads({7: [0, 7], 2: []})]}
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        m = mixers.matrix(lm, batch, head)[head]
        cap = mixers.capture(lm, batch, [site])[site]
        after = FAMILIES[site.kind].after(cap, [1])[:, 0]
    kept = m.clone()
    for b, t, columns in ((0, 5, [1, 2]), (0, T - 1, [3]), (1, 7, [0, 7]), (1, 2, [])):
        keep = torch.zeros(T, dtype=torch.bool)
        keep[columns] = True
        kept[b, t] = torch.where(keep, m[b, t], 0.0)
    before = entering(lm, tokens, site)
    with only_entries(lm, reads):
        found = entering(lm, tokens, site)
    here = site.channels(1)
    expected = before.clone()
    expected[..., here] = after * (kept @ cap.value[:, 1])
    assert torch.allclose(found[..., here], expected[..., here], atol=1e-5 * float(before.std()) + 1e-7, rtol=1e-4)
    assert torch.equal(found[..., site.channels(0)], before[..., site.channels(0)]) and other not in reads
    untouched = [(0, 4), (0, 6), (1, T - 1), (1, 3)]
    assert all(torch.equal(found[b, t], before[b, t]) for b, t in untouched)


def test_renormalised_rows_keep_their_weight():
    lm = zoo.lm("llama")
    tokens, site = ids(1), lm.sites[1]
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        cap = mixers.capture(lm, batch, [site])[site]
    with only_entries(lm, {site.head(1): [Reads({6: [4]})]}, renormalise=True):
        found = entering(lm, tokens, site)
    assert torch.allclose(found[0, 6, site.channels(1)], cap.value[0, 1, 4], atol=1e-6)  # weight 1 on one token


def test_strict_rows_give_nothing():
    lm = zoo.lm("llamba")
    tokens, site = ids(1), lm.sites[0]
    before = entering(lm, tokens, site)
    with only_entries(lm, {site.head(1): [Reads({6: range(7)})]}, strict=True):
        found = entering(lm, tokens, site)
    here = found[0, :, site.channels(1)]
    assert (here.abs().sum(-1) > 0).tolist() == [t == 6 for t in range(T)]
    assert torch.allclose(here[6], before[0, 6, site.channels(1)], rtol=1e-4, atol=1e-6)


def test_positions_are_those_of_the_example_in_any_batch():
    """Scores under the edit do not depend on companions or padding, and reach the answer's own tokens."""
    lm = zoo.lm("llama")
    texts = ["ab", "hello there", "a longer prompt than those"]
    examples = tuple(Example(t, (" yes", " no", " never"), 0) for t in texts)
    reads = [Reads({1: [0]}, [0]), Reads({3: [1, 2]}, [2]), Reads({}, [1])]
    heads = [lm.sites[0].head(1), lm.sites[2].head(0)]

    def asked(numbers, **kwargs):
        with only_entries(lm, {h: [reads[i] for i in numbers] for h in heads}):
            task = Task("three", tuple(examples[i] for i in numbers), "plain", "none")
            return score(lm, task, cached=False, **kwargs).logprobs

    whole = asked([0, 1, 2])
    alone = [asked([i])[0] for i in range(3)]
    assert abs(whole - np.array(alone)).max() < 1e-4
    assert abs(whole - asked([0, 1, 2], batch_size=1)).max() < 1e-4
    free = score(lm, Task("three", examples, "plain", "none"), cached=False).logprobs
    assert abs(whole - free).max() > 1e-3


def test_what_cannot_be_done_is_one_sentence():
    lm = zoo.lm("llama")
    head = lm.sites[0].head(0)
    for reads, says in (
        ({}, "names no head"),
        ({"L9H0": [Reads()] * 2}, "layers with heads are"),
        ({head: [Reads({99: [0]})] * 2}, "lies outside example 0"),
        ({head: [Reads({1: [0]})]}, "give one for each example"),
    ):
        with pytest.raises((GAError, HeadError), match=says) as error, only_entries(lm, reads):
            logits(lm, ids())
        assert "\n" not in str(error.value)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules())
    with pytest.raises(RuntimeError), only_entries(lm, {head: [Reads({1: [0]})] * 2}):
        raise RuntimeError
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules())
