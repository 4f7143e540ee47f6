"""What holds for every family's transformer, on what its own text encoder makes of two prompts; see family_cases.

That its predictions are diffusers' own is tested per family, as the calls of their classes differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import FAMILIES, FamilyCase
from family_parity import relative
from tables import table
from tiny_families import given_to, small_request

from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.kernels.modulated_norm.api import Branch, modulated_norm
from diffusion_runtime.layers import modulation
from diffusion_runtime.models.interface import ImageCondition
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pipeline_of(tiny_folder_of: Callable[[str], Path]) -> Callable[[str], Pipeline]:
    """A family's pipeline in float32."""
    pipelines: dict[str, Pipeline] = {}

    def pipeline(family: str) -> Pipeline:
        if family not in pipelines:
            loaded = load_pipeline(str(tiny_folder_of(family)), device="cpu", dtype="float32")
            assert isinstance(loaded, Pipeline)
            pipelines[family] = loaded
        return pipelines[family]

    return pipeline


@table(
    ("family", "most"),
    # By block: what attention to the text and between the streams gives; self-attention of LTX-2, whose norm follows.
    [("ltx_video", 1), ("ltx2", 6)],
    ("ltx_video", "ltx2"),
)
def test_branches_are_added_by_the_norms_that_follow(
    family: str, most: int, pipeline_of: Callable[[str], Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in a pass of their own."""
    counts = [0]

    def counted(*args: Any, branch: Branch | None = None, **named: Any) -> torch.Tensor:
        counts[0] += branch is not None
        return modulated_norm(*args, branch=branch, **named)

    monkeypatch.setattr(modulation, "modulated_norm", counted)
    pipeline = pipeline_of(family)
    pipeline(dataclasses.replace(small_request(pipeline, num_steps=2), guidance_scale=1.0))
    assert counts == [2 * most * len(pipeline.transformer.blocks)]


def flipped(text: Conditions) -> Conditions:
    """Another text of the same lengths, in tensors of its own."""
    further = tuple(TextStream(stream.embeddings.flip(2), stream.lengths) for stream in text.further)
    return dataclasses.replace(text, embeddings=text.embeddings.flip(2), further=further)


@table(("family", "case"), FAMILIES.items(), FAMILIES)
def test_attention_layers_are_named_and_every_call_is_counted(
    pipeline_of: Callable[[str], Pipeline], family: str, case: FamilyCase
) -> None:
    pipeline = pipeline_of(family)
    layers = [layer.layer for layer in pipeline.transformer.attention_layers()]
    for role, number in case.layers.items():
        of_role = [
            (layer.index, layer.num_layers) for layer in layers if layer.role == role and layer.phase != "commit"
        ]
        assert of_role == [(index, case.one_of.get(role, number)) for index in range(number)], role
    modules = dict(pipeline.transformer.named_modules())
    for layer in pipeline.transformer.attention_layers():
        name = layer.layer.name
        assert layer in (modules.get(name), modules.get(f"{name}.attention")), name
    context = AttentionContext()
    given = given_to(pipeline)
    for factor in (1.0, 0.5):
        pipeline.transformer(given[0], factor * given[1], given[2], context)
    counts: dict[str, int] = {}
    for row in context.recorder.report().rows:
        if row.phase == "commit":
            # Of a prefix, by layers of its own.
            assert row.count == case.layers[row.role]
            continue
        counts[row.role] = counts.get(row.role, 0) + row.count
    called = {role: number for role, number in case.layers.items() if role not in case.of_images}
    assert counts == {role: number * (1 if role in case.runs_once else 2) for role, number in called.items()}


@table("family", FAMILIES)
def test_a_batch_equals_its_samples_and_inputs_stay(pipeline_of: Callable[[str], Pipeline], family: str) -> None:
    pipeline = pipeline_of(family)
    latents, timestep, inputs = given_to(pipeline)
    before = latents.clone(), inputs.text.embeddings.clone()
    together = pipeline.transformer(latents, timestep, inputs, AttentionContext())
    assert together.shape == latents.shape
    assert torch.equal(latents, before[0])
    assert torch.equal(inputs.text.embeddings, before[1])
    for index in range(2):
        part = slice(index, index + 1)
        image = None if inputs.image is None else of_samples(inputs.image, part)
        alone = dataclasses.replace(inputs, text=inputs.text.take([index]), image=image)
        found = pipeline.transformer(latents[part], timestep[part], alone, AttentionContext())
        assert relative(together[part], found) < 1e-5


def of_samples(image: ImageCondition, part: slice) -> ImageCondition:
    tokens = None if image.embeddings is None else image.embeddings[part]
    further = tuple(each[part] for each in image.further)
    return dataclasses.replace(image, latents=image.latents[part], embeddings=tokens, further=further)


# The driving video of Wan-Animate 2 has one text a request, which `flipped` changes with the prompt.
OF_PROMPTS = {name: case for name, case in FAMILIES.items() if name != "wan_animate_2"}


@table(("family", "case"), OF_PROMPTS.items(), OF_PROMPTS)
def test_the_text_is_projected_once_a_request_and_branch(
    pipeline_of: Callable[[str], Pipeline], family: str, case: FamilyCase
) -> None:
    transformer = pipeline_of(family).transformer
    latents, timestep, inputs = given_to(pipeline_of(family))
    other_inputs = dataclasses.replace(inputs, text=flipped(inputs.text))
    first, second = (transformer(latents, timestep, given, AttentionContext()) for given in (inputs, other_inputs))
    assert relative(first, second) > 1e-3
    assert relative(transformer(latents, timestep / 2, inputs, AttentionContext()), first) > 1e-3
    calls: list[str] = []
    hooks = [
        transformer.get_submodule(name).register_forward_hook(lambda module, given, out, name=name: calls.append(name))
        for name in case.text_modules
    ]
    try:
        cond = AttentionContext(step=StepInfo(branch="cond"))
        uncond = AttentionContext(step=StepInfo(branch="uncond"), state=cond.state)
        for _ in range(3):
            assert torch.equal(transformer(latents, timestep, inputs, cond), first)
            assert torch.equal(transformer(latents, timestep, other_inputs, uncond), second)
        assert sorted(calls) == sorted(2 * case.text_modules)
        # The same branch with another text.
        assert torch.equal(transformer(latents, timestep, other_inputs, cond), second)
        assert sorted(calls) == sorted(3 * case.text_modules)
        # An equal text in other tensors.
        equal = dataclasses.replace(inputs, text=flipped(flipped(inputs.text)))
        assert torch.equal(transformer(latents, timestep, equal, cond), first)
        assert sorted(calls) == sorted(4 * case.text_modules)
    finally:
        for hook in hooks:
            hook.remove()
