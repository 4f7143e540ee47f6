"""Features: what a request or a runtime has chosen, by the names that combinations.yaml has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.denoising.chunks import is_rolling
from diffusion_runtime.request.generation_request import GenerationRequest, is_set
from diffusion_runtime.request.layers import EXPLICIT_LEVELS
from diffusion_runtime.request.progressive_options import ProgressiveSettings
from diffusion_runtime.request.samplers import SAMPLERS, RegisteredSampler
from diffusion_runtime.request.step_cache_options import DBCacheOptions, MagCacheOptions, TeaCacheOptions
from diffusion_runtime.request.strength import steps_left_out
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.step_cache_rules import step_cache_of

LARGE_PATCHES = "the older frames of this model's history are in larger patches"
_OF_BLOCKS = (DBCacheOptions, MagCacheOptions, TeaCacheOptions)
_OPTION_DEFAULTS = {field.name: field.default for field in fields(RuntimeConfig)}


@dataclass(frozen=True)
class ChosenRequest:
    """A resolved request and the facts about its model that pairs ask for. edits_images: the model takes images to
    edit; takes_masks: masks as a condition. replays_passes: --cuda-graphs on. has_two_experts: one for high and one for
    low noise."""

    settings: BatchSettings
    edits_images: bool = False
    takes_masks: bool = False
    replays_passes: bool = False
    has_two_experts: bool = False

    @cached_property
    def features(self) -> Mapping[str, Callable[[], bool]]:
        """Features by name: functions that find whether each is chosen."""
        settings, request, sampling = self.settings, self.settings.shared, self.settings.sampling
        cache, terms = step_cache_of(request), settings.guidance.terms
        is_in_parts = settings.windows is not None or settings.segments.is_apart
        options, sampler = None if cache is None else cache.options, SAMPLERS[str(request.sampler)]
        other_steps = request.first_chunk_steps not in (None, request.num_inference_steps) and not is_rolling(request)
        return {
            "second stage": lambda: bool(settings.second_levels),
            "step cache": lambda: cache is not None,
            "step cache that decides per branch": lambda: cache is not None and cache.decides_per_branch,
            "step cache that leaves out blocks": lambda: isinstance(options, _OF_BLOCKS),
            "magcache": lambda: isinstance(options, MagCacheOptions),
            "progressive resolution": lambda: _is_progressive(request),
            "causal model": lambda: sampling.is_causal,
            "video in segments": lambda: settings.segments.is_apart,
            "segments of images": lambda: sampling.continues_images and settings.segments.is_apart,
            "no first image": lambda: request.image_path is None,
            "history in large patches": lambda: sampling.history is not None,
            "context windows": lambda: settings.windows is not None,
            "clip of one prompt": lambda: not (sampling.is_causal or is_in_parts),
            "given images": lambda: settings.has_condition,
            "RIFLEx": lambda: request.riflex == "on",
            "rolling chunks": lambda: is_rolling(request),
            "positions in the window": lambda: request.positions not in (None, "absolute"),
            "recaching at once": lambda: request.switch_mode == "recache_at_once",
            "another sampler than dmd": lambda: request.sampler != "dmd",
            "sampler that cannot change the size": lambda: not _changes_size(sampler),
            "sampler of several predictions a step": lambda: sampler.num_predictions_per_step > 1,
            "two experts": lambda: self.has_two_experts,
            "explicit noise levels": lambda: any(is_set(request, name) for name in EXPLICIT_LEVELS),
            "other steps of the first chunk": lambda: other_steps,
            "spatio-temporal or modality guidance": lambda: terms is not None and bool(terms.further_branches),
            "guidance of some steps": lambda: settings.guidance.is_of_some_steps,
            "skip-layer guidance": lambda: settings.guidance.skip is not None,
            "image with a strength below 1": lambda: any(s != 1 for _, _, s in request.frame_conditions or ()),
            "ComfyUI's noise": lambda: request.noise == "comfyui",
            "image behind the clip": lambda: _has_image_behind(request, sampling.geometry),
            "sampler dpmpp_sde": lambda: request.sampler == "dpmpp_sde",
            "image to edit": lambda: self.edits_images and request.image_path is not None,
            "mask of the model's own": lambda: self.takes_masks and request.mask_path is not None,
            "frames before the clip": lambda: _num_frames_before(settings) > 0,
            "part of the steps": lambda: steps_left_out(request) > 0,
            "sound": lambda: sampling.geometry.makes_sound,
            "CUDA graphs": lambda: self.replays_passes,
        }

    def is_set(self, name: str) -> bool:
        """Return whether the request says anything of a field."""
        return is_set(self.settings.shared, name)

    def values(self) -> dict[str, Any]:
        """Return what the refusals name."""
        request = self.settings.shared
        return {
            "request": request,
            "cache": step_cache_of(request),
            "history": LARGE_PATCHES,
            "levels": next((name for name in EXPLICIT_LEVELS if is_set(request, name)), None),
            "predictions": SAMPLERS[str(request.sampler)].num_predictions_per_step,
            "of_one_prediction": ", ".join(
                name for name, each in SAMPLERS.items() if each.num_predictions_per_step == 1
            ),
            "of_any_size": " or ".join(name for name, each in SAMPLERS.items() if _changes_size(each)),
        }


@dataclass(frozen=True)
class ChosenRuntime:
    """The options that a model is to be loaded with."""

    config: RuntimeConfig

    @cached_property
    def features(self) -> Mapping[str, Callable[[], bool]]:
        """Features by name: functions that find whether each is chosen."""
        config = self.config
        return {
            "offloaded layers": lambda: config.offload == "layers",
            "CUDA graphs": lambda: config.cuda_graphs == "on",
            "several processes": lambda: config.parallel.num_processes > 1,
            # Asked for these alone.
            "native blocks": lambda: True,
            "tune": lambda: True,
        }

    def is_set(self, name: str) -> bool:
        """Return whether an option differs from its default."""
        return bool(getattr(self.config, name) != _OPTION_DEFAULTS[name])

    def values(self) -> dict[str, Any]:
        """Return what the refusals name."""
        return {"config": self.config}


def _num_frames_before(settings: BatchSettings) -> int:
    """Return the latent frames before those of the clip: of a model trained so, or of its reference images."""
    control = settings.sampling.control
    references = 0 if control is None else control.num_references(settings.shared)
    return settings.sampling.geometry.num_latents_before + references


def _has_image_behind(request: GenerationRequest, geometry: LatentGeometry) -> bool:
    """Return whether an image at another frame than the first has tokens of its own behind the clip's."""
    at_end = geometry.appends_last_image and request.last_image_path is not None
    return at_end or any(frame > 0 for frame, _, _ in request.frame_conditions or ())


def _is_progressive(request: GenerationRequest) -> bool:
    text = request.progressive_resolution
    return text is not None and ProgressiveSettings.parse(text) is not None


def _changes_size(sampler: RegisteredSampler) -> bool:
    """Return whether a sampler goes on at another size between two steps: it is a schedule of single predictions."""
    return not sampler.adds_noise and sampler.num_predictions_per_step == 1
