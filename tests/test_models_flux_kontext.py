"""utils.models.flux_kontext: the real classes, offline; a seed decides the weights; real weights by checkpoint."""

import pytest
import torch
from diffusers import FluxKontextPipeline
from torch import nn

from utils.models import flux_kontext
from utils.models.flux_kontext import (
    edit_inputs,
    editor,
    image_tokens,
    kontext,
    step_inputs,
    transformer,
    vae,
    weight_bytes,
)

SIDE = 16


def edit(pipe, *, side=SIDE, seed=0):
    with torch.no_grad():
        return editor(pipe, side, steps=1)(*edit_inputs(pipe, side, 4, seed=seed))


@pytest.fixture(scope="module")
def tiny():
    return kontext("tiny")


def test_it_edits_an_image_and_follows_what_it_is_given(tiny):
    first, other = edit(tiny), edit(tiny, seed=1)
    assert isinstance(tiny, FluxKontextPipeline)
    assert first.shape == (1, 3, SIDE, SIDE) and 0 <= first.min() < first.max() <= 1
    assert first.std() > 0.01  # a picture with contrast, so that a check can fail
    assert torch.equal(first, edit(tiny)) and not torch.allclose(first, other, atol=1e-2)


def test_a_seed_decides_the_weights(tiny):
    weights = [kontext("tiny", seed=seed).transformer.x_embedder.weight for seed in (0, 1)]
    assert torch.equal(weights[0], tiny.transformer.x_embedder.weight) and not torch.equal(*weights)
    assert weights[0].data_ptr() != tiny.transformer.x_embedder.weight.data_ptr()  # drawn anew, at fresh addresses


def test_a_step_takes_the_tokens_of_both_images(tiny):
    given = step_inputs(tiny.transformer, image_tokens(tiny, SIDE), 4)
    with torch.no_grad():
        assert tiny.transformer(**given).sample.shape == (1, 2 * 16, 64)
    assert given["img_ids"][16:, 0].tolist() == [1.0] * 16 and given["img_ids"][:16, 0].tolist() == [0.0] * 16
    pipes_own = tiny._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
    assert torch.equal(given["img_ids"][:16], pipes_own)


def test_the_full_parts_have_the_published_sizes_and_no_memory():
    parts = [transformer("full", device="meta", dtype=torch.bfloat16), vae("full", device="meta")]
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [11_901_408_320, 83_819_683]
    assert all(p.is_meta for part in parts for p in part.parameters())
    assert not [m for m in parts[0].modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]


def test_pipelines_of_shared_weights_do_not_change_each_other(tiny):
    first, second = flux_kontext._sharing(tiny), flux_kontext._sharing(tiny)
    names = dict(second.transformer.named_parameters())
    assert all(p.data_ptr() == names[name].data_ptr() for name, p in first.transformer.named_parameters())
    before = edit(second)
    first.transformer.fuse_qkv_projections()
    first.vae.to(memory_format=torch.channels_last)
    nn.Module.to(first.transformer, torch.bfloat16)
    assert second.transformer.dtype == torch.float32 and not hasattr(
        second.transformer.transformer_blocks[0].attn, "to_qkv"
    )
    assert torch.equal(edit(second), before) and torch.equal(edit(tiny), before)


def test_real_weights_come_from_a_local_folder(tiny, tmp_path):
    other = kontext("tiny", seed=3)
    other.save_pretrained(tmp_path / "weights")
    flux_kontext._loaded.cache_clear()
    loaded = kontext("tiny", checkpoint=str(tmp_path / "weights"))
    assert torch.equal(edit(loaded), edit(other)) and not torch.allclose(edit(loaded), edit(tiny))
    assert loaded.text_encoder is None
    flux_kontext._loaded.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """What the hub was asked for; it gives nothing, and a loader that is called is a failure."""
    names = []

    def refused(url, **_):
        names.append(url)
        raise OSError("offline\nand more than one line")

    monkeypatch.setattr(flux_kontext, "get_hf_file_metadata", refused)
    monkeypatch.setattr(flux_kontext, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(flux_kontext.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(FluxKontextPipeline, "from_pretrained", lambda *_, **__: pytest.fail("asked again and again"))
    return names


def refusal(checkpoint):
    with pytest.raises(ValueError) as caught:
        kontext("tiny", checkpoint=checkpoint)
    said = str(caught.value)
    assert checkpoint in said and "--local-dir" in said and "hf auth login" in said and "\n" not in said
    return said


@pytest.mark.parametrize(
    ("checkpoint", "questions"), [("no/such/folder", 0), ("nothing", 0), ("~/nothing/here", 0), ("owner/name", 1)]
)
def test_a_missing_checkpoint_names_both_ways_at_once(checkpoint, questions, asked):
    refusal(checkpoint)
    assert len(asked) == questions  # a name with one "/" may be on the hub; it is asked once, for a small file


def test_offline_the_hub_is_not_asked(asked, monkeypatch):
    monkeypatch.setattr(flux_kontext.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal("owner/name") and not asked


def test_a_copy_in_the_cache_does_without_the_hub(tiny, asked, monkeypatch):
    given = {}
    monkeypatch.setattr(flux_kontext, "try_to_load_from_cache", lambda *_: "/cache/model_index.json")
    monkeypatch.setattr(FluxKontextPipeline, "from_pretrained", lambda name, **how: given.update(how) or tiny)
    flux_kontext._loaded.cache_clear()
    assert torch.equal(edit(kontext("tiny", checkpoint="owner/name")), edit(tiny))
    assert given["local_files_only"] is True
    flux_kontext._loaded.cache_clear()


def test_a_folder_without_the_model_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(FluxKontextPipeline, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"no such folder with a model_index\.json"):
        kontext("tiny", checkpoint=str(tmp_path))


def test_wider_arithmetic_keeps_the_weights(tiny):
    """Layer by layer in float64 is the float64 model; a bfloat16 model gives its own answer without rounding."""
    wide = flux_kontext.computing_in(kontext("tiny"), torch.float64)
    assert torch.equal(edit(wide), edit(kontext("tiny", dtype=torch.float64)))
    half = kontext("tiny", dtype=torch.bfloat16)
    exact = flux_kontext._sharing(half)
    for part in (exact.transformer, exact.vae):
        nn.Module.to(part, torch.float64)
    rounded, expected = edit(half), edit(exact)
    found = edit(flux_kontext.computing_in(half, torch.float32))
    assert torch.allclose(found.double(), expected, atol=1e-5) and not torch.allclose(
        rounded.double(), expected, atol=1e-3
    )
    assert next(half.transformer.x_embedder.parameters()).dtype == torch.bfloat16


def test_half_the_type_is_half_the_bytes(tiny):
    assert weight_bytes(kontext("tiny", dtype=torch.bfloat16)) * 2 == weight_bytes(tiny) > 1_000_000
    assert edit(kontext("tiny", dtype=torch.bfloat16)).dtype == torch.float32


def test_an_unknown_size_names_the_nearest():
    for build in (kontext, transformer):
        with pytest.raises(ValueError, match="size='smal'; expected one of tiny, small, full; nearest: 'small'"):
            build("smal")


@pytest.mark.parametrize(("side", "nearest"), [(18, 16), (0, 4), (3, 4)])
def test_a_side_that_does_not_divide_names_the_nearest(tiny, side, nearest):
    with pytest.raises(ValueError, match=f"side={side}; expected a multiple of 4; nearest: {nearest}"):
        edit_inputs(tiny, side)
    with pytest.raises(ValueError, match=f"side={side}; expected a multiple of 4"):
        editor(tiny, side, steps=1)


def test_the_name_of_a_size_is_enough_to_count_tokens(tiny):
    assert image_tokens("tiny", 32) == image_tokens(tiny, 32) == 64 and image_tokens("full", 1024) == 4096
    with pytest.raises(ValueError, match="side=24; expected a multiple of 16; nearest: 32"):
        image_tokens("small", 24)
