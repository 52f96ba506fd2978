"""Recipe 05: its algorithms and its tuner where a careless one goes wrong, its rules on made-up rows."""

from types import SimpleNamespace

import pytest
import torch
import yaml
from recipe_notebook import FOLDER, check_refused, code_cells, set_up, source_of, source_with

from utils.claims import per_place
from utils.cookbook.notebooks import tags
from utils.machine import machine_record
from utils.rows import append_rows, read_rows, recorded_rows

RECIPE = "05_cudnn_benchmark"
PRESETS = FOLDER.parent / "data" / "presets"


@pytest.fixture(scope="module")
def recipe():
    """The names of the notebook up to `technique`, as the benchmark `autotune` takes them."""
    names = {}
    for cell in code_cells(RECIPE):
        if not {"machine", "figure", "baseline"} & set(tags(cell)) or "def im2col" in cell.source:
            exec(cell.source, names)
        if "technique" in tags(cell):
            return names
    raise AssertionError("no cell is tagged technique")


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "given, told",
    [
        ({"kernels": [3]}, r"kernels=\[3\]; expected lists of one length"),
        ({"channels": [], "sizes": [], "kernels": []}, r"channels=\[\]; expected .*, one or more"),
        ({"kernels": [15, 99]}, r"kernels=\[15, 99\]; expected a kernel of at most 28, the side of its map"),
        ({"channels": [0, 4]}, r"channels=\[0, 4\]; expected a list of whole numbers of at least 1"),
        ({"sizes": [96, "28"]}, r"sizes=\[96, '28'\]; expected a list of whole numbers"),
        ({"kernels": [15, 3.0]}, r"kernels=\[15, 3.0\]; expected a list of whole numbers"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
        ({"min_run_time": -1.0}, "min_run_time=-1.0; expected a finite number above 0"),
        ({"min_run_time": float("nan")}, "min_run_time=nan; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_the_presets_are_taken(preset):
    given = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text())[RECIPE]
    assert set_up(RECIPE, **(given | {"device": "cpu"}))["dev"].type == "cpu"


# ---------------------------------------------------------------------------------------------------- algorithms


@pytest.mark.parametrize("name", ["im2col", "direct", "fft", "winograd"])
@pytest.mark.parametrize(
    "image, filters, told",
    [
        ((1, 2, 9, 9), (2, 2, 5, 3), "square"),
        ((1, 2, 9, 9), (2, 2, 3, 5), "square"),
        ((1, 2, 4, 4), (2, 2, 5, 5), "no larger"),
        ((1, 2, 2, 9), (2, 2, 3, 3), "no larger"),
        ((0, 2, 9, 9), (2, 2, 3, 3), "at least one value"),
        ((1, 2, 9, 9), (0, 2, 3, 3), "at least one value"),
        ((1, 3, 9, 9), (2, 2, 3, 3), "one C"),
        ((2, 9, 9), (2, 2, 3, 3), "one C"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(recipe, name, image, filters, told):
    tuner = recipe["Autotuner"]({name: recipe[name]}, lambda *_: 0.0)
    for call in (recipe[name], tuner):
        with pytest.raises(ValueError, match=rf"image and filters: .*; expected .*{told}") as caught:
            call(torch.zeros(image), torch.zeros(filters))
        assert "\n" not in str(caught.value)
    assert not tuner.winners


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float64), (torch.int64, torch.int64)])
def test_other_dtypes_are_refused(recipe, kinds):
    for name in ("im2col", "direct", "fft", "winograd"):
        with pytest.raises(ValueError, match="expected one floating dtype and one device"):
            recipe[name](torch.ones(1, 2, 9, 9, dtype=kinds[0]), torch.ones(2, 2, 3, 3, dtype=kinds[1]))


@pytest.mark.parametrize("name", ["im2col", "direct", "fft", "winograd"])
def test_maps_that_are_not_square_and_batches_are_right(recipe, name):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((3, 2, 9, 14), (5, 2, 3, 3)))
    assert recipe["judge"](recipe[name](x, w), *recipe["truth"](x, w))


# ---------------------------------------------------------------------------------------------------- the tuner


def tuned(recipe, order, x, w):
    """A tuner after one call, whose clock prefers the algorithms in this order; and its key."""
    ranks = {recipe["ALGORITHMS"][name]: rank for rank, name in enumerate(order)}
    tuner = recipe["Autotuner"]({name: recipe["ALGORITHMS"][name] for name in order}, lambda fn, x, w: ranks[fn])
    assert recipe["judge"](tuner(x, w), *recipe["truth"](x, w))
    return tuner, tuner.key(x, w)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_what_fails_or_differs_in_half_precision_is_left_out(recipe, kind):
    x, w = recipe["draw"](8, 16, 3, kind=kind)
    tuner, key = tuned(recipe, ["fft", "winograd", "im2col"], x, w)
    assert tuner.winners[key] == "im2col" and tuner.trials == 1
    assert list(tuner.left_out[key]) == ["fft", "winograd"]
    assert all(why and "\n" not in why for why in tuner.left_out[key].values())


def test_a_huge_pixel_leaves_the_fft_out(recipe):
    x, w = recipe["draw"](1, 64, 3)
    tuner, key = tuned(recipe, ["fft", "direct"], x, w)
    assert tuner.winners[key] == "fft" and tuner.left_out[key] == {}
    x[0, 0, 0, 0] = 1e6
    tuner, key = tuned(recipe, ["fft", "direct"], x, w)
    assert tuner.winners[key] == "direct" and list(tuner.left_out[key]) == ["fft"]


@pytest.mark.parametrize("scale", [0.0, 1e-7])
@pytest.mark.parametrize("zero_filters", [False, True])
def test_an_image_that_tells_nothing_settles_nothing(recipe, scale, zero_filters):
    """Zeros, as in a warm-up, pass every algorithm; the winner would serve wrong answers later."""
    wrong, good = lambda x, w: recipe["fft"](x, w.flip(-1)), recipe["direct"]
    tuner = recipe["Autotuner"]({"wrong": wrong, "good": good}, lambda fn, x, w: float(fn is good))
    x, w = recipe["draw"](4, 12, 3)
    tuner(x * scale, w * (not zero_filters))
    assert list(tuner.winners.values()) == ["good"]
    assert recipe["judge"](tuner(x, w), *recipe["truth"](x, w))


@pytest.mark.parametrize("place", [torch.contiguous_format, torch.channels_last])
def test_own_values_have_the_form_of_the_given_ones(recipe, place):
    x = torch.zeros(2, 3, 5, 5, dtype=torch.bfloat16).to(memory_format=place)
    own = recipe["own_values"](x)
    assert (own.shape, own.stride(), own.dtype) == (x.shape, x.stride(), x.dtype)
    assert own.float().std() > 0.5 and own.abs().max() <= 1


def test_an_algorithm_that_raises_or_returns_something_else_is_left_out(recipe):
    def broken(x, w):
        raise RuntimeError("no kernel\nmany lines")

    good = recipe["im2col"]
    bad = {"broken": broken, "none": lambda x, w: None, "shape": lambda x, w: good(x, w)[..., :-1]}
    bad["nan"] = lambda x, w: good(x, w) * float("nan")
    tuner = recipe["Autotuner"](bad | {"good": good}, lambda fn, x, w: float(fn is good))
    x, w = recipe["draw"](2, 9, 3)
    assert tuner(x, w).shape == (1, 2, 7, 7)
    (left,) = tuner.left_out.values()
    assert list(left) == list(bad) and left["broken"] == "no kernel"


def test_without_a_right_algorithm_it_says_why(recipe):
    tuner = recipe["Autotuner"]({"winograd": recipe["winograd"]}, lambda *_: 0.0)
    with pytest.raises(RuntimeError, match=r"no algorithm is right for filters \[2, 2, 5, 5\]: .*filter size 5"):
        tuner(*recipe["draw"](2, 9, 5))
    assert not tuner.winners


def test_the_key_holds_shapes_strides_dtype_and_threads(recipe, monkeypatch):
    tuner = recipe["Autotuner"](recipe["ALGORITHMS"], lambda *_: 0.0)
    x, w = recipe["draw"](4, 9, 3)
    last = torch.channels_last
    keys = {tuner.key(x, w), tuner.key(x.to(memory_format=last), w), tuner.key(x, w.to(memory_format=last))}
    keys |= {tuner.key(x.double(), w.double()), tuner.key(x[..., :-1], w), tuner.key(x, w[:2])}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    keys.add(tuner.key(x, w))
    assert len(keys) == 7
    assert tuner.key(*recipe["draw"](4, 9, 3, number=5)) in keys  # other values, the same key


def test_a_known_shape_pays_nothing_again(recipe):
    tuner = recipe["Autotuner"](recipe["ALGORITHMS"], lambda *_: 0.0)
    for number in range(3):
        tuner(*recipe["draw"](2, 9, 3, number))
    assert tuner.trials == 4
    tuner(*recipe["draw"](2, 10, 3))
    tuner(*recipe["draw"](2, 10, 5))  # no Winograd
    assert tuner.trials == 4 + 4 + 3


# ---------------------------------------------------------------------------------------------------- rules


@pytest.fixture(scope="module")
def rules():
    names = {}
    for part in ("def first_and_later", "def beside_convolution", "def pooling", "def vit_gains"):
        exec(source_with(RECIPE, part), names)
    return names


def pair(first, low, high, size=64, device="card"):
    """Made-up rows of one size: with the flag off 1 s, 1.0 to 1.1 s later; with it on as given."""
    off = {"first_call_s": 1.0, "ci_low_s": 1.0, "ci_high_s": 1.1}
    on = {"first_call_s": first, "ci_low_s": low, "ci_high_s": high}
    where = {"device_name": device, "case.size": size}
    return [where | {"case.flag": False} | off, where | {"case.flag": True} | on]


@pytest.mark.parametrize(
    "rows, verdict",
    [
        (pair(5.0, 0.5, 0.6), "confirmed"),
        (pair(5.0, 0.5, 0.6) + pair(4.0, 0.7, 0.9, size=128), "confirmed"),
        (pair(5.0, 0.5, 0.6) + pair(4.0, 1.0, 1.1, size=128), "refined"),  # later calls gain at one size only
        (pair(5.0, 0.5, 0.6) + pair(0.9, 0.5, 0.6, size=128), "refined"),
        (pair(5.0, 0.5, 1.05), "refuted"),  # the intervals overlap
        (pair(0.9, 0.5, 0.6), "refuted"),  # the first call is no slower
        (pair(5.0, 0.5, 0.6)[:1], "not measurable here"),
        ([pair(5.0, 0.5, 0.6)[0], pair(5.0, 0.5, 0.6, device="other")[1]], "not measurable here"),
    ],
)
def test_rule_of_b1_compares_on_with_off(rules, rows, verdict):
    assert rules["first_and_later"](rows)[0] == verdict


def test_rule_of_b2_counts_trials(rules):
    rule = rules["trials_rule"]
    found = rule({"one size": 4, "new sizes": 80, "buckets of 16": 8}, 20)
    assert found == ("refined", "trials for 20 calls: one size 4, new sizes 80, buckets of 16 8")
    assert rule({"new sizes": 80, "buckets of 16": 30}, 20)[0] == "confirmed"
    assert rule({"new sizes": 10, "buckets of 16": 8}, 20)[0] == "refuted"


def reached(operation, verdict="equivalent", cudnn=False, same=True):
    """A made-up row of one operation, flag on against off."""
    found = {"case.operation": operation, "verdict": verdict, "ran_cudnn": cudnn, "same_kernels": same}
    return found | {"device_name": "a card"}


CONV = reached("conv2d", "faster", cudnn=True, same=False)  # the profile can see cuDNN
THREE = [reached(name) for name in ("linear", "layer_norm", "softmax")]


@pytest.mark.parametrize(
    "attention, verdict",
    [
        (reached("attention"), "confirmed"),
        (reached("attention", cudnn=True), "refined"),
        (reached("attention", "faster"), "refuted"),
        (reached("attention", "slower", cudnn=True), "refuted"),
        (reached("attention", "inconclusive"), "not measurable here"),
        (reached("attention", "error"), "not measurable here"),
        (reached("max_pool2d"), "not measurable here"),  # attention is missing
    ],
)
def test_rule_of_b3_compares_on_with_off(rules, attention, verdict):
    assert rules["beside_convolution"]([CONV, *THREE, attention])[0] == verdict
    for blind in ([], [CONV | {"ran_cudnn": False}]):
        assert rules["beside_convolution"]([*blind, *THREE, attention])[0] == "not measurable here"


@pytest.mark.parametrize("last", ["a card", "another"])
def test_b3_looks_at_every_card(rules, last):
    cards = ["another", "a card"] if last == "a card" else ["a card", "another"]
    slowed = [reached(name, "slower") for name in ("linear", "attention", "layer_norm", "softmax")]
    rows = [row | {"device_name": cards[0]} for row in (CONV, *slowed)]
    rows += [row | {"device_name": cards[1]} for row in (CONV, *THREE, reached("attention"))]
    assert rules["beside_convolution"](rows)[0] == "refuted"


@pytest.mark.parametrize(
    "rows, verdict",
    [
        ([reached("max_pool2d", cudnn=True), reached("avg_pool2d")], "refuted"),  # cuDNN, but the flag does nothing
        ([reached("max_pool2d", same=False), reached("avg_pool2d")], "refined"),
        ([reached("max_pool2d", same=False), reached("avg_pool2d", "faster")], "confirmed"),
        ([reached("max_pool2d"), reached("avg_pool2d", "inconclusive")], "not measurable here"),
        ([reached("linear", "faster", same=False)], "not measurable here"),
    ],
)
def test_rule_of_b6_compares_on_with_off(rules, rows, verdict):
    assert rules["pooling"]([CONV, *rows])[0] == verdict
    assert rules["pooling"](rows)[0] == "not measurable here"  # without the proof that the profile sees cuDNN


def test_b6_needs_the_proof_on_the_same_card_and_takes_the_newest_row(rules):
    rule = per_place(rules["pooling"])
    other = CONV | {"device_name": "another"}
    faster = [reached("max_pool2d", "faster"), reached("avg_pool2d", "faster")]
    assert rule([other, *faster])[0] == "not measurable here"
    assert rule([CONV, other, *faster])[0] == "confirmed"
    assert rule([CONV, *faster, reached("max_pool2d"), reached("avg_pool2d")])[0] == "refuted"  # measured again
    assert "per_place(pooling)" in source_of(RECIPE, "claims")


def test_rules_of_b4_and_b5_follow_what_was_counted(rules):
    assert rules["vit_gains"](1, 1.007) == (
        "refuted",
        "convolutions in a ViT-Base/16: 1; if they took no time, it would gain 1.007x",
    )
    assert rules["vit_gains"](30, 1.5)[0] == "not measurable here"
    rule = rules["flux_convolves"]
    assert rule({}, None) == ("not measurable here", "needs the count: run with audit = True")
    assert rule({"transformer": 9}, 0.85)[0] == "confirmed" and rule({"transformer": 9}, 0.4)[0] == "refined"
    assert rule({"transformer": 0}, 0.3)[0] == "refined" and rule({"transformer": 9}, 0.003)[0] == "refined"
    verdict, evidence = rule({"transformer": 0}, 0.0034)
    assert verdict == "refuted" and "transformer: 0; 0.3 %" in evidence


def test_kernels_of_cudnn_are_told_by_name():
    names = {}
    exec("import torch\n" + source_with(RECIPE, "def is_cudnn"), names)
    of_cudnn = ["sm80_xmma_fprop_implicit_gemm_f16f16", "cudnn_generated_fort_native_sdpa_sm90", "winograd_fwd_4x4"]
    others = ["sm90_xmma_gemm_f16f16_f16f32_tn_n", "cutlass_80_wmma_tensorop_f16_s161616gemm", "max_pool_forward_nchw"]
    assert all(map(names["is_cudnn"], of_cudnn)) and not any(map(names["is_cudnn"], others))


def test_the_flag_is_set_for_both_sides():
    names, seen = {}, []
    exec("import torch\n" + source_with(RECIPE, "def flagged"), names)
    before = torch.backends.cudnn.benchmark
    try:
        for flag in (True, False):
            names["flagged"](lambda x: seen.append(torch.backends.cudnn.benchmark), flag)(1)
    finally:
        torch.backends.cudnn.benchmark = before
    assert seen == [True, False]


def test_rows_of_a_card_can_be_written(recipe, monkeypatch, tmp_path):
    """The cells for CUDA with its calls replaced: the fields of a row must not clash with those of the machine."""
    names = dict(recipe)
    for part in ("def is_cudnn", "def flag_rows", "OPERATIONS = {", "def reach_rows"):
        exec(source_with(RECIPE, part), names)
    one = SimpleNamespace(first_call_s=2.0, median_s=1.0, ci_low_s=0.9, ci_high_s=1.1)
    draw = lambda c, size, k, number=0, kind=None: recipe["draw"](2, 8, k, number)  # noqa: E731
    names |= {"draw": draw, "measure": lambda *args, **kwargs: one, "min_run_time": 0.001}
    names |= {"kernel_names": lambda fn: (fn(), ["sm80_xmma_fprop"])[1]}
    names |= {"OPERATIONS": {"softmax": lambda x: x.softmax(-1)}}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    append_rows(tmp_path / "rows.jsonl", names["flag_rows"]() + names["reach_rows"]())
    *flags, reach = read_rows(tmp_path / "rows.jsonl")
    assert [(r["case.flag"], r["case.size"]) for r in flags] == [(f, n) for f in (False, True) for n in (64, 128, 192)]
    assert all(r["label"] == "conv2d" and r["kernels"] == "sm80_xmma_fprop" and r["peak_bytes"] == 7 for r in flags)
    assert reach["label"] == "flag on" and reach["ran_cudnn"] is True and reach["same_kernels"] is True
    assert {r["cudnn"] for r in (*flags, reach)} == {machine_record("cpu")["cudnn"]}
    assert torch.backends.cudnn.benchmark is False


# ---------------------------------------------------------------------------------------------------- prose


def test_the_recorded_winners_are_what_the_prose_says():
    won = {(r["case.k"], r["case.c"], r["case.size"]): r["winner"] for r in recorded_rows(RECIPE) if "winner" in r}
    assert won[3, 128, 34] == "direct" and won[3, 4, 34] == "im2col"  # Try it, 2
    assert "winograd" not in won.values()
    assert all(name == ("im2col" if size == 18 else "fft") for (k, _, size), name in won.items() if k == 15)
    small = {at: name for at, name in won.items() if at[0] == 3}
    for axis in (1, 2):  # neither the channels alone nor the map size alone
        assert any(len({name for at, name in small.items() if at[axis] == n}) > 1 for n in {at[axis] for at in small})
