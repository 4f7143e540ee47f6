"""The interface of sparse attention: options with a dense schedule, a planner, and the block-sparse kernel for all."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from diffusion_runtime.attention.backends.calling import expected_implementation, run_backend
from diffusion_runtime.attention.backends.capability import (
    AttentionRequirements,
    Capability,
    HeadSizes,
    NarrowedCapability,
    narrowed,
)
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
    Availability,
    CallForm,
    DenseAttention,
)
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.requirements import requirements_of
from diffusion_runtime.attention.schedule import DenseRule, IndexRanges, Window, dense_first_steps
from diffusion_runtime.attention.select import resolve_dense, select_dense
from diffusion_runtime.attention.sparse.tiles import sequence_order, text_lengths_of, tile_counts, tiles_of
from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.hardware import DTYPES, Hardware
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import RASTER, Extent, TokenLayout
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_packing import Averaged, TokenBlocks
from diffusion_runtime.kernels.block_sparse import flash4, triton
from diffusion_runtime.kernels.block_sparse.api import block_sparse_attention, takes_packed_rows
from diffusion_runtime.kernels.block_sparse.expected import PlanForm
from diffusion_runtime.kernels.block_sparse.expected import expected_implementation as expected_kernel
from diffusion_runtime.kernels.block_sparse.plan import PooledBranch, RowCounts, SparsePlan
from diffusion_runtime.kernels.block_sparse.pooled_tail import BlockMeans
from diffusion_runtime.startup.importing import import_failure

_logger = logging.getLogger("diffusion_runtime.attention")

# So many that a share of the steps is some of them.
_MANY_STEPS = 1000
# Where torch calls the device `cuda`, and the Triton kernels compute.
GPU_PLATFORMS = ("cuda", "rocm")
_INSTALL_TRITON = "pip install 'diffusion-runtime[sparse]'"

_FEATURES = frozenset({"key_padding", "gqa", "scale", "lse"})


def sparse_capability(features: frozenset[str] = _FEATURES) -> NarrowedCapability:
    """Return the reference's capability, and on a GPU that of the kernel: nothing there runs silently on the
    reference."""
    everywhere = Capability(
        dtypes=frozenset((*DTYPES, "float64")),
        head_sizes=HeadSizes(maximum=256),
        features=features,
        categories=frozenset({"self"}),
        needs_every_key=True,
        needs_grid=True,
    )
    on_gpu = replace(everywhere, dtypes=frozenset(DTYPES), minimum_capability=triton.MINIMUM_CAPABILITY)
    return narrowed(everywhere, lambda hardware: on_gpu if hardware.platform in GPU_PLATFORMS else everywhere)


@dataclass(frozen=True)
class SparseOptions:
    """The options of every sparse method. min_tokens: grids with fewer tokens run dense, which the report states.
    tail: `pooled` counts every block of keys that a query does not see as one key, so that none leaves the softmax
    (kernels/block_sparse/pooled_tail.py); with `none` they are left out.
    """

    # Names that were options -> what to do instead.
    REMOVED: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"skip_threshold": "skip-softmax was slower than computing every key; leave it out, or lower the density"}
    )

    min_tokens: int = field(default=0, kw_only=True)
    tail: Literal["none", "pooled"] = field(default="none", kw_only=True)

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens: expected 0 or more, got {self.min_tokens}")

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:  # noqa: ARG002
        """The rules of the method's own options, such as dense first steps. num_layers, num_steps: of the run."""
        return ()

    def dense_rules(self, layer: LayerInfo, step: StepInfo, num_tokens: int) -> tuple[DenseRule, ...]:
        """The rules that hold for a call; empty when it is sparse. num_tokens: of the grid."""
        size = (DenseRule(f"min_tokens {self.min_tokens}", min_tokens=self.min_tokens),) if self.min_tokens else ()
        rules = (*size, *self.dense_schedule(layer.num_layers, step.num_steps))
        return tuple(rule for rule in rules if rule.holds(layer, step, num_tokens))


@dataclass(frozen=True)
class ScheduledOptions(SparseOptions):
    """Options of a method that leaves steps and layers dense. dense_first_steps: steps that leave nothing out.
    dense_layers: layers that leave nothing out, as indexes or as ranges such as `0-1,-1`; none by default."""

    dense_first_steps: int = field(default=0, kw_only=True)
    dense_layers: int | str | tuple[int | str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_first_steps < 0:
            raise ValueError(f"dense_first_steps must be 0 or more, got {self.dense_first_steps}")
        _ = self._layer_rules

    @cached_property
    def _layer_rules(self) -> tuple[DenseRule, ...]:
        # No layer: no ranges at all would mean every one.
        if self.dense_layers == ():
            return ()
        return (DenseRule("dense_layers", Window(layers=IndexRanges.parse(self.dense_layers, "dense_layers"))),)

    def dense_schedule(self, num_layers: int, num_steps: int) -> tuple[DenseRule, ...]:  # noqa: ARG002
        option = f"dense_first_steps {self.dense_first_steps}"
        return (*dense_first_steps(self.dense_first_steps, option), *self._layer_rules)


class SparseBackend(ImportingBackend):
    """A backend that plans which blocks to keep and hands the rest to the block-sparse kernel.

    Every options_type derives from SparseOptions, whose rules decide which calls are dense. masks_rows: whether plans
    have a row_mask.
    """

    masks_rows: ClassVar[bool] = False

    capability: ClassVar[Capability] = sparse_capability()
    lossless = False
    distributions = ("triton", "flash-attn-4")
    self_check_platforms: ClassVar[frozenset[str]] = frozenset()
    not_replayed: ClassVar[str | None] = None

    def probe(self, hardware: Hardware) -> Availability:
        if hardware.platform in GPU_PLATFORMS and "triton" not in hardware.packages:
            return Availability(None, f"its kernel on {hardware.platform} needs triton", _INSTALL_TRITON)
        return Availability(version=hardware.packages.get("triton", hardware.torch_version))

    def imported(self, requirements: AttentionRequirements) -> Availability:
        if requirements.hardware.platform in GPU_PLATFORMS:
            failure = import_failure("triton")
            if failure is not None:
                return Availability(None, f"triton is installed and cannot be imported: {failure}", _INSTALL_TRITON)
            if flash4.serves(requirements.hardware):
                # Asked here, so that what is wrong with it does not wait for the first sparse step.
                flash4.check_package(requirements.hardware)
        return self.probe(requirements.hardware)

    def keeps_everything(self, options: Any, layout: TokenLayout, layer: LayerInfo) -> str | None:  # noqa: ARG002
        """Return why a layer's pattern keeps every pair whatever the tokens are, such as a sparsity of 0; else None."""
        return None

    def step_key(self, options: Any, layer: LayerInfo, step: StepInfo) -> Hashable:
        """Return which rules of the dense schedule hold."""
        rules = options.dense_schedule(layer.num_layers, step.num_steps)
        return tuple(rule.window.holds(layer, step) for rule in rules)

    def depends_on_step(self, options: Any, layer: LayerInfo) -> bool:
        """Return whether a rule of the dense schedule depends on the step; the pattern of most methods does not."""
        rules = options.dense_schedule(layer.num_layers, _MANY_STEPS)
        return any(not rule.window.steps.is_every for rule in rules)

    def dense_reason(self, call: AttentionCall | CallForm) -> str | None:
        """Return why a call attends to every key, by a rule of its options or by its pattern; None when it is
        sparse."""
        options: SparseOptions = call.options
        layout = call.layout
        assert layout is not None, "check_grid raises before"
        for rule in options.dense_rules(call.layer, call.step, layout.num_grid_tokens):
            return str(rule)
        return self.keeps_everything(options, layout, call.layer)

    def plan_form(self, options: Any, layout: TokenLayout, layer: LayerInfo) -> PlanForm:  # noqa: ARG002
        """Return the form of a sparse call's plan: in equal tiles where `tile_of` names them and they fit the grid."""
        tile, num_tokens, num_grid = self.tile_of(options, layout.grid), layout.num_tokens, layout.num_grid_tokens
        if tile == RASTER:
            return PlanForm(num_tokens, num_grid, 1)
        sizes = [min(extent, size) for extent, size in zip(layout.grid, tile, strict=True)]
        are_equal = all(extent % size == 0 for extent, size in zip(layout.grid, sizes, strict=True))
        num_tiles = math.prod(tile_counts(layout.grid, tile))
        largest = math.prod(sizes)
        return PlanForm(num_tokens, num_grid, num_tiles, largest if are_equal else None, largest)

    def expected_implementation(self, form: CallForm) -> str | None:
        layout, options = form.layout, form.options
        if layout is None or layout.num_grid_tokens == 0:
            return None
        reason = self.dense_reason(form)
        if reason is not None:
            return self.expected_dense(form, reason)
        plan = self.plan_form(options, layout, form.layer)
        plan = plan._replace(pooled_tail=options.tail == "pooled")
        kernel = expected_kernel(form.hardware, form.dtype, form.q_shape[3], plan)
        return _said_of_kernel(kernel, plan.pooled_tail)

    def expected_dense(self, form: CallForm, reason: str) -> str | None:
        """`expected_implementation` of a dense call."""
        if form.dense is None:
            return None
        inner = form._replace(options=form.dense.options, dense=None, has_gate=False)
        implementation = expected_implementation(form.dense.backend, inner)
        return None if implementation is None else _said_of_dense(form.dense, implementation, reason)

    def tile_of(self, options: Any, grid: Extent) -> Extent:  # noqa: ARG002
        """The tiles that are the blocks of every plan of a grid with these options; of other methods, raster order."""
        return RASTER

    def preferred_tile(self, options: Any, layout: TokenLayout, layer: LayerInfo) -> Extent | None:
        is_small = layout.num_grid_tokens < options.min_tokens
        if is_small or self.keeps_everything(options, layout, layer) is not None:
            return None
        return self.tile_of(options, layout.grid)

    def expected_density(
        self, options: Any, layout: TokenLayout | None, layer: LayerInfo, step: StepInfo
    ) -> float | None:
        if layout is None or layout.num_grid_tokens == 0:
            return None
        if options.dense_rules(layer, step, layout.num_grid_tokens):
            return 1.0
        if self.keeps_everything(options, layout, layer) is not None:
            return 1.0
        return self.sparse_density(options, layout, layer)

    def sparse_density(self, options: Any, layout: TokenLayout, layer: LayerInfo) -> float | None:  # noqa: ARG002
        """`expected_density` of a call that is sparse. None: the tokens' content decides."""
        return None

    def token_blocks(self, call: AttentionCall) -> TokenBlocks | None:
        """Return the blocks of a sparse call whose tokens are in the order of the method's tiles; None for any
        other."""
        layout = check_grid(self.name, call)
        tile = self.tile_of(call.options, layout.grid)
        if tile == RASTER or tile != layout.tile or self.dense_reason(call) is not None:
            return None
        geometry = tiles_of(call, tile)
        pools = call.options.tail == "pooled"
        if not geometry.is_identity or not takes_packed_rows(call.q, geometry, geometry, layout.num_grid_tokens, pools):
            return None
        return TokenBlocks(geometry, layout.num_grid_tokens, text_lengths_of(call), self.averaged(call))

    def averaged(self, call: AttentionCall) -> Averaged:
        """Return the tensors whose tile means the planner or a pooled tail reads; `none`, `qk` or `qkv`."""
        return "qkv" if call.options.tail == "pooled" else "none"

    @abstractmethod
    def select_blocks(self, call: AttentionCall) -> SparsePlan:
        """The pattern of one call that is sparse."""

    def plan(self, call: AttentionCall) -> SparsePlan:
        """The pattern of one call, the full one for a dense call. Raises ConfigError."""
        check_grid(self.name, call)
        if self.dense_reason(call) is not None:
            return dense_plan(self.name, call)
        return self.select_blocks(call)

    def run(self, call: AttentionCall) -> AttentionResult:
        check_grid(self.name, call)
        reason = self.dense_reason(call)
        if reason is not None:
            return self.run_dense(call, reason)
        plan = self.select_blocks(call)
        if plan.is_dense:
            return self.run_dense(call, "the pattern keeps every block")
        return self.run_sparse(call, plan)

    def run_sparse(
        self,
        call: AttentionCall,
        plan: SparsePlan,
        branch: PooledBranch | None = None,
        packed: PackedTokens | None = None,
        means: BlockMeans | None = None,
    ) -> AttentionResult:
        """The kernel on a plan. packed: the call's tokens in the plan's geometries, from planners that packed them.
        means: of its key blocks, from planners that have them for a pooled tail."""
        given = call.packed
        if packed is None and given is not None and given.q_geometry is plan.q and given.kv_geometry is plan.kv:
            packed = given
        result = block_sparse_attention(
            call.q,
            call.k,
            call.v,
            plan,
            scale=call.scale,
            return_lse=call.return_lse,
            branch=branch,
            packed=packed,
            means=means,
        )
        implementation = _said_of_kernel(result.implementation, plan.pooled_tail)
        return AttentionResult(result.out, result.lse, implementation, plan)

    def run_dense(self, call: AttentionCall, reason: str) -> AttentionResult:
        """Every key, by the dense backend that goes with this choice, and why; logged once per request.

        Padded text rows are 0 with a log-sum-exp of -inf, as the kernel leaves them.
        """
        dense = _platform_dense(call) if call.dense is None else call.dense
        if call.state.is_first(f"{self.name}: {reason}"):
            _logger.info("%s runs dense: %s", self.name, reason)
        result = run_backend(
            dense.backend, call._replace(inputs=call.inputs._replace(gate=None), options=dense.options, dense=None)
        )
        out, lse = result.out, result.lse
        if call.layout is not None and call.layout.has_padding:
            hidden = call.state.request.compute_once(_padded_rows, call.layout, call.q.device)
            out = out.masked_fill(hidden[:, :, None, None], 0.0)
            lse = None if lse is None else lse.masked_fill(hidden[:, None], float("-inf"))
        return AttentionResult(out, lse, _said_of_dense(dense, result.implementation, reason))


def _said_of_kernel(kernel: str, pooled_tail: bool) -> str:
    pooled = ", pooled tail" if pooled_tail else ""
    return f"block-sparse {kernel}{pooled}"


def _said_of_dense(dense: DenseAttention, implementation: str, reason: str) -> str:
    who = "; ".join(filter(None, [implementation, dense.reason]))
    return f"dense {dense.backend.name} ({who}): {reason}"


def _platform_dense(call: AttentionCall) -> DenseAttention:
    """The platform's default for this call with everything visible; for calls that no selection made."""
    return resolve_dense(select_dense(requirements_of(call)))


def _padded_rows(layout: TokenLayout, device: torch.device) -> torch.Tensor:
    """bool [batch, seq], True for text tokens that are padding."""
    assert layout.valid_lengths is not None, "only asked of padded layouts"
    hidden = torch.ones(len(layout.valid_lengths), layout.num_tokens, dtype=torch.bool, device="cpu")
    for sample in range(len(layout.valid_lengths)):
        for start, stop in layout.key_ranges(sample):
            hidden[sample, start:stop] = False
    return hidden.to(device)


def check_grid(name: str, call: AttentionCall) -> TokenLayout:
    """The layout of a self-attention over a grid. Raises ConfigError when there is none, or it does not fit."""
    layout, num_q_tokens, num_k_tokens = call.layout, call.q.shape[1], call.k.shape[1]
    if layout is None or layout.num_grid_tokens == 0:
        raise ConfigError(
            f"{name} needs to know where tokens sit: pass layout=TokenLayout(grid=(frames, height, width)), counted in "
            f"tokens after patchify, got {layout}"
        )
    if layout.num_tokens != num_k_tokens or num_q_tokens != num_k_tokens:
        raise ConfigError(
            f"{name}: the layout {layout.grid} with {layout.num_text_tokens} text tokens describes "
            f"{layout.num_tokens} tokens, q has {num_q_tokens} and k has {num_k_tokens}; it serves self-attention, "
            "where all three are equal"
        )
    return layout


def dense_plan(method: str, call: AttentionCall) -> SparsePlan:
    """One block that holds the whole grid and lists itself."""
    layout, device = call.grid_layout, call.q.device
    text = (layout.num_prefix_tokens, layout.num_suffix_tokens)
    geometry = call.state.request.compute_once(_whole_grid, layout.num_grid_tokens, *text, device)
    return plan_of_call(
        method,
        call,
        q=geometry,
        kv=geometry,
        group_of=torch.zeros(call.batch, call.num_heads, dtype=torch.int32, device=device),
        kv_count=torch.ones(1, 1, dtype=torch.int32, device=device),
        kv_index=torch.zeros(1, 1, 1, dtype=torch.int32, device=device),
        is_dense=True,
    )


def plan_of_call(
    method: str,
    call: AttentionCall,
    *,
    q: BlockGeometry,
    kv: BlockGeometry,
    group_of: torch.Tensor,
    kv_count: torch.Tensor,
    kv_index: torch.Tensor,
    row_mask: torch.Tensor | None = None,
    max_blocks_per_query: int | None = None,
    row_counts: RowCounts | None = None,
    is_dense: bool = False,
) -> SparsePlan:
    """A SparsePlan whose batch, heads and tokens are those of a call; for the rest see SparsePlan."""
    return SparsePlan(
        method=method,
        batch=call.batch,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        q=q,
        kv=kv,
        group_of=group_of,
        kv_count=kv_count,
        kv_index=kv_index,
        num_grid_tokens=call.grid_layout.num_grid_tokens,
        text_lengths=text_lengths_of(call),
        row_mask=row_mask,
        max_blocks_per_query=max_blocks_per_query,
        row_counts=row_counts,
        pooled_tail=call.options.tail == "pooled",
        is_dense=is_dense,
    )


def _whole_grid(num_grid: int, num_prefix: int, num_suffix: int, device: torch.device) -> BlockGeometry:
    """The grid in raster order as one block. num_grid: 1 or more, as check_grid saw to."""
    grid_order = torch.arange(num_grid, device=device)
    return BlockGeometry(
        order=sequence_order(num_prefix, num_suffix, grid_order)[None].to(torch.int32),
        # [0, num_grid] without a copy from the CPU, which would wait for the device.
        offsets=torch.arange(0, num_grid + 1, num_grid, dtype=torch.int32, device=device)[None],
        max_block_size=num_grid,
        uniform_block_size=num_grid,
    )
