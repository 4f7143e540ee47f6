"""Settings of a command: flags, config file, recipe and presets resolved by precedence.

Highest first: flags, `--set`, a row of the prompt file, `--config` (a preset of its own that `--preset` picks, then its
request), the recipe of `--from`, a preset of the model's, the model's defaults. The last two are the pipeline's to fill
in (`resolve`).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.cli.attention_flags import AttentionFlags, overlay_attention
from diffusion_runtime.cli.config_file import FileConfig, read_config
from diffusion_runtime.cli.flag_syntax import WEIGHT_SUFFIXES
from diffusion_runtime.cli.prompt_rows import PromptRow
from diffusion_runtime.cli.prompts import MAX_ITEMS, match_negative_prompts, parse_seeds
from diffusion_runtime.config import ParallelConfig, RuntimeConfig, runtime_options
from diffusion_runtime.errors import ConfigError, OutputError, RequestError, UsageError, shown
from diffusion_runtime.media.formats import LATENTS_SUFFIX
from diffusion_runtime.request.generation_request import (
    INPUT_FIELDS,
    OF_SECOND_STAGE,
    REQUEST_FIELDS,
    GenerationRequest,
)
from diffusion_runtime.request.given_images import fetched_images
from diffusion_runtime.request.layers import layered
from diffusion_runtime.untrusted.printable import printable

_RUNTIME_KEYS = tuple(runtime_options())
_REPEATED_RUNTIME = tuple(name for name, option in runtime_options().items() if option.repeated_by_from)


@dataclass(frozen=True)
class Flags:
    """The flags of `generate` about what to make and where, as they were typed; None or empty means not given.

    request, runtime: values by field name; prompts, negative_prompts, seeds: every one that was given. allow_url: hosts
    that images may be fetched from. workflow_file: of ComfyUI, below the config file. begins, allow_changes: of
    `finish`.
    """

    prompts: Sequence[str | PromptRow] = ()
    negative_prompts: Sequence[str] = ()
    seeds: Sequence[str] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    attention: AttentionFlags = field(default_factory=AttentionFlags)
    config: str | None = None
    settings: Sequence[str] = ()
    repeat: str | None = None
    preset: str | None = None
    allow_url: Sequence[str] = ()
    workflow_file: str | None = None
    begins: tuple[Path, ...] = ()
    allow_changes: bool = False


@dataclass(frozen=True)
class Settings:
    """requests: one per prompt and seed, prompts outermost. preset: the name that was given, None for none.

    file_presets: names that the config file defines; the values of the chosen one are in `requests` already.
    repeated: the recipe of --from. notes: remarks for standard error. begins: files of latents that the requests go on
    from, one each; empty where they begin anew.
    """

    runtime: RuntimeConfig
    requests: tuple[GenerationRequest, ...]
    preset: str | None = None
    file_presets: tuple[str, ...] = ()
    repeated: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    begins: tuple[Path, ...] = ()
    allow_changes: bool = False

    def on_processes(self, num_processes: int) -> Settings:
        """The same where so many processes run already. Raises ConfigError when others were asked for."""
        parallel = self.runtime.parallel.with_world(num_processes)
        return dataclasses.replace(self, runtime=dataclasses.replace(self.runtime, parallel=parallel))

    def preset_for(self, model_presets: Iterable[str]) -> str | None:
        """The preset that is the model's to apply, None when there is none, or when the config file defines one of that
        name. Raises ConfigError for an unknown name."""
        if self.preset in self.file_presets:
            return None
        if self.preset is not None and self.preset not in model_presets:
            from diffusion_runtime.models.sampling_presets import unknown_preset

            raise ConfigError(unknown_preset(self.preset, [*model_presets, *self.file_presets]))
        return self.preset


def resolve_settings(flags: Flags, any_prompt: str | None = None) -> Settings:
    """any_prompt: that stands where there is none, for verbs to which prompts are alike.

    Raises ConfigError, RequestError, OutputError (a --from file without a recipe).
    """
    if flags.begins:
        return _settings_of_latents(flags)
    of_nodes, settings = _node_values(flags)
    config = read_config(flags.config, settings)
    workflow_notes: tuple[str, ...] = ()
    if flags.workflow_file is not None:
        config, workflow_notes = _with_workflow(config, flags, of_nodes)
    recipe = {} if flags.repeat is None else _read_recipe(flags.repeat)
    runtime = _build_runtime(flags, config, recipe)
    if runtime.model_path.endswith(WEIGHT_SUFFIXES):
        # Imports torch, which the settings of a model by its name do not need.
        from diffusion_runtime.models.found_files import with_found_files

        runtime = with_found_files(runtime)
    recipe_request = _without_none(recipe.get("request") or {})
    if runtime.upsampler_path is None:
        # Those of a second stage that `--upsampler-path none` leaves out.
        for name in OF_SECOND_STAGE:
            recipe_request.pop(name, None)
    if runtime.interpolation_path is None:
        # Likewise `--interpolation-path none`.
        recipe_request.pop("interpolate", None)
    preset_values = config.presets.get(flags.preset, {}) if flags.preset is not None else {}
    requests, notes = _build_requests(flags, config, (recipe_request, config.request, preset_values), any_prompt)
    continued = recipe.get("continued")
    # Of latents, `finish` goes on with what made their steps.
    if isinstance(continued, Mapping) and flags.repeat is not None and not flags.repeat.endswith(LATENTS_SUFFIX):
        made_with = continued.get("made_with")
        names = ", ".join(map(printable, made_with)) if isinstance(made_with, Mapping) else "other values"
        notes.append(
            f"--from {flags.repeat}: its first {shown(continued.get('after'))} steps were made with other values "
            f"({names}); all are made with the later ones here, and the result will differ"
        )
    if flags.preset is not None and flags.preset not in config.presets and recipe_request:
        notes.append(f"--preset {flags.preset}: the recipe of {flags.repeat} sets its values already and comes first")
    shipped = None if flags.preset in config.presets else lora_of_preset(flags.preset, runtime)
    if shipped is not None:
        if recipe_request:
            raise ConfigError(
                f"--preset {flags.preset}: it is for the LoRA {shipped}, and the recipe of {flags.repeat}, which comes "
                "first, for the model without; give --prompt and --seed instead of --from, or leave the preset out"
            )
        runtime = dataclasses.replace(runtime, lora=(*runtime.lora, shipped))
    return Settings(
        runtime=runtime,
        requests=requests,
        preset=flags.preset,
        file_presets=tuple(config.presets),
        repeated=recipe,
        notes=(*workflow_notes, *notes),
    )


def _settings_of_latents(flags: Flags) -> Settings:
    """Return the settings of generations that go on from files of latents, each repeated to its end. Raises ConfigError
    for files of several models or runtimes."""
    # A file may be a stranger's: the model and LoRA that it names are those of this machine, unless the user names one.
    given = flags.runtime if _without_none(flags.runtime).get("model_path") else {**flags.runtime, "offline": True}
    flags = dataclasses.replace(flags, runtime=given)
    found = [resolve_settings(dataclasses.replace(flags, begins=(), repeat=str(path))) for path in flags.begins]
    first = found[0]
    for path, each in zip(flags.begins, found, strict=True):
        if each.runtime != first.runtime:
            raise ConfigError(
                f"finish: {flags.begins[0]} and {path} were made by other models, or with other options of loading; "
                "finish them apart"
            )
    requests = tuple(request for each in found for request in each.requests)
    recorded = (first.repeated.get("runtime") or {}).get("offline")
    if isinstance(recorded, bool) and not _asks_hub(first.runtime):
        # Nothing of it is anywhere else: the recipe is that of a whole run.
        first = dataclasses.replace(first, runtime=dataclasses.replace(first.runtime, offline=recorded))
    return dataclasses.replace(first, requests=requests, begins=flags.begins, allow_changes=flags.allow_changes)


def _asks_hub(runtime: RuntimeConfig) -> bool:
    """Return whether a model, or a LoRA of it, may be looked for on the hub."""
    from diffusion_runtime.models.published import embedded_names

    is_here = runtime.model_path in embedded_names() or os.path.isdir(runtime.model_path)
    return not is_here or any(not os.path.exists(lora.path) for lora in runtime.lora)


def _node_values(flags: Flags) -> tuple[list[str], list[str]]:
    """Return the texts of `--set` that are of a workflow's nodes, and the others."""
    if flags.workflow_file is None:
        return [], list(flags.settings)
    from diffusion_runtime.workflows.settings import is_node_value

    of_nodes = [each for each in flags.settings if is_node_value(each)]
    return of_nodes, [each for each in flags.settings if each not in of_nodes]


def _with_workflow(config: FileConfig, flags: Flags, of_nodes: Sequence[str]) -> tuple[FileConfig, tuple[str, ...]]:
    """Return a config file's values above those of a workflow, and remarks."""
    from diffusion_runtime.workflows.settings import workflow_settings

    assert flags.workflow_file is not None
    runtime = {**config.runtime, **_without_none(flags.runtime)}
    prompt = next(iter(flags.prompts), None)
    found = workflow_settings(
        flags.workflow_file,
        of_nodes,
        runtime.get("models_dir") or (),
        runtime.get("model_path"),
        prompt.prompt if isinstance(prompt, PromptRow) else prompt,
    )
    merged = dataclasses.replace(
        config,
        runtime={**found.runtime, **config.runtime},
        request=layered(found.request, config.request),
    )
    return merged, tuple(f"workflow: {note}" for note in found.notes)


def _build_requests(
    flags: Flags, config: FileConfig, files: tuple[Mapping[str, Any], ...], any_prompt: str | None
) -> tuple[tuple[GenerationRequest, ...], list[str]]:
    """One request per prompt and seed, and remarks. files: request values of the recipe and of the config file, where
    later ones win; the values of a prompt's row stand between them and what is typed. any_prompt: see
    resolve_settings."""
    typed = (config.settings, _without_none(flags.request))
    values = layered(*files, *typed)
    configured = {**config.request, **config.settings}
    prompts = list(flags.prompts) or configured.get("prompt") or _as_list(files[0].get("prompt"))
    typed_seeds = parse_seeds(flags.seeds) or config.settings.get("seed") or []
    seeds = typed_seeds or configured.get("seed") or _as_list(files[0].get("seed")) or [0]
    if not prompts and any_prompt is not None:
        prompts = [any_prompt]
    if not prompts:
        raise RequestError(
            'prompt: there is none; give it in quotes, as in generate "a fox running left in the snow", or use '
            "--prompt, --prompt-file or --from"
        )
    negative_prompts = match_negative_prompts(
        len(prompts), flags.negative_prompts or _as_list(values.pop("negative_prompt", None))
    )
    rows = [prompt if isinstance(prompt, PromptRow) else PromptRow(prompt) for prompt in prompts]
    seeds_of = [typed_seeds or row.seeds or seeds for row in rows]
    num_requests = sum(map(len, seeds_of))
    if num_requests > MAX_ITEMS:
        raise RequestError(
            f"{len(rows)} prompts with their seeds are more than {MAX_ITEMS} generations: {num_requests}; make them in "
            "parts"
        )
    own_negative = not flags.negative_prompts and "negative_prompt" not in config.settings
    requests = []
    for row, row_seeds, negative_prompt in zip(rows, seeds_of, negative_prompts, strict=True):
        own = {**layered(*files, row.values, *typed), "prompt": row.prompt}
        if not (own_negative and "negative_prompt" in row.values):
            own["negative_prompt"] = negative_prompt
        requests += [_build_request({**own, "seed": seed}, flags, row.where) for seed in row_seeds]
    given = layered(*typed, {"seed": typed_seeds, "negative_prompt": flags.negative_prompts})
    return tuple(requests), _replaced_values(given, rows)


def lora_of_preset(preset: str | None, runtime: RuntimeConfig) -> str | None:
    """The shipped LoRA that a preset of the model brings along; None for none, and where it is given already."""
    if preset is None or runtime.backend == "diffusers":
        return None
    from diffusion_runtime.models.sampling_presets import shipped_lora_of
    from diffusion_runtime.weights.lora.shipped import lora_path

    name = shipped_lora_of(preset, runtime.model_path)
    if name is None:
        return None
    folder = lora_path(name)
    given = [lora_path(lora.path).absolute() for lora in runtime.lora]
    return None if any(path in (folder, *folder.iterdir()) for path in given) else name


def _replaced_values(typed: Mapping[str, Any], rows: Sequence[PromptRow]) -> list[str]:
    """A remark for each field that is given on the command line and by rows of the prompt file."""
    notes = []
    for name in (name for name, value in typed.items() if value not in ((), [], None)):
        replaced = [row for row in rows if (row.seeds if name == "seed" else name in row.values)]
        if replaced:
            notes.append(
                f"{name}: the command line's value replaces that of {len(replaced)} of {len(rows)} prompts (the first "
                f"is {replaced[0].where})"
            )
    return notes


def _build_request(values: Mapping[str, Any], flags: Flags, where: str = "") -> GenerationRequest:
    """Return the request of these values, with the images that they name by https: addresses."""
    repeat = flags.repeat
    try:
        given = {name: REQUEST_FIELDS[name].check.read(values[name]) for name in INPUT_FIELDS if values.get(name)}
        fetched = {name: fetched_images(name, value, flags.allow_url) for name, value in given.items()}
        return GenerationRequest.from_dict({**values, **fetched})
    except UsageError as error:
        if where:
            raise RequestError(f"{where}: {error}") from error
        if repeat is None:
            raise
        raise RequestError(f"{error} (with the recipe of {repeat})") from error


def _build_runtime(flags: Flags, config: FileConfig, recipe: Mapping[str, Any]) -> RuntimeConfig:
    recorded = recipe.get("runtime") or {}
    for key in recorded:
        if key not in _RUNTIME_KEYS:
            raise ConfigError(
                f"--from: the recipe's runtime has a key that is unknown here: {shown(key)}; it is of version "
                f"{shown(recipe.get('version'))}; repeat it with that version, or take the key out"
            )
    values = {key: recorded[key] for key in _REPEATED_RUNTIME if recorded.get(key) is not None}
    # The recorded flag may be `auto`; what it led to is what has to be repeated.
    if (dtype := (recipe.get("model") or {}).get("dtype")) is not None:
        values["dtype"] = dtype
    for planned in _as_list(recipe.get("attention")):
        # An environment variable is not in the recipe; the default that it set is.
        if isinstance(planned, Mapping) and planned.get("source") == "environment":
            values["attention"] = overlay_attention(
                values.get("attention"), {"default.backend": planned.get("backend")}
            )
    chosen = {**config.runtime, **_without_none(flags.runtime)}
    if "model_path" in chosen:
        # The recorded revision is the recorded model's.
        values.pop("revision", None)
    if "quantization" in chosen:
        # The recorded layers are left out of the recorded quantization, and of no other.
        values.pop("quantization_ignored_layers", None)
    values.update(chosen)
    parallel = {**_parallel_values(values.pop("parallel", {})), **_without_none(flags.parallel)}
    if parallel:
        values["parallel"] = parallel
    attention = flags.attention.collect()
    if attention is not None:
        values["attention_override"] = attention
    return RuntimeConfig.from_dict(values)


def _parallel_values(value: Any) -> dict[str, Any]:
    return dataclasses.asdict(value) if isinstance(value, ParallelConfig) else dict(value)


def _read_recipe(path: str) -> Mapping[str, Any]:
    """A recipe whose sections are mappings; what stands in them is checked like any other input."""
    if path.endswith(LATENTS_SUFFIX):
        # Imports torch, as tensors are in the same file.
        from diffusion_runtime.generation.saved_latents import read_head

        recipe: Mapping[str, Any] = read_head(Path(path))[0]
        request = recipe.get("request")
        if isinstance(request, Mapping):
            # They are those of the whole, wherever it was left.
            recipe = {**recipe, "request": {**request, "stop_after_step": None}}
    else:
        from diffusion_runtime.media import read_recipe

        recipe = read_recipe(path, "--from")
    for section in ("request", "runtime", "model"):
        if not isinstance(recipe.get(section, {}), Mapping):
            raise OutputError(f"{path}: its recipe's {section} is not a mapping; the file is damaged")
    return recipe


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
