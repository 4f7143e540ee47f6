"""Media as bytes: what `save` writes, without a file that stays."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy
import pytest
from sample_media import make_media

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.media import FORMATS, Audio


def test_bytes_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (room := tmp_path / "room").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(room))
    video, image = make_media(num_frames=3), make_media(num_frames=1)
    for file_format in FORMATS:
        media = image if file_format == "png" else video
        path = media.save(tmp_path / f"saved.{file_format}")
        assert media.to_bytes(file_format) == path.read_bytes(), file_format
    assert list(room.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the cores of a process are chosen on Linux alone")
def test_the_bytes_of_a_video_do_not_tell_how_many_cores_a_machine_has() -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("one core")
    media = make_media(num_frames=9, height=256, width=256)
    try:
        os.sched_setaffinity(0, {min(cores)})
        alone = media.to_bytes("mp4")
    finally:
        os.sched_setaffinity(0, cores)
    assert media.to_bytes("mp4") == alone


def test_a_sound_needs_a_format_that_carries_it() -> None:
    sound = Audio(numpy.zeros((2, 1600), numpy.float32), 16000)
    media = dataclasses.replace(make_media(num_frames=3), audio=sound)
    with pytest.raises(ConfigError, match="gif cannot carry the sound of this video; use one of mp4"):
        media.to_bytes("gif")
    assert media.to_bytes("wav").startswith(b"RIFF")
    with pytest.raises(ConfigError, match="avi"):
        media.to_bytes("avi")
