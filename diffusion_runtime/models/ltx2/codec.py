"""LTX-2's decoders as diffusers computes them: of the video, and of the sound, whose spectrogram a vocoder plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.convolution import QuickConvolutions
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.autoencoder import COMPONENT, load_autoencoder_half, load_component
from diffusion_runtime.models.folder import component_class, read_config
from diffusion_runtime.models.interface import LatentDecoder
from diffusion_runtime.models.ltx2.config import AUDIO_VAE

VOCODER = "vocoder"


class LTX2Decoder(LatentDecoder):
    """The decoders of AutoencoderKLLTX2Video and AutoencoderKLLTX2Audio, in their weights' dtype, and the vocoder.

    scaling_factor: of the video's latents. sample_rate: of the vocoder's sound.
    """

    library = "diffusers"

    def __init__(
        self, autoencoder: Any, scaling_factor: float, audio_autoencoder: Any, vocoder: Any, sample_rate: int
    ) -> None:
        self._autoencoder = autoencoder
        self._scaling_factor = scaling_factor
        self._audio_autoencoder = audio_autoencoder
        self._vocoder = vocoder
        self._sample_rate = sample_rate
        self.implementation = type(autoencoder).__name__

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """See LatentDecoder.decode. The normalisation is undone in float32, whatever the decoder computes in."""
        weight = next(self._autoencoder.parameters())
        mean, std = (
            statistic.view(1, -1, 1, 1, 1)
            for statistic in (self._autoencoder.latents_mean, self._autoencoder.latents_std)
        )
        raw = latents.to(weight.device, torch.float32) * std / self._scaling_factor + mean
        with torch.inference_mode(), QuickConvolutions():
            frames: torch.Tensor = self._autoencoder.decode(raw.to(weight.dtype), return_dict=False)[0]
            return frames.float().mul_(0.5).add_(0.5).clamp_(0.0, 1.0).permute(0, 2, 3, 4, 1).contiguous()

    def decode_audio(self, latents: torch.Tensor) -> Audio:
        """See LatentDecoder.decode_audio. Normalised moment by moment, over channels and bins together."""
        weight = next(self._audio_autoencoder.parameters())
        mean, std = (
            statistic.view(1, latents.shape[1], 1, latents.shape[3])
            for statistic in (self._audio_autoencoder.latents_mean, self._audio_autoencoder.latents_std)
        )
        raw = latents.to(weight.device, torch.float32) * std + mean
        with torch.inference_mode():
            spectrogram: torch.Tensor = self._audio_autoencoder.decode(raw.to(weight.dtype), return_dict=False)[0]
            # The vocoder is in float32: the eight bits of bfloat16 would be heard as noise.
            waveform: torch.Tensor = self._vocoder(spectrogram.float())
        samples = waveform[0].clamp(-1.0, 1.0).cpu().numpy()
        return Audio(numpy.ascontiguousarray(samples), self._sample_rate)


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype) -> LTX2Decoder:
    """The decoders of a diffusers folder's `vae` and `audio_vae`, and its `vocoder`.

    Raises ModelLoadError for settings that the installed diffusers does not know, or that need more than latents, and
    for weights that do not fit.
    """
    # Imported here: it takes a few tenths of a second, and more when it is the first part of diffusers.
    from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
    from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    _check_is_deterministic(folder)
    _, name = component_class(folder, VOCODER)
    if name != LTX2Vocoder.__name__:
        raise ModelLoadError(
            f"{folder}: the vocoder is a {name}, expected {LTX2Vocoder.__name__}, as in LTX-2.0, the version that this "
            "family runs natively"
        )
    return LTX2Decoder(
        load_autoencoder_half(
            folder, AutoencoderKLLTX2Video, device, dtype, left_out=("encoder",), stays_float32=_is_statistic
        ),
        read_config(folder, COMPONENT).number("scaling_factor", 1.0),
        load_component(
            folder,
            AUDIO_VAE,
            AutoencoderKLLTX2Audio,
            device,
            dtype,
            left_out=("encoder",),
            stays_float32=_is_statistic,
        ),
        load_component(folder, VOCODER, LTX2Vocoder, device, torch.float32),
        read_config(folder, VOCODER).whole_number("output_sampling_rate", 24000),
    )


def _is_statistic(name: str) -> bool:
    return name in ("latents_mean", "latents_std")


def _check_is_deterministic(folder: Path) -> None:
    """Raises ModelLoadError for a decoder that adds noise to latents, or between its layers."""
    file = read_config(folder, COMPONENT)
    if file.flag("timestep_conditioning", False):
        raise file.error("timestep_conditioning", "false: noise before decoding is not supported", True)
    noisy = file.values.get("decoder_inject_noise", False)
    if noisy is True or (isinstance(noisy, list) and any(noisy)):
        raise file.error("decoder_inject_noise", "false: noise between a decoder's layers is not supported", noisy)
