"""Skip-layer guidance: which passes leave out which blocks, and what is made of them. Whole generations are compared
with diffusers' SkipLayerGuidance in models/anima/test_pipeline.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import table
from tiny_families import given_to, small_request

from diffusion_runtime import Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.core.step_info import PERTURBED
from diffusion_runtime.denoising.guidance import with_guidance
from diffusion_runtime.denoising.skip_layers import SkipLayers
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")
# Velocities of the branches, with all blocks and without some.
WHOLE, CUT = {"cond": 5.0, "uncond": 2.0}, {"uncond": 3.0, PERTURBED: 4.0}


@table(
    ("scale", "skip", "expected", "passes"),
    [
        # 2 + 3 * 3; with 3 in place of 2; with 0.5 * (5 - 4) more; 4 + 0.5 * (5 - 4).
        (3.0, None, [11.0, 11.0, 11.0], 2),
        (3.0, SkipLayers((1,), start=0.1, stop=0.5), [11.0, 9.0, 11.0], 2),
        (3.0, SkipLayers((1,), 0.5, start=0.1, stop=0.5), [11.0, 11.5, 11.0], 3),
        (1.0, SkipLayers((1,), 0.5, start=0.1, stop=0.5), [5.0, 4.5, 5.0], 2),
    ],
)
def test_velocities_are_combined(scale: float, skip: SkipLayers | None, expected: list[float], passes: int) -> None:
    ran: list[int] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        ran.append(step.index)
        assert step.skipped_blocks in ((), (1,))
        return torch.full_like(latents, (CUT if step.skipped_blocks else WHOLE)[step.branch])

    guided = with_guidance(predict, scale, "two_pass", skip=skip)
    found = [float(guided(torch.zeros(1), StepInfo(index, 3))) for index in range(3)]
    assert found == pytest.approx(expected)
    assert ran.count(1) == passes


@pytest.mark.parametrize("family", ["flux1", "wan", "krea2"])
def test_blocks_leave_the_tokens_as_they_are(tiny_folder_of: Callable[[str], Path], family: str) -> None:
    """Those of two streams as well, the last of which joins them: as if the block's own outputs were zero."""
    pipeline = load_pipeline(str(tiny_folder_of(family)), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    model, given = pipeline.transformer, given_to(pipeline)

    def run(*skipped: int) -> torch.Tensor:
        return model(*given, AttentionContext(step=StepInfo(skipped_blocks=skipped)))

    found = [run(index) for index in range(model.num_blocks)]
    whole = run()
    lists = [getattr(model, name) for name in ("double_blocks", "single_blocks", "blocks") if hasattr(model, name)]
    blocks = [block for several in lists for block in several]
    assert len(blocks) == model.num_blocks
    for block, cut in zip(blocks, found, strict=True):
        kept = {name: each.clone() for name, each in block.state_dict().items()}
        # The layers whose products are added to the tokens.
        for name, each in block.named_parameters():
            if f".{name}".split(".")[-2] in ("out", "text_out", "down"):
                each.data.zero_()
        assert (run() - cut).abs().max() < 1e-5 < 1e-3 < (cut - whole).abs().max()
        block.load_state_dict(kept)


def test_a_request_says_which_and_when(tiny_folder_of: Callable[[str], Path]) -> None:
    config = RuntimeConfig(str(tiny_folder_of("krea2")), device="cpu")
    pipeline = inspect_pipeline(config)

    def asked(**values: Any) -> Any:
        return pipeline.rules.resolve(dataclasses.replace(small_request_of, **values))

    small_request_of = small_request(load_pipeline(config))
    # Both branches in one pass could not leave out blocks of one.
    assert asked(skip_layers=(1,), guidance_scale=3.0).guidance_mode == "two_pass"
    assert asked(skip_layers=(1,), guidance_scale=3.0, skip_layer_scale=1.0).guidance_mode == "batched"
    for values, told in (
        ({"skip_layer_scale": 1.0}, "skip_layer_scale: needs the blocks that are left out"),
        ({"skip_layers": (3,)}, "skip_layers: expected indices from 0 to 2, the model's blocks, got 3"),
        ({"skip_layers": (0, 1, 2)}, "skip_layers: these are all blocks"),
        ({"skip_layers": (1,), "skip_layer_start": 0.5, "skip_layer_stop": 0.4}, "expected more than skip_layer_start"),
        ({"skip_layers": (1,), "guidance_scale": 3.0, "step_cache": "easycache"}, "easycache compares passes of"),
    ):
        with pytest.raises(RequestError, match=told):
            asked(**values)


def test_a_generation_says_what_it_skips(tiny_folder_of: Callable[[str], Path]) -> None:
    pipeline = load_pipeline(str(tiny_folder_of("krea2")), device="cpu", dtype="float32")
    plain = dataclasses.replace(small_request(pipeline, 3), guidance_scale=3.0)
    cut = dataclasses.replace(plain, skip_layers=(1,), skip_layer_start=0.3)
    off = dataclasses.replace(cut, skip_layer_stop=0.0)
    made = [pipeline(each) for each in (plain, cut, off)]
    assert "the unconditional pass skips block 1 from 0.3 to 1 of the steps" in str(made[1].attention_report)
    same = [(made[0].frames == each.frames).all() for each in made]
    assert same == [True, False, True]
