"""Weights of a transformer that lie in several components of a folder, such as those of its ControlNet."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from diffusion_runtime.core.model_folder import AnyFolder
from diffusion_runtime.weights.checkpoint import Source
from diffusion_runtime.weights.stored_tensors import Rows, stored_rows
from diffusion_runtime.weights.transformer_files import open_tensor_file
from diffusion_runtime.weights.weight_files import COMPONENT_STEM, find_weight_files


def joined(folder: AnyFolder, component: str, further: Sequence[str], own: Source | None = None) -> Source:
    """The tensors of a component, and those of further ones under the component's name and a dot: `controlnet.img_in`.

    own: opens the first component's, None where they are in the folder. The result raises ModelLoadError for files that
    are missing, damaged or quantised in a way that is not read.
    """

    def of_folder(name: str, stack: contextlib.ExitStack) -> Rows:
        paths = find_weight_files(folder / name, COMPONENT_STEM)
        return stored_rows([open_tensor_file(path, name, stack) for path in paths])

    def open_files(stack: contextlib.ExitStack) -> Rows:
        rows = dict(of_folder(component, stack) if own is None else own(stack))
        for name in further:
            rows.update({f"{name}.{tensor}": stored for tensor, stored in of_folder(name, stack).items()})
        return rows

    return open_files
