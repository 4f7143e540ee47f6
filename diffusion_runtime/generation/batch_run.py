"""BatchRun: one batch of requests on the parts of a model, from texts to clean latents."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.core.progress import StageClock
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.interface import LatentEncoder
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.errors import DiffusionRuntimeError
from diffusion_runtime.generation.chunked_denoiser import ChunkedDenoiser
from diffusion_runtime.generation.hooks import Hooks
from diffusion_runtime.generation.latent_denoiser import Denoised, LatentDenoiser
from diffusion_runtime.generation.participants import Participants
from diffusion_runtime.generation.parts import PipelineParts
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts, encode_prompts
from diffusion_runtime.generation.remarks import note_remarks
from diffusion_runtime.generation.saved_latents import SavedLatents
from diffusion_runtime.memory.device_memory import explain_memory_shortage
from diffusion_runtime.models.interface import ImageConditioner
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.longer_clips import segment_prompts, window_prompts
from diffusion_runtime.rules.request_rules import RequestRules
from diffusion_runtime.text_encoders.interface import Conditions


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchRun:
    """One batch while it is made.

    batch: resolved requests. mesh: the processes that run the model together. participants: those of this generation,
    which have begun. recorder: of its report. begin: what an earlier run has left of the one request, None for nothing.
    """

    parts: PipelineParts
    rules: RequestRules
    batch: Sequence[GenerationRequest]
    settings: BatchSettings
    device: torch.device
    dtype: torch.dtype
    mesh: ProcessMesh
    hooks: Hooks
    participants: Participants
    recorder: AttentionRecorder
    begin: SavedLatents | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context manager: compute on the device, and explain a lack of memory by what would fit. A failure leaves no
        offloaded part on the device."""

        def remedy() -> str:
            return f"{self.parts.memory.fitting(self.settings.shared)}{self.settings.advice(self.dtype)}"

        with torch.inference_mode(), device_guard(self.device):
            try:
                with explain_memory_shortage("generating", remedy):
                    yield
            except BaseException:
                self.participants.abandon()
                raise

    def encode(self, prompt: str | None = None, recorder: AttentionRecorder | None = None) -> EncodedPrompts:
        """Encode the prompts of the batch, or another prompt for all of it. recorder: counts, None for the run's."""
        batch = self.batch
        requests = batch if prompt is None else [dataclasses.replace(each, prompt=prompt) for each in batch]
        recorder = self.recorder if recorder is None else recorder
        encoder, guidance, kept = self.parts.text_encoder, self.settings.guidance, self.parts.encodings
        return encode_prompts(
            encoder,
            requests,
            recorder,
            self.device,
            self.dtype,
            kept,
            reads_negative=guidance.reads_negative,
            has_zero_text=guidance.has_zero_text,
            vocabulary=self.parts.vocabulary,
        )

    def denoiser(self) -> LatentDenoiser:
        """Return the denoiser of this batch."""
        return LatentDenoiser(
            transformer=self.parts.transformer,
            image_conditioner=self.loaded_image_conditioner,
            latent_encoder=self._loaded_latent_encoder,
            settings=self.settings,
            mesh=self.mesh,
            device=self.device,
            dtype=self.dtype,
            model=self.rules.step_caches.identity(),
            recorder=self.recorder,
            graphs=self.parts.graphs,
            published=self.rules.step_caches.teacache,
            upsampler=self.parts.upsampler,
            encodings=self.parts.encodings,
            hooks=self.hooks,
        )

    def read_prompts(self, clock: StageClock) -> EncodedPrompts:
        """Encode the prompts of the batch, as a stage."""
        with clock.stage("text", 1) as done:
            prompts = self._with_parts(self.encode())
            done(1)
        self.participants.after_text()
        return prompts

    def _with_parts(self, prompts: EncodedPrompts) -> EncodedPrompts:
        """Return the prompts with those of context windows, or of segments, that have their own."""
        wanted = window_prompts(self.settings) or segment_prompts(self.settings)
        encoded: dict[str | None, EncodedPrompts] = {None: prompts}
        encoded |= {prompt: self.encode(prompt) for prompt in dict.fromkeys(wanted) if prompt is not None}
        if len(encoded) == 1:
            return prompts
        of_requests = zip(*(each.notes for each in encoded.values()), strict=True)
        notes = tuple(tuple(dict.fromkeys(chain.from_iterable(of_one))) for of_one in of_requests)
        return EncodedPrompts(prompts.conditions, notes, tuple(encoded[prompt].conditions for prompt in wanted))

    def with_known_length(self, clock: StageClock) -> tuple[BatchRun, EncodedPrompts | None]:
        """Return the run, and its prompts where they had to be encoded: of one request that leaves its length open the
        run of the length that the model predicts. Raises what RequestRules.of_length raises."""
        if not self.rules.leaves_length_open(self.settings.shared):
            return self, None
        (request,), prompts = self.batch, self.read_prompts(clock)
        (seconds,) = prompts.conditions["cond"].seconds
        if math.isnan(seconds):
            raise DiffusionRuntimeError(
                "num_frames: the predicted length is not a number (NaN): the weights of the duration head are damaged; "
                "copy the model again, or set --num-frames"
            )
        made = self.rules.of_length(request, seconds)
        self.recorder.note(
            f"num_frames: {made.num_frames}, chosen for the prompt: a length of {seconds:.2f} s was predicted, and "
            f"{request.min_seconds:g} to {request.max_seconds:g} s are asked for"
        )
        run = dataclasses.replace(self, batch=[made], settings=self.rules.settings(made))
        note_remarks(run.batch, run.settings, self.rules, self.mesh, self.recorder)
        return run, prompts

    def denoise(self, clock: StageClock, prompts: EncodedPrompts | None = None) -> tuple[Denoised, EncodedPrompts]:
        """Encode the prompts, unless they are given, and denoise the batch, from where an earlier run has left it."""
        prompts = self.read_prompts(clock) if prompts is None else prompts
        num_steps = self.settings.shared.stop_after_step or self.settings.chunking.num_steps_of_video
        with clock.stage("denoise", num_steps) as done:

            def on_step(step: StepInfo, at: torch.Tensor) -> None:
                self.hooks.notify_step(step, at)
                done(self.settings.chunking.num_done(step))

            denoiser, seeds = self.denoiser(), [request.seed for request in self.batch]
            if not self.settings.sampling.is_causal:
                begin = None if self.begin is None else self.begin.state
                denoised = denoiser.denoise(
                    prompts.conditions, seeds, on_step, begin=begin, of_windows=prompts.of_parts
                )
            elif self.begin is not None:
                latents = self.begin.clean[0]
                denoised = Denoised(latents.to(self.device), self.settings.size, None)
            else:
                latents = ChunkedDenoiser(denoiser).denoise(
                    prompts.conditions, seeds, on_step, lambda prompt: self.encode(prompt).conditions
                )
                denoised = Denoised(latents, self.settings.size, None)
            if self.hooks.on_latents is not None:
                self.hooks.on_latents(denoised.latents)
        return denoised, prompts

    def keep(self, denoised: Denoised, recipes: Sequence[Mapping[str, Any]]) -> None:
        """Hand over what the denoising has left of each request, where somebody wants it. recipes: of the requests."""
        if self.hooks.keep is None:
            return
        for index, recipe in enumerate(recipes):
            if denoised.state is None:
                num_steps, clean = self.settings.chunking.num_steps_of_video, denoised.latents[index : index + 1]
                saved = SavedLatents(recipe, num_steps, num_steps, clean={0: clean})
            else:
                saved = SavedLatents.of_state(denoised.state.of_sample(index), self.settings, recipe)
            self.hooks.keep(index, saved)

    def of_segment(self, segment: Segment, image_path: str | None = None) -> BatchRun:
        """Return the run of one segment of the one request's video. image_path: of the image that it begins with, None
        for the request's."""
        settings = self.settings.of_segment(segment.index, image_path)
        return dataclasses.replace(self, batch=[settings.shared], settings=settings)

    def denoise_segment(
        self,
        conditions: Mapping[str, Conditions],
        segment: Segment,
        count: int,
        conditioner: Callable[[ImageConditioner], ImageConditioner],
        clock: StageClock,
        began: float,
    ) -> torch.Tensor:
        """Denoise a segment, whose run this is. Return clean latents, float32 [1, *sample_shape]. conditions: of its
        prompts, by guidance branch. count: of the segments. conditioner: returns the segment's, of the model's. began:
        when the first segment did, as of StageClock.stage."""
        settings = self.settings
        num_steps = settings.num_steps
        # Encodings are kept by the request without its seed; a segment may see the one before, or noise of the seed.
        denoiser = dataclasses.replace(
            self.denoiser(),
            settings=settings,
            image_conditioner=lambda: conditioner(self.loaded_image_conditioner()),
            encodings=None,
        )
        with clock.stage("denoise", num_steps * count, began=began) as done:

            def on_step(step: StepInfo, at: torch.Tensor) -> None:
                self.hooks.notify_step(step, at)
                done(num_steps * segment.index + step.index + 1)

            seeds = [settings.shared.seed]
            latents = denoiser.denoise(conditions, seeds, on_step, segment.num_drawn).latents
            if self.hooks.on_latents is not None:
                self.hooks.on_latents(latents)
        return latents

    def loaded_image_conditioner(self) -> ImageConditioner:
        """Return the image conditioner, once there is room for it."""
        self.participants.before_image_encoder()
        return self.parts.image_conditioner

    def _loaded_latent_encoder(self) -> LatentEncoder:
        self.participants.before_image_encoder()
        return self.parts.latent_encoder
