"""Are scores exact, whatever the architecture, the batch, the tokenizer and the path that was taken?

The oracle here knows nothing of trees, caches or padding: one full forward a candidate, alone, no mask.
"""

import contextlib
import json
import os

import numpy as np
import pytest
import torch
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ga_utils import caches, errors
from ga_utils.errors import GAError, ModelError, TaskError
from ga_utils.language_model import LanguageModel, wrap
from ga_utils.masking import mask_heads
from ga_utils.scoring import score
from ga_utils.tasks import Example, Task, encode, kv_task

MAIN = ("llama", "gpt2", "mamba", "mamba2", "falcon_mamba", "zamba2", "jamba")
VOCAB = 420  # room for the tokens that `tokenizer` adds to the bytes
MIXED = Task(
    "mixed",
    (
        Example("one prompt of a length:", ("57", "5", "512", "86"), 0),  # "5" begins "57"
        Example("a prompt of that length", ("57", "58", "12", "86"), 2),
        Example("short", ("aab", "aac", "aad"), 1),  # all begin alike
        Example("a good deal longer than any other of these prompts", ("abc", "xbc", "xyc", "xy"), 3),
        Example("the length of a prompt.", (" 1", " 2"), 0),
        Example("single", ("7", "8", "9"), 2),
        Example("alone", ("abc",), 0),
    ),
)


def tokenizer(merges=(), template: str = "<s> $A", pad: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and the given merges, in order of priority; `template` places the special tokens."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for token in [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]:
        vocab[token] = len(vocab)
    tok = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>") | (dict(pad_token="<pad>") if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=tok, **names)


TWO_DIGITS = tuple((a, b) for a in "0123456789" for b in "0123456789")


def lm_of(name: str, tok=None, **overrides) -> LanguageModel:
    model, own = zoo.build(name, **overrides)
    return wrap(model, own if tok is None else tok, name)


@torch.no_grad()
def oracle(lm: LanguageModel, task: Task, special: str = "tokenizer") -> list[tuple[np.ndarray, bool]]:
    """Log-probabilities of each example's candidates, and whether the greedy continuation is the answer."""
    results = []
    for e in task.examples:
        texts = [
            lm.tokenizer(e.prompt + c, add_special_tokens=special == "tokenizer")["input_ids"]
            for c in ("", *e.candidates)
        ]
        texts = [t[:-1] if t[-1] == lm.tokenizer.eos_token_id else t for t in texts]
        start = len(os.path.commonprefix(texts))
        sums, greedy = [], False
        for i, ids in enumerate(texts[1:]):
            logp = torch.log_softmax(lm.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double(), -1)
            sums.append(sum(logp[k - 1, ids[k]].item() for k in range(start, len(ids))))
            if i == e.answer:
                greedy = all(logp[k - 1].argmax().item() == ids[k] for k in range(start, len(ids)))
        results.append((np.array(sums), greedy))
    return results


def assert_equal_to_oracle(scores, expected, bound: float = 1e-4) -> None:
    for i, (sums, greedy) in enumerate(expected):
        np.testing.assert_allclose(scores.logprobs[i, : len(sums)], sums, rtol=0, atol=bound)
        assert np.isneginf(scores.logprobs[i, len(sums) :]).all()
        assert scores.predicted[i] == sums.argmax() and scores.full_vocab_correct[i] == greedy


@contextlib.contextmanager
def counted(lm: LanguageModel):
    """The number of rows of each forward call that reaches the model."""
    seen: list[tuple[int, int]] = []
    handle = lm.backbone.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple((args[0] if args else kwargs["input_ids"]).shape)),
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        handle.remove()


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch) -> None:
    monkeypatch.setattr(errors, "_said", set())


@pytest.mark.filterwarnings("ignore:Candidates of several tokens", "ignore:In .* one candidate's tokens begin")
@pytest.mark.parametrize("name", zoo.NAMES)
def test_equals_one_full_forward_a_candidate(name: str) -> None:
    lm = zoo.lm(name)
    scores = score(lm, MIXED)
    assert_equal_to_oracle(scores, oracle(lm, MIXED))
    assert scores.cached == (lm.family not in caches.INEXACT)
    assert scores.prefix_biased == 2 and scores.special_tokens == "tokenizer"


@pytest.mark.filterwarnings("ignore:Candidates of several tokens")
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("name", MAIN)
def test_equals_the_oracle_on_kv_with_and_without_bos(name: str, bos: bool) -> None:
    lm = wrap(zoo.lm(name).model, zoo.tokenizer(bos=bos, pad=bos), name)
    task = kv_task(4, 2, seed=0, tokenizer=lm.tokenizer)
    scores = score(lm, task)
    assert_equal_to_oracle(scores, oracle(lm, task))
    assert (encode(lm.tokenizer, task).items[0].context[0] == 1) is bos
    assert_equal_to_oracle(score(lm, task, special_tokens="none"), oracle(lm, task, "none"))


@pytest.mark.filterwarnings("ignore:Candidates of several tokens", "ignore:In .* one candidate's tokens begin")
@pytest.mark.parametrize("name", MAIN)
def test_batch_order_and_companions_do_not_matter(name: str) -> None:
    lm = zoo.lm(name)
    base = score(lm, MIXED)
    for batch_size in (1, 2, 3, 64):
        again = score(lm, MIXED, batch_size=batch_size)
        np.testing.assert_allclose(again.logprobs, base.logprobs, rtol=0, atol=1e-4)
    order = np.random.default_rng(0).permutation(len(MIXED))
    shuffled = score(lm, [MIXED.examples[i] for i in order], batch_size=3)
    np.testing.assert_allclose(shuffled.logprobs, base.logprobs[order], rtol=0, atol=1e-4)
    for i, example in enumerate(MIXED.examples):
        alone = score(lm, example).logprobs[0]
        np.testing.assert_allclose(alone, base.logprobs[i, : len(alone)], rtol=0, atol=1e-4)


def test_same_bytes_at_the_same_batch_size() -> None:
    lm, task = zoo.lm("llama"), kv_task(5, 6, 0, tokenizer=zoo.tokenizer())
    assert score(lm, task).logprobs.tobytes() == score(lm, task).logprobs.tobytes()


def test_single_tokens_take_one_row_a_question() -> None:
    lm = lm_of("llama", tokenizer(TWO_DIGITS), vocab_size=VOCAB)
    task = kv_task(30, 7, seed=0, values="10-99")
    with counted(lm) as seen:
        scores = score(lm, task, batch_size=3)
    assert [rows for rows, _ in seen] == [3, 3, 1] and scores.calls == 3 and scores.checks == 0
    assert scores.tokens == sum(rows * width for rows, width in seen)
    assert_equal_to_oracle(scores, oracle(lm, task))


def test_several_tokens_take_one_prompt_and_one_step_a_branch() -> None:
    lm = wrap(zoo.build("llama")[0], zoo.tokenizer(), "llama")
    task = kv_task(30, 1, seed=0, values="10-99")
    firsts = {c[0] for c in task.examples[0].candidates}
    with counted(lm) as seen:
        scores = score(lm, task)
    work = seen[scores.checks :]  # the first use of a model proves its cache before
    assert scores.checks == len(seen) - len(work) == 3 and scores.calls == len(work) == 2
    length = len(encode(lm.tokenizer, task).items[0].context)
    assert work == [(1, length), (len(firsts), 1)] and scores.tokens == length + len(firsts)
    assert score(lm, task).checks == 3 and score(lm, task).checks == 0  # a hook fewer: proved anew, then known


def test_tokens_that_all_candidates_share_cost_nothing() -> None:
    lm = lm_of("llama", tokenizer(TWO_DIGITS), vocab_size=VOCAB)
    task = kv_task(9, 3, seed=0, format="paper-space", values="10-99")  # " ", then one of nine
    scores = score(lm, task)
    assert scores.calls == 1 and not scores.cached
    assert_equal_to_oracle(scores, oracle(lm, task))


def test_only_the_needed_logits_are_computed() -> None:
    lm = zoo.lm("llama")
    shapes = []
    handle = lm.model.get_output_embeddings().register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    score(lm, kv_task(8, 4, 0, values="0-9"))
    handle.remove()
    assert [tuple(s[:2]) for s in shapes] == [(4, 1)]


def test_a_merge_across_the_boundary_moves_the_boundary() -> None:
    lm = lm_of("llama", tokenizer((("s", "1"), *TWO_DIGITS)), vocab_size=VOCAB)
    task = Task("merge", (Example("the value is", ("17", "57", "10"), 0), Example("the value:", ("17", "57"), 1)))
    scores = score(lm, task)
    assert scores.boundary_moved == 1
    first = encode(lm.tokenizer, task).items[0]
    assert lm.tokenizer.decode(first.context).endswith("value i")
    assert [lm.tokenizer.convert_ids_to_tokens(c) for c in first.continuations] == [
        ["s1", "7"],
        ["s", "57"],
        ["s1", "0"],
    ]
    assert_equal_to_oracle(scores, oracle(lm, task))


def test_an_appended_eos_never_stands_between_prompt_and_candidate() -> None:
    lm = lm_of("llama", tokenizer(template="<s> $A </s>"))
    task = kv_task(4, 2, 0, values="10-99")
    item = encode(lm.tokenizer, task).items[0]
    assert item.context[0] == 1 and 2 not in item.context and all(2 not in c for c in item.continuations)
    assert_equal_to_oracle(score(lm, task), oracle(lm, task))


def test_too_long_is_said_before_any_forward() -> None:
    lm = lm_of("llama", max_position_embeddings=100)
    task = kv_task(12, 2, 0, values="10-99")
    need = max(i.longest for i in encode(lm.tokenizer, task).items)
    with counted(lm) as seen, pytest.raises(TaskError, match=rf"has {need} tokens .* takes 100"):
        score(lm, task)
    assert not seen


def test_an_inexact_cache_is_never_used_and_that_is_said() -> None:
    task = kv_task(5, 2, 0, values="10-99")
    with pytest.warns(UserWarning, match="full forward each branch on zamba2, because its prefill"):
        scores = score(zoo.lm("zamba2"), task)
    assert not scores.cached


def test_the_check_finds_a_cache_that_drifts(monkeypatch) -> None:
    # Zamba2 clamps small steps dt in the prefill only: 0.002 to 0.008 of the logits' spread
    monkeypatch.setattr(caches, "INEXACT", {})
    monkeypatch.setattr("ga_utils.candidates.INEXACT", {})
    lm = lm_of("zamba2")
    for name, p in lm.model.named_parameters():
        if "dt_bias" in name:
            p.data.fill_(-9.0)
    task = kv_task(5, 2, 0, values="10-99")
    with pytest.warns(UserWarning, match="zamba2, because its cached steps were checked and not trusted: .*deviations"):
        scores = score(lm, task)
    assert not scores.cached
    assert_equal_to_oracle(scores, oracle(lm, task))


def test_the_check_finds_a_cache_that_does_not_reorder(monkeypatch) -> None:
    monkeypatch.setattr("transformers.cache_utils.Cache.reorder_cache", lambda self, index: None)
    lm, task = lm_of("llama"), kv_task(5, 2, 0, values="10-99")
    with pytest.warns(UserWarning, match="not trusted"):
        scores = score(lm, task)
    assert not scores.cached
    assert_equal_to_oracle(scores, oracle(lm, task))


def test_an_unknown_family_in_half_precision_is_not_trusted(monkeypatch) -> None:
    lm, task = lm_of("llama"), kv_task(5, 2, 0, values="10-99")
    lm.model.to(torch.bfloat16)
    assert score(lm, task).cached
    monkeypatch.setattr("ga_utils.candidates.EXACT", frozenset())
    with pytest.warns(UserWarning, match="cannot be checked in half precision"):
        scores = score(lm, task)
    assert not scores.cached


def test_a_changed_model_must_prove_its_cache_again() -> None:
    lm, task = lm_of("llama"), kv_task(5, 2, 0, values="10-99")
    assert score(lm, task).checks and not score(lm, task).checks
    lm.model.model.layers = lm.model.model.layers[1:]  # layers now ask the cache for the wrong slot
    scores = score(lm, task)
    assert scores.checks
    assert_equal_to_oracle(scores, oracle(lm, task))


@pytest.mark.filterwarnings("ignore:Candidates of several tokens")
@pytest.mark.parametrize("positions", ["all", "last", "answer", "lists"])
@pytest.mark.parametrize("name", ["llama", "mamba2", "jamba"])
def test_masks_mean_the_same_on_both_paths(name: str, positions: str, monkeypatch) -> None:
    lm, task = lm_of(name), kv_task(5, 3, 0, values="10-99")
    lengths = [len(item.context) for item in encode(lm.tokenizer, task).items]
    where = [[3, n - 2 - i] for i, n in enumerate(lengths)] if positions == "lists" else positions
    heads = lm.head_list()[:2] + lm.head_list()[-2:]
    with mask_heads(lm, heads, positions=where):
        walked = score(lm, task)
        monkeypatch.setattr("ga_utils.candidates.INEXACT", {lm.family: "a test says so"})
        full = score(lm, task, batch_size=4)
    assert walked.cached and not full.cached
    np.testing.assert_allclose(walked.logprobs, full.logprobs, rtol=0, atol=1e-4)
    assert np.abs(walked.logprobs - score(lm, task).logprobs).max() > 1e-3


@pytest.mark.parametrize("trusted", [True, False])
def test_last_means_the_prompts_last_token(trusted: bool, monkeypatch) -> None:
    lm, task = lm_of("llama"), kv_task(5, 3, 0, values="10-99")
    if not trusted:
        monkeypatch.setattr("ga_utils.candidates.INEXACT", {"llama": "a test says so"})
        monkeypatch.setitem(errors.__dict__, "_said", {"scoring.cache.llama"})
    ends = [[len(item.context) - 1] for item in encode(lm.tokenizer, task).items]
    with mask_heads(lm, "L1H0,L2H3", positions="last"):
        last = score(lm, task)
    with mask_heads(lm, "L1H0,L2H3", positions=ends):
        counted_out = score(lm, task, batch_size=2)
    assert last.cached is trusted
    np.testing.assert_allclose(last.logprobs, counted_out.logprobs, rtol=0, atol=1e-4)
    assert np.abs(last.logprobs - score(lm, task).logprobs).max() > 1e-2


def test_full_vocabulary_asks_more_than_the_candidates() -> None:
    lm = lm_of("llama")
    head = lm.model.lm_head
    with torch.no_grad():  # a model that says "x" whatever comes before
        head.weight.zero_()
    bias = torch.zeros(320)
    bias[lm.tokenizer.convert_tokens_to_ids("x")] = 5.0
    head.bias = torch.nn.Parameter(bias)
    task = Task("t", (Example("p", ("x", "y"), 0), Example("p", ("y", "z"), 0), Example("p", ("xx", "xy"), 0)))
    scores = score(lm, task)
    assert scores.correct.tolist() == [True, True, True]
    assert scores.full_vocab_correct.tolist() == [True, False, True]
    assert scores.full_vocab_accuracy == pytest.approx(2 / 3)


def test_summary_is_json_and_arrays_are_plain(tmp_path) -> None:
    task = kv_task(5, 8, 0, values="10-99")
    scores = score(zoo.lm("llama"), task)
    values = json.loads(json.dumps(scores.to_values(), allow_nan=False))
    p = scores.correct.mean()
    assert values["accuracy"] == p and values["n"] == 8 and values["chance"] == pytest.approx(0.2)
    assert values["stderr"] == pytest.approx((p * (1 - p) / 8) ** 0.5)
    np.savez(tmp_path / "a.npz", **scores.arrays())
    with np.load(tmp_path / "a.npz", allow_pickle=False) as kept:
        assert kept["logprobs"].dtype == np.float64 and kept["logprobs"].shape == (8, 5)
        assert (kept["correct"] == (kept["predicted"] == [e.answer for e in task.examples])).all()
        assert (kept["answer_logprob"] == [scores.logprobs[i, e.answer] for i, e in enumerate(task.examples)]).all()


@pytest.mark.filterwarnings("ignore:Candidates of several tokens")
def test_bad_requests_are_said() -> None:
    lm = lm_of("llama")
    with pytest.raises(TaskError, match="batch_size=0"):
        score(lm, MIXED, batch_size=0)
    with pytest.raises(TaskError, match="special_tokens='bos'"):
        score(lm, MIXED, special_tokens="bos")
    with pytest.raises(TaskError, match="list of Example"):
        score(lm, ["a prompt"])
    unknown = PreTrainedTokenizerFast(tokenizer_object=_words({"<unk>": 0, "p": 1, "a": 2}), unk_token="<unk>")
    with pytest.raises(TaskError, match="same ids"):
        score(wrap(lm.model, unknown, "x"), Example("p ", ("b", "c"), 0))
    lm.model.train()
    with pytest.raises(ModelError, match="training mode"):
        score(lm, MIXED)
    lm.model.eval()
    with torch.no_grad():
        lm.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(GAError, match="not finite"):
        score(lm, MIXED.take(1))


def _words(vocab: dict) -> Tokenizer:
    tok = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    return tok
