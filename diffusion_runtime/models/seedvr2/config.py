"""Config of a SeedVR2 folder: its transformer, read from json and checked.

The authors publish no json; models/published_folders.yaml has what their YAML files say, under the keys that these
have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion_runtime.core.model_folder import AnyFolder, read_config
from diffusion_runtime.models.seedvr2.windows import COUNTS

PATCH = (1, 2, 2)
NUM_WAVES = 256
# Of the hidden layer of a gated feed-forward network.
_MULTIPLE = 256
_SIZES = {
    **{"vid_out_channels": ("num_channels", 16), "vid_dim": ("dim", 2560), "txt_in_dim": ("text_dim", 5120)},
    **{"heads": ("num_heads", 20), "head_dim": ("head_dim", 128)},
}
_FIXED = {"patch_size": list(PATCH), "window": list(COUNTS), "qk_bias": False}


@dataclass(frozen=True)
class SeedVR2Config:
    """Sizes of a SeedVR2 transformer.

    num_own_layers: blocks, from the first, in which the text has layers of its own. ends_still: whether the text is not
    modulated in the last block. is_gated: whether feed-forward networks are gated. turns_text: whether the text has
    rotary positions, and the video whole ones behind it. has_out_norm: whether a norm lies before the last projection.
    """

    num_layers: int
    num_own_layers: int
    num_heads: int
    head_dim: int
    dim: int
    ffn_dim: int
    text_dim: int
    num_channels: int
    is_gated: bool
    turns_text: bool
    has_out_norm: bool
    ends_still: bool
    eps: float

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
    others = ("vid_in_channels", "expand_ratio", "num_layers", "mm_layers", "norm_eps", "mlp_type", "rope_type")
    file.refuse_unknown((*_SIZES, *_FIXED, *others, "vid_out_norm"))
    file.refuse_other_values(_FIXED, "as in the published models")
    sizes, num_read = file.sizes(_SIZES), file.whole_number("vid_in_channels", 33)
    if num_read != (expected := 2 * sizes["num_channels"] + 1):
        raise file.error("vid_in_channels", f"2 x vid_out_channels + 1, {expected}", num_read)
    if sizes["head_dim"] % 2 or sizes["head_dim"] < 12:
        raise file.error("head_dim", "an even number of 12 or more", sizes["head_dim"])
    is_gated = file.one_of("mlp_type", ("swiglu", "normal")) == "swiglu"
    turns_text = file.one_of("rope_type", ("mmrope3d", "rope3d")) == "mmrope3d"
    num_layers = file.layer_count("num_layers", 32)
    own = file.whole_number("mm_layers", 10, minimum=0)
    ffn_dim = sizes["dim"] * file.whole_number("expand_ratio", 4)
    if is_gated:
        ffn_dim = _MULTIPLE * math.ceil(int(2 * ffn_dim / 3) / _MULTIPLE)
    return SeedVR2Config(
        **sizes,
        num_layers=num_layers,
        num_own_layers=min(own, num_layers),
        ffn_dim=ffn_dim,
        is_gated=is_gated,
        turns_text=turns_text,
        has_out_norm=file.flag("vid_out_norm", True),
        # What tells the authors' two versions of the block apart.
        ends_still=turns_text,
        eps=file.number("norm_eps", 1e-5),
    )
