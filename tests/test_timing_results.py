"""What a reader sees: a table of at most 80 columns, and nothing where nothing is proven."""

import dataclasses
import math

import pytest

from utils.cookbook.table import unknown_ratio
from utils.equivalence import Equivalence
from utils.timing import Comparison, ComparisonRow, Measurement
from utils.timing.report import _advice
from utils.timing.results import interval, seconds
from utils.timing.statistics import Estimate

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


# ------------------------------------------------------------------------------------------- cell by cell

BAD = row("bad", "invalid", equivalence=WRONG, error=None, share_of_limit=0.5)
LOST = row("lost", "error", equivalence=None, error="E: boom", share_of_limit=0.5)
FAST = row("fast", share_of_limit=0.256)
BARE = row("bare", "inconclusive", speedup=None, ci_low=None, ci_high=None, equivalence=None)


def test_cells_of_every_kind_of_row():
    shown = table(FAST, BAD, LOST, BARE, baseline_share_of_limit=0.1249, confidence=0.9)
    assert shown.cells() == [
        ["", "time", "speedup", "90% interval", "verdict", "same answer", "limit"],
        ["baseline", "1.50 ms", "", "", "baseline", "", "12 %"],
        ["fast", "750 µs", "2.00x", "[1.90, 2.10]", "faster", "bitwise", "26 %"],
        ["bad", "-", "-", "-", "invalid", "different", "-"],
        ["lost", "-", "-", "-", "error", "-", "-"],
        ["bare", "750 µs", "-", "-", "inconclusive", "-", "-"],
    ]
    assert shown.notes() == ["bad: output: 3 of 4 values differ", "lost: E: boom"]


def test_the_limit_has_a_column_only_where_one_is_known():
    assert "limit" not in table(row("a")).cells()[0]
    assert table(row("a"), baseline_share_of_limit=0.5).cells()[1:] == [
        ["baseline", "1.50 ms", "", "", "baseline", "", "50 %"],
        ["a", "750 µs", "2.00x", "[1.90, 2.10]", "faster", "bitwise", "-"],
    ]
    assert table(FAST).cells()[1][-1] == "-"


def test_the_table_with_a_limit_and_notes():
    assert str(table(FAST, BAD, baseline_share_of_limit=0.1)).splitlines() == [
        "latency, hot cache, 2 threads, 6 replicates, margin 2 %",
        "             time  speedup  95% interval  verdict   same answer  limit",
        "-" * 70,
        "baseline  1.50 ms                         baseline                10 %",
        "fast       750 µs    2.00x  [1.90, 2.10]  faster    bitwise       26 %",
        "bad             -        -  -             invalid   different        -",
        "! bad: output: 3 of 4 values differ",
    ]


def test_the_html_in_full():
    left = ' style="text-align: left"'
    assert table(row("a", warnings=("w: x",)))._repr_html_().splitlines() == [
        "<p>latency, hot cache, 2 threads, 6 replicates, margin 2 %</p>",
        "<table>",
        "<tr>"
        + "".join(f"<th{left}>{t}</th>" for t in ("", "time", "speedup", "95% interval", "verdict", "same answer"))
        + "</tr>",
        "<tr>" + "".join(f"<td{left}>{t}</td>" for t in ("baseline", "1.50 ms", "", "", "baseline", "")) + "</tr>",
        "<tr>"
        + "".join(f"<td{left}>{t}</td>" for t in ("a", "750 µs", "2.00x", "[1.90, 2.10]", "faster", "bitwise"))
        + "</tr>",
        "</table>",
        "<ul><li>a: w: x</li></ul>",
    ]
    assert "<ul>" not in table(row("a"))._repr_html_()


def test_labels_that_do_not_fit_stand_alone():
    lines = str(table(row("x" * 30), row("y" * 81), row("z" * 80), row("short"))).splitlines()
    room = 80 - len("750 µs") - 2 - len("speedup") - 2 - len("[1.90, 2.10]") - 2 - len("baseline") - 2 - 11 - 3
    assert max(map(len, lines)) <= 80
    assert "y" * 79 + "…" in lines and "z" * 80 in lines
    assert any(line.startswith("x" * 30 + "  ") for line in lines) is (room >= 30)
    after = lines[lines.index("z" * 80) + 1]
    assert after.startswith(" ") and "2.00x" in after


def test_long_notes_are_wrapped_and_indented():
    lines = str(table(row("a", warnings=("word " * 30,)))).splitlines()[-2:]
    assert lines[0].startswith("! a: word") and lines[1].startswith("  word") and len(lines[0]) <= 80


def test_headline_and_words():
    one = dataclasses.replace(baseline(), num_threads=1, mode="throughput", cache="cold")
    shown = Comparison([row("a")], one, min_effect=0.0125, replicates=1)
    assert shown.headline() == "throughput, cold cache, 1 thread, 1 replicate, margin 1.25 %"
    with pytest.raises(KeyError) as caught:
        table(row("a"), row("b"))["c"]
    assert caught.value.args == ("'c'; rows: a, b",)


def test_a_measurement_without_interval_and_first_call():
    shown = str(dataclasses.replace(baseline("f"), ci_low_s=None, ci_high_s=None, first_call_s=None))
    assert shown.splitlines() == ["f: 1.50 ms, n = 40 x 1", "  latency, hot cache, 2 threads"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.0, 1.019, "[1.000, 1.019]"),
        (1.0, 1.0201, "[1.00, 1.02]"),
        (9.99, 9.999, "[9.990, 9.999]"),
        (10.0, 10.01, "[10.0, 10.0]"),
        (99.0, 101.0, "[99.0, 101]"),
        (0.09, 0.2, "[0.090, 0.20]"),
        (0.1, 0.2, "[0.10, 0.20]"),
        (1.0, None, "-"),
        (None, 1.0, "-"),
    ],
)
def test_ends_of_an_interval(low, high, text):
    assert interval(low, high) == text


@pytest.mark.parametrize(
    ("speedup", "text"),
    [(0.0999, "0.100x"), (0.1, "0.10x"), (9.994, "9.99x"), (10.0, "10.0x"), (100.0, "100x"), (1e6, "1000000x")],
)
def test_digits_of_a_speedup(speedup, text):
    assert table(row("a", speedup=speedup)).cells()[2][2] == text


@pytest.mark.parametrize(("low", "high", "verdict", "shown"), [
    (0.55, 7.65, "inconclusive", "-"),
    (0.6, 2.3, "inconclusive", "1.17x"),
    (1.4, 9.0, "faster", "1.17x"),
])  # fmt: skip
def test_no_ratio_is_printed_where_noise_left_it_unknown(low, high, verdict, shown):
    cells = table(row("x", verdict, speedup=1.17, ci_low=low, ci_high=high)).cells()[2]
    assert cells[2] == shown
    assert cells[3] == ("unknown" if shown == "-" else interval(low, high))


@pytest.mark.parametrize("factor, unknown", [(3.99, False), (4.0, False), (4.01, True), (7.3, True), (7.5, True)])
def test_tables_and_warnings_agree_where_the_ratio_is_unknown(factor, unknown):
    """The whole interval spans `factor`; the ratio and the per cent of noise are both given, or neither is."""
    half = math.log(factor) / 2
    estimate = Estimate(0.0, half, half, None, None)
    low, high = estimate.interval
    if factor == 4.0:
        assert (low, high) == (0.5, 2.0)  # exactly on the edge
    said = _advice(estimate, 10, 20, 0.02)
    found = row("c", "inconclusive", speedup=1.0, ci_low=low, ci_high=high)
    shown, inside = Comparison([found], baseline(), 0.02, 6).cells()[2][2:4]
    assert (shown == "-") is unknown is (inside == "unknown")
    assert ("the ratio itself is unknown" in said) is unknown and ("±" in said) is not unknown
    assert unknown_ratio({"verdict": found.verdict, "ci_low": low, "ci_high": high}) is unknown
    assert not row("c", ci_low=low, ci_high=high).ratio_unknown  # it is faster all the same
