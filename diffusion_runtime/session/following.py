"""Follower loop: a pipeline on several processes serves requests as they come; rank 0 leads, the other ranks follow.

Rank 0 gets requests, from a server for example; `generate` of its LeadingPipeline hands them to the ranks that are in
`follow`, and all of them generate together. Progress is reported on rank 0, and cancelled there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.progress import OnProgress, Progress
from diffusion_runtime.errors import Cancelled
from diffusion_runtime.generation.interface import GenerationPipeline
from diffusion_runtime.media import GeneratedMedia
from diffusion_runtime.parallel.world import World
from diffusion_runtime.request.generation_request import GenerationRequest


@contextmanager
def lead(pipeline: GenerationPipeline, world: World) -> Iterator[LeadingPipeline]:
    """Context manager: on rank 0, while the others are in `follow`; at the end of the block they stop.

    pipeline: as `load_pipeline(..., world=world)` returned it on every rank.
    """
    yield (leading := LeadingPipeline(pipeline, world))
    leading.stop()


def follow(pipeline: GenerationPipeline, world: World) -> None:
    """Generate, on every rank but 0, what rank 0 is asked for, with the LoRA files it sets, until it stops. The results
    are rank 0's to keep.

    Raises RunEnded when an error meets only some of the ranks.
    """
    while True:
        with world.idle():
            message: dict[str, Any] = json.loads(world.from_first(lambda: ""))
        if message["stop"]:
            return
        if "loras" in message:
            # The ranks have agreed on what went wrong.
            with contextlib.suppress(Exception):
                pipeline.set_loras(message["loras"])
            continue
        requests = [GenerationRequest.from_dict(values) for values in message["requests"]]
        try:
            pipeline.generate(requests, on_progress=agreed_progress(world, None) if message["is_watched"] else None)
        except Exception as error:
            # Rank 0, which met it too, raises it to its caller.
            world.agree(world.failure_of(error))
        else:
            world.agree(None)


class LeadingPipeline:
    """Rank 0's side of `follow`: generates as its pipeline does, on all ranks. Use it from one thread at a time."""

    def __init__(self, pipeline: GenerationPipeline, world: World) -> None:
        self.pipeline = pipeline
        self._world = world

    def __call__(self, request: GenerationRequest, *, on_progress: OnProgress | None = None) -> GeneratedMedia:
        """Generate one video or image. Raises what `generate` raises."""
        return self.generate([request], on_progress=on_progress)[0]

    def generate(
        self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
    ) -> list[GeneratedMedia]:
        """Generate one batch, as GenerationPipeline.generate does. on_progress: called on this rank alone; a Cancelled
        that it raises reaches all ranks.

        Raises what the pipeline raises, and RunEnded when an error meets only some of the ranks.
        """
        message = {
            "stop": False,
            "is_watched": on_progress is not None,
            "requests": [request.to_dict() for request in requests],
        }
        self._world.from_first(lambda: json.dumps(message))
        watch = None if on_progress is None else agreed_progress(self._world, on_progress)
        try:
            media = self.pipeline.generate(requests, on_progress=watch)
        except Exception as error:
            self._world.agree(self._world.failure_of(error))
            raise
        self._world.agree(None)
        return media

    def set_loras(self, loras: Sequence[Any]) -> None:
        """Other LoRA files on all ranks, as GenerationPipeline.set_loras, each of which reads them.

        Raises what the pipeline raises, and RunEnded when an error meets only some of the ranks.
        """
        configs = RuntimeConfig(lora=loras).lora
        message = {"stop": False, "loras": [dataclasses.asdict(config) for config in configs]}
        self._world.from_first(lambda: json.dumps(message))
        self.pipeline.set_loras(configs)

    def stop(self) -> None:
        """Let the other ranks return from `follow`."""
        self._world.from_first(lambda: json.dumps({"stop": True}))


def agreed_progress(world: World, on_progress: OnProgress | None) -> OnProgress:
    """Return an on_progress for every rank: what rank 0's raises is raised on all of them at the same step."""

    def watch(progress: Progress) -> None:
        def ask() -> str:
            assert on_progress is not None
            try:
                on_progress(progress)
            except Cancelled as cancelled:
                return json.dumps({"cancelled": cancelled.request_indices})
            return json.dumps({})

        message = json.loads(world.from_first(ask))
        if "cancelled" in message:
            raise Cancelled(message["cancelled"])

    return watch
