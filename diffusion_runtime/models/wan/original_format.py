"""Config keys and tensor names of Wan's authors, for models on Wan's blocks whose folders keep them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diffusion_runtime.core.latent_geometry import LatentGeometry, read_num_channels
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.models.wan.config import WanTransformerConfig
from diffusion_runtime.models.wan.weights import IMAGE_PARTS, LORA_NAMES, PARTS, transformer_pieces
from diffusion_runtime.weights.lora.names import LoraNames, Originals, block_names
from diffusion_runtime.weights.pieces import NamedPieces

# Of the image encoder, CLIP ViT-H/14: the authors' classes write it down nowhere else.
IMAGE_DIM = 1280
KEYS = (
    *("patch_size", "text_len", "in_dim", "dim", "ffn_dim", "freq_dim", "text_dim", "out_dim", "num_heads"),
    *("num_layers", "cross_attn_norm", "eps"),
)
# Names of Wan's modules in diffusers' folders -> in the authors' files.
_NAMES = {str(theirs): name for name, theirs in LORA_NAMES.originals.items() if not name.startswith(("vace", "far"))}
_ATTENTION = {"attn1": "self_attn", "attn2": "cross_attn"}
_MODULE = re.compile(r"(?P<block>blocks\.\d+\.)?(?P<module>.+?)(?P<kind>\.weight|\.bias)?")


@dataclass(frozen=True, kw_only=True)
class OriginalConfig(WanTransformerConfig):
    """Sizes of a transformer that the authors' keys give. max_tokens: length that the text is padded to."""

    max_tokens: int


def read_sizes(file: ConfigFile, in_dim: int) -> OriginalConfig:
    """Read the sizes of a transformer of 14 B parameters with an image encoder. in_dim: where the file has none. Raises
    ModelLoadError that names the file and the key."""
    patch = file.whole_numbers("patch_size", 3) if "patch_size" in file.values else (1, 2, 2)
    if patch[0] != 1:
        raise file.error("patch_size", "one latent frame per token", list(patch))
    dim, num_heads = file.whole_number("dim", 5120), file.whole_number("num_heads", 40)
    if dim % num_heads or (dim // num_heads) % 2:
        raise file.error("dim", f"num_heads, {num_heads}, times an even size of a head", dim)
    num_channels, in_channels = file.whole_number("out_dim", 16), file.whole_number("in_dim", in_dim)
    if in_channels <= num_channels:
        raise file.error("in_dim", f"more than out_dim, {num_channels}: channels of a mask too", in_channels)
    return OriginalConfig(
        num_layers=file.layer_count("num_layers", 40),
        num_heads=num_heads,
        head_dim=dim // num_heads,
        ffn_dim=file.whole_number("ffn_dim", 13824),
        num_channels=num_channels,
        text_dim=file.whole_number("text_dim", 4096),
        num_waves=file.even_number("freq_dim", 256),
        patch=(patch[0], patch[1], patch[2]),
        norm_cross=file.flag("cross_attn_norm", True),
        eps=file.number("eps", 1e-6),
        condition_channels=in_channels - num_channels,
        image_dim=IMAGE_DIM,
        max_tokens=file.whole_number("text_len", 512),
    )


def read_geometry(
    folder: AnyFolder, transformer: OriginalConfig, *, encoded: bool, token_multiple: int = 1
) -> LatentGeometry:
    """Read vae/config.json for a transformer. encoded: whether encoded frames are next to the latents, beside a mask.
    token_multiple: of LatentGeometry. Raises ModelLoadError that names the file and the key."""
    file, num_channels = read_config(folder, "vae"), transformer.num_channels
    read_num_channels(file, "z_dim", num_channels, "the transformer's out_dim", 16)
    factor = file.whole_number("scale_factor_temporal", 4)
    parts = [f"{num_channels} of the latents", f"{factor} of a mask"]
    parts += [f"{num_channels} of encoded frames"] * encoded
    expected = num_channels + factor + num_channels * encoded
    if transformer.in_channels != expected:
        raise read_config(folder, "transformer").error(
            "in_dim", f"{expected}: {', '.join(parts)}", transformer.in_channels
        )
    return LatentGeometry(
        num_channels=num_channels,
        spatial_factor=file.whole_number("scale_factor_spatial", 8),
        temporal_factor=factor,
        patch=transformer.patch,
        token_multiple=token_multiple,
    )


def original_pieces(config: WanTransformerConfig, *, within_attention: bool = True) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other, by the authors' names.
    within_attention: False for files that keep diffusers' names within attention layers."""
    for name, pieces in transformer_pieces(config):
        yield name, tuple(dataclasses.replace(each, name=_renamed(each.name, within_attention)) for each in pieces)


def _renamed(name: str, within_attention: bool) -> str:
    """Return the authors' name of a tensor, from that in a folder of diffusers'."""
    match = _MODULE.fullmatch(name)
    assert match is not None
    block, module, kind = match["block"] or "", match["module"], match["kind"] or ""
    attention, _, layer = module.partition(".")
    if attention in _ATTENTION and not within_attention:
        return f"{block}{_ATTENTION[attention]}.{layer}{kind}"
    theirs = _NAMES[f"blocks.{{}}.{module}" if block else module]
    return f"{block}{theirs.removeprefix('blocks.{}.')}{kind}"


def original_lora_names(
    title: str, *, within_attention: bool = True, prefixes: Sequence[str] = ("blocks.{}",), more: Sequence[str] = ()
) -> LoraNames:
    """Return the names in LoRA files of a transformer of 14 B parameters, under the title of its family.
    within_attention: of original_pieces. prefixes: of a block's modules. more: modules that Wan has not."""

    def parts(names: Mapping[str, str]) -> dict[str, str]:
        return {name: name if within_attention else part for name, part in names.items()}

    names: Originals = {
        **{f"self_attn.{name}": f"self_attn.{part}" for name, part in parts(PARTS).items()},
        **{f"cross_attn.{name}": f"cross_attn.{part}" for name, part in parts({**PARTS, **IMAGE_PARTS}).items()},
        **{name: name for name in ("norm3", "ffn.0", "ffn.2", "modulation")},
    }
    return LoraNames(
        title=title,
        shares_names_of=LORA_NAMES.title,
        same=(*(name for name in _NAMES.values() if "{}" not in name), *more),
        originals={key: each for prefix in prefixes for key, each in block_names(prefix, "blocks.{}", names).items()},
        resized={"patch_embedding": "the patch embedding of a model with other inputs (text to video)"},
        widths=frozenset({5120}),
        num_blocks=frozenset({40}),
    )
