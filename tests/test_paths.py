"""Path patching agrees with a model written out by hand, and with masks where both say the same."""

import math

import numpy as np
import pytest
import torch
import zoo

from ga_utils.counterfactual import logit_difference, swapped
from ga_utils.errors import GAError, HeadError, ModelError, TaskError
from ga_utils.head_inputs import PARTS, reading
from ga_utils.heads import parse_heads
from ga_utils.interactions import paired_effects
from ga_utils.language_model import wrap
from ga_utils.masking import capture_inputs, mask_heads
from ga_utils.mixers.base import FAMILIES
from ga_utils.patches import find_mlps
from ga_utils.paths import path_effects
from ga_utils.tasks import kv_task
from ga_utils.tiny import questions


def some_pairs(lm, n=2, values="0-9", n_pairs=3):
    return swapped(kv_task(n_pairs, n, 3, format="terse", values=values, tokenizer=lm.tokenizer))


# ---- a Llama written out: one sequence, no padding, every head with keys and values of its own ----


def written_out(model, ids, edit):
    """Log-probabilities [t, v]. edit(layer, what, x) may change q, k, v, z [t, h, p] and the MLP's output."""
    config, w = model.config, {n: p.detach() for n, p in model.named_parameters()}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    p, t = config.hidden_size // heads, len(ids)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[name]

    def turn(x):
        angle = torch.arange(t)[:, None] / 10_000 ** (torch.arange(p // 2) * 2 / p)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : p // 2], x[..., p // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (h @ w[f"{at}self_attn.{n}_proj.weight"].T for n in "qkv")
        q, k, v = turn(q.view(t, heads, p)), turn(k.view(t, groups, p)), v.view(t, groups, p)
        k, v = (y.repeat_interleave(heads // groups, 1) for y in (k, v))
        q, k, v = (edit(i, n, y) for n, y in zip("qkv", (q, k, v), strict=True))
        scores = torch.einsum("thp,shp->hts", q, k) / math.sqrt(p)
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        z = edit(i, "z", torch.einsum("hts,shp->thp", scores.softmax(-1), v))
        x = x + z.reshape(t, -1) @ w[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ w[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + edit(i, "mlp", (torch.nn.functional.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T)
    return (norm(x, "model.norm.weight") @ w["lm_head.weight"].T).log_softmax(-1)


def by_hand(lm, pairs, sender, receiver, path, fill, freeze, positions):
    """Mean effect of one path, one sequence and one candidate at a time."""
    (sl, sh), (rl, rh) = sender, receiver
    tok, changes = lm.tokenizer, []
    for a, b, places in zip(pairs.task.examples, pairs.swapped.examples, pairs.places, strict=True):
        end = len(tok(a.prompt)["input_ids"]) - 1  # the prompt's last token
        difference = 0.0
        for sign, place in zip((1, -1), places, strict=True):
            answer = tok(a.candidates[place], add_special_tokens=False)["input_ids"]
            ids, ids_b = (tok(e.prompt)["input_ids"] + answer[:-1] for e in (a, b))
            rows = {"all": range(len(ids)), "answer": range(end, len(ids)), "last": [end]}
            kept, swap = {}, {}

            def keep(into):
                return lambda i, what, x: into.setdefault((i, what), x)

            def score(edit, ids=ids, answer=answer, end=end):
                logp = written_out(lm.model, ids, edit)
                return sum(float(logp[end + d, token]) for d, token in enumerate(answer))

            intact = score(keep(kept))
            written_out(lm.model, ids_b, keep(swap))
            sent = kept[sl, "z"].clone()
            for r in rows[positions[0]]:
                sent[r, sh] = 0 if fill == "zero" else swap[sl, "z"][r, sh]

            def total(i, what, x, sent=sent):
                if (i, what) == (sl, "z"):
                    x = x.clone()
                    x[:, sh] = sent[:, sh]
                return x

            got = {}

            def along(i, what, x, kept=kept, got=got, sent=sent):
                if i == rl:
                    got[what] = x
                if what == "z" and i < rl:
                    return sent if i == sl else kept[i, "z"]
                if what == "mlp" and freeze and i < rl:
                    return kept[i, "mlp"]
                return x

            written_out(lm.model, ids, along)

            def received(i, what, x, kept=kept, got=got, rows=rows):
                if i != rl:
                    return x
                if what == path or (path == "all" and what in "qkv"):
                    x = x.clone()
                    x[:, rh] = got[what][:, rh]
                if what == "z":
                    new, x = x, kept[rl, "z"].clone()
                    for r in rows[positions[1]]:
                        x[r, rh] = new[r, rh]
                return x

            difference += sign * (intact - score(total if path == "total" else received))
        changes.append(difference)
    return np.mean(changes), np.std(changes, ddof=1) / len(changes) ** 0.5


@pytest.fixture(scope="module")
def double():
    """A Llama of three layers, four heads that share two sets of keys and values, in float64."""
    model, tok = zoo.build("llama")
    return wrap(model.double(), tok)


@pytest.mark.parametrize(
    ("fill", "freeze", "positions", "values", "sender"),
    [
        ("swapped", False, ("all", "answer"), "10-99", "L0H1"),
        ("swapped", True, ("all", "all"), "0-9", "L0H2"),
        ("zero", False, ("answer", "answer"), "10-99", "L1H3"),
        ("zero", True, ("last", "last"), "0-9", "L1H0"),
    ],
)
def test_every_path_is_that_of_the_model_written_out(double, fill, freeze, positions, values, sender):
    pairs = some_pairs(double, values=values)
    table = path_effects(double, pairs, sender, "L2H1", None, positions, fill, freeze)
    assert list(table.path) == ["total", "all", "q", "k", "v"]
    number = int(sender[1]), int(sender[3])
    for _, row in table.iterrows():
        effect, se = by_hand(double, pairs, number, (2, 1), row.path, fill, freeze, positions)
        # the model takes its norms and rotations in float32 even here
        assert row.effect == pytest.approx(effect, abs=3e-6) and row.se == pytest.approx(se, abs=3e-6)
    assert (table.se > 2e-5).all()


def test_total_is_the_effect_of_the_mask(double):
    pairs = some_pairs(double)
    for fill in ("zero", "swapped"):
        table = path_effects(double, pairs, ["L0H0", "L1H2"], "L2H3", ["v"], fill=fill)
        masks = paired_effects(double, pairs, "L0H0 L1H2", "all", fill).set_index("head")
        totals = table[table.path == "total"].set_index("sender")
        assert list(table.path) == ["total", "all", "v"] * 2
        for head in totals.index:
            assert totals.effect[head] == pytest.approx(masks.effect[head], abs=1e-9)
            assert totals.se[head] == pytest.approx(masks.se[head], abs=1e-9)


def test_all_heads_below_as_senders_are_the_masked_models_receiver(double):
    # with every head below replaced and MLPs recomputed, the receiver reads what it reads in the masked model
    pairs, site = some_pairs(double), double.sites[2]
    below = [h for h in double.head_list() if h.layer < 2]
    table = path_effects(double, pairs, below, "L2H0", ["q"], ("all", "all"), "zero", together=True)
    assert len(table) == 3
    differences = []
    for a, places in zip(pairs.task.examples, pairs.places, strict=True):
        ids = double.encode([a.prompt])
        with mask_heads(double, below), capture_inputs([site]) as got, torch.no_grad():
            double.model(**ids)

        def paste(module, args, new=got[site]):
            x = args[0].clone()
            x[..., site.channels(0)] = new[..., site.channels(0)]
            return (x,)

        answer, other = (double.tokenizer(a.candidates[i], add_special_tokens=False)["input_ids"][0] for i in places)
        with torch.no_grad():
            before = double.model(**ids).logits[0, -1]
            handle = site.proj.register_forward_pre_hook(paste)
            after = double.model(**ids).logits[0, -1]
            handle.remove()
        differences.append(float((before - after)[answer] - (before - after)[other]))
    assert table.effect[1] == pytest.approx(np.mean(differences), abs=1e-9)
    assert abs(table.effect[1]) > 1e-3


def test_without_norms_paths_through_values_add_up_over_senders():
    model, tok = zoo.build("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    model.model.layers[2].input_layernorm = torch.nn.Identity()
    model.model.norm = torch.nn.Identity()
    lm = wrap(model.double(), tok)
    pairs, senders = some_pairs(lm), ["L0H0", "L0H3", "L1H1"]
    apart = path_effects(lm, pairs, senders, "L2H2", "v").set_index(["sender", "path"]).effect
    joint = path_effects(lm, pairs, senders, "L2H2", "v", together=True).set_index("path").effect
    assert joint["v"] == pytest.approx(sum(apart[s, "v"] for s in senders), abs=1e-9)
    assert abs(joint["v"]) > 1e-3


def test_a_sender_that_says_nothing_has_no_effect():
    model, tok = zoo.build("llama")
    lm = wrap(model, tok)
    model.model.layers[0].self_attn.o_proj.weight.data[:, lm.sites[0].channels(1)] = 0
    table = path_effects(lm, some_pairs(lm), ["L0H1", "L0H2"], "L2H0")
    assert (table.effect[table.sender == "L0H1"] == 0).all()
    assert (table.effect[table.sender == "L0H2"].abs() > 1e-6).all()


def test_a_receiver_whose_output_is_not_used_lets_nothing_through():
    model, tok = zoo.build("llama")
    lm = wrap(model, tok)
    model.model.layers[2].self_attn.o_proj.weight.data[:, lm.sites[2].channels(3)] = 0
    table = path_effects(lm, some_pairs(lm), "L1H2", "L2H3").set_index("path").effect
    assert abs(table["total"]) > 1e-4 and (table[["all", "q", "k", "v"]] == 0).all()


def hooks_of(lm):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in lm.model.modules())


SENDERS = {  # a sender and a receiver of each kind of mixer that can be read
    "gpt2": ("L0H1", "L2H2"),
    "gpt_neox": ("L0H1", "L2H2"),
    "phi3": ("L0H1", "L2H3"),
    "qwen3": ("L0H1", "L1H3"),
    "gemma2": ("L1H1", "L2H0"),
    "olmo2": ("L0H1", "L2H2"),
    "jamba": ("L0H3", "L3H1"),
    "kimi_linear": ("L0H1", "L3H2"),
    "mamba2": ("L0H1", "L2H5"),
    "mamba2_g1": ("L0H1", "L2H5"),
    "zamba2": ("L0H1", "L3H2"),
    "bamba": ("L1H1", "L2H5"),
    "falcon_h1": ("L0.mamba2.H1", "L2.mamba2.H4"),
    "llamba": ("L0H1", "L2H2"),
}


@pytest.mark.parametrize("name", SENDERS)
def test_parts_are_read_in_every_kind_of_mixer(name):
    lm = zoo.lm(name)
    sender, receiver = SENDERS[name]
    pairs, before, hooks = some_pairs(lm), lm.fingerprint, hooks_of(lm)
    intact = logit_difference(lm, pairs)
    table = path_effects(lm, pairs, sender, receiver).set_index("path").effect
    site = lm.site(next(h for h in lm.head_list() if str(h) == receiver))
    assert list(table.index) == ["total", "all", *PARTS[site.kind]]
    assert (table.abs() > 1e-9).all(), table
    assert lm.fingerprint == before and hooks_of(lm) == hooks
    assert np.abs(logit_difference(lm, pairs) - intact).max() < 1e-6


class PlainGate(torch.nn.Module):
    """In place of Mamba-2's norm, which couples heads."""

    def forward(self, x, gate):
        return x * torch.nn.functional.silu(gate)


def uncoupled(name):
    model, tok = zoo.build(name)
    lm = wrap(model, tok)
    if name in ("mamba2", "bamba"):
        for site in lm.sites:
            if site.kind == "mamba2":
                site.mixer.norm = PlainGate()
    return lm


@pytest.mark.parametrize(
    ("name", "head"),
    [("llama", "L1H2"), ("gpt2", "L1H2"), ("gpt_neox", "L1H2"), ("phi3", "L2H1"), ("gemma2", "L1H3"), ("olmo2", "L1H0")]
    + [("qwen3", "L1H3"), ("kimi_linear", "L1H2"), ("llamba", "L1H2"), ("mamba2", "L1H5"), ("bamba", "L2H5")],
)
def test_a_head_that_reads_all_parts_of_another_prompt_gives_what_it_gives_there(name, head):
    lm = uncoupled(name)
    site = lm.site(parse_heads(head)[0])
    here, there = (lm.encode([text]) for text in ("a:1 b:2 a:", "b:3 c:7 c:"))
    own = site.channels(int(head[3]))
    with reading(site, parse_heads(head)[0]) as reader, capture_inputs([site]) as got, torch.no_grad():
        lm.model(**there)
        wanted, taken = got[site], dict(reader.taken)
        lm.model(**here)
        intact = got[site]
        reader.given = taken
        lm.model(**here)
        edited = got[site]
        reader.given = {}
        lm.model(**here)
    assert (got[site] == intact).all()
    assert (edited[..., own] - wanted[..., own]).abs().max() < 1e-5 < 1e-3 < (intact - wanted)[..., own].abs().max()


@pytest.mark.parametrize(("name", "head"), [("llamba", "L1H2"), ("mamba2", "L1H5"), ("bamba", "L2H5")])
def test_parts_of_a_scan_are_what_their_names_say(name, head):
    lm = uncoupled(name)
    site = lm.site(parse_heads(head)[0])
    h, ids = int(head[3]), lm.encode(["a:1 b:2 a:"])

    def run(change=None):
        with FAMILIES[site.kind].watch(site) as cap, reading(site, parse_heads(head)[0]) as reader, torch.no_grad():
            with capture_inputs([site]) as got:
                lm.model(**ids)
                if change:
                    cap.output = cap.value = None
                    reader.given = {change: reader.taken[change] + 1}
                    lm.model(**ids)
        steps = cap.tensors["log_decay" if site.kind == "llamba" else "dt"]
        return {"x": cap.value.mT, "B": cap.tensors["B"].mT, "C": cap.tensors["C"].mT, "dt": steps[..., None, :]} | {
            "y": cap.output.mT, "z": got[site].unflatten(-1, (site.n_heads, -1)).mT
        }  # fmt: skip

    before = run()
    assert set(PARTS[site.kind]) <= set(before)
    for part in PARTS[site.kind]:
        after = run(part)
        moved = {name for name in ("x", "B", "C", "dt") if not torch.equal(after[name], before[name])}
        assert moved == ({part} - {"z"})
        assert torch.equal(after["y"], before["y"]) == (part == "z")
        # only the head's own channels, and of B and C those of its group
        where = (after[part] != before[part]).flatten(0, 1)
        axis = where.any(-2).any(0) if part != "x" else None
        if part in ("B", "C", "z", "dt"):
            group = h // (site.n_heads // before[part].shape[-1])
            assert axis.nonzero().flatten().tolist() == [group]
        else:
            assert (after["x"] != before["x"]).flatten(2).any(-1).any(0).nonzero().flatten().tolist() == [h]


def test_batches_change_nothing(monkeypatch):
    lm = zoo.lm("llama")
    pairs = some_pairs(lm, 5)
    whole = path_effects(lm, pairs, "L0H1", "L2H1")
    monkeypatch.setattr("ga_utils.paths.TOKENS_PER_BATCH", {"cpu": 1})
    assert np.allclose(path_effects(lm, pairs, "L0H1", "L2H1").effect, whole.effect, atol=1e-5)


def test_frozen_mlps_are_found_in_every_layer_below():
    assert len(find_mlps(zoo.lm("llama"), 1)) == 2
    assert len(find_mlps(zoo.lm("jamba"), 3)) == 4
    assert find_mlps(zoo.lm("mamba2"), 2) == []
    assert len(find_mlps(zoo.lm("nemotron_h"), 4)) == 2
    assert len(find_mlps(zoo.lm("zamba2"), 3)) == 2
    with pytest.raises(ModelError, match="freeze_mlps=True: .*ShortConvolution.*use freeze_mlps=False"):
        find_mlps(zoo.lm("inkling"), 1)


def test_the_model_is_restored_after_an_error(double):
    pairs, hooks = some_pairs(double), hooks_of(double)
    before = logit_difference(double, pairs)
    handle = double.sites[1].proj.register_forward_pre_hook(lambda m, a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        path_effects(double, pairs, "L0H1", "L2H1")
    handle.remove()
    assert hooks_of(double) == hooks
    assert (logit_difference(double, pairs) == before).all()
    import transformers.models.llama.modeling_llama as code

    assert type(code.ALL_ATTENTION_FUNCTIONS).__name__ != "_Editing"


def test_bad_arguments_are_one_sentence(double):
    pairs = some_pairs(double)
    for message, args in {
        "There is no head L0H9": ("L0H9", "L2H0"),
        "There is no head L7H0": ("L0H0", "L7H0"),
        "L2H1 cannot send to L2H0: a sender must lie in an earlier layer": ("L2H1", "L2H0"),
        "L2H0 cannot send to L1H1.* whose layer is 1": ("L0H0 L2H0", "L1H1"),
        "receiver must be one head, not 2": ("L0H0", "L1H0 L2H0"),
        "No sender was named": ([], "L1H0"),
        "parts='x' must be some of q, k, v": ("L0H0", "L1H0", "x"),
        "must be a pair: for the senders": ("L0H0", "L1H0", None, "all"),
    }.items():
        with pytest.raises(HeadError, match=message):
            path_effects(double, pairs, *args)
    with pytest.raises(GAError, match="fill='mean' is unknown: use 'swapped' or 'zero'"):
        path_effects(double, pairs, "L0H0", "L1H0", fill="mean")
    with pytest.raises(TaskError, match="Pairs of prompts are needed"):
        path_effects(double, pairs.task, "L0H0", "L1H0")
    with pytest.raises(TaskError, match="give two or more"):
        path_effects(double, swapped(pairs.task.take(1)), "L0H0", "L1H0")
    with pytest.raises(TaskError, match="has only one segment"):
        path_effects(double, swapped(questions.kv_task(1, 2, 0)), "L0H0", "L1H0")


@pytest.mark.parametrize(("name", "receiver"), [("mamba", "L2H3"), ("qwen3_next", "L2H1"), ("lfm2", "L2H4")])
def test_receivers_that_cannot_be_read_are_refused(name, receiver):
    lm = zoo.lm(name)
    with pytest.raises(ModelError, match="cannot be a receiver: only heads of attention, mamba2, llamba mixers can"):
        path_effects(lm, some_pairs(lm), "L0H0", receiver)


def test_inkling_biases_its_attention_by_queries_and_is_refused():
    lm = zoo.lm("inkling")
    with pytest.raises(GAError, match="adds a bias to its attention that may depend on the queries"):
        path_effects(lm, some_pairs(lm), "L0H0", "L2H1")


def test_training_mode_is_refused():
    model, tok = zoo.build("llama")
    lm = wrap(model, tok)
    pairs = some_pairs(lm)
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        path_effects(lm, pairs, "L0H0", "L1H0")
