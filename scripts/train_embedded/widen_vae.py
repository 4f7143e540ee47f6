"""Widen the deepest level of a trained VAE, so that training goes on from what it knows.

python -m scripts.train_embedded.widen_vae vae.pt wide.pt

Channels are doubled as in Chen et al., "Net2Net: accelerating learning via knowledge transfer" (arXiv 1511.05641): what
a channel sends on is divided between the two, unevenly, so that they learn different things. RMS norms do not notice.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    """Read a vae.pt and write the wide one; its latents are the same, so their statistics stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("narrow", type=Path)
    parser.add_argument("wide", type=Path)
    arguments = parser.parse_args()
    held = torch.load(arguments.narrow, map_location="cpu")
    torch.save({**held, "state": widen(held["state"])}, arguments.wide)


if __name__ == "__main__":
    main()
