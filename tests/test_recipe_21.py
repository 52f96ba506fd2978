"""Recipe 21: its techniques away from the notebook, its recorded rows, other parameters, and a run on a card."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from recipe_notebook import claims_of, code_cells, run_here, run_whole, source_with

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
        heads = [row for row in mine if row.get("headline")]
        assert [row["label"] for row in heads] == ["kept stack"]
        assert heads[0]["stack"] == ", ".join(row["label"] for row in added if row["kept"])
        assert not [row["label"] for row in mine if row.get("verdict") in ("invalid", "error")]


def test_the_kept_stack_of_a_cpu_is_not_slower_than_plain_eager():
    rows = [row for row in recorded_rows(RECIPE) if row["device"] == "cpu"]
    head, by_hand = ([row for row in rows if row["label"] == label][-1] for label in ("kept stack", "by hand"))
    assert head["verdict"] != "slower" and head["param.size"] == "small"
    assert head["against"] in ("SDPA", "SDPA, bfloat16") and head["stack"].startswith(head["against"])
    assert by_hand["verdict"] == "slower"


def test_the_rule_of_x1():
    adds_up = names_of_cell("def adds_up")["adds_up"]
    row = {"run_id": "a", "device": "cpu", "device_name": "Some CPU", "verdict": "faster"}

    def settled(*speedups, verdicts=("faster",) * 3):
        rows = [
            row | {"label": name, "speedup": s, "ci_low": s * 0.98, "ci_high": s * 1.02, "verdict": verdict}
            for name, s, verdict in zip(("SDPA", "compile", "SDPA + compile"), speedups, verdicts, strict=True)
        ]
        return adds_up(rows)[0]

    assert settled(1.5, 1.4, 2.1) == "confirmed"
    assert settled(1.5, 1.4, 1.8) == "refined"
    assert settled(1.5, 1.4, 1.5) == "refuted"
    assert settled(1.0, 1.4, 1.4, verdicts=("equivalent", "faster", "faster")) == "refuted"


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
    assert {row["case.kind"] for row in rows} == {"alone", "added", "step", "final"}
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
