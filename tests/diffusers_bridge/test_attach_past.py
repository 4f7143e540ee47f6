"""Attention that goes past what is attached: taken over where it can be, else counted, said, or an error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tables import table
from tiny_denoisers import EVERY, forward, image_linear, video_cross
from tiny_pipelines import pipeline_of

from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.diffusers_bridge.observe import ObservedAttention
from diffusion_runtime.errors import BackendUnavailableError


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def by_hand(attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


class ByHand:
    """A processor that computes without torch's attention."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return by_hand(attn, hidden_states)


def perturbed(folder: Path) -> Any:
    """The tiny SD pipeline with perturbed-attention guidance, which sets processors within its call."""
    from diffusers import StableDiffusionPAGPipeline

    pipeline = StableDiffusionPAGPipeline(**pipeline_of(folder).components, pag_applied_layers=["mid", "up"])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image_of(pipeline: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    arguments = {"num_inference_steps": 2, "height": 16, "width": 16, "output_type": "pt", "generator": generator}
    result: torch.Tensor = pipeline("a cat", pag_scale=3.0, **arguments).images
    return result


def test_perturbed_attention_guidance_is_served(image_folder: Path) -> None:
    pipeline = perturbed(image_folder)
    before = image_of(pipeline)
    processors = dict(pipeline.unet.attn_processors)
    with attach(pipeline, "reference") as handle:
        for _ in range(2):
            handle.start_report()
            assert relative_error(image_of(pipeline), before) < 1e-4
            # One forward pass a step, guidance as one batch.
            assert handle.report().num_calls == handle.num_modules * 2
            assert {row.backend for row in handle.report().rows} == {"reference"}
    assert pipeline.unet.attn_processors == processors
    assert torch.equal(image_of(pipeline), before)


def test_a_processor_that_a_script_sets_is_served_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    model, arguments = video_cross()
    first, second = WanAttnProcessor(), ByHand()
    with attach(model, "reference") as handle, caplog.at_level(logging.WARNING):
        model.blocks[0].attn1.set_processor(first)
        forward(model, arguments)
        assert (handle.report().num_calls, handle.report().notes[1:]) == (4, ())
        model.blocks[1].attn1.set_processor(second)
        for _ in range(2):
            forward(model, arguments)
        assert handle.report().num_calls == 4 + 3 + 3
        assert handle.report().notes[1] == (
            "attention calls reached: 10 of 12; 2 not intercepted: WanTransformer3DModel.blocks.1.attn1 x 2 "
            "(ByHand was set in the meantime: ByHand computes attention by hand)"
        )
    assert len([record for record in caplog.records if "1 not intercepted" in record.getMessage()]) == 1
    assert model.blocks[0].attn1.processor is first
    assert model.blocks[1].attn1.processor is second


def test_a_choice_that_serves_no_call_is_an_error() -> None:
    model, arguments = video_cross()
    with attach(model, "reference"):
        for block in model.blocks:
            block.attn1.set_processor(ByHand())
            block.attn2.set_processor(ByHand())
        with pytest.raises(
            BackendUnavailableError, match=r"serves no call: attention calls reached: 0 of 4; 4 not intercepted"
        ):
            forward(model, arguments)


def test_a_replaced_scaled_dot_product_attention(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As SageAttention's documentation plugs it in."""
    original = F.scaled_dot_product_attention
    unet, (model, arguments) = pipeline_of(image_folder).unet, video_cross()
    inputs = {"sample": torch.randn(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(1, 7, 32)}
    expected, other = forward(unet, inputs), forward(model, arguments)

    def plugged_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", plugged_in)
    with attach(unet, "reference"), pytest.raises(BackendUnavailableError, match=r"serves no call.*plugged_in stands"):
        forward(unet, inputs)
    with attach(unet) as handle, caplog.at_level(logging.WARNING):
        forward(unet, inputs)
        assert f"0 of {handle.num_modules}; {handle.num_modules} not intercepted" in caplog.records[-1].getMessage()
    # diffusers' dispatcher asks us before it asks torch.
    with attach(model, "reference") as handle:
        assert relative_error(forward(model, arguments), other) < 1e-5
        assert handle.report().num_calls == 4
    # One that ends in torch's own is only in between.
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **named: original(*args, **named))
    with attach(unet, "reference") as handle:
        assert relative_error(forward(unet, inputs), expected) < 1e-5
        assert handle.report().num_calls == handle.num_modules


def test_guidance_that_leaves_scores_out_keeps_its_calls() -> None:
    """diffusers' hooks answer torch's attention themselves in some layers; a backend would undo that unsaid."""
    from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode

    model, arguments = EVERY["CogVideoXTransformer3DModel"][0]()
    whole = forward(model, arguments)
    inner = model.transformer_blocks[1].attn1.forward

    def skipping(*args: Any, **kwargs: Any) -> Any:
        with AttentionScoreSkipFunctionMode():
            return inner(*args, **kwargs)

    model.transformer_blocks[1].attn1.forward = skipping
    before = forward(model, arguments)
    assert relative_error(whole, before) > 1e-3
    with attach(model, "reference") as handle:
        assert relative_error(forward(model, arguments), before) < 1e-5
        note = handle.report().notes[1]
    assert "AttentionScoreSkipFunctionMode replaces torch's attention here" in note
    assert "reached: 1 of 2; 1 not intercepted: CogVideoXTransformer3DModel.transformer_blocks.1.attn1 x 1" in note
    assert torch.equal(forward(model, arguments), before)


def test_a_sparse_choice_that_serves_no_call_is_an_error() -> None:
    model, arguments = image_linear()
    before = forward(model, arguments)
    sparse = {"backend": "sliding_tile_attn", "extra": {"window": [3, 3, 3]}}
    with pytest.raises(BackendUnavailableError, match=r"sliding_tile_attn: it would serve no attention call.*: cross"):
        attach(model, {"default": sparse})
    assert torch.equal(forward(model, arguments), before)


def test_what_is_named_as_usable_is_not_refused_next(image_folder: Path) -> None:
    unet = pipeline_of(image_folder).unet
    with pytest.raises(BackendUnavailableError) as failure:
        attach(unet, "fa")
    usable = str(failure.value).partition("usable here for this role: ")[2].partition(". Choose")[0].split(", ")
    assert "torch_sdpa" in usable
    for name in usable:
        attach(unet, name).detach()


def test_a_sparse_choice_with_a_dense_one_behind_it_takes_that_where_no_grid_is_known(image_folder: Path) -> None:
    unet = pipeline_of(image_folder).unet
    with attach(unet, "video_sparse_attn,reference") as handle:
        forward(
            unet, {"sample": torch.randn(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(1, 7, 32)}
        )
        assert {row.backend for row in handle.report().rows} == {"reference"}


class Holder:
    """What ObservedAttention asks of a pipeline."""

    def __init__(self, **components: Any) -> None:
        self.components = components


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@table("name", ["MochiTransformer3DModel", "WanTransformer3DModel", "SanaTransformer2DModel"])
def test_without_a_choice_the_report_counts_calls(name: str) -> None:
    from diffusion_runtime.attention import StepInfo

    build, _, _ = EVERY[name]
    model, arguments = build()
    before = forward(model, arguments)
    with attach(model, "torch_sdpa") as handle:
        forward(model, arguments)
        # Linear attention is counted where it cannot be reached.
        linear = {row.kind for row in handle.report().rows} > {"softmax"}
        num_calls = handle.report().num_calls + (0 if linear else len(handle.others))
    observed = ObservedAttention(Holder(transformer=model), None, "platform")
    with observed.counting(StepInfo):
        assert torch.equal(forward(model, arguments), before)
    assert observed.report().num_calls == num_calls
    kinds = {row.role: row.kind for row in observed.report().rows}
    assert kinds["self"] == ("linear" if name.startswith("Sana") else "softmax")


def test_a_dispatcher_choice_says_what_goes_past_it(caplog: pytest.LogCaptureFixture) -> None:
    from diffusion_runtime.attention import StepInfo

    model, arguments = video_cross()
    before = forward(model, arguments)
    observed = ObservedAttention(Holder(transformer=model), "native", "cli")
    with observed.counting(StepInfo):
        assert torch.equal(forward(model, arguments), before)
    assert [(row.implementation, row.source, row.count) for row in observed.report().rows] == [
        ("native", "cli", 2),
        ("native", "cli", 2),
    ]
    with caplog.at_level(logging.WARNING), observed.counting(StepInfo):
        model.blocks[0].attn1.set_processor(ByHand())
        forward(model, arguments)
    assert "7 of 8; 1 not intercepted: transformer.blocks.0.attn1 x 1 (ByHand" in caplog.records[-1].getMessage()
