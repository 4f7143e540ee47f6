"""Config of a Qwen-Image 2.1 folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry, read_frame_factor, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index

# A latent is a token; two times two of them take the place of one of the language model.
PATCH = (1, 1, 1)
_SIDE = 2


@config_fields.config
class QwenImage21TransformerConfig:
    """Sizes of a Qwen-Image 2.1 transformer.

    text_dim: of the language model's hidden states. axes: channels of a head that carry each axis of the rotary
    positions. num_waves: of the sinusoidal timestep. eps: of every norm.
    """

    num_layers: int = config_fields.layer_count("num_layers")
    num_heads: int = config_fields.whole_number("num_attention_heads", 32)
    head_dim: int = config_fields.whole_number("attention_head_dim", 128)
    num_channels: int = config_fields.equal_channels(64)
    text_dim: int = config_fields.whole_number("context_in_dim", 4096)
    mlp_ratio: int = config_fields.whole_number("mlp_ratio", 3)
    axes: tuple[int, ...] = config_fields.rotary_axes("axes_dims_rope", (16, 56, 56))
    eps: float = config_fields.number("eps", 1e-6)
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
    why = "as published, where the text's keys and values are computed once; `--backend diffusers` runs the others"
    fixed = {"patch_size": 1, "causal_condition": True}
    sizes = config_fields.read_fields(QwenImage21TransformerConfig, file, fixed=fixed, why=why)
    return QwenImage21TransformerConfig(**sizes)


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
