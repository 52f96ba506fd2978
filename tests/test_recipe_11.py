"""Recipe 11: its rules on made-up numbers, and the values that its set-up refuses."""

from types import SimpleNamespace

import pytest
import torch
from recipe_notebook import check_refused, source_with

RECIPE = "11_reading_notes"


@pytest.fixture(scope="module")
def rules():
    names = {"torch": torch}
    for text in ("def value_rule", "def checkpoint_rule"):
        exec(source_with(RECIPE, text), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize(
    ("same", "flops", "columns", "verdict"),
    [
        (True, (1000, 100, 10), 128, "refined"),  # fewer FLOPs, and a head is never d wide: both are right
        (True, (1000, 100, 10), 12288, "confirmed"),  # fewer, but the objection does not hold
        (True, (1000, 1000, 10), 128, "refuted"),
        (True, (1000, 1500, 10), 128, "refuted"),
        (False, (1000, 100, 10), 128, "refuted"),
    ],
)
def test_k8_follows_its_rule(rules, same, flops, columns, verdict):
    assert rules.value_rule(same, flops, columns, 12288)[0] == verdict


def test_k9_follows_its_rule(rules):
    rewards = torch.tensor([[1.0] * n + [0.0] * (8 - n) for n in (7, 4, 1)], dtype=torch.float64)
    centred, spread = rewards - rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    verdict, text = rules.advantage_rule(rewards, centred, centred / spread)
    assert verdict == "confirmed" and "7 of 8 right 2.8x" in text
    biased = rewards.std(1, keepdim=True, correction=0)
    for dr_grpo, grpo in (
        (centred, rewards / spread),  # the mean stays in one of them
        (rewards, rewards / spread),  # and in both
        (centred, centred / biased),
        (centred, centred),
    ):
        assert rules.advantage_rule(rewards, dr_grpo, grpo)[0] == "refuted"


@pytest.mark.parametrize(
    ("equal", "without", "with_it", "extra", "verdict"),
    [
        (True, 900, 100, 1.0, "confirmed"),
        (True, 900, 100, 0.9, "confirmed"),
        (True, 900, 100, 1.1, "confirmed"),  # within 10 percent
        (True, 900, 100, 1.11, "refined"),
        (True, 900, 100, 0.5, "refined"),
        (True, 900, 100, 1.5, "refined"),
        (True, 900, 900, 1.0, "refuted"),
        (True, 900, 100, 0.0, "refuted"),
        (False, 900, 100, 1.0, "refuted"),
    ],
)
def test_k10_follows_its_rule(rules, equal, without, with_it, extra, verdict):
    assert rules.checkpoint_rule(equal, without, with_it, extra)[0] == verdict


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"width": 0}, "width=0; expected a whole number of at least 3"),
        ({"width": 96.0}, "width=96.0; expected a whole number"),
        ({"rank": 0}, "rank=0; expected a whole number of at least 1"),
        ({"layers": 0}, "layers=0; expected a whole number of at least 1"),
        ({"layers": True}, "layers=True; expected a whole number"),
        ({"threads": 0}, "threads=0; expected a whole number of at least 1"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)
