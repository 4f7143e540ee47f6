"""Our transformer against diffusers' WanTransformer3DModel on the same weights, float32 on the CPU: within 1e-5."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from denoiser_inputs import text_inputs
from diffusers import WanTransformer3DModel
from family_parity import write_plain_scheduler
from tables import table

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.errors import BackendUnavailableError, RequestError
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.models.wan.weights import transformer_pieces

CPU = torch.device("cpu")
CHANNELS, TEXT_DIM = 4, 12


@dataclass(frozen=True)
class Variant:
    """Sizes of a transformer to compare on."""

    num_heads: int = 2
    head_dim: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    norm_cross: bool = True
    max_shard_size: str = "10GB"


VARIANTS = {
    "plain": Variant(),
    "sharded, head_dim 128": Variant(num_heads=2, head_dim=128, max_shard_size="700KB"),
    "head_dim 64, other patch, no norm before cross": Variant(4, 64, (2, 1, 3), norm_cross=False),
}


def write_folder(folder: Path, variant: Variant) -> Path:
    """A folder with a random transformer, and the rest of what a family reads of one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            patch_size=variant.patch,
            num_attention_heads=variant.num_heads,
            attention_head_dim=variant.head_dim,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=32,
            ffn_dim=96,
            num_layers=3,
            cross_attn_norm=variant.norm_cross,
            rope_max_seq_len=64,
        )
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one would hide a norm that is left out.
            if "norm" in name:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(folder / "transformer", max_shard_size=variant.max_shard_size)
    (folder / "model_index.json").write_text(json.dumps({"transformer": ["diffusers", "WanTransformer3DModel"]}))
    write_plain_scheduler(folder)
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"z_dim": CHANNELS}))
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = write_folder(tmp_path_factory.mktemp("wan"), VARIANTS[name])
        return folders[name]

    return folder


def load_ours(folder: Path, dtype: torch.dtype = torch.float32) -> WanTransformer:
    model = FAMILY.describe(folder)
    return model.load_transformer(model.build_transformer(AttentionPolicy(dtype=dtype)), CPU, dtype)


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    return WanTransformer3DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def inputs(
    shape: tuple[int, int, int], batch: int = 1, num_text_tokens: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents of a shape (frames, height, width), unequal timesteps, text whose padding is zero."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, CHANNELS, *shape, generator=generator)
    text = torch.randn(batch, num_text_tokens, TEXT_DIM, generator=generator)
    text[:, 5:] = 0.0
    return latents, torch.linspace(937.3, 12.0, batch + 1)[:batch], text


def run_ours(
    model: WanTransformer,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    context: AttentionContext,
) -> torch.Tensor:
    return model(latents, timestep, text_inputs(text), context)


@torch.no_grad()
def run_theirs(
    model: WanTransformer3DModel, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    return model(latents, timestep, text, return_dict=False)[0]


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


# --- parity -----------------------------------------------------------------------------------------------------------


@table("name", VARIANTS)
def test_forward_equals_diffusers(folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    assert (len(list((folder / "transformer").glob("*.safetensors"))) > 2) == ("sharded" in name)
    ours, theirs = load_ours(folder), load_theirs(folder)
    frames, height, width = VARIANTS[name].patch
    for grid in ((1, 1, 1), (1, 4, 4), (3, 5, 7)):
        for batch in (1, 2):
            arguments = inputs((grid[0] * frames, grid[1] * height, grid[2] * width), batch)
            before = [argument.clone() for argument in arguments]
            out = run_ours(ours, *arguments, AttentionContext())
            assert out.shape == arguments[0].shape
            assert relative(out, run_theirs(theirs, *arguments)) < 1e-5
            assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


def test_bfloat16_keeps_the_same_parts_in_float32_and_is_as_exact_as_diffusers(
    folder_of: Callable[[str], Path],
) -> None:
    folder = folder_of("head_dim 64, other patch, no norm before cross")
    exact = load_theirs(folder)
    ours, theirs = load_ours(folder, torch.bfloat16), load_theirs(folder, torch.bfloat16)
    latents, timestep, text = inputs((4, 6, 9), batch=2)
    reference = run_theirs(exact, latents, timestep, text)
    theirs_error = relative(run_theirs(theirs, latents.bfloat16(), timestep, text.bfloat16()), reference)
    out = run_ours(ours, latents, timestep, text, AttentionContext())
    assert out.dtype == torch.float32
    assert relative(out, reference) < 1.5 * theirs_error < 0.1


@table("name", VARIANTS)
def test_every_parameter_has_the_dtype_it_has_in_diffusers(folder_of: Callable[[str], Path], name: str) -> None:
    ours, theirs = load_ours(folder_of(name), torch.bfloat16), load_theirs(folder_of(name), torch.bfloat16)
    their_dtypes = {key: value.dtype for key, value in theirs.state_dict().items()}
    pieces = dict(transformer_pieces(ours.config))
    for key, value in ours.state_dict().items():
        assert {their_dtypes.pop(piece.name) for piece in pieces[key]} == {value.dtype}, key
        assert FAMILY.weights.stays_float32(key) == (value.dtype == torch.float32)
    assert not their_dtypes


# --- attention --------------------------------------------------------------------------------------------------------


def test_layers_see_the_grid_and_the_text(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("plain"))
    seen: dict[str, TokenLayout] = {}

    def keep(module: AttentionLayer, arguments: tuple[Any, ...]) -> None:
        seen[module.layer.role] = arguments[3].layout

    for layer in ours.attention_layers():
        layer.register_forward_pre_hook(keep)
    run_ours(ours, *inputs((2, 4, 6)), AttentionContext())
    assert seen["self"].grid == (2, 2, 3)
    assert seen["self"].num_text_tokens == 0
    assert seen["cross"].num_text_tokens == 7
    assert seen["cross"].num_grid_tokens == 0
    assert not seen["cross"].has_padding


def test_a_choice_that_cannot_run_fails_before_any_weight_is_there(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "config_alone"
    for name in ("model_index.json", "vae/config.json", "transformer/config.json", "scheduler/scheduler_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((folder_of("plain") / name).read_bytes())
    policy = AttentionPolicy(config=AttentionConfig.parse("fa"))
    with pytest.raises(BackendUnavailableError):
        FAMILY.describe(folder).build_transformer(policy)


def test_latents_that_are_no_whole_patches_are_refused(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("plain"))
    with pytest.raises(RequestError, match="whole number of 1 x 2 x 2 patches"):
        run_ours(ours, *inputs((1, 3, 4)), AttentionContext())


def test_another_grid_in_the_same_request_has_its_own_positions(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("plain")
    ours, theirs = load_ours(folder), load_theirs(folder)
    context = AttentionContext()
    for shape in ((1, 4, 8), (1, 8, 4), (2, 4, 4)):
        arguments = inputs(shape)
        assert relative(run_ours(ours, *arguments, context), run_theirs(theirs, *arguments)) < 1e-5
