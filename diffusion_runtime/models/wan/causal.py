"""Causal Wan checkpoints (CausVid, Self-Forcing, LongLive): the settings of a folder for videos made chunk by chunk.

The transformer and its weights are those of any Wan folder; the class of the transformer tells them apart, and its
config.json holds FastVideo's keys. Each is the default of a request field.
"""

from __future__ import annotations

from typing import Any

from diffusion_runtime.core.model_folder import AnyFolder, read_config

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
