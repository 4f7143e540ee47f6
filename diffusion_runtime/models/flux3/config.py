"""Config of a FLUX.3 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, read_config, read_index
from diffusion_runtime.models.flux2.config import Flux2TransformerConfig, geometry_of, read_sizes

# The ordinary names of diffusers' modular pipelines: before and after distillation to a flow map.
BASE, DISTILLED = "Flux3Pipeline", "Flux3DistilledPipeline"
_KEYS = (
    *("in_channels", "cond_in_channels", "num_layers", "num_single_layers", "attention_head_dim"),
    *("num_attention_heads", "joint_attention_dim", "timestep_channels", "mlp_ratio", "axes_dims_rope"),
    *("rope_theta", "eps", "flow_map"),
)


@dataclass(frozen=True)
class Flux3TransformerConfig(Flux2TransformerConfig):
    """Sizes of a FLUX.3 transformer. num_double_layers: blocks of each kind of tokens; num_single_layers: of all
    tokens. is_flow_map: whether the timestep that a step leads to is an input."""

    is_flow_map: bool = False


def read_transformer_config(folder: AnyFolder) -> Flux3TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown(_KEYS)
    sizes, of_references = read_sizes(file, "timestep_channels"), file.whole_number("cond_in_channels", 128)
    if of_references != sizes["num_channels"]:
        raise file.error("cond_in_channels", f"{sizes['num_channels']}, in_channels", of_references)
    is_flow_map, name = file.flag("flow_map", False), read_index(folder).get("_class_name")
    if name in (BASE, DISTILLED) and is_flow_map != (name == DISTILLED):
        expected = str(not is_flow_map).lower()
        raise file.error("flow_map", f"{expected} in a folder whose {INDEX_FILE} says {name}", is_flow_map)
    theta = file.number("rope_theta", 10000.0)
    return Flux3TransformerConfig(**sizes, embeds_guidance=False, theta=theta, is_flow_map=is_flow_map)


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels)
