"""Config of a FLUX.1 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.model_folder import AnyFolder, read_config
from diffusion_runtime.models.geometry import ImageGeometry

# Four latents per token. The checkpoint's own patch_size is 1: its pipeline folds them before.
PATCH = (1, 2, 2)
_LATENTS_A_TOKEN = 4
# Channels of a head that carry (an axis images do not use, row, column), where config.json does not say.
_AXES = (16, 56, 56)
_KEYS = (
    "patch_size",
    "in_channels",
    "out_channels",
    "num_layers",
    "num_single_layers",
    "attention_head_dim",
    "num_attention_heads",
    "joint_attention_dim",
    "pooled_projection_dim",
    "guidance_embeds",
    "axes_dims_rope",
)


@dataclass(frozen=True)
class Flux1TransformerConfig:
    """Sizes of a FLUX.1 transformer.

    text_dim: of T5's embeddings; pooled_dim: of CLIP's vector. embeds_guidance: whether the guidance scale is an input.
    axes: channels of a head that carry each axis of the rotary positions. num_waves: of the sinusoidal timestep.
    eps: of every norm.
    """

    num_double_layers: int
    num_single_layers: int
    num_heads: int
    head_dim: int
    num_channels: int
    text_dim: int
    pooled_dim: int
    embeds_guidance: bool
    axes: tuple[int, ...]
    num_waves: int = 256
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def ffn_dim(self) -> int:
        return 4 * self.dim

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * _LATENTS_A_TOKEN

    @property
    def num_layers(self) -> int:
        return self.num_double_layers + self.num_single_layers


def read_transformer_config(folder: AnyFolder) -> Flux1TransformerConfig:
    """transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown(_KEYS)
    if file.whole_number("patch_size", 1) != 1:
        raise file.error("patch_size", "1", file.values["patch_size"])
    in_channels = file.whole_number("in_channels")
    if in_channels % _LATENTS_A_TOKEN:
        raise file.error("in_channels", f"a multiple of {_LATENTS_A_TOKEN}", in_channels)
    out_channels = file.whole_number("out_channels", in_channels)
    if out_channels != in_channels:
        raise ModelLoadError(
            f"{file.path}: keys 'in_channels' ({in_channels}) and 'out_channels' ({out_channels}) differ: this is not "
            "a text-to-image checkpoint, the only kind this family runs natively; `--backend diffusers` runs it"
        )
    head_dim = file.whole_number("attention_head_dim")
    axes = _AXES if file.values.get("axes_dims_rope") is None else file.whole_numbers("axes_dims_rope", len(_AXES))
    if sum(axes) != head_dim or any(size % 2 for size in axes):
        raise file.error("axes_dims_rope", f"even numbers whose sum is attention_head_dim, {head_dim}", list(axes))
    return Flux1TransformerConfig(
        num_double_layers=file.layer_count("num_layers"),
        num_single_layers=file.layer_count("num_single_layers"),
        num_heads=file.whole_number("num_attention_heads"),
        head_dim=head_dim,
        num_channels=in_channels // _LATENTS_A_TOKEN,
        text_dim=file.whole_number("joint_attention_dim"),
        pooled_dim=file.whole_number("pooled_projection_dim"),
        embeds_guidance=file.flag("guidance_embeds", False),
        axes=axes,
    )


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """From transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = file.whole_number("latent_channels")
    if num_channels != transformer.num_channels:
        raise file.error(
            "latent_channels", f"{transformer.num_channels}, a quarter of the transformer's in_channels", num_channels
        )
    widths = file.values.get("block_out_channels")
    if not isinstance(widths, list) or not widths:
        raise file.error("block_out_channels", "a list with the width of every level", widths)
    return ImageGeometry(
        num_channels=num_channels, spatial_factor=2 ** (len(widths) - 1), temporal_factor=1, patch=PATCH
    )
