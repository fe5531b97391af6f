"""Curves of removed and kept heads: the right heads are masked, random ones are others, and the verdicts follow."""

import numpy as np
import pytest
import zoo

from ga_utils import claims_heads, concentration
from ga_utils.concentration import Curve
from ga_utils.errors import GAError
from ga_utils.masking import mask_heads
from ga_utils.records import Store
from ga_utils.scoring import score
from ga_utils.tasks import kv_task


def curve(removed=None, random=None, width=None, n_heads=200, intact=0.9, name="m", n=400):
    """A curve with these accuracies on n questions; the right answers are nested, so differences are paired."""

    def correct(share):
        return np.arange(n) < round(share * n)

    removed, random = removed or {1: 0.8, 9: 0.2}, random or {1: 0.9, 9: 0.88}
    return Curve(
        name, name, (), n_heads, 0.1, correct(intact), {k: correct(a) for k, a in removed.items()}, {},
        {k: np.stack([correct(a)] * 2) for k, a in random.items()}, {}, width or {k: k / n_heads for k in removed}, [],
    )  # fmt: skip


@pytest.mark.parametrize(
    "n, sizes", [(24, [1, 2, 4]), (270, [1, 2, 4, 8, 13]), (100, [1, 2, 4, 8]), (384, [1, 2, 4, 8, 19, 32])]
)
def test_sizes_double_up_to_a_tenth_and_hold_the_last_below_five_percent(n, sizes):
    assert concentration.sizes_for(n) == sizes
    below = [k for k in sizes if k < 0.05 * n]
    assert not below or max(below) == int(np.ceil(0.05 * n)) - 1


def test_the_named_heads_are_masked(tmp_path):
    lm = zoo.lm("llama")
    task = kv_task(3, 12, 0, "terse", "10-99", lm.tokenizer)
    ranked = lm.head_list()
    found = concentration.measure(Store(tmp_path), lm, task, ranked, [1, 2], [2], 2, progress=False)
    with mask_heads(lm, ranked[:2]):
        assert np.array_equal(found.removed[2], score(lm, task).correct)
    others = concentration.others(lm, ranked[:2])
    assert {lm.site(h) for h in others} == {lm.site(ranked[0])} and not set(others) & set(ranked[:2])
    with mask_heads(lm, others):
        assert np.array_equal(found.kept[2], score(lm, task).correct)
    assert found.random[2].shape == (2, 12)
    total = sum(s.n_heads * s.head_dim for s in lm.sites)
    assert found.width[2] == pytest.approx(2 * lm.site(ranked[0]).head_dim / total)
    rows = found.table()
    assert set(rows.series) == {"intact", "removed", "kept", "random", "random kept"}


def test_random_heads_are_never_those_they_are_compared_with():
    lm = zoo.lm("llama")
    heads = lm.head_list()[:3]
    for drawn in concentration._draws(lm, heads, 5, 0):
        assert len(set(drawn)) == 3 and not set(drawn) & set(heads)
    assert concentration._draws(lm, heads, 2, 0) == concentration._draws(lm, heads, 2, 0)
    most = lm.head_list()[:-1]
    assert concentration._draws(lm, most, 2, 0) == []


def test_sizes_that_cannot_be_had_are_refused(tmp_path):
    lm = zoo.lm("llama")
    task = kv_task(3, 12, 0, "terse", "10-99", lm.tokenizer)
    for sizes in ([0], [len(lm.head_list())], []):
        with pytest.raises(GAError, match="must lie between 1 and"):
            concentration.measure(Store(tmp_path), lm, task, lm.head_list(), sizes, progress=False)


def test_the_claim_on_few_heads():
    assert claims_heads.few_heads(curve()).verdict == "reproduced"
    assert claims_heads.few_heads(curve({1: 0.8, 9: 0.6})).verdict == "partly"
    assert claims_heads.few_heads(curve({1: 0.9, 9: 0.9}, {1: 0.9, 9: 0.9})).verdict == "not"
    assert claims_heads.few_heads(curve(n_heads=24)).verdict == "not testable"
    at_chance = claims_heads.few_heads(curve(intact=0.1))
    assert at_chance.verdict == "not testable" and "chance" in at_chance.because


def test_the_claim_on_spread():
    few = curve({1: 0.8, 4: 0.3}, width={1: 0.01, 4: 0.04})
    many = curve({1: 0.88, 4: 0.8, 16: 0.3}, width={1: 0.01, 4: 0.04, 16: 0.16}, name="ssm")
    assert few.half() == 0.04 and many.half() == 0.16
    assert claims_heads.spread(few, many).verdict == "partly"
    assert claims_heads.spread(few, curve({4: 0.3}, width={4: 0.04})).verdict == "not"
    never = curve({4: 0.8}, width={4: 0.04}, name="ssm")
    assert never.half() is None and claims_heads.spread(few, never).verdict == "not testable"
    wide = curve({4: 0.8, 16: 0.7}, width={4: 0.04, 16: 0.16}, name="ssm")
    assert claims_heads.spread(few, wide).verdict == "partly"
