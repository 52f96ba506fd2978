"""`./cookbook report`: what is read, what is named, what is averaged, and what the tables say."""

import csv
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from toy_recipes import toy

from utils.cookbook import cli, report_command
from utils.cookbook.report import Section, add_cost, cost_section, natural, prices, recipe_sections, times
from utils.cookbook.report_rows import column, machine_names, merge, row_files
from utils.rows import append_rows, code_hash

ROOT = Path(__file__).resolve().parents[1]
MEASURED = {
    "schema_version": 1,
    "provenance": "measured",
    "run_id": "r1",
    "recipe": "01_toy",
    "code_hash": None,
    "param.seed": 0,
    "param.size": 8,
    "case.length": 64,
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "torch": "2.13.0+cu130",
    "python": "3.11.7",
    "env_id": "e",
    "date": "2026-11-30T10:00:00Z",
    "label": "fast",
    "baseline_label": "slow",
    "verdict": "faster",
    "speedup": 2.0,
    "ci_low": 1.9,
    "ci_high": 2.1,
    "median_s": 0.5,
    "baseline_median_s": 1.0,
}
REPORTED = {"schema_version": 1, "provenance": "reported", "recipe": "01_toy", "source": "a wiki", "speedup": 700.0}
BAD = {"speedup": None, "ci_low": None, "ci_high": None}


def write(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def merged(folder: Path, rows: list, notebooks=()) -> pd.DataFrame:
    return merge([write(folder / "rows.jsonl", rows)], notebooks).rows


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """A toy recipe as the project's own, and a working folder apart from it."""
    path = toy(tmp_path / "nb", "01_toy")
    monkeypatch.setenv("COOKBOOK_NOTEBOOKS", str(tmp_path / "nb"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return path


# ---------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ["speedup", "median_s", "baseline_median_s"])
def test_a_row_with_a_number_that_cannot_be_is_named(tmp_path, name):
    merged = merge([write(tmp_path / "a.jsonl", [MEASURED, MEASURED | {name: -3.0}])])
    assert len(merged.rows) == 1 and f"line 2: foreign: {name}=-3.0, expected more than 0" in merged.problems[0]


def test_damaged_and_foreign_rows_are_named_with_file_and_line(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        [
            MEASURED,
            '{"half": ',
            "[1, 2]",
            MEASURED | {"run_id": "r2"},
            {"a": 1},
            MEASURED | {"schema_version": 99},
            MEASURED | {"schema_version": True},
            MEASURED | {"provenance": "guessed"},
            MEASURED | {"verdict": "great"},
            MEASURED | {"speedup": "2x"},
            MEASURED | {"recipe": ""},
        ],
    )
    with open(path, "a") as file:
        file.write('{"schema_version": 1, "prov')
    found = merge([path])
    assert len(found.rows) == 2
    said = "\n".join(found.problems)
    for line, words in [
        ("lines 2–3", "damaged; expected one JSON object a line"),
        ("line 5", "schema_version=None, expected 1 to 1"),
        ("line 6", "schema_version=99"),
        ("line 7", "schema_version=True"),
        ("line 8", "provenance='guessed', expected 'measured' or 'reported'"),
        ("line 9", "verdict='great'"),
        ("line 10", "speedup='2x', expected a number"),
        ("line 11", "recipe=''"),
        ("line 12", "unfinished"),
    ]:
        assert any(f"rows.jsonl, {line}: " in p and words in p for p in found.problems), (line, said)
    assert len(found.problems) == 9


def test_infinite_numbers_are_damage(tmp_path):
    found = merge([write(tmp_path / "r.jsonl", [json.dumps(MEASURED).replace("2.0", "Infinity"), MEASURED])])
    assert len(found.rows) == 1 and "line 1: damaged" in found.problems[0]


def test_a_row_that_is_there_twice_counts_once(tmp_path):
    first = write(tmp_path / "a.jsonl", [MEASURED, MEASURED])
    second = write(tmp_path / "b.jsonl", [MEASURED, MEASURED | {"run_id": "r2"}])
    found = merge([first, second])
    assert len(found.rows) == 2 and found.twice == 2


def test_a_folder_gives_its_rows_and_of_a_sweep_only_finished_points(tmp_path):
    write(tmp_path / "run" / "01_toy.rows.jsonl", [MEASURED])
    write(tmp_path / "run" / "01_toy.status.json", ["{}"])
    swept = MEASURED | {"run_id": "r2"}
    write(tmp_path / "sweep" / "rows.jsonl", [swept | {"point": "k1"}])
    write(tmp_path / "sweep" / "points" / "k1" / "row.json", [{"rows": [swept]}])
    write(tmp_path / "sweep" / "points" / "k1" / "01_toy.rows.jsonl", [swept, MEASURED | {"run_id": "failed try"}])
    write(tmp_path / "sweep" / "points" / "k2" / "row.json", [{"rows": [MEASURED | {"run_id": "r3"}]}])
    found = merge(row_files([tmp_path / "run", tmp_path / "sweep"]))
    assert sorted(found.rows["run_id"]) == ["r1", "r2", "r3"] and not found.problems and not found.twice


def test_what_utils_rows_writes_is_read(tmp_path):
    append_rows(tmp_path / "r.jsonl", [MEASURED, REPORTED])
    found = merge([tmp_path / "r.jsonl"])
    assert list(found.rows["provenance"]) == ["measured", "reported"] and not found.problems


def test_missing_row_files_are_named(tmp_path):
    write(tmp_path / "rows.jsonl", [MEASURED])
    with pytest.raises(ValueError, match=r"no row file .*row\.jsonl'; nearest: .*rows\.jsonl"):
        row_files([tmp_path / "row.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="in this folder"):
        row_files([tmp_path / "empty"])


def test_rows_of_older_code_are_marked_and_kept_apart(tmp_path, recipe):
    now = code_hash(recipe)
    rows = [MEASURED | {"code_hash": now}, MEASURED | {"code_hash": "0" * 16, "speedup": 8.0}, MEASURED]
    frame = merged(tmp_path, rows, [recipe])
    assert list(frame["code"]) == ["current", "older", "unknown"]
    (section,) = recipe_sections(frame)
    assert [line[0] for line in section.lines] == ["fast", "fast †", "fast ‡"]
    assert [line[3] for line in section.lines] == ["2.00x", "8.00x", "2.00x"]
    assert len(section.notes) == 2 and "older code" in section.notes[0]


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (["NVIDIA H200", "AMD EPYC 9V74"], ["H200", "EPYC"]),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB"], ["A100-SXM4-80GB", "A100-PCIE-40GB"]),
    ],
)
def test_machines_have_short_names_that_differ(devices, names):
    found = machine_names([{"device_name": name, "torch": "2.13.0+cu130"} for name in devices])
    assert list(found.values()) == [f"{name}, 2.13.0" for name in names]


def test_versions_stay_whole_where_the_short_ones_are_equal():
    found = machine_names([{"device_name": "H200", "torch": f"2.13.0+{build}"} for build in ("cu126", "cu130")])
    assert list(found.values()) == ["H200, 2.13.0+cu126", "H200, 2.13.0+cu130"]


def test_names_of_columns(tmp_path):
    frame = merged(tmp_path, [MEASURED | {"case.size": 3}])
    assert column("label", frame, "") == "label"
    assert column("length", frame, "") == "case.length"
    assert column("seed", frame, "") == "param.seed"
    assert column("size", frame, "") == "case.size"  # the point, before the parameter
    with pytest.raises(ValueError, match=r"--by 'lenght': no row has such a field; nearest: case\.length"):
        column("lenght", frame, "--by ")


# ---------------------------------------------------------------------------------------------------- tables


def test_means_are_geometric_and_failures_are_counted_never_averaged(tmp_path):
    rows = [MEASURED | {"speedup": s, "run_id": f"r{s}"} for s in (2.0, 8.0)]
    rows += [MEASURED | {"verdict": "slower", "speedup": 0.5}, MEASURED | {"verdict": "invalid", "speedup": 90.0}]
    rows += [MEASURED | {"verdict": "error", **BAD}, MEASURED | {"verdict": None, **BAD}, REPORTED]
    (section,) = recipe_sections(merged(tmp_path, rows))
    assert section.title == ("01_toy: 6 measured rows of 3 runs, 1 without a comparison; 1 reported, never averaged")
    assert section.lines == [
        ["fast ‡", "H200, 2.13.0", "5", "2.00x", "0.5–8", "2 faster, 1 slower, 1 invalid, 1 error"]
    ]


def test_rows_that_only_failed_have_no_mean(tmp_path):
    (section,) = recipe_sections(merged(tmp_path, [MEASURED | {"verdict": "error", **BAD}]))
    assert section.lines[0][2:] == ["1", "—", "—", "1 error"]


def test_by_gives_a_line_for_each_value_in_order_of_numbers(tmp_path):
    rows = [MEASURED | {"case.length": n, "speedup": float(n)} for n in (1024, 64, 9)]
    (section,) = recipe_sections(merged(tmp_path, rows), ["case.length"])
    assert section.headings[1] == "length" and [line[1] for line in section.lines] == ["9", "64", "1024"]
    assert [line[4] for line in section.lines] == ["9.00x", "64.0x", "1024x"]


def test_natural_order_and_times():
    assert sorted(["2.13", "2.9", "a10", "a9"], key=natural) == ["2.9", "2.13", "a9", "a10"]
    assert [times(value) for value in (None, math.nan, 1.234, 12.34, 123.4)] == ["—", "—", "1.23x", "12.3x", "123x"]


# ---------------------------------------------------------------------------------------------------- cost


def test_cost_of_an_output(tmp_path):
    rows = [
        MEASURED | {"param.batch": 4, "median_s": 3.6, "baseline_median_s": 7.2},
        MEASURED | {"param.batch": 4, "verdict": "invalid", "case.length": 128},
        MEASURED | {"device_name": "AMD EPYC", "param.batch": 4},
    ]
    frame = merged(tmp_path, rows)
    add_cost(frame, prices("H200=2", frame), "param.batch")
    assert frame["cost_per_output"][0] == pytest.approx(2 * 3.6 / 3600 / 4)
    assert frame["baseline_cost_per_output"][0] == pytest.approx(2 * 7.2 / 3600 / 4)
    assert frame["cost_per_output"][1:].isna().all()  # wrong answers are worth nothing; a device without a price
    section = cost_section(frame)
    assert section.title == "Cost of 1,000 outputs"
    assert section.lines == [["01", "fast", "H200, 2.13.0", "1", "0.5", ""]]
    assert section.notes == ["no price, or no valid row: EPYC, 2.13.0"]


@pytest.mark.parametrize("text", ["cheap", "-1", "0", "nan", "H200=x"])
def test_a_price_is_money(tmp_path, text):
    with pytest.raises(ValueError, match="expected money per hour"):
        prices(text, merged(tmp_path, [MEASURED]))


def test_a_price_of_a_device_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="'B300=1': no row of such a device; there are: NVIDIA H200"):
        prices("B300=1", merged(tmp_path, [MEASURED]))


# ---------------------------------------------------------------------------------------------------- the command


def test_the_report_fits_80_columns_and_names_damage_on_stderr(recipe, tmp_path, capsys):
    long = "a candidate with a very long name, and a reason why it has it"
    rows = [
        MEASURED | {"label": long, "device_name": f"NVIDIA A100-SXM4-80GB-{n}", "run_id": f"r{n}"} for n in range(5)
    ]
    rows += [rows[0] | {"verdict": "slower", "speedup": 0.5, "torch": "2.9.1", "run_id": "old"}, "damaged"]
    path = write(tmp_path / "rows.jsonl", rows)
    assert cli.main(["report", str(path), "--price", "2.5"]) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert "01_toy: 6 measured rows" in out and "Drift: 1 of" in out and "Cost of" in out and "Machines side" in out
    assert f"cookbook: {path}, line 7: damaged" in err


def test_nothing_is_lost_where_a_cell_is_too_wide():
    text = Section("title", ["a", "b"], [["x" * 100, "y" * 100]]).text()
    assert text.count("x") == 100 and text.count("y") == 100 and max(map(len, text.splitlines())) <= 80


def test_csv_holds_every_row_once(recipe, tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [MEASURED, MEASURED, MEASURED | {"run_id": "r2"}, REPORTED])
    assert cli.main(["report", "--csv", str(path)]) == 0  # no file ends in .csv: to stdout, and nothing else
    printed = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert cli.main(["report", str(path), "--csv", "out/table.csv"]) == 0
    assert "out/table.csv: 3 rows" in capsys.readouterr().out
    with open("out/table.csv", newline="") as file:
        assert list(csv.DictReader(file)) == printed
    assert [row["run_id"] for row in printed] == ["r1", "r2", ""]
    assert (
        printed[0]["machine"] == "H200, 2.13.0" and printed[0]["speedup"] == "2.0" and printed[2]["source"] == "a wiki"
    )


def test_markdown_has_the_same_tables(recipe, tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [MEASURED | {"label": "a | b"}])
    assert cli.main(["report", str(path), "--md", "report.md"]) == 0
    assert "report.md: 1 table" in capsys.readouterr().out
    assert "| a \\| b ‡ | H200, 2.13.0 | 1 | 2.00x | 2.00x | 1 faster |" in Path("report.md").read_text()
    assert cli.main(["report", str(path), "--md"]) == 0
    assert capsys.readouterr().out == Path("report.md").read_text()


def test_parquet_needs_pyarrow_and_says_so(recipe, tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "rows.jsonl", [MEASURED])
    monkeypatch.setattr(report_command.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["report", str(path), "--parquet", "t.parquet"]) == 2
    assert "--parquet t.parquet: needs pyarrow: " in capsys.readouterr().err


def test_parquet_columns_have_one_type_each(tmp_path):
    frame = merged(tmp_path, [MEASURED | {"case.x": 1, "case.y": [1, 2]}, MEASURED | {"case.x": "a", "run_id": "r2"}])
    made = report_command.plain(frame)
    assert list(made["case.x"]) == ["1", '"a"'] and made["case.y"][0] == "[1, 2]" and pd.isna(made["case.y"][1])


def test_parquet_is_written(recipe, tmp_path):
    pytest.importorskip("pyarrow", reason="needs pyarrow: pip install pyarrow")
    path = write(tmp_path / "rows.jsonl", [MEASURED | {"case.x": 1, "case.y": [1, 2]}, MEASURED | {"case.x": "a"}])
    assert cli.main(["report", str(path), "--parquet", "t.parquet"]) == 0
    assert list(pd.read_parquet("t.parquet")["speedup"]) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nope.jsonl", "no row file 'nope.jsonl'"),
        ("ROWS --by lenght", "--by 'lenght': no row has such a field; nearest: case.length"),
        ("ROWS --plot x=lenght", "--plot x='lenght': no row has such a field; nearest: case.length"),
        ("ROWS --plot z=1", "--plot 'z=1': expected x=…, y=… or hue=…"),
        ("ROWS --plot y=speedup", "x=… is missing"),
        ("ROWS --price cheap", "--price 'cheap': expected money per hour"),
        ("ROWS --outputs size", "--outputs size: only --price needs it"),
        ("ROWS --outputs sise --price 1", "--outputs 'sise': no row has such a field; nearest: param.size"),
        ("ROWS --recipe 77", "no recipe '77'"),
        ("ROWS --csv ROWS.csv", "that file holds the rows"),
        ("ROWS --mdd", "No such option: --mdd"),
        ("EMPTY", "no usable row in 1 file"),
        ("ROWS --adopt x", "--adopt x: takes one file and no other rows"),
        ("--adopt x", "--adopt x: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(recipe, tmp_path, capsys, arguments, said):
    rows = write(tmp_path / "rows.csv", [MEASURED])
    empty = write(tmp_path / "empty.jsonl", ["damaged"])
    words = [
        {"ROWS": str(rows), "ROWS.csv": str(rows), "EMPTY": str(empty)}.get(word, word) for word in arguments.split()
    ]
    assert cli.main(["report", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cookbook: ") and said in err and err.count("\n") == 1
    assert list(Path().iterdir()) == [] and rows.read_text() == json.dumps(MEASURED) + "\n"


def test_a_report_imports_no_torch(tmp_path):
    """Importing torch alone would take longer than ten thousand rows may."""
    path = write(tmp_path / "rows.jsonl", [MEASURED])
    code = f"""
import sys
from utils.cookbook.cli import main
assert main(["report", {str(path)!r}, "--csv", {str(tmp_path / "o.csv")!r}]) == 0
assert "torch" not in sys.modules and "papermill" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0


def test_a_ratio_that_noise_left_unknown_is_not_averaged(tmp_path):
    noise = {"verdict": "inconclusive", "speedup": 2.06, "ci_low": 0.55, "ci_high": 7.65}
    rows = merge([write(tmp_path / "a.jsonl", [MEASURED | noise])]).rows
    (section,) = recipe_sections(rows)
    assert section.lines[0][-3:] == ["—", "—", "1 inconclusive"]


@pytest.mark.parametrize("name", ["label", "param.seed"])
def test_outputs_that_are_no_number_above_0_are_refused(tmp_path, name):
    rows = merge([write(tmp_path / "a.jsonl", [MEASURED])]).rows
    with pytest.raises(ValueError, match=f"--outputs {name}: expected a column of numbers above 0"):
        add_cost(rows, {"NVIDIA H200": 2.0}, name)
