"""Images after one H.264 frame."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from PIL import Image

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import check_image
from diffusion_runtime.media.recompression import MAX_SIDE, recompress


def picture(height: int, width: int) -> numpy.ndarray:
    rows, columns = numpy.mgrid[0:height, 0:width]
    waves = [127 + 120 * numpy.sin(columns / 9), 127 + 120 * numpy.cos(rows / 13), (rows + columns) % 256]
    noise = numpy.random.default_rng(0).normal(0, 12, (height, width, 3))
    return (numpy.stack(waves, axis=-1) + noise).clip(0, 255).astype(numpy.uint8)


def test_a_larger_factor_loses_more_and_odd_sides_lose_their_edge() -> None:
    image = picture(101, 151)
    assert recompress(image, 0) is image
    lost = []
    for crf in (1, 33, 51):
        found = recompress(image, crf)
        assert found.shape == (100, 150, 3)
        lost.append(numpy.abs(found.astype(int) - image[:100, :150]).mean())
    assert 0 < lost[0] < lost[1] - 1 < lost[2] - 2
    assert lost[2] < 20


def test_the_pixels_are_those_of_diffusers() -> None:
    """Where PyAV is installed; the number of its slices follows the cores, by which rounding differs."""
    pytest.importorskip("av")
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf

    image = picture(101, 151)
    found, expected = recompress(image, 33).astype(int), apply_image_conditioning_crf(image, 33).astype(int)
    own = numpy.abs(expected - image[:100, :150]).mean()
    assert numpy.abs(found - expected).mean() <= 0.25 * own


def test_sides_that_h264_has_not(tmp_path: Path) -> None:
    path = str(tmp_path / "wide.png")
    Image.new("RGB", (MAX_SIDE + 2, 400)).save(path)
    check_image(path, 40, 1638)
    with pytest.raises(RequestError, match=r"image_path: .* is 16386 x 400 .* expected sides .* --image-crf 0"):
        check_image(path, 40, 1638, crf=33)
