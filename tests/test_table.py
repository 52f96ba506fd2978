import json

import pytest
from toy_recipes import toy

from utils.cookbook import presets
from utils.cookbook.readme import results_markdown
from utils.cookbook.run import Outcome
from utils.cookbook.table import (
    bytes_text,
    card,
    headline,
    interval_text,
    results_table,
    same_answer,
    seconds_text,
    speedup_text,
    usual_rows,
    wide_cells,
)

FAST = {"label": "linear", "speedup": 11.84, "verdict": "faster", "same": True, "rule": "bitwise", "ci_low": 11.2}
FAST |= {"ci_high": 12.5, "median_s": 0.001, "baseline_median_s": 0.011, "first_call_s": 0.5, "share_of_limit": 0.97}
FAST |= {"peak_bytes": 5e6, "baseline_peak_bytes": 2e7, "case.patches": 784}
WRONG = {"label": "wrong", "speedup": 90.0, "verdict": "invalid", "same": False, "rule": "different"}
SLOW = {"label": "slow", "speedup": 0.5, "verdict": "slower", "same": True, "rule": "approximate"}


def test_the_headline_is_the_marked_row():
    assert headline([FAST, SLOW | {"headline": True}]) == (SLOW | {"headline": True}, True)


def test_without_a_mark_the_best_valid_row_stands_and_the_table_says_so():
    assert headline([SLOW, WRONG, FAST]) == (FAST, False)
    assert headline([FAST]) == (FAST, True)
    assert headline([WRONG]) == (WRONG, True)
    assert headline([]) == (None, True)
    assert headline([FAST | {"provenance": "reported"}]) == (None, True)


def test_an_invalid_row_has_no_speed_up():
    assert [speedup_text(row) for row in (FAST, SLOW, WRONG, None)] == ["11.8x", "0.50x", "—", "—"]
    assert speedup_text(FAST | {"speedup": 118.4}) == "118x"
    assert speedup_text(FAST | {"speedup": None}) == "—"


def test_same_answer():
    assert [same_answer(row) for row in (FAST, SLOW, WRONG, {}, None)] == ["yes", "approx.", "NO", "—", "—"]


@pytest.mark.parametrize(
    ("name", "short"),
    [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla T4", "T4"), (None, "")],
)
def test_cards_have_short_names(name, short):
    assert card(name) == short


def test_units():
    assert [seconds_text(s) for s in (2, 0.0125, 3e-6, 5e-9, None)] == ["2 s", "12.5 ms", "3 µs", "5 ns", "—"]
    assert [bytes_text(b) for b in (2.5e9, 6e6, 1500, 12, None)] == ["2.5 GB", "6 MB", "1.5 kB", "12 B", "—"]


@pytest.fixture
def outcomes(tmp_path):
    names = ["07_conv3d_to_linear", "08_kv_cache", "09_find_the_cliff", "20_a_recipe_with_a_very_long_name_for_once"]
    paths = [toy(tmp_path, name, why="one matrix product, not a convolution") for name in names]
    error = "AssertionError: a long story about two outputs that are not the same at all, however one looks at them"
    return [
        Outcome(names[0], "done", [SLOW, FAST], 12.0, paths[0]),
        Outcome(names[1], "kept", [WRONG], 3.0, paths[1]),
        Outcome(names[2], "failed", path=paths[2], where="cell [7], tag `check`", why=error),
        Outcome(names[3], "done", [FAST | {"verdict": "inconclusive", "why": "noise"}], 3.0, paths[3]),
    ]


def test_the_table_fits_80_columns_and_says_what_counts(outcomes, tmp_path):
    recorded = [
        FAST | {"provenance": "measured", "device": "cpu", "device_name": "a CPU", "speedup": 300.0},
        FAST | {"provenance": "measured", "device": "cuda:0", "device_name": "NVIDIA H200", "speedup": 118.4},
        FAST | {"provenance": "reported", "device": "cuda", "device_name": "NVIDIA B200", "speedup": 900.0},
    ]
    file = tmp_path / "results" / "07_conv3d_to_linear.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in recorded))
    text = results_table(outcomes, results=tmp_path / "results")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "* the best valid row of several" in lines[-1]
    row = next(line for line in lines if line.startswith("07_conv3d_to_linear"))
    assert row.split()[1:6] == ["11.8x*", "118x", "H200", "yes", "faster"]
    row = next(line for line in lines if line.startswith("08_kv_cache"))
    assert row.split()[1:5] == ["—", "—", "NO", "invalid"]
    assert "cell [7], tag" in text and "noise" in text and "B200" not in text and "a long story" not in text


def test_wide_shows_every_row_in_full(outcomes, tmp_path):
    text = results_table(outcomes, wide=True, results=tmp_path)
    row = next(line for line in text.splitlines() if "linear (patches=784)" in line)
    for shown in ("11.2–12.5", "yes (bitwise)", "1 ms", "11 ms", "5 MB of 20 MB", "97%", "500 ms", "50 calls"):
        assert shown in row
    assert "slow " in text and "failed" in text


def test_a_ratio_that_noise_left_unknown_is_not_shown():
    row = {"verdict": "inconclusive", "speedup": 2.06, "ci_low": 0.55, "ci_high": 7.65}
    assert speedup_text(row) == "—" and interval_text(row) == "unknown" == wide_cells(row)[2]
    assert interval_text(row | {"ci_low": 1.0, "ci_high": 3.0}) == "1–3" and interval_text(None) == "—"
    assert interval_text(row | {"ci_low": None, "ci_high": None}) == "—" == interval_text(row | {"verdict": "invalid"})
    assert speedup_text(row | {"ci_low": 1.0, "ci_high": 3.0}) == "2.06x"
    assert speedup_text(row | {"ci_low": None, "ci_high": None}) == "2.06x" == speedup_text(row | {"ci_low": "low"})


def test_a_headline_whose_ratio_is_known_goes_before_a_newer_one_that_is_noise():
    good = {"headline": True, "verdict": "faster", "speedup": 2.0, "ci_low": 1.9, "ci_high": 2.1}
    noise = {"headline": True, "verdict": "inconclusive", "speedup": 3.5, "ci_low": 0.5, "ci_high": 9.0}
    assert headline([good, noise]) == (good, True) and headline([noise]) == (noise, True)


def test_only_rows_at_the_defaults_or_a_preset_stand_for_a_recipe_where_there_are_any(tmp_path, monkeypatch):
    path = toy(tmp_path, "07_toy")
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "gpu.yaml").write_text("07_toy: {device: cuda, rate: 2, sizes: [9]}\n")
    monkeypatch.setattr(presets, "PRESETS", tmp_path / "presets")
    measured = FAST | {"provenance": "measured", "device": "cuda", "device_name": "NVIDIA H200", "headline": True}
    default = measured | {"param.rate": 0.5, "param.sizes": [1, 2], "param.seed": 3, "speedup": 2.0}
    preset = measured | {"param.rate": 2.0, "param.sizes": [9], "param.device": "cuda", "speedup": 3.0}
    other = measured | {"param.rate": 2.0, "param.sizes": [1, 2], "speedup": 90.0}  # half a preset
    bare = {
        "provenance": "measured",
        "device": "cuda",
        "device_name": "NVIDIA H200",
    }  # not compared: stands for nothing

    def shown(*rows):
        (tmp_path / "07_toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        line = results_table([Outcome("07_toy", "done", [SLOW], 1.0, path)], results=tmp_path).splitlines()[-1]
        assert f"| {line.split()[2]} on H200 |" in results_markdown([path], tmp_path)
        return line.split()[2]

    assert shown(default, other) == "2.00x" and shown(other, preset, other) == "3.00x"
    assert shown(default, preset) == "3.00x"  # the newest of them, as before
    assert shown(other, bare) == "90.0x"  # there is no other


def test_a_recipe_without_its_notebook_has_all_rows(tmp_path):
    assert usual_rows([FAST], None) == [FAST] == usual_rows([FAST], tmp_path / "gone.ipynb")
