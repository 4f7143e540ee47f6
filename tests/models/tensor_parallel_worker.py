"""Processes that share the weights of whole transformers; test_tensor_parallel.py runs it with a folder for results,
and test_tensor_parallel_gpu.py with `cuda` behind it.

Each process reads its part of a file, computes, and compares with what one process computes of the whole file: the
largest difference, as a part of the largest value. On the CPU they are four and exchange over gloo, on GPUs two over
NCCL.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from fp8_files import comfy_mixed
from safetensors.torch import save_file

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, StepInfo
from diffusion_runtime.attention.normalized_guidance import NormalizedGuidance
from diffusion_runtime.benchmark.step_model import StepModel, open_step_model, with_size
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.layers import weight_share
from diffusion_runtime.layers.fp8_linear import Fp8Linear
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.memory.offloaded_part import OffloadedPart, arena_for
from diffusion_runtime.memory.transfers import Transfers
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.random_weights import draw_weight
from diffusion_runtime.models.registry import lora_names_of_families
from diffusion_runtime.parallel.groups import ProcessMesh
from diffusion_runtime.weights.lora.binding import Lora, bind
from diffusion_runtime.weights.lora.reading import read_lora_file
from diffusion_runtime.weights.parallel_reads import StoredBytes
from diffusion_runtime.weights.quantization import Quantization
from diffusion_runtime.weights.tensor_files import SafetensorsFile, read_tensors, write_tensors

IS_CUDA = sys.argv[-1] == "cuda"
WORLD = 2 if IS_CUDA else 4
# Of a checkpoint's tensors, by name.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
CPU, DTYPE = torch.device("cpu"), torch.float32
_WAN = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 96, "text_dim": 32}
_JOINT = {
    "num_layers": 1,
    "num_single_layers": 1,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
    "axes_dims_rope": [4, 6, 6],
}
_HUNYUAN = {
    "num_layers": 1,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "rope_axes_dim": [4, 6, 6],
    "text_embed_dim": 32,
}
_STREAM = {"num_attention_heads": 4, "attention_head_dim": 16, "cross_attention_dim": 64}
# Published models with four heads and a block of each kind.
NARROW: dict[str, dict[str, Any]] = {
    "wan2.1-1.3b": _WAN,
    "wan2.1-i2v-14b-480p": {**_WAN, "image_dim": 24, "added_kv_proj_dim": 64},
    "wan2.1-vace-1.3b": {**_WAN, "vace_layers": [0]},
    "flux.1-dev": {**_JOINT, "pooled_projection_dim": 16},
    "flux.2-dev": {**_JOINT, "axes_dims_rope": [4, 4, 4, 4]},
    "qwen-image": {key: value for key, value in _JOINT.items() if key != "num_single_layers"},
    "hunyuan-video": {**_HUNYUAN, "num_single_layers": 1, "pooled_projection_dim": 16},
    "hunyuan-video-1.5-t2v": {**_HUNYUAN, "text_embed_2_dim": 32, "image_embed_dim": 32},
    "z-image-turbo": {
        **{"n_layers": 1, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4, "dim": 64, "cap_feat_dim": 32},
        "axes_dims": [4, 6, 6],
    },
    # With twice as many heads of queries.
    "krea-2-turbo": {
        **{"num_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "attention_head_dim": 16},
        **{"intermediate_size": 96, "axes_dims_rope": [4, 6, 6], "text_hidden_dim": 32, "text_intermediate_size": 48},
        **{"text_num_attention_heads": 8, "text_num_key_value_heads": 4},
    },
    "anima-base": {"num_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16, "adaln_lora_dim": 8},
    "moss-image-sft": {"num_layers": 1, "num_heads": 4, "dim": 64, "ffn_dim": 96, "text_dim": 32},
    "ltx-2": {
        **{"num_layers": 1, "caption_channels": 32, **_STREAM, "audio_num_attention_heads": 4},
        **{"audio_attention_head_dim": 8, "audio_cross_attention_dim": 32},
    },
    "ltx-video-0.9.1": {"num_layers": 1, "caption_channels": 32, **_STREAM},
}
FILE = "diffusion_pytorch_model.safetensors"
IN_8_BITS = ("wan2.1-1.3b", "flux.2-dev")
TILE = {"tile_size": [1, 2, 2]}
SPARSE: dict[str, Any] = {
    "VSA": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}},
    "STA": {"backend": "sliding_tile_attn", "extra": {"window": [1, 3, 1], **TILE}},
    "STA by head": {
        "backend": "sliding_tile_attn",
        "extra": {"mask_strategy_file_path": "windows.json", "skip_time_steps": 0, **TILE},
    },
    "V-MoBA": {
        "backend": "vmoba_attn",
        "extra": {
            **{"temporal_chunk_size": 1, "temporal_topk": 1, "spatial_chunk_size": [2, 2], "spatial_topk": 2},
            **{"st_chunk_size": [1, 2, 2], "st_topk": 2, "moba_select_mode": "topk", "first_full_step": 0},
        },
    },
}
# By denoising step, layer and head.
WINDOWS = {f"0_{layer}_{head}": [1 + head % 2, 1 + 2 * (head > 1), 1] for layer in range(2) for head in range(4)}
# How four processes share a model. Each of the families shares its weights in both of the usual ways: two by two beside
# a shared sequence with weights as they are, among all four with a LoRA in weights of 8 bits.
MESHES = {
    "TP 2": {"branch_degree": 2, "tensor_degree": 2},
    "TP 2 x Ulysses 2": {"ulysses_degree": 2, "tensor_degree": 2},
    "TP 2 x ring 2": {"ring_degree": 2, "tensor_degree": 2},
    "TP 4": {"tensor_degree": 4},
}
# One token stream, and streams apart with blocks of one stream: these are shared in every way.
IN_EVERY_WAY = ("wan2.1-1.3b", "flux.1-dev")


def meshes_of(case: str) -> list[str]:
    """How the processes share a case, by its name."""
    model, _, what = case.partition(", ")
    if model == "wan":
        # A ring shows a sparse backend a part of the keys.
        return ["TP 2 x Ulysses 2", "TP 4"]
    if what:
        # What is in a weight does not depend on how the tokens are cut.
        ways = ["TP 2", "TP 4"] if model in IN_8_BITS else ["TP 4"]
    else:
        ways = list(MESHES) if model in IN_EVERY_WAY else ["TP 2 x Ulysses 2"]
    # Its 170 features are not shared by four.
    return list(dict.fromkeys("TP 2" if model.startswith("z-image") and way == "TP 4" else way for way in ways))


# What one process computes of each case.
ALONE: dict[str, torch.Tensor] = {}


@dataclass(frozen=True)
class Case:
    """A model with weights in a file, and what goes in."""

    name: str
    model: Model[Any, Any]
    given: tuple[torch.Tensor, torch.Tensor, DenoiserInputs]
    loras: tuple[Lora, ...] = ()
    quantization: str = "none"
    attention: Any = None

    def load(self, mesh: ProcessMesh, dtype: torch.dtype = DTYPE) -> DiffusionTransformer:
        model = self.model.shared_by(mesh.tensor)
        config = AttentionConfig.parse(None if self.attention is None else {"per_role": {"self": self.attention}})
        policy = AttentionPolicy(config=config, environment=None, mesh=mesh, device=str(_device()), dtype=dtype)
        transformer = model.build_transformer(policy)
        rules = Quantization.of(model.family.name, self.quantization, ())
        rules.apply(model.modules(transformer))
        model.load_transformer(transformer, _device(), dtype, self.loras, rules)
        has_8_bits = any(isinstance(layer, Fp8Linear) for layer in transformer.modules())
        assert has_8_bits == (self.quantization != "none" or self.name.endswith("in the file"))
        return transformer

    def forward(
        self, mesh: ProcessMesh, dtype: torch.dtype = DTYPE, guidance: NormalizedGuidance | None = None
    ) -> torch.Tensor:
        """guidance: within attention, where the model's text is part of the sequence, away from the second text."""
        steps = [StepInfo(timestep=float(self.given[1].flatten()[0]) + later, next_timestep=0.0) for later in (0, 1)]
        with torch.inference_mode():
            transformer, context = self.load(mesh, dtype), AttentionContext(sharding=mesh.sharding, step=steps[0])
            context = dataclasses.replace(context, guidance=guidance)
            plan_steps(context.state, steps)
            out: torch.Tensor = transformer(*_moved(self.given, _device(), dtype), context)
        return out.float()


def _device() -> torch.device:
    return torch.device("cuda", dist.get_rank()) if IS_CUDA else CPU


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The tensors in a value on a device, those of more than one dimension in a dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() and value.dim() > 1 else None)
    if isinstance(value, tuple):
        return tuple(_moved(each, device, dtype) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: _moved(each, device, dtype) for name, each in fields.items()})
    return value


def make_cases(folder: Path) -> list[Case]:
    cases = []
    for name, changes in NARROW.items():
        opened = _small(open_step_model(name, changes=changes))
        pieces = opened.model.weights.pieces("transformer").values()
        shapes = {piece.name: piece.shape for several in pieces for piece in several}
        if name != "wan2.1-1.3b":
            # Whether there are gates of Video Sparse Attention is known by the names of a file's tensors alone.
            shapes = {tensor: shape for tensor, shape in shapes.items() if "to_gate_compress" not in tensor}
        whole = _written(opened, folder / name, shapes)
        cases.append(whole)
        lora = _write_lora(whole.model, folder / f"{name}.safetensors", shapes)
        cases.append(dataclasses.replace(whole, name=f"{name}, fp8 and a LoRA", loras=(lora,), quantization="fp8-all"))
        if name in IN_8_BITS:
            cases.append(_in_8_bits(whole, folder / f"{name}-fp8"))
    wan = cases[0]
    (folder / "windows.json").write_text(json.dumps(WINDOWS))
    os.chdir(folder)
    cases += [dataclasses.replace(wan, name=f"wan, {name}", attention=sparse) for name, sparse in SPARSE.items()]
    return cases


def _small(opened: StepModel) -> StepModel:
    """6 x 4 tokens of each latent frame, two of a video."""
    side = opened.model.geometry.spatial_factor * opened.model.geometry.patch[1]
    return with_size(opened, height=6 * side, width=4 * side, num_frames=sum(opened.model.geometry.frame_rule), batch=2)


def _in_folder(model: Any, folder: Any) -> Any:
    """The same model with its weights in another folder."""
    return dataclasses.replace(model, weights=dataclasses.replace(model.weights, folder=folder))


def _make_component(folder: Path) -> None:
    """A transformer's folder whose config.json asks for nothing at load: the model's own was read elsewhere."""
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text("{}")


def _written(opened: StepModel, folder: Path, shapes: Shapes) -> Case:
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        draw_weight(name, tensor)
    _make_component(folder)
    write_tensors(folder / "transformer" / FILE, tensors)
    model = _in_folder(opened.model, folder)
    return Case(opened.name, model, opened.inputs(CPU, DTYPE).ours)


def _in_8_bits(case: Case, folder: Path) -> Case:
    """The same with weights that are 8-bit floats in the file, a scale per row, and stay so."""
    tensors, _ = read_tensors(case.model.folder / "transformer" / FILE, "test")
    file = comfy_mixed(tensors)
    _make_component(folder)
    save_file(file.stored, folder / "transformer" / FILE, file.metadata)
    return dataclasses.replace(case, name=f"{case.name}, 8 bits in the file", model=_in_folder(case.model, folder))


def _write_lora(model: Model[Any, Any], path: Path, shapes: Shapes) -> Lora:
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        if len(shape) == 2 and name.endswith(".weight"):
            stem = f"transformer.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(3, shape[1], generator=generator) / shape[1] ** 0.5
            tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(shape[0], 3, generator=generator)
    write_tensors(path, tensors)
    return bind(read_lora_file(str(path)), LoraConfig(str(path), 0.7), model.lora_target(lora_names_of_families))


def _guided(cases: Sequence[Case], mesh: ProcessMesh) -> torch.Tensor:
    """A forward pass of FLUX.1 guided within attention, by norms over the heads of all processes."""
    (joint,) = (case for case in cases if case.name == "flux.1-dev")
    return joint.forward(mesh, guidance=NormalizedGuidance(scale=4.0, tau=1.1, alpha=0.5, num_samples=1))


def work(rank: int, folder: Path, cases: Sequence[Case]) -> None:
    """Everything one process does on the CPU."""
    alone = ALONE
    store = dist.FileStore(str(folder / "store"), WORLD)
    patience = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=patience)
    measured = {}
    meshes = {name: ProcessMesh.create(**degrees) for name, degrees in MESHES.items()}
    for case in cases:
        for name in meshes_of(case.name):
            measured[f"{case.name}, {name}"] = relative(case.forward(meshes[name]), alone[case.name])
    whole, with_lora = cases[0], cases[1]
    measured |= {f"{case.name} against dense": relative(alone[case.name], alone[whole.name]) for case in cases[-4:]}
    measured["guided"] = relative(_guided(cases, meshes["TP 2 x Ulysses 2"]), alone["guided"])
    measured |= _reading(whole, meshes["TP 2"])
    measured["LoRA switched"] = relative(_switched(with_lora, meshes["TP 2"]), alone[with_lora.name])
    measured["from an arena"] = relative(_from_arena(whole, meshes["TP 2 x Ulysses 2"]), alone[whole.name])
    measured["from their files"] = relative(_from_files(with_lora, meshes["TP 2"]), alone[with_lora.name])
    with mock.patch.object(weight_share, "sum_in_place", lambda _, x: x):
        measured["broken: no sum"] = relative(whole.forward(meshes["TP 2"]), alone[whole.name])
    (folder / f"result-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def work_on_gpu(rank: int, folder: Path, cases: Sequence[Case]) -> None:
    """Everything one process does on its GPU: float32 as on the CPU, and the error of bfloat16 together and alone."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=300))
    mesh, measured = ProcessMesh.create(tensor_degree=2), {}
    for case in cases:
        exact = case.forward(ProcessMesh())
        measured[f"{case.name}, float32"] = relative(case.forward(mesh), exact)
        if case.quantization == "none":
            measured[f"{case.name}, bfloat16"] = relative(case.forward(mesh, torch.bfloat16), exact)
            measured[f"{case.name}, bfloat16 alone"] = relative(case.forward(ProcessMesh(), torch.bfloat16), exact)
    (folder / f"result-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _from_arena(case: Case, mesh: ProcessMesh) -> torch.Tensor:
    """As forward, with weights that are read into an arena of this process, as for offloading."""
    model = case.model.shared_by(mesh.tensor)
    transformer = model.build_transformer(AttentionPolicy(environment=None, mesh=mesh))
    model.load_transformer(transformer, CPU, DTYPE, room_for=lambda _, module: arena_for(module).empty)
    with torch.inference_mode():
        out: torch.Tensor = transformer(*case.given, AttentionContext(sharding=mesh.sharding))
    return out


def _from_files(case: Case, mesh: ProcessMesh) -> torch.Tensor:
    """As forward, of blocks that are read from their files while they run, whose LoRA files come later."""
    model = case.model.shared_by(mesh.tensor)
    transformer = model.build_transformer(AttentionPolicy(environment=None, mesh=mesh))
    rules = Quantization.of(model.family.name, case.quantization, ())
    rules.apply(model.modules(transformer))
    (home,) = model.weights.keep_in_files(model.modules(transformer), CPU, DTYPE, (), rules).values()
    part = OffloadedPart("transformer", transformer, home, Transfers(CPU), 0, 1)
    home.change(case.loras)
    part.enter()
    with torch.inference_mode():
        out: torch.Tensor = transformer(*case.given, AttentionContext(sharding=mesh.sharding))
    part.close()
    return out


def _switched(case: Case, mesh: ProcessMesh) -> torch.Tensor:
    """As forward, of a model that was loaded without its LoRA files."""
    transformer = dataclasses.replace(case, loras=()).load(mesh)
    changed = {"transformer": frozenset().union(*(lora.changed("transformer") for lora in case.loras))}
    model = case.model.shared_by(mesh.tensor)
    model.weights.rewrite(model.modules(transformer), changed, case.loras, {"transformer": {}}, DTYPE)
    with torch.inference_mode():
        out: torch.Tensor = transformer(*case.given, AttentionContext(sharding=mesh.sharding))
    return out


def _reading(case: Case, mesh: ProcessMesh) -> dict[str, float]:
    """Bytes read of the file, bytes of this process's weights, and of all weights."""
    read, read_run, sizes_read = SafetensorsFile.read, StoredBytes.read, [0]

    def counted(file: SafetensorsFile, name: str, rows: slice | None = None, columns: Any = None) -> torch.Tensor:
        found = read(file, name, rows, columns)
        if columns is not None:
            sizes_read.append(found.nbytes)
        return found

    def counted_run(stored: StoredBytes, start: int, target: torch.Tensor) -> None:
        sizes_read.append(target.nbytes)
        read_run(stored, start, target)

    with mock.patch.object(SafetensorsFile, "read", counted), mock.patch.object(StoredBytes, "read", counted_run):
        mine = case.load(mesh)
    sizes = {"own": mine, "whole": case.load(ProcessMesh())}
    held = {name: sum(tensor.nbytes for tensor in each.state_dict().values()) for name, each in sizes.items()}
    return {"bytes read": sum(sizes_read), "bytes held": held["own"], "bytes of all": held["whole"]}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> int:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    cases = make_cases(folder)
    if not IS_CUDA:
        # CUDA would not survive the fork.
        ALONE.update({case.name: case.forward(ProcessMesh()) for case in cases})
        ALONE["guided"] = _guided(cases, ProcessMesh())
    return fork_ranks(lambda rank: (work_on_gpu if IS_CUDA else work)(rank, folder, cases), WORLD)


if __name__ == "__main__":
    sys.exit(main())
