"""Wan-Animate 2 folders and diffusers' pipeline of them, made once a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image
from tiny_wan_animate_2 import write_tiny_wan_animate_2

FolderOf = Callable[..., Path]


@pytest.fixture(scope="package")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder that write_tiny_wan_animate_2 makes of these arguments. Read only: tests share it."""
    folders: dict[str, Path] = {}

    def folder(**how: Any) -> Path:
        name = str(sorted(how.items()))
        if name not in folders:
            folders[name] = write_tiny_wan_animate_2(tmp_path_factory.mktemp("animate") / "model", **how)
        return folders[name]

    return folder


@pytest.fixture(scope="package")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A driving video of 21 frames, wider than the clips, and images, by name."""
    folder = tmp_path_factory.mktemp("inputs")
    frames, rows, columns = numpy.mgrid[0:21, 0:40, 0:70]
    video = numpy.stack([5 * rows + 9 * frames, 3 * columns + 7 * frames, 255 - rows * frames // 4], axis=-1)
    numpy.save(folder / "video.npy", video.astype(numpy.uint8))
    pixels = numpy.random.default_rng(0).integers(0, 256, (9, 6, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).resize((64, 96)).save(folder / "fitting.png")
    Image.fromarray(pixels).resize((66, 98)).save(folder / "near.png")
    Image.fromarray(pixels).resize((90, 50)).save(folder / "wide.png")
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.fixture(scope="package", autouse=True)
def eager_masks() -> Iterator[None]:
    """diffusers' mask of the driving video's frames without the compiler, which takes a minute here."""
    from diffusers.models.transformers import transformer_wan_animate_2 as theirs

    made = theirs.create_block_mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "create_block_mask", lambda *args, **how: made(*args, **{**how, "_compile": False}))
        yield
