"""./cookbook prescribe: the table and code of a user's model, and one clear line for everything of theirs."""

import pytest
import torch
from prescribe_fakes import Table

from utils.cookbook import cli
from utils.cookbook.prescribe_command import run_prescribe

pytest_plugins = ["user_models"]  # the fixture `place`


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr("utils.prescribe._Bench._memory", lambda self, stack: 1000)
    return Table({"linearize": 2.0}).install(monkeypatch)


@pytest.mark.parametrize("inputs", ["image", "named", "numbered", None])
def test_the_table_and_code_that_runs(place, table, capsys, inputs):
    target = "their_models:model" if inputs else "their_models:both"
    arguments = ["prescribe", target] + ["--inputs", f"their_models:{inputs}"] * bool(inputs)
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80 and err == ""
    assert "+ linearize" in out and "kept: linearize. Together 2.00x" in out
    namespace = {}
    exec(out.partition("was measured:\n")[2], namespace)
    assert namespace["run"](torch.randn(2, 3, 8, 8)).shape == (2, 4)
    assert type(namespace["model"][0]).__name__ == "LinearizedConv2d"


def test_options_reach_it(place, table, capsys):
    options = {"allow_lossy": True, "skip": ["linearize", "channels_last"]}
    assert run_prescribe("their_models:model", "their_models:image", **options) == 0
    out = capsys.readouterr().out
    assert "skip names it" in out and "allow_lossy" not in out and "kept: nothing" in out


@pytest.mark.parametrize(
    ("target", "inputs", "said"),
    [
        ("their_models", "their_models:image", "expected package.module:function"),
        ("their_modles:model", "their_models:image", "cannot import 'their_modles'"),
        ("their_models:modle", "their_models:image", "nearest: 'model'"),
        ("their_models:constant", "their_models:image", "is a int"),
        ("their_models:broken", "their_models:image", "factory 'their_models:broken' raised OSError: no weights"),
        ("their_models:training", "their_models:image", "in train mode"),
        ("their_models:model", None, "give --inputs"),
        ("their_models:model", "their_models:imag", "nearest: 'image'"),
        ("their_models:model", "their_models:broken", "make_inputs raised OSError: no weights (their_models.py:33)"),
        ("their_models:leaves", "their_models:image", "raised SystemExit: 3 (their_models.py:36)"),
        ("their_models:leaves_later", "their_models:image", "raised SystemExit: no more (their_models.py:42)"),
        (
            "their_models:in_a_library",
            "their_models:image",
            "double quotes: line 1 column 2 (char 1) (their_models.py:49)",
        ),
        ("their_models.py:model", "their_models:image", "name the module without the suffix: 'their_models'"),
        ("their_models:model", "their_models:wrong", "the inputs do not fit the model"),
        ("their_models:model", "their_models:nothing", "make_inputs gives ()"),
        ("their_models:image", "their_models:image", "factory returned Tensor"),
    ],
)
def test_one_line_and_status_2(place, monkeypatch, capsys, target, inputs, said):
    monkeypatch.setattr("utils.prescribe_checks.compare", None)
    monkeypatch.setattr("utils.prescribe.compare", None)
    assert cli.main(["prescribe", target, *(["--inputs", inputs] if inputs else [])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and err.startswith("prescribe: ") and "frozen" not in err


def test_an_unknown_step_is_refused_before_any_work(place, monkeypatch, capsys):
    monkeypatch.setattr("utils.prescribe.Subject", None)
    assert run_prescribe("their_models:model", "their_models:image", skip=["linearise"]) == 2
    assert "nearest: 'linearize'" in capsys.readouterr().err


def test_the_help_names_the_steps(monkeypatch, capsys):
    from utils.prescribe_steps import NAMES

    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["prescribe", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split()).partition("one of ")[2].partition(" --help")[0]
    assert said == ", ".join(f'"{name}"' if " " in name else name for name in NAMES)
