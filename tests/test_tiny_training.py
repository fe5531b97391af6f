"""Does a training that was killed go on as if nothing had happened, and are the hand-written gradients
right?"""

import json

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ga_utils.errors import GAError, ModelError
from ga_utils.models import load
from ga_utils.tiny import architectures, distil, fastscan, recipes, shipping, training
from ga_utils.tiny.language import VOCABULARY
from ga_utils.tiny.lessons import batch
from ga_utils.tiny.training import Run, Stage

MIXTURE = {"cloze": 0.5, "kv": 0.5}
STAGES = (
    Stage("first", MIXTURE, most_steps=4, batch_size=4, warmup=2, muon_lr=0.01),
    Stage("second", MIXTURE, most_steps=6, batch_size=4, warmup=2, muon_lr=0.01, decay=True),
)


def _small(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.1,
            rms_norm_eps=1e-5,
            pad_token_id=0,
        )
    )


class _Killed(Exception):
    pass


@pytest.mark.parametrize("killed_after", [1, 3, 5, 9])
def test_a_killed_training_ends_with_the_same_weights(tmp_path, monkeypatch, killed_after):
    monkeypatch.setattr(training, "CHECK_EVERY", 2)
    whole = Run(_small(), 0, None, progress=False)
    for stage in STAGES:
        whole.stage(stage)

    steps = 0

    def loss(model, lesson):
        nonlocal steps
        if steps == killed_after:
            raise _Killed
        steps += 1
        return training.answer_loss(model(lesson.ids).logits, lesson)

    with pytest.raises(_Killed):
        run = Run(_small(), 0, tmp_path / "c", progress=False)
        for stage in STAGES:
            run.stage(stage, loss)
    again = Run(_small(seed=1), 0, tmp_path / "c", progress=False)
    if killed_after == 1:  # before the first checkpoint: from the start
        again.model.load_state_dict(_small().state_dict())
    for stage in STAGES:
        again.stage(stage)
    assert again.history == whole.history
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_stage_ends_when_its_goals_are_met_twice(monkeypatch):
    monkeypatch.setattr(training, "CHECK_EVERY", 1)
    found = iter([0.95, 0.2, 0.9, 0.91, 0.0])
    monkeypatch.setattr(training, "answer_accuracy", lambda *a, **k: {"kv": next(found)})
    run = Run(_small(), 0, None, progress=False)
    run.stage(Stage("s", MIXTURE, {"kv": 0.9}, most_steps=9, batch_size=2))
    assert [h["kv"] for h in run.history] == [0.95, 0.2, 0.9, 0.91]


@pytest.mark.parametrize("change", ["seed", "recipe", "model"])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setattr(training, "CHECK_EVERY", 2)

    steps = iter(range(9))

    def loss(model, lesson):
        if next(steps) == 2:
            raise _Killed
        return model(lesson.ids).logits.square().mean()

    with pytest.raises(_Killed):
        Run(_small(), 0, tmp_path, progress=False).stage(STAGES[0], loss)
    with pytest.raises(GAError, match="Delete|delete"):
        other = architectures.tiny_falcon_mamba(0) if change == "model" else _small()
        Run(other, 1 if change == "seed" else 0, tmp_path, progress=False).stage(STAGES[1 if change == "recipe" else 0])


def test_the_answer_loss_is_the_mean_over_answers_and_a_part_of_the_rest():
    model, lesson = _small(), batch({"letters": 1.0}, 3, "s")
    logits = model(lesson.ids).logits
    log = logits.log_softmax(-1)
    sums = {True: [], False: []}
    for i in range(3):
        for t in range(lesson.ids.shape[1] - 1):
            if lesson.answers[i, t] or lesson.other[i, t]:
                sums[bool(lesson.answers[i, t])].append(-log[i, t, lesson.ids[i, t + 1]])
    want = torch.stack(sums[True]).mean() + training.OTHER_WORDS * torch.stack(sums[False]).mean()
    assert torch.allclose(training.answer_loss(logits, lesson), want, rtol=1e-5)


def test_the_fast_scan_is_transformers_own_scan_and_leaves_it_in_place():
    from transformers.models.falcon_mamba import modeling_falcon_mamba as module

    before = module.mamba_selective_scan
    model = architectures.tiny_falcon_mamba(0, layers=2).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.add_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    ids = torch.randint(3, len(VOCABULARY), (2, 11))

    def gradients():
        model.zero_grad()
        logits = model(ids).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

    slow = gradients()
    with fastscan.fast_training():
        assert module.mamba_selective_scan is fastscan.scan
        fast = gradients()
    assert module.mamba_selective_scan is before
    for a, b in zip(slow, fast, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_the_scan_has_the_right_gradient():
    sizes = ((4, 2, 3), (4, 2, 3), (3, 2), (4, 2, 2), (4, 2, 2))  # dt, x, A, B, C
    parts = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(lambda *p: fastscan._Scan.apply(*p)[0], parts)


def test_zamba2_shares_one_block_and_an_untied_one_is_refused():
    model = architectures.tiny_zamba2(0)
    first, second = architectures.shared_blocks(model)
    assert first is not second
    assert first.self_attn.q_proj.weight is second.self_attn.q_proj.weight
    assert first.feed_forward.down_proj.weight is second.feed_forward.down_proj.weight
    second.self_attn.q_proj.weight = nn.Parameter(second.self_attn.q_proj.weight.detach().clone())
    with pytest.raises(ModelError, match="not shared"):
        architectures.require_shared(model)


def test_a_student_of_exact_layers_has_no_error_and_a_broken_layer_shows_alone():
    teacher = _small().eval()
    teacher.set_attn_implementation("eager")
    student = distil.student_of(teacher, d_state=8)
    lesson, watch = batch(MIXTURE, 4, "s"), distil._Watch(teacher)
    states = watch(lesson.ids)
    hidden = teacher(lesson.ids, output_hidden_states=True).hidden_states
    for mine, theirs in zip(states[:-1], hidden[:-1], strict=True):
        assert torch.equal(mine, theirs)
    for i, block in enumerate(student.backbone.layers):  # put the teacher's attention into the student's mixer
        block.mixer.forward = lambda x, *a, i=i: watch.mixed[i]
    errors = distil.layer_errors(student, watch, lesson, "blocks")
    assert max(errors).item() < 1e-9
    student.backbone.layers[1].mixer.forward = lambda x, *a: 0 * x
    errors = distil.layer_errors(student, watch, lesson, "blocks")
    assert errors[0] < 1e-9 and errors[1] > 0.01
    mixers = distil.layer_errors(student, watch, lesson, "mixers")
    assert mixers[0] < 1e-9 and mixers[1] >= 1.0


def test_matrix_orientation_compares_the_students_own_matrix_with_the_attention():
    teacher = _small().eval()
    teacher.set_attn_implementation("eager")
    student, watch, lesson = (
        distil.student_of(teacher, d_state=8),
        distil._Watch(teacher),
        batch(MIXTURE, 2, "s"),
    )
    errors = distil.layer_errors(student, watch, lesson, "matrices")
    state = watch(lesson.ids)[1]
    block = student.backbone.layers[1]
    x, B, C, log_decay, _ = block.mixer.project(block.input_layernorm(state))
    total, weight = torch.zeros(2, 2), torch.zeros(2, 2)
    real = lesson.answers | lesson.other
    for b in range(2):
        for h in range(2):
            for t in range(state.shape[1]):
                if not real[b, t]:
                    continue
                for s in range(t + 1):
                    m = (C[b, t, h] @ B[b, s, h]) * log_decay[b, s + 1 : t + 1, h].sum().exp()
                    total[b, h] += (m - watch.attention[1][b, h, t, s]) ** 2
                    weight[b, h] += watch.attention[1][b, h, t, s] ** 2
    assert torch.allclose(errors[1], (total / weight).mean(), rtol=1e-3)


@pytest.mark.parametrize(
    "name, seed, called", [("tiny-llama", 0, "tiny-llama"), ("tiny-llamba", 2, "tiny-llamba-seed2")]
)
def test_a_model_is_shipped_under_its_recipe_and_seed(tmp_path, monkeypatch, name, seed, called):
    monkeypatch.setattr(shipping, "WEIGHTS", tmp_path / "weights")
    source = tmp_path / "trained"
    source.mkdir()
    (source / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no trained model"):
        recipes.ship(source)
    for content in ("new", "newer"):  # the second replaces the first
        (source / shipping.RECORD).write_text(json.dumps({"name": name, "seed": seed, "scores": content}))
        assert recipes.ship(source) == shipping.folder(called)
        assert shipping.record(called)["scores"] == content and shipping.shipped() == [called]
    (source / shipping.RECORD).write_text(json.dumps({"name": "tiny-gpt", "seed": 0}))
    with pytest.raises(ModelError, match="tiny-gpt"):
        recipes.ship(source)


@pytest.mark.slow
def test_every_recipe_trains_writes_and_loads(tmp_path, monkeypatch):
    """The recipes with their stages cut to two steps; what is written is whole, in 16 bit, and scored after
    loading."""
    import dataclasses

    short = lambda s: dataclasses.replace(s, most_steps=2, batch_size=4)  # noqa: E731
    for name, recipe in list(recipes.RECIPES.items()):
        stages = tuple(map(short, recipe.stages))
        monkeypatch.setitem(recipes.RECIPES, name, dataclasses.replace(recipe, stages=stages))
    for name in recipes.RECIPES:
        body = recipes.train(name, 0, tmp_path, progress=False, n_test=6)
        folder = tmp_path / f"{name}-seed0"
        lm = load(folder, device="cpu")
        assert body["parameters"] == sum(p.numel() for p in lm.model.parameters())
        assert (folder / "model.safetensors").stat().st_size < min(
            shipping.MOST_BYTES, 2.2 * body["parameters"] + 20_000
        )
        assert body["scores"]["letter"]["n"] == 6 and len(body["history"]) >= 2
        assert body["rounding"]["largest_logit_change"] < 0.05 * body["rounding"]["logit_deviation"]
        assert not folder.with_name(folder.name + ".checkpoint").exists()
        with pytest.raises(GAError, match="already"):
            recipes.train(name, 0, tmp_path, progress=False)
    with pytest.raises(GAError, match="tiny-llama"):
        recipes.train("tiny-gpt", 0, tmp_path)
