"""MiniMax-H3's autoencoders as diffusers computes them, of the video and of the sound."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.minimax_h3.config import AUDIO_VAE
from diffusion_runtime.models.minimax_h3.keyframes import EncodeImage

_MODULE = "diffusers.models.autoencoders.autoencoder_kl_minimax_h3"
VIDEO_AUTOENCODER = DiffusersComponent(COMPONENT, _MODULE, "AutoencoderKLMiniMaxH3")
AUDIO_AUTOENCODER = DiffusersComponent(AUDIO_VAE, f"{_MODULE}_audio", "AutoencoderKLMiniMaxH3Audio")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class MiniMaxH3Decoder(LatentDecoder):
    """Both decoders, of diffusers."""

    library = "diffusers"

    def __init__(self, video: Any, audio: Any, sample_rate: int) -> None:
        self._video, self._audio, self._sample_rate = video, audio, sample_rate
        self.implementation = type(video).__name__

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        weight, config = next(self._video.parameters()), self._video.config
        mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (config.latents_mean, config.latents_std))
        raw = latents.float().cpu() * std + mean
        with torch.inference_mode():
            pixels = self._video.decode(raw.to(weight.device, weight.dtype), return_dict=False)[0].float().cpu()
        mean, std = (torch.tensor(each).view(1, 3, 1, 1, 1) for each in (_MEAN, _STD))
        return (pixels * std + mean).clamp(0, 1).permute(0, 2, 3, 4, 1)

    def decode_audio(self, latents: torch.Tensor) -> Audio:
        weight, config = next(self._audio.parameters()), self._audio.config
        mean, std = (torch.tensor(each).view(1, -1, 1) for each in (config.latents_mean, config.latents_std))
        raw = latents[0].float().cpu().permute(2, 0, 1) * std + mean
        with torch.inference_mode():
            waveform = self._audio.decode(raw.to(weight.device, weight.dtype), return_dict=False)[0]
        samples = waveform.float().reshape(len(raw), -1).clamp(-1, 1).cpu().numpy()
        return Audio(numpy.ascontiguousarray(samples), self._sample_rate)


def _load_video(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import AutoencoderKLMiniMaxH3

    load: Any = AutoencoderKLMiniMaxH3.from_pretrained
    return load(folder / COMPONENT, torch_dtype=dtype, use_safetensors=True, local_files_only=True).to(device)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> MiniMaxH3Decoder:
    """Load both decoders. Raises ModelLoadError."""
    return MiniMaxH3Decoder(
        _load_video(folder, device, dtype),
        AUDIO_AUTOENCODER.load(folder, device, torch.float32),
        read_config(folder, AUDIO_VAE).whole_number("sampling_rate", 32000),
    )


def load_image_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> tuple[EncodeImage, str]:
    """Load the encoder of images. Raises ModelLoadError."""
    autoencoder = _load_video(folder, device, dtype)
    from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        weight = next(autoencoder.parameters())
        given = pixels.to(weight.device).permute(2, 0, 1)[None, :, None]
        with torch.inference_mode():
            return encode_vae_condition(autoencoder, given, _MEAN, _STD)

    return encode, "AutoencoderKLMiniMaxH3's encoder"
