"""Is the teacher left with one Aggregate head by the rule that its record states, and do pruned heads stay off?"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ga_utils.errors import ModelError
from ga_utils.heads import Head
from ga_utils.language_model import wrap
from ga_utils.models import load
from ga_utils.tiny import architectures, pruning, shipping, training
from ga_utils.tiny.language import VOCABULARY, tokenizer
from ga_utils.tiny.training import Run, Stage

MIXTURE = {"letters": 0.5, "kv": 0.5}
SHORT = Stage("concentrate", MIXTURE, most_steps=6, batch_size=4, warmup=2, muon_lr=0.01, one_head=True)


def _small(seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY), hidden_size=24, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=3, num_key_value_heads=3, head_dim=16, initializer_range=0.3, pad_token_id=0,
        )
    )  # fmt: skip


def test_a_heads_preference_is_what_its_attention_says():
    lm = load(shipping.folder("tiny-llama"), dtype="float32", device="cpu", attn_implementation="eager")
    tasks = pruning.retrieval_tasks(12, 4)
    found = pruning.preferences(lm, tasks)
    for head in (Head(0, 0), Head(3, 3), Head(4, 3)):
        means = []
        for task in tasks.values():
            total = 0.0
            for e in task.examples:
                ids = lm.tokenizer(e.prompt, return_tensors="pt")["input_ids"]
                row = lm.model(ids, output_attentions=True).attentions[head.layer][0, head.index, -1]
                lines, words = [], ids[0].tolist()
                breaks = [i for i, w in enumerate(words) if VOCABULARY[w] == "\n"]
                for a, b in zip(breaks, breaks[1:], strict=False):  # a line is what follows one newline, with the next
                    lines.append(float(row[a + 1 : b + 1].sum()))
                wrong = sum(x for i, x in enumerate(lines) if i != e.answer) / (len(lines) - 1)
                total += lines[e.answer] - wrong
            means.append(total / 12)
        assert found[head] == pytest.approx(sum(means) / 3, abs=1e-5)


@pytest.mark.parametrize("kept", [None, "L0H1"])
@pytest.mark.parametrize("left", [0.3, 0.4])
def test_of_the_heads_that_aggregate_the_one_that_serves_best_alone_is_kept(monkeypatch, kept, left):
    liking = {Head(0, 0): 0.5, Head(0, 1): 0.25, Head(1, 0): 0.19, Head(1, 2): 0.9}
    serves = {Head(0, 0): 0.3, Head(0, 1): 0.8, Head(1, 2): 0.7}
    monkeypatch.setattr(pruning, "preferences", lambda lm, tasks: liking)

    def accuracies(lm, tasks, masked, positions="last"):
        alone = [h for h in serves if h not in masked]
        return dict.fromkeys(tasks, serves[alone[0]] if len(alone) == 1 else left)

    monkeypatch.setattr(pruning, "accuracies", accuracies)
    found = pruning.find(_small(), 0, kept)
    assert found["kept"] == "L0H1" and found["others"] == ["L0H0", "L1H2"]
    assert set(found["alone"]) == (set() if kept else {"L0H0", "L0H1", "L1H2"})
    assert found["gone"] is (left == 0.3)  # kv-8's chance is 0.125: 0.4 is too far above it


@pytest.mark.parametrize(
    "knowledge, layer, kept", [((1.0, 0.99), 1, "L1H1"), ((1.0, 0.9), 0, None), ((0.3, 0.2), None, None)]
)
def test_the_layer_that_gathers_costs_retrieval_and_spares_knowledge(monkeypatch, knowledge, layer, kept):
    def accuracies(lm, tasks, masked, positions="last"):
        assert positions == "all"
        layers = {h.layer for h in masked}
        if len(masked) == 3:
            off = layers.pop()
            return dict.fromkeys(tasks, (0.6, 0.4)[off]) | {"knowledge": knowledge[off]}
        return dict.fromkeys(tasks, 0.9 if Head(1, 1) not in masked else 0.5)

    monkeypatch.setattr(pruning, "accuracies", accuracies)
    found = pruning.find_gather(_small(), 0, "L2H0")
    assert (found["layer"], found["kept"]) == (layer, kept)
    assert found["others"] == (["L1H0", "L1H2"] if kept else [])


def test_pruned_heads_attend_evenly_add_nothing_and_stay_so(monkeypatch):
    monkeypatch.setattr(training, "CHECK_EVERY", 3)
    monkeypatch.setattr(pruning, "QUESTIONS", 4)
    monkeypatch.setattr(pruning, "SHARE", -1.0)  # every head counts as aggregating
    run = Run(_small(), 0, None, progress=False)
    run.stage(SHORT)
    kept = run.pruning[0]["kept"]
    assert len(run.pruned) == 5 and kept not in run.pruned
    assert [look["step"] for look in run.pruning] == [0, 3, 6] and run.pruning[-1]["pruned"] == []
    sites = wrap(run.model, tokenizer()).sites
    for layer, site in enumerate(sites):
        for index in range(3):
            q = site.mixer.q_proj.weight[16 * index : 16 * index + 16]
            o = site.proj.weight[:, 16 * index : 16 * index + 16]
            off = f"L{layer}H{index}" in run.pruned
            assert (q == 0).all() == off and (o == 0).all() == off
    run.model.set_attn_implementation("eager")
    head = Head(int(run.pruned[0][1]), int(run.pruned[0][3]))
    weights = run.model(torch.arange(3, 9)[None], output_attentions=True).attentions[head.layer][0, head.index]
    assert torch.allclose(weights, torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None])


@pytest.mark.parametrize("killed_after", [4, 7])
def test_a_killed_pruning_goes_on_with_the_same_heads_off(tmp_path, monkeypatch, killed_after):
    monkeypatch.setattr(training, "CHECK_EVERY", 2)
    monkeypatch.setattr(pruning, "QUESTIONS", 4)
    monkeypatch.setattr(pruning, "SHARE", -1.0)
    settle = Stage("settle", MIXTURE, most_steps=4, batch_size=4, decay=True, one_head=True)
    whole = Run(_small(), 0, None, progress=False)
    for stage in (SHORT, settle):
        whole.stage(stage)

    class Killed(Exception):
        pass

    steps = iter(range(99))

    def loss(model, lesson):
        if next(steps) == killed_after:
            raise Killed
        return training.answer_loss(model(lesson.ids).logits, lesson)

    with pytest.raises(Killed):
        run = Run(_small(), 0, tmp_path, progress=False)
        for stage in (SHORT, settle):
            run.stage(stage, loss)
    again = Run(_small(seed=1), 0, tmp_path, progress=False)
    for stage in (SHORT, settle):
        again.stage(stage)
    assert again.pruning == whole.pruning and again.history == whole.history
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_stage_does_not_end_while_another_head_serves(monkeypatch):
    monkeypatch.setattr(training, "CHECK_EVERY", 1)
    monkeypatch.setattr(training, "answer_accuracy", lambda *a, **k: {"kv": 1.0})
    gone = iter([False, True, False, True, True])  # the first is the look at the start
    monkeypatch.setattr(
        pruning, "find", lambda *a: {"kept": "L1H0", "others": [], "gone": next(gone), "alone": {}, "without": {}}
    )
    monkeypatch.setattr(pruning, "find_gather", lambda *a: {"kept": None, "others": []})
    run = Run(_small(), 0, None, progress=False)
    run.stage(Stage("s", MIXTURE, {"kv": 0.9}, most_steps=9, batch_size=2, one_head=True))
    assert len(run.history) == 4


def test_only_attention_heads_can_be_pruned():
    with pytest.raises(ModelError, match="cannot be pruned"):
        pruning.weights_of(architectures.tiny_falcon_mamba(0, layers=1), ["L0H3"])
