"""Strength of image to image and video to video (SDEdit, Meng et al., arXiv:2108.01073): how many of a request's steps
run, as diffusers' pipelines count them."""

from __future__ import annotations

from diffusion_runtime.request.generation_request import GenerationRequest

# Of a request with init_path that says neither a strength nor where its noise levels begin, as diffusers' FluxImg2Img.
DEFAULT_STRENGTH = 0.6


def steps_left_out(request: GenerationRequest, num_steps: int | None = None) -> int:
    """Return how many of the first steps do not run. num_steps: of them all, None for the request's."""
    num_steps = request.num_inference_steps if num_steps is None else num_steps
    if request.strength is None or num_steps is None:
        return 0
    # In diffusers' order of operations: the rounding of 10 * 0.7 decides.
    return int(max(num_steps - min(num_steps * request.strength, num_steps), 0))


def starts_from_noise(request: GenerationRequest) -> bool:
    """Return whether the first step is given noise alone."""
    return request.init_path is None or (request.strength is not None and steps_left_out(request) == 0)


def reads_initial(request: GenerationRequest) -> bool:
    """Return whether a resolved request needs the latents of its init_path: not at a strength of 1 without a mask."""
    return request.init_path is not None and not (starts_from_noise(request) and request.mask_path is None)


def steps_that_run(request: GenerationRequest) -> int | None:
    """Return the steps of a request that run; None where nothing says a number."""
    num_steps = request.num_inference_steps
    return None if num_steps is None else num_steps - steps_left_out(request)
