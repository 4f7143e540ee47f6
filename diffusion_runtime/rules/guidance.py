"""Guidance of a batch: its scales at every step, and the branches that run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.normalized_guidance import ALPHA, DEFAULT_ROLE, TAU, NormalizedGuidance
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.core.step_info import PERTURBED, StepInfo
from diffusion_runtime.denoising.guidance_terms import GuidanceTerms
from diffusion_runtime.denoising.skip_layers import SkipLayers
from diffusion_runtime.errors import RequestError, nearest, shown
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.request.fields import NumberByRole
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.draft import filled
from diffusion_runtime.rules.guided_steps import GuidedSteps


@dataclass(frozen=True)
class Guidance:
    """The guidance of the requests of a batch. shared: their values, resolved."""

    shared: GenerationRequest
    sampling: Sampling

    @property
    def scale(self) -> float:
        """The value of guidance_scale."""
        return filled(self.shared.guidance_scale)

    @property
    def mode(self) -> str:
        """The value of guidance_mode; two passes where they do not run the same blocks, or one of them has both texts
        itself."""
        is_apart = self.is_within_attention or (self.skip is not None and self.skip.branch == "uncond")
        return "two_pass" if is_apart else filled(self.shared.guidance_mode)

    @property
    def values(self) -> dict[str, Any]:
        """Request values that follow from the kinds of guidance, spelled out."""
        values: dict[str, Any] = {}
        if self.skip is not None or (self.is_within_attention and self.is_guided):
            values["guidance_mode"] = self.mode
        found = self.normalized(1)
        return values if found is None else values | {"nag_tau": found.tau, "nag_alpha": found.alpha}

    @property
    def is_within_attention(self) -> bool:
        """True with normalized attention guidance, of all attention roles or of some."""
        scale = self.shared.nag_scale or 1.0
        return any(number > 1 for _, number in scale) if isinstance(scale, tuple) else scale > 1

    def normalized(self, num_samples: int) -> NormalizedGuidance | None:
        """Return the guidance within attention of every pass but those of the unconditional branch; None without.
        num_samples: of a pass."""
        shared = self.shared
        if not self.is_within_attention or shared.nag_scale is None:
            return None
        tau = TAU if shared.nag_tau is None else shared.nag_tau
        alpha = ALPHA if shared.nag_alpha is None else shared.nag_alpha
        return NormalizedGuidance(shared.nag_scale, tau, alpha, num_samples)

    @property
    def embedded(self) -> float | None:
        """The guidance scale that the transformer gets as an input; None when it has no such input."""
        return self.scale if self.sampling.embeds_guidance else None

    @property
    def cfg_scales(self) -> tuple[float, float]:
        """The scale of classifier-free guidance for the first expert and for the second."""
        if self.sampling.embeds_guidance:
            scale = 1.0 if self.shared.true_cfg_scale is None else self.shared.true_cfg_scale
            return scale, scale
        second = self.scale if self.shared.guidance_scale_2 is None else self.shared.guidance_scale_2
        return self.scale + self.sampling.guidance_offset, second + self.sampling.guidance_offset

    def cfg_scale_at(self, step: StepInfo) -> float:
        """Return the scale of one step's expert and chunk; 1 outside of guidance_start to guidance_stop, and where
        guided_chunks leaves it without guidance, and no new prompt has it. A commit is for the chunk behind it."""
        guided = self.steps.is_active(step) and (step.shares_keys or self.has_both_branches(step))
        return self.cfg_scales[min(step.expert, 1)] if guided else 1.0

    @property
    def steps(self) -> GuidedSteps:
        """The steps that guidance_start and guidance_stop leave with guidance, and CFG-zero*."""
        return GuidedSteps(self.shared)

    @property
    def is_of_some_steps(self) -> bool:
        """True where some steps are guided or computed otherwise than others."""
        return self.steps.num_zero > 0 or (self.is_guided and not self.steps.are_all)

    @property
    def has_zero_text(self) -> bool:
        """True where zeros stand for the encoded negative prompt."""
        return self.shared.negative_encoding == "zeros" and self.reads_negative

    def has_both_branches(self, step: StepInfo) -> bool:
        """Return whether guided_chunks allows guidance at a step, with keys of both branches; once it does not, it does
        at no later one of the video."""
        num_guided = self.shared.guided_chunks
        return num_guided is None or step.chunk + (step.phase == "commit") < num_guided

    def with_shared_keys(self, step: StepInfo, switched_at: int | None) -> StepInfo:
        """Return the step with guidance from the keys of the conditional branch alone, where guided_switch_chunks has
        it. switched_at: the first chunk of the prompt; None for the video's first prompt."""
        num_guided = self.shared.guided_switch_chunks or 0
        guided = switched_at is not None and step.chunk < switched_at + num_guided and step.phase == "denoise"
        return dataclasses.replace(step, shares_keys=True) if guided and not self.has_both_branches(step) else step

    @property
    def terms(self) -> GuidanceTerms | None:
        """Guidance of a model that makes pictures and sound; None for one scale of classifier-free guidance."""
        terms = GuidanceTerms.of(self.shared) if self.sampling.guides_parts else None
        return None if terms is None or terms.is_plain else terms

    @property
    def skip(self) -> SkipLayers | None:
        """Skip-layer guidance; None without it, and where the branch that it is of does not run."""
        shared = self.shared
        if shared.skip_layers is None or shared.skip_layer_stop == 0:
            return None
        start = shared.skip_layer_start or 0.0
        stop = 1.0 if shared.skip_layer_stop is None else shared.skip_layer_stop
        skip = SkipLayers(shared.skip_layers, shared.skip_layer_scale or 0.0, start, stop)
        return skip if skip.scale > 0 or self.is_guided else None

    @property
    def further_branches(self) -> tuple[str, ...]:
        """Forward passes of each step in addition to the one or two of classifier-free guidance."""
        if self.skip is not None and self.skip.scale > 0:
            return (PERTURBED,)
        return () if self.terms is None else self.terms.further_branches

    @property
    def note(self) -> str | None:
        """The guidance of each step, for the report; None for classifier-free guidance alone."""
        found = self.normalized(1)
        within = None
        if found is not None:
            within = (
                f"normalized attention guidance away from the negative prompt: nag_scale {text_by_role(found.scale)}, "
                f"nag_tau {text_by_role(found.tau)}, nag_alpha {text_by_role(found.alpha)}"
            )
        zeros = "zeros in place of the encoded negative prompt (negative_encoding)" if self.has_zero_text else None
        steps = self.steps.notes(is_guided=self.is_guided)
        return "; ".join(filter(None, (self._passes_note, within, *steps, zeros))) or None

    @property
    def _passes_note(self) -> str | None:
        if self.skip is not None:
            blocks, passes = ", ".join(map(str, self.skip.layers)), 1 + self.is_guided + len(self.further_branches)
            what = "the unconditional pass" if self.skip.branch == "uncond" else f"a pass of scale {self.skip.scale:g}"
            when = f"from {self.skip.start:g} to {self.skip.stop:g} of the steps"
            return f"guidance: up to {passes} forward passes per step: {what} skips block {blocks} {when}"
        return None if self.terms is None else self.terms.note(self.mode)

    @property
    def is_guided(self) -> bool:
        """True where the branch of the negative prompt runs."""
        terms = self.terms
        return max(self.cfg_scales) > 1 if terms is None else terms.is_guided

    @property
    def reads_negative(self) -> bool:
        """True where negative prompts are encoded."""
        return self.is_guided or self.is_within_attention


# Of skip-layer guidance, beside its blocks.
_OF_SKIP = ("skip_layer_scale", "skip_layer_start", "skip_layer_stop")


def check_guidance(
    guidance: Guidance, num_blocks: int | None, roles: Collection[str] = (), text_roles: Collection[str] = ()
) -> None:
    """Raises RequestError for guidance of a model that runs without, and for spatio-temporal guidance without blocks,
    or with some that the model does not have; for skip-layer guidance that does not say which; for guidance by
    attention roles that are none of `roles`, those of the model, or none of `text_roles`, those that meet the prompt;
    both are empty where they are not known. num_blocks: of the transformer, None where that is not known."""
    if not guidance.sampling.takes_guidance and guidance.is_guided:
        raise RequestError(
            "guidance_scale: this model was distilled to run without guidance; expected 1 or less, got "
            f"{guidance.scale:g}; leave it out"
        )
    if guidance.is_within_attention and not guidance.shared.negative_prompt:
        raise RequestError(
            "nag_scale: guides away from the negative prompt, and the request has none; give one (--negative-prompt "
            "blurry), or leave out --nag-scale"
        )
    _check_roles(guidance.shared, roles)
    _check_text_roles(guidance.shared, text_roles)
    _check_skip(guidance, num_blocks)
    guidance.steps.check()
    terms = guidance.terms
    if terms is None or not terms.is_perturbed:
        return
    if not terms.stg_blocks:
        raise RequestError("stg_blocks: stg_scale needs the blocks whose self-attention is skipped: --stg-blocks 28")
    beyond = [block for block in terms.stg_blocks if num_blocks is not None and block >= num_blocks]
    if beyond:
        raise RequestError(
            f"stg_blocks: expected indices from 0 to {(num_blocks or 0) - 1}, the model's blocks, got {beyond[0]}"
        )


def text_by_role(value: NumberByRole) -> str:
    """`5`, `cross=5,default=3`."""
    return ",".join(f"{role}={number:g}" for role, number in value) if isinstance(value, tuple) else f"{value:g}"


def _check_roles(shared: GenerationRequest, roles: Collection[str]) -> None:
    known = dict.fromkeys((DEFAULT_ROLE, *roles, *map(role_category, roles)))
    for name in ("nag_scale", "nag_tau", "nag_alpha"):
        value = getattr(shared, name)
        unknown = [role for role, _ in value if roles and role not in known] if isinstance(value, tuple) else []
        if unknown:
            raise RequestError(
                f"{name}: this model has no attention role {shown(unknown[0])}.{nearest(unknown[0], known)}"
            )


def _check_skip(guidance: Guidance, num_blocks: int | None) -> None:
    shared = guidance.shared
    if shared.skip_layers is None:
        named = [name for name in _OF_SKIP if getattr(shared, name) is not None]
        if named:
            raise RequestError(f"{named[0]}: needs the blocks that are left out: --skip-layers 22; or leave it out")
        return
    beyond = [block for block in shared.skip_layers if num_blocks is not None and block >= num_blocks]
    if beyond:
        raise RequestError(
            f"skip_layers: expected indices from 0 to {(num_blocks or 0) - 1}, the model's blocks, got {beyond[0]}"
        )
    if num_blocks is not None and len(shared.skip_layers) == num_blocks:
        raise RequestError("skip_layers: these are all blocks of the model, and nothing is left; leave some out")
    start = shared.skip_layer_start or 0.0
    if shared.skip_layer_stop is not None and 0 < shared.skip_layer_stop <= start:
        raise RequestError(
            f"skip_layer_stop: expected more than skip_layer_start, {start:g}, or 0 for none, got "
            f"{shared.skip_layer_stop:g}"
        )


def _check_text_roles(shared: GenerationRequest, text_roles: Collection[str]) -> None:
    scale = shared.nag_scale
    named = [role for role, number in scale if number > 1] if isinstance(scale, tuple) and text_roles else []
    met = dict.fromkeys((*sorted(text_roles), *sorted(map(role_category, text_roles)), DEFAULT_ROLE))
    unmet = next((role for role in named if role not in met), None)
    if unmet is not None:
        raise RequestError(
            f"nag_scale: {unmet} attends to no prompt in this model; expected {', '.join(met)} (--nag-scale "
            f"{next(iter(met))}=5)"
        )
