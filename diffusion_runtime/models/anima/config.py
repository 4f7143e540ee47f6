"""Config of an Anima folder: its transformer, text conditioner and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry, read_frame_factor, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.layers.rope import THETA, split_head_dim

# The component that makes the transformer's text, in a folder of its own.
CONDITIONER = "text_conditioner"
PATCH = (1, 2, 2)
_ONLY = "the only value this family runs"
# Cosmos models with another input, and what counts with those alone.
_FIXED = {
    "extra_pos_embed_type": None,
    "use_crossattn_projection": False,
    "controlnet_block_every_n": None,
    "img_context_dim_in": None,
    "patch_size": list(PATCH),
}
_WITH_FIXED = (
    *("crossattn_proj_in_channels", "encoder_hidden_states_channels", "img_context_num_tokens", "img_context_dim_out"),
    # The length of diffusers' table of positions; here they are computed.
    "max_size",
)
_SIZES = {
    **{"num_attention_heads": ("num_heads", 32), "attention_head_dim": ("head_dim", 128)},
    **{
        "in_channels": ("num_channels", 16),
        "text_embed_dim": ("text_dim", 1024),
        "adaln_lora_dim": ("narrow_dim", 256),
    },
}
_CONDITIONER_SIZES = {
    **{"source_dim": ("source_dim", 1024), "target_dim": ("out_dim", 1024), "model_dim": ("dim", 1024)},
    **{"num_attention_heads": ("num_heads", 16), "target_vocab_size": ("vocab_size", 32128)},
    **{"min_sequence_length": ("min_tokens", 512)},
}


@dataclass(frozen=True)
class ConditionerConfig:
    """Sizes of the text conditioner. source_dim: of the language model's states; vocab_size: of T5's tokens;
    min_tokens: what its tokens are filled up to with zeros, which the transformer attends to."""

    source_dim: int
    dim: int
    out_dim: int
    num_heads: int
    num_layers: int
    ffn_dim: int
    vocab_size: int
    min_tokens: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(frozen=True)
class AnimaTransformerConfig:
    """Sizes of an Anima transformer.

    num_mask_channels: of the mask of a picture's padding, of which there is none, next to its latents. narrow_dim:
    between the two layers that modulate a block. thetas: the longest period of the rotary positions along each axis.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    ffn_dim: int
    num_channels: int
    num_mask_channels: int
    text_dim: int
    narrow_dim: int
    thetas: tuple[float, ...]
    conditioner: ConditionerConfig
    eps: float = 1e-6

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * PATCH[1] * PATCH[2]


def read_transformer_config(folder: AnyFolder) -> AnimaTransformerConfig:
    """Read transformer/config.json and text_conditioner/config.json of a diffusers folder. Raises ModelLoadError that
    names the file and the key."""
    file = read_config(folder, "transformer")
    own = ("num_layers", "mlp_ratio", "rope_scale", "concat_padding_mask", "out_channels")
    file.refuse_unknown((*_SIZES, *_FIXED, *_WITH_FIXED, *own))
    file.refuse_other_values(_FIXED, _ONLY)
    sizes, num_made = file.sizes(_SIZES), file.whole_number("out_channels", 16)
    if num_made != sizes["num_channels"]:
        raise file.error("out_channels", f"{sizes['num_channels']}, in_channels", num_made)
    head_dim = sizes["head_dim"]
    sides = split_head_dim(head_dim)
    if head_dim % 2 or min(sides) < 4:
        raise file.error("attention_head_dim", "an even number of at least 12", head_dim)
    scales = (2.0, 1.0, 1.0) if file.values.get("rope_scale") is None else file.numbers("rope_scale", 3)
    if not all(0 < scale <= 1000 for scale in scales):
        raise file.error("rope_scale", "numbers above 0, of at most 1000", list(scales))
    conditioner = _read_conditioner_config(folder)
    if conditioner.out_dim != sizes["text_dim"]:
        raise file.error("text_embed_dim", f"{conditioner.out_dim}, target_dim of {CONDITIONER}", sizes["text_dim"])
    return AnimaTransformerConfig(
        **sizes,
        num_layers=file.layer_count("num_layers", 28),
        ffn_dim=int(sizes["num_heads"] * head_dim * file.number("mlp_ratio", 4.0)),
        num_mask_channels=int(file.flag("concat_padding_mask", True)),
        # Stretched for more positions than in training ("NTK-aware" scaling).
        thetas=tuple(THETA * scale ** (size / (size - 2)) for scale, size in zip(scales, sides, strict=True)),
        conditioner=conditioner,
    )


def _read_conditioner_config(folder: AnyFolder) -> ConditionerConfig:
    file = read_config(folder, CONDITIONER)
    fixed = {"use_self_attention": True, "use_layer_norm": False}
    file.refuse_unknown((*_CONDITIONER_SIZES, *fixed, "num_layers", "mlp_ratio"))
    file.refuse_other_values(fixed, _ONLY)
    sizes = file.sizes(_CONDITIONER_SIZES)
    dim, num_heads = sizes["dim"], sizes["num_heads"]
    if dim % (2 * num_heads):
        raise file.error("model_dim", f"an even number for each of num_attention_heads, {num_heads}", dim)
    num_layers, ffn_dim = file.layer_count("num_layers", 6), int(dim * file.number("mlp_ratio", 4.0))
    return ConditionerConfig(**sizes, num_layers=num_layers, ffn_dim=ffn_dim)


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = read_num_channels(file, "z_dim", transformer.num_channels, "the transformer's in_channels", 16)
    return ImageGeometry(num_channels, read_frame_factor(file, [False, True, True]), 1, PATCH)
