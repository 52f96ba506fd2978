"""Errors of the timing layer. Each message is one line: the wrong thing, what was expected, a way out."""

from __future__ import annotations


class BenchmarkError(Exception):
    """Base of everything that utils.timing raises about what it measures."""


class CallableFailedError(BenchmarkError):
    """A builder or a timed call raised; the original exception is `__cause__`."""


class MixedDeviceError(BenchmarkError, ValueError):
    """Tensors on several devices, or a mode that does not exist on their device."""


class MetaTensorError(BenchmarkError, ValueError):
    """A meta or fake tensor: it holds no data, so a call on it computes nothing."""


class OutputMismatchError(BenchmarkError):
    """A candidate gives another answer than the baseline (only with on_mismatch="raise")."""


class NonFiniteOutputError(OutputMismatchError):
    """NaN or infinity where the baseline is finite (only with on_mismatch="raise")."""


class NondeterministicOutputError(BenchmarkError):
    """Two equal calls (same inputs, same seed) gave different outputs."""


class InputMutationError(BenchmarkError):
    """A call changed its inputs, so later calls would do other work."""


class RecompilationError(BenchmarkError):
    """Dynamo compiled during timed calls, so the samples hold compile time."""


class EagerFallbackError(BenchmarkError):
    """A compiled function ran no compiled graph: it fell back to eager."""
