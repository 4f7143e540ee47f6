"""LTX-2.5's duration head: the length of a video whose request names none, against diffusers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import LTX2Pipeline
from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead
from tiny_ltx2 import ONE_SCALE

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.models.published import model_of_name
from diffusion_runtime.rules.predicted_length import LengthBounds
from diffusion_runtime.session.resume import output_identity

PROMPTS = ("a red circle", "a blue star moving left")
SIZES: dict[str, Any] = {"height": 64, "width": 96, "fps": 24, "num_inference_steps": 2, "guidance_scale": 1.0}


@pytest.fixture(scope="module")
def pipeline(tiny_folder25: Path) -> Pipeline:
    loaded = load_pipeline(str(tiny_folder25), device="cpu")
    assert isinstance(loaded, Pipeline)
    return loaded


def open_request(prompt: str = PROMPTS[0], **values: Any) -> GenerationRequest:
    return GenerationRequest(prompt, **{**SIZES, "modality_scale": 1.0, "stg_scale": 0.0, **values})


def test_frames_of_a_prediction_are_those_of_diffusers() -> None:
    head, wrong = LTX2DurationHead(4, 4, 4, 1, 1, 4), []
    for seconds in (0.01, 0.9, 1.0, 1.02, 1.4, 4.99, 5.0, 19.9, 20.0, 400.0):
        for least, most in ((1.0, 20.0), (1.0, 1.02), (0.5, 5.0), (1.3, 1.6), (0.01, 0.02)):
            for fps in (8, 24, 25):
                with mock.patch.object(head, "forward", lambda *_, seconds=seconds: torch.tensor([seconds])):
                    expected = head.predict_num_frames(
                        frame_rate=fps, temporal_compression_ratio=8, min_seconds=least, max_seconds=most
                    )
                found = LengthBounds(least, most, fps, (8, 1)).num_frames(seconds)
                wrong += [] if found == expected else [(seconds, least, most, fps, found, expected)]
    assert not wrong


def test_a_length_that_nobody_names_is_the_one_of_diffusers(tiny_folder25: Path, pipeline: Pipeline) -> None:
    theirs = LTX2Pipeline.from_pretrained(tiny_folder25)
    theirs.set_progress_bar_config(disable=True)
    lengths = []
    for prompt in PROMPTS:
        media = pipeline(open_request(prompt))
        settings = {"height": 64, "width": 96, "frame_rate": 24.0, "num_inference_steps": 2, "guidance_scale": 1.0}
        video = theirs(prompt=prompt, **settings, **ONE_SCALE, output_type="latent", generator=torch.Generator())[0]
        lengths.append(len(media.frames))
        assert lengths[-1] == (video.shape[2] - 1) * 8 + 1
        assert f"num_frames: {lengths[-1]}, chosen for the prompt: a length of" in str(media.attention_report)
    # Neither bound, and each prompt its own: of one batch as well.
    assert 25 < min(lengths) < max(lengths) < 473
    batch = pipeline.generate([open_request(prompt) for prompt in PROMPTS])
    assert [len(media.frames) for media in batch] == lengths


def test_the_recipe_repeats_the_video_and_keeps_what_was_asked_for(pipeline: Pipeline) -> None:
    asked = pipeline.resolve(open_request(max_seconds=1.5))
    assert (asked.num_frames, asked.min_seconds, asked.max_seconds) == (33, 1.0, 1.5)
    assert pipeline.resolve(asked) == asked
    media = pipeline(asked)
    recipe, made = media.recipe, GenerationRequest.from_dict(media.recipe["request"])
    assert (made.num_frames, made.max_seconds) == (len(media.frames), None)
    # What the number of frames decides is that of the video, not of the longest one.
    assert made == pipeline.resolve(open_request(num_frames=made.num_frames))
    assert (pipeline(made).frames == media.frames).all()
    identity = output_identity(recipe)
    assert identity["request"] == output_identity({"request": asked.recorded()})["request"]
    assert pipeline.latents(asked).shape == pipeline.latents(made).shape


def test_a_length_and_bounds_of_one_are_told_apart(pipeline: Pipeline, tiny_copy: Callable[[], Path]) -> None:
    def length(**values: Any) -> tuple[int | None, float | None]:
        resolved = pipeline.resolve(open_request(**values))
        return resolved.num_frames, resolved.max_seconds

    assert length() == (473, 20.0)
    assert length(num_frames=49) == (49, None)
    assert length(seconds=2.0) == (49, None)
    assert length(min_seconds=2.0) == (473, 20.0)
    assert "chosen for the prompt" in " ".join(pipeline.rules.unused(pipeline.resolve(open_request())))
    with pytest.raises(RequestError, match="num_frames, max_seconds: expected one of them, got both"):
        length(num_frames=49, max_seconds=5.0)
    with pytest.raises(RequestError, match="max_seconds: expected more than min_seconds, 5, got 5"):
        length(min_seconds=5.0, max_seconds=5.0)
    other = load_pipeline(str(tiny_copy()), device="cpu")
    with pytest.raises(RequestError, match="max_seconds: this model chooses no length for a prompt"):
        other.resolve(GenerationRequest("a circle", max_seconds=5.0))


def test_files_of_parts_have_no_duration_head(
    tiny_folder25: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds that are published for the whole folder are no request's of these."""
    folder = shutil.copytree(tiny_folder25, tmp_path / "model")
    next((folder / "duration_head").glob("*.safetensors")).unlink()
    monkeypatch.setattr("diffusion_runtime.loading.model_rules.model_of_name", lambda _: model_of_name("ltx-2.5"))
    file = tiny_folder25 / "transformer" / "diffusion_pytorch_model.safetensors"
    for place, path, expected in ((tiny_folder25, None, (473, 1.0, 20.0)), (folder, str(file), (121, None, None))):
        prepared = prepare(RuntimeConfig(str(place), device="cpu", transformer_path=path))
        assert isinstance(prepared, PreparedModel)
        asked = prepared.description.rules.resolve(GenerationRequest("a red circle"))
        assert (asked.num_frames, asked.min_seconds, asked.max_seconds) == expected
