"""Config of a FLUX.2 folder: its pipeline, transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry, read_image_factor, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index

# [dev], which takes the guidance scale as an input, and [klein], which does not; one kind of [klein] computes reference
# images once, before the first step.
DEV, KLEIN, KLEIN_KV = "Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline"
# The latents of the autoencoder are folded 2 x 2 into channels, so that each of the transformer's is one token.
FOLD = 2


@dataclass(frozen=True)
class Flux2PipelineConfig:
    """Settings of model_index.json. is_klein: of the smaller models with Qwen3 in front. is_distilled: to a few steps
    without guidance. caches_references: whether keys and values of reference images are computed once."""

    is_klein: bool
    is_distilled: bool
    caches_references: bool = False


@config_fields.config
class Flux2TransformerConfig:
    """Sizes of a FLUX.2 transformer.

    text_dim: of the stacked hidden states of the text encoder. embeds_guidance: whether the guidance scale is an input.
    axes: channels of a head that carry each axis of the rotary positions (an axis for images to edit, row, column,
    place in the text). num_waves: of the sinusoidal timestep. eps: of every norm. caches_references: whether reference
    images attend to themselves alone, at timestep 0, so that their keys and values are the same at every step.
    """

    num_double_layers: int = config_fields.layer_count("num_layers")
    num_single_layers: int = config_fields.layer_count("num_single_layers")
    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.whole_number("attention_head_dim")
    num_channels: int = config_fields.equal_channels(128, multiple_of=FOLD**2)
    text_dim: int = config_fields.whole_number("joint_attention_dim")
    ffn_dim: int = config_fields.ffn_width("mlp_ratio", 3.0)
    embeds_guidance: bool = config_fields.flag("guidance_embeds", True)
    axes: tuple[int, ...] = config_fields.rotary_axes("axes_dims_rope", (32, 32, 32, 32), length=4)
    theta: float = config_fields.number("rope_theta", 2000.0)
    num_waves: int = config_fields.even_number("timestep_guidance_channels", 256)
    eps: float = config_fields.number("eps", 1e-6)
    caches_references: bool = False

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_layers(self) -> int:
        return self.num_double_layers + self.num_single_layers


def read_pipeline_config(folder: AnyFolder) -> Flux2PipelineConfig:
    """Read model_index.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    path = folder / INDEX_FILE
    index = ConfigFile(path, read_index(folder))
    name = index.values.get("_class_name")
    is_klein, caches_references = name in (KLEIN, KLEIN_KV), name == KLEIN_KV
    # The pipeline of the second kind writes no key, and has no guidance.
    is_distilled = is_klein and index.flag("is_distilled", caches_references)
    return Flux2PipelineConfig(is_klein, is_distilled, caches_references)


def read_transformer_config(folder: AnyFolder) -> Flux2TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    sizes = config_fields.read_fields(Flux2TransformerConfig, file, fixed={"patch_size": 1})
    pipeline = read_pipeline_config(folder)
    embeds_guidance = sizes["embeds_guidance"]
    if embeds_guidance == pipeline.is_klein:
        expected = "false in a folder of FLUX.2 [klein]" if embeds_guidance else "true in a folder of FLUX.2 [dev]"
        raise file.error("guidance_embeds", expected, embeds_guidance)
    return Flux2TransformerConfig(**sizes, caches_references=pipeline.caches_references)


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels)


def geometry_of(folder: AnyFolder, num_channels: int) -> ImageGeometry:
    """Read vae/config.json. num_channels: of the transformer. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "vae")
    fold = file.values.get("patch_size", [FOLD, FOLD])
    if fold != [FOLD, FOLD]:
        raise file.error("patch_size", f"{[FOLD, FOLD]}", fold)
    source = "a quarter of the transformer's in_channels"
    read_num_channels(file, "latent_channels", num_channels // FOLD**2, source, 32)
    return ImageGeometry(
        num_channels=num_channels,
        spatial_factor=FOLD * read_image_factor(file),
        temporal_factor=1,
        patch=(1, 1, 1),
    )
