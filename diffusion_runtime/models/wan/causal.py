"""Causal Wan checkpoints (CausVid, Self-Forcing, LongLive; AnyFlow-FAR, arXiv:2605.13724, on FAR, arXiv:2503.19325):
the settings of a folder for videos made chunk by chunk.

The transformer and its weights are those of any Wan folder; the class of the transformer tells them apart, and its
config.json holds FastVideo's keys. Each is the default of a request field. AnyFlow-FAR keeps older frames in larger
patches (attention/cache/history.py) and has a network of its own (far_transformer.py).
"""

from __future__ import annotations

from typing import Any

from diffusion_runtime.attention.cache.history import CompressedHistory
from diffusion_runtime.core.model_folder import AnyFolder, ConfigFile, read_config
from diffusion_runtime.models.wan.flow_map import AUTHORS_CLASS, FLOW_MAP_CLASSES

_POSITIONS = {"absolute": "absolute", "relativistic": "window"}


def read_cache_defaults(folder: AnyFolder, component: str = "transformer") -> dict[str, Any]:
    """Read request values by field name. Raises ModelLoadError that names the file and the key.

    num_frames_per_block: chunk_frames; independent_first_frame: whether the first chunk is one frame. local_attn_size:
    kv_window, -1 for all that the cache keeps, which is sliding_window_num_frames. sink_size: kv_sink.
    rope_cache_policy: positions, `absolute` or `relativistic` (among the frames in sight).
    """
    file = read_config(folder, component)
    span = file.values.get("local_attn_size", -1)
    if span == -1:
        span = file.whole_number("sliding_window_num_frames", 21)
    elif type(span) is not int or span < 1:
        raise file.error("local_attn_size", "a number of latent frames, or -1 for all that the cache keeps", span)
    sink = file.values.get("sink_size", 0)
    if type(sink) is not int or not 0 <= sink < span:
        raise file.error("sink_size", f"a number of latent frames from 0 to {span - 1}, below the window", sink)
    policy = file.values.get("rope_cache_policy", "absolute")
    if policy not in _POSITIONS:
        raise file.error("rope_cache_policy", " or ".join(map(repr, _POSITIONS)), policy)
    chunk_frames = file.whole_number("num_frames_per_block", 3)
    first = {"first_chunk_frames": 1} if file.flag("independent_first_frame", False) else {}
    return {
        "chunk_frames": chunk_frames,
        **first,
        "chunk_schedule": "sequential",
        "kv_window": span,
        "kv_sink": sink,
        "commit_noise": 0.0,
        "positions": _POSITIONS[policy],
    }


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
