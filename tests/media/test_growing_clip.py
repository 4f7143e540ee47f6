"""A clip that grows: what stands in the file is playable at every moment, however the writing ends."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
from sample_media import RECIPE, make_media

from diffusion_runtime.errors import ConfigError, OutputError, RequestError
from diffusion_runtime.media import read_media_file
from diffusion_runtime.media.clips import inspect_clip, read_clip
from diffusion_runtime.media.growing_clip import GrowingClip

FPS, FRAGMENT = 8, 4
SIDECAR: dict[str, Any] = {
    "schema": "diffusion_runtime.sidecar/1",
    "recipe": {"schema": "diffusion_runtime.recipe/1", **RECIPE},
}
FRAMES = make_media(12, 49, 63).frames


def clip_at(path: Path | str) -> GrowingClip:
    return GrowingClip(path, 49, 63, fps=FPS, fragment_frames=FRAGMENT)


def num_playable(path: Path) -> int:
    try:
        return inspect_clip(str(path), "video_path", 1000).num_frames
    except RequestError:
        return 0


def test_a_file_is_playable_while_it_grows_and_an_ordinary_one_at_the_end(tmp_path: Path) -> None:
    with clip_at(tmp_path / "new" / "x.mp4") as clip:
        assert clip.path is not None
        seen = {0}
        for frame in FRAMES:
            clip.write(frame[None])
        # A fragment is written at the latest when the next one begins.
        deadline = time.monotonic() + 120
        while max(seen) < len(FRAMES) - FRAGMENT and time.monotonic() < deadline:
            shutil.copy(clip.path, tmp_path / "copy.mp4")
            seen.add(num_playable(tmp_path / "copy.mp4"))
            time.sleep(0.02)
        assert max(seen) >= len(FRAMES) - FRAGMENT
        assert clip.finish(SIDECAR) == tmp_path / "new" / "x.mp4"
    media = read_media_file(clip.path)
    assert (media.num_frames, media.fps, media.width, media.height) == (12, FPS, 64, 50)
    assert media.recipe == SIDECAR["recipe"]
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == SIDECAR
    error = read_clip(str(clip.path), "video_path", 12, 50, 64)[:, :49, :63].astype(float) - FRAMES
    assert numpy.abs(error).mean() < 2.0
    # The index comes first: a player on the network need not read to the end.
    head = clip.path.read_bytes()[:200_000]
    assert head.index(b"moov") < head.index(b"mdat")
    assert {path.name for path in clip.path.parent.iterdir()} == {"x.mp4", "x.json"}


def test_names_that_ffmpeg_would_take_for_options_or_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-x.mp4", "12:30.mp4", "tcp:x.mp4", "pipe:1.mp4"):
        with clip_at(name) as clip:
            clip.write(FRAMES[:1])
            clip.finish(SIDECAR)
        assert num_playable(tmp_path / name) == 1


def test_what_was_written_stays_whatever_ends_the_block(tmp_path: Path) -> None:
    def interrupted() -> None:
        with clip_at(tmp_path / "x.mp4") as clip:
            clip.write(FRAMES[:7])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert num_playable(tmp_path / "x.mp4") == 7
    # A taken name gets a number, that of a sidecar alone too.
    (tmp_path / "x-2.json").write_text("{}")
    with clip_at(tmp_path / "x.mp4") as clip:
        assert clip.path == tmp_path / "x-3.mp4"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-2.json", "x.mp4"], "no file without frames"


def test_a_full_disk_leaves_what_came_before(tmp_path: Path) -> None:
    noise = numpy.random.default_rng(0).integers(0, 256, (12, 49, 63, 3), dtype=numpy.uint8)

    def write() -> None:
        with clip_at(tmp_path / "x.mp4") as clip:
            for frame in noise:
                clip.write(frame[None])
            clip.finish(SIDECAR)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for some fragments of noise.
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, before[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*x\.mp4: .* frames before are in it and can") as raised:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = num_playable(tmp_path / "x.mp4")
    assert 0 < kept < 12
    # Of those that the encoder had taken, which are more than are in the file.
    numbers = re.search(r"(\d+) of the (\d+) frames before", str(raised.value))
    assert numbers is not None
    assert int(numbers[1]) == kept <= int(numbers[2])


def test_a_disk_that_is_full_in_the_first_bytes_leaves_no_file(tmp_path: Path) -> None:
    """However the block ends: one that cannot be played is no result."""
    noise = numpy.random.default_rng(0).integers(0, 256, (12, 49, 63, 3), dtype=numpy.uint8)

    def write(*, finishes: bool) -> None:
        with clip_at(tmp_path / "x.mp4") as clip:
            for frame in noise:
                clip.write(frame[None])
            if not finishes:
                raise KeyboardInterrupt
            clip.finish(SIDECAR)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for finishes in (True, False):
        # Less than the first fragment.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
        try:
            with pytest.raises((OutputError, KeyboardInterrupt)) as raised:
                write(finishes=finishes)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not finishes or "nothing was left behind" in str(raised.value)
        assert list(tmp_path.iterdir()) == []


PIPED = """
import numpy
from diffusion_runtime.errors import OutputError
from diffusion_runtime.media.growing_clip import GrowingClip
with GrowingClip("-", 48, 64, fps=8, fragment_frames=2) as clip:
    try:
        for index in range({count}):
            clip.write(numpy.random.default_rng(index).integers(0, 256, (1, 48, 64, 3), dtype=numpy.uint8))
        clip.finish({{}})
    except OutputError as error:
        raise SystemExit(str(error))
"""


def test_a_pipe_gets_the_fragments_and_its_reader_may_leave(tmp_path: Path) -> None:
    whole = subprocess.run([sys.executable, "-c", PIPED.format(count=6)], stdout=subprocess.PIPE, check=True)
    (tmp_path / "piped.mp4").write_bytes(whole.stdout)
    assert num_playable(tmp_path / "piped.mp4") == 6
    with subprocess.Popen(
        [sys.executable, "-c", PIPED.format(count=2000)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=False
    ) as left:
        assert left.stdout is not None
        assert left.stderr is not None
        left.stdout.read(1000)
        left.stdout.close()
        message = left.stderr.read().decode()
        assert left.wait() == 1
    assert message.startswith("standard output: whoever read it has left after ")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"x\.gif: a gif file cannot be watched while it grows; use a name that ends in"
    ):
        clip_at(tmp_path / "x.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        clip_at(tmp_path / "file" / "x.mp4")
