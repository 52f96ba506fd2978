"""What a value may be: the messages that users see, one line each."""

import pytest

from utils import expect

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("check", "error", "told"),
    [
        (lambda: expect.whole(1, width=0), ValueError, "width=0; expected a whole number of at least 1"),
        (lambda: expect.whole(1, depth=2, width=-5), ValueError, "width=-5; expected a whole number of at least 1"),
        (lambda: expect.whole(1, width=1.0), TypeError, "width=1.0; expected a whole number of at least 1"),
        (lambda: expect.whole(1, width=True), TypeError, "width=True; expected a whole number of at least 1"),
        (lambda: expect.whole(0, width="3"), TypeError, "width='3'; expected a whole number of at least 0"),
        (lambda: expect.whole(None, seed=None), TypeError, "seed=None; expected a whole number"),
        (lambda: expect.whole_list(1, lengths=64), TypeError,
         "lengths=64; expected a list of whole numbers of at least 1"),
        (lambda: expect.whole_list(1, lengths=[64, True]), TypeError, "lengths=[64, True]; expected a list of"),
        (lambda: expect.whole_list(1, lengths=[64, 0]), ValueError, "lengths=[64, 0]; expected a list of"),
        (lambda: expect.whole_list(1, lengths=[]), ValueError,
         "lengths=[]; expected a list of whole numbers of at least 1, one or more"),
        (lambda: expect.above(0, min_run_time=0.0), ValueError, "min_run_time=0.0; expected a finite number above 0"),
        (lambda: expect.above(0, min_run_time=NAN), ValueError, "min_run_time=nan; expected a finite number above 0"),
        (lambda: expect.above(0, min_run_time=INF), ValueError, "min_run_time=inf; expected a finite number above 0"),
        (lambda: expect.above(0, min_run_time="1"), TypeError, "min_run_time='1'; expected a finite number above 0"),
        (lambda: expect.above(0, min_run_time=True), TypeError, "min_run_time=True; expected a finite number above 0"),
        (lambda: expect.at_least(0, patience=-1), ValueError, "patience=-1; expected a finite number of at least 0"),
        (lambda: expect.one_of(("eager", "compile"), how="compil"), ValueError,
         "how='compil'; expected one of eager, compile; nearest: 'compile'"),
        (lambda: expect.one_of(("eager",), how=None), TypeError, "how=None; expected one of eager"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_in_one_line(check, error, told):
    with pytest.raises(error) as caught:
        check()
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_right_values_pass():
    expect.whole(1, a=1, b=7)
    expect.whole(None, seed=-3)
    expect.whole_list(1, lengths=[1, 2])
    expect.above(0, seconds=1e-9, rate=3)
    expect.at_least(0, patience=0)
    assert expect.one_of({"x": 1, "y": 2}, size="y") == "y"


def test_a_wrong_value_is_shown_short():
    with pytest.raises(TypeError) as caught:
        expect.whole(1, width=[0] * 1000)
    assert len(str(caught.value)) < 130
