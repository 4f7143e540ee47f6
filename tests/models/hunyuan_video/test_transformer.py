"""Our transformer against diffusers' HunyuanVideoTransformer3DModel on the same weights, float32 on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel
from family_parity import CPU, relative, write_plain_scheduler
from tables import table
from tiny_encoders import HIDDEN
from tiny_hunyuan_video import random_transformer

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.hunyuan_video.family import FAMILY
from diffusion_runtime.models.hunyuan_video.transformer import REFINER_ROLE, HunyuanVideoTransformer
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions

CHANNELS, TEXT_DIM, POOLED_DIM, NUM_TEXT_TOKENS = 16, 24, HIDDEN, 9
SIZE = ClipSize(32, 48, 9, 24)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without guidance, three heads": {"has_guidance": False, "num_heads": 3},
    "other patch, other axes": {"patch": (2, 1), "axis_channels": (8, 4, 4)},
    "two streams alone": {"num_single_layers": 1, "num_layers": 3},
}


@dataclass(frozen=True)
class Inputs:
    """What one forward pass gets. lengths: real tokens of each prompt; what lies behind them is noise on purpose."""

    latents: torch.Tensor
    timestep: torch.Tensor
    text: torch.Tensor
    pooled: torch.Tensor
    lengths: tuple[int, ...]
    guidance: float | None = field(default=6.0)


def make_inputs(shape: tuple[int, int, int], lengths: Sequence[int] = (5, 9), guidance: float | None = 6.0) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    batch = len(lengths)
    return Inputs(
        torch.randn(batch, CHANNELS, *shape, generator=generator),
        torch.linspace(937.3, 12.0, batch + 1)[:batch],
        torch.randn(batch, NUM_TEXT_TOKENS, TEXT_DIM, generator=generator),
        torch.randn(batch, POOLED_DIM, generator=generator),
        tuple(lengths),
        guidance,
    )


def write_folder(folder: Path, variant: dict[str, Any]) -> Path:
    """A folder with a random transformer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random_transformer(**variant).save_pretrained(folder / "transformer", max_shard_size="100KB")
    write_rest(folder)
    return folder


def write_rest(folder: Path) -> None:
    """What a family reads beside the transformer's folder."""
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"latent_channels": CHANNELS}))
    index = {"transformer": ["diffusers", "HunyuanVideoTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    write_plain_scheduler(folder)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = write_folder(tmp_path_factory.mktemp("hunyuan_video"), VARIANTS[name])
        return folders[name]

    return folder


def load_ours(folder: Path, dtype: torch.dtype = torch.float32, attention: Any = None) -> HunyuanVideoTransformer:
    model = family_for_folder(folder).describe(folder)
    policy = AttentionPolicy(dtype=dtype, config=AttentionConfig.parse(attention))
    transformer = model.load_transformer(model.build_transformer(policy), CPU, dtype)
    assert isinstance(transformer, HunyuanVideoTransformer)
    return transformer


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> HunyuanVideoTransformer3DModel:
    return HunyuanVideoTransformer3DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def run_ours(
    model: HunyuanVideoTransformer, inputs: Inputs, context: AttentionContext | None = None, text: Any = None
) -> torch.Tensor:
    conditions = Conditions.of(inputs.text, inputs.lengths, pooled=inputs.pooled) if text is None else text
    whole = DenoiserInputs(text=conditions, size=SIZE, guidance=inputs.guidance)
    return model(inputs.latents, inputs.timestep, whole, AttentionContext() if context is None else context)


@torch.no_grad()
def run_theirs(
    model: HunyuanVideoTransformer3DModel, inputs: Inputs, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    mask = torch.arange(NUM_TEXT_TOKENS)[None] < torch.tensor(inputs.lengths)[:, None]
    guidance = (
        None if inputs.guidance is None else torch.full_like(inputs.timestep, inputs.guidance, dtype=dtype) * 1000
    )
    return model(
        inputs.latents.to(dtype),
        inputs.timestep,
        inputs.text.to(dtype),
        mask.to(dtype),
        inputs.pooled.to(dtype),
        guidance=guidance,
        return_dict=False,
    )[0]


# --- parity -----------------------------------------------------------------------------------------------------------


@table("name", VARIANTS)
def test_forward_equals_diffusers(folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    ours, theirs = load_ours(folder), load_theirs(folder)
    frames, height, width = ours.geometry.patch
    for grid in ((1, 2, 3), (3, 4, 2)):
        for lengths in ((4,), (5, 9), (2, 3)):
            inputs = make_inputs((grid[0] * frames, grid[1] * height, grid[2] * width), lengths)
            before = [tensor.clone() for tensor in (inputs.latents, inputs.text, inputs.pooled)]
            out = run_ours(ours, inputs)
            assert out.shape == inputs.latents.shape
            assert relative(out, run_theirs(theirs, inputs)) < 1e-5
            after = (inputs.latents, inputs.text, inputs.pooled)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_every_condition_matters(folder_of: Callable[[str], Path]) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    ours = load_ours(folder_of("plain"))
    inputs = make_inputs((1, 4, 4), (5,))
    out = run_ours(ours, inputs)
    text, pooled = inputs.text.clone(), inputs.pooled
    text[0, 4] += 1.0
    others = [
        Inputs(inputs.latents, inputs.timestep, text, pooled, (5,)),
        Inputs(inputs.latents, inputs.timestep, inputs.text, pooled + 1.0, (5,)),
        Inputs(inputs.latents, inputs.timestep, inputs.text, pooled, (4,)),
        Inputs(inputs.latents, inputs.timestep, inputs.text, pooled, (5,), guidance=1.0),
        Inputs(inputs.latents, inputs.timestep - 100, inputs.text, pooled, (5,)),
    ]
    for other in others:
        assert relative(run_ours(ours, other), out) > 1e-3


def test_bfloat16_is_as_exact_as_diffusers(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("plain")
    inputs = make_inputs((2, 6, 8))
    # A scale of 6 is 6016 thousandths in bfloat16, as in their pipeline.
    reference = run_theirs(load_theirs(folder), dataclasses.replace(inputs, guidance=6.016))
    theirs = load_theirs(folder, torch.bfloat16)
    theirs_error = relative(run_theirs(theirs, inputs, torch.bfloat16), reference)
    ours = load_ours(folder, torch.bfloat16)
    for name, parameter in ours.named_parameters():
        assert FAMILY.weights.stays_float32(name) == (parameter.dtype == torch.float32)
    out = run_ours(ours, inputs)
    assert out.dtype == torch.float32
    assert relative(out, reference) < 1.5 * theirs_error < 0.3


# --- attention --------------------------------------------------------------------------------------------------------


def test_padding_is_a_length_and_no_mask_reaches_a_layer(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("plain"))
    seen: dict[str, list[TokenLayout]] = {REFINER_ROLE: [], "self": []}

    def keep(module: AttentionLayer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert options.get("mask") is None
        seen[module.layer.role].append(arguments[3].layout)

    for layer in ours.attention_layers():
        layer.register_forward_pre_hook(keep, with_kwargs=True)
    run_ours(ours, make_inputs((2, 4, 6), (5, 3)))
    # The longest prompt has 5 tokens of the 9 there is room for: the rest is cut off before the first layer.
    assert set(seen["self"]) == {TokenLayout((2, 2, 3), num_suffix_tokens=5, valid_lengths=(5, 3))}
    assert set(seen[REFINER_ROLE]) == {TokenLayout.text(5, (5, 3))}
    assert {role: len(layouts) for role, layouts in seen.items()} == {REFINER_ROLE: 2, "self": 4}


def test_a_sparse_backend_that_keeps_everything_equals_dense(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("plain")
    inputs = make_inputs((3, 8, 6), (5, 9))
    sparse = load_ours(folder, attention={"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}})
    context = AttentionContext()
    assert relative(run_ours(sparse, inputs, context), run_ours(load_ours(folder), inputs)) < 1e-5
    backends = {row.role: row.backend for row in context.recorder.report().rows}
    assert backends == {"self": "video_sparse_attn", REFINER_ROLE: "torch_sdpa"}


def test_missing_conditions_are_named(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("plain"))
    inputs = make_inputs((1, 4, 4))
    with pytest.raises(RequestError, match="pooled text and a guidance scale"):
        run_ours(ours, inputs, text=Conditions.of(inputs.text, inputs.lengths))
    with pytest.raises(RequestError, match="pooled text and a guidance scale"):
        run_ours(ours, make_inputs((1, 4, 4), guidance=None))
