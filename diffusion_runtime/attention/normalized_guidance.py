"""Normalized attention guidance (NAG; Chen et al., arXiv:2505.21179): away from a negative text within attention.

Queries attend to the prompt, Z+, and to the negative text, Z-, and each token's result is

    Z~ = Z+ + (scale - 1) * (Z+ - Z-),   r = |Z~|_1 / |Z+|_1
    Z  = alpha * min(1, tau / r) * Z~ + (1 - alpha) * Z+

with norms over all heads. The paper's phi is scale - 1: scale counts as in its authors' code, where 1 is no guidance.

A forward pass has the texts of all samples first and the negative texts after them. In a model that attends to text as
keys (cross-attention) its tokens are there once, and each query attends to both texts, or with a scale of 1 to the
prompt alone. In a model whose text is part of
the sequence (joint attention) the tokens are there twice, one sample with each text: both get the same Z, so that they
stay the same, and each text goes on as it would alone.

scale, tau and alpha may differ by attention role, such as those of a model that makes pictures and sound: one number
for all, or pairs of a role and a number. A role comes before its category, and that before DEFAULT_ROLE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch

from diffusion_runtime.parallel.collectives import RankGroup, sum_in_place
from diffusion_runtime.parallel.interface import AttentionInputs

# In place of a role: of all that are not named. Scale 1 is none, and the others are those of the authors, for
# transformers.
DEFAULT_ROLE = "default"
SCALE, TAU, ALPHA = 1.0, 2.5, 0.25

# One number for all roles, or one by role.
ByRole = float | tuple[tuple[str, float], ...]


def value_of_role(value: ByRole, role: str, category: str, otherwise: float) -> float:
    """Return the number of a role. otherwise: where neither it nor its category nor DEFAULT_ROLE is named."""
    if not isinstance(value, tuple):
        return value
    named = dict(value)
    return next((named[key] for key in (role, category, DEFAULT_ROLE) if key in named), otherwise)


class Attend(Protocol):
    """Computation of an attention call. is_guided: as it is counted."""

    def __call__(self, inputs: AttentionInputs, *, is_guided: bool) -> torch.Tensor: ...


@dataclass(frozen=True)
class NormalizedGuidance:
    """The guidance of a forward pass with num_samples samples. scale, tau, alpha: as above, of all roles or by role."""

    scale: ByRole
    tau: ByRole
    alpha: ByRole
    num_samples: int

    @lru_cache(maxsize=64)  # noqa: B019 - of values, a few in a process
    def of_role(self, role: str, category: str) -> RoleGuidance:
        """Return the guidance of the attention layers of a role."""
        scale, tau, alpha = (
            value_of_role(value, role, category, otherwise)
            for value, otherwise in ((self.scale, SCALE), (self.tau, TAU), (self.alpha, ALPHA))
        )
        return RoleGuidance(scale, tau, alpha, self.num_samples)


@dataclass(frozen=True)
class RoleGuidance:
    """NormalizedGuidance of the layers of one role. With a scale of 1 it is Z+, and no call counts as guided."""

    scale: float
    tau: float
    alpha: float
    num_samples: int

    def around(
        self, attend: Attend, inputs: AttentionInputs, *, has_prefix: bool, group: RankGroup | None = None
    ) -> torch.Tensor:
        """Return the result of an attention call, like its queries: guided where it meets both texts, else `attend` of
        it as it is, such as among the tokens of a text or of a picture.

        attend: computes a call, which it counts as guided or not. inputs: of this process's tokens. has_prefix: whether
        there are keys in front of those in the inputs, such as a text's. group: as of `combine`.
        """
        q, k, gate, layout = inputs.q, inputs.k, inputs.gate, inputs.layout
        if len(k) != 2 * self.num_samples:
            return attend(inputs, is_guided=False)
        if len(q) == self.num_samples and self.scale == 1:
            return attend(self._of_prompts(inputs), is_guided=False)
        if len(q) == self.num_samples:
            twice = inputs._replace(q=torch.cat([q, q]), gate=None if gate is None else torch.cat([gate, gate]))
            positive, negative = attend(twice, is_guided=True).chunk(2)
            return self.combine(positive, negative, group)
        if layout is None or not layout.num_grid_tokens or not (has_prefix or layout.num_prompt_tokens):
            return attend(inputs, is_guided=False)
        out = attend(inputs, is_guided=self.scale > 1)
        # Every row but those of the texts.
        end = out.shape[1] - (layout.num_suffix_tokens - layout.num_given_tokens)
        positive, negative = out[:, layout.num_prefix_tokens : end].chunk(2)
        combined = self.combine(positive, negative, group)
        positive.copy_(combined)
        negative.copy_(combined)
        return out

    def _of_prompts(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the call without the keys of the negative texts."""
        count, layout, mask = self.num_samples, inputs.layout, inputs.mask
        if layout is not None and layout.valid_lengths is not None:
            layout = replace(layout, valid_lengths=layout.valid_lengths[:count])
        mask = mask if mask is None or len(mask) == 1 else mask[:count]
        return inputs._replace(k=inputs.k[:count], v=inputs.v[:count], layout=layout, mask=mask)

    def combine(self, positive: torch.Tensor, negative: torch.Tensor, group: RankGroup | None = None) -> torch.Tensor:
        """Return Z of Z+ and Z-, [batch, seq, heads, head_dim] each, in their dtype; computed in float32, float64 for
        float64. group: of processes that hold a part of the heads each."""
        if self.scale == 1:
            return positive
        wide = torch.promote_types(positive.dtype, torch.float32)
        guided = positive.to(wide, copy=True).mul_(self.scale).sub_(negative, alpha=self.scale - 1)
        norms = torch.stack([_norm(guided, wide), _norm(positive, wide)])
        if group is not None:
            norms = sum_in_place(group, norms)
        of_guided, most = norms[0], self.tau * norms[1]
        # Without a division by 0, where nothing is attended to.
        share = torch.where(of_guided > most, most / of_guided, 1.0).mul_(self.alpha)
        guided.mul_(share[..., None, None]).add_(positive, alpha=1 - self.alpha)
        return guided.to(positive.dtype)

    def allocated(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tensors as large as those that a guided call makes beside its result, on the meta device."""
        if len(k) != 2 * self.num_samples or self.scale == 1:
            return ()
        wide = torch.promote_types(q.dtype, torch.float32)
        combined = q.new_empty(self.num_samples, *q.shape[1:], dtype=wide)
        # Queries and results of both texts, where the tokens are there once.
        return combined, q.new_empty(4 * len(q) if len(q) == self.num_samples else 0, *q.shape[1:])


def _norm(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the L1 norm of each token, [batch, seq], of [batch, seq, heads, head_dim]."""
    norm: torch.Tensor = torch.linalg.vector_norm(values, ord=1, dim=(2, 3), dtype=dtype)
    return norm
