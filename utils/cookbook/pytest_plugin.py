"""Plain `pytest` runs unit tests, the structure check and every notebook under strict nbval.

conftest.py loads this module; another repository can with `-p utils.cookbook.pytest_plugin`. nbval runs and compares;
here is what it leaves out: a dead kernel is noticed, a notebook stops at its first failing cell, a cell that runs alone
first gets those before it, and a failure says where it is and what to do.
"""

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

from .check import check
from .kernels import Kernel, KernelDied, python_path
from .notebooks import NOTEBOOKS, ROOT, label, load, plain, short_name, shown_path, stored_and_came
from .versions import off_pins, pins

CELL_TIMEOUT = 300.0  # seconds; a whole recipe has 60 at its defaults, a loaded machine needs air
IGNORED = {"build", ".ipynb_checkpoints"}
PINNED = ("torch", "transformers", "diffusers", "numpy", "pandas", "matplotlib")  # what an output can depend on


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "folders whose notebooks are recipes: checked for structure (default: the notebooks beside utils)"
    parser.addini("cookbook_recipes", text, type="paths", default=[NOTEBOOKS])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if not hasattr(option, "nbval"):
        raise pytest.UsageError("nbval is not loaded; install it (pip install nbval) or add -p nbval.plugin")
    config.addinivalue_line("markers", "gpu: needs a CUDA device, is skipped without one")
    option.nbval = option.nbval or not option.nbval_lax
    option.nbval_current_env = option.nbval_current_env or not (option.nbval_kernel_name or option.current_env)
    if option.nbval_cell_timeout == 2000:  # nbval's default
        option.nbval_cell_timeout = CELL_TIMEOUT
    patch = pytest.MonkeyPatch()
    patch.setenv("COOKBOOK_DEVICE", "cpu")
    patch.setenv("PYTHONPATH", python_path(config.rootpath))
    if "OMP_WAIT_POLICY" not in os.environ:  # a thread that waits by spinning takes the core of one that works: on a
        patch.setenv("OMP_WAIT_POLICY", "passive")  # loaded machine cells took ten times as long and met the timeout
    config.add_cleanup(patch.undo)


def pytest_report_header() -> str:
    differences = outside_pins()
    if not differences:
        return "notebooks: strict nbval, the tested versions"
    return f"notebooks: strict nbval, a difference is a finding: {differences}"


@cache
def outside_pins() -> str:
    """What differs here from the tested versions, as "torch 2.11.0 (tested: 2.13.0)"; empty when nothing does."""
    if not (ROOT / "requirements.txt").is_file():  # another repository has taken the folder
        return ""
    return off_pins(dict.fromkeys(PINNED, ""), pins(ROOT))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    root = config.rootpath
    inside = collection_path.relative_to(root) if collection_path.is_relative_to(root) else collection_path
    return True if IGNORED.intersection(inside.parts) else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator[None]:
    collected = yield
    return [
        Notebook.from_parent(parent, path=file_path) if isinstance(collector, IPyNbFile) else collector
        for collector in collected
    ]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """`-n 2` keeps a file, so a notebook, on one worker."""
    if config.getoption("dist", "no") in ("load", "worksteal"):
        from xdist.scheduler import LoadFileScheduling

        return LoadFileScheduling(config, log)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def no_cuda() -> str:
    """Why a test marked gpu cannot run here; "" when it can."""
    try:
        import torch
    except ImportError:
        return "needs a CUDA device: torch is not installed"
    return "" if torch.cuda.is_available() else f"needs a CUDA device: torch {torch.__version__} finds none"


class Notebook(IPyNbFile):
    """A notebook: its structure check when it is a recipe, then one item for each code cell."""

    failed: int | None = None  # the first cell that failed, counted from 0 as nbval does
    ran = 0  # code cells that the kernel has behind it

    def collect(self) -> Iterator[pytest.Item]:
        try:
            load(self.path)
            self.cells = [
                NotebookCell.from_parent(self, name=it.name, cell_num=it.cell_num, cell=it.cell, options=it.options)
                for it in super().collect()
            ]
        except ValueError as error:
            raise self.CollectError(str(error)) from None
        if outside_pins():
            self.skip_compare += ("stderr",)  # other versions warn of other things; what they compute must agree
        if self.path.parent in [Path(folder).resolve() for folder in self.config.getini("cookbook_recipes")]:
            yield Structure.from_parent(self, name="structure")
        elif self.cells and all(item.cell.execution_count is None for item in self.cells):
            self.warn(pytest.PytestWarning(f"{shown_path(self.path)}: no stored outputs: it runs, nothing is compared"))
        yield from self.cells

    def setup(self) -> None:
        """Nothing yet: the first cell that runs starts the kernel."""

    def start(self) -> None:
        """A fresh kernel in the notebook's folder. Raises KernelDied."""
        self.stop()
        options = self.config.option
        name = None if options.nbval_current_env else options.nbval_kernel_name
        folder = str(self.path.parent)
        timeout = options.nbval_kernel_startup_timeout
        self.kernel = Kernel(folder, self.config.rootpath, kernel_name=name, startup_timeout=timeout)
        self.setup_sanitize_files()

    def prepare(self, cell: "NotebookCell") -> None:
        """Bring the kernel to where `cell` finds it in a full run: silently run those before it."""
        if self.kernel is None or self.ran > cell.cell_num:
            self.start()
        for earlier in self.cells[self.ran : cell.cell_num]:
            if earlier.options["skip"]:
                continue
            error = self.kernel.run_quietly(earlier.cell.source, self.config.option.nbval_cell_timeout)
            if error and not earlier.options["check_exception"]:
                cell.raise_cell_error(f"{label(self.nb, earlier.cell_num + 1)}, which it needs, fails: {error}")
        self.ran = cell.cell_num

    def stop(self) -> None:
        if self.kernel is not None:
            self.kernel.stop()
        self.kernel, self.ran = None, 0

    def teardown(self) -> None:
        self.stop()


class Structure(pytest.Item):
    """The structure check of one recipe."""

    def runtest(self) -> None:
        problems = check(self.path)
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            name = shown_path(self.path)
            pytest.fail(
                f"{name}: {len(problems)} to put right\n{lines}\nagain: {command('check', name)}", pytrace=False
            )

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"structure of {shown_path(self.path)}"


class NotebookCell(IPyNbCell):
    """One code cell, run and compared by nbval."""

    def setup(self) -> None:
        notebook = self.parent
        if notebook.failed is not None and notebook.failed < self.cell_num:
            pytest.skip(f"earlier cell failed: Cell {notebook.failed} ({label(notebook.nb, notebook.failed + 1)})")
        if notebook.kernel is None:
            try:
                notebook.start()
            except KernelDied as error:
                notebook.failed = self.cell_num
                raise pytest.fail.Exception(f"{shown_path(notebook.path)}: {error}", pytrace=False) from None

    def runtest(self) -> None:
        notebook = self.parent
        try:
            notebook.prepare(self)
            super().runtest()
            notebook.ran = self.cell_num + 1
        except pytest.skip.Exception:
            notebook.ran = self.cell_num + 1
            raise
        except BaseException:
            notebook.failed = self.cell_num
            raise

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{shown_path(self.path)}, {label(self.parent.nb, self.cell_num + 1)}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo) -> str:
        error = excinfo.value
        path = self.parent.path
        where = f"{shown_path(path)}, {label(self.parent.nb, self.cell_num + 1)}"
        if isinstance(error, KernelDied):
            return f"{where}: {error}\nnext: {command('lab', path)} and look at its memory, or {self.again()}"
        if not isinstance(error, NbCellError):
            return f"{where}: {type(error).__name__}: {error}"
        came = self.test_outputs or []
        stored = self.cell.outputs
        raised = next((output for output in came if output["output_type"] == "error"), None)
        if raised:
            trace = re.sub(r"Cell In\[\d+\], ", "", plain(error.inner_traceback or ""))  # always [1] under nbval
            said = f"{raised['ename']}: {raised['evalue']}"
            if raised["ename"] == "KeyboardInterrupt":
                said = str(error)
            lines = [f"{where}: {said}", *trace.strip().splitlines()[-25:], stored_and_came(stored, came)]
            return "\n".join([*lines, f"next: {command('lab', path)} to look at it; {self.again()}"])
        if str(error) != "Cell outputs differ":
            verb = "refresh" if str(error).startswith("Unrun") else "lab"
            return f"{where}: {error}\nnext: {command(verb, path)}; {self.again()}"
        lines = [f"{where}: the output differs from the stored one", stored_and_came(stored, came)]
        if differences := outside_pins():
            lines.append(f"other versions than the tested ones: {differences}")
        lines.append(f"next: {command('refresh', path)} if the change is intended, else {command('lab', path)}")
        return "\n".join([*lines, self.again()])

    def again(self) -> str:
        return f"again: {command('test', f'{shown_path(self.path)}::{self.name}')}"


def command(verb: str, target: str | Path) -> str:
    """The shell command that does `verb`: `./cookbook` for this project's own notebooks, plain tools elsewhere."""
    path = Path(str(target).split("::")[0]).resolve()
    if verb == "test":
        start = "./cookbook test" if path.is_relative_to(ROOT) else "pytest"
        return f'{start} "{target}"'
    if path.is_relative_to(ROOT):
        return f"./cookbook {verb} {short_name(path)}"
    if verb == "lab":
        return f"jupyter lab {shown_path(path)}"
    return f"{Path(sys.executable).name} -m {__package__}.cli {verb} {shown_path(path)}"
