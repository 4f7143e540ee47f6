"""Frames of a video that is made in segments: each is denoised, decoded, and shown to the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diffusion_runtime.core.progress import StageClock
from diffusion_runtime.decoders.interface import FrameStream, LatentDecoder
from diffusion_runtime.generation.batch_run import BatchRun
from diffusion_runtime.generation.frame_decoding import without_first
from diffusion_runtime.generation.prompt_encoding import EncodedPrompts


def segment_frames(
    run: BatchRun, prompts: EncodedPrompts, decoder: LatentDecoder, clock: StageClock, latents: list[torch.Tensor]
) -> FrameStream:
    """Return the frames of a request whose video is made in segments, computed as they are taken. run: of one request.
    latents: is given those of each segment."""
    plan, recorder = run.settings.segments, run.recorder
    recorder.note(
        f"made in {len(plan)} segments of {plan.length} frames, each from the last {plan.overlap} of the one before"
    )

    def chunks() -> Iterator[torch.Tensor]:
        before: torch.Tensor | None = None
        left = plan.num_frames
        for segment in plan:
            if segment.index:
                run.participants.begin_again(recorder)
            made = run.denoise_segment(prompts, segment, before, clock)
            latents.append(made)
            run.participants.after_denoising(recorder)
            run.participants.before_decoding()
            shown = []
            with clock.stage("decode", 1, 0) as done:
                stream = without_first(decoder.stream(made), segment.num_known)
                for chunk in stream.chunks:
                    shown.append(chunk[0, -plan.overlap :])
                    if left:
                        yield chunk[:, :left]
                        left -= min(left, chunk.shape[1])
                done(1)
            before = torch.cat(shown)[-plan.overlap :].permute(3, 0, 1, 2) * 2 - 1
        recorder.record_library("vae", decoder.library, decoder.implementation, decoder.chosen)

    return FrameStream(plan.num_frames, chunks())
