"""What a reader sees: a table of at most 80 columns, and nothing where nothing is proven."""

import dataclasses

import pytest

from utils.equivalence import Equivalence
from utils.timing import Comparison, ComparisonRow, Measurement
from utils.timing.results import interval, seconds

SAME = Equivalence(True, "bitwise", "the same bits")
WRONG = Equivalence(False, "different", "output: 3 of 4 values differ")


def baseline(label="baseline", warnings=()):
    return Measurement(
        label,
        1.5e-3,
        1.4e-3,
        1.6e-3,
        1e-4,
        1.5e-3,
        1e-3,
        None,
        None,
        None,
        40,
        1,
        0.5,
        3,
        (1e-3,),
        warnings,
        "latency",
        "hot",
        2,
    )


def row(label, verdict="faster", **fields):
    fields = {"speedup": 2.0, "ci_low": 1.9, "ci_high": 2.1, "median_s": 7.5e-4, "equivalence": SAME, **fields}
    return ComparisonRow(label=label, baseline_label="baseline", verdict=verdict, **fields)


def table(*rows, **fields):
    return Comparison(rows=list(rows), baseline=baseline(), min_effect=0.02, replicates=6, **fields)


def test_the_table():
    shown = table(
        row("half"),
        row("much faster", speedup=123.4, ci_low=120.0, ci_high=127.0, median_s=12e-6),
        row("same", "equivalent", speedup=1.001, ci_low=0.9951, ci_high=1.0049, median_s=1.498e-3),
    )
    assert str(shown).splitlines() == [
        "latency, hot cache, 2 threads, 6 replicates, margin 2 %",
        "                time  speedup  95% interval    verdict     same answer",
        "-" * 70,
        "baseline     1.50 ms                           baseline",
        "half          750 µs    2.00x  [1.90, 2.10]    faster      bitwise",
        "much faster  12.0 µs     123x  [120, 127]      faster      bitwise",
        "same         1.50 ms    1.00x  [0.995, 1.005]  equivalent  bitwise",
    ]
    assert repr(shown) == str(shown)


@pytest.mark.parametrize("verdict", ["invalid", "error"])
def test_nothing_proven_nothing_printed(verdict):
    """Even if a number were in the row, it would not be shown."""
    text = str(table(row("bad", verdict, equivalence=WRONG, error="RuntimeError: boom", share_of_limit=0.5)))
    html = table(row("bad", verdict, equivalence=WRONG, share_of_limit=0.5))._repr_html_()
    for number in ("2.00x", "1.90", "750 µs", "50 %"):
        assert number not in text and number not in html
    assert verdict in text
    if verdict == "invalid":
        assert "! bad: output: 3 of 4 values differ" in text


def test_at_most_eighty_columns_with_everything_in_it():
    long = "a candidate with a very long name that goes on"
    noise = "noise_exceeds_effect: " + "word " * 40
    lossy = Equivalence(True, "approximate", "")
    shown = table(
        row(long, "inconclusive", equivalence=lossy, speedup=0.12345, share_of_limit=1.06, warnings=(noise,)),
        row("x" * 100, "error", error="E: " + "y" * 200),
        row("short", "faster", share_of_limit=0.5),
        baseline_share_of_limit=0.25,
    )  # fmt: skip
    lines = str(shown).splitlines()
    assert max(map(len, lines)) <= 80
    assert long in lines  # a line of its own, whole
    assert "106 %" in str(shown) and "25 %" in str(shown)


def test_warnings_stand_once_below_the_table():
    shown = Comparison(
        [row("a", warnings=("w1: x",)), row("b", warnings=("w2: y", "w0: z"))],
        baseline(warnings=("w0: z",)),
        min_effect=0.02,
        replicates=6,
        warnings=("note: n",),
    )
    assert str(shown).splitlines()[-4:] == ["! w0: z", "! note: n", "! a: w1: x", "! b: w2: y"]


def test_rows_by_label_and_in_order():
    shown = table(row("a"), row("b"))
    assert shown["b"].label == "b" and [r.label for r in shown] == ["a", "b"] and len(shown) == 2
    with pytest.raises(KeyError, match="rows: a, b"):
        shown["c"]


def test_html_is_the_same_table_and_escaped():
    html = table(row("<b>&"), row("c", warnings=("w: <x>",)))._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>" not in html and "w: &lt;x&gt;" in html
    assert html.count("<tr>") == 4


def test_a_row_is_plain_data():
    fields = dataclasses.asdict(row("a"))
    assert fields["speedup"] == 2.0 and fields["samples"] == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.00 s"), (12.345, "12.3 s"), (123.4, "123 s"), (0.9996, "1.00 s"), (0.99, "990 ms"),
        (1.234e-3, "1.23 ms"), (99.96e-6, "100 µs"), (12.3e-9, "12.3 ns"), (0.0, "0.00 ns"), (None, "-"),
    ],
)  # fmt: skip
def test_seconds(value, text):
    assert seconds(value) == text


def test_intervals_show_where_they_differ():
    assert interval(0.9951, 1.0049) == "[0.995, 1.005]"
    assert interval(1.0, 1.5) == "[1.00, 1.50]"
    assert interval(12.0, 15.0) == "[12.0, 15.0]"
    assert interval(0.031, 75.2) == "[0.031, 75.2]"
    assert interval(0.3, 120.0) == "[0.30, 120]"
    assert interval(None, None) == "-"
