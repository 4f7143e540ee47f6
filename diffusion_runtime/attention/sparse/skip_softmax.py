"""Skip-softmax attention to every key (BLASST, arXiv:2512.12087): all pairs are listed, and the kernel skips pieces of
keys whose weights are too small to count.

The other sparse methods take the same option, `skip_threshold`, for the keys that they keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from diffusion_runtime.attention.backends.interface import AttentionCall
from diffusion_runtime.attention.backends.registry import register_backend
from diffusion_runtime.attention.schedule import DenseRule, dense_first_steps
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions, dense_plan
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.block_sparse.expected import PlanForm
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan


@dataclass(frozen=True)
class SkipSoftmaxOptions(SparseOptions):
    """skip_threshold: see SparseOptions. What a threshold skips depends on the model and grows with the length: the
    report states the share. dense_first_steps: steps that skip nothing."""

    skip_threshold: float = field(default=1e-3, kw_only=True)
    dense_first_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_first_steps < 0:
            raise ValueError(f"dense_first_steps: expected 0 or more, got {self.dense_first_steps}")
        if self.tail != "none":
            raise ValueError(f"tail: every key is listed, so there is no block to pool; leave it none, got {self.tail}")

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:  # noqa: ARG002
        return dense_first_steps(self.dense_first_steps, f"dense_first_steps {self.dense_first_steps}")


@register_backend
class SkipSoftmaxBackend(SparseBackend):
    """One block that holds the grid and lists itself; `skip_threshold` does the rest."""

    name = "skip_softmax"
    summary = "every key, without those whose weights lie below a threshold (skip-softmax)"
    options_type = SkipSoftmaxOptions
    self_test_options = MappingProxyType({"skip_threshold": 1e-6})

    def keeps_everything(self, options: SkipSoftmaxOptions, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        return None if options.skip_threshold else "skip_threshold is 0"

    def plan_form(self, options: SkipSoftmaxOptions, layout: TokenLayout, layer: LayerInfo) -> PlanForm:  # noqa: ARG002
        return PlanForm(layout.num_tokens, layout.num_grid_tokens, 1, layout.num_grid_tokens)

    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        return replace(dense_plan(self.name, call), is_dense=False)
