"""`./cookbook report --adopt FILE`: what gets into data/results, and what never does."""

import json
import subprocess

import pytest
import test_report
from test_report import REPORTED, write
from toy_recipes import toy

from utils.cookbook import adopt as module
from utils.cookbook import cli, report_command
from utils.cookbook.adopt import adopt, executed_verdicts
from utils.rows import code_hash, read_rows

CLAIMS = """\
from pathlib import Path
count = len(Path("../results/01_toy.jsonl").read_text().splitlines()) if Path("../results").exists() else 0
print(f"Q1  {'confirmed' if count else 'not measurable here':<21}{count} rows")
print("Q2  refuted              as before")
"""
MEASURED = {name: value for name, value in test_report.MEASURED.items() if name != "param.size"}  # not declared
STORED = "Q1  not measurable here  0 rows\nQ2  refuted              as before\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A recipe with claims, a results folder, and rows to adopt."""
    path = toy(tmp_path / "nb", "01_toy", ("claims", CLAIMS), ("", "case = {'length': 64}"), row=False)
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": STORED}]
    path.write_text(json.dumps(notebook))
    monkeypatch.setenv("COOKBOOK_NOTEBOOKS", str(tmp_path / "nb"))
    (tmp_path / "results").mkdir()
    return tmp_path, path


def run(project, rows, verdicts=lambda path: {"Q1": "not measurable here", "Q2": "refuted"}):
    folder, path = project
    return "\n".join(adopt(write(folder / "mine.jsonl", rows), [path], folder / "results", verdicts))


def results(project):
    return {path.name: path.read_text() for path in (project[0] / "results").iterdir()}


def test_rows_are_added_once(project):
    row = MEASURED | {"code_hash": code_hash(project[1])}
    assert run(project, [row, row, row | {"run_id": "r2"}]).startswith("01_toy: 2 rows added, 1 there already\n")
    before = results(project)
    assert read_rows(project[0] / "results" / "01_toy.jsonl") == [row, row | {"run_id": "r2"}]
    said = run(project, [row | {"point": "the sweep's key"}, row | {"run_id": "r2"}])
    assert said.startswith("01_toy: 0 rows added, 2 there already\n") and results(project) == before
    assert "Next, if that was not done yet: ./cookbook refresh 01\nthen: ./cookbook readme" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"speedup": -3.0}, "speedup=-3.0, expected more than 0"),
        ({"speedup": 9.9}, "is outside its interval"),
        ({"speedup": 9.9, "ci_low": 9, "ci_high": 11}, "but the medians give 2"),
        ({"speedup": 0.5, "ci_low": 0.4, "ci_high": 0.6, "median_s": 2.0}, "verdict='faster', but"),
        ({"verdict": "slower"}, "verdict='slower', but"),
        ({"median_s": -1.0}, "median_s=-1.0, expected more than 0"),
        ({"date": "yesterday"}, "date='yesterday', expected"),
        ({"date": "2999-01-01T00:00:00Z"}, "is in the future"),
        ({"device": "toaster"}, "device='toaster', expected"),
        ({"run_id": 5}, "run_id=5, expected text"),
        ({"param.seed": "big"}, "param.seed='big', expected int"),
    ],
)
def test_what_no_measurement_gives_is_refused(project, wrong, said):
    with pytest.raises(ValueError) as error:
        run(project, [MEASURED | wrong])
    assert said in str(error.value) and not results(project)


def test_an_edited_copy_of_a_row_is_refused(project):
    run(project, [MEASURED])
    with pytest.raises(ValueError, match="is there with other values"):
        run(project, [MEASURED | {"speedup": 2.05}])


def test_two_versions_of_a_row_in_one_file_are_refused(project):
    with pytest.raises(ValueError, match="is there with other values"):
        run(project, [MEASURED, MEASURED | {"speedup": 2.05}])
    assert not results(project)


def test_parameters_that_are_not_the_defaults_are_named(project):
    same = run(project, [MEASURED | {"param.sizes": [1, 2]}])
    said = run(project, [MEASURED | {"param.sizes": [3], "run_id": "r2"}])
    assert "neither" not in same and "; neither the defaults nor a preset: sizes=[3]" in said


def test_it_says_what_is_to_do_next(project):
    said = run(project, [MEASURED])
    next = "the stored outputs are older than the rows now. Next: ./cookbook refresh 01\nthen: ./cookbook readme"
    assert said.endswith(f"{next}\n01_toy: no verdict on a claim changes")


def test_who_stops_the_execution_has_been_told_what_is_next(project):
    def stopped(path):
        raise KeyboardInterrupt

    said = []
    lines = adopt(write(project[0] / "mine.jsonl", [MEASURED]), [project[1]], project[0] / "results", stopped)
    with pytest.raises(KeyboardInterrupt):
        for line in lines:
            said.append(line)
    assert said[-1] == "then: ./cookbook readme" and "01_toy.jsonl" in results(project)


def test_a_file_that_git_does_not_know_is_told(project):
    folder = project[0]
    said = run(project, [MEASURED])
    assert "01_toy.jsonl is a new file, not in git yet. Next: git add " in said
    assert "git add" not in run(project, [MEASURED])  # no repository here
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    assert "git add" in run(project, [MEASURED])
    subprocess.run(["git", "-C", str(folder), "add", "results/01_toy.jsonl"], check=True)
    assert "git add" not in run(project, [MEASURED])


def test_an_unknown_field_is_named_with_the_nearest(project):
    for name, near in (("speed_up", "speedup"), ("case.lenght", "case.length"), ("param.sede", "param.seed")):
        with pytest.raises(ValueError, match=f"line 1: unknown field '{name}'; nearest: {near}"):
            run(project, [MEASURED | {name: 1}])
    with pytest.raises(
        ValueError, match=r"added: lines 1–2, 4: unknown field 'x'; nearest: \w+; line 3: a reported row"
    ):
        run(project, [MEASURED | {"x": 1}, MEASURED | {"x": 2}, REPORTED, MEASURED | {"x": 3}])
    assert not results(project)
    said = run(project, [MEASURED | {"param.gone": 1, "code_hash": "0" * 16}])
    assert "fields that the recipe does not write now (the rows are of older code): param.gone" in said


def test_a_folder_is_called_one(project):
    folder, path = project
    for inside, expected in (("", "one file of rows"), ("a.jsonl", f"one file, such as {folder / 'mine' / 'a.jsonl'}")):
        write(folder / "mine" / (inside or "a.txt"), [MEASURED])
        with pytest.raises(ValueError, match=f"--adopt {folder / 'mine'}: is a folder; expected {expected}"):
            list(adopt(folder / "mine", [path], folder / "results"))


def test_rows_of_older_code_are_adopted_and_counted(project):
    said = run(project, [MEASURED | {"code_hash": "0" * 16}])
    assert "1 row added, 1 measured with older or unknown code" in said


def test_verdicts_that_flip_are_listed(project):
    said = run(project, [MEASURED], lambda path: {"Q1": "confirmed", "Q2": "refuted", "Q3": "refined"})
    assert "\nQ1: not measurable here → confirmed\nQ3: not settled → refined" in said and "Q2" not in said


def test_a_recipe_that_fails_with_the_rows_is_told(project):
    def fails(path):
        raise ValueError("nb/01_toy.ipynb, cell [2], tag `claims`: KeyError: 'x'\ntraceback")

    said = run(project, [MEASURED], fails)
    assert "01_toy: its claims could not be derived: nb/01_toy.ipynb, cell [2], tag `claims`: KeyError: 'x'" in said


def test_verdicts_come_from_an_execution_of_the_recipe(project):
    path = project[1]
    before = path.read_bytes()
    said = run(project, [MEASURED], executed_verdicts)
    assert "Q1: not measurable here → confirmed" in said and path.read_bytes() == before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (REPORTED, "line 2: a reported row; only measured rows are adopted"),
        (MEASURED | {"source": "a wiki"}, "line 2: source='a wiki' in a measured row"),
        (MEASURED | {"recipe": "01_toi"}, "line 2: unknown recipe '01_toi'; nearest: 01_toy"),
        (MEASURED | {"schema_version": 2}, "line 2: foreign: schema_version=2, expected 1 to 1"),
        (MEASURED | {"run_id": None}, "line 2: a measured row without run_id"),
        (MEASURED | {"torch": ""}, "line 2: a measured row without torch"),
        (MEASURED | {"speedup": None}, "line 2: verdict='faster' without a speedup"),
        (MEASURED | {"verdict": "best"}, "line 2: foreign: verdict='best'"),
        (MEASURED | {"case.x": {"a": 1}}, "line 2: field 'case.x' is nested"),
        ("damaged", "line 2: damaged"),
    ],
)
def test_one_wrong_row_and_nothing_is_added(project, row, said):
    with pytest.raises(ValueError, match="nothing was added: ") as caught:
        run(project, [MEASURED, row, MEASURED | {"run_id": "r2"}])
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert results(project) == {}


def test_names_of_hosts_users_and_folders_stay_out(project):
    private = {
        "hostname": "gpu-box-17",
        "slurm_node_name": "rack9",
        "user": "jane",
        "param.rows": "/data/jane/rows.jsonl",
        "warnings": "slow disk of gpu-box-17 at /mnt/jane/cache; copied from jane@10.0.0.7:/srv/x to 10.1.2.3",
        "error": r"no file file:///home/jane/model.bin nor C:\Users\jane\model.bin on trainer.eu.internal, ip-10-0-0-1",
        "param.model": "/home/jane/models/tiny",
        "label": "q@k",
        "driver": "12.8.0.1",
        "case.files": ["/tmp/jane/a.txt"],
    }
    said = run(project, [MEASURED | private | {"code_hash": "0" * 16}])
    assert "left out, because it says whose machine it was: hostname, slurm_node_name, user" in said
    (row,) = read_rows(project[0] / "results" / "01_toy.jsonl")
    text = json.dumps(row)
    for secret in (
        "jane",
        "gpu-box-17",
        "rack9",
        "10.0.0.7",
        "10.1.2.3",
        "internal",
        "ip-10",
        "/mnt",
        "/home",
        "Users",
    ):
        assert secret not in text, (secret, text)
    assert row["label"] == "q@k" and row["driver"] == "12.8.0.1" and row["param.model"] == "tiny"
    assert row["case.files"] == ["a.txt"] and "param.rows" not in row
    assert row["warnings"] == "slow disk of HOST at cache; copied from USER@HOST: x to HOST"


def test_several_recipes_are_adopted_together_or_not_at_all(project, monkeypatch):
    folder, path = project
    other = toy(folder / "nb", "02_toy", ("claims", "print('length')"))
    rows = write(folder / "mine.jsonl", [MEASURED, MEASURED | {"recipe": "02_toy"}])

    def full(part, rows):
        if "02_toy" in part.name:
            raise OSError("No space left on device")
        append(part, rows)

    append = module.append_rows
    monkeypatch.setattr(module, "append_rows", full)
    with pytest.raises(OSError, match="No space"):
        list(adopt(rows, [path, other], folder / "results", lambda path: {}))
    assert results(project) == {}
    monkeypatch.setattr(module, "append_rows", append)
    said = "\n".join(adopt(rows, [path, other], folder / "results", lambda path: {}))
    assert sorted(results(project)) == ["01_toy.jsonl", "02_toy.jsonl"] and "./cookbook refresh 01 02" in said


def test_the_command(project, monkeypatch, capsys):
    folder, _ = project
    monkeypatch.setattr(report_command, "RESULTS", folder / "results")
    monkeypatch.setattr(module, "executed_verdicts", lambda path: {"Q1": "confirmed", "Q2": "refuted"})
    path = write(folder / "mine.jsonl", [MEASURED])
    assert cli.main(["report", "--adopt", str(path)]) == 0
    assert "Q1: not measurable here → confirmed" in capsys.readouterr().out
    assert cli.main(["report", "--adopt", str(write(path, [REPORTED]))]) == 2
    assert "nothing was added: line 1: a reported row" in capsys.readouterr().err
