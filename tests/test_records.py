"""Are records named by what they depend on, whole or absent, and the same in every run?"""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ga_utils.heads
from ga_utils import codehash, encoding, records
from ga_utils.codehash import code_hash, folder_hash, hash_sources, reachable
from ga_utils.errors import StoreError
from ga_utils.records import Store, canonical, record_hash

ROOT = Path(__file__).parent.parent
KEY = {"kind": "score", "model": {"name": "tiny", "layers": 4}, "seed": 0, "scale": 1e-05}

# Measures six conditions, noting each call of fn; dies where it is told to, as kill -9 would have it.
CHILD = """
import os, signal, sys, time
import numpy as np
from ga_utils.records import Store

store, log, die_at, pause = Store(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
real = os.replace

def replace(source, target):
    if os.path.basename(target).partition(".")[2] == die_at and condition == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    real(source, target)

os.replace = replace
for condition in range(6):
    def fn():
        with open(log, "a") as file:
            file.write(f"{condition}\\n")
        time.sleep(pause)
        if die_at == "fn" and condition == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng(condition)
        return {"accuracy": float(rng.random()), "pair": (1, 2)}, {"logprobs": rng.normal(size=(5, 3))}
    store.compute({"kind": "score", "condition": condition}, fn)
"""


def child(store: Path, log: Path, die_at: str = "nothing", pause: float = 0.0) -> subprocess.Popen:
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.Popen([sys.executable, "-c", CHILD, store, log, die_at, str(pause)], env=env)


def content(store: Path) -> dict[str, bytes]:
    """The hashed and compared files of a store."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and not path.name.endswith((".meta.json", ".lock", ".tmp"))
    }


def measured() -> tuple[dict, dict]:
    return {"accuracy": np.float64(0.5), "n": np.int64(3), "ok": np.bool_(True)}, {
        "b": np.arange(4.0),
        "a": np.eye(2),
    }


def test_canonical_text_is_one_for_equal_keys():
    assert canonical({"b": (1, 2.5), "a": {"z": None, "y": True}}) == '{"a":{"y":true,"z":null},"b":[1,2.5]}'
    assert canonical({"x": 0.1 + 0.2, "y": 1e-05}) == '{"x":0.30000000000000004,"y":1e-05}'
    assert record_hash(KEY) == record_hash(dict(reversed(KEY.items())))
    assert record_hash(KEY) != record_hash({**KEY, "seed": 1})
    assert len(record_hash(KEY)) == 24


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ({"model": {"heads": [1, {2, 3}]}}, "key.model.heads[1]"),
        ({"x": float("nan")}, "key.x"),
        ({"x": {"y": [float("inf")]}}, "key.x.y[0]"),
        ({"x": {3: "y"}}, "key.x"),
        ({"x": np.float32(0.1)}, "key.x"),
        ({"x": Path("a")}, "key.x"),
    ],
)
def test_a_key_that_json_cannot_hold_names_the_place(tmp_path, bad, place):
    with pytest.raises(StoreError) as error:
        Store(tmp_path).compute({"kind": "score", **bad}, measured)
    assert str(error.value).startswith(f"{place} ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [None, "", "A b", "../up", 3, "score\n"])
def test_a_key_needs_a_kind(tmp_path, kind):
    with pytest.raises(StoreError, match="'kind'"):
        Store(tmp_path).compute({"kind": kind}, measured)


def test_a_record_is_measured_once_and_reads_back_the_same(tmp_path):
    calls, meta = [], {}

    def fn():
        calls.append(1)
        meta["batch_size"] = 8
        return measured()

    store = Store(tmp_path / "new" / "results")
    first = store.compute(KEY, fn, meta)
    again = Store(tmp_path / "new" / "results").compute(KEY, fn, meta)
    assert calls == [1]
    assert first.values == again.values == {"accuracy": 0.5, "n": 3, "ok": True}
    assert type(first.values["n"]) is int
    assert list(first.arrays) == list(again.arrays) == ["a", "b"]
    np.testing.assert_array_equal(again.arrays["b"], np.arange(4.0))
    assert again.key == {**KEY} and again.hash == record_hash(KEY) == again.path.stem
    assert again.path == tmp_path / "new" / "results" / "score" / f"{again.hash}.json"
    assert again.meta["batch_size"] == 8 and again.meta["seconds"] >= 0 and again.meta["host"]
    assert "host" not in json.loads(again.path.read_text())["values"]
    assert store.get(KEY).values == first.values and store.get({**KEY, "seed": 9}) is None
    assert not list(tmp_path.rglob("*.lock")) and not list(tmp_path.rglob("*.tmp"))


def test_values_alone_make_a_record_without_arrays(tmp_path):
    record = Store(tmp_path).compute(KEY, lambda: {"x": 1})
    assert record.arrays == {} and not record.path.with_suffix(".npz").exists()


def test_an_existing_record_is_read_without_a_lock(tmp_path, monkeypatch):
    Store(tmp_path).compute(KEY, measured)
    monkeypatch.setattr(records, "FileLock", lambda path: pytest.fail("locked"))
    assert Store(tmp_path).compute(KEY, lambda: pytest.fail("measured")).values["n"] == 3


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (({"a": {"b": float("nan")}}, None), "values.a.b is nan"),
        (({"a": object()}, None), "values.a is <object"),
        ((3, None), "dict"),
        (({}, {"x": np.array([object()])}), "array 'x'"),
        (({}, {"a/b": np.eye(2)}), "a/b"),
        (({}, [np.eye(2)]), "arrays are a dict of names to arrays, not [array("),
        (({}, np.eye(2)), "arrays are a dict"),
        (({}, {3: np.eye(2), "a": np.eye(2)}), "arrays are a dict"),
        (({},), "returns (values, arrays) or values, not 1 things"),
        (({}, {}, {}), "not 3 things"),
        (None, "values are a dict"),
    ],
)
def test_values_that_a_record_cannot_hold_leave_nothing(tmp_path, result, words):
    with pytest.raises(StoreError) as error:
        Store(tmp_path).compute(KEY, lambda: result)
    assert words in str(error.value)
    assert content(tmp_path) == {}


def test_arguments_of_another_kind_are_refused_before_any_work(tmp_path):
    with pytest.raises(StoreError, match="a function that takes nothing, not by {'x': 1}"):
        Store(tmp_path).compute(KEY, {"x": 1})
    with pytest.raises(StoreError, match=r"\(meta\) are a dict, not list"):
        Store(tmp_path).compute(KEY, lambda: pytest.fail("measured"), ["batch_size"])
    assert list(tmp_path.iterdir()) == []


def test_notes_of_any_names_lose_no_record(tmp_path):
    meta = {3: "a number", (1, 2): "a pair", "path": Path("a")}
    assert Store(tmp_path).compute(KEY, measured, meta).meta["path"] == "a"


def test_what_fn_raises_passes_and_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        Store(tmp_path).compute(KEY, lambda: 1 / 0)
    assert content(tmp_path) == {}
    assert Store(tmp_path).compute(KEY, measured).values["n"] == 3


def test_array_bytes_depend_on_the_numbers_alone(tmp_path):
    a, b = np.arange(6.0).reshape(2, 3), np.array("text")
    fortran = np.asfortranarray(a)
    _, first = encoding.encode(KEY, {}, {"a": a, "b": b})
    _, second = encoding.encode(KEY, {}, {"b": b.copy(), "a": fortran})
    assert first == second
    assert encoding.encode(KEY, {}, {"a": a + 1, "b": b})[1] != first
    path = tmp_path / "x.npz"
    path.write_bytes(first)
    with np.load(path) as archive:  # numpy itself reads it
        np.testing.assert_array_equal(archive["a"], a)


@pytest.mark.parametrize("die_at", ["fn", "npz", "meta.json", "json"])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, die_at):
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    assert child(whole, tmp_path / "log0").wait(60) == 0
    assert child(broken, log, die_at).wait(60) == -signal.SIGKILL
    assert len(Store(broken).find("score")) == 3  # only whole ones
    assert child(broken, log).wait(60) == 0
    assert content(broken) == content(whole) and len(content(whole)) == 12
    assert log.read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]  # what was done is not done again
    assert not list(broken.rglob("*.tmp"))


def test_two_processes_share_a_store_and_measure_each_record_once(tmp_path):
    log = tmp_path / "log"
    processes = [child(tmp_path / "store", log, pause=0.15) for _ in range(2)]
    assert [p.wait(60) for p in processes] == [0, 0]
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4", "5"]
    assert len(Store(tmp_path / "store").find("score")) == 6


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: truncate(path),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text('["not", "a record"]'),
        lambda path: path.write_text(path.read_text().replace("0.5", "0.6")),
        lambda path: truncate(path.with_suffix(".npz")),
        lambda path: path.with_suffix(".npz").unlink(),
        lambda path: path.with_suffix(".npz").write_bytes(encoding.encode(KEY, {}, {"a": np.eye(3)})[1]),
    ],
)
def test_a_damaged_record_is_said_moved_aside_and_measured_again(tmp_path, damage):
    store = Store(tmp_path)
    good = store.compute(KEY, measured)
    before = content(tmp_path)
    damage(good.path)
    with pytest.warns(UserWarning, match="is damaged") as said:
        assert store.find("score") == []
    assert good.path.exists()  # looking changes nothing
    with pytest.warns(UserWarning, match="measured again") as said:
        again = store.compute(KEY, measured)
    assert len(said) == 1 and good.hash in str(said[0].message)
    assert again.values == good.values
    aside = good.path.with_suffix(".json.damaged")
    assert aside.exists()
    assert {k: v for k, v in content(tmp_path).items() if not k.endswith(".damaged")} == before


def test_a_record_under_another_name_is_damaged(tmp_path):
    store = Store(tmp_path)
    first = store.compute({"kind": "score", "x": 1}, lambda: {"y": 1})
    other = first.path.with_name(record_hash({"kind": "score", "x": 2}) + ".json")
    other.write_bytes(first.path.read_bytes())
    with pytest.warns(UserWarning, match="name of another record"):
        assert store.compute({"kind": "score", "x": 2}, lambda: {"y": 2}).values == {"y": 2}


def test_a_folder_that_cannot_be_written_is_one_sentence_before_any_work(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for root in (tmp_path / "file", tmp_path / "file" / "results", Path("/proc/no-such-folder")):
        store = Store(root)
        with pytest.raises(StoreError, match="cannot be written to .*--store"):
            store.check_writable()
        with pytest.raises(StoreError, match="cannot be written to .*--store"):
            store.compute(KEY, lambda: pytest.fail("measured"))
    with pytest.raises(StoreError, match="file is a file, not a folder"):
        Store(tmp_path / "file" / "results").check_writable()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="link is a broken link, not a folder"):
        Store(tmp_path / "link").check_writable()


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.compute(KEY, measured)
    before = content(tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for attempt in (store.check_writable, lambda: store.compute({**KEY, "seed": 1}, measured)):
        with pytest.raises(StoreError, match=r"full\. Nothing measured before is lost"):
            attempt()
    monkeypatch.undo()
    assert content(tmp_path) == before and not list(tmp_path.rglob("*.tmp"))
    store.check_writable()
    assert store.compute({**KEY, "seed": 1}, measured).values["n"] == 3


def test_find_filters_by_parts_of_the_key(tmp_path):
    store = Store(tmp_path)
    for model in ("a", "b"):
        for seed in (1, 0):
            store.compute({"kind": "score", "model": {"name": model, "layers": 4}, "seed": seed}, lambda: {"x": 1})
    store.compute({"kind": "sweep", "model": {"name": "a"}}, lambda: {"x": 1})
    assert [(r.key["model"]["name"], r.key["seed"]) for r in store.find("score")] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert len(store.find("score", model={"name": "a"})) == 2
    assert len(store.find("score", model={"name": "a"}, seed=0)) == 1
    assert store.find("score", model={"name": "a", "layers": 5}) == []
    assert store.find("score", absent=None) == []
    assert len(store.find(model={"name": "a"})) == 3
    assert store.find("nothing") == [] and Store(tmp_path / "none").find() == []


def test_the_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GA_STORE", str(tmp_path / "x"))
    assert Store().root == tmp_path / "x"
    assert Store(tmp_path / "y").root == tmp_path / "y"
    monkeypatch.delenv("GA_STORE")
    assert Store().root == Path("results")


SOURCES = {
    "ga_utils": "from .sweep import sweep",
    "ga_utils.heads": "class Head:\n    'a head'\n    x = 1",
    "ga_utils.sites": "from .heads import Head\ndef find():\n    return 1",
    "ga_utils.sweep": "def sweep():\n    from . import sites\n    from .tasks import kv\n    return 1",
    "ga_utils.tasks": "from .base import Task",
    "ga_utils.tasks.base": "class Task: pass",
    "ga_utils.tasks.kv": "from .base import Task\nfrom ..heads import Head",
    "ga_utils.loop": "import ga_utils.loop2",
    "ga_utils.loop2": "from ga_utils import loop",
    "ga_utils.named": "NAME = 'ga_utils.sites'",
    "ga_utils.top": "from . import sweep_all",
}


def sources(**changes: str) -> dict[str, bytes]:
    return {name: changes.get(name.rpartition(".")[2], text).encode() for name, text in SOURCES.items()}


def test_the_code_hash_follows_imports():
    def names(name):
        return [n.removeprefix("ga_utils").removeprefix(".") for n in reachable(sources(), [f"ga_utils.{name}"])]

    assert names("heads") == ["heads"]
    assert names("sites") == ["heads", "sites"]
    assert names("sweep") == ["heads", "sites", "sweep", "tasks", "tasks.base", "tasks.kv"]
    assert names("loop") == ["loop", "loop2"]
    assert names("named") == ["heads", "named", "sites"]
    assert names("top")[0] == ""  # what the package's own __init__ holds counts where it is used
    with pytest.raises(StoreError, match="no module ga_utils.nothing"):
        reachable(sources(), ["ga_utils.nothing"])


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"heads": "class Head:\n    'another docstring'\n    # a comment\n    x = (1)"}, True),
        (
            {"sites": '"""Where?"""\nfrom .heads import Head\n\ndef find():\n    """Why."""\n    return 1'},
            True,
        ),
        ({"base": "class Task: x = 1"}, False),
        ({"heads": "class Head:\n    'a head'\n    x = 2"}, False),
        ({"heads": "class Head:\n    'a head'\n    x = 1.0"}, False),
        ({"kv": "from .base import Task"}, False),
        ({"loop": "x = 1"}, True),
        ({"ga_utils": "x = 1"}, True),
    ],
)
def test_the_code_hash_changes_with_code_and_not_with_comments(changes, same):
    before = hash_sources(sources(), ["ga_utils.sweep"])
    assert (hash_sources(sources(**changes), ["ga_utils.sweep"]) == before) is same


@pytest.fixture
def fresh_sources(monkeypatch):
    """The code as it lies on disk now, whoever edited it since these tests began."""
    monkeypatch.setattr(codehash, "_at_start", codehash.read_sources(codehash._FOLDER))


def test_the_code_hash_of_this_package(fresh_sources):
    assert code_hash("heads") == code_hash("ga_utils.heads") == code_hash(ga_utils.heads)
    assert code_hash("heads") != code_hash("errors")
    assert "ga_utils.errors" in reachable(codehash._at_start, ["ga_utils.heads"])


def test_where_records_are_kept_is_no_part_of_what_was_measured():
    given = {"ga_utils.sweep": b"from .records import Store", "ga_utils.records": b"x = 1"}
    assert reachable(given, ["ga_utils.sweep"]) == ["ga_utils.sweep"]


def test_code_that_changed_under_a_running_process_is_an_error(monkeypatch, fresh_sources):
    source = codehash._at_start["ga_utils.heads"]
    monkeypatch.setitem(codehash._at_start, "ga_utils.heads", source + b"\n# only a comment\n")
    code_hash("heads")
    monkeypatch.setitem(codehash._at_start, "ga_utils.heads", source + b"\nx = 1\n")
    with pytest.raises(StoreError, match="ga_utils.heads has changed on disk"):
        code_hash("heads")


def test_the_folder_hash_covers_data_and_not_comments(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "models.toml").write_text("a = 1")
    before = folder_hash(tmp_path)
    (tmp_path / "a.py").write_text("x = 1  # one")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "b.py").write_text("y = 1")
    assert folder_hash(tmp_path) == before
    (tmp_path / "models.toml").write_text("a = 2")
    assert folder_hash(tmp_path) != before


HOLDER = """
import sys, filelock
lock = filelock.FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of KEY's record until its stdin closes."""
    lock_path = tmp_path / "score" / f"{record_hash(KEY)}.lock"
    lock_path.parent.mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, lock_path], **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_waiting_process_says_so_and_waits(tmp_path, monkeypatch, holder):
    said = []

    def say(key, message):
        said.append(message)
        holder.stdin.close()

    monkeypatch.setattr(records, "say_once", say)
    assert Store(tmp_path).compute(KEY, measured).values["n"] == 3
    assert len(said) == 1 and "waiting for it" in said[0]


def test_a_lock_dies_with_its_process(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert Store(tmp_path).compute(KEY, measured).values["n"] == 3
