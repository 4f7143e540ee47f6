"""MiniMax-H3's autoencoders: of pictures, a convolutional encoder and a decoder that is a transformer; of sound, one
channel at a time, with a vocoder as its decoder.

17 frames are 5 latent frames, and a video has 17 n + 5 frames, so 5 n + 2 latent frames. A second of sound, at 32 kHz,
has 40 latents of each of two sides. Latents of sound are [batch, channels, length, sides].
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.decoders.autoencoder import COMPONENT, DiffusersComponent
from diffusion_runtime.decoders.bigvgan_decoder import BigVganAutoencoder, BigVganSizes
from diffusion_runtime.decoders.clip_encoder import ClipEncoder, ClipEncoderSizes
from diffusion_runtime.decoders.interface import LatentEncoder, SampleEncoder
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.vit_decoder_network import (
    NUM_AXES,
    VitDecoderSizes,
    VitVideoAutoencoder,
    pair_channels,
)
from diffusion_runtime.decoders.vit_video_decoder import IMAGENET_MEAN, IMAGENET_STD, VitVideoDecoder
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.media.audio import Audio
from diffusion_runtime.models.minimax_h3.config import AUDIO_VAE
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import LibraryAttention
from diffusion_runtime.weights.vit_autoencoder_rows import diffusers_rows

# Attention of the video decoder: within a tile, which is no grid of the video.
DECODER_ROLE = "minimax_h3.video_decoder"
register_role(DECODER_ROLE, "cross")
_MODULES = "diffusers.models.autoencoders.autoencoder_kl_minimax_h3"
# In pixels.
_TILE, _TILE_OVERLAP = 256, 64
_ENCODER_PARTS = ("encoder", "quant_conv")
_DECODER_PARTS = ("decoder", "post_quant_conv")
AUDIO_ENCODER_PARTS = ("encoder", "pre_block", "mean_proj", "logs_proj")
_ENCODER_RATES = (2, 4, 4, 5, 5)
_AUDIO_DECODER_PARTS = ("decoder", "dec_in_proj")
# Computed in float32 by the authors' code whatever the dtype of the rest.
_IN_FLOAT32 = frozenset((*_ENCODER_PARTS, "norm1", "norm2", "norm_out", "scale1", "scale2"))
# The authors sample the latents of an image or a video that is given with this seed, whatever the request's, and round
# them to float16.
_ENCODING_SEED = 42
_VIDEO_KEYS = (
    "in_channels out_channels latent_channels block_out_channels layers_per_block spatial_downsample_factors "
    "temporal_downsample_factors norm_num_groups norm_eps spatial_padding_mode decoder_num_layers "
    "decoder_num_attention_heads decoder_attention_head_dim decoder_num_register_tokens decoder_ffn_mult "
    "decoder_rope_theta decoder_rope_dim_ratio decoder_norm_eps clip_length token_drop latents_mean latents_std"
).split()
_AUDIO_KEYS = (
    "encoder_dim encoder_rates latent_dim latent_channels num_attention_heads decoder_dim decoder_rates "
    "decoder_kernel_sizes resblock_kernel_sizes resblock_dilation_sizes sampling_rate latents_mean latents_std"
).split()


def _decoder_sizes(file: ConfigFile) -> VitDecoderSizes:
    """Read the sizes of the video decoder. Raises ModelLoadError that names the file and the key."""
    file.refuse_unknown(_VIDEO_KEYS)
    file.refuse_other_values({"in_channels": 3, "out_channels": 3, "spatial_padding_mode": "reflect"}, "as published")
    encoder = encoder_sizes(file)
    patch = math.prod(encoder.frame_factors), math.prod(encoder.side_factors)
    head_dim = file.whole_number("decoder_attention_head_dim", 64)
    ratio = file.number("decoder_rope_dim_ratio", 0.75)
    num_rotated = int(head_dim * ratio)
    if not 0 < num_rotated <= head_dim or num_rotated % (2 * NUM_AXES):
        expected = f"a share of {head_dim} channels that is a multiple of {2 * NUM_AXES}"
        raise file.error("decoder_rope_dim_ratio", expected, ratio)
    if not 0 < encoder.num_dropped < math.ceil(encoder.clip_length / patch[0]):
        raise file.error("token_drop", "fewer latents than a clip has, and at least 1", encoder.num_dropped)
    return VitDecoderSizes(
        latent_channels=encoder.latent_channels,
        num_layers=file.layer_count("decoder_num_layers", 36),
        num_heads=file.whole_number("decoder_num_attention_heads", 32),
        head_dim=head_dim,
        num_registers=file.whole_number("decoder_num_register_tokens", 4),
        hidden_factor=file.whole_number("decoder_ffn_mult", 4),
        num_rotated=num_rotated,
        rope_theta=file.number("decoder_rope_theta", 100.0),
        eps=file.number("decoder_norm_eps", 1e-5),
        patch=patch,
        clip_length=encoder.clip_length,
        num_dropped=encoder.num_dropped,
    )


def encoder_sizes(file: ConfigFile) -> ClipEncoderSizes:
    """Read the sizes of the video encoder. Raises ModelLoadError that names the file and the key."""
    widths = _several(file, "block_out_channels", (128, 256, 256, 512, 512, 1024))
    sides = _several(file, "spatial_downsample_factors", (2, 2, 2, 2, 1, 1), len(widths))
    frames = _several(file, "temporal_downsample_factors", (1, 2, 2, 1, 1, 1), len(widths))
    if max(*sides, *frames) > 2:
        raise file.error("spatial_downsample_factors", "1 or 2 each, as temporal_downsample_factors", sides)
    return ClipEncoderSizes(
        latent_channels=file.whole_number("latent_channels", 24),
        widths=widths,
        num_blocks=file.layer_count("layers_per_block", 2),
        side_factors=sides,
        frame_factors=frames,
        num_groups=file.whole_number("norm_num_groups", 32),
        eps=file.number("norm_eps", 1e-6),
        clip_length=file.whole_number("clip_length", 17),
        num_dropped=file.whole_number("token_drop", 3),
    )


def _audio_sizes(file: ConfigFile) -> BigVganSizes:
    """Read the sizes of the sound's decoder. Raises ModelLoadError that names the file and the key."""
    file.refuse_unknown(_AUDIO_KEYS)
    rates = _several(file, "decoder_rates", (5, 5, 2, 2, 2, 2, 2))
    kernels = _several(file, "resblock_kernel_sizes", (3, 7, 11))
    given = file.values.get("resblock_dilation_sizes") or [[1, 3, 5]] * len(kernels)
    if (
        not isinstance(given, list | tuple)
        or len(given) != len(kernels)
        or not all(isinstance(each, list | tuple) and each and all(map(_is_size, each)) for each in given)
    ):
        raise file.error("resblock_dilation_sizes", f"{len(kernels)} lists of whole numbers", given)
    hop = math.prod(_several(file, "encoder_rates", _ENCODER_RATES))
    if math.prod(rates) != hop:
        raise file.error("decoder_rates", f"a product of {hop}, as of encoder_rates", rates)
    return BigVganSizes(
        latent_channels=file.whole_number("latent_channels", 32),
        latent_dim=file.whole_number("latent_dim", 2048),
        dim=file.whole_number("decoder_dim", 1024, minimum=2 ** len(rates)),
        rates=rates,
        kernels=_several(file, "decoder_kernel_sizes", (9, 9, 4, 4, 4, 4, 4), len(rates)),
        block_kernels=kernels,
        block_dilations=tuple(tuple(each) for each in given),
    )


# The deepest published network has 7 levels.
_MAX_LEVELS, _MAX_VALUE = 16, 65536


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_VALUE


def _several(file: ConfigFile, key: str, default: tuple[int, ...], length: int | None = None) -> tuple[int, ...]:
    """Read a list of sizes. Raises ModelLoadError for another value, and another length."""
    found = file.values.get(key, default)
    if not isinstance(found, list | tuple) or not all(map(_is_size, found)) or not 1 <= len(found) <= _MAX_LEVELS:
        raise file.error(key, f"a list of whole numbers from 1 to {_MAX_VALUE}", found)
    if length is not None and len(found) != length:
        raise file.error(key, f"{length} numbers", found)
    return tuple(found)


def _video_half(settings: Mapping[str, Any]) -> nn.Module | None:
    try:
        sizes = _decoder_sizes(ConfigFile(Path(COMPONENT), settings))
    except ModelLoadError:  # check_decoding reports it
        return None
    with empty_modules():
        return VitVideoAutoencoder("AutoencoderKLMiniMaxH3", sizes)


def _audio_half(settings: Mapping[str, Any]) -> nn.Module | None:
    try:
        sizes = _audio_sizes(ConfigFile(Path(AUDIO_VAE), settings))
    except ModelLoadError:
        return None
    with empty_modules():
        return BigVganAutoencoder(sizes)


def _original_rows(module: nn.Module, rows: Any) -> Any:
    """Return the tensors of the authors' file by diffusers' names; others as they are."""
    return diffusers_rows(rows, module.sizes.num_heads if isinstance(module, VitVideoAutoencoder) else None)


VIDEO_AUTOENCODER = DiffusersComponent(
    COMPONENT,
    _MODULES,
    "AutoencoderKLMiniMaxH3",
    encoder_parts=_ENCODER_PARTS,
    decoding_half=_video_half,
    stays_float32=lambda name: not _IN_FLOAT32.isdisjoint(name.split(".")),
    arrange=pair_channels,
    original_rows=_original_rows,
    # The most used file of it is int8 ConvRot.
    reads_quantized=True,
)
AUDIO_AUTOENCODER = DiffusersComponent(
    AUDIO_VAE,
    f"{_MODULES}_audio",
    "AutoencoderKLMiniMaxH3Audio",
    encoder_parts=AUDIO_ENCODER_PARTS,
    decoding_half=_audio_half,
    # The authors' note: in bfloat16 the sound is 20 dB quieter.
    stays_float32=lambda _: True,
)


def check_decoding(folder: AnyFolder) -> None:
    """Check the settings of both autoencoders. Raises ModelLoadError that names the file and the key."""
    video, audio = read_config(folder, COMPONENT), read_config(folder, AUDIO_VAE)
    _statistics(video, _decoder_sizes(video).latent_channels)
    _statistics(audio, _audio_sizes(audio).latent_channels)
    _sample_rate(audio)


def _statistics(file: ConfigFile, num_channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read mean and deviation of the latents by channel. Raises ModelLoadError."""
    return file.numbers("latents_mean", num_channels), file.numbers("latents_std", num_channels)


def _sample_rate(file: ConfigFile) -> int:
    return file.whole_number("sampling_rate", 32000)


def sample_rate(folder: AnyFolder) -> int:
    """Return the samples a second of the sound. Raises ModelLoadError."""
    return _sample_rate(read_config(folder, AUDIO_VAE))


def tiling(autoencoder: Any) -> Tiling:
    """Return the authors' tiles: 256 pixels a side that overlap by 64 or more. They are part of the result."""
    pixels = int(autoencoder.spatial_compression_ratio)
    size, overlap = (max(1, each // pixels) for each in (_TILE, _TILE_OVERLAP))
    return Tiling(size, size - overlap, pixels, is_default=True)


class MiniMaxH3Decoder(VitVideoDecoder):
    """The decoders of AutoencoderKLMiniMaxH3, in its weights' dtype, and of AutoencoderKLMiniMaxH3Audio, in float32.

    audio_statistics: mean and deviation of the sound's latents by channel. sample_rate: of the sound.
    """

    def __init__(
        self,
        autoencoder: VitVideoAutoencoder,
        statistics: tuple[Sequence[float], Sequence[float]],
        attention: Sequence[AttentionLayer],
        audio_autoencoder: BigVganAutoencoder,
        audio_statistics: tuple[Sequence[float], Sequence[float]],
        sample_rate: int,
    ) -> None:
        super().__init__(autoencoder, *statistics, attention, tiling(autoencoder))
        self._audio_autoencoder = audio_autoencoder
        self._audio_mean, self._audio_std = (
            torch.tensor(tuple(each), device=self._device).view(1, -1, 1) for each in audio_statistics
        )
        self._sample_rate = sample_rate

    def decode_audio(self, latents: torch.Tensor) -> Audio:
        """Decode the sound of one sample. latents: normalised, [1, channels, length, sides]."""
        sides = latents[0].to(self._device, torch.float32).permute(2, 0, 1)
        with torch.inference_mode():
            samples = self._audio_autoencoder.decode(sides * self._audio_std + self._audio_mean)
        return Audio(numpy.ascontiguousarray(samples.cpu().numpy()), self._sample_rate)


def load_decoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> MiniMaxH3Decoder:
    """Load the decoders of a diffusers folder's `vae` and `audio_vae`.

    Raises ModelLoadError for settings that are not supported, and for weights that do not fit.
    """
    check_decoding(folder)
    video, audio = read_config(folder, COMPONENT), read_config(folder, AUDIO_VAE)
    autoencoder = VIDEO_AUTOENCODER.load_decoder(folder, device, dtype)
    sizes = autoencoder.sizes
    return MiniMaxH3Decoder(
        autoencoder,
        _statistics(video, sizes.latent_channels),
        attention_of(sizes, AttentionPolicy(device=str(device), dtype=dtype)),
        AUDIO_AUTOENCODER.load_decoder(folder, device, dtype),
        _statistics(audio, _audio_sizes(audio).latent_channels),
        _sample_rate(audio),
    )


def decoder_attention(folder: AnyFolder, policy: AttentionPolicy) -> tuple[AttentionLayer, ...]:
    """Return the attention of the video decoder's blocks. Raises what AttentionLayer and check_decoding raise."""
    return attention_of(_decoder_sizes(read_config(folder, COMPONENT)), policy)


def attention_of(sizes: VitDecoderSizes, policy: AttentionPolicy) -> tuple[AttentionLayer, ...]:
    """Return the attention of the blocks of a decoder of these sizes, which holds none of its state."""
    # Processes that share a transformer's heads share the decoder's tiles instead.
    policy = dataclasses.replace(policy, mesh=ProcessMesh())
    total = sizes.num_layers
    layers = (
        LayerInfo(index, total, DECODER_ROLE, f"vae.decoder.transformer_blocks.{index}.attn") for index in range(total)
    )
    return tuple(LocalAttention(sizes.num_heads, sizes.head_dim, layer=layer, policy=policy) for layer in layers)


class MiniMaxH3Encoder:
    """Encoder of given images, videos and sounds to normalised latents, as the authors condition the model on them.

    Both parts are loaded when they are first used. folder: of the model.
    """

    def __init__(self, folder: AnyFolder, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._pictures: ClipEncoder | None = None
        self._sound: Any = None

    @torch.inference_mode()
    def encode_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Encode an image or a video to [1, channels, latent frames, height, width], float32, on the CPU.

        frames: uint8, [frames, height, width, 3]; one for an image. Raises ModelLoadError as load_decoder does.
        """
        pixels = frames.to(self._device, torch.float32).div_(255.0).permute(3, 0, 1, 2)[None]
        likeliest, deviation = self._encoded(pixels)
        noise = torch.randn(likeliest.shape, generator=torch.Generator().manual_seed(_ENCODING_SEED))
        return self._normal((likeliest + deviation * noise.to(self._device)).to(torch.float16).float().cpu())

    @torch.inference_mode()
    def encode_likeliest(self, frames: torch.Tensor) -> torch.Tensor:
        """Encode a video as a clip starts from it, as LatentEncoder.encode does."""
        return self._normal(self._encoded((frames.to(self._device) + 1) / 2)[0].cpu())

    def _encoded(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and deviation of the latents of frames in [0, 1], [1, 3, frames, height, width]."""
        if self._pictures is None:
            self._pictures = load_picture_encoder(self._folder, self._device)
        pixels = (frames - _by_channel(IMAGENET_MEAN, self._device)) / _by_channel(IMAGENET_STD, self._device)
        side = math.prod(self._pictures.sizes.side_factors)
        size, overlap = (max(1, each // side) for each in (_TILE, _TILE_OVERLAP))
        with OneDnnConvolutions():
            return self._pictures.encode(pixels, Tiling(size, size - overlap, side, is_default=True))

    def _normal(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalise latents of pictures, on the CPU."""
        cpu, (mean, std) = torch.device("cpu"), _statistics(read_config(self._folder, COMPONENT), latents.shape[1])
        return (latents - _by_channel(mean, cpu)) / _by_channel(std, cpu)

    @torch.inference_mode()
    def encode_sound(self, samples: torch.Tensor) -> torch.Tensor:
        """Encode a sound to [1, channels, length, sides], float32, on the CPU: the likeliest latents.

        samples: float32 in [-1, 1] at the model's rate, [sides, number]; silence follows to whole latents.
        """
        if self._sound is None:
            with warnings.catch_warnings():
                # Of torch, on how diffusers normalises weights.
                warnings.simplefilter("ignore", FutureWarning)
                self._sound = AUDIO_AUTOENCODER.load(
                    self._folder, self._device, torch.float32, left_out=_AUDIO_DECODER_PARTS
                )
        file = read_config(self._folder, AUDIO_VAE)
        statistics = _statistics(file, _audio_sizes(file).latent_channels)
        mean, std = (torch.tensor(each).view(1, -1, 1) for each in statistics)
        latents = self._sound.encode(samples[:, None].to(self._device)).latent_dist.mode().float().cpu()
        normal: torch.Tensor = (latents - mean) / std
        return normal.permute(1, 2, 0)[None]


def load_clip_encoder(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,  # noqa: ARG001 - it computes in float32
) -> LatentEncoder:
    """Return the encoders of a diffusers folder's `vae` and `audio_vae`, for a video that a clip starts from. Raises
    ModelLoadError when the first one comes, for what is wrong with the weights."""
    encoder, rate = MiniMaxH3Encoder(folder, device), sample_rate(folder)
    hop = math.prod(_several(read_config(folder, AUDIO_VAE), "encoder_rates", _ENCODER_RATES))
    libraries = (
        LibraryAttention("vae encoder", "diffusers", "AutoencoderKLMiniMaxH3's encoder"),
        LibraryAttention("audio vae encoder", "diffusers", "AutoencoderKLMiniMaxH3Audio's encoder"),
    )
    of_samples = SampleEncoder(rate, lambda length: length * hop, encoder.encode_sound)
    return LatentEncoder(encoder.encode_likeliest, lambda: libraries, of_samples)


def load_image_encoder(
    folder: AnyFolder,
    device: torch.device,
    dtype: torch.dtype,  # noqa: ARG001 - it computes in float32
) -> tuple[Callable[[torch.Tensor], torch.Tensor], str]:
    """Return the encoder of an image [height, width, 3], uint8, to [1, channels, 1, height, width], and its
    description. Raises ModelLoadError when the first image comes, for what is wrong with the weights."""
    encoder = MiniMaxH3Encoder(folder, device)
    return lambda image: encoder.encode_frames(image[None]), "AutoencoderKLMiniMaxH3's encoder"


def load_picture_encoder(folder: AnyFolder, device: torch.device) -> ClipEncoder:
    """Load the encoder of a diffusers folder's `vae`, in float32. Raises what load_decoder raises."""
    with empty_modules():
        encoder = ClipEncoder(encoder_sizes(read_config(folder, COMPONENT)))
    VIDEO_AUTOENCODER.fill(encoder, folder, device, torch.float32, _DECODER_PARTS)
    return encoder


def _by_channel(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(tuple(values), dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
