"""Config of a Qwen-Image folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry, read_frame_factor, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.errors import ModelLoadError

# The pipeline folds 2 x 2 latents into a token, whatever the checkpoint's patch_size.
_SIDE = 2
PATCH = (1, _SIDE, _SIDE)
# The model takes time in [0, 1].
TIME_SCALE = 1000.0
# Layered images have other values, and the third nothing reads.
FIXED = {"patch_size": _SIDE, **dict.fromkeys(("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"), False)}
UNREAD = ("pooled_projection_dim",)


@config_fields.config
class QwenImageTransformerConfig:
    """Sizes of a Qwen-Image transformer.

    text_dim: of the language model's hidden states. axes: channels of a head that carry each axis of the rotary
    positions. references_at_zero: whether the tokens of images to edit are at timestep 0 (zero_cond_t, from
    Qwen-Image-Edit-2511 on). num_waves: of the sinusoidal timestep. eps: of every norm.
    """

    num_layers: int = config_fields.layer_count("num_layers")
    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.whole_number("attention_head_dim")
    num_channels: int = config_fields.whole_number("out_channels")
    text_dim: int = config_fields.whole_number("joint_attention_dim")
    axes: tuple[int, ...] = config_fields.rotary_axes("axes_dims_rope", (16, 56, 56))
    references_at_zero: bool = config_fields.flag("zero_cond_t", False)
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
        return self.num_channels * _SIDE * _SIDE


def read_transformer_config(folder: AnyFolder) -> QwenImageTransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    why = "as in Qwen-Image and Qwen-Image-Edit; `--backend diffusers` runs others"
    others = (*UNREAD, "in_channels")
    sizes = config_fields.read_fields(QwenImageTransformerConfig, file, fixed=FIXED, why=why, others=others)
    config, in_channels = QwenImageTransformerConfig(**sizes), file.whole_number("in_channels")
    if in_channels != config.patch_channels:
        raise ModelLoadError(
            f"{file.path}: keys 'in_channels' ({in_channels}) and 'out_channels' ({config.num_channels}): expected the "
            "first to be four times the second; this is not a text-to-image checkpoint, the only kind that runs "
            "natively; `--backend diffusers` runs it"
        )
    return config


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    return geometry_of(folder, read_transformer_config(folder).num_channels, "the transformer's out_channels")


def geometry_of(folder: AnyFolder, num_channels: int, source: str) -> ImageGeometry:
    """Read vae/config.json of a model with this autoencoder. num_channels: of its transformer's latents; source: where
    they stand. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "vae")
    read_num_channels(file, "z_dim", num_channels, source, 16)
    return ImageGeometry(num_channels, read_frame_factor(file, [False, True, True]), 1, PATCH)
