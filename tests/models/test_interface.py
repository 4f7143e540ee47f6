"""The geometry between pixels, latents and tokens."""

from __future__ import annotations

import pytest

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.errors import RequestError

WAN = LatentGeometry(num_channels=16, spatial_factor=8, temporal_factor=4, patch=(1, 2, 2))
PAIRED_FRAMES = LatentGeometry(num_channels=4, spatial_factor=8, temporal_factor=4, patch=(2, 1, 1))
NO_TIME_COMPRESSION = LatentGeometry(num_channels=4, spatial_factor=8, temporal_factor=1, patch=(1, 1, 1))


def test_latent_shape_and_grid() -> None:
    assert WAN.latent_shape(480, 832, 81) == (16, 21, 60, 104)
    assert WAN.latent_shape(256, 256, 1) == (16, 1, 32, 32)
    assert WAN.grid((16, 21, 60, 104)) == (21, 30, 52)
    assert WAN.grid((2, 16, 1, 32, 32)) == (1, 16, 16)
    assert PAIRED_FRAMES.latent_shape(8, 8, 13) == (4, 4, 1, 1)
    assert NO_TIME_COMPRESSION.latent_shape(8, 8, 7) == (4, 7, 1, 1)


@pytest.mark.parametrize(
    ("geometry", "size", "said"),
    [
        (WAN, (100, 256, 29), "height: expected a multiple of 16, got 100; use 96 or 112"),
        (WAN, (256, 8, 29), "width: expected a multiple of 16, got 8; use 16"),
        (WAN, (256, 256, 30), "num_frames: expected a multiple of 4 plus 1, got 30; use 29 or 33"),
        (WAN, (256, 256, 3), "num_frames: expected a multiple of 4 plus 1, got 3; use 1 or 5"),
        (WAN, (0, 256, 1), "height: expected a multiple of 16, got 0; use 16"),
        (PAIRED_FRAMES, (8, 8, 9), "num_frames: expected a multiple of 8 plus 5, got 9; use 5 or 13"),
    ],
)
def test_a_size_that_does_not_divide_names_the_ones_that_do(
    geometry: LatentGeometry, size: tuple[int, int, int], said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        geometry.check(*size)
    assert str(caught.value) == said
    for number in [int(word) for word in said.rpartition("use ")[2].split(" or ")]:
        name = said.partition(":")[0]
        fixed = dict(zip(("height", "width", "num_frames"), size, strict=True)) | {name: number}
        geometry.check(**fixed)


def test_every_wrong_size_is_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"height: .*; width: .*; num_frames: "):
        WAN.latent_shape(100, 100, 100)


def test_latents_that_are_no_whole_patches_have_no_grid() -> None:
    with pytest.raises(RequestError, match=r"1 x 3 x 4 .* 1 x 2 x 2 patches"):
        WAN.grid((16, 1, 3, 4))
