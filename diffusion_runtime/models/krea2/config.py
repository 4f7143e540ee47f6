"""Config of a Krea 2 folder: its transformer, latents and pipeline, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.models.qwen_image.config import geometry_of

# The pipeline folds 2 x 2 latents into a token.
_SIDE = 2
PATCH = (1, _SIDE, _SIDE)
# Keys of config.json that are whole numbers, with the values that they have where they are left out.
_NUMBERS = {
    **{"in_channels": 64, "num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 48},
    **{"num_key_value_heads": 12, "intermediate_size": 16384, "timestep_embed_dim": 256, "text_hidden_dim": 2560},
    **{"num_text_layers": 12, "text_num_attention_heads": 20, "text_num_key_value_heads": 20},
    **{"text_intermediate_size": 6912, "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2},
}
_AXES = (32, 48, 48)
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


@dataclass(frozen=True)
class Krea2TransformerConfig:
    """Sizes of a Krea 2 transformer.

    joint: of the blocks of picture and text; text: of those of the text alone. num_text_layers: of the language model,
    read per token; num_layer_blocks: text blocks across these; num_refiner_blocks: text blocks across tokens. axes:
    channels of a head that carry each axis of the rotary positions.
    """

    joint: BlockSizes
    text: BlockSizes
    num_layers: int
    num_channels: int
    num_text_layers: int
    num_layer_blocks: int
    num_refiner_blocks: int
    axes: tuple[int, ...]
    theta: float
    num_waves: int
    eps: float

    @property
    def text_dim(self) -> int:
        """Numbers per token of the conditions: of all layers, one after the other."""
        return self.num_text_layers * self.text.dim

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * _SIDE * _SIDE


def read_transformer_config(folder: AnyFolder) -> Krea2TransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    file.refuse_unknown((*_NUMBERS, "axes_dims_rope", "rope_theta", "norm_eps"))
    found = {
        key: (file.layer_count if key.endswith(("layers", "blocks")) else file.whole_number)(key, default)
        for key, default in _NUMBERS.items()
    }
    for key, divisor in (("in_channels", 4), ("timestep_embed_dim", 2)):
        if found[key] % divisor:
            raise file.error(key, f"a multiple of {divisor}", found[key])
    for key, whole in {
        "num_key_value_heads": "num_attention_heads",
        "text_num_key_value_heads": "text_num_attention_heads",
        "text_num_attention_heads": "text_hidden_dim",
    }.items():
        if found[whole] % found[key]:
            raise file.error(key, f"a divisor of {whole}, {found[whole]}", found[key])
    head_dim, text_heads = found["attention_head_dim"], found["text_num_attention_heads"]
    axes = file.rotary_axes("axes_dims_rope", head_dim, default=_AXES)
    joint = found["num_attention_heads"], found["num_key_value_heads"], head_dim, found["intermediate_size"]
    text_head_dim = found["text_hidden_dim"] // text_heads
    text = text_heads, found["text_num_key_value_heads"], text_head_dim, found["text_intermediate_size"]
    return Krea2TransformerConfig(
        BlockSizes(*joint),
        BlockSizes(*text),
        num_layers=found["num_layers"],
        num_channels=found["in_channels"] // _SIDE**2,
        num_text_layers=found["num_text_layers"],
        num_layer_blocks=found["num_layerwise_text_blocks"],
        num_refiner_blocks=found["num_refiner_text_blocks"],
        axes=axes,
        theta=file.number("rope_theta", 1000.0),
        num_waves=found["timestep_embed_dim"],
        eps=file.number("norm_eps", 1e-5),
    )


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
