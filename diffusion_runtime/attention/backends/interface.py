"""The attention backend interface: a name, a declared capability, typed options, a probe and `run`.

Adding one is one file that defines a `Backend` and a `@register_backend` above it; nothing else changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from diffusion_runtime.attention.backends.capability import AttentionRequirements, Capability
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.forward_plans import ForwardPlan, PlanLimits
from diffusion_runtime.core.hardware import PLATFORMS, Hardware
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import RASTER, Extent, TokenLayout
from diffusion_runtime.parallel.interface import AttentionInputs

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from diffusion_runtime.core.packed_tokens import PackedTokens
    from diffusion_runtime.kernels.block_packing import TokenBlocks
    from diffusion_runtime.kernels.block_sparse.plan import SparsePlan


@dataclass(frozen=True)
class Availability:
    """The presence of a backend's packages: a version when they are installed, else a reason and a fix."""

    version: str | None
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True)
class NoOptions:
    """The options of a backend that has none."""


@dataclass(frozen=True)
class RoundedOptions:
    """The options of a backend that declares an error bound.

    max_error: the relative error on a model's own q, k and v up to which a generation goes on; None is the backend's
    bound. One with further options subclasses it.
    """

    max_error: float | None = None

    def __post_init__(self) -> None:
        if self.max_error is not None and not self.max_error > 0:
            raise ValueError(f"max_error: expected a number above 0, got {self.max_error}")


class DenseAttention(NamedTuple):
    """The backend for the dense calls of one that chooses among keys. options: an instance of its options_type; reason:
    why it was chosen, empty for the platform's default."""

    backend: Backend
    options: Any
    reason: str = ""


# Calls and results are made at every call of every layer: a tuple takes a quarter of a frozen dataclass's time.
class AttentionCall(NamedTuple):
    """One attention call: its inputs, and what the layer and the choice add to them.

    inputs: q, k, v and what belongs to them: layout, gate, mask, which heads these are. Backends read them as call.q,
    call.layout and so on; a call with other inputs is call._replace(inputs=call.inputs._replace(...)).
    options: an instance of the backend's options_type. scale: None is 1 / sqrt(head_dim). causal: query i sees keys
    0..i; needs seq_q == seq_k. block_mask: a BlockMask of torch's FlexAttention [batch or 1, heads or 1, seq_q, seq_k],
    which describes all that is hidden: such a call has neither layout nor mask and is not causal.
    state: the cache of the request, with a scope per request, branch and layer.
    dense: for a backend that chooses among keys, what serves a call for which it chooses all; None for the platform's
    default. prepared: what `Backend.prepare` made for this forward pass, None where the backend prepares nothing.
    """

    inputs: AttentionInputs
    options: Any
    layer: LayerInfo
    step: StepInfo
    state: RequestCache
    scale: float | None = None
    causal: bool = False
    return_lse: bool = False
    dense: DenseAttention | None = None
    block_mask: BlockMask | None = None
    prepared: Any = None

    @property
    def q(self) -> torch.Tensor:
        """[batch, seq_q, heads, head_dim]"""
        return self.inputs.q

    @property
    def k(self) -> torch.Tensor:
        """[batch, seq_k, kv_heads, head_dim]"""
        return self.inputs.k

    @property
    def v(self) -> torch.Tensor:
        """[batch, seq_k, kv_heads, head_dim]"""
        return self.inputs.v

    @property
    def layout(self) -> TokenLayout | None:
        """Return where the key tokens sit; None when nothing is padded."""
        return self.inputs.layout

    @property
    def grid_layout(self) -> TokenLayout:
        """The layout of a call for a backend that declares needs_grid, which has checked that there is one."""
        assert self.inputs.layout is not None, "check_grid raises before a planner asks"
        return self.inputs.layout

    @property
    def gate(self) -> torch.Tensor | None:
        """[batch, seq_q, heads, head_dim], for backends with a gated branch."""
        return self.inputs.gate

    @property
    def mask(self) -> torch.Tensor | None:
        """[batch or 1, heads or 1, seq_q or 1, seq_k], boolean (True: attend) or added to the scaled scores in q's
        dtype; it hides keys in addition to those that layout and causal hide."""
        return self.inputs.mask

    @property
    def packed(self) -> PackedTokens | None:
        """q, k and v in the blocks that the backend asked for (`Backend.token_blocks`)."""
        return self.inputs.packed

    @property
    def batch(self) -> int:
        return self.inputs.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.inputs.q.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.inputs.k.shape[2]

    @property
    def num_heads_of_layer(self) -> int:
        """Query heads of the layer, those of other processes included."""
        total = self.inputs.num_heads_total
        return self.num_heads if total is None else total

    @property
    def softmax_scale(self) -> float:
        return self.inputs.q.shape[3] ** -0.5 if self.scale is None else self.scale


class KnownCall(NamedTuple):
    """The facts that a forward pass on the meta device shows about a layer's call. Shapes, mask: as in CallForm."""

    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    layout: TokenLayout | None
    mask: tuple[tuple[int, ...], torch.dtype] | None = None
    has_gate: bool = False


class CallForm(NamedTuple):
    """The facts known before a call that decide which kernel serves it.

    q_shape: [batch, seq_q, heads, head_dim]; k_shape: [batch, seq_k, kv_heads, head_dim]; mask: its shape and dtype,
    None without one; the others as in AttentionCall. Where samples differ in their lengths is not known.
    """

    hardware: Hardware
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    layout: TokenLayout | None
    options: Any
    layer: LayerInfo
    step: StepInfo
    dense: DenseAttention | None = None
    mask: tuple[tuple[int, ...], torch.dtype] | None = None
    has_gate: bool = False
    scale: float | None = None
    causal: bool = False
    return_lse: bool = False


class AttentionResult(NamedTuple):
    """out: [batch, seq_q, heads, head_dim] in q's dtype; lse: natural log, float32, [batch, heads, seq_q], or None.

    A query that sees no key gets 0 and -inf. implementation: who computed it, for the report. plan: which blocks were
    kept of a call that is sparse. keys: set by the layer, of a call to a cache in pages or codes: ReportRow.keys.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
    implementation: str
    plan: SparsePlan | None = None
    keys: str = ""


class Backend(ABC):
    """One way to compute attention. Instances hold no state; what must outlive a call goes into AttentionCall.state.

    lossless: computes the exact softmax up to rounding; False where precision or pairs are given up by design.
    error_bound: the relative error in the Frobenius norm that precision given up by design may cost on normally
    distributed inputs, on the machine where it costs most; None where rounding alone errs, or pairs are given up and
    the rest is exact. A generation compares it with the error on the model's own (attention/measured_error.py), and
    goes on beyond it with the option max_error alone (RoundedOptions).
    lse_error_bound: the largest error of the log-sum-exp, where it is more than error_bound: of few keys it is that of
    single scores.
    self_test_options: options under which a small self-test exercises it, where its defaults would not.
    self_check_platforms: where its numbers are checked before a model is loaded with it (attention/self_check.py): on
    every accelerator, because a package's kernels depend on chip, driver and torch; nowhere for torch's own kernels and
    for this project's.
    not_replayed: why calls cannot be replayed from a CUDA graph, None where they can (`replay_refusal`).
    keeps_between_steps: what its calls of a step leave in AttentionCall.state that those of the next one start from, so
    that a generation cannot be left between the two; None for nothing.
    prepares: whether `prepare` is called, once per forward pass for all calls of the same PlanLimits.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    capability: ClassVar[Capability]
    options_type: ClassVar[type] = NoOptions
    lossless: ClassVar[bool] = True
    error_bound: ClassVar[float | None] = None
    lse_error_bound: ClassVar[float | None] = None
    self_test_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    self_check_platforms: ClassVar[frozenset[str]] = frozenset(PLATFORMS) - {"cpu"}
    not_replayed: ClassVar[str | None] = "it does not declare that its calls can be replayed"
    keeps_between_steps: ClassVar[str | None] = None
    prepares: ClassVar[bool] = False

    @abstractmethod
    def probe(self, hardware: Hardware) -> Availability:
        """Return whether its packages are installed, from `hardware`, without importing anything heavy."""

    def versions(self, hardware: Hardware) -> str:
        """Versions for a log line, in addition to the platform's: `flash-attn-4 4.0.0b36`; may be empty."""
        version = self.probe(hardware).version
        return "" if version in (None, hardware.torch_version) else f"{self.name} {version}"

    # Not abstract: most backends serve whatever their capability declares.
    def check(self, options: Any, layer: LayerInfo, num_heads: int, num_steps: int | None) -> None:  # noqa: B027
        """Check that a complete set of options can serve a layer, before any weight is read.

        options: an instance of options_type. num_heads: all query heads of the layer, however many processes share
        them. num_steps: of the request that is about to start; None while no request is known. Raises ConfigError when
        these options cannot serve this layer. Layers ask; a call of `attention` does not.
        """

    # Not abstract: most backends treat every head by itself.
    def check_split_heads(self, options: Any) -> None:  # noqa: B027
        """Check that these options can serve a layer whose heads are shared by processes; called together with `check`.

        Raises ConfigError when what one head attends to depends on heads that another process holds.
        """

    def timed_by_default(self, hardware: Hardware) -> bool:  # noqa: ARG002
        """Return whether a comparison of speed on `hardware` includes this backend when none is named.

        False for a reference that is right rather than fast, one that takes a minute to start, and one that picks
        another backend.
        """
        return True

    def compiles_at_first_call(self, hardware: Hardware) -> bool:  # noqa: ARG002
        """Return whether the first call of each form on `hardware` compiles kernels, which takes seconds to minutes."""
        return False

    def error_bound_on(self, hardware: Hardware) -> float | None:  # noqa: ARG002
        """`error_bound` on one machine: kernels for other chips may give up less."""
        return self.error_bound

    def delegates(self, requirements: AttentionRequirements) -> tuple[str, ...]:  # noqa: ARG002
        """Names of other backends that it may hand calls of a layer with `requirements` to."""
        return ()

    def replay_refusal(self, options: Any) -> str | None:  # noqa: ARG002
        """Return why calls with these options cannot be captured in a CUDA graph and replayed; None where they can. The
        default is `not_replayed`, whatever the options.

        They can where `run` launches the same kernels for equal shapes, layouts, options and `step_key`, reads nothing
        else of the step, never waits for the device, and keeps nothing in AttentionCall.state that another step
        changes. What is kept there once per request is copied into the graph's own. A backend that says nothing runs
        without graphs.
        """
        return self.not_replayed

    def step_key(self, options: Any, layer: LayerInfo, step: StepInfo) -> Hashable:  # noqa: ARG002
        """Return the part of a step that decides which kernels a call runs, such as a dense schedule: a graph serves
        the steps with equal keys."""
        return ()

    def depends_on_step(self, options: Any, layer: LayerInfo) -> bool:  # noqa: ARG002
        """Return whether the result of a call depends on the step; a call whose step is unknown is then refused. The
        default is True for backends that choose among keys, since such methods may depend on the step, False for dense
        ones."""
        return self.capability.needs_grid

    def reserve(self, limits: PlanLimits) -> Any:  # noqa: ARG002
        """Buffers on the device for the plans of calls up to `limits`, made once per CUDA graph, and once per video
        that is made chunk by chunk with a key-value cache; None for nothing."""
        return None

    def prepare(self, plan: ForwardPlan, into: Any = None) -> Any:  # noqa: ARG002
        """Return what calls find as AttentionCall.prepared. into: what `reserve` made, which is written and returned,
        without allocating on the device or waiting for it; None makes a new plan."""
        return into

    def token_blocks(self, call: AttentionCall) -> TokenBlocks | None:  # noqa: ARG002
        """The blocks in whose rows a call like this one is best given its q, k and v, where a layer writes them anew
        (kernels/qk_norm_rope/block_order.py); None where they are read as they come. call: with tensors of the shapes,
        dtype and device alone."""
        return None

    def preferred_tile(self, options: Any, layout: TokenLayout, layer: LayerInfo) -> Extent | None:  # noqa: ARG002
        """The order of the grid's tokens (TokenLayout.tile) in which a layer costs least; None where any will do.

        Models keep their tokens in the order that all layers prefer. A call may come in any other, which its layout
        tells.
        """
        return RASTER if self.capability.needs_grid else None

    def expected_density(
        self,
        options: Any,  # noqa: ARG002
        layout: TokenLayout | None,  # noqa: ARG002
        layer: LayerInfo,  # noqa: ARG002
        step: StepInfo,  # noqa: ARG002
    ) -> float | None:
        """The share of a layer's pairs of grid queries and grid keys that a call computes, before anything is computed;
        None where it depends on the numbers."""
        return 1.0

    def expected_warning(self, form: CallForm) -> str | None:  # noqa: ARG002
        """Return the warning of such a call, for example that its result lacks something; None without one."""
        return None

    def expected_implementation(self, form: CallForm) -> str | None:  # noqa: ARG002
        """Return the AttentionResult.implementation of such a call before anything is computed; None where it is found
        at the call. A result may add that the samples of its call differ in length."""
        return None

    def gradient_refusal(self, call: AttentionCall) -> str | None:  # noqa: ARG002
        """Return why the gradients of such a call, whose inputs require them, cannot be computed; None where they can,
        or where `run` gives the reason. A result that records none is refused in any case (calling.py)."""
        return None

    @abstractmethod
    def run(self, call: AttentionCall) -> AttentionResult:
        """Compute one call, which has at least one query and one key. Selection has already checked `capability`, so
        every call is one it declared.

        Callers go through `calling.run_backend`, which answers empty calls and keeps what requirements do not name:
        key_counts.
        """
