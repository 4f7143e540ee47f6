"""ModuleAttention: computes one attention module of a diffusers model with the backend chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention.flex_attention import BlockMask

from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.force import current_force
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.select import Levels, resolve_decision
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.diffusers_bridge.explicit_choices import deciding_choice
from diffusion_runtime.diffusers_bridge.grids import Grid, TokenOrder
from diffusion_runtime.diffusers_bridge.masks import (
    MaskReader,
    OtherMask,
    QueryGroups,
    Visibility,
    attend_groups,
    attend_padded,
    run_layer,
)
from diffusion_runtime.diffusers_bridge.module_run import AttentionModuleCall
from diffusion_runtime.diffusers_bridge.modules import FoundModule, head_shape, processor_of
from diffusion_runtime.errors import BackendUnavailableError, ConfigError
from diffusion_runtime.report.attention_report import AttentionRecorder


@dataclass
class ForwardPass:
    """One forward pass of a model, for its attention modules.

    step: None when unknown. order, grid: positions of the tokens, None when unknown.
    """

    step: StepInfo | None = None
    state: RequestCache = field(default_factory=RequestCache)
    order: TokenOrder | None = None
    grid: Grid | None = None
    masks: MaskReader = field(default_factory=MaskReader)


class ModuleAttention:
    """Computes the calls of one module. The constructor raises for a choice that cannot run."""

    def __init__(self, found: FoundModule, policy: AttentionPolicy) -> None:
        self.found = found
        self._policy = policy
        self._processor_class = type(found.module if processor_of(found.module) is None else processor_of(found.module))
        self._layers: dict[tuple[int, int, int, float | None, bool], LocalAttention] = {}
        shape = head_shape(found.module)
        if shape is not None:
            self._layer(*shape, None, False)

    @property
    def layers(self) -> tuple[LocalAttention, ...]:
        """The layers that compute its calls, one per kind of call seen so far."""
        return tuple(self._layers.values())

    @property
    def needs_step(self) -> bool:
        """True if the chosen backend depends on the step."""
        if self._policy.cli.schedule or self._policy.config.schedule:
            return True
        served = [resolve_decision(each) for layer in self._layers.values() for _, each in layer.decisions.possible]
        return any(each.backend.depends_on_step(each.options, self.found.layer) for each in served)

    def check_request(self, num_steps: int) -> None:
        """Check options that depend on the number of steps. Raises ConfigError for options made for another number."""
        for layer in self._layers.values():
            layer.decisions.check_request(num_steps)

    def attend(
        self,
        call: AttentionModuleCall,
        number: int,
        given: Sequence[torch.Tensor],
        now: ForwardPass,
        recorder: AttentionRecorder,
    ) -> torch.Tensor:
        """Return the result of one call, [batch, heads, seq_q, head_dim]. number, given: see AttendCall."""
        self._check(call, now)
        q, k, v = (x.transpose(1, 2) for x in (call.q_bhsd, call.k_bhsd, call.v_bhsd))
        if isinstance(call.mask, BlockMask):
            return self._attend_blocks(call, call.mask, q, k, v, now, recorder)
        # Masks that diffusers' own processors build depend only on the given masks.
        origin = (self._processor_class, number) if self._processor_class.__module__.startswith("diffusers.") else None
        seen = now.masks.read(call.mask, (q.shape[0], q.shape[1], k.shape[1]), given, origin)
        layer = self._layer(q.shape[2], q.shape[3], k.shape[2], call.scale, call.causal)
        over_grid = now.order is not None and self.found.layer.role == "self"
        layout = now.order.layout(now.grid, q.shape[1], k.shape[1]) if over_grid and now.order is not None else None
        context = AttentionContext(layout, now.step or StepInfo(), now.state, recorder)
        try:
            out = self._compute(layer, q, k, v, seen, context)
        except ConfigError as error:
            raise ConfigError(f"{self.found.path} (role {self.found.layer.role}): {error}") from error
        except BackendUnavailableError as error:
            raise type(error)(f"{self.found.path}: {error}", error.reasons) from error
        return out.transpose(1, 2)

    def _check(self, call: AttentionModuleCall, now: ForwardPass) -> None:
        where = f"{self.found.path} (role {self.found.layer.role})"
        if call.dropout:
            raise ConfigError(f"{where}: attention with dropout is for training; call eval() on the model, or detach")
        if any(x.dim() != 4 for x in (call.q_bhsd, call.k_bhsd, call.v_bhsd)):
            raise ConfigError(
                f"{where}: expected q, k and v [batch, heads, seq, head_dim], got {tuple(call.q_bhsd.shape)}, "
                f"{tuple(call.k_bhsd.shape)}, {tuple(call.v_bhsd.shape)}; this module cannot be attached"
            )
        if call.causal and call.mask is not None:
            raise ConfigError(f"{where}: a causal call with a mask on top; torch refuses this too")
        if now.step is None and self.needs_step:
            raise ConfigError(
                f"{where}: the attention choice depends on the step, and the step is unknown here. Attach to the "
                "pipeline and not to its model, give attach the pipeline's scheduler=, or call handle.set_step(...) in "
                "your loop"
            )

    def _compute(
        self,
        layer: LocalAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seen: Visibility,
        context: AttentionContext,
    ) -> torch.Tensor:
        """Compute attention. q: [batch, seq_q, heads, head_dim]; k, v: [batch, seq_k, kv_heads, head_dim]; out as q."""
        if seen is None:
            return run_layer(layer, q, k, v, context)
        if isinstance(seen, OtherMask):
            mask = seen.mask if seen.mask.dtype == torch.bool else seen.mask.to(q.dtype)
            return run_layer(layer, q, k, v, context.with_layout(None), mask=mask)
        if isinstance(seen, QueryGroups):
            return attend_groups(layer, q, k, v, seen, context)
        out = attend_padded(layer, q, k, v, seen, context)
        return out if seen.hidden_rows is None else out.masked_fill(seen.hidden_rows, 0.0)

    def _attend_blocks(
        self,
        call: AttentionModuleCall,
        blocks: BlockMask,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        now: ForwardPass,
        recorder: AttentionRecorder,
    ) -> torch.Tensor:
        """Compute a call whose mask is a BlockMask, by the choice for its role or by the module's own function."""
        step, info = now.step or StepInfo(), self.found.layer
        if deciding_choice(self._levels(step), info.role) is None:
            out = call.run_own()
            reason = "its mask is a BlockMask, and no backend was chosen for it"
            recorder.record(
                info, step, backend="diffusers", implementation=call.own, source="platform", reason=reason, kept=()
            )
            return out
        context = AttentionContext(None, step, now.state, recorder)
        try:
            layer = self._layer(q.shape[2], q.shape[3], k.shape[2], call.scale, False)
            out = run_layer(layer, q, k, v, context, block_mask=blocks)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(
                f"{self.found.path}: its mask is a BlockMask; {error}", error.reasons
            ) from error
        return out.transpose(1, 2)

    def _levels(self, step: StepInfo) -> Levels:
        return self._policy.levels(self._policy.rules_now(self.found.layer, step), current_force())

    def _layer(self, heads: int, head_dim: int, kv_heads: int, scale: float | None, causal: bool) -> LocalAttention:
        key = (heads, head_dim, kv_heads, scale, causal)
        if key not in self._layers:
            self._layers[key] = LocalAttention(
                heads, head_dim, kv_heads, layer=self.found.layer, policy=self._policy, scale=scale, causal=causal
            )
        return self._layers[key]
