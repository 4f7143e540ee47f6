"""Two stages of LTX-2 against diffusers' LTX2Pipeline, LTX2LatentUpsamplePipeline and LTX2Pipeline again, on tiny
weights in float32 on the CPU."""

from __future__ import annotations

import dataclasses
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2LatentUpsamplePipeline, LTX2Pipeline
from diffusers.pipelines.ltx2 import pipeline_ltx2 as theirs_module
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from family_cases import change
from family_parity import kept_after_steps, load_theirs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_runs import assert_same, finished, saving
from tables import table
from tiny_ltx2 import ONE_SCALE, VIDEO_CHANNELS

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention.layer_decisions import LayerDecisions
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.decoders.latent_upsampler import open_upsampler
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.errors import ConfigError, ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.generation.denoising_stages import stages_of
from diffusion_runtime.generation.saved_latents import read_latents
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.models.found_files import with_found_files
from diffusion_runtime.models.ltx2.family import FAMILY
from diffusion_runtime.models.ltx2.geometry import LTX2Geometry
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.session.finishing import continued_request, request_of

SIZE, HALF = ClipSize(128, 192, 9, 25), ClipSize(64, 96, 9, 25)
LEVELS = (0.909375, 0.725, 0.421875)


@pytest.fixture(scope="module")
def upsampler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_upsampler(tmp_path_factory.mktemp("upsampler") / "latent_upsampler")


def write_upsampler(folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LTX2LatentUpsamplerModel(in_channels=VIDEO_CHANNELS, mid_channels=32, num_blocks_per_stage=1)
        model.save_pretrained(folder)
    return folder


def load(folder: Path, upsampler: Path | None) -> Pipeline:
    ours = load_pipeline(str(folder), device="cpu", upsampler_path=None if upsampler is None else str(upsampler))
    assert isinstance(ours, Pipeline)
    return ours


def request(**values: Any) -> GenerationRequest:
    sizes = {"height": 128, "width": 192, "num_frames": 9, "fps": 25}
    fields = {"prompt": "a red circle", **sizes, "num_inference_steps": 2, "guidance_scale": 3.0, "seed": 5}
    return GenerationRequest(**(fields | values))


def packed(geometry: LTX2Geometry, noise: torch.Tensor, size: ClipSize) -> list[torch.Tensor]:
    parts = geometry.parts(noise, size)
    assert parts.audio is not None
    return [parts.video.flatten(2).transpose(1, 2), parts.audio.transpose(1, 2).flatten(2)]


def test_two_stages_equal_diffusers(tiny_folder: Path, upsampler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = load(tiny_folder, upsampler), load_theirs(LTX2Pipeline, tiny_folder)
    kept, geometry = kept_after_steps(monkeypatch), ours.rules.sampling.geometry
    assert isinstance(geometry, LTX2Geometry)
    requests = [
        request(prompt=prompt, negative_prompt=other, seed=seed)
        for prompt, other, seed in (("a red circle", "a star", 5), ("a blue star moving left", "", 6))
    ]
    steps: list[int] = []
    media = ours.generate(requests, on_progress=lambda at: steps.append(at.step) if at.stage == "denoise" else None)
    # Two steps at half size, three behind the upsampler.
    assert steps == [0, 1, 2, 3, 4, 5]
    drawn = SampleNoise(geometry.sample_shape(HALF), [5, 6])
    first, second = drawn.draw(), drawn.draw_of(geometry.sample_shape(SIZE))
    halves = geometry.parts(first, HALF)
    draws = [halves.video, halves.audio, *packed(geometry, second, SIZE)]
    monkeypatch.setattr(theirs_module, "randn_tensor", lambda *_, **__: draws.pop(0).clone())
    expected: list[list[torch.Tensor]] = []

    def keep(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        expected.append([tensors["latents"].clone(), tensors["audio_latents"].clone()])
        return {}

    theirs._callback_tensor_inputs = [*LTX2Pipeline._callback_tensor_inputs, "audio_latents"]
    values: dict[str, Any] = {
        "callback_on_step_end": keep,
        "callback_on_step_end_tensor_inputs": ["latents", "audio_latents"],
        "prompt": [each.prompt for each in requests],
        "negative_prompt": [each.negative_prompt for each in requests],
        "num_frames": 9,
        "frame_rate": 25.0,
        "guidance_scale": 3.0,
        "return_dict": False,
        **ONE_SCALE,
    }
    small, sound = theirs(height=64, width=96, num_inference_steps=2, output_type="latent", **values)
    network = LTX2LatentUpsamplerModel.from_pretrained(upsampler)
    larger = LTX2LatentUpsamplePipeline(vae=theirs.vae, latent_upsampler=network)(
        latents=small, height=64, width=96, num_frames=9, output_type="latent", return_dict=False
    )[0]
    assert larger.shape[-2:] == (4, 6)
    theirs.scheduler = FlowMatchEulerDiscreteScheduler()
    frames, waves = theirs(
        height=128,
        width=192,
        latents=larger,
        audio_latents=sound,
        num_inference_steps=3,
        sigmas=list(LEVELS),
        noise_scale=LEVELS[0],
        output_type="np",
        **values,
    )
    assert len(kept) == len(expected) == 5
    for index, (found, theirs_parts) in enumerate(zip(kept, expected, strict=True)):
        for mine, other in zip(packed(geometry, found, HALF if index < 2 else SIZE), theirs_parts, strict=True):
            assert (mine - other).norm() <= 1e-4 * other.norm()
    for item, theirs_frames, wave in zip(media, frames, waves.numpy(), strict=True):
        assert item.frames.shape == theirs_frames.shape == (9, 128, 192, 3)
        assert numpy.abs(item.frames / 255 - theirs_frames).max() <= 2 / 255
        assert theirs_frames.std() > 0.02
        assert item.audio is not None
        assert numpy.abs(item.audio.samples - wave).max() <= 1e-4
    remarks = " ".join(media[0].attention_report.notes)
    assert "second stage: 3 steps of flow_match_euler at 128 x 192 after 2 at 64 x 96" in remarks


def test_a_second_stage_of_ancestral_steps_draws_noise_of_its_own_size(tiny_folder: Path, upsampler: Path) -> None:
    prepared = prepare(RuntimeConfig(str(tiny_folder), device="cpu", upsampler_path=str(upsampler)))
    resolved = prepared.rules.resolve(dataclasses.replace(request(), second_stage_sampler="euler_ancestral"))
    settings = BatchSettings.of([resolved], prepared.rules.sampling)
    stage, shape = stages_of(settings)[1], settings.sampling.geometry.sample_shape(SIZE)
    drawn, start = SampleNoise(shape, [4]), SampleNoise(shape, [3]).draw()
    found = stage.run(
        stage.start(start.clone()), lambda x, _: x / 2, lambda *_: None, SampleNoise(shape, [4])
    ).latents.float()
    latents = start.double()
    for level, following in pairwise((*LEVELS, 0.0)):
        data = latents - level * latents / 2
        down = following**2 / level
        latents = down / level * latents + (1 - down / level) * data
        if following:
            signal = (1 - following) / (1 - down)
            latents = signal * latents + math.sqrt(following**2 - (down * signal) ** 2) * drawn.draw().double()
    assert (found - latents).norm() <= 1e-6 * latents.norm()


def test_a_second_stage_begins_with_noise_of_its_own_seed(tiny_folder: Path, upsampler: Path) -> None:
    rules = prepare(RuntimeConfig(str(tiny_folder), device="cpu", upsampler_path=str(upsampler))).rules
    drawn = {}
    for values in ({}, {"second_stage_seed": 9}, {"noise": "comfyui"}):
        first, second = stages_of(BatchSettings.of([rules.resolve(request(**values))], rules.sampling))
        before = first.noise([5])
        before.draw()
        drawn[tuple(values)] = [second.noise([5], before).draw_of((16,)) for _ in range(2)]
    of_seeds = {seed: SampleNoise((16,), [seed]).draw() for seed in (5, 9)}
    assert not torch.equal(*drawn[()])
    assert torch.equal(drawn["second_stage_seed",][0], of_seeds[9])
    assert torch.equal(drawn["noise",][0], of_seeds[5])


def test_attention_and_costs_are_those_of_both_stages(
    tiny_folder: Path, upsampler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[int] = set()
    monkeypatch.setattr(LayerDecisions, "check_request", lambda self, num_steps: asked.add(num_steps))
    prepared = prepare(RuntimeConfig(str(tiny_folder), device="cpu", upsampler_path=str(upsampler)))
    resolved = prepared.rules.resolve(request())
    found = explain(prepared, resolved)
    assert asked == {2 + len(LEVELS)} == {found.num_steps}
    stages = stages_of(BatchSettings.of([resolved], prepared.rules.sampling))
    assert [(each.size, len(each.steps(torch.device("cpu")))) for each in stages] == [(HALF, 2), (SIZE, len(LEVELS))]


def test_a_file_is_the_folders_network(tiny_folder: Path, upsampler: Path, tmp_path: Path) -> None:
    """By its name in ComfyUI's folder; its settings are those of its tensors. Another network is refused."""
    place = tmp_path / "models" / "latent_upscale_models" / "larger.safetensors"
    place.parent.mkdir(parents=True)
    shutil.copy(next(upsampler.rglob("*.safetensors")), place)
    config = RuntimeConfig(
        str(tiny_folder), upsampler_path="larger.safetensors", models_dir=(str(tmp_path / "models"),)
    )
    found = with_found_files(config)
    assert (found.upsampler_path, found.models_dir) == (str(place), ())
    latents, cpu = torch.randn(1, VIDEO_CHANNELS, 2, 4, 6), torch.device("cpu")
    made = []
    for path in (str(upsampler), str(place)):
        stage = open_upsampler(path, FAMILY.requests.second_stage, "ltx2", VIDEO_CHANNELS)
        made.append(stage.load(tiny_folder, cpu, torch.float32)(latents))
    assert torch.equal(*made)
    tensors = load_file(place)
    save_file(
        {"initial_conv.weight": tensors["initial_conv.weight"], "upsampler.0.weight": torch.zeros(64, 32, 3, 3, 3)},
        place,
    )
    with pytest.raises(ModelLoadError, match=r"larger\.safetensors: key 'spatial_upsample': expected True"):
        open_upsampler(str(place), FAMILY.requests.second_stage, "ltx2", VIDEO_CHANNELS)
    save_file({"weight": torch.zeros(1)}, place)
    with pytest.raises(ModelLoadError, match=r"larger\.safetensors: expected the tensors of a latent upsampler"):
        open_upsampler(str(place), FAMILY.requests.second_stage, "ltx2", VIDEO_CHANNELS)


def test_the_memory_plan_counts_the_upsampler(tiny_folder: Path, upsampler: Path) -> None:
    sizes = []
    for path in (None, str(upsampler)):
        prepared = prepare(RuntimeConfig(str(tiny_folder), upsampler_path=path, device="cpu", memory_limit="8GB"))
        memory = prepared.planned_for([]).description.memory
        assert memory is not None
        sizes.append(memory.demand.decoder.total)
    (weights,) = upsampler.rglob("*.safetensors")
    with safe_open(weights, framework="pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - it is not a mapping
    assert sizes[1] - sizes[0] == 4 * stored


def test_one_stage_is_as_without_an_upsampler(tiny_folder: Path, upsampler: Path, tmp_path: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_folder), upsampler_path=str(upsampler))).rules
    resolved = rules.resolve(request())
    assert resolved.second_stage_sigmas == LEVELS
    # The shift is that of the first stage's tokens.
    plain = inspect_pipeline(RuntimeConfig(str(tiny_folder))).rules.resolve(request(height=64, width=96))
    assert resolved.flow_shift == plain.flow_shift
    # A folder of two pipelines has it inside.
    shutil.copytree(upsampler, tmp_path / "both" / "latent_upsampler")
    inspect_pipeline(RuntimeConfig(str(tiny_folder), upsampler_path=str(tmp_path / "both")))


@table(
    ("values", "told"),
    [
        ({"height": 160}, "height: expected a multiple of 64, got 160; use 128 or 192, or leave out --upsampler-path"),
        ({"height": 64}, r"height: expected 64 or more, got 32: .* \(the first stage halves 64 x "),
        ({"step_cache": "easycache"}, "step_cache: it goes with one stage"),
        ({"second_stage_sigmas": "0.4,0.9"}, "second_stage_sigmas: expected noise levels that fall"),
    ],
)
def test_what_two_stages_cannot_make_is_refused_before_any_work(
    tiny_folder: Path, upsampler: Path, values: dict[str, Any], told: str
) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_folder), upsampler_path=str(upsampler))).rules
    with pytest.raises(RequestError, match=told):
        rules.resolve(request(**values))


def test_an_upsampler_that_does_not_fit_is_named(
    tiny_folder: Path, tiny_wan_folder: Path, upsampler: Path, tmp_path: Path
) -> None:
    def opened(model: Path, path: Path | str, backend: str = "auto") -> None:
        inspect_pipeline(RuntimeConfig(str(model), upsampler_path=str(path), backend=backend))

    with pytest.raises(ConfigError, match="upsampler_path: wan models have no second stage; leave out --upsampler"):
        opened(tiny_wan_folder, upsampler)
    with pytest.raises(ConfigError, match=r"upsampler_path: .* has no config.json; expected .* LTX2LatentUpsamplerMo"):
        opened(tiny_folder, tmp_path)
    with pytest.raises(ConfigError, match="upsampler_path: diffusers' own pipelines have no second stage"):
        opened(tiny_folder, upsampler, "diffusers")
    refusals: tuple[tuple[dict[str, Any], str], ...] = (
        ({"_class_name": "LTXLatentUpsamplerModel"}, "expected LTX2LatentUpsamplerModel, got 'LTXLatent"),
        ({"in_channels": 8}, "key 'in_channels': expected 6"),
        ({"rational_spatial_scale": 1.5}, "key 'rational_spatial_scale': expected 2.0"),
        ({"spatial_scale": 2.0}, "key 'spatial_scale' is unknown to LTX2LatentUpsamplerModel"),
    )
    for index, (values, told) in enumerate(refusals):
        folder = change(Path(shutil.copytree(upsampler, tmp_path / str(index))), "config.json", values)
        with pytest.raises(ModelLoadError, match=told):
            opened(tiny_folder, folder)
    with pytest.raises(
        RequestError,
        match="second_stage_sigmas: a second stage needs an upsampler, a folder by --upsampler-path; leave it out",
    ):
        inspect_pipeline(RuntimeConfig(str(tiny_folder))).rules.resolve(request(second_stage_sigmas=LEVELS))


def test_a_draft_of_two_stages_is_finished(tiny_folder: Path, upsampler: Path, tmp_path: Path) -> None:
    """Left in either stage and between them; and a small clip with sound that gets a second stage afterwards."""
    ours, plain = load(tiny_folder, upsampler), load(tiny_folder, None)
    asked = request(second_stage_sampler="euler_ancestral")
    whole = ours(asked)
    for stop in (1, 2, 3, 4):
        assert_same(finished(ours, asked, stop, tmp_path), whole)
    draft, _ = saving(ours, dataclasses.replace(asked, stop_after_step=2), tmp_path)
    assert draft.frames.shape == (9, 64, 96, 3)
    assert draft.audio is not None
    _, files = saving(plain, request(height=64, width=96), tmp_path)
    saved = read_latents(files[-1])
    larger = continued_request(saved, request_of(saved), ours.rules)
    found = ours.finish(saved, larger)
    assert_same(found, ours(larger))
    assert found.frames.shape == (9, 128, 192, 3)
