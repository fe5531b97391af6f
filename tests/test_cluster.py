"""A cluster's jobs are the run's own: each notebook and model once, with what it needs, and no name taken twice."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ga_utils import cli, cluster
from ga_utils.errors import GAError

ROOT = Path(__file__).resolve().parent.parent


def test_a_job_for_each_model_and_one_for_a_notebook_without_models():
    found = cluster.jobs(ROOT, ["fig4_kv_retrieval", "tiny_panel", "verdicts"], ["tiny-llama", "ORG/NAME"], ["seed=3"])
    assert [job.name for job in found] == [
        "fig4_kv_retrieval--tiny-llama", "fig4_kv_retrieval--ORG_NAME", "tiny_panel",
    ]  # fmt: skip
    assert found[1].arguments() == ["fig4_kv_retrieval", "--models", "ORG/NAME", "--set", "seed=3"]
    assert found[2].arguments() == ["tiny_panel", "--set", "seed=3"]


def test_pages_hold_all_models_together_and_the_scoreboard_comes_last():
    words = cluster.page_arguments(ROOT, ["verdicts", "fig4_kv_retrieval"], ["panel:paper-8b"], ["seed=3"])
    assert words == [["fig4_kv_retrieval", "--models", "panel:paper-8b", "--set", "seed=3"], ["verdicts"]]


def test_needs_grow_with_the_model_and_the_attempt():
    small, large = (cluster.Job("fig4_kv_retrieval", m) for m in ("tiny-llama", "llama-3.1-8b-instruct"))
    assert cluster.resources(small)["mem_mb"] < cluster.resources(large)["mem_mb"]
    assert cluster.resources(large)["mem_mb"] > 4 * 8000  # fp32 weights of 8 billion parameters
    first, second = cluster.resources(large, 1, gpus=1), cluster.resources(large, 2, gpus=1)
    assert first["gpu"] == 1 and all(second[k] > first[k] for k in ("mem_mb", "runtime"))
    assert "gpu" not in cluster.resources(small)


@pytest.mark.parametrize(
    ("models", "settings", "said"),
    [
        (["nonesuch"], [], "nonesuch"),
        ([], ["nonesuch=1"], "nonesuch"),
        ([], ['models=["tiny-llama"]'], "a job of its own"),
    ],
)
def test_bad_input_is_said_before_any_job(models, settings, said):
    with pytest.raises(GAError, match=said):
        cluster.jobs(ROOT, ["fig4_kv_retrieval"], models, settings)


def test_two_models_never_share_a_file(tmp_path):
    for name in ("x y", "x+y"):
        (tmp_path / name).mkdir()
    with pytest.raises(GAError, match="share the file name"):
        cluster.jobs(ROOT, ["fig4_kv_retrieval"], [str(tmp_path / "x y"), str(tmp_path / "x+y")])


def test_run_takes_a_folder_for_its_pages(monkeypatch):
    asked = []
    monkeypatch.setattr("ga_utils.runner.run_notebooks", lambda *a, **k: asked.append((a, k)) or [])
    monkeypatch.setattr(sys, "argv", ["ga", "run", "verdicts", "--store", "s", "--out", "elsewhere"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert asked == [((["verdicts"], None, (), "s"), {"jobs": 1, "out": "elsewhere"})]


def test_snakemake_plans_these_jobs(tmp_path):
    snakemake = shutil.which("snakemake") or shutil.which("snakemake", path=str(ROOT / ".venv-cluster" / "bin"))
    if snakemake is None:
        pytest.skip("snakemake is not installed (extra cluster)")
    done = subprocess.run(
        [snakemake, "-s", "workflow/Snakefile", "-n", "--cores", "2", "--config", f"store={tmp_path / 'a store'}",
         "notebooks=layers_and_heads,verdicts", "models=tiny-llama,tiny-llamba", "settings=seed=3"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for model in ("tiny-llama", "tiny-llamba"):
        assert f"ga run layers_and_heads --models {model} --set seed=3 --store '{tmp_path / 'a store'}'" in said
    assert "ga run layers_and_heads --models tiny-llama,tiny-llamba --set seed=3" in said and "ga run verdicts" in said
