"""Config of a Krea 2 folder: its transformer, latents and pipeline, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry, read_frame_factor, read_num_channels
from diffusion_runtime.core.model_folder import (
    INDEX_FILE,
    MAX_LAYERS,
    AnyFolder,
    ConfigFile,
    read_config,
    read_index,
)
from diffusion_runtime.errors import ModelLoadError

# The pipeline folds 2 x 2 latents into a token.
_SIDE = 2
PATCH = (1, _SIDE, _SIDE)
# Channels of a head that carry (frame, row, column), where config.json does not set them.
_AXES = (32, 48, 48)
# Layers of the language model whose outputs are read, where model_index.json does not set them.
_TEXT_LAYERS = tuple(range(2, 36, 3))
_KEYS = (
    "in_channels",
    "num_layers",
    "attention_head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "timestep_embed_dim",
    "text_hidden_dim",
    "num_text_layers",
    "text_num_attention_heads",
    "text_num_key_value_heads",
    "text_intermediate_size",
    "num_layerwise_text_blocks",
    "num_refiner_text_blocks",
    "axes_dims_rope",
    "rope_theta",
    "norm_eps",
)


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
    def dim(self) -> int:
        return self.joint.dim

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
    file.refuse_unknown(_KEYS)
    in_channels, text_dim = file.whole_number("in_channels", 64), file.whole_number("text_hidden_dim", 2560)
    if in_channels % (_SIDE * _SIDE):
        raise file.error("in_channels", f"a multiple of {_SIDE * _SIDE}", in_channels)
    joint_heads, text_heads = (_heads(file, prefix, of) for prefix, of in (("", (48, 12)), ("text_", (20, 20))))
    head_dim = file.whole_number("attention_head_dim", 128)
    if text_dim % text_heads[0]:
        raise file.error("text_hidden_dim", f"a multiple of text_num_attention_heads, {text_heads[0]}", text_dim)
    axes = _AXES if file.values.get("axes_dims_rope") is None else file.whole_numbers("axes_dims_rope", len(_AXES))
    if sum(axes) != head_dim or any(size % 2 for size in axes):
        raise file.error("axes_dims_rope", f"even numbers whose sum is attention_head_dim, {head_dim}", list(axes))
    num_waves = file.whole_number("timestep_embed_dim", 256)
    if num_waves % 2:
        raise file.error("timestep_embed_dim", "an even number", num_waves)
    return Krea2TransformerConfig(
        joint=BlockSizes(*joint_heads, head_dim, file.whole_number("intermediate_size", 16384)),
        text=BlockSizes(*text_heads, text_dim // text_heads[0], file.whole_number("text_intermediate_size", 6912)),
        num_layers=file.layer_count("num_layers", 28),
        num_channels=in_channels // (_SIDE * _SIDE),
        num_text_layers=file.layer_count("num_text_layers", 12),
        num_layer_blocks=file.layer_count("num_layerwise_text_blocks", 2),
        num_refiner_blocks=file.layer_count("num_refiner_text_blocks", 2),
        axes=axes,
        theta=file.number("rope_theta", 1000.0),
        num_waves=num_waves,
        eps=file.number("norm_eps", 1e-5),
    )


def _heads(file: ConfigFile, prefix: str, defaults: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of heads of queries, and of keys and values."""
    num_heads = file.whole_number(f"{prefix}num_attention_heads", defaults[0])
    key = f"{prefix}num_key_value_heads"
    num_kv_heads = file.whole_number(key, defaults[1])
    if num_heads % num_kv_heads:
        raise file.error(key, f"a divisor of {prefix}num_attention_heads, {num_heads}", num_kv_heads)
    return num_heads, num_kv_heads


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    source = "a quarter of the transformer's in_channels"
    num_channels = read_num_channels(file, "z_dim", transformer.num_channels, source, 16)
    return ImageGeometry(num_channels, read_frame_factor(file, [False, True, True]), 1, PATCH)


@dataclass(frozen=True)
class PipelineConfig:
    """Keys of model_index.json. is_distilled: to a few steps without guidance (Turbo). text_layers: of the language
    model whose outputs are read, counted from 1; 0 is its input."""

    is_distilled: bool
    text_layers: tuple[int, ...]

    keys = ("is_distilled", "text_encoder_select_layers", "patch_size")


def read_pipeline_config(folder: AnyFolder) -> PipelineConfig:
    """Read model_index.json. Raises ModelLoadError that names the file and the key."""
    file = ConfigFile(folder / INDEX_FILE, read_index(folder))
    if file.whole_number("patch_size", _SIDE) != _SIDE:
        raise file.error("patch_size", str(_SIDE), file.values["patch_size"])
    key, expected = "text_encoder_select_layers", read_transformer_config(folder).num_text_layers
    layers = file.values.get(key)
    layers = list(_TEXT_LAYERS) if layers is None else layers
    if not isinstance(layers, list) or any(type(each) is not int or not 0 <= each <= MAX_LAYERS for each in layers):
        raise file.error(key, "a list of numbers of layers", layers)
    if len(layers) != expected or max(layers) == 0:
        raise ModelLoadError(
            f"{file.path}: key {key!r}: expected {expected} numbers of layers, as many as the transformer's "
            f"num_text_layers, got {len(layers)}: {layers}"
        )
    return PipelineConfig(file.flag("is_distilled", False), tuple(layers))
