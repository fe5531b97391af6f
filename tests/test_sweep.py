"""A sweep over heads gives what masking each head alone gives, at a fraction of the forwards."""

import numpy as np
import pytest
import zoo

from ga_utils.caches import INEXACT
from ga_utils.errors import HeadError, TaskError
from ga_utils.masking import mask_heads
from ga_utils.scoring import score
from ga_utils.sweep import sweep_heads
from ga_utils.tasks import kv_task

SHARED = [n for n in zoo.NAMES if zoo.CONFIGS[n][0].lower() not in ("zamba2", "nemotronh", "minimax")]


def a_task(lm, n=3):
    return kv_task(3, n, seed=5, format="terse", values="10-99", tokenizer=lm.tokenizer)


def some_heads(lm):
    return [s.head(i) for s in lm.sites for i in sorted({0, s.n_heads - 1})]


@pytest.mark.parametrize("positions", ["answer", "last"])
@pytest.mark.parametrize("name", SHARED)
def test_shared_prompt_equals_a_full_forward_for_each_head(name, positions):
    lm = zoo.lm(name)
    task, heads = a_task(lm), some_heads(lm)
    fast = sweep_heads(lm, task, heads, positions, shared=True)
    slow = sweep_heads(lm, task, heads, positions, shared=False)
    assert fast.shared and not slow.shared
    assert np.abs(fast.logprob - slow.logprob).max() < 1e-4
    assert np.abs(fast.intact_logprob - slow.intact_logprob).max() < 1e-4
    assert np.abs(slow.logprob - slow.intact_logprob).max() > 1e-3  # the masks did something


def test_each_row_is_the_head_of_its_name():
    lm = zoo.lm("llama")
    task, heads = a_task(lm), lm.head_list()
    sweep = sweep_heads(lm, task)
    assert sweep.heads == tuple(heads)
    for i, head in enumerate(heads):
        with mask_heads(lm, head, "answer"):
            alone = score(lm, task)
        assert np.abs(alone.answer_logprob - sweep.logprob[i]).max() < 1e-4
        assert (alone.correct == sweep.correct[i]).all()


def test_scoring_the_answer_alone_gives_its_log_probability_and_greedy_choice():
    lm = zoo.lm("llama")
    task = a_task(lm, 6)
    every, alone = sweep_heads(lm, task), sweep_heads(lm, task, scored="answer")
    slow = sweep_heads(lm, task, scored="answer", shared=False)
    assert np.abs(every.logprob - alone.logprob).max() < 1e-5 and alone.tokens < every.tokens
    assert (alone.correct == slow.correct).all() and (alone.intact_correct == slow.intact_correct).all()
    with mask_heads(lm, alone.heads[5], "answer"):
        assert (score(lm, task).full_vocab_correct == alone.correct[5]).all()


def test_forwards_are_counted():
    lm = zoo.lm("llama")
    task = kv_task(8, 2, seed=0, format="paper", values="0-9", tokenizer=lm.tokenizer)
    fast, slow = sweep_heads(lm, task, shared=True), sweep_heads(lm, task, shared=False)
    # single-token candidates: the prompt once and one batch over its last token, for each question
    check = 1 + 1
    assert fast.calls == check + 2 * 2
    assert fast.tokens < slow.tokens / 5
    assert slow.calls >= len(lm.head_list()) + 1


def test_small_budgets_split_the_variants_and_change_nothing(monkeypatch):
    lm = zoo.lm("qwen3")
    whole = sweep_heads(lm, a_task(lm))
    monkeypatch.setattr("ga_utils.sweep.CACHE_BUDGET", 1)
    split = sweep_heads(lm, a_task(lm))
    assert split.calls > whole.calls
    assert np.abs(split.logprob - whole.logprob).max() < 1e-5


@pytest.mark.parametrize("name", ["zamba2", "nemotron_h", "minimax"])
def test_models_whose_cache_is_inexact_take_the_plain_way(name):
    lm = zoo.lm(name)
    assert lm.family in INEXACT
    assert not sweep_heads(lm, a_task(lm, 1), some_heads(lm)[:2]).shared
    with pytest.raises(TaskError, match="cannot be shared"):
        sweep_heads(lm, a_task(lm, 1), some_heads(lm)[:2], shared=True)


def test_masks_at_all_positions_take_the_plain_way():
    lm = zoo.lm("llama")
    sweep = sweep_heads(lm, a_task(lm), "L0H1,L2H3", positions="all")
    with mask_heads(lm, "L2H3"):
        assert np.allclose(score(lm, a_task(lm)).answer_logprob, sweep.logprob[1])
    assert not sweep.shared


def test_a_sweep_under_a_mask_starts_from_the_masked_model():
    lm = zoo.lm("llama")
    with mask_heads(lm, "L1H1"):
        sweep = sweep_heads(lm, a_task(lm), "L2H0")
        assert np.allclose(score(lm, a_task(lm)).answer_logprob, sweep.intact_logprob, atol=1e-4)


def test_bad_input_is_named():
    lm = zoo.lm("llama")
    with pytest.raises(HeadError, match="0-3"):
        sweep_heads(lm, a_task(lm), "L0H4")
    with pytest.raises(TaskError, match="positions"):
        sweep_heads(lm, a_task(lm), positions="first")
    with pytest.raises(TaskError, match="No head"):
        sweep_heads(lm, a_task(lm), [])
