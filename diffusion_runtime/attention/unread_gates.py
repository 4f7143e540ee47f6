"""Trained gates of sparse attention (Video Sparse Attention) in layers whose backends have no gated branch."""

from __future__ import annotations

from collections.abc import Iterable

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.step_info import StepInfo


def unread_gates(layers: Iterable[AttentionLayer], num_steps: int) -> tuple[str, ...]:
    """Return a sentence for each role whose layers have gates that no call of a request reads, and what would."""
    by_role: dict[str, list[AttentionLayer]] = {}
    for layer in layers:
        if layer.has_gate:
            by_role.setdefault(layer.layer.role, []).append(layer)
    found = []
    for role, gated in by_role.items():
        served = [
            layer.decisions.resolved_at(StepInfo(index, num_steps), None).backend
            for layer in gated
            for index in range(num_steps)
        ]
        if any("gate" in backend.capability.features for backend in served):
            continue
        names = ", ".join(dict.fromkeys(backend.name for backend in served))
        found.append(
            f"{role}: the weights of its {len(gated)} layers have trained gates, which {names} does not read: the "
            "model was trained with Video Sparse Attention, and is another one without; choose it for the role, with "
            f"the sparsity of its training: --attention-config.per_role.{role}.backend video_sparse_attn "
            f"--attention-config.per_role.{role}.extra.sparsity 0.9"
        )
    return tuple(found)
