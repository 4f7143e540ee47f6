"""Weights of a transformer from elsewhere than its model's folder (`--transformer-path`): one file, or a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, read_json, read_json_in
from diffusion_runtime.errors import ModelLoadError, shown, shown_name
from diffusion_runtime.untrusted.files import check_file, check_place, user_path
from diffusion_runtime.weights.cached_folder import snapshot_in
from diffusion_runtime.weights.checkpoint import Source
from diffusion_runtime.weights.file_kinds import kind_of
from diffusion_runtime.weights.file_parts import prefix_of_transformer
from diffusion_runtime.weights.gguf_encoder import open_gguf
from diffusion_runtime.weights.stored_tensors import Rows, stored_rows
from diffusion_runtime.weights.tensor_files import SafetensorsFile, TensorFile
from diffusion_runtime.weights.tensor_names import Expected, by_diffusers_names, transformer_tensors
from diffusion_runtime.weights.weight_files import (
    COMPONENT_STEM,
    CONVERT,
    GGUF,
    SUFFIXES,
    check_quantization_config,
    find_weight_files,
    listed,
    refuse_unmarked,
    without_prefix,
)


@dataclass(frozen=True)
class TransformerFile:
    """path: as it was given. key: of the config, for messages; component: whose weights these are."""

    path: str
    key: str
    component: str

    @property
    def place(self) -> Path:
        path = user_path(self.path, self.key)
        return snapshot_in(path) or path

    def check_settings(self, folder: AnyFolder) -> None:
        """Raises ModelLoadError where config.json next to the weights differs from the model folder's, which
        is the one that holds: other positions or epsilons fit the same tensors, and give other numbers."""
        path = self.place / "config.json"
        if not path.is_file():
            return
        given, own = read_json(path), read_json_in(folder, self.component, "config.json")
        classes = given.get("_class_name"), own.get("_class_name")
        if None not in classes and classes[0] != classes[1]:
            raise ModelLoadError(
                f"{path}: key '_class_name': expected {shown(classes[1])}, the model's own, got {shown(classes[0])}: "
                "give the folder of a transformer of this model"
            )
        differing = [
            f"{key} is {shown(value)}, here {shown(own[key])}"
            for key, value in given.items()
            if key in own and own[key] != value and not key.startswith("_") and key != "quantization_config"
        ]
        if differing:
            raise ModelLoadError(
                f"{path}: {len(differing)} settings differ from the model's own: {listed(differing)}. Give the folder "
                f"of the whole model by --model-path; or the weights' file itself, without its config.json, by "
                f"--{self.key.replace('_', '-')}, to run them with the model's settings"
            )

    def source(self, expected: Expected) -> Source:
        """Opens the files, and gives their tensors the names that the model's folder would have.

        The result raises ConfigError for a path that is no file's, ModelLoadError for files that are missing, damaged,
        of another kind or for another model.
        """

        def open_files(stack: contextlib.ExitStack) -> Rows:
            files = [open_tensor_file(path, self.key, stack) for path in self.files()]
            rows = stored_rows(files)
            kind = None if any(name in expected.shapes for name in rows) else kind_of(transformer_tensors(tuple(rows)))
            if kind is not None:
                flag = f"give it by --{kind.component.replace('_', '-')}-path, or " if kind.component else ""
                raise ModelLoadError(
                    f"{self.key}: {self.place}: holds {kind.title}, expected a transformer: {flag}use the file of this "
                    "component"
                )
            return by_diffusers_names(self.place, rows, expected)

        return open_files

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors as they are stored, by their names without a prefix. Raises what `source`
        raises for files that cannot be read."""
        with contextlib.ExitStack() as stack:
            files = [open_tensor_file(path, self.key, stack) for path in self.files()]
            return {without_prefix(name): head.shape for file in files for name, head in file.heads.items()}

    def files(self) -> Sequence[Path]:
        """Return the files that are opened. Raises what `source` raises for a path without any."""
        place = check_place(self.place, self.key)
        if not place.is_dir():
            return [place]
        if (place / INDEX_FILE).exists():
            raise ModelLoadError(
                f"{self.key}: {place} is the folder of a whole model: give {place / self.component}, or --model-path"
            )
        check_quantization_config(place, self.component)
        return find_weight_files(place, COMPONENT_STEM)


def _transformer_in(path: Path) -> SafetensorsFile:
    """The transformer's part of a file that holds several components; the whole of any other. Raises ModelLoadError for
    two tensors that have one name without the prefixes of transformers."""
    file = SafetensorsFile(path)
    known: dict[str, str] = {}
    for name in file.heads:
        if (other := known.setdefault(without_prefix(name), name)) != name:
            file.close()
            raise ModelLoadError(
                f"{path}: {shown_name(other)} and {shown_name(name)} are one tensor of a transformer, given twice; "
                "expected a file of one transformer: copy or download it again"
            )
    prefix = prefix_of_transformer(tuple(file.heads))
    if not prefix:
        return file
    file.close()
    return SafetensorsFile(path, prefix)


def transformer_files(config: RuntimeConfig) -> tuple[TransformerFile, ...]:
    """The transformers' weights that a config names."""
    given = (("transformer_path", "transformer"), ("transformer_2_path", "transformer_2"))
    return tuple(
        TransformerFile(path, key, component) for key, component in given if (path := getattr(config, key)) is not None
    )


def open_tensor_file(path: Path, key: str, stack: contextlib.ExitStack) -> TensorFile:
    """A file of tensors, closed with the stack. key: what named it. Raises what TransformerFile.source raises."""
    check_file(path, key, missing=ModelLoadError)
    if path.suffix not in SUFFIXES:
        raise ModelLoadError(
            f"{path}: expected a file in {' or '.join(SUFFIXES)}; a pickle can run code when it is opened, and is "
            f"never read: {CONVERT}"
        )
    file: TensorFile = open_gguf(path) if path.suffix == GGUF else _transformer_in(path)
    stack.callback(file.close)
    if not file.is_gguf:
        refuse_unmarked(path, {name: head.kind for name, head in file.heads.items()})
    return file
