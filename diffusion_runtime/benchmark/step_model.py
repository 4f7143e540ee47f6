"""A model whose denoising step is timed, with random weights: a published one from its json in the package, or a
folder."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.latent_geometry import ClipSize, LatentGeometry
from diffusion_runtime.core.model_folder import INDEX_FILE, component_class, read_json
from diffusion_runtime.diffusers_bridge.random_transformer import class_in_diffusers, random_transformer
from diffusion_runtime.diffusers_bridge.sample_inputs import StepInputs, StepSample, step_inputs
from diffusion_runtime.errors import ConfigError, RequestError, shown
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS, named_alike, resolve_model_folder
from diffusion_runtime.models.published import PublishedModel, published_models
from diffusion_runtime.models.published_folders import FolderFiles, published_folders, write_folder
from diffusion_runtime.models.random_weights import fill_randomly
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.rules.predicted_length import LengthBounds
from diffusion_runtime.weights.quantization import Quantization

_TRANSFORMER = "transformer/config.json"
# Keys that give the number of blocks of a transformer; a text's refiner stays whole.
_BLOCK_COUNTS = ("num_layers", "num_single_layers", "n_layers")


@dataclass(frozen=True)
class StepModel:
    """A transformer with its sizes. config: of the transformer as it is built; num_blocks: that are built;
    whole_blocks: that the model has. size: of the clip; batch: samples of one forward. text_tokens: see StepSample.
    num_images: to edit, of the size of what is made. transformer_class: as diffusers calls it, where it has one."""

    name: str
    model: Model[Any, Any]
    transformer_class: str
    config: Mapping[str, Any]
    num_blocks: int
    whole_blocks: int
    size: ClipSize
    batch: int = 1
    text_tokens: int | None = None
    num_images: int = 0

    @property
    def num_tokens(self) -> int:
        """Grid tokens of one sample."""
        geometry: LatentGeometry = self.model.geometry
        return geometry.num_tokens(self.size.height, self.size.width, self.size.num_frames)

    def describe(self) -> str:
        """`FLUX.1-dev, 1 frame of 1024 x 1024, 4096 tokens, batch 1, 57 blocks`."""
        size = self.size
        frames = "1 frame" if size.num_frames == 1 else f"{size.num_frames} frames"
        blocks = f"{self.num_blocks} blocks"
        if self.num_blocks != self.whole_blocks:
            blocks = f"{self.num_blocks} of {self.whole_blocks} blocks"
        images = "an image" if self.num_images == 1 else f"{self.num_images} images"
        beside = f" and {self.num_images * self.num_tokens} of {images} to edit" if self.num_images else ""
        return (
            f"{self.name}, {frames} of {size.width} x {size.height}, {self.num_tokens} tokens{beside}, "
            f"batch {self.batch}, {blocks}"
        )

    def inputs(self, device: torch.device, dtype: torch.dtype) -> StepInputs:
        """Return the same inputs at every call."""
        generator = torch.Generator(device).manual_seed(0)
        return step_inputs(
            self.transformer_class,
            StepSample(
                self.config,
                self.model.geometry,
                self.size,
                self.batch,
                device,
                dtype,
                generator,
                self.text_tokens,
                num_images=self.num_images,
            ),
        )

    def build(
        self,
        policy: AttentionPolicy,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> tuple[DiffusionTransformer, Quantization | None]:
        """Our transformer with random weights. quantization: a mode of config.py.

        Raises BackendUnavailableError and ConfigError for choices that cannot run.
        """
        empty = self.model.build_transformer(policy)
        rules = Quantization.of(self.model.family.name, quantization, ())
        if rules is not None:
            rules.apply(self.model.modules(empty))
        return fill_randomly(self.model, empty, device, dtype), rules

    def build_theirs(self, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        """diffusers' transformer with the same weights."""
        return random_transformer(self.transformer_class, self.config, device, dtype)

    def num_parameters(self) -> int:
        empty = self.model.build_transformer(AttentionPolicy())
        return sum(parameter.numel() for parameter in empty.parameters())


def open_step_model(
    name: str,
    num_layers: int | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    index_changes: Mapping[str, Any] = MappingProxyType({}),
) -> StepModel:
    """Open the model of a name of `models`, of its hub id, or of a folder; of two experts, one.

    num_layers: how many blocks are built of the kind that has most, and of other kinds in proportion; None for all.
    changes: of the transformer's config, such as sizes that a CPU computes; index_changes: of the folder's
    model_index.json, such as another class. Raises ConfigError for an unknown name and
    ModelLoadError for a folder that no family here loads.
    """
    published = _find_published(name)
    files = dict(_published_files(published) if published is not None else _folder_files(name))
    # One forward pass runs one expert.
    index = {**files[INDEX_FILE], **index_changes}
    files[INDEX_FILE] = {key: value for key, value in index.items() if key not in ("transformer_2", "boundary_ratio")}
    config = {**files[_TRANSFORMER], **changes}
    whole = _num_blocks(config)
    if num_layers is not None:
        config.update(_cut(config, num_layers))
        if "vace_layers" in config:
            config["vace_layers"] = [layer for layer in config["vace_layers"] if layer < config["num_layers"]]
    files[_TRANSFORMER] = config
    with tempfile.TemporaryDirectory(prefix="diffusion_runtime_bench_") as temporary:
        # Nothing reads the folder once it is described.
        folder = write_folder(Path(temporary), files)
        model = family_for_folder(folder).describe(folder)
        transformer_class = class_in_diffusers(component_class(folder, "transformer")[1], config)
    return StepModel(
        name=published.name if published is not None else name,
        model=model,
        transformer_class=transformer_class,
        config=config,
        num_blocks=_num_blocks(config),
        whole_blocks=whole,
        size=_default_size(model, published),
        text_tokens=_text_tokens(files),
        num_images=0 if model.inputs.references is None else model.inputs.references.usual,
    )


def with_size(
    opened: StepModel,
    *,
    height: int | None,
    width: int | None,
    num_frames: int | None,
    batch: int,
    num_images: int | None = None,
) -> StepModel:
    """Return the same model at another size. num_images: to edit; None for the model's usual number. Raises
    RequestError for sizes that the model does not make, and ConfigError for images that it does not take."""
    references = opened.model.inputs.references
    most = 0 if references is None else references.most
    num_images = opened.num_images if num_images is None else num_images
    if num_images > most:
        raise ConfigError(f"--num-images: expected {most} or less for this model, got {num_images}")
    if num_images and references is not None and references.are_cached:
        raise ConfigError(
            "--num-images: expected 0 for this model, which computes images once per request and not at every step, "
            f"got {num_images}; `bench generate` times whole requests"
        )
    changes = {"height": height, "width": width, "num_frames": num_frames}
    size = dataclasses.replace(opened.size, **{key: value for key, value in changes.items() if value is not None})
    opened.model.geometry.check(size.height, size.width, size.num_frames)
    return dataclasses.replace(opened, size=size, batch=batch, num_images=num_images)


def _find_published(name: str) -> PublishedModel | None:
    if name in EMBEDDED_FOLDERS or os.path.exists(name):
        return None
    found = next((each for each in published_models() if name in (each.name, each.model_path)), None)
    if found is None:
        raise ConfigError(
            f"MODEL: {shown(name)} is neither a folder nor a published model.{named_alike(name)} Expected a name that "
            "`diffusion-runtime models` lists, or a diffusers folder"
        )
    return found


def is_published(name: str) -> bool:
    """Return True if a name is that of a model without weights here: a name of `models` or a hub id, and no folder.
    Raises ConfigError for an unknown name."""
    return _find_published(name) is not None


def published_files(name: str) -> FolderFiles:
    """Return the json files of a published model's folder. Raises ConfigError for an unknown name."""
    published = _find_published(name)
    if published is None:
        raise ConfigError(f"MODEL: {shown(name)} is not a published model")
    return _published_files(published)


def _published_files(published: PublishedModel) -> FolderFiles:
    return published_folders()[published.model_path.rpartition("/")[2]]


def _folder_files(name: str) -> FolderFiles:
    """Return the json that a family reads, of a folder with or without weights."""
    folder = resolve_model_folder(name)
    paths = [folder / INDEX_FILE, folder / "generation.json", *sorted(folder.glob("[!.]*/*config.json"))]
    return {path.relative_to(folder).as_posix(): read_json(path) for path in paths if path.is_file()}


def _num_blocks(config: Mapping[str, Any]) -> int:
    return sum(config[key] for key in _BLOCK_COUNTS if isinstance(config.get(key), int))


def _cut(config: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    counts = {key: config[key] for key in _BLOCK_COUNTS if isinstance(config.get(key), int)}
    most = max(counts.values(), default=0)
    if not 1 <= num_layers <= most:
        raise ConfigError(f"--layers: expected 1 to {most} for this model, got {num_layers}")
    return {key: max(1, round(count * num_layers / most)) for key, count in counts.items()}


# The length of the clips that most models make by default.
_SECONDS = 5.0


def _default_size(model: Model[Any, Any], published: PublishedModel | None) -> ClipSize:
    """Return the size of a request that gives none."""
    values = {**model.defaults, **model.generation.defaults, **({} if published is None else published.request)}
    references = model.inputs.references
    if references is not None and references.sized_by is not None:
        # Of an image that is a square.
        square = references.encoded_size((1024, 1024))
        values = {**dict(zip(("height", "width"), square, strict=True)), **values}
    if model.sampling.restoration is not None:
        # Of a file that comes with each request.
        values = {"height": 720, "width": 1280, "num_frames": values.get("segment_frames"), **values}
    if values.get("max_seconds") is not None and values.get("num_frames") is None:
        # A length that each prompt decides.
        bounds = LengthBounds(values["min_seconds"], values["max_seconds"], values["fps"], model.geometry.frame_rule)
        values["num_frames"] = bounds.num_frames(_SECONDS)
    missing = [key for key in ("height", "width") if values.get(key) is None]
    if missing:
        raise RequestError(f"{' and '.join(missing)}: this model has no size of its own; give --height and --width")
    return ClipSize(values["height"], values["width"], values.get("num_frames") or 1, values.get("fps") or 1)


def _text_tokens(files: FolderFiles) -> int | None:
    """Return the number of tokens that a folder's tokenizer makes room for, if less than models of its kind have, else
    None."""
    room = files.get("tokenizer/tokenizer_config.json", {}).get("model_max_length")
    return room if isinstance(room, int) and room <= 512 else None
