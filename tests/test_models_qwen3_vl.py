"""The vision tower of Qwen3-VL: real classes, offline, seeded."""

import pytest
import torch

from utils.equivalence import check_equivalence
from utils.models import qwen3_vl
from utils.models.qwen3_vl import SIZES, grid_of, patch_embed, patch_inputs, vision_config, vision_tower


def test_they_are_the_classes_of_transformers():
    from transformers import Qwen3VLVisionModel

    tower = vision_tower("tiny")
    assert type(tower) is Qwen3VLVisionModel
    assert type(tower.patch_embed).__module__ == "transformers.models.qwen3_vl.modeling_qwen3_vl"
    assert type(tower.patch_embed) is type(patch_embed("tiny"))
    assert isinstance(tower.patch_embed.proj, torch.nn.Conv3d)
    assert not tower.training


def test_the_8b_tower_has_its_published_sizes():
    config = vision_config("8b")
    assert (config.depth, config.hidden_size, config.intermediate_size, config.num_heads) == (27, 1152, 4304, 16)
    with torch.device("meta"):
        assert sum(p.numel() for p in qwen3_vl.Qwen3VLVisionModel(config).parameters()) == 576_388_336
    assert patch_embed("8b").proj.weight.shape == (1152, 3, 2, 16, 16)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_shapes_of_the_output(size):
    tower = vision_tower(size)
    pixels, grid = patch_inputs((1, 4, 6), (2, 2, 2))
    assert pixels.shape == (24 + 8, 1536) and grid.tolist() == [[1, 4, 6], [2, 2, 2]]
    with torch.inference_mode():
        out = tower(pixels, grid)
    assert out.pooler_output.shape == (32 // 4, SIZES[size]["out_hidden_size"])
    assert len(out.deepstack_features) == len(SIZES[size]["deepstack_visual_indexes"])
    assert torch.isfinite(out.pooler_output).all()


def test_nothing_stays_on_the_meta_device_and_frequencies_are_right():
    tower = vision_tower("tiny", dtype=torch.bfloat16)
    tensors = dict([*tower.named_parameters(), *tower.named_buffers()])
    assert not [name for name, tensor in tensors.items() if tensor.is_meta]
    assert all(p.dtype is torch.bfloat16 for p in tower.parameters())
    built = qwen3_vl.Qwen3VLVisionModel(vision_config("tiny"))
    for name, buffer in built.named_buffers():
        assert tensors[name].dtype is torch.float32
        assert torch.equal(tensors[name], buffer)


def test_every_parameter_is_random_so_that_a_lost_bias_shows():
    for name, parameter in vision_tower("tiny").named_parameters():
        assert parameter.std() > 0.005, name
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        assert abs(parameter.mean().item() - mean) < 0.02, name


def test_weights_depend_on_seed_and_name_only():
    alone = patch_embed("tiny", seed=3)
    inside = vision_tower("tiny", seed=3)
    shallow = vision_tower("tiny", seed=3, depth=1)
    assert torch.equal(alone.proj.weight, inside.patch_embed.proj.weight)
    assert torch.equal(alone.proj.bias, inside.patch_embed.proj.bias)
    assert torch.equal(shallow.blocks[0].attn.qkv.weight, inside.blocks[0].attn.qkv.weight)
    assert not torch.equal(alone.proj.weight, patch_embed("tiny", seed=4).proj.weight)
    assert not torch.equal(inside.blocks[0].attn.qkv.weight, inside.blocks[1].attn.qkv.weight)


def test_the_same_result_twice_and_in_double_precision():
    pixels, grid = patch_inputs((1, 4, 4), seed=1)
    with torch.inference_mode():
        once = vision_tower("tiny", seed=5)(pixels, grid)
        twice = vision_tower("tiny", seed=5)(pixels, grid)
        double = vision_tower("tiny", seed=5, dtype=torch.float64)(pixels.double(), grid)
        other = vision_tower("tiny", seed=6)(pixels, grid)
    assert check_equivalence(once.pooler_output, twice.pooler_output)
    assert check_equivalence(once.pooler_output, double.pooler_output.float(), rtol=1e-3, atol=1e-4)
    assert not check_equivalence(once.pooler_output, other.pooler_output, rtol=1e-3, atol=1e-4)


def test_a_smaller_depth_drops_deepstack_layers():
    assert vision_config("8b", depth=9).deepstack_visual_indexes == [8]
    assert vision_config("8b", depth=2).deepstack_visual_indexes == []
    assert len(vision_tower("tiny", depth=1).blocks) == 1


def test_attention_can_be_chosen():
    tower = vision_tower("tiny", attn_implementation="eager")
    assert tower.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: vision_config("7b"), r"size='7b'; expected one of tiny, small, 4b, 8b; nearest: '8b'"),
        (lambda: vision_tower("Tiny"), r"size='Tiny'.*nearest: 'tiny'"),
        (lambda: patch_embed("smal"), r"size='smal'.*nearest: 'small'"),
        (lambda: vision_config("tiny", hiden_size=8), r"'hiden_size' is no field.*nearest: 'hidden_size'"),
        (lambda: patch_embed("tiny", dtype=torch.int8), r"dtype=torch.int8; expected a floating point"),
        (lambda: patch_inputs(), r"no grid given"),
        (lambda: patch_inputs((1, 3, 4)), r"grid=\(1, 3, 4\).*multiples of 2"),
        (lambda: patch_inputs((4, 4)), r"grid=\(4, 4\)"),
        (lambda: grid_of(6271, frames=4), r"patches=6271 is no positive multiple of 16.*nearest: 6272"),
        (lambda: grid_of(0), r"nearest: 4"),
    ],
)
def test_errors_are_one_line_and_name_the_nearest(call, said):
    with pytest.raises(ValueError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_grids():
    assert grid_of(784) == (1, 28, 28)
    assert grid_of(6272, frames=4) == (4, 28, 56)
    assert grid_of(4) == (1, 2, 2)


def test_inputs_are_drawn_on_the_cpu_from_the_seed():
    a, _ = patch_inputs((1, 2, 2), seed=1)
    b, _ = patch_inputs((1, 2, 2), seed=1, dtype=torch.bfloat16)
    c, _ = patch_inputs((1, 2, 2), seed=2)
    assert torch.equal(a.bfloat16(), b)
    assert not torch.equal(a, c)
