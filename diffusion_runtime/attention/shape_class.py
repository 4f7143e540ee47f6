"""Shape classes: attention calls that are expected to rank backends alike, for autotuning."""

from __future__ import annotations

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.requirements import call_features
from diffusion_runtime.attention.roles import role_category


def shape_class(call: AttentionCall) -> str:
    """A name for all calls that are expected to rank backends alike: `self-b1-q32768-k32768-h12-kv12-d128-bfloat16`.

    Lengths and batch are rounded up to the next power of two or one and a half times one; heads, head size, dtype and
    features are exact. Padding counts by what it asks of a kernel.
    """
    batch, seq_q, num_heads, head_dim = call.q.shape
    parts = [
        role_category(call.layer.role),
        f"b{_bucket(batch)}",
        f"q{_bucket(seq_q)}",
        f"k{_bucket(call.k.shape[1])}",
        f"h{num_heads}",
        f"kv{call.k.shape[2]}",
        f"d{head_dim}",
        str(call.q.dtype).removeprefix("torch."),
    ]
    parts += sorted(call_features(call) - {"key_padding", "scale"})
    if padding := padding_class(call):
        parts.append(padding)
    if call.mask is not None:
        # Which dimensions a mask spans decides what a kernel reads of it.
        parts.append("mask" + "".join("x" if size > 1 else "1" for size in call.mask.shape))
    return "-".join(parts)


def padding_class(call: AttentionCall) -> str:
    """`cut` where one slice of the keys serves all samples, `gathered` where a copy does, else `unequal`; empty
    without padding."""
    layout = call.layout
    if layout is None or not layout.has_padding:
        return ""
    ranges = {layout.key_ranges(sample) for sample in range(call.q.shape[0])}
    if len(ranges) > 1:
        return "unequal"
    return "gathered" if len(next(iter(ranges))) > 1 else "cut"


def _bucket(length: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is not below `length`."""
    power = 1
    while power < length:
        power *= 2
    return power // 4 * 3 if power >= 4 and power // 4 * 3 >= length else power
