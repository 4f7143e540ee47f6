"""Config of a Wan folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.model_folder import (
    INDEX_FILE,
    AnyFolder,
    ConfigFile,
    read_config,
    read_index,
)
from diffusion_runtime.models.geometry import LatentGeometry

_QK_NORM = "rms_norm_across_heads"

# The linear map of a block, in checkpoints trained with Video Sparse Attention, that makes its gate.
GATE = "to_gate_compress"

_KEYS = (
    "patch_size",
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "text_dim",
    "freq_dim",
    "ffn_dim",
    "num_layers",
    "cross_attn_norm",
    "qk_norm",
    "eps",
    # The length of diffusers' table of rotary positions; here they are computed for the size at hand.
    "rope_max_seq_len",
)
# Settings that only image-conditioned checkpoints have.
_IMAGE_KEYS = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")


@dataclass(frozen=True)
class WanTransformerConfig:
    """Sizes of a Wan transformer.

    patch: latents per token in (frames, height, width). num_waves: channels of the sinusoidal timestep.
    norm_cross: whether a layer norm with weights stands before the cross-attention. eps: of every norm.
    has_gate: whether blocks have the gate of Video Sparse Attention; only the names of the weights say it.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    num_channels: int
    text_dim: int
    num_waves: int
    patch: tuple[int, int, int]
    norm_cross: bool
    eps: float
    has_gate: bool = False

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * math.prod(self.patch)


@dataclass(frozen=True)
class WanPipelineConfig:
    """What model_index.json says. boundary: the timestep in [0, 1000] above which the first of two experts predicts,
    None for one transformer. takes_image: whether a video may start from an image, at timestep 0."""

    boundary: float | None
    takes_image: bool


def read_pipeline_config(folder: AnyFolder) -> WanPipelineConfig:
    """model_index.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    path = folder / INDEX_FILE
    file = ConfigFile(path, read_index(folder))
    has_second = file.values.get("transformer_2") not in (None, [None, None])
    ratio = file.values.get("boundary_ratio")
    if has_second != (ratio is not None):
        raise ModelLoadError(
            f"{path}: keys 'transformer_2' and 'boundary_ratio' belong together: two experts and the noise level "
            f"between them; got {shown(file.values.get('transformer_2'))} and {shown(ratio)}"
        )
    takes_image = file.flag("expand_timesteps", False)
    if ratio is None:
        return WanPipelineConfig(None, takes_image)
    if takes_image:
        raise file.error("expand_timesteps", "false in a model of two experts", True)
    boundary = file.number("boundary_ratio")
    if not 0 < boundary < 1:
        raise file.error("boundary_ratio", "a number between 0 and 1", ratio)
    return WanPipelineConfig(1000 * boundary, takes_image)


def read_transformer_config(folder: AnyFolder, component: str = "transformer") -> WanTransformerConfig:
    """config.json of a transformer in a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, component)
    _refuse_image_conditioned(file)
    file.refuse_unknown((*_KEYS, *_IMAGE_KEYS))
    qk_norm = file.values.get("qk_norm", _QK_NORM)
    if qk_norm != _QK_NORM:
        raise file.error("qk_norm", repr(_QK_NORM), qk_norm)
    num_channels = file.whole_number("in_channels")
    out_channels = file.whole_number("out_channels", num_channels)
    if out_channels != num_channels:
        raise ModelLoadError(
            f"{file.path}: keys 'in_channels' ({num_channels}) and 'out_channels' ({out_channels}) differ: this is not "
            "a text-to-video checkpoint, the only kind this family runs natively; `--backend diffusers` runs it"
        )
    patch = file.whole_numbers("patch_size", 3)
    head_dim, num_waves = file.whole_number("attention_head_dim"), file.whole_number("freq_dim")
    for key, value in (("attention_head_dim", head_dim), ("freq_dim", num_waves)):
        if value % 2:
            raise file.error(key, "an even number", value)
    return WanTransformerConfig(
        num_layers=file.layer_count("num_layers"),
        num_heads=file.whole_number("num_attention_heads"),
        head_dim=head_dim,
        ffn_dim=file.whole_number("ffn_dim"),
        num_channels=num_channels,
        text_dim=file.whole_number("text_dim"),
        num_waves=num_waves,
        patch=(patch[0], patch[1], patch[2]),
        norm_cross=file.flag("cross_attn_norm", True),
        eps=file.number("eps", 1e-6),
    )


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """From transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = file.whole_number("z_dim", 16)
    if num_channels != transformer.num_channels:
        raise file.error("z_dim", f"{transformer.num_channels}, the transformer's in_channels", num_channels)
    if read_pipeline_config(folder).takes_image and transformer.patch[0] != 1:
        raise ModelLoadError(
            f"{folder / 'transformer' / 'config.json'}: key 'patch_size': expected 1 latent frame a token in a model "
            f"that starts from an image, got {transformer.patch[0]}"
        )
    return LatentGeometry(
        num_channels=num_channels,
        spatial_factor=file.whole_number("scale_factor_spatial", 8),
        temporal_factor=file.whole_number("scale_factor_temporal", 4),
        patch=transformer.patch,
    )


def _refuse_image_conditioned(file: ConfigFile) -> None:
    for key in _IMAGE_KEYS:
        if file.values.get(key) is not None:
            raise ModelLoadError(
                f"{file.path}: key {shown(key)} is {shown(file.values[key])}: this is an image-conditioned checkpoint, "
                "and this family runs text-to-video ones; `--backend diffusers` runs it"
            )
