"""prescribe leaves nothing behind: every switch is as before, also after an error, also of the compiler."""

import random

import numpy as np
import pytest
import torch
from prescribe_fakes import FAST, Table, check_code, factory, image, only, quick, two_threads  # noqa: F401
from torch import nn

from utils.prescribe import prescribe
from utils.timing import guards

MEASURED = ("faster", "slower", "equivalent", "inconclusive")


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


@pytest.mark.parametrize(
    ("fails_at", "said"),
    [(0, "BackendCompilerFailed: backend='broken' raised: RuntimeError: no such"), (3, "RuntimeError: no such")],
)
def test_a_compiler_that_fails_is_an_error_with_its_reason_and_leaves_nothing_behind(monkeypatch, fails_at, said):
    """For real: while it compiles, or in the call in which the comparison counts graphs. The other steps go on."""
    calls = []

    def broken(graph, inputs):
        def run(*args):
            calls.append(1)
            if len(calls) == fails_at:
                raise RuntimeError("no such\ninstruction")
            return graph(*args)

        if not fails_at:
            raise RuntimeError("no such\ninstruction")
        return run

    plain = torch.compile
    monkeypatch.setattr("utils.prescribe_steps.has_compiler", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda model: plain(model, backend=broken))
    before = {name: read() for name, (read, _) in SWITCHED.items()}
    skip = only("torch.compile", "BF16")
    found = prescribe(factory, image, skip=skip, replicates=2, min_run_time=0.02, allow_lossy=True)
    row = found["torch.compile"]
    assert row.verdict == "error" and not row.kept and said in row.reason and "\n" not in row.reason
    assert "torch.compile" not in found.code and found["BF16"].alone.verdict in MEASURED
    text = " ".join(str(found).split())  # where a line ends depends on what BF16 did
    assert "RuntimeError: no such" in text and ("Failed: torch.compile" in text or found.kept)
    assert {name: read() for name, (read, _) in SWITCHED.items()} == before
    check_code(found.code, lossy="BF16" in found.kept)
