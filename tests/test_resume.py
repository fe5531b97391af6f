"""A killed run goes on where it stood, ends with the bytes of an unbroken one, and its page enters the book."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zoo

ROOT = Path(__file__).parents[1]
SETTINGS = ["heads=L1H1,L2H0", "pairs=[2,3,4,5]", "n_examples=20", "sweep_pairs=3", "n_random=2"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of what `ga run` needs of the checkout, and a folder with a tiny random model."""
    root = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("executed"))
    shutil.copy(ROOT / "_config.yml", root)
    (root / "book" / "index.md").write_text("# A book of one page\n")
    (root / "book" / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n  - file: book/executed/fig4_kv_retrieval\n"
        "  - file: book/references\n"
    )
    (root / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "fig4_kv_retrieval.ipynb", root / "notebooks")
    model, tokenizer = zoo.build("llama")
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root


def ga(project: Path, *arguments: str | Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ga_utils.cli", *arguments]
    streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, cwd=project, env=environment, **streams)


def run(project: Path, store: Path) -> subprocess.Popen:
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    return ga(project, "run", "fig4_kv_retrieval", "--models", "./model", "--store", store, *settings)


def hashed(store: Path) -> dict[str, bytes]:
    """What a record's name is taken over and what it holds: not the notes beside it, nor locks."""
    files = [p for p in store.rglob("*") if p.suffix in (".json", ".npz") and not p.name.endswith(".meta.json")]
    return {str(p.relative_to(store)): p.read_bytes() for p in files}


def kill_tree(process: subprocess.Popen) -> None:
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()  # SIGKILL: nothing can tidy up
    psutil.wait_procs(family, timeout=20)
    process.communicate()


def test_a_killed_run_resumes_and_ends_with_the_same_bytes(project, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    process = run(project, whole)
    assert process.wait(timeout=240) == 0, process.communicate()
    unbroken = hashed(whole)

    process = run(project, broken)
    deadline = time.monotonic() + 200
    while len(hashed(broken)) < 6:  # mid-way: some records are there, most are not
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    kill_tree(process)
    kept = hashed(broken)
    assert 6 <= len(kept) < len(unbroken)
    stamps = {name: (broken / name).stat().st_mtime_ns for name in kept if name.endswith(".json")}

    process = run(project, broken)
    assert process.wait(timeout=240) == 0, process.communicate()
    assert hashed(broken) == unbroken
    assert all((broken / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())  # none measured twice

    process = ga(project, "build")
    assert process.wait(timeout=120) == 0, process.communicate()
    page = (project / "_build" / "html" / "book" / "executed" / "fig4_kv_retrieval.html").read_text()
    assert "image/svg+xml" in page or ".svg" in page  # the figure
    for words in ("random minus found, points", "Claim C6", "fingerprint", "made again by", "L1H1, L2H0"):
        assert words in page, words
    assert "Traceback (most recent" not in page
    assert str(ROOT) not in page  # no path of this machine but that of the user's own model
