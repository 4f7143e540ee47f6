"""Config of a SeedVR2 folder: its transformer, read from json and checked.

The authors publish no json; models/published_folders.yaml has what their YAML files say, under the keys that these
have.
"""

from __future__ import annotations

import math

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.seedvr2.windows import COUNTS

PATCH = (1, 2, 2)
NUM_WAVES = 256
# Of the hidden layer of a gated feed-forward network.
_MULTIPLE = 256
_FIXED = {"patch_size": list(PATCH), "window": list(COUNTS), "qk_bias": False}


@config_fields.config
class SeedVR2Config:
    """Sizes of a SeedVR2 transformer.

    num_own_layers: blocks, from the first, in which the text has layers of its own. ends_still: whether the text is not
    modulated in the last block. is_gated: whether feed-forward networks are gated. turns_text: whether the text has
    rotary positions, and the video whole ones behind it. has_out_norm: whether a norm lies before the last projection.
    """

    num_layers: int = config_fields.layer_count("num_layers", 32)
    num_own_layers: int
    num_heads: int = config_fields.whole_number("heads", 20)
    head_dim: int = config_fields.even_number("head_dim", 128)
    dim: int = config_fields.whole_number("vid_dim", 2560)
    ffn_dim: int
    text_dim: int = config_fields.whole_number("txt_in_dim", 5120)
    num_channels: int = config_fields.whole_number("vid_out_channels", 16)
    is_gated: bool
    turns_text: bool
    has_out_norm: bool = config_fields.flag("vid_out_norm", True)
    ends_still: bool
    eps: float = config_fields.number("norm_eps", 1e-5)

    @property
    def inner_dim(self) -> int:
        """Width of q, of k and of v."""
        return self.num_heads * self.head_dim

    @property
    def patch_channels(self) -> int:
        """Numbers of a token that is made."""
        return self.num_channels * math.prod(PATCH)

    @property
    def patch_channels_in(self) -> int:
        """Numbers of a token that is read: noise, the video to restore, and the mask."""
        return (2 * self.num_channels + 1) * math.prod(PATCH)


def read_transformer_config(folder: AnyFolder) -> SeedVR2Config:
    """Read transformer/config.json. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    others = ("vid_in_channels", "expand_ratio", "mm_layers", "mlp_type", "rope_type")
    sizes = config_fields.read_fields(
        SeedVR2Config, file, fixed=_FIXED, why="as in the published models", others=others
    )
    num_read, expected = file.whole_number("vid_in_channels", 33), 2 * sizes["num_channels"] + 1
    if num_read != expected:
        raise file.error("vid_in_channels", f"2 x vid_out_channels + 1, {expected}", num_read)
    if sizes["head_dim"] < 12:
        raise file.error("head_dim", "an even number of 12 or more", sizes["head_dim"])
    is_gated = file.one_of("mlp_type", ("swiglu", "normal")) == "swiglu"
    turns_text = file.one_of("rope_type", ("mmrope3d", "rope3d")) == "mmrope3d"
    own = file.whole_number("mm_layers", 10, minimum=0)
    ffn_dim = sizes["dim"] * file.whole_number("expand_ratio", 4)
    if is_gated:
        ffn_dim = _MULTIPLE * math.ceil(int(2 * ffn_dim / 3) / _MULTIPLE)
    return SeedVR2Config(
        **sizes,
        num_own_layers=min(own, sizes["num_layers"]),
        ffn_dim=ffn_dim,
        is_gated=is_gated,
        turns_text=turns_text,
        # What tells the authors' two versions of the block apart.
        ends_still=turns_text,
    )
