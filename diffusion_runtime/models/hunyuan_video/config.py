"""Config of a HunyuanVideo folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.model_folder import AnyFolder, read_config
from diffusion_runtime.models.geometry import LatentGeometry

_QK_NORM = "rms_norm"

# sample_size is the training size, which nothing needs.
_KNOWN_KEYS = (
    "in_channels",
    "out_channels",
    "num_attention_heads",
    "attention_head_dim",
    "num_layers",
    "num_single_layers",
    "num_refiner_layers",
    "mlp_ratio",
    "patch_size",
    "patch_size_t",
    "qk_norm",
    "guidance_embeds",
    "text_embed_dim",
    "pooled_projection_dim",
    "rope_theta",
    "rope_axes_dim",
    "image_condition_type",
    "sample_size",
)


@dataclass(frozen=True)
class HunyuanVideoConfig:
    """Sizes of a HunyuanVideo transformer.

    num_layers: blocks of two streams; num_single_layers: blocks of one, behind them. patch: latents per token in
    (frames, height, width). axis_channels: of a head that carry the position on each axis; theta: of those.
    has_guidance: whether the guidance scale is an input.
    """

    num_layers: int
    num_single_layers: int
    num_refiner_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    num_channels: int
    text_dim: int
    pooled_dim: int
    patch: tuple[int, int, int]
    axis_channels: tuple[int, int, int]
    theta: float
    has_guidance: bool

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim


def read_transformer_config(folder: AnyFolder) -> HunyuanVideoConfig:
    """transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown(_KNOWN_KEYS)
    qk_norm = file.values.get("qk_norm", _QK_NORM)
    if qk_norm != _QK_NORM:
        raise file.error("qk_norm", repr(_QK_NORM), qk_norm)
    kind = file.values.get("image_condition_type")
    num_channels = file.whole_number("in_channels")
    out_channels = file.whole_number("out_channels", num_channels)
    if kind is not None or out_channels != num_channels:
        raise ModelLoadError(
            f"{file.path}: keys 'image_condition_type' ({shown(kind)}), 'in_channels' ({num_channels}) and "
            "'out_channels' "
            f"({out_channels}): expected null and equal numbers; this is an image-conditioned checkpoint, and this "
            "family runs text-to-video ones natively; `--backend diffusers` runs the others"
        )
    head_dim, num_heads = file.whole_number("attention_head_dim"), file.whole_number("num_attention_heads")
    axis_channels = file.whole_numbers("rope_axes_dim", 3)
    if sum(axis_channels) != head_dim or any(size % 2 for size in axis_channels):
        raise file.error("rope_axes_dim", f"even numbers that sum to attention_head_dim, {head_dim}", axis_channels)
    side = file.whole_number("patch_size")
    return HunyuanVideoConfig(
        num_layers=file.layer_count("num_layers"),
        num_single_layers=file.layer_count("num_single_layers"),
        num_refiner_layers=file.layer_count("num_refiner_layers", 2),
        num_heads=num_heads,
        head_dim=head_dim,
        ffn_dim=int(num_heads * head_dim * file.number("mlp_ratio", 4.0)),
        num_channels=num_channels,
        text_dim=file.whole_number("text_embed_dim"),
        pooled_dim=file.whole_number("pooled_projection_dim"),
        patch=(file.whole_number("patch_size_t", 1), side, side),
        axis_channels=(axis_channels[0], axis_channels[1], axis_channels[2]),
        theta=file.number("rope_theta", 256.0),
        has_guidance=file.flag("guidance_embeds", True),
    )


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """From transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = file.whole_number("latent_channels", 16)
    if num_channels != transformer.num_channels:
        raise file.error("latent_channels", f"{transformer.num_channels}, the transformer's in_channels", num_channels)
    return LatentGeometry(
        num_channels=num_channels,
        spatial_factor=file.whole_number("spatial_compression_ratio", 8),
        temporal_factor=file.whole_number("temporal_compression_ratio", 4),
        patch=transformer.patch,
    )
