"""Offloading in every family: the frames of a model whose weights wait elsewhere are those of one that is all there."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from offloaded_pipelines import StrictTransfers, load_offloaded, planned
from tables import table
from tiny_families import WRITERS, given_to, small_request
from tiny_models import TINY_SIZES, write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.block_stack import BlockRunner
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.errors import ConfigError, DeviceMemoryError, ModelLoadError
from diffusion_runtime.generation.latent_denoiser import Denoised, LatentDenoiser
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.loading import native_model, prepare
from diffusion_runtime.loading.native_model import PreparedModel, build_transformer
from diffusion_runtime.memory import device_memory
from diffusion_runtime.memory.live_bytes import kept_bytes, peak_bytes
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.memory_demand import SAMPLER_COPIES, PlannedRequest, step_demand
from diffusion_runtime.text_encoders.interface import Conditions, TextStream
from diffusion_runtime.text_encoders.offloaded import modules_of

FolderOf = Callable[[str], Path]
SMALL = {"height": 64, "width": 64, "num_frames": 5}
# Leaves blocks out in the middle of the stack.
BLOCK_CACHE = "dbcache:F=1,B=1,W=1,R=10,force=true"
STREAMED = {"transformer": 0, "transformer_2": 1, "text_encoder": 0}


def offloaded(folder: str, offload: str, resident: Mapping[str, int] = STREAMED, **values: Any) -> Pipeline:
    """On a device that is strict about what is there."""
    transfers = StrictTransfers()
    pipeline = load_offloaded(folder, offload, resident if offload == "layers" else {}, transfers, **values)
    for part in offloading_of(pipeline).parts:
        transfers.hide(part.arena.bytes)
    return pipeline


def offloading_of(pipeline: Pipeline) -> Offloading:
    assert pipeline.parts.offloading is not None
    return pipeline.parts.offloading


def aligned(pipeline: Pipeline) -> Pipeline:
    """With the encoder's weights at addresses that torch would choose: those of a mapped file begin anywhere, and MKL
    sums in another order there."""
    for module in modules_of(pipeline.text_encoder):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
    return pipeline


class Comparing(BlockRunner):
    """Computes what TeaCache compares, of weights of the first block outside of its forward."""

    values: torch.Tensor

    def run(self, blocks: Any, streams: Any, step: Any, num_grid_tokens: int, modulated_input: Any = None) -> Any:
        self.values = modulated_input().values.clone()
        return super().run(blocks, streams, step, num_grid_tokens)


def forward(pipeline: Pipeline, encoder: Pipeline) -> tuple[torch.Tensor, torch.Tensor]:
    """The velocity of one forward pass, and what TeaCache compares. encoder: of the text."""
    runner = Comparing()
    latents, timestep, inputs = given_to(encoder)
    velocity = pipeline.transformer(latents, timestep, inputs, AttentionContext(block_runner=runner))
    return velocity, runner.values


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model that is all there, and what it made of a small request."""

    folder: str
    pipeline: Pipeline
    request: GenerationRequest
    frames: numpy.ndarray


@pytest.fixture(scope="module")
def whole_of(tiny_folder_of: FolderOf) -> Callable[[str], Whole]:
    """Call it with a family's name. Read only: tests share what it returns."""

    @functools.cache
    def whole(family: str) -> Whole:
        folder = str(tiny_folder_of(family))
        pipeline = aligned(load_pipeline(folder, device="cpu"))
        request = small_request(pipeline, 2)
        return Whole(folder, pipeline, request, pipeline(request).frames)

    return whole


@pytest.mark.parametrize("family", WRITERS)
def test_streamed_and_resident_make_the_same_frames(
    family: str, whole_of: Callable[[str], Whole], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = whole_of(family)
    velocity, modulated = forward(whole.pipeline, whole.pipeline)
    pipeline = offloaded(whole.folder, "layers")
    # The plan of the test stands, whatever a request with files takes.
    monkeypatch.setattr(type(pipeline.parts.memory), "make_room", lambda *_: None)
    assert numpy.array_equal(pipeline(whole.request).frames, whole.frames)
    found = forward(pipeline, whole.pipeline)
    assert torch.equal(found[0], velocity)
    assert torch.equal(found[1], modulated)
    assert any(part.stream is not None for part in offloading_of(pipeline).parts)
    pipeline.close()


def test_text_encoders_have_left_when_the_denoising_begins(
    tiny_folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is encoded there before the transformer is called."""
    pipeline = offloaded(str(tiny_folder_of("flux2")), "model")
    parts, denoise, present = offloading_of(pipeline).parts, LatentDenoiser.denoise, []

    def note(when: str) -> None:
        present.append((when, [part.name for part in parts if part.is_on_device]))

    def watched(*arguments: Any, **named: Any) -> Denoised:
        note("denoise")
        return denoise(*arguments, **named)

    modules_of(pipeline.text_encoder)[0].register_forward_hook(lambda *_: note("text"))
    monkeypatch.setattr(LatentDenoiser, "denoise", watched)
    pipeline(small_request(pipeline, 1))
    assert (present[0], present[-1]) == (("text", ["text_encoder"]), ("denoise", []))
    pipeline.close()


def from_files(folder: str, resident: Mapping[str, int], **values: Any) -> Pipeline:
    """On a CPU, with blocks that are read from their files while they run."""
    prepared = prepare(RuntimeConfig(model_path=folder, device="cpu", **values))
    assert isinstance(prepared, PreparedModel)
    return planned(prepared, "layers", resident, waits_in_files=True).load()


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.slow
def test_blocks_read_from_their_files_make_the_same_frames(family: str, whole_of: Callable[[str], Whole]) -> None:
    whole = whole_of(family)
    pipeline = from_files(whole.folder, {"transformer": 0, "transformer_2": 1, "text_encoder": 1})
    assert pipeline.parts.offloading is not None
    for _ in range(2):
        media = pipeline(whole.request)
        assert numpy.array_equal(media.frames, whole.frames)
        # The plan of a clip in segments lets a transformer stay, so that the next one does not read it again.
        kept = pipeline.parts.offloading.plan.keeps_transformer
        modules = (*(() if kept else (pipeline.transformer,)), *modules_of(pipeline.text_encoder))
        # Nothing stays of what was read: whoever computes with it computes NaN.
        waiting = [each for module in modules for each in module.parameters() if each.is_floating_point()]
        assert all(bool(each.isnan().all()) for each in waiting)
    assert any("read from its files" in note for note in media.attention_report.notes)
    # The encoder of a clip in segments is planned anew, and whole.
    part = "transformer" if family in ("seedvr2", "wan_animate_2", "scail_2") else "text_encoder"
    assert any(
        re.match(rf"offload: {part}: \d+ of \d+ blocks streamed from files, ", note)
        for note in media.attention_report.notes
    )
    pipeline.close()


def test_from_files_with_eight_bit_layers_and_lora_files_that_change(tmp_path: Path) -> None:
    request = GenerationRequest(prompt="a red circle", num_inference_steps=6, step_cache=BLOCK_CACHE, seed=1, **SMALL)
    values: dict[str, Any] = {"quantization": "fp8", "lora": ["emoji-fast"]}
    whole, pipeline = (
        load_pipeline("emoji", device="cpu", **values),
        from_files("emoji", {"transformer": 1}, **values),
    )
    for loras in (None, (), ("emoji-fast",)):
        if loras is not None:
            pipeline.set_loras(loras)
            whole.set_loras(loras)
        assert numpy.array_equal(pipeline(request).frames, whole(request).frames), loras
    # Two experts: the one that does not predict has no memory.
    folder = str(write_tiny_wan(tmp_path / "experts", boundary_ratio=0.8, num_layers=3))
    request = GenerationRequest(prompt="a red circle", **TINY_SIZES, num_inference_steps=4, seed=1)
    expected = load_pipeline(folder, device="cpu")(request).frames
    assert numpy.array_equal(from_files(folder, {"transformer": 1, "transformer_2": 0})(request).frames, expected)


def test_a_larger_request_than_the_model_was_loaded_for_is_planned_again() -> None:
    prepared = prepare(RuntimeConfig("shapes", device="cpu", memory_limit="36MB"))
    assert isinstance(prepared, PreparedModel)
    small, large, largest = (
        prepared.rules.resolve(
            GenerationRequest("a star", height=side, width=side, num_frames=number, num_inference_steps=1, seed=1)
        )
        for side, number in ((64, 5), (128, 29), (256, 29))
    )
    pipeline = prepared.load(None, [small])
    kept = []
    whole = load_pipeline("shapes", device="cpu")
    for request in (small, large, small):
        assert numpy.array_equal(pipeline(request).frames, whole(request).frames)
        plan = offloading_of(pipeline).plan
        assert plan.limit is not None
        assert plan.peak <= plan.limit
        _, part = offloading_of(pipeline).parts
        assert part.stream is not None
        assert part.stream.num_blocks == 6 - plan.resident["transformer"]
        kept.append(plan.resident["transformer"])
    # A batch takes what its samples take together.
    with pytest.raises(DeviceMemoryError, match=r"loaded for 1 x 128 x 128, 29 frames: where more"):
        pipeline.generate([large, large, large])
    with pytest.raises(
        DeviceMemoryError, match=r"in denoise, .* more than the 36 MB there are: activations of denoise"
    ):
        pipeline(largest)
    assert kept[0] > kept[1] == kept[2]
    assert numpy.array_equal(pipeline(small).frames, whole(small).frames)


def test_a_file_that_is_cut_between_two_blocks_ends_the_generation_with_an_error(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "wan", num_layers=3)
    pipeline = from_files(str(folder), {"transformer": 0})
    request = GenerationRequest(prompt="a red circle", **TINY_SIZES, num_inference_steps=2, seed=1)
    expected = pipeline(request).frames
    # Removed and replaced: the open file is still the old one.
    (file,) = (folder / "transformer").glob("*.safetensors")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(bytes(len(content)))
    assert numpy.array_equal(pipeline(request).frames, expected)
    pipeline = None
    file.write_bytes(content)
    pipeline = from_files(str(folder), {"transformer": 0})
    os.truncate(file, len(content) // 2)
    with pytest.raises(ModelLoadError, match="was cut off while it was read"):
        pipeline(request)
    assert not any(part.is_on_device for part in offloading_of(pipeline).parts)


def test_two_experts_take_turns(tmp_path: Path) -> None:
    folder = str(write_tiny_wan(tmp_path / "experts", boundary_ratio=0.8, num_layers=3))
    request = GenerationRequest(prompt="a red circle", **TINY_SIZES, num_inference_steps=4, seed=1)
    expected = load_pipeline(folder, device="cpu")(request).frames
    for mode in ("model", "layers"):
        pipeline = offloaded(folder, mode)
        media = pipeline(request)
        assert numpy.array_equal(media.frames, expected), mode
        first, second = (part for part in offloading_of(pipeline).parts if part.name != "text_encoder")
        # The last steps are the second one's; before decoding it left.
        assert not first.is_on_device
        assert not second.is_on_device
        assert any(note.startswith(f"offload: {mode} (of a test)") for note in media.attention_report.notes)


@pytest.mark.slow
def test_with_a_step_cache_eight_bit_layers_and_lora_files_that_change() -> None:
    values: dict[str, Any] = {"quantization": "fp8", "lora": ["emoji-fast"]}
    request = GenerationRequest(prompt="a red circle", num_inference_steps=6, step_cache=BLOCK_CACHE, seed=1, **SMALL)
    whole, pipeline = (
        load_pipeline("emoji", device="cpu", **values),
        offloaded("emoji", "layers", {"transformer": 1}, **values),
    )
    assert numpy.array_equal(pipeline(request).frames, whole(request).frames)
    # The new weights are computed of the files and written where the old ones wait.
    plain = load_offloaded("emoji", "layers", {"transformer": 1}, Readable(), **values)
    plain(request)
    plain.set_loras([])
    whole.set_loras([])
    assert numpy.array_equal(plain(request).frames, whole(request).frames)


class Readable(StrictTransfers):
    """Weights stay where they wait."""

    def copy(self, copies: Any, after: Any) -> Any:
        for target, source in copies:
            target.copy_(source)
        return 0


def test_an_interrupted_generation_leaves_nothing_on_the_device_or_pinned() -> None:
    transfers = StrictTransfers()
    pipeline = load_offloaded("shapes", "layers", {"transformer": 0}, transfers)
    for part in offloading_of(pipeline).parts:
        transfers.hide(part.arena.bytes)
    request = GenerationRequest(prompt="a red circle", num_inference_steps=3, seed=1, **SMALL)
    transfers.fails_at = 9
    with pytest.raises(KeyboardInterrupt):
        pipeline(request)
    assert not any(part.is_on_device for part in offloading_of(pipeline).parts)
    transfers.fails_at = None
    assert numpy.array_equal(pipeline(request).frames, load_pipeline("shapes", device="cpu")(request).frames)
    assert transfers.pins
    pipeline.close()
    assert transfers.pins == {}


def test_a_device_that_lost_memory_since_the_plan_is_said_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(RuntimeConfig("shapes", device="cpu", memory_limit="1GB"))
    assert isinstance(prepared, PreparedModel)
    for share, said in (
        (3 * 10**8, "other programs have left 300 MB of it since: end them, or try again, which plans"),
        (2 * 10**9, "loading: CUDA out of memory. A dtype of bfloat16 needs half"),
    ):
        monkeypatch.setattr(native_model, "share_of_device", lambda _, share=share: share)

        def fail(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(native_model, "load_transformer", fail)
        with pytest.raises(DeviceMemoryError, match=said):
            prepared.load()


def test_a_generation_without_memory_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline("shapes", device="cpu")
    monkeypatch.setattr(
        pipeline.parts.memory, "fitting", lambda _: "--offload layers fits: it takes 2.00 GB of 8.00 GB. "
    )

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pipeline.transformer.register_forward_pre_hook(fail)
    with pytest.raises(
        DeviceMemoryError, match=r"--offload layers fits: it takes 2\.00 GB of 8\.00 GB\. These need less"
    ):
        pipeline(GenerationRequest(prompt="a red circle", num_inference_steps=2, seed=1, **SMALL))


def test_a_device_that_refused_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline("shapes", device="cpu")
    request = GenerationRequest(prompt="a red circle", num_inference_steps=1, seed=1, **SMALL)
    assert not any("last bits" in note for note in pipeline(request).attention_report.notes)
    monkeypatch.setattr(device_memory, "num_shortages", lambda _: 3)
    (note,) = [note for note in pipeline(request).attention_report.notes if "last bits" in note]
    assert note.startswith("this process asked the device 3 times for memory that was not there")


# Heights in pixels.
SIZES = (64, 160)
# Steps whose rows of modulation are computed at the first of them.
NUMBERED = tuple(StepInfo(timestep=500.0 - index, next_timestep=0.0) for index in range(40))
# Of the counted activations against those of a real forward pass.
TOLERANCE = 0.1


@table("family", ("wan", "flux1", "hunyuan_video_15", "ltx2", "z_image"))
def test_planned_activations_are_those_of_a_forward_pass(
    family: str, tiny_folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where both are the eager formulas; a GPU's kernels are the business of a GPU's test."""
    monkeypatch.setenv(VARIABLE, "reference")
    prepared = prepare(RuntimeConfig(model_path=str(tiny_folder_of(family)), device="cpu"))
    assert isinstance(prepared, PreparedModel)
    model, geometry = (
        prepared.model,
        prepared.rules.sampling.geometry,
    )
    shapes = model.family.text.shapes(model.folder, model.config)
    streams = [TextStream(torch.zeros(1, *shape), (shape[0],)) for shape in shapes.streams]
    pooled = None if shapes.pooled_dim is None else torch.zeros(1, shapes.pooled_dim)
    text = Conditions.of(streams[0].embeddings, streams[0].lengths, pooled=pooled, further=streams[1:])
    # What the numbers are does not matter.
    real = build_transformer(model, prepared.policy, prepared.quantization).to_empty(device="cpu")
    for pixels in SIZES:
        size = ClipSize(pixels, 64, sum(model.geometry.frame_rule), 24)
        asked = GenerationRequest("a", num_inference_steps=len(NUMBERED))
        request = PlannedRequest(size, 1, False, False, asked, 1.0 if model.sampling.embeds_guidance else None)
        planned = step_demand(model, prepared.transformer, shapes, torch.float32, request).total
        latents = torch.zeros(1, *geometry.sample_shape(size))
        inputs = DenoiserInputs(text, size, request.guidance)

        def step(latents: torch.Tensor = latents, inputs: DenoiserInputs = inputs) -> tuple[object, object]:
            context = AttentionContext(step=NUMBERED[0])
            plan_steps(context.state, NUMBERED)
            return real(latents, torch.full((1,), NUMBERED[0].timestep), inputs, context), context

        measured = peak_bytes(step, latents.device) + SAMPLER_COPIES * latents.nbytes
        assert (1 - TOLERANCE) * measured <= planned <= (1 + TOLERANCE) * measured, (size, planned / measured)
        kept = kept_bytes(lambda: step()[1], latents.device)
        more = step_demand(model, prepared.transformer, shapes, torch.float32, request, num_others=1).total - planned
        assert (1 - TOLERANCE) * kept <= more <= (1 + TOLERANCE) * kept, (size, more / kept)


def test_sparse_attention_in_tiles_and_eight_bit_layers_are_planned_for(tiny_folder_of: FolderOf) -> None:
    """No backend is asked where there are shapes alone; rows of blocks take memory, and 8-bit rows less than 16-bit
    ones."""

    def planned(family: str, **values: Any) -> int:
        prepared = prepare(RuntimeConfig(model_path=str(tiny_folder_of(family)), device="cpu", **values))
        assert isinstance(prepared, PreparedModel)
        model = prepared.model
        shapes = model.family.text.shapes(model.folder, model.config)
        size = ClipSize(160, 160, sum(model.geometry.frame_rule), 24)
        request = PlannedRequest(
            size, 1, False, False, GenerationRequest("a"), 1.0 if model.sampling.embeds_guidance else None
        )
        return step_demand(model, prepared.transformer, shapes, prepared.policy.dtype, request).total

    vsa = {"per_role": {"self": {"backend": "vsa", "extra": {"sparsity": 0.6}}}}
    assert planned("wan", attention=vsa) > planned("wan")
    for family in ("wan", "flux1", "flux2", "z_image"):
        whole, quantized = (planned(family, dtype="bfloat16", quantization=mode) for mode in ("none", "fp8-all"))
        assert quantized <= whole, family


def test_weights_by_part_are_those_that_load(tiny_folder_of: FolderOf) -> None:
    for family in ("wan", "flux2"):
        folder = str(tiny_folder_of(family))
        prepared = prepare(RuntimeConfig(model_path=folder, device="cpu")).planned_for(())
        plan = prepared.description.memory
        assert plan is not None, family
        pipeline = load_pipeline(folder, device="cpu")
        found = sum(each.nbytes for each in pipeline.transformer.state_dict().values())
        assert plan.demand.transformers[0].total == found, family
        text = sum(
            parameter.nbytes for module in modules_of(pipeline.text_encoder) for parameter in module.parameters()
        )
        assert 0.9 * text <= plan.demand.text.total <= 1.6 * text, (family, plan.demand.text.total, text)


def test_what_cannot_be_offloaded_or_does_not_fit_is_refused_before_a_weight_is_read() -> None:
    for offload in ("model", "layers"):
        with pytest.raises(ConfigError, match=f"offload: {offload}: the memory of cpu is the machine's"):
            prepare(RuntimeConfig("shapes", device="cpu", offload=offload))
    with pytest.raises(ConfigError, match="leave out --offload and --memory-limit"):
        prepare(RuntimeConfig("shapes", device="cpu", backend="diffusers", memory_limit="1GB"))
    prepared = prepare(RuntimeConfig("shapes", device="cpu", memory_limit="50MB"))
    stages: list[str] = []
    with pytest.raises(DeviceMemoryError, match=r"more than the 50 MB there are: .*What would fit"):
        prepared.load(stages.append)
    assert stages == ["choosing attention"]
