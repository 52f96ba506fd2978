"""Recipe 06: what a recording takes and refuses, buckets, and the rules of its claims on made-up values."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from recipe_notebook import check_refused, code_cells, source_of, source_with

from utils.claims import per_place
from utils.cookbook.notebooks import tags
from utils.equivalence import check_equivalence

RECIPE = "06_cuda_graph"


@pytest.fixture(scope="module")
def recipe():
    """The names of the notebook before its check."""
    names = {}
    for cell in code_cells(RECIPE):
        if "check" in tags(cell):
            return names
        if not {"machine", "figure", "baseline"} & set(tags(cell)):
            exec(cell.source, names)
    raise AssertionError("no cell is tagged check")


@pytest.fixture
def capture(recipe, monkeypatch):
    """`capture` on a machine without a GPU: what is run inside `torch.cuda.graph` goes on a tape."""

    @contextmanager
    def recording(graph):
        with recipe["Operations"]() as seen:
            yield
        graph.steps = seen.tape

    stream = lambda: SimpleNamespace(wait_stream=lambda other: None)  # noqa: E731
    graph = type("Graph", (), {"replay": recipe["Tape"].replay})
    for name, stand_in in {
        "Stream": stream,
        "current_stream": stream,
        "stream": lambda side: nullcontext(),
        "CUDAGraph": graph,
        "graph": recording,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return recipe["capture"]


@pytest.fixture(params=["Tape", "capture"])
def record(request, recipe, capture, monkeypatch):
    """Either kind of recording, also for the buckets."""
    made = capture if request.param == "capture" else recipe["Tape"]
    monkeypatch.setitem(recipe, "record", made)
    return made


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "given, told",
    [
        ({"width": 0}, "width=0; expected a whole number"),
        ({"depth": True}, "depth=True; expected a whole number"),
        ({"batch": 1.5}, "batch=1.5; expected a whole number"),
        ({"launch_us": -5.0}, "launch_us=-5.0; expected a finite number above 0"),
        ({"launch_us": float("nan")}, "launch_us=nan; expected a finite number above 0"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)


# ---------------------------------------------------------------------------------------------------- recordings


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.ones(1, 16),),  # copy_ would broadcast these three
        (torch.ones(16),),
        (torch.ones(4, 1),),
        (torch.ones(5, 16),),
        (torch.ones(4, 16, dtype=torch.float64),),  # and cast these two
        (torch.ones(4, 16, dtype=torch.int64),),
        (torch.ones(4, 16, device="meta"),),
        (torch.ones(4, 16), torch.ones(4, 16)),
        (),
        (3.0,),
    ],
)
def test_a_call_that_was_not_recorded_is_refused_in_one_line(record, inputs):
    step = record(lambda x: x + 1, torch.zeros(4, 16))
    with pytest.raises(ValueError, match=r"expected as recorded: \[4, 16\] float32 on cpu$") as caught:
        step(*inputs)
    assert "\n" not in str(caught.value)
    assert step(torch.ones(4, 16)).equal(torch.full((4, 16), 2.0))


def test_the_tensors_of_the_example_are_left_alone(record):
    x = torch.zeros(3)
    step = record(lambda x, y: x - y, x, x)
    assert step(torch.ones(3), torch.full((3,), 5.0)).tolist() == [-4.0] * 3
    assert x.tolist() == [0.0] * 3


def test_two_inputs_are_not_exchanged(record):
    step = record(lambda x, y: x + y, torch.zeros(2, 3), torch.zeros(3))
    assert step(torch.ones(2, 3), torch.ones(3)).equal(torch.full((2, 3), 2.0))
    with pytest.raises(ValueError, match=r"called with \[3\] float32 on cpu, \[2, 3\]"):
        step(torch.ones(3), torch.ones(2, 3))


@pytest.mark.parametrize("example", [(), (3,), (torch.ones(2), None)])
def test_only_tensors_are_recorded(record, example):
    with pytest.raises(TypeError, match="expected tensors"):
        record(lambda *inputs: inputs[0], *example)


def test_outputs_in_tuples_lists_and_dictionaries_outlive_the_next_call(record):
    def fn(x):
        return {"both": (x + 1, [x * 2]), "name": "kept", "none": None}

    step = record(fn, torch.zeros(3))
    first, second = step(torch.ones(3)), step(torch.full((3,), 5.0))
    assert check_equivalence(first, fn(torch.ones(3))) and check_equivalence(second, fn(torch.full((3,), 5.0)))


def test_several_outputs_of_one_operation_and_work_in_place(record):
    def fn(x):
        high, low = torch.topk(x, 2)[0], torch.aminmax(x)[0]
        return high.add_(low), x.relu_()

    step = record(fn, torch.tensor([1.0, 2.0, 3.0]))
    for x in (torch.tensor([-4.0, 9.0, 5.0]), torch.tensor([7.0, -1.0, 0.0])):
        assert check_equivalence(step(x), fn(x.clone()))


def test_an_output_that_cannot_be_copied_is_refused(recipe):
    with pytest.raises(TypeError, match="the output holds a SimpleNamespace; expected tensors"):
        recipe["Tape"](lambda x: SimpleNamespace(x=x + 1), torch.zeros(3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * x.max().item(),
        lambda x: x + 1 if x.sum() > 0 else x - 1,
        lambda x: x * float(x[0]),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: x if torch.equal(x, x) else -x,
        lambda x: x * x.tolist()[0],
        lambda x: x * float(x.numpy()[0]),
        lambda x: torch.from_numpy(x.numpy() * 2) + x,
        lambda x: x + torch.tensor(x.data_ptr() % 7),
        lambda x: x * len(str(x)),
        lambda x: x * float(f"{x.sum()}"),
        lambda x: x * x.untyped_storage()[0],
    ],
)
def test_a_step_that_reads_a_value_is_refused(recipe, fn):
    with pytest.raises(RuntimeError, match=r"cannot be recorded; a graph holds kernels only: no \.item\(\)") as caught:
        recipe["Tape"](fn, torch.ones(4))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x * 2).unsqueeze_(0),
        lambda x: (x * 2).t_(),
        lambda x: (x * 2)[None].squeeze_(0),
        lambda x: (x * 2).transpose_(0, 1),
    ],
)
def test_a_tensor_that_changes_its_shape_in_place_is_refused(recipe, fn):
    with pytest.raises(RuntimeError, match=r"cannot be recorded; it changes a shape in place: use the form") as caught:
        recipe["Tape"](fn, torch.ones(2, 3))
    assert "\n" not in str(caught.value)


def test_indexing_with_numbers_is_recorded(record):
    step = record(lambda x, i: x[i], torch.zeros(4), torch.tensor([0, 0]))
    assert step(torch.arange(4.0), torch.tensor([3, 1])).tolist() == [3.0, 1.0]


def test_what_cuda_refuses_to_capture_becomes_one_line(recipe, capture):
    def fn(x):
        if torch.utils._python_dispatch._get_current_dispatch_mode():  # inside the recording only
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel errors might be …")
        return x

    with pytest.raises(RuntimeError, match=r"^not recorded, operation not permitted .*; a graph holds") as caught:
        capture(fn, torch.ones(3))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize("shape", [(), (5,), (3, 6, 6), (2, 2, 2, 2)])
def test_buckets_pad_the_batch_of_any_number_of_dimensions(recipe, record, shape):
    fn = lambda x, y: (x * 2 + y, {"other": y.sin()})  # noqa: E731
    served = recipe["in_buckets"](fn, [4, 2], torch.zeros(1, *shape), torch.zeros(1, *shape))
    for n in (0, 1, 2, 3, 4):
        x, y = torch.rand(n, *shape), torch.rand(n, *shape)
        assert check_equivalence(served(x, y), fn(x, y))
        assert served(x, y)[0].shape == x.shape


def test_the_next_bucket_is_used(recipe, record, monkeypatch):
    seen = []
    monkeypatch.setitem(recipe, "record", lambda fn, *ex: lambda *new: seen.append(len(new[0])) or fn(*new))
    served = recipe["in_buckets"](lambda x: x, (8, 2, 4), torch.zeros(1, 3))
    for n in (1, 2, 3, 5, 8):
        served(torch.ones(n, 3))
    assert seen == [2, 2, 4, 8, 8]


@pytest.mark.parametrize(
    "inputs, told",
    [
        ((torch.ones(9, 3), torch.ones(9, 3)), "expected one batch of at most 4: buckets 2, 4"),
        ((torch.ones(2, 3), torch.ones(1, 3)), "expected one batch of at most 4"),
        ((torch.tensor(1.0), torch.tensor(1.0)), "expected one batch"),
        ((), "called with nothing; expected one batch"),
        ((torch.ones(2, 4), torch.ones(2, 4)), "expected as recorded"),
        ((torch.ones(3, 3).double(), torch.ones(3, 3)), "expected as recorded"),
    ],
)
def test_what_fits_no_bucket_is_refused_in_one_line(recipe, record, inputs, told):
    served = recipe["in_buckets"](lambda x, y: x + y, (2, 4), torch.zeros(1, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=told) as caught:
        served(*inputs)
    assert "\n" not in str(caught.value)


def test_buckets_of_no_size_and_outputs_without_a_batch_are_refused(recipe, record):
    with pytest.raises(ValueError, match=r"sizes=\[\]"):
        recipe["in_buckets"](lambda x: x, [], torch.zeros(1, 3))
    with pytest.raises(ValueError, match="sizes="):
        recipe["in_buckets"](lambda x: x, [2, 0], torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"an output is \[4\] for 4 rows and \[5\] for 5; expected tensors to cut"):
        recipe["in_buckets"](lambda x: (x, len(x)), [2, 4], torch.zeros(1, 3))
    for fn in (lambda x: x.sum(), lambda x: x.mean(0), lambda x: x.T, lambda x: {"a": (x, x.sum(1).sum(0))}):
        for size in (2, 3):  # 3: the output is as long as the bucket
            with pytest.raises(ValueError, match=rf" for {size} rows and .* for {size + 1}; expected a row"):
                recipe["in_buckets"](fn, [1, size], torch.zeros(1, 3))


# ---------------------------------------------------------------------------------------------------- counts


def test_calls_of_cuda_are_told_apart(recipe, monkeypatch):
    names = {"launch_us": 5.0} | recipe
    exec(source_with(RECIPE, "def runtime_calls"), names)
    ran = ["aten::add", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch", "cudaMemcpyAsync", "cutlass_gemm"]
    ran += ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaLaunchKernelExC", "cudaStreamIsCapturing"]
    events = [SimpleNamespace(name=name) for name in ran]
    profile = lambda: nullcontext(SimpleNamespace(events=lambda: events))  # noqa: E731
    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert names["runtime_calls"](lambda: None) == {"launches": 4, "graph_launches": 1, "waits": 2}


def test_a_kept_output_is_right_only_if_the_next_call_leaves_it_alone(recipe):
    names = dict(recipe)
    exec(source_with(RECIPE, "def runtime_calls"), names)
    net, tape = names["build"](), recipe["Tape"](names["build"](), *names["draw"](0))

    def overwrites(x):
        tape(x)
        return tape.output

    def notices(x):
        raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten")

    assert names["outlives"](net) and names["outlives"](tape)
    assert not names["outlives"](overwrites) and not names["outlives"](notices)


def test_rows_of_a_card_carry_the_counts_of_their_own_contender(recipe):
    names = dict(recipe)
    exec(source_with(RECIPE, "def with_counts"), names)
    names["runtime_calls"] = lambda fn, *args: {"launches": fn.n, "graph_launches": 1, "waits": 0}
    names["outlives"] = lambda fn, *sizes: fn.n == 1 and sizes == (16, 2)
    names["build"] = lambda width: SimpleNamespace(n=40)
    contenders = {n: lambda n=n: SimpleNamespace(n=int(n)) for n in ("1", "2", "3")}
    rows = [{"label": n, "verdict": v} for n, v in (("2", "slower"), ("1", "faster"), ("3", "error"))]
    assert names["with_counts"]([dict(row) for row in rows], contenders, 16, 2) == rows  # on a CPU as they are
    names["dev"] = SimpleNamespace(type="cuda")
    two, one, failed = names["with_counts"](rows, contenders, 16, 2)
    assert (two["launches"], two["output_kept"]) == (2, False) and (one["launches"], one["output_kept"]) == (1, True)
    assert one["eager_launches"] == 40 and one["graph_launches"] == 1
    assert failed == {"label": "3", "verdict": "error"}


@pytest.mark.parametrize("done", [True, False])
def test_the_row_of_an_eager_step_leaves_out_how_the_profiler_waits(recipe, monkeypatch, done):
    names = dict(recipe) | {"net": torch.relu}
    seen = iter([{"launches": 0, "waits": 1}, {"launches": 40, "waits": 1}, {"launches": 41, "waits": 2}])
    names["runtime_calls"] = lambda fn, *args: (fn(*args), next(seen))[1]
    event = SimpleNamespace(record=lambda: None, query=lambda: done)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "rand", lambda *sizes, device: torch.ones(2, 2))
    exec(source_with(RECIPE, "def waiting_row"), names)
    row = names["waiting_row"]()
    assert (row["launches"], row["waits"], row["waits_to_read"]) == (40, 0, 1) and row["runs_ahead"] is not done
    assert row["label"] == "eager step" and row["provenance"] == "measured"


# ---------------------------------------------------------------------------------------------------- rules


@pytest.fixture(scope="module")
def rules():
    names = {"launch_us": 5.0, "BY_MODE": "mode", "BY_HAND": "hand"}
    for part in ("def buckets_rule", "def with_compile_rule", "def flux_rule"):
        exec(source_with(RECIPE, part), names)
    return names


def graph(speedup, verdict="faster", launches=1, same=True):
    """A made-up row of a captured step."""
    row = {"label": "CUDA graph", "speedup": speedup, "verdict": verdict, "same": same}
    return row | ({} if launches is None else {"launches": launches, "eager_launches": 40})


@pytest.mark.parametrize(
    "rows, verdict",
    [
        ([graph(5.0)], "confirmed"),
        ([graph(5.0), graph(1.3)], "confirmed"),
        ([graph(5.0), graph(1.0, "equivalent")], "refined"),  # the gain vanishes at a size
        ([graph(5.0, launches=3)], "refined"),  # faster, but not one launch
        ([graph(1.0, "equivalent"), graph(0.9, "slower")], "refuted"),
        ([graph(5.0, launches=None)], "not measurable here"),  # nobody counted
        ([graph(5.0), graph(1.1, "inconclusive")], "refined"),  # not shown at every size
        ([graph(5.0), graph(5.0, same=False)], "refined"),
        ([graph(5.0), graph(None, "invalid", launches=None, same=False)], "refined"),  # as `compare` gives it
        ([graph(5.0), graph(None, "error", launches=None, same=None)], "refined"),
        ([graph(5.0, same=False)], "not measurable here"),
        ([graph(None, "error", same=None)], "not measurable here"),
        ([graph(1.1, "inconclusive")], "not measurable here"),
    ],
)
def test_rule_of_g1_counts_launches(rules, rows, verdict):
    assert rules["graph_rule"](rows)[0] == verdict


def test_g1_says_what_was_counted(rules):
    said = rules["graph_rule"]([graph(5.0), graph(1.0, "equivalent")])[1]
    assert said == "launches of a step 40 before, 1 after; faster in 1 of 2 rows, 5.0x at best"


def test_rule_of_g2(rules):
    rule = rules["buckets_rule"]
    assert rule({1: True, 3: True}, {1: False, 3: True}, True) == (
        "refined",
        "buckets equal eager for batches 1, 3, for networks that compute each row alone",
    )
    assert "any network" in rule({1: True}, {1: True}, True)[1]
    assert rule({1: False}, {1: False}, True)[0] == "confirmed" and rule({1: True}, {}, False)[0] == "refuted"


def compiled(label, same=True, graph_launches=1, kept=True):
    counts = {"launches": max(1, graph_launches), "graph_launches": graph_launches}
    return {"label": label, "same": same, "output_kept": kept} | counts


@pytest.mark.parametrize(
    "rows, verdict",
    [
        ([compiled("mode"), compiled("hand")], "confirmed"),
        ([compiled("mode", kept=False), compiled("hand")], "refined"),  # a condition: clone
        ([compiled("mode"), compiled("hand", same=False)], "refined"),  # one of the two works
        ([compiled("mode", graph_launches=0), compiled("hand")], "refined"),
        ([compiled("mode", graph_launches=0), compiled("hand", same=False)], "refuted"),
        ([compiled("mode", same=False), compiled("hand"), compiled("mode")], "refined"),  # wrong at one size
        ([{"label": "mode", "same": False}, compiled("hand"), compiled("mode")], "refined"),  # as `compare` gives it
        ([compiled("mode")], "not measurable here"),  # the hand-made capture is part of the rule
        ([compiled("hand")], "not measurable here"),
        ([{"label": "mode", "same": True}, compiled("hand")], "not measurable here"),
        ([compiled("mode") | {"launches": 0}, compiled("hand")], "not measurable here"),  # the profile saw nothing
    ],
)
def test_rule_of_g3_needs_both_ways(rules, rows, verdict):
    assert rules["with_compile_rule"](rows)[0] == verdict


@pytest.mark.parametrize(
    "launches, waits, read, ahead, verdict",
    [
        (40, 40, 41, False, "confirmed"),
        (40, 0, 1, True, "refuted"),
        (40, 3, 4, True, "refined"),
        (40, 0, 1, False, "refined"),  # nobody waits, and yet the result is there at once
        (40, 0, 0, True, "refined"),  # not even the reading waits
        (0, 0, 0, True, "not measurable here"),  # the profile saw nothing
    ],
)
def test_rule_of_g5(rules, launches, waits, read, ahead, verdict):
    row = {"launches": launches, "waits": waits, "waits_to_read": read, "runs_ahead": ahead}
    found, evidence = rules["waiting_rule"]([row])
    assert found == verdict
    assert not launches or f"{launches} launches of a step, {waits} waiting calls" in evidence


def test_g5_hears_every_card(rules):
    ahead = {"launches": 40, "waits": 0, "waits_to_read": 1, "runs_ahead": True, "device_name": "a card"}
    waits = ahead | {"waits": 40, "device_name": "another"}
    rule = per_place(rules["waiting_rule"])
    assert rule([ahead, waits])[0] == rule([waits, ahead])[0] == "refined"
    assert rule([waits | {"device_name": "a card"}, ahead])[0] == "refuted"  # measured again
    assert "per_place(waiting_rule)" in source_of(RECIPE, "claims")


@pytest.mark.parametrize(
    "longer, verdict", [("aa", "refuted"), ("la", "refined"), ("ll", "confirmed"), ("al", "confirmed")]
)
def test_rule_of_g4_reads_the_table(rules, longer, verdict):
    words = {"a": "arithmetic", "l": "launches"}
    table = [{"image": str(n), "takes longer": words[one]} for n, one in enumerate(longer)]
    found, evidence = rules["flux_rule"](table)
    assert found == verdict and ("0" in evidence.split("longer at")[1]) == (longer[0] == "l")


@pytest.mark.parametrize("launch_us, verdict", [(5.0, "refined"), (1000.0, "confirmed"), (0.001, "refuted")])
def test_g4_follows_the_assumed_cost_of_a_launch(rules, launch_us, verdict, capsys):
    """The cell `cost` with a step of FLUX made up like the counted one: 3,000 launches; FLOP grow with the tokens."""
    figures = SimpleNamespace(table=lambda rows: None)
    names = {"launch_us": launch_us, "figures": figures, "flux_step": lambda tokens: (3000, 7e12 + tokens * 3.9e10)}
    exec(source_of(RECIPE, "cost"), names)
    table = names["table"]
    assert table[-1]["takes longer"] == ("launches" if launch_us > 100 else "arithmetic")
    exec(source_with(RECIPE, "def flux_rule"), names)
    found, evidence = names["flux_rule"](table)
    assert found == verdict and f"counted, {launch_us:g} µs a launch" in evidence
    assert ("arithmetic at 1024 x 1024" in evidence) == (verdict != "confirmed")
