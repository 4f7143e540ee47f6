"""Sizes and frame counts that a diffusers pipeline makes exactly, known before any weight is read.

diffusers refuses some in `check_inputs` and rounds others with a log message. Both are a RequestError here.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.diffusers_bridge.pipeline_interface import PARAMETER_NAMES, PipelineInterface
from diffusion_runtime.errors import RequestError


@dataclass(frozen=True)
class AutoencoderTraits:
    """Traits of an autoencoder class. tiled_only: it raises NotImplementedError when it decodes without tiling, and
    tiling is off by default. causal: the first latent frame is one frame of the video; else every latent frame becomes
    as many frames as the temporal factor."""

    tiled_only: bool = False
    causal: bool = True


_KNOWN: Mapping[str, AutoencoderTraits] = {
    "AutoencoderKLAllegro": AutoencoderTraits(tiled_only=True, causal=False),
}


def traits_of(autoencoder: object) -> AutoencoderTraits:
    """Return the traits of an autoencoder; the defaults for a class that is not listed."""
    return _KNOWN.get(type(autoencoder).__name__, AutoencoderTraits())


_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")

# Names of the autoencoder's temporal factor in pipelines.
_TEMPORAL_FACTORS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_IMAGE_PROCESSORS = ("video_processor", "image_processor")
_SIZES = frozenset(name for field in ("height", "width", "num_frames") for name in PARAMETER_NAMES[field])
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class SizeRules:
    """Size rules of one pipeline. pipeline: without weights, None where nothing is known before they are loaded.

    multiple: of pixels, for height and width; frame_step: a video has `first_frames` plus a multiple of it as its
    number of frames; resolutions: the only (width, height) pairs. None where that is unknown.
    """

    interface: PipelineInterface
    pipeline: Any = None
    multiple: int | None = None
    frame_step: int | None = None
    resolutions: tuple[tuple[int, int], ...] | None = None
    first_frames: int = 1

    @classmethod
    def of(cls, interface: PipelineInterface, pipeline: Any | None) -> SizeRules:
        """Read the rules of a pipeline. pipeline: as built by `meta_pipeline`."""
        if pipeline is None:
            return cls(interface)
        first = 1 if traits_of(getattr(pipeline, "vae", None)).causal else 0
        step = _frame_step(interface, pipeline, first)
        return cls(interface, pipeline, _multiple(pipeline), step, _resolutions(pipeline), first)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Check the arguments of the pipeline's call. Raises RequestError that names the value."""
        self._check_inputs(arguments)
        width, height = arguments.get("width"), arguments.get("height")
        if self.resolutions is not None and width and height and (width, height) not in self.resolutions:
            known = ", ".join(f"{each[0]} x {each[1]}" for each in self.resolutions)
            raise RequestError(f"width, height: {self.interface.name} makes no {width} x {height}; it makes {known}")
        for field, size in (("height", height), ("width", width)):
            if self.multiple is not None and size and size % self.multiple:
                makes = self._makes("multiples of", self.multiple)
                raise RequestError(f"{field}: {makes}, got {size}; {_either(size, self.multiple)}")
        count = arguments.get(self.interface.parameter("num_frames") or "")
        first = self.first_frames
        if self.frame_step is not None and isinstance(count, int) and (count - first) % self.frame_step:
            makes = self._makes(f"{first} plus a multiple of" if first else "multiples of", self.frame_step)
            raise RequestError(f"num_frames: {makes} frames, got {count}; {_either(count, self.frame_step, first)}")

    def _makes(self, rule: str, step: int) -> str:
        return f"{self.interface.name} makes {rule} {step}"

    def _check_inputs(self, arguments: Mapping[str, Any]) -> None:
        """Run the pipeline's own checks. A refusal counts when it disappears with the request's sizes: any other may
        come from components that are not loaded yet, and is left for the call."""
        refusal = self._refusal(arguments)
        without = {name: value for name, value in arguments.items() if name not in _SIZES}
        if refusal is not None and refusal != self._refusal(without):
            raise RequestError(f"{self.interface.name} refuses the request: {refusal}")

    def _refusal(self, arguments: Mapping[str, Any]) -> str | None:
        check = getattr(type(self.pipeline), "check_inputs", None)
        if check is None:
            return None
        _, *parameters = inspect.signature(check).parameters.values()
        values = {**self.interface.parameters, **arguments}
        # Arguments that neither the request nor the call's signature sets are computed later, or deprecated.
        unknown = {each.name: None for each in parameters if each.default is _EMPTY}
        known = {each.name: values[each.name] for each in parameters if values.get(each.name, _EMPTY) is not _EMPTY}
        try:
            self.pipeline.check_inputs(**{**unknown, **known})
        except ValueError as error:
            return str(error)
        except Exception as error:  # any exception: it may need what only a call or a loaded pipeline has
            _logger.debug("%s: check_inputs without weights: %s", self.interface.name, error)
        return None


def _multiple(pipeline: Any) -> int | None:
    """Return the multiple to which the pipeline's image or video processor rounds sizes, patches of the transformer
    included."""
    for name in _IMAGE_PROCESSORS:
        config = getattr(getattr(pipeline, name, None), "config", None)
        factor = None if config is None else config.get("vae_scale_factor")
        if type(factor) is int and factor > 1:
            return factor
    return None


def _resolutions(pipeline: Any) -> tuple[tuple[int, int], ...] | None:
    """Return the (width, height) that a pipeline rounds every other size to, where it lists them."""
    listed = getattr(pipeline, "resolutions", None)
    return tuple((width, height) for width, height in listed) if isinstance(listed, list) and listed else None


def _frame_step(interface: PipelineInterface, pipeline: Any, first: int) -> int | None:
    """Return the temporal factor; None where the class's own number of frames is not `first` plus a multiple of it."""
    count = interface.parameters.get(interface.parameter("num_frames") or "", first)
    steps = (getattr(pipeline, name, None) for name in _TEMPORAL_FACTORS)
    step = next((step for step in steps if type(step) is int and step > 1), None)
    return step if step is None or count is None or (count - first) % step == 0 else None


def _either(size: int, step: int, first: int = 0) -> str:
    """Return `use 32 or 48`: the nearest on either side."""
    below = (size - first) // step * step + first
    return f"use {below} or {below + step}" if below > 0 else f"use {below + step}"
