"""The three attention layers every transformer is built from. They hold no weights.

LocalAttention attends within the process. UlyssesAttention and USPAttention attend over a sequence that several
processes share, through an exchange; with one process they equal LocalAttention.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Iterable

import torch
from torch import nn

from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend, Question
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.info import LayerInfo
from diffusion_runtime.attention.layout import TokenLayout
from diffusion_runtime.attention.options import build_options
from diffusion_runtime.attention.policy import AttentionPolicy, HeldRules, dtype_name
from diffusion_runtime.attention.select import Decision, ForcedChoice, current_force, select
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.hardware import detect_hardware, resolve_device
from diffusion_runtime.parallel.interface import Exchange, SingleProcess


@dataclasses.dataclass(frozen=True)
class _Resolved:
    """A decision with what running it takes."""

    decision: Decision
    backend: Backend
    options: object


@dataclasses.dataclass(frozen=True)
class _Moment:
    """All that a decision depends on at a call; equal moments share one decision."""

    forced: tuple[ForcedChoice, ...]
    rules: HeldRules
    dtype: torch.dtype
    device: torch.device
    needs: frozenset[str]


class AttentionLayer(nn.Module, ABC):
    """What the three layers share: a decision at construction, a check and a count at every call.

    num_heads, head_dim: of the queries; num_kv_heads: of keys and values, None for as many (fewer is grouped-query
    attention). layer: which layer this is, its role included. policy: the choices it is built with; None takes the
    environment's and the platform's. scale: None is 1 / sqrt(head_dim). causal: query i sees keys 0..i.

    Raises BackendUnavailableError and ConfigError at construction when a choice for the role cannot run, with its
    options and with any schedule rule that can hold.
    """

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
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        self.layer = LayerInfo() if layer is None else layer
        self.policy = AttentionPolicy() if policy is None else policy
        self.scale = scale
        self.causal = causal
        self._exchange = SingleProcess() if exchange is None else exchange
        self._resolved: dict[_Moment, _Resolved] = {}
        question = dataclasses.replace(
            self.policy.question(self.layer, head_dim=head_dim, num_heads=num_heads, num_kv_heads=self.num_kv_heads),
            needs=self._constant_needs(),
        )
        self.decisions: tuple[tuple[str, Decision], ...] = tuple(self.policy.possible_decisions(question, self.layer))
        for _, decision in self.decisions:
            self.policy.announce(decision, self.layer.role)
        self._check_moments(self.policy.held_rules(self.layer), (), num_steps=None)

    def check_request(self, num_steps: int) -> None:
        """Ask the backends of a request of `num_steps` whether their options can serve this layer; it costs little.

        Raises ConfigError when one cannot, and BackendUnavailableError when a choice that is forced now cannot run.
        """
        self._check_moments(self.policy.held_rules(self.layer, num_steps), current_force(), num_steps)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: AttentionContext | None = None,
        *,
        gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]; out as q.

        context: where the keys sit, which step it is, the request's state and its recorder. gate: [batch, seq_q, heads,
        head_dim] for backends with a gated branch. Raises ConfigError for shapes that do not fit.
        """
        context = AttentionContext() if context is None else context

        def run(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            result = self._run(q, k, v, context.with_layout(layout), gate, self._exchange.needs_lse)
            return result.out, result.lse

        return self._exchange.attend(q, k, v, context.layout, run)

    def takes_gate(self, x: torch.Tensor, context: AttentionContext | None = None) -> bool:
        """Whether the backend that serves the next call has a gated branch; a gate for any other is not worth making.

        x: a tensor of the dtype and on the device of that call's q; context: of that call. Raises
        BackendUnavailableError when no backend of the choice can serve it.
        """
        context = AttentionContext() if context is None else context
        resolved = self._resolved_for(x, context, with_gate=False, return_lse=self._exchange.needs_lse)
        return "gate" in resolved.backend.capability.features

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: AttentionContext,
        gate: torch.Tensor | None,
        return_lse: bool,
    ) -> AttentionResult:
        """One call of this process: decide, compute, count."""
        check_shapes(q, k, v, context.layout, self.causal)
        resolved = self._resolved_for(q, context, with_gate=gate is not None, return_lse=return_lse)
        call = AttentionCall(
            q=q,
            k=k,
            v=v,
            options=resolved.options,
            layout=context.layout,
            layer=self.layer,
            step=context.step,
            state=context.state,
            gate=gate,
            scale=self.scale,
            causal=self.causal,
            return_lse=return_lse,
        )
        result = resolved.backend.run(call)
        context.recorder.record(
            self.layer,
            context.step,
            backend=resolved.decision.backend,
            implementation=result.implementation,
            source=resolved.decision.source,
            reason=resolved.decision.reason,
        )
        for name, reason in resolved.decision.rejected:
            context.recorder.note(f"{self.layer.role}: {name} not used: {reason}")
        return result

    def _resolved_for(
        self, x: torch.Tensor, context: AttentionContext, *, with_gate: bool, return_lse: bool
    ) -> _Resolved:
        """The decision for one call, whose q is like x; kept for every later call like it."""
        needs = set(self._constant_needs())
        if context.layout is not None and context.layout.has_padding:
            needs.add("key_padding")
        if return_lse:
            needs.add("lse")
        if with_gate:
            needs.add("gate")
        rules = self.policy.rules_now(self.layer, context.step)
        return self._resolved_at(_Moment(current_force(), rules, x.dtype, x.device, frozenset(needs)))

    def _check_moments(
        self, held: Iterable[HeldRules], forced: tuple[ForcedChoice, ...], num_steps: int | None
    ) -> None:
        device = resolve_device(self.policy.device)
        for rules in held:
            moment = _Moment(forced, rules, self.policy.dtype, device, self._constant_needs())
            resolved = self._resolved_at(moment)
            resolved.backend.check(resolved.options, self.layer, self.num_heads, num_steps)

    def _resolved_at(self, moment: _Moment) -> _Resolved:
        resolved = self._resolved.get(moment)
        if resolved is None:
            resolved = self._resolved[moment] = self._resolve(moment)
        return resolved

    def _resolve(self, moment: _Moment) -> _Resolved:
        question = Question(
            role=self.layer.role,
            category=self.policy.question(
                self.layer, head_dim=self.head_dim, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads
            ).category,
            head_dim=self.head_dim,
            dtype=dtype_name(moment.dtype),
            hardware=detect_hardware(str(moment.device)),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            needs=moment.needs,
        )
        decision = select(question, self.policy.levels(moment.rules, moment.forced))
        self.policy.announce(decision, self.layer.role)
        return resolve_decision(decision)

    def _constant_needs(self) -> frozenset[str]:
        needs = {"causal"} if self.causal else set()
        return frozenset(needs if self.scale is None else {*needs, "scale"})

    def extra_repr(self) -> str:
        backends = ", ".join(decision.backend for _, decision in self.decisions)
        return f"role={self.layer.role}, num_heads={self.num_heads}, head_dim={self.head_dim}, backend={backends}"


class LocalAttention(AttentionLayer):
    """Attention within this process: cross-attention, and everything when there is one process."""


class UlyssesAttention(AttentionLayer):
    """Attention over a sequence that processes share by heads (Jacobs et al., arXiv:2309.14509)."""


class USPAttention(AttentionLayer):
    """Attention over a sequence shared by heads and by key blocks (Fang and Zhao, arXiv:2405.07719)."""


def resolve_decision(decision: Decision) -> _Resolved:
    """The backend of a decision, with its options as the type it declares.

    Raises ConfigError for options that contradict each other: here the set is complete.
    """
    backend = find_backend(decision.backend)
    assert backend is not None, decision
    options = build_options(backend.options_type, decision.options, f"options of {backend.name}")
    return _Resolved(decision, backend, options)


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TokenLayout | None, causal: bool) -> None:
    """Raises ConfigError unless q, k, v are [batch, seq, heads, head_dim] that fit each other and the layout."""
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[2] % max(1, k.shape[2]):
        raise ConfigError(
            "attention: expected q [batch, seq_q, heads, head_dim] and k, v [batch, seq_k, kv_heads, head_dim] with "
            f"heads a multiple of kv_heads, got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ConfigError(f"attention: q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if causal and q.shape[1] != k.shape[1]:
        raise ConfigError(f"attention: causal needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}")
    if layout is None:
        return
    if layout.num_tokens != k.shape[1]:
        raise ConfigError(f"attention: the layout describes {layout.num_tokens} tokens, k has {k.shape[1]}")
    if layout.valid_lengths is not None and len(layout.valid_lengths) != q.shape[0]:
        raise ConfigError(
            f"attention: valid_lengths holds {len(layout.valid_lengths)} samples, the batch has {q.shape[0]}"
        )
