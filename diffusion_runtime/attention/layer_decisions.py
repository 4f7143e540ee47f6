"""Decisions of one attention layer: which backend serves its calls, asked at a call and before there is one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.backends.calling import expected_implementation
from diffusion_runtime.attention.backends.interface import Backend, CallForm, KnownCall
from diffusion_runtime.attention.backends.packages import ImportingBackend
from diffusion_runtime.attention.backends.registry import find_backend, num_changes
from diffusion_runtime.attention.backends.requirements import dtype_name, features_used
from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.force import ForcedChoice, current_force
from diffusion_runtime.attention.measured_error import Rounding, rounding_of
from diffusion_runtime.attention.policy import AttentionPolicy, HeldRules
from diffusion_runtime.attention.select import Decision, Resolved, resolve_decision, select
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import RASTER, Extent, TokenLayout
from diffusion_runtime.parallel.interface import Exchange


@dataclass(frozen=True)
class LayerShape:
    """Sizes and features that a layer is built with. num_heads, num_kv_heads: of this process, where processes share
    the num_heads_total of a layer (tensor parallel); scale, causal, cached_keys, merges: as in AttentionLayer."""

    num_heads: int
    num_kv_heads: int
    num_heads_total: int
    head_dim: int
    scale: float | None
    causal: bool
    cached_keys: bool
    merges: bool = False


@dataclass(frozen=True)
class ResolvedCall:
    """A decision, and the exchange that suits its backend. shared: how processes share the sequence, empty for one
    process; needs_lse: whether parts are merged by the log-sum-exp, of a ring or with further keys; rounding: the error
    that it may have by design, None for none."""

    resolved: Resolved
    exchange: Exchange
    shared: str
    needs_lse: bool
    rounding: Rounding | None


class _DecisionKey(NamedTuple):
    """Everything that a decision depends on; calls with equal keys share one decision. needs: FEATURES it uses."""

    forced: tuple[ForcedChoice, ...]
    rules: HeldRules
    dtype: torch.dtype
    device: torch.device
    needs: frozenset[str]


class LayerDecisions:
    """Decisions of one layer: all that may serve it, made and checked at construction, and one for each kind of call.

    layer: which layer; shape: its sizes and features; policy: the choices that it decides by; exchange: how processes
    share the sequence. requirements: what is known of the layer before it is called. possible: (when, decision), every
    decision that may serve it.

    Raises BackendUnavailableError and ConfigError at construction when a choice for the role cannot run, with its
    options and with any schedule rule that can hold.
    """

    def __init__(self, layer: LayerInfo, shape: LayerShape, policy: AttentionPolicy, exchange: Exchange) -> None:
        self._layer = layer
        self._shape = shape
        self._exchange = exchange
        self._exchange_with_every_key = exchange.with_every_key(shape.num_heads)
        self._needs = features_used(
            scale=shape.scale, causal=shape.causal, return_lse=shape.merges, cached_keys=shape.cached_keys
        )
        self._known: dict[_DecisionKey, ResolvedCall] = {}
        self._known_at = num_changes()
        self.policy = policy
        self.requirements = dataclasses.replace(
            policy.requirements(
                layer, head_dim=shape.head_dim, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads
            ),
            needs=self._needs,
            keys_in_parts=exchange.needs_lse,
            every_key_on_demand=self._exchange_with_every_key is not None,
            width=shape.num_heads_total * shape.head_dim,
        )
        self.possible: tuple[tuple[str, Decision], ...] = ()
        self._decide()

    def choose(self, policy: AttentionPolicy) -> None:
        """Decide again, for the calls from here on, by another policy for the same device, dtype and processes.

        Raises what the constructor raises for a choice that cannot run, and leaves everything as it was.
        """
        before = self.policy, self.possible, self._known
        self.policy, self._known = policy, {}
        try:
            self._decide()
        except Exception:
            self.policy, self.possible, self._known = before
            raise

    def check_request(self, num_steps: int) -> None:
        """Ask the backends of a request of `num_steps` whether their options can serve this layer; it costs little.

        Raises ConfigError when one cannot, and BackendUnavailableError when a choice that is forced now cannot run.
        """
        self._check_moments(self.policy.held_rules(self._layer, num_steps), current_force(), num_steps)

    def served(
        self,
        x: torch.Tensor,
        context: AttentionContext,
        *,
        gate: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        block_mask: BlockMask | None = None,
    ) -> ResolvedCall:
        """Return what serves one call, whose q is like x; the decision is kept for every later call like it. Raises
        BackendUnavailableError when no backend of the choice can serve it."""
        return self._served_by(
            current_force(),
            self.policy.rules_now(self._layer, context.step),
            x.dtype,
            x.device,
            self._needs | features_used(layout=context.layout, gate=gate, mask=mask, block_mask=block_mask),
        )

    def resolved_at(self, step: StepInfo, layout: TokenLayout | None) -> Resolved:
        """Return what will serve a call at a step of a request whose keys sit as in `layout`."""
        return self._planned(current_force(), self.policy.rules_now(self._layer, step), layout).resolved

    def expected_implementation(self, step: StepInfo, form: KnownCall) -> str | None:
        """Return the implementation that the report will name for a call at `step`; None where that is found at the
        call."""
        return expected_implementation(*self._expected_call(step, form))

    def expected_warning(self, step: StepInfo, form: KnownCall) -> str | None:
        """Return what a call at `step` would warn of, None for nothing."""
        backend, known = self._expected_call(step, form)
        return backend.expected_warning(known)

    def preferred_tiles(self, layout: TokenLayout, num_steps: int) -> frozenset[Extent]:
        """Return the orders of the grid's tokens that this layer prefers at some step of a request; empty where any
        will do. layout: of the grid, without the text."""
        if self._shape.causal:
            return frozenset({RASTER})
        forced = current_force()
        tiles = set()
        for rules in self.policy.held_rules(self._layer, num_steps):
            resolved = self._planned(forced, rules, layout).resolved
            tiles.add(resolved.backend.preferred_tile(resolved.options, layout, self._layer))
        return frozenset(tile for tile in tiles if tile is not None)

    def lossy_commits(self) -> tuple[Decision, ...]:
        """Return the choices that give up accuracy where the keys of finished frames are computed: their backend
        declares an error bound, or leaves out keys. Empty for a layer that caches none."""
        if not self._shape.cached_keys:
            return ()
        found = []
        for rules in self.policy.held_in_commits(self._layer):
            resolved = self._planned((), rules).resolved
            is_lossy = resolved.backend.error_bound_on(self.policy.hardware) is not None
            if resolved.decision.source != "platform" and (is_lossy or resolved.backend.capability.needs_every_key):
                found.append(resolved.decision)
        return tuple(found)

    def replay_refusals(self) -> tuple[str, ...]:
        """Return why calls cannot be replayed from a CUDA graph, of every backend that may serve the layer."""
        served = [resolve_decision(decision) for _, decision in self.possible]
        known = [(each.backend, each.options) for each in served]
        known += [(each.dense.backend, each.dense.options) for each in served if each.dense is not None]
        reasons = [(backend.name, backend.replay_refusal(options)) for backend, options in known]
        return tuple(sorted({f"{name}: {reason}" for name, reason in reasons if reason is not None}))

    def step_key(self, step: StepInfo) -> Hashable:
        """Return what of a step decides which kernels the calls run, by all that has served them so far."""
        keys = (_step_keys(served.resolved, self._layer, step) for served in self._known.values())
        # A set: another decision for the same backend and options changes nothing.
        return self.policy.rules_now(self._layer, step), frozenset(key for several in keys for key in several)

    def _decide(self) -> None:
        possible = self.policy.possible_decisions(self.requirements, self._layer)
        self.possible = tuple((when, self._with_exchange(decision)) for when, decision in possible)
        for _, decision in self.possible:
            self.policy.announce(decision, self._layer.role)
        self._check_moments(self.policy.held_rules(self._layer), (), num_steps=None)

    def _check_moments(
        self, held: Iterable[HeldRules], forced: tuple[ForcedChoice, ...], num_steps: int | None
    ) -> None:
        shape = self._shape
        for rules in held:
            resolved = self._planned(forced, rules).resolved
            resolved.backend.check(resolved.options, self._layer, shape.num_heads_total, num_steps)
            if self._exchange_for(resolved.backend).splits_heads or shape.num_heads < shape.num_heads_total:
                resolved.backend.check_split_heads(resolved.options)
            if resolved.dense is not None:
                resolved.dense.backend.check(resolved.dense.options, self._layer, shape.num_heads_total, num_steps)

    def _expected_call(self, step: StepInfo, form: KnownCall) -> tuple[Backend, CallForm]:
        policy, shape = self.policy, self._shape
        served = self._planned(current_force(), policy.rules_now(self._layer, step), form.layout)
        resolved = served.resolved
        known = CallForm(
            hardware=policy.hardware_of(policy.torch_device),
            dtype=form.dtype,
            q_shape=form.q_shape,
            k_shape=form.k_shape,
            layout=form.layout,
            options=resolved.options,
            layer=self._layer,
            step=step,
            dense=resolved.dense,
            mask=form.mask,
            has_gate=form.has_gate,
            scale=shape.scale,
            causal=shape.causal,
            return_lse=served.needs_lse,
        )
        return resolved.backend, known

    def _planned(
        self, forced: tuple[ForcedChoice, ...], rules: HeldRules, layout: TokenLayout | None = None
    ) -> ResolvedCall:
        """Return what will serve calls of the policy's dtype on its device, without gate and mask."""
        needs = self._needs | features_used(layout=layout)
        return self._served_by(forced, rules, self.policy.dtype, self.policy.torch_device, needs)

    def _served_by(
        self,
        forced: tuple[ForcedChoice, ...],
        rules: HeldRules,
        dtype: torch.dtype,
        device: torch.device,
        needs: frozenset[str],
    ) -> ResolvedCall:
        if self._known_at != num_changes():
            self._known, self._known_at = {}, num_changes()
        known, key = self._known, _DecisionKey(forced, rules, dtype, device, needs)
        served = known.get(key)
        if served is None:
            resolved = self._resolve(key)
            exchange = self._exchange_for(resolved.backend)
            needs_lse = exchange.needs_lse or self._shape.merges
            rounding = rounding_of(resolved, dtype_name(dtype), self.policy.hardware_of(device))
            served = known[key] = ResolvedCall(resolved, exchange, exchange.describe(), needs_lse, rounding)
        return served

    def _resolve(self, key: _DecisionKey) -> Resolved:
        hardware = self.policy.hardware_of(key.device)
        requirements = dataclasses.replace(
            self.requirements, dtype=dtype_name(key.dtype), hardware=hardware, needs=key.needs
        )
        decision = select(requirements, self.policy.levels(key.rules, key.forced))
        self.policy.announce(decision, self._layer.role)
        return resolve_decision(self._with_exchange(decision))

    def _with_exchange(self, decision: Decision) -> Decision:
        """Return the decision with a remark where its backend cannot share the sequence as the others do."""
        exchange = self._exchange_for(resolve_decision(decision).backend)
        if exchange.needs_lse or not self._exchange.needs_lse:
            return decision
        remark = f"it looks at every key, so {exchange.describe()} instead of {self._exchange.describe()}"
        return dataclasses.replace(decision, reason=f"{decision.reason}; {remark}")

    def _exchange_for(self, backend: Backend) -> Exchange:
        if not backend.capability.needs_every_key:
            return self._exchange
        assert self._exchange_with_every_key is not None, "selection refuses such a backend"
        return self._exchange_with_every_key

    def __getstate__(self) -> dict[str, Any]:
        # Without what calls were decided here: a copy may run on another machine, or with other backends registered.
        return self.__dict__ | {"_known": {}}


class MeasuredPasses:
    """Passes of a request that may measure the error of a rounded backend in some layer (attention/measured_error.py):
    the first ones of each choice that names one, known without looking at a tensor. layers: of the transformer, with
    what they decide by; leaves_out: whether a step leaves out blocks, which are measured in a later one."""

    def __init__(
        self, layers: Iterable[tuple[LayerInfo, AttentionPolicy]], leaves_out: Callable[[StepInfo], bool]
    ) -> None:
        self._layers = tuple(layers)
        self._leaves_out = leaves_out
        self._seen: set[Hashable] = set()

    def __call__(self, step: StepInfo, branches: Sequence[str]) -> bool:
        """Return whether those of a step that compute these guidance branches do. Called once for them."""
        scope = step.expert, step.chunk, step.phase, self._leaves_out(step), current_force(), *branches
        found = {(scope, layer, policy.rules_now(layer, step)): (layer, policy) for layer, policy in self._layers}
        new = found.keys() - self._seen
        self._seen |= new
        return any(_may_round(*found[key], step) for key in new)


def _may_round(layer: LayerInfo, policy: AttentionPolicy, step: StepInfo) -> bool:
    """Return whether a choice for a step, or for a prefix that is computed in it, names a backend that declares an
    error bound here. Which backend of a list serves a call depends on its padding and masks too."""
    held = {policy.rules_now(layer, step), *policy.held_in_commits(layer)}
    choices = [each for rules in held for each in policy.levels(rules, current_force()).choices(layer.role)]
    named = [find_backend(name) for choice in choices for name in choice.spec.candidates]
    return any(each is not None and each.error_bound_on(policy.hardware) is not None for each in named)


def _step_keys(resolved: Resolved, layer: LayerInfo, step: StepInfo) -> Iterator[Hashable]:
    """Yield the keys of the backend that serves a call and of the one that serves its dense calls, where these differ
    by step."""
    dense = resolved.dense
    several = [(resolved.backend, resolved.options)]
    several += [] if dense is None else [(dense.backend, dense.options)]
    for backend, options in several:
        key = backend.step_key(options, layer, step)
        if key != ():
            yield backend.name, options, key


def first_imports(layers: Iterable[LayerDecisions]) -> tuple[Callable[[], None], ...]:
    """Return functions that import what the first calls of layers import, one for each backend."""
    found: dict[str, Callable[[], None]] = {}
    for decisions in layers:
        for _, decision in decisions.possible:
            backend = find_backend(decision.backend)
            if isinstance(backend, ImportingBackend):
                found.setdefault(decision.backend, functools.partial(backend.import_ahead, decisions.requirements))
    return tuple(found.values())
