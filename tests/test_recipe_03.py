"""Recipe 03: its technique, the rules of its claims on made-up rows, and wrong values refused before any work."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from recipe_notebook import code_cells, run_whole, said, set_up, source_with

from utils import figures
from utils.cookbook.notebooks import tags
from utils.rows import recorded_rows

RECIPE = "03_sdpa"
PRESETS = Path(__file__).parents[1] / "data" / "presets"


def names_of(*parts, **given):
    """What the cells that hold these texts define."""
    for part in parts:
        exec(source_with(RECIPE, part), given)
    return SimpleNamespace(**given)


@pytest.fixture(scope="module")
def rules():
    return names_of("def gain_by_length", "def who_reaches", "def registers_rule", itertools=itertools, figures=figures)


# ---------------------------------------------------------------------------------------------------- technique


@pytest.fixture(scope="module")
def attend():
    return names_of("def check_arguments(", "def blockwise_attention(", torch=torch).blockwise_attention


@pytest.mark.parametrize("factor", [1.0, 30.0, 1000.0])
def test_the_technique_is_exact_at_every_size_of_the_inputs(attend, factor):
    q, k, v = (factor * torch.randn(2, n, 8, dtype=torch.float64) for n in (5, 11, 11))
    exact = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), -1) @ v
    for block_size in (1, 4, 11, 100):
        torch.testing.assert_close(attend(q, k, v, block_size=block_size), exact)


def test_a_mask_and_causal_together_are_refused(attend):
    q = torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="mask or is_causal"):
        attend(q, q, q, block_size=2, mask=torch.ones(4, 4, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"block_size": 0}, "block_size=0; expected a whole number above 0"),
        ({"block_size": -2}, "block_size=-2; expected"),
        ({"block_size": 2.0}, "block_size=2.0; expected"),
        ({"mask": torch.ones(4, 6, dtype=torch.int64)}, "mask is torch.int64; expected torch.bool"),
        ({"mask": torch.ones(4, 6, dtype=torch.uint8)}, "mask is torch.uint8; expected torch.bool"),
        ({"mask": torch.ones(4, 9)}, r"mask has shape \[4, 9\]; expected \[..., 4, 6\]"),
        ({"mask": torch.ones(3, 6, dtype=torch.bool)}, r"mask has shape \[3, 6\]; expected"),
        ({"mask": torch.tensor(True)}, r"mask has shape \[\]; expected"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(attend, given, told):
    q, k = torch.randn(2, 4, 8), torch.randn(2, 6, 8)
    with pytest.raises(ValueError, match=told) as caught:
        attend(q, k, k, **({"block_size": 2} | given))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="expected at least one number in each vector"):
        attend(q[..., :0], k[..., :0], k, block_size=2)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 1), (2, 4, 6), (1, 1)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_masks_that_spread_are_taken(attend, shape, kind):
    q, k = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)
    mask = (torch.rand(shape) > 0.3).to(kind)
    whole = mask.expand(2, 4, 6)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=whole)
    torch.testing.assert_close(attend(q, k, k, block_size=4, mask=mask), exact)


# ---------------------------------------------------------------------------------------------------- S2


def row(length, speedup, verdict="faster", **more):
    """A made-up row of naive against SDPA."""
    fixed = {"device_name": "card", "case.dtype": "bfloat16", "case.keys": length, "same": True}
    return fixed | {"case.length": length, "speedup": speedup, "verdict": verdict} | more


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(64, 2.1), row(1024, 3.9)], "confirmed"),
        ([row(1024, 3.9), row(64, 2.1)], "confirmed"),  # the order in the file does not matter
        ([row(64, 2.4), row(64, 2.5), row(1024, 3.5), row(1024, 3.4)], "confirmed"),  # two runs of one card
        ([row(64, 2.4), row(64, 3.6), row(1024, 3.5)], "refined"),  # one run says that it does not grow
        ([row(64, 1.2), row(1024, 3.0)], "refined"),  # short sequences gain less
        ([row(64, 2.5), row(1024, 7.0)], "refined"),  # long ones gain more
        ([row(64, 3.5), row(1024, 2.5)], "refined"),  # in the band, but falling
        ([row(1024, 3.0)], "refined"),  # one length says nothing about growth
        (
            [row(64, 2.1), row(1024, 3.9), row(64, 1.1, device_name="other"), row(512, 3, device_name="other")],
            "refined",
        ),
        ([row(64, 0.7, "slower"), row(1024, 1.0, "equivalent")], "refuted"),
        (
            [row(64, 2.1, **{"case.dtype": "torch.bfloat16"}), row(1024, 3.9)],
            "confirmed",
        ),  # one type, written in two ways
        ([row(64, 2.1), row(1024, 3.9), row(2048, 0.5, "slower")], "refined"),
        ([row(64, 3.0, "inconclusive")], "not measurable here"),
        ([row(64, 3.0, same=False)], "not measurable here"),
        ([row(1, 0.2, "slower", **{"case.keys": 2048})], "not measurable here"),  # decoding is another question
        ([row(64, 2.1), row(1024, 3.9), row(64, 0.5, "slower", **{"case.pairs": True})], "confirmed"),
    ],
)
def test_s2_follows_its_rule(rules, rows, expected):
    assert rules.gain_by_length(rows)[0] == expected


COUNTED = [
    ("memory_rule", ({"naive": 16.0, "block-wise": 4.0, "SDPA": 4.1}, True), "refined"),
    ("memory_rule", ({"naive": 16.0, "block-wise": 4.0, "SDPA": 4.1}, False), "confirmed"),
    ("memory_rule", ({"naive": 16.0, "block-wise": 4.0, "SDPA": 15.9}, True), "refuted"),
    ("memory_rule", ({"naive": 4.0, "block-wise": 4.0, "SDPA": 4.0}, True), "refuted"),
    ("stored_rule", (False, False), "confirmed"),
    ("stored_rule", (False, True), "refined"),
    ("stored_rule", (True, True), "refuted"),
    ("registers_rule", ("a card", 33 * 2**20, 2**18), "refined"),
    ("registers_rule", ("a card", 5 * 2**20, 2**18), "confirmed"),
    ("registers_rule", ("a card", 33 * 2**20, 2 * 2**20), "confirmed"),
    ("graph_mode_rule", (1, 0), "refuted"),
    ("graph_mode_rule", (3, 0), "refined"),
    ("graph_mode_rule", (1, 1), "confirmed"),
    ("recompute_rule", (False, 1), "refined"),
    ("recompute_rule", (True, 1), "refuted"),
    ("recompute_rule", (False, 2), "confirmed"),
]


@pytest.mark.parametrize(("rule", "given", "expected"), COUNTED)
def test_what_is_counted_settles_by_its_rule_and_says_so(rules, rule, given, expected):
    verdict, evidence = getattr(rules, rule)(*given)
    others = {getattr(rules, rule)(*row[1])[1] for row in COUNTED if row[0] == rule and row[2] != expected}
    assert verdict == expected and evidence not in others, "another verdict has another reason"


def test_s2_names_both_ends(rules):
    found = rules.gain_by_length([row(64, 1.2), row(1024, 3.0), row(32, 0.9, "slower")])
    assert found == ("refined", "faster in 2 of 3 rows, 0.90x at L = 32 to 3.00x at L = 1024")


# ---------------------------------------------------------------------------------------------------- S7


def pairs(sdpa16, naive32, sdpa32, *, length=64, run="a", same=True):
    """Made-up rows of one comparison of four: (ci_low, ci_high) of three pairs against naive in bfloat16."""
    labels = {"SDPA, bfloat16": sdpa16, "naive, float32": naive32, "SDPA, float32": sdpa32}
    fixed = {"run_id": run, "device_name": "card", "case.length": length, "case.pairs": True, "same": same}
    return [fixed | {"label": name, "ci_low": low, "ci_high": high} for name, (low, high) in labels.items()]


WINS = ((3.0, 3.2), (0.5, 0.6), (1.4, 1.6))
BEATEN = ((0.6, 0.7), (0.8, 0.9), (1.4, 1.6))
UNCLEAR = ((1.5, 1.9), (0.5, 0.6), (1.4, 1.6))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (pairs(*WINS), "confirmed"),
        (pairs(*WINS) + pairs(*WINS, length=128), "confirmed"),
        (pairs(*WINS) + pairs(*BEATEN, length=128), "refined"),
        (pairs(*WINS) + pairs(*WINS, length=128, same=False), "confirmed"),  # what is not equal is not compared
        (pairs(*WINS) + pairs(*UNCLEAR, length=128), "refined"),
        (pairs(*WINS) + pairs(*BEATEN, run="b"), "refined"),
        (pairs(*BEATEN), "refuted"),
        (pairs((0.8, 0.9), (0.5, 0.6), (0.5, 0.6)), "refuted"),  # the baseline, naive in bfloat16, wins
        (pairs(*UNCLEAR), "not measurable here"),
        (pairs(*WINS, same=False), "not measurable here"),
        (pairs(*WINS)[:2], "not measurable here"),  # three of four
        ([row(64, 3.0)], "not measurable here"),  # naive against SDPA in one type only
    ],
)
def test_s7_needs_all_four_pairs(rules_of_pairs, rows, expected):
    assert rules_of_pairs.best_pair(rows)[0] == expected


@pytest.fixture(scope="module")
def rules_of_pairs():
    return names_of("def best_pair")


# ---------------------------------------------------------------------------------------------------- S5


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ({"a": True, "b": True}, "confirmed"),
        ({"a": True, "b": False}, "refined"),
        ({"a": False, "b": False}, "refuted"),
    ],
)
def test_s5_follows_its_rule(rules, reached, expected):
    assert rules.who_reaches(reached)[0] == expected


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8'; expected one of float32, bfloat16, float16; nearest: 'float32'"),
        ({"backend": "nope"}, "backend='nope'; expected one of auto, math, flash, efficient; nearest: 'auto'"),
        (
            {"backend": "efficient", "device": "cpu"},
            "backend='efficient' does not exist on a CPU; expected one of auto, math, flash",
        ),
        (
            {"head_dim": 512},
            "head_dim=512; expected at most 128: q, k and v must be small beside the L x L matrix",
        ),
        ({"lengths": []}, "lengths=[]; expected a list of whole numbers of at least 1, one or more"),
        ({"lengths": 64}, "lengths=64; expected a list of whole numbers of at least 1"),
        ({"lengths": [64, 0]}, "lengths=[64, 0]; expected a list of whole numbers of at least 1"),
        ({"heads": 0}, "heads=0; expected a whole number of at least 1"),
        ({"block_size": -1}, "block_size=-1; expected a whole number of at least 1"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        set_up(RECIPE, **given)  # which ends before the cell `machine`: nothing ran before
    assert str(caught.value) == message


@pytest.mark.parametrize("preset", [None, "cpu", "gpu"])
def test_the_defaults_and_the_presets_are_taken(preset):
    given = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text()).get(RECIPE, {}) if preset else {}
    scope = set_up(RECIPE, **given | {"device": "cpu"})
    assert scope["kind"] == getattr(torch, scope["dtype"])


# ---------------------------------------------------------------------------------------------------- rows


def test_the_recorded_table_shows_type_and_keys_of_each_row():
    """The row of one query in bfloat16 was once shown as float32, from the parameter."""
    (cell,) = [cell for cell in code_cells(RECIPE) if "recorded" in tags(cell)]
    lines = said(cell).splitlines()
    table = [line.split() for line in lines]
    for r in recorded_rows("03_sdpa"):
        if r["provenance"] == "measured" and not r.get("case.pairs"):
            expected = (str(r["case.dtype"]).removeprefix("torch."), f"{r['case.length']:,}", f"{r['case.keys']:,}")
            assert any(set(expected) <= set(line) for line in table), expected


def test_the_four_pairs_are_one_comparison(tmp_path):
    """A whole run at small sizes writes rows from which S7 can be judged."""
    given = {"lengths": [16, 32], "heads": 2, "head_dim": 16, "min_run_time": 0.05}
    _, found = run_whole(RECIPE, tmp_path, **given)
    four = [r for r in found if r.get("case.pairs")]
    assert [(r["case.length"], r["label"]) for r in four] == [
        (length, label) for length in (16, 32) for label in ("SDPA, bfloat16", "naive, float32", "SDPA, float32")
    ]
    assert all(r["same"] and r["baseline_label"] == "naive, bfloat16" for r in four)
    assert {r["case.dtype"] for r in found if "case.dtype" in r} == {"float32", "bfloat16"}
    assert sum(bool(r.get("headline")) for r in found) == 1
