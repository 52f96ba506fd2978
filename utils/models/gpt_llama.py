"""The GPT of `gpt.py` as a transformers Llama and back: the same weights, with the RoPE pairs in the other order."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..expect import short
from .gpt import GPT, GPTConfig


def to_llama(model: GPT):
    """A `transformers.LlamaForCausalLM` with these weights, bit for bit, and half-split RoPE. Imports transformers.

    transformers turns by float32 angles in every dtype, so float64 logits differ by that rounding, which grows with the
    position.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.feed_forward,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            max_position_embeddings=16_384 + 512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    llama = llama.to(device=model.device, dtype=model.dtype)  # before the weights come: else they pass through float32
    llama.load_state_dict(llama_state_dict(model))
    return llama.eval().requires_grad_(False)


_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _names(config: GPTConfig) -> dict[str, str]:
    """Our parameter name -> Llama's."""
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for i in range(config.layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in _LAYER_NAMES.items()}
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}


def _turns(name: str) -> bool:
    return name.endswith(("query.weight", "key.weight"))


def llama_state_dict(model: GPT) -> dict[str, Tensor]:
    """The weights under Llama's names. Rows of query and key move from pairs (0, 1), (2, 3) to halves (i, i + D/2)."""
    config, state, out = model.config, model.state_dict(), {}
    for ours, theirs in _names(config).items():
        weight = state[ours]
        if _turns(ours):  # [H, D/2, 2, width] -> [H, 2, D/2, width]
            weight = weight.view(config.heads, -1, 2, config.width).transpose(1, 2).reshape(config.width, config.width)
        out[theirs] = weight
    return out


def from_llama(state: Mapping[str, Tensor], config: GPTConfig) -> GPT:
    """A GPT with the weights of a Llama state_dict; reverse of `llama_state_dict`.

    TypeError: no state_dict, or no GPTConfig. ValueError: a wrong tensor.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state is {short(state)}; expected a state_dict, names with their tensors")
    if not isinstance(config, GPTConfig):
        raise TypeError(f"config is {short(config)}; expected a GPTConfig")
    model, ours = GPT(config), {}
    for name, theirs in _names(config).items():
        expected = model.get_parameter(name).shape
        given = state.get(theirs)
        if not isinstance(given, Tensor) or given.shape != expected:
            found = "nothing" if given is None else tuple(given.shape) if isinstance(given, Tensor) else short(given)
            raise ValueError(f"{theirs}: found {found}; expected {tuple(expected)}")
        weight = state[theirs]
        if _turns(name):  # [H, 2, D/2, width] -> [H, D/2, 2, width]
            weight = weight.view(config.heads, 2, -1, config.width).transpose(1, 2).reshape(config.width, config.width)
        ours[name] = weight
    model = model.to(next(iter(ours.values())))
    model.load_state_dict(ours)
    return model.eval().requires_grad_(False)
