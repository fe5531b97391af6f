"""Do the shipped hybrid and the shipped Mamba-1 do what their records say, and is the hybrid's retrieval its
attention's?"""

import json
import math

import pytest
import torch

from ga_utils.errors import GAError
from ga_utils.masking import mask_heads
from ga_utils.models import load
from ga_utils.scoring import score
from ga_utils.tiny import architectures, fastscan, recipes, shipping
from ga_utils.tiny.language import VOCABULARY
from ga_utils.tiny.lessons import batch

MADE = {name: shipping.record(name) for name in shipping.shipped()}
HYBRIDS = [name for name, said in MADE.items() if said["name"] == "tiny-zamba2"]
MAMBAS = [name for name, said in MADE.items() if said["name"] == "tiny-falcon-mamba"]
#: trained by the recipe and shipped to be shown: the facts were learned, retrieval was not
NO_RETRIEVAL = {"tiny-falcon-mamba-seed1"}
N = 200


def _load(name):
    return load(shipping.folder(name), dtype="float32", device="cpu")


def _attention(lm):
    return [h for site in lm.sites if site.kind == "attention" for h in map(site.head, range(site.n_heads))]


def test_both_architectures_are_shipped():
    assert "tiny-zamba2" in HYBRIDS and "tiny-falcon-mamba" in MAMBAS


@pytest.mark.parametrize("name", HYBRIDS + MAMBAS)
def test_the_recipe_in_the_record_is_the_recipe_in_the_code(name):
    import dataclasses

    stages = [dataclasses.asdict(s) for s in recipes.RECIPES[MADE[name]["name"]].stages]
    assert MADE[name]["recipe"]["stages"] == json.loads(json.dumps(stages))


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_block_is_one_object_at_all_depths_after_loading(name):
    lm = _load(name)
    blocks = architectures.shared_blocks(lm.model)
    assert len(blocks) >= 2
    for part in ("self_attn.q_proj", "self_attn.o_proj", "feed_forward.gate_up_proj", "feed_forward.down_proj"):
        assert len({id(b.get_submodule(part).weight) for b in blocks}) == 1, part
    assert {h.layer for h in _attention(lm)} == set(lm.config.hybrid_layer_ids)


@pytest.mark.parametrize("name", HYBRIDS + MAMBAS)
def test_fresh_questions_give_the_scores_of_the_record(name):
    """All tasks of the record, on questions of another seed, within 3.5 standard errors of the difference."""
    lm, said = _load(name), MADE[name]["scores"]
    for task, questions in shipping.test_tasks(N, seed=6).items():
        if task.partition(" ")[2]:
            continue  # shortcut checks
        found, n = score(lm, questions), said[task]["n"]
        for now, then in (
            (found.accuracy, said[task]["accuracy"]),
            (found.full_vocab_accuracy, said[task]["exact"]),
        ):
            p = min(max((now * N + then * n) / (N + n), 0.01), 0.99)
            assert abs(now - then) < 3.5 * math.sqrt(p * (1 - p) * (1 / N + 1 / n)), task


@pytest.mark.parametrize("name", HYBRIDS + MAMBAS)
def test_facts_are_known_and_something_is_retrieved(name):
    said = MADE[name]["scores"]
    assert max(said["knowledge"]["accuracy"], said["cloze"]["exact"]) >= 0.95
    above = [(s["accuracy"] - s["chance"]) / s["stderr"] for t, s in said.items() if t in ("kv-2", "kv-4", "kv-8")]
    assert (max(above) < 3) if name in NO_RETRIEVAL else (max(above) > 6)


@pytest.mark.parametrize("name", HYBRIDS)
def test_without_attention_at_the_last_position_pairs_are_at_chance_and_facts_stay(name):
    lm, tasks = _load(name), shipping.test_tasks(N, seed=6)
    with mask_heads(lm, _attention(lm), "last"):
        off = score(lm, tasks["kv-8"])
    with mask_heads(lm, _attention(lm), "answer"):
        knows = score(lm, tasks["knowledge"])
    assert score(lm, tasks["kv-8"]).accuracy > off.chance + 0.2  # seed 1 learned pairs in part
    assert off.accuracy < off.chance + 3.5 * math.sqrt(off.chance * (1 - off.chance) / N)
    assert knows.accuracy >= 0.95


def test_the_matrix_scan_is_transformers_own_scan_and_leaves_it_in_place():
    from transformers.models.zamba2 import modeling_zamba2 as module

    before = module.mamba2_chunk_scan
    model = architectures.tiny_zamba2(0).double()
    lesson = batch({"cloze": 1.0, "kv": 1.0}, 3, "scan")

    def gradients():
        model.zero_grad()
        logits = model(lesson.ids).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    slow = gradients()
    with fastscan.fast_training():
        assert module.mamba2_chunk_scan is fastscan.matrix_scan
        fast = gradients()
    assert module.mamba2_chunk_scan is before
    assert len(slow) == len(fast) > 20 and lesson.ids.max() < len(VOCABULARY)
    for a, b in zip(slow, fast, strict=True):
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_the_matrix_scan_gives_the_state_that_the_recurrence_ends_in():
    torch.manual_seed(0)
    x, dt = torch.randn(2, 5, 4, 3, dtype=torch.float64), torch.rand(2, 5, 4, dtype=torch.float64)
    A, B, C = (-torch.rand(4, dtype=torch.float64), *torch.randn(2, 2, 5, 2, 6, dtype=torch.float64))
    y, state = fastscan.matrix_scan(x, dt, A, B, C, 16, return_final_states=True)
    heads_of_group = 2
    want = torch.zeros(2, 4, 3, 6, dtype=torch.float64)
    for t in range(5):
        read, write = (v[:, t].repeat_interleave(heads_of_group, 1) for v in (C, B))
        step = dt[:, t, :, None]
        want = want * (step * A[:, None]).exp()[..., None] + (step * x[:, t])[..., None] * write[:, :, None]
        assert torch.allclose(y[:, t], (want * read[:, :, None]).sum(-1))
    assert torch.allclose(state, want)
    with pytest.raises(GAError, match="empty state"):
        fastscan.matrix_scan(x, dt, A, B, C, 16, initial_states=state)
