"""What prescribe refuses, each in one line: checks that cannot fail, what the user gives, wrong arguments."""

import numpy as np
import pytest
import torch
from prescribe_fakes import STEPS, Net, Table, factory, image, quick, two_threads  # noqa: F401
from torch import nn

from utils.equivalence import check_equivalence, declared_lossy
from utils.prescribe import PrescribeError, prescribe
from utils.prescribe_checks import scaled, signal_to_noise, with_loss

# ------------------------------------------------------------------------------------------ the check can fail


@pytest.mark.parametrize("wrong", [lambda y: scaled(y, 0.01), with_loss], ids=["off", "lost"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_wrong_outputs_are_wrong(wrong, size):
    y = torch.randn(size)
    assert not check_equivalence(wrong(y), y, reference=y.double())
    assert check_equivalence(y.clone(), y)


def test_the_default_metric_sees_three_per_cent_in_the_worst_tensor():
    small, large = torch.randn(10), 1e6 * torch.randn(1000)
    metric = signal_to_noise()
    assert metric((small * 1.02, large), (small, large)) and not metric((small * 1.05, large), (small, large))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rtol": 0.5}, "the check does not find a wrong output (1 % off)"),
        (
            {"allow_lossy": True, "lossy": declared_lossy(lambda a, e: 1 - float((a * 0).sum()), at_least=1, name="x")},
            "lossy: the metric does not find a wrong output",
        ),
    ],
)
def test_a_check_that_cannot_fail_is_refused(options, said):
    if "lossy" in options:  # declared_lossy itself refuses zeros; this one likes everything but zeros
        options = options | {"lossy": lambda actual, expected: check_equivalence(expected, expected)}
    with pytest.raises(PrescribeError, match=said.replace("(", r"\(").replace(")", r"\)")):
        prescribe(factory, image, **options)


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (lambda y: y * 0, "every value of the output is 0"),
        (lambda y: y * float("nan"), "every value of the output is NaN"),
        (lambda y: y / 0, "every value of the output is infinite"),
        (lambda y: torch.where(y > 0, y * float("nan"), y * 0), "every value of the output is 0 or NaN"),
        (lambda y: (y * 0).long(), "every value of the output is 0"),
        (lambda y: y[:0], "the output has no values"),
        (lambda y: y.clamp(-1, 1) * 1e-9, "its largest value is 1e-09; is rtol or atol too wide for it?"),
    ],
)
def test_an_output_that_proves_nothing_is_named(output, cause):
    def make():
        model = nn.Identity().eval()
        model.forward = output
        return model

    with pytest.raises(PrescribeError, match="does not find a wrong output") as error:
        prescribe(make, lambda: 10 * torch.randn(2, 50))
    assert str(error.value).partition("): ")[2] == cause


# ---------------------------------------------------------------------------------------------------- refusals


def other_weights():
    model = factory()
    with torch.no_grad():
        model.head.bias += next(COUNTER)
    return model


COUNTER = iter(range(1000))
SHARED = factory()


def half_shared():
    model = factory()
    model.mix = SHARED.mix
    return model


def part_in_train_mode():
    model = factory()
    model.head.train()
    return model


def failing():
    raise OSError("no\nweights")


@pytest.mark.parametrize(
    ("given", "inputs", "said"),
    [
        (3, image, "factory is a int; expected a function"),
        (factory(), image, r"factory is a model \(Net\)"),
        (factory, torch.ones(1), "make_inputs is a Tensor; expected a function"),
        (lambda size: Net(), image, "factory needs arguments"),
        (factory, lambda a, b: image(), "make_inputs needs arguments"),
        (failing, image, "factory raised OSError: no weights"),
        (lambda: 3, image, "factory returned int, expected an nn.Module"),
        (Net, image, r"factory returned a model in train mode \(Net\); expected model.eval\(\)"),
        (part_in_train_mode, image, "in train mode .'head'"),
        (lambda: torch.compile(factory()), image, "a compiled model"),
        (lambda: factory().to("meta"), image, "on the meta device"),
        (lambda: SHARED, image, "the same model twice"),
        (half_shared, image, "shares 'mix.weight' between two models"),
        (other_weights, image, "gives other weights each time: 'head.bias' differs"),
        (factory, failing, "make_inputs raised OSError: no weights"),
        (factory, lambda: (), r"make_inputs gives \(\)"),
        (factory, {}.copy, "make_inputs gives {}"),
        (factory, lambda: None, "make_inputs gives None"),
        (factory, lambda: torch.ones(0, 3), r"an empty tensor \(0, 3\)"),
        (factory, lambda: torch.ones(2, 4, 16, 16), "the inputs do not fit the model: RuntimeError"),
        (factory, lambda: {"y": torch.ones(1)}, "the inputs do not fit the model: TypeError"),
        (factory, lambda: "words", "the inputs do not fit the model"),
        (lambda: nn.Dropout().eval().apply(lambda m: setattr(m, "forward", len)), image, "without a tensor"),
    ],
)
def test_one_clear_line(monkeypatch, given, inputs, said):
    monkeypatch.setattr("utils.prescribe.compare", None)
    with pytest.raises(PrescribeError, match=said) as caught:
        prescribe(given, inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (lambda x: x + next(COUNTER), "cannot be compared"),
        (lambda x: x.add_(1), "cannot be compared: .* changes its inputs"),
    ],
)
def test_a_model_that_cannot_be_compared(forward, said):
    def make():
        model = nn.Identity().eval()
        model.forward = forward
        return model

    with pytest.raises(PrescribeError, match=said):
        prescribe(make, image)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"skip": ["torch.compil"]}, "skip='torch.compil' is no step; .*nearest: 'torch.compile'"),
        ({"skip": 3}, r"skip=3; expected names of steps"),
        ({"replicates": 0}, "replicates=0; expected a whole number, 1 or more"),
        ({"replicates": 2.5}, "replicates=2.5; expected a whole number"),
        ({"replicates": "2"}, "replicates='2'; expected a whole number"),
        ({"replicates": True}, "replicates=True; expected a whole number"),
        ({"seed": "a"}, "seed='a'; expected a whole number"),
        ({"seed": 2**70}, r"below 2\*\*62"),
        ({"min_run_time": "1"}, "min_run_time='1'; expected seconds, above 0"),
        ({"min_run_time": float("nan")}, "min_run_time=nan"),
        ({"min_effect": 2}, "min_effect=2; expected a share between 0 and 1"),
        ({"allow_lossy": "no"}, "allow_lossy='no'; expected True or False"),
        ({"model_code": 3}, "model_code=3; expected lines of code"),
        ({"rtol": -1.0}, "rtol"),
        ({"atol": "a"}, "atol='a'"),
        ({"lossy": 3}, "lossy=3 is no check"),
        ({"lossy": lambda a, b: True}, r"lossy gives bool, no Equivalence; expected .*declared_lossy\(metric"),
        ({"lossy": lambda a: True}, r"lossy takes no two arguments"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(options, said):
    with pytest.raises(PrescribeError, match=said) as error:
        prescribe(never, never, **options)
    assert "\n" not in str(error.value)


def never():
    raise AssertionError("work was done")


@pytest.mark.parametrize(
    ("lossy", "said"),
    [
        (lambda a, b: a.logits, "lossy raised .*Error: .* for an output of the model"),
        (lambda a, b: len(a) == 2 or 1 / 0, "lossy gives bool"),
    ],
)
def test_a_lossy_check_that_fails_on_the_output(lossy, said):
    with pytest.raises(PrescribeError, match=said):
        prescribe(factory, image, allow_lossy=True, lossy=lossy)
    prescribed = {"allow_lossy": False, "skip": STEPS, "replicates": 1}
    assert prescribe(factory, image, lossy=lossy, **prescribed).kept == ()  # nothing lossy is tried: it is not asked


def test_numbers_of_numpy_are_numbers(monkeypatch):
    Table().install(monkeypatch)
    options = {"replicates": np.int64(2), "min_run_time": np.float32(0.5), "seed": np.int64(3)}
    assert prescribe(factory, image, **options).kept == ()
