"""A sweep over heads gives what masking each head alone gives, at a fraction of the work."""

import contextlib
import functools
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo

from ga_utils import errors
from ga_utils.caches import INEXACT
from ga_utils.errors import GAError, HeadError, TaskError
from ga_utils.language_model import wrap
from ga_utils.masking import mask_heads
from ga_utils.scoring import score
from ga_utils.sites import find_layers
from ga_utils.sweep import sweep_heads
from ga_utils.tasks import kv_task
from ga_utils.tasks.tokens import encode

SLOWER = {"minimax": "reused"}  # its cache does not continue exactly in any way
DEEP = {"30x9": (30, 9, 3.0), "32x32": (32, 32, 7.0)}


def a_task(lm, n=3, seed=5):
    return kv_task(3, n, seed=seed, format="terse", values="10-99", tokenizer=lm.tokenizer)


def one_letter(lm, pairs, n=1):
    """Answers of a single token."""
    return kv_task(pairs, n, seed=0, format="paper", values="0-9", tokenizer=lm.tokenizer)


def some_heads(lm):
    """The first and last head of the first and last site of each kind."""
    kinds = {k: [s for s in lm.sites if s.kind == k] for k in dict.fromkeys(s.kind for s in lm.sites)}
    ends = dict.fromkeys(s for sites in kinds.values() for s in (sites[0], sites[-1]))
    return [s.head(i) for s in ends for i in sorted({0, s.n_heads - 1})]


def fresh(name="llama", **overrides):
    """A model of one's own, for tests that break it; float64, so that what differs is not rounding."""
    model, tokenizer = zoo.build(name, **overrides)
    return wrap(model.double(), tokenizer, name=f"random-{name}")


def untouched(lm):
    layers = find_layers(lm.model)[1]
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in lm.model.modules())
    return hooks == 0 and not any("forward" in vars(layer) for layer in layers)


@contextlib.contextmanager
def counted(lm):
    """Tokens that each layer's MLP sees: counted from outside, below the wrapped layers and without hooks."""
    seen, mlps = [], [layer.mlp for layer in find_layers(lm.model)[1]]

    def counting(x, run):
        seen.append(x.shape[:2].numel())
        return run(x)

    try:
        for mlp in mlps:
            mlp.forward = functools.partial(counting, run=mlp.forward)
        yield seen
    finally:
        for mlp in mlps:
            del mlp.forward


@pytest.mark.parametrize("positions", ["answer", "all"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_every_architecture_gives_what_a_plain_loop_gives(name, positions):
    lm = zoo.lm(name)
    task, heads = a_task(lm, 2), some_heads(lm)
    fast, slow = sweep_heads(lm, task, heads, positions), sweep_heads(lm, task, heads, positions, shared=False)
    assert fast.way == ("reused" if positions == "all" else SLOWER.get(name, "growing")) and slow.way == "plain"
    assert np.abs(fast.logprob - slow.logprob).max() < 1e-4
    assert np.abs(fast.intact_logprob - slow.intact_logprob).max() < 1e-4
    assert (fast.correct == slow.correct).all() and (fast.intact_correct == slow.intact_correct).all()
    assert np.abs(slow.logprob - slow.intact_logprob).max() > 1e-2  # the masks did something
    # the plain way may feed padding where candidates' leaves differ in length
    assert fast.plain_token_layers <= slow.token_layers < 1.1 * fast.plain_token_layers
    assert fast.token_layers < (0.8 if positions == "all" or name in SLOWER else 0.3) * slow.token_layers
    assert untouched(lm)


@pytest.mark.parametrize("name", ["llama", "mamba", "mamba2", "zamba2", "qwen3_5", "falcon_h1", "llamba", "minimax"])
def test_masks_of_the_last_token_leave_the_answers_tokens(name):
    lm = zoo.lm(name)
    heads = some_heads(lm)
    fast, slow = (sweep_heads(lm, a_task(lm, 2), heads, "last", shared=s) for s in (None, False))
    whole = sweep_heads(lm, a_task(lm, 2), heads, "answer")
    assert np.abs(fast.logprob - slow.logprob).max() < 1e-4 < np.abs(fast.logprob - whole.logprob).max()


@pytest.mark.parametrize("positions", ["answer", "all"])
@pytest.mark.parametrize("fill", ["mean", "resample"])
@pytest.mark.parametrize("name", ["llama", "mamba2", "zamba2", "qwen3_5", "minimax"])
def test_fills_are_those_of_mask_heads(name, fill, positions):
    lm = zoo.lm(name)
    task, heads = a_task(lm, 3), some_heads(lm)[::3]
    reference = [e.prompt + " 0123456789" for e in a_task(lm, 3, seed=9).examples]
    fast, slow = (sweep_heads(lm, task, heads, positions, shared=s, fill=fill, reference=reference) for s in (None, 0))
    zero = sweep_heads(lm, task, heads, positions)
    assert fast.way != "plain"
    assert np.abs(fast.logprob - slow.logprob).max() < 1e-4 < np.abs(fast.logprob - zero.logprob).max()
    with mask_heads(lm, heads[-1], positions, fill, reference):
        assert np.abs(score(lm, task).answer_logprob - fast.logprob[-1]).max() < 1e-4


def test_a_short_reference_is_named():
    lm = zoo.lm("llama")
    task = a_task(lm, 2)
    with pytest.raises(GAError, match="example 1 has 3 tokens, but the example has"):
        sweep_heads(lm, task, "L1H1", "all", fill="resample", reference=[task.examples[0].prompt + "0000", "ab"])


@pytest.mark.parametrize("shape", DEEP)
def test_work_of_a_sweep_at_the_answer_is_that_of_a_few_forwards(shape):
    n_layers, n_heads, bound = DEEP[shape]
    lm = deep(n_layers, n_heads)
    task = one_letter(lm, 4)
    t = len(encode(lm.tokenizer, task).items[0].context)
    assert 90 <= t <= 110
    sweep_heads(lm, task, scored="answer")  # compares with the plain way, once
    with counted(lm) as seen:
        sweep = sweep_heads(lm, task, scored="answer", shared=True)
    assert len(sweep.heads) == n_layers * n_heads
    intact = t * n_layers
    assert sweep.token_layers <= bound * intact
    assert sum(seen) == sweep.token_layers + sweep.check_token_layers
    with counted(lm) as seen:
        score(lm, task)
    assert sum(seen) == intact and sweep.plain_token_layers == (len(sweep.heads) + 1) * intact


def deep(n_layers, n_heads):
    return fresh(
        num_hidden_layers=n_layers, num_attention_heads=n_heads, num_key_value_heads=n_heads, head_dim=4,
        hidden_size=4 * n_heads, intermediate_size=16,
    )  # fmt: skip


def test_work_of_a_sweep_at_all_positions_is_half_of_the_loops():
    lm = deep(30, 9)
    task = one_letter(lm, 3)
    fast = sweep_heads(lm, task, positions="all")
    assert fast.token_layers <= 0.55 * fast.plain_token_layers
    few = [fast.heads[i] for i in (0, 100, 200, 269)]
    with counted(lm) as seen:
        slow = sweep_heads(lm, task, few, positions="all", shared=False)
    assert sum(seen) * 271 == fast.plain_token_layers * 5
    assert np.abs(fast.logprob[[0, 100, 200, 269]] - slow.logprob).max() < 1e-4


def test_a_batch_as_large_as_the_time_axis_is_cut_rightly():
    """GPT-2's and others' arguments have axes of tokens too; here as many variants as tokens run at once."""
    for name in ("llama", "gpt2", "zaya"):
        lm = zoo.lm(name)
        task = a_task(lm, 1)
        t = len(encode(lm.tokenizer, task).items[0].context)
        heads = [s.head(i) for s in lm.sites for i in range(s.n_heads)]
        assert len(heads) == 12 and t > 12
        short = [replace(task.examples[0], prompt=task.examples[0].prompt[t - n :], segments=()) for n in (11, 12, 13)]
        fast, slow = (sweep_heads(lm, short, heads, "all", scored="answer", shared=s) for s in (None, False))
        assert fast.way == "reused" and np.abs(fast.logprob - slow.logprob).max() < 1e-4


def test_each_row_is_the_head_of_its_name():
    lm = zoo.lm("llama")
    task, heads = a_task(lm), lm.head_list()
    sweep = sweep_heads(lm, task)
    assert sweep.heads == tuple(heads)
    back = sweep_heads(lm, task, heads[::-1])  # any order of heads, though rows are sorted by layer
    assert np.abs(back.logprob[::-1] - sweep.logprob).max() < 1e-5
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
    lm = fresh()
    task = one_letter(lm, 8, 2)
    fast, slow = sweep_heads(lm, task, shared=True), sweep_heads(lm, task, shared=False)
    # the prompt, the intact model on its last token, and one batch over that, for each question
    assert fast.calls == 2 * 3 and fast.tokens < slow.tokens / 5
    assert slow.calls >= len(lm.head_list()) + 1
    assert fast.check_token_layers > 0
    assert sweep_heads(lm, task, shared=True).check_token_layers == 0  # compared once for each model


def test_small_budgets_split_the_variants_and_change_nothing():
    lm = zoo.lm("qwen3")
    for positions in ("answer", "all"):
        whole = sweep_heads(lm, a_task(lm), positions=positions)
        with pytest.raises(TaskError, match="holds no variant") as error:
            sweep_heads(lm, a_task(lm), positions=positions, budget=1)
        need = int(re.search(r"about (\d+) bytes", str(error.value))[1])
        split = sweep_heads(lm, a_task(lm), positions=positions, budget=3 * need)
        assert split.calls > whole.calls and split.token_layers == whole.token_layers
        assert np.abs(split.logprob - whole.logprob).max() < 1e-5


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("MPS: out of memory"), MemoryError()])
@pytest.mark.parametrize("positions", ["answer", "all"])
def test_when_memory_runs_out_batches_are_halved_and_nothing_is_lost(monkeypatch, positions, error):
    lm = fresh()
    whole = sweep_heads(lm, a_task(lm), positions=positions)
    mlp = find_layers(lm.model)[1][1].mlp
    failed = []

    def forward(x, run=mlp.forward):
        if x.shape[0] > 3:
            failed.append(len(x))
            raise error
        return run(x)

    mlp.forward = forward
    monkeypatch.setattr(errors, "_said", set())
    with pytest.warns(UserWarning, match="Memory ran out"):
        small = sweep_heads(lm, a_task(lm), positions=positions)
    assert 1 <= len(failed) <= 3  # the smaller size is kept
    assert np.abs(small.logprob - whole.logprob).max() < 1e-6 and (small.correct == whole.correct).all()
    assert untouched(lm)


def test_memory_that_does_not_hold_one_variant_is_an_error():
    lm = fresh()
    sweep_heads(lm, a_task(lm))

    def forward(x):
        raise torch.OutOfMemoryError("full")

    find_layers(lm.model)[1][2].mlp.forward = forward
    with pytest.raises(torch.OutOfMemoryError):
        sweep_heads(lm, a_task(lm))
    assert untouched(lm)


def test_an_exception_leaves_the_model_as_it_was():
    lm = fresh()
    task = a_task(lm, 1)
    before = score(lm, task).logprobs
    sweep_heads(lm, task)
    layer = find_layers(lm.model)[1][1]
    calls = []

    def forward(x, run=layer.mlp.forward):
        calls.append(len(x))
        if len(x) > 1:
            raise ZeroDivisionError
        return run(x)

    layer.mlp.forward = forward
    with pytest.raises(ZeroDivisionError):
        sweep_heads(lm, task)
    assert max(calls) > 1 and untouched(lm)
    del layer.mlp.forward
    assert (score(lm, task).logprobs == before).all()


def test_a_forward_of_a_layers_own_is_put_back():
    lm = fresh()
    layer = find_layers(lm.model)[1][1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    mine = layer.forward
    assert sweep_heads(lm, a_task(lm, 1)).way == "growing"
    assert layer.forward is mine


def said(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(w.message) for w in caught if "sweep" in str(w.message)]


@pytest.mark.parametrize("leak, way", [("rows", "shared"), ("place", "plain")])
def test_what_does_not_fit_takes_a_slower_exact_way_and_says_so(monkeypatch, leak, way):
    """rows: layer 2 also reads what layer 0 gave, behind the arguments. place: a row's result depends on its place."""
    lm = fresh()
    first, _, third = find_layers(lm.model)[1]
    stash = []

    def early(x, run=first.mlp.forward):
        stash[:] = [x]
        return run(x)

    def late(x, run=third.mlp.forward):
        place = 0.1 * torch.arange(len(x))[:, None, None]
        return run(x) + (stash[0] if leak == "rows" else place)

    first.mlp.forward, third.mlp.forward = early, late
    monkeypatch.setattr(errors, "_said", set())
    fast, words = said(lambda: sweep_heads(lm, a_task(lm, 1), "L0H0,L1H1,L2H3"))
    assert fast.way == way and len(words) == 1 and "not trusted" in words[0]
    assert said(lambda: sweep_heads(lm, a_task(lm, 1), "L0H0,L1H1,L2H3"))[1] == []
    if leak == "rows":
        slow = sweep_heads(lm, a_task(lm, 1), fast.heads, shared=False)
        assert np.abs(fast.logprob - slow.logprob).max() < 1e-4


def test_models_whose_steps_are_inexact_share_the_prompt_by_pieces_of_two_tokens(monkeypatch):
    for name in ("zamba2", "nemotron_h"):
        lm = zoo.lm(name)
        assert lm.family in INEXACT
        monkeypatch.setattr(errors, "_said", set())
        fast, words = said(lambda lm=lm: sweep_heads(lm, one_letter(lm, 3), some_heads(lm), shared=True))
        slow = sweep_heads(lm, one_letter(lm, 3), some_heads(lm), shared=False)
        assert fast.shared and len(words) == 1 and "last two tokens" in words[0]
        assert np.abs(fast.logprob - slow.logprob).max() < 1e-4


def test_a_prompt_that_cannot_be_shared_is_said_or_refused(monkeypatch):
    lm = zoo.lm("minimax")
    monkeypatch.setattr(errors, "_said", set())
    sweep, words = said(lambda: sweep_heads(lm, a_task(lm, 1), some_heads(lm)[:2]))
    assert not sweep.shared and "lightning" in words[0] and len(words) == 1
    with pytest.raises(TaskError, match="cannot be shared"):
        sweep_heads(lm, a_task(lm, 1), some_heads(lm)[:2], shared=True)
    with pytest.raises(TaskError, match="whole prompt"):
        sweep_heads(zoo.lm("llama"), a_task(lm, 1), positions="all", shared=True)


@pytest.mark.parametrize("positions, way", [("all", "growing"), ("answer", "shared")])
def test_a_sweep_under_a_mask_starts_from_the_masked_model(positions, way):
    lm = zoo.lm("llama")
    with mask_heads(lm, "L1H1", positions):
        sweep = sweep_heads(lm, a_task(lm), "L2H0,L0H2")
        assert sweep.way == way
        assert np.allclose(score(lm, a_task(lm)).answer_logprob, sweep.intact_logprob, atol=1e-4)
        with mask_heads(lm, "L0H2", "answer"):
            assert np.allclose(score(lm, a_task(lm)).answer_logprob, sweep.logprob[1], atol=1e-4)


def test_half_precision_takes_the_fast_way():
    model, tokenizer = zoo.build("llama")
    lm = wrap(model.bfloat16(), tokenizer, name="half")
    fast, slow = (sweep_heads(lm, a_task(lm), shared=s) for s in (None, False))
    assert fast.way == "growing" and 0 < np.abs(fast.logprob - slow.logprob).max() < 0.1


def test_bad_input_is_named():
    lm = zoo.lm("llama")
    task = a_task(lm)
    with pytest.raises(HeadError, match="0-3"):
        sweep_heads(lm, task, "L0H4")
    with pytest.raises(TaskError, match="positions"):
        sweep_heads(lm, task, positions="first")
    with pytest.raises(TaskError, match="No head"):
        sweep_heads(lm, task, [])
    with pytest.raises(TaskError, match="budget"):
        sweep_heads(lm, task, budget=0)
    with pytest.raises(GAError, match="'ones' is unknown"):
        sweep_heads(lm, task, fill="ones")
    with pytest.raises(GAError, match="reference"):
        sweep_heads(lm, task, fill="mean")
    with pytest.raises(GAError, match="2 reference prompts for 3 examples"):
        sweep_heads(lm, task, fill="resample", reference=["a", "b"])
    short = fresh(max_position_embeddings=32)
    with pytest.raises(TaskError, match="takes 32"):
        sweep_heads(short, a_task(short), "L0H0")
