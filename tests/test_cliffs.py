"""cliffs: the decision, on profiles made by hand. No clock."""

import dataclasses

import pytest
import torch
from torch import nn

from utils import cliffs
from utils.cliff_remedies import Remedy, Trial
from utils.cost import MachinePeaks
from utils.op_profile import OUTSIDE, PYTHON, OpProfile, OpRow

CPU = torch.device("cpu")
PEAKS = MachinePeaks(1e11, 1e10, 1e10, 2**28, "float32", 2, "a machine", "cpu", 1024, "id")  # 100 GFLOP/s, 10 GB/s
HELPS = Trial(True, 5.0, 4.5, 5.5, "faster")
HELPS_NOT = Trial(False, 1.0, 0.9, 1.1, "equivalent")


def product(path, seconds, gflop=1.0, *, dtype=torch.float32, calls=1, kinds=1, op="aten::addmm", **more):
    """A row of matrix products; its expected time is 10 ms for each GFLOP."""
    tensors = tuple((shape, (1,), dtype) for shape in [(512,), (512, 512), (512, 512)])
    return OpRow(path, op, calls, seconds, int(gflop * 1e9), 10**6, 10**5, kinds, dtype, (), tensors, **more)


def plain(path, seconds, op="aten::add", mb=10.0, **more):
    """A row without a formula; its expected time is 0.1 ms for each MB."""
    return OpRow(
        path, op, more.pop("calls", 1), seconds, 0, int(mb * 1e6), int(mb), more.pop("kinds", 1), torch.float32
    )


def judged(*rows, trial=HELPS_NOT, alone=None, model_calls=1, module_calls=None, peaks=None):
    found = OpProfile(list(rows), sum(r.seconds for r in rows), model_calls, CPU, module_calls or {})
    return cliffs.judge(found, peaks or {torch.float32: PEAKS}, lambda *given: trial, lambda *given: alone)


def layers(n=8, seconds=0.012):
    return [product(f"layers.{i}.mlp", seconds) for i in range(n)]


def test_the_lesson_of_the_source_996_per_mille_of_the_time_for_5_of_the_work():
    conv = product("patch_embed.proj", 3.62, 0.04, op="aten::aten_conv")
    report = judged(conv, *layers(27, 0.0005))
    (suspect,) = report.suspects
    assert suspect.row.path == "patch_embed.proj" and suspect.row.share_of_time > 0.99 > 100 * suspect.row.share_of_work
    assert suspect.bound > 100 and "99.6% of the time" in str(suspect)


def test_a_healthy_model_is_not_accused():
    report = judged(*layers(), plain("norm", 0.002), product("head", 0.03, 2.0), OpRow("", PYTHON, 1, 0.002))
    assert report.suspects == [] and "no suspect" in str(report)
    assert sum(row.share_of_time for row in report.rows) == pytest.approx(1)
    assert sum(row.share_of_work for row in report.rows) == pytest.approx(1)


def test_a_run_that_was_slow_throughout_gives_no_verdict():
    report = judged(*layers())
    for slowdown, said in ((5.0, 5), (3.9, 3), (3.0, 3)):
        slow = str(dataclasses.replace(report, slowdown=slowdown))
        assert slow.startswith(f"no verdict: everything took {said} times or more") and "no suspect" not in slow
    text = str(dataclasses.replace(report, slowdown=2.9))
    assert text.startswith("one call") and "no suspect" in text and "no verdict" not in text


def twice(row, again):
    row.again = again
    return row


@pytest.mark.parametrize(
    "rows, said",
    [
        ([("a", 0.011, 0.012), ("b", 0.011, 0.011)], None),
        ([("a", 0.011, 0.021), ("b", 0.011, 0.011)], None),  # below twice
        ([("a", 0.011, 0.044), ("b", 0.011, 0.011)], "4.0x"),
        ([("a", 0.011, 0.023), ("b", 0.011, 0.033)], "3.0x"),  # all lines, the worst is named
        ([("a", 0.001, 0.0025), ("b", 0.011, 0.011)], None),  # more than twice, and not worth a look
        ([(f"a{i}", 0.010, 0.024) for i in range(20)], "2.4x"),  # small lines, all together
    ],
)
def test_repeated_calls_that_differ_give_no_verdict(rows, said):
    report = judged(*(twice(product(path, seconds), again) for path, seconds, again in rows))
    first, *_, last = str(report).splitlines()
    assert report.suspects == [] and last.startswith("no suspect") is (said is None)
    if said is None:
        assert first.startswith("one call") and report.doubt == ""
    else:
        assert first.startswith(f"no verdict: repeated calls differ by {said}, the machine was busy.")
        assert report.spread == pytest.approx(float(said[:-1]))


def test_a_suspect_of_a_busy_machine_is_named_and_the_rest_is_not_called_healthy():
    report = judged(twice(product("cliff", 0.5), 0.5), twice(product("a", 0.1, 8.0), 0.3))
    assert [s.row.path for s in report.suspects] == ["cliff"]
    assert str(report).startswith("no verdict beyond the suspects: repeated calls differ by 3.0x")


def test_layers_are_put_together():
    rows = judged(*layers(4), product("layers.0.attention.10.out", 0.5)).rows
    assert {(r.path, r.calls) for r in rows} == {("layers.*.mlp", 4), ("layers.*.attention.*.out", 1)}
    mlp = next(r for r in rows if r.path == "layers.*.mlp")
    assert mlp.flops == 4e9 and mlp.seconds == pytest.approx(0.048) and mlp.share_of_limit == pytest.approx(0.835, 1e-2)


@pytest.mark.parametrize("slower", [1, 2, 4, 5])
def test_a_machine_that_is_slow_altogether_accuses_nobody(slower):
    healthy = [product(f"a{i}", 0.012 * slower) for i in range(3)] + [plain("b", 0.001 * slower)]
    assert judged(*healthy).suspects == []
    cliff = product("c", 0.5 * slower)
    assert [s.row.path for s in judged(cliff, *healthy).suspects] == ["c"]


def test_a_cliff_that_is_the_whole_model_is_found_by_the_limit_alone():
    assert [s.row.path for s in judged(product("only", 0.2, 1.0)).suspects] == ["only"]
    assert judged(product("only", 0.03, 1.0)).suspects == []


def test_a_small_share_of_the_time_is_not_worth_a_word():
    assert judged(product("tiny", 0.016, 0.02), *layers(10)).suspects == []
    assert judged(product("tiny", 0.050, 0.02), *layers(10)).suspects != []


def test_what_is_slow_in_the_model_and_not_alone_was_slow_by_chance():
    assert judged(product("odd", 0.5), *layers(3), alone=1.2).suspects == []
    assert [s.row.path for s in judged(product("odd", 0.5), *layers(3), alone=40.0).suspects] == ["odd"]
    assert [s.row.path for s in judged(product("odd", 0.5), *layers(3), alone=None).suspects] == ["odd"]


def test_an_operation_without_formula_needs_a_larger_excess():
    assert judged(plain("odd", 0.010, mb=10), *layers(2)).suspects == []  # 10x
    assert [s.row.path for s in judged(plain("odd", 0.020, mb=10), *layers(2)).suspects] == ["odd"]
    assert judged(plain("odd", 0.5, op="aten::linalg_svd"), *layers(2)).suspects == []  # its work is not known here


def test_what_needs_arithmetic_per_element_is_expected_to_take_it():
    exponentials = plain("odd", 0.020, mb=10)
    exponentials.elements = 10**7  # 10 steps each at a sixteenth of the rate: 16 ms
    assert judged(exponentials, *layers(2)).suspects == []


CONV = dict(op="aten::convolution")
CONV_ARGUMENTS = (
    ((784, 3, 2, 16, 16), (1536, 512, 256, 16, 1), torch.float32), ((288, 3, 2, 16, 16), (1,) * 5, torch.float32), None,
    [2, 16, 16], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1,
)  # fmt: skip


def conv_row(seconds):
    row = product("proj", seconds, **CONV, module=nn.Conv3d(3, 288, (2, 16, 16), (2, 16, 16)))
    row.arguments = CONV_ARGUMENTS
    return row


def test_a_remedy_is_named_only_when_its_measurement_agrees():
    slow = conv_row(0.04)  # 4x its expected time: below what accuses without a remedy
    (suspect,) = judged(slow, *layers(3), trial=HELPS).suspects
    assert "linearize(model)" in suspect.remedy and suspect.trial is HELPS
    share = 0.04 / (0.04 + 3 * 0.012)
    whole = 1 / (1 - share + share / 5.0)
    assert f"the whole call would be {suspect.bound:.2f}x as fast (Amdahl's bound: computed, not" in str(suspect)
    assert f"alone on this shape: that form is 5.0x (4.5 to 5.5) as fast; that alone makes the whole call about " \
        f"{whole:.2f}x as fast." in str(suspect)  # fmt: skip
    assert judged(slow, *layers(3), trial=HELPS_NOT).suspects == []
    (suspect,) = judged(conv_row(0.4), *layers(3), trial=HELPS_NOT).suspects  # far off the limit all the same
    assert "No remedy known" in suspect.remedy and suspect.trial is None


@pytest.mark.parametrize(
    ("interval", "open"), [((0.6, 40.0), True), ((0.9, 1.3), True), ((0.9, 1.2), False), ((None, None), True)]
)
def test_a_trial_that_drowned_in_noise_gives_no_verdict(interval, open):
    """A convolution 4x above its expected time, and a form that could be faster: neither accused nor called healthy."""
    conv = conv_row(0.04)
    report = judged(conv, *layers(3), trial=Trial(False, 3.0, *interval, "inconclusive"))
    text = str(report)
    assert report.suspects == [] and [s.row.path for s in report.undecided] == ["proj"] * open
    assert text.startswith("no verdict: a line could not be told") == open == ("no suspect" not in text)
    assert ("an unknown number of times" in text) == (open and interval != (0.9, 1.3))
    assert ("undecided: proj" in text) == open and "alone makes the whole call" not in text


def test_without_a_doubt_of_its_trial_a_slow_line_is_a_suspect_as_before():
    conv = conv_row(0.4)  # far beyond what needs no remedy to be accused
    noisy = Trial(False, 3.0, 0.6, 40.0, "inconclusive")
    (suspect,) = judged(conv, *layers(3), trial=noisy).suspects
    assert suspect.row.path == "proj" and "linearize(model)" in suspect.remedy and suspect.trial is None
    unslow = judged(conv, *layers(3), trial=noisy, alone=1.0)  # alone it is not slow
    assert unslow.suspects == [] and [s.row.path for s in unslow.undecided] == ["proj"]


def test_a_trial_that_would_take_too_long_leaves_the_remedy_in_words():
    trial = Trial(False, None, None, None, cliffs.TOO_LONG)
    (suspect,) = judged(conv_row(31.6), *layers(3), trial=trial).suspects
    assert "linearize(model)" in suspect.remedy and suspect.trial is None


def test_nothing_is_tried_for_healthy_rows():
    def fail(*given):
        raise AssertionError("tried")

    found = OpProfile([conv_row(0.011), *layers(3)], 0.047, 1, CPU)
    assert cliffs.judge(found, {torch.float32: PEAKS}, fail).suspects == []


def test_a_slow_type_is_held_against_the_rate_of_float32():
    half = product("half", 0.2, dtype=torch.float16)
    slow = MachinePeaks(5e9, 1e10, 1e10, 2**28, "float16", 2, "a machine", "cpu", 64, "id")
    (suspect,) = judged(half, *layers(3), trial=HELPS, peaks={torch.float32: PEAKS, torch.float16: slow}).suspects
    assert "float16" in suspect.remedy and suspect.ratio > 10
    fast = MachinePeaks(4e11, 1e10, 1e10, 2**28, "bfloat16", 2, "a machine", "cpu", 64, "id")
    row = product("bf16", 0.010, dtype=torch.bfloat16)
    (shown,) = judged(row, peaks={torch.float32: PEAKS, torch.bfloat16: fast}).rows
    assert shown.share_of_limit == pytest.approx(0.25, rel=0.02)


def test_an_island_of_float64_is_found_as_a_whole():
    island = [product(f"island.part{i}", 0.02, 0.5, dtype=torch.float64) for i in range(6)]  # 12 % each, 4x
    (suspect,) = judged(*island, *layers(4), trial=HELPS).suspects
    assert suspect.row.op == "(all in float64)" and suspect.row.share_of_time > 0.6 and "float64" in suspect.remedy
    assert len(suspect.row.members) == 6
    assert str(suspect).endswith("that form is 5.0x (4.5 to 5.5) as fast.")  # of the longest line, not of the whole


def test_a_model_wholly_in_float64_is_meant_to_be():
    wide = [product(f"part{i}", 0.05, 1.0, dtype=torch.float64) for i in range(4)]
    assert judged(*wide, trial=HELPS).suspects == []


def test_a_loop_over_tokens_is_found_as_a_whole():
    rows = [
        product("cell.project", 0.02, 0.1, calls=512),
        plain("cell", 0.01, op="aten::tanh", mb=0.5, calls=512),
        OpRow("cell", PYTHON, 1, 0.02),
        OpRow("cell.project", PYTHON, 512, 0.015),
        *layers(4),
    ]
    (suspect,) = judged(*rows, module_calls={"": 1, "cell": 1, "cell.project": 512}).suspects
    assert suspect.row.path == "cell" and suspect.row.op == "(a loop)" and "512 times" in suspect.remedy
    assert suspect.row.seconds == pytest.approx(0.065)


def test_one_step_per_token_of_generate_is_no_loop():
    rows = [product(f"layers.{i}.mlp", 0.07, 0.1, calls=64) for i in range(4)]  # 64 steps, weights read each time
    for row in rows:
        row.bytes = 64 * 10**7
    module_calls = {"": 64, **{f"layers.{i}.mlp": 64 for i in range(4)}}
    assert judged(*rows, OpRow(OUTSIDE, PYTHON, 1, 0.01), model_calls=64, module_calls=module_calls).suspects == []


def test_experts_with_different_numbers_of_tokens_are_no_loop():
    rows = [product("experts", 0.3, 20.0, calls=64, kinds=64), *layers(2)]
    assert judged(*rows).suspects == []


def test_the_worst_comes_first_and_the_report_is_readable():
    report = judged(product("a" * 40, 0.9), product("b", 2.0), *layers(20), plain("c", 0.00001))
    assert [s.row.path for s in report.suspects] == ["b", "a" * 40]
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80 and " c add" not in text
    assert "suspect 1: b aten::addmm: " in text and report._repr_html_().startswith("<pre>")


def test_remedy_without_a_form_is_only_words():
    row = product("conv", 0.5, op="aten::convolution")
    row.arguments = (
        ((4, 64, 512), (1,) * 3, torch.float32), ((64, 4, 31), (1,) * 3, torch.float32), None,
        [1], [15], [1], False, [0], 16,
    )  # fmt: skip
    (suspect,) = judged(row, *layers(3), trial=HELPS).suspects
    assert "16 groups" in suspect.remedy and suspect.trial is None


def test_trial_and_remedy_are_plain_data():
    assert str(HELPS) == "5.0x (4.5 to 5.5)" and str(Trial(False, None, None, None, "error")) == "error"
    assert Remedy("name", "text").form is None
