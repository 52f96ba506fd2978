"""The convolutional networks of diffusion pipelines: real classes of diffusers, built offline with random weights.

`vae` is the autoencoder of FLUX.1 (16 latent channels) and `unet` a latent-diffusion UNet. "tiny" runs in a test,
"full" has the published sizes. Weights are drawn from a seed on the CPU, then moved.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn

from .. import expect

VAE_SIZES: dict[str, dict] = {
    "tiny": {"block_out_channels": [32, 64], "layers_per_block": 1, "norm_num_groups": 8},
    "small": {"block_out_channels": [32, 64, 128, 128], "layers_per_block": 1, "norm_num_groups": 16},
    "full": {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32},
}
UNET_SIZES: dict[str, dict] = {
    "tiny": {"block_out_channels": [32, 64], "cross_attention_dim": 32, "norm_num_groups": 8, "layers_per_block": 1},
    "full": {"block_out_channels": [320, 640, 1280, 1280], "cross_attention_dim": 768},
}
LATENT_CHANNELS = {"vae": 16, "unet": 4}


def _size(size: str, sizes: dict[str, dict]) -> dict:
    return sizes[expect.one_of(sizes, size=size)]


def vae(size: str = "tiny", *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0):
    """An `AutoencoderKL` in eval mode. `.decode(latents [N, 16, h, w]).sample` is [N, 3, s*h, s*w].

    s is 2 for "tiny" and 8 otherwise. Raises ValueError with the nearest name for an unknown size.
    """
    blocks = _size(size, VAE_SIZES)
    depth = len(blocks["block_out_channels"])
    torch.manual_seed(seed)
    model = AutoencoderKL(
        **blocks,
        down_block_types=["DownEncoderBlock2D"] * depth,
        up_block_types=["UpDecoderBlock2D"] * depth,
        latent_channels=LATENT_CHANNELS["vae"],
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return nn.Module.to(model, device=device, dtype=dtype).eval()  # diffusers' own `to` logs a remark about dtypes


def unet(size: str = "tiny", *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0):
    """A `UNet2DConditionModel` in eval mode, called as `unet(*unet_inputs(size))`. Unknown size: ValueError."""
    blocks = _size(size, UNET_SIZES)
    depth = len(blocks["block_out_channels"])
    torch.manual_seed(seed)
    model = UNet2DConditionModel(
        **blocks,
        down_block_types=["CrossAttnDownBlock2D"] * (depth - 1) + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (depth - 1),
        attention_head_dim=8,
    )
    return nn.Module.to(model, device=device, dtype=dtype).eval()  # diffusers' own `to` logs a remark about dtypes


def latents(kind: str, side: int, *, batch: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal latents for "vae" or "unet" on the CPU: [batch, channels, side, side]."""
    expect.one_of(LATENT_CHANNELS, kind=kind)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, LATENT_CHANNELS[kind], side, side, generator=generator).to(dtype)


def unet_inputs(size: str, side: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple:
    """(latents [1, 4, side, side], timestep, text [1, 77, width]) for `unet(size)`, on the CPU."""
    generator = torch.Generator().manual_seed(seed + 1)
    width = _size(size, UNET_SIZES)["cross_attention_dim"]
    text = torch.randn(1, 77, width, generator=generator).to(dtype)
    return latents("unet", side, dtype=dtype, seed=seed), torch.tensor(500), text
