"""compare without a clock: contenders are built, called and checked for real; their times come from a table.

And the model that most tests of prescribe are about.
"""

import pytest
import torch
from torch import nn

from utils.equivalence import check_equivalence
from utils.prescribe_checks import scaled, signal_to_noise
from utils.timing import Comparison, ComparisonRow, Measurement, guards

NAMES = "inference mode|linearize|SDPA|channels_last|torch.compile|1 thread|TF32|BF16|FP16|cudnn.benchmark|CUDA Graph"
STEPS = NAMES.split("|")
FAST = dict.fromkeys(STEPS, 1.2)


class Net(nn.Module):
    """Both kinds of convolution, and something to compare."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.mix = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x, shift=0.0):
        x = torch.relu(self.mix(self.patch(x)))
        return self.head(x.mean((2, 3))) + shift


def factory():
    return Net().eval()


def image():
    return torch.randn(2, 3, 16, 16)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quick(monkeypatch, two_threads):
    """Memory is measured in one test of its own."""
    monkeypatch.setattr("utils.prescribe._Bench._memory", lambda self, stack: 1000)


def only(*names):
    return [name for name in STEPS if name not in names]


def check_code(code, lossy=False):
    x = torch.randn(2, 3, 16, 16)
    torch.manual_seed(3)
    expected = factory()(x)
    namespace = {}
    torch.manual_seed(3)
    exec(compile(code, "<code>", "exec"), namespace)  # imports the factory of this module
    actual = namespace["run"](x)
    torch.manual_seed(3)
    exact = factory().double()(x.double())
    same = signal_to_noise()(actual, expected) if lossy else check_equivalence(actual, expected, reference=exact)
    assert same, same
    assert not check_equivalence(scaled(actual, 0.1), expected)
    assert check_equivalence(namespace["run"](x=x), actual)
    return namespace


class Table:
    """`speed`: step -> how many times as fast (1 when absent), or a function of the set of a stack's steps.

    `wide`: stacks whose interval goes from a `noise`-th of the ratio to `noise` times it; 9 of `needed` rounds taken.
    """

    def __init__(self, speed=None, setup=None, wide=(), noise=1.5, needed=90):
        self.speed, self.setup, self.wide = speed or {}, setup or {}, wide
        self.noise, self.needed = noise, needed
        self.asked = []

    def seconds(self, label):
        steps = set(label.split(" + ")) & set(STEPS)
        if callable(self.speed):
            return 1e-3 / self.speed(frozenset(steps))
        value = 1e-3
        for step in steps:
            value /= self.speed.get(step, 1.0)
        return value

    def first(self, label):
        return self.seconds(label) + sum(self.setup.get(step, 0.0) for step in label.split(" + "))

    def compare(self, baseline, candidates, *, make_inputs, label, reference, lossy, seed, rtol, atol, **options):
        assert options["grad_mode"] == "enabled"
        self.asked.append((label, *candidates))
        inputs, outputs = make_inputs(0), {}
        for name, builder in {label: baseline, **candidates}.items():
            guards.seed_all(seed)
            outputs[name] = guards.cloned(builder()(*inputs))
        rows = []
        for name in candidates:
            if lossy and name in lossy:
                found = lossy[name](outputs[name], outputs[label])
            else:
                exact = None
                if reference is not None:
                    guards.seed_all(seed)
                    exact = reference()(*guards.to_float64(inputs))
                given = {"reference": exact, "rtol": rtol, "atol": atol}
                found = check_equivalence(outputs[name], outputs[label], **given)
            rows.append(self.row(name, label, found, options["min_effect"]))
        base = Measurement(
            label, self.seconds(label), None, None, 0.0, 0.0, 0.0, None, None, None, 9, 1, self.first(label),
            3, (), (), "latency", "hot", 2,
        )  # fmt: skip
        return Comparison(rows, base, options["min_effect"], options["replicates"])

    def row(self, name, label, found, margin):
        if not found:
            return ComparisonRow(name, label, "invalid", equivalence=found)
        ratio = self.seconds(label) / self.seconds(name)
        share = self.noise if name in self.wide else 1.01
        low, high = ratio / share, ratio * share
        verdict = "inconclusive"
        if low > 1 + margin:
            verdict = "faster"
        elif high < 1 / (1 + margin):
            verdict = "slower"
        elif 1 / (1 + margin) <= low and high <= 1 + margin:
            verdict = "equivalent"
        return ComparisonRow(
            name, label, verdict, ratio, low, high, found, self.seconds(name), self.seconds(label),
            first_call_s=self.first(name), n_rounds=9, needed_rounds=self.needed * (verdict == "inconclusive") or None,
            warnings=("about 9 rounds would settle it",) * (verdict == "inconclusive"),
        )  # fmt: skip

    def install(self, monkeypatch, compiler=False):
        """In the place of the real one. torch.compile does nothing; with `compiler` its backend without a compiler."""
        monkeypatch.setattr("utils.prescribe.compare", self.compare)
        monkeypatch.setattr("utils.prescribe_checks.compare", self.compare)
        monkeypatch.setattr("utils.prescribe_steps.has_compiler", lambda: True)
        plain = torch.compile
        compiled = (lambda model: plain(model, backend="eager")) if compiler else (lambda model: model)
        monkeypatch.setattr(torch, "compile", compiled)
        return self
