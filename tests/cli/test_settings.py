"""Which value wins: flags, --set, --config, --from, and what is left to the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_media import make_media

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.cli.attention_flags import AttentionFlags
from diffusion_runtime.cli.prompt_file import collect_prompts
from diffusion_runtime.cli.settings import Flags, resolve_settings
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import ConfigError, OutputError, RequestError

RECIPE: dict[str, Any] = {
    "request": {"prompt": "recorded", "seed": 9, "height": 16, "width": 16, "fps": 16, "num_frames": 5},
    "runtime": {"model_path": "recorded", "device": "cuda", "dtype": "auto", "attention_override": "torch_sdpa"},
    "model": {"dtype": "bfloat16", "path": "recorded", "config_sha256": "0"},
}
CONFIG: dict[str, Any] = {
    "request": {"height": 32, "width": 32, "num_inference_steps": 3},
    "runtime": {"model_path": "configured", "attention": {"default": "reference"}},
    "presets": {"small": {"width": 48, "guidance_scale": 1.0}},
}


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    return str(make_media(num_frames=1, recipe=RECIPE).save(tmp_path / "recorded.png"))


@pytest.fixture
def configured(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return str(path)


def test_flags_come_first_and_what_nobody_says_is_left_open(recorded: str, configured: str) -> None:
    settings = resolve_settings(
        Flags(
            prompts=["typed"],
            seeds=["1"],
            request={"height": 64, "num_frames": None},
            runtime={"model_path": "typed", "dtype": None},
            config=configured,
            settings=["request.fps=4"],
            repeat=recorded,
            preset="small",
        )
    )
    (request,) = settings.requests
    assert {name: value for name, value in request.to_dict().items() if value is not None} == {
        "prompt": "typed",
        "seed": 1,
        "height": 64,  # flag, over config and recipe
        "width": 48,  # the config's preset, over its request and the recipe
        "num_inference_steps": 3,  # config
        "fps": 4,  # --set, over the recipe
        "num_frames": 5,  # recipe
        "guidance_scale": 1.0,  # the config's preset
    }
    assert settings.runtime.model_path == "typed"
    assert settings.runtime.dtype == "bfloat16"
    assert settings.runtime.device == "auto"
    assert AttentionConfig.parse(settings.runtime.attention) == AttentionConfig("reference")
    assert settings.runtime.attention_override == "torch_sdpa"
    assert settings.preset_for(["draft"]) is None


def test_a_guidance_scale_of_a_flag_stands_for_both_experts(tmp_path: Path) -> None:
    path = tmp_path / "experts.yaml"
    path.write_text("request: {guidance_scale: 4.0, guidance_scale_2: 3.0}\n")
    (request,) = resolve_settings(Flags(prompts=["a"], config=str(path))).requests
    assert (request.guidance_scale, request.guidance_scale_2) == (4.0, 3.0)
    (request,) = resolve_settings(Flags(prompts=["a"], config=str(path), request={"guidance_scale": 7.0})).requests
    assert (request.guidance_scale, request.guidance_scale_2) == (7.0, None)


def test_attention_flags_replace_the_recorded_ones(recorded: str) -> None:
    settings = resolve_settings(Flags(repeat=recorded, attention=AttentionFlags("reference")))
    assert AttentionConfig.parse(settings.runtime.attention_override) == AttentionConfig("reference")


def test_a_recipe_alone_is_enough(recorded: str) -> None:
    (request,) = resolve_settings(Flags(repeat=recorded)).requests
    assert (request.prompt, request.seed, request.height) == ("recorded", 9, 16)


def test_a_recipe_is_repeated_without_its_second_stage(tmp_path: Path) -> None:
    runtime = {**RECIPE["runtime"], "upsampler_path": "upsampler"}
    recipe = {**RECIPE, "runtime": runtime, "request": {**RECIPE["request"], "second_stage_sigmas": [0.9, 0.5]}}
    recorded = str(make_media(num_frames=1, recipe=recipe).save(tmp_path / "two.png"))
    for flags, expected in (({}, (0.9, 0.5)), ({"upsampler_path": "none"}, None)):
        (request,) = resolve_settings(Flags(repeat=recorded, runtime=flags)).requests
        assert request.second_stage_sigmas == expected


def test_prompts_times_seeds_prompts_outermost() -> None:
    requests = resolve_settings(Flags(prompts=["a", "b"], seeds=["1-2"])).requests
    assert [(request.prompt, request.seed) for request in requests] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_a_config_may_hold_prompts_and_seeds(tmp_path: Path) -> None:
    path = tmp_path / "batch.yaml"
    path.write_text("request: {prompt: [a, b], seed: 3}\n")
    requests = resolve_settings(Flags(config=str(path))).requests
    assert [(request.prompt, request.seed) for request in requests] == [("a", 3), ("b", 3)]
    assert resolve_settings(Flags(config=str(path), settings=["request.prompt=c"])).requests[0].prompt == "c"


def negative_prompts(flags: Flags) -> list[tuple[str, str | None]]:
    return [(request.prompt, request.negative_prompt) for request in resolve_settings(flags).requests]


def test_one_negative_prompt_is_for_all_and_several_are_one_for_each(tmp_path: Path) -> None:
    prompts = ["a", "b"]
    assert negative_prompts(Flags(prompts=prompts)) == [("a", None), ("b", None)]
    assert negative_prompts(Flags(prompts=prompts, negative_prompts=["x"])) == [("a", "x"), ("b", "x")]
    assert negative_prompts(Flags(prompts=prompts, negative_prompts=["x", ""])) == [("a", "x"), ("b", "")]
    seeds = Flags(prompts=prompts, negative_prompts=["x", "y"], seeds=["1-2"])
    assert negative_prompts(seeds) == [("a", "x"), ("a", "x"), ("b", "y"), ("b", "y")]
    path = tmp_path / "batch.yaml"
    path.write_text("request: {prompt: [a, b], negative_prompt: [x, y]}\npresets: {one: {negative_prompt: z}}\n")
    assert negative_prompts(Flags(config=str(path))) == [("a", "x"), ("b", "y")]
    assert negative_prompts(Flags(config=str(path), preset="one")) == [("a", "z"), ("b", "z")]
    assert negative_prompts(Flags(config=str(path), settings=["request.negative_prompt=w"])) == [("a", "w"), ("b", "w")]
    assert negative_prompts(Flags(config=str(path), negative_prompts=["v"])) == [("a", "v"), ("b", "v")]


def test_a_recorded_negative_prompt_is_repeated_and_overridden(tmp_path: Path) -> None:
    recipe = {**RECIPE, "request": {**RECIPE["request"], "negative_prompt": "grey"}}
    recorded = str(make_media(num_frames=1, recipe=recipe).save(tmp_path / "recorded.png"))
    assert negative_prompts(Flags(repeat=recorded)) == [("recorded", "grey")]
    assert negative_prompts(Flags(repeat=recorded, prompts=["a", "b"])) == [("a", "grey"), ("b", "grey")]
    assert negative_prompts(Flags(repeat=recorded, negative_prompts=["x"])) == [("recorded", "x")]


@pytest.mark.parametrize(
    ("prompts", "negative", "said"),
    [
        (["a"], ["x", "y"], "negative_prompt: 2 negative prompts for 1 prompt; give one for all"),
        (["a", "b", "c"], ["x", "y"], "negative_prompt: 2 negative prompts for 3 prompts; give one for all"),
    ],
)
def test_another_number_of_negative_prompts_is_an_error(prompts: list[str], negative: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        resolve_settings(Flags(prompts=prompts, negative_prompts=negative))


def test_a_preset_of_the_model_is_left_to_the_model(recorded: str) -> None:
    settings = resolve_settings(Flags(prompts=["a"], preset="draft"))
    assert settings.preset_for(["draft", "large"]) == "draft"
    with pytest.raises(ConfigError, match="unknown name 'draft'"):
        settings.preset_for(["large"])
    assert "the recipe of" in resolve_settings(Flags(repeat=recorded, preset="draft")).notes[0]


def test_an_unknown_preset_names_the_nearest(configured: str) -> None:
    settings = resolve_settings(Flags(prompts=["a"], preset="smal", config=configured))
    with pytest.raises(ConfigError, match="Did you mean 'small'"):
        settings.preset_for(["draft"])


@pytest.mark.parametrize(
    ("parallel", "num_processes"),
    [
        ({}, 1),
        ({"num_gpus": 2}, 2),
        ({"ulysses_degree": 3}, 3),
        ({"ring_degree": 2, "cfg_parallel": True}, 4),
        ({"tensor_parallel_size": 2, "ring_degree": 2}, 4),
    ],
)
def test_degrees_say_how_many_processes(parallel: dict[str, Any], num_processes: int) -> None:
    assert resolve_settings(Flags(prompts=["a"], parallel=parallel)).runtime.parallel.num_processes == num_processes


OWN_VALUES: dict[str, Any] = {
    "transformer_path": "fp8.safetensors",
    "transformer_2_path": "low_noise.safetensors",
    "controlnet_path": "controlnet",
    "vae_path": "ae.safetensors",
    "audio_vae_path": "ltx2_audio_vae.safetensors",
    "vocoder_path": "ltx2_audio_vae.safetensors",
    "connectors_path": "connectors.safetensors",
    "image_encoder_path": "clip_vision_h.safetensors",
    "text_encoder_path": "clip_l.safetensors",
    "text_encoder_2_path": "t5xxl_fp16.safetensors",
    "mmproj_path": "mmproj-F16.gguf",
    "variant": "fp16",
    "upsampler_path": "upsampler",
    "lora": [{"path": "style.safetensors", "scale": 0.5, "component": "both"}],
    "vae_decode": "fast",
    "vae_tiling": "on",
    "quantization": "fp8",
    "quantization_ignored_layers": ["blocks.1.*"],
}


def test_everything_that_changes_the_frames_is_repeated(tmp_path: Path) -> None:
    def repeated(recorded: dict[str, Any], **flags: Any) -> RuntimeConfig:
        path = tmp_path / "recorded.png"
        make_media(num_frames=1, recipe={**RECIPE, "runtime": RECIPE["runtime"] | recorded}).save(path)
        return resolve_settings(Flags(repeat=str(path), runtime=flags)).runtime

    found = repeated(OWN_VALUES)
    expected = RuntimeConfig.from_dict(
        {"model_path": "recorded", "dtype": "bfloat16", "attention_override": "torch_sdpa", **OWN_VALUES}
    )
    assert found == expected
    tiny = {"vae_decoder": "taew2_1.safetensors"}
    assert repeated(tiny).vae_decoder == "taew2_1.safetensors"
    # A preview, made again with the model's own decoder; the plain model, whose ignored layers say nothing.
    assert repeated(tiny, vae_decoder="none").vae_decoder is None
    assert repeated(OWN_VALUES, transformer_path="none").transformer_path is None
    plain = repeated(OWN_VALUES, quantization="none")
    assert (plain.quantization, plain.quantization_ignored_layers) == ("none", ())
    assert repeated({"compile": "regional"}).compile == "regional"


def test_a_recipe_of_many_processes_is_repeated_by_one(tmp_path: Path) -> None:
    path = tmp_path / "recorded.npy"
    recipe = {"request": {"prompt": "recorded", "num_frames": 1}, "runtime": {"parallel": {"num_gpus": 8}}}
    make_media(num_frames=1, recipe=recipe).save(path)
    assert resolve_settings(Flags(repeat=str(path))).runtime.parallel.num_processes == 1


def test_processes_that_run_already_must_be_as_many_as_asked_for() -> None:
    settings = resolve_settings(Flags(prompts=["a"], parallel={"ring_degree": 2}))
    assert settings.on_processes(4).runtime.parallel.num_processes == 4
    with pytest.raises(ConfigError, match="does not give 3 processes"):
        settings.on_processes(3)


def test_no_prompt_says_where_one_could_come_from() -> None:
    with pytest.raises(RequestError, match="--prompt-file or --from"):
        resolve_settings(Flags())


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"request": {**RECIPE["request"], "height": "tall"}}, RequestError, "height: .*the recipe of"),
        ({"request": {**RECIPE["request"], "exec": "rm"}}, RequestError, "unknown key 'exec'"),
        ({"request": "x"}, OutputError, "damaged"),
        ({"runtime": []}, OutputError, "damaged"),
        ({"runtime": {"model_path": 3}}, ConfigError, "model_path: expected a text"),
        ({"model": {"dtype": ["float32"]}}, ConfigError, "dtype: expected a text"),
    ],
)
def test_a_recipe_is_checked_like_any_input(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    path = make_media(num_frames=1, recipe={**RECIPE, **changes}).save(tmp_path / "x.png")
    with pytest.raises(error, match=said):
        resolve_settings(Flags(repeat=str(path)))


def test_a_prompt_file_brings_request_fields_per_row(tmp_path: Path) -> None:
    """Typed values come before a row's, a row's before those of the files."""
    (tmp_path / "mine.yaml").write_text("request: {height: 64, fps: 8, negative_prompt: blur, seed: 9}")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "a", "seed": [3, "5-6"], "height": 128, "negative_prompt": "grey"}\n\n'
        '{"prompt": "b", "sigmas": [1, 0.5], "image_path": ["x.png", "y.png"], "fps": null}\n'
    )
    flags = Flags(prompts=collect_prompts([], [], str(tmp_path / "rows.jsonl")), config=str(tmp_path / "mine.yaml"))
    settings = resolve_settings(flags)
    assert [(each.prompt, each.seed, each.height, each.negative_prompt) for each in settings.requests] == [
        *(("a", seed, 128, "grey") for seed in (3, 5, 6)),
        ("b", 9, 64, "blur"),
    ]
    assert (settings.requests[3].num_inference_steps, settings.requests[3].image_path) == (2, ("x.png", "y.png"))
    assert {each.fps for each in settings.requests} == {8}
    assert settings.notes == ()
    typed = dataclasses.replace(flags, request={"height": 96, "width": 32}, seeds=["1"], negative_prompts=["dark"])
    settings = resolve_settings(typed)
    assert [(each.prompt, each.seed, each.height, each.negative_prompt) for each in settings.requests] == [
        ("a", 1, 96, "dark"),
        ("b", 1, 96, "dark"),
    ]
    # Nothing of a row is lost silently.
    assert [note.partition(":")[0] for note in settings.notes] == ["height", "seed", "negative_prompt"]
    assert all("rows.jsonl:1" in note for note in settings.notes)
