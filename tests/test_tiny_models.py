"""Are the shipped models what their records say, and do they read both ends of a name where they should?"""

import math

import pytest
import torch

from ga_utils.errors import ModelError
from ga_utils.models import load
from ga_utils.scoring import score
from ga_utils.tiny import architectures, questions, recipes, shipping

NAMES = shipping.shipped()
N = 150
CHECKED = ("knowledge", "letter", "copy-letter", "kv-8")


def test_the_teacher_and_its_students_are_shipped():
    assert "tiny-llama" in NAMES
    assert set(NAMES) <= set(recipes.RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_whole_and_in_16_bit(name):
    from safetensors import safe_open

    folder = shipping.folder(name)
    assert (folder / "model.safetensors").stat().st_size < shipping.MOST_BYTES
    with safe_open(folder / "model.safetensors", "pt") as f:
        assert {f.get_tensor(k).dtype for k in f.keys()} == {torch.float16}  # noqa: SIM118
    lm = load(folder, dtype="float32", device="cpu")
    assert sum(p.numel() for p in lm.model.parameters()) == shipping.record(name)["parameters"]
    assert type(lm.model).__name__ == shipping.record(name)["architecture"]


@pytest.mark.parametrize("name", NAMES)
def test_rounding_to_16_bit_changed_next_to_nothing(name):
    r = shipping.record(name)["rounding"]
    assert r["largest_logit_change"] < 0.05 * r["logit_deviation"]
    assert r["answers_changed"] <= 0.01 * r["answers"]


@pytest.mark.parametrize("name", NAMES)
def test_scores_on_other_questions_agree_with_the_record(name):
    """On fresh questions of another seed, within 3.3 standard errors of the difference."""
    lm = load(shipping.folder(name), dtype="float32", device="cpu")
    said = shipping.record(name)["scores"]
    tasks = shipping.test_tasks(N, seed=5)
    for task in CHECKED:
        found = score(lm, tasks[task])
        n = said[task]["n"]
        p = (found.accuracy * N + said[task]["accuracy"] * n) / (N + n)
        p = min(max(p, 0.01), 0.99)  # a score of 1 has an error too
        error = math.sqrt(p * (1 - p) * (1 / N + 1 / n))
        assert abs(found.accuracy - said[task]["accuracy"]) < 3.3 * error, task


@pytest.mark.parametrize("name", NAMES)
def test_every_model_knows_its_facts_or_says_so(name):
    said = shipping.record(name)["scores"]
    assert max(said["knowledge"]["accuracy"], said["cloze"]["exact"]) >= (0.5 if "unaligned" in name else 0.95)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["letter", "copy-letter"])
def test_a_model_that_does_letters_reads_both_ends_of_the_name(name, kind):
    """The shortcut check, required of a model that scores above what one symbol gives (0.75 or so)."""
    said = shipping.record(name)["scores"]
    checks = [said[f"{kind} {rule}"] for rule in ("share-start", "share-end")]
    if said[kind]["accuracy"] > 0.8:
        assert all(c["accuracy"] - 3 * c["stderr"] > questions.SHORTCUT_CEILING for c in checks)


def test_the_teacher_meets_its_goals():
    said = shipping.record("tiny-llama")["scores"]
    assert min(said[t]["accuracy"] for t in ("cloze", "letter", "kv-8")) >= 0.95


@pytest.mark.skipif("tiny-zamba2" not in NAMES, reason="tiny-zamba2 is not shipped")
def test_zamba2_still_shares_its_block_after_loading():
    lm = load(shipping.folder("tiny-zamba2"), dtype="float32", device="cpu")
    first, second = architectures.shared_blocks(lm.model)
    assert first.self_attn.q_proj.weight is second.self_attn.q_proj.weight
    architectures.require_shared(lm.model)


def test_a_model_that_is_not_shipped_is_named():
    with pytest.raises(ModelError, match="tiny-llama"):
        shipping.folder("tiny-gpt")
