"""The techniques that `prescribe` tries, in order, and why one does not apply to a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from .dynamic_range import audit
from .linearize import linearize, restore
from .machine import has_compiler, has_triton
from .prescribe_code import Stack, Step
from .prescribe_switches import matmul_precision

PACKAGE = __package__  # "utils", or the name that a team gave the folder
NOT_APPLICABLE, NOT_MEASURABLE, NOT_TRIED = "not applicable", "not measurable here", "not tried"
HALVES = (torch.float16, torch.bfloat16)
INFERENCE = Step("inference mode", place=90, inference=True)
# What `skip` may name, in the order of the trials; "threads" is every number of them.
NAMES = (
    *("inference mode", "linearize", "SDPA", "channels_last", "torch.compile", "threads"),
    *("TF32", "BF16", "FP16", "cudnn.benchmark", "CUDA Graph"),
)


@dataclass(frozen=True)
class Facts:
    """What is known of a user's model: one instance of it, one set of inputs, and where it runs."""

    model: nn.Module
    args: tuple
    kwargs: Mapping[str, Any]
    device: torch.device
    threads: int
    allow_lossy: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


Trial = tuple[Step, str]  # a step, and why it is not tried ("" when it is)


def trials(facts: Facts) -> list[Trial]:
    """Every step in the order of the waterfall."""
    found: list[Trial] = [(INFERENCE, ""), _linearize(facts), _sdpa(facts), _channels_last(facts), _compile(facts)]
    found += _threads(facts)
    found += [_tf32(facts), _half(facts, torch.bfloat16), _half(facts, torch.float16)]
    return [*found, _cudnn_benchmark(facts), _cuda_graph(facts)]


def conflict(stack: Stack, step: Step) -> str:
    """Why a step has no place on a stack of kept ones ("" where it has)."""
    if step.graph and any("reduce-overhead" in line for kept in stack for line in kept.model):
        return f"{NOT_APPLICABLE}: torch.compile in mode reduce-overhead replays CUDA graphs already"
    return ""


def _convolutions(model: nn.Module) -> list[_ConvNd]:
    return [part for part in model.modules() if isinstance(part, _ConvNd)]


def _linearize(facts: Facts) -> Trial:
    step = Step(
        "linearize", place=10, imports=(f"from {PACKAGE}.linearize import linearize",), model=("linearize(model)",)
    )
    found = linearize(facts.model)
    restore(facts.model)
    if not found:
        return step, f"{NOT_APPLICABLE}: no convolution"
    if not any(rewrite.converted for rewrite in found):
        return step, f"{NOT_APPLICABLE}: no convolution is a matrix product; {found[0].path}: {found[0].reason}"
    return step, ""


def _sdpa(facts: Facts) -> Trial:
    """Scaled dot product attention, through the switch that transformers or diffusers gives a model."""
    lines, imports, fused, switchable = [], [], False, ""
    for path, part in _outermost(facts.model, "set_attn_implementation"):
        switchable = switchable or type(part).__name__
        config = getattr(part, "config", None)
        now = getattr(config, "_attn_implementation", None)
        fused |= now in ("sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
        if now == "eager" and getattr(part, "_supports_sdpa", True):
            lines.append(f'{_at(path)}.set_attn_implementation("sdpa")')
    for path, part in _outermost(facts.model, "set_attn_processor"):
        switchable = switchable or type(part).__name__
        kinds = {type(processor).__name__ for processor in getattr(part, "attn_processors", {}).values()}
        fused |= any("2_0" in kind or "SDPA" in kind for kind in kinds)
        if kinds == {"AttnProcessor"}:
            lines.append(f"{_at(path)}.set_attn_processor(AttnProcessor2_0())")
            imports = ["from diffusers.models.attention_processor import AttnProcessor2_0"]
    step = Step("SDPA", place=20, imports=tuple(imports), model=tuple(lines))
    if lines:
        return step, ""
    if fused:
        return step, f"{NOT_APPLICABLE}: the model uses it already"
    if switchable:
        return step, f"{NOT_APPLICABLE}: the attention of {switchable} has no SDPA to switch to"
    return step, (
        f"{NOT_APPLICABLE}: no attention that can be switched was found (set_attn_implementation of transformers, "
        "set_attn_processor of diffusers); attention written by hand: recipe 03 shows how to replace it"
    )


def _outermost(model: nn.Module, method: str) -> list[tuple[str, nn.Module]]:
    """(path, module) of the modules with a method that lie in no other one with it."""
    found: list[tuple[str, nn.Module]] = []
    for path, part in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer, _ in found)
        if not inside and callable(getattr(part, method, None)):
            found.append((path, part))
    return found


def _at(path: str) -> str:
    return f'model.get_submodule("{path}")' if path else "model"


def _channels_last(facts: Facts) -> Trial:
    step = Step(
        "channels_last",
        place=40,
        model=("model = model.to(memory_format=torch.channels_last)",),
        inputs=("if x.dim() == 4:", "    x = x.contiguous(memory_format=torch.channels_last)"),
    )
    found = _convolutions(facts.model)
    if any(conv.weight.dim() == 4 for conv in found):
        return step, ""
    return step, f"{NOT_APPLICABLE}: no {'2-D ' * bool(found)}convolution"


def _compile(facts: Facts) -> Trial:
    line = 'model = torch.compile(model, mode="reduce-overhead")' if facts.cuda else "model = torch.compile(model)"
    step = Step("torch.compile", place=80, brings=(INFERENCE,), model=(line,))
    if facts.cuda and not has_triton():
        return step, f"{NOT_MEASURABLE}: needs Triton (pip install triton)"
    if not facts.cuda and not has_compiler():
        return step, f"{NOT_MEASURABLE}: needs a C++ compiler and Python's headers (apt-get install g++ python3-dev)"
    return step, ""


def _threads(facts: Facts) -> list[Trial]:
    """Other numbers of threads: one, half as many, and all processors."""
    if facts.cuda:
        return [(Step("threads", place=0), f"{NOT_APPLICABLE}: the model is on {facts.device}")]
    counts = thread_counts(facts.threads)
    if not counts:
        return [(Step("threads", place=0), f"{NOT_APPLICABLE}: one thread is all there is")]
    return [(Step(name, place=0, group="threads", switch=("threads", n)), "") for name, n in counts.items()]


def thread_counts(now: int) -> dict[str, int]:
    """Name of the step → number of threads, where so many are in use now."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = sorted({1, now // 2, cpus} - {0, now}, reverse=True)
    return {f"{count} thread{'s' * (count != 1)}": count for count in counts}


def _needs_cuda(facts: Facts) -> str:
    if facts.cuda:
        return ""
    if torch.cuda.is_available():
        return f"{NOT_APPLICABLE}: the model is on {facts.device}; let the factory build it on cuda"
    return f"{NOT_MEASURABLE}: needs an NVIDIA GPU"


def _lossy(facts: Facts) -> str:
    return "" if facts.allow_lossy else f"{NOT_TRIED}: it changes the result; allow it with allow_lossy"


def _weights_are(facts: Facts) -> str:
    """Why a narrower type is no step for this model."""
    dtypes = {parameter.dtype for parameter in facts.model.parameters()}
    if torch.float32 in dtypes:
        return ""
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
    return f"{NOT_APPLICABLE}: the model has no float32 weights ({names})"


def _tf32(facts: Facts) -> Trial:
    step = Step("TF32", place=1, lossy=True, switch=("float32 products", "high"))
    reason = _weights_are(facts) or _needs_cuda(facts) or _lossy(facts)
    if not reason and torch.cuda.get_device_capability(facts.device) < (8, 0):
        reason = f"{NOT_APPLICABLE}: this GPU has no TF32 (Ampere and later have)"
    if not reason and matmul_precision() != "highest":
        reason = f"{NOT_APPLICABLE}: float32 products are set to less than full precision already"
    return step, reason


def _half(facts: Facts, dtype: torch.dtype) -> Trial:
    name = str(dtype).removeprefix("torch.")
    step = Step(
        {"bfloat16": "BF16", "float16": "FP16"}[name],
        place=30,
        group="dtype",
        lossy=True,
        model=(f"model = model.to({dtype})",),
        inputs=("if x.is_floating_point():", f"    x = x.to({dtype})"),
    )
    reason = _weights_are(facts) or _lossy(facts)
    if not reason and dtype is torch.float16 and not facts.cuda:
        reason = f"{NOT_APPLICABLE}: CPUs compute float16 in wider steps; BF16 is the half type here"
    return step, reason or _range_problem(facts, dtype)


def _range_problem(facts: Facts, dtype: torch.dtype) -> str:
    """What the audit of the range says against a type ("" when nothing leaves it)."""
    try:
        report = audit(facts.model, *facts.args, dtype=dtype, **facts.kwargs)
    except Exception as problem:
        return f"{NOT_TRIED}: the audit of its range failed, {type(problem).__name__}: {' '.join(str(problem).split())}"
    return "" if report else f"{NOT_TRIED}: audit of its range: {report.first}"


def _cudnn_benchmark(facts: Facts) -> Trial:
    step = Step("cudnn.benchmark", place=2, switch=("cudnn.benchmark", True))
    if not _convolutions(facts.model):
        return step, f"{NOT_APPLICABLE}: no convolution"
    reason = _needs_cuda(facts)
    if not reason and torch.backends.cudnn.benchmark:
        reason = f"{NOT_APPLICABLE}: it is on already"
    return step, reason


def _cuda_graph(facts: Facts) -> Trial:
    return Step("CUDA Graph", place=85, brings=(INFERENCE,), graph=True), _needs_cuda(facts)
