"""What one generation is asked for (call time). Never merged with RuntimeConfig (load time)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args, get_type_hints

from diffusion_runtime.errors import RequestError, nearest, shown

GUIDANCE_MODES = ("batched", "two_pass")
# Far beyond what any model makes; a number above is a slip of the finger, and its square has no room in memory.
MAX_COUNT = 1_000_000
# What float32 holds without a loss, and half types do not overflow with at once.
MAX_SCALE = 1e6
SAMPLERS = ("flow_match_euler", "unipc")


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how to turn it into frames. None means: as the model's own defaults say.

    prompt: what to show; at least one word.
    negative_prompt: what guidance steers away from.
    height, width: pixels; the model says which multiples it needs.
    num_frames: 1 is an image; video models need 1 plus a multiple of their temporal factor.
    fps: frames a second of the written video.
    num_inference_steps: denoising steps, 1 or more.
    guidance_scale: classifier-free guidance; 1 or less runs no negative branch. A model that was distilled from
        guidance takes it as an input instead, and runs one branch.
    true_cfg_scale: classifier-free guidance of such a model, on top; 1 or less runs no negative branch.
    guidance_scale_2: guidance_scale of the second expert, at low noise; None is the same.
    image_path: the image that a video starts from, for models that take one; None is text alone.
    flow_shift: shift of the noise schedule towards high noise.
    sampler: one of SAMPLERS.
    guidance_mode: `batched` runs both branches in one forward, `two_pass` in two (half the memory, same result).
    seed: of the CPU generator that draws the noise, so that every device starts alike.
    """

    prompt: str
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    sampler: str | None = None
    guidance_mode: str | None = None
    image_path: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise RequestError(f"prompt: expected a text, got {shown(self.prompt)}")
        if not self.prompt.strip():
            raise RequestError("prompt: expected at least one word, got an empty prompt")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise RequestError(f"negative_prompt: expected a text, got {shown(self.negative_prompt)}")
        for name in ("prompt", "negative_prompt"):
            if not is_unicode(getattr(self, name) or ""):
                raise RequestError(
                    f"{name}: expected a text, got one with half of a character (a lone surrogate, or bytes that are "
                    f"not UTF-8): {shown(getattr(self, name))}"
                )
        for name in ("height", "width", "num_frames", "fps", "num_inference_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise RequestError(f"{name}: expected a whole number of 1 or more, got {shown(value)}")
            if value is not None and value > MAX_COUNT:
                raise RequestError(f"{name}: expected a whole number of at most {MAX_COUNT}, got {shown(value)}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise RequestError(f"seed: expected a whole number from 0 to 2**63 - 1, got {shown(self.seed)}")
        for name in ("guidance_scale", "true_cfg_scale", "guidance_scale_2"):
            self._check_float(name, minimum=0.0)
        if self.image_path is not None and (not isinstance(self.image_path, str) or not self.image_path):
            raise RequestError(f"image_path: expected the path of an image, got {shown(self.image_path)}")
        self._check_float("flow_shift", minimum=1e-3)
        for name, allowed in (("sampler", SAMPLERS), ("guidance_mode", GUIDANCE_MODES)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise RequestError(f"{name}: unknown value {shown(value)}.{nearest(value, allowed)}")

    def _check_float(self, name: str, minimum: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= MAX_SCALE:
            raise RequestError(f"{name}: expected a number from {minimum:g} to {MAX_SCALE:g}, got {shown(value)}")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """This request with every None replaced by the value of the same name in `defaults`; as in `layered`, a
        guidance_scale of its own stands for both experts."""
        own = {name: value for name, value in self.to_dict().items() if value is not None}
        missing = {name: value for name, value in layered(defaults, own).items() if name not in own}
        return dataclasses.replace(self, **missing)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a recipe."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The request a mapping describes. Raises RequestError that names an unknown key and the nearest valid one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise RequestError(f"request: unknown key {shown(key)}.{nearest(key, known)}")
        if "prompt" not in values:
            raise RequestError("request: 'prompt' is missing")
        return cls(**values)


def layered(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Request values of several levels by field name, where a later level wins over an earlier one.

    A level that says guidance_scale without guidance_scale_2 means both experts: no second scale of an earlier level
    stands beside it.
    """
    values: dict[str, Any] = {}
    for level in levels:
        if level.get("guidance_scale") is not None:
            values.pop("guidance_scale_2", None)
        values.update(level)
    return values


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: half of a character, from JSON or from bytes that are not UTF-8, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def request_field_types() -> dict[str, type]:
    """Name and plain type (str, int, float) of every field, for whoever parses text into one."""
    hints = get_type_hints(GenerationRequest)
    return {name: (get_args(hint) or (hint,))[0] for name, hint in hints.items()}
