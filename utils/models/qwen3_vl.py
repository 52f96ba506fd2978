"""The vision tower of Qwen3-VL: the real classes of transformers, built offline with random weights.

Nothing is downloaded. A size is a configuration; the weights are drawn from a seed, biases and norms included, so that
a bias that is lost, or an axis that is swapped, changes the output. Every parameter is drawn by its own name: the patch
embedding alone, a tower of two blocks and one of 27 share the weights that they have in common.

Shapes: N patches, C channels (3), T frames a patch (2), P pixels a side (16), D width. One patch arrives as a flat row
of C*T*P*P = 1536 values. A grid (t, h, w) counts patches in time, height and width.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, Qwen3VLVisionPatchEmbed

from .. import expect

# "4b" and "8b" are the published vision towers of Qwen3-VL 4B and 8B; patch, channels and frames never differ.
SIZES: dict[str, dict] = {
    "tiny": dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=4,
        out_hidden_size=96, num_position_embeddings=64, deepstack_visual_indexes=[0],
    ),
    "small": dict(
        depth=6, hidden_size=384, intermediate_size=1536, num_heads=6,
        out_hidden_size=512, num_position_embeddings=2304, deepstack_visual_indexes=[1, 3],
    ),
    "4b": dict(
        depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16,
        out_hidden_size=2560, num_position_embeddings=2304, deepstack_visual_indexes=[5, 11, 17],
    ),
    "8b": dict(
        depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16,
        out_hidden_size=4096, num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24],
    ),
}  # fmt: skip

_STD = 0.02  # initializer_range of the published configurations


def vision_config(size: str = "8b", **overrides) -> Qwen3VLVisionConfig:
    """The configuration of a vision tower: "tiny", "small", "4b" or "8b", with fields of it replaced by `overrides`.

    With a smaller `depth` the DeepStack layers that no longer exist are left out.
    Raises ValueError, with the nearest right name, for an unknown size or field.
    """
    expect.one_of(SIZES, size=size)
    fields = [*SIZES["8b"], "patch_size", "temporal_patch_size", "in_channels", "spatial_merge_size", "hidden_act",
              "attn_implementation"]  # fmt: skip
    for name in overrides:
        if name not in fields:
            raise ValueError(f"{name!r} is no field of the vision configuration; {expect.nearest(name, fields)}")
    values = {**SIZES[size], **overrides}
    if "deepstack_visual_indexes" not in overrides:
        values["deepstack_visual_indexes"] = [at for at in values["deepstack_visual_indexes"] if at < values["depth"]]
    return Qwen3VLVisionConfig(**values)


def vision_tower(
    size: str = "tiny",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **overrides,
) -> Qwen3VLVisionModel:
    """A `Qwen3VLVisionModel` in eval mode; called as `tower(pixel_values [N, 1536], grid_thw [images, 3])`.

    `pooler_output` of the result is [N / 4, out_hidden_size]. "8b" holds 576 million parameters.
    Parameters are of `dtype`; the rotary frequencies stay float32, as in a loaded checkpoint.
    """
    config = vision_config(size, **overrides)
    with torch.device("meta"):  # skip the default initialisation: every value is drawn below
        tower = Qwen3VLVisionModel(config)
    return draw_weights(tower, dtype=dtype, device=device, seed=seed)


def patch_embed(
    size: str = "8b",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **overrides,
) -> Qwen3VLVisionPatchEmbed:
    """The `Qwen3VLVisionPatchEmbed` of that tower alone, with the same weights: [N, 1536] -> [N, D]."""
    config = vision_config(size, **overrides)
    with torch.device("meta"):
        module = Qwen3VLVisionPatchEmbed(config)
    return draw_weights(module, dtype=dtype, device=device, seed=seed, prefix="patch_embed.")


def draw_weights(
    module: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    prefix: str = "",
    draw_on: str | torch.device = "cpu",
) -> nn.Module:
    """Give a module of transformers that was built on the meta device random values on `device`; eval mode.

    Every parameter is N(0, 0.02), plus 1 for the weight of a norm, drawn on the CPU from `seed` and its name (after
    `prefix`), so it depends neither on the device nor on what else the model holds. `draw_on` names another device to
    draw on, which is much faster for billions of values and gives other ones. Buffers, which are computed and not
    drawn, come from building their module again from its configuration.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype={dtype!r}; expected a floating point torch.dtype such as torch.bfloat16")
    for path, part in list(module.named_modules()):
        if next(part.buffers(recurse=False), None) is not None:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, type(part)(part.config).to(device))
    with torch.no_grad():
        for path, part in module.named_modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                full = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
                generator = torch.Generator(draw_on).manual_seed(zlib.crc32(f"{seed} {full}".encode()))  # takes 32 bits
                value = torch.randn(parameter.shape, generator=generator, device=draw_on).mul_(_STD)
                if name == "weight" and parameter.ndim == 1:  # the weight of a norm
                    value += 1
                setattr(part, name, nn.Parameter(value.to(device, dtype), requires_grad=parameter.requires_grad))
    return module.eval()


def grid_of(patches: int, frames: int = 1, merge: int = 2) -> tuple[int, int, int]:
    """The grid (t, h, w) nearest to a square with t*h*w = `patches`; h and w are multiples of `merge`.

    `frames` is t: one for an image, half the number of frames for a video.
    Raises ValueError when no such grid exists, naming the nearest number of patches that has one.
    """
    unit = frames * merge * merge
    if patches < 1 or patches % unit:
        near = max(unit, round(patches / unit) * unit)
        raise ValueError(
            f"patches={patches} is no positive multiple of {unit} ({frames} x {merge} x {merge}); nearest: {near}"
        )
    cells = patches // unit  # merged patches of one frame
    height = next(side for side in range(math.isqrt(cells), 0, -1) if cells % side == 0)
    return frames, height * merge, cells // height * merge


def patch_inputs(
    *grids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    config: Qwen3VLVisionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Random images or videos as the processor hands them over: pixel_values [N, 1536] and grid_thw [images, 3].

    Each of `grids` is (t, h, w); N is the sum of t*h*w. Values are N(0, 1), drawn on the CPU from `seed`.
    Raises ValueError for a grid that is not three positive whole numbers or does not fit the 2 x 2 merge.
    """
    config = config or vision_config()
    merge, patch = config.spatial_merge_size, config.patch_size
    if not grids:
        raise ValueError("no grid given; expected at least one (t, h, w), for example (1, 28, 28)")
    for grid in grids:
        whole = len(grid) == 3 and all(isinstance(side, int) and side > 0 for side in grid)
        if not whole or grid[1] % merge or grid[2] % merge:
            raise ValueError(
                f"grid={tuple(grid)!r}; expected (t, h, w), whole and positive, h and w multiples of {merge}"
            )
    rows = sum(math.prod(grid) for grid in grids)
    width = config.in_channels * config.temporal_patch_size * patch * patch
    pixels = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return pixels.to(device, dtype), torch.tensor(grids, dtype=torch.int64, device=device)
