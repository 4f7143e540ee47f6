"""Presets of a model: values by name, what it was distilled to, and whose flow shift it runs with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.models.sampling_presets import FewSteps, SamplingPreset, names_of, unknown_preset
from diffusion_runtime.models.shift_choice import ShiftChoice
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.layers import EXPLICIT_LEVELS
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.draft import Draft
from diffusion_runtime.rules.sizes import shift_of_size


@dataclass(frozen=True)
class PresetRules:
    """The sampling presets of a model. known: those of its family; few_steps: what the model, or a LoRA of it, was
    distilled to, None for many steps. shift_choice: a default flow shift that is not the folder's scheduler's, None
    where there is no other."""

    known: tuple[SamplingPreset, ...] = ()
    few_steps: FewSteps | None = None
    shift_choice: ShiftChoice | None = None

    def fill(self, draft: Draft, name: str, presets: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what is open to the values of the preset `name`. presets: every one of the model. Raises RequestError for
        an unknown one, for one whose LoRA is not loaded, and where its noise levels would be lost."""
        if name not in presets:
            raise RequestError(unknown_preset(name, presets))
        values = presets[name]
        self._refuse_without_lora(name, values)
        draft.fill(values)
        field = next((field for field in EXPLICIT_LEVELS if values.get(field) is not None), None)
        if field is None or any(getattr(draft, other) is not None for other in EXPLICIT_LEVELS):
            return
        num_levels, num_steps = len(values[field]), draft.num_inference_steps
        if num_steps != num_levels:
            raise RequestError(
                f"num_inference_steps: preset {name} has {num_levels} noise levels, got {num_steps} steps; leave it "
                f"out, or say {num_steps} levels: --{field.replace('_', '-')} X,X,..."
            )
        raise RequestError(
            f"sampler: preset {name} has noise levels of its own, and {draft.sampler} spaces its own; leave it out"
        )

    def choose_shift(self, draft: Draft, own: Collection[str]) -> None:
        """Set the flow shift, and what goes with it, where it is not the model's default. own: fields that the request
        says itself, which stay."""
        if draft.sigmas is not None:
            if "flow_shift" not in own:
                # They are not shifted, whatever the model's own schedule is.
                draft.values["flow_shift"] = 1.0
        elif (choice := self.shift_choice) and not choice.fits(draft.num_inference_steps, draft.guidance_scale):
            for name in set(choice.fields) - set(own):
                draft.values.pop(name, None)
            draft.fill({"flow_shift": choice.of_folder})

    def matching(self, request: GenerationRequest) -> tuple[SamplingPreset, ...]:
        """Return the presets whose values a resolved request has."""
        return tuple(preset for preset in self.known if preset.matches(request))

    def note(self, request: GenerationRequest, sampling: Sampling) -> str | None:
        """Name the preset that a resolved request has, what recognised it, and whose flow shift runs; None where the
        folder alone says how the model is sampled."""
        notes: list[str] = []
        found, distilled = self.matching(request), self.few_steps
        if found:
            is_recognised = distilled is not None and not set(names_of(found)).isdisjoint(names_of(distilled.presets))
            because = f" ({distilled.because})" if distilled is not None and is_recognised else ""
            notes.append(f"sampling preset: {' = '.join(names_of(found))}{because}")
        if self.shift_choice is not None:
            computed = shift_of_size(request, sampling).get("flow_shift")
            notes += filter(None, [self.shift_choice.note(request, computed)])
        return "; ".join(notes) or None

    def remarks(self, settings: BatchSettings) -> list[str]:
        """Return what a few-step model was not made for, as sentences."""
        if self.few_steps is None:
            return []
        remark = self.few_steps.remark(settings.shared, settings.guidance.is_guided)
        return [] if remark is None else [remark]

    def _refuse_without_lora(self, name: str, values: Mapping[str, Any]) -> None:
        preset = next((each for each in self.known if each.name == name), None)
        if preset is None or preset.needs_lora is None or values != preset.request:
            return
        if self.few_steps is None or preset not in self.few_steps.presets:
            raise RequestError(
                f"preset: {name} needs the LoRA {preset.needs_lora}, which is not loaded: "
                f"load_pipeline({preset.model!r}, lora=[{preset.needs_lora!r}]), or --lora {preset.needs_lora}"
            )
