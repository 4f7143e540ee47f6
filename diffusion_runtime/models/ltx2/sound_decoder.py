"""Decoder of LTX-2's sound as diffusers computes it: latents become a spectrogram, which a vocoder plays."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.ltx2.config import AUDIO_VAE

VOCODER = "vocoder"
AUDIO_AUTOENCODER = DiffusersComponent(
    AUDIO_VAE, "diffusers.models.autoencoders.autoencoder_kl_ltx2_audio", "AutoencoderKLLTX2Audio"
)
# Vocoders of LTX-2.0, and of LTX-2.3 with bandwidth extension, a second network for the high frequencies.
_EXTENDED_VOCODER = "LTX2VocoderWithBWE"
VOCODER_NETWORK = DiffusersComponent(
    VOCODER, "diffusers.pipelines.ltx2.vocoder", "LTX2Vocoder", other_classes=(_EXTENDED_VOCODER,)
)


class SoundDecoder:
    """The decoder of AutoencoderKLLTX2Audio, in its weights' dtype, and the vocoder. sample_rate: of its sound."""

    def __init__(self, autoencoder: Any, vocoder: Any, sample_rate: int) -> None:
        self.autoencoder = autoencoder
        self.vocoder = vocoder
        self._sample_rate = sample_rate

    def decode(self, latents: torch.Tensor) -> Audio:
        """Decode the sound. It is normalised moment by moment, over channels and bins together."""
        weight = next(self.autoencoder.parameters())
        mean, std = (
            statistic.view(1, latents.shape[1], 1, latents.shape[3])
            for statistic in (self.autoencoder.latents_mean, self.autoencoder.latents_std)
        )
        raw = latents.to(weight.device, torch.float32) * std + mean
        with torch.inference_mode():
            spectrogram: torch.Tensor = self.autoencoder.decode(raw.to(weight.dtype), return_dict=False)[0]
            # The vocoder is in float32: the eight bits of bfloat16 would be heard as noise.
            waveform: torch.Tensor = self.vocoder(spectrogram.float())
        samples = waveform[0].clamp(-1.0, 1.0).cpu().numpy()
        return Audio(numpy.ascontiguousarray(samples), self._sample_rate)


def load_sound_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> SoundDecoder:
    """Load the decoder of a folder's `audio_vae`, and its `vocoder`. Raises ModelLoadError."""
    return SoundDecoder(
        AUDIO_AUTOENCODER.load(folder, device, dtype, left_out=("encoder",), stays_float32=is_statistic),
        _load_vocoder(folder, device),
        sample_rate(folder),
    )


def is_statistic(name: str) -> bool:
    """Return whether a tensor holds statistics of latents, which stay in float32."""
    return name in ("latents_mean", "latents_std")


def _load_vocoder(folder: AnyFolder, device: torch.device) -> Any:
    vocoder = VOCODER_NETWORK.load(folder, device, torch.float32)
    if VOCODER_NETWORK.class_in(folder) == _EXTENDED_VOCODER:
        # Its filter is computed and not read, which the meta device does not do.
        given = vocoder.resampler
        vocoder.resampler = type(given)(ratio=given.ratio, window_type="hann", persistent=False).to(device)
    return vocoder


def sample_rate(folder: AnyFolder) -> int:
    """Read the sample rate of the vocoder's sound. Raises ModelLoadError."""
    file = read_config(folder, VOCODER)
    if VOCODER_NETWORK.class_in(folder) != _EXTENDED_VOCODER:
        return file.whole_number("output_sampling_rate", 24000)
    rates = file.whole_number("input_sampling_rate", 16000), file.whole_number("output_sampling_rate", 48000)
    if rates[1] % rates[0]:
        raise file.error("output_sampling_rate", f"a multiple of {rates[0]}, its input_sampling_rate", rates[1])
    return rates[1]
