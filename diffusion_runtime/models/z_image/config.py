"""Config of a Z-Image folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import ImageGeometry, read_image_factor, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, read_config

# Both sequences, of the picture and of the text, are padded to a multiple of this with trained tokens.
TOKEN_MULTIPLE = 32
# The conditioning vector is no wider than this, whatever the width of the transformer.
_MAX_CONDITIONING = 256
_FIXED = {"all_patch_size": [2], "all_f_patch_size": [1], "siglip_feat_dim": None, "t_scale": 1000, "qk_norm": True}
# `nheads` is in published files next to n_heads, which means the same; no version of the class knows it.
_UNREAD = ("nheads", "axes_lens")


@config_fields.config
class ZImageTransformerConfig:
    """Sizes of a Z-Image transformer.

    num_refiner_layers: of the picture and of the text each, before they meet. text_dim: of the text encoder. axes:
    channels of a head that carry each axis of the rotary positions (place in the sequence, row, column).
    """

    num_layers: int = config_fields.layer_count("n_layers")
    num_refiner_layers: int = config_fields.layer_count("n_refiner_layers")
    num_heads: int = config_fields.whole_number("n_heads")
    dim: int = config_fields.whole_number("dim")
    num_channels: int = config_fields.whole_number("in_channels")
    text_dim: int = config_fields.whole_number("cap_feat_dim")
    axes: tuple[int, ...]
    theta: float = config_fields.number("rope_theta", 256.0)
    eps: float = config_fields.number("norm_eps", 1e-5)
    # Not in published configs: the class fixes it.
    num_waves: int = 256
    timestep_hidden_dim: int = 1024
    qk_eps: float = 1e-5
    out_eps: float = 1e-6
    patch: tuple[int, int, int] = (1, 2, 2)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def ffn_dim(self) -> int:
        return int(self.dim / 3 * 8)

    @property
    def conditioning_dim(self) -> int:
        return min(self.dim, _MAX_CONDITIONING)

    @property
    def patch_channels(self) -> int:
        """Numbers in a patch of latents."""
        return self.num_channels * self.patch[1] * self.patch[2]


def read_transformer_config(folder: AnyFolder) -> ZImageTransformerConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    sizes = config_fields.read_fields(
        ZImageTransformerConfig, file, fixed=_FIXED, others=("n_kv_heads", "axes_dims", *_UNREAD)
    )
    dim, num_heads = sizes["dim"], sizes["num_heads"]
    if dim % num_heads:
        raise file.error("dim", f"a multiple of n_heads, {num_heads}", dim)
    if file.whole_number("n_kv_heads", num_heads) != num_heads:
        raise file.error("n_kv_heads", f"n_heads, {num_heads}", file.values["n_kv_heads"])
    axes = file.rotary_axes("axes_dims", dim // num_heads, of="the head size")
    return ZImageTransformerConfig(**sizes, axes=axes)


def read_geometry(folder: AnyFolder) -> ImageGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    expected, source = transformer.num_channels, "the transformer's in_channels"
    num_channels = read_num_channels(file, "latent_channels", expected, source, default=expected)
    return ImageGeometry(num_channels, read_image_factor(file), 1, transformer.patch)
