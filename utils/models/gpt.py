"""A small GPT (RoPE, RMSNorm, SwiGLU, no biases) with a preallocated KV cache; the weights fit `LlamaForCausalLM`.

Shapes: B sequences, L tokens, S cache slots, H heads, D values per head, V words. Recipe 08 explains the idea; these
are the functions to import. Every public function looks at its arguments before it writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import expect
from ..expect import short
from .whole_numbers import prompt_ids, whole_numbers, with_values


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The defaults are the full model: exactly 11,389,824 parameters.

    TypeError, ValueError: a size that is no whole number of at least 1, a width that is no multiple of 2 x heads, a
    rope_base or norm_eps that is no number above 0.
    """

    vocab_size: int = 1000
    layers: int = 6
    width: int = 384
    heads: int = 6
    feed_forward: int = 1024
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self):
        expect.whole(1, **{size.name: getattr(self, size.name) for size in fields(self)[:5]})
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} must be a multiple of 2 x {self.heads} heads: RoPE turns pairs")
        expect.above(0, rope_base=self.rope_base, norm_eps=self.norm_eps)

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Closed form: two tables of words, and per layer 4 square matrices, 3 feed-forward ones and 2 norms."""
        layer = 4 * self.width**2 + 3 * self.width * self.feed_forward + 2 * self.width
        return 2 * self.vocab_size * self.width + self.layers * layer + self.width

    @property
    def cached_values(self) -> int:
        """Values that the cache keeps per token: one key and one value vector in each layer."""
        return 2 * self.layers * self.width


SIZES = {
    "tiny": GPTConfig(vocab_size=64, layers=2, width=32, heads=2, feed_forward=64),
    "small": GPTConfig(vocab_size=256, layers=4, width=128, heads=4, feed_forward=344),
    "full": GPTConfig(),
}
FLOATS = ("float32", "float64", "float16", "bfloat16")


class Layer(nn.Module):
    """One transformer layer: attention and SwiGLU, each behind an RMSNorm and added to its input."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width, hidden = config.width, config.feed_forward
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def query_key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, width] -> query, key, value [B, H, L, D]; query and key are turned by their position."""
        x = self.attention_norm(x)
        query, key, value = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                             for part in (self.query, self.key, self.value))  # fmt: skip
        return apply_rope(query, cos, sin), apply_rope(key, cos, sin), value

    def finish(self, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attend (query [B, H, L, D], keys and values [B, H, S, D], mask True = attend), then the feed-forward part."""
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)  # [B, H, L, D]
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPT(nn.Module):
    """tokens [B, L] -> logits [B, L, V], without a cache: every call computes every position."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def forward(self, tokens: Tensor) -> Tensor:
        _check_tokens(self, tokens)
        length = tokens.shape[1]
        cos, sin = rope_tables(length, self.config, self.dtype, self.device)
        mask = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()  # True = attend
        x = self.embedding(tokens)  # [B, L, width]
        for layer in self.layers:
            query, key, value = layer.query_key_value(x, cos, sin)
            x = layer.finish(x, query, key, value, mask)
        return self.head(self.norm(x))


def load(
    size: str | GPTConfig = "full",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> GPT:
    """A GPT in eval mode with weights drawn on the CPU from `seed`: the same on every device and in every dtype.

    Standard deviation 1/sqrt(inputs): attention is far from uniform, so a wrong mask or position shows.
    ValueError: `size` is no key of SIZES. TypeError: another kind of size, seed or dtype.
    """
    if not isinstance(size, str | GPTConfig):
        raise TypeError(f"size is {short(size)}; expected one of {', '.join(SIZES)}, or a GPTConfig")
    if isinstance(size, str):
        expect.one_of(SIZES, size=size)
    expect.whole(None, seed=seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {short(seed)}; expected a whole number of 64 bits")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        near = get_close_matches(str(dtype).removeprefix("torch."), FLOATS, n=1, cutoff=0)[0]
        raise TypeError(f"dtype is {short(dtype)}; expected a torch.dtype of real numbers; nearest: torch.{near}")
    config = SIZES[size] if isinstance(size, str) else size
    with torch.device("meta"):
        model = GPT(config)
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(int(seed))
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    return model.to(device=device, dtype=dtype)


# RoPE: a pair of values (even, odd) is turned by an angle that grows with the position.


def rope_angles(positions: int, head_size: int, base: float = 10_000.0) -> Tensor:
    """Angles [positions, D/2] in float64: position x base^(-2i/D) (Su et al. 2021, equation 15)."""
    speed = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    return torch.outer(torch.arange(positions, dtype=torch.float64), speed)


def rope_tables(positions: int, config: GPTConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, D/2]. Computed in float64 and cast last: in half precision an angle of 4,000 is noise."""
    angles = rope_angles(positions, config.head_size, config.rope_base)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B, H, L, D] by cos, sin [L, D/2] or [B, 1, L, D/2]; pairs are interleaved: (0, 1), (2, 3), ..."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


# The cache.


@dataclass
class KVCache:
    """Keys and values of every token seen so far, preallocated for `slots` tokens per sequence.

    kv: one tensor per layer [2, B, H, S, D] (0: keys, 1: values).
    filled [B]: tokens seen per sequence, which is also the position of the next one.
    longest: the largest of them, kept on the host.
    logits [B, V]: what the last token of each sequence predicts.
    cos, sin [S, D/2]: RoPE of each slot.
    """

    model: GPT = field(repr=False)
    kv: list[Tensor] = field(repr=False)
    filled: Tensor
    logits: Tensor = field(repr=False)
    cos: Tensor = field(repr=False)
    sin: Tensor = field(repr=False)
    longest: int = 0

    @property
    def slots(self) -> int:
        return self.cos.shape[0]

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(layer.nbytes for layer in self.kv)


def new_cache(model: GPT, batch: int, slots: int) -> KVCache:
    """An empty cache for `batch` sequences of at most `slots` tokens, in the model's dtype.

    TypeError, ValueError: a size that is no whole number of at least 1.
    """
    check_model(model)
    expect.whole(1, batch=batch, slots=slots)
    config, place = model.config, {"dtype": model.dtype, "device": model.device}
    shape = (2, batch, config.heads, slots, config.head_size)
    return KVCache(
        model=model,
        kv=[torch.zeros(shape, **place) for _ in range(config.layers)],
        filled=torch.zeros(batch, dtype=torch.int64, device=model.device),
        logits=torch.zeros(batch, config.vocab_size, **place),
        **dict(zip(("cos", "sin"), rope_tables(slots, config, model.dtype, model.device), strict=True)),
    )


@torch.no_grad()  # a graph of gradients would keep every step alive
def prefill(model: GPT, tokens: Tensor, cache: KVCache, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
    """Store a prompt, or its next piece, and return what the last token of each sequence predicts: logits [B, V].

    tokens [B, L], padded on the right; lengths [B]: the real tokens of each row in this call (default: all L). A row
    with 0 tokens keeps its earlier logits. Call it again with the next piece: positions go on where they stopped.
    ValueError/TypeError, before any write: empty prompt, no whole numbers, token id out of range, more tokens than
    free slots, a cache of another model, batch, dtype or device.
    """
    _check_cache(model, cache, tokens)
    rows, length = tokens.shape
    count = whole_numbers("lengths", [length] * rows if lengths is None else lengths, model.device)  # [B]
    longest = _check_room(cache, count, length)
    position = cache.filled[:, None] + torch.arange(length, device=model.device)  # [B, L]
    real = torch.arange(length, device=model.device) < count[:, None]  # [B, L]
    hidden = _through_layers(model, tokens, cache, position, real, upto=longest)  # [B, L, width]
    last = hidden[torch.arange(rows, device=model.device), (count - 1).clamp(min=0)]  # [B, width]
    cache.logits = torch.where(count[:, None] > 0, model.head(last), cache.logits)
    cache.filled, cache.longest = cache.filled + count, longest
    return cache.logits


def decode_step(model: GPT, token: Tensor, cache: KVCache) -> Tensor:
    """Append one token per sequence, token [B], and return what it predicts: logits [B, V]. Errors as in `prefill`."""
    if not isinstance(token, Tensor):
        raise TypeError(f"token is {short(token)}; expected a tensor [B], one token for each sequence")
    if token.ndim != 1:
        raise ValueError(f"token has shape {tuple(token.shape)}; expected [B], one token for each sequence")
    return prefill(model, token[:, None], cache)


def _through_layers(model: GPT, tokens: Tensor, cache: KVCache, position: Tensor, real: Tensor, upto: int) -> Tensor:
    """Write keys and values of real tokens into their slots, attend to slots <= position; [B, L, width]."""
    row, column = real.nonzero(as_tuple=True)
    slot = position[row, column]
    near = position.clamp(max=cache.slots - 1)  # padding may point past the end; its result is thrown away
    cos, sin = cache.cos[near][:, None], cache.sin[near][:, None]  # [B, 1, L, D/2]
    mask = (torch.arange(upto, device=model.device) <= position[:, :, None])[:, None]  # [B, 1, L, S], True = attend
    x = model.embedding(tokens)
    for layer, kv in zip(model.layers, cache.kv, strict=True):
        query, key, value = layer.query_key_value(x, cos, sin)
        kv[0][row, :, slot] = key[row, :, column]
        kv[1][row, :, slot] = value[row, :, column]
        x = layer.finish(x, query, kv[0, :, :, :upto], kv[1, :, :, :upto], mask)
    return model.norm(x)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]] | Tensor,
    new_tokens: int,
    *,
    slots: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Greedy decoding with a cache: the next `new_tokens` tokens of each prompt, [B, new_tokens].

    prompts: a [B, L] tensor, or sequences of different length. slots: cache size (default: exactly what is needed; the
    last token is never stored). chunk: prompt tokens per prefill call (default: all). Errors as in `prefill`.
    """
    check_model(model)
    if isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__") or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts is {short(prompts)}; expected a tensor [B, L], or a list of token ids for each text")
    expect.whole(0, new_tokens=new_tokens)
    expect.whole(1, **{name: size for name, size in (("chunk", chunk), ("slots", slots)) if size is not None})
    prompts = [prompt_ids(prompt, model.device) for prompt in prompts]
    sizes = [len(prompt) for prompt in prompts]
    if not sizes or min(sizes) == 0:
        raise ValueError(f"prompt lengths are {sizes}; expected at least one prompt and one token in each")
    need = max(sizes) + max(new_tokens - 1, 0)
    if slots is not None and need > slots:
        raise ValueError(
            f"{max(sizes)} prompt tokens and {new_tokens} new ones need {need} slots; the cache has {slots}"
        )
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # [B, L]
    _check_tokens(model, tokens)
    cache = new_cache(model, len(prompts), slots or need)
    for start in range(0, max(sizes), chunk or max(sizes)):
        piece = tokens[:, start : start + (chunk or max(sizes))]
        logits = prefill(model, piece, cache, [min(max(size - start, 0), piece.shape[1]) for size in sizes])
    made = []
    for step in range(new_tokens):
        made.append(logits.argmax(-1))  # [B]
        if step + 1 < new_tokens:
            logits = decode_step(model, made[-1], cache)
    return torch.stack(made, dim=1) if made else tokens.new_zeros(len(prompts), 0)


@torch.no_grad()
def generate_uncached(model: GPT, prompt: Sequence[int] | Tensor, new_tokens: int) -> Tensor:
    """Greedy decoding of ONE prompt without a cache, the reference: every step computes every position. [new_tokens]

    Errors as in `generate`.
    """
    check_model(model)
    expect.whole(0, new_tokens=new_tokens)
    tokens = prompt_ids(prompt, model.device)[None]
    _check_tokens(model, tokens)
    for _ in range(new_tokens):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens[0, tokens.shape[1] - new_tokens :]


# Checks. All of them run before the first write.


def check_model(model: GPT) -> None:
    """TypeError: no GPT, compiled or not."""
    if not isinstance(getattr(model, "config", None), GPTConfig):
        raise TypeError(f"model is {short(model)}; expected a GPT, as load(...) gives it")


def _check_tokens(model: GPT, tokens: Tensor) -> None:
    check_model(model)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens are {short(tokens)}; expected a tensor [batch, length]")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens are {tokens.dtype}; expected torch.int64 or torch.int32")
    with_values("tokens", tokens)
    if tokens.ndim != 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; expected [batch, length]")
    if tokens.numel() == 0:
        raise ValueError(f"the prompt is empty: shape {tuple(tokens.shape)}; expected at least one token")
    if tokens.device != model.device:
        raise ValueError(f"tokens are on {tokens.device}; the model is on {model.device}")
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is out of range; expected 0 to {model.config.vocab_size - 1}")


def _check_cache(model: GPT, cache: KVCache, tokens: Tensor) -> None:
    _check_tokens(model, tokens)
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is {short(cache)}; expected what new_cache(...) gives")
    if cache.model is not model:
        raise ValueError("this cache belongs to another model; make one with new_cache(model, batch, slots)")
    if cache.kv[0].dtype != model.dtype or cache.kv[0].device != model.device:
        held = f"{cache.kv[0].dtype} on {cache.kv[0].device}"
        raise ValueError(f"the cache is {held}; the model is {model.dtype} on {model.device}: make a new cache")
    if cache.kv[0].shape[1] != tokens.shape[0]:
        raise ValueError(f"tokens hold {tokens.shape[0]} sequences; the cache was made for {cache.kv[0].shape[1]}")


def _check_room(cache: KVCache, count: Tensor, length: int) -> int:
    """The largest number of filled slots after this call. ValueError: no room, or a count that cannot be."""
    if count.shape != cache.filled.shape:
        raise ValueError(f"lengths have shape {tuple(count.shape)}; expected {len(cache.filled)} whole numbers")
    low, high = (int(bound) for bound in count.aminmax())
    if low < 0 or high > length:
        raise ValueError(f"lengths hold {low if low < 0 else high}; expected 0 to {length}, the tokens given")
    if low == 0 and bool(((cache.filled == 0) & (count == 0)).any()):
        raise ValueError("the prompt is empty: a sequence would have no token at all; expected at least one")
    longest = int((cache.filled + count).max())
    if longest > cache.slots:
        raise ValueError(
            f"{longest} tokens do not fit into {cache.slots} slots; the cache is unchanged: make it longer"
        )
    return longest
