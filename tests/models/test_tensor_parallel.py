"""Weights that processes share (tensor parallel): what four real processes compute of every family, what each reads of
the files, which layers are shared, and what is refused."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.tensor_parallel_worker import IN_8_BITS, NARROW, SPARSE, meshes_of
from tables import table
from tiny_families import small_request
from triton_interpreter import needs_triton
from warm_python import run_worker

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.attention import AttentionPolicy
from diffusion_runtime.benchmark.step_model import open_step_model
from diffusion_runtime.config import ParallelConfig
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.kernels.launches import expecting_launches
from diffusion_runtime.layers.linear import Linear
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.family import Model
from diffusion_runtime.models.published import published_models
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.groups import planned_mesh
from diffusion_runtime.weights.tensor_parallel import TensorParallel, shared_pieces

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What each process measured."""
    folder = tmp_path_factory.mktemp("world")
    run_worker(ROOT / "tests/models/tensor_parallel_worker.py", folder)
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(4)]


OTHER_WEIGHTS = [
    *(f"{name}, fp8 and a LoRA" for name in NARROW),
    *(f"{name}, 8 bits in the file" for name in IN_8_BITS),
]


@table("name", [*NARROW, *OTHER_WEIGHTS])
def test_processes_that_share_weights_equal_one(measured: list[dict[str, float]], name: str) -> None:
    for of_process in measured:
        assert max(of_process[f"{name}, {mesh}"] for mesh in meshes_of(name)) < 1e-5, name


@table("name", SPARSE)
def test_sparse_backends_plan_for_the_heads_of_a_process(measured: list[dict[str, float]], name: str) -> None:
    for of_process in measured:
        assert max(of_process[f"wan, {name}, {mesh}"] for mesh in meshes_of(f"wan, {name}")) < 1e-5
        assert of_process[f"wan, {name} against dense"] > 1e-3


def test_a_process_reads_its_part_of_the_file_and_no_more(measured: list[dict[str, float]]) -> None:
    for rank, of_process in enumerate(measured):
        # Biases of sums are read by the first process of a pair; what is whole is a third of so small a model.
        assert 0 <= of_process["bytes held"] - of_process["bytes read"] <= (0 if rank % 2 == 0 else 2048)
        assert of_process["bytes held"] < 0.7 * of_process["bytes of all"]


@table("name", ["LoRA switched", "from an arena", "from their files"])
def test_a_lora_is_switched_and_weights_wait_elsewhere(measured: list[dict[str, float]], name: str) -> None:
    assert max(of_process[name] for of_process in measured) < 1e-5


def test_guidance_within_attention_has_norms_over_the_heads_of_all(measured: list[dict[str, float]]) -> None:
    assert max(of_process["guided"] for of_process in measured) < 1e-5


def test_without_the_sum_the_result_is_another(measured: list[dict[str, float]]) -> None:
    assert min(of_process["broken: no sum"] for of_process in measured) > 0.1


# SeedVR2, whose windows are no sequence that processes could share, refuses several.
@table("name", [each.name for each in published_models() if each.family != "seedvr2"])
def test_every_linear_layer_meets_one_rule_and_two_halves_make_the_whole(name: str) -> None:
    """At the real widths, where two processes share every published model evenly."""
    model = open_step_model(name, 1).model
    whole = model.build_transformer(AttentionPolicy(environment=None))
    rules = TensorParallel.of(model.family.name, RankGroup())
    patterns = [*(rule.layers for rule in rules.rules if rule.kind != "norm"), *rules.whole]
    for layer_name, layer in whole.named_modules():
        if isinstance(layer, Linear):
            met = [pattern for pattern in patterns if fnmatch.fnmatchcase(layer_name, pattern)]
            assert len(met) == 1, (layer_name, met)
    sizes = {key: parameter.numel() for key, parameter in whole.named_parameters()}
    places: dict[str, list[tuple[str, int, int]]] = {key: [] for key in sizes}
    for index in range(2):
        mesh = dataclasses.replace(planned_mesh(1, 1, 1, 2), tensor=RankGroup((0, 1), index, None, (0, 1)))
        part = model.shared_by(mesh.tensor).build_transformer(AttentionPolicy(environment=None, mesh=mesh))
        pieces = shared_pieces(part, model.weights.pieces("transformer"))
        for key, parameter in part.named_parameters():
            assert sum(math.prod(piece.read_shape) for piece in pieces[key]) == parameter.numel(), key
            for piece in pieces[key]:
                ranges = piece.part.rows or piece.part.columns or ()
                places[key] += [(piece.name, each.start, each.stop) for each in ranges]
        in_blocks = {key: parameter.numel() for key, parameter in part.named_parameters() if _is_of_block(key)}
        assert sum(in_blocks.values()) < 0.51 * sum(sizes[key] for key in in_blocks)
    for key, divided in places.items():
        # Side by side without a gap: what one process leaves out the other one has.
        for name_of_tensor in {each[0] for each in divided}:
            ranges = sorted((start, stop) for tensor, start, stop in divided if tensor == name_of_tensor)
            assert all(first[1] == second[0] for first, second in itertools.pairwise(ranges)), key
            assert ranges[0][0] == 0


def _is_of_block(name: str) -> bool:
    return name.split(".")[0] in ("blocks", "double_blocks", "single_blocks")


def test_what_cannot_be_shared_is_refused_before_loading() -> None:
    model = open_step_model("z-image-turbo", 1).model
    with pytest.raises(ConfigError, match=r"4 processes cannot share the 30 heads of .* 1, 2, 3, 5, 6, 10, 15, 30"):
        _build(model, 4)
    narrow = open_step_model("z-image-turbo", changes=NARROW["z-image-turbo"]).model
    with pytest.raises(
        ConfigError, match=r"4 processes cannot share the 170 features of .*feed_forward\.up .* 1, 2, 5"
    ):
        _build(narrow, 4)
    other = dataclasses.replace(model, weights=dataclasses.replace(model.weights, family="other"))
    with pytest.raises(ConfigError, match=r"other models hold their weights whole.*families that share.*wan"):
        _build(other, 2)


def _build(model: Model[Any, Any], degree: int) -> None:
    mesh = planned_mesh(1, 1, 1, degree)
    model.shared_by(mesh.tensor).build_transformer(AttentionPolicy(environment=None, mesh=mesh))


# Norms of queries and keys over all heads, and of each head with a gate.
SHARED = ("wan", "krea2")
OF_3_HEADS = ("flux2",)
SHARED_TOO = ("anima", "flux1", "flux2", "flux3", "hunyuan_video_15", "ltx2", "minimax_h3", "qwen_image_21")


def check_shared(folder: Path, num_processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every limit between the widths of a part and of the whole."""
    compared = set()
    monkeypatch.setattr("diffusion_runtime.kernels.implementation.is_interpreted", False)
    for limit in (15, 23, 31, 47, 63, 95, 127):
        monkeypatch.setattr("diffusion_runtime.kernels.implementation.NARROW", limit)
        kernels = []
        for degree in (1, num_processes):
            config = RuntimeConfig(str(folder), device="cpu", parallel=ParallelConfig(tensor_parallel_size=degree))
            prepared = prepare(config)
            with expecting_launches() as expected:
                explain(prepared, prepared.rules.resolve(small_request(prepared)))
            kernels.append({(each.launch.kernel.__name__, len(each.dtypes)) for each in expected.values()})
        assert kernels[0] == kernels[1], limit
        compared.add(frozenset(kernels[0]))
    assert len(compared) > 1, "no limit lies between widths"


@needs_triton
@table("family", SHARED)
def test_processes_that_share_a_layer_compile_what_one_does(
    tiny_folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    check_shared(tiny_folder_of(family), 3 if family in OF_3_HEADS else 2, monkeypatch)


@pytest.mark.slow
@needs_triton
@table("family", SHARED_TOO)
def test_those_of_the_other_families_too(
    tiny_folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    check_shared(tiny_folder_of(family), 3 if family in OF_3_HEADS else 2, monkeypatch)
