"""Sound: in the file where the format carries it, beside it where not, and alone."""

from __future__ import annotations

import dataclasses
import json
import logging
import resource
import signal
import subprocess
import wave
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy
import pytest
from sample_media import RECIPE, make_media
from sound_files import write_wave
from tables import table

from diffusion_runtime.errors import ConfigError, OutputError, RequestError
from diffusion_runtime.media import RECIPE_SCHEMA, Audio, GeneratedMedia, audio, read_media_file, read_recipe

RATE = 24000
# As long as the nine frames of make_media at eight a second.
NUM_SAMPLES = RATE * 9 // 8
LEFT, RIGHT = 440.0, 1000.0


def tones() -> Audio:
    """A low tone on the left and a softer, higher one on the right."""
    seconds = numpy.arange(NUM_SAMPLES) / RATE
    pair = [0.8 * numpy.sin(2 * numpy.pi * LEFT * seconds), 0.4 * numpy.sin(2 * numpy.pi * RIGHT * seconds)]
    return Audio(numpy.stack(pair).astype(numpy.float32), RATE)


def media_with_sound(**changes: Any) -> GeneratedMedia:
    return make_media(audio=tones(), **changes)


def heard(path: Path, rate: int = RATE) -> numpy.ndarray:
    """The sound of a file as ffmpeg plays it, [samples, 2]."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), "-map", "0:a", "-f", "f32le"]
    raw = subprocess.run([*command, "-ar", str(rate), "-"], capture_output=True, check=True).stdout
    return numpy.frombuffer(raw, numpy.float32).reshape(-1, 2)


def has_sound(path: Path) -> bool:
    told = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path)], capture_output=True, check=False)
    return b"Audio: aac" in told.stderr


def pitch(samples: numpy.ndarray) -> float:
    """The loudest frequency in Hz."""
    spectrum = numpy.abs(numpy.fft.rfft(samples))
    return float(spectrum.argmax() * RATE / len(samples))


def saved_wav(path: Path) -> tuple[numpy.ndarray, int]:
    with wave.open(str(path), "rb") as file:
        samples = numpy.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return samples, file.getframerate()


def test_an_mp4_carries_its_sound(tmp_path: Path) -> None:
    path = media_with_sound().save(tmp_path / "clip.mp4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clip.json", "clip.mp4"]
    sound = heard(path)
    assert sound.shape[0] / RATE == pytest.approx(9 / 8, abs=0.1)
    assert pitch(sound[:, 0]) == pytest.approx(LEFT, abs=2)
    assert pitch(sound[:, 1]) == pytest.approx(RIGHT, abs=2)
    middle = sound[RATE // 4 : RATE // 2]
    assert numpy.abs(middle).max(0) == pytest.approx([0.8, 0.4], abs=0.05)
    known = read_media_file(path)
    assert (known.num_frames, known.height, known.width, known.fps) == (9, 48, 64, 8.0)
    assert known.recipe == {"schema": RECIPE_SCHEMA, **RECIPE}


def test_a_rate_that_aac_does_not_have_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = numpy.zeros((2, 4000), numpy.float32)
    for rate, said in ((22_000, 22_050), (192_000, 96_000), (48_000, None)):
        media = dataclasses.replace(make_media(), audio=Audio(samples, rate))
        caplog.clear()
        media.save(tmp_path / f"{rate}.mp4")
        expected = [] if said is None else [f"mp4: AAC has no sound of {rate} Hz: it is resampled to {said} Hz"]
        assert caplog.messages == expected, rate


def test_an_mp4_without_sound_has_no_track_for_it(tmp_path: Path) -> None:
    assert has_sound(media_with_sound().save(tmp_path / "loud.mp4"))
    silent = make_media().save(tmp_path / "still.mp4")
    assert not has_sound(silent)
    with pytest.raises(RequestError, match=r"audio_path: .*still.mp4: is not readable as sound: it has no sound$"):
        audio.check_sound(str(silent), "audio_path", 0.1)


@table("file_format", ["gif", "webp", "npy", "png"])
def test_beside_other_formats_it_is_a_wav_and_that_is_said(
    tmp_path: Path, file_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    media = media_with_sound(num_frames=1 if file_format == "png" else 9)
    with caplog.at_level(logging.WARNING, "diffusion_runtime"):
        path = media.save(tmp_path / f"clip.{file_format}")
    assert sorted(p.suffix for p in tmp_path.iterdir()) == sorted([".json", ".wav", f".{file_format}"])
    samples, rate = saved_wav(path.with_suffix(".wav"))
    assert (samples.shape, rate) == ((NUM_SAMPLES, 2), RATE)
    assert numpy.abs(samples / 32767 - tones().samples.T).max() < 1e-4
    assert caplog.messages == [f"{path} cannot carry sound; it is in {path.with_suffix('.wav')}"]
    written = json.loads(path.with_suffix(".json").read_text())["file"]
    assert written["audio"] == {"sample_rate": RATE, "num_channels": 2, "seconds": 1.125, "is_beside": True}


def test_the_sidecar_of_an_mp4_says_that_the_sound_is_inside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    media_with_sound().save(tmp_path / "loud.mp4")
    make_media().save(tmp_path / "still.mp4")
    files = {name: json.loads((tmp_path / f"{name}.json").read_text())["file"] for name in ("loud", "still")}
    assert files["loud"]["audio"]["is_beside"] is False
    assert "audio" not in files["still"]
    assert not caplog.messages


def test_a_wav_is_the_sound_alone_and_its_recipe_can_be_read(tmp_path: Path) -> None:
    path = media_with_sound().save(tmp_path / "clip.wav")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clip.json", "clip.wav"]
    assert saved_wav(path)[0].shape == (NUM_SAMPLES, 2)
    assert read_recipe(path) == {"schema": RECIPE_SCHEMA, **RECIPE}
    path.with_suffix(".json").unlink()
    with pytest.raises(OutputError, match="carries no recipe"):
        read_recipe(path)


@table("name", ["clip.wav", "clip.gif", "clip.mp4"])
def test_a_file_says_what_sound_there_is(tmp_path: Path, name: str) -> None:
    media_with_sound().save(tmp_path / name)
    known = read_media_file(tmp_path / name)
    assert known.recipe == {"schema": RECIPE_SCHEMA, **RECIPE}
    assert known.attention_report == {"num_calls": 3, "rows": []}
    assert known.audio == {
        "sample_rate": RATE,
        "num_channels": 2,
        "seconds": 1.125,
        "is_beside": name == "clip.gif",
    }
    size = (0, 0, 0) if name == "clip.wav" else (9, 48, 64)
    assert (known.num_frames, known.height, known.width) == size


def test_a_wav_beside_a_clip_is_read_as_well(tmp_path: Path) -> None:
    media_with_sound().save(tmp_path / "clip.gif")
    known = read_media_file(tmp_path / "clip.wav")
    assert (known.format, known.num_frames) == ("wav", 0)
    assert known.recipe == {"schema": RECIPE_SCHEMA, **RECIPE}


def test_a_stranger_s_wav_beside_a_clip_has_no_recipe(tmp_path: Path) -> None:
    media_with_sound().save(tmp_path / "other.wav")
    make_media().save(tmp_path / "clip.gif")
    (tmp_path / "other.wav").rename(tmp_path / "clip.wav")
    assert read_media_file(tmp_path / "clip.wav").recipe is None


@table("content", [b"", b"RIFF", b"RIFF\x10\0\0\0WAVEfmt \x10\0\0\0"])
def test_a_broken_wav_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "clip.wav").write_bytes(content)
    with pytest.raises(OutputError, match="not a readable wav"):
        read_media_file(tmp_path / "clip.wav")


def test_a_clip_that_is_overwritten_takes_its_sound_with_it(tmp_path: Path) -> None:
    media_with_sound().save(tmp_path / "clip.gif")
    make_media().save(tmp_path / "clip.gif")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clip.gif", "clip.json"]


def test_a_sound_of_somebody_else_s_stays(tmp_path: Path) -> None:
    make_media().save(tmp_path / "clip.gif")
    (tmp_path / "clip.wav").write_text("mine")
    make_media().save(tmp_path / "clip.gif")
    media_with_sound().save(tmp_path / "pair.gif")
    make_media().save(tmp_path / "pair.mp4")
    assert sorted(p.name for p in tmp_path.glob("*.wav")) == ["clip.wav", "pair.wav"]


def test_a_wav_of_what_makes_no_sound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wav holds sound, and this model makes pictures alone"):
        make_media().save(tmp_path / "clip.wav")
    assert not list(tmp_path.iterdir())


def test_louder_than_full_scale_is_cut(tmp_path: Path) -> None:
    loud = Audio(numpy.array([[2.0, -3.0, 0.5]], numpy.float32), RATE)
    path = make_media(audio=loud).save(tmp_path / "clip.wav")
    assert saved_wav(path)[0].ravel().tolist() == [32767, -32767, 16384]


@table("taken", ["clip.gif", "clip.json", "clip.wav"])
def test_any_taken_name_of_the_three_takes_the_number(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).write_text("mine")
    path = media_with_sound().save(tmp_path / "clip.gif", overwrite=False)
    assert path == tmp_path / "clip-2.gif"
    names = {"clip-2.gif", "clip-2.json", "clip-2.wav", taken}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert (tmp_path / taken).read_text() == "mine"
    assert saved_wav(tmp_path / "clip-2.wav")[0].shape == (NUM_SAMPLES, 2)


@table("file_format", ["mp4", "png", "wav"])
def test_a_disk_that_fills_up_with_the_sound_leaves_nothing(tmp_path: Path, file_format: str) -> None:
    media = media_with_sound(num_frames=1, height=8, width=8)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Room for the picture and the sidecar, and not for the sound.
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot write .*nothing was left behind"):
            media.save(tmp_path / f"x.{file_format}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@table(
    ("samples", "rate", "told"),
    [
        (numpy.zeros(8, numpy.float32), RATE, r"expected float32 \[channels, num_samples\], got float32 \[8\]"),
        (numpy.zeros((2, 8)), RATE, r"got float64 \[2, 8\]"),
        (numpy.zeros((2, 0), numpy.float32), RATE, r"got float32 \[2, 0\]"),
        (numpy.full((1, 4), numpy.nan, numpy.float32), RATE, "not finite"),
        (numpy.zeros((1, 4), numpy.float32), 0, "sample_rate: expected a whole number of 1 or more, got 0"),
    ],
)
def test_what_is_not_sound_is_refused(samples: numpy.ndarray, rate: int, told: str) -> None:
    with pytest.raises(OutputError, match=told):
        Audio(samples, rate)


def test_a_sound_that_begins_after_the_pictures_stays_at_its_time(tmp_path: Path) -> None:
    silent, sound = make_media().save(tmp_path / "still.mp4"), write_wave(tmp_path / "a.wav")
    late = str(tmp_path / "late.mkv")
    inputs = ["-i", silent, "-itsoffset", "0.5", "-i", sound, "-map", "0:v", "-map", "1:a", "-c:a", "pcm_s16le"]
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *map(str, inputs), late], check=True)
    assert audio.has_sound(late, "init_path")
    found = audio.read_sound(late, "init_path", 1.0, 16000).samples
    assert not found[:, :8000].any()
    assert numpy.array_equal(found[:, 8000:], audio.read_sound(sound, "init_path", 0.5, 16000).samples)


def test_a_part_of_a_sound_is_that_of_the_whole(tmp_path: Path) -> None:
    """Of AAC, where the first frames behind a place are lost, and what came after them was 48 ms too early."""
    packed = str(tmp_path / "a.m4a")
    tone = ["-f", "lavfi", "-i", "sine=frequency=440:duration=3:sample_rate=16000"]
    subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *tone, packed], check=True)
    whole = audio.read_sound(packed, "video_path", 3.0, 16000).samples
    assert numpy.abs(whole[:, :16000]).max() > 0.05
    for start in (0.3, 1.0, 1.7):
        part = audio.read_long_sound(packed, "video_path", start, 0.5, 16000).samples
        first = round(start * 16000)
        assert numpy.abs(part - whole[:, first : first + 8000]).max() < 1e-3, start
