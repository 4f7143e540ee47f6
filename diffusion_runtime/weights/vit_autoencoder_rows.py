"""Tensors of MiniMax-H3's video autoencoder as its authors' files hold them, which ComfyUI's keep: by diffusers' names.

Queries, keys and values of the decoder are one tensor, of each head its own rows one after the other; the halves of a
gated feed-forward network are the gate first. The encoder has the names of latent diffusion. The sound's autoencoder
has diffusers' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from diffusion_runtime.weights.stored_tensors import Rows, StoredRows

# What only these files have.
_SIGN = "decoder.x_embedder.weight"
# Tensors that nothing reads: of training, and statistics that config.json holds more precisely.
_UNREAD = frozenset(("decoder.mask_token", "latents_mean", "latents_std"))
_NAMES = (
    (r"^decoder\.x_embedder\.", "decoder.proj_in."),
    (r"\.attn\.to_out\.(?=weight|bias)", ".attn.to_out.0."),
    (r"\.ff\.w1\.", ".ff.net.0.proj."),
    (r"\.ff\.w2\.", ".ff.net.2."),
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
)


def diffusers_rows(rows: Rows, num_heads: int | None) -> Rows:
    """Return the tensors by diffusers' names; those of other files as they are. num_heads: of the decoder, None where
    it is not read.

    Raises ModelLoadError for a product of queries, keys and values that these heads do not share evenly.
    """
    if _SIGN not in rows:
        return rows
    found: Rows = {}
    for name, stored in rows.items():
        if name in _UNREAD:
            continue
        block, is_product, leaf = name.partition(".attn.to_qkv.")
        if is_product and num_heads is not None:
            parts = _by_head(stored[0], num_heads)
            found |= {f"{block}.attn.to_{each}.{leaf}": part for each, part in zip("qkv", parts, strict=True)}
            continue
        if ".ff.w1." in name:
            half = stored[0].shape[0] // 2
            stored = (stored[0].some(half, 2 * half), stored[0].some(0, half))
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        found[name] = stored
    return found


def _by_head(product: StoredRows, num_heads: int) -> Sequence[tuple[StoredRows, ...]]:
    """Return the rows of q, k and v of a product whose rows are those of each head, one head after the other."""
    size, rest = divmod(product.shape[0], 3 * num_heads)
    if rest:
        raise product.error(
            f"tensor {product.name}: expected rows of {num_heads} heads, three of each, got {product.shape[0]}"
        )

    def part(index: int) -> Iterator[StoredRows]:
        for head in range(num_heads):
            start = (3 * head + index) * size
            yield product.some(start, start + size)

    return [tuple(part(index)) for index in range(3)]
