"""Weight map: the tensors of a SeedVR2 checkpoint, which all files name as the authors do, that make up each of ours.

Where the text has the video's weights, a layer is called `all`; elsewhere there are `vid` and `txt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from diffusion_runtime.models.seedvr2.config import NUM_WAVES, SeedVR2Config
from diffusion_runtime.weights.checkpoint import Piece
from diffusion_runtime.weights.lora.names import LoraNames, each
from diffusion_runtime.weights.pieces import NamedPieces, linear_pieces, up_down_pieces

_TABLE = tuple(f"{layer}_{kind}" for layer in ("attn", "mlp") for kind in ("shift", "scale", "gate"))
# The text that the models were trained with, in ComfyUI's own files: this package has it (text.py). The paces of the
# rotary positions are computed.
_UNREAD = re.compile(r"(positive_conditioning|negative_conditioning|blocks\.\d+\.attn\.rope\.rope\.freqs)")


# The tables of modulation, which are added to float32.
FLOAT32 = ("*table",)


def unread_tensors(config: SeedVR2Config) -> Callable[[str], bool]:
    """Return whether a tensor of a checkpoint is read by nothing, by its name: also what the last block has of the text
    behind its attention."""
    last = f"blocks.{config.num_layers - 1}"
    behind = (f"{last}.mlp.txt.", f"{last}.attn.proj_out.txt.")
    return lambda name: _UNREAD.fullmatch(name) is not None or name.startswith(behind)


def transformer_pieces(config: SeedVR2Config) -> Iterator[NamedPieces]:
    """Yield our parameter names, and the checkpoint tensors that fill each, one after the other."""
    dim = config.dim
    yield from linear_pieces("time_in", [("emb_in.proj_in", dim)], NUM_WAVES)
    yield from linear_pieces("time_hidden", [("emb_in.proj_hid", dim)], dim)
    yield from linear_pieces("time_out", [("emb_in.proj_out", 6 * dim)], dim)
    yield from linear_pieces("patch_embedding", [("vid_in.proj", dim)], config.patch_channels_in)
    yield from linear_pieces("text_embedding", [("txt_in", dim)], config.text_dim)
    for index in range(config.num_layers):
        ours, theirs = f"blocks.{index}", f"blocks.{index}"
        if index >= config.num_own_layers:
            yield from _stream(f"{ours}.video", theirs, "all", config)
            continue
        is_last = index == config.num_layers - 1
        yield from _stream(f"{ours}.video", theirs, "vid", config)
        yield from _stream(
            f"{ours}.text", theirs, "txt", config, has_end=not is_last, has_table=not (is_last and config.ends_still)
        )
    if config.has_out_norm:
        yield "out_norm.weight", (Piece("vid_out_norm.weight", (dim,)),)
        yield "out_table", tuple(Piece(f"vid_out_ada.out_{kind}", (dim,)) for kind in ("shift", "scale"))
    yield from linear_pieces("out", [("vid_out.proj", config.patch_channels)], dim)


def _stream(
    ours: str, theirs: str, kind: str, config: SeedVR2Config, *, has_end: bool = True, has_table: bool = True
) -> Iterator[NamedPieces]:
    """A SeedVR2Stream."""
    dim, inner = config.dim, config.inner_dim
    yield from linear_pieces(f"{ours}.qkv", [(f"{theirs}.attn.proj_qkv.{kind}", 3 * inner)], dim, bias=False)
    for name in ("norm_q", "norm_k"):
        yield f"{ours}.{name}.weight", (Piece(f"{theirs}.attn.{name}.{kind}.weight", (config.head_dim,)),)
    if has_table:
        yield f"{ours}.table", tuple(Piece(f"{theirs}.ada.{kind}.{name}", (dim,)) for name in _TABLE)
    if not has_end:
        return
    yield from linear_pieces(f"{ours}.out", [(f"{theirs}.attn.proj_out.{kind}", dim)], inner)
    mlp, hidden = f"{theirs}.mlp.{kind}", config.ffn_dim
    up = [(f"{mlp}.{name}", hidden) for name in (("proj_in_gate", "proj_in") if config.is_gated else ("proj_in",))]
    yield from up_down_pieces(f"{ours}.feed_forward", up, f"{mlp}.proj_out", dim, hidden, bias=not config.is_gated)


_MODULES = tuple(
    f"{module}.{kind}" for module in ("attn.proj_qkv", "attn.proj_out") for kind in ("vid", "txt", "all")
) + tuple(f"mlp.{kind}.{part}" for kind in ("vid", "txt", "all") for part in ("proj_in", "proj_in_gate", "proj_out"))

LORA_NAMES = LoraNames(
    title="SeedVR2",
    same=("vid_in.proj", "txt_in", "vid_out.proj", *each("blocks.{}", _MODULES)),
    widths=frozenset({2560, 3072}),
    num_blocks=frozenset({32, 36}),
)
