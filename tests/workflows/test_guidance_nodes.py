"""Nodes that change guidance: of some steps, with skipped layers, CFG-zero*; samplers that follow each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tables import table
from workflows.test_translation import Nodes, graph_of, refused, translated, verdicts

from diffusion_runtime.workflows.evaluation import Verdict

BOTH = {"positive": ("5", 0), "negative": ("6", 0)}
SAMPLER = {**BOTH, "cfg": 4, "noise_seed": 3, "sampler_name": "euler", "scheduler": "simple", "steps": 8}


def wan(changes: Nodes, model: str = "1", **sampler: Any) -> Nodes:
    """A video of Wan 2.1 in eight steps at shift 8. model: the node whose model is sampled."""
    nodes: Nodes = {
        "1": ("UNETLoader", {"unet_name": "wan2.1_t2v_14B_fp16.safetensors"}),
        "2": ("CLIPLoader", {"clip_name": "umt5.safetensors", "type": "wan"}),
        "3": ("VAELoader", {"vae_name": "wan_2.1_vae.safetensors"}),
        "4": ("EmptyHunyuanLatentVideo", {"width": 832, "height": 480, "length": 33, "batch_size": 1}),
        "5": ("CLIPTextEncode", {"text": "waves", "clip": ("2", 0)}),
        "6": ("CLIPTextEncode", {"text": "blurred", "clip": ("2", 0)}),
        "9": ("KSamplerAdvanced", {**SAMPLER, "model": (model, 0), "latent_image": ("4", 0), "add_noise": "enable",
                                   "start_at_step": 0, "end_at_step": 10000, **sampler}),
        "20": ("VAEDecode", {"samples": ("9", 0), "vae": ("3", 0)}),
        "21": ("CreateVideo", {"images": ("20", 0), "fps": 16}),
        "22": ("SaveVideo", {"video": ("21", 0)}),
    }  # fmt: skip
    return nodes | changes


def then(**second: Any) -> Nodes:
    """A second sampler from step 3 on, behind the first."""
    goes_on = {"add_noise": "disable", "start_at_step": 3, "model": ("1", 0), "latent_image": ("9", 0)}
    return {
        "10": ("KSamplerAdvanced", {**SAMPLER, **goes_on, "end_at_step": 10000, **second}),
        "20": ("VAEDecode", {"samples": ("10", 0), "vae": ("3", 0)}),
    }


UP_TO_3 = {"end_at_step": 3, "return_with_leftover_noise": "enable"}
PLAIN = {"guidance_scale": 4.0, "negative_prompt": "blurred"}
SKIP = {"double_layers": "9, 10", "single_layers": ""}


def skipped_before(end: float) -> Nodes:
    """Two samplers, the first of which has guidance, with skipped layers up to a share of the schedule."""
    values = {"model": ("1", 0), **SKIP, "start_percent": 0, "end_percent": end}
    return wan(then(cfg=1, model=("7", 0)) | {"7": ("SkipLayerGuidanceDiT", values)}, "7", **UP_TO_3)


@table(
    "nodes, expected",
    [
        (wan({}), {**PLAIN, "guidance_start": None, "cfg_zero_star": None, "zero_init_steps": None}),
        # Guidance in the first three of eight steps, and behind them.
        (wan(then(cfg=1), **UP_TO_3), {**PLAIN, "guidance_start": 0.0, "guidance_stop": 3 / 8}),
        (wan(then(), cfg=1, **UP_TO_3), {**PLAIN, "guidance_start": 3 / 8, "guidance_stop": 1.0}),
        (wan(then(), **UP_TO_3), {**PLAIN, "guidance_start": None}),
        (wan(then(cfg=1), cfg=1, **UP_TO_3), {"guidance_scale": 1.0, "negative_prompt": None, "guidance_stop": None}),
        (wan({"7": ("CFGZeroStar", {"model": ("1", 0)})}, "7"), {**PLAIN, "cfg_zero_star": "comfyui"}),
        (
            wan({"7": ("CFGZeroStarAndInit", {"model": ("1", 0), "use_zero_init": True, "zero_init_steps": 1})}, "7"),
            {**PLAIN, "cfg_zero_star": "on", "zero_init_steps": 2},
        ),
        (
            wan({"7": ("CFGZeroStarAndInit", {"model": ("1", 0), "use_zero_init": False})}, "7"),
            {**PLAIN, "cfg_zero_star": "on", "zero_init_steps": None},
        ),
        (
            # Levels at shift 8 from that of 0.2 of the schedule to that of 0.5, both included: steps 2 to 4.
            wan({"7": ("SkipLayerGuidanceDiTSimple", {"model": ("1", 0), **SKIP, "start_percent": 0.2,
                                                      "end_percent": 0.5})}, "7"),
            {"skip_layers": [9, 10], "skip_layer_scale": None, "skip_layer_start": 2 / 8, "skip_layer_stop": 5 / 8},
        ),
        (
            wan({"7": ("SkipLayerGuidanceDiT", {"model": ("1", 0), **SKIP, "scale": 2.5, "start_percent": 0,
                                                "end_percent": 1})}, "7"),
            {"skip_layers": [9, 10], "skip_layer_scale": 2.5, "skip_layer_start": 0.0, "skip_layer_stop": 1.0},
        ),
        (
            # Within the guided steps.
            skipped_before(0.25),
            {"skip_layer_scale": 3.0, "guidance_stop": 3 / 8, "skip_layer_stop": 3 / 8},
        ),
        (
            # Without a negative branch ComfyUI begins at the whole prediction: once more the difference.
            wan({"7": ("SkipLayerGuidanceDiT", {"model": ("1", 0), **SKIP, "scale": 2.5, "start_percent": 0,
                                                "end_percent": 1})}, "7", cfg=1),
            {"skip_layer_scale": 3.5, "guidance_scale": 1.0},
        ),
    ],
)  # fmt: skip
def test_they_become_request_fields(nodes: Nodes, expected: dict[str, Any]) -> None:
    request = translated(graph_of(nodes)).request
    found = {name: request.get(name) for name in expected}
    assert {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in expected.items()
    } == found
    assert len(request["sigmas"]) == 8


def scheduled(**values: Any) -> Nodes:
    """SamplerCustomAdvanced with KJNodes' guider of some steps."""
    return wan(
        {
            "11": ("ScheduledCFGGuidance", {**BOTH, "model": ("1", 0), "cfg": 5, **values}),
            "12": ("BasicScheduler", {"model": ("1", 0), "scheduler": "simple", "steps": 10, "denoise": 1}),
            "13": ("KSamplerSelect", {"sampler_name": "euler"}),
            "14": ("RandomNoise", {"noise_seed": 1}),
            "15": ("SamplerCustomAdvanced", {"guider": ("11", 0), "sigmas": ("12", 0), "sampler": ("13", 0),
                                             "noise": ("14", 0), "latent_image": ("4", 0)}),
            "20": ("VAEDecode", {"samples": ("15", 0), "vae": ("3", 0)}),
        }
    )  # fmt: skip


def test_a_guider_of_some_steps() -> None:
    request = translated(graph_of(scheduled(start_percent=0.1, end_percent=0.4))).request
    # Steps 1 to 4 of ten: its ends count.
    assert (request["guidance_start"], request["guidance_stop"]) == (0.1, 0.5)
    reason = "start_percent, end_percent: expected shares from 0 to 1"
    assert reason in refused(graph_of(scheduled(start_percent=0.6, end_percent=0.4))).message()


@table(
    "nodes, node_id, reason",
    [
        (wan(then(cfg=2), **UP_TO_3), "10", "a scale of guidance of 2 in the second sampler"),
        (wan(then(sampler_name="lcm"), **UP_TO_3), "10", "sampler lcm after euler"),
        (wan(then(positive=("6", 0)), **UP_TO_3), "6", "another prompt for the second sampler"),
        (wan(then(negative=("5", 0)), **UP_TO_3), "5", "another negative prompt"),
        (wan(then(start_at_step=4), **UP_TO_3), "10", "does not go on where the first one ends"),
        (wan(then(sampler_name="uni_pc"), sampler_name="uni_pc", **UP_TO_3), "10", "begun anew in the middle"),
        (
            wan({"7": ("SkipLayerGuidanceDiT", {"model": ("1", 0), **SKIP, "rescaling_scale": 0.5})}, "7"),
            "7",
            "rescaling_scale: expected 0, got 0.5",
        ),
        (
            wan({"7": ("SkipLayerGuidanceDiT", {"model": ("1", 0), "single_layers": "3", "double_layers": ""})}, "7"),
            "7",
            "single_layers: the places of this model's blocks are not known here",
        ),
        (
            skipped_before(0.5),
            "7",
            "skipped layers in steps without guidance",
        ),
        (
            wan({"7": ("SkipLayerGuidanceDiT", {"model": ("1", 0), **SKIP, "end_percent": 1.2})}, "7"),
            "7",
            "start_percent, end_percent: expected shares from 0 to 1",
        ),
        (
            wan({"6": ("ConditioningSetTimestepRange", {"conditioning": ("5", 0), "start": 0.2, "end": 1})}),
            "6",
            "a prompt of some steps alone",
        ),
        (
            wan({"20": ("VAEDecode", {"samples": ("8", 0), "vae": ("3", 0)}),
                 "8": ("TrimVideoLatent", {"samples": ("9", 0), "trim_amount": 1})}),
            "8",
            "trim_amount: expected 0, the latent frames that come before the video's, got 1",
        ),
    ],
)  # fmt: skip
def test_what_no_request_says_is_refused(nodes: Nodes, node_id: str, reason: str) -> None:
    found = refused(graph_of(nodes))
    assert [each.node.id for each in found.reasons] == [node_id]
    assert reason in found.message()


def test_what_changes_nothing_is_said_to() -> None:
    for kind, values in (
        ("CFGZeroStar", {}),
        ("SkipLayerGuidanceDiTSimple", SKIP),
        ("SkipLayerGuidanceDiT", {"double_layers": "", "single_layers": ""}),
    ):
        found = translated(graph_of(wan({"7": (kind, {"model": ("1", 0), **values})}, "7", cfg=1)))
        assert verdicts(found)["7"] is Verdict.WITHOUT_EFFECT, kind
        assert not {"cfg_zero_star", "skip_layers"} & found.request.keys()


@table(
    "cast, file, quantization, said",
    [
        ("default", "wan2.1_t2v_14B_fp16.safetensors", None, ""),
        ("fp8_e4m3fn", "wan2.1_t2v_14B_fp16.safetensors", None, "2.7 to 11 % (rms), and --quantization fp8 by 2.6 %"),
        ("fp8_e5m2", "wan2.1_t2v_14B_fp16.safetensors", None, "by 5.3 % (rms)"),
        ("fp8_e4m3fn_fast", "wan2.1_t2v_14B_fp16.safetensors", "fp8", "--quantization fp8: products of 8-bit floats"),
        ("fp8_e4m3fn_fast", "wan2.1_t2v_14B_fp8_e4m3fn.safetensors", None, "the file's own numbers"),
    ],
)
def test_casts_of_weights(cast: str, file: str, quantization: str | None, said: str) -> None:
    found = translated(graph_of(wan({"1": ("UNETLoader", {"unet_name": file, "weight_dtype": cast})})))
    assert found.runtime.get("quantization") == quantization
    remark = next(each.remark for each in found.findings if each.node.id == "1")
    assert said in remark


def test_the_rounding_that_is_said_is_that_of_the_casts() -> None:
    """Root mean squares of weights with a normal distribution, without scales and with one per row."""

    def rounding(deviation: float, dtype: torch.dtype, *, by_row: bool = False) -> float:
        weights = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)) * deviation
        scale = weights.abs().amax(1, keepdim=True) / torch.finfo(dtype).max if by_row else 1
        found = (weights / scale).to(dtype).float() * scale
        return 100 * float((found - weights).norm() / weights.norm())

    for deviation, expected in ((0.05, 2.7), (0.005, 11)):
        assert rounding(deviation, torch.float8_e4m3fn) == pytest.approx(expected, rel=0.03)
        assert rounding(deviation, torch.float8_e5m2) == pytest.approx(5.3, rel=0.03)
        assert rounding(deviation, torch.float8_e4m3fn, by_row=True) == pytest.approx(2.6, rel=0.03)
