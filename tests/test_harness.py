"""Models and masks work inside lm-eval's harness: Llamba, which transformers lacks, like any other."""

import pytest
import zoo

from ga_utils.masking import mask_heads

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra 'eval')")


def a_task(kind: str, questions: list[dict]) -> dict:
    """A task of the harness made in memory: no file, no hub."""
    from datasets import Dataset

    task = {
        "task": f"facts_{kind}",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(questions)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "output_type": kind,
    }
    if kind == "multiple_choice":
        metric = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
        return task | {"doc_to_choice": "choices", "doc_to_target": "answer", "metric_list": metric}
    metric = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    stop = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    return task | {"doc_to_target": "{{choices[answer]}}", "generation_kwargs": stop, "metric_list": metric}


QUESTIONS = [
    {"question": f"{'x' * (3 * i)} key {i}:", "choices": [" 17", " 5", " 204"], "answer": i % 3} for i in range(6)
]


def run(lm, kind: str, batch_size: int) -> list:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=batch_size, device="cpu")
    out = lm_eval.simple_evaluate(
        wrapped,
        tasks=[a_task(kind, QUESTIONS)],
        log_samples=True,
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),  # reading its own 14,000 task files takes seconds
    )
    samples = sorted(next(iter(out["samples"].values())), key=lambda s: s["doc_id"])
    if kind == "multiple_choice":
        return [[float(r[0]) for r in s["filtered_resps"]] for s in samples]
    return [s["resps"][0][0] for s in samples]


@pytest.mark.parametrize("name", ["llama", "llamba", "zamba2"])
def test_harness_scores_do_not_depend_on_the_batch_and_heed_masks(name):
    lm = zoo.lm(name)
    alone, together = run(lm, "multiple_choice", 1), run(lm, "multiple_choice", 4)
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    with mask_heads(lm, lm.head_list()[0]):
        masked = run(lm, "multiple_choice", 4)
    assert any(abs(x - y) > 1e-3 for a, b in zip(masked, together, strict=True) for x, y in zip(a, b, strict=True))
    assert run(lm, "multiple_choice", 4) == together


@pytest.mark.parametrize("name", ["llama", "llamba"])
def test_harness_generations_do_not_depend_on_the_batch(name):
    lm = zoo.lm(name)
    assert run(lm, "generate_until", 1) == run(lm, "generate_until", 4)
