"""The few lines of code of a stack of steps. What is printed is what was measured: contenders run this very text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from .prescribe_switches import SWITCHES

CUDA_GRAPH = """\
graph = None


# The next call overwrites the result of run: clone what you keep.
{decorator}def run(*args, **kwargs):
    global graph, static, result
    given, form = tree_flatten({given})
    tensors = [x for x in given if torch.is_tensor(x)]
    if graph is None:  # the first call records; later ones need its shapes
        static = [x.clone() for x in tensors]
        fresh = iter(static)
        held = [next(fresh) if torch.is_tensor(x) else x for x in given]
        fixed_args, fixed_kwargs = tree_unflatten(held, form)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(*fixed_args, **fixed_kwargs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(*fixed_args, **fixed_kwargs)
    for mine, new in zip(static, tensors, strict=True):
        mine.copy_(new)
    graph.replay()
    return result
"""
PLAIN_CALL = """\
{decorator}def run(*args, **kwargs):
{convert}    return model(*args, **kwargs)
"""
PREPARED = """\
def prepared(x):
    if torch.is_tensor(x):
{lines}
    return x
"""
TAKEN = {"model", "run", "prepared", "graph", "static", "result", "torch", "linearize"}  # names of the code


@dataclass(frozen=True)
class Step:
    """One technique as code. `place` orders the lines of a stack, whatever the order of the trials was.

    group: at most one step of a group is in a stack. brings: steps that come with it. switch: (name, value) of
    SWITCHES. model: lines after `model = factory()`. inputs: lines in `prepared(x)`, for each input tensor.
    """

    name: str
    place: int
    group: str = ""
    brings: tuple[Step, ...] = ()
    lossy: bool = False
    imports: tuple[str, ...] = ()
    switch: tuple[str, Any] | None = None
    model: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    inference: bool = False
    graph: bool = False


Stack = tuple[Step, ...]


def with_step(stack: Stack, step: Step) -> Stack:
    """The stack with a step and what it brings, in the order of the code."""
    added = {one.name: one for one in (step, *step.brings)}
    stays = [one for one in stack if one.name not in added and not (one.group and one.group == step.group)]
    return tuple(sorted([*stays, *added.values()], key=lambda one: one.place))


def switches_of(stack: Stack) -> dict[str, Any]:
    return dict(step.switch for step in stack if step.switch)


def source(stack: Stack, model_code: str = "model = factory()") -> str:
    """Source text that defines `run(*args, **kwargs)`. `model_code`: lines that make `model`, imports first."""
    given = model_code.strip().splitlines()
    imports = [line for line in given if line.startswith(("from ", "import "))]
    uses_torch = any(step.switch or step.inputs or step.inference or step.graph for step in stack)
    uses_torch |= any("torch." in line for step in stack for line in step.model)
    tree = ["tree_map"] if any(step.inputs for step in stack) else []
    if any(step.graph for step in stack):
        tree += ["tree_flatten", "tree_unflatten"]
    found = sorted({line for step in stack for line in step.imports} | set(imports))
    head = ["import torch"] * uses_torch
    head += [f"from torch.utils._pytree import {', '.join(sorted(tree))}"] * bool(tree) + found
    switches = [SWITCHES[name].line.format(value) for name, value in switches_of(stack).items()]
    model = [*(line for line in given if line not in imports), *(line for step in stack for line in step.model)]
    parts = ["\n".join([*head, *[""] * bool(head), *switches, *model])]
    text = "\n\n\n".join([*parts, *_functions(stack)])
    return re.sub(r"\n{4,}", "\n\n\n", text).rstrip() + "\n"


def _functions(stack: Stack) -> list[str]:
    decorator = "@torch.inference_mode()\n" * any(step.inference for step in stack)
    lines = [line for step in stack for line in step.inputs]
    graph = any(step.graph for step in stack)
    parts, call = [], "tree_map(prepared, (args, kwargs))" if lines else "(args, kwargs)"
    if lines:
        body = "\n".join(f"        {line}" for line in lines)
        parts.append(PREPARED.format(lines=body))
    if graph:
        return [*parts, CUDA_GRAPH.format(decorator=decorator, given=call)]
    convert = f"    args, kwargs = {call}\n" if lines else ""
    return [*parts, PLAIN_CALL.format(decorator=decorator, convert=convert)]


def execute(stack: Stack, model: nn.Module) -> Callable[..., Any]:
    """Run the text of a stack, without its switches, on a model that is there already; returns its `run`."""
    unswitched = tuple(step for step in stack if not step.switch)
    namespace: dict[str, Any] = {"__name__": "prescribed", "factory": lambda: model}
    exec(compile(source(unswitched), "<prescribed>", "exec"), namespace)
    return namespace["run"]


def model_code(target: str | None, gives_inputs: bool = False) -> str:
    """Code that makes `model` from "package.module:function"; None: a function `factory` that is there already.

    gives_inputs: the function returns (model, inputs).
    """
    module, _, path = (target or ":factory").partition(":")
    name, dot, rest = path.partition(".")
    imported, called = name, path
    if name in TAKEN:
        imported, called = f"{name} as factory", f"factory{dot}{rest}"
    call = f"{'model, _' if gives_inputs else 'model'} = {called}()"
    return f"from {module} import {imported}\n{call}" if module else call


def target_of(factory: Any) -> str | None:
    """ "package.module:function" of a function that another process can import, else None."""
    module, path = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    importable = module not in (None, "__main__") and path.replace(".", "").isidentifier()
    return f"{module}:{path}" if importable else None
