"""Proof that the check of `prescribe` can fail: outputs that are wrong on purpose go through the same comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .equivalence import Equivalence, declared_lossy
from .prescribe_arguments import check_on_output
from .prescribe_subject import PrescribeError
from .timing import BenchmarkError, compare, guards

OFF = {"exact": 0.01, "half": 0.1}  # by how much every number is off: full types, and 16-bit types or lossy steps
LEAST_DECIBELS = 30.0  # the error has 3 % of the size of the output
MOST_DECIBELS = 300.0  # no difference at all
LOST = 16  # one part in so many of the values is lost, the largest ones


def signal_to_noise(at_least: float = LEAST_DECIBELS) -> Callable[[Any, Any], Equivalence]:
    """The metric of lossy steps unless another one is declared: the worst ratio over all output tensors."""
    return declared_lossy(_worst_decibels, at_least=at_least, name="signal-to-noise ratio in dB")


def _worst_decibels(actual: Any, expected: Any) -> float:
    """20 log10(rms(expected) / rms(actual - expected)), the least of all floating tensors."""
    found = []
    for a, e in zip(guards.tensors(actual), guards.tensors(expected), strict=True):
        if e.is_floating_point() or e.is_complex():
            a, e = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, e))
            noise, signal = (a - e).abs().square().mean().sqrt().item(), e.abs().square().mean().sqrt().item()
            if noise:
                found.append(20 * math.log10(signal / noise) if signal else -MOST_DECIBELS)
            else:
                found.append(MOST_DECIBELS)
    return min(found, default=-MOST_DECIBELS)


def scaled(output: Any, share: float) -> Any:
    """Every number off by a share of itself; whole numbers off by one."""

    def off(x: torch.Tensor) -> torch.Tensor:
        x = x.detach()
        if x.dtype is torch.bool:
            return ~x
        return x * (1 + share) if x.is_floating_point() or x.is_complex() else x + 1

    return guards.map_tensors(off, output)


def with_loss(output: Any) -> Any:
    """The largest sixteenth of the values of every tensor is zero, as where a kernel forgets a block."""

    def lose(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x
        if x.dtype is torch.bool:
            return ~x
        flat = x.detach().clone().flatten()
        flat[flat.abs().topk(-(-flat.numel() // LOST)).indices] = 0
        return flat.view(x.shape)

    return guards.map_tensors(lose, output)


def _indistinct(output: Any) -> str:
    """Why a wrong output looks like this one: what its values are, or how small."""
    wide = [x.detach().to(torch.complex128 if x.is_complex() else torch.float64) for x in guards.tensors(output)]
    values = torch.cat([x.abs().flatten() for x in wide])
    if not values.numel():
        return "the output has no values"
    finite = values[values.isfinite()]
    largest = finite.max().item() if len(finite) else 0.0
    if largest:
        return f"its largest value is {largest:.3g}; is rtol or atol too wide for it?"
    kinds = {"0": len(finite), "NaN": values.isnan().any(), "infinite": values.isinf().any()}
    return f"every value of the output is {' or '.join(kind for kind, there in kinds.items() if there)}"


def check_controls(
    builder: Callable[..., Callable[[], Callable]],
    make_inputs: Callable[[int], Any],
    reference: Callable | None,
    lossy: Callable[[Any, Any], Equivalence],
    options: dict[str, Any],
    steps: list,
) -> str:
    """Run plain against plain with a wrong output; each must come out as `invalid`. Returns what was found, in words.

    Raises PrescribeError where a wrong output passes, or where the plain call itself cannot be compared.
    """
    output = builder(())()(*make_inputs(0))
    tries_lossy = any(step.lossy and not reason for step, reason in steps)
    if tries_lossy:
        check_on_output(lossy, scaled(output, OFF["half"]), output)
    dtypes = {tensor.dtype for tensor in guards.tensors(output)}
    del output
    share = OFF["half"] if dtypes & {torch.float16, torch.bfloat16} else OFF["exact"]
    wrong = {
        f"{100 * share:.0f} % off": lambda output: scaled(output, share),
        f"1/{LOST} of the values lost": with_loss,
    }
    lossy_off = f"{100 * OFF['half']:.0f} % off, lossy"
    if tries_lossy:
        wrong |= {lossy_off: lambda output: scaled(output, OFF["half"]), "values lost, lossy": with_loss}
    try:
        found = compare(
            builder(()),
            {name: builder((), after) for name, after in wrong.items()},
            make_inputs=make_inputs,
            label="plain",
            grad_mode="enabled",
            reference=reference,
            lossy={name: lossy for name in wrong if name.endswith("lossy")},
            **options | {"replicates": 1, "min_run_time": 0.01},
        )
    except BenchmarkError as problem:
        raise PrescribeError(f"the model cannot be compared: {problem}") from problem
    except (TypeError, ValueError) as problem:  # a tolerance, a number of replicates
        raise PrescribeError(" ".join(str(problem).split())) from problem
    for row in found:
        if row.verdict == "error":
            raise PrescribeError(f"the model cannot be compared: {row.error}")
    missed = [row.label for row in found if row.verdict != "invalid"]
    exact = [name for name in missed if not name.endswith("lossy")]
    if exact:
        reason = _indistinct(builder(())()(*make_inputs(0)))
        raise PrescribeError(f"the check does not find a wrong output ({exact[0]}): {reason}")
    if tries_lossy and len(missed) == 2:
        raise PrescribeError("lossy: the metric does not find a wrong output (10 % off, or a sixteenth of it lost)")
    names = [name for name in wrong if not name.endswith("lossy")]
    return f"outputs that are wrong on purpose ({', '.join(names)}) fail the check" + (
        ", and that of the lossy steps" if tries_lossy else ""
    )
