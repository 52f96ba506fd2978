import dataclasses
from collections import OrderedDict, namedtuple
from typing import NamedTuple

import numpy as np
import pytest
import torch

from utils import tensor_difference
from utils.equivalence import check_equivalence, declared_lossy


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


X = draw(6, 5)


# ------------------------------------------------------------------------------------------------ wrong outputs


def with_value(value, index=(2, 3)):
    changed = X.clone()
    changed[index] = value
    return changed


WRONG = {
    "zeros": torch.zeros_like(X),
    "one wrong value": with_value(9.0),
    "nan": with_value(float("nan")),
    "inf": with_value(float("inf")),
    "transposed": X.T,
    "same values in another shape": X.reshape(5, 6),
    "broadcastable": X[:1],
    "scalar": X[0, 0],
    "permuted": X.flip(0),
    "scaled by 1.01": X * 1.01,
    "sign": -X,
    "integers": X.to(torch.int64),
    "complex": X.to(torch.complex64),
    "in a list": [X],
    "none": None,
    "number": 1.0,
    "text": "x",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_output_is_different(name):
    found = check_equivalence(WRONG[name], X)
    assert not found and found.rule == "different" and not found.equivalent
    assert str(found).startswith("different: ") and "\n" not in str(found)


@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if isinstance(wrong, torch.Tensor)])
def test_wrong_output_is_different_with_a_reference_too(name):
    assert not check_equivalence(WRONG[name], X, reference=X.double())


@pytest.mark.parametrize("name", ["zeros", "nan", "transposed", "scaled by 1.01"])
def test_wrong_output_is_different_as_the_expected_one(name):
    assert not check_equivalence(X, WRONG[name])


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-9, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zeros_are_caught_however_small_the_right_values_are(scale, dtype):
    small = (X.double() * scale).to(dtype)
    assert not check_equivalence(torch.zeros_like(small), small)
    assert not check_equivalence(small * 0.5, small)
    assert check_equivalence(small * (1 + torch.finfo(dtype).eps), small)


def test_zeros_for_a_softmax_over_a_large_vocabulary():
    right = torch.softmax(draw(1, 200_000), -1)
    assert right.max() < 1e-3
    assert not check_equivalence(torch.zeros_like(right), right)
    assert check_equivalence(right + 1e-12, right)


def test_the_reason_names_place_value_and_what_was_expected():
    found = check_equivalence([{"logits": with_value(9.0)}], [{"logits": X}])
    assert found.reason.startswith(f"[0]['logits'] at (2, 3): 9, expected {X[2, 3]:.6g}; 1 of 30 values differ")
    assert found.max_abs == pytest.approx(9 - X[2, 3].item())
    assert found.rmse == pytest.approx((9 - X[2, 3].item()) / 30**0.5)


def test_the_worst_value_is_named_not_the_first():
    wrong = X.clone()
    wrong[0, 0] += 1
    wrong[4, 1] += 3
    assert "at (4, 1)" in check_equivalence(wrong, X).reason


def test_large_tensors_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr(tensor_difference, "_CHUNK", 7)
    for index in [(0, 0), (1, 1), (1, 2), (5, 4)]:
        found = check_equivalence(with_value(9.0, index), X)
        assert not found and f"at {index}" in found.reason
        broken = check_equivalence(with_value(float("nan"), index), X)
        assert f"at {index}: nan" in broken.reason and broken.max_abs == float("inf")
    two = with_value(9.0, (0, 0))
    two[5, 4] = 99.0
    assert "at (5, 4)" in check_equivalence(two, X).reason
    whole = check_equivalence(X + 1e-7, X)
    monkeypatch.setattr(tensor_difference, "_CHUNK", 1 << 22)
    one = check_equivalence(X + 1e-7, X)
    assert (whole.rule, whole.max_abs, whole.max_rel) == (one.rule, one.max_abs, one.max_rel) and one.rule == "close"
    assert whole.rmse == pytest.approx(one.rmse)


# ------------------------------------------------------------------------------------------------ rules


def test_bitwise_means_the_same_bits():
    assert check_equivalence(X.clone(), X).rule == "bitwise"
    nearly = X.clone()
    nearly.view(torch.int32)[0, 0] += 1
    found = check_equivalence(nearly, X)
    assert found and found.rule == "close" and found.max_abs > 0
    assert check_equivalence(-torch.zeros(3), torch.zeros(3)).rule == "close"
    quiet, signed = torch.tensor([float("nan"), 1.0]), torch.tensor([-float("nan"), 1.0])
    signed.view(torch.int32)[0] |= 1  # another NaN is still NaN
    assert not torch.equal(quiet.view(torch.int32), signed.view(torch.int32))
    assert check_equivalence(signed, quiet).rule == "bitwise"
    assert check_equivalence(X.T.contiguous().T, X).rule == "bitwise"  # strides are not values


@pytest.mark.parametrize("dtype", list(tensor_difference._TOLERANCES))
def test_default_tolerances_are_those_of_torch(dtype):
    from torch.testing._comparison import default_tolerances

    assert tensor_difference._TOLERANCES[dtype] == default_tolerances(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_close_agrees_with_torch_at_ordinary_sizes(dtype, factor):
    rtol, atol = tensor_difference._TOLERANCES[dtype]
    right = (X.abs() + 1).to(dtype)
    wrong = (right.double() + factor * (atol + rtol * right.double())).to(dtype)
    try:
        torch.testing.assert_close(wrong, right)
        torch_says = True
    except AssertionError:
        torch_says = False
    assert bool(check_equivalence(wrong, right)) is torch_says is (factor < 1)


def test_the_looser_dtype_decides_and_is_said():
    for pair in [(X.bfloat16(), X), (X, X.bfloat16()), (X.bfloat16(), X.double())]:
        found = check_equivalence(*pair)
        assert found and found.rule == "close" and found.dtype == "bfloat16"
        assert "bfloat16 against float" in found.reason or "against bfloat16" in found.reason
    assert not check_equivalence((X * 1.05).bfloat16(), X)
    assert not check_equivalence(X * 1.001, X)  # accepted if the tolerance of bfloat16 leaked into float32


def test_the_weakest_rule_of_all_places_is_the_rule():
    found = check_equivalence({"a": X.clone(), "b": X + 1e-6}, {"a": X, "b": X})
    assert found and found.rule == "close"
    assert check_equivalence({"a": X.clone(), "b": X + 1}, {"a": X, "b": X}).rule == "different"


def matmul_pair(n, k, dtype):
    a, b = draw(n, k, seed=1, dtype=dtype), draw(k, n, seed=2, dtype=dtype)
    right = a.double() @ b.double()
    return right, right.to(torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("factor", [0.5, 1.9, 2.5, 3.5, 30.0])
def test_rounding_is_the_rule_of_torch_dynamo(dtype, n, factor):
    from torch._dynamo.utils import same

    reference = draw(n, n, seed=3, dtype=torch.float64)
    error = 0.05 * draw(n, n, seed=4, dtype=torch.float64)
    expected = (reference + error).to(dtype)
    actual = (reference + factor * error).to(dtype)
    found = check_equivalence(actual, expected, reference=reference)
    assert bool(found) is same(expected, actual, fp64_ref=reference, log_error=lambda *args: None)
    multiplier = 3 if dtype == torch.bfloat16 or n * n < 1000 else 2
    assert found.rule == ("rounding" if factor < multiplier else "different")


def test_rounding_needs_a_reference_and_says_both_errors():
    reference, expected = matmul_pair(40, 300, torch.bfloat16)
    actual = (reference * (1 + 2e-2 * draw(40, 40, seed=9, dtype=torch.float64).sign())).to(torch.bfloat16)
    assert not check_equivalence(actual, expected)
    near = (expected.double() + (expected.double() - reference)).to(torch.bfloat16)
    found = check_equivalence(near, expected, reference=reference, rtol=1e-6)
    assert found.rule == "rounding" and "rmse to float64" in found.reason


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_rounding_refuses_zeros_even_where_the_baseline_is_poor(scale):
    reference = draw(50, 50, dtype=torch.float64) * scale
    poor = (reference * (1 + 0.8 * draw(50, 50, seed=5, dtype=torch.float64))).float()
    found = check_equivalence(torch.zeros(50, 50), poor, reference=reference)
    assert not found and "too far from float64" in found.reason
    good = reference.float()
    assert not check_equivalence(torch.zeros(50, 50), good, reference=reference)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_lets_nothing_pass(bad):
    reference = torch.full((6, 5), bad, dtype=torch.float64)
    found = check_equivalence(X + 1, X, reference=reference)
    assert not found and "the reference is not finite" in found.reason


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (X, "reference at output is of float32; expected float64"),
        (X.double().T, "reference at output has shape"),
        (3.0, "reference at output is 3.0"),
    ],
)
def test_a_wrong_reference_is_an_error(reference, message):
    with pytest.raises(ValueError, match=message):
        check_equivalence(X, X, reference=reference)
    with pytest.raises(ValueError, match="structure of the expected output"):
        check_equivalence([X], [X], reference=X.double())


# ------------------------------------------------------------------------------------------------ tolerances


@pytest.mark.parametrize(
    ("tolerance", "error", "message"),
    [
        ({"rtol": 1.0}, ValueError, "rtol=1.0 would accept an output of zeros"),
        ({"rtol": float("inf")}, ValueError, "rtol=inf; expected a finite number"),
        ({"atol": float("inf")}, ValueError, "atol=inf; expected a finite number"),
        ({"atol": float("nan")}, ValueError, "atol=nan"),
        ({"rtol": -1e-3}, ValueError, "rtol=-0.001"),
        ({"atol": True}, TypeError, "atol=True is of type bool"),
        ({"atol": "1"}, TypeError, "atol='1' is of type str"),
    ],
)
def test_tolerances_that_accept_everything_are_refused(tolerance, error, message):
    with pytest.raises(error, match=message):
        check_equivalence(X, X, **tolerance)


def test_an_absolute_tolerance_above_the_values_is_a_reported_failure():
    found = check_equivalence(X + 1e-3, X, atol=100)
    assert not found and "would accept zeros" in found.reason and "atol=100" in found.reason
    assert not check_equivalence(X, X, atol=100)  # equal or not, the check would prove nothing
    assert check_equivalence(X + 1e-3, X, atol=2e-3)


def test_given_tolerances_replace_the_defaults():
    assert not check_equivalence(X + 1e-3, X) and not check_equivalence(X + 1e-7, X, atol=0, rtol=1e-12)
    assert check_equivalence(X * 1.01, X, rtol=0.02)


def test_noise_around_zero_may_be_declared():
    noise, other = draw(20) * 1e-9, draw(20, seed=1) * 1e-9
    found = check_equivalence(other, noise)
    assert not found and "give reference= or atol=" in found.reason
    assert check_equivalence(other, noise, atol=1e-6)
    assert check_equivalence(other, torch.zeros(20))  # zeros are right: the plain atol of torch holds
    assert not check_equivalence(other + 1, torch.zeros(20))


# ------------------------------------------------------------------------------------------------ special values


def test_nan_and_inf_at_equal_places_are_allowed_and_said():
    both = with_value(float("nan"))
    both[0, 0] = float("-inf")
    found = check_equivalence(both.clone(), both)
    assert found.rule == "bitwise" and "2 of 30 values are NaN or inf in both" in found.reason
    near = check_equivalence(both + 1e-7, both)
    assert near.rule == "close" and "2 of 30" in near.reason and near.max_abs < 1e-6
    assert not check_equivalence(-both, both)
    assert not check_equivalence(X, both)
    assert not check_equivalence(with_value(float("nan"), (0, 0)), with_value(float("nan"), (1, 1)))


def test_two_notes_on_one_tensor_are_both_said():
    both = with_value(float("nan"))
    found = check_equivalence(both.bfloat16(), both)
    assert "1 of 30 values are NaN or inf in both" in found.reason and "bfloat16 against float32" in found.reason


def test_a_non_finite_value_is_named_before_a_larger_finite_error():
    wrong = with_value(float("nan"))
    wrong[0, 0] = 1e30
    found = check_equivalence(wrong, X, reference=X.double())
    assert "at (2, 3): nan, expected" in found.reason and found.max_abs == float("inf")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint16, torch.bool])
def test_whole_numbers_are_exact(dtype):
    right = torch.tensor([0, 1, 1, 0]).to(dtype)
    wrong = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert check_equivalence(right.clone(), right).rule == "bitwise"
    found = check_equivalence(wrong, right, rtol=0.9, atol=5)
    assert not found and "at (2,)" in found.reason


def test_whole_numbers_beyond_float64_are_exact():
    big = torch.tensor([2**60, 2**62])
    assert not check_equivalence(big + 1, big)
    assert check_equivalence(big.clone(), big)
    assert not check_equivalence(big.int(), big) and not check_equivalence(big.bool(), big)


def test_complex_values():
    z = torch.complex(X, X.flip(0))
    assert check_equivalence(z.clone(), z).rule == "bitwise"
    assert check_equivalence(z * (1 + 1e-7), z).rule == "close"
    assert not check_equivalence(z.conj(), z) and not check_equivalence(z * 1j, z)
    assert check_equivalence(z.conj().resolve_conj(), z.conj()).rule == "bitwise"
    assert check_equivalence(z.to(torch.complex128), z).dtype == "complex64"


def test_empty_tensors_agree_by_shape():
    found = check_equivalence(torch.empty(0, 3), torch.empty(0, 3))
    assert found and "no values were compared" in found.reason and found.max_abs is None
    assert not check_equivalence(torch.empty(3, 0), torch.empty(0, 3))
    assert not check_equivalence(torch.empty(0), torch.zeros(1))


@pytest.mark.filterwarnings("ignore")  # torch 2.13 deprecates quantized tensors
def test_sparse_quantized_and_nested_tensors_are_compared_by_value():
    sparse = torch.eye(4).to_sparse()
    assert check_equivalence(sparse, torch.eye(4)) and not check_equivalence(sparse * 2, torch.eye(4).to_sparse())
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    assert check_equivalence(quantized, quantized.dequantize())
    assert not check_equivalence(quantized, X)
    nested = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)
    assert check_equivalence(nested, torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged))
    assert not check_equivalence(nested, torch.nested.nested_tensor([X, X[1:3]], layout=torch.jagged))
    assert not check_equivalence(X, nested)


def test_float8_has_no_tolerance():
    right = X.to(torch.float8_e4m3fn)
    assert check_equivalence(right.clone(), right).rule == "bitwise"
    assert not check_equivalence((X * 1.2).to(torch.float8_e4m3fn), right)


def test_tensors_without_values_are_an_error():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(ValueError, match=r"actual at \[0\] is a meta or fake tensor"):
        check_equivalence([X.to("meta")], [X])
    with FakeTensorMode():
        fake = torch.empty(6, 5)
    with pytest.raises(ValueError, match="expected at output is a meta or fake"):
        check_equivalence(X, fake)


def test_another_device_is_a_difference():
    class Elsewhere(torch.Tensor):  # a CPU test of what a CUDA output would give
        device = torch.device("cuda:0")

    found = check_equivalence(X.as_subclass(Elsewhere), X)
    assert not found and "is on cuda:0, expected cpu" in found.reason


def test_gradients_and_parameters_do_not_matter():
    parameter = torch.nn.Parameter(X.clone())
    assert check_equivalence(parameter, X) and check_equivalence(parameter * 1, parameter)
    assert parameter.grad is None and parameter.requires_grad


# ------------------------------------------------------------------------------------------------ structure


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: object = None


class Layer:
    def __init__(self, keys):
        self.keys, self.kind = keys, "dynamic"


class Cache:
    def __init__(self, *keys):
        self.layers = [Layer(key) for key in keys]


PAIRS = {
    "tuple": ((X, X), (X, X + 1), "[1] at"),
    "list and tuple": ([X], (X,), None),
    "named tuple": (Point(X, X), Point(X, X + 1), "[1] at"),
    "mapping": (OrderedDict(a=X), {"a": X + 1}, "['a'] at"),
    "order of keys": ({"a": X, "b": 1}, {"b": 1, "a": X}, None),
    "missing key": ({"a": X}, {"a": X, "b": X}, "has no 'b'"),
    "extra key": ({"a": X, "b": X}, {"a": X}, "has 'b', which the expected output has not"),
    "shorter": ([X], [X, X], "has 1 entries, expected 2"),
    "mapping for list": ({0: X}, [X], "is a dict, expected a list"),
    "dataclass": (Output(X), Output(X + 1), ".logits at"),
    "cache": (Output(X, Cache(X, X)), Output(X, Cache(X, X + 1)), ".cache.layers[1].keys at"),
    "cache of fewer layers": (Cache(X), Cache(X, X), ".layers has 1 entries, expected 2"),
    "array": (X.numpy(), (X + 1).numpy(), "output at"),
    "array for tensor": (X.numpy(), X, None),
    "text": ({"a": "x"}, {"a": "y"}, "['a'] is 'x', expected 'y'"),
    "none": ((X, None), (X, X), "[1] is None, expected a tensor"),
    "whole number": ([3], [4], "[0] is 3, expected 4"),
    "number": ([0.1 + 0.2], [0.3], None),
    "far number": ([0.31], [0.3], "[0] at (): 0.31, expected 0.3"),
    "bool for int": ([True], [1], "[0] is True, expected 1"),
    "int for float": ([1], [1.0], None),
    "nan for number": ([float("nan")], [1.0], "nan, expected 1"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_structures(name):
    actual, expected, why = PAIRS[name]
    found = check_equivalence(actual, expected)
    assert bool(found) is (why is None), found
    assert why is None or why in found.reason


def test_model_output_of_transformers_is_a_mapping():
    from transformers.modeling_outputs import BaseModelOutput

    right = BaseModelOutput(last_hidden_state=X)
    assert check_equivalence(BaseModelOutput(last_hidden_state=X.clone()), right)
    assert "['last_hidden_state'] at" in check_equivalence(BaseModelOutput(last_hidden_state=X + 1), right).reason
    assert not check_equivalence(X, right)


def test_images_are_compared_by_pixels():
    from PIL import Image

    one = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    other = one.copy()
    other.putpixel((1, 2), 200)
    assert check_equivalence([one], [one.copy()])
    assert "[0] at (2, 1): 200, expected 9" in check_equivalence([other], [one]).reason


def test_objects_without_values_are_an_error_not_a_pass():
    with pytest.raises(TypeError, match=r"\['a'\]: cannot compare a object"):
        check_equivalence({"a": object()}, {"a": object()})
    with pytest.raises(TypeError, match="cannot compare a generator"):
        check_equivalence((part for part in [1]), (part for part in [1]))


def test_nothing_compared_is_said():
    found = check_equivalence(None, None)
    assert found and "no tensors or numbers were compared" in found.reason


def test_one_memory_compared_with_itself_is_said():
    buffer = X.clone()
    baseline = buffer
    candidate = buffer.add_(1)  # in place: it changed what it is compared with
    assert "the same memory" in check_equivalence(candidate, baseline).reason
    assert "the same memory" not in check_equivalence(X.clone(), X).reason


def test_the_result_reads_as_one_line():
    assert str(check_equivalence(X, X.clone())) == "same (bitwise, float32): 30 values, the same bits"
    assert str(check_equivalence(X + 1e-7, X)).startswith("same (close, float32): largest difference ")
    pair = namedtuple("Pair", "a b")(X, torch.tensor([1]))
    assert check_equivalence(pair, pair).dtype == "float32"


# ------------------------------------------------------------------------------------------------ lossy


def cosine(actual, expected):
    return torch.nn.functional.cosine_similarity(actual.flatten(), expected.flatten(), dim=0)


def test_a_declared_lossy_output_must_reach_its_score():
    check = declared_lossy(cosine, at_least=0.99, name="cosine")
    found = check(X + 0.01, X)
    assert found and found.rule == "approximate" and found.reason.startswith("cosine 0.99")
    assert found.max_abs == pytest.approx(0.01, rel=1e-3)
    for wrong in (torch.zeros_like(X), -X, X.flip(0), with_value(float("nan"))):
        assert not check(wrong, X)
    assert "nan, expected" in check(with_value(float("nan")), X).reason


def test_a_metric_that_zeros_satisfy_is_no_proof():
    lenient = declared_lossy(lambda actual, expected: 1.0, at_least=0.5, name="always")
    found = lenient(X, X)
    assert not found and "an output of zeros reaches it too" in found.reason
    assert not declared_lossy(lambda a, e: float("nan"), at_least=0.5, name="nan")(X, X)


def test_zeros_are_fine_where_they_are_right():
    agreement = declared_lossy(lambda a, e: (a == e).float().mean(), at_least=0.9, name="agreement")
    assert agreement(torch.zeros(5), torch.zeros(5))
    tokens = torch.tensor([5, 6, 7])
    assert agreement(tokens.clone(), tokens) and not agreement(torch.tensor([5, 6, 0]), tokens)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"metric": 3, "at_least": 1, "name": "x"}, TypeError),
        ({"metric": cosine, "at_least": float("-inf"), "name": "x"}, ValueError),
        ({"metric": cosine, "at_least": 1, "name": ""}, ValueError),
    ],
)
def test_wrong_arguments_of_declared_lossy(arguments, error):
    with pytest.raises(error):
        declared_lossy(arguments["metric"], at_least=arguments["at_least"], name=arguments["name"])


# ------------------------------------------------------------------------------------------------ every word and figure


@dataclasses.dataclass
class Size:
    width: int
    unit: str = "px"


class Plain:
    """Compared by identity, holds no tensors."""


NESTED = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged)


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (Size(3), Size(4), ".width is 3, expected 4"),
        (Size(3, "em"), Size(3), ".unit is 'em', expected 'px'"),
        (Size(3), [3], "output is a Size, expected a list"),
        (3, Plain(), "output is 3, expected a Plain"),
        (Plain(), 3, "output is a Plain, expected 3"),
        (None, "x", "output is None, expected 'x'"),
        (True, False, "output is True, expected False"),
        (2, True, "output is 2, expected True"),
        (1.0, True, "output is 1.0, expected True"),
        ("a" * 38, "b", f"output is '{'a' * 38}', expected 'b'"),
        ("a" * 39, "b", f"output is '{'a' * 36}..., expected 'b'"),
        (int, float, "output is a type, expected a type"),
        (len, max, "output is a builtin_function_or_method, expected a builtin_function_or_method"),
        ({"a": X}, {"a": X, "b": X}, "output has no 'b'; it has 'a'"),
        ({}, {"b": X}, "output has no 'b'; it has nothing"),
        ([{"a": X, "b": X}], [{"a": X}], "[0] has 'b', which the expected output has not"),
        ([[X], X], [[X, X], X], "[0] has 1 entries, expected 2"),
        ([X, X, X], [X], "output has 3 entries, expected 1"),
        (X, [X], "output is a tensor (6, 5) of float32, expected a list"),
        ([X], X, "output is a list, expected a tensor (6, 5) of float32"),
        (X, NESTED, "output: one is a nested tensor and the other is not"),
        (NESTED, X, "output: one is a nested tensor and the other is not"),
        (X.T, X, "output has shape (5, 6), expected (6, 5)"),
        (X.to(torch.int64), X, "output is of int64, expected float32"),
        (X.to(torch.complex64), X, "output is of complex64, expected float32"),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32), "output is of int64, expected int32"),
        (
            torch.tensor([True, False]),
            torch.tensor([True, True]),
            "output at (1,): False, expected True; 1 of 2 values differ",
        ),
        (
            torch.tensor([[1, 2], [3, 5]]),
            torch.tensor([[0, 2], [3, 9]]),
            "output at (1, 1): 5, expected 9; 2 of 4 values differ",
        ),
        (
            torch.tensor([2.5]),
            torch.tensor([1.0]),
            "output at (0,): 2.5, expected 1; 1 of 1 values differ beyond rtol=1.3e-06, atol=1e-05",
        ),
        (
            torch.tensor([2e-8, 1e-8]),
            torch.tensor([1e-8, 1e-8]),
            "output at (0,): 2e-08, expected 1e-08; 1 of 2 values differ beyond rtol=1.3e-06, atol=1e-10; "
            "the expected values are at most 1e-08: give reference= or atol= if they are noise",
        ),
        (
            torch.tensor([1 + 2j]),
            torch.tensor([1 - 2j]),
            "output at (0,): 1+2j, expected 1-2j; 1 of 1 values differ beyond rtol=1.3e-06, atol=1e-05",
        ),
        (1 + 2j, 1 - 2j, "output at (): 1+2j, expected 1-2j; 1 of 1 values differ beyond rtol=1e-07, atol=1e-07"),
        (np.array(["a", "b"]), np.array(["a", "c"]), "[1] is 'b', expected 'c'"),
    ],
)
def test_reasons(actual, expected, reason):
    found = check_equivalence(actual, expected)
    assert not found and (found.rule, found.reason) == ("different", reason)
    assert str(found) == f"different: {reason}"


@pytest.mark.parametrize(
    ("actual", "expected", "shown"),
    [
        (None, None, "same (bitwise): equal; no tensors or numbers were compared"),
        ("".join(["a", "b"]), "ab", "same (bitwise): equal; no tensors or numbers were compared"),
        (len, len, "same (bitwise): equal; no tensors or numbers were compared"),
        (int, int, "same (bitwise): equal; no tensors or numbers were compared"),
        ([3, True], [3, True], "same (bitwise, int): 2 values, the same bits"),
        ([True], [True], "same (bitwise, bool): 1 values, the same bits"),
        (1.5, 1.5, "same (bitwise, float64): 1 values, the same bits"),
        (1, 1.0, "same (bitwise, float64): 1 values, the same bits"),
        (1 + 2j, 1 + 2j, "same (bitwise, complex128): 1 values, the same bits"),
        (1.0, 1 + 0j, "same (bitwise, complex128): 1 values, the same bits"),
        (Size(3), Size(3), "same (bitwise, int): 1 values, the same bits"),
        ([X.clone(), torch.tensor([1])], [X, torch.tensor([1])], "same (bitwise, float32): 31 values, the same bits"),
        (torch.empty(0), torch.empty(0), "same (bitwise, float32): equal, and empty: no values were compared"),
        ([torch.ones(1), X.half()], [torch.ones(1), X.half()], "same (bitwise, float16): 31 values, the same bits"),
        (torch.tensor([2.0 + 1e-6]), torch.tensor([2.0]), "same (close, float32): largest difference 9.54e-07"),
        (
            [torch.ones(1).double()],
            [torch.ones(1)],
            "same (close, float32): largest difference 0; [0]: float64 against float32",
        ),
        (np.array(["a"]), np.array(["a"]), "same (bitwise): equal; no tensors or numbers were compared"),
        (NESTED, NESTED.clone(), "same (bitwise, float32): 40 values, the same bits"),
    ],
)  # fmt: skip
def test_what_is_said_of_equal_outputs(actual, expected, shown):
    assert str(check_equivalence(actual, expected)) == shown


def test_one_memory_is_said_with_its_place():
    found = check_equivalence([X], [X])
    assert found.reason == "30 values, the same bits; [0]: both lie in the same memory, which proves nothing"


def test_figures_are_over_all_values_of_all_places():
    a = [torch.tensor([1.0, 2.0, 4.0]), torch.tensor([float("nan"), 10.0, 0.0])]
    b = [torch.tensor([1.0, 2.5, 4.0]), torch.tensor([float("nan"), 12.0, 1.0])]
    found = check_equivalence(a, b)
    assert found.max_abs == 2.0 and found.max_rel == 1.0
    assert found.rmse == pytest.approx(((0.5**2 + 2**2 + 1) / 5) ** 0.5)  # of five finite pairs
    turned = check_equivalence([b[1], b[0]], [a[1], a[0]])
    assert turned.max_abs == 2.0 and turned.max_rel == pytest.approx(0.25)  # an expected zero has no relative error
    assert check_equivalence([1.0, "x"], [1.5, "y"]).max_abs == 0.5  # also when the structure differs further on


def test_read_only_arrays_and_numbers_of_numpy():
    array = np.ones(3)
    array.flags.writeable = False
    assert check_equivalence(array, torch.ones(3).double())
    assert check_equivalence(np.float32(2.0), torch.tensor(2.0)) and not check_equivalence(np.int64(3), torch.tensor(4))
    assert check_equivalence([np.bool_(True)], [torch.tensor(True)])
    with pytest.raises(TypeError, match="cannot compare a Plain"):
        check_equivalence([Plain()], [Plain()])


@pytest.mark.parametrize(
    ("tolerance", "message"),
    [
        ({"rtol": 1}, "rtol=1 would accept an output of zeros; expected a number below 1"),
        ({"rtol": -1}, "rtol=-1; expected a finite number >= 0"),
        ({"atol": float("nan")}, "atol=nan; expected a finite number >= 0"),
        ({"atol": "1"}, "atol='1' is of type str; expected a number or None"),
        ({"atol": True}, "atol=True is of type bool; expected a number or None"),
    ],
)
def test_messages_of_tolerances(tolerance, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        check_equivalence(X, X, **tolerance)
    assert str(caught.value) == message


def test_zero_and_large_tolerances_are_taken():
    assert check_equivalence(X.clone(), X, rtol=0, atol=0)
    assert check_equivalence(torch.tensor([5.0]), torch.tensor([2.0]), rtol=0.99, atol=1.9e-2) is not None
    assert not check_equivalence(torch.tensor([2.0]), torch.tensor([1.0]), atol=1)  # as large as the value: zeros pass
    assert check_equivalence(torch.tensor([1.9]), torch.tensor([1.0]), atol=0.95)
    refused = check_equivalence(torch.tensor([1.9]), torch.tensor([1.0]), atol=0.95, rtol=0.1)
    assert refused.reason == "output: atol=0.95 would accept zeros: the largest expected value is 1"
    assert check_equivalence(torch.tensor([3.0]), torch.tensor([2.0]), rtol=0.5)  # at the limit
    assert check_equivalence(torch.tensor([0.5, 1.0]), torch.tensor([0.25, 1.0]), atol=0.25)
    assert check_equivalence([1.0], [1.01], rtol=0.02) and not check_equivalence([1.0], [1.01])


def test_the_cap_of_the_absolute_tolerance_is_one_per_cent():
    right = torch.tensor([1e-4, 0.0])
    assert check_equivalence(torch.tensor([1e-4, 0.9e-6]), right)
    assert not check_equivalence(torch.tensor([1e-4, 1.1e-6]), right)
    assert check_equivalence(torch.tensor([1.0, 9e-6]), torch.tensor([1.0, 0.0]))
    assert not check_equivalence(torch.tensor([1.0, 1.1e-5]), torch.tensor([1.0, 0.0]))
    infinite = torch.tensor([float("inf"), 1e-4, 0.0])  # infinity is no measure
    assert not check_equivalence(torch.tensor([float("inf"), 1e-4, 1.1e-6]), infinite)


@pytest.mark.parametrize(
    ("shape", "dtype", "factor", "passes"),
    [
        ((999,), torch.float32, 2.5, True),
        ((1000,), torch.float32, 2.5, False),
        ((1000,), torch.float32, 1.9, True),
        ((999,), torch.float32, 3.1, False),
        ((5000,), torch.float16, 2.5, True),
        ((5000,), torch.bfloat16, 2.5, True),
        ((5000,), torch.bfloat16, 3.2, False),
        ((2, 1000, 1, 1), torch.float32, 2.5, True),  # torch's own exception: pooled features
        ((2, 1000, 1), torch.float32, 2.5, False),
        ((2, 1000, 1, 2), torch.float32, 2.5, False),
        ((2, 1000, 2, 1), torch.float32, 2.5, False),
        ((2, 2, 1000, 1, 1), torch.float32, 2.5, False),
    ],
)
def test_how_far_rounding_may_go(shape, dtype, factor, passes):
    reference = draw(*shape, seed=3, dtype=torch.float64)
    error = 0.05 * draw(*shape, seed=4, dtype=torch.float64)
    expected, actual = (reference + error).to(dtype), (reference + factor * error).to(dtype)
    found = check_equivalence([actual], [expected], reference=[reference])
    assert found.rule == ("rounding" if passes else "different")


def test_rounding_in_figures():
    reference = torch.full((2000,), 4.0, dtype=torch.float64)
    expected, actual = (reference + 0.25).float(), (reference - 0.375).float()
    found = check_equivalence(actual, expected, reference=reference)
    assert found.reason == "rmse to float64 0.375, that of the expected output 0.25, allowed 0.5"
    far = check_equivalence((reference - 1).float(), expected, reference=reference)
    assert far.reason.endswith("; rmse to float64 1, that of the expected output 0.25, allowed 0.5")
    poor = check_equivalence(actual, (reference + 3).float(), reference=reference)
    assert poor.reason.endswith("; the expected output is too far from float64 (rmse 3) to judge by rounding")
    exact = reference.float()
    assert check_equivalence(exact + 8e-6, exact, reference=reference, rtol=0, atol=0)  # the 1e-5 of torch
    assert not check_equivalence(exact + 3e-5, exact, reference=reference, rtol=0, atol=0)


def test_rounding_leaves_out_what_is_not_finite_in_both():
    reference = torch.full((2000,), 4.0, dtype=torch.float64)
    reference[0] = float("inf")
    expected, actual = (reference + 0.25).float(), (reference - 0.375).float()
    found = check_equivalence(actual, expected, reference=reference)
    assert found.rule == "rounding" and "1 of 2000 values are NaN or inf in both" in found.reason
    reference[1] = float("nan")
    found = check_equivalence(actual, expected, reference=reference)
    assert found.reason.endswith("; the reference is not finite where the expected output is")


def test_rounding_of_complex_values():
    reference = draw(2000, dtype=torch.float64) + 1j * draw(2000, seed=2, dtype=torch.float64)
    error = 0.1 * draw(2000, seed=3, dtype=torch.float64)
    expected = (reference + error).to(torch.complex64)
    for factor, rule in ((1.5, "rounding"), (2.5, "different")):
        actual = (reference + factor * 1j * error).to(torch.complex64)
        assert check_equivalence(actual, expected, reference=reference).rule == rule
    with pytest.raises(ValueError, match="reference at output is of float64; expected complex128"):
        check_equivalence(expected, expected, reference=reference.real)


def test_references_of_the_wrong_kind_are_named():
    for given, message in (
        (3.0, "reference at [0] is 3.0; expected a float64 tensor"),
        (X, "reference at [0] is of float32; expected float64"),
        (X.double().T, "reference at [0] has shape (5, 6); expected (6, 5)"),
        (X.double().to("meta"), "reference at [0] is a meta or fake tensor; it has no values to compare"),
    ):
        with pytest.raises(ValueError) as caught:
            check_equivalence([X + 1], [X], reference=[given])
        assert str(caught.value) == message
    for given, kind in ((X.double(), "a tensor (6, 5) of float64"), ([X.double()] * 2, "a list"), ({"a": 1}, "a dict")):
        with pytest.raises(ValueError) as caught:
            check_equivalence([X], [X], reference=given)
        assert str(caught.value) == f"reference at output is {kind}; expected the structure of the expected output"
    assert check_equivalence([X.clone(), 3, None], [X, 3, None], reference=[X.double(), None, None])
    assert check_equivalence([torch.tensor([1])], [torch.tensor([1])], reference=[X])  # whole numbers need none


def test_a_reference_in_a_nested_tensor_and_an_array():
    double = torch.nested.nested_tensor([X.double(), X[:2].double()], layout=torch.jagged)
    off = torch.nested.nested_tensor([X + 1e-3, X[:2]], layout=torch.jagged)
    poor = torch.nested.nested_tensor([X - 1e-3, X[:2]], layout=torch.jagged)
    assert check_equivalence(off, poor, reference=double).rule == "rounding"
    assert check_equivalence(X + 1e-3, X - 1e-3, reference=X.double().numpy()).rule == "rounding"


# ------------------------------------------------------------------------------------------------ zeros as a proof

Pair = namedtuple("Pair", "a b")


class Fields(OrderedDict):
    """As ModelOutput: a mapping that is made from keywords."""

    def __init__(self, **entries):
        super().__init__(**entries)


class Stubborn(dict):
    """A mapping that cannot be made from keywords."""

    def __init__(self, entries):
        super().__init__(entries)


@pytest.mark.parametrize(
    ("value", "zeros"),
    [
        (X, torch.zeros_like(X)),
        ([X, 3], [torch.zeros_like(X), 0]),
        ((2.5, "x", True), (0.0, "x", True)),
        (Pair(X, 1), Pair(torch.zeros_like(X), 0)),
        (Fields(a=X), Fields(a=torch.zeros_like(X))),
        (Stubborn({"a": X}), {"a": torch.zeros_like(X)}),
        ({3: X}, {3: torch.zeros_like(X)}),
    ],
)
def test_zeros_of_every_structure_are_tried(value, zeros):
    given = []
    check = declared_lossy(lambda actual, expected: (given.append(actual), 1.0)[1], at_least=1.0, name="always")
    found = check(value, value)
    assert found.reason == "always 1, asked for at least 1; an output of zeros reaches it too: no proof"
    assert len(given) == 2 and type(given[1]) is type(zeros) and check_equivalence(given[1], zeros)


@pytest.mark.parametrize(
    "value", [torch.zeros(2), [torch.zeros(2), 0], Pair(0, 0.0), {"a": torch.zeros(1)}, "x", [True]]
)
def test_zeros_are_no_proof_against_an_expected_zero(value):
    given = []
    check = declared_lossy(lambda actual, expected: (given.append(actual), 1.0)[1], at_least=1.0, name="always")
    assert check(value, value).rule == "approximate" and len(given) == 1


@pytest.mark.parametrize("value", [[torch.zeros(2), torch.ones(2)], {"a": 0, "b": 1}, Fields(a=torch.zeros(1), b=2)])
def test_one_value_that_is_not_zero_is_enough(value):
    assert not declared_lossy(lambda actual, expected: 1.0, at_least=1.0, name="always")(value, value)


def test_a_metric_that_refuses_zeros_tells_them_apart():
    check = declared_lossy(lambda a, e: 1 / float(a.abs().sum() > 0), at_least=1.0, name="score")
    assert check(X, X).reason == "score 1, asked for at least 1"


def test_figures_stand_beside_every_score():
    for metric, at_least, rule in (
        (cosine, 0.9, "approximate"),
        (cosine, 1.1, "different"),
        (lambda a, e: 1.0, 0.5, "different"),
    ):
        found = declared_lossy(metric, at_least=at_least, name="m")(X + 0.25, X)
        assert (found.rule, found.dtype, found.equivalent) == (rule, "float32", rule == "approximate")
        assert found.max_abs == pytest.approx(0.25, rel=1e-5) and found.rmse == pytest.approx(0.25, rel=1e-5)
        assert found.max_rel > 0.25 / X.abs().max().item()
    broken = declared_lossy(cosine, at_least=0.5, name="m")(with_value(float("nan")), X)
    assert (
        broken.rule == "different" and broken.dtype == "float32" and broken.reason.startswith("output at (2, 3): nan")
    )
    inside = declared_lossy(lambda a, e: 1.0, at_least=0.5, name="m")([X, with_value(float("inf"))], [X, X])
    assert inside.reason.startswith("[1] at (2, 3): inf")


@pytest.mark.parametrize(
    ("metric", "at_least", "name", "message"),
    [
        (3, 1, "x", "metric=3 is not callable; expected a function of (actual, expected)"),
        (cosine, float("nan"), "x", "at_least=nan is not finite; a score below it must be possible"),
        (cosine, 1, "", "name=''; expected a short name of the metric, it is printed beside the score"),
        (cosine, 1, 3, "name=3; expected a short name of the metric, it is printed beside the score"),
    ],
)
def test_messages_of_declared_lossy(metric, at_least, name, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        declared_lossy(metric, at_least=at_least, name=name)
    assert str(caught.value) == message
