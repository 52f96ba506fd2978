"""FLUX.1 Kontext, the image editor: the real pipeline, transformer, autoencoder and scheduler of diffusers, offline.

`kontext(size)` is a FluxKontextPipeline with random weights and without text encoders: prompt embeddings are inputs.
"tiny" runs in a test, "small" on a laptop, "full" has the published sizes. `checkpoint` takes real weights instead.
Kontext puts the tokens of the old image beside those of the new one, so a step works on twice the tokens of an image.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.hooks import apply_layerwise_casting
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from .. import expect
from . import diffusion


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    """Without the remark that an image processor, which is not used here, would like torchvision."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


with _only_errors():
    FluxKontextPipeline = diffusers.FluxKontextPipeline  # diffusers imports it here, at the first use of the name

TRANSFORMER_SIZES: dict[str, dict] = {
    "tiny": {
        "num_layers": 2,
        "num_single_layers": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "axes_dims_rope": (8, 12, 12),
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
    },
    "small": {
        "num_layers": 2,
        "num_single_layers": 4,
        "num_attention_heads": 6,
        "attention_head_dim": 64,
        "axes_dims_rope": (16, 24, 24),
        "joint_attention_dim": 256,
        "pooled_projection_dim": 128,
    },
    "full": {
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "axes_dims_rope": (16, 56, 56),
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
    },
}
# What plain random weights are multiplied by, by the end of the name. Without it attention is nearly uniform and the
# gates are nearly closed: the transformer hardly changes the image, and a check could not see its errors.
LIVELY = {
    "norm_q.weight": 2.0,  # sharper attention
    "norm_added_q.weight": 2.0,
    "to_v.weight": 3.0,
    "add_v_proj.weight": 3.0,
    "norm.linear.weight": 2.0,  # gates and shifts of the blocks
    "norm1.linear.weight": 2.0,
    "norm1_context.linear.weight": 2.0,
}
# Published with the weights: how latents are scaled for the transformer, and how the schedule follows the image size.
LATENT_SCALE = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
SCHEDULE = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
HUB_NAME = "black-forest-labs/FLUX.1-Kontext-dev"
NOT_NEEDED = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "image_encoder", "feature_extractor")


def kontext(
    size: str = "tiny",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    checkpoint: str = "",
) -> FluxKontextPipeline:
    """A pipeline in eval mode. Called with image [N, 3, H, W] in 0 … 1, latents, prompt_embeds, pooled_prompt_embeds.

    "tiny" and "small" draw their weights anew at each call, on the CPU. "full" and a checkpoint keep one copy of the
    weights per dtype and device, which all pipelines of this process share: 24 GB in bfloat16 for the published size.
    checkpoint: a local folder with a model_index.json, or a hub name; "" for random weights.
    Raises ValueError, one line, for an unknown size and for a checkpoint that is in neither place. The hub is asked
    once, for one small file, and never where HF_HUB_OFFLINE says so.
    """
    if checkpoint:
        return _sharing(_loaded(str(checkpoint), dtype, str(device)))
    expect.one_of(TRANSFORMER_SIZES, size=size)
    if size == "full":
        return _sharing(_drawn(size, dtype, str(device), seed))
    return _assembled(
        transformer(size, dtype=dtype, device=device, seed=seed),
        _scaled(diffusion.vae(size, dtype=dtype, device=device, seed=seed)),
    )


def transformer(
    size: str = "tiny", *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> FluxTransformer2DModel:
    """The denoiser alone, called with `step_inputs`. device="meta": shapes without memory, for counting."""
    given = TRANSFORMER_SIZES[expect.one_of(TRANSFORMER_SIZES, size=size)]
    torch.manual_seed(seed)
    with torch.device("meta") if str(device) == "meta" else contextlib.nullcontext():
        model = _lively(FluxTransformer2DModel(**given, guidance_embeds=True))
    return nn.Module.to(model, device=device, dtype=dtype).eval()  # diffusers' own `to` logs a remark about dtypes


def vae(size: str = "tiny", *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0):
    """The autoencoder alone, with the scale of its latents. device="meta": shapes without memory, for counting."""
    if str(device) != "meta":
        return _scaled(diffusion.vae(size, dtype=dtype, device=device, seed=seed))
    with torch.device("meta"):
        return _scaled(diffusion.vae(size, dtype=dtype, device="meta", seed=seed))


def image_tokens(pipe: FluxKontextPipeline | str, side: int) -> int:
    """Tokens of a square image of `side` pixels: one for 2 x 2 latents. ValueError when the side does not divide.

    pipe: the pipeline, or the name of a size, which is enough to know how many pixels a latent stands for.
    """
    if isinstance(pipe, str):
        patch = 2 ** len(diffusion.VAE_SIZES[expect.one_of(TRANSFORMER_SIZES, size=pipe)]["block_out_channels"])
    else:
        patch = 2 * pipe.vae_scale_factor
    if side < patch or side % patch:
        raise ValueError(f"side={side}; expected a multiple of {patch}; nearest: {max(1, round(side / patch)) * patch}")
    return (side // patch) ** 2


def edit_inputs(pipe: FluxKontextPipeline, side: int, text: int = 16, *, seed: int = 0) -> tuple[Tensor, ...]:
    """One edit, drawn on the CPU in float32.

    (image [1, 3, side, side] in 0 … 1, noise [1, tokens, 64], prompt [1, text, width], pooled [1, width]).
    """
    generator = torch.Generator().manual_seed(seed)
    config, tokens = pipe.transformer.config, image_tokens(pipe, side)
    coarse = torch.rand(1, 3, 4, 4, generator=generator)  # a smooth picture, not noise
    image = nn.functional.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False).clamp(0, 1)
    noise = torch.randn(1, tokens, config.in_channels, generator=generator)
    prompt = torch.randn(1, text, config.joint_attention_dim, generator=generator)
    pooled = torch.randn(1, config.pooled_projection_dim, generator=generator)
    return image, noise, prompt, pooled


def editor(pipe: FluxKontextPipeline, side: int, steps: int) -> Callable[..., Tensor]:
    """edit(*edit_inputs(pipe, side)) -> image [1, 3, side, side] in 0 … 1, in float32 (a float64 pipeline: float64)."""
    image_tokens(pipe, side)  # a side that does not divide would be changed without an error
    how = {"height": side, "width": side, "max_area": side**2, "_auto_resize": False, "num_inference_steps": steps}

    def edit(image: Tensor, noise: Tensor, prompt: Tensor, pooled: Tensor) -> Tensor:
        noise, prompt, pooled = (t.to(pipe.transformer.dtype) for t in (noise, prompt, pooled))
        given = {"image": image, "latents": noise, "prompt_embeds": prompt, "pooled_prompt_embeds": pooled}
        made = pipe(**given, **how, output_type="pt", return_dict=False)[0]
        return made if made.dtype == torch.float64 else made.float()

    return edit


def computing_in(pipe: FluxKontextPipeline, dtype: torch.dtype) -> FluxKontextPipeline:
    """`pipe` itself, from now on with arithmetic in a wider dtype and the weights as they are: the exact answer.

    A layer's weights are converted while it runs, so that a second copy of the whole model need not fit into memory.
    """
    for part in (pipe.transformer, pipe.vae):
        apply_layerwise_casting(part, part.dtype, dtype, skip_modules_pattern=())  # products and convolutions
        for layer in part.modules():
            if not hasattr(layer, "_diffusers_hook") and any(True for _ in layer.parameters(recurse=False)):
                nn.Module.to(layer, dtype)  # the norms: small, converted for good
    return pipe


def weight_bytes(pipe: FluxKontextPipeline) -> int:
    """Bytes of the parameters of transformer and autoencoder."""
    return sum(p.numel() * p.element_size() for part in (pipe.transformer, pipe.vae) for p in part.parameters())


def step_inputs(
    model: FluxTransformer2DModel, tokens: int, text: int, *, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Tensor]:
    """Keyword arguments of one denoising step of Kontext for an image of `tokens` tokens, in the model's dtype."""
    generator, config = torch.Generator().manual_seed(seed), model.config
    like = {"device": device, "dtype": next(model.parameters()).dtype}

    def normal(*shape: int) -> Tensor:
        if str(device) == "meta":
            return torch.empty(*shape, **like)
        return torch.randn(*shape, generator=generator).to(**like)

    side = max(1, round(tokens**0.5))
    place = torch.arange(tokens)
    ids = torch.stack([torch.zeros(tokens), place // side, place % side], -1)  # [tokens, 3]: which image, row, column
    both = torch.cat([ids, ids + torch.tensor([1.0, 0, 0])])  # the old image has a 1 in the first column
    return {
        "hidden_states": normal(1, 2 * tokens, config.in_channels),
        "encoder_hidden_states": normal(1, text, config.joint_attention_dim),
        "pooled_projections": normal(1, config.pooled_projection_dim),
        "timestep": torch.full((1,), 0.5, **like),
        "guidance": torch.full((1,), 3.5, device=device),
        "img_ids": both.to(**like),
        "txt_ids": torch.zeros(text, 3, **like),
    }


# ---------------------------------------------------------------------------------------------------- details


def _lively(model: FluxTransformer2DModel) -> FluxTransformer2DModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if factor := next((by for end, by in LIVELY.items() if name.endswith(f".{end}")), None):
                parameter.mul_(factor)
        model.proj_out.weight.mul_(2.0)
    return model


def _scaled(model):
    model.register_to_config(**LATENT_SCALE)
    return model


def _assembled(denoiser: FluxTransformer2DModel, autoencoder, scheduler=None) -> FluxKontextPipeline:
    pipe = FluxKontextPipeline(
        transformer=denoiser.requires_grad_(False),
        vae=autoencoder.requires_grad_(False),
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(**SCHEDULE),
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@lru_cache(maxsize=1)
def _drawn(size: str, dtype: torch.dtype, device: str, seed: int) -> FluxKontextPipeline:
    """Weights drawn where they will be used: 12 billion numbers from the CPU would take minutes."""
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = _lively(FluxTransformer2DModel(**TRANSFORMER_SIZES[size], guidance_embeds=True)).eval()
    finally:
        torch.set_default_dtype(before)
    return _assembled(model, _scaled(diffusion.vae(size, dtype=dtype, device=device, seed=seed)))


@lru_cache(maxsize=1)
def _loaded(checkpoint: str, dtype: torch.dtype, device: str) -> FluxKontextPipeline:
    place = Path(checkpoint).expanduser()
    folder = (place / "model_index.json").is_file()
    if not folder and (place.is_dir() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", checkpoint)):
        raise ValueError(_absent(checkpoint, "no such folder with a model_index.json"))
    why = "" if folder else _unanswered(checkpoint)
    if why and not isinstance(try_to_load_from_cache(checkpoint, "model_index.json"), str):
        raise ValueError(_absent(checkpoint, f"no such folder here, and {why}"))
    try:
        found = FluxKontextPipeline.from_pretrained(
            str(place) if folder else checkpoint,
            torch_dtype=dtype,
            local_files_only=bool(folder or why),
            **dict.fromkeys(NOT_NEEDED),
        )
    except (OSError, ValueError) as error:  # huggingface_hub's errors of the network and of access are OSErrors
        what = "the folder cannot be loaded" if folder else "the hub did not give all of it"
        raise ValueError(_absent(checkpoint, f"{what} ({type(error).__name__})")) from error
    for part in (found.transformer, found.vae):
        nn.Module.to(part, device).eval()
    return found


def _unanswered(name: str) -> str:
    """Why the hub does not give the first file of this repository, "" when it does. It is asked once: no retries."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps the hub from being asked"
    try:
        get_hf_file_metadata(hf_hub_url(name, "model_index.json"), timeout=10)
    except Exception as error:  # no network, no such repository, no access: each has classes of its own
        return f"the hub did not give it ({type(error).__name__})"
    return ""


def _absent(checkpoint: str, why: str) -> str:
    return (
        f"checkpoint={checkpoint!r}: {why}; expected a local folder (hf download {HUB_NAME} --local-dir FOLDER), "
        f"or the name of a hub repository such as {HUB_NAME!r} (accept its licence there, then: hf auth login)"
    )


def _sharing(source: FluxKontextPipeline) -> FluxKontextPipeline:
    """Another pipeline over the same weights: what is fused, compiled or converted in one leaves the other alone."""
    parts = []
    for part in (source.transformer, source.vae):
        with torch.device("meta"):
            twin = type(part).from_config(part.config)
        # from_config goes back to the defaults of the class where the source was built with them.
        twin.register_to_config(**{name: part.config[name] for name in LATENT_SCALE if name in part.config})
        twin.load_state_dict(part.state_dict(), assign=True)
        parts.append(twin.eval())
    return _assembled(*parts, scheduler=type(source.scheduler).from_config(source.scheduler.config))
