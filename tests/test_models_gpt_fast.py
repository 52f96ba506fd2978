"""The fast decoder of recipe 08: the same tokens as the plain one, arranged in another way."""

import pytest
import torch

from utils.machine import has_compiler
from utils.models import gpt, gpt_fast, gpt_llama
from utils.models.gpt_fast import BLOCK, DecodeStep, FastGPT, Rows

PROMPT = [1, 2, 3, 4, 5]
compiler = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    """Norms that are not all ones: they are multiplied into the matrices, and ones would hide a mistake."""
    model = gpt.load("tiny")
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5, generator=generator)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_arranged_step_writes_the_same_tokens_over_many_blocks(model, dtype):
    same = gpt_llama.from_llama(gpt_llama.llama_state_dict(model), model.config).to(dtype)
    count = 4 * BLOCK
    expected = gpt.generate(same, [PROMPT], count)[0]
    assert len(expected.unique()) > 4
    assert torch.equal(FastGPT(same, len(PROMPT) + count - 1, how="eager").generate(PROMPT, count), expected)


@compiler
@pytest.mark.parametrize("how", ["compile", "aot"])
def test_compiled_steps_write_the_same_tokens_with_one_graph(model, how):
    torch._dynamo.reset()
    fast = FastGPT(model, 3 * BLOCK, how=how)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    made = fast.generate(PROMPT, 2 * BLOCK)
    assert torch.equal(made, gpt.generate(model, [PROMPT], 2 * BLOCK)[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == (how == "compile")
    torch._dynamo.reset()


@pytest.mark.parametrize("slots", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_every_slot_can_be_used_and_no_more(model, slots):
    """A prompt of one token fills a slot; the last new token is never stored."""
    fast = FastGPT(model, slots, how="eager")
    assert torch.equal(fast.generate([7], slots), gpt.generate(model, [[7]], slots)[0])
    before = [kept.clone() for kept in fast.cache]
    with pytest.raises(ValueError, match=f"1 prompt tokens and {slots + 1} new ones need {slots + 1} slots"):
        fast.generate([7], slots + 1)
    assert all(map(torch.equal, before, fast.cache))


def test_an_old_text_does_not_shine_through(model):
    fast = FastGPT(model, 40, how="eager")
    first = fast.generate(PROMPT, 20)
    fast.generate([9, 8, 7, 6, 5, 4, 3, 2], 30)
    assert torch.equal(fast.generate(PROMPT, 20), first)


def test_the_whole_cache_gives_what_the_blocks_up_to_the_token_give(model):
    """A CUDA graph has one shape, so it reads all slots and relies on the mask."""
    fast = FastGPT(model, 40, how="eager")
    fast.generate([9, 8, 7, 6, 5, 4, 3, 2], 30)
    expected = fast.generate(PROMPT, 20)
    fast.read_slots = lambda position: fast.all_slots[:-1]
    assert torch.equal(fast.generate(PROMPT, 20), expected)


@pytest.mark.parametrize(("threads", "cpus", "dynamic"), [(2, 2, False), (1, 2, True), (8, 16, True)])
def test_a_step_that_is_compiled_ahead_follows_the_threads_of_the_call(monkeypatch, model, threads, cpus, dynamic):
    """Where they are not all of the machine, the compiler would write their number into the code."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    assert gpt_fast._options(DecodeStep(model, 16))["cpp.dynamic_threads"] is dynamic


def test_int8_is_near_and_its_error_is_that_of_half_a_step():
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    rows = Rows(weight, int8=True)
    kept = rows.weight.flatten(0, 1).float() * rows.scale[:, None]
    step = weight.abs().amax(1, keepdim=True) / 127
    assert rows.weight.dtype is torch.int8 and ((kept - weight).abs() <= step / 2 * 1.0001).all()
    x = torch.randn(16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rows(x), kept @ x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_of_half_precision_has_no_step_outside_its_range(dtype):
    """In bfloat16 127 steps of a row round to 128, which an int8 does not have: the largest weight changed its sign."""
    weight = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] *= 1e-4  # its step is below the smallest float16
    weight[4] = 0
    rows = Rows(weight, int8=True)
    steps = rows.weight.flatten(0, 1)
    assert steps.min() >= -127 and (rows.scale > 0).all() and not steps[4].any()
    kept = steps.double() * rows.scale.double()[:, None]
    largest = weight.double().abs().amax(1, keepdim=True)
    assert ((kept - weight.double()).abs() <= largest / 254 * 1.0001).all()
    x = 100 * torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)  # a sum of steps passes 65,504
    found, expected = rows(x), kept @ x.double()
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_int8_agrees_mostly_and_reads_fewer_bytes(model):
    exact, small = FastGPT(model, 64, how="eager"), FastGPT(model, 64, weights="int8", how="eager")
    text = [*PROMPT, *exact.generate(PROMPT, 50).tolist()]
    small.prefill(PROMPT)
    places = range(len(PROMPT), len(text) - 1)
    same = sum(int(small.step(*small.arguments(text[at], at))[0]) == text[at + 1] for at in places)
    assert same >= 0.8 * len(places)
    scales = 4 * (2 * (96 + 32 + 128 + 32) + 64)  # one float32 for each row
    assert small.weight_bytes == exact.weight_bytes // 4 + scales


def test_bytes_of_the_full_model_in_closed_form():
    config = gpt.SIZES["full"]
    with torch.device("meta"):
        step = DecodeStep(gpt.GPT(config), 64)
    held = sum(kept.nbytes for part in step.modules() if isinstance(part, Rows) for kept in part.buffers())
    norms = (2 * config.layers + 1) * config.width
    assert held == 4 * (config.parameters - config.vocab_size * config.width - norms)


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(slots=0), "slots=0; expected a whole number of at least 1"),
    (dict(slots=4, weights="int4"), "weights='int4'; expected one of float, int8; nearest: 'int8'"),
    (dict(slots=4, how="aott"), "how='aott'; expected one of eager, compile, aot; nearest: 'aot'"),
])  # fmt: skip
def test_a_wrong_name_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        FastGPT(model, **arguments)


@pytest.mark.parametrize(("prompt", "new_tokens", "message"), [
    ([], 1, "the prompt is empty"),
    ([64], 1, "token id 64 is out of range"),
    ([1], -1, "new_tokens=-1"),
    ([1] * 9, 0, "9 prompt tokens and 0 new ones need 9 slots; the cache has 8"),
])  # fmt: skip
def test_bad_input_is_refused_before_any_write(model, prompt, new_tokens, message):
    fast = FastGPT(model, 8, how="eager")
    with pytest.raises(ValueError, match=message):
        fast.generate(prompt, new_tokens)
    assert all(kept.count_nonzero() == 0 for kept in fast.cache)


@pytest.mark.parametrize(("prompt", "new_tokens", "error", "message"), [
    ([1.7, 2.2], 1, TypeError, r"prompt is \[1.7, 2.2\]; expected whole numbers"),
    ([True], 1, TypeError, r"prompt is \[True\]; expected whole numbers"),
    ("hello", 1, TypeError, "prompt is 'hello'; expected whole numbers"),
    (3, 1, ValueError, r"prompt 3 has shape \(\); expected \[length\]"),
    ([[1, 2]], 1, ValueError, r"has shape \(1, 2\); expected \[length\]"),
    ([1], 1.0, TypeError, "new_tokens=1.0; expected a whole number"),
])  # fmt: skip
def test_another_kind_of_prompt_or_count_is_refused_before_any_write(model, prompt, new_tokens, error, message):
    fast = FastGPT(model, 8, how="eager")
    with pytest.raises(error, match=message):
        fast.generate(prompt, new_tokens)
    if new_tokens == 1 and isinstance(new_tokens, int):
        with pytest.raises(error, match=message):
            fast.prefill(prompt)
    assert all(kept.count_nonzero() == 0 for kept in fast.cache)


def test_another_kind_of_model_or_slots_is_refused(model):
    with pytest.raises(TypeError, match="model is None; expected a GPT"):
        FastGPT(None, 8, how="eager")
    with pytest.raises(TypeError, match=r"slots=8\.5; expected a whole number"):
        FastGPT(model, 8.5, how="eager")
