"""Parts of a folder that diffusers' own classes compute, such as half of the autoencoder in `vae`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.checkpoint import Checkpoint, load_weights, own_pieces
from diffusion_runtime.models.folder import read_config

COMPONENT = "vae"


def load_autoencoder_half(
    folder: Path,
    autoencoder_class: type,
    device: torch.device,
    dtype: torch.dtype,
    *,
    left_out: tuple[str, ...],
    stays_float32: Callable[[str], bool] = lambda _: False,
    idle_settings: tuple[str, ...] = (),
) -> Any:
    """The `vae` of a folder, without some of its parts. Raises what load_component raises."""
    return load_component(
        folder,
        COMPONENT,
        autoencoder_class,
        device,
        dtype,
        left_out=left_out,
        stays_float32=stays_float32,
        idle_settings=idle_settings,
    )


def load_component(
    folder: Path,
    component: str,
    component_class: type,
    device: torch.device,
    dtype: torch.dtype,
    *,
    left_out: tuple[str, ...] = (),
    stays_float32: Callable[[str], bool] = lambda _: False,
    idle_settings: tuple[str, ...] = (),
) -> Any:
    """A component of that class with its config.json's settings, in eval mode and without gradients.

    left_out: names of its modules that are neither built nor read, such as those of the encoder. stays_float32:
    parameters and buffers that are not converted to `dtype`. idle_settings: keys that published files have although
    nothing reads them, and that some versions of the class do not know.

    Raises ModelLoadError for settings that the installed diffusers does not know and for weights that do not fit.
    """
    file = read_config(folder, component)
    name = component_class.__name__
    settings = {key: value for key, value in file.settings().items() if key not in idle_settings}
    unknown = [key for key in settings if key not in inspect.signature(component_class).parameters]
    if unknown:
        import diffusers

        raise ModelLoadError(
            f"{file.path}: key {unknown[0]!r} is unknown to {name} of the installed diffusers "
            f"{diffusers.__version__}; this model was written for a newer one: `pip install -U diffusers`"
        )
    try:
        with torch.device("meta"):
            module: Any = component_class(**settings)
    except (TypeError, ValueError, NotImplementedError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"{file.path}: {name} refuses these settings: {error}") from error
    for part in left_out:
        setattr(module, part, None)
    prefixes = tuple(f"{part}." for part in left_out)
    with Checkpoint(folder / component) as checkpoint:
        load_weights(
            module,
            checkpoint,
            own_pieces(module),
            device,
            dtype,
            stays_float32=stays_float32,
            ignored=lambda tensor: tensor.startswith(prefixes),
        )
    return module
