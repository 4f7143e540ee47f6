"""Whether every component of a folder has weights that can be read, seen from json and the heads of files alone.

What cannot be read ends a load here, before the first and largest component has been read for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diffusion_runtime.errors import ModelLoadError, shown
from diffusion_runtime.model_folder import INDEX_FILE, read_json
from diffusion_runtime.models.weight_files import UNQUANTISED, find_weight_files, refuse_quantised, stored_dtypes
from diffusion_runtime.untrusted.component_sizes import check_sizes
from diffusion_runtime.untrusted.files import check_path

# How the files of a component's weights are called, by the library that its class is of.
_STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


def check_components(folder: Path) -> None:
    """Raises ModelLoadError for a component that could not be a folder's inside the model folder, or has sizes that a
    library would build without end. Reads json alone."""
    path = folder / INDEX_FILE
    for component, _ in _components(folder):
        check_path(component, f"{path}: component", ModelLoadError)
        if Path(component).name != component:
            raise ModelLoadError(
                f"{path}: component {shown(component)}: expected the name of a folder beside this file"
            )
    for component, _ in _with_weights(folder):
        config = folder / component / "config.json"
        check_sizes(read_json(config), config)


def refuse_quantised_components(folder: Path) -> None:
    """Raises ModelLoadError for a component whose config.json says that its weights are quantised. Reads json alone."""
    for component, _ in _with_weights(folder):
        path = folder / component / "config.json"
        settings = read_json(path).get("quantization_config")
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else settings
            raise ModelLoadError(
                f"{path}: key 'quantization_config': the weights are quantised ({method}), and this runtime does not "
                f"read them; {UNQUANTISED}"
            )


def check_component_files(folder: Path) -> None:
    """Raises ModelLoadError for a component that is missing, or whose weight files are missing, pickled, quantised,
    damaged or cut off."""
    for component, _ in _components(folder):
        if not (folder / component).is_dir():
            raise ModelLoadError(
                f"{folder / component}/ is missing, and {INDEX_FILE} names it; copy or download the whole model folder"
            )
    for component, stem in _with_weights(folder):
        for path in find_weight_files(folder / component, stem):
            refuse_quantised(path, stored_dtypes(path))


def _with_weights(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, stem of its weight files) of every component that has weights: schedulers and tokenizers have no
    config.json."""
    for component, library in _components(folder):
        if library in _STEMS and (folder / component / "config.json").is_file():
            yield component, _STEMS[library]


def _components(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, library) of every component; optional ones that a model lacks are null in model_index.json."""
    for component, entry in read_json(folder / INDEX_FILE).items():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
            yield component, entry[0]
