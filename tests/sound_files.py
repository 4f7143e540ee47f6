"""Sound files for tests."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy


def write_wave(path: Path, *, seconds: float = 1.0, rate: int = 16000, pitch: float = 440.0) -> str:
    """Two channels that differ."""
    times = numpy.arange(round(seconds * rate)) / rate
    channels = [0.5 * numpy.sin(2 * numpy.pi * pitch * factor * times) * (times < 0.8) for factor in (1, 1.5)]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((numpy.stack(channels, axis=1) * 32767).astype("<i2").tobytes())
    return str(path)
