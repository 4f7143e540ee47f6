"""Load a model: `prepare` decides, `load` of its result reads the weights, and `load_pipeline` is both."""

from diffusion_runtime.loading.interface import OnStage, Prepared
from diffusion_runtime.loading.preparation import inspect_pipeline, load_pipeline, prepare

__all__ = ["OnStage", "Prepared", "inspect_pipeline", "load_pipeline", "prepare"]
