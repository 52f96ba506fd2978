"""doctor: a report for a user's model, and one clear line for everything of theirs that does not work."""

import pytest
import torch
from torch import nn

from utils.cookbook.doctor import run_doctor

pytest_plugins = ["user_models"]  # the fixture `place`


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    from utils import cliffs
    from utils.cost import MachinePeaks

    peaks = MachinePeaks(1e11, 1e10, 1e10, 2**28, "float32", 2, "a machine", "cpu", 1024, "id")
    monkeypatch.setattr(cliffs, "measure_peaks", lambda *given: peaks)
    monkeypatch.setattr(cliffs, "try_out", None)
    monkeypatch.setattr(cliffs, "reproduce", None)


@pytest.mark.parametrize("inputs", ["image", "named", "several", None])
def test_the_report(place, capsys, inputs):
    target = "their_models:model" if inputs else "their_models:both"
    arguments = (target, f"their_models:{inputs}") if inputs else (target,)
    assert run_doctor(*arguments) == 0
    out, err = capsys.readouterr()
    assert "convolution" in out and "1 of 1 convolutions are matrix products" in out and err == ""


CONV = ("0", "aten::convolution")
QUICK, SLOW, PAUSE = 2e-5, 2e-4, 9.0  # of a line; the first is what each line of this model is expected to take


@pytest.mark.parametrize(
    "passes, first, suspects",
    [
        ([(QUICK, QUICK)] * 3, "one call", 0),
        ([(PAUSE, QUICK), (QUICK, QUICK), (QUICK, QUICK)], "one call", 0),  # accuses nobody
        ([(SLOW * 99, PAUSE), (SLOW * 99, QUICK), (SLOW * 99, QUICK)], "one call", 1),  # hides no cliff
        ([(QUICK, QUICK), (SLOW, QUICK), (SLOW, QUICK)], "no verdict: repeated calls differ by 10.0x", 0),
        ([(QUICK, QUICK), (SLOW, SLOW), (SLOW, SLOW)], "no verdict: repeated calls differ by 10.0x", 0),
        ([(SLOW, SLOW)] * 3, "no verdict: everything took 5 times or more", 0),
    ],
)
def test_a_busy_machine_accuses_nobody_and_clears_nobody(place, capsys, monkeypatch, passes, first, suspects):
    left = iter(passes)

    def timed(call, hooks, names, device):
        conv, others = next(left)
        lines = {(path, op): (others, 1) for path, ops in names.items() for op in ops}
        lines[CONV] = (conv, 1)
        return sum(seconds for seconds, _ in lines.values()), lines

    monkeypatch.setattr("utils.op_profile._timed_pass", timed)
    assert run_doctor("their_models:both") == 0
    out = capsys.readouterr().out
    assert out.startswith(first) and " ".join(out.split()).count("suspect 1: * aten::convolution") == suspects
    assert ("no suspect" in out) is (first == "one call" and not suspects)


@pytest.mark.parametrize(
    "target, inputs, said",
    [
        ("their_models", "their_models:image", "expected package.module:function"),
        ("their_modles:model", "their_models:image", "cannot import 'their_modles'"),
        ("their_models:modle", "their_models:image", "nearest: 'model'"),
        ("their_models:constant", "their_models:image", "is a int"),
        ("their_models:number", "their_models:image", "expected an nn.Module"),
        ("their_models:broken", "their_models:image", "factory 'their_models:broken' raised OSError: no weights"),
        ("their_models:broken", "their_models:image", "no weights (their_models.py:"),
        ("their_models:leaves", "their_models:image", "factory 'their_models:leaves' raised SystemExit: 3"),
        ("their_models.py:model", "their_models:image", "without the suffix: 'their_models'"),
        ("their_models:model", None, "give --inputs"),
        ("their_models:model", "their_models:broken", "inputs 'their_models:broken' raised OSError"),
        ("their_models:model", "their_models:imag", "nearest: 'image'"),
        ("their_models:model", "their_models:wrong", "the inputs do not fit the model of 'their_models:model'"),
        ("their_models:model", "their_models:number", "the inputs do not fit"),
    ],
)
def test_one_line_and_status_2(place, capsys, target, inputs, said):
    assert run_doctor(target, inputs) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and err.startswith("doctor: ") and "<frozen" not in err


def test_the_model_is_as_before(place, capsys, monkeypatch):
    kept = nn.Sequential(nn.Conv2d(3, 8, 4, 4))
    monkeypatch.setattr(
        "utils.cookbook.doctor.called", lambda target, what: kept if what == "factory" else torch.ones(1, 3, 8, 8)
    )
    assert run_doctor("a:b", "a:c") == 0 and type(kept[0]) is nn.Conv2d
