"""The Wan-Animate 2 transformer against diffusers' own on tiny weights, float32: within 1e-5 of the largest value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_parity import load_transformer, relative
from tables import table
from tiny_wan_animate_2 import MAX_TEXT_TOKENS

from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions, TextStream

# diffusers' eager FlexAttention says that it is one.
pytestmark = pytest.mark.filterwarnings("ignore")
FRAMES, HEIGHT, WIDTH = 3, 6, 10
LENGTHS, TIMESTEPS = (5, 9), (937.3, 474.65)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def theirs_of(folder: Path, tokens: torch.Tensor | None, given: dict[str, Any], branch: str) -> torch.Tensor:
    """Run diffusers' two passes, sample by sample."""
    from diffusers import WanAnimate2Transformer3DModel
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    model = WanAnimate2Transformer3DModel.from_pretrained(folder / "transformer").eval()
    grid, outs = torch.tensor([[FRAMES, HEIGHT // 2, WIDTH // 2]]), []
    halves = (None, None) if tokens is None else tokens.chunk(2, dim=1)
    for index, timestep in enumerate(TIMESTEPS):
        cache = WanAnimate2KVCache(model.config.num_layers)
        driving = given["driving"][0]
        with torch.no_grad():
            model(
                [driving],
                timestep=torch.tensor([timestep]),
                encoder_hidden_states=[given["driving_text"][0]],
                encoder_hidden_states_image=halves[1],
                condition_latents=[torch.cat([torch.ones(4, *driving.shape[1:]), driving])],
                kv_cache=cache,
                kv_cache_mode="extract",
                seq_len=FRAMES * HEIGHT * WIDTH // 4,
                offset_grid_sizes=grid,
            )
            outs.append(
                model(
                    [given["latents"][index]],
                    timestep=torch.tensor([timestep]),
                    encoder_hidden_states=[given["text"][index]],
                    encoder_hidden_states_image=halves[0],
                    condition_latents=[given["condition"][0]],
                    kv_cache=cache,
                    kv_cache_mode="cached",
                    seq_len=(FRAMES + 1) * HEIGHT * WIDTH // 4,
                    reference_grid_sizes=grid,
                    origin_len=4 * FRAMES - 3,
                    origin_area=[8 * HEIGHT, 8 * WIDTH],
                    is_uncondtion=branch == "uncond",
                ).sample[0]
            )
    return torch.stack(outs)


@table(
    "how",
    [
        {"num_layers": 2, "has_image_encoder": True},
        {"num_layers": 11},
        {"num_layers": 2, "refer_offset_t": 0, "refer_offset_h": -1, "refer_offset_w": 3, "refer_stride": 2},
        {"num_layers": 1, "cross_attn_norm": False},
    ],
)
def test_both_passes_equal_those_of_diffusers(folder_of: Callable[..., Path], how: dict[str, Any]) -> None:
    folder = folder_of(**how)
    ours = load_transformer(family_for_folder(ModelFolder(folder)), ModelFolder(folder))
    given = {
        "latents": randn(2, 16, FRAMES + 1, HEIGHT, WIDTH, seed=0),
        "condition": randn(1, 20, FRAMES + 1, HEIGHT, WIDTH, seed=1),
        "driving": randn(1, 16, FRAMES, HEIGHT, WIDTH, seed=2),
        "text": randn(2, MAX_TEXT_TOKENS, 32, seed=3),
        "driving_text": randn(1, MAX_TEXT_TOKENS, 32, seed=4),
    }
    for row, length in zip(given["text"], LENGTHS, strict=True):
        row[length:] = 0
    tokens = randn(1, 10, 1280, seed=5) if "has_image_encoder" in how else None
    behind = torch.cat([torch.zeros(1, 16, 1, HEIGHT, WIDTH), given["driving"]], dim=2)
    image = ImageCondition(torch.cat([given["condition"], behind], dim=1), tokens)
    stream = TextStream(given["driving_text"].repeat(2, 1, 1), (MAX_TEXT_TOKENS,) * 2)
    text = Conditions.of(given["text"], LENGTHS, further=[stream])
    inputs = DenoiserInputs(text, ClipSize(8 * HEIGHT, 8 * WIDTH, 4 * FRAMES - 3, 24), image=image.repeat(2))
    # Both branches of guidance, one after the other with one driving pass, and in one batch.
    contexts, state = {}, AttentionContext().state
    for branch in ("cond", "uncond", "both"):
        contexts[branch] = AttentionContext(step=StepInfo(branch=branch), state=state)
    found = {
        branch: ours(given["latents"], torch.tensor(TIMESTEPS), inputs, contexts[branch])
        for branch in ("cond", "uncond")
    }
    for branch, out in found.items():
        assert relative(out, theirs_of(folder, tokens, given, branch)) <= 1e-5, branch
    is_left_out = how["num_layers"] > 9
    assert (relative(found["uncond"], found["cond"]) > 0.01) == is_left_out
    joined = dataclasses.replace(inputs, text=text.take([0, 1, 0, 1]), image=image.repeat(4))
    twice = torch.cat([given["latents"]] * 2), torch.tensor(TIMESTEPS * 2)
    assert relative(ours(*twice, joined, contexts["both"]), torch.cat(list(found.values()))) <= 1e-5
    # The driving video's keys were computed once.
    counted = contexts["cond"].recorder.report(), contexts["uncond"].recorder.report()
    phases = [{(row.role, row.phase) for row in report.rows} for report in counted]
    assert ("self", "commit") in phases[0]
    assert ("self", "commit") not in phases[1]
