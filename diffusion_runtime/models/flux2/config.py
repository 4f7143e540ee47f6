"""Config of a FLUX.2 folder: its pipeline, transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusion_runtime.core.latent_geometry import ImageGeometry, read_image_factor, read_num_channels
from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    AnyFolder,
    ConfigFile,
    read_config,
    read_index,
)
from diffusion_runtime.errors import ModelLoadError

# [dev], which takes the guidance scale as an input, and [klein], which does not; one kind of [klein] computes reference
# images once, before the first step.
DEV, KLEIN, KLEIN_KV = "Flux2Pipeline", "Flux2KleinPipeline", "Flux2KleinKVPipeline"
# The latents of the autoencoder are folded 2 x 2 into channels, so that each of the transformer's is one token.
FOLD = 2
_NUM_AXES = 4
_AXES = (32, 32, 32, 32)
_KEYS = (
    "patch_size",
    "in_channels",
    "out_channels",
    "num_layers",
    "num_single_layers",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "timestep_guidance_channels",
    "mlp_ratio",
    "axes_dims_rope",
    "rope_theta",
    "eps",
    "guidance_embeds",
)


@dataclass(frozen=True)
class Flux2PipelineConfig:
    """Settings of model_index.json. is_klein: of the smaller models with Qwen3 in front. is_distilled: to a few steps
    without guidance. caches_references: whether keys and values of reference images are computed once."""

    is_klein: bool
    is_distilled: bool
    caches_references: bool = False


@dataclass(frozen=True)
class Flux2TransformerConfig:
    """Sizes of a FLUX.2 transformer.

    text_dim: of the stacked hidden states of the text encoder. embeds_guidance: whether the guidance scale is an input.
    axes: channels of a head that carry each axis of the rotary positions (an axis for images to edit, row, column,
    place in the text). num_waves: of the sinusoidal timestep. eps: of every norm. caches_references: whether reference
    images attend to themselves alone, at timestep 0, so that their keys and values are the same at every step.
    """

    num_double_layers: int
    num_single_layers: int
    num_heads: int
    head_dim: int
    num_channels: int
    text_dim: int
    ffn_dim: int
    embeds_guidance: bool
    axes: tuple[int, ...] = _AXES
    theta: float = 2000.0
    num_waves: int = 256
    eps: float = 1e-6
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
    file.refuse_unknown(_KEYS)
    if file.whole_number("patch_size", 1) != 1:
        raise file.error("patch_size", "1", file.values["patch_size"])
    in_channels = file.whole_number("in_channels", 128)
    out_channels = file.whole_number("out_channels", in_channels)
    if out_channels != in_channels:
        raise ModelLoadError(
            f"{file.path}: keys 'in_channels' ({in_channels}) and 'out_channels' ({out_channels}) differ: this is not "
            "a text-to-image checkpoint, the only kind this family runs natively; `--backend diffusers` runs it"
        )
    return Flux2TransformerConfig(
        **read_sizes(file, "timestep_guidance_channels"),
        embeds_guidance=_embeds_guidance(folder, file),
        theta=file.number("rope_theta", 2000.0),
        caches_references=read_pipeline_config(folder).caches_references,
    )


def read_sizes(file: ConfigFile, waves_key: str) -> dict[str, Any]:
    """Return the sizes that a transformer's config says, as fields of Flux2TransformerConfig. waves_key: that of
    num_waves. Raises ModelLoadError that names the file and the key."""
    in_channels = file.whole_number("in_channels", 128)
    if in_channels % FOLD**2:
        raise file.error("in_channels", f"a multiple of {FOLD**2}", in_channels)
    head_dim, num_heads = file.whole_number("attention_head_dim"), file.whole_number("num_attention_heads")
    axes = file.rotary_axes("axes_dims_rope", head_dim, _NUM_AXES, default=_AXES)
    num_waves = file.even_number(waves_key, 256)
    return {
        "num_double_layers": file.layer_count("num_layers"),
        "num_single_layers": file.layer_count("num_single_layers"),
        "num_heads": num_heads,
        "head_dim": head_dim,
        "num_channels": in_channels,
        "text_dim": file.whole_number("joint_attention_dim"),
        "ffn_dim": int(num_heads * head_dim * file.number("mlp_ratio", 3.0)),
        "axes": axes,
        "num_waves": num_waves,
        "eps": file.number("eps", 1e-6),
    }


def _embeds_guidance(folder: AnyFolder, file: ConfigFile) -> bool:
    """Return whether the guidance scale is an input, which must agree with the folder's pipeline."""
    embeds_guidance = file.flag("guidance_embeds", True)
    if embeds_guidance == read_pipeline_config(folder).is_klein:
        expected = "false in a folder of FLUX.2 [klein]" if embeds_guidance else "true in a folder of FLUX.2 [dev]"
        raise file.error("guidance_embeds", expected, embeds_guidance)
    return embeds_guidance


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
