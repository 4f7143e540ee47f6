"""Config of a Wan-Animate 2 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.models.wan.config import WanTransformerConfig

# Of the image encoder, CLIP ViT-H/14: the class writes it down nowhere else.
IMAGE_DIM = 1280
_KEYS = (
    *("patch_size", "text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "text_dim", "out_dim", "num_heads"),
    *("num_layers", "cross_attn_norm", "eps", "use_img_emb", "refer_stride"),
)
# Where the reference's positions begin along each axis, and by default.
_STARTS = {"refer_offset_t": 1, "refer_offset_h": 0, "refer_offset_w": -1}
# Positions in diffusers' table.
_MOST_POSITIONS = 512


@dataclass(frozen=True, kw_only=True)
class WanAnimate2Config(WanTransformerConfig):
    """Sizes of the transformer. max_tokens: length that the text is padded to. reference_start: position of the
    reference's first token in (frame, row, column), None for the reference's size along that axis. reference_stride:
    positions between its frames."""

    max_tokens: int
    reference_start: tuple[int | None, int | None, int | None]
    reference_stride: int


def read_transformer_config(folder: AnyFolder) -> WanAnimate2Config:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown((*_KEYS, *_STARTS))
    patch = file.whole_numbers("patch_size", 3) if "patch_size" in file.values else (1, 2, 2)
    if patch[0] != 1:
        raise file.error("patch_size", "one latent frame per token", list(patch))
    dim, num_heads = file.whole_number("dim", 5120), file.whole_number("num_heads", 40)
    if dim % num_heads or (dim // num_heads) % 2:
        raise file.error("dim", f"num_heads, {num_heads}, times an even size of a head", dim)
    num_channels, in_channels = file.whole_number("out_dim", 16), file.whole_number("in_dim", 36)
    if in_channels <= num_channels:
        raise file.error("in_dim", f"more than out_dim, {num_channels}: a mask and encoded frames too", in_channels)
    starts = [_read_start(file, key, default) for key, default in _STARTS.items()]
    return WanAnimate2Config(
        num_layers=file.layer_count("num_layers", 40),
        num_heads=num_heads,
        head_dim=dim // num_heads,
        ffn_dim=file.whole_number("ffn_dim", 13824),
        num_channels=num_channels,
        text_dim=file.whole_number("text_dim", 4096),
        num_waves=file.even_number("freq_dim", 256),
        patch=(patch[0], patch[1], patch[2]),
        norm_cross=file.flag("cross_attn_norm", True),
        eps=file.number("eps", 1e-6),
        condition_channels=in_channels - num_channels,
        image_dim=IMAGE_DIM if file.flag("use_img_emb", True) else None,
        max_tokens=file.whole_number("text_len", 512),
        reference_start=(starts[0], starts[1], starts[2]),
        reference_stride=file.whole_number("refer_stride", 1, maximum=_MOST_POSITIONS),
    )


def _read_start(file: ConfigFile, key: str, default: int) -> int | None:
    value = file.values.get(key, default)
    if type(value) is not int or not -1 <= value < _MOST_POSITIONS:
        raise file.error(key, f"a position from 0 to {_MOST_POSITIONS - 1}, or -1 for the reference's size", value)
    return None if value == -1 else value


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = read_num_channels(file, "z_dim", transformer.num_channels, "the transformer's out_dim", 16)
    temporal_factor = file.whole_number("scale_factor_temporal", 4)
    expected = 2 * num_channels + temporal_factor
    if transformer.in_channels != expected:
        raise read_config(folder, "transformer").error(
            "in_dim",
            f"{expected}: {num_channels} of the latents, {temporal_factor} of a mask, {num_channels} of encoded frames",
            transformer.in_channels,
        )
    return LatentGeometry(
        num_channels=num_channels,
        spatial_factor=file.whole_number("scale_factor_spatial", 8),
        temporal_factor=temporal_factor,
        patch=transformer.patch,
    )
