"""Config of an Anima folder: its transformer, text conditioner and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.layers.rope import THETA, split_head_dim
from diffusion_runtime.models.anima.conditioner import CONDITIONER, ConditionerConfig, read_conditioner_config
from diffusion_runtime.models.qwen_image.config import geometry_of

PATCH = (1, 2, 2)
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


@config_fields.config
class AnimaTransformerConfig:
    """Sizes of an Anima transformer.

    has_mask: whether the mask of a picture's padding, of which there is none, next to its latents. narrow_dim:
    between the two layers that modulate a block. thetas: the longest period of the rotary positions along each axis.
    """

    num_layers: int = config_fields.layer_count("num_layers", 28)
    num_heads: int = config_fields.whole_number("num_attention_heads", 32)
    head_dim: int = config_fields.even_number("attention_head_dim", 128)
    ffn_dim: int = config_fields.ffn_width("mlp_ratio", 4.0)
    num_channels: int = config_fields.equal_channels(16, default_out=16)
    has_mask: bool = config_fields.flag("concat_padding_mask", True)
    text_dim: int = config_fields.whole_number("text_embed_dim", 1024)
    narrow_dim: int = config_fields.whole_number("adaln_lora_dim", 256)
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
    sizes = config_fields.read_fields(AnimaTransformerConfig, file, fixed=_FIXED, others=(*_WITH_FIXED, "rope_scale"))
    sides = split_head_dim(sizes["head_dim"])
    if min(sides) < 4:
        raise file.error("attention_head_dim", "an even number of at least 12", sizes["head_dim"])
    scales = (2.0, 1.0, 1.0) if file.values.get("rope_scale") is None else file.numbers("rope_scale", 3)
    if not all(0 < scale <= 1000 for scale in scales):
        raise file.error("rope_scale", "numbers above 0, of at most 1000", list(scales))
    conditioner = read_conditioner_config(folder)
    if conditioner.out_dim != sizes["text_dim"]:
        raise file.error("text_embed_dim", f"{conditioner.out_dim}, target_dim of {CONDITIONER}", sizes["text_dim"])
    # Stretched for more positions than in training ("NTK-aware" scaling).
    thetas = tuple(THETA * scale ** (size / (size - 2)) for scale, size in zip(scales, sides, strict=True))
    return AnimaTransformerConfig(**sizes, thetas=thetas, conditioner=conditioner)


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels, "the transformer's in_channels")
