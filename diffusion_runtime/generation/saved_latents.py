"""Saved latents: where the denoising of one request was left, in a safetensors file from which it goes on to the bit.

The file holds the sampler's place (latents in its precision, what it keeps of earlier steps), or the clean latents of a
model that makes a video in segments or chunks; in its metadata the recipe, with the fingerprints of the weights, how
far it is, and how much noise was drawn, which with the seed is the generator's state. It is read as one of a stranger:
bounded, nothing but numbers and JSON, and every tensor is held against the plan of the request before it is used.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from diffusion_runtime.denoising.interface import SamplerState
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.errors import ModelLoadError, OutputError, RequestError, shown
from diffusion_runtime.generation.denoising_stages import DenoisingStage, stages_of
from diffusion_runtime.media.formats import LATENTS_SUFFIX
from diffusion_runtime.media.publish import numbered, publish_bytes, publish_free
from diffusion_runtime.media.sidecar import RECIPE_SCHEMA
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import check_file
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.weights.tensor_files import read_tensors, tensor_bytes
from diffusion_runtime.weights.weight_files import stored_heads

SCHEMA = "diffusion_runtime.latents/1"
# The latents of ten minutes of 720p, several times over.
_MAX_BYTES = 32 * 2**30
# A recipe has some 60 values and a prompt.
_MAX_CHARACTERS = 1_000_000
# Numbers and names in a message.
_MAX_LISTED = 16
_MAX_NUMBER = 2**40
_MAX_SEGMENTS = 10_000
# DPM-Solver++ (SDE) draws twice.
_MAX_DRAWS_PER_STEP = 4
_KEY = "diffusion_runtime"
_STATE, _HISTORY, _CLEAN = "latents", "history.", "clean."


@dataclass(frozen=True, eq=False)
class DenoisingState:
    """The place of a batch's denoising between two steps.

    stage: of denoising_stages.stages_of, counted from 0. sampler: the place in its steps, latents [batch, ...]. drawn:
    the shapes of a sample's noise so far.
    """

    stage: int
    sampler: SamplerState
    drawn: tuple[tuple[int, ...], ...]

    def of_sample(self, index: int) -> DenoisingState:
        """Return the place of one sample of the batch."""
        one, sampler = slice(index, index + 1), self.sampler
        history = {name: each[one] for name, each in sampler.history.items()}
        return DenoisingState(self.stage, SamplerState(sampler.index, sampler.latents[one], history), self.drawn)


@dataclass(frozen=True, eq=False)
class SavedLatents:
    """Latents of one request, as its denoising has left them.

    recipe: of the generation, as its file carries it. num_done, num_steps: the steps; of a video that is made in
    segments these. levels: sigma of the steps done and of the next one, as far as there is one, of the stage of the
    state. state: None where clean holds the latents, float32 [1, ...], of the segments done by their index, or of the
    whole video.
    """

    recipe: Mapping[str, Any]
    num_done: int
    num_steps: int
    levels: tuple[float, ...] = ()
    state: DenoisingState | None = None
    clean: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def on_cpu(self) -> SavedLatents:
        """Return a copy in the machine's memory, which decoding does not change."""

        def copies(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
            return {name: each.detach().to("cpu", copy=True) for name, each in tensors.items()}

        state = self.state
        if state is not None:
            sampler = state.sampler
            latents = copies({_STATE: sampler.latents})[_STATE]
            state = dataclasses.replace(state, sampler=SamplerState(sampler.index, latents, copies(sampler.history)))
        return dataclasses.replace(self, state=state, clean=copies(self.clean))

    @property
    def progress_text(self) -> str:
        """The progress for people: `4 of 30 steps`."""
        return f"{self.num_done} of {self.num_steps} {'segments' if self.state is None else 'steps'}"

    @property
    def num_steps_done(self) -> int:
        """Steps that do not run again, none where parts of a video are kept."""
        return 0 if self.state is None else self.num_done

    @property
    def progress(self) -> dict[str, Any]:
        """The progress as JSON values."""
        state, place = self.state, dict[str, Any]()
        if state is not None:
            drawn = [list(shape) for shape in state.drawn]
            place = {"stage": state.stage, "step": state.sampler.index, "drawn": drawn}
        unit = "segments" if state is None else "steps"
        return {"unit": unit, "done": self.num_done, "of": self.num_steps, "levels": list(self.levels), **place}

    @classmethod
    def of_state(cls, state: DenoisingState, settings: BatchSettings, recipe: Mapping[str, Any]) -> Self:
        """Return what is left of a request whose settings these are, at a place."""
        stages = stages_of(settings)
        num_done = stages[state.stage].first + state.sampler.index
        return cls(recipe, num_done, settings.num_steps, _levels(stages[state.stage], state), state)

    def check(self, settings: BatchSettings) -> None:
        """Check that the tensors are those of a place in the plan of a resolved request. Raises RequestError."""
        if self.state is None:
            self._check_clean(settings)
            return
        stop = settings.shared.stop_after_step
        if stop is not None and stop <= self.num_done:
            raise RequestError(
                f"stop_after_step: expected more than the {self.num_done} steps that are done, got {stop}"
            )
        if settings.sampling.is_causal or settings.segments.is_apart:
            raise _differs("the model makes a video in one piece", "segments or chunks")
        stages, state = stages_of(settings), self.state
        if state.stage >= len(stages):
            raise _differs(f"a place in stage {state.stage + 1}", f"{len(stages)} stages")
        stage = stages[state.stage]
        if self.num_done != stage.first + state.sampler.index:
            raise _differs(f"{self.num_done} steps that are done", f"{stage.first + state.sampler.index}")
        if (levels := _levels(stage, state)) != self.levels or not levels:
            raise RequestError(
                f"finish: the {self.num_done} steps that were made, and the next one, have the noise levels "
                f"{_listed(self.levels)}, and those of the request are {_listed(levels)}; leave out what changes the "
                "schedule: --num-inference-steps goes on with other steps behind them"
            )
        _check_tensors(state, stage, settings)

    def _check_clean(self, settings: BatchSettings) -> None:
        num_segments = len(settings.segments) if settings.segments.is_apart else 1
        in_parts = settings.sampling.is_causal or settings.segments.is_apart
        if not in_parts or not set(self.clean) <= set(range(num_segments)):
            raise _differs(f"the clean latents of {len(self.clean)} parts of a video", f"{num_segments} parts")
        own = settings.of_segment()
        shape = (1, *own.sampling.geometry.sample_shape(own.size))
        for each in self.clean.values():
            _check_tensor("clean latents", each, shape)


def _levels(stage: DenoisingStage, state: DenoisingState) -> tuple[float, ...]:
    """Return sigma of the steps of a stage up to the place, and of the next one."""
    steps = {step.index: step.sigma for step in reversed(stage.steps(torch.device("cpu")))}
    return tuple(sigma for index, sigma in sorted(steps.items()) if index <= state.sampler.index and sigma is not None)


def _check_tensors(state: DenoisingState, stage: DenoisingStage, settings: BatchSettings) -> None:
    """Hold the tensors of a place against those that the stage's sampler has there. Raises RequestError."""
    shape = (1, *stage.settings.sizes.sample_shape(stage.size))
    expected, num_drawn = _rehearsed(stage, state.sampler.index)
    expected = set() if stage.is_over(state.sampler) else expected
    _check_tensor(_STATE, state.sampler.latents, shape)
    if set(state.sampler.history) != expected:
        raise _differs(f"a sampler that keeps {_listed(sorted(state.sampler.history))}", _listed(sorted(expected)))
    for name, each in state.sampler.history.items():
        _check_tensor(f"{_HISTORY}{name}", each, shape)
    shapes = {tuple(each.settings.sizes.sample_shape(each.size)) for each in stages_of(settings)}
    # Stages behind the first go on from, or begin, noise of their own.
    is_other = len(state.drawn) != num_drawn if state.stage == 0 else len(state.drawn) > _most_draws(settings)
    if not set(state.drawn) <= shapes or is_other:
        raise _differs(f"noise that was drawn {len(state.drawn)} times", f"{settings.num_steps} steps")


def _most_draws(settings: BatchSettings) -> int:
    """Return how often noise is drawn at most."""
    return _MAX_DRAWS_PER_STEP * (settings.num_steps + 1)


def _rehearsed(stage: DenoisingStage, index: int) -> tuple[set[str], int]:
    """Return the names of what a stage's sampler keeps at a step, and how often it has drawn noise by then, the initial
    noise with it, found by running it on one number."""
    noise = SampleNoise((1, 1, 1, 1), [0])
    start = stage.start(noise.draw())
    place = stage.run(start, lambda latents, _: latents, lambda *_: None, noise, stage.first + index)
    return set(place.history), len(noise.drawn)


def _check_tensor(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Raises RequestError. Samplers compute in single or double precision, as the device has it."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in (torch.float32, torch.float64):
        raise _differs(f"{name} {list(tensor.shape)} in {tensor.dtype}", f"{list(shape)} in float32 or float64")


def _differs(found: str, expected: object) -> RequestError:
    return RequestError(f"finish: the file holds {found}, and the request is of {expected}: it is another request's")


def _listed(values: Iterable[object]) -> str:
    texts = [f"{each:.4g}" if isinstance(each, float) else shown(each) for each in values]
    more = len(texts) - _MAX_LISTED
    return ", ".join([*texts[:_MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]) or "nothing"


def latents_path(path: Path) -> Path:
    """Return the path of the latents beside a media file: `out.latents.safetensors` for `out.mp4`."""
    return path.with_name(f"{path.stem}{LATENTS_SUFFIX}")


def write_latents(saved: SavedLatents, beside: Path, over: Path | None = None) -> Path:
    """Write the latents beside a media file, whole or not at all; return the path. over: an earlier file of the same
    request to replace, None for the first number that is free. Raises OutputError."""
    recipe = {"schema": RECIPE_SCHEMA, **saved.recipe}
    head = {"schema": SCHEMA, "recipe": recipe, "progress": saved.progress}
    content = tensor_bytes(_tensors_of(saved), {_KEY: json.dumps(head, allow_nan=False)})
    if over is not None:
        publish_bytes(over, content)
        return over
    return publish_free(content, (latents_path(numbered(beside, number)) for number in itertools.count(1)))


def _tensors_of(saved: SavedLatents) -> dict[str, torch.Tensor]:
    found = {f"{_CLEAN}{index}": each for index, each in saved.clean.items()}
    if saved.state is not None:
        sampler = saved.state.sampler
        history = {f"{_HISTORY}{name}": each for name, each in sampler.history.items()}
        found |= {_STATE: sampler.latents, **history}
    # Copies: what a sampler keeps may be one tensor under two names, which the format does not hold.
    return {name: each.detach().to("cpu", copy=True).contiguous() for name, each in found.items()}


def read_head(path: Path, key: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe and the progress in a file of saved latents, without its tensors. key: what named it.

    Raises ConfigError for a path that is no file's, OutputError for one that is damaged or something else.
    """
    check_file(path, key, max_bytes=_MAX_BYTES)
    if not path.name.endswith(LATENTS_SUFFIX):
        raise OutputError(
            f"{path}: expected a file of latents, whose name ends in {LATENTS_SUFFIX}; use {latents_path(path)}, if "
            "--save-latents wrote it"
        )
    try:
        _, metadata = stored_heads(path)
        text = metadata.get(_KEY)
        content = None if text is None or len(text) > _MAX_CHARACTERS else parse_json(text)
    except (ModelLoadError, DocumentError) as error:
        raise OutputError(f"{path}: it is damaged: {error}") from error
    parts = [content.get(name) for name in ("recipe", "progress")] if isinstance(content, dict) else []
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise OutputError(f"{path}: expected latents that --save-latents wrote ({SCHEMA}); it holds something else")
    recipe, progress = parts
    if not isinstance(recipe, dict) or not isinstance(progress, dict):
        raise OutputError(f"{path}: its recipe and its progress are not mappings; the file is damaged")
    return recipe, progress


def read_latents(path: Path, key: str = "") -> SavedLatents:
    """Read saved latents, to be checked against a request before they are used (SavedLatents.check). key: what named
    the file. Raises what `read_head` raises."""
    recipe, progress = read_head(path, key)
    heads, _ = stored_heads(path)
    unknown = [name for name in heads if name != _STATE and not name.startswith((_HISTORY, _CLEAN))]
    if unknown:
        raise OutputError(f"{path}: it holds {shown(unknown[0])}, which is no part of saved latents; it is damaged")
    try:
        tensors, _ = read_tensors(path, key)
    except ModelLoadError as error:
        raise OutputError(f"{path}: it is damaged: {error}") from error
    levels = progress.get("levels")
    done, total, stage, step = (_count(progress.get(name), path) for name in ("done", "of", "stage", "step"))
    if not isinstance(levels, list) or not all(type(each) in (int, float) for each in levels):
        raise OutputError(f"{path}: levels: expected noise levels, got {shown(levels)}; the file is damaged")
    clean = {index: tensors[name] for index in range(_MAX_SEGMENTS) if (name := f"{_CLEAN}{index}") in tensors}
    if _STATE not in tensors:
        if not clean:
            raise OutputError(f"{path}: it holds no latents; the file is damaged")
        return SavedLatents(recipe, done, total, tuple(map(float, levels)), clean=clean)
    drawn = progress.get("drawn")
    if not isinstance(drawn, list) or not all(isinstance(each, list) for each in drawn):
        raise OutputError(f"{path}: drawn: expected shapes of noise, got {shown(drawn)}; the file is damaged")
    shapes = tuple(tuple(_count(size, path) for size in shape) for shape in drawn)
    history = {name.removeprefix(_HISTORY): each for name, each in tensors.items() if name.startswith(_HISTORY)}
    state = DenoisingState(stage, SamplerState(step, tensors[_STATE], history), shapes)
    return SavedLatents(recipe, done, total, tuple(map(float, levels)), state)


def _count(value: object, path: Path) -> int:
    """Return a number in a file's progress; 0 where it says none. Raises OutputError."""
    value = 0 if value is None else value
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise OutputError(f"{path}: expected a number of 0 or more, got {shown(value)}; the file is damaged")
    return value
