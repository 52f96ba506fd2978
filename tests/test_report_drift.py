"""Machines side by side, drift, and the curves of a report."""

import pytest
from test_report import BAD, MEASURED, REPORTED, merged, write

from utils.cookbook import cli
from utils.cookbook.report_drift import change, drift, drift_section, machine_sections
from utils.cookbook.report_plot import curves, drawable, parse_plot, plot

A100 = {"device_name": "NVIDIA A100-SXM4-80GB"}
NONE = {"flip": 0, "same": 0, "failed": 0, "open": 0}
OLD = {"torch": "2.9.1+cu128"}


def slower(row: dict = MEASURED) -> dict:
    return row | {"verdict": "slower", "speedup": 0.5, "ci_low": 0.4, "ci_high": 0.6}


@pytest.mark.parametrize(
    ("first", "second", "answer"),
    [
        ("faster", "slower", "flip"),
        ("faster", "equivalent", "flip"),
        ("faster", "faster", "same"),
        ("faster", "inconclusive", "open"),
        ("inconclusive", "inconclusive", "open"),
        ("inconclusive", "invalid", "failed"),
        ("faster", "error", "failed"),
        ("invalid", "error", "open"),
    ],
)
def test_what_contradicts(first, second, answer):
    assert change(first, second) == answer == change(second, first)


def test_only_decided_verdicts_can_flip(tmp_path):
    others = [("slower", 0.5), ("faster", 2.0), ("inconclusive", 1.0), ("invalid", None), ("error", None)]
    rows = []
    for length, (verdict, speedup) in enumerate(others):
        other = {"verdict": verdict, "speedup": speedup, "ci_low": speedup, "ci_high": speedup}
        rows += [MEASURED | {"case.length": length}, MEASURED | OLD | other | {"case.length": length}]
    section = drift_section(merged(tmp_path, rows))
    assert section.title == "Drift: 1 of 2 pairs of decided verdicts flipped (other machine or torch)"
    assert [line[-1] for line in section.lines] == ["length=0", "length=3", "length=4"]
    assert section.notes == [
        "2 pairs with a wrong answer or a failed run on one side: no flip",
        "1 pair undecided (inconclusive, or failed on both sides): not counted",
    ]


def test_a_flip_between_two_versions_of_torch(tmp_path):
    rows = [MEASURED, slower(MEASURED | OLD), MEASURED | {"case.length": 128}, MEASURED | OLD | {"case.length": 128}]
    section = drift_section(merged(tmp_path, rows))
    assert section.title.startswith("Drift: 1 of 2 pairs")
    before, after = "H200, 2.9.1: slower 0.50x [0.4, 0.6]", "H200, 2.13.0: faster 2.00x [1.9, 2.1]"
    assert section.lines == [["01", "fast", before, after, ""]]


def test_other_points_are_not_compared(tmp_path):
    for other in (
        {"case.length": 128},
        {"param.size": 16},
        {"label": "faster"},
        {"baseline_label": "x"},
        {"cache": "cold"},
    ):
        assert drift(merged(tmp_path, [MEASURED, slower(MEASURED | OLD | other)])) == ([], NONE)
    found = drift(merged(tmp_path, [MEASURED, slower(MEASURED | OLD | {"param.device": "cuda"})]))
    assert found[1] == NONE | {"flip": 1}


def test_the_newest_row_of_a_machine_counts_and_contradicting_runs_are_told(tmp_path):
    later = {"date": "2026-12-01T10:00:00Z", "run_id": "later"}
    rows = [MEASURED | later, slower(), MEASURED | OLD]
    section = drift_section(merged(tmp_path, rows))
    assert section.title.startswith("Drift: 0 of 1") and "1 older row of the same points" in section.notes[0]
    assert "1 point got contradicting verdicts" in section.notes[1]


def test_pairs_that_differ_in_two_things_count_only_without_better_ones(tmp_path):
    far = slower(MEASURED | A100 | OLD)
    flips, counts = drift(merged(tmp_path, [MEASURED, far]))
    assert len(flips) == 1 == counts["flip"] == sum(counts.values())
    flips, counts = drift(merged(tmp_path, [MEASURED, far, MEASURED | OLD]))
    assert counts == NONE | {"flip": 1, "same": 1} and [
        (f["from"]["torch"], f["to"]["device_name"]) for f in flips
    ] == [(OLD["torch"], "NVIDIA H200")]


def test_other_code_is_marked_as_a_possible_reason(tmp_path):
    section = drift_section(
        merged(tmp_path, [MEASURED | {"code_hash": "a"}, slower(MEASURED | OLD | {"code_hash": "b"})])
    )
    assert section.lines[0][1] == "fast †" and "the code may be the reason" in section.notes[0]


def test_side_by_side_uses_only_points_that_all_machines_have(tmp_path):
    rows = [
        MEASURED | {"speedup": 2.0, "median_s": 1.0},
        MEASURED | {"speedup": 50.0, "case.length": 128},
        MEASURED | A100 | {"speedup": 3.0, "median_s": 1.5},
        MEASURED | A100 | {"case.length": 256, "verdict": "error", **BAD},
    ]
    (section,) = machine_sections(merged(tmp_path, rows))
    assert section.headings == ["recipe", "points", "A100, 2.13.0", "H200, 2.13.0", "candidate"]
    assert section.lines == [["01", "1", "3.00x", "2.00x, time 0.67", "fast"]]


def test_many_machines_are_several_tables_with_the_first_in_each(tmp_path):
    rows = [MEASURED | {"device_name": f"NVIDIA H{n}00"} for n in range(1, 6)]
    found = [section.headings[2:-1] for section in machine_sections(merged(tmp_path, rows))]
    assert found == [[f"H{n}00, 2.13.0" for n in group] for group in ((1, 2, 3), (1, 4, 5))]


def test_machines_without_a_common_point_say_so(tmp_path):
    (section,) = machine_sections(merged(tmp_path, [MEASURED, MEASURED | A100 | {"case.length": 1}]))
    assert section.notes == ["no point was measured on all of them"]


# ---------------------------------------------------------------------------------------------------- curves


def test_a_curve_has_the_interval_of_its_rows(tmp_path):
    rows = [
        MEASURED | {"case.length": 1024, "run_id": "b", "speedup": 8.0, "ci_low": 7.0, "ci_high": 9.0},
        MEASURED | {"case.length": 1024, "run_id": "c", "speedup": 2.0, "ci_low": 1.0, "ci_high": 3.0},
        MEASURED,
        MEASURED | {"case.length": 9, "verdict": "invalid", "speedup": 90.0},
        MEASURED | {"case.length": 9, "verdict": "error", **BAD},
    ]
    good, left_out = drawable(merged(tmp_path, rows), "case.length", "speedup")
    ((line,), over) = curves(good, "case.length")
    assert (line.name, line.x, left_out, over) == ("fast", [64, 1024], {"without a valid speedup": 2}, [])
    assert line.y == pytest.approx([2.0, 4.0]) and line.low == [1.9, 1.0] and line.high == [2.1, 9.0]


def test_other_columns_have_median_and_range(tmp_path):
    rows = [MEASURED | {"median_s": s, "run_id": str(s)} for s in (0.1, 0.2, 0.9)]
    ((line,), _) = curves(merged(tmp_path, rows), "case.length", "median_s")
    assert (line.y, line.low, line.high) == ([0.2], [0.1], [0.9])


def test_parse_plot():
    assert parse_plot("x=a, hue=b") == {"x": "a", "y": "speedup", "hue": "b"}


def test_plot_writes_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [
        MEASURED | {"case.length": n, "case.kind": kind, **more}
        for n in (64, 1024)
        for kind in "ab"
        for more in ({}, A100)
    ]
    path = write(tmp_path / "rows.jsonl", [*rows, MEASURED | {"verdict": "invalid", "case.kind": "a"}])
    assert cli.main(["report", str(path), "--plot", "x=length,hue=case.kind", "--png", "curve"]) == 0
    out = capsys.readouterr().out
    assert "curve.png: 2 lines, 1 row not drawn (1 without a valid speedup)\n" in out
    assert "points taken over" not in out  # the same case on two machines
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_a_plot_cannot_show_are_counted_and_points_say_what_they_are_taken_over(tmp_path):
    noise = {"verdict": "inconclusive", "speedup": 2.06, "ci_low": 0.55, "ci_high": 7.65}
    rows = [MEASURED | {"param.dtype": name} for name in ("a", "b", "c")]
    rows += [MEASURED | {"case.length": None}, MEASURED | {"case.length": None, "verdict": "invalid"}]
    rows += [MEASURED | {"verdict": None, "label": "alone"}, MEASURED | noise, REPORTED]
    said = plot(merged(tmp_path, rows), parse_plot("x=length"), tmp_path / "a.png")
    assert said == [
        f"{tmp_path / 'a.png'}: 1 line, 4 rows not drawn "
        "(1 without a comparison, 2 without case.length, 1 without a valid speedup)",
        "points taken over 3 cases (param.dtype). --plot hue=… splits them",
    ]
    said = plot(merged(tmp_path, rows), parse_plot("x=length,hue=dtype"), tmp_path / "a.png")
    assert len(said) == 1 and ": 3 lines, 4 rows not drawn" in said[0]


def test_lines_are_machines_where_there_are_several(tmp_path):
    frame = merged(tmp_path, [MEASURED, MEASURED | A100])
    assert plot(frame, parse_plot("x=length"), tmp_path / "a.png") == [
        f"{tmp_path / 'a.png'}: 2 lines, 0 rows not drawn"
    ]


def test_names_on_an_axis(tmp_path):
    frame = merged(tmp_path, [MEASURED | {"case.kind": kind} for kind in ("b", "a")])
    ((line,), _) = curves(frame, "case.kind")
    assert line.x == ["a", "b"]
    assert "1 line" in plot(frame, parse_plot("x=kind"), tmp_path / "a.png")[0]


@pytest.mark.parametrize(
    ("rows", "wanted", "said"),
    [
        (
            [MEASURED, MEASURED | {"recipe": "02_other"}],
            "x=length",
            "rows of 2 recipes have case.length: 01_toy, 02_other",
        ),
        ([MEASURED | {"verdict": "invalid"}], "x=length", "no valid row has both case.length and speedup"),
        ([MEASURED | {"case.n": n} for n in range(30)], "x=length,hue=n", "30 lines, at most 24"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, rows, wanted, said):
    with pytest.raises(ValueError, match=said):
        plot(merged(tmp_path, rows), parse_plot(wanted), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_long_table_is_cut_on_a_terminal_and_whole_in_markdown(tmp_path):
    rows = [row | {"case.length": n} for n in range(50) for row in (MEASURED, slower(MEASURED | OLD))]
    section = drift_section(merged(tmp_path, rows))
    assert "… and 10 more; --md has them all" in section.text() and "length=39" in section.text()
    assert "length=40" not in section.text() and "length=49" in section.markdown()


def test_an_interval_that_names_no_ratio_is_not_printed(tmp_path):
    noise = {"verdict": "inconclusive", "speedup": 2.06, "ci_low": 1e-9, "ci_high": 386976867519659.0}
    failed = MEASURED | A100 | {"verdict": "invalid", "speedup": None, "ci_low": None, "ci_high": None}
    section = drift_section(merged(tmp_path, [MEASURED | noise, failed]))
    assert any(cell.endswith("inconclusive unknown") for cell in section.lines[0]) and "3869" not in str(section)
