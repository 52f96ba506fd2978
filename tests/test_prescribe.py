"""prescribe: what is kept and why, that its code runs, that wrong outputs are found, that everything is undone."""

import random

import numpy as np
import pytest
import torch
from prescribe_fakes import STEPS, Table
from torch import nn

from utils.equivalence import check_equivalence, declared_lossy
from utils.prescribe import PrescribeError, prescribe
from utils.prescribe_checks import scaled, signal_to_noise, with_loss
from utils.prescribe_steps import NAMES
from utils.timing import guards


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


FAST = dict.fromkeys(STEPS, 1.2)


# ---------------------------------------------------------------------------------------------------- the waterfall


def test_what_is_faster_is_kept_and_nothing_else(monkeypatch):
    Table({"linearize": 1.5, "torch.compile": 0.7, "1 thread": 1.0, "channels_last": 1.3}).install(monkeypatch)
    found = prescribe(factory, image)
    assert found.kept == ("linearize", "channels_last")
    assert [row.name for row in found.rows] == STEPS
    verdicts = {row.name: row.verdict for row in found.rows}
    assert verdicts["torch.compile"] == "slower" and verdicts["1 thread"] == verdicts["inference mode"] == "equivalent"
    assert verdicts["SDPA"] == "not applicable" and verdicts["cudnn.benchmark"] == "not measurable here"
    assert found["linearize"].alone.speedup == pytest.approx(1.5) == found["linearize"].total.speedup
    assert found["channels_last"].on_best.speedup == pytest.approx(1.3)
    assert found.total.speedup == pytest.approx(1.95) and found.total is found["channels_last"].total
    assert found["torch.compile"].total is None and not found["torch.compile"].kept


@pytest.mark.parametrize("skip", ["threads", "1 thread"])
def test_every_name_of_skip_skips(monkeypatch, skip):
    Table(FAST).install(monkeypatch)
    left = [name for name in NAMES if name != "threads"]
    found = prescribe(factory, image, skip=[*left, skip], allow_lossy=True)
    assert found.kept == () and not any(row.alone for row in found.rows)
    assert {row.name for row in found.rows} == {*left, "1 thread"}


def test_alone_is_not_enough(monkeypatch):
    def speed(steps):  # the two do the same thing: one of them is all there is to gain
        return 1.5 if steps & {"linearize", "channels_last"} else 1.0

    Table(speed).install(monkeypatch)
    found = prescribe(factory, image)
    assert found.kept == ("linearize",)
    assert found["channels_last"].alone.verdict == "faster" and found["channels_last"].verdict == "equivalent"


def test_slower_alone_may_be_faster_on_the_best_stack(monkeypatch):
    Table(lambda steps: 0.9 if steps == {"channels_last"} else 1.2 ** len(steps)).install(monkeypatch)
    row = prescribe(factory, image)["channels_last"]
    assert row.alone.verdict == "slower" and row.kept


def test_no_stack_is_slower_than_one_that_it_grew_from(monkeypatch):
    class Liar(Table):
        """On linearize, compile looks faster; against the plain call the stack is slower than linearize alone."""

        def row(self, name, label, found, margin):
            told = label == "linearize" and "torch.compile" in name
            return super().row(name, "SDPA + CUDA Graph" if told else label, found, margin)

    table = Liar({"linearize": 1.5, "torch.compile": 0.9, "SDPA": 0.5, "CUDA Graph": 0.5})
    table.install(monkeypatch)
    found = prescribe(factory, image)
    row = found["torch.compile"]
    assert row.verdict == "faster" and not row.kept and "in total 1.35x, and 1.50x without it" in row.reason
    assert found.kept == ("linearize",)


def test_too_much_noise_is_not_faster(monkeypatch):
    Table(dict.fromkeys(STEPS, 1.3), wide=("linearize",)).install(monkeypatch)
    row = prescribe(factory, image, skip=[step for step in STEPS if step != "linearize"])["linearize"]
    assert row.verdict == "inconclusive" and not row.kept and "would settle it" in row.reason


@pytest.mark.parametrize("shift", [1.0, 1e-3])  # the second would be good enough for a lossy step
def test_another_answer_is_never_kept_however_fast(monkeypatch, shift):
    class Peeks(Net):
        def forward(self, x):
            return super().forward(x, shift if torch.is_inference_mode_enabled() else 0.0)

    Table(FAST).install(monkeypatch)
    found = prescribe(lambda: Peeks().eval(), image)
    assert found["inference mode"].verdict == "invalid"
    assert found["torch.compile"].verdict == "invalid" and found["torch.compile"].reason
    assert found.kept == ("1 thread", "linearize", "channels_last")


def test_no_pair_is_measured_twice(monkeypatch):
    table = Table(FAST).install(monkeypatch)
    prescribe(factory, image)
    pairs = table.asked[1:]  # the first are the controls
    assert len(pairs) == len(set(pairs))


def test_compile_brings_inference_mode(monkeypatch):
    Table({"torch.compile": 2.0}).install(monkeypatch)
    found = prescribe(factory, image)
    assert found.kept == ("torch.compile", "inference mode")
    row = found["inference mode"]
    assert row.kept and row.verdict == "equivalent" and row.reason == "comes with torch.compile"
    assert "@torch.inference_mode()" in found.code


def test_of_one_kind_the_later_and_better_stays(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("prescribe_fakes.STEPS", [*STEPS, "8 threads"])
    Table({"8 threads": 1.5, "1 thread": 2.0}).install(monkeypatch)
    found = prescribe(factory, image)
    assert found.kept == ("1 thread",) and found["8 threads"].verdict == "faster" and not found["8 threads"].kept
    assert found["8 threads"].reason.startswith("replaced")
    assert found["1 thread"].on_best.baseline_label == "8 threads" and "set_num_threads(1)" in found.code


def test_nothing_helps(monkeypatch):
    Table().install(monkeypatch)
    found = prescribe(factory, image)
    assert found.kept == () and found.total is None and "kept: nothing" in str(found)
    assert "def run" in found.code and "def run" not in str(found)


def test_set_up_and_break_even(monkeypatch):
    Table({"torch.compile": 2.0}, setup={"torch.compile": 5.0}).install(monkeypatch)
    found = prescribe(factory, image)
    row = found["torch.compile"]
    assert row.setup_s == pytest.approx(5.0) and row.pays.calls == 10_000  # 5 s at 0.5 ms saved a call
    assert found.pays.calls == 10_000 and found["linearize"].setup_s == 0.0


def test_lossy_steps_only_where_allowed_and_by_their_metric(monkeypatch):
    Table({"BF16": 2.0}).install(monkeypatch)
    refused = prescribe(factory, image)
    assert refused["BF16"].verdict == "not tried" and "allow_lossy" in refused["BF16"].reason and refused.kept == ()
    allowed = prescribe(factory, image, allow_lossy=True)
    assert allowed.kept == ("BF16",) and allowed["BF16"].on_best.equivalence.rule == "approximate"
    strict = prescribe(factory, image, allow_lossy=True, lossy=signal_to_noise(120.0))
    assert strict["BF16"].verdict == "invalid" and strict.kept == () and "120" in strict["BF16"].reason


# ---------------------------------------------------------------------------------------------------- its code


@pytest.mark.parametrize("step", ["inference mode", "linearize", "channels_last", "torch.compile", "1 thread", "BF16"])
def test_the_code_of_one_step_runs_and_gives_the_same(monkeypatch, step):
    Table({step: 2.0}).install(monkeypatch, compiler=step == "torch.compile")
    found = prescribe(factory, image, allow_lossy=True)
    assert step in found.kept
    check_code(found.code, lossy=step == "BF16")


def test_the_code_of_everything_runs_and_gives_the_same(monkeypatch):
    Table(FAST).install(monkeypatch, compiler=True)
    found = prescribe(factory, image, allow_lossy=True)
    expected = {"1 thread", "linearize", "BF16", "channels_last", "torch.compile", "inference mode"}
    assert set(found.kept) == expected
    namespace = check_code(found.code, lossy=True)
    assert torch.get_num_threads() == 1 and hasattr(namespace["model"], "_orig_mod")


def test_the_code_of_nothing_runs_too(monkeypatch):
    Table().install(monkeypatch)
    check_code(prescribe(factory, image).code)


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


def test_a_local_factory_is_named_factory(monkeypatch):
    Table({"linearize": 2.0}).install(monkeypatch)
    code = prescribe(lambda: Net().eval(), image).code
    namespace = {"factory": factory}
    exec(code, namespace)
    assert "import" not in code.replace("from utils.linearize import linearize", "") and callable(namespace["run"])


# --------------------------------------------------------------------------------------- the check can fail


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


def test_an_output_of_zeros_proves_nothing():
    with pytest.raises(PrescribeError, match="does not find a wrong output"):
        prescribe(lambda: nn.Threshold(1e9, 0.0).eval(), image)


# ---------------------------------------------------------------------------------------------------- everything undone


def dynamo_option(value):
    import torch._dynamo

    torch._dynamo.config.cache_size_limit = value


def inductor_option(value):
    import torch._inductor.config

    torch._inductor.config.freezing = value


def read_dynamo():
    import torch._dynamo

    return torch._dynamo.config.cache_size_limit


def read_inductor():
    import torch._inductor.config

    return torch._inductor.config.freezing


def precisions():
    """The newer options behind torch.set_float32_matmul_precision, where this torch has them."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv
    return [getattr(backend, "fp32_precision", None) for backend in backends]


def set_by_name(value):
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = value


SWITCHED = {
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(1)),
    "matmul precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("high")),
    "fp32_precision": (precisions, lambda: torch.set_float32_matmul_precision("high")),
    "fp32_precision, set by name": (precisions, lambda: set_by_name("tf32")),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
    ),
    "Dynamo": (read_dynamo, lambda: dynamo_option(99)),
    "Inductor": (read_inductor, lambda: inductor_option(True)),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "torch's generator": (lambda: torch.get_rng_state().tolist(), lambda: torch.manual_seed(77)),
    "numpy's generator": (lambda: np.random.get_state()[1].tolist(), lambda: np.random.seed(77)),
    "random": (random.getstate, lambda: random.seed(77)),
    "cache folder": (
        lambda: __import__("os").environ.get("TORCHINDUCTOR_CACHE_DIR"),
        lambda: __import__("os").environ.update(TORCHINDUCTOR_CACHE_DIR="elsewhere"),
    ),
}


@pytest.mark.parametrize("ends", ["well", "with an error in the middle"])
@pytest.mark.parametrize("switch", SWITCHED)
def test_every_switch_is_undone(monkeypatch, switch, ends):
    read, turn = SWITCHED[switch]
    Table(FAST).install(monkeypatch)
    calls = []

    def meddling():
        model = factory()
        calls.append(1)
        if len(calls) > 6:
            turn()
            if ends != "well":
                raise KeyboardInterrupt  # not even an Exception
        return model

    before = read()
    if ends == "well":
        prescribe(meddling, image)
    else:
        with pytest.raises(KeyboardInterrupt):
            prescribe(meddling, image)
    assert len(calls) > 6 and read() == before


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_steps_turn_is_undone(monkeypatch, fails):
    """Not the user's code but our own steps: all of them are kept, so all of their switches are turned."""
    table = Table(FAST).install(monkeypatch)
    seen = []

    def watched(*args, **options):
        found = table.compare(*args, **options)
        seen.append(torch.get_num_threads())
        if fails and len(table.asked) > 12:
            raise MemoryError("in the middle")
        return found

    monkeypatch.setattr("utils.prescribe.compare", watched)
    before = torch.get_num_threads()
    if fails:
        with pytest.raises(MemoryError):
            prescribe(factory, image)
    else:
        assert "1 thread" in prescribe(factory, image).kept
    assert 1 in seen and torch.get_num_threads() == before == 2


@pytest.mark.parametrize("before", ["none", "tf32"])
def test_the_newer_options_of_precision_are_as_before(monkeypatch, before):
    """Where they were never set, and where they were: then torch refuses the older question."""
    Table().install(monkeypatch)
    first = precisions()
    try:
        set_by_name(before)
        wanted = precisions()
        prescribe(factory, image, skip="torch.compile")
        assert precisions() == wanted
    finally:
        set_by_name(first[0])


def test_the_models_of_the_user_keep_mode_class_and_weights(monkeypatch):
    Table(FAST).install(monkeypatch)
    shown = []

    def showing():
        shown.append(factory())
        return shown[-1]

    prescribe(showing, image, allow_lossy=True)
    assert not any(part.training for model in shown for part in model.modules())
    probe = shown[0]  # looked at by linearize and audit
    assert type(probe.patch) is nn.Conv2d and probe.patch.weight.dtype is torch.float32
    torch.manual_seed(0)
    assert guards.same_values(list(probe.parameters()), list(factory().parameters()))
    assert not probe._forward_hooks and not probe._forward_pre_hooks


def test_inside_inference_mode_and_without_gradients_it_is_the_same(monkeypatch):
    Table(FAST).install(monkeypatch)
    with torch.inference_mode():
        found = prescribe(factory, image)
        assert torch.is_inference_mode_enabled()
    assert "inference mode" in found.kept


def test_a_configuration_that_the_factory_holds_is_not_written_to(monkeypatch):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    Table({"SDPA": 2.0}).install(monkeypatch)
    found = prescribe(lambda: LlamaModel(config).eval(), lambda: {"input_ids": torch.randint(0, 32, (1, 8))})
    assert found.kept == ("SDPA",) and config._attn_implementation == "eager"
    assert 'model.set_attn_implementation("sdpa")' in found.code


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
        ({"replicates": 0}, "replicates"),
        ({"min_effect": 2}, "min_effect"),
        ({"rtol": -1.0}, "rtol"),
        ({"lossy": 3}, "lossy=3 is no check"),
    ],
)
def test_wrong_arguments(options, said):
    with pytest.raises(PrescribeError, match=said):
        prescribe(factory, image, **options)


# ---------------------------------------------------------------------------------------------------- for real


def test_a_real_run(monkeypatch):
    """The real comparison, without the compiler: no verdict is foreseen, but every row holds together."""
    monkeypatch.undo()
    skip = ["torch.compile", "channels_last", "1 thread"]
    found = prescribe(factory, image, skip=skip, replicates=2, min_run_time=0.02, allow_lossy=True)
    measured = [row for row in found.rows if row.on_best is not None]
    assert {row.name for row in measured} == {"inference mode", "linearize", "BF16"}
    for row in measured:
        assert row.verdict in ("faster", "slower", "equivalent", "inconclusive") and row.alone.equivalence
        assert row.memory_bytes > 0 and row.setup_s >= 0
        assert row.kept == (row.verdict == "faster") or row.reason
    assert found.plain_memory_bytes > 0 and found.plain_s > 0
    check_code(found.code, lossy="BF16" in found.kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    found = prescribe(
        lambda: factory().cuda(), lambda: image().cuda(), allow_lossy=True, replicates=2, min_run_time=0.05
    )
    rows = {row.name: row for row in found.rows}
    for name in ("torch.compile", "cudnn.benchmark", "CUDA Graph", "BF16", "FP16"):
        assert rows[name].alone is not None and rows[name].alone.verdict != "error", rows[name].reason
