"""Files of every format: what is written can be read back, and a failure leaves nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy
import pytest
from PIL import Image
from sample_media import RECIPE, make_media

from diffusion_runtime.errors import ConfigError, OutputError
from diffusion_runtime.media import FORMATS, RECIPE_SCHEMA, read_media_file, read_recipe
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.outputs import Outputs


def decoded(path: Path) -> numpy.ndarray:
    """The frames of a file, by the libraries that anyone would read it with."""
    if path.suffix == ".npy":
        return numpy.load(path)
    if path.suffix == ".mp4":
        known = read_media_file(path)
        command = [
            imageio_ffmpeg.get_ffmpeg_exe(),
            "-v",
            "error",
            "-i",
            str(path),
            "-f",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
        ]
        pixels = subprocess.run([*command, "-"], capture_output=True, check=True).stdout
        return numpy.frombuffer(pixels, numpy.uint8).reshape(-1, known.height, known.width, 3)
    with Image.open(path) as image:
        frames = []
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            frames.append(numpy.asarray(image.convert("RGB")))
        return numpy.stack(frames)


def mean_error(path: Path, frames: numpy.ndarray) -> float:
    shown = decoded(path)
    assert shown.shape == frames.shape
    return float(numpy.abs(shown.astype(int) - frames.astype(int)).mean())


@pytest.mark.parametrize(("file_format", "tolerance"), [("mp4", 2.5), ("gif", 6.0), ("webp", 3.0), ("npy", 0.0)])
def test_a_video_survives_its_file(tmp_path: Path, file_format: str, tolerance: float) -> None:
    media = make_media()
    path = media.save(tmp_path / f"video.{file_format}")
    assert mean_error(path, media.frames) <= tolerance
    known = read_media_file(path)
    assert (known.num_frames, known.height, known.width, known.fps) == (9, 48, 64, 8.0)
    assert known.recipe == {"schema": RECIPE_SCHEMA, **RECIPE}


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_image_survives_its_file(tmp_path: Path, file_format: str) -> None:
    media = make_media(num_frames=1)
    path = media.save(tmp_path / f"image.{file_format}")
    assert mean_error(path, media.frames) <= (0.0 if file_format in ("png", "npy") else 6.0)
    assert read_recipe(path) == {"schema": RECIPE_SCHEMA, **RECIPE}


@pytest.mark.parametrize("file_format", [name for name in FORMATS if name != "npy"])
def test_the_recipe_is_inside_the_file(tmp_path: Path, file_format: str) -> None:
    path = make_media(num_frames=1 if file_format == "png" else 5).save(tmp_path / f"x.{file_format}")
    path.with_suffix(".json").unlink()
    assert read_recipe(path)["request"] == RECIPE["request"]


def test_other_programs_find_the_comment_of_an_mp4(tmp_path: Path) -> None:
    path = make_media().save(tmp_path / "x.mp4")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "ffmetadata", "-"]
    told = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    assert "comment=" in told
    assert RECIPE_SCHEMA in told


def test_the_sidecar_has_recipe_report_and_timings(tmp_path: Path) -> None:
    path = make_media().save(tmp_path / "x.npy")
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert sidecar["recipe"]["request"] == RECIPE["request"]
    assert sidecar["attention_report"] == {"num_calls": 3, "rows": []}
    assert sidecar["timings"]["denoise"] == 1.5
    assert sidecar["timings"]["write"] > 0
    assert sidecar["file"] == {"format": "npy", "num_frames": 9, "height": 48, "width": 64, "fps": 8}
    assert read_recipe(path.with_suffix(".json")) == read_recipe(path)


def test_odd_sizes_keep_every_pixel_in_an_mp4(tmp_path: Path) -> None:
    media = make_media(height=47, width=63)
    path = media.save(tmp_path / "odd.mp4")
    shown = decoded(path)
    assert shown.shape == (9, 48, 64, 3)
    assert numpy.abs(shown[:, :47, :63].astype(int) - media.frames.astype(int)).mean() < 2.5


def test_a_gif_of_more_frames_than_players_show_is_refused(tmp_path: Path) -> None:
    """Before the run, where the request says how many."""
    make_media(num_frames=3, fps=50).save(tmp_path / "x.gif")
    make_media(num_frames=1, fps=60).save(tmp_path / "still.gif")
    request = GenerationRequest(prompt="a", num_frames=9, fps=60)
    for refused in (
        lambda: make_media(num_frames=3, fps=60).save(tmp_path / "y.gif"),
        lambda: make_media(num_frames=3, fps=60).to_bytes("gif"),
        lambda: Outputs.parse(str(tmp_path / "y.gif"), None).format_for(request),
    ):
        with pytest.raises(ConfigError, match=r"at most 50 frames per second, got 60; use webp or mp4, or --fps 50"):
            refused()
    assert not (tmp_path / "y.gif").exists()


@pytest.mark.parametrize("fps", [7, 12, 30])
def test_a_gif_is_as_long_as_it_should_be(tmp_path: Path, fps: int) -> None:
    path = make_media(num_frames=13, fps=fps).save(tmp_path / "x.gif")
    with Image.open(path) as image:
        milliseconds = 0.0
        for index in range(13):
            image.seek(index)
            milliseconds += image.info["duration"]
    assert abs(milliseconds - 13_000 / fps) <= 5


def test_a_video_is_not_squeezed_into_a_png(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"9 frames; use one of mp4, gif, webp, npy"):
        make_media().save(tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "said"), [("x.mp3", "'mp4'"), ("x", "no extension"), ("x.jpg", "'.jpg'")])
def test_an_unknown_extension_says_which_there_are(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_media().save(tmp_path / name)


@pytest.mark.parametrize(
    "changes",
    [{"frames": numpy.zeros((2, 8, 8, 3), numpy.float32)}, {"frames": numpy.zeros((8, 8, 3), numpy.uint8)}, {"fps": 0}],
)
def test_what_is_not_a_video_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(OutputError, match="expected"):
        make_media(**changes)


def test_save_overwrites_only_when_it_may(tmp_path: Path) -> None:
    first = make_media().save(tmp_path / "x.npy")
    replaced = make_media(num_frames=5).save(tmp_path / "x.npy")
    assert replaced == first
    assert len(decoded(first)) == 5
    second = make_media(num_frames=1).save(tmp_path / "x.npy", overwrite=False)
    assert second.name == "x-2.npy"
    assert len(decoded(first)) == 5
    assert read_media_file(second).num_frames == 1


def test_a_taken_sidecar_takes_the_name(tmp_path: Path) -> None:
    make_media().save(tmp_path / "x.npy")
    path = make_media().save(tmp_path / "x.gif", overwrite=False)
    assert path.name == "x-2.gif"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x-2.gif", "x-2.json", "x.json", "x.npy"]


def _save_many(folder: Path, seed: int) -> None:
    for index in range(12):
        media = make_media(num_frames=1, recipe={"request": {"prompt": "p", "seed": 100 * seed + index}})
        media.save(folder / "same.png", overwrite=False)


def test_two_processes_never_get_the_same_name(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_save_many, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    seeds = {read_recipe(path)["request"]["seed"] for path in tmp_path.glob("*.png")}
    assert seeds == {100 * process + index for process in range(3) for index in range(12)}
    for path in tmp_path.glob("*.png"):
        sidecar = json.loads(path.with_suffix(".json").read_text())
        assert sidecar["recipe"]["request"]["seed"] == read_recipe(path)["request"]["seed"]


def test_results_get_the_rights_the_umask_gives(tmp_path: Path) -> None:
    path = make_media(num_frames=1).save(tmp_path / "x.png")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow past 2 kB, which is what a full disk looks like to a writer.

    Held around the call alone: the test runner may itself be writing into a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, file_format: str) -> None:
    noise = numpy.random.default_rng(0).integers(0, 256, (1 if file_format == "png" else 4, 64, 64, 3), numpy.uint8)
    with full_disk(), pytest.raises(OutputError, match=r"cannot write .*nothing was left behind"):
        make_media(frames=noise).save(tmp_path / f"x.{file_format}")
    assert list(tmp_path.iterdir()) == []


def test_a_really_full_file_system_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small file system here; the test above limits the file size instead")
    try:
        noise = numpy.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), numpy.uint8)
        for file_format in ("mp4", "gif", "npy"):
            with pytest.raises(OutputError, match=r"(?i)no space left"):
                make_media(frames=noise).save(small / f"x.{file_format}")
            assert list(small.iterdir()) == []
        assert make_media(num_frames=1, height=8, width=8).save(small / "x.png").is_file()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_encoder_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    with pytest.raises(OutputError, match="cannot write"):
        make_media().save(tmp_path / "x.mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        make_media().save(tmp_path / "file" / "x.npy")


def test_a_recipe_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="plain JSON"):
        make_media(recipe={"request": {"guidance_scale": float("nan")}}).save(tmp_path / "x.npy")
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_too_long_for_a_comment_stays_in_the_sidecar(tmp_path: Path) -> None:
    path = make_media(recipe={"request": {"prompt": "word " * 30_000}}).save(tmp_path / "x.mp4")
    assert read_recipe(path)["request"]["prompt"] == "word " * 30_000
    path.with_suffix(".json").unlink()
    with pytest.raises(OutputError, match="no recipe"):
        read_recipe(path)
