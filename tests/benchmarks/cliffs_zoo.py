"""Models for the benchmark of utils.cliffs: healthy ones, which must not be accused, and planted cliffs, which must be
found. Sizes at which the arithmetic dominates, float32 unless said, a second or less each on two cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


# ---- planted cliffs: behind each, honest work; beside each, the healthy form of the same function --------------------


class Tail(nn.Module):
    """Honest work, so that the cliff is a part of a model."""

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

    def __init__(self, cliff: nn.Module, tail: Tail) -> None:
        super().__init__()
        self.cliff, self.tail = cliff, tail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.cliff(x).to(self.tail.layers[0][0].weight.dtype))


class Function(nn.Module):
    """A function as a module, with modules that it uses."""

    def __init__(self, function: Callable, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


@dataclass(frozen=True)
class Case:
    """path, op: the row that must be named. make: (cliff, its healthy form, input, width of the tail)."""

    path: str
    op: str
    make: Callable[[], tuple[nn.Module, nn.Module, torch.Tensor, int]]

    def models(self) -> tuple[nn.Module, nn.Module, torch.Tensor]:
        cliff, quick, x, width = self.make()
        tail = Tail(width).to(x.dtype if x.dtype is torch.bfloat16 else torch.float32)
        return Planted(cliff, tail).eval(), Planted(quick, tail).eval(), x


def patch_embedding(dtype: torch.dtype):
    """Qwen3-VL's patch embedding at a quarter of its width."""
    proj = nn.Conv3d(3, 288, (2, 16, 16), (2, 16, 16), dtype=dtype)
    slow = Function(lambda self, x: self.proj(x.view(-1, 3, 2, 16, 16)).view(-1, 288), proj=proj)
    quick = Function(lambda self, x: F.linear(x, proj.weight.flatten(1), proj.bias))
    return slow, quick, torch.randn(1568, 1536, dtype=dtype), 288


def float16_product():
    half, single = nn.Linear(1024, 256).half(), nn.Linear(1024, 256)
    single.load_state_dict(half.state_dict())
    slow = Function(lambda self, x: self.inner(x.half()), inner=half)
    return slow, Function(lambda self, x: self.inner(x), inner=single), torch.randn(512, 1024), 256


def full_map_pool():
    slow = Function(lambda self, x: F.avg_pool2d(x, x.shape[-2:]).flatten(1))
    return slow, Function(lambda self, x: x.mean((2, 3))), torch.randn(4, 256, 96, 96), 256


def grouped_convolution():
    conv = nn.Conv2d(256, 256, 3, padding=1, groups=128)
    last = torch.channels_last

    def quick(self, x):
        weight = conv.weight.contiguous(memory_format=last)
        return F.conv2d(x.contiguous(memory_format=last), weight, conv.bias, padding=1, groups=128).mean((2, 3))

    slow = Function(lambda self, x: self.conv(x).mean((2, 3)), conv=conv)
    return slow, Function(quick), torch.randn(8, 256, 28, 28), 256


def token_loop():
    project = nn.Linear(256, 256)
    slow = Function(lambda self, x: torch.stack([torch.tanh(self.project(t)) for t in x]), project=project)
    return slow, Function(lambda self, x: torch.tanh(project(x))), torch.randn(512, 256), 256


def float64_island():
    wide = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256)).double()
    single = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
    single.load_state_dict(wide.state_dict())
    slow = Function(lambda self, x: self.inner(x.double()), inner=wide)
    return slow, Function(lambda self, x: self.inner(x), inner=single), torch.randn(512, 256), 256


def whole_sort():
    """The 256 largest of 32,000 logits by sorting all of them."""
    slow = Function(lambda self, x: torch.sort(x, -1, descending=True).values[:, :256])
    return slow, Function(lambda self, x: torch.topk(x, 256).values), torch.randn(64, 32_000), 256


def sliding_maximum():
    """A maximum over 31 x 31 around every pixel; two passes of 31 do the same."""
    slow = Function(lambda self, x: F.max_pool2d(x, 31, 1, 15).mean((2, 3)))
    quick = Function(
        lambda self, x: F.max_pool2d(F.max_pool2d(x, (31, 1), 1, (15, 0)), (1, 31), 1, (0, 15)).mean((2, 3))
    )
    return slow, quick, torch.randn(2, 64, 56, 56), 64


PLANTED: dict[str, Case] = {
    "patch embedding, float32": Case("cliff.proj", "convolution", lambda: patch_embedding(torch.float32)),
    "patch embedding, bfloat16": Case("cliff.proj", "convolution", lambda: patch_embedding(torch.bfloat16)),
    "float16 product": Case("cliff.inner", "addmm", float16_product),
    "full-map average pooling": Case("cliff", "avg_pool2d", full_map_pool),
    "grouped convolution": Case("cliff.conv", "convolution", grouped_convolution),
    "loop over tokens": Case("cliff", "(a loop)", token_loop),
    "float64 island": Case("cliff.inner.*", "addmm", float64_island),
    # these two were written after the decision was settled, and it was not changed for them
    "sort of a whole vocabulary": Case("cliff", "sort", whole_sort),
    "sliding maximum": Case("cliff", "max_pool2d", sliding_maximum),
}
