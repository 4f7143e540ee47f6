"""Control videos and masks: every kind of file, what is said of it, and what is refused before it is decoded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy
import pytest
from PIL import Image

from diffusion_runtime.errors import RequestError
from diffusion_runtime.media import clips
from diffusion_runtime.media.clips import inspect_clip, read_clip
from diffusion_runtime.media.encode import FrameChunks, encode

HEIGHT, WIDTH, FRAMES = 32, 48, 6


def moving() -> numpy.ndarray:
    """A bright square that moves right on a smooth background, [frames, height, width, 3]."""
    frames = numpy.zeros((FRAMES, HEIGHT, WIDTH, 3), numpy.uint8)
    frames[..., 0] = numpy.linspace(0, 120, WIDTH).astype(numpy.uint8)
    frames[..., 2] = 60
    for index, frame in enumerate(frames):
        frame[8:24, 6 * index : 6 * index + 12] = (220, 200, 160)
    return frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clips")
    for kind in ("mp4", "gif", "webp", "npy"):
        encode(kind, FrameChunks.of(moving()), 20, None, made / f"clip.{kind}")
    return made


def run_ffmpeg(*arguments: str) -> None:
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *arguments], check=True)


def test_frames_of_every_format_are_those_that_were_written(folder: Path) -> None:
    for kind, fps in (("mp4", 20), ("gif", 20), ("webp", 20), ("npy", None)):
        path = str(folder / f"clip.{kind}")
        facts = inspect_clip(path, "video_path", 4)
        # One more than was asked for says that there are more.
        assert (facts.width, facts.height, facts.num_frames) == (WIDTH, HEIGHT, 5), kind
        assert facts.fps is None if fps is None else facts.fps == pytest.approx(fps, rel=0.01), kind
        assert inspect_clip(path, "video_path", 100).num_frames == FRAMES, kind
        frames = read_clip(path, "video_path", FRAMES, HEIGHT, WIDTH)
        assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
        # Colours of a GIF are 256, chroma of an MP4 is halved; a frame is nearest to itself.
        differences = numpy.abs(frames[:, None].astype(float) - moving()[None]).mean(axis=(2, 3, 4))
        assert (differences.argmin(axis=1) == numpy.arange(FRAMES)).all(), kind
        assert differences.diagonal().max() < 6, kind
        smaller = read_clip(path, "mask_path", 2, 16, 24, grey=True)
        assert smaller.shape == (2, 16, 24)


def test_a_turned_video_is_upright_and_a_variable_rate_keeps_its_frames(folder: Path, tmp_path: Path) -> None:
    turned, unequal = tmp_path / "turned.mov", tmp_path / "unequal.mkv"
    run_ffmpeg("-display_rotation", "90", "-i", str(folder / "clip.mp4"), "-c", "copy", str(turned))
    facts = inspect_clip(str(turned), "video_path", FRAMES)
    assert (facts.width, facts.height) == (HEIGHT, WIDTH)
    upright = read_clip(str(turned), "video_path", FRAMES, WIDTH, HEIGHT)
    assert numpy.abs(upright[0].astype(float) - numpy.rot90(moving()[0]).astype(float)).mean() < 6
    # The last frames are shown three times as long.
    slower = ["-vf", "setpts='if(gt(N,2),3*N-4,N)/20/TB'", "-fps_mode", "vfr"]
    run_ffmpeg("-i", str(folder / "clip.mp4"), *slower, str(unequal))
    assert inspect_clip(str(unequal), "video_path", 100).num_frames == FRAMES


def test_what_is_no_clip_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, playlist, cut = tmp_path / "a.mp4", tmp_path / "list.mp4", tmp_path / "cut.mp4"
    text.write_text("no video")
    # A playlist names other files, which would be opened.
    playlist.write_text(f"ffconcat version 1.0\nfile '{folder / 'clip.mp4'}'\n")
    cut.write_bytes((folder / "clip.mp4").read_bytes()[:700])
    drawn = numpy.zeros((HEIGHT, WIDTH, 4), numpy.uint8)
    Image.fromarray(drawn).save(tmp_path / "clear.png")
    numpy.save(tmp_path / "float.npy", numpy.zeros((2, 4, 4, 3)))
    numpy.save(tmp_path / "objects.npy", numpy.array([{}]), allow_pickle=True)
    (tmp_path / "a.txt").write_text("no video")
    for path, told in (
        (text, "video_path: .*a.mp4: is not a readable mp4: "),
        (playlist, "is not a readable mp4"),
        (cut, "is not a readable mp4"),
        (tmp_path / "clear.png", "video_path: .*clear.png has transparent parts; put it on a background"),
        (tmp_path / "float.npy", r"is not a readable npy: expected uint8 frames \[num_frames, height, width, 3\]"),
        (tmp_path / "objects.npy", "is not a readable npy"),
        (tmp_path / "a.txt", "expected a file that ends in .mp4, "),
        (tmp_path / "none.mp4", "video_path: .*none.mp4: no such file"),
        (tmp_path, "this is a folder, expected a regular file"),
    ):
        with pytest.raises(RequestError, match=told):
            inspect_clip(str(path), "video_path", 4)
    # Frames too large to unpack are counted by their headers.
    monkeypatch.setattr(clips, "MAX_FRAME_PIXELS", WIDTH * HEIGHT - 1)
    clips._facts.cache_clear()
    for kind in ("mp4", "gif", "webp", "npy"):
        with pytest.raises(RequestError, match=f"clip.{kind}: is not a readable {kind}"):
            inspect_clip(str(folder / f"clip.{kind}"), "video_path", 4)
    clips._facts.cache_clear()


def test_a_file_that_became_shorter_is_refused_when_it_is_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "clip.npy"
    numpy.save(path, moving())
    assert inspect_clip(str(path), "video_path", FRAMES).num_frames == FRAMES
    numpy.save(path, moving()[:3])
    with pytest.raises(RequestError, match="expected 6 frames, got 3"):
        read_clip(str(path), "video_path", FRAMES, HEIGHT, WIDTH)
