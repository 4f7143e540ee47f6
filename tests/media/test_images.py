"""Images that a generation starts from."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from PIL import Image

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media.images import check_image, read_image


def write(path: Path, width: int, height: int, mode: str = "RGB") -> str:
    pixels = numpy.linspace(0, 255, width * height * 3).reshape(height, width, 3).astype(numpy.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return str(path)


@pytest.mark.parametrize(("name", "mode"), [("a.png", "RGBA"), ("a.jpg", "RGB"), ("a.webp", "RGB"), ("b.png", "L")])
def test_an_image_is_read_in_the_size_of_the_clip(tmp_path: Path, name: str, mode: str) -> None:
    path = write(tmp_path / name, 96, 64, mode)
    check_image(path, 32, 48)
    pixels = read_image(path, 32, 48)
    assert pixels.shape == (32, 48, 3)
    assert pixels.dtype == numpy.uint8
    # Dark above, bright below, as it was written.
    assert pixels[0].mean() < 30 < 220 < pixels[-1].mean()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 54), (32, 42)])
def test_sides_of_another_ratio_are_refused(tmp_path: Path, height: int, width: int) -> None:
    path = write(tmp_path / "a.png", 96, 64)
    with pytest.raises(RequestError, match=rf"is 96 x 64 \(width x height\), the clip {width} x {height}"):
        check_image(path, height, width)


def test_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.png"
    text.write_text("no picture")
    with pytest.raises(RequestError, match="not a readable PNG, JPEG, WEBP image"):
        check_image(str(text), 32, 32)
    with pytest.raises(RequestError, match="no such file"):
        check_image(str(tmp_path / "missing.png"), 32, 32)
    with pytest.raises(RequestError, match="this is a folder"):
        check_image(str(tmp_path), 32, 32)


def test_a_picture_too_large_to_unpack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.png", 96, 64)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with pytest.raises(RequestError, match="exceeds limit"):
        check_image(path, 64, 96)
