"""The FLUX.3 transformer against diffusers' own on tiny weights, float32: within 1e-5 of the largest value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from family_parity import load_transformer, relative
from graphed_forwards import run_request, with_other_text
from recorded_capture import RecordedCapture
from tables import table
from tiny_flux2 import CHANNELS
from tiny_flux3 import TEXT_DIM

from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.layers.modulation_rows import plan_key, plan_steps
from diffusion_runtime.models.flux3.family import FAMILY
from diffusion_runtime.models.flux3.transformer import Flux3Transformer
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.text_encoders.interface import Conditions

LENGTHS = (9, 5)
NEXT = 431.6


@pytest.fixture(scope="module")
def models(tiny_folder_of: Callable[[str], Path], tiny_flow_map: Path) -> dict[bool, tuple[Flux3Transformer, Any]]:
    """Ours and theirs, by whether it is a flow map."""
    return {
        is_flow_map: (
            load_transformer(FAMILY, folder),
            Flux3Transformer2DModel.from_pretrained(folder / "transformer").eval(),
        )
        for is_flow_map, folder in ((False, tiny_folder_of("flux3")), (True, tiny_flow_map))
    }


def arguments(
    size: tuple[int, int] = (4, 6), references: Sequence[tuple[int, int]] = (), lengths: tuple[int, ...] = LENGTHS
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    """Of as many samples as lengths: with noise where the text of one is padding, so that it would show."""
    generator, batch = torch.Generator().manual_seed(1), len(lengths)
    latents, *pictures = (torch.randn(batch, CHANNELS, 1, *each, generator=generator) for each in (size, *references))
    text = torch.randn(batch, max(lengths), TEXT_DIM, generator=generator)
    image = ImageCondition(pictures[0], further=tuple(pictures[1:])) if pictures else None
    inputs = DenoiserInputs(Conditions.of(text, lengths), ClipSize(4 * size[0], 4 * size[1], 1, 1), image=image)
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], inputs


@torch.no_grad()
def run_theirs(
    model: Any, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, following: float | None
) -> torch.Tensor:
    """Sample by sample, as their pipeline does: each with its own text alone."""
    out = []
    for index, length in enumerate(inputs.text.lengths):
        own = slice(index, index + 1)
        references = () if inputs.image is None else inputs.image.references
        given = {}
        if references:
            given["image_cond_hidden_states"] = torch.cat([each[own].flatten(2) for each in references], 2).mT
            ids = [_prepare_image_ids(*each.shape[3:], 0.5, -1 - place) for place, each in enumerate(references)]
            given["image_cond_ids"] = torch.cat(ids)
        if following is not None:
            given["target_timestep"] = torch.full((1,), following) / 1000
        zero = torch.zeros(length)
        velocity = model(
            hidden_states=latents[own].flatten(2).mT,
            encoder_hidden_states=inputs.text.embeddings[own, :length],
            timestep=timestep[own] / 1000,
            img_ids=_prepare_image_ids(*latents.shape[3:], 0.5),
            txt_ids=torch.stack([zero, zero, zero, torch.arange(length)], 1),
            return_dict=False,
            **given,
        )[0]
        out.append(velocity.mT.unflatten(2, latents.shape[2:]))
    return torch.cat(out)


def run_ours(model: Flux3Transformer, given: Any, context: AttentionContext | None = None) -> torch.Tensor:
    step = StepInfo(0, 4, timestep=float(given[1][0]), next_timestep=NEXT)
    return model(*given, AttentionContext(step=step) if context is None else context)


@table("is_flow_map", [False, True])
@table(
    ("size", "references", "lengths"),
    [
        ((4, 6), (), LENGTHS),
        ((5, 3), ((3, 5),), (7,)),
        ((1, 1), ((2, 3), (1, 4), (5, 1)), (4, 9, 1)),
    ],
)
def test_velocities_equal_those_of_diffusers(
    models: Any, is_flow_map: bool, size: tuple[int, int], references: Any, lengths: tuple[int, ...]
) -> None:
    """Odd sizes, unequal texts and timesteps, several references."""
    ours, theirs = models[is_flow_map]
    given = arguments(size, references, lengths)
    before = given[0].clone(), given[2].text.embeddings.clone()
    expected = run_theirs(theirs, *given, NEXT if is_flow_map else None)
    assert relative(run_ours(ours, given), expected) < 1e-5
    assert torch.equal(given[0], before[0])
    assert torch.equal(given[2].text.embeddings, before[1])


@table("is_flow_map", [False, True])
def test_every_later_step_equals_diffusers(models: Any, is_flow_map: bool) -> None:
    """References and text of the first step serve the others, except in a flow map; rows come from the request's
    table. Another guidance branch has its own."""
    ours, theirs = models[is_flow_map]
    latents, _, inputs = arguments(references=((3, 5), (2, 2)))
    other = dataclasses.replace(inputs, text=dataclasses.replace(inputs.text, embeddings=-inputs.text.embeddings))
    times = [900.0, 611.5, 250.25]
    steps = [
        StepInfo(n, 3, timestep=at, next_timestep=after)
        for n, (at, after) in enumerate(zip(times, [*times[1:], 0.0], strict=True))
    ]
    context = AttentionContext(recorder=AttentionRecorder())
    plan_steps(context.state, steps)
    calls = dict.fromkeys(("text_blocks", "reference_blocks", "blocks", "single_blocks"), 0)

    def counted(name: str) -> Callable[..., None]:
        def count(*_: object) -> None:
            calls[name] += 1

        return count

    hooks = [getattr(ours, name)[0].register_forward_hook(counted(name)) for name in calls]
    for step in steps:
        for branch, given in (("cond", inputs), ("uncond", other)):
            at = dataclasses.replace(context, step=dataclasses.replace(step, branch=branch))
            timestep = torch.full((2,), step.timestep)
            found = run_ours(ours, (latents, timestep, given), at)
            expected = run_theirs(theirs, latents, timestep, given, step.next_timestep if is_flow_map else None)
            assert relative(found, expected) < 1e-5, (step.index, branch)
    for hook in hooks:
        hook.remove()
    kept = 6 if is_flow_map else 2
    assert calls == {"text_blocks": kept, "reference_blocks": kept, "blocks": 6, "single_blocks": 6}
    notes = " ".join(context.recorder.report().notes)
    assert ("references: 19 tokens in front of the joint blocks computed once" in notes) != is_flow_map
    assert f"references and text: rows of {3 if is_flow_map else 1} timestep" in notes


def test_every_input_matters(models: Any) -> None:
    """Otherwise the comparisons could not tell whether one went astray on both sides."""
    ours = models[True][0]
    latents, timestep, inputs = arguments(references=((3, 5), (2, 2)))
    assert inputs.image is not None
    out = run_ours(ours, (latents, timestep, inputs))
    text, image = inputs.text, inputs.image
    swapped = ImageCondition(image.further[0], further=(image.latents,))
    for other in (
        (timestep / 2, inputs),
        (timestep, dataclasses.replace(inputs, text=dataclasses.replace(text, embeddings=text.embeddings.flip(1)))),
        (timestep, dataclasses.replace(inputs, image=swapped)),
        (timestep, dataclasses.replace(inputs, image=None)),
    ):
        assert relative(run_ours(ours, (latents, *other)), out) > 1e-3
    later = AttentionContext(step=StepInfo(0, 4, timestep=float(timestep[0]), next_timestep=0.0))
    assert relative(run_ours(ours, (latents, timestep, inputs), later), out) > 1e-3


def test_a_flow_map_is_replayed(models: Any) -> None:
    """The timestep that a step leads to is read in a table; where it is not planned, no other step's graph is taken."""
    ours, graphs = models[True][0], ForwardGraphs(RecordedCapture())
    latents, _, inputs = arguments(references=((3, 5),))
    for request, num_replayed in ((inputs, 2), (with_other_text(inputs, 0.7), 4)):
        found, report = run_request(ours, request, graphs, sample_shape=latents.shape)
        expected, _ = run_request(ours, request, None, sample_shape=latents.shape)
        assert all(torch.equal(replayed, eager) for replayed, eager in zip(found, expected, strict=True))
        assert report.graphs is not None
        assert (report.graphs.num_replayed, report.graphs.num_graphs) == (num_replayed, 1)
    context = AttentionContext(step=StepInfo(0, 2, timestep=500.0, next_timestep=250.0))
    other = dataclasses.replace(context, step=dataclasses.replace(context.step, next_timestep=125.0))
    keys = [plan_key(each, takes_next=ours.rows_take_next) for each in (context, other)]
    assert keys == [(False, 250.0), (False, 125.0)]
    plan_steps(context.state, [context.step])
    assert plan_key(context, takes_next=True) == (True, None)
