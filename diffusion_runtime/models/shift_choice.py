"""Flow shifts of a model that differ: that of its folder's scheduler, and of a sampling preset or of its authors; and
the noise level that a schedule is stretched to, which goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.models.sampling_presets import SamplingPreset
from diffusion_runtime.request.generation_request import GenerationRequest

_FIELD, _TERMINAL = "flow_shift", "shift_terminal"


@dataclass(frozen=True)
class ShiftChoice:
    """A flow shift that is not that of the folder's scheduler.

    value: the shift; owner: its source, in words. of_folder: that of the scheduler, None where it follows the size.
    presets: those that the model was recognised by, whose shift goes with their steps or their guidance; none for a
    shift that goes with any. terminal: the shift_terminal that goes with this shift, None where the folder's holds.
    """

    value: float
    owner: str
    of_folder: float | None
    presets: tuple[SamplingPreset, ...] = ()
    terminal: float | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The request fields that it chooses."""
        return (_FIELD,) if self.terminal is None else (_FIELD, _TERMINAL)

    def fits(self, num_steps: int | None, guidance_scale: float | None) -> bool:
        """Return whether a request of these values runs the model as the presets do."""
        if not self.presets:
            return True
        has_steps = num_steps in {preset.num_steps for preset in self.presets}
        return has_steps or guidance_scale in {preset.request.get("guidance_scale") for preset in self.presets}

    def note(self, request: GenerationRequest, computed: float | None) -> str | None:
        """Return a note on the source of a resolved request's shift; None for one of its own, and where noise levels
        are not shifted.

        computed: the shift that the scheduler leads to at the request's size, None where its shift is fixed.
        """
        if request.sigmas is not None:
            return None
        of_folder = computed if self.of_folder is None else self.of_folder
        folder_says = "a shift that follows the size" if self.of_folder is None else f"{self.of_folder:g}"
        if request.flow_shift == self.value:
            is_taken = self.terminal is not None and request.shift_terminal == self.terminal
            terminal = f", with its shift_terminal of {self.terminal:g}," if is_taken else ""
            return (
                f"flow_shift: {self.value:g} of {self.owner}{terminal} runs; the folder's scheduler says {folder_says}"
            )
        fits = self.fits(request.num_inference_steps, request.guidance_scale)
        if of_folder is not None and request.flow_shift == of_folder and not fits:
            return (
                f"flow_shift: {of_folder:g} of the folder's scheduler runs; {self.owner} says {self.value:g}, for "
                "other steps and guidance"
            )
        return None


def shift_choice(
    scheduler: Mapping[str, Any],
    presets: tuple[SamplingPreset, ...],
    generation: Mapping[str, Any],
    documented: Mapping[str, Any] | None,
    name: str,
) -> ShiftChoice | None:
    """Compare the flow shifts that a model is given by default; None where the folder's own is the only one.

    scheduler: request values of the folder's scheduler, its shift_terminal among them; presets: those that the folder
    is recognised by, the default first; generation: request values of its generation.json; documented: those of the
    model's authors, None for a model that was not chosen by its name; name: of the model.
    """
    of_folder = scheduler.get(_FIELD)
    authors = {} if documented is None else documented
    preset = {} if not presets else presets[0].request
    if authors.get(_FIELD) is not None:
        found = ShiftChoice(float(authors[_FIELD]), f"{name}'s authors", of_folder)
    elif generation.get(_FIELD) is not None or preset.get(_FIELD) is None:
        return None
    else:
        same = tuple(each for each in presets if each.request.get(_FIELD) == preset[_FIELD])
        # None and 0 both leave the schedule as it is.
        terminal = preset.get(_TERMINAL)
        if (terminal or None) == (scheduler.get(_TERMINAL) or None):
            terminal = None
        owner = f"the sampling preset {presets[0].name}"
        found = ShiftChoice(float(preset[_FIELD]), owner, of_folder, same, terminal)
    return None if found.value == of_folder and found.terminal is None else found
