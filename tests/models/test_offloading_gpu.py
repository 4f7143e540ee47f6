"""Offloading on a real GPU: the same bits, memory within the plan, copies that are pinned, ahead and given back."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_families import WRITERS, small_request

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import DeviceMemoryError
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.device_memory import num_shortages, shortage_remark

pytestmark = pytest.mark.gpu
FolderOf = Callable[[str], Path]
DEVICE = "cuda"


def load(folder: str, offload: str, num_resident: int = 0, **values: Any) -> Pipeline:
    """With so many blocks of each part on the device, whatever fits."""
    prepared = prepare(RuntimeConfig(model_path=folder, device=DEVICE, offload=offload, **values)).planned_for(())
    assert isinstance(prepared, PreparedModel)
    plan = prepared.description.memory
    assert plan is not None
    resident = dict.fromkeys(("text_encoder", "transformer", "transformer_2"), num_resident)
    plan = dataclasses.replace(plan, resident=resident if offload == "layers" else {}, keeps_transformer=False)
    description = dataclasses.replace(prepared.description, memory=plan)
    return dataclasses.replace(prepared, description=description).load()


@pytest.mark.parametrize("family", WRITERS)
def test_streamed_and_resident_make_the_same_bits(family: str, tiny_folder_of: FolderOf) -> None:
    folder = str(tiny_folder_of(family))
    whole = load_pipeline(folder, device=DEVICE, offload="none")
    request = small_request(whole, 3)
    expected = whole(request).frames
    for offload, num_resident in (("model", 0), ("layers", 0), ("layers", 1)):
        pipeline = load(folder, offload, num_resident)
        assert pipeline.parts.offloading is not None
        for _ in range(2):
            assert numpy.array_equal(pipeline(request).frames, expected), (offload, num_resident)
        assert all(part.arena.is_pinned for part in pipeline.parts.offloading.parts)
        pipeline.close()


@pytest.mark.parametrize(
    ("model_path", "values"), [("shapes", {"quantization": "fp8"}), ("emoji", {"lora": ["emoji-fast"]})]
)
def test_an_embedded_model_with_what_is_made_while_loading(model_path: str, values: dict[str, Any]) -> None:
    request = GenerationRequest(prompt="a red circle", num_inference_steps=10, step_cache="easycache", seed=1)
    whole = load_pipeline(model_path, device=DEVICE, offload="none", **values)
    pipeline = load(model_path, "layers", 1, **values)
    assert numpy.array_equal(pipeline(request).frames, whole(request).frames)
    pipeline.set_loras([])
    whole.set_loras([])
    assert numpy.array_equal(pipeline(request).frames, whole(request).frames)


def test_auto_keeps_everything_where_it_fits_and_a_limit_is_kept() -> None:
    prepared = prepare(RuntimeConfig("shapes", device=DEVICE)).planned_for(())
    assert prepared.description.memory is not None
    assert prepared.description.memory.offload == "none"
    with pytest.raises(DeviceMemoryError, match="What would fit"):
        load_pipeline("shapes", device=DEVICE, memory_limit="60MB")


def test_the_plan_holds_for_several_sizes() -> None:
    """The peak that torch's allocator sees is below the plan's, whose workspace a small model does not take."""
    for height, num_frames in ((128, 5), (256, 29), (512, 29)):
        request = GenerationRequest(prompt="a star", height=height, width=256, num_frames=num_frames, seed=1)
        prepared = prepare(RuntimeConfig("shapes", device=DEVICE, offload="none"))
        request = prepared.rules.resolve(request)
        plan = prepared.planned_for([request]).description.memory
        assert plan is not None
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pipeline = load_pipeline("shapes", device=DEVICE, offload="none")
        pipeline(request)
        peak = torch.cuda.max_memory_allocated() - before
        print(height, num_frames, peak / 1e6, {phase: each / 1e6 for phase, each in plan.phases.items()})
        assert peak <= plan.peak, (height, num_frames)
        pipeline.close()


def test_closing_unpins_and_frees() -> None:
    left = []
    # The first generation makes workspaces that libraries keep.
    for _ in range(2):
        pipeline = load("shapes", "layers", 0)
        assert pipeline.parts.offloading is not None
        arenas = [part.arena for part in pipeline.parts.offloading.parts]
        assert all(arena.is_pinned for arena in arenas)
        pipeline(GenerationRequest(prompt="a star", num_inference_steps=2, seed=1))
        pipeline.close()
        assert not any(arena.is_pinned for arena in arenas)
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[1] - left[0] < 2**20


def test_a_convolution_without_its_workspace_is_counted() -> None:
    """cuDNN computes with another algorithm then and says nothing."""
    device = torch.device(DEVICE, 0)
    x = torch.randn(1, 256, 1024, 1024, device=device, dtype=torch.bfloat16)
    convolution = torch.nn.Conv2d(256, 128, 3, padding=1, device=device, dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    before = num_shortages(device)
    total = torch.cuda.get_device_properties(device).total_memory
    room = torch.cuda.memory_reserved(device) + x.nbytes // 2 + 32 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / total, device)
    try:
        convolution(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert num_shortages(device) > before
    assert shortage_remark(device) is not None
