"""AnyFlow-FAR (arXiv:2605.13724, on FAR, arXiv:2503.19325): how a folder of the causal flow maps cuts a video into
chunks, and what it keeps of them. The cache: attention/cache/history.py; the network: far_transformer.py."""

from __future__ import annotations

from typing import Any

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.models.wan.flow_map import AUTHORS_CLASS, FLOW_MAP_CLASSES

# Chunk lengths of the published checkpoints: 21 latent frames, 81 frames.
_PARTITION = (1, 3, 3, 3, 3, 3, 3, 2)
# Tokens of large patches turn by the middle of their positions. The checkpoints average the turns of all of these,
# which has the same direction up to this many: the fastest channels turn by one radian per position.
_LARGEST_SPAN = 6


def is_far(file: ConfigFile, class_name: str) -> bool:
    """Return whether a config is a causal flow map's. Raises ModelLoadError that names the file and the key."""
    return class_name == FLOW_MAP_CLASSES[1] or (class_name == AUTHORS_CLASS and file.flag("init_far_model", False))


def read_history(file: ConfigFile, patch: tuple[int, int, int]) -> CompressedHistory:
    """Read the keys full_chunk_limit (chunks in sight token by token, the current one included) and
    compressed_patch_size. patch: of the others. Raises ModelLoadError that names the file and the key."""
    limit = file.whole_number("full_chunk_limit", 3)
    if limit < 2:
        raise file.error("full_chunk_limit", "2 or more: a chunk and the one before it", limit)
    large = file.whole_numbers("compressed_patch_size", 3) if "compressed_patch_size" in file.values else [1, 4, 4]
    spans = [whole / part for whole, part in zip(large, patch, strict=True)]
    if spans[0] != 1 or any(span not in range(1, _LARGEST_SPAN + 1) for span in spans):
        expected = f"one frame, and 1 to {_LARGEST_SPAN} times the patch_size {list(patch)} in height and width"
        raise file.error("compressed_patch_size", expected, list(large))
    return CompressedHistory(limit - 1, (large[0], large[1], large[2]))


def read_far_defaults(folder: AnyFolder, component: str = "transformer") -> dict[str, Any]:
    """Read request values by field name, from the key chunk_partition: a first chunk, chunks of one size, and the rest.
    Raises ModelLoadError that names the file and the key."""
    file = read_config(folder, component)
    sizes = file.values.get("chunk_partition") or _PARTITION
    if not isinstance(sizes, list | tuple) or any(type(size) is not int or size < 1 for size in sizes):
        raise file.error("chunk_partition", "a list of numbers of latent frames", sizes)
    first, *others = sizes
    chunk = others[0] if others else first
    if any(size != chunk for size in others[:-1]) or (others and others[-1] > chunk):
        raise file.error("chunk_partition", "a first chunk, chunks of one size, and a last one of at most that", sizes)
    return {
        "chunk_frames": chunk,
        "first_chunk_frames": first,
        "chunk_schedule": "sequential",
        "kv_window": 0,
        "kv_sink": 0,
        "commit_noise": 0.0,
        "positions": "absolute",
    }
