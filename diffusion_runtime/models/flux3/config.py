"""Config of a FLUX.3 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, read_config, read_index
from diffusion_runtime.models.flux2.config import Flux2TransformerConfig, geometry_of

# The ordinary names of diffusers' modular pipelines: before and after distillation to a flow map.
BASE, DISTILLED = "Flux3Pipeline", "Flux3DistilledPipeline"


@config_fields.config
class Flux3TransformerConfig(Flux2TransformerConfig):
    """Sizes of a FLUX.3 transformer. num_double_layers: blocks of each kind of tokens; num_single_layers: of all
    tokens. is_flow_map: whether the timestep that a step leads to is an input."""

    embeds_guidance: bool = config_fields.constant(False)
    theta: float = config_fields.number("rope_theta", 10000.0)
    num_waves: int = config_fields.even_number("timestep_channels", 256)
    caches_references: bool = config_fields.constant(False)
    is_flow_map: bool = config_fields.flag("flow_map", False)


def read_transformer_config(folder: AnyFolder) -> Flux3TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    config = Flux3TransformerConfig(
        **config_fields.read_fields(Flux3TransformerConfig, file, others=("cond_in_channels",))
    )
    of_references = file.whole_number("cond_in_channels", 128)
    if of_references != config.num_channels:
        raise file.error("cond_in_channels", f"{config.num_channels}, in_channels", of_references)
    name = read_index(folder).get("_class_name")
    if name in (BASE, DISTILLED) and config.is_flow_map != (name == DISTILLED):
        expected = str(not config.is_flow_map).lower()
        raise file.error("flow_map", f"{expected} in a folder whose {INDEX_FILE} says {name}", config.is_flow_map)
    return config


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels)
