"""Config of a FLUX.3 folder: its pipeline, transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry, read_image_factor, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.models.flux2.config import FOLD

# The ordinary names of diffusers' modular pipelines: before and after distillation to a flow map.
BASE, DISTILLED = "Flux3Pipeline", "Flux3DistilledPipeline"
_AXES = (32, 32, 32, 32)
_KEYS = (
    "in_channels",
    "cond_in_channels",
    "num_layers",
    "num_single_layers",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "timestep_channels",
    "mlp_ratio",
    "axes_dims_rope",
    "rope_theta",
    "eps",
    "flow_map",
)


@dataclass(frozen=True)
class Flux3TransformerConfig:
    """Sizes of a FLUX.3 transformer.

    num_own_layers: blocks of each kind of tokens; num_joint_layers: of all tokens. text_dim: of the stacked hidden
    states of the text encoder. is_flow_map: whether the timestep that a step leads to is an input. axes: channels of a
    head that carry each axis of the rotary positions (one that images do not use, row, column, place in the text).
    num_waves: of the sinusoidal timestep. eps: of every norm.
    """

    num_own_layers: int
    num_joint_layers: int
    num_heads: int
    head_dim: int
    num_channels: int
    text_dim: int
    ffn_dim: int
    is_flow_map: bool = False
    axes: tuple[int, ...] = _AXES
    theta: float = 10000.0
    num_waves: int = 256
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_layers(self) -> int:
        """Number of blocks that an image token goes through."""
        return self.num_own_layers + self.num_joint_layers


def read_transformer_config(folder: AnyFolder) -> Flux3TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown(_KEYS)
    in_channels = file.whole_number("in_channels", 128)
    if in_channels % FOLD**2:
        raise file.error("in_channels", f"a multiple of {FOLD**2}", in_channels)
    if (of_references := file.whole_number("cond_in_channels", 128)) != in_channels:
        raise file.error("cond_in_channels", f"{in_channels}, in_channels", of_references)
    head_dim, num_heads = file.whole_number("attention_head_dim", 128), file.whole_number("num_attention_heads", 24)
    axes = _AXES if file.values.get("axes_dims_rope") is None else file.whole_numbers("axes_dims_rope", len(_AXES))
    if sum(axes) != head_dim or any(size % 2 for size in axes):
        raise file.error("axes_dims_rope", f"even numbers whose sum is attention_head_dim, {head_dim}", list(axes))
    num_waves = file.whole_number("timestep_channels", 256)
    if num_waves % 2:
        raise file.error("timestep_channels", "an even number", num_waves)
    return Flux3TransformerConfig(
        num_own_layers=file.layer_count("num_layers"),
        num_joint_layers=file.layer_count("num_single_layers"),
        num_heads=num_heads,
        head_dim=head_dim,
        num_channels=in_channels,
        text_dim=file.whole_number("joint_attention_dim", 20480),
        ffn_dim=int(num_heads * head_dim * file.number("mlp_ratio", 3.0)),
        is_flow_map=_is_flow_map(folder, file),
        axes=axes,
        theta=file.number("rope_theta", 10000.0),
        num_waves=num_waves,
        eps=file.number("eps", 1e-6),
    )


def _is_flow_map(folder: AnyFolder, file: ConfigFile) -> bool:
    """Return whether a transformer is a flow map, which must agree with the folder's pipeline."""
    is_flow_map = file.flag("flow_map", False)
    index = read_index(folder)
    if index.get("_class_name") in (BASE, DISTILLED) and is_flow_map != (index["_class_name"] == DISTILLED):
        expected = str(not is_flow_map).lower()
        raise file.error(
            "flow_map", f"{expected} in a folder whose {INDEX_FILE} says {index['_class_name']}", is_flow_map
        )
    return is_flow_map


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    fold = file.values.get("patch_size", [FOLD, FOLD])
    if fold != [FOLD, FOLD]:
        raise file.error("patch_size", f"{[FOLD, FOLD]}", fold)
    source = "a quarter of the transformer's in_channels"
    read_num_channels(file, "latent_channels", transformer.num_channels // FOLD**2, source, 32)
    return ImageGeometry(
        num_channels=transformer.num_channels,
        spatial_factor=FOLD * read_image_factor(file),
        temporal_factor=1,
        patch=(1, 1, 1),
    )
