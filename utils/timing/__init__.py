"""The only clock of the project: time one function, or compare candidates with a baseline."""

from .builders import fixed
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
    RecompilationError,
)
from .measure import measure
from .results import Comparison, ComparisonRow, Measurement

__all__ = [
    "BenchmarkError",
    "CallableFailedError",
    "Comparison",
    "ComparisonRow",
    "EagerFallbackError",
    "InputMutationError",
    "Measurement",
    "MetaTensorError",
    "MixedDeviceError",
    "NonFiniteOutputError",
    "NondeterministicOutputError",
    "RecompilationError",
    "compare",
    "fixed",
    "measure",
]
