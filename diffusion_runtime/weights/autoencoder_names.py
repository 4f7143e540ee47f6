"""Tensor names of autoencoders in one file: diffusers', or those of their authors, which ComfyUI's files keep.

Schemes: Wan's, of causal video autoencoders (Wan 2.1 and 2.2, Qwen-Image), that of latent diffusion (the
`ae.safetensors` of FLUX.1 and Z-Image, FLUX.2's, and HunyuanVideo-1.5's, which counts a decoder's levels as they run),
and those of level_list_names.py. HunyuanVideo's authors have diffusers' names. The authors' name of each tensor follows
from diffusers'.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError, shown_name
from diffusion_runtime.weights.file_kinds import kind_of
from diffusion_runtime.weights.level_list_names import UNREAD, connector_names, level_list_names, vocoder_names
from diffusion_runtime.weights.stored_tensors import Rows
from diffusion_runtime.weights.weight_files import listed, without_prefix

Shapes = Mapping[str, tuple[int, ...]]
# In front of the names in files that hold more than an autoencoder; that of other components is their name.
_PREFIXES = {"vae": ("first_stage_model.", "vae.")}
# Whole modules that a scheme calls otherwise, at any position.
_CAUSAL = {
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_CAUSAL_PARTS = {
    "conv_in": "conv1",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
    "norm_out": "head.0",
    "conv_out": "head.2",
}
# Of the module that is not built for a half of the autoencoder, so that its tensors are known as such.
_CAUSAL_TOPS = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
_LATENT_DIFFUSION = {
    "conv_shortcut": "nin_shortcut",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "conv_norm_out": "norm_out",
}


def by_diffusers_names(path: Path, rows: Rows, expected: Shapes, component: str = "vae") -> Rows:
    """The rows of a file's tensors by diffusers' names, which they have already in a diffusers folder. path: for
    messages. expected: the tensors that will be read; component: whose they are.

    Raises ModelLoadError for a file that holds something else, with what it holds.
    """
    if all(name in rows for name in expected):
        return rows
    if component == "connectors":
        # Beside a transformer, with its prefix; the projections are outside of it.
        original = connector_names(expected)
        names = {without_prefix(name): name for name in rows}
        if all(name in names for name in original):
            return {ours: (rows[names[name]][0].as_shape(expected[ours]),) for name, ours in original.items()}
    found = _without_prefix(rows, _PREFIXES.get(component, (f"{component}.",)))
    if all(name in found for name in expected):
        return found
    if any(name.startswith(UNREAD) for name in found):
        wanted = level_list_names(expected)
        found = {name: each for name, each in found.items() if not name.startswith(UNREAD) or name in wanted}
    forwards = functools.partial(_latent_diffusion_names, counts_backwards=False)
    schemes = (_causal_names, _latent_diffusion_names, forwards, level_list_names, vocoder_names)
    for original in (names(expected) for names in schemes):
        if original and all(name in found for name in original):
            tops = _tops(original)
            return {
                _renamed(name, original, tops): (
                    (each[0].as_shape(expected[original[name]]),) if name in original else each
                )
                for name, each in found.items()
            }
    if not any(name in found for name in expected):
        kind, part = kind_of(tuple(rows)), "autoencoder" if component == "vae" else component
        raise ModelLoadError(
            f"{path}: holds {'something else' if kind is None else kind.title}, expected an {part} with tensors "
            f"such as {listed(map(shown_name, sorted(expected)[:2]))}: use the file or the folder of this model's own "
            f"{part}"
        )
    return found


def _without_prefix(rows: Rows, prefixes: Sequence[str]) -> Rows:
    prefix = next((each for each in prefixes if any(name.startswith(each) for name in rows)), "")
    return {name.removeprefix(prefix): each for name, each in rows.items() if name.startswith(prefix)}


def _renamed(name: str, original: Mapping[str, str], tops: Mapping[str, str]) -> str:
    module, _, leaf = name.rpartition(".")
    return original.get(name) or (f"{tops[module]}.{leaf}" if module in tops else name)


def _tops(original: Mapping[str, str]) -> Mapping[str, str]:
    """Names of the other half's outermost convolution, whose tensors nothing reads."""
    if any(".upsamples." in name or ".downsamples." in name for name in original):
        return _CAUSAL_TOPS
    return {"encoder.quant_conv": "quant_conv", "decoder.post_quant_conv": "post_quant_conv"}


def _causal_names(expected: Collection[str]) -> dict[str, str]:
    """The authors' name -> diffusers'."""
    nested = any(".downsampler." in name or ".upsampler." in name for name in expected)
    counts = _counts(expected)
    return {_causal_name(name, counts, nested=nested): name for name in expected}


def _causal_name(name: str, counts: Mapping[tuple[str, int], int], *, nested: bool) -> str:
    for ours, theirs in _CAUSAL_TOPS.items():
        if name.startswith(f"{theirs}."):
            return f"{ours}.{name.removeprefix(f'{theirs}.')}"
    half, _, rest = name.partition(".")
    for theirs, ours in _CAUSAL_PARTS.items():
        if rest.startswith(f"{theirs}."):
            return f"{half}.{ours}.{_replaced(rest.removeprefix(f'{theirs}.'), _CAUSAL)}"
    block = re.match(r"(down|up)_blocks\.(\d+)\.(.*)", rest)
    if block is None:
        return name
    way, index, inner = block[1], int(block[2]), block[3]
    several = f"{way}samples"
    member = re.match(r"resnets\.(\d+)\.(.*)", inner)
    last = re.match(r"(?:(?:up|down)samplers\.0|(?:up|down)sampler)\.(.*)", inner)
    if member is None and last is None:
        # A flat list of layers, as the encoder's of Wan 2.1.
        return f"{half}.{several}.{index}.{_replaced(inner, _CAUSAL)}"
    own = int(member[1]) if member else counts.get((f"{half}.{way}", index), 0)
    tail = _replaced(member[2], _CAUSAL) if member else str(last and last[1])
    if nested:
        return f"{half}.{several}.{index}.{several}.{own}.{tail}"
    before = sum(
        counts.get((f"{half}.{way}", each), 0) + counts.get((f"{half}.{way}.sampler", each), 0) for each in range(index)
    )
    return f"{half}.{several}.{before + own}.{tail}"


def _counts(expected: Collection[str]) -> dict[tuple[str, int], int]:
    """By (half and way, block): how many residual layers it has, and under `.sampler` whether it changes the size."""
    counts: dict[tuple[str, int], int] = {}
    for name in expected:
        found = re.match(r"(\w+)\.(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(\w+sampler))", name)
        if found is None:
            continue
        place, index = f"{found[1]}.{found[2]}", int(found[3])
        if found[4] is None:
            counts[f"{place}.sampler", index] = 1
        else:
            counts[place, index] = max(counts.get((place, index), 0), int(found[4]) + 1)
    return counts


def _latent_diffusion_names(expected: Collection[str], *, counts_backwards: bool = True) -> dict[str, str]:
    """The authors' name -> diffusers'. counts_backwards: whether the decoder's last level is the authors' first."""
    up_blocks = [int(found[1]) for name in expected if (found := re.match(r"decoder\.up_blocks\.(\d+)\.", name))]
    last = max(up_blocks, default=-1) if counts_backwards else None
    return {_latent_diffusion_name(name, last): name for name in expected}


def _latent_diffusion_name(name: str, last_up_block: int | None) -> str:
    def level(index: str) -> int:
        return int(index) if last_up_block is None else last_up_block - int(index)

    name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda found: f"up.{level(found[1])}.block.{found[2]}", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda found: f"up.{level(found[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d+)", lambda found: f"mid.block_{int(found[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0.", "mid.attn_1.")
    return _replaced(name, _LATENT_DIFFUSION)


def _replaced(name: str, names: Mapping[str, str]) -> str:
    """With modules of a name called as in `names`."""
    for theirs, ours in names.items():
        name = re.sub(rf"(^|\.){re.escape(theirs)}\.", rf"\g<1>{ours}.", name)
    return name
