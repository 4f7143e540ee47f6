"""Pipeline: from requests to media; encode, denoise, decode."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.core.progress import Cancellations, OnProgress, Progress, StageClock
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.latent_upsampler import LatentUpsampler
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.denoising.interface import OnStep, Wrapper
from diffusion_runtime.denoising.progressive_resolution import MIN_FITTED_SIZE, fit_spectrum
from diffusion_runtime.denoising.step_cache.calibration import Calibration, model_identity
from diffusion_runtime.denoising.step_cache.measurement import StackMeasurement, fit_polynomials, mean_ratios
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.generation.chunk_decoding import DecodingThread
from diffusion_runtime.generation.chunked_denoiser import ChunkedDenoiser
from diffusion_runtime.generation.frame_decoding import decode_frames, without_first
from diffusion_runtime.generation.input_files import input_digests
from diffusion_runtime.generation.latent_denoiser import LatentDenoiser
from diffusion_runtime.generation.one_generation import OneGeneration, SharedGeneration
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts, encode_prompts
from diffusion_runtime.layers.compiled_blocks import CompileCost, CompiledBlocks
from diffusion_runtime.media import Audio, ClipHeader, GeneratedMedia
from diffusion_runtime.media.file_writer import FrameSink, OpenSink
from diffusion_runtime.media.sound_files import read_sound
from diffusion_runtime.memory.device_memory import explain_memory_shortage, release_device_memory, shortage_remark
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.models.interface import DiffusionTransformer, ImageConditioner
from diffusion_runtime.models.quantization import Quantization
from diffusion_runtime.models.sampling_presets import FewSteps
from diffusion_runtime.models.weight_fingerprint import with_loras
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.profiling.attention_clock import AttentionClock, timed_layers
from diffusion_runtime.profiling.forward_ranges import forward_ranges
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.streaming.generation_stream import GenerationStream, check_streamable
from diffusion_runtime.streaming.stream_state import StreamPlace, StreamSource
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.weights.lora.binding import Lora
from diffusion_runtime.weights.lora.switching import LoraSwitch

logger = logging.getLogger("diffusion_runtime")

# Samples per second of a sound that comes from a file.
_FILE_SOUND_RATE = 48000


class Pipeline:
    """A loaded model; `load_pipeline` makes one. One generation at a time: a second call meanwhile is an error.

    defaults, presets: values of request fields, the model's own. load_image_conditioner: called when the first request
    has an image. recipe: the part of every generation's recipe about the model and its attention. mesh: the processes
    that run the model together; each is given the same requests, and returns the same media. remarks: added to every
    attention report. quantization: of the transformer's linear layers. loras: the LoRA files of the transformer.
    compiled: its blocks, where torch.compile compiles them. graphs: the CUDA graphs of its forward passes, None for
    none. decoder_graphs: those of the decoder. offloading: the parts that wait in the machine's memory. fitting: what
    to offload so that a request fits, for the message of one that ran out of memory; make_room: offloads more for a
    batch that takes more than what was planned. few_steps_of: what the model was distilled to with other LoRA files, by
    their paths. upsampler: of a second stage, where there is one.
    """

    def __init__(
        self,
        *,
        text_encoder: TextEncoder,
        transformer: DiffusionTransformer,
        decoder: LatentDecoder,
        rules: RequestRules,
        load_image_conditioner: Callable[[], ImageConditioner],
        device: torch.device,
        dtype: torch.dtype,
        recipe: Mapping[str, Any],
        mesh: ProcessMesh | None = None,
        remarks: Sequence[str] = (),
        quantization: Quantization | None = None,
        compiled: CompiledBlocks | None = None,
        graphs: ForwardGraphs | None = None,
        offloading: Offloading | None = None,
        fitting: Callable[[GenerationRequest], str] = lambda _: "",
        make_room: Callable[[Sequence[GenerationRequest]], None] = lambda _: None,
        upsampler: LatentUpsampler | None = None,
        decoder_graphs: DecoderGraphs | None = None,
        loras: LoraSwitch | None = None,
        few_steps_of: Callable[[Iterable[str]], FewSteps | None] = lambda _: None,
    ) -> None:
        self.text_encoder = text_encoder
        self.transformer = transformer
        self.decoder = decoder if decoder_graphs is None else decoder.with_graphs(decoder_graphs)
        self.rules = rules
        self.device = device
        self.dtype = dtype
        self.recipe = recipe
        self.mesh = ProcessMesh() if mesh is None else mesh
        self._remarks = tuple(remarks)
        self._quantization = quantization
        self._compiled = compiled
        self._graphs = graphs
        self.offloading = offloading
        self._fitting = fitting
        self._make_room = make_room
        self._upsampler = upsampler
        self._decoder_graphs = decoder_graphs
        self._loras = loras
        self._few_steps_of = few_steps_of
        self.defaults = rules.defaults
        self.presets = rules.presets
        self._load_image_conditioner = load_image_conditioner
        self._image_conditioner: ImageConditioner | None = None
        self._one_generation = OneGeneration()
        self._load_timings: dict[str, float] = {}
        self._watch_latents: OnStep | None = None
        self._counts_density = False
        self._wrap_predictions: Wrapper | None = None

    def note_load(self, timings: Mapping[str, float]) -> None:
        """As GenerationPipeline says."""
        for name, seconds in timings.items():
            self._load_timings[name] = self._load_timings.get(name, 0.0) + seconds

    @property
    def load_timings(self) -> dict[str, float]:
        """As GenerationPipeline says."""
        return dict(self._load_timings)

    def __repr__(self) -> str:
        model = self.recipe.get("model", {})
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<Pipeline: {model.get('path', 'a model')}, {self.device}, {dtype}>"

    def resolve(self, request: GenerationRequest, preset: str | None = None) -> GenerationRequest:
        """`RequestRules.resolve` of this model."""
        return self.rules.resolve(request, preset)

    def __call__(
        self, request: GenerationRequest, *, on_progress: OnProgress | None = None, open_sink: OpenSink | None = None
    ) -> GeneratedMedia:
        """One video or image. Raises what `generate` raises."""
        return self.generate([request], on_progress=on_progress, open_sink=open_sink)[0]

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_progress: OnProgress | None = None,
        open_sink: OpenSink | None = None,
    ) -> list[GeneratedMedia]:
        """One batch, each request with its own prompt, negative prompt and seed; the results equal single runs. With a
        step cache, which decides per sample, the requests are made one after the other.

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
            batch = [self.resolve(request) for request in requests]
            settings = BatchSettings.of(batch, self.rules)
            self._make_room(batch)
            if len(batch) > 1 and settings.decides_per_sample:
                return self._generate_apart(batch, on_progress, open_sink)
            return self._generate(batch, settings, on_progress, open_sink)

    def stream(
        self,
        request: GenerationRequest,
        *,
        endless: bool = False,
        keeps_frames: bool = False,
        decodes_beside: bool | None = None,
    ) -> GenerationStream:
        """One video of a causal model, chunk after chunk: a context manager that gives frames as they are made, and
        takes other prompts on the way. Its frames are those of `generate`.

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
            request = self.resolve(request)
            settings = BatchSettings.of([request], self.rules)
            check_streamable(self.rules, settings, endless=endless)
            self._make_room([request])
            recorder = AttentionRecorder(counts_density=self._counts_density)
            self._note_remarks([request], settings, (), recorder)
            if self._quantization is not None:
                resources.callback(self._quantization.counter.stop)
            self._count_products(recorder)
            thread = None
            if self._decodes_beside if decodes_beside is None else decodes_beside:
                thread = DecodingThread(self.device, lambda: self._streaming(settings))
                resources.callback(thread.close)
            source = StreamSource(
                decoder=self.decoder.for_request(request),
                device=self.device,
                fps=settings.size.fps,
                plan=settings.chunks if not endless else dataclasses.replace(settings.chunks, num_frames=None),
                temporal_factor=self.rules.geometry.temporal_factor,
                encoder=functools.partial(self._encoder, [request], settings),
                count_products=self._count_products,
                recipe={**self.recipe, **self._sampling_preset(settings)},
                guard=lambda: self._streaming(settings),
                thread=thread,
                generation=SharedGeneration(resources),
            )
            load_timings, self._load_timings = self._load_timings, {}
            started = time.perf_counter()
            with self._streaming(settings):
                prompts = source.encoder(recorder)(None)
                denoiser = ChunkedDenoiser(self._denoiser(settings, recorder))
                chunks = denoiser.stream(source.plan, prompts.conditions, [request.seed])
            return GenerationStream(
                source,
                chunks,
                recorder,
                StreamPlace.start(request, prompts.notes[0], keeps_frames=keeps_frames),
                text_seconds=time.perf_counter() - started,
                load_timings=load_timings,
            )
        except BaseException:
            resources.close()
            raise

    def _count_products(self, recorder: AttentionRecorder) -> None:
        """Products of quantised layers from here on."""
        if self._quantization is not None:
            self._quantization.counter.start(recorder.record_product)

    @property
    def _decodes_beside(self) -> bool:
        """Decoder and transformer share the cores of a CPU, and must both be on the device."""
        return self.device.type == "cuda" and self.offloading is None

    @contextlib.contextmanager
    def _streaming(self, settings: BatchSettings) -> Iterator[None]:
        """While a chunk is made."""
        with torch.inference_mode(), device_guard(self.device), self._explained_shortage(settings):
            yield

    @property
    def loras(self) -> tuple[Lora, ...]:
        """The LoRA files that are merged into the transformer."""
        return () if self._loras is None else self._loras.loras

    def set_loras(self, loras: Sequence[Any]) -> None:
        """Other LoRA files for the generations from here on, instead of those before; none for the model alone.

        loras: each in any form that LoraConfig.parse takes. The weights of the layers concerned are kept on the CPU, so
        that nothing is loaded again; what follows is bit for bit what a pipeline loaded with these files makes. Where
        several processes run the model together, each must be given the same files, as with `generate`.

        Raises ConfigError and ModelLoadError for files that cannot be used, and leaves everything as it was;
        PipelineBusyError while a generation runs.
        """
        configs = RuntimeConfig(lora=loras).lora
        with self._one_generation.held(), device_guard(self.device):
            if self._loras is None:
                raise ConfigError("set_loras: this pipeline does not know its model's folder: use load_pipeline")
            if self.offloading is not None:
                # Where they wait, the weights are whole and belong to nobody else.
                self.offloading.leave()
            self._loras.switch(configs)
            few_steps = self._few_steps_of([config.path for config in configs])
            model = self.recipe["model"]
            self.rules = dataclasses.replace(
                self.rules,
                few_steps=few_steps,
                loras=self._loras.loras,
                identity=functools.partial(
                    model_identity,
                    model["family"],
                    model["config_sha256"],
                    configs,
                    "none" if self._quantization is None else self._quantization.mode,
                    () if self._quantization is None else self._quantization.ignored,
                    [
                        path
                        for key in ("transformer_path", "transformer_2_path", "controlnet_path")
                        if (path := self.recipe["runtime"].get(key)) is not None
                    ],
                ),
            )
            runtime = {**self.recipe["runtime"], "lora": [dataclasses.asdict(config) for config in configs]}
            weights = with_loras(self.recipe.get("weights", {}), configs)
            others = {key: value for key, value in self.recipe.items() if key != "weights"}
            self.recipe = {**others, "runtime": runtime, **({"weights": weights} if weights else {})}

    @property
    def profile_remarks(self) -> tuple[str, ...]:
        """As GenerationPipeline says."""
        return () if self._graphs is None else ("recorded steps run without CUDA graphs, which have no ranges inside",)

    @contextlib.contextmanager
    def named_ranges(self) -> Iterator[None]:
        """While it holds, forward passes (`forward cond`) and attention calls (`attention self, layer 3, fa`) are
        ranges of torch.profiler, and no CUDA graph is replayed. It may begin and end between two steps."""
        with contextlib.ExitStack() as stack:
            if self._graphs is not None:
                stack.enter_context(self._graphs.paused("a profile records the step"))
            stack.enter_context(forward_ranges(self.transformer))
            yield

    @contextlib.contextmanager
    def timed_attention(self) -> Iterator[AttentionClock]:
        """While it holds, the calls of the transformer's attention layers are timed; no CUDA graph is replayed."""
        with contextlib.ExitStack() as stack:
            if self._graphs is not None:
                stack.enter_context(self._graphs.paused("attention is timed"))
            yield stack.enter_context(timed_layers(self.transformer, self.device))

    @contextlib.contextmanager
    def counted_density(self) -> Iterator[None]:
        """While it holds, attention reports say which share of the pairs every layer computed at every step, and show a
        plan (`density`, `plan`). Forward passes run without CUDA graphs, and each call waits for the device."""
        before, self._counts_density = self._counts_density, True
        try:
            with contextlib.ExitStack() as stack:
                if self._graphs is not None:
                    stack.enter_context(self._graphs.paused("the density of each call is counted"))
                yield
        finally:
            self._counts_density = before

    @contextlib.contextmanager
    def watched_latents(self, watch: OnStep) -> Iterator[None]:
        """While it holds, `watch` is called after every denoising step with its StepInfo and the latents at its end,
        float32 [batch, *sample_shape] on the model's device, which it must not keep."""
        before, self._watch_latents = self._watch_latents, watch
        try:
            yield
        finally:
            self._watch_latents = before

    @contextlib.contextmanager
    def wrapped_predictions(self, wrap: Wrapper) -> Iterator[None]:
        """While it holds, the sampler calls `wrap(predict)` for the model's guided prediction of every step."""
        before, self._wrap_predictions = self._wrap_predictions, wrap
        try:
            yield
        finally:
            self._wrap_predictions = before

    @contextlib.contextmanager
    def attention_choices(self, choices: AttentionConfig) -> Iterator[None]:
        """While it holds, the transformer's layers attend as if `choices` were the command line's; nothing is loaded
        again. The recipe of what is made meanwhile says what the pipeline was loaded with.

        Raises ConfigError and BackendUnavailableError as loading does, and ConfigError where CUDA graphs hold the
        choices.
        """
        if self._graphs is not None:
            raise ConfigError("attention_choices: CUDA graphs hold the kernels of one choice; use cuda_graphs='off'")
        layers = [(layer, layer.policy) for layer in self.transformer.attention_layers()]
        policies: dict[int, AttentionPolicy] = {}
        try:
            for layer, policy in layers:
                # One policy for all, as the model was built with: what is announced is announced once.
                layer.choose(policies.setdefault(id(policy), dataclasses.replace(policy, cli=choices)))
            yield
        finally:
            for layer, policy in layers:
                layer.choose(policy)

    def calibrate(self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None) -> Calibration:
        """Measure what the step caches MagCache and TeaCache and progressive resolution need to know of this model, on
        whole generations of these requests. on_progress: as of `generate`, each request by itself.

        Raises what `generate` raises, and ConfigError on several processes, which hold a part of the tokens each.
        """
        if self.mesh.size > 1:
            raise ConfigError("calibrate: expected one process; leave out --num-gpus and degrees")
        if self.rules.is_causal:
            raise ConfigError("calibrate: this model makes a video chunk by chunk, for which there are no step caches")
        if self._upsampler is not None:
            raise ConfigError("calibrate: the two stages of a generation are no one schedule; leave out upsampler_path")
        with self._one_generation.held():
            # Each branch by itself, as the cache runs them.
            batch = [
                self.resolve(
                    dataclasses.replace(
                        request, step_cache=None, cfg_gate=None, progressive_resolution=None, guidance_mode="two_pass"
                    )
                )
                for request in requests
            ]
            settings = BatchSettings.of(batch, self.rules)
            measured: list[StackMeasurement] = []
            clean: list[torch.Tensor] = []
            for index, request in enumerate(batch):

                def watch(progress: Progress, index: int = index) -> None:
                    if on_progress is not None:
                        on_progress(dataclasses.replace(progress, request_index=index))

                measured.append(StackMeasurement())
                alone = BatchSettings.of([request], self.rules)
                self._generate([request], alone, watch, block_runner=measured[-1], on_latents=clean.append)
        latents = self.rules.geometry.parts(torch.cat(clean), settings.size).video
        spectrum = None if min(latents.shape[-2:]) < MIN_FITTED_SIZE else fit_spectrum(latents)
        own = ("prompt", "negative_prompt", "seed")
        return Calibration(
            model=self.rules.identity(),
            num_steps=settings.num_inference_steps,
            ratios=mean_ratios(measured, settings.num_inference_steps),
            prompts=tuple(request.prompt for request in batch),
            request={key: value for key, value in settings.shared.to_dict().items() if key not in own},
            versions={"diffusion_runtime": str(self.recipe["version"]), "torch": torch.__version__},
            coefficients=fit_polynomials(measured),
            spectrum=None if spectrum is None else dataclasses.asdict(spectrum),
        )

    def close(self) -> None:
        """Give the memory of the model back. A later generation raises PipelineClosedError.

        Raises PipelineBusyError while a generation runs, and PipelineClosedError the second time.
        """
        with self._one_generation.held():
            self._one_generation.close()
            del self.text_encoder, self.transformer, self.decoder, self._image_conditioner, self._load_image_conditioner
            if self.offloading is not None:
                self.offloading.close()
            self._upsampler = self._loras = self._compiled = self._graphs = self._decoder_graphs = self.offloading = (
                None
            )
            release_device_memory(self.device)

    def _generate_apart(
        self, batch: Sequence[GenerationRequest], on_progress: OnProgress | None, open_sink: OpenSink | None
    ) -> list[GeneratedMedia]:
        """Each request by itself, one after the other, for what is decided per sample: a forward pass has one batch."""
        cancellations = Cancellations(len(batch), on_progress)
        remark = f"step_cache decides for each request: the {len(batch)} of this batch were made one after the other"
        made = []
        for index, request in enumerate(batch):

            def watch(progress: Progress, index: int = index) -> None:
                cancellations.watch(dataclasses.replace(progress, request_index=index))

            def open_own(_: int, header: ClipHeader, index: int = index) -> FrameSink:
                assert open_sink is not None
                return open_sink(index, header)

            if cancellations.is_wanted(index):
                settings = BatchSettings.of([request], self.rules)
                media = self._generate(
                    [request],
                    settings,
                    None if on_progress is None else watch,
                    None if open_sink is None else open_own,
                    (remark,),
                )
                if cancellations.is_wanted(index):
                    made += media
        return made

    @torch.inference_mode()
    def _generate(
        self,
        batch: Sequence[GenerationRequest],
        settings: BatchSettings,
        on_progress: OnProgress | None,
        open_sink: OpenSink | None = None,
        remarks: Sequence[str] = (),
        block_runner: BlockRunner | None = None,
        on_latents: Callable[[torch.Tensor], object] = lambda _: None,
    ) -> list[GeneratedMedia]:
        """batch: resolved requests; remarks: added to the attention report. block_runner: None for the one of the
        requests' step cache. on_latents: called with the clean latents, [batch, *sample_shape]."""
        cancellations = Cancellations(len(batch), on_progress)
        watch = None if on_progress is None else cancellations.watch
        digests = input_digests(settings.shared)
        inputs = {"inputs": digests} if digests else {}
        recorder = AttentionRecorder(counts_density=self._counts_density)
        clock = StageClock(self.device, watch)
        self._note_remarks(batch, settings, remarks, recorder)
        self._count_products(recorder)
        preset = self._sampling_preset(settings)
        denoiser = self._denoiser(settings, recorder, block_runner)
        encode = self._encoder(batch, settings, recorder)
        compile_cost = CompileCost(self._compiled)
        with device_guard(self.device), self._explained_shortage(settings):
            with clock.stage("text", 1) as done:
                prompts = encode(None)
                done(1)
            if self.offloading is not None:
                self.offloading.leave_text_encoders()
            with clock.stage("denoise", settings.num_steps_of_video) as done:
                seeds = [request.seed for request in batch]

                def on_step(step: StepInfo, at: torch.Tensor) -> None:
                    if self._watch_latents is not None:
                        self._watch_latents(step, at)
                    done(settings.num_done(step))

                if settings.rules.is_causal:
                    latents = ChunkedDenoiser(denoiser).denoise(
                        prompts.conditions, seeds, on_step, lambda prompt: encode(prompt).conditions
                    )
                else:
                    latents = denoiser.denoise(prompts.conditions, seeds, on_step)
                on_latents(latents)
            if self._quantization is not None:
                self._quantization.counter.stop()
            move_timings = {} if self.offloading is None else self.offloading.report(recorder.note)
            recipes = [
                {**self.recipe, "request": request.to_dict(), **inputs, **preset, "notes": list(notes)}
                for request, notes in zip(batch, prompts.notes, strict=True)
            ]
            frames: dict[int, torch.Tensor] = {}
            sounds: dict[int, Audio | None] = {}
            if self._decoder_graphs is not None:
                self._decoder_graphs.start()
            # One after the other: the decoder's activations are what needs the most memory.
            for index in range(len(batch)):
                if not cancellations.is_wanted(index):
                    continue
                with clock.stage("decode", 1, index) as done:
                    parts = self.rules.geometry.parts(latents[index : index + 1], settings.size)
                    # A file of a clip with sound begins with the sound, which is not there yet.
                    sink = open_sink if parts.audio is None else None
                    decoder, fps = self.decoder.for_request(batch[index]), settings.size.fps
                    stream = without_first(decoder.stream(parts.video), self.rules.geometry.num_frames_before)
                    frames[index] = decode_frames(stream, index, fps, recipes[index], sink)
                    # Afterwards: a decoder may find that its kernels are not to be used here.
                    recorder.record_library("vae", decoder.library, decoder.implementation)
                    sounds[index] = self._sound(parts.audio, recorder, settings)
                    done(1)
            if (remark := shortage_remark(self.device)) is not None:
                recorder.note(remark)
            compile_timings = compile_cost.report(recorder)
            if frames and self._decoder_graphs is not None:
                recorder.record_decoder_graphs(self._decoder_graphs.report())
        load_timings, self._load_timings = self._load_timings, {}
        return [
            GeneratedMedia(
                frames=frames[index].numpy(),
                fps=settings.size.fps,
                recipe=recipes[index],
                attention_report=recorder.report(),
                timings={**load_timings, **clock.timings(index), **compile_timings, **move_timings},
                peak_memory=peaks(self.device),
                audio=sounds[index],
            )
            for index in range(len(batch))
            if cancellations.is_wanted(index)
        ]

    def _denoiser(
        self, settings: BatchSettings, recorder: AttentionRecorder, block_runner: BlockRunner | None = None
    ) -> LatentDenoiser:
        return LatentDenoiser(
            transformer=self.transformer,
            image_conditioner=self._loaded_image_conditioner,
            settings=settings,
            mesh=self.mesh,
            device=self.device,
            dtype=self.dtype,
            model=self.rules.identity(),
            recorder=recorder,
            block_runner=block_runner,
            is_compiled=self._compiled is not None,
            graphs=self._graphs,
            published=self.rules.teacache,
            upsampler=self._upsampler,
            wrap=self._wrap_predictions,
        )

    def _encoder(
        self, batch: Sequence[GenerationRequest], settings: BatchSettings, recorder: AttentionRecorder
    ) -> Callable[[str | None], EncodedPrompts]:
        """Encodes the prompts of a batch, or another one for all of it."""

        def encode(prompt: str | None) -> EncodedPrompts:
            requests = batch if prompt is None else [dataclasses.replace(each, prompt=prompt) for each in batch]
            return encode_prompts(
                self.text_encoder, requests, recorder, self.device, self.dtype, is_guided=settings.is_guided
            )

        return encode

    def _sampling_preset(self, settings: BatchSettings) -> dict[str, str]:
        """For a recipe."""
        named = self.rules.sampling_preset(settings.shared)
        return {} if named is None else {"sampling_preset": named}

    @contextlib.contextmanager
    def _explained_shortage(self, settings: BatchSettings) -> Iterator[None]:
        """Out of memory inside is explained by what would fit. What fails leaves nothing of the offloaded parts on the
        device."""
        try:
            with explain_memory_shortage(
                "generating", lambda: f"{self._fitting(settings.shared)}{settings.advice(self.dtype)}"
            ):
                yield
        except BaseException:
            if self.offloading is not None:
                self.offloading.leave()
            raise

    def _note_remarks(
        self,
        batch: Sequence[GenerationRequest],
        settings: BatchSettings,
        remarks: Sequence[str],
        recorder: AttentionRecorder,
    ) -> None:
        """Put what is known of these requests before they run into the report, and warnings into the log."""
        for remark in (*self._remarks, *remarks):
            recorder.note(remark)
        if self.mesh.branch.size > 1 and not settings.is_guided:
            remark = "no guidance to share: the processes of one half wait for the other; leave out --cfg-parallel"
            logger.warning(remark)
            recorder.note(remark)
        for remark in dict.fromkeys(remark for request in batch for remark in self.rules.unused(request)):
            logger.warning(remark)
            recorder.note(remark)
        note = self.rules.sampling_note(settings.shared)
        if note is not None:
            logger.info(note)
            recorder.note(note)

    def _loaded_image_conditioner(self) -> ImageConditioner:
        """Loaded when the first request has an image."""
        if self.offloading is not None:
            # The text encoders, which are done, have its room.
            self.offloading.leave()
        if self._image_conditioner is None:
            self._image_conditioner = self._load_image_conditioner()
        return self._image_conditioner

    def _sound(
        self, latents: torch.Tensor | None, recorder: AttentionRecorder, settings: BatchSettings
    ) -> Audio | None:
        """The sound of one sample, [1, channels, length, bins], or the file's that the video was made for; a note
        records audio latents that the decoder cannot decode."""
        if settings.shared.audio_path is not None:
            recorder.note(f"the sound is that of {settings.shared.audio_path}")
            seconds = settings.size.num_frames / settings.size.fps
            return read_sound(settings.shared.audio_path, "audio_path", seconds, _FILE_SOUND_RATE)
        if latents is None:
            return None
        sound = self.decoder.decode_audio(latents)
        if sound is None:
            recorder.note("the model made sound as well, which this decoder does not decode")
        return sound
