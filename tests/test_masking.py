"""What if heads are off? Exact values of every fill and position, and each way in which one could mislead."""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo

from ga_utils.caches import Forward
from ga_utils.errors import GAError, HeadError, ModelError
from ga_utils.language_model import wrap
from ga_utils.masking import capture_inputs, mask_heads
from ga_utils.scoring import score
from ga_utils.selfcheck import self_check
from ga_utils.tasks import kv_task

PROMPTS = ["x:4. x:", "Memorize: fox:17. fox:", "owl:23, b:9"]
REFERENCES = ["y:5. y:7", "Remember the cat:39, dog.", "a reference text"]


@pytest.fixture
def lm():
    """A tiny llama of the test's own, which it may edit."""
    return wrap(*zoo.build("llama"), name="llama")


def inputs_of(lm, batch, site):
    """What the site's projection sees, behind every mask in force: [b, t, width]."""
    with torch.no_grad(), capture_inputs([site]) as inputs:
        lm.model(**batch)
    return inputs[site]


def real_rows(lm, prompts, site):
    """The projection's input at the real tokens of each prompt, one prompt at a time."""
    return [inputs_of(lm, lm.encode([p]), site)[0] for p in prompts]


# --- fills, against values computed by hand


@pytest.mark.parametrize("name", ["llama", "mamba", "mamba2", "zamba2", "qwen3_next"])
@pytest.mark.parametrize("where", ["all", "last", "answer", [[0], [1, -1], [-2, 3]]], ids=str)
@pytest.mark.parametrize("fill", ["zero", "mean", "resample"])
def test_each_fill_stands_exactly_where_it_should(name, where, fill):
    lm = zoo.lm(name)
    site = lm.sites[1]
    heads = [0, site.n_heads - 1]
    batch = lm.encode(PROMPTS)
    lengths = batch["attention_mask"].sum(1).tolist()
    plain = inputs_of(lm, batch, site)
    references = real_rows(lm, REFERENCES, site)
    ended = where in ("last", "answer")
    with mask_heads(lm, [site.head(i) for i in heads], where, fill, None if fill == "zero" else REFERENCES):
        masked = inputs_of(lm, batch, site)
    expected = plain.clone()
    for b, n in enumerate(lengths):
        at = {"all": range(n), "last": [n - 1], "answer": [n - 1]}.get(where if isinstance(where, str) else None)
        at = [p % n for p in where[b]] if at is None else at
        for p in at:
            if fill == "zero":
                value = torch.zeros(site.width)
            elif fill == "mean":
                value = torch.cat([r[-1:] if ended else r for r in references]).mean(0)
            else:
                value = references[b][-1 if ended else p]
            for i in heads:
                expected[b, p, site.channels(i)] = value[site.channels(i)]
        real = torch.arange(plain.shape[1]) < n
        torch.testing.assert_close(masked[b, real], expected[b, real], atol=2e-5, rtol=1e-4)
    # nothing but the chosen channels was touched, pads included
    others = torch.ones(site.width, dtype=torch.bool)
    for i in heads:
        others[site.channels(i)] = False
    assert torch.equal(masked[..., others], plain[..., others])


def test_resampling_follows_the_rows_that_are_asked(lm):
    site, head = lm.sites[0], lm.sites[0].head(1)
    references = real_rows(lm, REFERENCES, site)
    batch = lm.encode([PROMPTS[2], PROMPTS[0]])
    with mask_heads(lm, head, [[0], [9], [2]], "resample", REFERENCES), lm.asking(rows=[2, 0]):
        found = inputs_of(lm, batch, site)
    c = site.channels(1)
    torch.testing.assert_close(found[0, 2, c], references[2][2, c], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1, 0, c], references[0][0, c], atol=1e-5, rtol=1e-4)


def test_masking_by_hand_equals_masking_by_zeroed_weights(lm):
    """The paper's protocol: all positions, columns of the output projection set to zero."""
    batch = lm.encode(PROMPTS)
    with torch.no_grad(), mask_heads(lm, "L1H2,L2H0"):
        masked = lm.model(**batch).logits
    for layer, head in ((1, 2), (2, 0)):
        lm.model.model.layers[layer].self_attn.o_proj.weight.data[:, 16 * head : 16 * (head + 1)] = 0
    torch.testing.assert_close(masked, lm.model(**batch).logits.detach(), atol=1e-5, rtol=1e-5)


def test_reference_forwards_do_not_see_the_callers_layout(lm):
    batch = lm.encode(PROMPTS)
    with mask_heads(lm, "L0H1", "last", "mean", REFERENCES):
        expected = lm.model(**batch).logits
    # an outer mask at other positions, and a layout that fits the batch but not the references
    ends = batch["attention_mask"].sum(1) - 1
    with mask_heads(lm, "L2H0", "last"):
        with mask_heads(lm, "L0H1", "last", "mean", REFERENCES):
            nested = lm.model(**batch).logits
        with (
            lm.asking(ends, torch.zeros(3), [0, 1, 2]),
            mask_heads(lm, "L0H1", "last", "mean", REFERENCES[:2] * 5),
        ):
            lm.model(**batch)
    assert not torch.equal(nested, expected)


@pytest.mark.parametrize(
    ("fill", "reference", "says"),
    [
        ("zero", REFERENCES, "takes no reference"),
        ("mean", None, "needs reference"),
        ("resample", None, "needs reference"),
        ("mean", [], "one prompt or more"),
        ("mean", "a text", "list of one prompt"),  # not eight prompts of one letter
        ("resample", ["a", 3], "list of one prompt"),
        ("median", REFERENCES, "'zero', 'mean' or 'resample'"),
        (None, None, "unknown"),
    ],
)
def test_wrong_fills_are_refused_before_anything_runs(lm, fill, reference, says):
    ran = []
    lm.model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(GAError, match=says), mask_heads(lm, "L0H0", fill=fill, reference=reference):
        pytest.fail("the block was entered")
    assert not ran


def test_an_empty_reference_prompt_is_refused():
    model, _ = zoo.build("llama")
    lm = wrap(model, zoo.tokenizer(bos=False))
    for fill in ("mean", "resample"):
        with pytest.raises(GAError, match="no tokens: ''"), mask_heads(lm, "L0H0", "last", fill, ["abc", ""]):
            pytest.fail("the block was entered")


@pytest.mark.parametrize("count", [2, 4])
def test_resampling_needs_one_reference_for_each_example(lm, count):
    with (
        mask_heads(lm, "L0H0", "last", "resample", (REFERENCES * 2)[:count]),
        pytest.raises(HeadError, match=str(count)),
    ):
        lm.model(**lm.encode(PROMPTS))


def test_resampling_needs_references_as_long_as_the_masked_positions(lm):
    short = ["y", "Remember the cat:39, dog.", "a reference text"]
    with mask_heads(lm, "L0H0", [[1], [0], [0]], "resample", short):
        lm.model(**lm.encode(PROMPTS))  # the first has two tokens, <s> and y
    with mask_heads(lm, "L0H0", "all", "resample", short), pytest.raises(GAError, match="fewer tokens"):
        lm.model(**lm.encode(PROMPTS))


def test_references_of_one_token_do_not_stand_for_other_positions():
    model, _ = zoo.build("llama")
    lm = wrap(model, zoo.tokenizer(bos=False))
    batch = lm.encode(["ab", "cd"])
    with mask_heads(lm, "L0H0", "all", "resample", ["x", "y"]), pytest.raises(GAError, match="fewer tokens"):
        lm.model(**batch)
    with mask_heads(lm, "L0H0", "last", "resample", ["x", "y"]):
        lm.model(**batch)


# --- positions


@pytest.mark.parametrize(
    "positions",
    ["First", "", "ALL", 3, 1.5, [0, 1, 2], [[0.5]], [["a"]], [[None]], [[True]], {0: [1]}, {(1,), (2,)},
     [None], torch.ones(3, 8, dtype=torch.bool), np.ones((3, 8), dtype=bool), ["last", "last", "last"]],
    ids=repr,
)  # fmt: skip
def test_wrong_positions_are_one_sentence_before_anything_runs(lm, positions):
    with pytest.raises(HeadError, match=r"^positions=.*\.$"), mask_heads(lm, "L0H0", positions):
        pytest.fail("the block was entered")


@pytest.mark.parametrize(
    "positions",
    [
        ((1,), (0, 2), (3,)),
        np.array([[1], [0], [3]]),
        torch.tensor([[1], [0], [3]]),
        [range(2), range(0), [1]],
    ],
)
def test_lists_may_be_of_any_library(lm, positions):
    site, batch = lm.sites[0], lm.encode(PROMPTS)
    with mask_heads(lm, "L0H3", positions):
        found = inputs_of(lm, batch, site)
    off = (found[..., site.channels(3)] == 0).all(-1)
    assert [r.nonzero().flatten().tolist() for r in off] == [[int(p) for p in row] for row in positions]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_there_must_be_one_list_for_each_example(lm, count):
    with mask_heads(lm, "L0H0", [[0]] * count), pytest.raises(HeadError, match=f"{count} lists.*3 examples"):
        lm.model(**lm.encode(PROMPTS))


@pytest.mark.parametrize("position", [8, -9, 100])
def test_a_position_outside_the_prompt_names_prompt_and_length(lm, position):
    with (
        mask_heads(lm, "L0H0", [[position], [0], [0]]),
        pytest.raises(HeadError, match=f"Position {position}.*example 0.*8"),
    ):
        lm.model(**lm.encode(PROMPTS))


def test_what_asking_says_must_fit_the_batch(lm):
    batch = lm.encode(PROMPTS)
    for said in (
        dict(rows=[0, 1]),
        dict(rows=[0, 1, 2, 2]),
        dict(prompt_ends=torch.tensor([3])),
        dict(past=torch.zeros(2)),
    ):
        with mask_heads(lm, "L0H0", "last"), lm.asking(**said), pytest.raises(HeadError, match="lm.asking"):
            lm.model(**batch)
    with (
        mask_heads(lm, "L0H0", [[0]] * 3),
        lm.asking(rows=[0, 1, 3]),
        pytest.raises(HeadError, match="an example 3"),
    ):
        lm.model(**batch)


def masked_columns(lm, site, index, run):
    """Where head `index` of `site` is off in each forward call inside `run`: one [b, t] for each."""
    calls = []

    def look(module, args):
        calls.append((args[0][..., site.channels(index)] == 0).all(-1))

    handle = site.proj.register_forward_pre_hook(look)
    try:
        with torch.no_grad():
            run()
    finally:
        handle.remove()
    return calls


@pytest.mark.parametrize(
    ("where", "prompt", "answer"),
    [
        ("all", "11111111", "111"),
        ("last", "00000001", "000"),
        ("answer", "00000001", "111"),
        ([[-1, 2]], "00100001", "000"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "mamba2", "zamba2", "minimax", "qwen3_next", "llamba"])
def test_generation_masks_the_prompt_and_its_answer_as_one_forward_does(name, where, prompt, answer):
    lm = zoo.lm(name)
    site = lm.sites[0]
    batch = lm.encode(["x:4. x:"])
    with mask_heads(lm, site.head(1), where):
        out = []
        calls = masked_columns(
            lm,
            site,
            1,
            lambda: out.append(lm.model.generate(**batch, max_new_tokens=4, do_sample=False, eos_token_id=None)),
        )
    text = ["".join(str(int(v)) for v in call[0]) for call in calls]
    assert text == [prompt, *answer]
    # the same in one forward over everything, told where the prompt ends
    with mask_heads(lm, site.head(1), where), lm.asking(prompt_ends=torch.tensor([7])):
        (full,) = masked_columns(lm, site, 1, lambda: lm.model(out[0][:, :-1]))
        logits = lm.model(out[0][:, :-1]).logits
    assert "".join(str(int(v)) for v in full[0]) == prompt + answer
    assert torch.equal(logits[0, 7:].argmax(-1), out[0][0, 8:])  # greedy: the cached run followed the same masks


def test_padded_generation_is_told_apart_by_the_mask(lm):
    batch = {k: v.flip(1) for k, v in lm.encode(PROMPTS).items()}  # padding on the left
    with mask_heads(lm, "L0H1", [[0], [1], [-1]]):
        calls = masked_columns(
            lm, lm.sites[0], 1, lambda: lm.model.generate(**batch, max_new_tokens=3, do_sample=False)
        )
    t = batch["input_ids"].shape[1]
    lengths = batch["attention_mask"].sum(1).tolist()
    expected = [t - lengths[0], t - lengths[1] + 1, t - 1]
    off = calls[0] & batch["attention_mask"].bool()  # attention from a pad to nothing is zero by itself
    assert off.nonzero().tolist() == [[0, expected[0]], [1, expected[1]], [2, expected[2]]]
    assert not any(c.any() for c in calls[1:])


def cached(lm, prompt):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = lm.encode([prompt])
        name = Forward(lm).cache_name
        return batch["input_ids"].shape[1], name, getattr(lm.model(batch["input_ids"], use_cache=True), name)


@pytest.mark.parametrize(
    ("where", "step"), [("last", "00"), ("answer", "11"), ([[7]], "00"), ([[-1, 0]], "00")], ids=str
)
def test_cached_steps_of_a_told_layout(lm, where, step):
    n, name, cache = cached(lm, "x:4. x:")
    with mask_heads(lm, "L1H1", where), lm.asking(torch.tensor([n - 1]), torch.tensor([n]), [0]):
        (found,) = masked_columns(
            lm, lm.sites[1], 1, lambda: lm.model(torch.tensor([[9, 10]]), **{name: cache}, use_cache=True)
        )
    assert "".join(str(int(v)) for v in found[0]) == step


def test_the_last_chunk_of_a_prompt_may_come_after_a_cache(lm):
    n, name, cache = cached(lm, "x:4. x:")
    ids = torch.tensor([[9, 10, 11]])
    with mask_heads(lm, "L1H1", "last"), lm.asking(torch.tensor([n + 1]), torch.tensor([n])):
        (found,) = masked_columns(lm, lm.sites[1], 1, lambda: lm.model(ids, **{name: cache}, use_cache=True))
    assert found[0].tolist() == [False, True, False]


@pytest.mark.parametrize("where", ["last", "answer", [[0]]], ids=str)
@pytest.mark.parametrize("name", ["llama", "mamba2", "llamba"])
def test_a_cache_of_unknown_prompts_is_refused(name, where):
    lm = zoo.lm(name)
    _, keyword, cache = cached(lm, "x:4. x:")
    with mask_heads(lm, lm.sites[0].head(0), where), pytest.raises(HeadError, match="continues a cache"):
        lm.model(torch.tensor([[9]]), **{keyword: cache}, use_cache=True)


def test_lists_count_in_the_prompt_whatever_candidates_follow(lm):
    """-1 is the prompt's last token in full forwards over prompt and candidate, and in cached steps alike."""
    task = kv_task(2, 4, seed=3, format="terse", tokenizer=lm.tokenizer)
    heads = [s.head(2) for s in lm.sites]
    with mask_heads(lm, heads, "last"):
        last = score(lm, task).logprobs
    with mask_heads(lm, heads, [[-1]] * 4):
        lists = score(lm, task).logprobs
    np.testing.assert_allclose(last, lists, atol=1e-9)
    with mask_heads(lm, heads):
        assert abs(score(lm, task).logprobs - last).max() > 1e-3


@pytest.mark.parametrize("where", ["last", "answer", [[0], [0], [0]]], ids=str)
def test_pads_without_an_attention_mask_are_refused_where_it_matters(lm, where):
    batch = lm.encode(PROMPTS)
    ids = batch["input_ids"]
    for padded in (ids, ids.flip(1)):
        with mask_heads(lm, "L0H0", where), pytest.raises(HeadError, match="attention_mask"):
            lm.model(padded)
    with mask_heads(lm, "L0H0", where), pytest.raises(HeadError, match="attention_mask"):
        lm.model(inputs_embeds=lm.model.get_input_embeddings()(ids))
    with mask_heads(lm, "L0H0", where), pytest.raises(HeadError, match="not \\[batch, time\\]"):
        lm.model(ids, attention_mask=torch.zeros(3, 1, ids.shape[1], ids.shape[1]))
    with mask_heads(lm, "L0H0", "all"):
        lm.model(ids)  # right padding needs no mask, and every position is masked


def test_one_padded_row_without_an_attention_mask_is_refused(lm):
    ids = lm.encode(PROMPTS)["input_ids"][:1]
    with mask_heads(lm, "L0H0", "last"), pytest.raises(HeadError, match="attention_mask"):
        lm.model(ids)


def test_a_tokenizer_without_pad_token_is_checked_by_what_encode_pads_with():
    model, _ = zoo.build("llama")
    lm = wrap(model, zoo.tokenizer(pad=False))
    assert lm.pad_id == 2
    ids = lm.encode(PROMPTS)["input_ids"]
    with mask_heads(lm, "L0H0", "last"), pytest.raises(HeadError, match="attention_mask"):
        lm.model(ids)
    with mask_heads(lm, "L0H0", "last"):
        lm.model(torch.tensor([[1, 5, 6, 2]]))  # one prompt may end in EOS


def test_a_mask_passed_by_position_is_seen(lm):
    batch = lm.encode(PROMPTS)
    with mask_heads(lm, "L0H0", "last"):
        found = masked_columns(lm, lm.sites[0], 0, lambda: lm.backbone(batch["input_ids"], batch["attention_mask"]))
    assert found[0].nonzero()[:, 1].tolist() == (batch["attention_mask"].sum(1) - 1).tolist()


def test_layers_called_on_their_own_have_no_positions(lm):
    x = torch.randn(1, 4, 64)
    attention = lm.model.model.layers[0].self_attn
    cos_sin = lm.model.model.rotary_emb(x, torch.arange(4)[None])
    with mask_heads(lm, "L0H0", "last"), pytest.raises(ModelError, match="outside a forward call"):
        attention(x, position_embeddings=cos_sin, attention_mask=None)
    with mask_heads(lm, "L0H0", "all"):
        attention(x, position_embeddings=cos_sin, attention_mask=None)


def test_two_language_models_of_one_model_share_what_is_asked(lm):
    other = wrap(lm.model, lm.tokenizer, name="another label")
    ids = torch.tensor([[1, 5, 6, 7, 8]])
    with mask_heads(lm, "L0H0", "last"), other.asking(prompt_ends=torch.tensor([2])):
        (found,) = masked_columns(lm, lm.sites[0], 0, lambda: other.model(ids))
    assert found[0].tolist() == [False, False, True, False, False]
    assert lm.layout is None and other.layout is None


# --- hooks of others, copies, fused kernels


def test_a_users_hook_on_the_same_projection_stays_and_keeps_its_order(lm):
    order, seen = [], []
    site, batch = lm.sites[1], lm.encode(PROMPTS[:1])
    proj = site.proj

    def first(module, args):
        order.append("first")
        return (args[0] + 1.0,)

    def second(module, args):
        order.append("second")
        seen.append(args[0].clone())

    kept = [proj.register_forward_pre_hook(first), proj.register_forward_pre_hook(second)]
    plain = lm.model(**batch).logits
    hooks = list(proj._forward_pre_hooks.items())
    with mask_heads(lm, "L1H0"):
        order.clear()
        masked = lm.model(**batch).logits
        assert order == ["first", "second"]  # before the mask: the mask has the last word
        late = proj.register_forward_pre_hook(lambda m, a: seen.append(a[0].clone()))
        lm.model(**batch)
        assert float(seen[-1][..., site.channels(0)].abs().max()) == 0
        torch.testing.assert_close(seen[-1][..., 16:], seen[-2][..., 16:], atol=0, rtol=0)
    assert late.id in proj._forward_pre_hooks  # hooks made inside the block stay too
    late.remove()
    assert list(proj._forward_pre_hooks.items()) == hooks
    assert not torch.equal(masked, plain)
    assert torch.equal(lm.model(**batch).logits, plain)
    [h.remove() for h in kept]


def bypass(proj, when=lambda: True):
    """Let the projection's mixer multiply by its weight without calling it, as a fused kernel does."""
    original = proj.__class__

    class Fused(original):
        def __call__(self, x):
            return F.linear(x, self.weight) if when() else super().__call__(x)

    proj.__class__ = Fused


@pytest.mark.parametrize("where", ["all", "last"])
def test_a_projection_that_is_not_called_is_an_error(lm, where):
    bypass(lm.sites[1].proj)
    with pytest.raises(ModelError, match="never reached.*LlamaAttention"), mask_heads(lm, "L1H0,L1H2", where):
        lm.model(**lm.encode(PROMPTS))
    with mask_heads(lm, "L0H0", where):  # other layers are as they were
        lm.model(**lm.encode(PROMPTS))


def test_a_projection_that_is_called_only_sometimes_is_an_error(lm):
    fused = []
    bypass(lm.sites[1].proj, lambda: bool(fused))
    with pytest.raises(ModelError, match="1 of 2 forward"), mask_heads(lm, "L1H0"):
        lm.model(**lm.encode(PROMPTS))
        fused.append(True)
        lm.model(**lm.encode(PROMPTS))


def test_the_self_check_refuses_a_model_with_a_fused_projection(lm):
    bypass(lm.sites[1].proj)
    with pytest.raises(ModelError, match="layer 1 .*never called"):
        self_check(lm)


def test_the_self_check_refuses_a_model_that_runs_a_layer_twice(lm):
    """A mask on the layer would reach both calls: a head is not one place in such a model."""
    layer = lm.model.model.layers[1]
    once = layer.forward
    layer.forward = lambda x, **kwargs: once(once(x, **kwargs), **kwargs)
    with pytest.raises(ModelError, match="layer 1 .*ran 2 times"):
        self_check(lm)


def test_a_forward_that_failed_is_not_counted(lm):
    """Out of memory at a large batch, then a smaller one: layers above the failure were not reached."""
    batch, failures = lm.encode(PROMPTS), [1]

    def fail_once(module, args):
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("pretended")

    handle = lm.model.model.layers[0].register_forward_pre_hook(fail_once)
    with mask_heads(lm, "L2H0"):
        with pytest.raises(torch.OutOfMemoryError):
            lm.model(**batch)
        lm.model(**batch)
    handle.remove()


@pytest.mark.parametrize(
    "train", [lambda lm: lm.model.train(), lambda lm: lm.sites[2].mixer.train()], ids=["all", "mixer"]
)
def test_training_mode_is_refused(lm, train):
    train(lm)
    with pytest.raises(ModelError, match="training mode.*eval"), mask_heads(lm, "L2H0"):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("where", ["all", "last"])
def test_a_copy_made_inside_the_block_would_stay_masked_and_is_refused(lm, where):
    with mask_heads(lm, "L0H0", where), pytest.raises(GAError, match="copy it before"):
        copy.deepcopy(lm.model)
    twin = copy.deepcopy(lm.model)  # outside it is fine
    batch = lm.encode(PROMPTS)
    assert torch.equal(twin(**batch).logits, lm.model(**batch).logits)


# --- a mask that changes nothing


def changed_nothing(lm, heads, positions="all", batch=None, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mask_heads(lm, heads, positions, **kwargs):
            if batch is not None:
                lm.model(**batch)
    return [str(w.message) for w in caught if "changed nothing" in str(w.message)]


def test_a_mask_that_changes_nothing_warns_and_no_other_does(lm):
    batch = lm.encode(PROMPTS)
    for where in ("all", "last", "answer", [[0], [], []]):
        assert not changed_nothing(lm, "L0H0,L2H3", where, batch)
        assert not changed_nothing(lm, "L0H0", where, batch, fill="mean", reference=REFERENCES)
    assert not changed_nothing(lm, "L0H0")  # the model did not run
    assert not changed_nothing(lm, [], batch=batch)
    with mask_heads(lm, "L0H0"):
        (text,) = changed_nothing(lm, "L0H0", "last", batch)  # already off
        assert "L0H0" in text
        assert not changed_nothing(lm, "L0H1", "last", batch)
    assert len(changed_nothing(lm, "L0H0,L1H0", [[], [], []], batch)) == 2
    # a head that says nothing: its values are zero
    values = lm.model.model.layers[1].self_attn.v_proj.weight.data
    values[:16] = 0  # kv head 0 serves query heads 0 and 1
    assert len(changed_nothing(lm, "L1H0,L1H1", batch=batch)) == 1
    assert not changed_nothing(lm, "L1H1,L1H2", batch=batch)


def test_an_empty_list_of_heads_changes_nothing(lm):
    batch = lm.encode(PROMPTS)
    plain = lm.model(**batch).logits
    for kwargs in ({}, dict(positions="last"), dict(fill="mean", reference=REFERENCES)):
        with mask_heads(lm, [], **kwargs):
            assert torch.equal(lm.model(**batch).logits, plain)


# --- numbers, gradients, memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("fill", ["zero", "mean", "resample"])
def test_other_dtypes(dtype, fill):
    model, tok = zoo.build("zamba2")
    lm = wrap(model.to(dtype), tok)
    batch = lm.encode(PROMPTS)
    for site in (s for s in lm.sites if s.layer == 1):
        with mask_heads(lm, site.head(1), "last", fill, None if fill == "zero" else REFERENCES):
            x = inputs_of(lm, batch, site)
        assert x.dtype == dtype
        ends = x[torch.arange(3), batch["attention_mask"].sum(1) - 1][:, site.channels(1)]
        assert bool((ends == 0).all()) == (fill == "zero") and bool(ends.isfinite().all())
    assert self_check(lm).ok


def test_gradients_flow_around_a_mask_and_not_through_it(lm):
    batch = lm.encode(PROMPTS[:1])
    with mask_heads(lm, "L1H0"):
        lm.model(**batch).logits.square().sum().backward()
    grad = lm.model.model.layers[1].self_attn.o_proj.weight.grad
    assert float(grad[:, :16].abs().max()) == 0  # a masked head has no say
    assert float(grad[:, 16:].abs().max()) > 0
    assert float(lm.model.model.layers[0].self_attn.q_proj.weight.grad.abs().max()) > 0


def test_fifty_sweeps_leave_memory_and_hooks_as_they_were(lm):
    batch = lm.encode(PROMPTS)
    heads = lm.head_list()

    def sweep():
        for head in heads[::3]:
            with torch.no_grad(), mask_heads(lm, head, "last"):
                lm.model(**batch)
        with torch.no_grad(), mask_heads(lm, heads[:4], "all", "mean", REFERENCES):
            lm.model(**batch)

    def state():
        gc.collect()
        modules = list(lm.model.modules())
        hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)
        extras = sum(len(m._forward_pre_hooks_with_kwargs) + len(m._forward_hooks_always_called) for m in modules)
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects()), hooks, extras

    sweep()
    before = state()
    for _ in range(50):
        sweep()
    assert state() == before


def test_masks_work_with_the_heads_of_each_layer_as_the_layer_counts_them():
    """Inkling's sliding layers have their own number of heads; the configuration's would cut wrongly."""
    model, tok = zoo.build("inkling", swa_num_attention_heads=2, swa_num_key_value_heads=1, swa_head_dim=32)
    lm = wrap(model, tok)
    assert [(s.n_heads, s.head_dim) for s in lm.sites] == [(2, 32), (4, 16), (2, 32)]
    with pytest.raises(HeadError, match="heads 0-1"), mask_heads(lm, "L0H2"):
        pass
    assert self_check(lm).ok


@pytest.mark.parametrize("name", [n for n in zoo.NAMES if any(s.kind == "attention" for s in zoo.lm(n).sites)])
def test_the_width_of_an_attention_head_is_the_one_its_module_computes_with(name):
    for site in zoo.lm(name).sites:
        if site.kind == "attention":
            widths = {getattr(site.mixer, a, None) for a in ("v_head_dim", "head_dim", "head_size")}
            assert site.head_dim in widths, (site, widths)
