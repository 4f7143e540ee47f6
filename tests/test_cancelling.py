"""A request of a batch that is cancelled leaves the others as they were; requests with one batch key go together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import TINY_SIZES
from tiny_pipelines import write_tiny_video_pipeline

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.core.progress import OnProgress, Progress
from diffusion_runtime.errors import Cancelled, DiffusionRuntimeError, RequestError

NATIVE = GenerationRequest("a red circle", **{**TINY_SIZES, "num_inference_steps": 2, "guidance_scale": 1.0})
PASSTHROUGH = GenerationRequest("a red circle", num_frames=5, height=16, width=16, num_inference_steps=2)


def cancelling(*indices: int) -> OnProgress:
    """Cancels these, one with each report of progress."""
    waiting = list(indices)

    def on_progress(progress: Progress) -> None:
        if waiting and progress.stage == "denoise":
            raise Cancelled([waiting.pop()])

    return on_progress


@pytest.mark.filterwarnings("ignore:.*requires torchvision")
@pytest.mark.parametrize("write", [None, write_tiny_video_pipeline])
def test_one_of_a_batch_is_cancelled(
    write: Callable[[Path], Path] | None, tiny_wan_folder: Path, tmp_path: Path
) -> None:
    pipeline = load_pipeline(str(tiny_wan_folder if write is None else write(tmp_path / "video")), device="cpu")
    first = pipeline.resolve(NATIVE if write is None else PASSTHROUGH)
    batch = [replace(first, seed=seed) for seed in range(3)]
    expected = pipeline.generate(batch)
    made = pipeline.generate(batch, on_progress=cancelling(1))
    assert [media.recipe["request"]["seed"] for media in made] == [0, 2]
    assert all((a.frames == b.frames).all() for a, b in zip(made, (expected[0], expected[2]), strict=True))
    for on_progress in (cancelling(0, 1, 2), cancelling(2, 1, 0)):
        with pytest.raises(Cancelled):
            pipeline.generate(batch, on_progress=on_progress)
    # No failure: a program that handles ours does not report one.
    try:
        pipeline(batch[0], on_progress=cancelling(0))
    except DiffusionRuntimeError as error:
        raise AssertionError("a cancelled request was reported as a failure") from error
    except Cancelled:
        pass
    assert len({pipeline.rules.batch_key(request) for request in batch}) == 1


def test_another_batch_key_is_another_batch(tiny_wan_folder: Path) -> None:
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu")
    pair = [pipeline.resolve(NATIVE), pipeline.resolve(replace(NATIVE, num_inference_steps=1))]
    assert len({pipeline.rules.batch_key(request) for request in pair}) == 2
    with pytest.raises(RequestError, match="num_inference_steps"):
        pipeline.generate(pair)
