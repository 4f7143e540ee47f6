"""Pipeline: from requests to media; encode, denoise, decode."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.core.progress import Cancellations, OnProgress, Progress, StageClock
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.generation.batch_run import BatchRun
from diffusion_runtime.generation.chunk_decoding import DecodingThread
from diffusion_runtime.generation.chunked_denoiser import ChunkedDenoiser
from diffusion_runtime.generation.frame_decoding import (
    decode_clip,
    decode_frames,
    interpolated,
    source_sound,
    written_rate,
)
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.generation.input_files import input_digests
from diffusion_runtime.generation.latent_denoiser import Denoised
from diffusion_runtime.generation.one_generation import OneGeneration, SharedGeneration
from diffusion_runtime.generation.parts import PipelineParts
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts
from diffusion_runtime.generation.remarks import note_remarks
from diffusion_runtime.generation.saved_latents import SavedLatents
from diffusion_runtime.generation.segmented_clip import SegmentedClip
from diffusion_runtime.media import Audio, ClipHeader, GeneratedMedia
from diffusion_runtime.media.file_writer import FrameSink, OpenSink
from diffusion_runtime.memory.device_memory import release_device_memory
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.lora_sources import located
from diffusion_runtime.models.sampling import Sampling
from diffusion_runtime.models.weight_fingerprint import with_loras_of
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.session.finishing import continued_recipe, kept_segments, request_of
from diffusion_runtime.streaming.generation_stream import GenerationStream, check_streamable
from diffusion_runtime.streaming.segment_stream import AnyStream, SegmentStream
from diffusion_runtime.streaming.stream_state import StreamPlace, StreamSource
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.lora.binding import Lora


class Pipeline:
    """A loaded model; `load_pipeline` makes one. One generation at a time: a second call meanwhile is an error.

    parts: the modules of the model and what surrounds them. rules: what the model says about requests. recipe: the part
    of every generation's recipe about the model and its attention. mesh: the processes that run the model together;
    each is given the same requests, and returns the same media. remarks: added to every attention report.
    hooks: what instruments (`profiling`, `tuning`, `comparison`) ask of the generations.
    """

    def __init__(
        self,
        parts: PipelineParts,
        rules: RequestRules,
        *,
        device: torch.device,
        dtype: torch.dtype,
        recipe: Mapping[str, Any],
        mesh: ProcessMesh | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        graphs = parts.decoder_graphs
        self.parts = parts if graphs is None else dataclasses.replace(parts, decoder=parts.decoder.with_graphs(graphs))
        self.rules = rules
        self.device = device
        self.dtype = dtype
        self.recipe = recipe
        self.mesh = ProcessMesh() if mesh is None else mesh
        self.defaults = rules.defaults
        self.presets = rules.presets
        self.hooks = Hooks()
        self._remarks = tuple(remarks)
        self._one_generation = OneGeneration()
        self._load_timings: dict[str, float] = {}

    @property
    def inspectable(self) -> Pipeline:
        """Itself: instruments see the parts of a native model."""
        return self

    @property
    def text_encoder(self) -> TextEncoder:
        """The text encoder, which may be several models."""
        return self.parts.text_encoder

    @property
    def transformer(self) -> DiffusionTransformer:
        """The denoiser, on our attention layers."""
        return self.parts.transformer

    @property
    def decoder(self) -> LatentDecoder:
        """The decoder from latents to frames."""
        return self.parts.decoder

    def note_load(self, timings: Mapping[str, float]) -> None:
        """Add seconds by name, as GenerationPipeline says."""
        for name, seconds in timings.items():
            self._load_timings[name] = self._load_timings.get(name, 0.0) + seconds

    @property
    def load_timings(self) -> dict[str, float]:
        """Seconds noted since the last generation, by name."""
        return dict(self._load_timings)

    def __repr__(self) -> str:
        model = self.recipe.get("model", {})
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<Pipeline: {model.get('path', 'a model')}, {self.device}, {dtype}>"

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """Fill in and check a request, as `RequestRules.resolve` does."""
        return self.rules.resolve(request, preset)

    def __call__(
        self, request: GenerationRequest, *, on_progress: OnProgress | None = None, open_sink: OpenSink | None = None
    ) -> GeneratedMedia:
        """Make one video or image. Raises what `generate` raises."""
        return self.generate([request], on_progress=on_progress, open_sink=open_sink)[0]

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_progress: OnProgress | None = None,
        open_sink: OpenSink | None = None,
    ) -> list[GeneratedMedia]:
        """Make one batch, each request with its own prompt, negative prompt and seed; the results equal single runs.
        With a step cache, which decides per sample, the requests are made one after the other.

        on_progress: called before and after every step; what it raises ends the generation. A Cancelled that names
        requests ends those alone: the result leaves them out, the others equal what they would have been (a batch is
        denoised whole; cancelled requests are not decoded). open_sink: called with the index of a request and its
        clip's header when its first frames are decoded; takes them as they come. It is not called for clips with
        sound, whose file begins with it.

        Raises what `resolve` raises and RequestError for requests that do not belong together, before any work;
        PipelineBusyError at once while another generation of this pipeline runs; DeviceMemoryError when memory runs
        out, and DiffusionRuntimeError when the numbers overflow.
        """
        with self._one_generation.held():
            batch, settings = _opened(self.rules, self.parts, requests)
            if _is_apart(self.rules, batch, settings):
                return _generate_apart(self._generate, batch, self.rules.sampling, on_progress, open_sink)
            return self._generate(batch, settings, on_progress, open_sink)

    def latents(
        self, requests: GenerationRequest | Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
    ) -> torch.Tensor:
        """Denoise one request, or a batch at once, without decoding. Return clean latents, float32 [batch,
        *sample_shape].

        Raises what `generate` raises, and RequestError for a batch that it would make one request after the other.
        """
        several = [requests] if isinstance(requests, GenerationRequest) else requests
        with self._one_generation.held():
            batch, settings = _opened(self.rules, self.parts, several)
            if _is_apart(self.rules, batch, settings):
                raise RequestError("latents: each of these requests has forward passes of its own; call it for each")
            run = self._begun(batch, settings)
            with run.guarded():
                clock = StageClock(self.device, on_progress)
                run, read = run.with_known_length(clock)
                if run.settings.segments.is_apart:
                    clip = SegmentedClip(run, run.read_prompts(clock), self.decoder.for_request(batch[0]), clock)
                    # Each segment is decoded for the one behind it.
                    for _ in clip.stream().chunks:
                        pass
                    # Along the frames; latents that hold sound are flat.
                    return torch.cat(clip.latents, dim=min(2, clip.latents[0].ndim - 1))
                denoised, _ = run.denoise(clock, read)
                run.participants.after_denoising(run.recorder)
        return denoised.latents

    def finish(
        self,
        saved: SavedLatents,
        request: GenerationRequest | None = None,
        *,
        allow_changes: bool = False,
        on_progress: OnProgress | None = None,
        open_sink: OpenSink | None = None,
    ) -> GeneratedMedia:
        """Go on with a request from what its denoising has left: the steps that remain, and decoding; equal to one
        whole run to the bit. request: None for that of the file; another may have further steps, a second stage, or
        other options of decoding. allow_changes: whether the model, its weights or other values may differ from those
        of the steps before, which the recipe then says.

        Raises what `generate` raises, RequestError for latents that do not fit the request, ConfigError for other
        values than those of the steps before.
        """
        request = request_of(saved) if request is None else request
        with self._one_generation.held():
            batch, settings = _opened(self.rules, self.parts, [request])
            saved.check(settings)
            saved = kept_segments(saved, settings)
            recipe = {**self.recipe, "request": batch[0].recorded(), "inputs": input_digests(settings.shared)}
            begin = Beginning(saved, continued_recipe(saved, recipe, allow_changes=allow_changes))
            return self._generate(batch, settings, on_progress, open_sink, begin=begin)[0]

    def stream(
        self,
        request: GenerationRequest,
        *,
        endless: bool = False,
        keeps_frames: bool = False,
        decodes_beside: bool | None = None,
    ) -> AnyStream:
        """Begin one video of a causal model, chunk after chunk: a context manager that gives frames as they are made,
        and takes other prompts on the way; or one that is made in segments, which takes none. Its frames are those of
        `generate`.

        endless: without an end, whatever num_frames says, for models or requests whose kv_window bounds the frames in
        sight. keeps_frames: for GenerationStream.media; else memory does not grow with the video. decodes_beside:
        whether a chunk is decoded while the next one is denoised, on a thread of its own; None for where that pays, on
        CUDA unless parts of the model wait in the machine's memory.

        Raises what `generate` raises, RequestError for a model that makes clips at once and for a video without an end
        that sees all of its frames, ConfigError for a decoder that needs the whole clip.
        """
        resources = contextlib.ExitStack()
        try:
            resources.enter_context(self._one_generation.held())
            is_streamable = functools.partial(check_streamable, self.rules, endless=endless)
            (request,), settings = _opened(self.rules, self.parts, [request], is_streamable)
            run = self._begun([request], settings)
            if settings.segments.is_apart:
                load_timings, self._load_timings = self._load_timings, {}
                digests = input_digests(settings.shared)
                recipe = {**self.recipe, **({"inputs": digests} if digests else {})}
                recipe |= _preset_recipe(self.rules, settings)
                decoder = self.decoder.for_request(request)
                return SegmentStream(
                    run, decoder, recipe, resources, keeps_frames=keeps_frames, load_timings=load_timings
                )
            resources.callback(self.parts.products.stop)
            if decodes_beside is None:
                # Decoder and transformer share the cores of a CPU, and must both be on the device.
                decodes_beside = self.device.type == "cuda" and self.parts.offloading is None
            thread = DecodingThread(self.device, run.guarded) if decodes_beside else None
            if thread is not None:
                resources.callback(thread.close)
            plan = settings.chunking.plan
            source = StreamSource(
                decoder=self.decoder.for_request(request),
                device=self.device,
                fps=settings.size.fps,
                plan=dataclasses.replace(plan, num_frames=None) if endless else plan,
                temporal_factor=self.rules.sampling.geometry.temporal_factor,
                encoder=lambda recorder: lambda prompt: run.encode(prompt, recorder),
                count_products=lambda recorder: self.parts.products.start(recorder.record_product),
                recipe={**self.recipe, **_preset_recipe(self.rules, settings)},
                guard=run.guarded,
                thread=thread,
                generation=SharedGeneration(resources),
            )
            load_timings, self._load_timings = self._load_timings, {}
            started = time.perf_counter()
            with run.guarded():
                prompts = run.encode()
                denoiser = ChunkedDenoiser(run.denoiser())
                chunks = denoiser.stream(source.plan, prompts.conditions, [request.seed])
            return GenerationStream(
                source,
                chunks,
                run.recorder,
                StreamPlace.start(request, prompts.notes[0], keeps_frames=keeps_frames),
                text_seconds=time.perf_counter() - started,
                load_timings=load_timings,
            )
        except BaseException:
            resources.close()
            raise

    @property
    def loras(self) -> tuple[Lora, ...]:
        """The LoRA files that are merged into the transformer."""
        return () if self.parts.loras is None else self.parts.loras.loras

    def set_loras(self, loras: Sequence[Any]) -> None:
        """Replace the LoRA files for the generations from here on; no files for the model alone.

        loras: each in any form that LoraConfig.parse takes. The weights of the layers concerned are kept on the CPU, so
        that nothing is loaded again; what follows is bit for bit what a pipeline loaded with these files makes. Where
        several processes run the model together, each must be given the same files, as with `generate`.

        Raises ConfigError and ModelLoadError for files that cannot be used, and leaves everything as it was;
        PipelineBusyError while a generation runs.
        """
        configs = located(RuntimeConfig(lora=loras).lora, offline=self.recipe.get("runtime", {}).get("offline", False))
        with self._one_generation.held(), device_guard(self.device):
            if self.parts.loras is None:
                raise ConfigError("set_loras: this pipeline does not know its model's folder: use load_pipeline")
            # Where offloaded weights wait, they are whole and belong to nobody else.
            self.parts.participants(self.device).abandon()
            self.parts.loras.switch(configs)
            # A LoRA may change a text encoder.
            self.parts.encodings.clear()
            self.rules = self.parts.rules_with_loras(self.rules, configs, self.parts.loras.loras)
            self.recipe = with_loras_of(self.recipe, configs)

    @property
    def profile_remarks(self) -> tuple[str, ...]:
        """Remarks that a profile of a generation should make, as GenerationPipeline says."""
        remark = "recorded steps run without CUDA graphs, which have no ranges inside"
        return () if self.parts.graphs is None else (remark,)

    def close(self) -> None:
        """Free the model's memory. A later generation raises PipelineClosedError.

        Raises PipelineBusyError while a generation runs, and PipelineClosedError the second time.
        """
        with self._one_generation.held():
            self._one_generation.close()
            offloading = self.parts.offloading
            del self.parts
            if offloading is not None:
                offloading.close()
            release_device_memory(self.device)

    def _begun(
        self, batch: Sequence[GenerationRequest], settings: BatchSettings, remarks: Sequence[str] = ()
    ) -> BatchRun:
        """Begin the run and the report of a resolved batch, with what is known before it is computed."""
        participants = self.parts.participants(self.device)
        recorder = AttentionRecorder(counts_density=self.hooks.counts_density)
        for remark in (*self._remarks, *remarks):
            recorder.note(remark)
        if not self.rules.leaves_length_open(settings.shared):
            note_remarks(batch, settings, self.rules, self.mesh, recorder)
        participants.begin(recorder)
        return BatchRun(
            parts=self.parts,
            rules=self.rules,
            batch=batch,
            settings=settings,
            device=self.device,
            dtype=self.dtype,
            mesh=self.mesh,
            hooks=self.hooks,
            participants=participants,
            recorder=recorder,
        )

    def _generate(
        self,
        batch: Sequence[GenerationRequest],
        settings: BatchSettings,
        on_progress: OnProgress | None,
        open_sink: OpenSink | None = None,
        remarks: Sequence[str] = (),
        begin: Beginning | None = None,
    ) -> list[GeneratedMedia]:
        """Make a batch of resolved requests. remarks: added to the attention report. begin: what an earlier run has
        left of the one request."""
        cancellations = Cancellations(len(batch), on_progress)
        watch = None if on_progress is None else cancellations.watch
        clock = StageClock(self.device, watch)
        digests = input_digests(settings.shared)
        run = self._begun(batch, settings, remarks)
        if begin is not None:
            run = dataclasses.replace(run, begin=begin.saved)
            run.recorder.note(f"finish: {begin.saved.progress_text} were made before")
        participants, recorder = run.participants, run.recorder
        made = {**({"inputs": digests} if digests else {}), **_preset_recipe(self.rules, settings)}
        if begin is not None:
            made |= begin.recipe

        def recipes_of(prompts: EncodedPrompts) -> list[dict[str, Any]]:
            asked = [_differing(before, request) for before, request in zip(batch, run.batch, strict=True)]
            return [
                {**self.recipe, "request": request.recorded(), **made, **own, "notes": list(notes)}
                for request, own, notes in zip(run.batch, asked, prompts.notes, strict=True)
            ]

        with run.guarded():
            run, read = run.with_known_length(clock)
            settings = run.settings
            denoised: Denoised | None = None
            moved: Mapping[str, float] = {}
            if settings.segments.is_apart:
                prompts = run.read_prompts(clock)
            else:
                denoised, prompts = run.denoise(clock, read)
                moved = participants.after_denoising(recorder)
            recipes = recipes_of(prompts)
            clips: dict[int, tuple[torch.Tensor, Audio | None]] = {}
            if denoised is not None:
                run.keep(denoised, recipes)
                denoised = dataclasses.replace(denoised, state=None)
                participants.before_decoding()
            else:
                clip = SegmentedClip(run, prompts, self.decoder.for_request(batch[0]), clock, recipes[0])
                audio, makes_sound = source_sound(settings, recorder), self.rules.makes_sound
                # A file of a clip with sound begins with the sound, which is written with all of it.
                has_sink = open_sink is not None and audio is None and not makes_sound
                sink = functools.partial(open_sink, 0) if open_sink is not None and has_sink else None
                stream = interpolated(clip.stream(), settings, self.parts.interpolator)
                frames = decode_frames(stream, written_rate(settings), recipes[0], sink)
                clips[0] = frames, clip.sound() if makes_sound else audio
                moved = clip.timings
            # One after the other: the decoder's activations are what needs the most memory.
            for index, request in enumerate(() if denoised is None else run.batch):
                if denoised is not None and cancellations.is_wanted(index):
                    with clock.stage("decode", 1, index) as done:
                        sample = denoised.latents[index : index + 1]
                        sink = None if open_sink is None else functools.partial(open_sink, index)
                        decoder = self.decoder.for_request(request)
                        clips[index] = decode_clip(
                            decoder,
                            sample,
                            settings,
                            recipes[index],
                            sink,
                            recorder,
                            denoised.size,
                            self.parts.interpolator,
                        )
                        done(1)
            timings = {**participants.finish(recorder), **moved}
        load_timings, self._load_timings = self._load_timings, {}
        return [
            GeneratedMedia(
                frames=clips[index][0].numpy(),
                fps=written_rate(settings),
                recipe=recipes[index],
                attention_report=recorder.report(),
                timings={**load_timings, **clock.timings(index), **timings},
                peak_memory=peaks(self.device),
                audio=clips[index][1],
            )
            for index in range(len(batch))
            if cancellations.is_wanted(index)
        ]


def _opened(
    rules: RequestRules,
    parts: PipelineParts,
    requests: Sequence[GenerationRequest],
    check: Callable[[BatchSettings], object] = lambda _: None,
) -> tuple[list[GenerationRequest], BatchSettings]:
    """Resolve a batch, check its settings and make room for it in memory."""
    batch = [rules.resolve(request) for request in requests]
    settings = BatchSettings.of(batch, rules.sampling)
    check(settings)
    parts.memory.make_room(batch)
    return batch, settings


def _is_apart(rules: RequestRules, batch: Sequence[GenerationRequest], settings: BatchSettings) -> bool:
    """Return whether the requests of a batch are made one after the other."""
    is_apart = settings.decides_per_sample or settings.segments.is_apart
    return len(batch) > 1 and (is_apart or rules.leaves_length_open(settings.shared))


@dataclasses.dataclass(frozen=True, eq=False)
class Beginning:
    """Saved latents that a generation goes on from. recipe: what they add to its recipe."""

    saved: SavedLatents
    recipe: Mapping[str, Any]


def _differing(asked: GenerationRequest, made: GenerationRequest) -> dict[str, Any]:
    """Return what a recipe holds of a request that was made as another one: the values of it that differ."""
    before, after = asked.recorded(), made.recorded()
    differing = {name: value for name, value in before.items() if value != after[name]}
    return {"asked": differing} if differing else {}


def _preset_recipe(rules: RequestRules, settings: BatchSettings) -> dict[str, str]:
    """Return the name of the sampling preset that a batch has, as recipes hold it."""
    named = rules.sampling_preset(settings.shared)
    return {} if named is None else {"sampling_preset": named}


def _generate_apart(
    generate: Callable[..., list[GeneratedMedia]],
    batch: Sequence[GenerationRequest],
    sampling: Sampling,
    on_progress: OnProgress | None,
    open_sink: OpenSink | None,
) -> list[GeneratedMedia]:
    """Make one request after the other, for what is decided per sample: a forward pass has one batch. generate: as
    Pipeline._generate."""
    cancellations = Cancellations(len(batch), on_progress)
    remark = f"the {len(batch)} requests of this batch were made one after the other: each has passes of its own"
    made = []
    for index, request in enumerate(batch):

        def watch(progress: Progress, index: int = index) -> None:
            cancellations.watch(dataclasses.replace(progress, request_index=index))

        def open_own(_: int, header: ClipHeader, index: int = index) -> FrameSink:
            assert open_sink is not None
            return open_sink(index, header)

        if cancellations.is_wanted(index):
            media = generate(
                [request],
                BatchSettings.of([request], sampling),
                None if on_progress is None else watch,
                None if open_sink is None else open_own,
                (remark,),
            )
            if cancellations.is_wanted(index):
                made += media
    return made
