"""RestoredClip: a video that is restored piece by piece, each blended with the one before where they share frames."""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from diffusion_runtime.core.progress import OnProgress, Progress, StageClock
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.generation.batch_run import BatchRun
from diffusion_runtime.generation.frame_decoding import to_pixels
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts
from diffusion_runtime.media import Audio, ClipHeader, GeneratedMedia
from diffusion_runtime.media.audio import has_sound, read_long_sound
from diffusion_runtime.media.file_writer import FrameSink, OpenSink
from diffusion_runtime.memory.machine_memory import peaks
from diffusion_runtime.models.video_restoration import VideoRestoration, shared_frames
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.draft import filled

# Frames of a longer video lie in a file without a name, in pages that the system may write and drop.
MAX_FRAME_BYTES = 4 * 2**30
_SOUND_RATE = 48000


@dataclass(frozen=True)
class RestoredClip:
    """Result of one request. frames: uint8 on the CPU, [frames, height, width, 3]; fps: of the file that it was
    made from, where the request says no other; audio: the file's."""

    frames: torch.Tensor
    fps: float
    audio: Audio | None


class Restoration:
    """One request of a model that restores videos, on its way. run: of the request; decoder: of the model; clock: of
    the generation."""

    def __init__(
        self, run: BatchRun, decoder: LatentDecoder, clock: StageClock, on_progress: OnProgress | None
    ) -> None:
        restoration = run.settings.sampling.restoration
        assert restoration is not None
        self._run = run
        self._decoder = decoder
        self._clock = clock
        self._on_progress = on_progress
        self._restoration: VideoRestoration = restoration
        self._request: GenerationRequest = run.settings.shared
        self._pieces = run.settings.pieces
        # Seconds of all pieces by stage.
        self.timings: dict[str, float] = {}

    def make(
        self, prompts: EncodedPrompts, recipe: Mapping[str, Any], open_sink: Callable[[ClipHeader], FrameSink] | None
    ) -> RestoredClip:
        """Restore all pieces. recipe, open_sink: as of decode_frames. Raises DiffusionRuntimeError for frames that are
        not numbers, and RequestError for a file that has changed meanwhile."""
        request = self._request
        fps = self._restoration.frame_rate(request, self._run.settings.size.fps)
        audio = self._sound(fps)
        shape = filled(request.num_frames), filled(request.height), filled(request.width), 3
        frames = _room_for(shape)
        # A file of a clip with sound begins with the sound, which is written with all of it.
        take = None
        if open_sink is not None and audio is None:
            take = open_sink(ClipHeader(*shape[:3], fps, recipe))
        if len(self._pieces) == 1:
            self._piece(0, prompts, frames, take, self._clock)
        else:
            with self._clock.stage("pieces", len(self._pieces)) as done:
                for index in range(len(self._pieces)):
                    self._piece(index, prompts, frames, take, StageClock(self._run.device, self._still(index)))
                    done(index + 1)
        return RestoredClip(frames, fps, audio)

    def _still(self, index: int) -> OnProgress | None:
        """Return an on_progress of the stages of a piece, which says that no further piece is done: it may cancel."""
        on_progress, number = self._on_progress, len(self._pieces)
        if on_progress is None:
            return None
        return lambda progress: on_progress(Progress("pieces", index, number, progress.seconds))

    def _piece(
        self, index: int, prompts: EncodedPrompts, frames: torch.Tensor, take: FrameSink | None, clock: StageClock
    ) -> None:
        """Restore one piece into its place among the frames, and pass on those that no other piece changes."""
        piece, run = self._pieces[index], self._run
        request = self._restoration.of_piece(self._request, piece)
        settings = BatchSettings.of([request], run.settings.sampling)
        of_piece = dataclasses.replace(run, batch=[request], settings=settings)
        with clock.stage("denoise", 1) as done:
            latents = of_piece.denoiser().denoise(prompts.conditions, [request.seed], lambda *_: None)
            if run.hooks.on_latents is not None:
                run.hooks.on_latents(latents)
            done(1)
        # As for the encoder of the next piece: what is offloaded makes room.
        run.participants.before_image_encoder()
        shared = shared_frames(self._pieces)[index]
        final = self._pieces[index + 1].start if index + 1 < len(self._pieces) else piece.stop
        position, passed = piece.start, piece.start
        with clock.stage("decode", 1, None) as done:
            decoder = self._decoder.for_request(request)
            for chunk in decoder.stream(latents).chunks:
                pixels = to_pixels(chunk[0], position)
                blended = min(len(pixels), max(0, piece.start + shared - position))
                if blended:
                    _blend_(pixels[:blended], frames[position : position + blended], position - piece.start, shared)
                frames[position : position + len(pixels)] = pixels
                position += len(pixels)
                stop = min(position, final)
                if take is not None and stop > passed:
                    take(frames[passed:stop].numpy())
                passed = max(passed, stop)
            done(1)
        run.recorder.record_library("vae", self._decoder.library, self._decoder.implementation, self._decoder.chosen)
        for name, seconds in clock.timings(0).items():
            self.timings[name] = self.timings.get(name, 0.0) + seconds

    def _sound(self, fps: float) -> Audio | None:
        """Return the sound of the frames that are restored; None for a file without."""
        request, source = self._request, self._restoration.source(self._request)
        if source.fps is None or not has_sound(source.path, source.field):
            return None
        start, seconds = (request.video_first_frame or 0) / source.fps, filled(request.num_frames) / source.fps
        if abs(fps - source.fps) > 1e-3:
            self._run.recorder.note(
                f"the sound is left out: the video has {source.fps:.4g} frames per second, and what is made {fps:.4g}"
            )
            return None
        self._run.recorder.note(f"the sound is that of {source.path}")
        return read_long_sound(source.path, source.field, start, seconds, _SOUND_RATE)


def restore(
    run: BatchRun,
    decoder: LatentDecoder,
    recipes_of: Callable[[EncodedPrompts], list[dict[str, Any]]],
    clock: StageClock,
    on_progress: OnProgress | None,
    open_sink: OpenSink | None,
) -> GeneratedMedia:
    """Make the one request of a run. recipes_of: encoded prompts -> the recipe of each request; open_sink: as of
    Pipeline.generate. Raises what Restoration.make raises."""
    restoration = Restoration(run, decoder, clock, on_progress)
    with run.guarded():
        prompts = run.read_prompts(clock)
        run.participants.before_decoding()
        (recipe,) = recipes_of(prompts)
        clip = restoration.make(prompts, recipe, None if open_sink is None else functools.partial(open_sink, 0))
        moved = run.participants.after_denoising(run.recorder)
        timings = {**run.participants.finish(run.recorder), **moved}
    return GeneratedMedia(
        frames=clip.frames.numpy(),
        fps=clip.fps,
        recipe=recipe,
        attention_report=run.recorder.report(),
        timings={**clock.timings(0), **restoration.timings, **timings},
        peak_memory=peaks(run.device),
        audio=clip.audio,
    )


def _blend_(pixels: torch.Tensor, before: torch.Tensor, first: int, shared: int) -> None:
    """Blend frames of a piece with those of the one before, in place. first: of them among the `shared` ones."""
    steps = torch.arange(first + 1, first + 1 + len(pixels), dtype=torch.float32) / (shared + 1)
    # Half a cosine: without a bend where the pieces meet.
    weights = (0.5 - 0.5 * (steps * math.pi).cos()).view(-1, 1, 1, 1)
    pixels.copy_((pixels.float() * weights + before.float() * (1 - weights)).round_())


def _room_for(shape: tuple[int, ...]) -> torch.Tensor:
    """Return an empty uint8 tensor; a large one in a file that is gone with it."""
    if math.prod(shape) <= MAX_FRAME_BYTES:
        return torch.empty(shape, dtype=torch.uint8)
    with tempfile.TemporaryFile(prefix="diffusion_runtime_frames_") as file:
        return torch.from_numpy(numpy.memmap(file, dtype=numpy.uint8, mode="w+", shape=shape))
