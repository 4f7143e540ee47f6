"""Latents of models that make single images."""

from __future__ import annotations

import pytest

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.errors import RequestError

GEOMETRY = ImageGeometry(16, 8, 1, (1, 2, 2))


def test_one_frame_is_what_there_is() -> None:
    assert GEOMETRY.latent_shape(1024, 768, 1) == (16, 1, 128, 96)
    assert GEOMETRY.num_tokens(1024, 768, 1) == 64 * 48


@pytest.mark.parametrize(
    ("sizes", "told"),
    [((1024, 768, 2), "num_frames: this model makes images, expected 1, got 2"), ((1024, 770, 1), "width: expected a")],
)
def test_other_sizes_are_refused(sizes: tuple[int, int, int], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        GEOMETRY.check(*sizes)
