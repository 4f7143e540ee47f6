"""Sparse methods that a request names and none of whose calls would be sparse: it would pay for nothing."""

from __future__ import annotations

from collections.abc import Iterable

from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.select import resolve_decision
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.core.token_layout import Extent, TokenLayout


def never_sparse(layers: Iterable[AttentionLayer], grid: Extent, num_steps: int) -> tuple[str, ...]:
    """A sentence for each role and sparse backend of its choices that leaves nothing out of a video of `grid` tokens
    (frames, height, width), at no step and in no layer: why, and what to change."""
    named: dict[tuple[str, str], list[AttentionLayer]] = {}
    for layer in layers:
        for _, decision in layer.decisions.possible:
            if isinstance(resolve_decision(decision).backend, SparseBackend):
                of_role = named.setdefault((layer.layer.role, decision.backend), [])
                if layer not in of_role:
                    of_role.append(layer)
    found = (
        (role, name, _reasons(name, of_role, TokenLayout(grid), num_steps)) for (role, name), of_role in named.items()
    )
    return tuple(_sentence(role, name, reasons, num_steps) for role, name, reasons in found if reasons is not None)


def _reasons(name: str, layers: list[AttentionLayer], layout: TokenLayout, num_steps: int) -> dict[str, str] | None:
    """Return every reason why a call is dense, with what to change; empty where no call is the backend's, None where
    one is sparse."""
    reasons: dict[str, str] = {}
    # Dense layers and steps are mostly the first ones, so a sparse call is found at once.
    for layer in reversed(layers):
        for index in reversed(range(num_steps)):
            step = StepInfo(index, num_steps)
            resolved = layer.decisions.resolved_at(step, layout)
            backend, options = resolved.backend, resolved.options
            if backend.name != name or not isinstance(backend, SparseBackend):
                continue
            assert isinstance(options, SparseOptions), "every options_type of a SparseBackend derives from it"
            rules = options.dense_rules(layer.layer, step, layout.num_grid_tokens)
            if rules:
                reasons[str(rules[0])] = rules[0].option.partition(" ")[0]
                continue
            kept = backend.keeps_everything(options, layout, layer.layer)
            if kept is None:
                return None
            reasons[kept] = "its options"
    return reasons


def _sentence(role: str, name: str, reasons: dict[str, str], num_steps: int) -> str:
    if not reasons:
        return (
            f"{role}: {name} is chosen and never runs: rules of the schedule give each of its layers to others at all "
            f"{num_steps} steps; change their steps or layers, or leave {name} out"
        )
    changes = " or ".join(dict.fromkeys(reasons.values()))
    return (
        f"{role}: {name} computes every pair in all of its layers at all {num_steps} steps, as dense attention does "
        f"({'; '.join(reasons)}); change {changes}, or choose a dense backend"
    )
