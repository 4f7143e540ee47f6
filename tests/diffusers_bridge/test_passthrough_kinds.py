"""Pipelines of other kinds: what they return, which sizes they make, and whose fault an exception is."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_pipelines import write_tiny_conditioned_pipeline, write_tiny_picture_pipeline, write_tiny_tiled_pipeline

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention.backends.capability import Capability as BackendCapability
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, Backend
from diffusion_runtime.attention.backends.registry import register_backend, unregister_backend
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.diffusers_bridge.size_rules import SizeRules
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError, RequestError, ThirdPartyError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.session.failures import Failure

# What transformers says about image processors when diffusers imports them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*requires torchvision"),
    # What numpy says about the timesteps that LTX gives its scheduler.
    pytest.mark.filterwarnings("ignore:__array__ implementation"),
]
SPARSE = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [1, 1, 1]}}
VIDEO = GenerationRequest(prompt="a red circle", height=16, width=16, num_frames=9, num_inference_steps=2)
IMAGE = GenerationRequest(prompt="a red circle", height=16, width=16, num_inference_steps=2)


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_picture_pipeline(tmp_path_factory.mktemp("pipelines") / "picture")


def without_weights(folder: Path, to: Path, class_name: str | None = None) -> str:
    """A copy that nothing can be loaded of, as another class of pipeline."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    index = json.loads((to / "model_index.json").read_text())
    (to / "model_index.json").write_text(json.dumps({**index, "_class_name": class_name or index["_class_name"]}))
    return str(to)


def rules_of(folder: str, **choices: Any) -> Any:
    """What is known of a folder before its weights are read."""
    return inspect_pipeline(RuntimeConfig(model_path=folder, backend="diffusers", **choices)).rules


def test_a_result_in_the_field_image(picture_folder: Path) -> None:
    pipeline = load_pipeline(str(picture_folder))
    with pytest.raises(RequestError, match="makes no 32 x 32; it makes 1024 x 1024, 640 x 1408, "):
        pipeline.resolve(GenerationRequest(prompt="a", height=32, width=32))
    pipeline.pipeline.resolutions = [(32, 32)]
    pipeline.rules = dataclasses.replace(pipeline.rules, sizes=SizeRules(pipeline.rules.interface))
    media = pipeline(GenerationRequest(prompt="a red circle", height=32, width=32, num_inference_steps=2))
    assert media.frames.shape == (1, 32, 32, 3)
    assert media.frames.std() > 0
    assert media.recipe["notes"] == []
    # What it rounds is said where no rule is known either.
    rounded = pipeline(GenerationRequest(prompt="a red circle", height=64, width=32, num_inference_steps=1))
    assert rounded.recipe["notes"] == ["Kandinsky5T2IPipeline made height 32 where 64 was asked for"]


def test_an_autoencoder_that_decodes_in_tiles_alone(tmp_path: Path) -> None:
    pipeline = load_pipeline(str(write_tiny_tiled_pipeline(tmp_path / "model")), attention="reference")
    # Its first latent frame holds as many frames as the others.
    with pytest.raises(
        RequestError, match="num_frames: AllegroPipeline makes multiples of 4 frames, got 9; use 8 or 12"
    ):
        pipeline.resolve(VIDEO)
    media = pipeline(dataclasses.replace(VIDEO, num_frames=8))
    assert media.frames.shape == (8, 16, 16, 3)


def test_a_sparse_choice_where_the_grid_is_said_by_coordinates(tmp_path: Path) -> None:
    folder = write_tiny_conditioned_pipeline(tmp_path / "model")
    request = dataclasses.replace(VIDEO, height=32, width=64)
    pipeline = load_pipeline(str(folder), backend="diffusers", attention={"per_role": {"self": SPARSE}})
    Image.new("RGB", (64, 32), "red").save(tmp_path / "red.png")
    for image in (None, str(tmp_path / "red.png")):
        media = pipeline(dataclasses.replace(request, image_path=image))
        rows = {(row.role, row.backend) for row in media.attention_report.rows}
        assert rows == {("self", "sliding_tile_attn"), ("cross", "torch_sdpa")}
        assert media.frames.shape == (9, 32, 64, 3)


def test_what_no_request_can_run_is_refused_before_the_weights(video_folder: Path, tmp_path: Path) -> None:
    for name, told in (
        ("AnimateDiffSparseControlNetPipeline", "it needs controlnet_frame_indices, which no request gives"),
        ("WanAnimatePipeline", "it needs pose_video and face_video"),
        ("LongCatAudioDiTPipeline", "it returns audios, and only pictures and videos are written"),
        ("AceStepPipeline", "it returns audios"),
        ("StableVideoDiffusionPipeline", "it takes no prompt"),
    ):
        folder = without_weights(video_folder, tmp_path / name, name)
        shutil.rmtree(Path(folder) / "scheduler")
        for run in (load_pipeline, lambda path: rules_of(path)):
            with pytest.raises(ModelLoadError, match=f"{name} cannot run here: {told}"):
                run(folder)


def test_a_sparse_choice_without_a_grid_is_refused_before_the_weights(picture_folder: Path, tmp_path: Path) -> None:
    folder = without_weights(picture_folder, tmp_path / "model")
    with pytest.raises(BackendUnavailableError, match="needs the grid of the tokens"):
        load_pipeline(folder, attention={"per_role": {"self": SPARSE}})


def test_sizes_are_checked_before_the_weights(
    tiny_wan_folder: Path, image_folder: Path, video_folder: Path, tmp_path: Path
) -> None:
    wan = rules_of(without_weights(tiny_wan_folder, tmp_path / "wan"))
    with pytest.raises(
        RequestError, match=r"num_frames: WanPipeline makes 1 plus a multiple of 4 frames, got 6; use 5"
    ):
        wan.resolve(dataclasses.replace(VIDEO, num_frames=6))
    with pytest.raises(RequestError, match=r"WanPipeline refuses the request: .*divisible by 16 but are 24"):
        wan.resolve(dataclasses.replace(VIDEO, height=24))
    wan.resolve(dataclasses.replace(VIDEO, num_frames=1))
    images = rules_of(without_weights(image_folder, tmp_path / "image"))
    with pytest.raises(RequestError, match=r"StableDiffusionPipeline refuses the request: .*divisible by 8"):
        images.resolve(dataclasses.replace(IMAGE, height=17))
    videos = rules_of(without_weights(video_folder, tmp_path / "video"))
    with pytest.raises(RequestError, match=r"num_frames: CogVideoXPipeline makes 1 plus .* got 7; use 5 or 9"):
        videos.resolve(dataclasses.replace(VIDEO, num_frames=7))


def test_no_size_is_refused_by_factors_that_nobody_knows(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """Without its autoencoder a pipeline takes factors of its own for granted."""
    folder = Path(without_weights(tiny_wan_folder, tmp_path / "wan"))
    (folder / "vae" / "config.json").unlink()
    rules = rules_of(str(folder))
    assert (rules.sizes.pipeline, rules.sizes.frame_step, rules.sizes.multiple) == (None, None, None)
    rules.resolve(dataclasses.replace(VIDEO, num_frames=6, height=24))


def test_sizes_that_diffusers_rounds_with_a_remark_are_refused(tmp_path: Path) -> None:
    from tiny_flux1 import write_tiny_flux1

    rules = rules_of(without_weights(write_tiny_flux1(tmp_path / "model"), tmp_path / "bare"))
    multiple = rules.sizes.multiple
    with pytest.raises(RequestError, match=f"height: FluxPipeline makes multiples of {multiple}, got .*; use "):
        rules.resolve(dataclasses.replace(IMAGE, height=4 * multiple + multiple // 2, width=4 * multiple))
    rules.resolve(dataclasses.replace(IMAGE, height=4 * multiple, width=4 * multiple))


def test_an_exception_of_the_pipeline_is_reported_as_its_own(image_folder: Path) -> None:
    pipeline = load_pipeline(str(image_folder))

    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("zip() argument 2 is missing" + " and more" * 100)

    pipeline.pipeline.encode_prompt = broken
    with pytest.raises(ThirdPartyError) as seen:
        pipeline(IMAGE)
    told = str(seen.value)
    assert told.startswith("diffusers' own StableDiffusionPipeline failed before the first step, in ")
    assert "__call__ (diffusers.pipelines.stable_diffusion." in told
    assert "TypeError: zip() argument 2 is missing" in told
    assert told.endswith("It also takes ip_adapter_image, which no request gives")
    failure = Failure.of(seen.value)
    assert (failure.kind, failure.exit_code, "unexpected" in failure.message) == ("ThirdPartyError", 1, False)
    assert len(told) < 1000

    pipeline = load_pipeline(str(image_folder))
    for error in (ValueError("bad latents"), NotImplementedError(), KeyError("latents")):

        def decode(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        pipeline.pipeline.vae.decode = decode
        with pytest.raises(ThirdPartyError, match=f"failed while denoising or decoding, .*{type(error).__name__}: "):
            pipeline(IMAGE)


@pytest.fixture
def broken_backend() -> Iterator[str]:
    @register_backend
    class Broken(Backend):
        name = "broken_in_its_call"
        summary = "raises"
        capability = BackendCapability()

        def probe(self, hardware: Hardware) -> Availability:
            return Availability("1")

        def run(self, call: AttentionCall) -> AttentionResult:
            raise RuntimeError("a mistake of this backend")

    yield Broken.name
    unregister_backend(Broken.name)


def test_what_is_ours_or_the_callers_is_not_theirs(image_folder: Path, broken_backend: str) -> None:
    with pytest.raises(RuntimeError, match="a mistake of this backend"):
        load_pipeline(str(image_folder), attention=broken_backend)(IMAGE)

    def stop(progress: Progress) -> None:
        if progress.stage == "denoise":
            raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        load_pipeline(str(image_folder))(IMAGE, on_progress=stop)
