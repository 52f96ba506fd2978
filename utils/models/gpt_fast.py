"""One sequence, one token at a time, as fast as memory can be read: the GPT of `gpt.py`, arranged for the compiler.

A token needs every weight once and every cached key and value once, so the floor is bytes over bandwidth. What keeps a
plain loop far above it is not arithmetic: it is hundreds of small calls, and products that a library prepares for large
matrices. Here one token is one compiled function. Recipe 08 climbs there rung by rung.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import expect
from . import gpt
from .whole_numbers import prompt_ids

HOW = ("eager", "compile", "aot")
WEIGHTS = ("float", "int8")
BLOCK = 16  # slots; the cache is read up to the block of the new token
LANES = 16  # float32 numbers in the widest vector of a CPU
STACK = "allow_stack_allocation"
STREAMS = 4  # places of a matrix that are read at once


class Rows(nn.Module):
    """W x for one vector x: every row of W is read once, multiplied and summed. [in] -> [out]

    `F.linear` would call a library that is made for many vectors; the compiler makes one loop of this sum. The rows are
    read at four distant places at once: memory answers several questions in the time of one.
    int8: a row is stored as whole numbers from -127 to 127 and one scale. Sums and scales of half precision are
    float32: there 127 steps may round to 128, and a sum of steps may pass the largest number.
    """

    def __init__(self, weight: Tensor, int8: bool):
        super().__init__()
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        scale, kept = None, weight.clone()
        if int8:
            wide = weight.to(self.wide)
            scale = (wide.abs().amax(1) / 127).clamp(min=torch.finfo(self.wide).tiny)  # a row of zeros has no largest
            kept = (wide / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.register_buffer("weight", kept.unflatten(0, (STREAMS if len(kept) % STREAMS == 0 else 1, -1)))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([(rows.to(self.wide) * x.to(self.wide)).sum(-1) for rows in self.weight.unbind()]).flatten()
        return (y if self.scale is None else y * self.scale).to(x.dtype)


def stored(x: Tensor) -> Tensor:
    """The same x. It makes the compiler write x to memory once, not compute it again in the loop of each row."""
    return x.as_strided(x.shape, x.stride())


class DecodeLayer(nn.Module):
    """The weights of one layer. Both norms' weights are multiplied into the matrices that follow them."""

    def __init__(self, layer: gpt.Layer, int8: bool):
        super().__init__()

        def to_halves(weight: Tensor) -> Tensor:  # rows of each head: 0 2 4 ... 1 3 5 ...
            return weight.unflatten(0, (layer.heads, -1, 2)).transpose(1, 2).flatten(0, 2)

        parts = to_halves(layer.query.weight), to_halves(layer.key.weight), layer.value.weight
        self.query_key_value = Rows(torch.cat(parts) * layer.attention_norm.weight, int8)
        self.out = Rows(layer.out.weight, int8)
        parts = layer.gate.weight, layer.up.weight
        self.gate_up = Rows(torch.cat(parts) * layer.feed_forward_norm.weight, int8)
        self.down = Rows(layer.down.weight, int8)


class DecodeStep(nn.Module):
    """token [1], position [1], slots [n, BLOCK], keys and values of each layer [H, S, D] -> next token, position + 1.

    Writes key and value of the token into slot `position`; attends to slots <= position among the given ones.
    RoPE pairs are (i, i + D/2): both halves are contiguous, as in Llama, and scores do not change.
    """

    def __init__(self, model: gpt.GPT, slots: int, weights: str = "float"):
        super().__init__()
        config = model.config
        self.heads, self.size, self.eps = config.heads, config.head_size, config.norm_eps
        self.register_buffer("embedding", model.embedding.weight.clone())
        self.layers = nn.ModuleList(DecodeLayer(layer, weights == "int8") for layer in model.layers)
        self.head = Rows(model.head.weight * model.norm.weight, weights == "int8")
        cos, sin = gpt.rope_tables(slots, config, model.dtype, model.device)  # [S, D/2]
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1))  # [S, D]
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1))

    def forward(self, token: Tensor, position: Tensor, slots: Tensor, *cache: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin, unseen = self.cos[position], self.sin[position], (slots > position).flatten()  # [1, D], [1, D], [s]
        x, n = stored(self.embedding[token][0]), slots.shape[0]  # [W]
        for i, layer in enumerate(self.layers):
            keys, values = cache[2 * i], cache[2 * i + 1]  # [H, S, D]
            query, key, value = (layer.query_key_value(x) * self.inverse_norm(x)).view(3, self.heads, self.size)
            query = stored(self.rope(query, cos, sin))
            keys.index_copy_(1, position, self.rope(key, cos, sin)[:, None])
            values.index_copy_(1, position, value[:, None])
            k, v = (kept.unflatten(1, (-1, BLOCK))[:, :n].flatten(1, 2) for kept in (keys, values))  # [H, s, D]
            scores = (query[:, None] * k).sum(-1) * self.size**-0.5  # [H, s]
            share = stored(scores.masked_fill(unseen, -torch.inf).softmax(-1))[..., None]
            mixed = [(share * part).sum(1) for part in v.split(LANES, -1)]  # one pass over v, and as many sums at once
            x = stored(x + layer.out(torch.cat(mixed, -1).flatten()))
            gate, up = (layer.gate_up(x) * self.inverse_norm(x)).chunk(2)
            x = stored(x + layer.down(stored(F.silu(gate) * up)))
        return self.head(x).argmax(-1, keepdim=True), position + 1  # the last norm's scale does not move the maximum

    def inverse_norm(self, x: Tensor) -> Tensor:
        """1 / root mean square. It is one number, so it can be applied after the product with a matrix."""
        return torch.rsqrt(x.square().mean() + self.eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn x [H, D]: (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of each head."""
        swapped = x.view(self.heads, 2, -1).flip(1).view(self.heads, -1)  # [H, D]
        return x * cos + swapped * sin


class FastGPT:
    """Greedy decoding of one sequence with a preallocated cache of `slots` tokens.

    The tokens are those of `gpt.generate` in float32 and float64. In 16 bits it rounds elsewhere, so words that are
    nearly tied may change places.
    weights: "float" keeps the model's; "int8" stores them in 8 bits and is lossy. how: "eager", "compile"
    (torch.compile: compiled at the first token) or "aot" (AOTInductor: compiled here, then called with next to no
    overhead; the number of threads at the call counts). ValueError, TypeError: an unknown name, slots that are no whole
    number of at least 1, another model.
    """

    def __init__(self, model: gpt.GPT, slots: int, *, weights: str = "float", how: str = "aot"):
        expect.one_of(WEIGHTS, weights=weights)
        expect.one_of(HOW, how=how)
        gpt.check_model(model)
        expect.whole(1, slots=slots)
        self.model, self.slots = model, slots
        blocks = max(3, -(-slots // BLOCK)) + 1  # one more than is read: the compiler meets no special case
        shape = (model.config.heads, blocks * BLOCK, model.config.head_size)
        place = {"dtype": model.dtype, "device": model.device}
        self.cache = [torch.zeros(shape, **place) for _ in range(2 * model.config.layers)]
        self.all_slots = torch.arange(blocks * BLOCK, device=model.device).view(blocks, BLOCK)
        step = DecodeStep(model, blocks * BLOCK, weights).eval()
        matrices = [part for part in step.modules() if isinstance(part, Rows)]
        self.weight_bytes = sum(kept.nbytes for part in matrices for kept in part.buffers())
        self.step = {"eager": _as_it_is, "compile": _compiled, "aot": _ahead_of_time}[how](step, self.arguments(0, 0))

    def arguments(self, token: int, position: int) -> tuple[Tensor, ...]:
        """What `step` takes to process `token` at `position`."""
        here = {"device": self.model.device}
        return torch.tensor([token], **here), torch.tensor([position], **here), self.read_slots(position), *self.cache

    def read_slots(self, position: int) -> Tensor:
        """The blocks of slots up to that of `position`, [n, BLOCK]; at least two, again to spare a special case."""
        return self.all_slots[: max(2, position // BLOCK + 1)]

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int] | Tensor) -> Tensor:
        """Store a prompt from slot 0 on, with the model's own weights; the token that follows it, [1].

        ValueError, TypeError before any write: no token, no whole numbers, an id out of range, more tokens than slots.
        """
        tokens = prompt_ids(prompt, self.model.device)[None]
        length = tokens.shape[1]
        if length > self.slots:
            raise ValueError(f"the prompt has {length} tokens; the cache has {self.slots} slots")
        first = gpt.new_cache(self.model, 1, max(1, length))
        logits = gpt.prefill(self.model, tokens, first)
        for i, kv in enumerate(first.kv):
            keys, values = kv[:, 0]  # [H, L, D]
            self.cache[2 * i][:, :length] = keys.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)  # to halves
            self.cache[2 * i + 1][:, :length] = values
        return logits.argmax(-1)

    @torch.no_grad()
    def generate(self, prompt: Sequence[int] | Tensor, new_tokens: int) -> Tensor:
        """The next `new_tokens` tokens, [new_tokens]. Before any write: errors as in `prefill`, a negative number."""
        expect.whole(0, new_tokens=new_tokens)
        prompt = prompt_ids(prompt, self.model.device)
        length = len(prompt)
        last = length + max(new_tokens - 1, 0)
        if last > self.slots:
            wanted = f"{length} prompt tokens and {new_tokens} new ones need {last} slots"
            raise ValueError(f"{wanted}; the cache has {self.slots}")
        token, position = self.prefill(prompt), torch.tensor([length], device=self.model.device)
        made = [token]
        for place in range(length, last):
            token, position = self.step(token, position, self.read_slots(place), *self.cache)
            made.append(token)
        return torch.cat(made)[:new_tokens]

    def bytes_per_token(self, position: int) -> int:
        """Bytes that a token at `position` has to read: every matrix once, and keys and values up to its own."""
        cached = self.model.config.cached_values * (position + 1) * self.cache[0].element_size()
        return self.weight_bytes + cached


def _as_it_is(step: DecodeStep, example: tuple[Tensor, ...]) -> Callable:
    return step


def _compiled(step: DecodeStep, example: tuple[Tensor, ...]) -> Callable:
    run = torch.compile(step)

    def call(token: Tensor, position: Tensor, slots: Tensor, *cache: Tensor):
        torch._dynamo.mark_dynamic(slots, 0)  # one graph for every number of blocks
        return run(token, position, slots, *cache)

    return call


def _ahead_of_time(step: DecodeStep, example: tuple[Tensor, ...]) -> Callable:
    token, position, slots, *cache = example
    blocks = torch.export.Dim("blocks", min=2, max=cache[0].shape[1] // BLOCK - 1)
    shapes = {"token": None, "position": None, "slots": {0: blocks}, "cache": (None,) * len(cache)}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own notes on its export
        program = torch.export.export(step, (token, position, slots, *cache), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder) / "step.pt2"), inductor_configs=_options(step)
        )
        run = torch._inductor.aoti_load_package(package)
    flat = getattr(getattr(run, "loader", None), "boxed_run", None)  # the same call, without unpacking its arguments

    def call(*arguments: Tensor) -> tuple[Tensor, ...]:
        # Copies: with intermediates on the stack, the next call writes its results to the same memory.
        return tuple(result.clone() for result in (flat(list(arguments)) if flat else run(*arguments)))

    return call


def _options(step: DecodeStep) -> dict[str, bool]:
    """Options of AOTInductor. Intermediates are small and many, and asking for each of them costs time every token.

    Where torch uses another number of threads than the machine has, the compiler would write that number into the code,
    and `torch.set_num_threads` would change nothing afterwards.
    """
    options = {"cpp.dynamic_threads": torch.get_num_threads() != os.cpu_count()}
    if step.cos.device.type == "cpu" and hasattr(torch._inductor.config.aot_inductor, STACK):
        options[f"aot_inductor.{STACK}"] = True
    return options
