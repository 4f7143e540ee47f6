"""Config of a HunyuanVideo folder: its transformer and latents, read from json and checked."""

from __future__ import annotations

from diffusion_runtime.core import config_fields
from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ConfigFile, read_config, read_index
from diffusion_runtime.errors import ModelLoadError, shown

TEXT_TO_VIDEO, IMAGE_TO_VIDEO = "HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"
# How a video starts from an image: next to the latents, or as their first frame.
LATENT_CONCAT, TOKEN_REPLACE = "latent_concat", "token_replace"

_FIXED = {"qk_norm": "rms_norm"}


@config_fields.config
class HunyuanVideoConfig:
    """Sizes of a HunyuanVideo transformer.

    num_layers: blocks of two streams; num_single_layers: blocks of one, after them. patch: latents per token in
    (frames, height, width). axis_channels: of a head that carry the position on each axis; theta: of those.
    has_guidance: whether the guidance scale is an input. image_condition: LATENT_CONCAT or TOKEN_REPLACE in models that
    make a video from an image, None in others.
    """

    num_layers: int = config_fields.layer_count("num_layers")
    num_single_layers: int = config_fields.layer_count("num_single_layers")
    num_refiner_layers: int = config_fields.layer_count("num_refiner_layers", 2)
    num_heads: int = config_fields.whole_number("num_attention_heads")
    head_dim: int = config_fields.whole_number("attention_head_dim")
    ffn_dim: int = config_fields.ffn_width("mlp_ratio", 4.0)
    num_channels: int
    text_dim: int = config_fields.whole_number("text_embed_dim")
    pooled_dim: int = config_fields.whole_number("pooled_projection_dim")
    patch: tuple[int, int, int] = config_fields.token_patch("patch_size_t", "patch_size")
    axis_channels: tuple[int, int, int] = config_fields.rotary_axes("rope_axes_dim")
    theta: float = config_fields.number("rope_theta", 256.0)
    has_guidance: bool = config_fields.flag("guidance_embeds", True)
    image_condition: str | None = None

    @property
    def dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_input_channels(self) -> int:
        """Channels of the latents, and of an image next to them with a channel that marks where it is."""
        return 2 * self.num_channels + 1 if self.image_condition == LATENT_CONCAT else self.num_channels


def read_transformer_config(folder: AnyFolder) -> HunyuanVideoConfig:
    """Read transformer/config.json of a diffusers folder. Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, "transformer")
    # sample_size is the training size, which nothing needs.
    others = ("in_channels", "out_channels", "image_condition_type", "sample_size")
    sizes = config_fields.read_fields(HunyuanVideoConfig, file, fixed=_FIXED, others=others)
    num_channels, kind = _read_channels(file)
    return HunyuanVideoConfig(**sizes, num_channels=num_channels, image_condition=kind)


def _read_channels(file: ConfigFile) -> tuple[int, str | None]:
    """Read the channels of a latent, and image_condition."""
    kind = file.values.get("image_condition_type")
    if kind not in (None, LATENT_CONCAT, TOKEN_REPLACE):
        raise file.error("image_condition_type", f"null, {LATENT_CONCAT} or {TOKEN_REPLACE}", kind)
    in_channels = file.whole_number("in_channels")
    out_channels = file.whole_number("out_channels", in_channels)
    expected = 2 * out_channels + 1 if kind == LATENT_CONCAT else out_channels
    if in_channels != expected:
        raise ModelLoadError(
            f"{file.path}: keys 'image_condition_type' ({shown(kind)}), 'in_channels' ({in_channels}) and "
            f"'out_channels' ({out_channels}): expected {expected} in_channels; with other channels an image is given "
            "in a way that this family has not; `--backend diffusers` runs such checkpoints"
        )
    return out_channels, kind


def check_pipeline(folder: AnyFolder) -> None:
    """Check that the pipeline in model_index.json fits the transformer. Raises ModelLoadError."""
    name, kind = read_index(folder).get("_class_name"), read_transformer_config(folder).image_condition
    expected = TEXT_TO_VIDEO if kind is None else IMAGE_TO_VIDEO
    if name is not None and name != expected:
        raise ModelLoadError(
            f"{folder / INDEX_FILE}: key '_class_name': expected {expected}, as the transformer's image_condition_type "
            f"is {shown(kind)}, got {shown(name)}"
        )


def read_geometry(folder: AnyFolder) -> LatentGeometry:
    """Read transformer/config.json and vae/config.json. Raises ModelLoadError that names the file and the key."""
    transformer, file = read_transformer_config(folder), read_config(folder, "vae")
    source = "as the transformer's latents have"
    return LatentGeometry(
        num_channels=read_num_channels(file, "latent_channels", transformer.num_channels, source, 16),
        spatial_factor=file.whole_number("spatial_compression_ratio", 8),
        temporal_factor=file.whole_number("temporal_compression_ratio", 4),
        patch=transformer.patch,
        # The image's own frame, which is decoded too and left out.
        num_latents_before=1 if transformer.image_condition == LATENT_CONCAT else 0,
    )
