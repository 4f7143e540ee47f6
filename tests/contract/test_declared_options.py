"""Every option and request field says what resume, `--from` and `tune` do with it; none of them keeps a list beside."""

from __future__ import annotations

import dataclasses
from typing import Any

from diffusion_runtime.cli.settings import _REPEATED_RUNTIME
from diffusion_runtime.config import RuntimeConfig, runtime_options, weight_paths
from diffusion_runtime.request.fields import RequestField
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.resume import output_identity

# Another valid value of each option whose value resume compares.
OTHERS: dict[str, Any] = {
    "variant": "fp16",
    "upsampler_path": "elsewhere",
    "lora": [{"path": "a.safetensors"}],
    "vae_decode": "fast",
    "vae_tiling": "on",
    "vae_decoder": "tiny",
    "quantization": "fp8",
    "quantization_ignored_layers": ["blocks.0.*"],
    "compile": "regional",
    **dict.fromkeys(weight_paths(), "elsewhere"),
}


def test_every_option_is_declared_and_resume_compares_what_changes_the_output() -> None:
    options = runtime_options()
    assert list(options) == [field.name for field in dataclasses.fields(RuntimeConfig)]
    before = {"runtime": dataclasses.asdict(RuntimeConfig())}
    compared = set()
    for name, option in options.items():
        if not option.changes_output:
            assert option.recorded_as is None, name
        elif option.recorded_as is None:
            compared.add(name)
            changed = {"runtime": {**before["runtime"], name: OTHERS[name]}}
            assert output_identity(changed) != output_identity(before), name
        else:
            assert option.recorded_as in output_identity(before), name
    assert compared == OTHERS.keys()
    # Chosen for the machine: the same frames, in the same order of sums or as on another device.
    assert {name for name, option in options.items() if not option.changes_output} == {
        *("device", "parallel", "self_check", "offload", "memory_limit", "cuda_graphs", "offline")
    }


def test_what_is_repeated_and_what_names_weights() -> None:
    options = runtime_options()
    assert set(_REPEATED_RUNTIME) == {name for name, option in options.items() if option.repeated_by_from}
    # What changes the output is repeated, or the same command would make something else.
    assert all(option.repeated_by_from for option in options.values() if option.changes_output)
    assert all(option.changes_output for option in options.values() if option.is_weight_path)
    paths = {name for name in options if name.endswith("_path")} - {"model_path", "upsampler_path"}
    assert set(weight_paths()) == paths


def test_every_request_field_is_declared_and_compared() -> None:
    request = GenerationRequest(prompt="a circle").to_dict()
    for field in dataclasses.fields(GenerationRequest):
        declared = RequestField.of(field.metadata)
        assert field.name in request, field.name
        if declared.is_of_chunks:
            assert declared.refusal is not None, field.name
