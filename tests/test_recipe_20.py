"""Recipe 20: its functions away from the notebook, its recorded rows, and whole runs."""

import math

import pytest
import torch
from recipe_notebook import claims_in, claims_of, code_cells, run_here, run_whole, set_up, source_with

import utils.machine
from utils.cookbook.notebooks import tags
from utils.models.qwen3_vl_caption import captioner
from utils.rows import read_rows, recorded_rows

RECIPE = "20_qwen3_vl_captioning"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """Undo what the recipe leaves in a process: the TF32 switch, the threads; and run where `auto` means the CPU."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    monkeypatch.setenv("COOKBOOK_DEVICE", "cpu")
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recipe():
    """The names that the cells before the first check define; nothing is drawn or timed."""
    names = {"__name__": "recipe"}  # functions without a module confuse those who look
    threads, tf32 = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    for cell in code_cells(RECIPE):
        if "check" in tags(cell):
            break
        if "machine" not in tags(cell):
            exec(cell.source, names)
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = tf32
    return names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "huge"}, "size='huge'; expected one of tiny, small, 4b, 8b"),
        ({"dtype": "float17"}, "dtype='float17'; expected one of float32, bfloat16, float16; nearest: 'float1"),
        ({"words": 0}, "words=0; expected a whole number of at least 1"),
        ({"batch": -1}, "batch=-1; expected a whole number of at least 1"),
        ({"replicates": 0}, "replicates=0; expected a whole number of at least 1"),
        ({"batches": []}, r"batches=\[\]; expected .*, one or more"),
        ({"batches": [8, 0]}, r"batches=\[8, 0\]; expected a list of whole numbers of at least 1"),
        ({"side": 63}, "side=63; expected a multiple of 32 pixels"),
        ({"side": 0}, "side=0; expected a whole number of at least 32"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
        ({"patience": -1.0}, "patience=-1.0; expected a finite number of at least 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        set_up(RECIPE, **given)


def test_the_check_of_a_lossy_step_looks_at_every_token(recipe):
    """What writes the tokens after the first is what gets compiled: one that writes nonsense must be seen."""
    names = {**recipe}
    exec("from utils.equivalence import declared_lossy", names)
    exec(source_with(RECIPE, "def cosine"), names)
    model, pixels = captioner("tiny", seed=5), recipe["clips"](3)
    asked, config = recipe["prompt"](model, 3, 5), model.config.text_config

    def written(model, write):
        with torch.inference_mode():
            return recipe["caption"](model, pixels, asked, recipe["DynamicCache"](config=config), write)

    exact = written(model, recipe["write"])
    near = written(recipe["copy_of"](model, dtype=torch.bfloat16), recipe["write"])
    wrong = written(model, lambda *given: -recipe["write"](*given))
    assert exact[1].shape == (3, 5, config.vocab_size) and torch.equal(exact[1].argmax(-1), exact[0])
    assert names["close_enough"](near, exact)
    assert torch.equal(wrong[1][:, 0], exact[1][:, 0]) and not names["close_enough"](wrong, exact)


AFTER = {1: 19, 8: 72, 16: 100, 32: 125}


def rates(device, size, **labels):
    """Made-up rows of a sweep; {label: {batch: clips per minute}}."""
    return [
        {"device_name": device, "param.size": size, "label": label.replace("_", " "), "case.batch": many}
        | {"clips_per_minute": rate}
        for label, of in labels.items()
        for many, rate in of.items()
    ]


@pytest.mark.parametrize(
    ("rows", "verdict", "says"),
    [
        (rates("NVIDIA H200", "8b", conv3d={1: 1.8, 8: 1.95}, linear=AFTER), "confirmed", "6 of 6"),
        (rates("NVIDIA H200", "8b", conv3d={1: 18, 8: 19}, linear=AFTER), "refined", "6 of 6"),
        (rates("NVIDIA H200", "8b", linear=AFTER), "refined", "4 of 6"),
        (rates("a CPU", "small", one_by_one={1: 10, 8: 10.5}, linear={1: 20, 8: 60}), "refined", "1.1x before, 3.0x"),
        (rates("a CPU", "small", one_by_one={1: 10, 8: 20}, linear={1: 20, 8: 60}), "refined", "(not flat)"),
        (rates("a CPU", "small", one_by_one={1: 10, 8: 70}, linear={1: 20, 8: 142}), "refuted", "(not flat)"),
    ],
)  # fmt: skip
def test_the_verdict_on_clips_per_minute_looks_before_and_after(recipe, rows, verdict, says):
    names = {**recipe}
    exec(source_with(RECIPE, "def shape_rule"), names)
    found = names["shape_rule"](rows)
    assert found[0] == verdict and says in found[1]


def test_the_fit_finds_what_the_times_were_made_of(recipe):
    sizes = [1, 4, 9]
    a, b = recipe["fit"](sizes, [60 * n / (2.5 + 0.25 * n) for n in sizes])
    assert math.isclose(a, 2.5) and math.isclose(b, 0.25)


def test_clips_become_patches_in_the_order_of_the_library(recipe):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    frames = recipe["film"](3)
    if not hasattr(Qwen3VLVideoProcessor, "patchify"):
        pytest.skip("this version of transformers has no patchify")
    expected, *grid = Qwen3VLVideoProcessor.patchify(None, frames[None], 16, 2, 2)
    assert grid == [4, 4, 4] and torch.equal(recipe["patches"](frames), expected[0])
    assert not torch.equal(recipe["film"](4), frames) and torch.equal(recipe["film"](3), frames)


@pytest.mark.parametrize("steps", [["linear"], ["cache"], ["sdpa"], ["linear", "cache", "sdpa"]])
def test_every_step_writes_the_same_tokens(recipe, steps):
    model, pixels = captioner("tiny", seed=5), recipe["clips"](3, first=7)
    with torch.inference_mode():
        tokens, scores = recipe["stack"](model, [], 3, words=5)(pixels)
        other, close = recipe["stack"](model, steps, 3, words=5)(pixels)
    assert tokens.shape == (3, 5) and torch.equal(other, tokens)
    torch.testing.assert_close(close, scores, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near(recipe):
    model, pixels = captioner("tiny", seed=5), recipe["clips"](3)
    with torch.inference_mode():
        exact = recipe["stack"](model, ["cache"], 3, words=2)(pixels)[1]
        near = recipe["stack"](model, ["cache", "bfloat16"], 3, words=2)(pixels)[1]
    apart = (near - exact).norm() / exact.norm()
    assert 1e-5 < apart < 0.05
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.skipif(not utils.machine.has_compiler(), reason=utils.machine.missing("compiler"))
def test_compiled_writing_is_the_same_and_compiles_once(recipe):
    model = captioner("tiny", seed=5)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # reset leaves them, and earlier tests compile too
    run = recipe["stack"](model, ["cache", "sdpa", "compile"], 2, words=4)
    plain = recipe["stack"](model, ["cache", "sdpa"], 2, words=4)
    with torch.inference_mode():
        for first in (0, 2):
            pixels = recipe["clips"](2, first=first)
            assert torch.equal(run(pixels)[0], plain(pixels)[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert graphs == 1


def test_the_report_is_recorded_as_reported():
    rows = [row for row in recorded_rows(RECIPE) if row["provenance"] == "reported"]
    clips = {
        row["case.batch"]: (row["baseline_clips_per_minute"], row["clips_per_minute"])
        for row in rows
        if row["kind"] == "clips"
    }
    assert clips == {1: (1.8, 19.5), 8: (1.9, 71.0), 16: (None, 104.6), 32: (None, 123.8)}
    assert {row["claim"] for row in rows if "claim" in row} == {"Q2", "Q3", "Q4", "Q5", "Q6", "Q7", "Q9"}
    assert all(row["source"] for row in rows)


def test_the_recorded_kept_stack_beats_the_best_plain_form():
    """Each step on top is measured against the steps kept before it; the stack against the best plain form."""
    steps = [row for row in recorded_rows(RECIPE) if row.get("kind") == "step" and row["case.way"] == "on top"]
    assert steps
    for run in {row["run_id"] for row in steps}:
        kept = []
        for row in (row for row in steps if row["run_id"] == run):
            assert row["baseline_label"] == ("+".join(kept) or "nothing") and row["same"]
            kept += [row["label"]] * (row["verdict"] == "faster")
        (final,) = (row for row in recorded_rows(RECIPE) if row.get("kind") == "final" and row["run_id"] == run)
        assert final["case.kept"] == "+".join(kept) and final["headline"]
        assert final["baseline_label"] in ("plain float32", "plain bfloat16")
        assert final["verdict"] == "faster" and final["ci_low"] > 1


def test_other_parameters_give_complete_rows(tmp_path, capsys, monkeypatch):
    """Without a compiler, too."""
    monkeypatch.setattr(utils.machine, "has_compiler", lambda: False)
    given = {"seed": 1, "side": 32, "words": 3, "batches": [1, 2], "batch": 2, "min_run_time": 0.01}
    given |= {"rows": str(tmp_path / "rows.jsonl")}
    shown = run_here(RECIPE, capsys, **given)
    assert claims_of(shown["claims"]).keys() == {"Q5", "Q6", "Q7"}
    assert "needs a C++ compiler" in shown["limits"]
    rows = read_rows(given["rows"])
    assert not [row["error"] or row["same_reason"] for row in rows if row.get("verdict") in ("error", "invalid")]
    sweep = {(row["label"], row["case.batch"]) for row in rows if row.get("kind") == "sweep"}
    assert sweep == {(name, many) for name in ("one by one", "conv3d", "linear") for many in (1, 2)}
    steps = {(row["label"], row["case.way"]) for row in rows if row.get("kind") == "step"}
    kept = {row["label"] for row in rows if row.get("case.way") == "on top" and row["verdict"] == "faster"}
    assert steps == {(s, way) for s in ("linear", "cache", "sdpa", "bfloat16") for way in ("alone", "on top")}
    finals = [row["label"] for row in rows if row.get("headline")]  # none where the stack is the plain form itself
    assert finals == ["kept stack"] or kept in ({"cache", "sdpa"}, {"cache", "sdpa", "bfloat16"})
    for row in rows:
        assert row["provenance"] == "measured" and row["code_hash"] and row["param.side"] == 32


def test_a_slow_form_is_not_tried_with_more_clips(tmp_path, capsys):
    """With no patience at all only the repair goes on, as in the report."""
    names = {"__name__": "recipe"}  # functions without a module confuse those who look
    for cell in code_cells(RECIPE):
        if {*tags(cell)} & {"machine", "figure", "check", "control", "cost"} and "def fit" not in cell.source:
            continue
        exec(cell.source, names)
        if "parameters" in tags(cell):
            names |= {"side": 32, "words": 2, "batches": [1, 2, 3], "min_run_time": 0.01, "patience": 0.0}
        if "measure" in tags(cell):
            break
    tried = {name: list(rates) for name, rates in names["speed"].items()}
    assert tried == {"one by one": [1], "conv3d": [1], "linear": [1, 2, 3]}


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    done, found = run_whole(RECIPE, tmp_path, device="cuda", size="small", side=128)
    assert claims_in(done)["Q6"] == "confirmed"
    assert {row.get("kind") for row in found} >= {"sweep", "step", "final", "profile"}
    assert all(row["device"].startswith("cuda") and row["driver"] for row in found)
    assert not [row["label"] for row in found if row.get("verdict") == "invalid"]
