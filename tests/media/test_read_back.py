"""What every writer promises of its file, read back from the file: colours, range, pixels, frames a second, sound."""

from __future__ import annotations

import re
import subprocess
import wave
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy
import pytest
from PIL import Image
from sample_media import RECIPE, make_media
from tables import table

from diffusion_runtime.media import FORMATS, Audio
from diffusion_runtime.media.formats import SOUND_FORMATS
from diffusion_runtime.media.growing_clip import GrowingClip

FPS, RATE = 12, 24000
NUM_FRAMES = 13
# Of ITU-T H.273, by the names of H.264's header: 1 is bt709, and a range flag of 0 the limited one.
BT709 = {"colour_primaries": 1, "transfer_characteristics": 1, "matrix_coefficients": 1, "video_full_range_flag": 0}


def sound() -> Audio:
    times = numpy.arange(RATE * NUM_FRAMES // FPS) / RATE
    return Audio(numpy.stack([numpy.sin(2764 * times), numpy.zeros(len(times))]).astype(numpy.float32), RATE)


def growing(folder: Path, **_: Any) -> Path:
    frames = make_media(NUM_FRAMES).frames
    with GrowingClip(folder / "growing.mp4", *frames.shape[1:3], fps=FPS, fragment_frames=4) as clip:
        clip.write(frames)
        clip.finish({"recipe": RECIPE})
    assert clip.path is not None
    return clip.path


def unfinished(folder: Path) -> Path:
    """Fragments alone, as a process that was ended leaves them."""
    frames = make_media(NUM_FRAMES).frames
    with GrowingClip(folder / "unfinished.mp4", *frames.shape[1:3], fps=FPS, fragment_frames=4) as clip:
        clip.write(frames)
    assert clip.path is not None
    return clip.path


def saved(folder: Path) -> Path:
    return make_media(NUM_FRAMES, fps=FPS).save(folder / "saved.mp4")


def saved_with_sound(folder: Path) -> Path:
    return make_media(NUM_FRAMES, fps=FPS, audio=sound()).save(folder / "sound.mp4")


def saved_image(folder: Path) -> Path:
    return make_media(1, fps=FPS).save(folder / "image.mp4")


def saved_of_odd_size(folder: Path) -> Path:
    return make_media(NUM_FRAMES, 47, 63, fps=FPS).save(folder / "odd.mp4")


def ffmpeg_says(*arguments: str) -> str:
    return subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), *arguments], capture_output=True, check=False
    ).stderr.decode()


@table("write", [saved, saved_with_sound, saved_image, saved_of_odd_size, growing, unfinished])
def test_an_mp4_says_its_colours_its_pixels_and_its_rates(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path)
    headers = ffmpeg_says("-i", str(path), "-c:v", "copy", "-bsf:v", "trace_headers", "-f", "null", "-")
    for name, value in BT709.items():
        assert {int(found) for found in re.findall(rf"\b{name}\b.* = (\d+)", headers)} == {value}, name
    told = ffmpeg_says("-i", str(path))
    (video,) = re.findall(r"Stream .* Video: .*", told)
    # Three equal tags are shown once, and the range as tv.
    assert "h264 (High)" in video
    assert re.search(r"yuv420p\(tv, bt709(, progressive)?\)", video)
    assert f" {FPS} fps" in video
    audio = re.findall(r"Stream .* Audio: .*", told)
    assert len(audio) == (write is saved_with_sound)
    assert all(f"aac (LC) (mp4a / 0x6134706D), {RATE} Hz, stereo" in line for line in audio)
    frames = ffmpeg_says("-i", str(path), "-map", "0:v", "-f", "null", "-")
    assert int(re.findall(r"frame= *(\d+)", frames)[-1]) == (1 if write is saved_image else NUM_FRAMES)


def test_shown_colours_are_those_of_the_frames_at_any_size(tmp_path: Path) -> None:
    """The range and the matrix that are written are those that the pixels were converted with: above 576 rows players
    without tags take bt709, below it bt601."""
    colours = ((255, 255, 255), (0, 0, 0), (200, 30, 60), (20, 180, 90))
    for height, width in ((64, 64), (720, 64)):
        frames = (
            numpy.zeros((len(colours), height, width, 3), numpy.uint8)
            + numpy.array(colours, numpy.uint8)[:, None, None]
        )
        path = make_media(frames=frames, fps=FPS).save(tmp_path / f"{height}.mp4")
        command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt"]
        raw = subprocess.run([*command, "rgb24", "-"], capture_output=True, check=True).stdout
        shown = numpy.frombuffer(raw, numpy.uint8).reshape(frames.shape)
        assert numpy.abs(shown.astype(int) - frames.astype(int)).max() <= 4


@table(("suffix", "is_video"), [("gif", True), ("webp", True), ("webp", False), ("png", False)])
def test_an_image_file_says_its_pixels_and_its_times(suffix: str, is_video: bool, tmp_path: Path) -> None:
    media = make_media(NUM_FRAMES if is_video else 1, fps=FPS)
    with Image.open(media.save(tmp_path / f"x.{suffix}")) as image:
        assert image.size == (64, 48)
        assert getattr(image, "n_frames", 1) == media.num_frames
        assert image.mode in (("P", "RGB") if suffix == "gif" else ("RGB",))
        # sRGB is what viewers take colours for without a profile.
        assert "icc_profile" not in image.info
        assert "gamma" not in image.info
        milliseconds = []
        for index in range(media.num_frames if is_video else 0):
            image.seek(index)
            image.load()
            milliseconds.append(image.info["duration"])
        if is_video:
            assert sum(milliseconds) == pytest.approx(1000 * NUM_FRAMES / FPS, abs=5)
            assert image.info["loop"] == 0


def test_an_array_says_its_shape_and_a_wav_its_rate(tmp_path: Path) -> None:
    media = make_media(NUM_FRAMES, fps=FPS, audio=sound())
    array = numpy.load(media.save(tmp_path / "x.npy"))
    assert (array.dtype, array.shape, array.flags.c_contiguous) == (numpy.uint8, (NUM_FRAMES, 48, 64, 3), True)
    for path in (tmp_path / "x.wav", media.save(tmp_path / "alone.wav")):
        with wave.open(str(path), "rb") as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 2, 2)
            assert file.getnframes() == RATE * NUM_FRAMES // FPS


def test_every_format_is_read_back_here() -> None:
    assert {"mp4", "gif", "webp", "png", "npy"} == set(FORMATS)
    assert {"wav"} == set(SOUND_FORMATS)
