"""Clips with sound against diffusers' modular pipeline on tiny weights: latents within 1e-4, frames and sound alike."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from family_parity import record_latents
from PIL import Image
from tables import table
from tiny_minimax_h3 import TINY_SIZES, write_tiny_minimax_h3

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry

# What importing diffusers' modular pipelines says about packages that are not here; of torch, about its weight norm.
pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 3


@pytest.fixture(scope="module")
def ours(tiny_minimax_h3_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_minimax_h3_folder), device="cpu")


@pytest.fixture(scope="module")
def theirs(tiny_minimax_h3_folder: Path) -> Any:
    """The pipeline, whose clips may be short."""
    import diffusers
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
    from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class OfShortClips(diffusers.MiniMaxH3ModularPipeline):
        min_duration = 0.0

    folder = tiny_minimax_h3_folder
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    picture = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    pipeline = OfShortClips(blocks=MiniMaxH3Blocks())
    parts = {
        name: getattr(diffusers, made_by).from_pretrained(folder / name)
        for name, made_by in (
            ("transformer", "MiniMaxH3Transformer3DModel"),
            ("vae", "AutoencoderKLMiniMaxH3"),
            ("audio_vae", "AutoencoderKLMiniMaxH3Audio"),
            ("scheduler", "MiniMaxH3Scheduler"),
            ("audio_scheduler", "MiniMaxH3Scheduler"),
        )
    }
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    pipeline.update_components(**parts, text_encoder=encoder, tokenizer=tokenizer)
    # transformers makes the processor of torchvision; these are what the pipeline takes of it.
    pipeline.processor = SimpleNamespace(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        create_mm_token_type_ids=lambda rows: [[int(each == picture) for each in row] for row in rows],
    )
    return pipeline


def picture(path: Path, seed: int) -> str:
    """Write an image whose sides have nearly the clip's ratio."""
    pixels = numpy.random.default_rng(seed).integers(0, 256, (8, 11 + seed, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).resize((150, 96 + 4 * seed)).save(path)
    return str(path)


@table("fields", [(), ("image_path", "last_image_path")])
def test_a_clip_equals_that_of_diffusers(
    ours: Pipeline,
    theirs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: tuple[str, ...],
) -> None:
    paths = {name: picture(tmp_path / f"{name}.png", index) for index, name in enumerate(fields)}
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=NUM_STEPS, seed=3, **paths)
    size, geometry = ClipSize(64, 96, 22, 24), ours.rules.sampling.geometry
    assert isinstance(geometry, MiniMaxH3Geometry)
    kept = record_latents(monkeypatch)
    media = ours(request)
    noise = geometry.parts(initial_noise(geometry.sample_shape(size), [3]), size)
    assert noise.audio is not None
    images = {name.removesuffix("_path"): Image.open(path) for name, path in paths.items()}
    state = theirs(
        prompt=request.prompt,
        **TINY_SIZES,
        **images,
        # The levels of the steps, and the last one, 0.
        num_inference_steps=NUM_STEPS + 1,
        latents=noise.video,
        audio_latents=noise.audio[0].permute(2, 0, 1),
        # Of the noise of the images.
        generator=torch.Generator().manual_seed(42),
        output_type="np",
    )
    found = geometry.parts(kept[-1], size)
    assert found.audio is not None
    for of_ours, of_theirs in (
        (found.video, state.get("latents")),
        (found.audio[0].permute(2, 0, 1), state.get("audio_latents")),
    ):
        assert (of_ours - of_theirs).norm() <= 1e-4 * of_theirs.norm()
    assert len(kept) == NUM_STEPS
    # The steps did something.
    assert (found.video - noise.video).abs().max() > 0.5
    frames = state.get("videos")[0]
    assert numpy.abs(media.frames / 255 - frames).max() <= 2 / 255
    assert media.audio is not None
    assert numpy.abs(media.audio.samples - numpy.asarray(state.get("audio")[0])).max() <= 1e-3


def test_the_modular_repository_is_read_without_the_other_transformer(
    hub: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_minimax_h3(hub.root / "ORG" / "NAME", is_modular=True)
    assert folder.is_dir()
    assert run(["models", "download", "ORG/NAME", "--dry-run", "--json"]) == 0
    listed = {each["name"] for each in json.loads(capsys.readouterr().out)["files"]}
    name = "diffusion_pytorch_model.safetensors"
    assert (f"transformer/{name}" in listed, f"transformer_ref/{name}" in listed) == (True, False)
    pipeline = load_pipeline("ORG/NAME", device="cpu")
    assert type(pipeline) is Pipeline
    assert isinstance(pipeline.rules.sampling.geometry, MiniMaxH3Geometry)
    asked = " ".join(map(str, hub.requests))
    assert (f"transformer/{name}" in asked, f"transformer_ref/{name}" in asked) == (True, False)


def test_the_published_model_makes_5_to_15_seconds() -> None:
    rules = inspect_pipeline(RuntimeConfig("minimax-h3", device="cpu", offline=True)).rules
    for num_frames, nearest in ((107, 124), (362, 345)):
        with pytest.raises(RequestError, match=f"got {num_frames}, .* 5.2 to 14.4 s: use {nearest}"):
            rules.resolve(GenerationRequest("a star", num_frames=num_frames))


def test_seconds_are_a_length_that_the_model_makes(ours: Pipeline) -> None:
    lengths = [ours.rules.resolve(GenerationRequest("rain", seconds=seconds)).num_frames for seconds in (5, 6)]
    assert lengths == [124, 141]


def test_an_image_to_end_with_alone(ours: Pipeline, tmp_path: Path) -> None:
    path = picture(tmp_path / "last.png", 0)
    request = ours.resolve(GenerationRequest("a star", last_image_path=path, num_frames=22))
    # The size follows from it, and not from the default.
    assert (request.height, request.width) == (64, 96)
    request = ours.resolve(GenerationRequest("a star", last_image_path=path, **TINY_SIZES))
    condition = ours.parts.image_conditioner.condition(request, ClipSize(64, 96, 22, 24))
    assert condition.latents.shape[2] == 0
    assert [each.shape[2:] for each in condition.further] == [(1, 4, 6)]
    assert condition.places == ((6, 1.0),)


@table(
    ("values", "told"),
    [
        ({"num_frames": 30}, "num_frames: expected a multiple of 17 plus 5, got 30; use 22 or 39"),
        ({"num_frames": 5}, "num_frames: expected 22 to 345, got 5, 0.2 s; the model makes 0.9 to 14.4 s: use 22"),
        ({"num_frames": 362}, "num_frames: expected 22 to 345, got 362, 15.1 s; .*: use 345"),
        ({"height": 80}, "height: expected a multiple of 32, got 80; use 64 or 96"),
        ({"fps": 30}, "fps: this model makes 24 frames a second with their sound, got 30; leave it out"),
        (
            {"sampler": "unipc"},
            "sampler: expected flow_match_euler, .*, got unipc: pictures and sound of this",
        ),
    ],
)
def test_what_a_request_may_not_say(ours: Pipeline, values: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        ours.resolve(GenerationRequest("a star", **{**TINY_SIZES, **values}))


def test_named_levels_move_the_sound_as_the_models_own_levels_do(ours: Pipeline) -> None:
    """Those of the model by name, with any flow shift, which such levels are not given."""
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=NUM_STEPS, seed=1)
    own = ours.rules.settings(ours.resolve(request)).build_sampler().steps(torch.device("cpu"))
    levels = tuple(step.sigma for step in own)
    expected = ours.latents(request)
    for flow_shift in (None, 6.0):
        named = GenerationRequest("a red circle", **TINY_SIZES, sigmas=levels, flow_shift=flow_shift, seed=1)
        assert (ours.latents(named) - expected).abs().max() < 1e-5
