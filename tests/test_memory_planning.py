"""The plan of a model and its requests: which limit holds, which choices are open, which request decides."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.core.memory_size import size_text
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ConfigError, DeviceMemoryError
from diffusion_runtime.loading import memory_planning, prepare
from diffusion_runtime.loading.memory_planning import (
    PlannedDemand,
    fitting_offloads,
    may_exceed_the_machine,
    plan_memory,
)
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.plan import MemoryDemand, MemoryPlan, PartSize

GB = 10**9
DEMAND = PlannedDemand(
    MemoryDemand(
        PartSize("text_encoder", 11 * GB, (GB // 3,) * 24),
        (PartSize("transformer", 28 * GB, (650 * 10**6,) * 40),),
        PartSize("decoder", GB // 4),
        GB // 10,
        3 * GB,
        4 * GB,
    ),
)
CUDA = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes of a stand-in GPU and its machine."""
    free = {"device": 80 * GB, "machine": 100 * GB}
    monkeypatch.setattr(memory_planning, "free_on_device", lambda _: free["device"])
    monkeypatch.setattr(memory_planning, "free_in_machine", lambda: free["machine"])
    return free


def chosen(**values: str) -> str:
    plan = plan_memory(DEMAND, RuntimeConfig(**values), CUDA)  # type: ignore[arg-type]
    assert plan is not None
    return plan.offload


def test_the_smaller_of_the_limit_and_what_is_free_decides(machine: dict[str, int]) -> None:
    assert chosen() == "none"
    assert chosen(memory_limit="40GB") == "model"
    assert chosen(memory_limit="12GB") == "layers"
    assert chosen(memory_limit="40GB", offload="layers") == "layers"
    machine["device"] = 24 * GB
    assert chosen() == "layers"
    assert chosen(memory_limit="40GB") == "layers"
    with pytest.raises(DeviceMemoryError, match=r"What would fit: --offload layers$"):
        chosen(offload="none")
    machine["machine"] = 30 * GB
    with pytest.raises(DeviceMemoryError, match=r"take 39.00 GB of the machine's memory, and 30.00 GB are free"):
        chosen()


def test_where_nothing_can_be_planned_a_choice_that_needs_a_plan_is_refused() -> None:
    assert plan_memory(None, RuntimeConfig(), CUDA) is None
    for values in ({"offload": "model"}, {"memory_limit": "12GB"}):
        with pytest.raises(ConfigError, match="cannot be computed"):
            plan_memory(None, RuntimeConfig(**values), CUDA)  # type: ignore[arg-type]


def test_the_largest_request_is_planned_for_and_a_shortage_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(RuntimeConfig("shapes", device="cpu"))
    assert isinstance(prepared, PreparedModel)
    small, large = (
        prepared.rules.resolve(GenerationRequest(prompt="a star", height=64, width=64, num_frames=number, seed=1))
        for number in (5, 29)
    )
    plans = [prepared.planned_for(each).description.memory for each in ((small,), (small, large), (large,), ())]
    steps = [plan.demand.step_activations for plan in plans if plan is not None]
    assert steps[0] < steps[1] == steps[2] < steps[3]
    monkeypatch.setattr(memory_planning, "share_of_device", lambda _: 12 * GB)
    description = dataclasses.replace(prepared.description, memory=None)
    said = fitting_offloads(DEMAND, description, CUDA)
    assert said.startswith("--offload layers fits: it takes 11.")
    assert fitting_offloads(None, description, CUDA) == ""


def test_of_requests_of_one_size_the_one_with_most_images_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(RuntimeConfig("shapes", device="cpu"))
    assert isinstance(prepared, PreparedModel)
    request = prepared.rules.resolve(GenerationRequest(prompt="a star", seed=1))
    planned = []
    monkeypatch.setattr(memory_planning, "demand_of", lambda *arguments, **_: planned.append(arguments[3]))
    prepared.planned_for([request, dataclasses.replace(request, image_path="first.png")])
    assert [each.request.image_path for each in planned] == ["first.png"]


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (90, "takes 99 MB at once, and 90 MB of the machine are free; --memory-limit 87MB fits, and reads blocks from"),
        (60, "too few even with --memory-limit, .* What would fit beside it: 76 MB of memory, --dtype bfloat16 "),
        (80_000, ""),
    ],
)
def test_a_model_beyond_the_machine_says_so_before_it_is_loaded(
    free: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_planning, "free_in_machine", lambda: free * 10**6)
    # Its files have 8.6 MB: activations are two thirds of what so small a model takes.
    monkeypatch.setattr(memory_planning, "_LARGE_FACTOR", 12)
    prepared = prepare(RuntimeConfig("shapes", device="cpu"))
    assert isinstance(prepared, PreparedModel)

    def fail(*_: object) -> None:
        raise InterruptedError

    # What comes after the plan.
    monkeypatch.setattr(PreparedModel, "_offloading", fail)
    with pytest.raises(InterruptedError):
        prepared.load()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(said)
    assert all(re.search(said, warning) for warning in warnings)
    memory = prepared.planned_for([]).description.memory
    assert memory is not None
    assert dict(memory.rows())["device, at most"] == f"99 MB of {size_text(free * 10**6)} that are free"


def test_a_model_whose_weights_alone_take_all_there_is_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(RuntimeConfig("shapes", device="cpu"))
    assert isinstance(prepared, PreparedModel)
    model, memory = prepared.model, prepared.planned_for([]).description.memory
    assert memory is not None
    demand = memory.demand
    weights = demand.text.total + demand.transformers[0].total + demand.decoder.total
    # The files are in 8 bits, and dequantised at load.
    stored = sum(path.stat().st_size for path in Path(model.folder / "").rglob("*.safetensors"))
    assert weights > 3 * stored
    monkeypatch.setattr(memory_planning, "free_in_machine", lambda: weights)
    assert may_exceed_the_machine(model)
    # In place of a text encoder of 0.4 MB, one of 0.4 GB.
    monkeypatch.setattr(memory_planning, "free_in_machine", lambda: 2 * weights)
    assert not may_exceed_the_machine(model)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(400 * 10**6)
    assert isinstance(model.folder, ModelFolder)
    weights_elsewhere = dataclasses.replace(model.weights, folder=model.folder.with_parts({"text_encoder": tmp_path}))
    assert may_exceed_the_machine(dataclasses.replace(model, weights=weights_elsewhere))


def test_what_is_named_where_nothing_fits_does_fit_and_takes_what_is_said() -> None:
    def plan(limit: str, **values: Any) -> MemoryPlan:
        request = {
            name: values.pop(name) for name in ("guidance_mode", "height", "width", "num_frames") if name in values
        }
        prepared = prepare(RuntimeConfig("shapes", device="cpu", memory_limit=limit, **values))
        found = prepared.planned_for([prepared.rules.resolve(GenerationRequest("a star", seed=1, **request))])
        assert found.description.memory is not None
        return found.description.memory

    with pytest.raises(DeviceMemoryError) as caught:
        plan("60MB")
    more, *ways = str(caught.value).partition("What would fit: ")[2].split(", ")
    assert plan(more.removeprefix("--memory-limit ")).offload == "layers"
    assert [way.split()[0] for way in ways] == ["--dtype", "--guidance-mode", "--height", "--num-frames"]
    for way in ways[1:3]:
        flags, _, size = way.rstrip(")").partition(" (")
        words = flags.split()
        values = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        sizes = {name: int(value) for name, value in values.items() if value.isdecimal()}
        assert size_text(plan("60MB", **{**values, **sizes}).peak) == size, way
