"""Served model: one loaded pipeline, asked for checks of requests, explanations and batches, each with an attention and
LoRA files of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion_runtime.attention.catalogue import list_backends, option_values
from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.config import LoraConfig, RuntimeConfig
from diffusion_runtime.core.progress import OnProgress
from diffusion_runtime.errors import DeviceMemoryError, RequestError, nearest, shown
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.interface import OnStage, Prepared
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.memory.machine_memory import free_in_machine, peak_in_machine
from diffusion_runtime.memory.plan import MemoryPlan
from diffusion_runtime.models.lora_sources import located
from diffusion_runtime.models.sampling_presets import shipped_lora_of
from diffusion_runtime.parallel.world import World
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.profiling.instruments import attention_choices
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.serving.previews import OnPreview, Previews
from diffusion_runtime.streaming.segment_stream import AnyStream
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.json_text import parse_json

# Combinations of attention and LoRA files whose decisions are kept.
_MAX_VARIANTS = 16
# Options that name a file of this machine, in the configs of attention backends.
_FILE_OPTIONS = ("file", "path")
_FILE_ENDINGS = (".json", ".yaml", ".yml")
# Steps of a warm-up: the first one, and one that uses what it left.
_WARM_UP_STEPS = 2
# Sides of a small one, in multiples of what they may be.
_WARM_UP_SIDES = 4


@dataclasses.dataclass(frozen=True)
class Choice:
    """The part of a request that is chosen when a model is loaded. attention: in any form that AttentionConfig.parse
    takes, as JSON; loras: name and scale of each."""

    attention: str | None = None
    loras: tuple[tuple[str, float], ...] = ()
    preset: str | None = None

    @classmethod
    def of(cls, work: Mapping[str, Any]) -> Choice:
        attention = work.get("attention")
        loras = tuple((str(each["name"]), float(each["scale"])) for each in work.get("loras") or ())
        return cls(None if attention is None else json.dumps(attention, sort_keys=True), loras, work.get("preset"))


class ServedModel:
    """A model as a server uses it. config: what it is loaded with. loras: the files that requests may name. preview: as
    of Previews. world: the processes that run it together, each of which calls `load` and `generate` alike; the other
    methods are of rank 0."""

    def __init__(
        self,
        config: RuntimeConfig,
        loras: Mapping[str, LoraConfig],
        world: World | None = None,
        preview: str = "auto",
    ) -> None:
        # Located once: a request asks the hub nothing.
        self._config = dataclasses.replace(config, lora=located(config.lora, offline=config.offline))
        self._preview = preview
        self._loras = dict(zip(loras, located(loras.values(), offline=config.offline), strict=True))
        self._world = world
        self._prepared = functools.lru_cache(maxsize=_MAX_VARIANTS)(self._prepare)
        self._pipeline: GenerationPipeline | None = None
        self._merged = self._config.lora
        self._recipe: Mapping[str, Any] = {}

    def load(self, on_stage: OnStage | None = None) -> None:
        """Read the weights. Raises what `load_pipeline` raises."""
        prepared = prepare(self._config, self._world)
        self._previews = Previews(self._preview, prepared)
        self._pipeline = prepared.load(on_stage)
        self._recipe = self._pipeline.recipe

    @property
    def pipeline(self) -> GenerationPipeline:
        assert self._pipeline is not None, "load comes first"
        return self._pipeline

    def warm_up_request(self) -> dict[str, Any]:
        """Return a request of the default size, with as few steps as its sampler takes; of a small size where none is
        compiled, captured or measured for its own. Raises RequestError for a model that needs an image."""
        prepared = self.prepared(Choice())
        rules, config = prepared.rules, self._config
        default = GenerationRequest("moving left", seed=0, num_inference_steps=_WARM_UP_STEPS)
        # The last one for a model with noise levels of its own for each step.
        wanted = [default, dataclasses.replace(default, num_inference_steps=None)]
        is_chosen = config.attention is not None or config.attention_override is not None
        if prepared.description.device == "cpu" and config.compile == "off" and not is_chosen:
            wanted[:0] = [dataclasses.replace(default, **small) for small in self._small_sizes(rules)]
        for request in wanted[:-1]:
            with contextlib.suppress(RequestError):
                return rules.resolve(request).to_dict()
        return rules.resolve(wanted[-1]).to_dict()

    @staticmethod
    def _small_sizes(rules: Any) -> Iterator[dict[str, Any]]:
        if isinstance(rules, RequestRules):
            side, frames = _size_steps(rules)
            num_frames = 1 + frames if rules.sampling.geometry.temporal_factor > 1 else 1
            yield {"height": _WARM_UP_SIDES * side, "width": _WARM_UP_SIDES * side, "num_frames": num_frames}

    def check(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Resolve the requests of a job, and decide its attention and its memory without running anything.

        Raises RequestError, ConfigError, BackendUnavailableError and DeviceMemoryError for what cannot run.
        """
        prepared = self.prepared(Choice.of(work))
        requests = self._resolved(prepared, work)
        _check_memory(prepared.planned_for(requests).description.memory)
        keys = [prepared.rules.batch_key(request) for request in requests]
        choice = Choice.of(work)
        key = repr((keys[0], choice.attention, choice.loras, self._shipped(choice)))
        remarks = prepared.rules.unused(requests[0]) if isinstance(prepared.rules, RequestRules) else ()
        return {"requests": [request.to_dict() for request in requests], "key": key, "remarks": list(remarks)}

    def explain(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a request would run and cost. Raises what `check` raises."""
        prepared = self.prepared(Choice.of(work))
        requests = self._resolved(prepared, work)
        return explain(prepared.planned_for(requests), requests[0]).to_dict()

    def card(self) -> dict[str, Any]:
        """Return what a form for requests needs: sizes, defaults, presets, attention."""
        prepared = self.prepared(Choice())
        description, rules = prepared.description, prepared.rules
        card = {
            "family": description.family,
            "device": description.device,
            "dtype": description.dtype,
            "num_gpus": description.degrees.num_processes,
            "defaults": dict(rules.defaults),
            "presets": {name: dict(values) for name, values in rules.presets.items()},
            "makes_sound": rules.makes_sound,
            "previews": self._previews.method,
            "no_previews": self._previews.reason or None,
            "loras": sorted(self._loras),
            "attention_roles": sorted({layer.layer.role for layer in prepared.layers}),
            "backends": [
                {
                    "name": each.name,
                    "usable": each.usable,
                    "reason": each.reason,
                    "fix": each.fix,
                    "summary": each.summary,
                    "categories": sorted(each.capability.categories),
                    "options": [
                        option for option in option_values(each.name) if not option["name"].endswith(_FILE_OPTIONS)
                    ],
                }
                for each in list_backends(description.device)
            ],
        }
        if isinstance(rules, RequestRules):
            geometry, images = rules.sampling.geometry, rules.inputs.images
            multiple, frames = _size_steps(rules)
            is_video = geometry.temporal_factor > 1
            kind = "V" if is_video else "I"
            takes = bool(images) or rules.inputs.references is not None
            card |= {
                "size_multiple": multiple,
                "frames_rule": f"1+{frames}k" if is_video else "1",
                "takes_image": takes,
                "needs_image": bool(rules.inputs.needed),
                "streams": rules.sampling.is_causal and description.degrees.num_processes == 1,
                "image_fields": sorted(images) or (["image_path"] if takes else []),
                "task_types": (types := [f"T2{kind}"] * (not rules.inputs.needed) + [f"TI2{kind}"] * takes),
                # As SGLang's clients read them.
                "task_type": types[0],
                "supported_task_types": types,
            }
        return card

    def prepared(self, choice: Choice) -> Prepared:
        """Return the model under a choice, decided and without weights. Raises what `prepare` raises."""
        return self._prepared(dataclasses.replace(choice, preset=self._shipped(choice)))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        choice: Choice,
        on_progress: OnProgress,
        on_preview: OnPreview | None = None,
        num_previews: int = 0,
    ) -> list[GeneratedMedia]:
        """Make one batch of resolved requests. on_preview: called at `num_previews` steps. Raises what
        GenerationPipeline.generate raises."""
        watching = self._previews.watching(self.pipeline, requests, on_preview, num_previews)
        with self._chosen(choice), watching:
            return self.pipeline.generate(requests, on_progress=on_progress)

    @contextlib.contextmanager
    def streaming(self, request: GenerationRequest, choice: Choice) -> Iterator[AnyStream]:
        """Context manager: the stream of a resolved request. Raises what Pipeline.stream raises."""
        if not isinstance(self.pipeline, Pipeline):
            raise RequestError(
                "stream: diffusers' own pipeline runs this model, which makes a clip at once; leave it out"
            )
        with self._chosen(choice), self.pipeline.stream(request, keeps_frames=True) as stream:
            yield stream

    def _resolved(self, prepared: Prepared, work: Mapping[str, Any]) -> list[GenerationRequest]:
        preset = work.get("preset")
        if preset is not None and preset not in prepared.rules.presets:
            raise RequestError(f"preset: unknown name {shown(preset)}.{nearest(preset, prepared.rules.presets)}")
        requests = [GenerationRequest.from_dict(values) for values in work["requests"]]
        return [prepared.rules.resolve(request, preset) for request in requests]

    def _shipped(self, choice: Choice) -> str | None:
        """Return the shipped LoRA that a preset brings along, as on the command line."""
        return None if choice.preset is None else shipped_lora_of(choice.preset, self._config.model_path)

    def _prepare(self, choice: Choice) -> Prepared:
        """choice: its preset is a shipped LoRA."""
        return prepare(self._config_of(choice))

    def _config_of(self, choice: Choice) -> RuntimeConfig:
        """Return the config with which a pipeline of this choice alone would be loaded."""
        loras = list(self._config.lora)
        for name, scale in choice.loras:
            if name not in self._loras:
                raise RequestError(f"lora: unknown name {shown(name)}.{nearest(name, self._loras)}")
            loras.append(dataclasses.replace(self._loras[name], scale=self._loras[name].scale * scale))
        if choice.preset is not None:
            loras.append(LoraConfig(choice.preset))
        changes: dict[str, Any] = {"lora": tuple(loras)}
        if choice.attention is not None:
            self._refuse_attention_of_requests()
            changes |= {"attention_override": parse_attention(parse_json(choice.attention)), "attention": self._below()}
        return dataclasses.replace(self._config, **changes)

    def _below(self) -> AttentionConfig | None:
        """Return the server's own choices, below those of a request: its flags, and where there are none its config."""
        given = self._config.attention if self._config.attention_override is None else self._config.attention_override
        return None if given is None else AttentionConfig.parse(given)

    def _refuse_attention_of_requests(self) -> None:
        if self._pipeline is None:
            return
        if not isinstance(self._pipeline, Pipeline):
            raise RequestError(
                "attention: diffusers' own pipeline runs this model, whose attention is chosen when the server starts"
            )
        if self._pipeline.parts.graphs is not None:
            raise RequestError(
                "attention: this server replays CUDA graphs, which hold the kernels of one choice; start it with "
                "--cuda-graphs off"
            )

    @contextlib.contextmanager
    def _chosen(self, choice: Choice) -> Iterator[None]:
        """Context manager: the pipeline runs and records as one that was loaded with this choice."""
        decided = dataclasses.replace(choice, preset=self._shipped(choice))
        config = self._config_of(decided)
        if config.lora != self._merged:
            self.pipeline.set_loras(config.lora)
            self._merged = config.lora
        if decided.attention is None:
            self.pipeline.recipe = self._recipe_of(decided)
            yield
            return
        assert isinstance(self._pipeline, Pipeline)
        override, below = AttentionConfig.parse(config.attention_override), AttentionConfig.parse(config.attention)
        with attention_choices(self._pipeline, override, below):
            self._pipeline.recipe = self._recipe_of(decided)
            yield

    def _recipe_of(self, decided: Choice) -> Mapping[str, Any]:
        """Return the recipe of a pipeline that is loaded with a choice: the bytes of a file are those of `generate`, to
        the order of the keys."""
        is_own = decided == Choice()
        return self._recipe if is_own else self._prepared(decided).description.to_dict()


def _size_steps(rules: RequestRules) -> tuple[int, int]:
    """Return what sides are a multiple of, in pixels, and frames behind the first one."""
    geometry = rules.sampling.geometry
    sides = geometry.token_multiple * geometry.spatial_factor * geometry.patch[1]
    return sides, geometry.temporal_factor * geometry.patch[0]


def _check_memory(plan: MemoryPlan | None) -> None:
    """Raises DeviceMemoryError for a plan of more memory than the machine has beside other programs: the system would
    end this process, with the jobs that it makes. A plan with a limit has been refused before."""
    free = free_in_machine()
    if plan is not None and plan.shortage and free is not None and plan.peak > free + peak_in_machine():
        raise DeviceMemoryError(plan.shortage)


def parse_attention(value: Any) -> AttentionConfig:
    """Return the attention that a request of a stranger chooses: names, a mapping or a JSON text, and no file.

    Raises RequestError for what would read a file of this machine, and ConfigError.
    """
    text = value.strip() if isinstance(value, str) else ""
    if not text.startswith("{") and ("/" in text or "\\" in text or text.lower().endswith(_FILE_ENDINGS)):
        raise RequestError("attention: expected names or a mapping; a request names no file of the server")
    # Before it is parsed: options that name a file are checked by looking at it.
    written = value
    if text.startswith("{"):
        with contextlib.suppress(DocumentError):
            written = parse_json(text)
    elif "=" in text:
        written = dict.fromkeys(re.split(r"[=,]", text))
    if (name := next(_file_options(written), None)) is not None:
        raise RequestError(f"attention: {name} names a file of the server, which a request cannot; leave it out")
    return AttentionConfig.parse(value)


def _file_options(value: Any) -> Iterator[str]:
    """Yield the keys that name a file, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if re.split(r"[._-]", str(key).strip())[-1].lower() in _FILE_OPTIONS:
                yield shown(key)
            yield from _file_options(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _file_options(inner)
