"""Several notebooks at once: they share the cores, those that gather come last, and none outlives a stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_runner import CONFIG, write_notebook

from ga_utils import notebooks
from ga_utils.errors import GAError
from ga_utils.runner import run_notebooks

MEET = """
import os, time
from pathlib import Path
me, other = Path("at-{}"), Path("at-{}")
me.write_text(os.environ.get("OMP_NUM_THREADS", "unset"))
for _ in range(600):
    if other.exists():
        break
    time.sleep(0.1)
else:
    raise RuntimeError("the other one did not start")
"""
FOREVER = "import os, time\nfrom pathlib import Path\nPath(f'pid-{name}').write_text(str(os.getpid()))\ntime.sleep(600)"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(notebooks, "folder_hash", lambda folder: "this package")
    monkeypatch.delenv("GA_STORE", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "_config.yml").write_text(CONFIG)
    return tmp_path


def test_notebooks_meet_and_the_one_that_gathers_comes_last(project):
    write_notebook(
        project, "a_gathers", "from pathlib import Path\nassert {p.name for p in Path().glob('at-*')} == both"
    )
    path = project / "notebooks" / "a_gathers.ipynb"
    content = json.loads(path.read_text())
    content["metadata"]["ga"] = {"last": True}
    content["cells"][1]["source"] = "both = {'at-b', 'at-c'}"
    path.write_text(json.dumps(content))
    write_notebook(project, "b", MEET.format("b", "c"))
    write_notebook(project, "c", MEET.format("c", "b"))
    runs = run_notebooks(project_root=project, jobs=2)
    assert {r.name: r.error for r in runs} == {"a_gathers": None, "b": None, "c": None}
    assert runs[-1].name == "a_gathers"
    assert (project / "at-b").read_text() == str(max(1, (os.cpu_count() or 1) // 2))


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_a_number_of_jobs_that_is_none_is_refused(project, jobs):
    write_notebook(project, "b", "1")
    with pytest.raises(GAError, match="must be a whole number from 1 up"):
        run_notebooks(project_root=project, jobs=jobs)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process there")
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_ends_all_that_run_and_starts_no_more(project, jobs):
    names = ["a", "b", "c"]
    for name in names:
        write_notebook(project, name, FOREVER, f"name = '{name}'")
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background shell ignores it
        f"from ga_utils.runner import run_notebooks; run_notebooks({names}, jobs={jobs})"
    )
    environment = dict(os.environ, PYTHONPATH=str(notebooks.PACKAGE_FOLDER.parent))
    started = [project / f"pid-{name}" for name in names[:jobs]]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=project, env=environment, stderr=subprocess.PIPE
    ) as process:
        for _ in range(900):
            if all(p.exists() and p.read_text() for p in started):
                break
            time.sleep(0.1)
        else:
            process.kill()
            pytest.fail("the notebooks did not start")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].decode()
    assert process.returncode != 0 and "KeyboardInterrupt" in said
    _, alive = psutil.wait_procs([psutil.Process(int(p.read_text())) for p in started if _there(p)], timeout=30)
    assert not alive
    assert not (project / f"pid-{names[jobs]}").exists()
    assert not list((project / "book" / "executed").glob("*.ipynb"))


def _there(path: Path) -> bool:
    return psutil.pid_exists(int(path.read_text()))
