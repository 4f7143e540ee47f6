"""A script of a user's own, which torchrun starts: rank 0 serves requests, the other ranks follow until it stops."""

from __future__ import annotations

import os

import torch

from diffusion_runtime import Cancelled, GenerationRequest, follow, join_processes, lead, load_pipeline
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import RequestError
from diffusion_runtime.session.following import LeadingPipeline

SIZES = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2, "guidance_scale": 1.0}
REQUESTS = [GenerationRequest(prompt=prompt, **SIZES) for prompt in ("a red circle", "a star")]


def serve(pipeline: LeadingPipeline) -> list[str]:
    """What came of five requests."""
    alone = load_pipeline("shapes", device="cpu")(REQUESTS[1]).frames.astype(int)
    stages: list[str] = []

    def cancel_first(progress: Progress) -> None:
        stages.append(progress.stage)
        if (progress.stage, progress.step) == ("denoise", 1):
            raise Cancelled([0])

    def cancel(progress: Progress) -> None:
        raise Cancelled

    def fail(progress: Progress) -> None:
        raise KeyError("of a progress bar")

    said = [str(abs(pipeline(REQUESTS[1]).frames - alone).max())]
    (kept,) = pipeline.generate(REQUESTS, on_progress=cancel_first)
    said += [str(abs(kept.frames - alone).max()), str(stages.count("decode"))]
    for request, on_progress, expected in (
        (GenerationRequest("a star", height=31), None, RequestError),
        (REQUESTS[0], cancel, Cancelled),
        (REQUESTS[0], fail, KeyError),
    ):
        try:
            pipeline(request, on_progress=on_progress)
        except expected as error:
            said.append(type(error).__name__)
    said.append(str(abs(pipeline(REQUESTS[1]).frames - alone).max()))
    return said


def main() -> None:
    torch.set_num_threads(1)
    with join_processes() as world:
        pipeline = load_pipeline("shapes", device="cpu", world=world)
        if world.is_first:
            with lead(pipeline, world) as leading:
                said = " ".join(serve(leading))
        else:
            follow(pipeline, world)
            said = "stopped"
        # In one piece: `print` without a buffer writes the line's end apart, and the other process's line between.
        os.write(1, f"rank {world.place.rank} of {world.size}: {said}\n".encode())


if __name__ == "__main__":
    main()
