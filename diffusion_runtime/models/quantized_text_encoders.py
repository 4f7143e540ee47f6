"""Text encoders that are read here instead of by transformers, tensor by tensor and dequantised: those that are
quantised in their files, of which transformers would read the numbers without what belongs to them, and those in files
that flags name, whose tensors go by many names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import nn

from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.memory.waiting_weights import is_waiting
from diffusion_runtime.models.text_encoder_files import is_elsewhere, open_encoder, source_of, text_components
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import modules_of
from diffusion_runtime.weights.stored_formats.float8 import Float8
from diffusion_runtime.weights.stored_tensors import StoredRows, stored_rows
from diffusion_runtime.weights.weight_loading import load_weights


def text_read_here(folder: AnyFolder) -> dict[str, str]:
    """Return the text encoders whose weights need more than transformers' own reading, by component, with the formats
    that are dequantised, empty for none. Raises ModelLoadError for files that cannot be read."""
    found = {}
    for component in text_components(folder):
        with ExitStack() as stack:
            titles = titles_of(stored_rows(open_encoder(folder / component, stack)))
        if titles or is_elsewhere(folder / component):
            found[component] = " and ".join(titles)
    return found


def titles_of(rows: Mapping[str, tuple[StoredRows, ...]]) -> list[str]:
    """Return what the formats are called that are dequantised, the first that is met first."""
    layers = (row.layer for several in rows.values() for row in several)
    # Plain casts to 8-bit floats have nothing beside them, and are numbers as others.
    return list(
        dict.fromkeys(
            each.format.title
            for each in layers
            if each is not None and (each.beside or not isinstance(each.format, Float8))
        )
    )


def dequantized_text(component: str, titles: str, modules: Sequence[nn.Module], *, waits: bool) -> str:
    """Return what a report says of an encoder in a quantised file. waits: whether its weights are read as they are
    used."""
    size = size_text(sum(tensor.nbytes for module in modules for tensor in module.parameters()))
    when = "as it is read for each use" if waits else f"at load: {size}"
    return f"{component.replace('_', ' ')}: {titles}, dequantised {when}"


def read_text_here(
    encoder: TextEncoder,
    folder: AnyFolder,
    others: Sequence[DiffusersComponent],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, list[nn.Module]]:
    """Read the weights of an encoder that was built for the meta device, where none is read, onto another one. others:
    components of diffusers' that may be among its modules. Returns the modules of each component.

    Raises ModelLoadError for files whose tensors cannot be matched to a module, and for tensors beside its weights that
    would change the result and are not read.
    """
    modules: dict[str, list[nn.Module]] = {}
    for module in modules_of(encoder):
        assert is_waiting(module), f"{type(module).__name__} was read"
        component, opens, pieces = source_of(module, folder, others, "read", "the flag that names its file")
        modules.setdefault(component, []).append(module)
        kept = {name for name, tensor in module.state_dict().items() if tensor.dtype == torch.float32}
        with opens(()) as checkpoint:
            load_weights(module, checkpoint, pieces, device, dtype, kept.__contains__, lambda _: True)
        # What no file holds, such as frequencies of a rotary embedding.
        module.to(device)
    return modules
