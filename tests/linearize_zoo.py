"""Tiny instances of the modules of transformers and diffusers whose convolutions have kernel = stride (as found in
transformers 5.24 and diffusers 0.42), what goes into them, and what `linearize` must say of each convolution.

A convolution is expected to be converted (YES), or left alone for a reason that contains the given words.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

YES = True
IMAGE = (2, 3, 16, 16)  # [N, C, H, W]
PATCHES = (6, 96)  # 6 flattened patches of 3 x 2 x 4 x 4
VIDEO = (2, 4, 3, 16, 16)  # [N, T, C, H, W]
CLIP = (2, 3, 4, 16, 16)  # [N, C, T, H, W]

# Every configuration gets those of these values that it knows; a class that takes any object as its configuration gets
# all of them.
TINY = {
    "hidden_size": 16, "embed_dim": 16, "hidden_dim": 16, "intermediate_size": 16, "d_model": 16,
    "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2,
    "image_size": 16, "img_size": 16, "input_size": 16, "patch_size": 4, "spatial_patch_size": 4,
    "num_channels": 3, "in_channels": 3, "in_chans": 3, "temporal_patch_size": 2, "tubelet_size": 2, "num_frames": 4,
}  # fmt: skip
BARE = {
    **TINY, "hidden_sizes": [16, 16], "pretrain_image_size": 16, "use_absolute_position_embeddings": False,
    "downsampling_rate": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_image_size": 16,
    "use_abs_pos": False, "use_absolute_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    library: str
    source: str  # the module below <library>.models
    cls: str
    expected: dict[str, bool | str]  # path of a convolution -> YES, or words of the reason
    build: Callable[[Any], nn.Module]  # from the imported module to an instance
    inputs: Callable[[], tuple]

    def __str__(self) -> str:
        return f"{self.source.rsplit('.', 1)[-1].removeprefix('modeling_')}.{self.cls}"

    def make(self) -> tuple[nn.Module, tuple] | None:
        """The module in eval mode and its inputs; None where the installed version has no such class."""
        try:
            module = importlib.import_module(f"{self.library}.models.{self.source}")
        except ModuleNotFoundError:
            return None
        if not hasattr(module, self.cls):
            return None
        torch.manual_seed(0)
        model = self.build(module).eval()
        return model, self.inputs()


def _randn(*shapes: tuple) -> Callable[[], tuple]:
    return lambda: tuple(torch.randn(shape) for shape in shapes)


def config_of(module: Any, name: str, **changes: Any) -> Any:
    """The configuration class `name` of a modeling module, with every value of TINY that it has."""
    kind = getattr(module, name)
    known = {key: value for key, value in TINY.items() if hasattr(kind, key)}
    return kind(**{**known, **changes})


def hf(model: str, cls: str, config: str | None, expected, inputs=IMAGE, file: str | None = None, **changes) -> Case:
    """A class of transformers that takes a configuration: `config` by name, or any object (None)."""

    def build(module: Any) -> nn.Module:
        made = config_of(module, config, **changes) if config else SimpleNamespace(**{**BARE, **changes})
        return getattr(module, cls)(made)

    return Case(
        "transformers", f"{model}.{file or 'modeling_' + model}", cls,
        {expected: YES} if isinstance(expected, str) else expected, build,
        inputs if callable(inputs) else _randn(inputs),
    )  # fmt: skip


def case(library: str, source: str, cls: str, expected, build, inputs) -> Case:
    return Case(library, source, cls, expected, build, inputs if callable(inputs) else _randn(inputs))


def _args(cls: str, *args: Any, **kwargs: Any) -> Callable[[Any], nn.Module]:
    return lambda module: getattr(module, cls)(*args, **kwargs)


# ---- images, one patch embedding each ------------------------------------------------------------------------------

IMAGES = [
    hf("aimv2", "Aimv2VisionEmbeddings", "Aimv2VisionConfig", "patch_embed"),
    hf("altclip", "AltCLIPVisionEmbeddings", "AltCLIPVisionConfig", "patch_embedding"),
    hf("beit", "BeitPatchEmbeddings", "BeitConfig", "projection"),
    hf("blip", "BlipVisionEmbeddings", "BlipVisionConfig", "patch_embedding"),
    hf("blip_2", "Blip2VisionEmbeddings", "Blip2VisionConfig", "patch_embedding"),
    hf("bridgetower", "BridgeTowerVisionEmbeddings", "BridgeTowerVisionConfig", "patch_embedding"),
    hf("chinese_clip", "ChineseCLIPVisionEmbeddings", "ChineseCLIPVisionConfig", "patch_embedding"),
    hf("clip", "CLIPVisionEmbeddings", "CLIPVisionConfig", "patch_embedding"),
    hf("clipseg", "CLIPSegVisionEmbeddings", "CLIPSegVisionConfig", "patch_embedding"),
    hf("convnext", "ConvNextEmbeddings", None, "patch_embeddings"),
    hf("convnextv2", "ConvNextV2Embeddings", None, "patch_embeddings"),
    hf("deit", "DeiTPatchEmbeddings", "DeiTConfig", "projection"),
    hf("dinov2", "Dinov2PatchEmbeddings", "Dinov2Config", "projection"),
    hf("dinov2_with_registers", "Dinov2WithRegistersPatchEmbeddings", "Dinov2WithRegistersConfig", "projection"),
    hf("dinov3_vit", "DINOv3ViTEmbeddings", "DINOv3ViTConfig", "patch_embeddings"),
    hf("dpt", "DPTViTPatchEmbeddings", "DPTConfig", "projection"),
    hf("eomt", "EomtPatchEmbeddings", "EomtConfig", "projection"),
    hf("git", "GitVisionEmbeddings", "GitVisionConfig", "patch_embedding"),
    hf("got_ocr2", "GotOcr2PatchEmbeddings", None, "projection"),
    hf("idefics", "IdeficsVisionEmbeddings", "IdeficsVisionConfig", "patch_embedding", file="vision"),
    hf("ijepa", "IJepaPatchEmbeddings", "IJepaConfig", "projection"),
    hf("instructblip", "InstructBlipVisionEmbeddings", "InstructBlipVisionConfig", "patch_embedding"),
    hf("janus", "JanusVisionEmbeddings", "JanusVisionConfig", "patch_embedding"),
    hf("kosmos2", "Kosmos2VisionEmbeddings", "Kosmos2VisionConfig", "patch_embedding"),
    hf("layoutlmv3", "LayoutLMv3PatchEmbeddings", None, "proj"),
    hf("metaclip_2", "MetaClip2VisionEmbeddings", "MetaClip2VisionConfig", "patch_embedding"),
    hf("mlcd", "MLCDVisionEmbeddings", "MLCDVisionConfig", "patch_embedding"),
    hf("ovis2", "Ovis2VisionEmbeddings", "Ovis2VisionConfig", "patch_embedding"),
    hf("owlv2", "Owlv2VisionEmbeddings", "Owlv2VisionConfig", "patch_embedding"),
    hf("owlvit", "OwlViTVisionEmbeddings", "OwlViTVisionConfig", "patch_embedding"),
    hf("pixtral", "PixtralVisionModel", "PixtralVisionConfig", "patch_conv"),
    hf("sam", "SamPatchEmbeddings", None, "projection"),
    hf("siglip", "SiglipVisionEmbeddings", "SiglipVisionConfig", "patch_embedding"),
    hf("swin", "SwinPatchEmbeddings", None, "projection"),
    hf("swinv2", "Swinv2PatchEmbeddings", None, "projection"),
    hf("timesformer", "TimesformerPatchEmbeddings", None, "projection", VIDEO),
    hf("udop", "UdopPatchEmbeddings", None, "proj"),
    hf("vilt", "ViltPatchEmbeddings", None, "projection"),
    hf("vit", "ViTPatchEmbeddings", "ViTConfig", "projection"),
    hf("vit_mae", "ViTMAEPatchEmbeddings", "ViTMAEConfig", "projection"),
    hf("vit_msn", "ViTMSNPatchEmbeddings", "ViTMSNConfig", "projection"),
    hf("vitdet", "VitDetEmbeddings", None, "projection"),
    hf("x_clip", "XCLIPVisionEmbeddings", "XCLIPVisionConfig", "patch_embedding"),
    hf("yolos", "YolosPatchEmbeddings", None, "projection"),
]

# ---- flattened patches, and videos ---------------------------------------------------------------------------------

_PATCH_ARGUMENTS = {"patch_size": 4, "temporal_patch_size": 2, "in_channels": 3, "embed_dim": 16}
PATCH_VOLUMES = [
    case("transformers", "qwen2_vl.modeling_qwen2_vl", "PatchEmbed", {"proj": YES},
         _args("PatchEmbed", **_PATCH_ARGUMENTS), PATCHES),
    case("transformers", "qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionPatchEmbed", {"proj": YES},
         _args("Qwen2_5_VisionPatchEmbed", **_PATCH_ARGUMENTS), PATCHES),
    hf("qwen3_vl", "Qwen3VLVisionPatchEmbed", None, "proj", PATCHES),
    hf("qwen3_vl_moe", "Qwen3VLMoeVisionPatchEmbed", None, "proj", PATCHES),
    hf("qwen3_omni_moe", "Qwen3OmniMoeVisionPatchEmbed", None, "proj", PATCHES),
    hf("qwen3_5", "Qwen3_5VisionPatchEmbed", None, "proj", PATCHES),
    hf("glm4v", "Glm4vVisionPatchEmbed", "Glm4vVisionConfig", "proj", PATCHES),
    hf("glm4v_moe", "Glm4vMoeVisionPatchEmbed", "Glm4vMoeVisionConfig", "proj", PATCHES),
    hf("glm_ocr", "GlmOcrVisionPatchEmbed", "GlmOcrVisionConfig", "proj", PATCHES),
    hf("glm4v", "Glm4vVisionModel", "Glm4vVisionConfig", {"patch_embed.proj": YES, "downsample": YES},
       lambda: (torch.randn(16, 96), torch.tensor([[1, 4, 4]])), out_hidden_size=16, spatial_merge_size=2),
    hf("video_llama_3", "VideoLlama3VisionEmbeddings", "VideoLlama3VisionConfig", "patch_embedding", (6, 48)),
    hf("videomae", "VideoMAEPatchEmbeddings", None, "projection", VIDEO),
    hf("vivit", "VivitTubeletEmbeddings", "VivitConfig", "projection", VIDEO, tubelet_size=[2, 4, 4]),
    hf("vjepa2", "VJEPA2PatchEmbeddings3D", "VJEPA2Config", "proj", CLIP),
    hf("canine", "CharactersToMolecules", None, "conv", (2, 15, 16)),
]  # fmt: skip

# ---- several convolutions, some of which must be left alone --------------------------------------------------------

_MASK = {"conv1": YES, "conv2": YES, "conv3": YES}
SEVERAL = [
    hf("sam", "SamMaskEmbedding", "SamPromptEncoderConfig", _MASK, (2, 1, 16, 16)),
    hf("sam2", "Sam2MaskEmbedding", "Sam2PromptEncoderConfig", _MASK, (2, 1, 16, 16)),
    hf("sam_hq", "SamHQMaskEmbedding", "SamHQPromptEncoderConfig", _MASK, (2, 1, 16, 16)),
    hf("edgetam", "EdgeTamMaskEmbedding", "EdgeTamPromptEncoderConfig", _MASK, (2, 1, 16, 16)),
    hf("eomt", "EomtScaleLayer", "EomtConfig", {"conv1": "transposed", "conv2": "groups=16"}, (2, 16, 5, 5)),
    case("transformers", "depth_anything.modeling_depth_anything", "DepthAnythingReassembleLayer",
         {"projection": YES, "resize": "transposed"},
         lambda m: m.DepthAnythingReassembleLayer(SimpleNamespace(reassemble_hidden_size=16), 8, 2), (2, 16, 5, 5)),
    case("transformers", "zoedepth.modeling_zoedepth", "ZoeDepthReassembleLayer",
         {"projection": YES, "resize": "overlap"},
         lambda m: m.ZoeDepthReassembleLayer(SimpleNamespace(backbone_hidden_size=16), 8, 0.5), (2, 16, 5, 5)),
    case("transformers", "dinov3_convnext.modeling_dinov3_convnext", "DINOv3ConvNextStage",
         {"downsample_layers.0": YES, "layers.0.depthwise_conv": "groups=16"},
         lambda m: m.DINOv3ConvNextStage(m.DINOv3ConvNextConfig(hidden_sizes=[16] * 4, depths=[1] * 4), 0), IMAGE),
    case("transformers", "segformer.modeling_segformer", "SegformerSequenceReduction", {"sequence_reduction": YES},
         _args("SegformerSequenceReduction", 16, 2), lambda: (torch.randn(2, 25, 16), 5, 5)),
    case("transformers", "focalnet.modeling_focalnet", "FocalNetPatchEmbeddings", {"projection": "overlap"},
         lambda m: m.FocalNetPatchEmbeddings(SimpleNamespace(layer_norm_eps=1e-5), 16, 4, 3, 16, use_conv_embed=True,
                                             is_stem=True), IMAGE),
    case("transformers", "audio_spectrogram_transformer.modeling_audio_spectrogram_transformer", "ASTPatchEmbeddings",
         {"projection": "overlap"},
         lambda m: m.ASTPatchEmbeddings(
             SimpleNamespace(patch_size=4, frequency_stride=3, time_stride=3, hidden_size=16)),
         (2, 16, 16)),
]  # fmt: skip

# ---- diffusers -----------------------------------------------------------------------------------------------------

_WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 8, "freq_dim": 16, "ffn_dim": 16, "num_layers": 1,
}  # fmt: skip


def _wan_inputs() -> tuple:
    return torch.randn(1, 4, 2, 8, 8), torch.tensor([10]), torch.randn(1, 5, 8)


DIFFUSERS = [
    case("diffusers", "embeddings", "PatchEmbed", {"proj": YES},
         _args("PatchEmbed", 16, 16, 2, 4, 16), (2, 4, 16, 16)),  # DiT, PixArt, SD3
    case("diffusers", "embeddings", "CogVideoXPatchEmbed", {"proj": YES},
         lambda m: m.CogVideoXPatchEmbed(2, None, 4, 16, 8, True, 8, 8, 9, 4, 5),
         lambda: (torch.randn(2, 5, 8), torch.randn(2, 3, 4, 8, 8))),
    case("diffusers", "transformers.transformer_hunyuan_video", "HunyuanVideoPatchEmbed", {"proj": YES},
         _args("HunyuanVideoPatchEmbed", (1, 2, 2), 4, 16), (2, 4, 3, 8, 8)),
    case("diffusers", "transformers.transformer_hunyuan_video15", "HunyuanVideo15PatchEmbed", {"proj": YES},
         _args("HunyuanVideo15PatchEmbed", (1, 1, 1), 65, 16), (2, 65, 3, 6, 6)),
    case("diffusers", "transformers.transformer_hunyuan_video_framepack", "HunyuanVideoHistoryPatchEmbed",
         {"proj": YES, "proj_2x": YES, "proj_4x": YES}, _args("HunyuanVideoHistoryPatchEmbed", 4, 16),
         _randn((1, 4, 1, 8, 8), (1, 4, 3, 9, 10), (1, 4, 5, 12, 12))),
    case("diffusers", "transformers.transformer_hunyuanimage", "HunyuanImagePatchEmbed", {"proj": YES},
         _args("HunyuanImagePatchEmbed", (2, 2), 4, 16), (2, 4, 8, 8)),
    case("diffusers", "transformers.transformer_omnigen", "OmniGenPatchEmbed",
         {"output_image_proj": YES, "input_image_proj": YES}, _args("OmniGenPatchEmbed", 2, 4, 16),
         lambda: (torch.randn(1, 4, 8, 8), False)),
    case("diffusers", "unets.unet_kandinsky3", "Kandinsky3ResNetBlock",
         {"resnet_blocks.0.projection": YES, "resnet_blocks.1.up_sample": "transposed",
          "resnet_blocks.1.projection": "overlap", "resnet_blocks.2.projection": "overlap",
          "resnet_blocks.2.down_sample": YES, "resnet_blocks.3.projection": YES,
          "shortcut_up_sample": "transposed", "shortcut_projection": YES, "shortcut_down_sample": YES},
         _args("Kandinsky3ResNetBlock", 8, 16, 8, 4, 2, [None, True, False, None]), _randn((2, 8, 6, 6), (2, 8))),
    case("diffusers", "transformers.transformer_wan", "WanTransformer3DModel", {"patch_embedding": YES},
         _args("WanTransformer3DModel", **_WAN), _wan_inputs),
    case("diffusers", "transformers.transformer_skyreels_v2", "SkyReelsV2Transformer3DModel", {"patch_embedding": YES},
         _args("SkyReelsV2Transformer3DModel", **_WAN), _wan_inputs),
    case("diffusers", "autoencoders.autoencoder_kl_mochi", "MochiDownBlock3D",
         {"conv_in.conv": "subclass of nn.Conv3d",  # pads in a wrapper, and its forward may split the memory
          "resnets.0.conv1.conv": "subclass", "resnets.0.conv2.conv": "subclass"},
         _args("MochiDownBlock3D", 32, 32, 1, 2, 2, False), (1, 32, 4, 8, 8)),
]  # fmt: skip

ZOO = IMAGES + PATCH_VOLUMES + SEVERAL + DIFFUSERS
