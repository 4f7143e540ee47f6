"""Config of a Wan-Animate 2 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass, fields

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.models.wan import original_format
from diffusion_runtime.models.wan.original_format import IMAGE_DIM, KEYS, OriginalConfig, read_sizes

# Where the reference's positions begin along each axis, and by default.
_STARTS = {"refer_offset_t": 1, "refer_offset_h": 0, "refer_offset_w": -1}
# Positions in diffusers' table.
_MOST_POSITIONS = 512


@dataclass(frozen=True, kw_only=True)
class WanAnimate2Config(OriginalConfig):
    """Sizes of the transformer. reference_start: position of the reference's first token in (frame, row, column), None
    for the reference's size along that axis. reference_stride: positions between its frames."""

    reference_start: tuple[int | None, int | None, int | None]
    reference_stride: int


def read_transformer_config(folder: AnyFolder) -> WanAnimate2Config:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown((*KEYS, *_STARTS, "use_img_emb", "refer_stride"))
    sizes = read_sizes(file, in_dim=36)
    starts = [_read_start(file, key, default) for key, default in _STARTS.items()]
    own = {item.name: getattr(sizes, item.name) for item in fields(sizes)}
    return WanAnimate2Config(
        **{**own, "image_dim": IMAGE_DIM if file.flag("use_img_emb", True) else None},
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
    return original_format.read_geometry(folder, read_transformer_config(folder), encoded=True)
