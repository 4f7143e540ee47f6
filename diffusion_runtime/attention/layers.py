"""The three attention layers every transformer is built from. They hold no weights.

LocalAttention attends within the process. UlyssesAttention and USPAttention attend over a sequence that several
processes share, through an exchange; with one process they equal LocalAttention.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.backends.calling import (
    check_heads,
    check_shapes,
    run_backend,
)
from diffusion_runtime.attention.backends.interface import (
    AttentionCall,
    AttentionResult,
)
from diffusion_runtime.attention.backends.masks import check_mask
from diffusion_runtime.attention.backends.stored import StoredKeysReader, attend_parts
from diffusion_runtime.attention.cached_calls import plan_of, with_cached_keys, with_prefix, write_to_cache
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layer_decisions import LayerDecisions, LayerShape, ResolvedCall
from diffusion_runtime.attention.measured_error import ErrorSample
from diffusion_runtime.attention.opaque import ATTENTIONS, record_attention, refusal_of_recording
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.recorded_values import CallValues, operator_values
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.core.packed_tokens import PackedTokens
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import RASTER
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels.block_packing import TokenBlocks
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.parallel.interface import AttentionInputs, Exchange, SingleProcess
from diffusion_runtime.parallel.ulysses import UlyssesExchange
from diffusion_runtime.parallel.usp import USPExchange
from diffusion_runtime.report.attention_density import Kept

_STEP = StepInfo()


class AttentionLayer(nn.Module, ABC):
    """The base of the three layers: a decision at construction, a check and a count at every call.

    num_heads, head_dim: of the queries; num_kv_heads: of keys and values, None for as many (fewer is grouped-query
    attention). layer: which layer this is, its role included. policy: the choices it is built with; None takes the
    environment's and the platform's. scale: None is 1 / sqrt(head_dim). causal: query i sees keys 0..i.
    exchange: how processes share the sequence; None takes what the class makes of the policy's mesh. cached_keys:
    whether its calls attend to the keys and values of earlier frames or of a prefix too, where the context has a cache
    of them. merges: whether its results are merged with those over further keys, by the log-sum-exp that its backend
    then returns.

    As attributes, num_heads and num_kv_heads are those of this process, where the policy's mesh shares a layer's heads
    (tensor parallel): first_head is the first of them among num_heads_total. decisions: what serves its calls, which
    answers questions before there is one. has_gate: whether the weights have a gate for its calls (with_gate).

    Raises BackendUnavailableError and ConfigError at construction when a choice for the role cannot run, with its
    options and with any schedule rule that can hold, and when the heads cannot be shared by so many processes.
    """

    has_gate = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        layer: LayerInfo | None = None,
        policy: AttentionPolicy | None = None,
        scale: float | None = None,
        causal: bool = False,
        exchange: Exchange | None = None,
        cached_keys: bool = False,
        merges: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ConfigError(f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.layer = LayerInfo() if layer is None else layer
        policy = AttentionPolicy() if policy is None else policy
        tensor = policy.mesh.tensor
        check_shared_heads(math.gcd(num_heads, num_kv_heads), tensor.size, self.layer.role)
        self.num_heads_total = num_heads
        self.num_heads = num_heads // tensor.size
        self.num_kv_heads = num_kv_heads // tensor.size
        self.first_head = tensor.index * self.num_heads
        self.head_dim = head_dim
        self.scale = scale
        self.causal = causal
        self.cached_keys = cached_keys
        if exchange is None:
            exchange = self._make_exchange(policy.mesh, policy.num_head_groups)
        exchange.check(self.num_heads, self.num_kv_heads, causal=causal)
        # What compiled graphs have of it.
        self._handle = ATTENTIONS.handle_of(self)
        shape = LayerShape(
            self.num_heads, self.num_kv_heads, self.num_heads_total, head_dim, scale, causal, cached_keys, merges
        )
        self.decisions = LayerDecisions(self.layer, shape, policy, exchange)

    @property
    def num_shares(self) -> int:
        """Number of processes that share its heads."""
        return self.num_heads_total // self.num_heads

    @property
    def policy(self) -> AttentionPolicy:
        """The choices that it decides by."""
        return self.decisions.policy

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: AttentionContext | None = None,
        *,
        gate: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        block_mask: BlockMask | None = None,
        packed: PackedTokens | None = None,
    ) -> torch.Tensor:
        """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]; out as q.

        context: where the keys sit, which step it is, the request's state and its recorder. gate: [batch, seq_q, heads,
        head_dim] for backends with a gated branch. mask: [batch or 1, heads or 1, seq_q or 1, seq_k], as `attention`
        takes it. block_mask: a BlockMask of torch's FlexAttention, which holds all that is hidden, so it comes without
        layout, mask and causality. packed: the same q, k and v in the blocks that token_blocks gave for this call.
        Raises ConfigError for shapes that do not fit each other or what the layer was built for.

        Where processes share the sequence, q, k, v and gate hold the rows of this one: its slice of the grid, as
        `context.sharding` cuts it, and all of the text; layout and mask are those of the whole sequence.
        """
        # False outside of torch.compile, without a look at anything.
        if torch.compiler.is_dynamo_compiling():
            return self._record_operator(q, k, v, context, gate, mask, block_mask)
        context = AttentionContext() if context is None else context
        if context.shapes_only:
            return self._allocate(q, k, v, context)
        check_heads(
            q,
            k,
            v,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            layer=self.layer,
        )
        inputs = AttentionInputs(q, k, v, context.layout, gate, mask, self.first_head, self.num_heads_total, packed)
        if context.guidance is None:
            return self._attended(inputs, context, block_mask)

        def attend(inputs: AttentionInputs, *, is_guided: bool) -> torch.Tensor:
            # Without the negative texts a call has other lengths, by which its backend is chosen.
            own = context if inputs.layout is context.layout else context.with_layout(inputs.layout)
            return self._attended(inputs, own, block_mask, is_guided=is_guided)

        group, guidance = (
            self.policy.mesh.tensor,
            context.guidance.of_role(self.layer.role, role_category(self.layer.role)),
        )
        return guidance.around(attend, inputs, has_prefix=context.prefix is not None, group=group)

    def _attended(
        self,
        inputs: AttentionInputs,
        context: AttentionContext,
        block_mask: BlockMask | None,
        *,
        is_guided: bool = False,
    ) -> torch.Tensor:
        """Attend by the backend that serves the call, over all processes that share the sequence, and count the call.
        is_guided: whether it is of normalized attention guidance. Raises BackendInaccurateError for a rounded backend
        whose error on these inputs is too large."""
        served = self.decisions.served(inputs.q, context, gate=inputs.gate, mask=inputs.mask, block_mask=block_mask)
        sample = ErrorSample.due(served.rounding, self.layer, context, inputs.q)
        if not served.shared:
            result = self._run(inputs, context, served, sample, block_mask)
            if sample is not None:
                sample.check(self.policy.mesh.forward, inputs.q.device)
            kept_here = [Kept(result.plan)]
            self._count(context, served, result.implementation, kept_here, result.keys, is_guided=is_guided)
            return result.out
        if block_mask is not None:
            raise ConfigError(f"{self.layer.name or self.layer.role}: a block mask cannot be cut for {served.shared}")
        names: list[tuple[str, str]] = []
        kept: list[Kept] = []

        def run(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
            result = self._run(inputs, context, served, sample)
            names.append((result.implementation, result.keys))
            kept.append(Kept(result.plan))
            return result.out, result.lse

        out = served.exchange.attend(inputs, run)
        if sample is not None:
            sample.check(self.policy.mesh.forward, inputs.q.device)
        implementation, keys = names[0] if names else ("no tokens on this process", "")
        self._count(context, served, implementation, kept, keys, is_guided=is_guided)
        return out

    def write_keys(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext) -> None:
        """Leave k and v in the key-value cache of the context, as a call with the same arguments does, and attend to
        nothing: of a commit whose output is not read. No call is counted.

        q: gives how many queries each process has, and is exchanged with k and v. Raises what `forward` raises.
        """
        if context.shapes_only:
            return
        cache = context.cache
        assert self.cached_keys, "of a layer that caches keys"
        assert cache is not None, "of a pass with a key-value cache"

        def run(inputs: AttentionInputs) -> tuple[torch.Tensor, None]:
            write_to_cache(inputs, self.layer, context, cache, causal=self.causal)
            return inputs.q, None

        inputs = AttentionInputs(q, k, v, context.layout, None, None, self.first_head, self.num_heads_total)
        self.decisions.served(q, context).exchange.attend(inputs, run)

    def takes_gate(self, x: torch.Tensor, context: AttentionContext | None = None) -> bool:
        """Return whether the backend of the next call has a gated branch; for any other, a gate need not be computed.

        x: a tensor of the dtype and on the device of that call's q; context: of that call. Raises
        BackendUnavailableError when no backend of the choice can serve it.
        """
        if torch.compiler.is_dynamo_compiling():
            # The operator leaves it out where it is not taken.
            return True
        context = AttentionContext() if context is None else context
        if context.shapes_only:
            # The backend is not asked on the meta device; a gate that is computed takes more.
            return True
        served = self.decisions.served(x, context)
        return "gate" in served.resolved.backend.capability.features

    def token_blocks(
        self, product: torch.Tensor, context: AttentionContext, gate: torch.Tensor | None
    ) -> TokenBlocks | None:
        """The blocks in whose rows the backend of the next call is best given its tokens; None where it reads them as
        they come.

        product: q, k and v of that call's shapes, dtype and device, [batch, seq, 3, heads, head_dim]; context, gate: of
        that call. Raises BackendUnavailableError when no backend of the choice can serve it.
        """
        layout = context.layout
        if torch.compiler.is_dynamo_compiling() or layout is None or layout.tile == RASTER or product.numel() == 0:
            return None
        if context.shapes_only:
            # Rows of blocks are among the copies that _allocate makes.
            return None
        q, k, v = product.unbind(2)
        served = self.decisions.served(q, context, gate=gate)
        if served.shared:
            # Processes exchange heads in between.
            return None
        inputs = AttentionInputs(q, k, v, layout, gate, None, 0, self.num_heads)
        call = AttentionCall(inputs, served.resolved.options, self.layer, context.step, context.state)
        return served.resolved.backend.token_blocks(call)

    def backend_of(
        self,
        x: torch.Tensor,
        context: AttentionContext | None = None,
        *,
        gate: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> str:
        """The name of the backend that serves a call whose q is like x; the others as in `forward`. Raises
        BackendUnavailableError when no backend of the choice can serve it."""
        context = AttentionContext() if context is None else context
        return self.decisions.served(x, context, gate=gate, mask=mask, block_mask=block_mask).resolved.decision.backend

    def _record_operator(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: AttentionContext | None,
        gate: torch.Tensor | None,
        mask: torch.Tensor | None,
        block_mask: BlockMask | None,
    ) -> torch.Tensor:
        """The call as torch.compile records it: one operator, which raises what the call would raise."""
        if context is not None and context.handle is not None and block_mask is None:
            return record_attention(self._handle, q, k, v, gate, mask, context.handle)[0]
        refusal = refusal_of_recording(context, block_mask)
        if context is None:
            values = operator_values(None, self.layer, _STEP, None, refusal)
        else:
            values = operator_values(context.layout, self.layer, context.step, context.state, refusal)
        return record_attention(self._handle, q, k, v, gate, mask, values)[0]

    def run_recorded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor | None,
        mask: torch.Tensor | None,
        context: AttentionContext,
        values: CallValues | None,
        return_lse: bool,  # noqa: ARG002 - a layer returns none
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute a recorded call, as RecordedAttention describes. A graph is the same at every step, so it always
        makes the gate; a backend without a gated branch, such as that of dense first steps, is called without it."""
        if values is not None and values.further[0]:
            raise ConfigError(values.further[0])
        if gate is not None and not self.takes_gate(q, context):
            gate = None
        return self.forward(q, k, v, context, gate=gate, mask=mask), None

    def _allocate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Return an output like the queries, of a pass for shapes only. While it is made, allocate the sums of each
        row; copies of queries, keys, values and output in the order of blocks where the backend chooses among keys, or
        for the other processes; keys and values joined with those of a prefix."""
        packs = any(decision.dense is not None for _, decision in self.decisions.possible)
        num_copies = 4 if packs or self.policy.mesh.sequence.size > 1 else 0
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        copies = torch.empty(num_copies, *q.shape, dtype=q.dtype, device=q.device)
        joined = () if context.prefix is None else context.prefix.joined(self.layer.index, k, v, 0, 0)
        # Of guidance: queries and results of both texts, and what they are combined in.
        pairs = (
            ()
            if context.guidance is None
            else context.guidance.of_role(self.layer.role, role_category(self.layer.role)).allocated(q, k)
        )
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        del sums, copies, joined, pairs
        return out

    def _run(
        self,
        inputs: AttentionInputs,
        context: AttentionContext,
        served: ResolvedCall,
        sample: ErrorSample | None = None,
        block_mask: BlockMask | None = None,
    ) -> AttentionResult:
        """Compute this process's share of one call, or a part of it. sample: what measures its error, if it is to be
        measured."""
        backend, dense = served.resolved.backend, served.resolved.dense
        copied, parts = "", None
        if self.cached_keys and context.cache is not None:
            inputs, copied, parts = with_cached_keys(
                inputs, self.layer, context, context.cache, causal=self.causal, backend=backend
            )
        if self.cached_keys and context.prefix is not None:
            inputs = with_prefix(inputs, self.layer, context.prefix, first_head=self.first_head, causal=self.causal)
        if parts is None:
            check_shapes(inputs.q, inputs.k, inputs.v, inputs.layout, self.causal)
        if inputs.mask is not None:
            check_mask(inputs.mask, inputs.q, inputs.k)
        call = AttentionCall(
            inputs,
            served.resolved.options,
            self.layer,
            context.step,
            context.state,
            scale=self.scale,
            causal=self.causal,
            return_lse=served.needs_lse,
            dense=served.resolved.dense,
            block_mask=block_mask,
        )
        context.plans.serves(backend, call.options)
        if dense is not None:
            context.plans.serves(dense.backend, dense.options)
        if backend.prepares:
            call = call._replace(prepared=context.plans.of(backend, plan_of(call, context.cache, parts)))
        if parts is not None:
            assert isinstance(backend, StoredKeysReader), "parts are for backends that read them"
            result = attend_parts(backend, call, parts, functools.partial(run_backend, backend))
        else:
            result = run_backend(backend, call)
            if sample is not None:
                sample.add(call, result.out, result.implementation, is_sparse=result.plan is not None)
        return result._replace(keys=copied) if copied else result

    def _count(
        self,
        context: AttentionContext,
        served: ResolvedCall,
        implementation: str,
        kept: Sequence[Kept],
        keys: str,
        *,
        is_guided: bool = False,
    ) -> None:
        """Record one call. kept: of its pairs, by the parts it was computed in; keys: as AttentionResult.keys."""
        decision = served.resolved.decision
        context.recorder.record(
            self.layer,
            context.step,
            backend=decision.backend,
            implementation=implementation,
            source=decision.source,
            reason=decision.reason,
            kept=kept,
            keys=keys,
            is_guided=is_guided,
        )
        for name, reason in decision.rejected:
            context.recorder.note(f"{self.layer.role}: {name} not used: {reason}")
        if served.shared:
            context.recorder.note(f"{self.layer.role}: {decision.backend} over a shared sequence: {served.shared}")
        if self.num_heads < self.num_heads_total:
            heads = f"{self.num_heads} of {self.num_heads_total} heads on each process"
            context.recorder.note(f"{self.layer.role}: {heads} (tensor parallel {self.num_shares})")

    @staticmethod
    @abstractmethod
    def _make_exchange(mesh: ProcessMesh, num_head_groups: int) -> Exchange:
        """Return how a layer of this class shares a sequence on a mesh."""

    def __getstate__(self) -> dict[str, Any]:
        # Without the handle, which is this layer's and not the copy's. A shallow copy decides for itself, too.
        own = {name: value for name, value in self.__dict__.items() if name != "_handle"}
        return own | {"decisions": copy.copy(self.decisions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = ATTENTIONS.handle_of(self)

    def extra_repr(self) -> str:
        backends = ", ".join(decision.backend for _, decision in self.decisions.possible)
        return f"role={self.layer.role}, num_heads={self.num_heads}, head_dim={self.head_dim}, backend={backends}"


def check_shared_heads(num_heads: int, degree: int, role: str) -> None:
    """Raises ConfigError where tensor parallel processes cannot share a layer's heads evenly."""
    if num_heads % degree:
        even = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
        raise ConfigError(
            f"parallel.tensor_parallel_size: {degree} processes cannot share the {num_heads} heads of attention of "
            f"role {role} evenly; degrees that divide them: {even}"
        )


class LocalAttention(AttentionLayer):
    """Attention within this process: to text, which all processes hold, and everything when there is one process."""

    @staticmethod
    def _make_exchange(mesh: ProcessMesh, num_head_groups: int) -> Exchange:  # noqa: ARG004
        return SingleProcess()


class UlyssesAttention(AttentionLayer):
    """Attention over a sequence that processes share by heads (Jacobs et al., arXiv:2309.14509).

    On a mesh with a ring axis it shares the heads among all processes of the sequence.
    """

    @staticmethod
    def _make_exchange(mesh: ProcessMesh, num_head_groups: int) -> Exchange:
        return UlyssesExchange(mesh.sequence, num_head_groups)


class USPAttention(AttentionLayer):
    """Attention over a sequence shared by heads and by key blocks (Fang and Zhao, arXiv:2405.07719)."""

    @staticmethod
    def _make_exchange(mesh: ProcessMesh, num_head_groups: int) -> Exchange:
        return USPExchange(mesh, num_head_groups)
