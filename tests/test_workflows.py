"""The workflows hold what they promise: least rights, no fork's code on a GPU, records that outlive a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path: Path) -> dict:
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_rights_and_times_are_bounded(path):
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"} and "concurrency" in content
    for name, job in content["jobs"].items():
        assert "timeout-minutes" in job or name == "publish"
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
            assert "secrets." not in step.get("run", "")  # a secret in a command is printed where it fails


def test_every_command_of_the_workflows_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = "\n".join(step.get("run", "") for path in FILES for job in jobs(path).values() for step in job["steps"])
    assert {"setup", "setup-gpu", "gpu-check"} <= set(re.findall(r"\bmake ([\w-]+)", said)) <= targets
    for command in set(re.findall(r"\.venv/bin/ga (\w+)", said)):
        done = subprocess.run(
            [sys.executable, "-c", "from ga_utils.cli import app; app()", command, "--help"],
            cwd=ROOT, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, command


def test_a_gpu_runs_no_code_of_a_fork_and_its_records_outlive_it():
    job = jobs(ROOT / ".github" / "workflows" / "gpu.yml")["panel"]
    assert "head.repo.full_name == github.repository" in job["if"] and job["environment"] == "gpu"
    steps = {step.get("name"): step for step in job["steps"]}
    keep = steps["Keep the records"]
    assert "always()" in keep["if"] and "pull_request" in keep["if"] and " results" in keep["run"]
    assert job["env"]["GA_STORE"].endswith("records/results")
    assert [s for s in job["steps"] if "HF_TOKEN" in str(s)] == [steps["Notebooks"]]


def test_the_gpu_check_says_why_it_does_not_run_here():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {k: v for k, v in os.environ.items() if k != "GA_GPU_CHECK"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-n", "0", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert "no CUDA device" in done.stdout
