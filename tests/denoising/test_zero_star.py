"""CFG-zero* by its formulae in float64 and by diffusers' guider; zeros in place of a text."""

from __future__ import annotations

import torch
from diffusers.guiders import ClassifierFreeZeroStarGuidance

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.zero_star import with_optimised_scale, with_zero_init
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

SIGMA, SCALE, NUM_STEPS = 0.7, 4.0, 10


def branches() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents and the velocities of both branches, float64: two samples whose factors differ."""
    generator = torch.Generator().manual_seed(3)
    latents, cond, noise = (torch.randn(2, 4, 3, 5, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    uncond = cond * torch.tensor([0.5, -0.25], dtype=torch.float64).view(2, 1, 1, 1, 1) + 0.3 * noise
    return latents, cond, uncond


def guided(of_clean: bool) -> torch.Tensor:
    latents, cond, uncond = branches()

    def predict(_: torch.Tensor, step: StepInfo) -> torch.Tensor:
        return {"cond": cond, "uncond": uncond}[step.branch].float()

    wrapper = with_optimised_scale(of_clean=of_clean)
    made = with_guidance(predict, SCALE, "two_pass", wrappers=(wrapper,))
    return made(latents.float(), StepInfo(3, NUM_STEPS, sigma=SIGMA))


def test_the_unconditional_velocity_is_scaled_by_the_papers_formula() -> None:
    _, cond, uncond = branches()
    for index, found in enumerate(guided(of_clean=False).double()):
        c, u = cond[index].flatten(), uncond[index].flatten()
        factor = torch.dot(c, u) / (torch.dot(u, u) + 1e-8)
        # The multiple of u that is nearest to c.
        assert abs(torch.dot(c - factor * u, u)) < 1e-6
        expected = factor * u + SCALE * (c - factor * u)
        assert (found.flatten() - expected).abs().max() < 1e-5
    theirs = ClassifierFreeZeroStarGuidance(guidance_scale=SCALE, zero_init_steps=1)
    theirs.set_state(step=3, num_inference_steps=NUM_STEPS, timestep=torch.tensor(1))
    assert (guided(of_clean=False) - theirs.forward(cond, uncond).pred).abs().max() < 1e-5


def test_comfyui_scales_what_the_branch_predicts_to_be_clean() -> None:
    """As its node has it: the guided clean prediction, plus (a - 1) u - s (a - 1) u, where u is the clean one."""
    latents, cond, uncond = branches()
    clean_cond, clean_uncond = latents - SIGMA * cond, latents - SIGMA * uncond
    made = latents - SIGMA * guided(of_clean=True).double()
    for index in range(len(latents)):
        positive, negative = ((latents - each)[index].flatten() for each in (clean_cond, clean_uncond))
        factor = torch.dot(positive, negative) / (torch.dot(negative, negative) + 1e-8)
        c, u = clean_cond[index], clean_uncond[index]
        plain = u + SCALE * (c - u)
        expected = plain + u * (factor - 1) + SCALE * u * (1 - factor)
        assert (made[index] - expected).abs().max() < 1e-5
    assert (guided(of_clean=True) - guided(of_clean=False)).abs().max() > 0.1


def test_first_steps_have_no_velocity_and_no_pass() -> None:
    ran: list[int] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        ran.append(step.index)
        return latents + 1

    made = with_zero_init(predict, 2)
    latents = torch.ones(1, 2, dtype=torch.bfloat16)
    found = [made(latents, StepInfo(index, 4)) for index in range(4)]
    assert ran == [2, 3]
    assert [float(each.abs().max()) for each in found] == [0, 0, 2, 2]
    assert found[0].dtype == torch.float32
    assert with_zero_init(predict, 0) is predict


def test_zeros_have_the_shapes_and_lengths_of_a_text() -> None:
    stream = TextStream(torch.ones(1, 5, 2), (4,))
    text = Conditions.of(torch.ones(1, 3, 4), (2,), pooled=torch.ones(1, 6), further=(stream,))
    zeros = text.zeroed()
    assert zeros.lengths == (2,)
    assert zeros.further[0].lengths == (4,)
    for each, before in (
        (zeros.embeddings, text.embeddings),
        (zeros.pooled, text.pooled),
        (zeros.further[0].embeddings, stream.embeddings),
    ):
        assert each is not None
        assert before is not None
        assert each.shape == before.shape
        assert float(before.min()) == 1 > float(each.abs().max())
