"""Config of a Krea 2 folder: its transformer, latents and pipeline, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.models.qwen_image.config import geometry_of

# The pipeline folds 2 x 2 latents into a token.
_SIDE = 2
PATCH = (1, _SIDE, _SIDE)
# Keys of model_index.json beside the components.
INDEX_KEYS = ("is_distilled", "text_encoder_select_layers", "patch_size")


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of one kind of block. num_kv_heads: heads of keys and values, fewer than of queries (GQA)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


@config_fields.config
class Krea2TransformerConfig:
    """Sizes of a Krea 2 transformer.

    The first four are of the blocks of picture and text; those that begin with text are of the blocks of the text
    alone. num_text_layers: of the language model, read per token; num_layer_blocks: text blocks across these;
    num_refiner_blocks: text blocks across tokens. axes: channels of a head that carry each axis of the rotary
    positions. patch_channels: numbers in a patch of latents.
    """

    num_heads: int = config_fields.whole_number("num_attention_heads", 48)
    num_kv_heads: int = config_fields.whole_number("num_key_value_heads", 12)
    head_dim: int = config_fields.whole_number("attention_head_dim", 128)
    ffn_dim: int = config_fields.whole_number("intermediate_size", 16384)
    text_num_heads: int = config_fields.whole_number("text_num_attention_heads", 20)
    text_num_kv_heads: int = config_fields.whole_number("text_num_key_value_heads", 20)
    text_width: int = config_fields.whole_number("text_hidden_dim", 2560)
    text_ffn_dim: int = config_fields.whole_number("text_intermediate_size", 6912)
    num_layers: int = config_fields.layer_count("num_layers", 28)
    patch_channels: int = config_fields.whole_number("in_channels", 64, multiple_of=_SIDE**2)
    num_text_layers: int = config_fields.layer_count("num_text_layers", 12)
    num_layer_blocks: int = config_fields.layer_count("num_layerwise_text_blocks", 2)
    num_refiner_blocks: int = config_fields.layer_count("num_refiner_text_blocks", 2)
    axes: tuple[int, ...] = config_fields.rotary_axes("axes_dims_rope", (32, 48, 48))
    theta: float = config_fields.number("rope_theta", 1000.0)
    num_waves: int = config_fields.even_number("timestep_embed_dim", 256)
    eps: float = config_fields.number("norm_eps", 1e-5)

    @property
    def joint(self) -> BlockSizes:
        return BlockSizes(self.num_heads, self.num_kv_heads, self.head_dim, self.ffn_dim)

    @property
    def text(self) -> BlockSizes:
        head_dim = self.text_width // self.text_num_heads
        return BlockSizes(self.text_num_heads, self.text_num_kv_heads, head_dim, self.text_ffn_dim)

    @property
    def text_dim(self) -> int:
        """Numbers per token of the conditions: of all layers, one after the other."""
        return self.num_text_layers * self.text_width

    @property
    def num_channels(self) -> int:
        return self.patch_channels // _SIDE**2


def read_transformer_config(folder: AnyFolder) -> Krea2TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    config = Krea2TransformerConfig(**config_fields.read_fields(Krea2TransformerConfig, file))
    for key, value, whole, of in (
        ("num_key_value_heads", config.num_kv_heads, "num_attention_heads", config.num_heads),
        ("text_num_key_value_heads", config.text_num_kv_heads, "text_num_attention_heads", config.text_num_heads),
        ("text_num_attention_heads", config.text_num_heads, "text_hidden_dim", config.text_width),
    ):
        if of % value:
            raise file.error(key, f"a divisor of {whole}, {of}", value)
    return config


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(
        folder, read_transformer_config(folder).num_channels, "a quarter of the transformer's in_channels"
    )


def read_is_distilled(folder: AnyFolder) -> bool:
    """Return whether the model is distilled to a few steps (Turbo). Raises ModelLoadError as read_geometry does."""
    file = ConfigFile(folder / INDEX_FILE, read_index(folder))
    file.refuse_other_values({"patch_size": _SIDE}, "the only value this family runs")
    return file.flag("is_distilled", False)


def read_text_layers(folder: AnyFolder) -> tuple[int, ...]:
    """Return the layers of the language model whose outputs are read, counted from 1; 0 is its input. Raises
    ModelLoadError as read_geometry does."""
    file, key = ConfigFile(folder / INDEX_FILE, read_index(folder)), "text_encoder_select_layers"
    layers, count = file.values.get(key), read_transformer_config(folder).num_text_layers
    layers = list(range(2, 36, 3)) if layers is None else layers
    fits = isinstance(layers, list) and all(type(each) is int and 0 <= each < 1000 for each in layers)
    if not fits or len(layers) != count or not any(layers):
        expected = f"the numbers of {count} layers of the language model, as many as the transformer's num_text_layers"
        raise file.error(key, expected, layers)
    return tuple(layers)
