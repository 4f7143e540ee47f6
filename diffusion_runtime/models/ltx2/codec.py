"""LTX-2's decoder of the video as diffusers computes it, with that of the sound. Also their encoders, for an image or a
sound to start from."""

from __future__ import annotations

import math
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.interface import LatentEncoder, SampleEncoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import VideoDecoder, by_statistics, norm_fused
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.first_frame_encoder import FirstFrameConditioner
from diffusion_runtime.models.ltx2.condition import LTX2Conditioner, SoundEncoder
from diffusion_runtime.models.ltx2.config import AUDIO_VAE, read_geometry
from diffusion_runtime.models.ltx2.positions import AUDIO_FACTOR
from diffusion_runtime.models.ltx2.sound_decoder import (
    AUDIO_AUTOENCODER,
    SoundDecoder,
    is_statistic,
    load_sound_decoder,
    sample_rate,
)

VIDEO_AUTOENCODER = DiffusersComponent(
    COMPONENT, "diffusers.models.autoencoders.autoencoder_kl_ltx2", "AutoencoderKLLTX2Video"
)
UPSAMPLER = DiffusersComponent(
    "latent_upsampler", "diffusers.pipelines.ltx2.latent_upsampler", "LTX2LatentUpsamplerModel"
)


class LTX2Decoder(VideoDecoder):
    """The decoder of AutoencoderKLLTX2Video, in its weights' dtype, and that of the sound. scaling_factor: of the
    video's latents."""

    def __init__(self, autoencoder: Any, scaling_factor: float, sound: SoundDecoder) -> None:
        restore = by_statistics(autoencoder.latents_mean, autoencoder.latents_std, scaling_factor)
        frames, _ = _factors(autoencoder.decoder)
        decoders = norm_fused(autoencoder, lambda module, raw: module.decoder(raw), frames)
        super().__init__(autoencoder, restore, decoders, tiling(autoencoder))
        self.sound = sound

    def decode_audio(self, latents: torch.Tensor) -> Audio:
        return self.sound.decode(latents)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LTX2Decoder:
    """Load the decoders of a diffusers folder's `vae` and `audio_vae`, and its `vocoder`.

    Raises ModelLoadError for settings that the installed diffusers does not know, or that need more than latents, and
    for weights that do not fit.
    """
    check_decoding(folder)
    return LTX2Decoder(
        VIDEO_AUTOENCODER.load(folder, device, dtype, left_out=("encoder",), stays_float32=is_statistic),
        read_config(folder, COMPONENT).number("scaling_factor", 1.0),
        load_sound_decoder(folder, device, dtype),
    )


def load_image_conditioner(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LTX2Conditioner:
    """Return the encoders of a diffusers folder's `vae` and `audio_vae`, loaded on first use, which raises what
    load_decoder raises."""
    return LTX2Conditioner(
        read_geometry(folder),
        lambda: _load_image_encoder(folder, device, dtype),
        lambda: _load_sound_encoder(folder, device),
    )


def load_clip_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
    """Load the encoders of a diffusers folder's `vae` and `audio_vae`. Raises what load_decoder raises."""
    pictures, sound = _load_image_encoder(folder, device, dtype), _load_sound_encoder(folder, device)
    of_samples = SampleEncoder(sound.sample_rate, sound.num_samples, sound.encode)
    libraries = (*pictures.libraries, sound.library)
    return LatentEncoder(pictures.encode_frames, lambda: libraries, of_samples)


def _load_image_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> FirstFrameConditioner:
    autoencoder = VIDEO_AUTOENCODER.load(folder, device, dtype, left_out=("decoder",), stays_float32=is_statistic)
    return FirstFrameConditioner(autoencoder, read_config(folder, COMPONENT).number("scaling_factor", 1.0))


def _load_sound_encoder(folder: AnyFolder, device: torch.device) -> SoundEncoder:
    # In float32: it is small, and a spectrogram spans eleven powers of e.
    autoencoder = AUDIO_AUTOENCODER.load(folder, device, torch.float32, left_out=("decoder",))
    file = read_config(folder, AUDIO_VAE)
    return SoundEncoder(
        autoencoder,
        sample_rate=file.whole_number("sample_rate", 16000),
        hop_length=file.whole_number("mel_hop_length", 160),
        num_bins=file.whole_number("mel_bins", 64),
        factor=AUDIO_FACTOR,
    )


def _factors(network: Any) -> tuple[int, int]:
    """Return the frames and pixels a side of a latent: the autoencoder's own ratios are its encoder's, or guessed."""
    strides = [each.stride for block in network.up_blocks for each in block.upsamplers or ()]
    frames, rows = (math.prod(stride[axis] for stride in strides) for axis in (0, 1))
    return frames * int(network.patch_size_t), rows * int(network.patch_size)


def tiling(autoencoder: Any) -> Tiling:
    """Return diffusers' tile sizes: 512 pixels a side that overlap by 64; 64 frames that overlap by 16."""
    # Its own tiles along the frames leave out the last frame of a tile instead of the first, and show everything after
    # it one frame late; a tile of one latent, which it makes of the last of 15, cannot be padded by reflection.
    _, pixels = _factors(autoencoder.decoder)
    size, stride = autoencoder.tile_sample_min_height // pixels, autoencoder.tile_sample_stride_height // pixels
    return Tiling(size, stride, pixels, (8, 6), keeps_ends=True)


def check_decoding(folder: AnyFolder) -> None:
    """Check that a decoder adds no noise to latents, or between its layers, and its numbers. Raises ModelLoadError."""
    file = read_config(folder, COMPONENT)
    if file.flag("timestep_conditioning", False):
        raise file.error("timestep_conditioning", "false: noise before decoding is not supported", True)
    noisy = file.values.get("decoder_inject_noise", False)
    if noisy is True or (isinstance(noisy, list) and any(noisy)):
        raise file.error("decoder_inject_noise", "false: noise between a decoder's layers is not supported", noisy)
    file.number("scaling_factor", 1.0)
    sample_rate(folder)
