"""Config of a MOSS-Image folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.flux2.config import FOLD, geometry_of

# Of the rotary positions: an axis that is 0 everywhere, place behind the text, row and column.
NUM_AXES = 4


@config_fields.config
class MossImageConfig:
    """Sizes of a MOSS-Image transformer. num_text_blocks: of the text alone, before picture and text meet; theta: of
    the rotary positions; num_waves: of the sinusoidal timestep."""

    num_layers: int = config_fields.layer_count("num_layers", 42)
    num_heads: int = config_fields.whole_number("num_heads", 24)
    dim: int = config_fields.whole_number("dim", 3072)
    ffn_dim: int = config_fields.whole_number("ffn_dim", 8192)
    text_dim: int = config_fields.whole_number("text_dim", 4096)
    num_channels: int = config_fields.whole_number("latent_channels", 128, multiple_of=FOLD**2)
    num_waves: int = config_fields.even_number("freq_dim", 256)
    theta: float = config_fields.number("rope_base", 10000.0)
    # Not in config.json: the class fixes them.
    num_text_blocks: int = 2
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def axes(self) -> tuple[int, ...]:
        """Channels of a head that carry each axis of the positions."""
        return (self.head_dim // NUM_AXES,) * NUM_AXES


def read_transformer_config(folder: AnyFolder) -> MossImageConfig:
    """Read transformer/config.json of a model folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    config = MossImageConfig(**config_fields.read_fields(MossImageConfig, file))
    if config.dim % config.num_heads or config.head_dim % (2 * NUM_AXES):
        raise file.error("dim", f"a multiple of {2 * NUM_AXES} for each of num_heads, {config.num_heads}", config.dim)
    return config


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels)
