"""Forward passes of a transformer over the steps of a request, eager or through CUDA graphs."""

from __future__ import annotations

import dataclasses

import torch

from diffusion_runtime.attention import AttentionContext, RequestCache, StepInfo
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.report.attention_report import AttentionRecorder, AttentionReport


@torch.inference_mode()
def run_request(
    model: DiffusionTransformer,
    inputs: DenoiserInputs,
    graphs: ForwardGraphs | None,
    *,
    sample_shape: tuple[int, ...],
    seed: int = 0,
    num_steps: int = 5,
    block_runner: BlockRunner | None = None,
) -> tuple[list[torch.Tensor], AttentionReport]:
    """The velocities of each step, of latents that follow from them, and what was counted."""
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    latents = torch.randn(sample_shape, generator=torch.Generator().manual_seed(seed)).to(device)
    state, recorder = RequestCache(), AttentionRecorder()
    runner = BlockRunner() if block_runner is None else block_runner
    forward = (
        None
        if graphs is None
        else graphs.of_generation(model, recorder, read=model.read_inputs, refusal=model.replay_refusal())
    )
    velocities = []
    times = [1000.0 * (1 - index / num_steps) for index in range(num_steps)]
    steps = [
        StepInfo(index, num_steps, timestep=time, next_timestep=time - 1000.0 / num_steps)
        for index, time in enumerate(times)
    ]
    plan_steps(state, steps)
    for time, step in zip(times, steps, strict=True):
        context = AttentionContext(step=step, state=state, recorder=recorder, block_runner=runner)
        timestep = torch.full(latents.shape[:1], time, device=device)
        given = ForwardPass(latents.to(dtype), timestep, inputs, context)
        velocity = given.run(model) if forward is None else forward(given)
        velocities.append(velocity)
        latents = latents - 0.2 * velocity.float()
    if forward is not None:
        forward.report()
    return velocities, recorder.report()


def with_other_text(inputs: DenoiserInputs, factor: float) -> DenoiserInputs:
    """The inputs of another prompt with tokens as many."""
    text = inputs.text
    further = tuple(dataclasses.replace(each, embeddings=each.embeddings * factor) for each in text.further)
    pooled = None if text.pooled is None else text.pooled * factor
    other = dataclasses.replace(text, embeddings=text.embeddings * factor, further=further, pooled=pooled)
    return dataclasses.replace(inputs, text=other)
