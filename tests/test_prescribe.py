"""prescribe: what is kept and why, and that its code runs."""

import pytest
import torch
from prescribe_fakes import FAST, STEPS, Net, Table, check_code, factory, image, quick, two_threads  # noqa: F401

from utils.prescribe import prescribe
from utils.prescribe_checks import signal_to_noise
from utils.prescribe_steps import NAMES

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


def test_a_local_factory_is_named_factory(monkeypatch):
    Table({"linearize": 2.0}).install(monkeypatch)
    code = prescribe(lambda: Net().eval(), image).code
    namespace = {"factory": factory}
    exec(code, namespace)
    assert "import" not in code.replace("from utils.linearize import linearize", "") and callable(namespace["run"])


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
