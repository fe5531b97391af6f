"""Claims C7, C8 and C11 to C13 follow their rules on answers made by hand, and are measured on the shipped models."""

import numpy as np
import pytest

from ga_utils import claims_transfer as claims
from ga_utils import transfer
from ga_utils.errors import GAError
from ga_utils.heads import parse_heads
from ga_utils.models import load
from ga_utils.records import Store
from ga_utils.task_choice import Asked

N = 400


def right(share):
    """Answers of which this share is right; nested, so that differences are paired."""
    return np.arange(N) < round(share * N)


def test_heads_that_stand_out_among_many_look_alike():
    rng = np.random.default_rng(0)
    mass = rng.uniform(0.1, 0.3, (60, N))
    mass[7], mass[9] = 0.9, 0.8
    found = claims.looks_alike("m", {"Gather": (mass, 7), "Aggregate": (mass, 9)})
    assert found.verdict == "reproduced"
    one = claims.looks_alike("m", {"Gather": (mass, 7)})
    assert one.verdict == "partly" and "Only one" in one.because
    assert claims.looks_alike("m", {"Gather": (mass, 0)}).verdict in ("not", "partly")
    assert claims.looks_alike("m", {}).verdict == "not testable"


def test_with_few_heads_all_others_must_be_exceeded():
    mass = np.tile(np.linspace(0.1, 0.9, 20)[:, None], N)
    assert claims.looks_alike("m", {"Gather": (mass, 19), "Aggregate": (mass, 19)}).verdict == "reproduced"
    second = claims.looks_alike("m", {"Gather": (mass, 18), "Aggregate": (mass, 19)})
    assert second.verdict == "partly" and "weak test" in second.because


def test_smoother_patterns():
    rng = np.random.default_rng(0)
    sharp = rng.normal(0.2, 0.05, N), rng.normal(0.9, 0.02, N)
    smooth = rng.normal(2.5, 0.2, N), rng.normal(0.2, 0.02, N)
    assert claims.smoother("m", sharp, smooth).verdict == "reproduced"
    assert claims.smoother("m", smooth, sharp).verdict == "not"


def test_delegation():
    intact, gone, same = (right(0.9), right(0.95)), (right(0.13), right(0.95)), (right(0.88), right(0.9))
    assert claims.delegated("m", intact, gone, same, (0.1, 0.25)).verdict == "reproduced"
    assert claims.delegated("m", intact, gone, gone, (0.1, 0.25)).verdict == "partly"  # the SSM heads matter as much
    assert claims.delegated("m", intact, intact, same, (0.1, 0.25)).verdict == "not"
    at_chance = claims.delegated("m", (right(0.1), right(0.95)), gone, same, (0.1, 0.25))
    assert at_chance.verdict == "not testable"


def test_replacement():
    student, teacher = right(0.3), right(0.9)
    swaps = {0: right(0.3), 1: right(0.8), 2: right(0.4)}
    assert claims.restored("m", student, teacher, swaps, [1], 0.25).verdict == "reproduced"
    assert claims.restored("m", student, teacher, swaps, [2], 0.25).verdict == "not"
    assert claims.restored("m", teacher, teacher, swaps, [1], 0.25).verdict == "not testable"
    assert claims.restored("m", student, teacher, swaps, [], 0.25).verdict == "not testable"


def test_the_head_alone():
    student, layer = right(0.3), right(0.8)
    assert claims.head_alone("m", student, layer, right(0.78), ("L1H0", 1)).verdict == "reproduced"
    assert claims.head_alone("m", student, layer, right(0.5), ("L1H0", 1)).verdict == "partly"
    assert claims.head_alone("m", student, layer, student, ("L1H0", 1)).verdict == "not"
    assert claims.head_alone("m", student, student, layer, ("L1H0", 1)).verdict == "not testable"


@pytest.mark.slow
def test_retrieval_moves_with_the_teachers_head(tmp_path):
    student, teacher = (load(n, dtype="float32", device="cpu") for n in ("tiny-llamba-unaligned", "tiny-llama"))
    from ga_utils.tiny.shipping import record

    kept = parse_heads(record("tiny-llama")["pruning"][0]["kept"])
    store = Store(tmp_path)
    verdicts, records = transfer.replacement(store, student, teacher, kept, Asked("kv", 8), 60, 0)
    assert [v.claim for v in verdicts] == ["C12", "C13"] and verdicts[0].verdict in ("reproduced", "partly")
    assert len(records) == 3 + student.n_layers and len({r.hash for r in records}) == len(records)


def test_what_is_no_hybrid_is_refused(tmp_path):
    lm = load("tiny-llama", dtype="float32", device="cpu")
    with pytest.raises(GAError, match="tiny-llama is no hybrid: it has attention alone"):
        transfer.delegation(Store(tmp_path), lm, Asked("kv", 8), 10, 0)
    with pytest.raises(GAError, match="no Aggregate head to graft"):
        transfer.replacement(Store(tmp_path), lm, lm, [], Asked("kv", 8), 10, 0)
