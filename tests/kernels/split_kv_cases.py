"""Merging of attention to parts of the keys: Triton against the reference, for its interpreter and for a GPU."""

from __future__ import annotations

import os

import torch

from diffusion_runtime.kernels.split_kv import merge_parts

# (batch, parts, queries, heads, head_dim): one tile and over its end, head sizes that are no power of two.
SHAPES = ((1, 2, 5, 2, 16), (2, 3, 19, 3, 24), (1, 8, 33, 2, 128))


def failures(dtype: torch.dtype, device: str, *, bound: float) -> list[str]:
    """Where Triton is further than `bound` from the reference in float64, and further than the reference in dtype."""
    torch.manual_seed(0)
    found = []
    for batch, num_parts, seq, heads, head_dim in SHAPES:
        partial = torch.randn(batch * num_parts, seq, heads, head_dim).to(device, dtype)
        # Beyond what exp takes without the largest being taken off.
        far = 200 * torch.randn(batch, heads, seq).repeat_interleave(num_parts, dim=0)
        lse = (far + 4 * torch.randn(batch * num_parts, heads, seq)).to(device)
        # Queries that see no key of some parts, and one that sees none at all.
        lse[0, :, 1::3] = float("-inf")
        lse[:, :, 2] = float("-inf")
        partial[:, 2] = 0
        # Within a longer sequence, as attention writes it.
        results = {}
        for name in ("triton", "reference"):
            whole = torch.full((batch, seq + 4, heads, head_dim), 7.0, device=device, dtype=dtype)
            merged = merge_parts(partial, lse, whole[:, 4:], implementation=name)
            assert torch.equal(whole[:, :4], torch.full_like(whole[:, :4], 7.0)), name
            results[name] = whole[:, 4:], merged
        exact = torch.empty(batch, seq, heads, head_dim, device=device, dtype=torch.float64)
        exact_lse = merge_parts(partial.double(), lse.double(), exact, implementation="reference")
        for what, wanted, of in (("out", exact, 0), ("lse", exact_lse, 1)):
            hidden = wanted.isinf() if what == "lse" else torch.zeros_like(wanted, dtype=torch.bool)
            errors = {}
            for name, result in results.items():
                assert torch.equal(result[of].isinf(), hidden), (what, name)
                distance = (result[of].double() - wanted).masked_fill(hidden, 0.0).abs()
                errors[name] = float((distance / (1 + wanted.masked_fill(hidden, 0.0).abs())).max())
            if not errors["triton"] <= max(bound, errors["reference"]):
                found.append(f"{what} {(batch, num_parts, seq, heads, head_dim)}: {errors}")
    return found


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    # Half precision is left to a GPU: the interpreter's bfloat16 is cut, not rounded.
    print("\n".join(failures(torch.float32, "cpu", bound=1e-6)))
