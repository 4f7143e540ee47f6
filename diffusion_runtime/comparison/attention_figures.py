"""Attention time and density under one setting, from further clips whose own time does not count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diffusion_runtime.core.progress import OnProgress
from diffusion_runtime.errors import UsageError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.generation.interface import InspectablePipeline
from diffusion_runtime.loading import Prepared
from diffusion_runtime.profiling import instruments
from diffusion_runtime.report.attention_density import LayerDensity
from diffusion_runtime.request.generation_request import GenerationRequest

_ATTENTION = "attention, "


@dataclass(frozen=True)
class ExpectedDensity:
    """share: of attention's operations that is computed; None where the content decides, or it is unknown. operations:
    of dense attention, by role; empty if unknown."""

    share: float | None = None
    operations: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_up_to_content(self) -> bool:
        return self.share is None and bool(self.operations)


def expected_density(prepared: Prepared, request: GenerationRequest) -> ExpectedDensity:
    """Known before a weight is read."""
    try:
        explanation = explain(prepared, request)
    except UsageError:
        return ExpectedDensity()
    parts = [part for part in explanation.parts if part.name.startswith(_ATTENTION)]
    operations = {part.name.removeprefix(_ATTENTION): part.operations for part in parts}
    total = sum(operations.values())
    if not total:
        return ExpectedDensity()
    share = None if explanation.is_bound else sum(part.kept for part in parts) / total
    return ExpectedDensity(share, operations)


def expected_operations(prepared: Prepared, request: GenerationRequest) -> float:
    """Floating-point operations of one generation, at most; 0 where the model's parts are not known."""
    try:
        return sum(part.kept for part in explain(prepared, request).parts)
    except UsageError:
        return 0.0


def attention_seconds(pipeline: InspectablePipeline, request: GenerationRequest, on_progress: OnProgress) -> float:
    """Return the seconds of the transformer's attention layers in one generation, all steps and guidance branches."""
    with instruments.timed_attention(pipeline) as clock:
        pipeline(request, on_progress=on_progress)
    return clock.seconds()


def counted_density(
    pipeline: InspectablePipeline, request: GenerationRequest, on_progress: OnProgress, expected: ExpectedDensity
) -> float | None:
    """Return the share of attention's operations that one generation computes."""
    with instruments.counted_density(pipeline):
        media = pipeline(request, on_progress=on_progress)
    return weighted_density(media.attention_report.density, expected.operations)


def weighted_density(layers: Sequence[LayerDensity], operations: Mapping[str, float]) -> float | None:
    """Return the mean over layers and steps of each role, weighted by what dense attention of the role takes, or None
    where a role was not counted."""
    shares: dict[str, list[float]] = {}
    for layer in layers:
        shares.setdefault(layer.role, []).extend(share for share in layer.steps if share is not None)
    if not operations or not all(shares.get(role) for role in operations):
        return None
    total = sum(operations.values())
    return sum(count * statistics.fmean(shares[role]) for role, count in operations.items()) / total
