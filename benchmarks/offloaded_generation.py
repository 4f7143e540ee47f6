"""Whole generations of models that do not fit a card, with random weights of their published shapes (offload_gpu.py).

The text encoder is a stand-in: as many linear layers as it has blocks, with as many bytes, over 512 tokens. Its copies
and its products are those of the real one; the conditions are random.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig
from diffusion_runtime.benchmark.random_pipeline import RandomConditions, random_decoder
from diffusion_runtime.benchmark.step_model import open_step_model, published_files
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel, fill_transformer
from diffusion_runtime.memory.machine_memory import free_in_machine
from diffusion_runtime.memory.offloaded_part import arena_for
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.memory.plan import OFFLOADS, MemoryDemand, MemoryPlan, PartSize, make_plan, plans_of
from diffusion_runtime.memory.transfers import transfers_of
from diffusion_runtime.models.published_folders import write_folder
from diffusion_runtime.models.random_weights import draw_weight, fill_randomly
from diffusion_runtime.profiling.instruments import watched_latents
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder

GB = 10**9
DTYPE = torch.bfloat16
NUM_TEXT_TOKENS = 512
PROMPT = "a red circle moves to the right"


@dataclass(frozen=True)
class Generation:
    """name: of `models`. encoder: its text encoder's bytes. limit: of the device, 0 for one that lets a few blocks
    stay. values: of the request; changes: of the folder's json by file, for sizes that a CPU computes."""

    name: str
    encoder: PartSize
    limit: int
    values: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


# UMT5-XXL, and the 30 layers of Mistral Small 3.1 that FLUX.2 reads, in bfloat16; the rest are embeddings.
_UMT5 = PartSize("text_encoder", 24 * 385_892_352 + 2_100_297_728, (385_892_352,) * 24)
_MISTRAL = PartSize("text_encoder", 34_687_518_720, (1_111_511_040,) * 30)
# Fewer steps than anybody asks for: four of 40 and eight of 50, so that a row takes minutes. What is moved once a
# generation weighs more against them than it would.
GENERATIONS: Mapping[str, Generation] = {
    "wan-a14b": Generation("wan2.2-t2v-a14b", _UMT5, 24 * GB, {"num_inference_steps": 4}),
    "flux2": Generation("flux.2-dev", _MISTRAL, 24 * GB, {"num_inference_steps": 8}),
}
_NARROW = {"num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "num_layers": 6}
TINY_GENERATIONS: Mapping[str, Generation] = {
    "tiny-a14b": Generation(
        "wan2.2-t2v-a14b",
        PartSize("text_encoder", 6 * 65536 + 131072, (65536,) * 6),
        0,
        {"num_inference_steps": 4, "height": 32, "width": 32, "num_frames": 5},
        {
            "transformer/config.json": _NARROW,
            "transformer_2/config.json": _NARROW,
            "vae/config.json": {"base_dim": 8},
        },
    ),
}


class LinearEncoder(TextEncoder):
    """Linear layers of an encoder's bytes. conditions: what it answers with."""

    max_tokens = NUM_TEXT_TOKENS
    library = "none"
    implementation = "linear layers of as many bytes"

    def __init__(self, part: PartSize, conditions: RandomConditions) -> None:
        # A power of two that divides every block.
        self.width = 4096 if min(part.blocks) > GB // 10 else 64
        self.conditions = conditions
        self.module = nn.Module()
        with torch.device("meta"):
            self.module.blocks = nn.ModuleList(self._layer(num_bytes) for num_bytes in part.blocks)
            self.module.table = self._layer(part.rest)

    def _layer(self, num_bytes: int) -> nn.Linear:
        return nn.Linear(self.width, num_bytes // (DTYPE.itemsize * self.width), bias=False, dtype=DTYPE)

    def encode(self, prompts: Sequence[str]) -> Conditions:
        x = torch.ones(NUM_TEXT_TOKENS, self.width, dtype=DTYPE, device=self.conditions.device)
        blocks = self.module.blocks
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = F.layer_norm(x + block(x).mean(-1, keepdim=True), (self.width,))
        return self.conditions.encode(prompts)


@torch.no_grad()
def fill_encoder(encoder: LinearEncoder, device: torch.device, offloading: Offloading | None) -> TextEncoder:
    """With random weights, made on the device and held where they wait."""
    arena = None if offloading is None else arena_for(encoder.module)
    for name, parameter in encoder.module.state_dict().items():
        made = torch.empty(parameter.shape, dtype=DTYPE, device=device) if arena is None else None
        place = made if arena is None else arena.empty(parameter.shape, DTYPE)
        assert place is not None
        draw_weight(name, place, device)
        encoder.module.load_state_dict({name: place}, assign=True, strict=False)
    encoder.module.requires_grad_(False)
    if offloading is None:
        return encoder
    assert arena is not None
    blocks = encoder.module.blocks
    assert isinstance(blocks, nn.ModuleList)
    offloading.add_text_encoder(encoder.module, arena, list(blocks))
    return OffloadedTextEncoder(encoder, offloading.use_text_encoders)


@dataclass(frozen=True)
class Opened:
    """A generation's model without weights, its request, and what it takes."""

    prepared: PreparedModel
    request: GenerationRequest
    demand: MemoryDemand
    folder: Path


def open_generation(row: Generation, folder: Path, device: torch.device) -> Opened:
    files = {path: {**values, **row.changes.get(path, {})} for path, values in published_files(row.name).items()}
    write_folder(folder, files)
    config = RuntimeConfig(model_path=str(folder), device=str(device), dtype="bfloat16")
    prepared = prepare(config)
    assert isinstance(prepared, PreparedModel)
    request = prepared.rules.resolve(GenerationRequest(PROMPT, seed=1, **row.values))
    demand = prepared._largest_demand(prepared.transformer, [request])
    assert demand is not None
    return Opened(prepared, request, replace(demand.demand, text=row.encoder), folder)


def plans_for(row: Generation, opened: Opened, host_limit: int | None = None) -> tuple[MemoryPlan, MemoryPlan]:
    """(all on the device, what `auto` does under the limit). host_limit: of the machine, None for any."""
    limit = row.limit
    if limit == 0:
        blocks = [max(part.blocks) for part in opened.demand.transformers]
        limit = plans_of(opened.demand, 1, ["layers"])[0].peak + max(blocks)
    return make_plan(opened.demand, ["none"], None), make_plan(opened.demand, OFFLOADS, limit, host_limit)


def build(row: Generation, opened: Opened, plan: MemoryPlan, device: torch.device) -> Pipeline:
    prepared = opened.prepared
    offloading = None if plan.offload == "none" else Offloading(plan, transfers_of(device))
    step = open_step_model(row.name, changes=row.changes.get("transformer/config.json", {}))
    encoder = LinearEncoder(row.encoder, RandomConditions(step, device, DTYPE))
    with torch.inference_mode(False), torch.no_grad():
        text_encoder = fill_encoder(encoder, device, offloading)
        fill_transformer(
            prepared.model,
            prepared.transformer,
            offloading,
            lambda room_for: fill_randomly(prepared.model, prepared.transformer, device, DTYPE, room_for=room_for),
        )
        decoder = random_decoder(prepared, opened.folder)
    return Pipeline(
        text_encoder=text_encoder,
        transformer=prepared.transformer,
        decoder=decoder,
        rules=prepared.rules,
        load_image_conditioner=lambda: prepared.model.load_image_conditioner(device, DTYPE),
        device=device,
        dtype=DTYPE,
        recipe=prepared.description.to_dict(),
        quantization=prepared.quantization,
        offloading=offloading,
    )


def _num_equal(latents: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> int:
    """Steps from the first on whose latents are the expected ones, bit for bit."""
    pairs = enumerate(zip(latents, expected, strict=True))
    return next((index for index, (found, wanted) in pairs if not torch.equal(found, wanted)), len(latents))


def _num_shortages(device: torch.device) -> int:
    """Allocations that the device refused so far, those that a library did without included."""
    return int(torch.cuda.memory_stats(device)["num_ooms"]) if device.type == "cuda" else 0


def run_generation(name: str, row: Generation, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for all weights on the device, then one under the limit, with the same frames."""
    frames, seconds = None, 0.0
    expected_latents: list[torch.Tensor] = []
    for limited in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            opened = open_generation(row, Path(folder), device)
            plan = plans_for(row, opened, free_in_machine())[limited]
            started = time.perf_counter()
            pipeline = build(row, opened, plan, device)
        fill_s = time.perf_counter() - started
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(plan.limit / total if plan.limit else 1.0, device)
        try:
            # What is compiled and captured at the first use.
            first = pipeline(replace(opened.request, num_inference_steps=2))
            latents: list[torch.Tensor] = []
            shortages = _num_shortages(device)
            with watched_latents(pipeline, lambda _, at, into=latents: into.append(at.cpu())):
                started = time.perf_counter()
                media = pipeline(opened.request)
                taken = time.perf_counter() - started
            shortages = _num_shortages(device) - shortages
        finally:
            if device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, device)
        is_identical = frames is None or numpy.array_equal(frames, media.frames)
        parts = () if pipeline.parts.offloading is None else pipeline.parts.offloading.parts
        yield {
            "case": name,
            "model": row.name,
            "values": dict(row.values),
            "offload": plan.offload,
            "limit_gb": None if plan.limit is None else plan.limit / GB,
            "is_identical": is_identical,
            "same_steps": len(latents) if frames is None else _num_equal(latents, expected_latents),
            "shortages": shortages,
            "resident_blocks": dict(plan.resident),
            "is_pinned": [part.arena.is_pinned for part in parts],
            "late_copies": {part.name: part.stream.num_late_copies for part in parts if part.stream is not None},
            "fill_s": fill_s,
            "generation_s": taken,
            "over_resident": taken / seconds if limited else 1.0,
            "timings": dict(media.timings),
            "first_timings": dict(first.timings),
            "peak_gb": media.peak_memory.get("device", 0) / GB,
            "planned_gb": plan.peak / GB,
            "planned_parts": {phase: dict(each) for phase, each in plan.parts.items()},
            "machine_peak_gb": media.peak_memory["machine"] / GB,
        }
        if not is_identical:
            raise ValueError(f"{name}: the frames are not those of all weights on the device")
        frames, expected_latents, seconds = media.frames, latents, taken
        pipeline.close()
        del pipeline, opened, parts
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
