"""Widen a trained VAE, so that training goes on from what it knows: its deepest level, or the whole decoder.

python -m scripts.train_embedded.widen_vae vae.pt wide.pt
python -m scripts.train_embedded.widen_vae vae.pt wide.pt --decoder-base 36    # for EMOJI_SIZES with this base

Channels of the deepest level are doubled as in Chen et al., "Net2Net: accelerating learning via knowledge transfer"
(arXiv 1511.05641): what a channel sends on is divided between the two, unevenly, so that they learn different things.
RMS norms do not notice. New channels of the whole decoder are zero at first, and what reads them is not, so that they
learn.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from scripts.train_embedded.architecture import EMOJI_SIZES, Sizes, build_vae

UNEVEN = 0.5
"""Standard deviation by which the halves of a divided weight differ, over that of the weight."""


def widen(state: dict[str, Tensor], sizes: Sizes = EMOJI_SIZES, seed: int = 0) -> dict[str, Tensor]:
    """Return the state of `build_vae(sizes=sizes)` that computes what `state` does, but for one block that starts anew.

    Every dimension of a weight must be as long as in `state` or twice as long.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {key: value.shape for key, value in build_vae(sizes=sizes).state_dict().items()}
    wide = {key: _stretch(state[key], shape, generator) for key, shape in shapes.items() if key in state}
    _add_shortcuts(shapes, wide)
    _drop_shortcut(state, wide, generator)
    return wide


def _stretch(old: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Repeat outputs side by side (pairs stay within chunks, such as q, k and v) and divide inputs."""
    new = old
    if shape[0] != old.shape[0]:
        new = new.repeat_interleave(2, dim=0)
    if old.ndim >= 4 and shape[1] != old.shape[1]:
        uneven = UNEVEN * old.std() * torch.randn(new.shape, generator=generator)
        new = torch.stack([new / 2 + uneven, new / 2 - uneven], dim=2).flatten(1, 2)
    if new.shape != shape:
        raise ValueError(f"expected a weight of {tuple(shape)} or half of it, got {tuple(old.shape)}")
    return new


def _add_shortcuts(shapes: dict[str, torch.Size], wide: dict[str, Tensor]) -> None:
    """Add shortcuts where a level had as many outputs as inputs and has twice as many: both of a pair get the input."""
    for key, shape in shapes.items():
        if key not in wide:
            bias = len(shape) == 1
            wide[key] = torch.zeros(shape) if bias else torch.eye(shape[1]).repeat_interleave(2, dim=0).view(shape)


def _drop_shortcut(old: dict[str, Tensor], wide: dict[str, Tensor], generator: torch.Generator) -> None:
    """The decoder's second level has as many inputs as outputs now: what its shortcut computed, the layer before does.

    Its first block sees something else then, and starts anew from zero.
    """
    block, before = "decoder.up_blocks.1.resnets.0.", "decoder.up_blocks.0.upsamplers.0.resample.1."
    shortcut, shift = old[block + "conv_shortcut.weight"].flatten(1), old[block + "conv_shortcut.bias"]
    spread = torch.einsum("oi,ijkl->ojkl", shortcut, old[before + "weight"])
    wide[before + "weight"] = _stretch(spread, wide[before + "weight"].shape, generator)
    wide[before + "bias"] = shortcut @ old[before + "bias"] + shift
    wide[block + "norm1.gamma"] = torch.ones_like(wide[block + "norm1.gamma"])
    wide[block + "conv2.weight"] = torch.zeros_like(wide[block + "conv2.weight"])
    wide[block + "conv2.bias"] = torch.zeros_like(wide[block + "conv2.bias"])


def widen_decoder(
    state: dict[str, Tensor], decoder_base: int, sizes: Sizes = EMOJI_SIZES, seed: int = 0
) -> dict[str, Tensor]:
    """Return the state of a VAE with another `decoder_base`, not below its own, that computes what `state` does."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        key: each.shape for key, each in build_vae(sizes=replace(sizes, decoder_base=decoder_base)).state_dict().items()
    }
    return {key: _padded(key, value, shapes[key], generator) for key, value in state.items()}


def _padded(key: str, old: Tensor, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Add channels: outputs of zero behind those of each chunk, and random inputs."""
    if old.shape == shape:
        return old
    if key.endswith("gamma"):
        # The norm is over more channels, of which the new ones are zero.
        held = old * math.sqrt(old.shape[0] / shape[0])
        return torch.cat([held, held.mean().expand(shape[0] - old.shape[0], *old.shape[1:])])
    num_chunks = 3 if "to_qkv" in key else 2 if "time_conv" in key else 1
    chunks = list(old.chunk(num_chunks))
    if num_chunks == 3:
        # Attention divides by the root of the number of channels, which has grown.
        chunks[0] = chunks[0] * math.sqrt(shape[0] / old.shape[0])
    new = torch.zeros(num_chunks, shape[0] // num_chunks, *shape[1:])
    if old.ndim > 1 and shape[1] > old.shape[1]:
        place = new[:, : len(chunks[0]), old.shape[1] :]
        place.copy_(old.std() * torch.randn(place.shape, generator=generator))
    for at, chunk in enumerate(chunks):
        new[at][tuple(slice(length) for length in chunk.shape)] = chunk
    return new.flatten(0, 1)


def main() -> None:
    """Read a vae.pt and write the wide one; its latents are the same, so their statistics stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("narrow", type=Path)
    parser.add_argument("wide", type=Path)
    parser.add_argument("--decoder-base", type=int, help="channels of the decoder's first level; the encoder stays")
    arguments = parser.parse_args()
    held = torch.load(arguments.narrow, map_location="cpu")
    base = arguments.decoder_base
    wide = widen(held["state"]) if base is None else widen_decoder(held["state"], base)
    torch.save({**held, "state": wide}, arguments.wide)


if __name__ == "__main__":
    main()
