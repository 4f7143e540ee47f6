"""Tensor names of video autoencoders and vocoders whose authors number the levels of a network in one list (LTX-Video,
LTX-2), where diffusers nests what changes the size in the block that it belongs to.

The list of the encoder: of each block its residual layers, its downsampler and its last layer where it has them, then
the middle. Of the decoder: the middle, then of each block its first layer, its upsampler and its residual layers. The
authors' name of each tensor follows from diffusers'.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

# Behind diffusers' name of a block: the parts with a level of their own, in the order of the authors' list.
_DOWN, _UP = ("resnets", "downsamplers.0", "conv_out"), ("conv_in", "upsamplers.0", "resnets")
# Of the latents, by diffusers' name and by the authors'.
STATISTICS = {
    "latents_mean": "per_channel_statistics.mean-of-means",
    "latents_std": "per_channel_statistics.std-of-means",
}
# Statistics in the authors' files that nothing reads.
UNREAD = "per_channel_statistics."
_DECODER = {
    "decoder.time_embedder.": "decoder.last_time_embedder.",
    "decoder.scale_shift_table": "decoder.last_scale_shift_table",
}
_VOCODER = {
    "conv_in": "conv_pre",
    "conv_out": "conv_post",
    "upsamplers": "ups",
    "resnets": "resblocks",
    "act_out": "act_post",
    "downsample": "downsample.lowpass",
}


def level_list_names(expected: Collection[str]) -> dict[str, str]:
    """The authors' name -> diffusers', of an autoencoder."""
    levels = dict(_levels(expected))
    return {_autoencoder_name(name, levels): name for name in expected}


def vocoder_names(expected: Collection[str]) -> dict[str, str]:
    """The authors' name -> diffusers', of a vocoder, with bandwidth extension or without."""
    return {".".join(_VOCODER.get(part, part) for part in name.split(".")): name for name in expected}


def connector_names(expected: Collection[str]) -> dict[str, str]:
    """The authors' name -> diffusers', of LTX-2's connectors from the text encoder to the transformer."""

    def original(name: str) -> str:
        name = re.sub(r"^(\w+_)?text_proj_in\.", r"text_embedding_projection.\1aggregate_embed.", name)
        name = re.sub(r"^(video|audio)_connector\.", r"\1_embeddings_connector.", name)
        name = name.replace(".transformer_blocks.", ".transformer_1d_blocks.")
        return re.sub(r"\.norm_([qk])\.", r".\1_norm.", name)

    return {original(name): name for name in expected}


def _levels(expected: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a part that has its own level, by diffusers' name (`decoder.up_blocks.1.upsamplers.0`), and the
    level."""
    for half, blocks, parts in (("encoder", "down_blocks", _DOWN), ("decoder", "up_blocks", _UP)):
        found = {_place(name, half, blocks) for name in expected} - {None}
        num_blocks = 1 + max((int(place.split(".")[2]) for place in found if place is not None), default=-1)
        order = [f"{half}.{blocks}.{index}.{part}" for index in range(num_blocks) for part in parts]
        present = [place for place in order if place in found]
        middle = f"{half}.mid_block"
        for index, place in enumerate([middle, *present] if half == "decoder" else [*present, middle]):
            yield place, f"{half}.{blocks}.{index}"


def _place(name: str, half: str, blocks: str) -> str | None:
    found = re.match(rf"{half}\.{blocks}\.\d+\.(resnets|(?:down|up)samplers\.0|conv_in|conv_out)\.", name)
    return None if found is None else found[0].removesuffix(".")


def _autoencoder_name(name: str, levels: dict[str, str]) -> str:
    if name in STATISTICS:
        return STATISTICS[name]
    for theirs, ours in _DECODER.items():
        if name.startswith(theirs):
            return f"{ours}{name.removeprefix(theirs)}"
    block = re.match(r"(?:encoder|decoder)\.(?:mid_block|(?:down|up)_blocks\.\d+)\.", name)
    if block is not None:
        inner = name.removeprefix(block[0])
        part = next((each for each in (*_DOWN, *_UP) if inner.startswith(f"{each}.")), "")
        if block[0].endswith("mid_block."):
            name = f"{levels[block[0].removesuffix('.')]}.{inner}"
        elif part:
            # Residual layers are numbered within their level, as is what a block has for all of them.
            rest = inner if part == "resnets" else inner.removeprefix(f"{part}.")
            name = f"{levels[block[0] + part]}.{rest}"
        elif (of_layers := levels.get(f"{block[0]}resnets")) is not None:
            name = f"{of_layers}.{inner}"
    name = name.replace(".conv_shortcut.conv.", ".conv_shortcut.").replace(".norm3.", ".norm3.norm.")
    return name.replace(".resnets.", ".res_blocks.")
