"""Recipe 08: its technique away from the notebook, the rules of its claims on made-up rows, and whole runs."""

import weakref
from contextlib import contextmanager, nullcontext
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipe_notebook import check_refused, claims_in, claims_of, run_here, run_whole, set_up, source_of, source_with
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.claims import per_place
from utils.cost import count_flops, peak_memory
from utils.models import gpt
from utils.models.gpt_fast import FastGPT
from utils.rows import read_rows, recorded_rows

RECIPE = "08_kv_cache"
CLAIMS = {f"K{number}" for number in range(2, 8)}


@pytest.fixture(autouse=True, scope="module")
def one_thread_without_gradients():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recipe():
    names = {"torch": torch, "F": F}
    for text in ("def turn(", "def offer(", "def write_without_cache", "def new_cache"):
        exec(source_with(RECIPE, text), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if callable(value)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_technique_agrees_with_the_library(recipe, dtype):
    model = gpt.load("tiny", dtype=dtype, seed=4)
    text = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(2))
    ours, theirs = recipe.new_cache(model, 2, 12), gpt.new_cache(model, 2, 12)
    loose = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {}
    for part in (text[:, :5], text[:, 5:9]):
        torch.testing.assert_close(recipe.prefill(model, part, ours), gpt.prefill(model, part, theirs), **loose)
    for at in (9, 10, 11):
        expected = gpt.decode_step(model, text[:, at], theirs)
        torch.testing.assert_close(recipe.decode_step(model, text[:, at], ours), expected, **loose)
    for i, kv in enumerate(theirs.kv):
        torch.testing.assert_close(torch.stack((ours["keys"][i], ours["values"][i])), kv, **loose)


def test_a_full_cache_is_an_error_and_stays_as_it_is(recipe):
    model = gpt.load("tiny")
    cache = recipe.new_cache(model, 1, 3)
    recipe.prefill(model, torch.tensor([[1, 2, 3]]), cache)
    before = [kept.clone() for kept in (*cache["keys"], *cache["values"], cache["filled"])]
    with pytest.raises(ValueError, match="4 tokens do not fit into 3 slots"):
        recipe.decode_step(model, torch.tensor([4]), cache)
    assert all(map(torch.equal, before, (*cache["keys"], *cache["values"], cache["filled"])))


def test_the_model_of_the_memory_pool_follows_its_rules():
    import bisect

    names = {"bisect": bisect, "MiB": 2**20}
    exec(source_with(RECIPE, "class Pool"), names)
    pool, mebi = names["Pool"](), 2**20
    small = pool.ask(3 * mebi)
    assert pool.taken == 20 * mebi and pool.free == [(17 * mebi, 1, 3 * mebi)]  # 20 MiB, and the rest split off
    other = pool.ask(17 * mebi - 100)
    assert pool.taken == 20 * mebi and other == (17 * mebi, 1, 3 * mebi)  # fits; less than 1 MiB is not split off
    large = pool.ask(11 * mebi)
    assert pool.taken == 32 * mebi and large[0] == 12 * mebi - 0  # in steps of 2 MiB; what is left is 1 MiB, not more
    pool.give_back(*small)
    pool.give_back(*other)
    assert pool.free == [(20 * mebi, 1, 0)]  # neighbours join
    assert pool.ask(20 * mebi + 1)[1] == 3 and pool.taken == 54 * mebi  # a little too large for every free block


def test_recorded_rows_hold_the_tables_of_the_source():
    rows = [row for row in recorded_rows(RECIPE) if row["provenance"] == "reported"]
    assert all(row["source"] == "003_d1bfa8a9c4385dfc.txt" and row["recipe"] == RECIPE for row in rows)
    pairs = {(row["claim"], row["case.tokens"]): row for row in rows if row["kind"] == "generation"}
    assert {tokens for claim, tokens in pairs if claim == "K4"} == {512, 1024, 2048, 4096}
    assert {tokens for claim, tokens in pairs if claim == "K5"} == {512, 1024, 2048, 4096, 8192, 16384}
    ratio = {key: row["baseline_median_s"] / row["median_s"] for key, row in pairs.items() if row["baseline_median_s"]}
    said = {("K4", 512): 6.9, ("K4", 1024): 15.6, ("K5", 512): 1.2, ("K5", 1024): 1.2, ("K5", 2048): 1.8}
    assert {key: round(value, 1) for key, value in ratio.items()} == said | {("K5", 4096): 42.2}


def test_other_parameters_give_complete_rows(tmp_path, capsys, monkeypatch):
    """The compiled step runs in nbval."""
    monkeypatch.setattr("utils.machine.has_compiler", lambda: False)
    given = {"size": "tiny", "new_tokens": 9, "prompt_tokens": 5, "seed": 1, "step_position": 40, "replicates": 2}
    given |= {"min_run_time": 0.01, "rows": str(tmp_path / "rows.jsonl")}
    shown = run_here(RECIPE, capsys, **given)
    assert claims_of(shown["claims"]).keys() == CLAIMS
    rows = read_rows(given["rows"])
    assert {row["case.kind"] for row in rows} == {"generation", "step", "long cache"}
    assert shown["measure"].count("measured over predicted") == 2
    for row in rows:
        assert row["verdict"] not in ("error", "invalid"), row
        assert row["provenance"] == "measured" and row["same"] and row["code_hash"]
        assert row["param.size"] == "tiny" and row["param.new_tokens"] == 9 and row["param.seed"] == 1


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "given, told",
    [
        ({"size": "huge"}, r"size='huge'; expected one of tiny, small, full; nearest: '\w+'"),
        ({"how": "aott"}, "how='aott'; expected one of compile, aot; nearest: 'aot'"),
        ({"how": "eager"}, "how='eager'; expected one of compile, aot"),
        ({"new_tokens": 0}, "new_tokens=0; expected a whole number of at least 1"),
        ({"new_tokens": -5}, "new_tokens=-5; expected a whole number"),
        ({"prompt_tokens": 0}, "prompt_tokens=0; expected a whole number"),
        ({"step_layers": 0}, "step_layers=0; expected a whole number"),
        ({"step_position": 15}, "step_position=15; expected a whole number of at least 16"),
        ({"replicates": 0}, "replicates=0; expected a whole number"),
        ({"threads": True}, "threads=True; expected a whole number"),
        ({"threads": 1.5}, r"threads=1\.5; expected a whole number"),
        ({"min_run_time": 0.0}, r"min_run_time=0\.0; expected a finite number above 0"),
        ({"min_run_time": float("nan")}, "min_run_time=nan; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)


@pytest.mark.parametrize("given", [{"step_position": 16}, {"prompt_tokens": 1, "new_tokens": 1, "how": "aot"}])
def test_the_smallest_values_are_taken(given):
    assert set_up(RECIPE, **given)["config"] is gpt.SIZES["small"]


# ---------------------------------------------------------------------------------------------------- what is shown


def test_the_figure_names_both_ratios_and_no_word_lies_on_a_curve():
    import matplotlib.pyplot as plt

    from utils import figures

    kept = []
    names = {"torch": torch, "full": gpt.SIZES["full"], "COLOURS": figures.COLOURS, "axes": figures.axes}
    exec(source_of(RECIPE, "figure"), names | {"finish": kept.append})
    (fig,) = kept
    axes = fig.axes[0]
    fig.canvas.draw()
    assert {"512 x", "4,096 x"} <= {text.get_text() for text in axes.texts}
    curves = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    assert len(curves) == 2 and all(np.isfinite(line.get_ydata()).all() for line in axes.lines)
    for text in axes.texts:
        if text.get_text():
            box = text.get_window_extent()
            assert axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1), text
            assert not [curve for curve in curves if any(box.contains(x, y) for x, y in curve)], text
    bend = np.diff(axes.lines[0].get_ydata(), 2)
    assert (bend > 0).all() and axes.get_yscale() == "linear", "the text says that the ramp bends upward"
    plt.close(fig)


def test_the_predicted_work_is_what_is_counted(recipe):
    names = vars(recipe) | {"torch": torch, "dev": torch.device("cpu")}
    exec(source_with(RECIPE, "def write(").partition("\n\n\nfor dtype")[0], names)
    exec(source_with(RECIPE, "def work(").partition("\n\n\nslow")[0], names)
    model = gpt.load("small")
    for prompt, count in ((1, 1), (3, 5), (9, 2)):
        text = torch.arange(prompt)[None]
        slow = count_flops(recipe.write_without_cache, model, text, count).total
        fast = count_flops(names["write"], model, [text[0]], count).total
        assert names["work"](model.config, prompt, count) == (slow, fast)


@pytest.mark.parametrize("gradients", [False, True])
def test_bytes_counted_without_memory_are_those_of_real_tensors(recipe, gradients):
    names = {"torch": torch, "TorchDispatchMode": TorchDispatchMode, "tree_leaves": tree_leaves, "weakref": weakref}
    names["write_without_cache"] = recipe.write_without_cache
    with torch.device("meta"):
        names["shell"] = gpt.GPT(gpt.SIZES["full"])
    exec(source_with(RECIPE, "class Live("), names)
    real = gpt.load("full").requires_grad_(True)
    with torch.set_grad_enabled(gradients):
        seen = peak_memory(recipe.write_without_cache, real, torch.zeros(1, 96, dtype=torch.int64), 1).peak_bytes
    assert names["lives_at_once"](96, gradients) == pytest.approx(seen, rel=0.01)


# ---------------------------------------------------------------------------------------------------- one step


class Graph(TorchDispatchMode):
    """Stands in for a CUDA graph: what runs while it records runs again on the same tensors at a replay."""

    def __init__(self):
        super().__init__()
        self.tape, self.replays = [], 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        self.tape.append((op, args, kwargs or {}, made))
        return made

    def replay(self):
        self.replays += 1
        for op, args, kwargs, made in self.tape:
            again = op(*args, **kwargs)
            if not (op.is_view or op._schema.is_mutable):
                made.copy_(again)


@pytest.fixture
def card(monkeypatch):
    """The names of the cells about the CUDA graph, on a machine without one; `compare` keeps what it is given."""

    @contextmanager
    def recording(graph):
        with graph:
            yield

    stream = lambda: SimpleNamespace(wait_stream=lambda other: None)  # noqa: E731
    made, asked = [], []
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Graph()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", recording)
    names = {"torch": torch, "gpt": gpt, "dev": SimpleNamespace(type="cuda"), "size": "tiny", "seed": 3}
    names |= {"prompt_tokens": 5, "new_tokens": 12, "replicates": 2, "min_run_time": 0.1, "rows": "", "graphs": made}
    names |= {"prompt_of": lambda i: (torch.randint(64, (1, 5), generator=torch.Generator().manual_seed(i)),)}
    names |= {"fixed": lambda fn: fn, "asked": asked, "append_rows": lambda *a: None}
    names["compare"] = lambda baseline, candidates, **given: asked.append((baseline, candidates, given))
    names["from_comparison"] = lambda result, **given: asked.append(given["case"])

    class CPU:  # the device is made up: models and tensors lie on the CPU
        load = staticmethod(lambda size, seed, device: gpt.load(size, seed=seed))

    names["gpt"], names["steps"] = CPU, []
    names["FastGPT"] = lambda model, slots, how: names["steps"].append(how) or FastGPT(model, slots, how="eager")
    monkeypatch.setattr(torch, "tensor", lambda *a, device=None, _make=torch.tensor, **k: _make(*a, **k))
    for text in ("def film(", "def player(", "def on_the_card("):
        exec(source_with(RECIPE, text), names)
    return names


def test_a_graph_is_compared_with_the_same_step_launched(card, capsys):
    assert card["steps"] == ["eager", "compile"], "one step for both contenders of a pair"
    pairs = [item for item in card["asked"] if isinstance(item, tuple)]
    labels = [(given["label"], *candidates) for _, candidates, given in pairs]
    assert labels == [("eager, launched", "eager, CUDA graph"), ("compile, launched", "compile, CUDA graph")]
    assert [item for item in card["asked"] if isinstance(item, dict)] == [
        {"kind": "launches", "step": "eager"},
        {"kind": "launches", "step": "compile"},
    ]
    model = gpt.load("tiny", seed=3)
    for (baseline, candidates, _), graph in zip(pairs, card["graphs"], strict=True):
        (replayed,) = candidates.values()
        for number in (7, 8):
            (text,) = card["prompt_of"](number)
            expected = gpt.generate(model, text, 12)[0]
            before = graph.replays
            assert torch.equal(baseline(text), expected) and graph.replays == before
            assert torch.equal(replayed(text), expected) and graph.replays == before + 11


# ---------------------------------------------------------------------------------------------------- claims


@pytest.fixture(scope="module")
def rules():
    names = {"combinations": combinations, "per_place": per_place, "full": gpt.SIZES["full"], "ours": []}
    exec(source_with(RECIPE, "def work(").partition("\n\n\nslow")[0], names)
    for text in ("def rope_rule", "def jump_rule", "def gain_rule", "def launch_rule"):
        exec(source_with(RECIPE, text), names)
    return SimpleNamespace(**names)


def gain(tokens, speedup, verdict="faster", half=0.05, **given):
    """A made-up row of generation."""
    row = {"param.new_tokens": tokens, "param.prompt_tokens": 16, "param.threads": 1, "device_name": "a CPU"}
    row |= {"speedup": speedup, "verdict": verdict, "ci_low": speedup * (1 - half), "ci_high": speedup * (1 + half)}
    return row | given


@pytest.mark.parametrize(
    "found, verdict",
    [
        ([gain(512, 6.9), gain(1024, 15.6)], "confirmed"),
        ([gain(512, 7.5), gain(1024, 14.0)], "confirmed"),
        ([gain(512, 6.9), gain(1024, 12.0)], "refined"),  # grows, and is another machine's
        ([gain(128, 4.0), gain(256, 7.0)], "refined"),
        ([gain(512, 6.9), gain(1024, 1.1)], "refuted"),  # the gain falls
        ([gain(512, 1.05), gain(1024, 0.9, "slower")], "refuted"),
        ([gain(512, 1.0, "equivalent")], "refuted"),  # no gain where the source has one
        ([gain(512, 6.9), gain(1024, 7.0)], "not measurable here"),  # intervals overlap
        ([gain(256, 6.9)], "not measurable here"),  # one length shows no growth
        ([gain(512, 6.9), gain(1024, 15.6, "inconclusive")], "not measurable here"),
        ([gain(512, 1.0, "inconclusive")], "not measurable here"),
        ([gain(512, 5.0), gain(1024, 10.0), gain(2048, 7.0)], "refuted"),
        ([gain(128, 9.0), gain(256, 8.5), gain(384, 8.0)], "refuted"),  # falls over two steps, each within its noise
        ([gain(64, 0.5, "slower"), gain(128, 0.7, "slower")], "not measurable here"),  # less of a loss is no gain
        ([gain(256, 4.0), gain(512, 9.0, **{"param.prompt_tokens": 400})], "not measurable here"),  # another prompt
        ([gain(512, 6.9), gain(1024, 15.6), gain(512, 1.0, "equivalent", device_name="another")], "refined"),
        ([gain(512, 6.9), gain(1024, 15.6), gain(256, 5.0, device_name="another")], "confirmed"),
        ([gain(256, 4.0), gain(512, 9.0, device_name="another")], "not measurable here"),  # two machines
        ([gain(256, 4.0), gain(512, 9.0, **{"param.threads": 2})], "not measurable here"),
        ([gain(512, 1.0, "equivalent"), gain(512, 6.9), gain(1024, 15.6)], "confirmed"),  # measured again
    ],
)
def test_k4_follows_gains_at_several_lengths(rules, found, verdict):
    said, evidence = per_place(rules.gain_rule, "device_name", "param.threads", "param.prompt_tokens")(found)
    assert said == verdict
    if verdict == "confirmed":
        assert "512 tokens" in evidence and "1024 tokens" in evidence and "work" in evidence


@pytest.mark.parametrize(
    "row, verdict",
    [
        (dict(speedup=5.0, ci_low=4.0, ci_high=6.0, verdict="faster"), "confirmed"),
        (dict(speedup=1.5, ci_low=1.4, ci_high=1.6, verdict="faster"), "refined"),
        (dict(speedup=1.0, ci_low=0.99, ci_high=1.01, verdict="equivalent"), "refuted"),
        (dict(speedup=0.8, ci_low=0.7, ci_high=0.9, verdict="slower"), "refuted"),
        (dict(speedup=2.1, ci_low=1.8, ci_high=2.4, verdict="faster"), "not measurable here"),
        (dict(speedup=1.2, ci_low=0.8, ci_high=1.6, verdict="inconclusive"), "not measurable here"),
    ],
)
def test_k6_follows_one_step_with_and_without_a_graph(rules, row, verdict):
    assert rules.launch_rule([row | {"device_name": "a card"}])[0] == verdict


def test_k6_hears_every_card_and_the_newest_row_of_each(rules):
    row = dict(speedup=5.0, ci_low=4.0, ci_high=6.0, verdict="faster", device_name="a card")
    slow = row | dict(speedup=0.9, ci_low=0.8, ci_high=0.95, verdict="slower")
    rule = per_place(rules.launch_rule)
    assert rule([slow, row])[0] == "confirmed"  # measured again
    assert rule([row, slow | {"device_name": "another"}])[0] == "refined"
    assert rule([slow, slow | {"device_name": "another"}])[0] == "refuted"


def test_k6_looks_at_eager_rows_of_the_full_model_only():
    row = {"param.size": "full", "verdict": "faster", "case.kind": "launches", "label": "x", "device": "cuda"}
    row["device_name"] = "a card"
    others = [
        {"device": "cpu"},
        {"case.step": "compile"},
        {"param.size": "small"},
        {"verdict": "invalid"},
        {"case.kind": "step"},
    ]
    names = {"ours": [{"case.step": "eager"} | row | other for other in ({}, *others)]}
    exec(source_with(RECIPE, "def launch_rule"), names)
    assert names["film_rows"] == names["ours"][:1]


def test_k4_and_k5_look_at_rows_of_their_machine(rules):
    row = {"param.size": "full", "verdict": "inconclusive", "case.kind": "generation", "label": "with cache"}
    cpu, card, other = (
        row | {"device": device, "device_name": name}
        for device, name in (("cpu", "AMD"), ("cuda", "NVIDIA GeForce RTX 4080 SUPER"), ("cuda:0", "H200"))
    )
    names = {"ours": [cpu, card, other, cpu | {"param.size": "small"}, cpu | {"label": "utils.models.gpt"}]}
    exec(source_with(RECIPE, "def launch_rule"), names)
    assert names["gain_rows"] == [cpu] and names["card_rows"] == [card]


SMALL, LARGE = {False: 1e9, True: 4e9}, {False: 17e9, True: 40e9}


@pytest.mark.parametrize(
    "times, counted, verdict",
    [
        ({2048: 12.0, 4096: 600.0}, {2048: SMALL, 4096: SMALL}, "confirmed"),
        ({2048: 12.0, 4096: 150.0}, {2048: SMALL, 4096: SMALL}, "refined"),
        ({2048: 12.0, 4096: 65.0}, {2048: SMALL, 4096: LARGE}, "refuted"),  # rows before counts
        ({}, {2048: SMALL, 4096: LARGE}, "refined"),
        ({}, {2048: SMALL, 4096: {False: 4e9, True: 20e9}}, "refined"),  # only with gradients
        ({}, {2048: LARGE, 4096: LARGE}, "not measurable here"),
        ({4096: 600.0}, {2048: SMALL, 4096: SMALL}, "not measurable here"),
    ],
)
def test_k5_follows_rows_of_such_a_card_and_else_counted_bytes(rules, times, counted, verdict):
    found = [{"param.new_tokens": n, "baseline_median_s": s, "device_name": "a card"} for n, s in times.items()]
    assert rules.jump_rule(found, counted, 16e9, 47.6, 5.45)[0] == verdict


def test_k5_compares_lengths_of_one_card(rules):
    one, other = ({"device_name": f"RTX 4080 {name}"} for name in ("SUPER", "Laptop"))
    short, long = ({"param.new_tokens": n, "baseline_median_s": s} for n, s in ((2048, 12.0), (4096, 600.0)))
    counted = {2048: SMALL, 4096: SMALL}
    prompts = [short | one | {"param.prompt_tokens": 16}, long | one | {"param.prompt_tokens": 4000}]
    assert rules.jump_rule(prompts, counted, 16e9, 47.6, 5.45)[0] == "not measurable here"
    assert rules.jump_rule([short | one, long | other], counted, 16e9, 47.6, 5.45)[0] == "not measurable here"
    assert rules.jump_rule([short | one, long | one, short | other], counted, 16e9, 47.6, 5.45)[0] == "confirmed"


@pytest.mark.parametrize(
    "agree, relative, values, verdict",
    [
        ((24, 24, 24, 24), True, True, "confirmed"),
        ((24, 24, 24, 23), True, True, "refined"),
        ((24, 24, 23, 24), True, True, "refined"),
        ((24, 23, 24, 23), True, True, "refuted"),
        ((23, 24, 24, 24), True, True, "refuted"),
        ((24, 24, 24, 24), False, True, "refuted"),
        ((24, 24, 24, 24), True, False, "refuted"),
    ],
)
def test_k2_follows_every_printed_entry(rules, agree, relative, values, verdict):
    counts = dict(zip("abcd", agree, strict=True))
    assert rules.rope_rule(counts, relative, values)[0] == verdict


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, device="cuda", size="full", new_tokens=256)
    assert claims_in(done)["K2"] == "confirmed"
    launches = {row["label"]: row for row in rows if row["case.kind"] == "launches"}
    assert {"eager, CUDA graph", "compile, CUDA graph"} == launches.keys()
    assert all(row["baseline_label"] == f"{row['case.step']}, launched" for row in launches.values())
    for row in launches.values():
        assert row["device"].startswith("cuda") and row["same"] and row["verdict"] not in ("error", "invalid")
