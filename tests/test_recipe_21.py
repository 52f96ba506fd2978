"""Recipe 21: its techniques away from the notebook, its recorded rows, other parameters, and a run on a card."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from recipe_notebook import claims_of, code_cells, run_here, run_whole, set_up, source_with

from utils.equivalence import check_equivalence
from utils.rows import read_rows, recorded_rows

RECIPE = "21_flux_kontext"
ROOT = Path(__file__).parents[1]
MISSING_ON_CPU = {"cudnn.benchmark", "CUDA Graph"}


def run_until(tag, **given):
    """The names of the notebook after all cells before the first one tagged `tag`."""
    names = {"__name__": RECIPE}
    for cell in code_cells(RECIPE):
        if tag in cell.metadata.get("tags", []):
            return names
        exec(cell.source, names)
        if "parameters" in cell.metadata.get("tags", []):
            assert given.keys() <= names.keys()
            names |= given
    raise AssertionError(f"no cell is tagged {tag}")


@pytest.fixture(scope="module")
def recipe():
    return run_until("control", device="cpu", side=16, text=4, steps=1)


def edited(recipe, *names, image=0, kind=None):
    inputs = recipe["draw"](image)
    if kind is not None:
        inputs = tuple(t.to(kind) for t in inputs)
    with torch.inference_mode():
        return recipe["build"](*names, kind=kind or torch.float32)()(*inputs)


@pytest.mark.parametrize(
    "names", [("SDPA",), ("fused QKV",), ("channels_last",), ("SDPA", "fused QKV", "channels_last")]
)
def test_a_technique_gives_the_same_image(recipe, names):
    for image in (0, 1):
        exact = edited(recipe, image=image, kind=torch.float64)
        assert check_equivalence(edited(recipe, *names, image=image), edited(recipe, image=image), reference=exact)


def test_attention_by_hand_is_attention(recipe):
    by_hand, fused = (edited(recipe, *names, kind=torch.float64) for names in ((), ("SDPA",)))
    assert torch.allclose(by_hand, fused, rtol=1e-9, atol=1e-11)


def test_the_techniques_are_there(recipe):
    pipe = recipe["pipeline"]("SDPA", "bfloat16", "fused QKV", "channels_last")
    block, conv = pipe.transformer.transformer_blocks[0], pipe.vae.decoder.conv_in
    assert type(block.attn.processor).__name__ == "FluxAttnProcessor" and block.attn.fused_projections
    assert pipe.transformer.dtype == pipe.vae.dtype == torch.bfloat16
    assert conv.weight.is_contiguous(memory_format=torch.channels_last) and not conv.weight.is_contiguous()
    assert type(recipe["pipeline"]().transformer.transformer_blocks[0].attn.processor).__name__ == "ByHand"


def test_bfloat16_is_lossy_and_passes_only_by_its_score(recipe):
    plain, half = edited(recipe), edited(recipe, "bfloat16")
    assert recipe["close_image"](half, plain).rule == "approximate" and not check_equivalence(half, plain)
    grey = torch.full_like(plain, float(plain.mean()))
    assert not recipe["close_image"](grey, plain) and not recipe["close_image"](1 - plain, plain)


@pytest.mark.parametrize("name", ["prompt zeroed", "summary of it zeroed", "positions zeroed", "guidance zeroed"])
@pytest.mark.parametrize("image", [0, 1])
def test_the_lossy_check_sees_an_input_that_is_ignored(recipe, name, image):
    """Each of these images keeps 26 dB or more: a fixed bound would let it through."""
    inputs, expected = recipe["draw"](image), edited(recipe, image=image)
    broken = recipe["EDITS"][name](recipe["pipeline"]("SDPA", "bfloat16"))
    assert not recipe["close_image"](recipe["image_of"](broken, inputs), expected)
    assert recipe["close_image"](edited(recipe, "SDPA", "fused QKV", "bfloat16", image=image), expected)


def test_the_bound_follows_what_rounding_does_to_each_edit(recipe):
    exact = [torch.linspace(0, 1, 100), torch.linspace(1, 0, 100)]
    judge = recipe["by_yardstick"](exact, [exact[0] + 0.01, exact[1] + 0.001])  # 40 dB and 60 dB
    assert judge(exact[0] + 0.011, exact[0]) and not judge(exact[0] + 0.012, exact[0])
    assert judge(exact[1] + 0.0011, exact[1]) and not judge(exact[1] + 0.0012, exact[1])


def test_plain_bfloat16_itself_must_keep_the_least_psnr(recipe):
    exact = torch.linspace(0, 1, 100)
    rounded = exact + 0.05  # 26 dB
    assert not recipe["by_yardstick"]([exact], [rounded])(rounded, exact)


def test_a_start_in_bfloat16_is_judged_against_float32():
    names = run_until("control", device="cpu", side=16, text=4, steps=1, dtype="bfloat16", replicates=1)
    assert names["exact"][0].dtype == torch.float32 and not names["strict"]
    broken = names["EDITS"]["prompt zeroed"](names["pipeline"]("SDPA"))
    assert not names["close_image"](names["image_of"](broken, names["draw"](0)), names["expected"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "float17"}, "dtype='float17'; expected one of float32, bfloat16; nearest: 'bfloat16'"),
        ({"size": "huge"}, "size='huge'; expected one of tiny, small, full; nearest: "),
        ({"side": 30}, "side=30; expected a multiple of 4; nearest: 32"),
        ({"side": 24, "size": "small"}, "side=24; expected a multiple of 16; nearest: 32"),
        ({"side": 32.0}, "side=32.0; expected a whole number of at least 1"),
        ({"text": 0}, "text=0; expected a whole number of at least 1"),
        ({"steps": 0}, "steps=0; expected a whole number of at least 1"),
        ({"steps": True}, "steps=True; expected a whole number of at least 1"),
        ({"replicates": 0}, "replicates=0; expected a whole number of at least 1"),
        ({"seed": -1}, "seed=-1; expected a whole number of at least 0"),
        ({"launch_us": -5.0}, "launch_us=-5.0; expected a finite number above 0"),
        ({"least_psnr": math.nan}, "least_psnr=nan; expected a finite number above 0"),
        ({"least_psnr": -1.0}, "least_psnr=-1.0; expected a finite number above 0"),
        ({"worse_by": math.inf}, "worse_by=inf; expected a finite number above 0"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
    ],
)
def test_wrong_values_are_refused_before_a_model_is_built(given, said, monkeypatch):
    monkeypatch.setattr("utils.models.flux_kontext.kontext", lambda *_, **__: pytest.fail("built a model"))
    with pytest.raises((TypeError, ValueError)) as caught:
        set_up(RECIPE, device="cpu", **given)
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_a_stack_is_not_timed_against_itself(recipe):
    names = dict(recipe)
    exec(source_with(RECIPE, "def contest(baseline"), names)
    names["compare"] = lambda *_, **__: pytest.fail("timed")
    with pytest.raises(AssertionError):
        names["contest"](["SDPA"], {"kept stack": ["SDPA"]})


@pytest.mark.parametrize(
    ("kept", "half_gains", "kinds", "against"),
    [
        (["SDPA"], 0.9, ["plain", "plain"], "SDPA"),
        (["SDPA", "bfloat16"], 1.5, ["plain", "plain"], "SDPA, bfloat16"),
        (["SDPA", "compile"], 1.5, ["plain", "plain", "final"], "SDPA, bfloat16"),
        (["SDPA", "bfloat16", "compile"], 0.9, ["plain", "plain", "final"], "SDPA"),
    ],
)
def test_the_last_word_is_against_the_best_plain_form_or_said_in_words(kept, half_gains, kinds, against):
    """Comparisons are made up: plain bfloat16 over by hand gains `half_gains`, plain float32 nothing."""
    asked = []

    def contest(baseline, candidates):
        asked.append((baseline, candidates))
        return {name: SimpleNamespace(speedup=half_gains if "bfloat16" in name else 1.0) for name in candidates}

    def row_of(result, case, place=0, **more):
        return {"label": list(result)[place], "case.kind": case["kind"]} | more

    names = {"contest": contest, "row_of": row_of, "half": ("SDPA", "bfloat16"), "absent": {}, "dtype": "float32"}
    exec(source_with(RECIPE, "def last_word"), names)
    finals, rows = names["last_word"](kept)
    assert [row["case.kind"] for row in rows] == kinds and len(finals) == len(set(kinds))
    (head,) = [row for row in rows if row.get("headline")]
    assert (head["stack"], head["against"]) == (", ".join(kept), against)
    assert not [1 for baseline, candidates in asked if baseline in candidates.values()]
    if kinds[-1] == "plain":
        assert head["label"] == against and "no more gain shown" in head["why"] and len(head["why"]) <= 40
    else:
        assert head["label"] == "kept stack" and asked[-1][0] == against.split(", ")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"verdict": "inconclusive"}, "no gain shown"),
        ({"verdict": "equivalent"}, "gains nothing"),
        ({"verdict": "slower"}, "slower"),
        ({"verdict": "invalid"}, "another image"),
        ({"missing": "needs a CUDA device: …"}, "needs CUDA"),
        ({"missing": "needs a C++ compiler"}, "not possible here"),
    ],
)
def test_a_step_that_is_left_out_says_why(row, said):
    assert names_of_cell("def reason")["reason"](row) == said


def test_psnr_counts_the_contrast_of_the_image(recipe):
    image = torch.linspace(0, 1, 100)
    assert math.isclose(recipe["psnr"](image + 0.01, image), 40, rel_tol=1e-3)
    assert math.isclose(recipe["psnr"](0.1 * image + 0.001, 0.1 * image), 40, rel_tol=1e-3)  # a pale image: the same


def test_the_flag_of_cudnn_is_on_only_inside(recipe):
    seen = []
    pipe = recipe["pipeline"]("cudnn.benchmark")
    pipe.vae.decoder.conv_in.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    before = torch.backends.cudnn.benchmark
    with torch.inference_mode():
        recipe["flux"].editor(pipe, 16, 1)(*recipe["draw"](0))
    assert seen == [True] and torch.backends.cudnn.benchmark == before


def test_recorded_rows_keep_only_what_earned_its_place():
    rows = [row for row in recorded_rows(RECIPE) if row["provenance"] == "measured"]
    assert rows and all(row["recipe"] == RECIPE for row in rows)
    for run in dict.fromkeys(row["run_id"] for row in rows):
        mine = [row for row in rows if row["run_id"] == run]
        added = [row for row in mine if row["case.kind"] == "added"]
        assert [row["label"] for row in added][:2] == ["SDPA", "bfloat16"] and len(added) == 7
        at_home = [row for row in added if row["label"] == "SDPA"]  # what a fresh pipeline does: kept unless slower
        assert all(row["kept"] == (row["verdict"] not in ("slower", "invalid", "error")) for row in at_home)
        assert all(row["kept"] == (row.get("verdict") == "faster") for row in added if row not in at_home)
        assert all(row.get("missing") or row["verdict"] for row in added)
        (head,) = [row for row in mine if row.get("headline")]
        assert head["stack"] == ", ".join(row["label"] for row in added if row["kept"])
        assert head["label"] == "kept stack" or head["label"] == head["stack"] == head["against"]
        assert not [row["label"] for row in mine if row.get("verdict") in ("invalid", "error")]


def test_the_kept_stack_of_a_cpu_is_not_slower_than_plain_eager():
    head = [row for row in recorded_rows(RECIPE) if row["device"] == "cpu" and row.get("headline")][-1]
    assert head["verdict"] != "slower" and head["param.size"] == "small"
    assert head["against"] in ("SDPA", "SDPA, bfloat16")


ALONE = {"SDPA": 1.5, "compile": 1.4, "CUDA Graph": 1.2}  # multiplied: 2.52


def settled(stacked, *, alone=ALONE, width=0.01, undecided=(), device="cuda:0"):
    """X1 from made-up rows whose intervals are ± `width`."""
    row = {"run_id": "a", "device": device, "device_name": "NVIDIA Made Up", "provenance": "measured"}
    rows = []
    for name, s in (alone | {" + ".join(alone): stacked}).items():
        low, high = s * (1 - width), s * (1 + width)
        verdict = "faster" if low > 1.02 else "slower" if high < 1 else "equivalent"
        verdict = "inconclusive" if name in undecided else verdict
        rows.append(row | {"label": name, "speedup": s, "ci_low": low, "ci_high": high, "verdict": verdict})
    names = names_of_cell("def verdict_of")
    exec(source_with(RECIPE, "def adds_up"), names)
    return names["adds_up"](rows)


@pytest.mark.parametrize(
    ("stacked", "given", "verdict"),
    [
        (2.5, {}, "confirmed"),
        (3.0, {}, "confirmed"),  # more than the product
        (1.9, {}, "refined"),  # more than each of them, less than the product
        (1.5, {}, "refuted"),  # no more than SDPA alone
        (2.1, {"alone": ALONE | {"CUDA Graph": 1.0}}, "refuted"),  # equivalent: the whole interval says so
        (1.9, {"alone": ALONE | {"CUDA Graph": 0.9}}, "refuted"),
        (2.1, {"undecided": ("CUDA Graph",)}, "not measurable here"),  # inconclusive is not "gains nothing"
        (1.5, {"undecided": ("SDPA + compile + CUDA Graph",)}, "not measurable here"),
        (1.6, {"width": 0.3, "alone": dict.fromkeys(ALONE, 1.5)}, "not measurable here"),  # too wide to tell
    ],
)
def test_the_rule_of_x1(stacked, given, verdict):
    found, said = settled(stacked, **given)
    assert found == verdict and "\n" not in said


@pytest.mark.parametrize(("stacked", "undecided"), [(2.1, ()), (1.5, ()), (2.1, ("SDPA",))])
def test_rows_without_graphs_do_not_settle_x1(stacked, undecided):
    alone = {"SDPA": 1.5, "compile": 1.4}
    found, said = settled(stacked, alone=alone, undecided=undecided, device="cpu")
    assert found == "not measurable here" and "CUDA Graph" in said and "on a CPU" in said
    assert "gains nothing" not in said and ("undecided (" in said) == bool(undecided)


def names_of_cell(start):
    names = {"math": math}
    exec(source_with(RECIPE, start), names)
    return names


def test_other_parameters_give_complete_rows(tmp_path, capsys, monkeypatch):
    """Without a compiler: compiling would only cost time here."""
    monkeypatch.setattr("utils.machine.has_compiler", lambda: False)
    given = {"device": "cpu", "side": 16, "text": 4, "steps": 1, "seed": 1, "min_run_time": 0.01, "replicates": 1}
    given |= {"rows": str(tmp_path / "rows.jsonl")}
    shown = run_here(RECIPE, capsys, **given)
    assert "X1" in claims_of(shown["claims"])
    rows = read_rows(given["rows"])
    assert not [row["error"] or row["same_reason"] for row in rows if row.get("verdict") in ("error", "invalid")]
    assert {"alone", "added", "step", "plain"} <= {row["case.kind"] for row in rows}
    assert not [row for row in rows if row.get("label") == row.get("baseline_label")]
    (head,) = [row for row in rows if row.get("headline")]
    assert (head["case.kind"] == "plain") == (head["stack"] == head["against"])
    missing = {row["label"]: row["missing"] for row in rows if row.get("missing")}
    assert missing.keys() == {*MISSING_ON_CPU, "compile"} and "needs a CUDA device" in missing["CUDA Graph"]
    assert all(row["code_hash"] and row["param.seed"] == 1 and row["param.side"] == 16 for row in rows)


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_the_presets_name_the_recipe(preset):
    given = yaml.safe_load((ROOT / "data" / "presets" / f"{preset}.yaml").read_text())[RECIPE]
    assert given["size"] == {"cpu": "small", "gpu": "full"}[preset]
    if preset == "gpu":
        assert given["device"] == "cuda" and given["dtype"] == "bfloat16" and given["side"] == 1024


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    _, found = run_whole(RECIPE, tmp_path, device="cuda", size="small", side=256)
    assert found, "no row was written"
    assert all(row["device"].startswith("cuda") and row["driver"] for row in found)
    assert not [row["label"] for row in found if row.get("verdict") in ("invalid", "error")]
    assert not [row["label"] for row in found if row.get("missing")]  # every step of the stack ran
    graph = next(row for row in found if row["label"] == "CUDA Graph" and row["case.kind"] == "step")
    assert graph["same"]
