"""Without imageio-ffmpeg: what needs it says so, and what to type, before weights are read; all else works."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from cli_support import Command
from sample_media import make_media
from tables import table
from tiny_models import write_tiny_wan

from diffusion_runtime.errors import MissingPackageError
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.media import FileWriter
from diffusion_runtime.media.audio import check_sound
from diffusion_runtime.media.clips import inspect_clip
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.media.growing_clip import GrowingClip
from diffusion_runtime.media.recompression import check_recompression

MISSING = "needs ffmpeg, and the package imageio-ffmpeg is not installed; to fix it: pip install imageio-ffmpeg"
FORMATS = f"format: mp4 {MISSING}, or choose a format without it: gif, webp, npy (--format gif)"
STREAM = f"--stream {MISSING}, or leave it out and choose a format without it: --format gif"


@pytest.fixture(autouse=True)
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(PreparedModel, "load", load)


GENERATE, COMPARE = (
    ("generate", "a red circle"),
    ("compare", "a ring", "--setting", "a:", "--setting", "b: --guidance-scale 2"),
)
REFUSED = {
    "a video": (GENERATE, FORMATS),
    "a video of the model's length": ((*GENERATE, "--model-path", "shapes"), FORMATS),
    "a dry run": ((*GENERATE, "--dry-run"), FORMATS),
    "a name": ((*GENERATE, "-o", "new/x.mp4"), FORMATS),
    "several": ((*GENERATE, "--seed", "1-3", "-o", "new/"), FORMATS),
    "an image as a video": ((*GENERATE, "--num-frames", "1", "--format", "mp4"), "choose a format without it: gif"),
    "a stream": ((*GENERATE, "--stream", "new/x.mp4"), STREAM),
    "a stream down a pipe": ((*GENERATE, "--stream", "-"), STREAM),
    "a stream with typed prompts": ((*GENERATE, "--stream", "new/x.mp4", "--interactive"), STREAM),
    "a stream's dry run": ((*GENERATE, "--stream", "new/x.mp4", "--dry-run"), STREAM),
    "clips of a comparison": ((*COMPARE, "-o", "new"), FORMATS),
    "a page of videos": (
        (*COMPARE, "--html", "x.html"),
        f"the page of videos (--html) {MISSING}, or leave the page out",
    ),
}


@table(("words", "said"), REFUSED.values(), REFUSED)
def test_a_command_says_so_before_weights_are_read(
    words: tuple[str, ...], said: str, command: Command, tiny_flags: tuple[str, ...], no_weights: None
) -> None:
    own = () if "--model-path" in words else tiny_flags
    if "--num-frames" in words:
        own = tuple(own[: own.index("--num-frames")])
    shown = command(*words, *own)
    assert shown.code == 1
    assert said in shown.said
    assert "ModuleNotFoundError" not in shown.said
    assert shown.out == ""
    assert not list(Path().rglob("*.mp4"))


def test_a_control_video_is_refused_and_its_frames_are_not(command: Command, tmp_path: Path, no_weights: None) -> None:
    folder = write_tiny_wan(tmp_path / "vace", condition="control", num_layers=3, vae="plain")
    Path("x.mp4").write_bytes(b"any")
    numpy.save("x.npy", numpy.zeros((5, 32, 32, 3), dtype=numpy.uint8))
    words = ("generate", "a ring", "--model-path", str(folder), "--height", "32", "--width", "32", "--num-frames", "5")
    words = (*words, "--format", "gif", "--dry-run", "--video-path")
    shown = command(*words, "x.mp4")
    assert (shown.code, shown.out) == (1, "")
    assert f"video_path: x.mp4 {MISSING}, or give its frames as a .gif, .webp or .npy" in shown.said
    assert command(*words, "x.npy").code == 0


@pytest.mark.parametrize("file_format", ["gif", "webp", "npy"])
def test_other_formats_are_written(command: Command, tiny_flags: Sequence[str], file_format: str) -> None:
    shown = command(*GENERATE, *tiny_flags, "-o", f"x.{file_format}")
    assert (shown.code, shown.out) == (0, f"x.{file_format}\n"), shown.err


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "save": (lambda: make_media(num_frames=5).save("x.mp4"), "(--format gif)"),
    "save an image": (
        lambda: make_media(num_frames=1).save("x.mp4"),
        "choose a format without it: gif, webp, png, npy",
    ),
    "bytes": (lambda: make_media(num_frames=5).to_bytes("mp4"), "choose a format without it: gif, webp, npy"),
    "a writer": (lambda: FileWriter("x.mp4"), "choose a format without it"),
    "a clip that grows": (lambda: GrowingClip("x.mp4", 32, 32, fps=12, fragment_frames=4), MISSING),
    "a clip to read": (lambda: inspect_clip("any.mov", "video_path", 5), "video_path: any.mov"),
    "a sound to read": (lambda: check_sound("any.wav", "audio_path", 1.0), f"audio_path: any.wav {MISSING}"),
    "an image to compress": (lambda: check_recompression(32, 32, "x.png", "image_path"), "--image-crf 0"),
}


@table(("call", "said"), CALLS.values(), CALLS)
def test_a_call_says_so(call: Callable[[], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("any.mov", "any.wav"):
        Path(name).write_bytes(b"any")
    with pytest.raises(MissingPackageError) as caught:
        call()
    assert MISSING.removeprefix("needs ") in str(caught.value)
    assert said in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["any.mov", "any.wav"]


def test_a_package_without_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_ffmpeg_exe() -> str:
        raise RuntimeError("No ffmpeg exe could be found. Install ffmpeg on your system.")

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace(get_ffmpeg_exe=get_ffmpeg_exe))
    with pytest.raises(MissingPackageError, match=r"has none for this machine; to fix it: .* on your system, or --x$"):
        find_ffmpeg("this", "--x")
