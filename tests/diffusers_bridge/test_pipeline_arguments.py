"""Further keywords of a pipeline's call: the types of its signature, and what is refused before the weights load."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import diffusers
import pytest
from tables import table

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.cli.config_file import read_config
from diffusion_runtime.cli.serve import runtime_of
from diffusion_runtime.diffusers_bridge.pipeline_arguments import fits, further_arguments
from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.loading import prepare

FLUX = PipelineInterface.of(diffusers.FluxPipeline)
LTX = PipelineInterface.of(diffusers.LTXConditionPipeline)


@table(
    "name, given, expected",
    [
        ("max_sequence_length", "128", 128),
        ("max_sequence_length", 128, 128),
        ("prompt_2", "128", "128"),
        ("prompt_2", '["a", "b"]', ["a", "b"]),
        ("prompt_2", "none", None),
        ("num_images_per_prompt", "none", None),
        ("callback_on_step_end_tensor_inputs", '["latents"]', ["latents"]),
        ("joint_attention_kwargs", '{"scale": 0.5}', {"scale": 0.5}),
    ],
)
def test_a_value_has_the_type_of_the_signature(name: str, given: Any, expected: Any) -> None:
    (found,) = further_arguments(FLUX, {name: given}).values()
    assert (type(found), found) == (type(expected), expected)


@table(
    "name, given, message",
    [
        (
            "max_sequence_lenght",
            "1",
            "FluxPipeline has no such keyword.*max_sequence_length",
        ),
        ("max_sequence_length", "many", "pipeline.max_sequence_length: expected int, got 'many'"),
        ("max_sequence_length", "1.5", "expected int"),
        ("max_sequence_length", "true", "expected int"),
        ("callback_on_step_end_tensor_inputs", "[1]", "expected .*list.*str"),
        ("num_inference_steps", "3", "it is a value of requests; write --num-inference-steps"),
        ("generator", "1", "the runtime gives it"),
        ("output_type", "latent", "the runtime gives it"),
        ("callback_on_step_end", "print", "it takes .*Callable.*, which is no number"),
        ("latents", "[1.0]", "it takes .*Tensor.*, which is no number"),
        ("ip_adapter_image", "/etc/passwd", "it is a picture, a video or a mask"),
    ],
)
def test_what_is_refused(name: str, given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        further_arguments(FLUX, {name: given})


@table(
    "value, annotation, expected",
    [
        (1, float, True),
        (True, float, False),
        ([1, 2], list[int] | None, True),
        ([1, "a"], list[int], False),
        ([[0.1], [2]], list[list[float]], True),
        ([1, 2], tuple[int, int], True),
        ([1], tuple[int, int], False),
        (None, int | None, True),
        (None, int, False),
        ({"a": 1}, dict[str, Any], True),
        ("text", "int", True),
        ("text", types.FunctionType, False),
    ],
)
def test_types(value: Any, annotation: Any, expected: bool) -> None:
    assert fits(value, annotation) is expected


def test_no_media_is_named_by_a_text() -> None:
    """In none of diffusers' pipelines of pictures."""
    for interface in (FLUX, LTX):
        for name in interface.media & interface.parameters.keys():
            with pytest.raises(ConfigError):
                further_arguments(interface, {name: "/etc/passwd"})


def test_the_call_gets_them(tiny_wan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From --set to the call of the pipeline, and into the recipe; a native model and a server refuse them."""
    given = read_config(None, ["pipeline.max_sequence_length=64", "runtime.device=cpu"]).runtime
    path = {"model_path": str(tiny_wan_folder)}
    pipeline = load_pipeline(RuntimeConfig.from_dict({**given, **path, "backend": "diffusers"}))
    sizes = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 1}
    called: list[int] = []
    encode = pipeline.pipeline.encode_prompt
    monkeypatch.setattr(
        pipeline.pipeline,
        "encode_prompt",
        lambda **values: called.append(values["max_sequence_length"]) or encode(**values),
    )
    (media,) = pipeline.generate([GenerationRequest("a star", **sizes)])
    assert called == [64]
    assert media.recipe["runtime"]["pipeline_arguments"] == {"max_sequence_length": "64"}
    with pytest.raises(ConfigError, match=r"pipeline_arguments .*: this model runs natively"):
        prepare(RuntimeConfig.from_dict({**given, **path}))
    with pytest.raises(ConfigError, match=r"clients; leave out --set pipeline.NAME"):
        runtime_of({"set_values": ["pipeline.max_sequence_length=64"], **path})
