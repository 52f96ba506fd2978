"""Recipe 01: its technique away from the notebook, its recorded rows, and whole runs with papermill."""

import copy

import pytest
import torch
from recipe_notebook import check_refused, claims_in, run_whole, source_of, source_with
from torch import nn

from utils.claims import per_place
from utils.dynamic_range import audit
from utils.rows import recorded_rows

RECIPE = "01_bf16_fp16"
CLAIMS = {f"P{number}" for number in range(1, 11)}


@pytest.fixture(scope="module")
def technique():
    names = {"torch": torch, "copy": copy}
    exec(source_with(RECIPE, "def to_sixteen"), names)
    return names


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 1 / 3]), persistent=False)
        self.register_buffer("steps", torch.arange(3))


def test_the_technique_keeps_tables_and_halves_the_rest(technique):
    model = nn.Sequential(Rotary(), Rotary())
    small = technique["to_sixteen"](model)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # a copy was cast
    for module in small:
        assert torch.equal(module.inv_freq, model[0].inv_freq) and module.inv_freq.dtype is torch.float32
        assert module.steps.dtype is torch.int64 and "inv_freq" not in module.state_dict()
    assert technique["to_sixteen"](model, torch.float16, keep=())[0].inv_freq.dtype is torch.float16


def test_a_table_that_two_modules_share_stays_exact_in_both(technique):
    model = nn.Sequential(Rotary(), Rotary())
    model[1].inv_freq = model[0].inv_freq
    small = technique["to_sixteen"](model)
    for module in small:
        assert torch.equal(module.inv_freq, model[0].inv_freq) and module.inv_freq.dtype is torch.float32
    assert small[1].inv_freq is small[0].inv_freq is not model[0].inv_freq


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning", "ignore:Complex modules:UserWarning")
@pytest.mark.parametrize("keep", [("inv_freq",), ()])
def test_a_complex_table_keeps_its_imaginary_part(technique, keep):
    model = nn.Sequential(Rotary())
    model[0].register_buffer("freqs_cis", torch.polar(torch.ones(3), torch.tensor([0.0, 1.0, 2.0])))
    small = technique["to_sixteen"](model, keep=keep)
    assert torch.equal(small[0].freqs_cis, model[0].freqs_cis) and small[0].freqs_cis.dtype is torch.complex64
    assert small[0].inv_freq.dtype is (torch.float32 if keep else torch.bfloat16)


@pytest.fixture(scope="module")
def rules():
    names: dict = {}
    exec(source_with(RECIPE, "def memory_rule"), names)
    exec(source_with(RECIPE, "def both_halves"), names)
    return names


def made_up(baseline="float32", label="bfloat16", verdict="faster", low=2.5, high=3.5, device="cuda:0"):
    """A row that never was measured."""
    row = {"device": device, "device_name": device, "baseline_label": baseline, "label": label, "verdict": verdict}
    return row | {"ci_low": low, "ci_high": high, "speedup": (low + high) / 2}


@pytest.mark.parametrize(
    "figures, verdict, said",
    [
        ((1000, 500, 0, 80, 40), "confirmed", "weights halve to the byte; the peak of a call does as well"),
        ((1000, 500, 0, 80, 41), "refined", "weights halve to the byte; the peak of a call does not"),
        (
            (1000, 504, 8, 80, 40),
            "refined",
            "weights halve to the byte (but the kept tables); the peak of a call does a",
        ),
        ((1000, 504, 0, 80, 40), "refuted", "weights take 50% of the bytes"),
        ((1000, 1000, 0, 80, 40), "refuted", "weights take 100% of the bytes"),
    ],
)
def test_halving_the_memory_follows_its_rule(rules, figures, verdict, said):
    found = rules["memory_rule"](*figures)
    assert found[0] == verdict and found[1].startswith(said)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"length": 0}, "length=0; expected a whole number of at least 1"),
        ({"side": 0}, "side=0; expected a whole number of at least 33"),
        ({"side": 32}, "side=32; expected a whole number of at least 33"),
        ({"threads": 0}, "threads=0; expected a whole number of at least 1"),
        ({"patience": -1.0}, "patience=-1.0; expected a finite number of at least 0"),
        ({"patience": "5"}, "patience='5'; expected a finite number"),
        ({"patience": float("nan")}, "patience=nan; expected"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)


@pytest.mark.parametrize(
    "intervals, verdict",
    [
        ([(2.0, 3.0), (2.5, 4.0)], "confirmed"),
        ([(2.0, 3.0), (1.4, 1.6)], "refined"),  # it depends on the float32 setting
        ([(5.0, 6.0), (2.5, 3.5)], "refined"),
        ([(5.0, 6.0), (4.5, 5.5)], "refined"),
        ([(1.5, 2.1), (1.4, 1.6)], "refined"),
        ([(1.5, 1.9), (0.9, 1.1)], "refuted"),
    ],
)
def test_the_gain_on_tensor_cores_follows_its_rule(rules, intervals, verdict):
    (a, b), (c, d) = intervals
    rows = [made_up("float32", low=a, high=b), made_up("TF32", low=c, high=d)]
    assert rules["tensor_core_rule"](rules["against_both"](rows))[0] == verdict


def test_the_gain_on_tensor_cores_needs_a_card_and_both_kinds_of_float32(rules):
    plain, tf32 = made_up("float32"), made_up("TF32")
    assert rules["against_both"]([plain, tf32]) == [plain, tf32]
    others = [made_up("float32", "TF32"), made_up("bfloat16", "float16"), made_up("float32", verdict="invalid")]
    assert rules["against_both"]([plain, tf32, *others]) == [plain, tf32]
    open_one = made_up("float32", verdict="inconclusive", low=0.5, high=9.0)  # says nothing
    assert rules["against_both"]([plain, tf32, open_one]) == [plain, tf32]
    elsewhere = made_up("TF32", device="cuda:1")
    for rows in (
        [plain, elsewhere],
        [open_one, tf32],
        [plain],
        [tf32],
        [plain, *others],
        [made_up("float32", device="cpu"), made_up("TF32", device="cpu")],
    ):
        assert rules["against_both"](rows) == []


@pytest.mark.parametrize(
    "verdicts, verdict",
    [
        ({"cuda:0": "equivalent"}, "confirmed"),
        ({"cuda:0": "equivalent", "cpu": "equivalent"}, "confirmed"),
        ({"cuda:0": "equivalent", "cpu": "slower"}, "refined"),
        ({"cuda:0": "faster", "cpu": "slower"}, "refuted"),
        ({"cuda:0": "equivalent", "cpu": "inconclusive"}, "confirmed"),  # an inconclusive row says nothing
        ({"cuda:0": "inconclusive", "cpu": "slower"}, None),
        ({"cpu": "equivalent"}, None),  # says nothing about a card
    ],
)
def test_equal_speed_follows_its_rule(rules, verdicts, verdict):
    rows = [made_up("bfloat16", "float16", found, device=device) for device, found in verdicts.items()]
    chosen = rules["both_halves"]([*rows, made_up("float32", "float16")])
    assert (per_place(rules["equal_rule"])(chosen)[0] if chosen else None) == verdict


def test_equal_speed_is_judged_by_kind_of_device_and_not_by_row(rules):
    """Two products of one card, one of them slower: it holds on no kind of device."""
    rows = [made_up("bfloat16", "float16", found, device="cuda:0") for found in ("equivalent", "slower")]
    assert per_place(rules["equal_rule"])(rows)[0] == "refuted"
    assert "per_place(equal_rule)" in source_of(RECIPE, "claims")


def test_the_last_product_tells_near_words_apart(technique):
    hidden = torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16)
    words = torch.tensor([[20.0, 0.0], [20.0, 0.0625]], dtype=torch.bfloat16)
    assert (hidden[:, -1] @ words.T).argmax(-1).item() == 0
    assert technique["next_token"](hidden, words).item() == 1


def test_tf32_by_hand_rounds_to_ten_fraction_bits():
    names = {"torch": torch}
    exec(source_with(RECIPE, "def to_tf32").partition("\n\n\n")[0], names)
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3.0e38, 0.0, 2**-126])
    expected = [1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10]
    assert names["to_tf32"](x)[:5].tolist() == expected
    assert names["to_tf32"](x)[6:].tolist() == [0.0, 2**-126]
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert ((names["to_tf32"](wide) - wide).abs() <= wide.abs() * 2**-11).all()


def test_the_idea_in_the_notebook_agrees_with_the_library():
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {"torch": torch, "TorchDispatchMode": TorchDispatchMode}
    exec(source_with(RECIPE, "class FirstTooLarge").partition("\n\n\n")[0], names)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Softmax(-1))
    with torch.no_grad():
        model[0].weight.fill_(100.0), model[1].weight.fill_(200.0)
        with names["FirstTooLarge"](model) as watch:
            model(torch.ones(1, 4))
    first = audit(model, torch.ones(1, 4), dtype="fp16").first
    assert watch.found == (first.path, first.op) == ("1", "mm")


def test_recorded_rows_are_complete_and_say_where_they_come_from():
    rows = recorded_rows(RECIPE)
    reported = [row for row in rows if row["provenance"] == "reported"]
    assert all(row["recipe"] == RECIPE and row["source"].startswith("github.com/") for row in reported)
    assert {row["dtype"] for row in reported if row["kind"] == "fault"} == {"float16", "bfloat16"}
    pairs = [row for row in reported if row["kind"] == "pair"]
    assert len(pairs) >= 3 and all(row["baseline_median_s"] > row["median_s"] for row in pairs)


def test_a_run_with_other_parameters(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, length=128, side=64, patience=0.0, seed=1)
    assert claims_in(done).keys() == CLAIMS
    assert {(row["baseline_label"], row["label"], row["case.side"]) for row in rows} == {
        ("float32", "bfloat16", 64),
        ("float32", "float16", 32),  # no patience: the guard stops at once
        ("bfloat16", "float16", 32),
    }
    for row in rows:
        assert row["provenance"] == "measured" and row["same"] and not row["error"], row
        assert row["param.side"] == 64 and row["param.seed"] == 1
    assert sum(row.get("headline", False) for row in rows) == 1


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, device="cuda", side=4096, length=1024)
    assert claims_in(done).keys() == CLAIMS
    big = {row["label"]: row for row in rows if row["case.side"] == 4096 and row["baseline_label"] == "float32"}
    assert {"TF32", "bfloat16"} <= big.keys() and any(row["baseline_label"] == "TF32" for row in rows)
    for row in rows:
        assert row["device"].startswith("cuda") and row["same"] and row["driver"] and not row["error"], row
