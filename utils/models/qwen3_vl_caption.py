"""Qwen3-VL as a captioner: the whole `Qwen3VLForConditionalGeneration` of transformers, offline, with random weights.

The vision tower is the one of `qwen3_vl`, with the same weights for the same seed; a language model stands behind it.
"4b" and "8b" are the published configurations; "tiny" and "small" are for CPUs. `checkpoint` loads real weights.

A clip of F frames arrives as N = F/2 * h * w patches (a patch spans two frames) and becomes V = N / 4 vectors. In the
prompt, each of its F/2 moments is a few tokens for the time, a start, its vectors, an end; then comes the question.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration

from .. import expect
from .qwen3_vl import SIZES as VISION_SIZES
from .qwen3_vl import draw_weights, vision_config

__all__ = ["CACHE", "SIZES", "DynamicCache", "Qwen3VLForConditionalGeneration", "StaticCache"]
__all__ += ["caption_config", "captioner", "copy_of", "prompt_ids"]

_PUBLISHED = dict(
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=151_936, max_position_embeddings=262_144,
)  # fmt: skip

# The language model behind the vision tower of the same name.
SIZES: dict[str, dict] = {
    "tiny": dict(
        hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=512, max_position_embeddings=4096,
    ),
    "small": dict(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, vocab_size=8192, max_position_embeddings=16_384,
    ),
    "4b": dict(hidden_size=2560, intermediate_size=9728, **_PUBLISHED),
    "8b": dict(hidden_size=4096, intermediate_size=12_288, **_PUBLISHED),
}  # fmt: skip

_LARGE = ("4b", "8b")
_TOKENS = dict(image_token_id=151_655, video_token_id=151_656, vision_start_token_id=151_652,
               vision_end_token_id=151_653)  # fmt: skip

# The argument that takes the key/value cache: transformers 5.2x renamed it.
CACHE = (
    "cache" if "cache" in inspect.signature(Qwen3VLForConditionalGeneration.forward).parameters else "past_key_values"
)


def caption_config(size: str = "8b") -> Qwen3VLConfig:
    """The configuration of a whole captioner: "tiny", "small", "4b" or "8b". Raises ValueError for another size."""
    text = SIZES[expect.one_of(SIZES, size=size)]
    assert VISION_SIZES[size]["out_hidden_size"] == text["hidden_size"], "the two parts must fit"
    half = text["head_dim"] // 2  # rotary frequencies, shared out to time, height and width
    side = half * 5 // 16
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
    rope["mrope_section"] = [half - 2 * side, side, side]
    tokens = _TOKENS if size in _LARGE else {name: text["vocab_size"] - i for i, name in enumerate(_TOKENS, start=1)}
    return Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision_config(size).to_dict(),
        tie_word_embeddings=size == "4b",
        **tokens,
    )


def captioner(
    size: str = "tiny",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    attention: str = "sdpa",
    checkpoint: str = "",
) -> Qwen3VLForConditionalGeneration:
    """A captioner in eval mode on `device`; `attention` is "sdpa" or "eager" (or another that transformers knows).

    The weights of "tiny" and "small" are drawn on the CPU, so they are the same on every device; those of "4b" and "8b"
    (8.8 billion values) are drawn where they will be. "8b" takes 17.5 GB in bfloat16.
    checkpoint: a local folder or an owner/name on the Hub whose configuration and weights are loaded; `size` and `seed`
    then do not matter. Raises ValueError for an unknown size and for a checkpoint that is in neither place.
    """
    if checkpoint:
        model = _load(checkpoint, dtype)
        model.set_attn_implementation(attention)
        return model.to(device).eval()
    config = caption_config(size)
    with torch.device("meta"):  # skip the default initialisation: every value is drawn below
        model = Qwen3VLForConditionalGeneration(config)
    draw_weights(model, dtype=dtype, device=device, seed=seed, draw_on=device if size in _LARGE else "cpu")
    draw_weights(model.model.visual, dtype=dtype, device=device, seed=seed, draw_on=device if size in _LARGE else "cpu")
    model.tie_weights()
    model.set_attn_implementation(attention)
    model.generation_config.pad_token_id = 0  # as no token ends a caption here, nothing is ever padded
    return model.eval()


def _load(checkpoint: str, dtype: torch.dtype) -> Qwen3VLForConditionalGeneration:
    """From a folder, or from the Hub (its local cache counts as the Hub)."""
    folder = Path(checkpoint).expanduser()
    local = (folder / "config.json").is_file()
    if not local:
        if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint) or checkpoint[0] == ".":
            raise ValueError(_neither(checkpoint, "no config.json is there" if folder.exists() else "no such folder"))
        if reason := _unanswered(checkpoint):
            if not isinstance(try_to_load_from_cache(checkpoint, "config.json"), str):
                raise ValueError(_neither(checkpoint, reason))
            local = True
    try:
        source = str(folder) if folder.exists() else checkpoint
        return Qwen3VLForConditionalGeneration.from_pretrained(source, dtype=dtype, local_files_only=local)
    except (OSError, ValueError) as error:
        raise ValueError(_neither(checkpoint, _first_line(error))) from None


def _unanswered(name: str) -> str:
    """Why the Hub does not give a repository ("" when it does). Asked once: its loaders ask again for half a minute."""
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except Exception as error:  # the Hub's library changed the library of its own network errors
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__


def _neither(checkpoint: str, reason: str) -> str:
    return (
        f"checkpoint={checkpoint!r} was not loaded ({reason}); expected one of two: a local folder with config.json "
        "and safetensors files, or an owner/name on the Hub, such as Qwen/Qwen3-VL-8B-Instruct, on a machine that "
        "reaches it"
    )


def copy_of(model: nn.Module, *, dtype: torch.dtype | None = None, share: bool = False) -> nn.Module:
    """Another instance with the same weights, as `dtype` if given, in memory of its own.

    Only the weights are cast: buffers such as rotary frequencies stay as they are, unlike with `.to(dtype)`. With
    `share`, weights that are not cast are the model's own, so that several forms of a large model fit on one GPU.
    """
    same = {id(p): p for p in model.parameters() if share and dtype in (None, p.dtype)}
    cast = {
        id(p): nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad)
        for p in model.parameters()
        if dtype not in (None, p.dtype)
    }
    return copy.deepcopy(model, same | cast)


def prompt_ids(config: Qwen3VLConfig, grid: Sequence[int], *, question: int = 16, seed: int = 0) -> Tensor:
    """Token ids [L] of a prompt about one clip of `grid` (t, h, w): random words around the places of its vectors.

    For each of the t moments: three words for the time, a start, h*w/4 places, an end. Then `question` words.
    Raises ValueError for a grid that the 2 x 2 merge does not divide.
    """
    merge = config.vision_config.spatial_merge_size
    t, h, w = grid
    if min(grid) < 1 or h % merge or w % merge:
        raise ValueError(f"grid={tuple(grid)!r}; expected (t, h, w), whole and positive, h and w multiples of {merge}")
    special = (config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id)
    words = torch.randint(min(special), (3 * t + question,), generator=torch.Generator().manual_seed(seed)).tolist()
    start, end, place = config.vision_start_token_id, config.vision_end_token_id, config.video_token_id
    ids = []
    for moment in range(t):
        ids += [*words[3 * moment : 3 * moment + 3], start, *[place] * (h * w // merge**2), end]
    return torch.tensor([*ids, *words[3 * t :]])
