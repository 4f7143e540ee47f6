"""load_pipeline and inspect_pipeline: the only place where parts are chosen and put together."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.report import LibraryAttention
from diffusion_runtime.attention.select import Decision
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.denoising.scheduler_config import SchedulerConfig, read_scheduler_config
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.hardware import resolve_device, resolve_dtype
from diffusion_runtime.memory.shortage import explain_memory_shortage
from diffusion_runtime.models.checkpoint import resolve_model_folder
from diffusion_runtime.models.generation import generation_settings
from diffusion_runtime.models.interface import DiffusionTransformer, ModelFamily
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.pipeline import Pipeline, RequestRules

OnStage = Callable[[str], None]


@dataclass(frozen=True)
class PlannedAttention:
    """What would run in some layers of a role. when: `always`, or the steps a schedule rule holds for."""

    role: str
    when: str
    layers: tuple[int, ...]
    decision: Decision

    def to_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "when": self.when,
            "layers": list(self.layers),
            "backend": self.decision.backend,
            "options": dict(self.decision.options),
            "source": self.decision.source,
            "reason": self.decision.reason,
            "rejected": [list(pair) for pair in self.decision.rejected],
        }


@dataclass(frozen=True)
class PipelineDescription:
    """What a RuntimeConfig leads to, known without any weight.

    folder: of the model; family: its architecture; device, dtype: where and in what it would run. rules: its request
    defaults, presets and sizes. attention: every choice, by role, layers and steps. libraries: components whose
    attention is their library's own.
    """

    config: RuntimeConfig
    folder: Path
    family: str
    device: str
    dtype: str
    rules: RequestRules
    attention: tuple[PlannedAttention, ...]
    libraries: tuple[LibraryAttention, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a recipe keeps them: `runtime` (RuntimeConfig fields), `model`, `attention`, `version`."""
        plain = dataclasses.replace(self.config, attention=None, attention_override=None)
        levels = {"attention": self.config.attention, "attention_override": self.config.attention_override}
        parsed = {
            name: None if given is None else AttentionConfig.parse(given).to_dict() for name, given in levels.items()
        }
        return {
            "version": str(importlib.import_module("diffusion_runtime").__version__),
            "runtime": {**dataclasses.asdict(plain), **parsed},
            "model": {
                "path": self.config.model_path,
                "family": self.family,
                "config_sha256": _config_digest(self.folder),
                "device": self.device,
                "dtype": self.dtype,
            },
            "attention": [planned.to_dict() for planned in self.attention],
        }


@dataclass(frozen=True)
class _Prepared:
    """A model whose attention is settled and whose weights are still on disk. transformer: on the meta device."""

    description: PipelineDescription
    family: ModelFamily
    transformer: DiffusionTransformer
    device: torch.device
    dtype: torch.dtype


def load_pipeline(
    model: str | RuntimeConfig = "shapes",
    *,
    attention: Any = None,
    attention_override: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    on_stage: OnStage | None = None,
) -> Pipeline:
    """Load a model: `shapes` (embedded), a diffusers folder or a hub id; or all that a RuntimeConfig says.

    attention: what the config level says, in any form AttentionConfig.parse takes; attention_override: the same one
    level higher, as the command line does. on_stage: called with a phrase before each part is loaded.

    Raises, before any weight is read, BackendUnavailableError for an attention choice that cannot run here and
    ConfigError for a value that is wrong; then ModelLoadError for a folder that cannot be used and DeviceMemoryError
    when it does not fit.
    """
    keywords = {
        "attention": attention,
        "attention_override": attention_override,
        "device": device,
        "dtype": dtype,
        "backend": backend,
    }
    config = _runtime_config(model, keywords)
    say: OnStage = on_stage if on_stage is not None else lambda _: None
    say("choosing attention")
    prepared = _prepare(config)
    description, family = prepared.description, prepared.family
    folder = resolve_model_folder(config.model_path)
    advice = "A dtype of bfloat16 needs half of what float32 does; so does a smaller model"
    with explain_memory_shortage("loading", advice):
        say("loading the text encoder")
        text_encoder = family.load_text_encoder(folder, prepared.device, prepared.dtype)
        say("loading the transformer")
        transformer = family.load_transformer(folder, prepared.transformer, prepared.device, prepared.dtype)
        say("loading the decoder")
        decoder = family.load_decoder(folder, prepared.device, prepared.dtype)
    return Pipeline(
        text_encoder=text_encoder,
        transformer=transformer,
        decoder=decoder,
        rules=description.rules,
        load_image_conditioner=lambda: family.load_image_conditioner(folder, prepared.device, prepared.dtype),
        device=prepared.device,
        dtype=prepared.dtype,
        recipe=description.to_dict(),
    )


def inspect_pipeline(config: RuntimeConfig) -> PipelineDescription:
    """What `load_pipeline` would put together, from the folder's json alone: no weight is read or downloaded.

    Raises what `load_pipeline` raises before it reads weights.
    """
    return _prepare(config).description


def _runtime_config(model: str | RuntimeConfig, keywords: Mapping[str, Any]) -> RuntimeConfig:
    if not isinstance(model, RuntimeConfig):
        return RuntimeConfig(model_path=model, **keywords)
    given = [name for name, value in keywords.items() if value not in (None, "auto")]
    if given:
        raise ConfigError(
            f"load_pipeline: {', '.join(given)}: put it into the RuntimeConfig, or give a model path instead"
        )
    return model


def _prepare(config: RuntimeConfig) -> _Prepared:
    folder = resolve_model_folder(config.model_path, weights=False)
    family = family_for_folder(folder)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    policy = AttentionPolicy(
        cli=AttentionConfig.parse(config.attention_override),
        config=AttentionConfig.parse(config.attention),
        device=str(device),
        dtype=dtype,
    )
    # Every attention layer settles its backend when it is made, so a choice that cannot run ends here.
    transformer = family.build_transformer(folder, policy)
    description = PipelineDescription(
        config=config,
        folder=folder,
        family=family.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        rules=_request_rules(folder, family, read_scheduler_config(folder), tuple(transformer.attention_layers())),
        attention=_planned_attention(transformer),
        libraries=(
            LibraryAttention("text_encoder", "transformers", "its own choice"),
            LibraryAttention("vae", "diffusers", "its own choice"),
        ),
    )
    return _Prepared(description, family, transformer, device, dtype)


def _request_rules(
    folder: Path, family: ModelFamily, scheduler: SchedulerConfig, attention_layers: tuple[AttentionLayer, ...]
) -> RequestRules:
    """generation.json over the scheduler's own settings over the family's defaults."""
    settings = generation_settings(folder)
    defaults = dict(family.request_defaults(folder))
    if scheduler.sampler is None:
        # Another scheduler would make other pictures: only a request or generation.json may put one in its place.
        del defaults["sampler"]
    return RequestRules(
        defaults={**defaults, **scheduler.defaults, **settings.defaults},
        presets=settings.presets,
        geometry=family.geometry(folder),
        scheduler=scheduler,
        schedule=family.schedule(folder, scheduler),
        embeds_guidance=family.embeds_guidance(folder),
        takes_image=family.takes_image(folder),
        attention_layers=attention_layers,
    )


def _planned_attention(transformer: DiffusionTransformer) -> tuple[PlannedAttention, ...]:
    """Equal decisions of one role as one row, in the order in which layers run."""
    rows: list[PlannedAttention] = []
    for layer in transformer.attention_layers():
        for when, decision in layer.decisions:
            for place, row in enumerate(rows):
                if (row.role, row.when, row.decision) == (layer.layer.role, when, decision):
                    rows[place] = dataclasses.replace(row, layers=(*row.layers, layer.layer.index))
                    break
            else:
                rows.append(PlannedAttention(layer.layer.role, when, (layer.layer.index,), decision))
    return tuple(rows)


def _config_digest(folder: Path) -> str:
    """SHA-256 over the json files of the model and its parts: folders that differ in it are not the same model."""
    digest = hashlib.sha256()
    whole = [folder / "model_index.json", folder / "generation.json"]
    for path in sorted([*whole, *folder.glob("[!.]*/*.json")]):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
