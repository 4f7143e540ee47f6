"""What is said while the weights of a part are read: bytes, rate and time left; nothing of a part soon there."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.loading import prepare, read_progress
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.loading.read_progress import ReadProgress, transformer_bytes
from diffusion_runtime.weights.parallel_reads import num_bytes_read
from diffusion_runtime.weights.transformer_files import TransformerFile

MB = 10**6


@dataclasses.dataclass
class Reading:
    """A stand-in for a disk and a clock."""

    num_bytes: int = 7 * MB
    seconds: float = 100.0

    def go_on(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds


def progress_of(reading: Reading, said: list[str], total: int | None) -> ReadProgress:
    return ReadProgress(
        said.append, "transformer", total, num_read=lambda: reading.num_bytes, clock=lambda: reading.seconds
    )


def test_lines_have_bytes_rate_and_what_is_left() -> None:
    reading, said = Reading(), list[str]()
    with progress_of(reading, said, 100 * MB) as progress:
        reading.go_on(20 * MB, 4)
        assert progress.line() == "loading the transformer: 20 MB of 100 MB read, 5 MB/s, about 16 s left"
        reading.go_on(0, 8)
        stalled = "loading the transformer: 20 MB of 100 MB read, none since the last line; 12 s so far"
        assert progress.line() == stalled
        # A LoRA file is read as well: more than the part's own files.
        reading.go_on(100 * MB, 8)
        assert progress.line() == "loading the transformer: 120 MB read, 6 MB/s"
    assert said == ["loading the transformer", "loaded the transformer: 120 MB read in 20.0 s, 6 MB/s"]


def test_a_part_that_a_library_reads_has_its_seconds_alone() -> None:
    reading, said = Reading(), list[str]()
    with progress_of(reading, said, None) as progress:
        reading.go_on(0, 8)
        assert progress.line() == "loading the transformer: 8 s so far"
    assert said[1:] == ["loaded the transformer in 8.0 s"]


def test_a_part_that_is_soon_there_or_fails_has_no_last_line() -> None:
    reading, said = Reading(), list[str]()
    with progress_of(reading, said, None):
        reading.go_on(20 * MB, 0.5)

    def fail() -> None:
        with progress_of(reading, said, None):
            reading.go_on(20 * MB, 50)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert said == ["loading the transformer"] * 2
    assert not [each for each in threading.enumerate() if each.name == "read-progress"]


def test_lines_come_by_themselves_and_what_they_raise_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_progress, "FIRST_LINE", 0.0)
    called = threading.Event()

    def say(phrase: str) -> None:
        if " read" in phrase:
            called.set()
            raise ValueError(phrase)

    with pytest.raises(ValueError, match=r"0\.00 MB of 1 MB read, none since"), ReadProgress(say, "decoder", MB):
        assert called.wait(20)


def test_what_is_counted_is_what_is_read(tiny_wan_folder: Path) -> None:
    prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu"))
    assert isinstance(prepared, PreparedModel)
    (file,) = (tiny_wan_folder / "transformer").glob("*.safetensors")
    size, before = file.stat().st_size, num_bytes_read()
    assert transformer_bytes(prepared.model, ["transformer"]) == size
    prepared.load()
    every = sum(each.stat().st_size for each in tiny_wan_folder.glob("*/*.safetensors"))
    # Without the heads of files and the half of the autoencoder that encodes.
    assert 0.7 * every < num_bytes_read() - before <= every
    elsewhere = TransformerFile(str(file), "transformer_path", "transformer")
    weights = dataclasses.replace(prepared.model.weights, files=(elsewhere,))
    model = dataclasses.replace(prepared.model, weights=weights)
    assert transformer_bytes(model, ["transformer"]) == size
    assert transformer_bytes(model, ["transformer", "transformer_2"]) is None
