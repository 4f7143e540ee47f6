"""GenerationRequest and the parts of it: everything that a request can say."""

from diffusion_runtime.request.generation_request import GenerationRequest

__all__ = ["GenerationRequest"]
