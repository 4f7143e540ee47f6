"""Files written while their clip is decoded: the same bytes, and nothing left behind by what goes wrong."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy
import pytest
from sample_media import make_media
from tables import table

from diffusion_runtime.errors import ConfigError, OutputError
from diffusion_runtime.media import ClipHeader, FileWriter, GeneratedMedia, encode, ffmpeg, file_writer


def hand_over(writer: FileWriter, media: GeneratedMedia, chunk: int = 2) -> None:
    take = writer.open(0, media.header)
    for start in range(0, media.num_frames, chunk):
        take(media.frames[start : start + chunk])


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "file writer"]


@table("file_format", ["mp4", "gif", "webp", "npy", "png"])
def test_a_streamed_file_has_the_bytes_of_a_saved_one(tmp_path: Path, file_format: str) -> None:
    """Odd sides, which an mp4 pads."""
    media = make_media(num_frames=1 if file_format == "png" else 9, height=47, width=63)
    whole = media.save(tmp_path / f"whole.{file_format}").read_bytes()
    with FileWriter(tmp_path / f"x.{file_format}") as writer:
        hand_over(writer, media)
        path = media.save(tmp_path / f"x.{file_format}", writer=writer)
    assert path.read_bytes() == whole
    assert sorted(each.suffix for each in tmp_path.iterdir()) == sorted([f".{file_format}", ".json"] * 2)
    assert threads() == []


def test_a_clip_that_nobody_handed_over_is_written_at_once(tmp_path: Path) -> None:
    """And one that is another than the header announced, or is saved as another format or elsewhere."""
    media = make_media()
    with FileWriter(tmp_path / "a.npy") as writer:
        media.save(tmp_path / "a.npy", writer=writer)
    with FileWriter(tmp_path / "b.npy") as writer:
        hand_over(writer, make_media(fps=9))
        media.save(tmp_path / "b.npy", writer=writer)
    # The bytes of an mp4 under another format's name would be no file at all.
    with FileWriter(tmp_path / "c.mp4") as writer:
        hand_over(writer, media)
        media.save(tmp_path / "c.npy", writer=writer)
    (tmp_path / "folder").mkdir()
    with FileWriter(tmp_path / "folder" / "d.npy") as writer:
        hand_over(writer, media)
        media.save(tmp_path / "d.npy", writer=writer)
    for name in ("a.npy", "b.npy", "c.npy", "d.npy"):
        assert numpy.array_equal(numpy.load(tmp_path / name), media.frames)
    assert len(list(tmp_path.iterdir())) == 9


@pytest.mark.parametrize("stops_decoding", [True, False])
def test_a_writer_that_fails_ends_decoding_or_waits_for_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_decoding: bool
) -> None:
    failed = threading.Event()

    def fail(frames: encode.FrameChunks, *_: object) -> None:
        next(iter(frames.chunks))
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(encode._ENCODERS, "mp4", fail)
    media, num_taken = make_media(), 0

    def decode_and_save() -> None:
        nonlocal num_taken
        with FileWriter(tmp_path / "x.mp4", stops_decoding=stops_decoding) as writer:
            take = writer.open(0, media.header)
            take(media.frames[:1])
            failed.wait(60)
            while writer._thread is not None and writer._thread.is_alive():
                time.sleep(0.001)
            for index in range(1, media.num_frames):
                take(media.frames[index : index + 1])
                num_taken += 1
            media.save(tmp_path / "x.mp4", writer=writer)

    with pytest.raises(OutputError, match=r"cannot write .*x\.mp4: No space left on device; nothing was left behind"):
        decode_and_save()
    assert num_taken == (0 if stops_decoding else media.num_frames - 1)
    assert list(tmp_path.iterdir()) == []


@table("error", [ValueError("decoding failed"), KeyboardInterrupt()], ids=["error", "interrupt"])
@table("file_format", ["mp4", "gif", "npy"])
def test_a_decoder_that_fails_leaves_nothing(tmp_path: Path, error: BaseException, file_format: str) -> None:
    media = make_media()

    def decode() -> None:
        with FileWriter(tmp_path / f"x.{file_format}") as writer:
            writer.open(0, media.header)(media.frames[:4])
            raise error

    with pytest.raises(type(error)):
        decode()
    assert list(tmp_path.iterdir()) == []
    assert threads() == []


def test_an_encoder_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By memory shortage, a limit on file sizes, or an administrator: ffmpeg then says nothing itself."""
    started: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            started.append(self)

    # Its first call tries ffmpeg out.
    imageio_ffmpeg.get_ffmpeg_exe()
    monkeypatch.setattr(ffmpeg.subprocess, "Popen", Remembered)
    media = make_media()

    def decode_and_save() -> None:
        with FileWriter(tmp_path / "x.mp4") as writer:
            take = writer.open(0, media.header)
            while not started:
                time.sleep(0.001)
            started[0].kill()
            started[0].wait()
            for index in range(media.num_frames):
                take(media.frames[index : index + 1])
            media.save(tmp_path / "x.mp4", writer=writer)

    with pytest.raises(OutputError, match=r"ffmpeg was ended by SIGKILL \(Killed\), without a message; nothing"):
        decode_and_save()
    assert list(tmp_path.iterdir()) == []
    assert threads() == []


def test_a_decoder_far_ahead_waits_for_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "MAX_WAITING", 2)
    go_on, num_taken = threading.Event(), 0

    def wait(frames: encode.FrameChunks, *_: object) -> None:
        go_on.wait(60)
        assert len(list(frames.chunks)) == 9

    monkeypatch.setitem(encode._ENCODERS, "npy", wait)
    media = make_media()

    def decode() -> None:
        nonlocal num_taken
        take = writer.open(0, media.header)
        for index in range(9):
            take(media.frames[index : index + 1])
            num_taken += 1

    with FileWriter(tmp_path / "x.npy") as writer:
        decoder = threading.Thread(target=decode)
        decoder.start()
        decoder.join(0.5)
        assert num_taken == 2
        go_on.set()
        decoder.join(60)
        assert num_taken == 9
        writer.finish()


def test_what_cannot_be_written_is_known_before_the_first_frame(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    media = make_media()
    with (
        pytest.raises(OutputError, match=r"cannot write .*nothing was left behind"),
        FileWriter(tmp_path / "file" / "x.mp4") as writer,
    ):
        writer.open(0, media.header)
    with pytest.raises(ConfigError, match="png holds one image"), FileWriter(tmp_path / "x.png") as writer:
        writer.open(0, media.header)
    with FileWriter(tmp_path / "x.npy") as writer:
        writer.open(0, ClipHeader(9, 48, 64, 8, {}))(media.frames[:4])
        with pytest.raises(OutputError, match="expected 9 frames, got 4"):
            writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
