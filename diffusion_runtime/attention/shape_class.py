"""What makes two attention calls alike: the features they use, and the class of shapes they belong to."""

from __future__ import annotations

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.masks import mask_feature
from diffusion_runtime.attention.roles import role_category


def call_needs(call: AttentionCall) -> frozenset[str]:
    """The FEATURES that a call uses; grouped queries follow from its head counts."""
    used = {
        "causal": call.causal,
        "scale": call.scale is not None,
        "lse": call.return_lse,
        "gate": call.gate is not None,
        "key_padding": call.layout is not None and call.layout.has_padding,
        "block_mask": call.block_mask is not None,
    }
    needs = {name for name, is_used in used.items() if is_used}
    return frozenset(needs if call.mask is None else {*needs, mask_feature(call.mask)})


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
    parts += sorted(call_needs(call) - {"key_padding", "scale"})
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
