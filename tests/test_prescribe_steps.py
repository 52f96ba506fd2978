"""Which steps apply to which model, the reason where one does not, and what each writes into the code."""

import ast
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from utils.models.diffusion import vae
from utils.models.qwen3_vl import vision_tower
from utils.prescribe_code import execute, model_code, source, target_of, with_step
from utils.prescribe_steps import INFERENCE, Facts, conflict, trials

CPU = torch.device("cpu")


def facts(model, *args, device=CPU, threads=2, allow_lossy=True):
    return Facts(model.eval(), args or (torch.randn(2, 8),), {}, device, threads, allow_lossy)


def found(model, *args, **options):
    return {step.name: (step, reason) for step, reason in trials(facts(model, *args, **options))}


@pytest.fixture
def cuda(monkeypatch):
    """A machine with a GPU, as far as the choice of steps can see."""
    monkeypatch.setattr("utils.prescribe_steps.has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("step", "model", "said"),
    [
        ("linearize", nn.Linear(8, 8), "not applicable: no convolution"),
        ("linearize", nn.Conv1d(8, 8, 3), "no convolution is a matrix product; : stride 1 is not kernel 3"),
        ("channels_last", nn.Linear(8, 8), "not applicable: no convolution"),
        ("channels_last", nn.Conv3d(1, 1, 1), "not applicable: no 2-D convolution"),
        ("cudnn.benchmark", nn.Linear(8, 8), "not applicable: no convolution"),
        ("cudnn.benchmark", nn.Conv2d(1, 1, 1), "not measurable here: needs an NVIDIA GPU"),
        ("CUDA Graph", nn.Linear(8, 8), "not measurable here: needs an NVIDIA GPU"),
        ("TF32", nn.Linear(8, 8), "not measurable here: needs an NVIDIA GPU"),
        ("TF32", nn.Linear(8, 8).half(), "not applicable: the model has no float32 weights (float16)"),
        ("BF16", nn.Linear(8, 8).bfloat16(), "not applicable: the model has no float32 weights (bfloat16)"),
        ("FP16", nn.Linear(8, 8), "not applicable: CPUs compute float16"),
        ("SDPA", nn.Linear(8, 8), "not applicable: no attention that can be switched was found"),
        ("linearize", nn.Conv2d(8, 8, 2, 2), ""),
        ("channels_last", nn.ConvTranspose2d(8, 8, 2), ""),
        ("BF16", nn.Linear(8, 8), ""),
        ("1 thread", nn.Linear(8, 8), ""),
        ("torch.compile", nn.Linear(8, 8), ""),
    ],
)
def test_on_a_cpu(monkeypatch, step, model, said):
    monkeypatch.setattr("utils.prescribe_steps.has_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = found(model)[step][1]
    assert said in reason if said else reason == ""


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr("utils.prescribe_steps.has_compiler", lambda: False)
    assert "not measurable here: needs a C++ compiler" in found(nn.Linear(8, 8))["torch.compile"][1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = found(nn.Linear(8, 8))["CUDA Graph"][1]
    assert reason == "not applicable: the model is on cpu; let the factory build it on cuda"


def test_lossy_steps_are_named_and_not_tried():
    steps = found(nn.Linear(8, 8), allow_lossy=False)
    assert all("allow_lossy" in steps[name][1] for name in ("BF16", "FP16"))


@pytest.mark.parametrize(
    ("cpus", "threads", "names"),
    [(1, 1, ["threads"]), (2, 2, ["1 thread"]), (2, 1, ["2 threads"]), (8, 8, ["4 threads", "1 thread"])],
)
def test_numbers_of_threads(monkeypatch, cpus, threads, names):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    assert [name for name in found(nn.Linear(8, 8), threads=threads) if "thread" in name] == names


def test_on_a_gpu_every_step_is_tried(cuda):
    steps = found(nn.Conv2d(8, 8, 2, 2), torch.randn(1, 8, 4, 4), device=cuda)
    assert {name for name, (_, reason) in steps.items() if reason} == {"SDPA", "threads"}
    assert 'mode="reduce-overhead"' in steps["torch.compile"][0].model[0]
    kept = with_step((), steps["torch.compile"][0])
    assert "replays CUDA graphs already" in conflict(kept, steps["CUDA Graph"][0])
    assert conflict(with_step((), steps["linearize"][0]), steps["CUDA Graph"][0]) == ""


def test_the_audit_comes_before_float16(cuda):
    class Large(nn.Linear):
        def forward(self, x):
            return super().forward(x * 1e5)

    steps = found(Large(8, 8), device=cuda)
    assert steps["FP16"][1].startswith("not tried: audit of its range: overflow at") and steps["BF16"][1] == ""


def test_attention_of_transformers():
    tower = vision_tower("tiny")
    assert found(tower)["SDPA"][1] == "not applicable: the model uses it already"
    tower.set_attn_implementation("eager")
    step, reason = found(tower)["SDPA"]
    assert reason == "" and step.model == ('model.set_attn_implementation("sdpa")',)
    step, _ = found(nn.ModuleDict({"tower": tower}))["SDPA"]
    assert step.model == ('model.get_submodule("tower").set_attn_implementation("sdpa")',)
    execute((step,), nn.ModuleDict({"tower": tower}))
    assert tower.config._attn_implementation == "sdpa"


def test_attention_written_by_hand_is_sent_to_its_recipe():
    class Unswitchable(nn.Module):
        _supports_sdpa = False

        def __init__(self):
            super().__init__()
            self.config = type("Config", (), {"_attn_implementation": "eager"})()

        def set_attn_implementation(self, name):
            raise AssertionError("it cannot")

    said = found(nn.MultiheadAttention(8, 2))["SDPA"][1]
    assert "set_attn_implementation of transformers" in said and "written by hand: recipe 03" in said
    assert found(Unswitchable())["SDPA"][1] == "not applicable: the attention of Unswitchable has no SDPA to switch to"


def test_attention_of_diffusers():
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    model = vae("tiny")
    assert found(model)["SDPA"][1] == "not applicable: the model uses it already"
    for processor in ("set_attn_processor",):
        getattr(model, processor)(AttnProcessor())
    step, reason = found(model)["SDPA"]
    assert reason == "" and step.model == ("model.set_attn_processor(AttnProcessor2_0())",)
    execute((step,), model)
    assert {type(one) for one in model.attn_processors.values()} == {AttnProcessor2_0}


def test_looking_at_a_model_changes_nothing():
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4)).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found(model, torch.randn(1, 3, 8, 8))
    assert type(model[0]) is nn.Conv2d and all(torch.equal(before[k], v) for k, v in model.state_dict().items())


# ---------------------------------------------------------------------------------------------------- code


def test_a_step_replaces_its_kind_and_brings_what_it_needs(cuda):
    steps = {
        name: step for name, (step, _) in found(nn.Conv2d(8, 8, 2, 2), torch.randn(1, 8, 4, 4), device=cuda).items()
    }
    stack = with_step(with_step((), steps["FP16"]), steps["torch.compile"])
    assert [step.name for step in stack] == ["FP16", "torch.compile", "inference mode"]
    assert [step.name for step in with_step(stack, steps["BF16"])] == ["BF16", "torch.compile", "inference mode"]
    assert with_step(stack, INFERENCE) == stack


def test_every_stack_is_python(cuda):
    steps = found(nn.Conv2d(8, 8, 2, 2), torch.randn(1, 8, 4, 4), device=cuda)
    stack = ()
    for step, reason in steps.values():
        if reason:
            continue
        stack = with_step(stack, step)
        for text in (source(stack), source((step,)), source(stack, "from a.b import c\nmodel, _ = c()")):
            tree = ast.parse(text)
            assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)][-1] == "run"
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
            assert {"torch", *imported} >= names & {"torch", "linearize", "tree_map", "tree_flatten", "tree_unflatten"}
            assert ("import torch" in text) == ("torch" in names)
            assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("target", "pair", "text"),
    [
        ("a.b:c", False, "from a.b import c\nmodel = c()"),
        ("a:C.make", True, "from a import C\nmodel, _ = C.make()"),
        ("a:model", False, "from a import model as factory\nmodel = factory()"),
        (None, False, "model = factory()"),
    ],
)
def test_how_the_model_is_made(target, pair, text):
    assert model_code(target, pair) == text


def test_what_another_process_can_import():
    assert target_of(found) == f"{__name__}:found"
    assert target_of(lambda: 0) is None and target_of(nn.Linear(1, 1)) is None


def test_the_cuda_graph_replays_on_new_inputs(monkeypatch, cuda):
    """Without a GPU: a graph that knows how to run again what was called while it was recorded."""
    recorded = []

    class Net(nn.Linear):
        def forward(self, x, scale=1.0):
            result = super().forward(x) * scale
            if recording:
                recorded.append(lambda: result.copy_(nn.Linear.forward(self, x) * scale))
            return result

    class Graph:
        def replay(self):
            for again in recorded:
                again()

    recording = []

    @contextmanager
    def record(graph):
        recording.append(graph)
        yield
        recording.clear()

    class Stream:
        def wait_stream(self, other):
            pass

    @contextmanager
    def on(stream):
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    model = Net(8, 8).eval()
    step, _ = found(model, device=cuda)["CUDA Graph"]
    run = execute(with_step((), step), model)
    for _ in range(3):
        x = torch.randn(2, 8)
        assert torch.allclose(run(x, scale=2.0), 2 * nn.Linear.forward(model, x))
    assert len(recorded) == 1
