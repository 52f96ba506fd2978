"""One sequence, one token at a time, as fast as the memory can be read: the GPT of `gpt.py`, arranged for the compiler.

A token needs every weight once and every cached key and value once, so the floor is bytes over bandwidth. What keeps a
plain loop far above it is not arithmetic: hundreds of small calls, and products that a library prepares for large
matrices. Here one token is one compiled function. Recipe 08 climbs there step by step.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import gpt

HOW = ("eager", "compile", "aot")
WEIGHTS = ("float", "int8")
BLOCK = 16  # the cache is read up to a multiple of this many slots: whole vectors of the CPU


class Rows(nn.Module):
    """W x for one vector x: every row of W is read once, multiplied and summed. [in] -> [out]

    `F.linear` would call a library that is made for many vectors; the compiler turns this sum into one loop.
    int8: a row is stored as whole numbers from -127 to 127 and one scale.
    """

    def __init__(self, weight: Tensor, int8: bool):
        super().__init__()
        scale = weight.abs().amax(1) / 127 if int8 else None
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8) if int8 else weight.clone())
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return (self.weight * x).sum(-1)
        return (self.weight.to(x.dtype) * x).sum(-1) * self.scale


def stored(x: Tensor) -> Tensor:
    """The same x. It asks the compiler to write x to memory once, instead of computing it again in each row's loop."""
    return x.as_strided(x.shape, x.stride())


class DecodeLayer(nn.Module):
    """The weights of one layer. Both norms' weights are multiplied into the matrices that follow them."""

    def __init__(self, layer: gpt.Layer, to_halves: Callable[[Tensor], Tensor], int8: bool):
        super().__init__()
        before, after = layer.attention_norm.weight, layer.feed_forward_norm.weight
        self.query = Rows(to_halves(layer.query.weight) * before, int8)
        self.key = Rows(to_halves(layer.key.weight) * before, int8)
        self.value = Rows(layer.value.weight * before, int8)
        self.out = Rows(layer.out.weight, int8)
        self.gate = Rows(layer.gate.weight * after, int8)
        self.up = Rows(layer.up.weight * after, int8)
        self.down = Rows(layer.down.weight, int8)


class DecodeStep(nn.Module):
    """token [1], position [1], slots [n], keys and values of each layer [H, S, D] -> next token [1], position + 1.

    Writes key and value of the token into slot `position`; attends to slots <= position among the n given ones.
    RoPE pairs are (i, i + D/2): both halves are contiguous, as in Llama, and scores do not change.
    """

    def __init__(self, model: gpt.GPT, slots: int, weights: str = "float"):
        super().__init__()
        config, int8 = model.config, weights == "int8"
        self.heads, self.size, self.eps = config.heads, config.head_size, config.norm_eps

        def to_halves(weight: Tensor) -> Tensor:  # rows of each head: 0 2 4 ... 1 3 5 ...
            return weight.unflatten(0, (config.heads, -1, 2)).transpose(1, 2).flatten(0, 2)

        self.register_buffer("embedding", model.embedding.weight.clone())
        self.layers = nn.ModuleList(DecodeLayer(layer, to_halves, int8) for layer in model.layers)
        self.head = Rows(model.head.weight * model.norm.weight, int8)
        cos, sin = gpt.rope_tables(slots, config, model.dtype, model.device)  # [S, D/2]
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1))  # [S, D]
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1))

    def forward(self, token: Tensor, position: Tensor, slots: Tensor, *cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[position], self.sin[position]  # [1, D]
        x = stored(self.embedding[token][0])  # [width]
        for i, layer in enumerate(self.layers):
            keys, values = cache[2 * i], cache[2 * i + 1]  # [H, S, D]
            norm = self.inverse_norm(x)
            query = stored(self.rope(layer.query(x) * norm, cos, sin))  # [H, D]
            keys.index_copy_(1, position, self.rope(layer.key(x) * norm, cos, sin)[:, None])
            values.index_copy_(1, position, (layer.value(x) * norm).view(self.heads, 1, self.size))
            read = slots.shape[0]
            scores = (query[:, None] * keys[:, :read]).sum(-1) * self.size**-0.5  # [H, n]
            share = stored(scores.masked_fill(slots > position, -torch.inf).softmax(-1))
            mixed = (share[:, :, None] * values[:, :read]).sum(1).view(-1)  # [width]
            x = stored(x + layer.out(mixed))
            norm = self.inverse_norm(x)
            hidden = stored(F.silu(layer.gate(x) * norm) * (layer.up(x) * norm))
            x = stored(x + layer.down(hidden))
        return self.head(x).argmax(-1, keepdim=True), position + 1  # the last norm's scale does not move the maximum

    def inverse_norm(self, x: Tensor) -> Tensor:
        """1 / root mean square: a number, so it can be applied after the product with the matrix."""
        return torch.rsqrt(x.square().mean() + self.eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x.view(self.heads, 2, self.size // 2)
        return (x.flatten(1)) * cos + x.flip(1).flatten(1) * sin  # [H, D]


class FastGPT:
    """Greedy decoding of one sequence with a preallocated cache of `slots` tokens.

    weights: "float" keeps the model's; "int8" stores them as 8-bit numbers and is lossy. how: "eager", "compile"
    (torch.compile: compiled at the first token) or "aot" (AOTInductor: compiled here, then called from C++ with next to
    no overhead). ValueError: an unknown name, or slots below 1.
    """

    def __init__(self, model: gpt.GPT, slots: int, *, weights: str = "float", how: str = "aot"):
        for name, value, known in (("weights", weights, WEIGHTS), ("how", how, HOW)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        if slots < 1:
            raise ValueError(f"slots is {slots}; expected at least 1")
        self.model, self.slots = model, slots
        # One block more than is ever read: the compiler then never meets the special case of a full cache.
        room = -(-slots // BLOCK) * BLOCK + BLOCK
        config = model.config
        shape = (config.heads, room, config.head_size)
        self.cache = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2 * config.layers)]
        self.all_slots = torch.arange(room, device=model.device)
        step = DecodeStep(model, room, weights).eval()
        self.weight_bytes = sum(b.nbytes for part in step.modules() if isinstance(part, Rows) for b in part.buffers())
        self.step = {"eager": _as_is, "compile": _compiled, "aot": _ahead_of_time}[how](step, self.arguments(0, 0))

    def arguments(self, token: int, position: int) -> tuple[Tensor, ...]:
        """What `step` takes to process `token` at `position`."""
        device = self.model.device
        place = torch.tensor([position], device=device)
        return torch.tensor([token], device=device), place, self.read_slots(position), *self.cache

    def read_slots(self, position: int) -> Tensor:
        return self.all_slots[: (position // BLOCK + 1) * BLOCK]

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int] | Tensor) -> Tensor:
        """Store a prompt from slot 0 on, with the model's own weights; the token that follows it, [1]."""
        tokens = torch.as_tensor(prompt, dtype=torch.int64, device=self.model.device)[None]
        first = gpt.new_cache(self.model, 1, self.slots)
        logits = gpt.prefill(self.model, tokens, first)
        for i, kv in enumerate(first.kv):
            keys, values = kv[:, 0, :, : first.longest]  # [H, L, D]
            halves = keys.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # pairs (0, 1) -> (i, i + D/2)
            self.cache[2 * i][:, : first.longest] = halves
            self.cache[2 * i + 1][:, : first.longest] = values
        return logits.argmax(-1)

    @torch.no_grad()
    def generate(self, prompt: Sequence[int] | Tensor, new_tokens: int) -> Tensor:
        """The next `new_tokens` tokens, [new_tokens]. ValueError as in `gpt.generate`, before anything is written."""
        if new_tokens < 0:
            raise ValueError(f"new_tokens is {new_tokens}; expected 0 or more")
        need = len(prompt) + max(new_tokens - 1, 0)
        if need > self.slots:
            raise ValueError(f"{len(prompt)} prompt tokens and {new_tokens} new ones need {need} slots; {self.slots}")
        token, position = self.prefill(prompt), torch.tensor([len(prompt)], device=self.model.device)
        made = [token]
        for place in range(len(prompt), need):
            token, position = self.step(token, position, self.read_slots(place), *self.cache)
            made.append(token)
        return torch.cat(made)[:new_tokens]

    def bytes_per_token(self, position: int) -> int:
        """Bytes that a token at `position` has to read: every matrix once, and keys and values up to its own."""
        cached = self.model.config.cached_values * (position + 1) * self.cache[0].element_size()
        return self.weight_bytes + cached


def _as_is(step: DecodeStep, example: tuple[Tensor, ...]) -> Callable:
    return step


def _compiled(step: DecodeStep, example: tuple[Tensor, ...]) -> Callable:
    run = torch.compile(step)

    def call(token: Tensor, position: Tensor, slots: Tensor, *cache: Tensor):
        torch._dynamo.mark_dynamic(slots, 0)  # one graph for every number of slots
        return run(token, position, slots, *cache)

    return call


def _ahead_of_time(step: DecodeStep, example: tuple[Tensor, ...]) -> Callable:
    token, position, slots, *cache = example
    read = torch.export.Dim("read", min=2, max=cache[0].shape[1] - 1)
    shapes = {"token": None, "position": None, "slots": {0: read}, "cache": (None,) * len(cache)}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own notes on its export
        program = torch.export.export(step, (token, position, slots, *cache), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "step.pt2"))
        run = torch._inductor.aoti_load_package(package)
    return run
