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
_NUMBERS = {
    **{"in_channels": 16, "out_channels": 16, "num_attention_heads": 32, "attention_head_dim": 128},
    **{"text_embed_dim": 1024, "adaln_lora_dim": 256},
}
_CONDITIONER_NUMBERS = {
    **{"source_dim": 1024, "target_dim": 1024, "model_dim": 1024, "num_attention_heads": 16},
    **{"target_vocab_size": 32128, "min_sequence_length": 512},
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
    own = ("num_layers", "mlp_ratio", "rope_scale", "concat_padding_mask")
    file.refuse_unknown((*_NUMBERS, *_FIXED, *_WITH_FIXED, *own))
    file.refuse_other_values(_FIXED, _ONLY)
    found = {key: file.whole_number(key, default) for key, default in _NUMBERS.items()}
    if found["out_channels"] != found["in_channels"]:
        raise file.error("out_channels", f"{found['in_channels']}, in_channels", found["out_channels"])
    head_dim = found["attention_head_dim"]
    sides = split_head_dim(head_dim)
    if head_dim % 2 or min(sides) < 4:
        raise file.error("attention_head_dim", "an even number of at least 12", head_dim)
    scales = (2.0, 1.0, 1.0) if file.values.get("rope_scale") is None else file.numbers("rope_scale", 3)
    if not all(0 < scale <= 1000 for scale in scales):
        raise file.error("rope_scale", "numbers above 0, of at most 1000", list(scales))
    dim = found["num_attention_heads"] * head_dim
    conditioner = _read_conditioner_config(folder)
    if conditioner.out_dim != found["text_embed_dim"]:
        raise file.error(
            "text_embed_dim", f"{conditioner.out_dim}, target_dim of {CONDITIONER}", found["text_embed_dim"]
        )
    return AnimaTransformerConfig(
        num_layers=file.layer_count("num_layers", 28),
        num_heads=found["num_attention_heads"],
        head_dim=head_dim,
        ffn_dim=int(dim * file.number("mlp_ratio", 4.0)),
        num_channels=found["in_channels"],
        num_mask_channels=int(file.flag("concat_padding_mask", True)),
        text_dim=found["text_embed_dim"],
        narrow_dim=found["adaln_lora_dim"],
        # Stretched for more positions than in training ("NTK-aware" scaling).
        thetas=tuple(THETA * scale ** (size / (size - 2)) for scale, size in zip(scales, sides, strict=True)),
        conditioner=conditioner,
    )


def _read_conditioner_config(folder: AnyFolder) -> ConditionerConfig:
    file = read_config(folder, CONDITIONER)
    fixed = {"use_self_attention": True, "use_layer_norm": False}
    file.refuse_unknown((*_CONDITIONER_NUMBERS, *fixed, "num_layers", "mlp_ratio"))
    file.refuse_other_values(fixed, _ONLY)
    found = {key: file.whole_number(key, default) for key, default in _CONDITIONER_NUMBERS.items()}
    dim, num_heads = found["model_dim"], found["num_attention_heads"]
    if dim % (2 * num_heads):
        raise file.error("model_dim", f"an even number for each of num_attention_heads, {num_heads}", dim)
    return ConditionerConfig(
        source_dim=found["source_dim"],
        dim=dim,
        out_dim=found["target_dim"],
        num_heads=num_heads,
        num_layers=file.layer_count("num_layers", 6),
        ffn_dim=int(dim * file.number("mlp_ratio", 4.0)),
        vocab_size=found["target_vocab_size"],
        min_tokens=found["min_sequence_length"],
    )


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    num_channels = read_num_channels(file, "z_dim", transformer.num_channels, "the transformer's in_channels", 16)
    return ImageGeometry(num_channels, read_frame_factor(file, [False, True, True]), 1, PATCH)
