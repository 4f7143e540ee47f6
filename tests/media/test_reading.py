"""Files from strangers: broken, lying and hostile ones end in one clear error, never in a guess."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy
import pytest
from PIL import Image, PngImagePlugin
from sample_media import make_media
from tables import table

from diffusion_runtime.errors import OutputError, UsageError
from diffusion_runtime.media import RECIPE_SCHEMA, SIDECAR_SCHEMA, read_media_file, read_recipe
from diffusion_runtime.media.sidecar import RECIPE_KEY


def png_with_comment(path: Path, comment: str) -> Path:
    texts = PngImagePlugin.PngInfo()
    texts.add_text(RECIPE_KEY, comment)
    Image.new("RGB", (8, 8)).save(path, pnginfo=texts)
    return path


@table(
    "comment",
    [
        "not json",
        "[1, 2]",
        "{}",
        '{"schema": "diffusion_runtime.recipe/2"}',
        f'{{"schema": "{RECIPE_SCHEMA}", "x": NaN}}',
        f'{{"schema": "{RECIPE_SCHEMA}", "x": {"[" * 500 + "]" * 500}}}',
        f'{{"schema": "{RECIPE_SCHEMA}", "x": {"[" * 90_000}',
        f'{{"schema": "{RECIPE_SCHEMA}", "x": "{"y" * 200_000}"}}',
        f'{{"schema": "{RECIPE_SCHEMA}", "x": {"9" * 90_000}}}',
    ],
    ids=["text", "list", "empty", "newer", "nan", "deep", "unclosed", "long", "number"],
)
def test_a_comment_that_is_not_a_recipe_counts_as_none(tmp_path: Path, comment: str) -> None:
    path = png_with_comment(tmp_path / "x.png", comment)
    assert read_media_file(path).recipe is None
    with pytest.raises(OutputError, match="carries no recipe"):
        read_recipe(path)


def test_a_stranger_s_image_has_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "photo.webp"
    Image.new("RGB", (8, 8)).save(path)
    with pytest.raises(OutputError, match="carries no recipe"):
        read_recipe(path)


def test_a_sidecar_of_another_file_is_not_believed(tmp_path: Path) -> None:
    make_media().save(tmp_path / "x.gif")
    numpy.save(tmp_path / "x.npy", numpy.zeros((1, 8, 8, 3), numpy.uint8))
    assert read_media_file(tmp_path / "x.npy").recipe is None


def test_a_sidecar_without_a_recipe_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"schema": SIDECAR_SCHEMA, "recipe": {"request": {}}}))
    with pytest.raises(OutputError, match="carries no recipe"):
        read_recipe(path)


@table("name", ["x.mp4", "x.gif", "x.webp", "x.png", "x.npy"])
@table("keep", [0.0, 0.3], ids=["empty", "cut"])
def test_a_cut_off_file_is_an_error(tmp_path: Path, name: str, keep: float) -> None:
    path = make_media(num_frames=1 if name == "x.png" else 5).save(tmp_path / name)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    path.with_suffix(".json").unlink()
    with pytest.raises(OutputError, match=name.replace(".", r"\.")):
        read_media_file(path)


def test_an_mp4_cut_after_its_index_still_says_what_it_was(tmp_path: Path) -> None:
    path = make_media().save(tmp_path / "x.mp4")
    content = bytearray(path.read_bytes())
    position = content.index(b"moov") - 4
    content[position : position + 4] = struct.pack(">I", 2**31)
    path.write_bytes(content)
    with pytest.raises(OutputError, match="has a size of 2147483648 bytes"):
        read_media_file(path)


def test_every_single_damaged_byte_of_an_mp4_is_read_or_refused(tmp_path: Path) -> None:
    path = make_media(num_frames=2, height=16, width=16).save(tmp_path / "x.mp4")
    content = path.read_bytes()
    outcomes = set()
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            outcomes.add(read_media_file(path).format)
        except OutputError:
            outcomes.add("refused")
    assert outcomes == {"mp4", "refused"}


def test_a_pickle_in_an_npy_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    numpy.save(path, numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(OutputError, match="not a readable npy"):
        read_media_file(path)


def test_an_npy_that_promises_terabytes_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    header = {"descr": "|u1", "fortran_order": False, "shape": (10**6, 1000, 1000, 3)}
    with path.open("wb") as file:
        numpy.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(OutputError, match=r"x\.npy"):
        read_media_file(path)


def test_an_image_that_promises_gigapixels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.new("RGB", (8, 8)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", 20_000, 9_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    path.write_bytes(content)
    with pytest.raises(OutputError, match="not a readable png"):
        read_media_file(path)


@table(("name", "said"), [("missing.mp4", "no such file"), ("folder.mp4", "a folder"), ("x.txt", "ends in")])
def test_what_is_not_a_media_file_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(OutputError if name == "x.txt" else UsageError, match=said):
        read_media_file(tmp_path / name)


def test_a_missing_sidecar_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_recipe(tmp_path / "x.json")
