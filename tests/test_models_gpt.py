"""The GPT of recipe 08 and its KV cache: the same tokens with and without it, and no write before a check."""

import dataclasses

import numpy as np
import pytest
import torch

from utils.models import gpt, gpt_llama
from utils.models.gpt import decode_step, generate, generate_uncached, new_cache, prefill

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices of 32 values gain nothing from threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def model(request):
    return gpt.load("tiny", dtype=request.param)


def prompts_of(*lengths, seed=1, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator) for length in lengths]


# The model.


def test_full_size_has_exactly_the_parameters_of_the_source():
    config = gpt.SIZES["full"]
    with torch.device("meta"):
        built = gpt.GPT(config)
    assert sum(weight.numel() for weight in built.parameters()) == config.parameters == 11_389_824
    assert config.cached_values == 2 * 6 * 384 == 4_608


@pytest.mark.parametrize("size", gpt.SIZES)
def test_every_size_loads_and_counts(size):
    model = gpt.load(size)
    assert sum(weight.numel() for weight in model.parameters()) == model.config.parameters
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, model.config.vocab_size)


def test_same_seed_same_weights_in_every_dtype():
    wide, narrow, other = gpt.load("tiny", dtype=torch.float64), gpt.load("tiny"), gpt.load("tiny", seed=1)
    assert torch.equal(wide.head.weight.float(), narrow.head.weight)
    assert not torch.equal(other.head.weight, narrow.head.weight)


def test_a_seed_of_numpy_is_a_seed():
    assert torch.equal(gpt.load("tiny", seed=np.int64(3)).head.weight, gpt.load("tiny", seed=3).head.weight)


def test_unknown_size_names_the_nearest():
    with pytest.raises(ValueError, match="size='ful'; expected one of tiny, small, full; nearest: 'full'"):
        gpt.load("ful")


@pytest.mark.parametrize(("given", "error", "message"), [
    (dict(heads=0), ValueError, "heads=0; expected a whole number of at least 1"),
    (dict(layers=0), ValueError, "layers=0; expected a whole number of at least 1"),
    (dict(vocab_size=-3), ValueError, "vocab_size=-3; expected a whole number of at least 1"),
    (dict(width=384.0), TypeError, "width=384.0; expected a whole number"),
    (dict(feed_forward=True), TypeError, "feed_forward=True; expected a whole number"),
    (dict(rope_base="x"), TypeError, "rope_base='x'; expected a finite number above 0"),
    (dict(rope_base=0), ValueError, "rope_base=0; expected a finite number above 0"),
    (dict(norm_eps=-1), ValueError, "norm_eps=-1; expected a finite number above 0"),
    (dict(norm_eps=float("nan")), ValueError, "norm_eps=nan; expected a finite number above 0"),
])  # fmt: skip
def test_sizes_that_cannot_be_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        gpt.GPTConfig(**given)


@pytest.mark.parametrize(("given", "message"), [
    (dict(size=None), "size is None; expected one of tiny, small, full, or a GPTConfig"),
    (dict(size=6), "size is 6; expected one of tiny, small, full, or a GPTConfig"),
    (dict(dtype="float16"), "dtype is 'float16'; expected a torch.dtype of real numbers; nearest: torch.float16"),
    (dict(dtype=torch.int8), "dtype is torch.int8; expected a torch.dtype of real numbers"),
    (dict(seed="1"), "seed='1'; expected a whole number"),
])  # fmt: skip
def test_load_refuses_another_kind_of_argument(given, message):
    with pytest.raises(TypeError, match=message):
        gpt.load(**{"size": "tiny"} | given)


@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**63) - 1])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    with pytest.raises(ValueError, match=f"seed is {seed}; expected a whole number of 64 bits"):
        gpt.load("tiny", seed=seed)


def test_heads_must_leave_pairs():
    with pytest.raises(ValueError, match="width 30 must be a multiple of 2 x 4 heads"):
        gpt.load(gpt.GPTConfig(width=30, heads=4))


# RoPE.


def digits(rows):
    return [[f"{value:.4f}" for value in row] for row in rows.tolist()]


def test_rope_reproduces_the_corner_values_of_the_source():
    angles = gpt.rope_angles(1024, head_size=8)
    assert angles.shape == (1024, 4)
    close = {"rtol": 0, "atol": 5.1e-5}  # the source prints four decimals
    torch.testing.assert_close(angles[1], torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64), **close)
    torch.testing.assert_close(angles[-1], torch.tensor([1023, 102.3, 10.23, 1.023], dtype=torch.float64), **close)
    first = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.5403, 0.9950, 0.9999, 1.0], [-0.4161, 0.9801, 0.9998, 1.0]])
    last = torch.tensor([[-0.9998, 0.0018, -0.7072, 0.5225], [-0.5550, -0.0981, -0.7001, 0.5217],
                         [0.4001, -0.1969, -0.6930, 0.5208]])  # fmt: skip
    printed, ours = torch.cat((first, last)), torch.cat((angles[:3], angles[-3:])).cos()
    assert digits(ours.float()) == digits(printed)  # the source prints float32
    exact, said = digits(ours), digits(printed)
    other = {(r, c): exact[r][c] for r in range(6) for c in range(4) if exact[r][c] != said[r][c]}
    assert other == {(1, 2): "1.0000"}  # exactly 0.99995000042; the float32 beside it lies below the edge: 0.9999


def test_rope_only_the_distance_matters():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=generator)
    angles = gpt.rope_angles(600, 16)
    scores = {}
    for here, there in [(7, 3), (507, 503), (3, 7)]:
        turned = [
            gpt.apply_rope(x, angles[p : p + 1].cos(), angles[p : p + 1].sin())
            for x, p in [(query, here), (key, there)]
        ]
        scores[here, there] = (turned[0] * turned[1]).sum()
    torch.testing.assert_close(scores[7, 3], scores[507, 503])
    assert (scores[7, 3] - scores[3, 7]).abs() > 1e-3


def test_half_precision_tables_are_cast_last():
    config = gpt.SIZES["tiny"]
    cos, _ = gpt.rope_tables(4096, config, torch.bfloat16, torch.device("cpu"))
    exact, _ = gpt.rope_tables(4096, config, torch.float64, torch.device("cpu"))
    assert cos.dtype == torch.bfloat16
    assert (cos.double() - exact).abs().max() < 2**-8


# Cached and uncached: identical tokens.


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 5, 6, 7])
def test_any_split_of_the_prompt_gives_the_same_tokens(model, chunk):
    (prompt,) = prompts_of(7)
    assert torch.equal(generate(model, prompt[None], 12, chunk=chunk)[0], generate_uncached(model, prompt, 12))


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_prompts_of_different_length_in_one_batch(model, chunk):
    prompts = prompts_of(3, 9, 1, 6)
    together = generate(model, prompts, 10, chunk=chunk)
    alone = torch.stack([generate_uncached(model, prompt, 10) for prompt in prompts])
    assert torch.equal(together, alone)
    assert len(together.unique()) > 4, "a model that repeats itself would hide a wrong cache"


def test_logits_agree_with_the_uncached_model_up_to_the_last_slot(model):
    (tokens,) = prompts_of(16)
    expected = model(tokens[None])[0]
    cache = new_cache(model, batch=1, slots=16)
    torch.testing.assert_close(prefill(model, tokens[None, :5], cache)[0], expected[4])
    torch.testing.assert_close(prefill(model, tokens[None, 5:9], cache)[0], expected[8])
    for position in range(9, 16):
        torch.testing.assert_close(decode_step(model, tokens[position, None], cache)[0], expected[position])
    assert cache.longest == cache.slots == 16


def test_a_longer_cache_changes_nothing(model):
    (prompt,) = prompts_of(5)
    assert torch.equal(generate(model, [prompt], 8), generate(model, [prompt], 8, slots=100))


def test_the_cache_holds_what_the_closed_form_says():
    model = gpt.load("tiny")
    cache = new_cache(model, batch=3, slots=20)
    assert cache.bytes == 3 * 20 * model.config.cached_values * 4
    assert len(cache.kv) == model.config.layers and cache.kv[0].shape == (2, 3, 2, 20, 16)


def test_padding_never_reaches_the_cache():
    model = gpt.load("tiny")
    cache = new_cache(model, batch=2, slots=6)
    tokens = torch.tensor([[1, 2, 0, 0, 0, 0], [3, 4, 5, 6, 7, 8]])
    prefill(model, tokens, cache, lengths=[2, 6])
    assert all(layer[:, 0, :, 2:].count_nonzero() == 0 for layer in cache.kv)
    assert cache.filled.tolist() == [2, 6] and cache.longest == 6


def test_a_row_without_new_tokens_keeps_its_logits():
    model = gpt.load("tiny")
    cache = new_cache(model, batch=2, slots=8)
    before = prefill(model, torch.tensor([[1, 2], [3, 4]]), cache).clone()
    after = prefill(model, torch.tensor([[5], [0]]), cache, lengths=[1, 0])
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])


def test_no_new_tokens_is_an_empty_answer():
    model = gpt.load("tiny")
    assert generate(model, [[1, 2]], 0).shape == (1, 0)
    assert generate_uncached(model, [1, 2], 0).shape == (0,)


# Bad input: a clear error, and nothing written.


def cache_state(cache):
    return [layer.clone() for layer in cache.kv], cache.filled.clone(), cache.logits.clone(), cache.longest


def same_state(left, right):
    return (all(map(torch.equal, left[0], right[0])) and torch.equal(left[1], right[1])
            and torch.equal(left[2], right[2]) and left[3] == right[3])  # fmt: skip


TINY = gpt.load("tiny")
BAD_PREFILL = {
    "empty prompt": ([[]], None, ValueError, "empty"),
    "id too large": ([[1, 64]], None, ValueError, "token id 64 is out of range; expected 0 to 63"),
    "id negative": ([[-1]], None, ValueError, "token id -1 is out of range"),
    "too long": ([[1] * 6], None, ValueError, "9 tokens do not fit into 8 slots; the cache is unchanged"),
    "floating tokens": ([[1.0]], None, TypeError, "tokens are torch.float32"),
    "one dimension": ([1, 2], None, ValueError, r"shape \(2,\); expected \[batch, length\]"),
    "other batch": ([[1], [2]], None, ValueError, "hold 2 sequences; the cache was made for 1"),
    "negative length": ([[1]], [-1], ValueError, "lengths hold -1; expected 0 to 1"),
    "length over the tokens": ([[1]], [2], ValueError, "lengths hold 2; expected 0 to 1"),
    "lengths of another batch": ([[1]], [1, 1], ValueError, "expected 1 whole numbers"),
    "a truth value as length": ([[1]], [True], TypeError, r"lengths is \[True\]; expected whole numbers"),
    "half a token": ([[1]], [0.5], TypeError, r"lengths is \[0.5\]; expected whole numbers"),
    "a length as text": ([[1]], "1", TypeError, "lengths is '1'; expected whole numbers"),
}


@pytest.mark.parametrize("case", BAD_PREFILL)
def test_bad_prompt_is_refused_before_any_write(case):
    tokens, lengths, error, message = BAD_PREFILL[case]
    cache = new_cache(TINY, batch=1, slots=8)
    prefill(TINY, torch.tensor([[1, 2, 3]]), cache)
    before = cache_state(cache)
    tokens = torch.tensor(tokens) if tokens != [[]] else torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(error, match=message):
        prefill(TINY, tokens, cache, lengths)
    assert same_state(before, cache_state(cache))


def test_past_the_last_slot_is_an_error_and_the_cache_is_unchanged():
    cache = new_cache(TINY, batch=1, slots=4)
    prefill(TINY, torch.tensor([[1, 2, 3]]), cache)
    decode_step(TINY, torch.tensor([4]), cache)
    before = cache_state(cache)
    with pytest.raises(ValueError, match="5 tokens do not fit into 4 slots"):
        decode_step(TINY, torch.tensor([5]), cache)
    assert same_state(before, cache_state(cache))


@pytest.mark.parametrize("tokens", [[[1, 2]], 3, None])
def test_tokens_that_are_no_tensor_are_refused(tokens):
    cache = new_cache(TINY, batch=1, slots=4)
    with pytest.raises(TypeError, match=r"tokens are .*; expected a tensor \[batch, length\]"):
        prefill(TINY, tokens, cache)
    with pytest.raises(TypeError, match=r"token is .*; expected a tensor \[B\]"):
        decode_step(TINY, tokens, cache)
    with pytest.raises(TypeError, match="tokens are"):
        TINY(tokens)
    assert cache.longest == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_lengths_of_any_whole_kind_count_the_same(dtype):
    """A row with no new token: 0 - 1 must not become 255."""
    model, kept = gpt.load("tiny"), []
    for lengths in ([2, 0], torch.tensor([2, 0], dtype=dtype)):
        cache = new_cache(model, batch=2, slots=8)
        prefill(model, torch.tensor([[1, 2], [3, 4]]), cache)
        kept.append(prefill(model, torch.tensor([[5, 6], [7, 8]]), cache, lengths))
    assert torch.equal(*kept)


def test_no_model_and_no_cache_are_refused_by_name():
    with pytest.raises(TypeError, match=r"model is None; expected a GPT, as load\(...\) gives it"):
        new_cache(None, 1, 4)
    for call in (generate, generate_uncached):
        with pytest.raises(TypeError, match="model is 'tiny'; expected a GPT"):
            call("tiny", [[1]], 2)
    with pytest.raises(TypeError, match=r"cache is None; expected what new_cache\(...\) gives"):
        prefill(TINY, torch.tensor([[1]]), None)


@pytest.mark.parametrize(("tokens", "message"), [
    (torch.tensor([[1, 2]]).to_sparse(), "tokens is torch.sparse_coo; expected a dense tensor with values"),
    (torch.zeros(1, 2, dtype=torch.int64, device="meta"), "tokens is on meta; expected a dense tensor with values"),
])  # fmt: skip
def test_tokens_without_readable_values_are_refused_before_any_write(tokens, message):
    cache = gpt.new_cache(TINY, 1, 8)
    before = cache_state(cache)
    with pytest.raises(TypeError, match=message):
        gpt.prefill(TINY, tokens, cache)
    assert same_state(before, cache_state(cache))
    with pytest.raises(TypeError, match=message.replace("tokens", "prompt")):
        gpt.generate(TINY, [tokens[0]], 1)


def test_a_model_that_is_trained_leaves_no_gradients_in_the_cache():
    model = gpt.load("tiny").requires_grad_(True)
    cache = gpt.new_cache(model, 1, 8)
    logits = gpt.prefill(model, torch.tensor([[1, 2, 3]]), cache)
    gpt.decode_step(model, torch.tensor([4]), cache)
    kept = [logits, cache.logits, *cache.kv]
    assert not any(t.requires_grad for t in kept), "each step would keep the graph of all steps before it"


def test_an_empty_row_in_an_empty_cache_is_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        prefill(TINY, torch.tensor([[1], [2]]), new_cache(TINY, batch=2, slots=4), lengths=[1, 0])


def test_a_cache_of_another_model_or_dtype_is_refused():
    cache = new_cache(TINY, batch=1, slots=4)
    with pytest.raises(ValueError, match="belongs to another model"):
        prefill(gpt.load("tiny"), torch.tensor([[1]]), cache)
    model = gpt.load("tiny")
    cache = new_cache(model, batch=1, slots=4)
    with pytest.raises(ValueError, match=r"cache is torch.float32.*model is torch.float64"):
        prefill(model.double(), torch.tensor([[1]]), cache)
    assert cache.longest == 0


def test_a_token_for_each_sequence():
    with pytest.raises(ValueError, match=r"shape \(1, 1\); expected \[B\]"):
        decode_step(TINY, torch.tensor([[1]]), new_cache(TINY, batch=1, slots=4))


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(prompts=[[1]], new_tokens=-1), "new_tokens=-1"),
    (dict(prompts=[[1]], new_tokens=1, chunk=0), "chunk=0"),
    (dict(prompts=[], new_tokens=1), "expected at least one prompt"),
    (dict(prompts=[[1], []], new_tokens=1), r"lengths are \[1, 0\]"),
    (dict(prompts=[[1, 2, 3]], new_tokens=3, slots=4), "3 prompt tokens and 3 new ones need 5 slots; the cache has 4"),
    (dict(prompts=[[99]], new_tokens=1), "token id 99 is out of range"),
])  # fmt: skip
def test_generate_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(TINY, **arguments)


NO_PROMPTS = {
    "fractions": ([[1.7, 2.2]], r"prompt is \[1.7, 2.2\]; expected whole numbers"),
    "a fraction among numbers": ([[1, 2.5]], r"prompt is \[1, 2.5\]"),
    "a float tensor": (torch.tensor([[1.0, 2.0]]), r"prompt is tensor\(\[1., 2.\]\)"),
    "a truth value": ([[1, True]], r"prompt is \[1, True\]"),
    "a mask": (torch.tensor([[True, False]]), r"prompt is tensor\(\[ True, False\]\)"),
    "texts": (["hello"], "prompt is 'hello'"),
    "nothing": ([None], "prompt is None"),
}


@pytest.mark.parametrize("case", NO_PROMPTS)
def test_prompts_that_are_no_whole_numbers_are_refused_and_never_cut(case):
    prompts, message = NO_PROMPTS[case]
    with pytest.raises(TypeError, match=message) as caught:
        generate(TINY, prompts, 2)
    assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match=message):
        generate_uncached(TINY, prompts[0], 2)


@pytest.mark.parametrize("prompts", ["hello", 7, None, torch.tensor(7)])
def test_what_is_no_list_of_prompts_is_refused(prompts):
    with pytest.raises(TypeError, match=r"prompts is .*; expected a tensor \[B, L\], or a list of token ids"):
        generate(TINY, prompts, 2)


@pytest.mark.parametrize(("given", "error", "message"), [
    (dict(new_tokens=2.5), TypeError, "new_tokens=2.5; expected a whole number"),
    (dict(new_tokens=True), TypeError, "new_tokens=True; expected a whole number"),
    (dict(new_tokens="3"), TypeError, "new_tokens='3'; expected a whole number"),
    (dict(new_tokens=3, chunk=2.5), TypeError, "chunk=2.5; expected a whole number"),
    (dict(new_tokens=3, slots=8.0), TypeError, "slots=8.0; expected a whole number"),
    (dict(new_tokens=3, slots=0), ValueError, "slots=0; expected a whole number of at least 1"),
])  # fmt: skip
def test_counts_are_whole_numbers(given, error, message):
    with pytest.raises(error, match=message):
        generate(TINY, [[1, 2, 3]], **given)


def test_a_flat_list_is_one_prompt_and_not_several():
    with pytest.raises(ValueError, match=r"prompt 1 has shape \(\); expected \[length\]"):
        generate(TINY, [1, 2, 3], 2)
    with pytest.raises(ValueError, match=r"prompt \[\[1, 2\]\] has shape \(1, 2\)"):
        generate_uncached(TINY, [[1, 2]], 2)


@pytest.mark.parametrize(("batch", "slots", "error", "message"), [
    (0, 4, ValueError, "batch=0"),
    (1, 0, ValueError, "slots=0"),
    (1, 2.5, TypeError, "slots=2.5; expected a whole number"),
    (True, 4, TypeError, "batch=True; expected a whole number"),
])  # fmt: skip
def test_a_cache_needs_a_size(batch, slots, error, message):
    with pytest.raises(error, match=message):
        new_cache(TINY, batch, slots)


# The same weights as a transformers Llama.


def test_llama_gives_the_same_logits_and_tokens():
    llama = gpt_llama.to_llama(TINY)
    (prompt,) = prompts_of(9)
    torch.testing.assert_close(TINY(prompt[None]), llama(prompt[None]).logits, rtol=1e-4, atol=1e-5)
    made = llama.generate(prompt[None], max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, 9:]
    assert torch.equal(made, generate(TINY, [prompt], 12)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_llama_gets_the_very_same_weights_in_every_dtype(dtype):
    model = gpt.load("tiny", dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-3)  # float64 values that float32 does not have
    found = gpt_llama.to_llama(model).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in gpt_llama.llama_state_dict(model).items())


@pytest.mark.parametrize(("state", "config", "message"), [
    (None, TINY.config, "state is None; expected a state_dict"),
    ({}, "tiny", "config is 'tiny'; expected a GPTConfig"),
])  # fmt: skip
def test_from_llama_refuses_another_kind_of_argument(state, config, message):
    with pytest.raises(TypeError, match=message):
        gpt_llama.from_llama(state, config)


def test_llama_state_dict_round_trip_is_exact():
    state = gpt_llama.llama_state_dict(TINY)
    assert set(state) == set(gpt_llama.to_llama(TINY).state_dict())
    back = gpt_llama.from_llama(state, TINY.config)
    assert all(map(torch.equal, back.state_dict().values(), TINY.state_dict().values()))
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(state[query], TINY.layers[0].query.weight), "the RoPE layout has to differ"


def test_from_llama_names_a_missing_or_wrong_tensor():
    state = gpt_llama.llama_state_dict(TINY)
    with pytest.raises(ValueError, match=r"lm_head.weight: found nothing; expected \(64, 32\)"):
        gpt_llama.from_llama({name: weight for name, weight in state.items() if name != "lm_head.weight"}, TINY.config)
    with pytest.raises(ValueError, match=r"lm_head.weight: found \(64, 32\); expected \(65, 32\)"):
        larger = dataclasses.replace(TINY.config, vocab_size=65)
        gpt_llama.from_llama(state | {"model.embed_tokens.weight": torch.zeros(65, 32)}, larger)
