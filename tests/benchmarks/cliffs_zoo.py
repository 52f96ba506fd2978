"""Models for the benchmark of utils.cliffs: healthy ones, which must not be accused, and planted cliffs, which must be
found. Sizes at which the arithmetic dominates, float32 unless said, a second or less each on two cores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module, tuple, dict]  # model, arguments, keyword arguments


def _ids(n: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(0, vocabulary, (n, length))


def _decoder(name: str, **changes) -> Made:
    import transformers

    sizes = dict(
        vocab_size=4000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=1024, head_dim=64,
    )  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config), (_ids(2, 256),), {"use_cache": False}


def bert() -> Made:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=3)), (_ids(4, 128),), {}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=8000)
    return GPT2LMHeadModel(config), (_ids(2, 256),), {"use_cache": False}


def llama() -> Made:
    return _decoder("Llama")


def mistral() -> Made:
    return _decoder("Mistral", sliding_window=128)


def qwen3() -> Made:
    return _decoder("Qwen3")


def mixtral() -> Made:
    return _decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2, intermediate_size=1024)


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=4000, d_model=512, d_kv=64, d_ff=1536, num_layers=3, num_heads=8)
    return T5ForConditionalGeneration(config), (), {
        "input_ids": _ids(4, 128), "decoder_input_ids": _ids(4, 64), "use_cache": False,
    }  # fmt: skip


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        d_model=384, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=1536, decoder_ffn_dim=1536, vocab_size=4000, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperModel(config), (torch.randn(1, 80, 3000),), {"decoder_input_ids": _ids(1, 64), "use_cache": False}


def clip() -> Made:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(num_hidden_layers=3)), (torch.randn(4, 3, 224, 224),), {}


def siglip() -> Made:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=3)), (torch.randn(4, 3, 224, 224),), {}


def dinov2() -> Made:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, image_size=224)
    return Dinov2Model(config), (torch.randn(4, 3, 224, 224),), {}


def vit() -> Made:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(num_hidden_layers=3)), (torch.randn(4, 3, 224, 224),), {}


def swin() -> Made:
    from transformers import SwinConfig, SwinModel

    return SwinModel(SwinConfig(depths=[2, 2, 2, 2])), (torch.randn(4, 3, 224, 224),), {}


def convnext() -> Made:
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig(depths=[2, 2, 3, 2])), (torch.randn(4, 3, 224, 224),), {}


def resnet() -> Made:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()), (torch.randn(4, 3, 224, 224),), {}


def segformer() -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=256, num_labels=20)
    return SegformerForSemanticSegmentation(config), (torch.randn(1, 3, 512, 512),), {}


def unet2d() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, block_out_channels=(160, 320, 640), layers_per_block=1, cross_attention_dim=256,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return model, (torch.randn(2, 4, 32, 32), torch.tensor([10, 20]), torch.randn(2, 77, 256)), {}


def autoencoder() -> Made:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(64, 128, 256), layers_per_block=1, latent_channels=4, norm_num_groups=32,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
    )  # fmt: skip
    return model, (torch.randn(1, 3, 128, 128),), {}


def flux() -> Made:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=2, num_single_layers=2, attention_head_dim=64, num_attention_heads=8,
        joint_attention_dim=512, pooled_projection_dim=256, axes_dims_rope=(16, 24, 24),
    )  # fmt: skip
    return model, (), {
        "hidden_states": torch.randn(1, 256, 64), "encoder_hidden_states": torch.randn(1, 128, 512),
        "pooled_projections": torch.randn(1, 256), "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(128, 3), "guidance": None,
    }  # fmt: skip


def sd3() -> Made:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=16, num_layers=3, attention_head_dim=64, num_attention_heads=8,
        joint_attention_dim=512, caption_projection_dim=512, pooled_projection_dim=256, out_channels=16,
    )  # fmt: skip
    return model, (torch.randn(2, 16, 32, 32), torch.randn(2, 128, 512), torch.randn(2, 256), torch.tensor([1, 2])), {}


HEALTHY: dict[str, Callable[[], Made]] = {
    f.__name__: f
    for f in (
        bert, gpt2, llama, mistral, qwen3, t5, whisper, clip, siglip, dinov2, vit, swin, convnext, resnet, mixtral,
        segformer, unet2d, autoencoder, flux, sd3,
    )
}  # fmt: skip


# ---- planted cliffs: (model, arguments, keyword arguments), the row that must be named, and the healthy form ---------


class Tail(nn.Module):
    """Honest work behind a planted cliff, so that the cliff is a part of a model."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Planted(nn.Module):
    """x -> cliff -> [tokens, width] -> tail, in the dtype of the tail."""

    def __init__(self, cliff: nn.Module, width: int) -> None:
        super().__init__()
        self.cliff, self.tail = cliff, Tail(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cliff(x)
        return self.tail(y.to(self.tail.layers[0][0].weight.dtype))


class PatchEmbedding(nn.Module):
    """Qwen3-VL's patch embedding, a quarter of its width."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, 288, (2, 16, 16), (2, 16, 16), dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.view(-1, 3, 2, 16, 16)).view(-1, 288)


class In(nn.Module):
    """A module computed in another dtype."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.dtype))


class FullMapPool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, x.shape[-2:]).flatten(1)


class GroupedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(256, 256, 3, padding=1, groups=128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3))


class TokenLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.tanh(self.project(token)) for token in x])


PLANTED: dict[str, tuple[Callable[[], Made], str]] = {
    "patch embedding, float32": (
        lambda: (Planted(PatchEmbedding(torch.float32), 288), (torch.randn(1568, 1536),), {}), "cliff.proj"),
    "patch embedding, bfloat16": (
        lambda: (Planted(PatchEmbedding(torch.bfloat16), 288).bfloat16(), (torch.randn(1568, 1536).bfloat16(),), {}),
        "cliff.proj"),
    "float16 product": (
        lambda: (Planted(In(nn.Linear(1024, 256), torch.float16), 256), (torch.randn(512, 1024),), {}), "cliff.inner"),
    "full-map average pooling": (
        lambda: (Planted(FullMapPool(), 256), (torch.randn(4, 256, 96, 96),), {}), "cliff"),
    "grouped convolution": (
        lambda: (Planted(GroupedConv(), 256), (torch.randn(8, 256, 28, 28),), {}), "cliff.conv"),
    "loop over tokens": (lambda: (Planted(TokenLoop(), 256), (torch.randn(512, 256),), {}), "cliff"),
    "float64 island": (
        lambda: (Planted(In(nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)), torch.float64), 256),
                 (torch.randn(512, 256),), {}), "cliff.inner.*"),
}  # fmt: skip
