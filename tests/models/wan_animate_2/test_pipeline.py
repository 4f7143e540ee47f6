"""Animations against diffusers' modular pipeline on tiny weights: latents within 1e-4, frames alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from offloaded_pipelines import StrictTransfers, load_offloaded
from PIL import Image
from saved_runs import assert_same, saving
from tables import table
from tiny_wan_animate_2 import MAX_TEXT_TOKENS, TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.generation.saved_latents import read_head, read_latents
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.driving_video import size_inside
from diffusion_runtime.models.wan_animate_2.condition import size_of_image

# What importing diffusers' modular pipelines says about packages that are not here, and its eager FlexAttention.
pytestmark = pytest.mark.filterwarnings("ignore")
FolderOf = Callable[..., Path]


def theirs_of(folder: Path, scale: float) -> Any:
    import diffusers
    from diffusers.modular_pipelines.wan_animate_2 import WanAnimate2Blocks, WanAnimate2ModularPipeline
    from diffusers.modular_pipelines.wan_animate_2.video_processor import WanAnimate2VideoProcessor
    from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

    settings = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    scheduler = getattr(diffusers, settings["_class_name"])
    pipeline = WanAnimate2ModularPipeline(blocks=WanAnimate2Blocks())
    pipeline.update_components(
        text_encoder=UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        image_encoder=CLIPVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32),
        vae=diffusers.AutoencoderKLWan.from_pretrained(folder / "vae"),
        transformer=diffusers.WanAnimate2Transformer3DModel.from_pretrained(folder / "transformer"),
        scheduler=scheduler.from_pretrained(folder / "scheduler"),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=scale),
        image_processor=WanAnimate2VideoProcessor(resample="bicubic"),
        video_processor=WanAnimate2VideoProcessor(resample="bilinear"),
    )
    return pipeline


def request(files: dict[str, str], **values: Any) -> GenerationRequest:
    fields = {
        "prompt": "a red  circle moving left",
        "negative_prompt": "a star",
        "image_path": files["fitting"],
        "video_path": files["video"],
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "seed": 5,
    }
    return GenerationRequest(**{**fields, **TINY_SIZES, **values})


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an image that leaves bars, guidance, a block left out": (
        {"has_image_encoder": True, "num_layers": 10},
        {"image": "near", "num_frames": 9, "num_inference_steps": 3},
    ),
    # 21 frames of segments that advance by 8: the last one is driven backwards by 4.
    "three segments, Euler's steps, no guidance": (
        {"has_image_encoder": True, "scheduler": "flow_match_euler"},
        {"num_frames": 21, "segment_frames": 9, "guidance_scale": 1.0},
    ),
    "two segments that share five frames": (
        {"has_image_encoder": True, "scheduler": "flow_match_euler"},
        {"num_frames": 21, "segment_frames": 13, "segment_overlap": 5, "num_inference_steps": 1, "guidance_scale": 1.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_generation_equals_that_of_diffusers(
    folder_of: FolderOf, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from diffusers.modular_pipelines.wan_animate_2 import denoise

    how, values = CASES[name]
    folder, values = folder_of(**how), dict(values)
    image = files[values.pop("image", "fitting")]
    asked = request(files, image_path=image, **values)
    ours, theirs = load_pipeline(str(folder), device="cpu"), theirs_of(folder, asked.guidance_scale or 0.0)
    assert isinstance(ours, Pipeline)
    # diffusers chooses the size by the image; the crop of its bars is undone by giving none.
    expected, decode = [], denoise.decode_vae
    monkeypatch.setattr(denoise, "decode_vae", lambda vae, x: (expected.append(x.clone()), decode(vae, x))[1])
    resolved = ours.resolve(asked)
    segment = min(asked.num_frames or 0, resolved.segment_frames or 0)
    state = theirs(
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt,
        image=Image.open(image).convert("RGB"),
        driving_video=[Image.fromarray(frame) for frame in numpy.load(files["video"])[: asked.num_frames]],
        height=asked.height,
        width=asked.width,
        segment_frame_length=segment,
        prev_segment_conditioning_frames=resolved.segment_overlap,
        num_inference_steps=asked.num_inference_steps,
        generator=torch.Generator().manual_seed(5),
        max_sequence_length=MAX_TEXT_TOKENS,
    )
    found = ours.latents(asked)
    for each, other in zip(found.split(expected[0].shape[1], dim=2), expected, strict=True):
        assert (each[0] - other).norm() <= 1e-4 * other.norm()
    top, left, height, width = state.get("crop_region")
    media = ours(asked)
    frames = media.frames[:, top : top + height, left : left + width] / 255
    assert frames.shape == numpy.asarray(state.get("videos")[0]).shape
    assert numpy.abs(frames - state.get("videos")[0]).max() <= 2 / 255
    assert media.frames.std() > 5
    if len(expected) > 1:
        count, shared = len(expected), resolved.segment_overlap
        last = "frame" if shared == 1 else f"{shared} frames"
        told = f"made in {count} segments of {segment} frames, each from the last {last} of the one before"
        assert told in str(media.attention_report)


def test_batches_and_offloaded_parts_equal_single_runs(folder_of: FolderOf, files: dict[str, str]) -> None:
    folder = folder_of(num_layers=10)
    ours = load_pipeline(str(folder), device="cpu")
    requests = [request(files), request(files, prompt="a star", negative_prompt="", seed=6)]
    alone = [ours(each).frames for each in requests]
    for values in ({}, {"guidance_mode": "two_pass"}):
        batch = ours.generate([request(files, **values), request(files, **{**values, **OTHER})])
        for one, other in zip(alone, batch, strict=True):
            assert numpy.abs(one.astype(int) - other.frames.astype(int)).max() <= 1
    # Segments of a batch are made one request after the other.
    longer = {"num_frames": 13, "segment_frames": 9}
    batch = ours.generate([request(files, **longer), request(files, **longer, **OTHER)])
    assert numpy.array_equal(batch[1].frames, ours(request(files, **longer, **OTHER)).frames)
    # Blocks that come to the device one by one, the one that a branch leaves out too.
    transfers = StrictTransfers()
    offloaded = load_offloaded(str(folder), "layers", {"transformer": 1}, transfers)
    assert offloaded.parts.offloading is not None
    for part in offloaded.parts.offloading.parts:
        transfers.hide(part.arena.bytes)
    # The plan of the test stands, whatever a request with files takes.
    with mock.patch.object(type(offloaded.parts.memory), "make_room"):
        assert numpy.array_equal(offloaded(requests[0]).frames, alone[0])
        assert numpy.array_equal(offloaded(request(files, **longer, **OTHER)).frames, batch[1].frames)


OTHER = {"prompt": "a star", "negative_prompt": "", "seed": 6}


@table(
    ("values", "told"),
    [
        ({"image_path": None}, "image_path: this model makes videos from an image; give one: --image-path FILE"),
        ({"video_path": None}, "video_path: this model moves the image's character as in a video; give one: --video-p"),
        ({"num_frames": 25}, "has 2[12] frames, the clip 25; give a longer one, or --num-frames 21"),
        ({"num_frames": 8}, "num_frames: expected a multiple of 4 plus 1, got 8; use 5 or 9"),
        ({"num_frames": 1}, "num_frames: expected 5 or more for a video, got 1"),
        ({"height": 40}, "height: expected a multiple of 16, got 40; use 32 or 48"),
        ({"segment_frames": 80}, "segment_frames: expected a multiple of 4 plus 1, got 80; use 77 or 81"),
        ({"segment_overlap": 0}, "segment_overlap: expected 1 to 80, less than segment_frames, got 0"),
        ({"image_path": "wide"}, r"wide.png is 90 x 50 \(width x height\), the clip 32 x 48: the ratio .* Leave out"),
        ({"video_path": "fitting"}, "fitting.png has one frame; give a video of the motion"),
        ({"mask_path": "fitting"}, "mask_path"),
        ({"conditioning_scale": 0.5}, "conditioning_scale"),
    ],
)
def test_what_a_request_may_not_say(
    folder_of: FolderOf, files: dict[str, str], values: dict[str, Any], told: str
) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(folder_of()), device="cpu")).rules
    with pytest.raises(RequestError, match=told):
        rules.resolve(request(files, **{name: files.get(value, value) for name, value in values.items()}))


def test_a_size_follows_from_the_image(folder_of: FolderOf, files: dict[str, str]) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(folder_of()), device="cpu")).rules
    resolved = rules.resolve(request(files, height=None, width=None))
    assert (resolved.height, resolved.width) == size_of_image((96, 64)) == (864, 576)
    assert size_inside((90, 50), 64, 64) == (64, 35)


def test_the_distilled_folder_has_its_steps(folder_of: FolderOf) -> None:
    for how, steps in (({}, 40), ({"distilled": True}, 10)):
        rules = inspect_pipeline(RuntimeConfig(str(folder_of(**how)), device="cpu")).rules
        assert rules.defaults["num_inference_steps"] == steps


def test_a_clip_that_failed_goes_on_behind_its_last_whole_segment(
    folder_of: FolderOf, files: dict[str, str], tmp_path: Path
) -> None:
    ours = load_pipeline(str(folder_of(num_layers=10)), device="cpu")
    asked = request(files, num_frames=21, segment_frames=9, num_inference_steps=1, guidance_scale=1.0)
    whole, kept = saving(ours, asked, tmp_path)
    assert [read_head(file)[1]["done"] for file in kept] == [1, 2, 3]
    for file in kept:
        assert_same(ours.finish(read_latents(file)), whole)
    # The second segment anew, and the third from its end.
    redone = dataclasses.replace(asked, segment_seeds=(5, 9, 5))
    found = ours.finish(read_latents(kept[-1]), redone)
    assert_same(found, ours(redone))
    assert numpy.array_equal(found.frames[:8], whole.frames[:8])
    assert not numpy.array_equal(found.frames[9:], whole.frames[9:])
    with pytest.raises(RequestError, match="segment_seeds: expected at most 3, one for each segment"):
        ours.resolve(dataclasses.replace(asked, segment_seeds=(1, 2, 3, 4)))
