"""LoRA files of several methods at once, with what each adds to its weight: low rank, LoHa and LoKr."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = dict[str, torch.Tensor]
RANK = 2


def of_every_kind(modules: Sequence[str], size: int, prefix: str = "transformer.") -> tuple[Tensors, Tensors]:
    """Return the tensors of a file with a method for each of three square modules, and what these add, in float32."""
    low_rank, loha, lokr = modules
    down, up = torch.randn(RANK, size), torch.randn(size, RANK)
    halves = {f"w{number}_{end}": torch.randn(size, RANK) for number in (1, 2) for end in "ab"}
    halves |= {name: half.T.contiguous() for name, half in halves.items() if name.endswith("b")}
    first, second = torch.randn(4, 2), torch.randn(size // 4, size // 2)
    # LyCORIS scales by alpha / rank, and nothing where no factor has a rank.
    alpha = torch.tensor(3.0)
    tensors = {
        f"{low_rank}.lora_A.weight": down,
        f"{low_rank}.lora_B.weight": up,
        **{f"{loha}.hada_{name}": half for name, half in halves.items()},
        f"{loha}.alpha": alpha,
        f"{lokr}.lokr_w1": first,
        f"{lokr}.lokr_w2": second,
    }
    one, two = (halves[f"w{number}_a"] @ halves[f"w{number}_b"] for number in (1, 2))
    added = {low_rank: up @ down, loha: one * two * (alpha / RANK), lokr: torch.kron(first, second)}
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}, added
