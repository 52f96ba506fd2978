"""Which module of utils may import which, and that the folder can be taken elsewhere."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import utils

FOLDER = Path(utils.__file__).parent

# Each layer imports only from those before it.
LAYERS = [
    ["machine", "tensor_difference", "flop_count", "unknown_ratio", "expect"],
    ["equivalence"],
    ["timing"],
    ["cost"],
    ["rows", "claims", "figures"],
    ["models", "remedies"],
    ["cookbook"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# What reads a clock. A calendar date (datetime, in machine) is provenance, and sleeping reads nothing.
CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
CLOCK_MODULES = ("timeit", "torch.utils.benchmark", "triton.testing", "torch._inductor.runtime.benchmarking")


def part_of(path: Path) -> str:
    """timing/clock.py -> "timing"; a remedy's name is "remedies"."""
    name = path.relative_to(FOLDER).parts[0].removesuffix(".py")
    return name if name in RANK else "remedies"


def sources(folder=FOLDER):
    return [path for path in sorted(folder.rglob("*.py")) if path != folder / "__init__.py"]


def imports(tree: ast.AST, path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import; relative ones become "utils....". Imports for type checking count too."""
    package = ["utils", *path.relative_to(FOLDER).parent.parts]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def layer_faults(source: str, path: Path) -> list[str]:
    faults, mine = [], part_of(path)
    for line, name in imports(ast.parse(source), path):
        if not name.startswith("utils."):
            continue
        raw = [
            alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
        ]
        absolute = name in raw or f"from {name.rpartition('.')[0]} import" in source
        other = name.split(".")[1]
        other = other if other in RANK else "remedies"
        if absolute:
            faults.append(f"{path.name}:{line} imports {name} absolutely; expected a relative import")
        if other != mine and RANK[other] >= RANK[mine]:
            faults.append(f"{path.name}:{line} is of the layer {mine} and imports {name}")
    return faults


def clock_faults(source: str, path: Path) -> list[str]:
    tree, faults = ast.parse(source), []
    named = {name: line for line, name in imports(tree, path)}
    for name, line in named.items():
        module, _, attribute = name.rpartition(".")
        if name.startswith(CLOCK_MODULES) or (module == "time" and attribute in CLOCKS):
            faults.append(f"{path.name}:{line} imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("time.") and node.attr in CLOCKS:
                faults.append(f"{path.name}:{node.lineno} reads {dotted}")
            if dotted.endswith(("cuda.Event", "utils.benchmark", "do_bench", "elapsed_time", "_cuda_getCurrentClock")):
                faults.append(f"{path.name}:{node.lineno} reads {dotted}")
    return faults


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_module_imports_only_from_the_layers_before_it(path):
    assert layer_faults(path.read_text(), path) == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_only_timing_reads_a_clock(path):
    if part_of(path) != "timing":
        assert clock_faults(path.read_text(), path) == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("cost.py", "from .timing import measure", 0),
        ("cost.py", "from . import machine, rows", 1),
        ("cost.py", "def f():\n    from .rows import append_rows", 1),
        ("machine.py", "from .cost import roofline", 1),
        ("cost.py", "from utils.timing import measure", 1),
        ("cost.py", "import utils.machine", 1),
        ("timing/clock.py", "from ..equivalence import check_equivalence\nfrom .errors import X", 0),
        ("timing/clock.py", "from ..cost import roofline", 1),
        ("linearize.py", "from .rows import x\nfrom .another_remedy import y", 0),
        ("linearize.py", "from .models.gpt import GPT", 1),
        ("linearize.py", "from .cookbook.check import check", 1),
        ("models/gpt.py", "from ..cookbook import cli", 1),
        ("rows.py", "import transformers.utils.timing", 0),
    ],
)
def test_the_layer_check_finds_what_it_must(module, source, found):
    assert len(layer_faults(source, FOLDER / module)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.perf_counter()", 1),
        ("from time import monotonic_ns", 1),
        ("import timeit", 1),
        ("from torch.utils import benchmark", 1),
        ("import torch\nx = torch.cuda.Event(enable_timing=True)", 1),
        ("from triton.testing import do_bench", 1),
        ("import time\ntime.sleep(1)\nfrom datetime import datetime", 0),
        ("runtime.time_steps = 3\nx.time", 0),
    ],
)
def test_the_clock_check_finds_what_it_must(source, found):
    assert len(clock_faults(source, FOLDER / "cost.py")) == found


def run(code: str, cwd: Path, path: Path | None = None) -> str:
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_timing_loads_no_model_library(tmp_path):
    heavy = {"transformers", "diffusers", "matplotlib", "IPython"}
    code = f"import sys, utils.timing; print(sorted({heavy} & set(sys.modules)))"
    assert run(code, tmp_path) == "[]"


def test_a_copy_under_another_name_imports_and_stays_apart(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "borrowed", ignore=shutil.ignore_patterns("__pycache__"))
    parts = ["machine", "equivalence", "timing", "cost", "rows", "claims", "figures"]
    remedies = [path.stem for path in FOLDER.glob("*.py") if path.stem not in (*RANK, "__init__")]
    lines = [f"import borrowed.{name}" for name in [*parts, *remedies]]
    lines += ["import sys, torch", "x = torch.ones(3)", "from borrowed.equivalence import check_equivalence as c"]
    lines += ["print(bool(c(x, x.clone())), 'utils' in sys.modules)"]
    assert run("\n".join(lines), tmp_path, tmp_path) == "True False"
