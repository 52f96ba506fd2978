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
from utils.cookbook.report import (
    Section,
    add_cost,
    cost_section,
    latest,
    natural,
    pooled_text,
    prices,
    recipe_sections,
    times,
)
from utils.cookbook.report_rows import column, described, machine_names, merge, row_files, spot_of
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"median_s": 1e12}, "absurd: median_s=1000000000000.0, expected seconds of a call, 1e-10 to 1e+07"),
        ({"baseline_median_s": 1e-15}, "absurd: baseline_median_s=1e-15, expected seconds"),
        ({"median_s": 500.0}, "absurd: speedup=2.0, but the medians give 0.002"),
        ({"first_call_s": -1.0}, "absurd: first_call_s=-1.0, expected 0 or more"),
        ({"peak_bytes": -5}, "absurd: peak_bytes=-5, expected 0 or more"),
        ({"date": None}, "a measured row without date"),
        ({"device_name": ""}, "a measured row without device_name"),
        ({"label": None}, "a measured row without label"),
    ],
)
def test_what_cannot_be_is_named_neither_drawn_nor_priced(recipe, tmp_path, capsys, wrong, said):
    path = write(tmp_path / "a.jsonl", [MEASURED, MEASURED | {"run_id": "r2", "case.length": 128} | wrong])
    assert cli.main(["report", str(path), "--price", "2", "--plot", "x=length"]) == 0
    out, err = capsys.readouterr()
    assert f"a.jsonl, line 2: {said}" in err and err.count("\n") == 1
    assert "1 measured row of 1 run" in out and "128" not in out and "report.png: 1 line, 0 rows not drawn\n" in out


def test_an_empty_file_and_every_damaged_line_are_named(recipe, tmp_path, capsys):
    write(Path("empty.jsonl"), [])
    write(Path("bad.jsonl"), ["x", MEASURED | {"schema_version": 9}, "y", MEASURED | {"recipe": 1}, "z"])
    assert cli.main(["report", "bad.jsonl", "empty.jsonl"]) == 2
    assert capsys.readouterr().err == (
        "cookbook: no usable row in 2 files; bad.jsonl, lines 1, 3, 5: damaged; expected one JSON object a line; "
        "bad.jsonl, line 2: foreign: schema_version=9, expected 1 to 1; "
        "bad.jsonl, line 4: foreign: recipe=1, expected the name of a recipe; empty.jsonl: empty, no row in it\n"
    )
    write(Path("bad.jsonl"), [MEASURED | {"schema_version": n} for n in range(4, 10)])
    assert cli.main(["report", "bad.jsonl"]) == 2
    assert "schema_version=7, expected 1 to 1; and 2 more\n" in capsys.readouterr().err
    write(Path("good.jsonl"), [MEASURED])
    assert cli.main(["report", "good.jsonl", "empty.jsonl"]) == 0
    assert capsys.readouterr().err == "cookbook: empty.jsonl: empty, no row in it\n"


def test_rows_that_lack_every_number_are_no_reason_to_stop(recipe, tmp_path, capsys):
    bare = {name: value for name, value in MEASURED.items() if not name.endswith("_s") and name != "torch"}
    path = write(tmp_path / "a.jsonl", [bare | {"verdict": "error"} | BAD])
    assert cli.main(["report", str(path), "--price", "2"]) == 0
    assert "1 error" in capsys.readouterr().out


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
    assert column("candidate", frame, "") == "label"  # as the tables call it
    assert column("candidate", merged(tmp_path, [MEASURED | {"case.candidate": 1}]), "") == "case.candidate"
    with pytest.raises(ValueError, match=r"--by 'lenght': no row has such a field; nearest: case\.length"):
        column("lenght", frame, "--by ")


def test_a_point_in_words_tells_every_point_apart():
    points = [{"case.k": 1, "param.k": 1}, {"case.k": 2, "param.k": 2}, {"case.k": 1, "param.k": 2}]
    spots = [spot_of(MEASURED | point) for point in points]
    assert list(described(spots).values()) == ["k=1", "k=2", "k=1 param.k=2"]


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
    rows = [MEASURED | {"case.length": n, "speedup": float(n), "median_s": 1 / n} for n in (1024, 64, 9)]
    (section,) = recipe_sections(merged(tmp_path, rows), ["case.length"])
    assert section.headings[1] == "length" and [line[1] for line in section.lines] == ["9", "64", "1024"]
    assert [line[4] for line in section.lines] == ["9.00x", "64.0x", "1024x"]


def test_a_mean_says_over_what_it_is_taken(tmp_path):
    cases = [{"case.k": k, "param.k": k, "param.dtype": t, "run_id": f"{k}{t}"} for k in (1, 2) for t in ("a", "b")]
    rows = [MEASURED | case for case in cases] + [MEASURED | {"label": "b, c", **case} for case in cases[:2]]
    rows += [MEASURED | {"label": "one"}, MEASURED | {"label": "one", "run_id": "again"}]
    frame = merged(tmp_path, rows)
    (section,) = recipe_sections(frame)
    over = "means over 4 cases (case.k, param.dtype): fast; over 2 cases (param.dtype): 'b, c'. --by splits them"
    assert section.notes[0] == over and over in section.markdown()
    (section,) = recipe_sections(frame, ["case.k"])
    assert section.notes[0] == "means over 2 cases (param.dtype): fast, 'b, c'. --by splits them"
    (section,) = recipe_sections(frame, ["case.k", "param.dtype"])
    assert len(section.notes) == 1 and "older code" not in section.notes[0] and "does not say" in section.notes[0]


def test_points_over_several_candidates_name_the_label():
    spots = [json.dumps({"recipe": "01_toy", "label": label, "case.k": 1}) for label in ("fast", "b")]
    assert pooled_text(spots) == "2 cases (label)" and pooled_text(spots[:1]) == ""


def test_by_adds_no_column_that_is_there(recipe, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [MEASURED, MEASURED | {"run_id": "r2", "case.length": None}])
    by = [
        word for name in ("machine", "candidate", "label", "recipe", "length", "case.length") for word in ("--by", name)
    ]
    assert cli.main(["report", str(path), *by]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["candidate", "length", "machine", "rows", "geomean", "range", "verdicts"]
    assert "fast ‡         64  H200" in out  # and not 64.0


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
    add_cost(frame, prices("H200=2", frame)[0], "param.batch")
    assert frame["cost_per_output"][0] == pytest.approx(2 * 3.6 / 3600 / 4)
    assert frame["baseline_cost_per_output"][0] == pytest.approx(2 * 7.2 / 3600 / 4)
    assert frame["cost_per_output"][1:].isna().all()  # wrong answers are worth nothing; a device without a price
    section = cost_section(frame, "param.batch")
    assert section.title == "Cost of 1,000 outputs"
    assert section.lines == [["01", "fast", "H200, 2.13.0", "1", "0.5", ""]]
    assert section.notes == [
        "1 point without a cost: the newest row has no valid answer",
        "no price, or no valid row: EPYC, 2.13.0",
    ]


def test_the_newest_row_of_a_point_is_priced_and_no_older_one_in_its_place(tmp_path):
    old, new = ({"run_id": r, "date": f"2026-11-{r}T10:00:00{z}"} for r, z in (("29", "Z"), ("30", "+00:00")))
    rows = [MEASURED | new | {"verdict": "invalid"}, MEASURED | old]
    rows += [row | {"case.length": 128} for row in (MEASURED | new | {"median_s": 1.8}, MEASURED | old)]
    # midnight of the 30th in Korea is before 20:00 of the 29th in London
    east = {"run_id": "east", "date": "2026-11-30T00:00:00+09:00"}
    rows += [row | {"case.length": 9} for row in (MEASURED | east, MEASURED | old | {"date": "2026-11-29T20:00:00Z"})]
    frame = merged(tmp_path, rows)
    assert sorted(latest(frame)["run_id"]) == ["29", "30", "30"]
    add_cost(frame, {"NVIDIA H200": 2000.0})
    section = cost_section(frame)
    assert [line[4:] for line in section.lines] == [["0.278", "length=9"], ["1", "length=128"]]
    assert section.notes == [
        "3 older rows of the same points left out: the newest counts",
        "1 point without a cost: the newest row has no valid answer",
    ]


@pytest.mark.parametrize("text", ["cheap", "-1", "0", "nan", "H200=x"])
def test_a_price_is_money(tmp_path, text):
    with pytest.raises(ValueError, match="expected money per hour"):
        prices(text, merged(tmp_path, [MEASURED]))


def test_a_price_of_a_device_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="'B300=1': no row of such a device; there are: NVIDIA H200"):
        prices("B300=1", merged(tmp_path, [MEASURED]))


def test_a_card_without_a_row_is_a_note(recipe, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [MEASURED, MEASURED | {"device_name": "NVIDIA A100-SXM4-80GB"}])
    frame = merge([path]).rows
    per_hour, notes = prices("H20=9,H200=3, a100=1", frame)
    assert per_hour == {"NVIDIA H200": 3.0, "NVIDIA A100-SXM4-80GB": 1.0}  # an H20 is no H200
    assert notes == ["--price 'H20=9': no row of such a device; there are: NVIDIA H200, NVIDIA A100-SXM4-80GB"]
    with pytest.raises(ValueError, match="'A100=1' and '80GB=2' are both NVIDIA A100-SXM4-80GB; give it one price"):
        prices("A100=1,80GB=2", frame)
    assert cli.main(["report", str(path), "--price", "H200=3,B300=1"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--price 'B300=1': no row of such a device; there are: " in out and "no valid row: A100, 2.13.0" in out


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
    assert cli.main(["report", str(path), "--csv", "table.csv"]) == 0
    assert "table.csv: 3 rows" in capsys.readouterr().out
    with open("table.csv", newline="") as file:
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
        ("ROWS --csv=OTHER", "that looks like a row file"),
        ("ROWS --parquet OTHER", "that looks like a row file"),
        ("ROWS --csv nope.jsonl", "--csv nope.jsonl: no such row file; a file to write ends in .csv or .tsv"),
        ("ROWS --csv FOLDER", "is a folder; give a file, such as "),
        ("ROWS --md FOLDER", "is a folder; give a file, such as "),
        ("ROWS --csv=FOLDER", "is a folder; give a file in it"),
        ("ROWS --parquet FOLDER", "is a folder; give a file in it"),
        ("ROWS --plot x=length --png FOLDER", "is a folder; give a file in it"),
        ("ROWS --csv new/a.csv", "--csv new/a.csv: no folder new; make it first"),
        ("ROWS --md new/a.md", "--md new/a.md: no folder new; make it first"),
        ("ROWS --parquet new/a.parquet", "--parquet new/a.parquet: no folder new; make it first"),
        ("ROWS --plot x=length --png new/a.png", "--png new/a.png: no folder new; make it first"),
        ("ROWS --plot x=length --png /proc/a.png", "--png /proc/a.png: cannot write there"),
        ("ROWS --plot x=length --png a.gif", "--png a.gif: expected a file that ends in .png"),
        ("ROWS --png a.png", "--png a.png: only --plot draws"),
        ("ROWS --outputs seed --price 1", "--outputs param.seed: expected numbers above 0 in it, got 0\n"),
        ("ROWS --mdd", "No such option: --mdd"),
        ("EMPTY", "no usable row in 1 file"),
        ("ROWS --adopt x", "--adopt x: takes one file and no other rows"),
        ("--adopt x", "--adopt x: no such file"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(recipe, tmp_path, capsys, arguments, said):
    rows = write(tmp_path / "rows.csv", [MEASURED])
    empty = write(tmp_path / "empty.jsonl", ["damaged"])
    (tmp_path / "folder").mkdir()
    for name, path in {"ROWS.csv": rows, "ROWS": rows, "EMPTY": empty, "OTHER": empty}.items():
        arguments = arguments.replace(name, str(path))
    words = arguments.replace("FOLDER", str(tmp_path / "folder")).split()
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


@pytest.mark.parametrize(
    ("name", "shown"), [("label", "'fast'"), ("param.seed", "0"), ("param.fast", "True"), ("case.none", "None")]
)
def test_outputs_that_are_no_number_above_0_are_refused(tmp_path, name, shown):
    rows = merge([write(tmp_path / "a.jsonl", [MEASURED | {"param.fast": True, "case.none": None}])]).rows
    with pytest.raises(ValueError, match=f"--outputs {name}: expected numbers above 0 in it, got {shown}$"):
        add_cost(rows, {"NVIDIA H200": 2.0}, name)


def test_points_without_a_number_of_outputs_are_told(tmp_path):
    frame = merged(tmp_path, [MEASURED | {"param.batch": 4}, MEASURED | {"param.batch": 0}])
    add_cost(frame, {"NVIDIA H200": 2.0}, "param.batch")
    assert cost_section(frame, "param.batch").notes == [
        "1 point without a cost: param.batch is no number above 0 there"
    ]


def test_a_file_to_write_may_have_another_ending(recipe, tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [MEASURED, MEASURED])
    assert cli.main(["report", str(path), "--csv", "table.txt", "--md", "notes"]) == 0
    out = capsys.readouterr().out
    assert "table.txt: 1 row, 26 columns" in out and "notes: 1 table" in out and "\n1 row was there twice" in out
    assert Path("table.txt").read_text().startswith("schema_version,")


def test_notes_go_to_stderr_where_stdout_holds_the_data(recipe, tmp_path, capsys):
    path = write(tmp_path / "rows.jsonl", [MEASURED])
    assert cli.main(["report", str(path), "--plot", "x=length", "--csv"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("schema_version,") and err == "cookbook: report.png: 1 line, 0 rows not drawn\n"
