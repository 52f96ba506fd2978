"""The only clock of the project: time one function, compare candidates with a baseline, count what set-up costs."""

from .builders import fixed
from .cold_start import BreakEven, ColdRun, ColdStart, break_even, cold_start
from .compare import compare
from .errors import (
    BenchmarkError,
    CallableFailedError,
    EagerFallbackError,
    InputMutationError,
    MetaTensorError,
    MixedDeviceError,
    NondeterministicOutputError,
    NonFiniteOutputError,
    OutputMismatchError,
    RecompilationError,
)
from .measure import measure
from .results import Comparison, ComparisonRow, Measurement

__all__ = [
    "BenchmarkError",
    "BreakEven",
    "CallableFailedError",
    "ColdRun",
    "ColdStart",
    "Comparison",
    "ComparisonRow",
    "EagerFallbackError",
    "InputMutationError",
    "Measurement",
    "MetaTensorError",
    "MixedDeviceError",
    "NonFiniteOutputError",
    "NondeterministicOutputError",
    "OutputMismatchError",
    "RecompilationError",
    "break_even",
    "cold_start",
    "compare",
    "fixed",
    "measure",
]
