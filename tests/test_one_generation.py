"""Two threads on one pipeline, and a call inside a call: an error at once, and no wrong frames. Two pipelines do not
meet."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_models import TINY_SIZES
from tiny_pipelines import write_tiny_video_pipeline

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.errors import DiffusionRuntimeError, PipelineBusyError, RequestError
from diffusion_runtime.generation.one_generation import OneGeneration

NATIVE = GenerationRequest("a red circle", **{**TINY_SIZES, "num_inference_steps": 2, "guidance_scale": 1.0})
PASSTHROUGH = GenerationRequest("a red circle", num_frames=5, height=16, width=16, num_inference_steps=2)
# Longer than any step takes on a slow machine: a test that waits so long has failed.
PATIENCE = 120.0


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def halt(reached: threading.Event, go_on: threading.Event) -> Any:
    """An on_progress that stops in the middle of denoising until it is told to go on."""

    def on_progress(progress: Progress) -> None:
        if (progress.stage, progress.step) == ("denoise", 1):
            reached.set()
            assert go_on.wait(PATIENCE)

    return on_progress


@pytest.mark.filterwarnings("ignore:.*requires torchvision")
@pytest.mark.parametrize("kind", ["native", "passthrough"])
def test_a_pipeline_makes_one_generation_at_a_time(kind: str, tiny_wan_folder: Path, tmp_path: Path) -> None:
    folder = tiny_wan_folder if kind == "native" else write_tiny_video_pipeline(tmp_path / "video")
    request = NATIVE if kind == "native" else PASSTHROUGH
    pipeline, other = load_pipeline(str(folder), device="cpu"), load_pipeline(str(folder), device="cpu")
    expected = pipeline(request).frames

    def check_free() -> None:
        """Whatever ended the one before, the next one makes what it should."""
        assert numpy.array_equal(pipeline(request).frames, expected)

    reached, go_on, made = threading.Event(), threading.Event(), []
    thread = threading.Thread(target=lambda: made.append(pipeline(request, on_progress=halt(reached, go_on))))
    thread.start()
    try:
        assert reached.wait(PATIENCE)
        with pytest.raises(PipelineBusyError, match="one generation at a time"):
            pipeline(request)
        assert numpy.array_equal(other(request).frames, expected)
    finally:
        go_on.set()
        thread.join()
    assert numpy.array_equal(made[0].frames, expected)

    def generate_inside(progress: Progress) -> None:
        pipeline(request)

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    for on_progress, error in ((generate_inside, PipelineBusyError), (interrupt, KeyboardInterrupt)):
        with pytest.raises(error):
            pipeline(request, on_progress=on_progress)
        check_free()
    with pytest.raises(RequestError):
        pipeline.generate([])
    check_free()


def test_a_copy_is_another_one() -> None:
    one = OneGeneration()
    with one.held():
        with copy.deepcopy(one).held(), pytest.raises(DiffusionRuntimeError), one.held():
            pass
        with pytest.raises(PipelineBusyError), one.held():
            pass
    with one.held():
        pass
