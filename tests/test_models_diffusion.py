"""utils.models.diffusion: real classes, offline, the same weights for the same seed, clear errors."""

import pytest
import torch

from utils.models.diffusion import latents, unet, unet_inputs, vae


def test_the_decoder_doubles_or_enlarges_by_eight():
    with torch.no_grad():
        assert vae("tiny").decode(latents("vae", 4)).sample.shape == (1, 3, 8, 8)
        assert vae("small").decode(latents("vae", 2)).sample.shape == (1, 3, 16, 16)


def test_the_unet_returns_the_shape_of_its_latents():
    with torch.no_grad():
        sample, step, text = unet_inputs("tiny", 8)
        assert unet("tiny")(sample, step, text).sample.shape == sample.shape


def test_a_seed_decides_the_weights():
    first, same, other = (next(vae("tiny", seed=seed).parameters()) for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_the_full_autoencoder_has_the_published_size():
    with torch.device("meta"):
        parameters = sum(p.numel() for p in vae("full", device="meta").parameters())
    assert parameters == 83_819_683


@pytest.mark.parametrize("build", [vae, unet])
def test_an_unknown_size_names_the_nearest(build):
    with pytest.raises(ValueError, match="nearest: 'tiny'"):
        build("tniy")
