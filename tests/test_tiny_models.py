"""Are the shipped models what their records say, and do they read both ends of a name where they should?"""

import math

import pytest
import torch

from ga_utils.errors import ModelError
from ga_utils.heads import parse_heads
from ga_utils.masking import mask_heads
from ga_utils.models import load
from ga_utils.scoring import score
from ga_utils.tiny import architectures, questions, recipes, shipping

NAMES = shipping.shipped()
TEACHERS = [name for name in NAMES if shipping.record(name)["name"] == "tiny-llama"]
N = 200
CHECKED = ("knowledge", "letter", "copy-letter", "kv-8")


def test_every_teacher_is_shipped_with_its_students_under_the_names_of_their_records():
    seeds = {shipping.record(name)["seed"] for name in TEACHERS}
    assert 0 in seeds and "tiny-llama" in TEACHERS
    for name in ("tiny-llama", "tiny-llamba-unaligned", "tiny-llamba"):
        assert {shipping.shipped_name(name, seed) for seed in seeds} <= set(NAMES)
    for name in NAMES:
        said = shipping.record(name)
        assert said["name"] in recipes.RECIPES and name == shipping.shipped_name(said["name"], said["seed"])


@pytest.mark.parametrize("name", NAMES)
def test_the_record_says_how_the_model_was_made(name):
    said = shipping.record(name)
    stages = [s["name"] for s in said["recipe"]["stages"]]
    assert list(dict.fromkeys(h["stage"] for h in said["history"])) == stages
    assert all(math.isfinite(h["loss"]) for h in said["history"]) and said["cpu_seconds"] > 60
    assert {"torch", "transformers"} <= set(said["versions"])
    assert all(0 <= s["accuracy"] <= 1 and s["n"] >= 500 for s in said["scores"].values())
    assert set(said["scores"]) == set(shipping.test_tasks(1))
    assert bool(said.get("pruning")) == bool(said.get("pruning_rule")) == (name in TEACHERS)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_in_the_folder_needs_unpickling(name):
    files = {p.name for p in shipping.folder(name).iterdir()}
    assert files == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        shipping.RECORD,
    }  # fmt: skip


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
    assert r["largest_logit_change"] < 0.1 * r["logit_deviation"]  # a scan hands its rounding on
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
    assert max(said["knowledge"]["accuracy"], said["cloze"]["exact"]) >= (0.85 if "unaligned" in name else 0.95)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["letter", "copy-letter"])
def test_a_model_that_does_letters_reads_both_ends_of_the_name(name, kind):
    """The shortcut check, required of a model that scores above what one symbol gives (0.75 or so)."""
    said = shipping.record(name)["scores"]
    checks = [said[f"{kind} {rule}"] for rule in ("share-start", "share-end")]
    if said[kind]["accuracy"] > 0.8:
        assert all(c["accuracy"] - 3 * c["stderr"] > questions.SHORTCUT_CEILING for c in checks)


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_meets_its_goals(name):
    said = shipping.record(name)["scores"]
    assert min(said[t]["accuracy"] for t in ("knowledge", "letter", "kv-8")) >= 0.97
    assert said["cloze"]["exact"] >= 0.98 and said["copy-letter"]["accuracy"] >= 0.9


@pytest.mark.parametrize("name", TEACHERS)
def test_a_teacher_has_one_aggregate_head_and_its_facts_do_not_need_it(name):
    """Masked where the answer is predicted, on questions of another seed than those that it was chosen on."""
    lm = load(shipping.folder(name), dtype="float32", device="cpu")
    looks = shipping.record(name)["pruning"]
    kept, pruned = looks[0]["kept"], [head for look in looks for head in look["pruned"]]
    tasks = shipping.test_tasks(N, seed=5)
    with mask_heads(lm, kept, "answer"):
        found = {t: score(lm, tasks[t]).accuracy for t in CHECKED}
    assert all(found[t] <= tasks[t].chance + 0.2 for t in ("letter", "copy-letter", "kv-8")), found
    assert found["knowledge"] >= 0.95
    others = [h for h in lm.head_list() if h.layer >= parse_heads(kept)[0].layer and str(h) not in {kept, *pruned}]
    with mask_heads(lm, others, "answer"):
        assert score(lm, tasks["letter"]).accuracy >= 0.9


@pytest.mark.parametrize("name", TEACHERS)
def test_what_a_record_calls_pruned_is_off_in_the_weights(name):
    lm = load(shipping.folder(name), dtype="float32", device="cpu")
    pruned = [head for look in shipping.record(name)["pruning"] for head in look["pruned"]]
    zero = [
        str(site.head(i)) for site in lm.sites for i in range(site.n_heads)
        if not site.proj.weight[:, site.channels(i)].any()
    ]  # fmt: skip
    assert sorted(pruned) == sorted(zero) and pruned


@pytest.mark.parametrize("name", [n for n in NAMES if shipping.record(n)["name"] == "tiny-llamba"])
def test_alignment_brings_retrieval_back(name):
    seed = shipping.record(name)["seed"]
    before = shipping.record(shipping.shipped_name("tiny-llamba-unaligned", seed))["scores"]
    after = shipping.record(name)["scores"]
    for task in ("letter", "kv-8"):
        assert after[task]["accuracy"] > before[task]["accuracy"] + 0.2
    assert before["knowledge"]["accuracy"] >= 0.85 and after["letter"]["accuracy"] >= 0.95


@pytest.mark.skipif("tiny-zamba2" not in NAMES, reason="tiny-zamba2 is not shipped")
def test_zamba2_still_shares_its_block_after_loading():
    lm = load(shipping.folder("tiny-zamba2"), dtype="float32", device="cpu")
    first, second = architectures.shared_blocks(lm.model)
    assert first.self_attn.q_proj.weight is second.self_attn.q_proj.weight
    architectures.require_shared(lm.model)


def test_a_model_that_is_not_shipped_is_named():
    with pytest.raises(ModelError, match="tiny-llama"):
        shipping.folder("tiny-gpt")
