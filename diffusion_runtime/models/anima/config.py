"""Config of an Anima folder: its transformer, text conditioner and latents, read from json and checked."""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.layers.rope import THETA, split_head_dim
from diffusion_runtime.models.anima.conditioner import CONDITIONER, ConditionerConfig, read_conditioner_config
from diffusion_runtime.models.qwen_image.config import geometry_of

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
    conditioner = read_conditioner_config(folder)
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


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels, "the transformer's in_channels")
