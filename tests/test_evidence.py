"""Parts that resume: what is done stays done, what was cut off is begun again, what can never end is not."""

import contextlib
import os
import select
import sys

import pytest
import yaml

from utils.cookbook import evidence, evidence_command
from utils.cookbook.cli import main
from utils.cookbook.evidence import DONE, FAILED, PENDING, SKIPPED, TOO_LONG, Part, record, state_of, to_do
from utils.cookbook.notebooks import find_recipes
from utils.timing.clock import default_timer


def part(name, code):
    return Part(name, ("-c", code), "nothing")


def states(known, out):
    return [state_of(one, evidence.read_states(out)) for one in known]


@pytest.fixture(autouse=True)
def one_key(monkeypatch):
    monkeypatch.setattr(evidence, "key_of", lambda part: "key")


def run(known, out, seconds=60.0, clock=default_timer()):  # noqa: B008
    return [
        (one.name, state)
        for one, state in record(to_do(known, evidence.read_states(out), seconds), out, seconds, print, clock)
    ]


def test_parts_run_once(tmp_path):
    known = [part("good", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"), part("bad", "import sys; sys.exit(3)")]
    assert run(known, tmp_path) == [("good", DONE), ("bad", FAILED)]
    assert run(known, tmp_path) == [("bad", FAILED)]
    assert (tmp_path / "ran").read_text() == "x"


def test_output_goes_to_a_log(tmp_path):
    run([part("two words", "print('said'); raise ValueError('why')")], tmp_path)
    log = (tmp_path / "logs" / "two_words.txt").read_text()
    assert "said" in log
    assert "ValueError: why" in log


def test_a_part_of_other_code_is_to_do_again(tmp_path, monkeypatch):
    known = [part("good", "pass")]
    run(known, tmp_path)
    monkeypatch.setattr(evidence, "key_of", lambda part: "other")
    assert states(known, tmp_path) == [PENDING]


def test_failed_parts_come_last(tmp_path):
    known = [part("bad", "1/0"), part("new", "pass")]
    run(known[:1], tmp_path)
    assert [one.name for one in to_do(known, evidence.read_states(tmp_path), 60)] == ["new", "bad"]


def ticking(*times):
    """A clock that says these, then stays."""
    left = list(times)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_no_part_is_begun_with_too_little_time(tmp_path):
    known = [part("first", "pass"), part("second", "pass")]
    # the end is fixed at 0 + 60; the first part takes until 50
    assert run(known, tmp_path, clock=ticking(0, 0, 0, 50)) == [("first", DONE)]
    assert states(known, tmp_path) == [DONE, PENDING]


@pytest.mark.parametrize(("passed", "state"), [(0, TOO_LONG), (30, PENDING)])
def test_cut_off_at_the_limit(tmp_path, monkeypatch, passed, state):
    monkeypatch.setattr(evidence, "run_limited", lambda command, log, seconds: None)
    assert run([part("slow", "")], tmp_path, clock=ticking(0, passed, passed, 60)) == [("slow", state)]


def test_a_part_that_was_too_long_gets_another_chance_with_more_time(tmp_path, monkeypatch):
    known = [part("slow", "")]
    monkeypatch.setattr(evidence, "run_limited", lambda command, log, seconds: None)
    assert run(known, tmp_path, clock=ticking(0, 0, 0, 60)) == [("slow", TOO_LONG)]
    assert run(known, tmp_path, seconds=60.0) == []
    assert to_do(known, evidence.read_states(tmp_path), 120.0) == known


def test_a_part_ends_at_its_limit(tmp_path):
    assert evidence.run_limited(("-c", "import time; time.sleep(600)"), tmp_path / "log", 0.5) is None


def test_nothing_outlives_a_part(tmp_path):
    pids = tmp_path / "pids"
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys, os; c = subprocess.Popen([sys.executable, '-c', {child!r}]);"
    code += f"open({str(pids)!r}, 'w').write(str(c.pid))"
    assert evidence.run_limited(("-c", code), tmp_path / "log", 600.0) == 0
    with contextlib.suppress(ProcessLookupError):  # gone already
        ended = select.poll()
        ended.register(os.pidfd_open(int(pids.read_text())), select.POLLIN)
        assert ended.poll(30_000), "what the part had started lives on"


def test_a_part_whose_tests_were_all_skipped_is_not_done(tmp_path):
    known = [
        part("tests x", "print('1 skipped, 3 deselected in 0.1s')"),
        part("tests y", "print('1 passed, 1 skipped')"),
    ]
    assert run(known, tmp_path) == [("tests x", SKIPPED), ("tests y", DONE)]


def test_everything_that_needs_a_card_is_a_part(tmp_path):
    recipes = find_recipes()
    names = [one.name for one in evidence.parts(recipes, tmp_path, "gpu")]
    assert [f"recipe {path.stem[:2]}" for path in recipes] == [name for name in names if name.startswith("recipe")]
    assert {"machine", "bench card", "tests recipes_gpu", "tests cost"} <= set(names)
    assert "tests pytest_plugin" not in names  # speaks of the marker in a string


def test_the_gpu_preset_has_every_recipe_on_the_card():
    preset = yaml.safe_load((evidence.ROOT / "data" / "presets" / "gpu.yaml").read_text())
    missing = {path.stem for path in find_recipes()} - {
        name for name, values in preset.items() if values["device"] == "cuda"
    }
    assert not missing


@pytest.mark.parametrize(("arguments", "message"), [
    (["--preset", "tpu"], "--preset tpu: expected gpu or cpu"),
    ([], "--preset cpu rehearses it without a card"),
])  # fmt: skip
def test_refused_before_any_part(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(evidence_command, "no_card", lambda: "needs a CUDA device")
    assert main(["evidence", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("codes", "status"), [(["pass"], 0), (["1/0"], 1), (["pass", "pass"], 75)])
def test_exit_status(codes, status, monkeypatch, capsys, tmp_path):
    known = [part(f"part {n}", code) for n, code in enumerate(codes)]
    monkeypatch.setattr(evidence, "parts", lambda *args: known)
    if status == 75:
        monkeypatch.setattr(evidence, "LEAST_SECONDS", 1e9)
    assert main(["evidence", "--preset", "cpu", "--out", str(tmp_path / "out")]) == status
    assert ("the same command goes on" in capsys.readouterr().out) == (status == 75)


def test_without_a_card_it_says_what_it_is_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "NVIDIA GPU" in evidence_command.no_card() and "run RECIPE" not in evidence_command.no_card()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert evidence_command.no_card() == ""


def test_list_runs_nothing(tmp_path, capsys):
    assert main(["evidence", "--list", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("machine")
    assert max(map(len, lines)) <= 80
    assert not (tmp_path / "out").exists()


def test_the_real_python_runs(tmp_path):
    assert evidence.run_limited(("-c", "import sys; print(sys.executable)"), tmp_path / "log", 60) == 0
    assert (tmp_path / "log").read_text().strip() == sys.executable
