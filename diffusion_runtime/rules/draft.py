"""Draft: one request while a model's rules fill in its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.generation_request import UNSET, GenerationRequest
from diffusion_runtime.request.layers import layered
from diffusion_runtime.rules.predicted_length import BOUNDS, LengthBounds

_T = TypeVar("_T")


class Draft:
    """The values of a request by field name, which read as its attributes. Defaults are not checked until `request`
    makes the request."""

    def __init__(self, request: GenerationRequest) -> None:
        values = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        self.values: dict[str, Any] = {name: value for name, value in values.items() if value is not None}

    def __getattr__(self, name: str) -> Any:
        if name not in UNSET:
            raise AttributeError(name)
        return self.values.get(name)

    def fill(self, defaults: Mapping[str, Any]) -> None:
        """Set what is open to the values of `defaults`, with the ties between fields that `layered` has."""
        filled = layered(defaults, self.values)
        self.values |= {name: value for name, value in filled.items() if value is not None and name not in self.values}

    def settle_length(self, frame_rule: tuple[int, int]) -> None:
        """Replace seconds by num_frames, the nearest number that the model makes; where the length is left open, set
        num_frames to the longest. frame_rule: of its geometry. Raises RequestError for images, and for a length beside
        bounds of one."""
        seconds = self.values.pop("seconds", None)
        if seconds is None:
            self._open_length(frame_rule)
            return
        step, remainder = frame_rule
        if step == 1:
            raise RequestError("seconds: this model makes images; leave it out")
        num_steps = max(0, round((seconds * self.values["fps"] - remainder) / step))
        self.values["num_frames"] = remainder + step * num_steps

    def _open_length(self, frame_rule: tuple[int, int]) -> None:
        least, most = (self.values.get(name) for name in BOUNDS)
        # One alone is of a model without defaults of them, which takes neither.
        if least is None or most is None:
            return
        longest = LengthBounds(least, most, self.values["fps"], frame_rule).longest
        if self.values.setdefault("num_frames", longest) != longest:
            raise RequestError(
                "num_frames, max_seconds: expected one of them, got both; a length is said, or chosen for the prompt "
                "between --min-seconds and --max-seconds"
            )

    def request(self) -> GenerationRequest:
        """Make the request. Raises RequestError for a value that its field cannot have."""
        return GenerationRequest(**self.values)


def filled(value: _T | None) -> _T:
    """Return a value of a resolved request that every model fills."""
    assert value is not None
    return value
