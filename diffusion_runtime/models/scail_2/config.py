"""Config of a SCAIL-2 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass, fields

from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.character_masks import CLASSES
from diffusion_runtime.models.wan import original_format
from diffusion_runtime.models.wan.original_format import KEYS, OriginalConfig, read_sizes

# Settings that the published model has; the class computes positions by constants, whatever pose_rope_shift says.
_FIXED = {"model_type": "i2v", "window_size": [-1, -1], "qk_norm": True, "pose_rope_shift": [0, 0, 120]}
# Clips are whole tokens at half their size too, which the driving video has.
_TOKEN_MULTIPLE = 2


@dataclass(frozen=True, kw_only=True)
class Scail2Config(OriginalConfig):
    """Sizes of the transformer. mask_channels: of the latents of a mask, a channel for each class and frame."""

    mask_channels: int


def read_transformer_config(folder: AnyFolder) -> Scail2Config:
    """Read transformer/config.json. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown((*KEYS, *_FIXED, "mask_dim"))
    file.refuse_other_values(_FIXED, "as in the published model")
    sizes = read_sizes(file, in_dim=20)
    own = {item.name: getattr(sizes, item.name) for item in fields(sizes)}
    return Scail2Config(**own, mask_channels=file.whole_number("mask_dim", 28))


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    config = read_transformer_config(folder)
    geometry = original_format.read_geometry(folder, config, encoded=False, token_multiple=_TOKEN_MULTIPLE)
    expected = len(CLASSES) * geometry.temporal_factor
    if config.mask_channels != expected:
        raise read_config(folder, "transformer").error(
            "mask_dim",
            f"{expected}: white and {len(CLASSES) - 1} colours, {geometry.temporal_factor} frames",
            config.mask_channels,
        )
    return geometry
