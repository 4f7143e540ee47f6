"""Config of a HunyuanVideo-1.5 folder: its transformer, latents and guidance, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import (
    AnyFolder,
    read_config,
    read_index,
)

_FIXED = {"qk_norm": "rms_norm"}
TASKS = ("t2v", "i2v")
TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"


@config_fields.config
class HunyuanVideo15Config:
    """Sizes of a HunyuanVideo-1.5 transformer.

    num_channels: of a latent; the transformer reads as many again of an image, and one that marks where it is.
    text_dim, glyph_dim, image_dim: of the tokens of the language model, of the text to write and of the image encoder.
    axis_channels: of a head that carry the position on each axis; theta: of those. target_size: pixels of a square
    frame it was made for. starts_from_image: whether it was trained to. takes_next_timestep: whether it takes the
    timestep that a step leads to as well (MeanFlow: step-distilled checkpoints).
    """

    num_layers: int = config_fields.layer_count("num_layers")
    num_refiner_layers: int = config_fields.layer_count("num_refiner_layers", 2)
    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.whole_number("attention_head_dim")
    ffn_dim: int = config_fields.ffn_width("mlp_ratio", 4.0)
    num_channels: int = config_fields.whole_number("out_channels")
    text_dim: int = config_fields.whole_number("text_embed_dim")
    glyph_dim: int = config_fields.whole_number("text_embed_2_dim")
    image_dim: int = config_fields.whole_number("image_embed_dim")
    patch: tuple[int, int, int] = config_fields.token_patch("patch_size_t", "patch_size")
    axis_channels: tuple[int, int, int] = config_fields.rotary_axes("rope_axes_dim")
    theta: float = config_fields.number("rope_theta", 256.0)
    target_size: int = config_fields.whole_number("target_size", 640)
    starts_from_image: bool
    takes_next_timestep: bool = config_fields.flag("use_meanflow", False)

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_input_channels(self) -> int:
        return 2 * self.num_channels + 1


def read_transformer_config(folder: AnyFolder) -> HunyuanVideo15Config:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    sizes = config_fields.read_fields(HunyuanVideo15Config, file, fixed=_FIXED, others=("in_channels", "task_type"))
    task = file.values.get("task_type", "i2v")
    if task not in TASKS:
        raise file.error("task_type", " or ".join(TASKS), task)
    config = HunyuanVideo15Config(**sizes, starts_from_image=_starts_from_image(folder, task))
    in_channels = file.whole_number("in_channels")
    if in_channels != config.num_input_channels:
        raise file.error("in_channels", f"{config.num_input_channels}, twice out_channels and one", in_channels)
    return config


def _starts_from_image(folder: AnyFolder, task: str) -> bool:
    """Return whether the folder's pipeline starts from an image. task: the transformer's task_type, for a folder that
    names no pipeline. diffusers does not read that key, and its converter of published models writes `i2v` for text to
    video at 480p, too."""
    name = read_index(folder).get("_class_name")
    return task == "i2v" if name is None else name == IMAGE_TO_VIDEO


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    source = "the transformer's out_channels"
    return LatentGeometry(
        num_channels=read_num_channels(file, "latent_channels", transformer.num_channels, source, 32),
        spatial_factor=file.whole_number("spatial_compression_ratio", 16),
        temporal_factor=file.whole_number("temporal_compression_ratio", 4),
        patch=transformer.patch,
    )


def wide_size(target_size: int, multiple: int) -> tuple[int, int]:
    """Return (height, width) in pixels, multiples of `multiple`, of 16:9 or a little less, in about as many pixels as a
    square of target_size: the nearest of the sizes it was trained on, those in which not one more row or column would
    fit."""
    num_patches = round((target_size / multiple) ** 2)
    trained = (
        (rows, columns)
        for rows in range(num_patches, 0, -1)
        for columns in range(max(1, num_patches // (rows + 1)), num_patches // rows + 1)
    )
    wanted = 9 / 16
    wide = [size for size in trained if size[0] / size[1] >= wanted]
    # A target of a patch or two has no such size: one patch, then.
    rows, columns = min(wide, key=lambda size: size[0] / size[1], default=(1, 1))
    return rows * multiple, columns * multiple
