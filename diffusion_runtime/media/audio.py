"""Audio: the sound of a video, and the .wav file that holds it alone."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from diffusion_runtime.errors import OutputError

# The largest 16-bit sample.
_FULL_SCALE = 32767


@dataclass(frozen=True, eq=False)
class Audio:
    """samples: float32 [channels, num_samples] in [-1, 1]; sample_rate: samples per second.

    Raises OutputError when the samples have another shape or type, or are not finite.
    """

    samples: numpy.ndarray
    sample_rate: int

    def __post_init__(self) -> None:
        shape = self.samples.shape
        if self.samples.dtype != numpy.float32 or len(shape) != 2 or 0 in shape:
            raise OutputError(
                f"audio: expected float32 [channels, num_samples], got {self.samples.dtype} {list(shape)}"
            )
        if not numpy.isfinite(self.samples).all():
            raise OutputError("audio: the samples are not finite: numbers overflowed, or the weights are damaged")
        if type(self.sample_rate) is not int or self.sample_rate < 1:
            raise OutputError(f"sample_rate: expected a whole number of 1 or more, got {self.sample_rate!r}")

    @property
    def num_channels(self) -> int:
        return int(self.samples.shape[0])

    @property
    def seconds(self) -> float:
        return float(self.samples.shape[1]) / self.sample_rate

    def describe(self) -> dict[str, Any]:
        """Plain values, as a sidecar holds them."""
        return {
            "sample_rate": self.sample_rate,
            "num_channels": self.num_channels,
            "seconds": round(self.seconds, 4),
        }

    def interleaved(self) -> numpy.ndarray:
        """int16 [num_samples, channels]: interleaved, as players and encoders read it. Values beyond 1 are clipped."""
        scaled = (self.samples.clip(-1.0, 1.0) * _FULL_SCALE).round().astype(numpy.int16)
        return numpy.ascontiguousarray(scaled.T)


def write_wav(audio: Audio, path: Path) -> None:
    """16-bit PCM. Raises OSError."""
    with path.open("wb") as file, wave.open(file, "wb") as out:
        out.setnchannels(audio.num_channels)
        out.setsampwidth(2)
        out.setframerate(audio.sample_rate)
        out.writeframes(audio.interleaved().astype("<i2").tobytes())
