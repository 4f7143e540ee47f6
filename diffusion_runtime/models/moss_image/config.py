"""Config of a MOSS-Image folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.flux2.config import FOLD, geometry_of

_NUMBERS = {
    **{"dim": 3072, "ffn_dim": 8192, "num_heads": 24, "text_dim": 4096, "freq_dim": 256, "latent_channels": 128},
}
# Of the rotary positions: an axis that is 0 everywhere, place behind the text, row and column.
NUM_AXES = 4


@dataclass(frozen=True)
class MossImageConfig:
    """Sizes of a MOSS-Image transformer. num_text_blocks: of the text alone, before picture and text meet; theta: of
    the rotary positions; num_waves: of the sinusoidal timestep."""

    num_layers: int
    num_heads: int
    dim: int
    ffn_dim: int
    text_dim: int
    num_channels: int
    num_waves: int
    theta: float
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
    file.refuse_unknown((*_NUMBERS, "num_layers", "rope_base"))
    found = {key: file.whole_number(key, default) for key, default in _NUMBERS.items()}
    dim, num_heads = found["dim"], found["num_heads"]
    if dim % num_heads or dim // num_heads % (2 * NUM_AXES):
        raise file.error("dim", f"a multiple of {2 * NUM_AXES} for each of num_heads, {num_heads}", dim)
    for key, divisor in (("freq_dim", 2), ("latent_channels", FOLD**2)):
        if found[key] % divisor:
            raise file.error(key, f"a multiple of {divisor}", found[key])
    return MossImageConfig(
        num_layers=file.layer_count("num_layers", 42),
        num_heads=num_heads,
        dim=dim,
        ffn_dim=found["ffn_dim"],
        text_dim=found["text_dim"],
        num_channels=found["latent_channels"],
        num_waves=found["freq_dim"],
        theta=file.number("rope_base", 10000.0),
    )


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels)
