"""Wan 2.2 against diffusers on tiny weights: two experts, and videos that start from an image."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image
from saved_runs import assert_same, finished
from tables import table
from tiny_families import small_request
from tiny_models import TINY_SIZES, write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules

PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring.")
NEGATIVE = "a yellow square"
TOLERANCE = 1e-5
BOUNDARY = 0.875


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "experts", boundary_ratio=BOUNDARY)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_wan(tmp_path_factory.mktemp("wan") / "image", vae="residual", takes_image=True)


@pytest.fixture(scope="module")
def image_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows, columns = numpy.mgrid[0:48, 0:96]
    pixels = numpy.stack([5 * rows % 256, 2 * columns, 255 - rows], axis=-1).astype(numpy.uint8)
    path = tmp_path_factory.mktemp("images") / "start.png"
    Image.fromarray(pixels).save(path)
    return str(path)


def theirs(folder: Path) -> WanPipeline:
    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def noise_of(ours: Pipeline, request: GenerationRequest, seeds: list[int]) -> torch.Tensor:
    sizes = ours.resolve(request).to_dict()
    shape = ours.rules.sampling.geometry.latent_shape(sizes["height"], sizes["width"], sizes["num_frames"])
    return initial_noise(shape, seeds)


class RecordingDecoder(LatentDecoder):
    """Another decoder, which keeps what it is given."""

    def __init__(self, decoder: LatentDecoder) -> None:
        self.decoder = decoder
        self.library, self.implementation = decoder.library, decoder.implementation
        self.latents: list[torch.Tensor] = []

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        self.latents.append(latents)
        return self.decoder.decode(latents)


def assert_latents(found: list[torch.Tensor], expected: torch.Tensor) -> None:
    difference = torch.cat(found) - expected
    assert difference.norm() <= TOLERANCE * expected.norm()


def assert_frames(found: numpy.ndarray, expected: numpy.ndarray) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.02
    assert numpy.abs(found / 255 - expected).max() <= 1 / 255


@pytest.mark.parametrize("guidance_mode", ["batched", "two_pass"])
@pytest.mark.parametrize("scales", [(4.0, 2.5), (3.0, None)])
def test_two_experts(experts_folder: Path, guidance_mode: str, scales: tuple[float, float | None]) -> None:
    ours = load_pipeline(str(experts_folder), device="cpu")
    decoder = RecordingDecoder(ours.decoder)
    ours.parts = dataclasses.replace(ours.parts, decoder=decoder)
    request = GenerationRequest(
        PROMPTS[0],
        NEGATIVE,
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=6,
        guidance_scale=scales[0],
        guidance_scale_2=scales[1],
        guidance_mode=guidance_mode,
        seed=3,
    )
    ours(request)
    reference = theirs(experts_folder)
    steps_of = [0, 0]
    for index, module in enumerate((reference.transformer, reference.transformer_2)):
        module.register_forward_pre_hook(lambda *_, index=index: steps_of.__setitem__(index, steps_of[index] + 1))
    latents = reference(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=6,
        guidance_scale=scales[0],
        guidance_scale_2=scales[1],
        latents=noise_of(ours, request, [3]),
        max_sequence_length=ours.text_encoder.max_tokens,
        output_type="latent",
    ).frames
    # Both experts had steps, or the comparison would not tell them apart.
    assert min(steps_of) > 0
    assert_latents(decoder.latents, latents)


@pytest.mark.parametrize("preset", ["distill-4", "turbowan2.2-4"])
def test_two_of_four_distilled_steps_are_at_high_noise(experts_folder: Path, preset: str) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(experts_folder))).rules
    assert isinstance(rules, RequestRules)
    request = rules.resolve(GenerationRequest(PROMPTS[0], height=32, width=48, num_frames=5), preset)
    assert (request.guidance_scale, request.guidance_scale_2) == (1.0, None)
    steps: list[StepInfo] = []
    noise = torch.zeros(1)
    BatchSettings.of([request], rules.sampling).build_sampler().sample(
        noise, lambda latents, _: latents, lambda step, _: steps.append(step), lambda: noise
    )
    for boundary in (0.875, 0.9):
        high = [1000 * boundary <= (step.timestep or 0.0) for step in steps]
        assert high == [True, True, False, False]


def test_each_expert_serves_its_steps(experts_folder: Path) -> None:
    ours = load_pipeline(str(experts_folder), device="cpu")
    seen: list[tuple[int, float, str]] = []
    for layer in ours.transformer.attention_layers():
        layer.register_forward_pre_hook(
            lambda layer, arguments: seen.append(
                (arguments[3].step.expert, arguments[3].step.timestep, layer.layer.name)
            )
        )
    ours(GenerationRequest(PROMPTS[0], height=32, width=32, num_frames=1, num_inference_steps=6, guidance_scale=1.0))
    assert {expert for expert, _, _ in seen} == {0, 1}
    for expert, timestep, name in seen:
        assert expert == (0 if timestep >= 1000 * BOUNDARY else 1)
        assert name.startswith(f"experts.{expert}.blocks.")
        assert name in dict(ours.transformer.named_modules())


def test_what_an_expert_keeps_of_the_prompt_is_dropped_when_the_next_takes_over(experts_folder: Path) -> None:
    """Both at once would be 0.84 GB more than the plan of a 24 GB card has room for."""
    ours = load_pipeline(str(experts_folder), device="cpu")
    kept: list[tuple[int, int]] = []

    def count(*given: Any) -> None:
        context = given[1][3]
        kept.append((context.step.expert, sum(1 for _ in context.state.find_all("prompt"))))

    for expert in range(2):
        ours.transformer.expert(expert).register_forward_hook(count)
    ours(GenerationRequest(PROMPTS[0], height=32, width=32, num_frames=1, num_inference_steps=6, guidance_scale=1.0))
    counts = dict(kept)
    assert counts[0] == counts[1] > 0


def test_the_experts_have_scales_of_their_own_by_default(experts_folder: Path, image_folder: Path) -> None:
    defaults = load_pipeline(str(experts_folder), device="cpu").defaults
    assert (defaults["guidance_scale"], defaults["guidance_scale_2"], defaults["num_inference_steps"]) == (4.0, 3.0, 40)
    rules = inspect_pipeline(RuntimeConfig(str(experts_folder), device="cpu")).rules
    settings = BatchSettings.of(
        [rules.resolve(GenerationRequest("a star", **TINY_SIZES, guidance_scale=7.0))], rules.sampling
    )
    assert settings.guidance.cfg_scales == (7.0, 7.0)
    defaults = load_pipeline(str(image_folder), device="cpu").defaults
    assert (defaults["height"], defaults["width"], defaults["num_frames"], defaults["fps"]) == (704, 1280, 121, 24)
    assert "guidance_scale_2" not in defaults


def image_request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {
        "prompt": PROMPTS[0],
        "negative_prompt": NEGATIVE,
        "height": 32,
        "width": 64,
        "num_frames": 9,
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
        "seed": 5,
    }
    return GenerationRequest(**(fields | values))


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_a_video_from_an_image(image_folder: Path, image_path: str, guidance_scale: float) -> None:
    ours = load_pipeline(str(image_folder), device="cpu")
    requests = [
        image_request(prompt=prompt, seed=seed, image_path=image_path, guidance_scale=guidance_scale)
        for prompt, seed in zip(PROMPTS, (5, 6), strict=True)
    ]
    decoder = RecordingDecoder(ours.decoder)
    ours.parts = dataclasses.replace(ours.parts, decoder=decoder)
    media = ours.generate(requests)
    plain = theirs(image_folder)
    parts = {name: plain.components[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")}
    reference = WanImageToVideoPipeline(**parts, expand_timesteps=True)
    reference.set_progress_bar_config(disable=True)
    image = Image.open(image_path).resize((64, 32), Image.Resampling.LANCZOS)

    def run(output_type: str) -> Any:
        return reference(
            image=image,
            prompt=list(PROMPTS),
            negative_prompt=[NEGATIVE] * 2,
            height=32,
            width=64,
            num_frames=9,
            num_inference_steps=4,
            guidance_scale=guidance_scale,
            latents=noise_of(ours, requests[0], [5, 6]),
            max_sequence_length=ours.text_encoder.max_tokens,
            output_type=output_type,
        ).frames

    assert_latents(decoder.latents, run("latent"))
    frames = run("np")
    for item, expected in zip(media, frames, strict=True):
        assert_frames(item.frames, expected)
    without = ours(image_request(guidance_scale=guidance_scale)).frames
    assert numpy.abs(without.astype(int) - media[0].frames).mean() > 1


def test_the_same_model_from_text_alone(image_folder: Path) -> None:
    ours = load_pipeline(str(image_folder), device="cpu")
    request = image_request()
    frames = theirs(image_folder)(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=32,
        width=64,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=4.0,
        latents=noise_of(ours, request, [5]),
        max_sequence_length=ours.text_encoder.max_tokens,
        output_type="np",
    ).frames
    assert_frames(ours(request).frames, frames[0])


def test_a_missing_image_fails_before_any_work(image_folder: Path, tmp_path: Path) -> None:
    ours = load_pipeline(str(image_folder), device="cpu")
    with pytest.raises(RequestError, match="no such file"):
        ours.resolve(image_request(image_path=str(tmp_path / "none.png")))


@table("expert", ["high_noise", "low_noise"])
def test_one_expert_alone(experts_folder: Path, tmp_path: Path, expert: str) -> None:
    """Every step is predicted as by a model of that transformer alone, with the expert's guidance."""
    single = tmp_path / "single"
    shutil.copytree(experts_folder, single)
    if expert == "low_noise":
        shutil.rmtree(single / "transformer")
        (single / "transformer_2").rename(single / "transformer")
    index = json.loads((single / "model_index.json").read_text())
    index |= {"transformer_2": [None, None], "boundary_ratio": None}
    (single / "model_index.json").write_text(json.dumps(index))
    two, one = (load_pipeline(str(folder), device="cpu") for folder in (experts_folder, single))
    request = small_request(two, 3)
    of_two = dataclasses.replace(request, expert=expert, guidance_scale=2.0, guidance_scale_2=3.0)
    scale = 3.0 if expert == "low_noise" else 2.0
    assert torch.equal(two.latents(of_two), one.latents(dataclasses.replace(request, guidance_scale=scale)))
    with pytest.raises(RequestError, match="boundary_ratio: one expert predicts every step"):
        two.resolve(dataclasses.replace(of_two, boundary_ratio=0.5))
    with pytest.raises(RequestError, match="expert: this model has one expert"):
        one.resolve(dataclasses.replace(request, expert=expert))


def test_a_second_expert_of_another_size_is_refused(experts_folder: Path, tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "experts", boundary_ratio=BOUNDARY)
    path = folder / "transformer_2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"transformer_2: the weights do not fit"):
        load_pipeline(str(folder), device="cpu")


def test_a_draft_is_finished_by_the_expert_of_its_next_step(experts_folder: Path, tmp_path: Path) -> None:
    ours = load_pipeline(str(experts_folder), device="cpu")
    sizes = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 4}
    asked = GenerationRequest(PROMPTS[0], NEGATIVE, **sizes, guidance_scale=4.0, guidance_scale_2=2.5, seed=1)
    whole = ours(asked)
    for stop in (1, 3):
        assert_same(finished(ours, asked, stop, tmp_path), whole)


def test_the_expert_that_no_request_uses_is_not_read(experts_folder: Path, tmp_path: Path) -> None:
    asked = GenerationRequest("a circle", height=32, width=48, num_frames=5, num_inference_steps=2)
    prepared = prepare(RuntimeConfig(str(experts_folder), device="cpu"))
    whole = prepared.load()
    for index, (name, component, other) in enumerate(
        (("high_noise", "transformer", "transformer_2"), ("low_noise", "transformer_2", "transformer"))
    ):
        # The folder without the other one's weights, which would be an error to read.
        folder = shutil.copytree(experts_folder, tmp_path / name)
        for file in (folder / other).glob("*.safetensors"):
            file.unlink()
        request = dataclasses.replace(asked, expert=name)
        prepared = prepare(RuntimeConfig(str(folder), device="cpu"))
        requests = [prepared.rules.resolve(request)]
        alone = prepared.for_these_alone(requests)
        alone.check_files()
        demand = alone.planned_for(requests).description.memory
        assert [part.name for part in demand.demand.transformers] == [component]
        pipeline = alone.load(None, requests)
        parts = pipeline.transformer.experts
        assert not any(each.is_meta for each in parts[index].parameters())
        assert all(each.is_meta for each in parts[1 - index].parameters())
        assert numpy.array_equal(pipeline(request).frames, whole(request).frames)
        # All steps on one side of the switch, and the first steps of a draft, are of one expert too.
        later: dict[str, Any] = {"boundary_ratio": 0.999, "sigmas": (0.9, 0.5), "sampler": "flow_match_euler"}
        for values in ({"boundary_ratio": 0.001}, {"stop_after_step": 1}, later):
            plain = prepared.rules.resolve(dataclasses.replace(asked, **values))
            unread = "transformer" if values is later else "transformer_2"
            assert prepared.for_these_alone([plain]).unread == (unread,), values
        # Requests that differ need both.
        both = prepared.for_these_alone([*requests, prepared.rules.resolve(asked)])
        assert both is prepared
        with pytest.raises(ModelLoadError):
            both.check_files()
