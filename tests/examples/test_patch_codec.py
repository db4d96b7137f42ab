"""The patch codec loses nothing, keeps energy, and treats time as Wan's VAE does."""

import pytest
import torch
from patch_codec import PatchCodec


@pytest.mark.parametrize("frames", [1, 5, 17])
@pytest.mark.parametrize("spatial_factor", [2, 4])
def test_decoding_undoes_encoding(frames, spatial_factor):
    codec = PatchCodec(spatial_factor)
    pixels = torch.rand(2, 3, frames, 16, 24, dtype=torch.float64) * 2 - 1
    latents = codec.encode(pixels)
    assert latents.shape == (2, codec.channels, (frames - 1) // 4 + 1, 16 // spatial_factor, 24 // spatial_factor)
    assert (codec.decode(latents) - pixels).abs().max() < 1e-14
    assert (codec.decode(codec.encode(pixels.float())) - pixels).abs().max() < 1e-6


def test_the_transform_is_orthonormal_up_to_the_scale():
    pixels = torch.randn(1, 3, 9, 8, 8, dtype=torch.float64)
    energy = pixels[:, :, 1:].square().sum() + 4 * pixels[:, :, 0].square().sum()  # the first frame fills its group
    torch.testing.assert_close(PatchCodec(scale=3.0).encode(pixels).square().sum(), 9 * energy)


def test_a_latent_frame_sees_no_later_frame():
    codec = PatchCodec()
    pixels = torch.randn(1, 3, 9, 8, 8)
    changed = pixels.clone()
    changed[:, :, 5:] += 1
    before, after = codec.encode(pixels), codec.encode(changed)
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not torch.equal(before[:, :, 2], after[:, :, 2])


def test_a_still_scene_has_the_same_latents_throughout():
    still = torch.randn(1, 3, 1, 8, 8)
    latents = PatchCodec().encode(still.expand(-1, -1, 9, -1, -1))
    torch.testing.assert_close(latents, PatchCodec().encode(still).expand(-1, -1, 3, -1, -1))


@pytest.mark.parametrize("shape", [(4, 8, 8), (5, 7, 8), (5, 8, 9)])
def test_clips_that_do_not_fit_the_patches_are_refused(shape):
    with pytest.raises(ValueError, match="patches"):
        PatchCodec().encode(torch.zeros(1, 3, *shape))
