"""Rules of a native model for requests, from its family, its folder's json and what is published of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from diffusion_runtime.config import LoraConfig, RuntimeConfig
from diffusion_runtime.denoising.step_cache.calibration import model_identity
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.generation import FILE_NAME as GENERATION_FILE
from diffusion_runtime.models.latent_spectrum import read_spectrum
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.models.sampling_presets import check_preset_names, few_steps_of, presets_of, recognise
from diffusion_runtime.models.shift_choice import shift_choice
from diffusion_runtime.models.teacache import read_polynomials
from diffusion_runtime.request.generation_request import OF_SECOND_STAGE, SECOND_STAGE_SAMPLERS
from diffusion_runtime.request.layers import layered
from diffusion_runtime.rules.predicted_length import BOUNDS
from diffusion_runtime.rules.presets import PresetRules
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.rules.step_cache_rules import StepCacheRules
from diffusion_runtime.weights.lora.binding import Lora


def request_rules_of(model: Model[Any, Any], config: RuntimeConfig) -> RequestRules:
    """Return the rules of a model without LoRA files. Defaults, first to last: what is documented of a model chosen by
    name, generation.json, the sampling preset that recognises it, the scheduler's settings, the family's.

    Raises ModelLoadError where generation.json has a preset by the name of one of the model's sampling presets."""
    named, family = model_of_name(config.model_path), model.family.name
    # Files of parts have no duration head, whose bounds are no request's then.
    unused = set(BOUNDS) - model.used_fields
    published = {} if named is None else {key: value for key, value in named.request.items() if key not in unused}
    distilled = recognise(family, model.folder, config.model_path)
    preset = {} if distilled is None else distilled.presets[0].request
    sampling_presets = presets_of(family, config.model_path)
    check_preset_names(model.generation.presets, sampling_presets, model.folder / GENERATION_FILE)
    defaults, scheduler = dict(model.defaults), model.sampling.scheduler
    if scheduler.sampler is None:
        # Another scheduler would give other images: only a request or generation.json may replace it.
        del defaults["sampler"]
    second: dict[str, Any] = {}
    stage = model.family.requests.second_stage
    if config.upsampler_path is not None and stage is not None:
        levels = stage.sigmas if distilled is None else stage.distilled_sigmas
        second = {
            "second_stage_sigmas": levels,
            "second_stage_sampler": SECOND_STAGE_SAMPLERS[0],
            "adain_factor": 0.0,
            "tone_map_compression_ratio": 0.0,
        }
    return RequestRules(
        defaults=layered(defaults, second, scheduler.defaults, preset, model.generation.defaults, published),
        presets={
            **{each.name: each.request for each in sampling_presets},
            **model.generation.presets,
            **({} if named is None else named.presets),
        },
        sampling=model.sampling,
        inputs=model.inputs,
        preset_rules=PresetRules(
            known=sampling_presets,
            shift_choice=shift_choice(
                {**scheduler.defaults, "shift_terminal": scheduler.values.get("shift_terminal")},
                () if distilled is None else distilled.presets,
                model.generation.defaults,
                None if named is None else named.request,
                config.model_path,
            ),
        ),
        step_caches=StepCacheRules(read_polynomials(model.folder), needs_whole_passes=config.cuda_graphs == "on"),
        model_fields=model.used_fields | frozenset(OF_SECOND_STAGE if second else ()),
        spectrum=read_spectrum(model.folder),
    )


def rules_with_loras(
    model: Model[Any, Any],
    config: RuntimeConfig,
    config_sha256: str,
    rules: RequestRules,
    configs: Sequence[LoraConfig],
    loras: tuple[Lora, ...],
) -> RequestRules:
    """Return the rules of a model with these LoRA files: what it was distilled to, and what says which model it is.
    config: what the model is loaded with, except its LoRA files. config_sha256: of its folder's json. loras: `configs`,
    read."""
    family, paths = model.family.name, [file.path for file in model.weights.files]
    few_steps = few_steps_of(family, model.folder, config.model_path, [lora.path for lora in configs])

    def identity() -> dict[str, str]:
        files = [*paths, *filter(None, [config.controlnet_path])]
        ignored = config.quantization_ignored_layers
        return model_identity(family, config_sha256, configs, config.quantization, ignored, files)

    return dataclasses.replace(
        rules,
        loras=loras,
        preset_rules=dataclasses.replace(rules.preset_rules, few_steps=few_steps),
        step_caches=dataclasses.replace(rules.step_caches, identity=identity),
    )
