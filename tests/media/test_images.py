"""Images that a generation starts from."""

from __future__ import annotations

import io
from pathlib import Path

import numpy
import pytest
from PIL import Image, ImageCms
from tables import table

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media import images
from diffusion_runtime.media.images import check_image, open_picture, picture_remarks, read_image


def write(path: Path, width: int, height: int, mode: str = "RGB") -> str:
    pixels = numpy.linspace(0, 255, width * height * 3).reshape(height, width, 3).astype(numpy.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return str(path)


@table(("name", "mode"), [("a.png", "RGBA"), ("a.jpg", "RGB"), ("a.webp", "RGB"), ("b.png", "L")])
def test_an_image_is_read_in_the_size_of_the_clip(tmp_path: Path, name: str, mode: str) -> None:
    path = write(tmp_path / name, 96, 64, mode)
    check_image(path, 32, 48)
    pixels = read_image(path, 32, 48)
    assert pixels.shape == (32, 48, 3)
    assert pixels.dtype == numpy.uint8
    # Dark above, bright below, as it was written.
    assert pixels[0].mean() < 30 < 220 < pixels[-1].mean()


@table(("height", "width"), [(32, 32), (32, 54), (32, 42)])
def test_sides_of_another_ratio_are_refused(tmp_path: Path, height: int, width: int) -> None:
    path = write(tmp_path / "a.png", 96, 64)
    with pytest.raises(RequestError, match=rf"is 96 x 64 \(width x height\), the clip {width} x {height}"):
        check_image(path, height, width)


def test_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.png"
    text.write_text("no picture")
    with pytest.raises(RequestError, match=r"not a readable PNG, JPEG, WEBP, GIF image: .*; save it, or a frame of it"):
        check_image(str(text), 32, 32)
    with pytest.raises(RequestError, match="no such file"):
        check_image(str(tmp_path / "missing.png"), 32, 32)
    with pytest.raises(RequestError, match="this is a folder"):
        check_image(str(tmp_path), 32, 32)


def test_a_picture_smaller_than_a_latent_is_told_of(tmp_path: Path) -> None:
    for sides, remarks in (((1, 1), ("it has 1 x 1 pixels (width x height), and is scaled up",)), ((16, 16), ())):
        path = write(tmp_path / "a.png", *sides)
        assert picture_remarks(path, "image_path") == tuple(f"image_path: {path}: {remark}" for remark in remarks)


def test_a_picture_too_large_to_unpack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.png", 96, 64)
    monkeypatch.setattr(images, "MAX_PIXELS", 4000)
    with pytest.raises(RequestError, match="96 x 64 pixels, more than 4000"):
        check_image(path, 64, 96)


def three_colours() -> Image.Image:
    """48 x 32, red above on the left, blue below on the right, green elsewhere."""
    picture = Image.new("RGB", (48, 32), "green")
    picture.paste("red", (0, 0, 24, 16))
    picture.paste("blue", (24, 16, 48, 32))
    return picture


@table("suffix", ["jpg", "png", "webp"])
@table("orientation", range(1, 9))
def test_a_photo_is_turned_as_its_exif_says(tmp_path: Path, orientation: int, suffix: str) -> None:
    """A portrait from a phone started a landscape clip lying on its side."""
    # How a camera stores it: the inverse of what a viewer does for each orientation.
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = three_colours() if orientation == 1 else three_colours().transpose(turns[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"photo.{suffix}"
    stored.save(path, exif=exif, **({"quality": 95} if suffix == "jpg" else {"lossless": True}))
    check_image(str(path), 32, 48)
    turned = ", turned upright by its EXIF orientation" if orientation >= 5 else ""
    with pytest.raises(RequestError, match=rf"is 48 x 32 \(width x height{turned}\)"):
        check_image(str(path), 48, 32)
    pixels = read_image(str(path), 32, 48)
    assert pixels[4, 4].argmax() == 0
    assert pixels[28, 44].argmax() == 2
    assert pixels[28, 4].argmax() == pixels[4, 44].argmax() == 1
    assert numpy.array_equal(pixels, numpy.asarray(open_picture(str(path))))


def test_damaged_exif_data_is_said(tmp_path: Path) -> None:
    three_colours().save(tmp_path / "a.jpg", exif=b"Exif\0\0MM\0*" + b"\xff" * 4)
    (remark,) = picture_remarks(str(tmp_path / "a.jpg"), "image_path")
    assert "a.jpg: Pillow warns: Corrupt EXIF data" in remark


def test_grey_of_sixteen_bits_keeps_its_shades(tmp_path: Path) -> None:
    shades = numpy.linspace(0, 65535, 48 * 32).reshape(32, 48).astype(numpy.uint16)
    Image.fromarray(shades).save(tmp_path / "deep.png")
    pixels = read_image(str(tmp_path / "deep.png"), 32, 48)
    assert numpy.array_equal(pixels[..., 0], (shades / 257).round().astype(numpy.uint8))
    assert numpy.array_equal(pixels[..., 0], pixels[..., 2])


@table("mode", ["1", "L", "P", "LA", "RGBA", "CMYK"])
def test_other_kinds_of_pixels_are_converted(tmp_path: Path, mode: str) -> None:
    picture = three_colours().convert(mode)
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    picture.save(path)
    pixels = read_image(str(path), 32, 48).astype(int)
    expected = numpy.asarray(picture.convert("RGB")).astype(int)
    assert abs(pixels - expected).max() <= (40 if mode == "CMYK" else 0)


def test_a_picture_with_transparent_parts_is_refused(tmp_path: Path) -> None:
    """Whatever colour is stored behind them, mostly black, was taken for the picture's."""
    hole = Image.new("L", (48, 32), 255)
    hole.paste(100, (10, 10, 20, 20))
    with_alpha = three_colours()
    with_alpha.putalpha(hole)
    with_alpha.save(tmp_path / "rgba.png")
    with_alpha.save(tmp_path / "rgba.webp", lossless=True)
    with_alpha.convert("LA").save(tmp_path / "la.png")
    palette = three_colours().convert("P")
    palette.save(tmp_path / "palette.png", transparency=palette.getpixel((0, 0)))
    three_colours().save(tmp_path / "key.png", transparency=(255, 0, 0))
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(RequestError, match=rf"{path.name} has transparent parts; put it on a background"):
            check_image(str(path), 32, 48)


def test_an_animation_gives_its_first_frame_and_says_so(tmp_path: Path) -> None:
    later = Image.new("RGB", (48, 32), "yellow")
    for name in ("a.gif", "a.png", "a.webp"):
        path = tmp_path / name
        three_colours().save(path, save_all=True, append_images=[later], **({"lossless": True} if "w" in name else {}))
        assert numpy.array_equal(read_image(str(path), 32, 48), numpy.asarray(three_colours()))
        assert picture_remarks(str(path), "image_path") == (
            f"image_path: {path}: it is animated: its first frame is used",
        )
    three_colours().save(tmp_path / "still.gif")
    assert picture_remarks(str(tmp_path / "still.gif"), "image_path") == ()


def test_colours_of_another_profile_become_srgb_ones(tmp_path: Path) -> None:
    """One whose red is sRGB's green, and the other way round. A picture that says it is sRGB stays as it is, and so
    does one with a damaged profile, which is said."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"rXYZ", b"____").replace(b"gXYZ", b"rXYZ").replace(b"____", b"gXYZ")
    swapped = swapped.replace("sRGB".encode("utf-16-be"), "mine".encode("utf-16-be"))
    red, green, blue = three_colours().split()
    Image.merge("RGB", (green, red, blue)).save(tmp_path / "swapped.png", icc_profile=swapped)
    found = read_image(str(tmp_path / "swapped.png"), 32, 48).astype(int)
    assert numpy.abs(found - numpy.asarray(three_colours()).astype(int)).max() <= 3
    (remark,) = picture_remarks(str(tmp_path / "swapped.png"), "last_image_path")
    assert remark.startswith("last_image_path: ")
    assert remark.endswith("swapped.png: its colours were converted from their own profile to sRGB")
    for name, given, said in (("own.png", srgb, 0), ("damaged.png", srgb[:60], 1)):
        three_colours().save(tmp_path / name, icc_profile=given)
        assert numpy.array_equal(read_image(str(tmp_path / name), 32, 48), numpy.asarray(three_colours()))
        assert len(picture_remarks(str(tmp_path / name), "image_path")) == said


def test_a_linear_profile_is_not_srgb_whatever_it_is_called(tmp_path: Path) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    start = srgb.index(b"para")
    one, zero = (1 << 16).to_bytes(4, "big"), bytes(4)
    # gamma, a, b, c and d of its curve.
    linear = srgb.replace(srgb[start : start + 32], srgb[start : start + 12] + one + one + zero + one + zero)
    assert "sRGB" in ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(linear)))
    Image.new("RGB", (48, 32), (128, 128, 128)).save(tmp_path / "linear.png", icc_profile=linear)
    assert abs(int(read_image(str(tmp_path / "linear.png"), 32, 48)[0, 0, 0]) - 188) <= 1
    assert len(picture_remarks(str(tmp_path / "linear.png"), "image_path")) == 1


def test_a_photo_that_is_cut_off_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "cut.jpg"
    three_colours().resize((480, 320)).save(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(RequestError, match="not a readable PNG, JPEG, WEBP, GIF image"):
        check_image(str(path), 32, 48)
