"""Gradients at all heads tell what masks would cost: a derivative on every architecture, and a ranking that helps."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
import zoo

from ga_utils import head_gradients
from ga_utils.attribution import attribute, ranking_quality, verify
from ga_utils.errors import GAError, HeadError, ModelError, TaskError
from ga_utils.language_model import wrap
from ga_utils.masking import capture_inputs, mask_heads
from ga_utils.models import load
from ga_utils.random_models import build
from ga_utils.sweep import sweep_heads
from ga_utils.tasks import kv_task
from ga_utils.tiny import questions, shipping

EPS = 2e-3  # bends of a router or a clamp lie further off, and rounding gives a thousandth of the change


def a_task(lm, n=3):
    return kv_task(3, n, seed=5, format="terse", values="10-99", tokenizer=lm.tokenizer)


@contextlib.contextmanager
def moved(lm, steps, first, stop, fills=None):
    """Each head moved by its entry of `steps` [h] towards its fill, at positions from `first` to before `stop`."""
    parts = steps.split([s.n_heads for s in lm.sites])

    def hook(site, step):
        def pre(module, args):
            x = args[0].clone()
            for i in range(site.n_heads):
                for p in range(first, stop):
                    at = site.channels(i)
                    fill = 0 if fills is None else fills[site][at]
                    x[:, p, at] = (1 - step[i]) * x[:, p, at] + step[i] * fill
            return (x, *args[1:])

        return pre

    handles = [s.proj.register_forward_pre_hook(hook(s, p)) for s, p in zip(lm.sites, parts, strict=True)]
    try:
        yield
    finally:
        for h in handles:
            h.remove()


def by_hand(lm, example, steps, positions, fills=None):
    """The answer's log-probability with heads moved: one row, no padding, no code of the package but the model."""
    prompt = lm.tokenizer(example.prompt)["input_ids"]
    ids = lm.tokenizer(example.prompt + example.candidates[example.answer])["input_ids"]
    end = len(prompt) - 1
    first, stop = {"all": (0, len(ids) - 1), "last": (end, end + 1), "answer": (end, len(ids) - 1)}[positions]
    with moved(lm, steps, first, stop, fills), torch.no_grad():
        out = lm.model(torch.tensor([ids[:-1]], device=lm.device), use_cache=False)
    logp = out.logits[0].double().log_softmax(-1)
    return sum(float(logp[i - 1, ids[i]]) for i in range(len(prompt), len(ids)))


def signs(lm):
    return torch.randint(0, 2, (len(lm.head_list()),), generator=torch.Generator().manual_seed(1)) * 2.0 - 1


@pytest.mark.parametrize("name", zoo.NAMES)
def test_the_estimate_is_the_derivative_along_the_masks(name):
    lm = zoo.lm(name)
    task, direction = a_task(lm), signs(lm)
    for positions in ("answer", "last", "all"):
        found = attribute(lm, task, positions=positions, corrections=False)
        assert found.heads == tuple(lm.head_list()) and found.effect.shape == (len(found.heads), 3)
        for i, example in enumerate(task.examples[:2]):
            up, down = (by_hand(lm, example, s * EPS * direction, positions) for s in (-1, 1))
            size = np.linalg.norm(found.effect[:, i])
            assert size > 1e-3
            # a random sign for each head: heads that were mixed up would give another sum
            assert abs((up - down) / (2 * EPS) - direction.numpy() @ found.effect[:, i]) < 0.03 * size


@pytest.mark.parametrize("name", ["gpt2", "falcon_mamba", "zamba2", "llamba"])
def test_each_row_is_the_head_of_its_name(name):
    lm = zoo.lm(name)
    task, every = a_task(lm), lm.head_list()
    chosen = [every[-1], every[0], every[len(every) // 2]]
    found = attribute(lm, task, chosen, corrections=False)
    assert found.heads == tuple(chosen)
    for row, head in enumerate(chosen):
        steps = torch.zeros(len(every))
        steps[every.index(head)] = 0.05
        up, down = (by_hand(lm, task.examples[0], s * steps, "answer") for s in (-1, 1))
        assert abs((up - down) / 0.1 - found.effect[row, 0]) < 0.03 * np.abs(found.effect).max() + 1e-4


def test_mean_fill_is_the_derivative_towards_the_mean():
    lm = zoo.lm("bamba")
    task, direction = a_task(lm), signs(lm)
    reference = ["one:12\ntwo:34\n", "three:5"]
    found = attribute(lm, task, positions="all", fill="mean", reference=reference, corrections=False)
    rows = {s: [] for s in lm.sites}
    for text in reference:
        with capture_inputs(lm.sites) as inputs, torch.no_grad():
            lm.model(**lm.encode([text]))
        for site in lm.sites:
            rows[site].append(inputs[site][0])
    fills = {s: torch.cat(r).mean(0) for s, r in rows.items()}
    up, down = (by_hand(lm, task.examples[0], s * EPS * direction, "all", fills) for s in (-1, 1))
    size = np.linalg.norm(found.effect[:, 0])
    assert abs((up - down) / (2 * EPS) - direction.numpy() @ found.effect[:, 0]) < 0.03 * size
    zero = attribute(lm, task, positions="all", corrections=False)
    assert np.abs(zero.effect - found.effect).max() > 0.1 * np.abs(found.effect).max()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_batches_padding_and_recomputing_change_nothing(name, layerwise):
    lm = zoo.lm(name)
    # prompts of unequal length, so that a batch is padded
    examples = a_task(lm, 2).examples + kv_task(2, 1, seed=6, format="terse", values="10-99").examples
    alone = attribute(lm, examples, batch_size=1, layerwise=layerwise)
    together = attribute(lm, examples, batch_size=3, layerwise=layerwise, recompute=True)
    scale = np.abs(alone.effect).max()
    assert scale > 1e-3 and np.abs(alone.effect - together.effect).max() < 2e-3 * scale


def test_counts_of_passes_and_kept_means():
    lm = zoo.lm("llama")
    task = a_task(lm, 4)
    attribute(lm, task)  # the finite-difference check is made once for a model
    plain = attribute(lm, task, corrections=False)
    assert (plain.forwards, plain.backwards) == (1, 1)
    odds = attribute(lm, task, batch_size=2)
    assert (odds.forwards, odds.backwards) == (2, 4)  # answers of two tokens
    layers = attribute(lm, task, layerwise=True)
    assert (layers.forwards, layers.backwards) == (1 + 3, 3 * 2)
    mean = attribute(lm, task, batch_size=2, keep="mean")
    assert mean.effect is None and np.allclose(mean.mean, odds.effect.mean(1), atol=1e-6)
    assert np.allclose(mean.se, odds.effect.std(1, ddof=1) / 2, atol=1e-6)
    table = odds.to_table()
    assert list(table["head"][:3]) == [str(h) for h in odds.top(3)] and table.estimate.all()
    assert table.loss.is_monotonic_decreasing
    assert np.isnan(attribute(lm, task.take(1)).se).all()


def test_the_correction_is_exact_where_only_the_odds_of_the_answer_change():
    lm = zoo.lm("qwen2")
    task = kv_task(4, 3, seed=1, format="terse", values="0-9", tokenizer=lm.tokenizer)  # answers of one token
    first = attribute(lm, task, corrections=False).effect.astype(float)
    found = attribute(lm, task).effect
    logp = np.array([by_hand(lm, e, torch.zeros(len(first)), "answer") for e in task.examples])
    odds = logp - np.log(-np.expm1(logp))
    after = odds - first / -np.expm1(logp)  # the log-odds have the derivative of the log-probability over 1 - p
    assert np.abs(found - (logp + np.log1p(np.exp(-after)))).max() < 1e-4
    assert np.abs(found - first).max() > 1e-3


def test_layerwise_is_the_change_at_half_strength():
    lm = zoo.lm("mamba2")
    task = a_task(lm, 1)
    found = attribute(lm, task, corrections=False, layerwise=True).effect[:, 0]
    heads = lm.head_list()
    for layer in range(lm.n_layers):
        here = torch.tensor([h.layer == layer for h in heads]).double()
        # Simpson's rule has little left to say over the midpoint's neighbourhood: the sum over a layer's heads is the
        # slope of masking the layer whole, at its middle
        up, down = (by_hand(lm, task.examples[0], (0.5 + s * EPS) * here, "answer") for s in (-1, 1))
        size = np.abs(found[here.bool().numpy()]).sum()
        assert abs((up - down) / (2 * EPS) - found[here.bool().numpy()].sum()) < 0.02 * size


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llamba"])
def test_each_correction_improves_the_ranking_of_a_trained_model(name):
    lm = load(shipping.folder(name), dtype="float32", device="cpu")
    tasks = questions.kv_task(8, 16, 11), questions.letter_task(16, 11)
    exact = [sweep_heads(lm, task, scored="answer", positions="all") for task in tasks]
    plain, odds, layers = (
        np.mean([
            ranking_quality(attribute(lm, t, positions="all", **way), e, 8)["spearman"]
            for t, e in zip(tasks, exact, strict=True)
        ])
        for way in ({"corrections": False}, {}, {"layerwise": True})
    )  # fmt: skip
    assert plain < odds < layers
    found = attribute(lm, tasks[0], positions="all", layerwise=True)
    checked = verify(lm, tasks[0], found, 5)
    rows = [exact[0].heads.index(h) for h in found.top(5)]
    assert checked.heads == found.top(5) and np.abs(checked.logprob - exact[0].logprob[rows]).max() < 1e-4


def test_ranking_quality_knows_right_from_wrong():
    lm = zoo.lm("llama")
    task = a_task(lm)
    found = attribute(lm, task)
    loss = np.stack([found.mean] * 3, 1)
    sweep = sweep_heads(lm, task, found.heads)
    same = dataclasses.replace(sweep, intact_logprob=np.zeros(3), logprob=-loss)
    reverse = dataclasses.replace(sweep, intact_logprob=np.zeros(3), logprob=loss)
    assert ranking_quality(found, same, 4) | {"largest": 0} == {
        "heads": 12, "top": 4, "recall": 1.0, "spearman": pytest.approx(1.0), "largest": 0,
    }  # fmt: skip
    worst = ranking_quality(found, reverse, 4)
    assert worst["recall"] == 0 and worst["spearman"] == pytest.approx(-1)
    shuffled = attribute(lm, task, found.heads[::-1])
    assert ranking_quality(shuffled, same, 4)["spearman"] == pytest.approx(1)
    for top in (0, 12, 2.0):
        with pytest.raises(GAError, match="12 heads are in both"):
            ranking_quality(found, same, top)
    with pytest.raises(GAError, match="over 3 examples, the attribution over 2"):
        ranking_quality(attribute(lm, task.take(2)), same, 4)
    with pytest.raises(GAError, match="top=13"):
        verify(lm, task, found, 13)


def test_both_mixers_of_a_layer_and_masks_around_it():
    lm = zoo.lm("falcon_h1")
    task = a_task(lm)
    every = attribute(lm, task)
    rows = [every.heads.index(lm.site(h).head(h.index)) for h in lm.head_list("mamba2")[:3]]
    some = attribute(lm, task, "L0.mamba2.H0 L0.mamba2.H1 L0.mamba2.H2")
    assert np.allclose(some.effect, every.effect[rows], atol=1e-5)
    with mask_heads(lm, "L1H2", "answer"):
        inside = attribute(lm, task)
    off = every.heads.index(lm.site(lm.head_list("attention")[6]).head(2))
    assert (inside.effect[off] == 0).all() and np.abs(every.effect[off]).max() > 1e-4
    assert np.abs(inside.effect - every.effect).max() > 1e-4


def state(lm):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules())
    own = [n for n, m in lm.model.named_modules() if "forward" in m.__dict__]
    return hooks, own, [(p.requires_grad, p.grad is None) for p in lm.model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_model_is_left_as_it_was(recompute, monkeypatch):
    lm = wrap(*build("jamba"))
    list(lm.model.parameters())[3].requires_grad_(False)
    before = state(lm)
    with torch.inference_mode():
        inside = attribute(lm, a_task(lm), recompute=recompute)
    with torch.no_grad():
        again = attribute(lm, a_task(lm), recompute=recompute)
    assert np.abs(inside.effect - again.effect).max() < 1e-6 and state(lm) == before

    def fails(*args, **kwargs):
        raise ValueError("no")

    monkeypatch.setattr(head_gradients.torch.autograd, "grad", fails)
    with pytest.raises(ValueError, match="no"):
        attribute(lm, a_task(lm), recompute=recompute)
    assert state(lm) == before


def test_memory_that_runs_out_halves_the_batches(monkeypatch):
    lm = zoo.lm("llama")
    task = a_task(lm, 4)
    whole = attribute(lm, task)
    ask = head_gradients.Gradients.ask

    def tight(self, items, *args):
        if len(items) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return ask(self, items, *args)

    monkeypatch.setattr(head_gradients.Gradients, "ask", tight)
    with pytest.warns(UserWarning, match="goes on with 2"):
        halved = attribute(lm, task)
    assert np.abs(halved.effect - whole.effect).max() < 1e-5

    def none(self, items, *args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(head_gradients.Gradients, "ask", none)
    with pytest.raises(GAError, match="recompute=True needs less"):
        attribute(lm, task)


def test_models_without_gradients_are_refused():
    with torch.inference_mode():
        model, tokenizer = build("llama")
    lm = wrap(model, tokenizer)
    with pytest.raises(ModelError, match="inference_mode"):
        attribute(lm, a_task(lm))
    lm = wrap(*build("llama"))
    lm.model.train()
    with pytest.raises(ModelError, match="training mode"):
        attribute(lm, a_task(lm))
    lm = wrap(*build("llama"))
    layer = lm.model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda m, args, out: (out[0].detach(), *out[1:]))
    with pytest.raises(ModelError, match="no gradient at the heads of LlamaAttention in layer 1"):
        attribute(lm, a_task(lm))


def test_a_kernel_that_loses_part_of_the_gradient_is_noticed():
    lm = wrap(*build("llama"))
    task = a_task(lm)
    attribute(lm, task)
    values = lm.model.model.layers[1].self_attn.v_proj
    values.register_forward_pre_hook(lambda m, args: (args[0].detach(),))
    with pytest.raises(ModelError, match="gradients of .* are wrong"):
        attribute(lm, task, positions="all")


def test_a_model_too_rough_for_finite_differences_is_said_and_not_refused(monkeypatch):
    lm = wrap(*build("llama"))
    values = head_gradients.Gradients.values

    def rough(self, items, numbers, steps=None):
        return values(self, items, numbers, steps) + torch.rand(1, generator=random)

    random = torch.Generator().manual_seed(0)
    monkeypatch.setattr(head_gradients.Gradients, "values", rough)
    with pytest.warns(UserWarning, match="could not be checked"):
        attribute(lm, a_task(lm))


@pytest.mark.filterwarnings("ignore")
def test_integer_weights_are_refused():
    lm = wrap(*build("llama"))
    engines = [e for e in torch.backends.quantized.supported_engines if e != "none"]
    if not engines:
        pytest.skip("this torch has no integer kernels")
    torch.backends.quantized.engine = engines[0]
    lm = wrap(torch.ao.quantization.quantize_dynamic(lm.model, {torch.nn.Linear}), lm.tokenizer)
    with pytest.raises(ModelError, match="gives no gradient"):
        attribute(lm, a_task(lm))


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ({"positions": "first"}, TaskError, "positions='first'"),
        ({"positions": [[0]] * 3}, TaskError, "use 'answer', 'last' or 'all'"),
        ({"fill": "resample"}, GAError, "fill='resample'"),
        ({"fill": "mean"}, GAError, "needs reference prompts"),
        ({"reference": ["a"]}, GAError, "takes no reference prompts"),
        ({"keep": "all"}, GAError, "keep='all'"),
        ({"batch_size": 0}, GAError, "batch_size=0"),
        ({"heads": "L7H0"}, HeadError, "the layers with heads are 0-2"),
        ({"heads": []}, GAError, "names no head"),
    ],
)
def test_bad_input_is_named(wrong, error, words):
    lm = zoo.lm("llama")
    with pytest.raises(error, match=words):
        attribute(lm, a_task(lm), **wrong)
