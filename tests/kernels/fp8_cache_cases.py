"""Reading of keys and values in 8 bits: Triton against the reference, for its interpreter and for a GPU."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.kernels.fp8_cache import dequantise

# (batch, tokens of the cache, those in sight, heads, head_dim): within a tile, over its end, over several columns.
SHAPES = ((1, 6, slice(0, 6), 2, 16), (2, 19, slice(3, 19), 3, 24), (1, 9, slice(1, 9), 12, 128))


def failures(dtype: torch.dtype, device: str, *, bound: float) -> list[str]:
    """Where Triton is further than bound * (|number| + |mean|) from the reference in float64; every code occurs."""
    torch.manual_seed(0)
    found = []
    # 0x7f and 0xff are NaN, which no commit writes.
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    for batch, num_tokens, in_sight, heads, head_dim in SHAPES:
        shape = (2, batch, num_tokens, heads, head_dim)
        codes = numbers[torch.arange(torch.Size(shape).numel()) % len(numbers)].view(shape)
        scale = torch.rand(2, batch, 1, heads, 1) + 0.01
        mean = torch.randn(batch, 1, heads, head_dim)
        scale, mean = (x.to(device, dtype) for x in (scale, mean))
        keys, values = (x[:, in_sight] for x in codes.to(device))
        computed = dequantise(keys, values, scale, mean, implementation="triton")
        expected = dequantise(keys, values, scale.double(), mean.double(), implementation="reference")
        own = dequantise(keys, values, scale, mean, implementation="reference")
        for name, ours, exact, eager in zip(("keys", "values"), computed, expected, own, strict=True):
            assert (ours.shape, ours.dtype) == (eager.shape, dtype), name
            size = exact.abs() + (mean.double().abs() if name == "keys" else 0)
            error, theirs = (float(((x.double() - exact).abs() / (size + 1e-30)).max()) for x in (ours, eager))
            if not error <= max(bound, theirs):
                found.append(f"{name} {tuple(ours.shape)}: {error:.1e}, the reference {theirs:.1e}")
    return found


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    # Half precision is left to a GPU: the interpreter's bfloat16 is cut, not rounded.
    print("\n".join(failures(torch.float32, "cpu", bound=2.5e-7)))
