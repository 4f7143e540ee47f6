"""Text encoders that are quantised in their files: transformers would read the numbers without what belongs to them, so
that their weights are read here, dequantised one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from diffusion_runtime.core.model_folder import AnyFolder, part_prefix
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.memory.waiting_weights import is_waiting
from diffusion_runtime.models.text_encoder_files import STEM, source_of, text_components
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import modules_of
from diffusion_runtime.weights.stored_tensors import StoredRows, stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile
from diffusion_runtime.weights.weight_files import find_weight_files, refuse_unmarked
from diffusion_runtime.weights.weight_loading import load_weights

_SAID = "dequantised as they are read"


def check_text_encoder_file(path: Path, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight in a text encoder's file, from its head and the marks beside weights. prefix: of
    its part of the file. Raises ModelLoadError for weights that are quantised in a way that is not read."""
    with closing(SafetensorsFile(path, prefix)) as file:
        refuse_unmarked(path, {name: head.kind for name, head in file.heads.items()})
        return {name: rows[0].shape for name, rows in stored_rows([file]).items()}


def quantized_text(folder: AnyFolder) -> dict[str, str]:
    """Return what reports say of the text encoders whose weights need more than a cast, by component. Raises
    ModelLoadError for files that cannot be read."""
    found = {}
    for component in text_components(folder):
        with ExitStack() as stack:
            paths, prefix = find_weight_files(folder / component, STEM), part_prefix(folder / component)
            rows = stored_rows([stack.enter_context(closing(SafetensorsFile(path, prefix))) for path in paths])
            if titles := _titles(rows):
                found[component] = f"{component}: weights in {' and '.join(titles)}, {_SAID}"
    return found


def _titles(rows: Mapping[str, tuple[StoredRows, ...]]) -> list[str]:
    layers = (row.layer for several in rows.values() for row in several)
    return list(dict.fromkeys(each.format.title for each in layers if each is not None and each.beside))


def read_dequantized(
    encoder: TextEncoder,
    folder: AnyFolder,
    others: Sequence[DiffusersComponent],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Read the weights of an encoder that was built for the meta device, where none is read, onto another one. others:
    components of diffusers' that may be among its modules. Raises ModelLoadError for files whose tensors cannot be
    matched to a module."""
    for module in modules_of(encoder):
        assert is_waiting(module), f"{type(module).__name__} was read"
        _, opens, pieces = source_of(module, folder, others, "dequantised", "the quantised file")
        kept = {name for name, tensor in module.state_dict().items() if tensor.dtype == torch.float32}
        with opens(()) as checkpoint:
            load_weights(module, checkpoint, pieces, device, dtype, kept.__contains__, lambda _: True)
        # What no file holds, such as frequencies of a rotary embedding.
        module.to(device)
