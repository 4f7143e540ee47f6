"""Config of an LTX-Video folder: its transformer and latents, read from json and checked; and where the tokens of its
latents begin in seconds and pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.weights.head_widths import HeadWidths

TEXT_PIPELINE, IMAGE_PIPELINE, CONDITION_PIPELINE = "LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"

# Values of published models; no other value has weights.
_FIXED: dict[str, object] = {
    "patch_size": 1,
    "patch_size_t": 1,
    "qk_norm": "rms_norm_across_heads",
    "activation_fn": "gelu-approximate",
    "norm_elementwise_affine": False,
    "attention_bias": True,
    "attention_out_bias": True,
}


@config_fields.config
class LTXVideoConfig(HeadWidths):
    """Sizes of an LTX-Video transformer.

    num_channels: of a token of latents. text_dim: of the text embeddings. eps: of the norms before attention and
    feed-forward.
    """

    num_layers: int = config_fields.layer_count("num_layers")
    num_channels: int = config_fields.equal_channels()
    text_dim: int = config_fields.whole_number("caption_channels")
    eps: float = config_fields.number("norm_eps", 1e-6)


def read_transformer_config(folder: AnyFolder) -> LTXVideoConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file, why = read_config(folder, "transformer"), "the only value that this family runs natively"
    sizes = config_fields.read_fields(LTXVideoConfig, file, fixed=_FIXED, why=why, others=("cross_attention_dim",))
    config, text_dim = LTXVideoConfig(**sizes), file.whole_number("cross_attention_dim")
    if text_dim != config.dim:
        raise file.error("cross_attention_dim", f"{config.dim}, the width of the transformer", text_dim)
    return config


def takes_conditions(folder: AnyFolder) -> bool:
    """Return whether the folder's pipeline is the one for conditions, whose schedule and positions are others."""
    return read_index(folder).get("_class_name") == CONDITION_PIPELINE


def decodes_at_a_timestep(folder: AnyFolder) -> bool:
    """Return whether the decoder takes a noise level, as since 0.9.1. Raises ModelLoadError."""
    return read_config(folder, COMPONENT).flag("timestep_conditioning", False)


def read_geometry(folder: AnyFolder) -> LTXVideoGeometry:
    """Read the configs of the transformer and the autoencoder. Raises ModelLoadError that names file and key."""
    transformer, file = read_transformer_config(folder), read_config(folder, COMPONENT)
    source = "the transformer's in_channels"
    return LTXVideoGeometry(
        num_channels=read_num_channels(file, "latent_channels", transformer.num_channels, source, 128),
        spatial_factor=_ratio(file, "spatial_compression_ratio", "patch_size", 4),
        temporal_factor=_ratio(file, "temporal_compression_ratio", "patch_size_t", 1),
        patch=(1, 1, 1),
        first_is_one_frame=takes_conditions(folder),
    )


def _ratio(file: ConfigFile, key: str, patch_key: str, patch: int) -> int:
    """Return the pixels or frames of a latent; older files leave the key to the patch and the blocks that halve."""
    if file.values.get(key) is not None:
        return file.whole_number(key)
    halves = file.values.get("spatio_temporal_scaling", [True, True, True, False])
    if not isinstance(halves, list) or not all(isinstance(each, bool) for each in halves):
        raise file.error("spatio_temporal_scaling", "a list of true and false", halves)
    return file.whole_number(patch_key, patch, maximum=64) << sum(halves[:10])


@dataclass(frozen=True)
class LTXVideoGeometry(LatentGeometry):
    """Geometry of LTX-Video. first_is_one_frame: whether the time of a token counts the first latent frame as the one
    frame that it holds, as the pipeline for conditions has it, or as many as the others."""

    first_is_one_frame: bool = False

    def token_starts(self, grid: tuple[int, int, int], fps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where the tokens along each axis of a grid begin: seconds, and pixels of height and width; float32."""
        frames, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
        if self.first_is_one_frame:
            seconds = (frames * self.temporal_factor + 1 - self.temporal_factor).clamp(min=0) * (1.0 / fps)
        else:
            seconds = frames * (self.temporal_factor / fps)
        return seconds, rows * self.spatial_factor, columns * self.spatial_factor
