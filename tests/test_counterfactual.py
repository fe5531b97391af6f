"""Paired prompts hold the same tokens, and effects on them are those of masks made by hand."""

import dataclasses

import numpy as np
import pytest
import zoo

from ga_utils.counterfactual import check_pairs, logit_difference, swappable, swapped
from ga_utils.errors import GAError, HeadError, TaskError
from ga_utils.interactions import interaction, paired_effects
from ga_utils.masking import mask_heads
from ga_utils.models import load
from ga_utils.scoring import score
from ga_utils.tasks import kv_task
from ga_utils.tasks.base import Example, Segment, Task
from ga_utils.tiny import questions, shipping


@pytest.fixture(scope="module")
def tiny():
    return load(shipping.folder("tiny-llama"), dtype="float32", device="cpu")


def text(example, i):
    return example.prompt[slice(*example.segments[i].value)]


def a_kv_task(lm, n=4, **settings):
    return kv_task(4, n, 3, tokenizer=lm.tokenizer, **{"format": "terse", "values": "0-9"} | settings)


TASKS = {
    "letter": lambda n: questions.letter_task(n, 1),
    "copy-letter": lambda n: questions.copy_letter_task(n, 1),
    "kv": lambda n: questions.kv_task(4, n, 1),
}


@pytest.mark.parametrize("name", TASKS)
def test_only_two_values_change_places_and_the_other_candidate_becomes_right(name, tiny):
    task = TASKS[name](20)
    pairs = swapped(task, seed=2)
    check_pairs(tiny, pairs)
    for old, new, (right, other) in zip(task.examples, pairs.swapped.examples, pairs.places, strict=True):
        assert old.candidates == new.candidates and (old.answer, new.answer) == (right, other)
        values = [text(old, i) for i in range(len(old.segments))]
        values[right], values[other] = values[other], values[right]
        assert [text(new, i) for i in range(len(new.segments))] == values
        lines = [old.prompt[slice(*s.span)] for s in old.segments]
        for i, j in ((right, other), (other, right)):
            lines[i] = lines[i].replace(text(old, i), text(old, j))
        assert [new.prompt[slice(*s.span)] for s in new.segments] == lines
        assert sorted(old.prompt.split()) == sorted(new.prompt.split())
        # the question is the same: what is asked for, and where the line that answers it now lies
        asked = old.prompt[old.segments[-1].span[1] :]
        assert new.prompt.endswith(asked) and [s.right for s in new.segments].count(True) == 1
        line = next(new.prompt[slice(*s.span)] for s in new.segments if s.right)
        if name == "kv":
            assert line.strip() == f"{asked.removeprefix('value ')}{new.candidates[other]}"
        if name == "copy-letter":
            assert line.strip() == f"{new.candidates[other].strip()} {asked.removeprefix('match ')}"


def test_a_trained_model_follows_the_swap(tiny):
    for make in TASKS.values():
        pairs = swapped(make(20))
        here, there = (logit_difference(tiny, pairs, on) for on in ("task", "swapped"))
        assert (here > 0).mean() > 0.8 and (there < 0).mean() > 0.8


def test_draws_depend_on_the_seed_and_the_examples_own_number():
    task = questions.letter_task(30, 1)
    assert swapped(task, 0).places[:10] == swapped(task.take(10), 0).places
    assert swapped(task, 0).places != swapped(task, 1).places
    assert {o for _, o in swapped(task, 0).places} == {0, 1, 2, 3}
    assert swapped(task, 0).swapped.digest == swapped(task, 0).swapped.digest != task.digest


def test_the_difference_is_that_of_the_two_candidates_log_probabilities():
    lm = zoo.lm("llama")
    task = a_kv_task(lm, values="10-99")  # two tokens each
    pairs = swapped(task)
    check_pairs(lm, pairs)
    scores = score(lm, task).logprobs
    for i, (right, other) in enumerate(pairs.places):
        assert abs(logit_difference(lm, pairs)[i] - (scores[i, right] - scores[i, other])) < 1e-5
    back = score(lm, pairs.swapped).logprobs
    want = [back[i, r] - back[i, o] for i, (r, o) in enumerate(pairs.places)]
    assert np.allclose(logit_difference(lm, pairs, "swapped"), want, atol=1e-5)


def test_only_distractors_of_as_many_tokens_are_drawn_where_the_tokenizer_is_given():
    tok = zoo.tokenizer()
    lines = ["A red\n", "B green\n", "C tan\n", "D yellow\n"]
    segments, at = [], 0
    for line in lines:
        segments.append(Segment((at, at + len(line)), (at + 2, at + len(line) - 1), line[0] == "A"))
        at += len(line)
    example = Example("".join(lines) + "red is", (" A", " B", " C", " D"), 0, tuple(segments))
    lonely = dataclasses.replace(
        example, answer=1, segments=tuple(dataclasses.replace(s, right=i == 1) for i, s in enumerate(segments))
    )
    for seed in range(5):
        assert swapped([example], seed, tok).places == ((0, 2),)
    drawn = {swapped([example], seed).places[0][1] for seed in range(20)}
    assert drawn == {1, 2, 3}
    with pytest.raises(TaskError, match="Example 1 .* no other value of as many tokens .*'green'.*swappable"):
        swapped([example, lonely], 0, tok)
    kept = swappable([lonely, example], tok)
    assert kept.examples == (example,)
    with pytest.raises(TaskError, match="no example with a distractor"):
        swappable([lonely], tok)
    lm = zoo.lm("llama")
    bad = next(p for p in (swapped([example], s) for s in range(20)) if p.places[0][1] == 1)
    with pytest.raises(TaskError, match="also differ at token"):
        check_pairs(lm, bad)


def test_pairs_that_are_no_swap_are_refused():
    lm = zoo.lm("llama")
    task = a_kv_task(lm)
    pairs = swapped(task)

    def changed(**changes):
        first = dataclasses.replace(pairs.swapped.examples[0], **changes)
        swap = dataclasses.replace(pairs.swapped, examples=(first, *pairs.swapped.examples[1:]))
        return dataclasses.replace(pairs, swapped=swap)

    prompt = pairs.swapped.examples[0].prompt
    with pytest.raises(TaskError, match="Example 0 .* tokens, so positions do not correspond"):
        check_pairs(lm, changed(prompt=prompt + "?"))
    with pytest.raises(TaskError, match="Example 0 .*also differ at token"):
        check_pairs(lm, changed(prompt=prompt[:-2] + "x:"))
    with pytest.raises(TaskError, match="Example 0 .*have the same tokens"):
        check_pairs(lm, changed(prompt=task.examples[0].prompt))
    a, b = pairs.swapped.examples[0].segments[pairs.places[0][0]].value
    with pytest.raises(TaskError, match="Example 0 .*hold different tokens"):
        check_pairs(lm, changed(prompt=prompt[:a] + "#" + prompt[b:]))
    with pytest.raises(TaskError, match="different tokens for the same candidates"):
        check_pairs(lm, changed(candidates=tuple(c + "0" for c in pairs.swapped.examples[0].candidates)))
    for call in (check_pairs, logit_difference):
        with pytest.raises(TaskError, match="Pairs of prompts are needed"):
            call(lm, task)
    with pytest.raises(TaskError, match="on='back' is unknown"):
        logit_difference(lm, pairs, "back")


def test_tasks_that_hold_nothing_to_swap_are_refused():
    with pytest.raises(TaskError, match="Example 0 of task 'tiny-cloze' has no segments"):
        swapped(questions.cloze_task(2, 0))
    with pytest.raises(TaskError, match="has only one segment"):
        swapped(questions.kv_task(1, 2, 0))
    example = questions.letter_task(1, 0).examples[0]
    with pytest.raises(TaskError, match="3 segments .* 4 candidates"):
        swapped([dataclasses.replace(example, segments=example.segments[:3])])
    same = Example("A x\nB x\n?", ("A", "B"), 0, (Segment((0, 4), (2, 3), True), Segment((4, 8), (6, 7))))
    with pytest.raises(TaskError, match="no other value to swap the answer's 'x' with"):
        swapped([same])


@pytest.mark.parametrize("fill", ["zero", "mean", "swapped"])
def test_effects_are_losses_of_the_difference_under_a_mask(fill):
    lm = zoo.lm("qwen3")
    pairs = swapped(a_kv_task(lm, 5))
    table = paired_effects(lm, pairs, fill=fill)
    assert len(table) == len(lm.head_list()) and (table.effect.diff()[1:] <= 0).all()
    references = {
        "zero": {},
        "mean": {"fill": "mean", "reference": [e.prompt for t in (pairs.task, pairs.swapped) for e in t.examples]},
        "swapped": {"fill": "resample", "reference": [e.prompt for e in pairs.swapped.examples]},
    }
    intact = logit_difference(lm, pairs)
    for _, row in table.iloc[[0, 5, -1]].iterrows():
        with mask_heads(lm, row["head"], "answer", **references[fill]):
            change = intact - logit_difference(lm, pairs)
        assert row.effect == pytest.approx(change.mean(), abs=1e-6)
        assert row.se == pytest.approx(np.std(change, ddof=1) / 5**0.5, abs=1e-6)
        assert row.z == pytest.approx(row.effect / row.se)


def test_the_swapped_fill_at_all_positions_is_that_of_the_whole_prompt():
    lm = zoo.lm("llama")
    for values in ("0-9", "10-99"):  # answers of two tokens go beyond what the swapped prompt has
        pairs = swapped(a_kv_task(lm, values=values))
        table = paired_effects(lm, pairs, "L1H2", "all", "swapped")
        prompts = [e.prompt for e in pairs.swapped.examples]
        everywhere = [range(len(lm.tokenizer(p)["input_ids"])) for p in prompts]
        with mask_heads(lm, "L1H2", everywhere, "resample", prompts):
            by_hand = logit_difference(lm, pairs)
        assert table.effect[0] == pytest.approx((logit_difference(lm, pairs) - by_hand).mean(), abs=1e-6)
        assert abs(table.effect[0]) > 1e-4


def test_interaction_is_the_joint_loss_less_the_single_ones():
    lm = zoo.lm("llama")
    task = a_kv_task(lm, 6)
    for asked in (task, swapped(task)):

        def measure(asked=asked):
            return logit_difference(lm, asked) if asked is not task else score(lm, task).answer_logprob

        table = interaction(lm, asked, "L0H1, L2H0", ["L1H0", "L2H3"])
        assert list(zip(table.gather_head, table.aggregate_head, table.can_feed, strict=True)) == [
            ("L0H1", "L1H0", True),
            ("L0H1", "L2H3", True),
            ("L2H0", "L1H0", False),
            ("L2H0", "L2H3", False),
        ]
        intact = measure()
        for _, row in table.iterrows():
            with mask_heads(lm, row.gather_head, "all"):
                g = intact - measure()
                with mask_heads(lm, row.aggregate_head, "answer"):
                    both = intact - measure()
            with mask_heads(lm, row.aggregate_head, "answer"):
                a = intact - measure()
            wanted = {"gather": g, "aggregate": a, "joint": both, "interaction": both - g - a}
            for name, values in wanted.items():
                column = name if name in ("joint", "interaction") else f"{name}_effect"
                assert row[column] == pytest.approx(values.mean(), abs=1e-5)
                assert row[f"{name}_se"] == pytest.approx(np.std(values, ddof=1) / 6**0.5, abs=1e-5)


def test_heads_that_only_act_apart_do_not_interact():
    # in the last layer, heads add to the residual stream side by side: without a final norm the logit difference is
    # linear in them
    import torch

    model, tok = zoo.build("llama")
    model.model.norm = torch.nn.Identity()
    model.model.layers[2].mlp.down_proj.weight.data.zero_()
    from ga_utils.language_model import wrap

    lm = wrap(model, tok)
    table = interaction(lm, swapped(a_kv_task(lm, values="0-9")), "L2H0", "L2H1 L2H3", ("answer", "answer"))
    assert table.interaction.abs().max() < 1e-4 < table.joint.abs().min()


def test_bad_arguments_are_one_sentence():
    lm = zoo.lm("llama")
    task = a_kv_task(lm)
    pairs = swapped(task)
    with pytest.raises(HeadError, match="There is no head L9H0"):
        paired_effects(lm, pairs, "L9H0")
    with pytest.raises(HeadError, match="No head was named"):
        paired_effects(lm, pairs, [])
    with pytest.raises(GAError, match="fill='half' is unknown: use 'zero', 'mean' or 'swapped'"):
        paired_effects(lm, pairs, "L1H0", fill="half")
    with pytest.raises(TaskError, match="give two or more"):
        paired_effects(lm, swapped(task.take(1)), "L1H0")
    with pytest.raises(TaskError, match="Pairs of prompts are needed"):
        paired_effects(lm, task, "L1H0")
    with pytest.raises(HeadError, match="L1H0 is named as a Gather and as an Aggregate head"):
        interaction(lm, task, "L0H0 L1H0", "L1H0")
    with pytest.raises(HeadError, match="There is no head L1H7"):
        interaction(lm, task, "L0H0", "L1H7")
    with pytest.raises(HeadError, match="must be a pair"):
        interaction(lm, task, "L0H0", "L1H0", "all")
    with pytest.raises(TaskError, match="give two or more"):
        interaction(lm, task.take(1), "L0H0", "L1H0")


def test_references_that_would_be_read_otherwise_than_the_questions_are_refused():
    lm = zoo.lm("llama")
    bare = Task("bare", a_kv_task(lm).examples, special_tokens="none")
    with pytest.raises(TaskError, match="fill='swapped' cannot be used with example 0 of task 'bare-swapped'"):
        paired_effects(lm, swapped(bare), "L1H0", fill="swapped")
    assert len(paired_effects(lm, swapped(bare), "L1H0", fill="zero")) == 1
