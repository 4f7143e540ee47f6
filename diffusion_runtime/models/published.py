"""Published models by name, from published.yaml: hub id, sizes, request values and presets; known without torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion_runtime.untrusted.json_text import read_json_file
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

PUBLISHED_FILE = Path(__file__).with_name("published.yaml")
_ASSETS = Path(__file__).parents[1] / "assets"
# Components that prompts go through.
_TEXT_PARTS = ("text_encoder", "connectors")
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PublishedModel:
    """A model folder that others publish.

    name: short, that of its file in configs/. model_path: a hub id, or an embedded name. makes: in words, such as
    `video`, `video from two images` or `image from text or images`. images: the request fields of files that it takes
    -> whether it needs one. parameters: of each component, in billions. stored_bytes: of one stored number, for the
    size of the download. told_by: a word that names of its files have, where another model has the same tensors; empty
    for none. files_alone: whether the hub has no folder of it that could be read, and users have its files. workflow:
    of RuntimeConfig, that its folder is opened for; None for the first one. parts: the keys of RuntimeConfig that name
    further folders of it, such as `upsampler_path` -> the class in such a folder. request, presets: the values it was
    made for, as its authors document them.
    """

    name: str
    family: str
    model_path: str
    makes: str
    parameters: tuple[tuple[str, float], ...]
    stored_bytes: int = 2
    told_by: str = ""
    files_alone: bool = False
    workflow: str | None = None
    images: Mapping[str, bool] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_download(self) -> bool:
        """True for a model on the hub, False for the embedded ones."""
        return "/" in self.model_path

    @property
    def total_billions(self) -> float:
        return sum(billions for _, billions in self.parameters)

    @property
    def download_gb(self) -> float:
        """Size of the hub's download in 10 ** 9 bytes; 0 for an embedded one."""
        return sum(self.downloads_gb.values())

    @property
    def downloads_gb(self) -> Mapping[str, float]:
        """Size of the download by component, in 10 ** 9 bytes."""
        return {name: billions * self.stored_bytes for name, billions in self.parameters} if self.is_download else {}

    def memory_gb(self, dtype: str) -> float:
        """Return the memory of all components' weights in 10 ** 9 bytes; what a generation adds depends on its size."""
        return self.total_billions * BYTES_OF[dtype]

    def offloaded_gb(self, dtype: str) -> float:
        """Return the same with `--offload model`: the text encoders, or one transformer, plus everything that stays.
        With `layers` it is less."""
        text = sum(billions for name, billions in self.parameters if name.startswith(_TEXT_PARTS))
        transformers = [billions for name, billions in self.parameters if name.startswith("transformer")]
        return (self.total_billions - text - sum(transformers) + max(text, *transformers)) * BYTES_OF[dtype]


@functools.cache
def published_models() -> tuple[PublishedModel, ...]:
    """Return every published model that a family here loads, the embedded ones first."""
    return tuple(_model(name, entry) for name, entry in read_packaged_yaml(PUBLISHED_FILE).items())


def embedded_names() -> frozenset[str]:
    """Return the names of the models inside the package."""
    return frozenset(model.name for model in published_models() if not model.is_download)


def _embedded_presets(name: str) -> Mapping[str, Any]:
    """Return the presets of an embedded model's own generation.json; its entry's are an example for configs."""
    path = _ASSETS / name.replace("-", "_") / "generation.json"
    presets: Mapping[str, Any] = read_json_file(path).get("presets", {})
    return presets


def _model(name: str, entry: Mapping[str, Any]) -> PublishedModel:
    published = entry["published"]
    is_embedded = entry["runtime"]["model_path"] == name
    return PublishedModel(
        name=name,
        family=published["family"],
        model_path=entry["runtime"]["model_path"],
        makes=published["makes"],
        parameters=tuple(published["parameters"].items()),
        stored_bytes=published.get("stored_bytes", 2),
        told_by=published.get("told_by", ""),
        files_alone=published.get("files_alone", False),
        workflow=entry["runtime"].get("workflow"),
        images={name: kind == "needed" for name, kind in published.get("images", {}).items()},
        parts=published.get("parts", {}),
        request={key: value for key, value in entry["request"].items() if value is not None},
        presets=_embedded_presets(name) if is_embedded else entry.get("presets", {}),
    )


def model_of_name(model_path: str) -> PublishedModel | None:
    """Return the published hub model that `model_path` names; None for a folder and for anything else."""
    named = next((model for model in published_models() if model.is_download and model.name == model_path), None)
    return None if named is None or os.path.exists(model_path) else named


def published_model_of(model_path: str, workflow: str | None = None) -> PublishedModel | None:
    """Return the published model of a name or a hub id; None for a folder and for anything else. workflow: of several
    models of one repository, the one of this workflow."""
    known = [each for each in published_models() if each.is_download and model_path in (each.name, each.model_path)]
    known.sort(key=lambda each: each.name != model_path and each.workflow != workflow)
    found = next(iter(known), None)
    return None if found is None or os.path.exists(model_path) else found


def published_defaults(name: str, *keys: str) -> dict[str, Any]:
    """Return the request values of a published model as the defaults of its family; `keys`: those alone.

    A negative prompt of words is its authors' suggestion and never a default; a blank is what it was trained with.
    """
    request = next(model.request for model in published_models() if model.name == name)
    negative_prompt = request.get("negative_prompt", "")
    own = {"negative_prompt": "" if negative_prompt.strip() else negative_prompt}
    values = {"fps": 1, "guidance_mode": "batched", **request, **own}
    return {key: values[key] for key in keys} if keys else values
