"""Stand-ins of the classes of ComfyUI's V3 interface that our nodes use, as its documentation names them."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch

FOLDER = Path(__file__).parents[1] / "comfyui"


class Interrupted(Exception):
    """As ComfyUI's InterruptProcessingException."""


@dataclass
class Socket:
    """An input or output. io_type: of its links; name: of an input."""

    io_type: str
    name: str = ""
    optional: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def _type(name: str) -> Any:
    def make_input(id: str, *, optional: bool = False, **more: Any) -> Socket:
        return Socket(name, id, optional, more)

    return SimpleNamespace(Input=make_input, Output=lambda display_name="": Socket(name, display_name))


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    inputs: list[Socket]
    outputs: list[Socket]
    description: str = ""


class NodeOutput(tuple[Any, ...]):
    """The outputs of a node, in their order."""

    def __new__(cls, *values: Any) -> NodeOutput:
        return super().__new__(cls, values)


class VideoFromFile:
    """A video as ComfyUI's nodes hand it on."""

    def __init__(self, file: Any) -> None:
        self.content = file.getvalue()

    def get_components(self) -> Any:
        from diffusion_runtime.media.clips import read_pictures

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "clip.mp4"
            path.write_bytes(self.content)
            frames = [numpy.asarray(picture) for picture in read_pictures(str(path), "video", 1000)]
        images = torch.from_numpy(numpy.stack(frames)).float() / 255
        return SimpleNamespace(images=images, audio=None)


class Recorded:
    """What the nodes tell ComfyUI. is_interrupted: whether its user has pressed cancel."""

    def __init__(self) -> None:
        self.progress: list[tuple[float, float]] = []
        self.is_interrupted = False

    def check(self) -> None:
        if self.is_interrupted:
            raise Interrupted


def load(recorded: Recorded) -> ModuleType:
    """Return our extension, loaded as ComfyUI loads a folder of custom nodes."""
    types_of = {
        name: _type(name.upper())
        for name in ("String", "Int", "Float", "Image", "Mask", "Video", "Audio", "Model", "Latent")
    }
    node = type("ComfyNode", (), {})
    io = SimpleNamespace(ComfyNode=node, Schema=Schema, NodeOutput=NodeOutput, Custom=_type, **types_of)
    latest: Any = types.ModuleType("comfy_api.latest")
    latest.io, latest.ComfyExtension = io, type("ComfyExtension", (), {})
    latest.InputImpl = SimpleNamespace(VideoFromFile=VideoFromFile)
    management: Any = types.ModuleType("comfy.model_management")
    management.throw_exception_if_processing_interrupted = recorded.check
    utils: Any = types.ModuleType("comfy.utils")
    utils.ProgressBar = lambda most: SimpleNamespace(
        update_absolute=lambda value: recorded.progress.append((value, most))
    )
    sys.modules |= {
        "comfy_api": types.ModuleType("comfy_api"),
        "comfy_api.latest": latest,
        "comfy": types.ModuleType("comfy"),
        "comfy.model_management": management,
        "comfy.utils": utils,
    }
    spec = importlib.util.spec_from_file_location("comfy_nodes_under_test", FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
