"""Modules without weights, and what is kept of those that a plan of memory builds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from published_configs import write_published
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.decoders.autoencoder import COMPONENT
from diffusion_runtime.models.flux1.family import FAMILY


class Operators(TorchDispatchMode):
    """Names of the operators that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def modules() -> nn.Module:
    layers = [nn.Linear(3, 4), nn.Conv2d(2, 3, 3), nn.LayerNorm(5), nn.Embedding(6, 2), nn.BatchNorm1d(2)]
    nn.init.trunc_normal_(nn.Parameter(torch.empty(3)))
    return nn.ModuleList(layers)


def test_modules_are_those_of_the_meta_device_and_nothing_is_filled() -> None:
    with torch.device("meta"):
        expected = modules().state_dict()
    with Operators() as computed, empty_modules():
        found = modules().state_dict()
    assert {name: (x.device, x.shape, x.dtype) for name, x in found.items()} == {
        name: (x.device, x.shape, x.dtype) for name, x in expected.items()
    }
    assert not [name for name in computed.names if any(part in name for part in ("uniform", "normal", "fill", "zero_"))]


def test_tensors_that_hold_numbers_are_filled() -> None:
    with empty_modules():
        numbers = torch.empty(4, device="cpu")
        nn.init.constant_(numbers, 2.0)
        assert numbers.tolist() == [2.0] * 4
        assert numbers.zero_().tolist() == [0.0] * 4
    assert nn.Linear(2, 2).weight.abs().sum() > 0


def test_sizes_of_a_component_follow_its_settings(tmp_path: Path) -> None:
    write_published(tmp_path, "FLUX.1-dev")
    autoencoder = next(each for each in FAMILY.files.diffusers_components if each.name == COMPONENT)
    file = tmp_path / COMPONENT / "config.json"
    for channels in (16, 4):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"latent_channels": channels}))
        folder = ModelFolder(tmp_path)
        state = autoencoder.build(folder).state_dict()
        for dtype in (torch.float32, torch.bfloat16):
            found = {each.name: each.num_bytes(dtype) for each in autoencoder.tensors(folder)}
            assert found == {name: tensor.to(dtype).nbytes for name, tensor in state.items()}
