"""Any diffusers pipeline behind our call: the same pictures, the same report, recipe and errors."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tables import table
from tiny_pipelines import pipeline_of

from diffusion_runtime import GenerationRequest, force_attention_backend, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface
from diffusion_runtime.diffusers_bridge.request_rules import PassthroughRules, signature_defaults
from diffusion_runtime.diffusers_bridge.size_rules import SizeRules
from diffusion_runtime.errors import (
    BackendUnavailableError,
    DeviceMemoryError,
    ModelLoadError,
    RequestError,
)
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.rules.request_rules import RequestRules

SIZES = {"height": 16, "width": 16, "num_inference_steps": 2}
VIDEO = GenerationRequest(prompt="a red circle", seed=3, num_frames=9, **SIZES)
IMAGE = GenerationRequest(prompt="a red circle", seed=3, negative_prompt="blue", **SIZES)
# What transformers says about image processors when diffusers imports them.
pytestmark = pytest.mark.filterwarnings("ignore:.*requires torchvision")


def diffusers_frames(folder: Path, request: GenerationRequest) -> Any:
    arguments = {name: value for name, value in request.to_dict().items() if value is not None and name != "seed"}
    result = pipeline_of(folder)(**arguments, generator=torch.Generator().manual_seed(request.seed), output_type="np")
    frames = result.frames[0] if "num_frames" in arguments else result.images
    return (numpy.asarray(frames) * 255).round().astype(numpy.uint8)


@table("choice", [None, "auto", "torch_sdpa", {"default": "reference"}])
def test_a_video_is_what_diffusers_makes(video_folder: Path, choice: Any) -> None:
    pipeline = load_pipeline(str(video_folder), attention=choice)
    media = pipeline(VIDEO)
    expected = diffusers_frames(video_folder, VIDEO).astype(int)
    assert media.frames.shape == (9, 16, 16, 3)
    assert numpy.abs(media.frames.astype(int) - expected).max() <= 1
    assert set(media.timings) == {"prepare", "read", "text", "denoise", "decode"}
    [row] = media.attention_report.rows
    # Two blocks, two steps, guidance in one batch.
    assert (row.role, row.count, row.layers, row.steps) == ("self", 4, "0-1", "0-1")
    if choice in (None, "auto"):
        assert (row.backend, row.implementation) == ("diffusers", "scaled_dot_product_attention")
        assert "as no backend was chosen" in str(media.attention_report)
    else:
        assert row.backend == (choice if isinstance(choice, str) else "reference")
        assert "attention modules reached: 2 of 2" in str(media.attention_report)
    # It is out again.
    assert all(
        "_class_before" not in dir(type(each)) for each in pipeline.pipeline.transformer.attn_processors.values()
    )
    assert numpy.array_equal(pipeline(VIDEO).frames, media.frames)


def test_a_transformer_that_was_compiled_since(video_folder: Path) -> None:
    pipeline = load_pipeline(str(video_folder))
    before = pipeline(VIDEO)
    pipeline.pipeline.transformer = torch.compile(pipeline.pipeline.transformer, backend="eager")
    media = pipeline(VIDEO)
    assert numpy.abs(media.frames.astype(int) - before.frames.astype(int)).max() <= 1
    assert media.attention_report == before.attention_report


def test_an_image_its_recipe_and_its_file(image_folder: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(str(image_folder), backend="diffusers", attention="reference")
    media = pipeline(IMAGE)
    assert numpy.abs(media.frames.astype(int) - diffusers_frames(image_folder, IMAGE).astype(int)).max() <= 1
    assert media.recipe["request"]["guidance_scale"] == 7.5
    assert media.recipe["model"]["family"] == "StableDiffusionPipeline"
    assert media.recipe["runtime"]["backend"] == "diffusers"
    saved = json.loads(media.save(tmp_path / "a.png").with_suffix(".json").read_text())
    assert saved["recipe"]["request"]["height"] == 16
    assert {row["backend"] for row in saved["attention_report"]["rows"]} == {"reference"}


def test_what_the_request_leaves_open_is_the_pipelines(image_folder: Path) -> None:
    pipeline = load_pipeline(str(image_folder))
    assert pipeline.defaults == {
        "fps": 16,
        "num_frames": 1,
        "num_inference_steps": 50,
        "guidance_scale": 7.5,
        "guidance_rescale": 0.0,
    }
    assert pipeline.resolve(GenerationRequest(prompt="a")).height is None
    media = pipeline(GenerationRequest(prompt="a", num_inference_steps=1))
    assert media.recipe["request"]["height"] == media.frames.shape[1] == 16


def test_progress_and_a_batch(video_folder: Path) -> None:
    seen: list[Progress] = []
    pipeline = load_pipeline(str(video_folder))
    first, second = pipeline.generate(
        [VIDEO, GenerationRequest(**{**VIDEO.to_dict(), "seed": 4})], on_progress=seen.append
    )
    assert not numpy.array_equal(first.frames, second.frames)
    assert numpy.array_equal(first.frames, pipeline(VIDEO).frames)
    once = [("text", 0), ("text", 1), ("denoise", 0), ("denoise", 1), ("denoise", 2), ("decode", 1)]
    assert [(each.stage, each.step) for each in seen] == once + once
    assert {each.num_steps for each in seen if each.stage == "denoise"} == {2}
    with pytest.raises(RequestError, match="got none"):
        pipeline.generate([])


def test_whoever_watches_may_stop_it_and_nothing_stays(video_folder: Path) -> None:
    pipeline = load_pipeline(str(video_folder), attention="reference")
    before = pipeline.pipeline.transformer.attn_processors

    def stop(progress: Progress) -> None:
        if progress.stage == "denoise" and progress.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline(VIDEO, on_progress=stop)
    after = pipeline.pipeline.transformer.attn_processors
    assert all(after[name] is before[name] for name in before)
    assert not pipeline.pipeline.transformer._forward_pre_hooks
    pipeline(VIDEO)


def test_values_that_the_pipeline_does_not_take_are_named(image_folder: Path, video_folder: Path) -> None:
    image, video = load_pipeline(str(image_folder)), load_pipeline(str(video_folder))
    for values in ({"flow_shift": 3.0}, {"sampler": "unipc"}, {"guidance_mode": "two_pass"}, {"true_cfg_scale": 2.0}):
        [name] = values
        with pytest.raises(RequestError, match=f"^{name}: StableDiffusionPipeline takes no such value"):
            image.resolve(GenerationRequest(prompt="a", **values))
    with pytest.raises(RequestError, match="num_frames: StableDiffusionPipeline makes images"):
        image.resolve(GenerationRequest(prompt="a", num_frames=5))
    with pytest.raises(RequestError, match="image_path: CogVideoXPipeline takes no such value"):
        video.resolve(GenerationRequest(prompt="a", image_path="a.png"))
    with pytest.raises(RequestError, match=r"refuses the request: .*divisible by 8"):
        image(GenerationRequest(prompt="a", height=17, width=16))
    with pytest.raises(RequestError, match="preset: unknown name 'draft'"):
        image.resolve(GenerationRequest(prompt="a"), "draft")


def test_an_image_to_start_from(image_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(image_folder, tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "StableDiffusionImg2ImgPipeline"}))
    pipeline = load_pipeline(str(folder), attention={"schedule": [{"steps": "0", "backend": "reference"}]})
    request = GenerationRequest(prompt="a", num_inference_steps=4)
    with pytest.raises(RequestError, match="image_path: StableDiffusionImg2ImgPipeline starts from an image; give one"):
        pipeline(request)
    with pytest.raises(RequestError, match="no such file"):
        pipeline.resolve(GenerationRequest(prompt="a", image_path=str(tmp_path / "no.png")))
    (tmp_path / "not.png").write_text("not an image")
    with pytest.raises(RequestError, match=r"not.png is not a readable PNG"):
        pipeline.resolve(GenerationRequest(prompt="a", image_path=str(tmp_path / "not.png")))
    made = []
    for colour in ("red", "blue"):
        Image.new("RGB", (16, 16), colour).save(tmp_path / f"{colour}.png")
        media = pipeline(
            GenerationRequest(prompt="a", num_inference_steps=4, image_path=str(tmp_path / f"{colour}.png"))
        )
        made.append(media.frames)
    assert not numpy.array_equal(*made)
    # strength 0.8 leaves out the first of four steps: what runs first is step 0.
    assert {(row.backend, row.steps) for row in media.attention_report.rows} == {
        ("reference", "0"),
        ("torch_sdpa", "1-2"),
    }
    # A portrait as a phone stores it, on its side; the pipeline takes its size from the image.
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (32, 16), "red").save(tmp_path / "phone.jpg", exif=exif)
    media = pipeline(GenerationRequest(prompt="a", num_inference_steps=2, image_path=str(tmp_path / "phone.jpg")))
    assert media.frames.shape == (1, 32, 16, 3)


def test_a_pipeline_that_cannot_do_without_an_image() -> None:
    from diffusers import WanImageToVideoPipeline

    interface = PipelineInterface.of(WanImageToVideoPipeline)
    rules = PassthroughRules(interface, SizeRules(interface), signature_defaults(interface), {}, lambda _: None)
    with pytest.raises(RequestError, match="image_path: WanImageToVideoPipeline starts from an image; give one"):
        rules.resolve(GenerationRequest(prompt="a"))


def test_a_class_without_a_native_model(
    video_folder: Path, image_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        description = inspect_pipeline(RuntimeConfig(model_path=str(video_folder)))
    assert description.family == "CogVideoXPipeline"
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "no native model for CogVideoXTransformer3DModel; diffusers' own" in line]
    with pytest.raises(ModelLoadError, match=r"CogVideoXTransformer3DModel.*Supported: .*--backend diffusers"):
        load_pipeline(str(video_folder), backend="native")
    with pytest.raises(
        ModelLoadError, match=r"UNet is a diffusers UNet2DConditionModel.*Supported: .*--backend diffusers"
    ):
        load_pipeline(str(image_folder), backend="native")


def test_a_native_class_by_diffusers_on_demand(tiny_wan_folder: Path) -> None:
    request = GenerationRequest(prompt="a red circle", height=32, width=32, num_frames=5, num_inference_steps=2, seed=3)
    ours = load_pipeline(str(tiny_wan_folder))
    assert isinstance(ours.rules, RequestRules)
    theirs = load_pipeline(str(tiny_wan_folder), backend="diffusers", attention="reference")
    media = theirs(request)
    assert numpy.abs(media.frames.astype(int) - diffusers_frames(tiny_wan_folder, request).astype(int)).max() <= 1
    # Two guidance branches, two blocks, two steps.
    assert {(row.role, row.count) for row in media.attention_report.rows} == {("self", 8), ("cross", 8)}
    sparse = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 1, 1], "window": [1, 1, 1]}}
    rules = [{"role": "self", "steps": "1", **sparse}]
    by_step = load_pipeline(str(tiny_wan_folder), backend="diffusers", attention={"schedule": rules})(request)
    assert {row.backend: row.steps for row in by_step.attention_report.rows if row.role == "self"} == {
        "torch_sdpa": "0",
        "sliding_tile_attn": "1",
    }
    assert not numpy.array_equal(by_step.frames, media.frames)


def test_diffusers_own_names(tiny_wan_folder: Path, video_folder: Path, image_folder: Path) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    request = GenerationRequest(prompt="a red circle", height=32, width=32, num_frames=5, num_inference_steps=2)
    registered = list(_AttentionBackendRegistry._backends)
    active = _AttentionBackendRegistry._active_backend
    pipeline = load_pipeline(str(tiny_wan_folder), backend="diffusers", attention="_native_math")
    media = pipeline(request)
    assert {(row.backend, row.implementation, row.source) for row in media.attention_report.rows} == {
        ("diffusers", "_native_math", "config")
    }
    assert "attention modules reached: 4 of 4" in str(media.attention_report)
    assert media.recipe["runtime"]["attention"] == "_native_math"
    assert list(_AttentionBackendRegistry._backends) == registered
    assert _AttentionBackendRegistry._active_backend is active
    assert {each._attention_backend for each in pipeline.pipeline.transformer.attn_processors.values()} == {None}
    with pytest.raises(BackendUnavailableError, match="'native' reaches none of the 2 attention modules"):
        load_pipeline(str(video_folder), attention="native")
    with pytest.raises(BackendUnavailableError, match=r"'flash' cannot run here: .*flash-attn"):
        load_pipeline(str(tiny_wan_folder), backend="diffusers", attention="flash")
    # In a mapping it is one of ours, like everywhere else.
    with pytest.raises(BackendUnavailableError, match="no attention backend of the choice for role 'self'"):
        load_pipeline(str(image_folder), backend="diffusers", attention={"default": "flash"})


def test_choices_from_elsewhere(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline(str(image_folder))
    with force_attention_backend("reference", role="cross"):
        rows = pipeline(IMAGE).attention_report.rows
    assert {(row.role, row.backend, row.source) for row in rows} == {
        ("self", "torch_sdpa", "platform"),
        ("cross", "reference", "force"),
    }
    assert {row.backend for row in pipeline(IMAGE).attention_report.rows} == {"diffusers"}
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    rows = load_pipeline(str(image_folder))(IMAGE).attention_report.rows
    assert {(row.backend, row.source) for row in rows} == {("reference", "environment")}


def test_a_shortage_of_memory(image_folder: Path) -> None:
    pipeline = load_pipeline(str(image_folder), attention="reference")

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    pipeline.pipeline.vae.decode = no_memory
    with pytest.raises(DeviceMemoryError, match=r"not enough memory while generating.*smaller height"):
        pipeline(IMAGE)
    assert not pipeline.pipeline.unet._forward_pre_hooks
