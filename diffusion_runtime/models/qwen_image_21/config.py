"""Config of a Qwen-Image 2.1 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry, read_frame_factor, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.errors import ModelLoadError

# A latent is a token; two times two of them take the place of one of the language model.
PATCH = (1, 1, 1)
_SIDE = 2
# Channels of a head that carry (frame, row, column), where config.json does not set them.
_AXES = (16, 56, 56)
_KEYS = (
    "patch_size",
    "in_channels",
    "out_channels",
    "num_layers",
    "attention_head_dim",
    "num_attention_heads",
    "context_in_dim",
    "mlp_ratio",
    "axes_dims_rope",
    "eps",
    "causal_condition",
)


@dataclass(frozen=True)
class QwenImage21TransformerConfig:
    """Sizes of a Qwen-Image 2.1 transformer.

    text_dim: of the language model's hidden states. axes: channels of a head that carry each axis of the rotary
    positions. num_waves: of the sinusoidal timestep. eps: of every norm.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_channels: int
    text_dim: int
    mlp_ratio: int
    axes: tuple[int, ...]
    eps: float = 1e-6
    num_waves: int = 256

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def ffn_dim(self) -> int:
        return self.mlp_ratio * self.dim


def read_transformer_config(folder: AnyFolder) -> QwenImage21TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown(_KEYS)
    if file.whole_number("patch_size", 1) != 1:
        raise file.error("patch_size", "1", file.values["patch_size"])
    if not file.flag("causal_condition", True):
        raise file.error(
            "causal_condition",
            "true, as published: the text's keys and values are computed once; `--backend diffusers` runs the others",
            False,
        )
    in_channels = file.whole_number("in_channels", 64)
    out_channels = file.whole_number("out_channels", in_channels)
    if out_channels != in_channels:
        raise ModelLoadError(
            f"{file.path}: keys 'in_channels' ({in_channels}) and 'out_channels' ({out_channels}) differ: this is not "
            "a text-to-image checkpoint, the only kind this family runs natively; `--backend diffusers` runs it"
        )
    head_dim = file.whole_number("attention_head_dim", 128)
    axes = file.rotary_axes("axes_dims_rope", head_dim, default=_AXES)
    return QwenImage21TransformerConfig(
        num_layers=file.layer_count("num_layers"),
        num_heads=file.whole_number("num_attention_heads", 32),
        head_dim=head_dim,
        num_channels=in_channels,
        text_dim=file.whole_number("context_in_dim", 4096),
        mlp_ratio=file.whole_number("mlp_ratio", 3),
        axes=axes,
        eps=file.number("eps", 1e-6),
    )


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = read_num_channels(file, "z_dim", transformer.num_channels, "the transformer's in_channels", 64)
    factor = read_frame_factor(file, [False, False, True, True])
    return ImageGeometry(num_channels, factor, 1, PATCH, token_multiple=_SIDE)


def read_sample_sigmas(folder: AnyFolder) -> tuple[float, ...] | None:
    """Read the noise levels, before the shift, that a model was distilled to (model_index.json); None where there are
    none. Raises ModelLoadError that names the file and the key."""
    index = ConfigFile(folder / INDEX_FILE, read_index(folder))
    levels = index.values.get("sample_sigmas")
    if levels is None:
        return None
    if not isinstance(levels, list) or not levels:
        raise index.error("sample_sigmas", "a list of noise levels", levels)
    return index.numbers("sample_sigmas", len(levels))
