"""Wrong values and combinations of step caches, few steps and progressive resolution, as a stranger types them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Command
from tables import table
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.denoising.step_cache.calibration import Calibration
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import prepare
from diffusion_runtime.rules.request_rules import RequestRules

NUM_STEPS = 12


@pytest.fixture(scope="module")
def rules(tiny_wan_folder: Path) -> RequestRules:
    """Of a model whose weights are still on disk."""
    found = prepare(RuntimeConfig(model_path=str(tiny_wan_folder), device="cpu")).rules
    assert isinstance(found, RequestRules)
    return found


@pytest.fixture(scope="module")
def files(rules: RequestRules, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the model, and files that are none."""
    folder = tmp_path_factory.mktemp("calibrations")
    right = Calibration(
        rules.step_caches.identity(),
        NUM_STEPS,
        dict.fromkeys(("cond", "uncond"), (1.0,) * NUM_STEPS),
        ("a",),
        {},
        {},
        {"plain": (0.0, 0.0, 0.0, 1.0, 0.0)},
    )
    values = json.loads(json.dumps(right.to_dict()))
    changed: dict[str, dict[str, Any]] = {
        "right": {},
        "other_model": {"model": {**values["model"], "config_sha256": "0" * 64}},
        "other_lora": {"model": {**values["model"], "lora": "style.safetensors x 1"}},
        "no_model": {"model": {}},
        "no_steps": {"num_steps": 0, "ratios": {"cond": []}},
        "few_ratios": {"ratios": {"cond": [1.0] * 3}},
        "text_ratios": {"ratios": {"cond": ["1"] * NUM_STEPS}},
        "true_ratios": {"ratios": {"cond": [True] * NUM_STEPS}},
        "four_coefficients": {"coefficients": {"plain": [1.0] * 4}},
        "no_list": {"coefficients": {"plain": None}},
        "no_coefficients": {"coefficients": {}},
        "no_mapping": {"coefficients": [1.0]},
    }
    for name, changes in changed.items():
        (folder / f"{name}.json").write_text(json.dumps(values | changes))
    (folder / "cut_off.json").write_text(json.dumps(values)[:-30])
    (folder / "deep.json").write_text("[" * 5000)
    (folder / "binary.json").write_bytes(bytes(range(256)))
    (folder / "huge.json").write_text(json.dumps(values).replace(str(NUM_STEPS), "1" * 400))
    return folder


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"step_cache": "teacache"}, "none were published for it; measure them, diffusion-runtime calibrate PROMPT"),
    *(
        ({"step_cache": f"{method}:file={{files}}/{name}.json"}, message)
        for method in ("teacache", "magcache")
        for name, message in (
            ("missing", "missing.json: no such file"),
            (
                "other_model",
                "for another model: config_sha256: expected .*measure this one: diffusion-runtime calibrate",
            ),
            ("other_lora", "for another model: lora: expected '', got 'style.safetensors x 1'"),
            ("no_model", "for another model: family: expected 'wan', got None"),
            ("no_steps", "'num_steps': expected 1 or more, got 0"),
            ("few_ratios", "'ratios.cond': expected 12 numbers above 0"),
            ("text_ratios", "'ratios.cond': expected 12 numbers above 0"),
            ("true_ratios", "'ratios.cond': expected 12 numbers above 0"),
            ("four_coefficients", "'coefficients.plain': expected 5 numbers"),
            ("no_list", "'coefficients.plain': expected 5 numbers"),
            ("no_mapping", "'coefficients': expected a mapping, got"),
            ("cut_off", "is not valid JSON"),
            ("deep", "nests too deep"),
            ("binary", "is not UTF-8 text"),
            ("huge", "a number of 400 characters"),
        )
    ),
    ({"step_cache": "teacache:file={files}"}, "this is a folder, expected a regular file"),
    ({"step_cache": "teacache:file={files}/no_coefficients.json"}, "no coefficients: its 12 steps were too few"),
    ({"step_cache": "teacache:file={files}/right.json,use_ret_steps=true"}, "use_ret_steps is a variant for Wan"),
    ({"step_cache": "dbcache"}, "expected F . B below this model's 2 blocks, got F=8, B=0; say dbcache:F=1"),
    ({"step_cache": "dbcache:F=1,B=1"}, "expected F . B below this model's 2 blocks"),
    ({"step_cache": "dbcache:F=1,mask=[1,0]"}, "dbcache.mask: expected 12 steps, got 2"),
    *(
        ({"step_cache": cache, "num_inference_steps": 4}, "expected more than 8 steps, got 4: .*:force=true")
        for cache in ("easycache", "dbcache", "teacache", "teacache:file={files}/right.json")
    ),
    (
        {"step_cache": "magcache:file={files}/right.json", "progressive_resolution": "dct:A=10,beta=1", "height": 64},
        "magcache is calibrated at one size",
    ),
    ({"progressive_resolution": "dct"}, "the spectrum of this model's latents is not known"),
    ({"progressive_resolution": "dct:A=10,beta=1", "height": 48}, "height: expected a multiple of 32, got 48; use 32"),
    # So little power that it is 0 in float64.
    (
        {"progressive_resolution": "dct:A=1e-300,beta=100", "height": 512, "width": 512},
        "begins at a noise level of 0 or less, and the last of 12 steps has",
    ),
    ({"sampler": "dmd", "progressive_resolution": "dct:A=10,beta=1"}, "dmd cannot change the size"),
    ({"sampler": "unipc", "sigmas": (1.0, 0.5)}, "sigmas: unipc spaces its own noise levels"),
]


@table(("values", "message"), REFUSED)
def test_before_the_weights_load(values: dict[str, Any], message: str, rules: RequestRules, files: Path) -> None:
    filled = {
        name: value.replace("{files}", str(files)) if isinstance(value, str) else value
        for name, value in values.items()
    }
    if "sigmas" not in filled:
        filled = {"num_inference_steps": NUM_STEPS, **filled}
    request = GenerationRequest("a red circle", **(TINY_SIZES | filled))
    with pytest.raises(RequestError, match=message):
        rules.resolve(request)


def test_the_right_calibration_is_taken(rules: RequestRules, files: Path) -> None:
    for method in ("teacache", "magcache"):
        request = GenerationRequest("a", **TINY_SIZES, num_inference_steps=NUM_STEPS, guidance_scale=4.0)
        request = dataclasses.replace(request, step_cache=f"{method}:file={files}/right.json")
        assert rules.unused(rules.resolve(request)) == ()
        other = rules.resolve(dataclasses.replace(request, num_inference_steps=20))
        [remark] = rules.unused(other)
        assert f"step_cache: {method}: calibrated with 12 steps, run with 20" in remark


def test_a_calibration_of_the_plain_model_is_said_with_fp8(files: Path, tiny_wan_folder: Path) -> None:
    """The weights round otherwise; it is the same model, so the file is taken."""
    config = RuntimeConfig(model_path=str(tiny_wan_folder), device="cpu", quantization="fp8")
    for ignored, said in (((), "'fp8'"), (("blocks.0.*",), "'fp8 without blocks.0.*'")):
        rules = prepare(dataclasses.replace(config, quantization_ignored_layers=ignored)).rules
        assert isinstance(rules, RequestRules)
        request = GenerationRequest("a", **TINY_SIZES, num_inference_steps=NUM_STEPS, guidance_scale=4.0)
        request = dataclasses.replace(request, step_cache=f"magcache:file={files}/right.json")
        [remark] = rules.unused(rules.resolve(request))
        assert f"calibrated with quantization 'none', run with {said}" in remark


def test_on_the_command_line(command: Command, tiny_flags: tuple[str, ...], tiny_wan_folder: Path) -> None:
    """Exit code 2, one message, nothing loaded and nothing written."""
    calibrate = ("calibrate", "a", "--model-path", str(tiny_wan_folder), "-o", "x.json")
    generate = ("generate", "a", *tiny_flags)
    for arguments, said in (
        ((*generate, "--num-inference-steps", "12", "--step-cache", "dbcache"), "below this model's 2 blocks"),
        ((*generate, "--num-inference-steps", "12", "--step-cache", "teacache"), "or use easycache"),
        ((*generate, "--step-cache", "none:x=1"), "none takes no options"),
        (
            ("generate", "a", "--preset", "lightning-4"),
            "'lightning-4' is for qwen_image and wan models; this model has default",
        ),
        (("generate", "a", "--vae-decoder", "tiny"), "the embedded ones have latents of their own, and no tiny"),
        (("generate", "a", "--vae-decoder", "taew2_1.safetensors"), "the embedded ones have latents of their own"),
        ((*calibrate, "--height", "33"), "height: expected a multiple of 16, got 33"),
        ((*calibrate, "--num-inference-steps", "0"), "num_inference_steps: expected a whole number of 1 or more"),
        ((*calibrate, "--backend", "diffusers"), "No such option: --backend"),
    ):
        result = command(*arguments)
        assert result.code == 2, result.err
        assert said in result.said
        assert "Traceback" not in result.err
        assert "loading the" not in result.said
        assert list(Path.cwd().iterdir()) == []
    result = command("calibrate", "a", "--model-path", str(tiny_wan_folder), "-o", "/proc/x.json")
    assert result.code == 1
    assert "--output-path: cannot write /proc" in result.said
