"""SegmentedClip: frames of a video that is made segment after segment, each denoised and decoded before the next."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from diffusion_runtime.core.progress import StageClock
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.denoising.segments import Segment
from diffusion_runtime.generation.batch_run import BatchRun
from diffusion_runtime.generation.frame_decoding import to_pixels, without_first
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts
from diffusion_runtime.generation.saved_latents import SavedLatents
from diffusion_runtime.media.audio import Audio, crossfaded
from diffusion_runtime.media.publish import published
from diffusion_runtime.models.interface import ImageConditioner
from diffusion_runtime.text_encoders.interface import Conditions


class SegmentedClip:
    """The one request of a run on its way. prompts: encoded; decoder: of the request; clock: of the generation.

    recipe: of the generation. latents: of the segments so far, float32 [1, *sample_shape] each. sounds: of the same, in
    a model that makes pictures and sound. timings: seconds of participants by name.
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
        self._folder = Path()
        self.latents: list[torch.Tensor] = []
        self.sounds: list[Audio] = []
        self.timings: dict[str, float] = {}

    def stream(self) -> FrameStream:
        """Return the frames, uint8 on the CPU, made as they are taken. Raises DiffusionRuntimeError for frames that are
        not numbers."""
        plan = self._run.settings.segments
        return FrameStream(plan.num_frames, self._blended() if plan.is_blended else self._continued())

    def sound(self) -> Audio | None:
        """Return the sounds of all segments as one, which fades from one to the next over the frames that they share;
        None in a model that makes pictures alone."""
        if not self.sounds:
            return None
        plan, fps = self._run.settings.segments, self._run.settings.size.fps
        starts = [segment.start / fps for segment in plan]
        return crossfaded(self.sounds, starts, plan.overlap / fps, plan.num_frames / fps)

    def _continued(self) -> Iterator[torch.Tensor]:
        """Yield every frame once, of segments that begin with the last ones of the segment before."""
        plan = self._run.settings.segments
        before, left = torch.empty(0), plan.num_frames
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="diffusion_runtime_segments_") as folder:
            self._folder = Path(folder)
            for segment in plan:
                tail: list[torch.Tensor] = []
                skipped, position = segment.num_shared, segment.start
                for chunk in self._decoded(segment, before, began):
                    if plan.overlap:
                        tail.append(chunk[:, -plan.overlap :])
                        # A view holds its whole chunk.
                        while sum(each.shape[1] for each in tail[1:]) >= plan.overlap:
                            del tail[0]
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
        recorder, known = self._run.recorder, before if segment.index else None
        if segment.index:
            self._run.participants.begin_again(recorder)
        run = self._run.of_segment(segment, self._image_of(segment, known))

        def conditioner(of_model: ImageConditioner) -> ImageConditioner:
            self._conditioner = (self._conditioner or of_model).of_segment(segment, known)
            return self._conditioner

        earlier = {} if run.begin is None else run.begin.clean
        if segment.index in earlier:
            # The next segment's condition is made of that of this one.
            conditioner(run.loaded_image_conditioner())
            made = earlier[segment.index].to(run.device)
        else:
            count, conditions = len(self._run.settings.segments), self._conditions(run, segment)
            made = run.denoise_segment(conditions, segment, count, conditioner, self._clock, began)
        self.latents.append(made)
        if run.hooks.keep is not None:
            num_segments = len(self._run.settings.segments)
            # Those of an earlier run behind this one too.
            clean = {**earlier, **dict(enumerate(self.latents))}
            run.hooks.keep(0, SavedLatents(self._recipe, len(clean), num_segments, clean=clean))
        for name, seconds in run.participants.after_denoising(recorder).items():
            self.timings[name] = self.timings.get(name, 0.0) + seconds
        run.participants.before_decoding()
        with self._clock.stage("decode", 1, 0) as done:
            decoder, geometry = self._decoder.of_segment(segment), run.settings.sampling.geometry
            if not self._run.settings.segments.is_blended:
                # Noise that a decoder adds is of the segment's seed.
                decoder = decoder.for_request(run.batch[0])
            parts = geometry.parts(made, run.settings.size)
            stream = decoder.recording(recorder).stream(parts.video)
            yield from without_first(stream, geometry.num_frames_before).chunks
            sound = None if parts.audio is None else decoder.decode_audio(parts.audio)
            if sound is not None:
                self.sounds.append(sound)
            done(1)
        recorder.record_library("vae", decoder.library, decoder.implementation, decoder.chosen)

    def _conditions(self, run: BatchRun, segment: Segment) -> Mapping[str, Conditions]:
        """Return what the prompts of a segment, whose run is given, are encoded to."""
        if segment.index and run.settings.sampling.text_sees_images:
            with self._clock.stage("text", 1) as done:
                encoded = run.encode()
                done(1)
            run.participants.after_text()
            return encoded.conditions
        return self._prompts.of_parts[segment.index] if self._prompts.of_parts else self._prompts.conditions

    def _image_of(self, segment: Segment, before: torch.Tensor | None) -> str | None:
        """Write the last frame of the segment before as the image that one begins with, where the model takes one;
        return its path."""
        if before is None or not self._run.settings.sampling.continues_images:
            return None
        from PIL import Image

        # As the file shows it, so that it can be gone on from the file as well.
        pixels = ((before[:, -1] + 1) * 127.5).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
        path = self._folder / f"{segment.index}.png"
        with published(path) as file:
            Image.fromarray(pixels).save(file, "PNG")
        return str(path)


def _blend_(pixels: torch.Tensor, before: torch.Tensor, first: int, shared: int) -> None:
    """Blend frames of a segment with those of the one before, in place. first: of them among the `shared` ones."""
    steps = torch.arange(first + 1, first + 1 + len(pixels), dtype=torch.float32) / (shared + 1)
    # Half a cosine: without a bend where the segments meet.
    weights = (0.5 - 0.5 * (steps * math.pi).cos()).view(-1, 1, 1, 1)
    pixels.copy_((pixels.float() * weights + before.float() * (1 - weights)).round_())
