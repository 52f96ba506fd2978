"""torch.compile as a candidate: Dynamo is real, Inductor is replaced by a backend that compiles nothing."""

import functools

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from timing_fakes import small_heap  # noqa: F401
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from utils.machine import has_compiler, missing
from utils.timing import EagerFallbackError, RecompilationError, compare, fixed, guards, measure
from utils.timing.dynamo import DynamoWatch, compiled_regions

FAST = {"num_threads": 1, "min_run_time": 0.01, "min_effect": 0.5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Baked(nn.Module):
    """Dynamo guards on the string, so every instance needs code of its own, as with Inductor's freezing."""

    count = 0

    def __init__(self):
        super().__init__()
        Baked.count += 1
        self.name = f"instance {Baked.count}"

    def forward(self, x):
        return x + 1 if self.name else x


def net():
    return Net().eval()


def inputs(index):
    return (torch.rand(4, 8),)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    limits = (torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit)
    yield
    assert (torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit) == limits
    assert not inductor_config.freezing
    assert not callback_handler.start_callbacks
    torch._dynamo.reset()


@pytest.fixture
def compilations(monkeypatch):
    """Inductor without code generation: a list of the freezing option at each compilation."""
    seen = []

    def compile_nothing(self, module, example_inputs, **options):
        seen.append(inductor_config.freezing)
        return module.forward

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compile_nothing)
    return seen


def frames():
    return counters["frames"]["total"]


def freezing(build):
    def frozen():
        inductor_config.freezing = True
        return torch.compile(build())

    return frozen


# ------------------------------------------------------------------------------------------- the right time


def test_twelve_rebuilds_are_twelve_compiled_instances(compilations):
    result = compare(
        lambda: Baked().eval(),
        {"compiled": lambda: torch.compile(Baked().eval())},
        make_inputs=inputs,
        replicates=12,
        **FAST,
    )
    row = result["compiled"]
    assert row.verdict not in ("error", "invalid"), row.error
    assert row.replicates == 12
    assert len(compilations) == 12  # eight, then eager, without care


def test_options_of_one_contender_do_not_reach_another(compilations):
    """One class, three ways: Dynamo itself would give all of them the first one's code."""
    candidates = {"plain": lambda: torch.compile(net()), "frozen": freezing(net), "again": lambda: torch.compile(net())}
    result = compare(net, candidates, make_inputs=inputs, replicates=3, **FAST)
    assert [row.error for row in result] == [None] * 3
    assert sorted(compilations) == [False, False, True, True, True]  # frozen code holds the weights: one per instance
    assert [row.equivalence.rule for row in result] == ["bitwise"] * 3


def test_compiled_functions_of_the_session_stay_compiled(compilations):
    mine = torch.compile(net())
    x = torch.rand(4, 8)
    with torch.inference_mode():
        mine(x)
        compare(net, {"plain": lambda: torch.compile(net())}, make_inputs=inputs, replicates=2, **FAST)
        before = frames()
        mine(x)
    assert frames() == before


def test_a_fixed_compiled_function_is_not_compiled_again(compilations):
    mine, x = torch.compile(net()), torch.rand(4, 8)
    with torch.inference_mode():
        mine(x)
    same = fixed(mine)
    options = FAST | {"num_threads": None}  # Dynamo guards on the number of threads
    row = compare(same, {"same": same}, make_inputs=inputs, replicates=3, **options)["same"]
    assert row.verdict != "error" and len(compilations) == 1


def test_nothing_of_a_comparison_counts_for_the_limit_afterwards(compilations):
    build = {"frozen": freezing(net)}
    for _ in range(2):
        assert compare(net, build, make_inputs=inputs, replicates=6, **FAST)["frozen"].verdict != "error"
    with torch.inference_mode():
        for _ in range(3):
            mine = torch.compile(net())
            mine(torch.rand(4, 8))
            assert compiled_regions(lambda mine=mine: mine(torch.rand(4, 8))) == 1


@pytest.mark.skipif(not has_compiler(), reason=missing("compiler"))
@pytest.mark.parametrize("option", ["plain", "frozen"])
def test_twelve_rebuilds_with_the_real_inductor(option):
    def plain():
        return torch.compile(net())

    before = counters["stats"]["unique_graphs"]
    build = {"plain": plain, "frozen": freezing(net)}[option]
    row = compare(net, {option: build}, make_inputs=inputs, replicates=12, **FAST)[option]
    assert row.verdict not in ("error", "invalid"), row.error
    assert row.replicates == 12
    assert counters["stats"]["unique_graphs"] - before == {"plain": 1, "frozen": 12}[option]


# ------------------------------------------------------------------------------------------- or an error


def hit_the_limit():
    """Compile one class until Dynamo gives up on it."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        torch.compile(Baked().eval(), backend="eager")(torch.rand(4, 8))


def compiled_baked():
    return torch.compile(Baked().eval(), backend="eager")


def hidden_baked():
    module = compiled_baked()
    return lambda x: module(x)


@pytest.mark.parametrize("build", [compiled_baked, hidden_baked])
def test_a_class_that_already_fell_back_to_eager_is_an_error(build):
    hit_the_limit()
    row = compare(lambda: Baked().eval(), {"compiled": build}, make_inputs=inputs, grad_mode="enabled", **FAST)[
        "compiled"
    ]
    assert row.verdict == "error" and row.speedup is None
    assert "EagerFallbackError" in row.error and "'compiled'" in row.error


def test_measure_refuses_a_function_that_fell_back():
    hit_the_limit()
    with pytest.raises(EagerFallbackError):
        measure(compiled_baked(), torch.rand(4, 8), grad_mode="enabled", min_run_time=0.01)


def test_reaching_the_limit_while_measuring_is_an_error(monkeypatch):
    from utils.timing import dynamo

    monkeypatch.setattr(dynamo, "LIMIT", 3)
    with torch._dynamo.config.patch(recompile_limit=0):  # 8 x 0
        row = compare(lambda: Baked().eval(), {"c": compiled_baked}, make_inputs=inputs, replicates=6, **FAST)["c"]
    assert row.verdict == "error" and "EagerFallbackError" in row.error and "limit" in row.error


def test_force_eager_is_an_error():
    with torch.compiler.set_stance("force_eager"):
        row = compare(net, {"c": lambda: torch.compile(net(), backend="eager")}, make_inputs=inputs, **FAST)["c"]
    assert row.verdict == "error" and "EagerFallbackError" in row.error


def recompiling():
    """Changes a guarded value at every 40th call, as a growing cache does."""
    count = [0]
    inner = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)

    def fn(x):
        count[0] += 1
        return inner(x, count[0] // 40) - count[0] // 40

    return fn


def test_compiling_during_timed_rounds_is_an_error():
    options = FAST | {"make_inputs": inputs, "replicates": 1, "min_run_time": 0.05}

    def good():
        return lambda x: x * 1

    result = compare(lambda: lambda x: x + 0, {"grows": recompiling, "good": good}, **options)
    assert result["grows"].verdict == "error" and "RecompilationError" in result["grows"].error
    assert result["good"].verdict not in ("error", "invalid")
    with pytest.raises(RecompilationError):
        compare(recompiling, {"good": good}, **options)
    torch._dynamo.reset()
    with pytest.raises(RecompilationError):
        measure(recompiling(), torch.rand(4), warmup_time=0.0, min_run_time=0.05, min_samples=6)


def test_a_reset_inside_a_builder_is_survived(compilations):
    def build():
        torch._dynamo.reset()
        return torch.compile(net())

    row = compare(net, {"c": build}, make_inputs=inputs, replicates=3, **FAST)["c"]
    assert row.verdict not in ("error", "invalid")
    assert len(compilations) == 3


# ------------------------------------------------------------------------------------------- pieces


def test_options_are_put_back_after_an_exception():
    def build():
        inductor_config.freezing = True
        torch._dynamo.config.cache_size_limit = 3
        raise RuntimeError

    row = compare(net, {"c": build}, make_inputs=inputs, replicates=1, **FAST)["c"]
    assert row.verdict == "error"
    assert not inductor_config.freezing  # and the fixture looks at the limits


def test_backends_of_different_contenders_differ():
    plain = torch._TorchCompileInductorWrapper("default", None, None)
    with DynamoWatch() as watch:
        made = []
        for index in (1, 1, 2):
            with watch.building(index):
                made.append(torch._TorchCompileInductorWrapper("default", None, None))
        assert made[0] == made[1] != made[2]
        assert plain not in made
    assert plain == torch._TorchCompileInductorWrapper("default", None, None)


def test_a_backend_gets_the_arguments_it_is_made_with():
    with DynamoWatch() as watch, watch.building(1):
        made = torch._TorchCompileInductorWrapper(mode="default", options={"max_autotune": True}, dynamic=True)
    assert made.dynamic is True and made.config["max_autotune"] is True


def test_code_of_the_session_that_no_contender_ran_is_kept():
    """Half of the limit is where code of the session that a contender shared is emptied."""
    mine, x = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False), torch.rand(4)
    for n in range(torch._dynamo.config.recompile_limit // 2):
        mine(x, n)
    with DynamoWatch():
        pass
    before = frames()
    mine(x, 0)
    assert frames() == before


def test_compiled_functions_are_recognised():
    compiled = torch.compile(net(), backend="eager")
    method = net()
    method.compile(backend="eager")
    forward = net()
    forward.forward = torch.compile(forward.forward, backend="eager")
    inside = nn.Sequential(torch.compile(net(), backend="eager"))
    for fn in (compiled, method, forward, inside, lambda x: compiled(x), functools.partial(compiled), compiled.forward):
        assert guards.is_compiled(fn), fn
    assert guards.is_compiled(torch.compile(lambda x: x, backend="eager"))
    for fn in (net(), net().forward, lambda x: x, torch.relu, functools.partial(torch.relu)):
        assert not guards.is_compiled(fn), fn


def test_compiled_regions_counts_graphs():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    x = torch.rand(4)
    for fn, graphs in ((torch.compile(broken, backend="eager"), 2), (broken, 0)):
        fn(x)
        assert compiled_regions(lambda fn=fn: fn(x)) == graphs


def test_limits_while_measuring():
    config = torch._dynamo.config
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "suppress_errors")
    before = [getattr(config, name) for name in names]
    for limit, high in ((8, 64), (100, 800)):
        with config.patch(recompile_limit=limit, accumulated_recompile_limit=5, suppress_errors=True), DynamoWatch():
            assert [getattr(config, name) for name in names] == [high, 4096, True, False]
    with config.patch(accumulated_recompile_limit=9999), DynamoWatch() as watch:
        watch.arm()  # a second time changes nothing
        assert config.accumulated_recompile_limit == 9999
    assert [getattr(config, name) for name in names] == before


def test_nothing_happens_before_dynamo_is_imported(monkeypatch):
    from utils.timing import dynamo

    monkeypatch.setattr(dynamo, "loaded", lambda: False)
    before = torch._dynamo.config.recompile_limit
    with DynamoWatch() as watch:
        assert torch._dynamo.config.recompile_limit == before
        with watch.sampling():
            pass
        assert watch.hits == [] and dynamo.frames_seen() == 0
        assert dynamo.check_compiled("f", lambda: 1 / 0, expected=True, at_least=3) == 0


def test_options_are_scoped():
    from utils.timing.dynamo import scoped_config

    config, before = torch._dynamo.config, torch._dynamo.config.verbose
    with pytest.raises(KeyError), scoped_config():
        config.verbose = not before
        inductor_config.freezing = True
        raise KeyError
    assert config.verbose is before and not inductor_config.freezing
    inductor_config.max_autotune = True
    try:
        with scoped_config():
            inductor_config.max_autotune = False
        assert inductor_config.max_autotune is True  # what it was, not the default
    finally:
        inductor_config.max_autotune = False
    limit = config.recompile_limit
    with config.patch(recompile_limit=limit + 1), scoped_config():
        config.recompile_limit = limit + 5
    assert config.recompile_limit == limit


def test_options_of_a_module_that_is_imported_meanwhile(monkeypatch):
    import sys

    from utils.timing.dynamo import scoped_config

    found = sys.modules["torch._inductor.config"]
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    with scoped_config():
        sys.modules["torch._inductor.config"] = found
        inductor_config.freezing = True
    assert not inductor_config.freezing  # its default
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    with scoped_config():
        pass  # never imported
    sys.modules["torch._inductor.config"] = found


def test_graphs_that_a_call_must_run():
    from utils.timing.dynamo import check_compiled

    x = torch.rand(4)
    fn = torch.compile(lambda x: x + 1, backend="eager")
    fn(x)
    assert check_compiled("f", lambda: fn(x), expected=True, at_least=0) == 1
    assert check_compiled("f", lambda: fn(x), expected=False, at_least=1) == 1
    assert check_compiled("f", lambda: fn(x), expected=False, at_least=0) == 0  # nobody asked
    for ran, expected, at_least, wanted in ((0, True, 0, 1), (1, True, 2, 2), (0, False, 1, 1)):
        call = (lambda: fn(x)) if ran else (lambda: x + 1)
        with pytest.raises(EagerFallbackError) as caught:
            check_compiled("f", call, expected=expected, at_least=at_least)
        assert str(caught.value) == (
            f"'f' is compiled but a call ran {ran} compiled graphs (expected {wanted} or more): "
            "it fell back to eager; see torch._dynamo's log, or call torch.compiler.reset() first"
        )


def test_who_compiled_is_noted():
    x = torch.rand(4)
    fn = torch.compile(lambda x, n: x + n, backend="eager", dynamic=False)
    with DynamoWatch() as watch:
        assert watch.current == [-1]
        fn(x, 1)
        with watch.sampling():
            watch.current[0] = 3
            fn(x, 1)
        assert watch.hits == []
        with watch.sampling():
            watch.current[0] = 4
            fn(x, 2)
        assert set(watch.hits) == {4}
        with watch.sampling():
            watch.current[0] = 5
            torch._dynamo.reset()
            fn(x, 3)
        assert set(watch.hits) == {5}  # also when the call threw the callback away
        with pytest.raises(KeyError), watch.sampling():
            raise KeyError
        assert watch.hits == []


def test_methods_are_put_back():
    cls = torch._TorchCompileInductorWrapper
    before = (cls.__init__, cls.__eq__)
    with pytest.raises(KeyError), DynamoWatch() as watch, watch.building(1):
        raise KeyError
    assert (cls.__init__, cls.__eq__) == before


def test_compiled_code_of_one_contender_is_forgotten_alone(compilations):
    x = torch.rand(4, 8)
    with DynamoWatch() as watch, torch.no_grad():
        made = {}
        for index in (1, 2):
            with watch.building(index):
                made[index] = torch.compile(net())
                made[index](x)
        watch.forget(1)
        before = len(compilations)
        made[2](x)
        assert len(compilations) == before == 2
        made[1](x)
        assert len(compilations) == 3


def test_messages_of_recompilation():
    options = FAST | {"make_inputs": inputs, "replicates": 1, "min_run_time": 0.05}
    row = compare(lambda: lambda x: x + 0, {"grows": recompiling}, **options)["grows"]
    assert row.error == ("RecompilationError: 'grows': Dynamo compiled, or recorded a CUDA graph, during timed rounds")
    torch._dynamo.reset()
    with pytest.raises(RecompilationError) as caught:
        measure(recompiling(), torch.rand(4), label="f", warmup_time=0.0, min_run_time=0.05, min_samples=6)
    assert str(caught.value) == "'f': Dynamo compiled during the samples; warm up every input shape"
