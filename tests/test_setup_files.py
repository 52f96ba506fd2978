"""The files of the set-up agree with each other: ranges, pins, environment.yml, hooks, README."""

import ast
import importlib
import re
import stat
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from utils.cookbook.environment import EXTRAS
from utils.cookbook.start import COMMANDS
from utils.cookbook.versions import parse, pins, ranges, satisfies

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = [
    "2.6.0",
    "2.7",
    "2.7.0",
    "2.7.0rc1",
    "2.7.1+cu128",
    "2.8.0a0+git.nv25",
    "2.11.0",
    "3",
    "3.0.0.dev1",
    "2.13.0+cpu",
]
SPECS = [">=2.7", ">=2.7,<3", "<3.0", "==2.13.0", "!=2.11.0", ">2.7", "<=2.11", ""]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("version", VERSIONS)
def test_satisfies_agrees_with_packaging(version, spec):
    assert satisfies(version, spec) == SpecifierSet(spec).contains(version, prereleases=True)


@pytest.mark.parametrize("text", ["", ">=2", "torch>=2.7; sys_platform == 'linux'", "torch @ file:///x", "torch~=2.7"])
def test_other_requirements_are_refused(text):
    with pytest.raises(ValueError, match="expected a name and comparisons"):
        parse(text)


def test_version_without_a_number_is_refused():
    with pytest.raises(ValueError, match="expected one like"):
        satisfies("unknown", ">=1")


def test_every_dependency_has_a_pin_in_its_range():
    pinned = pins(ROOT)
    wanted = ranges(ROOT, ("lab", "dev"))
    assert set(pinned) == set(wanted)
    for name, version in pinned.items():
        assert satisfies(version, wanted[name]), name


@pytest.mark.parametrize(
    ("name", "version"), [("torch", "2.7.0"), ("torch", "2.11.0+cu130"), ("transformers", "5.17.0")]
)
def test_ranges_hold_what_gpu_machines_have(name, version):
    assert satisfies(version, ranges(ROOT)[name])


def test_extras_are_the_declared_ones():
    for name in EXTRAS:
        assert set(ranges(ROOT, (name,))) > set(ranges(ROOT))


def test_conda_installs_the_same_list():
    packages = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert {"pip": ["-r requirements.txt", "-e ."]} in packages


def test_hooks_use_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    asked = {package for hook in hooks for package in hook.get("additional_dependencies", []) if "ruff" in package}
    assert asked == {f"ruff=={pins(ROOT)['ruff']}"}


def test_ci_is_the_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "./cookbook test"]
    steps = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_existing_commands_and_files(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for command in re.findall(r"\./cookbook ([a-z]+)", text):
        assert command in COMMANDS
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert (ROOT / link).exists(), link


def test_code_of_the_readme_imports_what_exists():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    imports = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    assert {"utils.timing", "utils.linearize", "utils.equivalence"} <= {node.module for node in imports}
    for node in imports:
        for name in node.names:
            assert hasattr(importlib.import_module(node.module), name.name), f"{node.module} has no {name.name}"


def test_readme_lists_every_recipe():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for notebook in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"(notebooks/{notebook.name})" in text, f"add a row for {notebook.name} to the reading path of README.md"
