"""Pipeline on a real (tiny) model: requests, batches, progress, the attention report, recipes and failures."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from open_fields import OPEN_FIELDS
from tiny_models import TINY_SIZES
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_runtime import AttentionConfig, GenerationRequest, Pipeline, force_attention_backend, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.progress import Progress
from diffusion_runtime.decoders.interface import FrameStream
from diffusion_runtime.errors import (
    ConfigError,
    DeviceMemoryError,
    DiffusionRuntimeError,
    ModelLoadError,
    RequestError,
)
from diffusion_runtime.media import ClipHeader, FileWriter
from diffusion_runtime.models.sampling_presets import names_of, presets_of

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_wan_folder), device="cpu")


def request(prompt: str = "a red circle moving left", **values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {**TINY_SIZES, "num_inference_steps": 3, "guidance_scale": 4.0, "seed": 1}
    return GenerationRequest(prompt, **(fields | values))


class KernelCalls(TorchDispatchMode):
    """Counts the attention operators torch dispatches, in all and inside one module's forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.total = 0
        self.inside = 0
        self._depth = 0
        self._hooks = [
            module.register_forward_pre_hook(lambda *_: self._enter(1)),
            module.register_forward_hook(lambda *_: self._enter(-1)),
        ]

    def _enter(self, change: int) -> None:
        self._depth += change

    def __exit__(self, *arguments: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*arguments)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(function):
            self.total += 1
            self.inside += self._depth > 0
        return function(*args, **(kwargs or {}))


def test_it_names_its_model(pipeline: Pipeline, tiny_wan_folder: Path) -> None:
    assert repr(pipeline) == f"<Pipeline: {tiny_wan_folder}, cpu, float32>"


def test_autocast_and_a_default_device_change_no_frame(pipeline: Pipeline) -> None:
    expected = pipeline(request()).frames
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numpy.array_equal(pipeline(request()).frames, expected)
    torch.set_default_device("meta")
    try:
        assert numpy.array_equal(pipeline(request()).frames, expected)
    finally:
        torch.set_default_device(None)


# --- the attention report ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "num_forwards"),
    [
        ({"guidance_mode": "batched"}, 3),
        ({"guidance_mode": "two_pass"}, 6),
        ({"guidance_scale": 1.0}, 3),
        ({"num_inference_steps": 5, "sampler": "flow_match_euler"}, 5),
        ({"num_frames": 1}, 3),
    ],
)
def test_the_report_counts_the_kernel_calls_that_happened(
    pipeline: Pipeline, values: dict[str, Any], num_forwards: int
) -> None:
    with KernelCalls(pipeline.transformer) as calls:
        report = pipeline(request(**values)).attention_report
    assert report.num_calls == calls.inside == num_forwards * NUM_LAYERS * 2
    # Text encoder and decoder attend too, by their libraries' own means: named, not counted.
    assert calls.total > calls.inside
    assert {(item.component, item.library) for item in report.libraries} == {
        ("text_encoder", "torch"),
        ("vae", "torch"),
    }
    assert {(row.role, row.backend, row.count) for row in report.rows} == {
        ("self", "torch_sdpa", num_forwards * NUM_LAYERS),
        ("cross", "torch_sdpa", num_forwards * NUM_LAYERS),
    }
    assert {row.layers for row in report.rows} == {"0-1"}


def test_every_generation_has_a_report_of_its_own(pipeline: Pipeline) -> None:
    first, second = pipeline(request()), pipeline(request())
    assert first.attention_report.num_calls == second.attention_report.num_calls == 12


def test_a_choice_forced_around_the_call_is_what_runs(pipeline: Pipeline) -> None:
    with force_attention_backend("reference"), KernelCalls(pipeline.transformer) as calls:
        forced = pipeline(request())
    assert calls.inside == 0
    assert {(row.backend, row.source) for row in forced.attention_report.rows} == {("reference", "force")}
    usual = pipeline(request())
    assert {row.backend for row in usual.attention_report.rows} == {"torch_sdpa"}
    assert numpy.abs(forced.frames.astype(int) - usual.frames).max() <= 1


def test_a_choice_forced_for_one_role_leaves_the_other(pipeline: Pipeline) -> None:
    with force_attention_backend("reference", role="cross"):
        rows = pipeline(request()).attention_report.rows
    assert {(row.role, row.backend) for row in rows} == {("self", "torch_sdpa"), ("cross", "reference")}


def test_a_choice_forced_around_loading_stays_with_the_pipeline(tiny_wan_folder: Path) -> None:
    with force_attention_backend("reference"):
        forced = load_pipeline(str(tiny_wan_folder), device="cpu")
    rows = forced(request()).attention_report.rows
    assert {(row.backend, row.source) for row in rows} == {("reference", "force")}


def test_a_schedule_runs_at_its_steps(tiny_wan_folder: Path) -> None:
    config = AttentionConfig.parse({"schedule": [{"steps": "1--1", "backend": "reference"}]})
    rows = load_pipeline(str(tiny_wan_folder), device="cpu", attention=config)(request()).attention_report.rows
    assert {(row.backend, row.steps) for row in rows} == {("torch_sdpa", "0"), ("reference", "1-2")}


# --- requests ---------------------------------------------------------------------------------------------------------


def test_what_this_model_cannot_take_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(RequestError, match="image_path: this model makes videos from text alone"):
        pipeline.resolve(GenerationRequest("a red circle", image_path="a.png"))
    with pytest.raises(RequestError, match="true_cfg_scale: this model's classifier-free guidance is guidance_scale"):
        pipeline.resolve(GenerationRequest("a red circle", true_cfg_scale=4.0))
    # It was taken and had no effect.
    with pytest.raises(RequestError, match="guidance_scale_2: this model has one expert"):
        pipeline.resolve(GenerationRequest("a red circle", guidance_scale_2=4.0))


def test_resolve_fills_every_field(pipeline: Pipeline) -> None:
    resolved = pipeline.resolve(GenerationRequest("a red circle", seed=3))
    open_fields = {name for name, value in resolved.to_dict().items() if value is None}
    assert open_fields == OPEN_FIELDS
    assert resolved.sampler == "unipc"
    assert resolved.flow_shift == 3.0
    assert pipeline.resolve(resolved) == resolved


def test_what_a_request_says_is_kept(pipeline: Pipeline) -> None:
    asked = request(sampler="flow_match_euler", flow_shift=7.0, fps=9, guidance_mode="two_pass", negative_prompt="blue")
    assert pipeline.resolve(asked) == asked


def test_presets_go_over_defaults_and_under_the_request(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    settings = {
        "defaults": {"height": 64, "num_inference_steps": 11, "flow_shift": 6.0},
        "presets": {"draft": {"height": 32, "num_inference_steps": 2}},
    }
    (folder / "generation.json").write_text(json.dumps(settings))
    loaded = load_pipeline(str(folder), device="cpu")
    own = {name: values for name, values in loaded.presets.items() if name not in names_of(presets_of("wan"))}
    assert own == settings["presets"]
    plain = loaded.resolve(GenerationRequest("a"))
    assert (plain.height, plain.num_inference_steps, plain.flow_shift) == (64, 11, 6.0)
    draft = loaded.resolve(GenerationRequest("a", num_inference_steps=5), preset="draft")
    assert (draft.height, draft.num_inference_steps, draft.flow_shift) == (32, 5, 6.0)
    with pytest.raises(RequestError, match="draft"):
        loaded.resolve(GenerationRequest("a"), preset="drafd")


@pytest.mark.parametrize(
    ("values", "told"),
    [({"height": 40}, "32 or 48"), ({"width": 17}, "16 or 32"), ({"num_frames": 4}, "1 or 5"), ({"height": 8}, "16")],
)
def test_sizes_that_do_not_divide_are_refused_before_any_work(
    pipeline: Pipeline, values: dict[str, Any], told: str
) -> None:
    seen: list[Progress] = []
    with pytest.raises(RequestError, match=told):
        pipeline(request(**values), on_progress=seen.append)
    assert seen == []


def test_attention_options_for_other_steps_are_refused_before_any_work(tiny_wan_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "three_steps.json"
    windows = {f"{s}_{layer}_{h}": [1, 1, 1] for s in range(3) for layer in range(NUM_LAYERS) for h in range(4)}
    path.write_text(json.dumps(windows))
    choice = {"backend": "sliding_tile_attn", "extra": {"mask_strategy_file_path": str(path)}}
    tuned = load_pipeline(str(tiny_wan_folder), device="cpu", attention=choice)
    plain = load_pipeline(str(tiny_wan_folder), device="cpu")
    seen: list[Progress] = []
    with pytest.raises(ConfigError, match="is for 3 steps and this run has 2"):
        tuned.generate([request(num_inference_steps=2)] * 2, on_progress=seen.append)
    with force_attention_backend(choice, role="self"), pytest.raises(ConfigError, match="is for 3 steps"):
        plain(request(num_inference_steps=2), on_progress=seen.append)
    assert seen == []
    assert {row.backend for row in tuned(request()).attention_report.rows} == {"sliding_tile_attn", "torch_sdpa"}
    plain(request(num_inference_steps=2))


def test_another_scheduler_class_needs_a_sampler_in_the_request(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({"_class_name": "DDIMScheduler", "num_train_timesteps": 1000}))
    loaded = load_pipeline(str(folder), device="cpu")
    with pytest.raises(ModelLoadError, match="DDIMScheduler") as caught:
        loaded(request())
    assert "UniPCMultistepScheduler" in str(caught.value)
    assert "FlowMatchEulerDiscreteScheduler" in str(caught.value)
    assert loaded(request(sampler="unipc")).recipe["request"]["sampler"] == "unipc"


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance_mode", ["batched", "two_pass"])
def test_a_batch_equals_single_runs(pipeline: Pipeline, guidance_mode: str) -> None:
    requests = [
        request(guidance_mode=guidance_mode),
        request(
            "two objects: a blue star and a green ring", negative_prompt="yellow", seed=2, guidance_mode=guidance_mode
        ),
        request(seed=9, guidance_mode=guidance_mode),
    ]
    together = pipeline.generate(requests)
    for item, alone in zip(together, map(pipeline, requests), strict=True):
        assert numpy.abs(item.frames.astype(int) - alone.frames).max() <= 1
        assert item.recipe == alone.recipe
    assert numpy.abs(together[0].frames.astype(int) - together[2].frames).max() > 4
    latents = pipeline.latents(requests)
    torch.testing.assert_close(latents, torch.cat([pipeline.latents(each) for each in requests]), rtol=1e-3, atol=1e-3)


def test_the_same_request_gives_the_same_bytes(pipeline: Pipeline) -> None:
    assert numpy.array_equal(pipeline(request()).frames, pipeline(request()).frames)


@pytest.mark.parametrize("values", [{"num_frames": 1}, {"guidance_scale": 2.0}, {"sampler": "flow_match_euler"}])
def test_requests_of_one_batch_must_agree(pipeline: Pipeline, values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(RequestError, match=name):
        pipeline.generate([request(), request(**values)])


def test_an_empty_batch_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(RequestError, match="one request or more"):
        pipeline.generate([])


# --- progress and interruption ----------------------------------------------------------------------------------------


def test_progress_says_every_step_in_order(pipeline: Pipeline) -> None:
    seen: list[Progress] = []
    media = pipeline.generate([request(), request(seed=2)], on_progress=seen.append)
    assert [(item.stage, item.step, item.num_steps, item.request_index) for item in seen] == [
        ("text", 0, 1, None),
        ("text", 1, 1, None),
        *(("denoise", step, 3, None) for step in range(4)),
        ("decode", 0, 1, 0),
        ("decode", 1, 1, 0),
        ("decode", 0, 1, 1),
        ("decode", 1, 1, 1),
    ]
    denoise = [item.seconds for item in seen if item.stage == "denoise"]
    assert denoise == sorted(denoise)
    for item in media:
        assert list(item.timings) == ["text", "denoise", "decode"]
        assert min(item.timings.values()) > 0
    assert media[0].timings["denoise"] == media[1].timings["denoise"] >= denoise[-1]


def test_a_sink_gets_the_frames_as_they_are_decoded(pipeline: Pipeline, tmp_path: Path) -> None:
    """Chunk after chunk, each clip's behind its header; the file has the bytes of one saved afterwards."""
    seen: list[tuple[int, ClipHeader]] = []
    chunks: dict[int, list[numpy.ndarray]] = {}

    def open_sink(index: int, header: ClipHeader) -> Callable[[numpy.ndarray], object]:
        seen.append((index, header))
        return chunks.setdefault(index, []).append

    requests = [request(), request(seed=2)]
    media = pipeline.generate(requests, open_sink=open_sink)
    assert seen == [(index, each.header) for index, each in enumerate(media)]
    for index, each in enumerate(media):
        assert [len(chunk) for chunk in chunks[index]] == [1] + [4] * ((each.num_frames - 1) // 4)
        assert numpy.array_equal(numpy.concatenate(chunks[index]), each.frames)
        assert numpy.array_equal(each.frames, pipeline(requests[index]).frames)
    with FileWriter(tmp_path / "streamed.mp4") as writer:
        pipeline(requests[0], open_sink=writer.open).save(tmp_path / "streamed.mp4", writer=writer)
    apart = media[0].save(tmp_path / "apart.mp4")
    assert (tmp_path / "streamed.mp4").read_bytes() == apart.read_bytes()


def test_an_interruption_passes_and_the_pipeline_goes_on(pipeline: Pipeline) -> None:
    def interrupt(progress: Progress) -> None:
        if (progress.stage, progress.step) == ("denoise", 2):
            raise KeyboardInterrupt

    expected = pipeline(request()).frames
    with pytest.raises(KeyboardInterrupt):
        pipeline(request(), on_progress=interrupt)
    assert numpy.array_equal(pipeline(request()).frames, expected)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_what_the_tokenizer_does_not_know_is_said_and_kept(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "diffusion_runtime"):
        media = pipeline(request("a red wibble and a wobble", negative_prompt="no plugh"))
    assert len(caplog.records) == len(media.recipe["notes"]) == 2
    for words, note, record in zip(
        (("wibble", "wobble"), ("plugh",)), media.recipe["notes"], caplog.records, strict=True
    ):
        assert note == record.message
        assert all(repr(word) in note for word in words)


def test_a_prompt_that_is_cut_says_by_how_much(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffusion_runtime"):
        media = pipeline(request("red " * 30, num_inference_steps=1))
    assert "last 7 tokens past 24 are cut" in caplog.text
    assert len(media.recipe["notes"]) == 1


def test_known_words_say_nothing(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffusion_runtime"):
        media = pipeline(request())
    assert caplog.text == ""
    assert media.recipe["notes"] == []


def test_without_guidance_the_negative_prompt_is_not_read(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "diffusion_runtime"):
        media = pipeline(request(guidance_scale=1.0, negative_prompt="plugh", guidance_mode="two_pass"))
    # Nothing of the word that the text encoder does not know, and that both values have no effect.
    said = "is not used: no second branch of guidance runs (a scale of 1 or less)"
    remarks = [
        f"negative_prompt: 'plugh' {said}; --nag-scale 5 would use it, within attention",
        f"guidance_mode: 'two_pass' {said}",
    ]
    assert [record.getMessage() for record in caplog.records] == remarks
    assert [note for note in media.attention_report.notes if "not used" in note] == remarks
    assert media.recipe["notes"] == []


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_repeats_the_generation(tiny_wan_folder: Path) -> None:
    config = RuntimeConfig(
        str(tiny_wan_folder),
        device="cpu",
        attention="reference",
        attention_override={"per_role": {"cross": "torch_sdpa"}},
    )
    media = load_pipeline(config)(request(negative_prompt="blue"))
    recipe = json.loads(json.dumps(dict(media.recipe)))
    assert recipe == dict(media.recipe)
    assert recipe["schema"] == "diffusion_runtime.recipe/1"
    assert {(row["role"], row["backend"], row["source"]) for row in recipe["attention"]} == {
        ("self", "reference", "config"),
        ("cross", "torch_sdpa", "cli"),
    }
    again = load_pipeline(RuntimeConfig.from_dict(recipe["runtime"]))(GenerationRequest.from_dict(recipe["request"]))
    assert numpy.array_equal(again.frames, media.frames)
    assert again.recipe == media.recipe


# --- precision and failures -------------------------------------------------------------------------------------------


def test_bfloat16_runs_close_to_float32(pipeline: Pipeline, tiny_wan_folder: Path) -> None:
    rounded = load_pipeline(str(tiny_wan_folder), device="cpu", dtype="bfloat16")
    exact, found = pipeline(request()).frames.astype(int), rounded(request()).frames
    assert not numpy.array_equal(exact, found)
    assert numpy.abs(exact - found).mean() < 6
    assert rounded(request()).recipe["model"]["dtype"] == "bfloat16"


def test_a_size_that_does_not_fit_into_memory(pipeline: Pipeline) -> None:
    with pytest.raises(DeviceMemoryError, match="two_pass") as caught:
        pipeline(request(height=10**6, width=10**6, num_frames=4 * 2**10 + 1))
    assert "bfloat16" in str(caught.value)
    assert "1000000" in str(caught.value)


def test_numbers_that_overflow_are_an_error_and_no_picture(tiny_wan_folder: Path) -> None:
    broken = load_pipeline(str(tiny_wan_folder), device="cpu")
    broken.transformer.get_submodule("out").weight.data.fill_(float("nan"))
    with pytest.raises(DiffusionRuntimeError, match="not finite"):
        broken(request())


def test_frames_that_are_not_numbers_are_an_error(pipeline: Pipeline, tmp_path: Path) -> None:
    """Of finite latents: a decoder that overflows in float16 would give a black clip."""
    decoder = pipeline.decoder

    class Overflowing:
        library, implementation = decoder.library, decoder.implementation

        def for_request(self, _: GenerationRequest) -> Any:
            return self

        def recording(self, _: object) -> Any:
            return self

        def stream(self, latents: torch.Tensor) -> FrameStream:
            frames = torch.full((1, 2, 8, 8, 3), 0.5)
            last = frames.clone()
            last[0, 1, 3, 4, 1] = math.nan
            return FrameStream(4, iter([frames, last]))

    pipeline.parts = dataclasses.replace(pipeline.parts, decoder=Overflowing())  # type: ignore[arg-type]
    try:
        with (
            FileWriter(tmp_path / "x.npy") as writer,
            pytest.raises(DiffusionRuntimeError, match=r"frames from 2 on are not numbers \(NaN\)"),
        ):
            pipeline(request(), open_sink=writer.open)
    finally:
        pipeline.parts = dataclasses.replace(pipeline.parts, decoder=decoder)
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_not_changed(pipeline: Pipeline) -> None:
    asked = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=1)
    before = dataclasses.replace(asked)
    pipeline(asked)
    assert asked == before
