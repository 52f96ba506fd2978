"""What plain `pytest` does with notebooks, seen from outside: on toy notebooks, each run a pytest of its own."""

import re

import pytest
from toy_recipe import code_notebook, edit, recipe, save

from utils.cookbook import kernels, pytest_plugin

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester):
    def run(*arguments):
        plugins = ["-p", "utils.cookbook.pytest_plugin", "-p", "no:cacheprovider"]
        return pytester.runpytest_inprocess(*plugins, "-rs", *arguments)

    return run


def test_a_notebook_is_run_and_compared_without_any_option(pytester, run):
    code_notebook(
        pytester.path, "a", "import os", ("print('device', os.environ['COOKBOOK_DEVICE'])", "device cpu\n"), "x = 1"
    )
    for folder in ("build", ".ipynb_checkpoints"):
        (pytester.path / folder).mkdir()
        code_notebook(pytester.path / folder, "copy", "1/0")
    result = run()
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["notebooks: strict nbval, *"])
    assert run("build").parseoutcomes() == {}


def test_one_changed_digit_is_found_and_the_rest_is_skipped(pytester, run):
    code_notebook(
        pytester.path, "a", "x = 12", ("print('bytes', x)\nprint('same')", "bytes 13\nsame\n", ["cost"]), "x", "x"
    )
    result = run()
    result.assert_outcomes(passed=1, failed=1, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "a.ipynb, cell [[]2[]], tag `cost`: the output differs from the stored one",
            "stored: bytes 13",
            "came:   bytes 12",
            "next: python* -m utils.cookbook.cli refresh a.ipynb if the change is intended, else jupyter lab a.ipynb",
            'again: pytest "a.ipynb::Cell 1"',
            "SKIPPED * earlier cell failed: Cell 1 (cell [[]2[]], tag `cost`)",
        ]
    )


def test_an_error_is_told_with_its_place_and_what_was_stored(pytester, run):
    code_notebook(pytester.path, "a", "d = {}", ("print(d['x'])", "1\n", ["check"]))
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["a.ipynb, cell [[]2[]], tag `check`: KeyError: 'x'", "----> 1 *", "stored: 1", "came:   KeyError: 'x'"]
    )
    result.stdout.fnmatch_lines(["next: jupyter lab a.ipynb to look at it; again: pytest *"])


def test_a_killed_kernel_is_noticed_at_once(pytester, run):
    kill = "import os, signal, threading\nos.kill(os.getpid(), signal.SIGKILL)\nthreading.Event().wait()"
    code_notebook(pytester.path, "a", "x = 1", kill, "x")
    result = run()  # with the timeout of minutes that a cell has: nbval alone would wait it out and say "Timeout"
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["a.ipynb, cell [[]2[]], `import os, signal, threading`: the kernel died"])
    assert kernels.SLICE <= 1  # seconds between two looks


def test_a_kernel_that_does_not_start_is_an_error(pytester, run, monkeypatch):
    code_notebook(pytester.path, "a", "x = 1", "x")
    broken = pytester.mkpydir("ipykernel_launcher")
    (broken / "__main__.py").write_text("import sys; sys.exit('no kernel today')")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    result = run()
    result.assert_outcomes(errors=1, skipped=1)
    result.stdout.fnmatch_lines(["a.ipynb: the kernel did not start: *", "  no kernel today"])


def test_a_cell_that_takes_too_long(pytester, run):
    code_notebook(pytester.path, "a", "import threading\nthreading.Event().wait()", "1")
    result = run("--nbval-cell-timeout=1")
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["a.ipynb, cell [[]1[]], *: Timeout of 1 seconds exceeded executing cell"])


@pytest.fixture
def counting(pytester):
    """Each cell needs those before it and shows how many ran."""
    steps = [(f"seen.append({i})\nprint(seen)", f"{list(range(i + 1))}\n") for i in (1, 2, 3)]
    code_notebook(pytester.path, "a", "seen = [0]", *steps)
    return pytester


def test_one_cell_runs_those_before_it(counting, run):
    run("a.ipynb::Cell 2").assert_outcomes(passed=1)


def test_chosen_cells_run_those_between(counting, run):
    run("-k", "Cell and (1 or 3)").assert_outcomes(passed=2, deselected=2)


def test_any_order_of_cells_is_right(pytester, run):
    add = "seen = [*globals().get('seen', []), {0}]\nprint(seen)"
    code_notebook(pytester.path, "a", *[(add.format(i), f"{list(range(i + 1))}\n") for i in range(3)])
    pytester.makeconftest("def pytest_collection_modifyitems(items):\n    items.insert(0, items.pop())")
    run().assert_outcomes(passed=3)


def test_last_failed_runs_the_failed_cell_alone(counting, pytester):
    edit(counting.path / "a.ipynb", lambda raw: raw["cells"][2]["outputs"][0].update(text="[0, 1, 9]\n"))
    arguments = ("-p", "utils.cookbook.pytest_plugin")
    pytester.runpytest_inprocess(*arguments).assert_outcomes(passed=2, failed=1, skipped=1)
    result = pytester.runpytest_inprocess(*arguments, "--lf")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["stored: [[]0, 1, 9[]]", "came:   [[]0, 1, 2[]]"])


def test_a_cell_before_the_chosen_one_fails(pytester, run):
    code_notebook(pytester.path, "a", "1/0", "2")
    result = run("a.ipynb::Cell 1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["a.ipynb, cell [[]2[]], *: cell [[]1[]], `1/0`, which it needs, fails: ZeroDivisionError: *"]
    )


def test_a_cell_before_the_chosen_one_takes_too_long(pytester, run):
    code_notebook(pytester.path, "a", "import threading\nthreading.Event().wait()", "2")
    result = run("a.ipynb::Cell 1", "--nbval-cell-timeout=1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["a.ipynb, cell [[]2[]], *: cell [[]1[]], *, which it needs, fails: no answer within 1 s"]
    )


def test_outputs_without_a_count_are_refreshed(pytester, run):
    path = code_notebook(pytester.path, "a", "x = 1", ("print(1)", "1\n"))
    edit(path, lambda raw: raw["cells"][1].update(execution_count=None))
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["a.ipynb, *: Unrun reference cell has outputs", "next: *refresh a.ipynb; again: *"])


def test_xdist_keeps_a_notebook_on_one_worker(counting, run):
    (counting.path / "b.ipynb").write_bytes((counting.path / "a.ipynb").read_bytes())
    result = run("-n", "2", "-v")
    result.assert_outcomes(passed=8)
    workers = {name: set(re.findall(rf"\[(gw\d)\].*{name}\.ipynb", result.stdout.str())) for name in "ab"}
    assert all(len(used) == 1 for used in workers.values()), workers
    assert set.union(*workers.values()) == {"gw0", "gw1"}


def test_names_of_tests_are_the_same_in_every_process(request):
    """Else the workers of xdist disagree about the tests, and none runs."""
    assert not [item.nodeid for item in request.session.items if " at 0x" in item.nodeid]


def test_recipes_are_checked_for_structure_and_other_notebooks_are_not(pytester, run):
    recipes = pytester.mkdir("recipes")
    path = save(recipe(), recipes)
    edit(path, lambda raw: [cell.update(execution_count=None) for cell in raw["cells"] if "execution_count" in cell])
    code_notebook(pytester.path, "other", "x = 1")
    pytester.makeini("[pytest]\ncookbook_recipes = recipes")
    result = run("-k", "structure or other")
    result.assert_outcomes(passed=1, failed=1, deselected=13)
    result.stdout.fnmatch_lines(
        [
            "*42_toy.ipynb: * to put right",
            "  - its outputs are not stored, so nothing would be compared: refresh the notebook",
        ]
    )


def test_a_foreign_notebook_without_outputs_is_named(pytester, run):
    path = code_notebook(pytester.path, "a", "1")
    edit(path, lambda raw: raw["cells"][0].update(execution_count=None))
    result = run()
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*a.ipynb: no stored outputs: it runs, nothing is compared*"])


def test_a_file_that_is_no_notebook(pytester, run):
    (pytester.path / "a.ipynb").write_text("{")
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*a.ipynb: not a notebook: *"])


def test_stderr_is_compared_with_the_tested_versions_only(pytester, run, monkeypatch):
    warning = ("import sys\nprint(1)\nprint('careful', file=sys.stderr)", "1\n")
    code_notebook(pytester.path, "a", warning, ("print(2)", "3\n"))
    monkeypatch.setattr(pytest_plugin, "outside_pins", lambda: "")
    run().assert_outcomes(failed=1, skipped=1)
    monkeypatch.setattr(pytest_plugin, "outside_pins", lambda: "torch 2.11.0 (tested: 2.13.0)")
    result = run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["notebooks: strict nbval, a difference is a finding: torch 2.11.0 (tested: 2.13.0)"])
    result.stdout.fnmatch_lines(["stored: 3", "other versions than the tested ones: torch 2.11.0 (tested: 2.13.0)"])


def test_gpu_tests_are_skipped_with_a_reason(pytester, run, monkeypatch):
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_it():\n    pass")
    monkeypatch.setattr(pytest_plugin, "no_cuda", lambda: "needs a CUDA device: torch finds none")
    result = run("--strict-markers")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs a CUDA device: torch finds none"])
    monkeypatch.setattr(pytest_plugin, "no_cuda", lambda: "")
    run().assert_outcomes(passed=1)


def test_the_environment_is_left_as_it_was(pytester, run, monkeypatch):
    import os

    monkeypatch.setenv("COOKBOOK_DEVICE", "cuda")
    pytester.makepyfile("import os\ndef test_it():\n    assert os.environ['COOKBOOK_DEVICE'] == 'cpu'")
    run().assert_outcomes(passed=1)
    assert os.environ["COOKBOOK_DEVICE"] == "cuda"


@pytest.mark.parametrize("chosen", [None, "active"])
def test_threads_that_wait_leave_the_core_to_others(pytester, run, monkeypatch, chosen):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    value = chosen or "passive"
    code_notebook(pytester.path, "a", ("import os\nprint(os.environ['OMP_WAIT_POLICY'])", f"{value}\n"))
    run().assert_outcomes(passed=1)


def test_a_kernel_finds_the_root_and_leaves_nothing_behind(pytester, run, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("MPLBACKEND", "agg")
    (pytester.path / "ours.py").write_text("value = 5")
    deep = pytester.mkdir("deep")
    source = "import ours, os\nprint(ours.value, os.environ.get('MPLBACKEND', 'inline')[-6:])"
    code_notebook(deep, "a", (source, "5 inline\n"))
    run().assert_outcomes(passed=1)
    assert not list(tmp_path.glob("nb*"))


def test_commands_are_those_of_this_project_for_its_own_notebooks(monkeypatch):
    monkeypatch.chdir(pytest_plugin.ROOT)
    assert pytest_plugin.command("refresh", "notebooks/07_x.ipynb") == "./cookbook refresh 07"
    assert pytest_plugin.command("lab", "notebooks/07_x.ipynb") == "./cookbook lab 07"
    again = pytest_plugin.command("test", "notebooks/07_x.ipynb::Cell 3")
    assert again == './cookbook test "notebooks/07_x.ipynb::Cell 3"'


def test_the_tested_versions_are_read_from_the_pins(monkeypatch):
    from utils.cookbook import versions

    monkeypatch.setattr(versions, "installed", lambda name: "2.11.0+cu128" if name == "torch" else None)
    pytest_plugin.outside_pins.cache_clear()
    assert pytest_plugin.outside_pins().startswith("torch 2.11.0+cu128 (tested: ")
    pytest_plugin.outside_pins.cache_clear()
