"""Muon for the transformer's matrices: momentum made orthogonal by five Newton-Schulz steps, one shape at a time.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the scale 0.2 sqrt(max(rows, columns))
that makes its step as large as AdamW's is from Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """The nearest matrices with singular values near 1: [n, rows, columns], in bfloat16 on CUDA."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (torch.linalg.vector_norm(x.float(), dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Muon:
    """Nesterov momentum, orthogonalised, with decoupled weight decay; only matrices."""

    def __init__(self, parameters: Iterable[Tensor], momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.ndim != 2:
                raise ValueError(f"Muon takes matrices only, got shape {tuple(parameter.shape)}")
            self._groups[(parameter.shape[0], parameter.shape[1])].append(parameter)
        self._momentum, self._weight_decay = momentum, weight_decay
        self._buffers = {
            shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self._groups.items()
        }

    @property
    def momenta(self) -> list[Tensor]:
        """The momentum of every shape of matrices, [n, rows, columns] each, always in the same order."""
        return list(self._buffers.values())

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at this learning rate (as large as AdamW's would be)."""
        for shape, group in self._groups.items():
            gradients = torch.stack([parameter.grad.float() for parameter in group if parameter.grad is not None])
            buffer = self._buffers[shape]
            buffer.lerp_(gradients, 1 - self._momentum)
            updates = orthogonalise(gradients.lerp(buffer, self._momentum)).float()
            updates *= -rate * 0.2 * max(shape) ** 0.5
            if self._weight_decay:
                torch._foreach_mul_(group, 1 - rate * self._weight_decay)
            torch._foreach_add_(group, list(updates.unbind(0)))
