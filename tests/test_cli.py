"""Does the command line answer at once, in sentences, and with exit statuses that scripts can use?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_runner import CONFIG, write_notebook

from ga_utils import cli
from ga_utils.errors import GAError, ModelError
from ga_utils.records import Store
from ga_utils.registry import registry
from ga_utils.runner import _alive

ROOT = Path(__file__).parent.parent
SLOW = """
import os, pathlib, time
from ga_utils.records import Store
Store().compute({"kind": "done"}, lambda: {"x": 1})
pathlib.Path("part").write_text(str(os.getpid()))
os.replace("part", "started")
time.sleep(600)
"""


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    return tmp_path


def start(folder: Path, *arguments: str, **options) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k != "GA_STORE"} | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "ga_utils.cli", *arguments], cwd=folder, env=env, **pipes, **options)


def ga(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_help_and_lists_load_nothing_heavy(tmp_path):
    heavy = "{'torch', 'transformers', 'papermill', 'numpy', 'matplotlib'}"
    for arguments in (["--help"], ["models"], ["run", "--help"]):
        code = (
            f"import sys; sys.argv = ['ga', *{arguments!r}]\nimport ga_utils.cli as cli\n"
            "try: cli.main()\nexcept SystemExit as end: assert not end.code\n"
            f"assert not {heavy} & {{*sys.modules}}"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_models_lists_every_entry_and_panel(tmp_path):
    status, out, err = ga(tmp_path, "models")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(registry()) + 1]] == list(registry())
    assert "panel:embedded = smollm2-135m" in lines
    assert "16.07 GB" in next(line for line in lines if line.startswith("llama-3.1-8b-instruct"))


def test_version(tmp_path):
    status, out, _ = ga(tmp_path, "--version")
    assert status == 0 and out.startswith("ga_utils ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "nope"], "There is no notebook 'nope'"),
        (
            ["run", "fine", "--set", "n=x"],
            "The parameter n of the notebook fine is a whole number such as 1, not 'x'.",
        ),
        (["run", "fine", "--store", "_config.yml/x"], "Results cannot be written to"),
        (["build"], "The table of contents"),
        (["check", "nope"], "There is no model 'nope' in the registry"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(project, arguments, sentence):
    write_notebook(project, "fine", "pass")
    status, out, err = ga(project, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"ga: {sentence}") and err.count("\n") == 1


def test_outside_a_checkout(tmp_path):
    for arguments in (["run"], ["build"], ["book"]):
        status, _, err = ga(tmp_path, *arguments)
        assert status == 2 and "is not inside a checkout of the book" in err and err.count("\n") == 1


def test_wrong_usage_is_status_2(tmp_path):
    assert ga(tmp_path, "frobnicate")[0] == 2
    assert ga(tmp_path, "check")[0] == 2


def test_a_failing_notebook_is_status_1_and_the_others_are_kept(project):
    write_notebook(project, "b_fine", "print(n)")
    write_notebook(project, "a_bad", "from ga_utils.errors import TaskError\nraise TaskError('No such task.')")
    status, out, err = ga(project / "notebooks", "run", "--set", "n=4", "--store", "kept")
    assert status == 1
    assert err == "ga: a_bad: No such task.\n"
    assert "[2/2] b_fine with n=4" in out and "[2/2] b_fine done in" in out
    assert [p.name for p in (project / "book" / "executed").iterdir()] == ["b_fine.ipynb"]
    assert (project / "notebooks" / "kept" / "a_bad.failed.ipynb").exists()  # relative to where the user is


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_that_records_are_kept(project, stop):
    write_notebook(project, "slow", SLOW)
    # a process in the background of a script inherits a deaf ear for SIGINT, and would pass it on
    hear = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = start(project, "run", "slow", start_new_session=True, preexec_fn=hear)
    while not (project / "started").exists():
        assert process.poll() is None, process.communicate()
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does
    else:
        process.send_signal(stop)  # as a scheduler does
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == "ga: stopped; finished records are kept, and the same command goes on from there.\n"
    assert len(Store(project / "results").find("done")) == 1
    assert list((project / "book" / "executed").iterdir()) == []
    kernel = int((project / "started").read_text())
    for _ in range(300):  # a kernel looks after its parent once a second
        if not _alive(kernel):
            break
        time.sleep(0.1)
    assert not _alive(kernel)


def test_book_runs_the_embedded_panel_and_then_builds(monkeypatch, capsys):
    done = []
    monkeypatch.setattr("ga_utils.runner.run_notebooks", lambda *a, jobs: done.append((*a, jobs)) or [])
    monkeypatch.setattr("ga_utils.book.build_book", lambda **k: done.append("built") or Path("index.html"))
    monkeypatch.setattr(sys, "argv", ["ga", "book", "--store", "s", "--jobs", "3"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert done == [(None, None, (), "s", 3), "built"]


class Report:
    def __init__(self, ok: bool):
        self.ok = ok
        self.rows = [
            {"check": "sum", "error": 1.5e-7, "ok": ok},
            {"check": "mask", "error": 0.25, "ok": True},
        ]


@pytest.mark.parametrize("ok", [True, False])
def test_check_prints_the_table_and_its_verdict(monkeypatch, capsys, ok):
    monkeypatch.setattr("ga_utils.models.load", lambda name, check: f"{name} {check}")
    monkeypatch.setattr("ga_utils.selfcheck.self_check", lambda lm: Report(ok) if lm == "a/b False" else None)
    monkeypatch.setattr(sys, "argv", ["ga", "check", "a/b"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code or 0) == (0 if ok else 1)
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == ["a/b:", "CHECK  ERROR    OK", f"sum    1.5e-07  {ok}"]
    assert ("passed" in out) is ok and ("FAILED" in out) is not ok


def test_every_own_error_is_a_sentence(monkeypatch, capsys):
    def fail(*a, **k):
        raise ModelError("It has no heads.")

    assert issubclass(ModelError, GAError)
    monkeypatch.setattr("ga_utils.models.load", fail)
    monkeypatch.setattr(sys, "argv", ["ga", "check", "a/b"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "ga: It has no heads.\n"
