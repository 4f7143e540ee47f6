"""SegmentedClip: frames of a video that is made segment after segment, each denoised and decoded before the next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from diffusion_runtime.core.progress import StageClock
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.generation.batch_run import BatchRun
from diffusion_runtime.generation.frame_decoding import to_pixels
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts
from diffusion_runtime.generation.saved_latents import SavedLatents
from diffusion_runtime.models.interface import ImageConditioner


class SegmentedClip:
    """The one request of a run on its way. prompts: encoded; decoder: of the request; clock: of the generation.

    recipe: of the generation. latents: of the segments so far, float32 [1, *sample_shape] each. timings: seconds of
    participants by name.
    """

    def __init__(
        self,
        run: BatchRun,
        prompts: EncodedPrompts,
        decoder: LatentDecoder,
        clock: StageClock,
        recipe: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._run = run
        self._prompts = prompts
        self._decoder = decoder
        self._clock = clock
        self._recipe = recipe
        self._conditioner: ImageConditioner | None = None
        self.latents: list[torch.Tensor] = []
        self.timings: dict[str, float] = {}

    def stream(self) -> FrameStream:
        """Return the frames, uint8 on the CPU, made as they are taken. Raises DiffusionRuntimeError for frames that are
        not numbers."""
        plan = self._run.settings.segments
        return FrameStream(plan.num_frames, self._blended() if plan.is_blended else self._continued())

    def _continued(self) -> Iterator[torch.Tensor]:
        """Yield every frame once, of segments that begin with the last ones of the segment before."""
        plan = self._run.settings.segments
        before, left = torch.empty(0), plan.num_frames
        began = time.perf_counter()
        for segment in plan:
            tail: list[torch.Tensor] = []
            skipped, position = segment.num_shared, segment.start
            for chunk in self._decoded(segment, before, began):
                if plan.overlap:
                    tail.append(chunk[:, -plan.overlap :])
                new = to_pixels(chunk[0, skipped:], position + skipped)[None, :left]
                skipped, position = max(0, skipped - chunk.shape[1]), position + chunk.shape[1]
                if new.shape[1]:
                    yield new
                    left -= new.shape[1]
            before = torch.cat(tail, dim=1)[0, -plan.overlap :].permute(3, 0, 1, 2) * 2 - 1 if tail else before

    def _blended(self) -> Iterator[torch.Tensor]:
        """Yield every frame once it is final: those that the next segment shares wait for it."""
        segments = list(self._run.settings.segments)
        waiting, began = torch.empty(0, dtype=torch.uint8), time.perf_counter()
        for segment, following in zip(segments, (*segments[1:], None), strict=True):
            num_final = segment.num_frames if following is None else following.start - segment.start
            kept, position = [], 0
            for chunk in self._decoded(segment, None, began):
                pixels = to_pixels(chunk[0], segment.start + position)
                shared = waiting[position : position + len(pixels)]
                if len(shared):
                    _blend_(pixels[: len(shared)], shared, position, len(waiting))
                final = max(0, num_final - position)
                if final:
                    yield pixels[None, :final]
                kept.append(pixels[final:])
                position += len(pixels)
            waiting = torch.cat(kept)

    def _decoded(self, segment: Segment, before: torch.Tensor | None, began: float) -> Iterator[torch.Tensor]:
        """Denoise a segment, and yield its frames as its decoder does. before: those that it begins with, as of
        ImageConditioner.of_segment. began: when the first one did, in seconds."""
        run, recorder = self._run, self._run.recorder
        if segment.index:
            run.participants.begin_again(recorder)
        known = before if segment.index else None

        def conditioner(of_model: ImageConditioner) -> ImageConditioner:
            self._conditioner = (self._conditioner or of_model).of_segment(segment, known)
            return self._conditioner

        earlier = {} if run.begin is None else run.begin.clean
        if segment.index in earlier:
            # The next segment's condition is made of that of this one.
            conditioner(run.loaded_image_conditioner())
            made = earlier[segment.index].to(run.device)
        else:
            made = run.denoise_segment(self._prompts, segment, conditioner, self._clock, began)
        self.latents.append(made)
        if run.hooks.keep is not None:
            num_segments = len(run.settings.segments)
            # Those of an earlier run behind this one too.
            clean = {**earlier, **dict(enumerate(self.latents))}
            run.hooks.keep(0, SavedLatents(self._recipe, len(clean), num_segments, clean=clean))
        for name, seconds in run.participants.after_denoising(recorder).items():
            self.timings[name] = self.timings.get(name, 0.0) + seconds
        run.participants.before_decoding()
        with self._clock.stage("decode", 1, 0) as done:
            decoder = self._decoder.of_segment(segment)
            yield from decoder.stream(made).chunks
            done(1)
        recorder.record_library("vae", decoder.library, decoder.implementation, decoder.chosen)


def _blend_(pixels: torch.Tensor, before: torch.Tensor, first: int, shared: int) -> None:
    """Blend frames of a segment with those of the one before, in place. first: of them among the `shared` ones."""
    steps = torch.arange(first + 1, first + 1 + len(pixels), dtype=torch.float32) / (shared + 1)
    # Half a cosine: without a bend where the segments meet.
    weights = (0.5 - 0.5 * (steps * math.pi).cos()).view(-1, 1, 1, 1)
    pixels.copy_((pixels.float() * weights + before.float() * (1 - weights)).round_())
