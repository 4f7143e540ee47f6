"""Combinations: which two features do not go together, why, and what to do instead, in one table.

A row with `found` is asked by `check_combinations`. One with a `place` is refused there, because what it needs stands
in a file, a layer or the running process; it is in the table so that all pairs can be read in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from diffusion_runtime.config import WEIGHT_PATHS, RuntimeConfig
from diffusion_runtime.denoising.chunks import is_rolling
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.request.generation_request import is_set
from diffusion_runtime.request.layers import EXPLICIT_LEVELS
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.request.step_cache_options import DBCacheOptions, MagCacheOptions, TeaCacheOptions
from diffusion_runtime.rules.chosen_request import ChosenRequest

LARGE_PATCHES = "the older frames of this model's history are in larger patches"
_MADE_AT_ONCE = "this model makes a video chunk by chunk, and this is for clips made at once"
_ONE_PROCESS, _NO_DEGREES = "expected one process", "leave out --num-gpus and degrees"
_ONE_SCHEDULE = "the two stages of a generation are no one schedule"

# What a row's message says of the pair that was found, by the names in its template; None where it was not chosen.
Found: TypeAlias = Mapping[str, object] | None


@dataclass(frozen=True)
class Combination:
    """Two features that do not go together. key: what the message begins with, a request field or a runtime option;
    why and instead: the rest of it, templates. found: of what was chosen; place: the module that refuses the pair where
    that is None."""

    first: str
    second: str
    key: str
    why: str
    instead: str
    found: Callable[[Any], Found] | None = None
    place: str = ""

    def message(self, values: Mapping[str, object]) -> str:
        """Return the refusal of a pair that was found."""
        return f"{self.key}: {self.why}; {self.instead}".format_map(values)


def _if(chosen: bool, **values: object) -> Found:
    return values if chosen else None


def _on_causal(name: str) -> Combination:
    return Combination(
        "Causal model",
        f"`{name}`",
        name,
        _MADE_AT_ONCE,
        "leave it out",
        lambda chosen: _if(chosen.settings.sampling.is_causal and is_set(chosen.request, name)),
    )


def _with_history(
    second: str, key: str, why: str, instead: str, found: Callable[[ChosenRequest], Found]
) -> Combination:
    return Combination(
        "Compressed history (FAR)",
        second,
        key,
        why,
        instead,
        lambda chosen: found(chosen) if chosen.has_history else None,
    )


def _weak_image(second: str, key: str, field: str) -> Combination:
    return Combination(
        "Image with a strength below 1",
        second,
        "frame_conditions (--condition-at)",
        "an image with a strength below 1 is denoised with the clip, at one size",
        f"leave out --{key.replace('_', '-')}, or use strength 1",
        lambda chosen: _if(chosen.has_weak_image and getattr(chosen.request, field) is not None),
    )


def _first_chunk_levels(chosen: ChosenRequest) -> Found:
    request = chosen.request
    own, expected = request.first_chunk_steps, request.num_inference_steps
    listed = next((name for name in EXPLICIT_LEVELS if is_set(request, name)), None)
    is_found = chosen.settings.sampling.is_causal and own not in (None, expected) and listed is not None
    return _if(is_found, listed=listed, expected=expected, got=own)


def _rolling_sampler(chosen: ChosenRequest) -> Found:
    return _if(is_rolling(chosen.request) and chosen.request.sampler != "dmd", sampler=chosen.request.sampler)


def _blocks_of_graph(chosen: ChosenRequest) -> Found:
    cache = chosen.step_cache
    if cache is None or not chosen.replays_passes:
        return None
    return _if(isinstance(cache.options, DBCacheOptions | MagCacheOptions | TeaCacheOptions), method=cache.method)


def _branches_of_cache(chosen: ChosenRequest) -> Found:
    cache, terms = chosen.step_cache, chosen.settings.guidance.terms
    if cache is None or terms is None or not terms.further_branches:
        return None
    return _if(cache.decides_per_branch, method=cache.method)


def _noisy_sampler(chosen: ChosenRequest) -> Found:
    others = " or ".join(name for name, declared in SAMPLERS.items() if not declared.adds_noise)
    sampler = chosen.request.sampler
    adds_noise = sampler is not None and SAMPLERS[sampler].adds_noise
    return _if(chosen.is_progressive and adds_noise, sampler=sampler, others=others)


def _calibrated_cache(chosen: ChosenRequest) -> Found:
    cache = chosen.step_cache
    return _if(chosen.is_progressive and cache is not None and isinstance(cache.options, MagCacheOptions))


# Two values of a request, or one and what its model is. In the order in which they are asked.
OF_REQUESTS: tuple[Combination, ...] = (
    Combination(
        "Second stage",
        "Step cache",
        "step_cache",
        "it goes with one stage",
        "leave it out, or --upsampler-path",
        lambda chosen: _if(bool(chosen.settings.second_levels) and chosen.step_cache is not None),
    ),
    Combination(
        "Second stage",
        "Progressive resolution",
        "progressive_resolution",
        "it goes with one stage",
        "leave it out, or --upsampler-path",
        lambda chosen: _if(bool(chosen.settings.second_levels) and chosen.is_progressive),
    ),
    _with_history(
        "Rolling chunks",
        "chunk_schedule",
        f"{LARGE_PATCHES}, and each chunk needs a clean past",
        "use sequential",
        lambda chosen: _if(is_rolling(chosen.request)),
    ),
    _with_history(
        "Positions in the window",
        "positions",
        f"{LARGE_PATCHES}, at their places in the video",
        "expected absolute, got {got}",
        lambda chosen: _if(chosen.request.positions not in (None, "absolute"), got=chosen.request.positions),
    ),
    _with_history(
        "Pages of cached keys",
        "page_size",
        f"{LARGE_PATCHES}, which fill no pages of one size",
        "leave it out",
        lambda chosen: _if(chosen.request.page_size is not None),
    ),
    _with_history(
        "Recaching at once",
        "switch_mode",
        f"{LARGE_PATCHES}, and are encoded chunk by chunk",
        "use recache or keep",
        lambda chosen: _if(chosen.request.switch_mode == "recache_at_once"),
    ),
    Combination(
        "Rolling chunks",
        "Sampler without noise between the steps",
        "chunk_schedule",
        "rolling adds noise between the steps",
        "expected sampler dmd, got {sampler}",
        _rolling_sampler,
    ),
    Combination(
        "Rolling chunks",
        "Two experts",
        "chunk_schedule",
        "rolling has several noise levels in one pass, and this model an expert for each",
        "use sequential",
        lambda chosen: _if(is_rolling(chosen.request) and chosen.has_two_experts),
    ),
    Combination(
        "Explicit noise levels",
        "Steps of the first chunk",
        "first_chunk_steps",
        "{listed} has one noise level for each of {expected} steps of any chunk",
        "expected {expected}, got {got}; leave out {listed}, or use --first-chunk-steps {expected}",
        _first_chunk_levels,
    ),
    _on_causal("step_cache"),
    _on_causal("progressive_resolution"),
    _on_causal("cfg_gate"),
    Combination(
        "Step cache that decides per branch",
        "Spatio-temporal or modality guidance",
        "step_cache",
        "{method} is made for the two branches of classifier-free guidance, and stg_scale or modality_scale run others",
        "use easycache, or leave one of them out",
        _branches_of_cache,
    ),
    _weak_image("Progressive resolution", "progressive_resolution", "progressive_resolution"),
    _weak_image("Second stage", "upsampler_path", "second_stage_sigmas"),
    Combination(
        "Progressive resolution",
        "Image to edit",
        "progressive_resolution",
        "an image to edit has one size, which the smaller latents do not",
        "leave it out",
        lambda chosen: _if(chosen.is_progressive and chosen.edits_images and chosen.request.image_path is not None),
    ),
    Combination(
        "Progressive resolution",
        "Sound",
        "progressive_resolution",
        "latents that hold sound as well cannot be halved",
        "leave it out",
        lambda chosen: _if(chosen.is_progressive and chosen.settings.sampling.geometry.makes_sound),
    ),
    Combination(
        "Progressive resolution",
        "Sampler that adds noise",
        "progressive_resolution",
        "{sampler} cannot change the size",
        "leave it out, or use {others}",
        _noisy_sampler,
    ),
    Combination(
        "Progressive resolution",
        "MagCache",
        "progressive_resolution",
        "magcache is calibrated at one size",
        "use another step_cache, or leave one out",
        _calibrated_cache,
    ),
    Combination(
        "CUDA graphs",
        "Step cache that leaves out blocks",
        "step_cache",
        "{method} leaves out blocks, which a CUDA graph cannot",
        "leave out --cuda-graphs on, or use easycache",
        _blocks_of_graph,
    ),
)


# Two options of a native model. Those without `found` are refused by `refusal`, once the files or the plan are known.
OF_NATIVE_MODELS: tuple[Combination, ...] = (
    Combination(
        "Compilation",
        "Offloaded layers",
        "offload",
        "layers: compiled blocks keep their weights where they are in this version",
        "leave out --compile, or use --offload model",
        lambda config: _if(config.offload == "layers" and config.compile != "off"),
    ),
    Combination(
        "Compilation",
        "Weights that are quantised in their files",
        "compile",
        "{mode}: the transformer's weights are quantised in their files, and such layers run as they are in this "
        "version, as each product is counted",
        "leave out --compile",
        place="loading/compilation.py",
    ),
    Combination(
        "CUDA graphs",
        "Offloading",
        "cuda_graphs",
        "on: weights are offloaded, and a graph would read them where they were when it was captured",
        "use --cuda-graphs auto, or --offload none",
        place="loading/cuda_graphs.py",
    ),
)


def _weight_paths(config: RuntimeConfig) -> Found:
    key = next((key for key in WEIGHT_PATHS if getattr(config, key) is not None), "")
    return _if(bool(key), key=key, flag=f"--{key.replace('_', '-')}")


# An option, and diffusers' own pipeline.
OF_PIPELINES: tuple[Combination, ...] = tuple(
    Combination("diffusers' own pipeline", *row)
    for row in (
        (
            "Decoder of another kind",
            "vae_decode, vae_decoder, vae_tiling",
            "diffusers' own pipeline decodes with its own module",
            "leave out --vae-decode, --vae-decoder and --vae-tiling",
            lambda config: _if(
                config.vae_decode != "exact" or config.vae_decoder is not None or config.vae_tiling != "auto"
            ),
        ),
        (
            "Weights from elsewhere",
            "{key}",
            "diffusers' own pipeline reads the weights of its folder",
            "leave out {flag}, or --backend diffusers",
            _weight_paths,
        ),
        (
            "Second stage",
            "upsampler_path",
            "diffusers' own pipelines have no second stage in one call",
            "leave out --upsampler-path, or --backend diffusers",
            lambda config: _if(config.upsampler_path is not None),
        ),
        (
            "Quantisation",
            "quantization",
            "{mode}: diffusers' own pipeline has its own way to quantise, a quantization_config in the folder",
            "leave out --quantization",
            lambda config: _if(config.quantization != "none", mode=config.quantization),
        ),
        (
            "CUDA graphs",
            "cuda_graphs",
            "on: diffusers' own pipeline runs its model as it is",
            "leave out --cuda-graphs, or use --backend native where the model has a family here",
            lambda config: _if(config.cuda_graphs == "on"),
        ),
        (
            "Offloading",
            "offload, memory_limit",
            "diffusers' own pipeline has its own, by pipeline.pipeline.enable_model_cpu_offload() in Python",
            "leave out --offload and --memory-limit",
            lambda config: _if(config.offload not in ("auto", "none") or config.memory_limit is not None),
        ),
    )
)


def _several_processes(config: RuntimeConfig) -> Found:
    return _if(config.parallel.num_processes > 1)


# An option, and a run that tries several choices of attention.
OF_TUNING: tuple[Combination, ...] = (
    Combination("tune", "Several processes", "tune", _ONE_PROCESS, _NO_DEGREES, _several_processes),
    Combination(
        "tune",
        "Second stage",
        "tune",
        _ONE_SCHEDULE,
        "leave out upsampler_path",
        lambda config: _if(config.upsampler_path is not None),
    ),
    Combination(
        "tune",
        "CUDA graphs",
        "tune",
        "CUDA graphs hold the kernels of one choice",
        "leave out --cuda-graphs on",
        lambda config: _if(config.cuda_graphs == "on"),
    ),
)

# Refused in lower rows of the package, with words of their own.
ELSEWHERE: tuple[Combination, ...] = tuple(
    Combination(first, second, key, why, instead, place=place)
    for place, first, second, key, why, instead in (
        (
            "models/family.py",
            "Tensor parallelism",
            "GGUF file",
            "parallel.tensor_parallel_size",
            "the blocks of a GGUF file are not shared by processes",
            "leave out --tensor-parallel-size, or use a safetensors file",
        ),
        (
            "models/family.py",
            "Tensor parallelism",
            "ControlNet",
            "parallel.tensor_parallel_size",
            "its weights are not shared by processes",
            "leave out --tensor-parallel-size; --ulysses-degree works",
        ),
        (
            "parallel/ring.py",
            "Ring attention",
            "Causal attention",
            "parallel.ring_degree",
            "its blocks would wait for each other",
            "share the sequence with ulysses_degree alone",
        ),
        (
            "streaming/generation_stream.py",
            "Stream without an end",
            "Cache of all frames",
            "stream",
            "a video without an end cannot see all of its frames",
            "give --kv-window",
        ),
        (
            "decoders/video_decoder.py",
            "Stream",
            "Decoder in tiles",
            "stream",
            "a decoder in tiles keeps nothing between two pieces of a clip",
            "leave out --vae-tiling on",
        ),
        ("profiling/calibration.py", "calibrate", "Several processes", "calibrate", _ONE_PROCESS, _NO_DEGREES),
        (
            "profiling/calibration.py",
            "calibrate",
            "Second stage",
            "calibrate",
            _ONE_SCHEDULE,
            "leave out upsampler_path",
        ),
        ("comparison/setting.py", "compare", "Several processes", "--setting", "compare runs one process", _NO_DEGREES),
        (
            "benchmark/random_pipeline.py",
            "Random weights",
            "Offloading",
            "--offload",
            "the random weights stay on the device",
            "leave it out, or give a folder with weights",
        ),
    )
)

TABLE = (*OF_REQUESTS, *OF_NATIVE_MODELS, *OF_PIPELINES, *OF_TUNING, *ELSEWHERE)


def check_combinations(
    rows: Sequence[Combination],
    chosen: ChosenRequest | RuntimeConfig,
    error: type[RequestError] | type[ConfigError] = ConfigError,
) -> None:
    """Raises `error` for the first row of the table that was chosen, with its message."""
    for row in rows:
        values = None if row.found is None else row.found(chosen)
        if values is not None:
            raise error(row.message(values))


def refusal(first: str, second: str, **values: object) -> ConfigError:
    """Return the error of the row of two features of a native model, for the place that refuses them."""
    row = next(row for row in OF_NATIVE_MODELS if (row.first, row.second) == (first, second))
    return ConfigError(row.message(values))
