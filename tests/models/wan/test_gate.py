"""The gate of checkpoints trained with Video Sparse Attention: loaded, used where it is asked for, else left out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from denoiser_inputs import text_inputs
from safetensors.torch import load_file, save_file
from sparse_oracle import masked_attention

from diffusion_runtime import GenerationRequest, RuntimeConfig
from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionContext,
    AttentionPolicy,
    StepInfo,
)
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.models.wan.config import read_transformer_config
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.models.wan.transformer import WanSelfAttention, WanTransformer

CPU = torch.device("cpu")
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
GRID = (6, 5, 6)
SPARSE = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}}


def gate_weights(num_layers: int = 2, dim: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for index in range(num_layers):
        name = f"blocks.{index}.to_gate_compress"
        weights[f"{name}.weight"] = 0.2 * torch.randn(dim, dim, generator=generator)
        weights[f"{name}.bias"] = torch.randn(dim, generator=generator)
    return weights


def add_weights(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, **weights}, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def gated_folder(tiny_wan_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gated_wan"
    return add_weights(Path(shutil.copytree(tiny_wan_folder, folder)), gate_weights())


def load(folder: Path, choice: Any = None, dtype: torch.dtype = torch.float32) -> WanTransformer:
    policy = AttentionPolicy(config=AttentionConfig.parse(choice), dtype=dtype, environment=None)
    model = FAMILY.describe(folder)
    return model.load_transformer(model.build_transformer(policy), CPU, dtype)


def run(model: WanTransformer, context: AttentionContext | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 16, GRID[0], 2 * GRID[1], 2 * GRID[2], generator=generator)
    text = torch.randn(2, 7, 32, generator=generator)
    return model(
        latents, torch.tensor([900.0, 300.0]), text_inputs(text), AttentionContext() if context is None else context
    )


def self_attention(model: WanTransformer, index: int) -> WanSelfAttention:
    found = model.get_submodule(f"blocks.{index}.self_attention")
    assert isinstance(found, WanSelfAttention)
    return found


def count_gates(model: WanTransformer) -> list[int]:
    """A list that grows by the index of a layer whenever its gate is computed."""
    counted: list[int] = []
    for index in range(2):
        gate = self_attention(model, index).gate
        assert gate is not None
        gate.register_forward_hook(lambda module, arguments, out, index=index: counted.append(index))
    return counted


def test_the_gate_changes_sparse_results_and_no_dense_ones(tiny_wan_folder: Path, gated_folder: Path) -> None:
    for choice in (None, "torch_sdpa", "reference"):
        gated = load(gated_folder, choice)
        counted = count_gates(gated)
        assert torch.equal(run(gated), run(load(tiny_wan_folder, choice)))
        assert not counted
    plain, gated_out = run(load(tiny_wan_folder, SPARSE)), run(load(gated_folder, SPARSE))
    assert (gated_out - plain).abs().max() > 1e-2 * plain.abs().max()
    all_tiles = {"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}}
    dense = run(load(tiny_wan_folder))
    assert torch.equal(run(load(tiny_wan_folder, all_tiles)), dense)
    assert (run(load(gated_folder, all_tiles)) - dense).abs().max() > 1e-2 * dense.abs().max()


def test_a_missing_gate_is_told_before_it_is_run(
    tiny_wan_folder: Path, gated_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the folder's weights alone, by their names; where they are not here, nobody knows."""
    request = GenerationRequest("a star", height=64, width=64, num_frames=21, num_inference_steps=2)
    bare = Path(shutil.copytree(tiny_wan_folder, tmp_path / "bare"))
    (bare / WEIGHTS).unlink()
    said = {}
    for folder in (tiny_wan_folder, gated_folder, bare):
        choice = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}}}}
        prepared = prepare(RuntimeConfig(str(folder), device="cpu", attention=choice))
        resolved = prepared.rules.resolve(request)
        said[folder] = [each for each in explain(prepared, resolved).remarks if "no trained gate" in each]
        if folder != bare:
            caplog.clear()
            prepared.load()(resolved)
            assert said[folder] == [each for each in caplog.messages if "no trained gate" in each]
    (plain,) = said[tiny_wan_folder]
    assert said[gated_folder] == []
    assert said[bare] == [f"its weights are not here, and tell whether this holds: {plain}"]
    # At no step is a call sparse.
    dense = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}}}}
    prepared = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu", attention=dense))
    assert not any("gate" in each for each in explain(prepared, prepared.rules.resolve(request)).remarks)


@pytest.mark.parametrize("index", [0, 1])
def test_a_layer_equals_its_formula(gated_folder: Path, index: int) -> None:
    model = load(gated_folder, SPARSE)
    layer = self_attention(model, index)
    seen: dict[str, torch.Tensor] = {}
    layer.register_forward_hook(lambda module, arguments, out: seen.update(x=arguments[0].clone(), out=out.clone()))
    layer.attention.register_forward_pre_hook(
        lambda module, arguments: seen.update(zip("qkv", (x.clone() for x in arguments[:3]), strict=True))
    )
    run(model)
    q, k, v, x = (seen[name] for name in "qkvx")
    tensors = {name: tensor.double() for name, tensor in load_file(gated_folder / WEIGHTS).items()}
    name = f"blocks.{index}"
    gate = F.linear(
        x.double(), tensors[f"{name}.to_gate_compress.weight"], tensors[f"{name}.to_gate_compress.bias"]
    ).view(2, 180, 4, 16)
    t, y, z = torch.meshgrid(*(torch.arange(n) for n in GRID), indexing="ij")
    # Inside the model tokens stand tile by tile.
    tile = (t // 4 * 4 + y // 4 * 2 + z // 4).flatten().sort().values
    means = [torch.stack([one.double()[:, tile == n].mean(1) for n in range(8)], 2) for one in (q, k, v)]
    scores = means[0] @ means[1].transpose(2, 3) / 4
    pooled = (scores.softmax(-1) @ means[2])[:, :, tile].transpose(1, 2)
    kept = torch.zeros(2, 4, 8, 8, dtype=torch.bool).scatter_(3, scores.topk(4).indices, True)
    fine, _ = masked_attention(q, k, v, kept[:, :, tile][..., tile])
    expected = F.linear(
        (fine + gate * pooled).flatten(2),
        tensors[f"{name}.attn1.to_out.0.weight"],
        tensors[f"{name}.attn1.to_out.0.bias"],
    )
    torch.testing.assert_close(seen["out"].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_gate_is_computed_where_the_backend_of_the_step_takes_it(gated_folder: Path) -> None:
    schedule = [{"steps": "0", "backend": "torch_sdpa"}, {"steps": "2", "layers": "0", "backend": "reference"}]
    model = load(gated_folder, {"per_role": {"self": SPARSE}, "schedule": schedule})
    counted = count_gates(model)
    for index, expected in enumerate(([], [0, 1], [1], [0, 1])):
        counted.clear()
        run(model, AttentionContext(step=StepInfo(index, 4)))
        assert counted == expected


def test_a_memory_plan_counts_gates(tiny_wan_folder: Path, gated_folder: Path) -> None:
    totals = []
    for folder in (tiny_wan_folder, gated_folder):
        prepared = prepare(RuntimeConfig(model_path=str(folder), device="cpu"))
        assert isinstance(prepared, PreparedModel)
        plan = prepared.planned_for(()).description.memory
        assert plan is not None
        totals.append(plan.demand.transformers[0].total)
    assert totals[1] - totals[0] == sum(tensor.numel() * 4 for tensor in gate_weights().values())


def test_a_gate_has_the_dtype_of_the_model(gated_folder: Path) -> None:
    model = load(gated_folder, SPARSE, torch.bfloat16)
    gate = self_attention(model, 1).gate
    assert gate is not None
    weights = gate_weights()
    assert torch.equal(gate.weight, weights["blocks.1.to_gate_compress.weight"].bfloat16())
    assert torch.equal(gate.bias, weights["blocks.1.to_gate_compress.bias"].bfloat16())
    assert run(model).isfinite().all()


def test_only_a_checkpoint_that_brings_one_has_one(tiny_wan_folder: Path, gated_folder: Path) -> None:
    assert read_transformer_config(tiny_wan_folder) == read_transformer_config(gated_folder)
    assert self_attention(load(tiny_wan_folder, SPARSE), 0).gate is None
    assert load(gated_folder, SPARSE).config.has_gate
