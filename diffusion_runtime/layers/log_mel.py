"""Log-mel spectrogram of a waveform: Hann windows, magnitudes, triangular filters of area 1 on Slaney's mel scale."""

from __future__ import annotations

import math

import torch

# Slaney's scale: linear up to 1000 Hz, 15 mels there, and then a factor of 6.4 in 27 mels.
_HERTZ_PER_MEL, _BREAK, _LOG_STEP = 200.0 / 3, 1000.0, math.log(6.4) / 27
# Quieter bins than this count as this.
_FLOOR = 1e-5


def log_mel_spectrogram(
    waveform: torch.Tensor, sample_rate: int, *, num_bins: int, hop_length: int, window_length: int = 1024
) -> torch.Tensor:
    """[channels, samples] to [channels, 1 + samples // hop_length, num_bins], float32: log of at least 1e-5.

    Windows are centred on multiples of the hop, over a waveform that is mirrored at its ends.
    """
    window = torch.hann_window(window_length, device=waveform.device)
    spectrum = torch.stft(
        waveform.float(), window_length, hop_length, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    filters = mel_filters(sample_rate, window_length // 2 + 1, num_bins).to(waveform.device)
    return (filters @ spectrum.abs()).clamp(min=_FLOOR).log().transpose(1, 2)


def mel_filters(sample_rate: int, num_frequencies: int, num_bins: int) -> torch.Tensor:
    """[num_bins, num_frequencies]: the weight of each frequency, from 0 to half the sample rate, in each bin."""
    frequencies = torch.linspace(0, sample_rate / 2, num_frequencies, dtype=torch.float64)
    edges = _hertz(torch.linspace(0, _mel(sample_rate / 2), num_bins + 2, dtype=torch.float64))
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * (2 / (upper - lower))).float()


def _mel(hertz: float) -> float:
    if hertz < _BREAK:
        return hertz / _HERTZ_PER_MEL
    return _BREAK / _HERTZ_PER_MEL + math.log(hertz / _BREAK) / _LOG_STEP


def _hertz(mels: torch.Tensor) -> torch.Tensor:
    above = _BREAK * torch.exp(_LOG_STEP * (mels - _BREAK / _HERTZ_PER_MEL))
    return torch.where(mels < _BREAK / _HERTZ_PER_MEL, mels * _HERTZ_PER_MEL, above)
