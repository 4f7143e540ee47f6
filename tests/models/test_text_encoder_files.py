"""Text encoders that are read from their files by blocks: the bits of whole ones, in no more memory than planned."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tables import table
from torch import nn

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.errors import DeviceMemoryError, ModelLoadError
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.memory.plan import MACHINE, MemoryDemand, MemoryPlan, PartSize, make_plan
from diffusion_runtime.memory.waiting_weights import is_waiting, let_wait
from diffusion_runtime.memory.weight_unit import aligned
from diffusion_runtime.models.matched_tensors import matched_tensors
from diffusion_runtime.models.random_weights import draw_weight
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.text_encoders.encoder_size import layers_of
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder, ReloadedTextEncoder, modules_of
from diffusion_runtime.weights.tensor_files import read_tensors, write_tensors

FolderOf = Callable[[str], Path]
PROMPTS = ("a red circle", "a")
SMALL = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "seed": 1}


def prepared_for(folder: Path, **values: Any) -> PreparedModel:
    prepared = prepare(RuntimeConfig(model_path=str(folder), device="cpu", **values))
    assert isinstance(prepared, PreparedModel)
    return prepared


def plan_of(prepared: PreparedModel) -> MemoryPlan:
    plan = prepared.planned_for(()).description.memory
    assert isinstance(plan, MemoryPlan)
    return plan


def text_alone(prepared: PreparedModel) -> MemoryDemand:
    """The demand, of which the text is what bounds it."""
    demand, nothing = plan_of(prepared).demand, PartSize("transformer", 0)
    return dataclasses.replace(
        demand, transformers=(nothing,), decoder=PartSize("decoder", 0), step_activations=0, decode_activations=0
    )


def loaded(prepared: PreparedModel, plan: MemoryPlan) -> Pipeline:
    return dataclasses.replace(prepared, description=dataclasses.replace(prepared.description, memory=plan)).load()


def live_bytes(modules: Iterable[nn.Module]) -> int:
    """Of the storages that parameters of these modules are in now."""
    storages = [parameter.untyped_storage() for module in modules for parameter in module.parameters()]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def same(one: Conditions, other: Conditions) -> bool:
    pairs = [(one.embeddings, other.embeddings), (one.pooled, other.pooled)]
    pairs += [(ours.embeddings, theirs.embeddings) for ours, theirs in zip(one.further, other.further, strict=True)]
    return all(
        (ours is None and theirs is None) or (ours is not None and theirs is not None and torch.equal(ours, theirs))
        for ours, theirs in pairs
    )


def whole_at_aligned_addresses(prepared: PreparedModel) -> Any:
    """Those of a mapped file begin anywhere, and MKL sums in another order there."""
    encoder = prepared.model.load_text_encoder(torch.device("cpu"), prepared.dtype)
    for module in modules_of(encoder):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
    return encoder


# What importing diffusers' pipelines says about packages that are not here.
pytestmark = pytest.mark.filterwarnings("ignore")


# UMT5 of this project, T5 and Qwen 2.5 VL of transformers (its files hold more than is read), Gemma 3 with diffusers'
# connectors; in the dtype of the files and in another one.
@table(
    "family, dtype",
    [("wan", "float32"), ("ltx_video", "bfloat16"), ("qwen_image", "bfloat16"), ("ltx2", "float32")],
)
@pytest.mark.slow
def test_the_same_bits_in_no_more_memory_than_planned(family: str, dtype: str, tiny_folder_of: FolderOf) -> None:
    folder = tiny_folder_of(family)
    prepared = prepared_for(folder, dtype=dtype)
    expected = whole_at_aligned_addresses(prepared).encode(PROMPTS)
    demand = text_alone(prepared)
    whole = make_plan(demand, ["none"], None, kind=MACHINE).phases["text"]
    held = demand.text.total - sum(demand.text.blocks)
    for limit in (whole - 1, whole - demand.text.total + held + max(demand.text.blocks)):
        plan = make_plan(demand, ["layers"], limit, kind=MACHINE)
        assert plan.peak <= limit
        pipeline = loaded(prepared_for(folder, dtype=dtype), plan)
        assert isinstance(pipeline.text_encoder, OffloadedTextEncoder)
        modules = modules_of(pipeline.text_encoder)
        # A number for each tensor that waits.
        assert live_bytes(modules) < 1024 * len(modules) * len(demand.text.blocks)
        seen: list[int] = []
        for module in modules:
            for layer in layers_of(module):
                layer.register_forward_hook(lambda *_, into=seen, of=modules: into.append(live_bytes(of)))
        for _ in range(2):
            assert same(pipeline.text_encoder.encode(PROMPTS), expected)
        tensors = [parameter for module in modules for parameter in module.parameters()]
        rounding = sum(aligned(each.nbytes) - each.nbytes for each in tensors)
        assert held < max(seen) <= plan.parts["text"]["text_encoder"] + rounding, (limit, max(seen))
        assert pipeline.parts.offloading is not None
        streamed = [part.stream.num_blocks for part in pipeline.parts.offloading.parts if part.stream is not None]
        assert streamed[:1] == [len(demand.text.blocks) - plan.resident["text_encoder"]]
        pipeline.parts.offloading.leave()
        assert live_bytes(modules) < 1024 * len(modules) * len(demand.text.blocks)
        pipeline.close()


def test_a_limit_reads_a_large_encoder_by_blocks_and_says_so(tiny_folder_of: FolderOf, tmp_path: Path) -> None:
    """With the plan of the command itself: nothing of it is set by hand."""
    folder = wide_t5(tiny_folder_of("ltx_video"), tmp_path / "wide")
    request = prepared_for(folder).rules.resolve(GenerationRequest("a red star", **SMALL))
    whole, limited = (prepared_for(folder, memory_limit=limit).planned_for([request]) for limit in ("1GB", "12MB"))
    plans = [each.description.memory for each in (whole, limited)]
    assert [plan.offload for plan in plans if plan is not None] == ["none", "layers"]
    plan = plans[1]
    assert plan is not None
    rows, number = dict(plan.rows()), plan.resident["text_encoder"]
    assert rows["text encoder, streamed"] == f"{number} of 12 blocks stay in memory, the others are read from files"
    expected, media = (each.load(None, [request])(request) for each in (whole, limited))
    assert numpy.array_equal(media.frames, expected.frames)
    (note,) = (note for note in media.attention_report.notes if note.startswith("offload: text_encoder"))
    assert f"{12 - number} of 12 blocks streamed from files, " in note


def test_an_encoder_that_cannot_be_read_by_blocks_is_whole_and_the_plan_says_why(
    tiny_folder_of: FolderOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder_of("ltx_video"), folder)
    plan = plan_of(prepared_for(folder, dtype="float16"))
    assert plan.demand.whole_text.startswith("in float16, transformers keeps parts of encoders in float32")
    # Where the plan has room for all of it, it is loaded whole, and again for the next prompt.
    prepared = prepared_for(folder, dtype="float16")
    demand = text_alone(prepared)
    pipeline = loaded(prepared, make_plan(demand, ["layers"], 10**9, kind=MACHINE))
    assert isinstance(pipeline.text_encoder, ReloadedTextEncoder)
    expected = pipeline.text_encoder.encode(PROMPTS)
    offloading = pipeline.parts.offloading
    assert offloading is not None
    offloading.leave()
    assert same(pipeline.text_encoder.encode(PROMPTS), expected)
    notes: list[str] = []
    offloading.report(notes.append)
    assert any(note.startswith("offload: text_encoder: whole while it encodes: in float16, ") for note in notes)
    with pytest.raises(
        DeviceMemoryError, match=r"in text, .* The text encoder is whole while it encodes: in float16, "
    ):
        make_plan(demand, ["layers"], demand.text.total // 2, kind=MACHINE)

    # What the heads cannot tell: two tensors that may be one parameter's.
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    tensors, _ = read_tensors(file, "a test")
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    write_tensors(file, {**tensors, f"other.{name}": tensors[name].clone()})
    prepared = prepared_for(folder)
    demand = text_alone(prepared)
    tight = make_plan(demand, ["layers"], demand.text_activations * 2 + demand.text.total - 1, kind=MACHINE)
    tight = dataclasses.replace(tight, resident={"text_encoder": 0})
    with pytest.raises(
        ModelLoadError, match=f"cannot be read by blocks: .*{name}, other.{name} may each be its {name}"
    ):
        loaded(prepared, tight)
    with caplog.at_level(logging.WARNING, "diffusion_runtime"):
        pipeline = loaded(prepared_for(folder), make_plan(demand, ["layers"], 10**9, kind=MACHINE))
    assert isinstance(pipeline.text_encoder, ReloadedTextEncoder)
    assert "the text encoder is read whole: " in caplog.text


def test_what_modules_share_is_read_once_and_one_number_stands_for_what_waits() -> None:
    module = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed_tokens"].weight
    assert not is_waiting(module)
    let_wait(module, torch.bfloat16)
    assert module["head"].weight is module["embed_tokens"].weight
    assert (live_bytes([module]), module["head"].weight.dtype, is_waiting(module)) == (2, torch.bfloat16, True)
    found, lacks = matched_tensors(module, {"x.shared.weight": (5, 3), "x.norm.weight": (5, 3)})
    assert (found, lacks) == (dict.fromkeys(("embed_tokens.weight", "head.weight"), "x.shared.weight"), {})


def test_a_tensor_is_that_of_one_parameter() -> None:
    """Of two layers with one name but for their numbers, of which the file has one or has one twice."""
    module = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])})
    first, second = "layers.0.weight", "layers.1.weight"
    for shapes, found, lacks in (
        ({f"x.{first}": (2, 2), f"x.{second}": (2, 2)}, {first: f"x.{first}", second: f"x.{second}"}, {}),
        ({f"x.{first}": (2, 2)}, {first: f"x.{first}"}, {second: []}),
        ({f"x.{first}": (2, 2), f"y.{first}": (2, 2)}, {}, {first: [f"x.{first}", f"y.{first}"], second: []}),
    ):
        assert matched_tensors(module, shapes) == (found, lacks)


def wide_t5(tiny: Path, folder: Path) -> Path:
    """A folder whose T5 has twelve blocks of 1.8 MB in float32."""
    shutil.copytree(tiny, folder)
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 12, "d_ff": 4096, "d_kv": 64}))
    from transformers import T5Config, T5EncoderModel

    with torch.device("meta"):
        names = T5EncoderModel(T5Config.from_pretrained(folder / "text_encoder")).named_parameters()
    tensors = {name: torch.empty(parameter.shape) for name, parameter in names}
    for name, tensor in tensors.items():
        draw_weight(name, tensor)
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    write_tensors(file, tensors)
    return folder
