"""Step caches on the tiny model of every family: the same picture where nothing is reused, fewer blocks where it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_families import WRITERS, small_request

from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.core.block_stack import BlockRunner, MakeModulatedInput, ModulatedInput, RunBlock, Streams
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.step_cache.calibration import Calibration

NUM_STEPS = 4


@pytest.mark.parametrize("family", list(WRITERS))
@pytest.mark.slow
def test_every_family_has_them(tiny_folder_of: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    pipeline = load_pipeline(str(tiny_folder_of(family)), device="cpu")
    assert isinstance(pipeline, Pipeline)
    plain = dataclasses.replace(small_request(pipeline, NUM_STEPS), guidance_mode="two_pass")

    def run(cache: str | None) -> Any:
        return pipeline(dataclasses.replace(plain, step_cache=cache))

    expected = run(None)
    tea = teacache(pipeline, tmp_path / "a calibration.json")
    for nothing in ("easycache:threshold=0,force=true", "dbcache:F=1,R=0,W=0,force=true", f"{tea},threshold=0"):
        media = run(nothing)
        assert numpy.array_equal(media.frames, expected.frames), nothing
        assert all(row.num_computed == NUM_STEPS for row in media.attention_report.steps)
    for cache, computed in (
        ("easycache:threshold=10,warmup=0,force=true", "0-1,3"),
        ("dbcache:F=1,R=10,W=2,MC=1,force=true", "0-1,3"),
        (f"{tea},threshold=10", "0,3"),
    ):
        media = run(cache)
        assert {row.computed for row in media.attention_report.steps} == {computed}, cache
        assert media.attention_report.num_calls < expected.attention_report.num_calls
        assert numpy.isfinite(media.frames).all()


def teacache(pipeline: Pipeline, path: Path) -> str:
    """TeaCache with a calibration of this model by which every step changes as much as any other."""
    calibration = Calibration(
        pipeline.rules.step_caches.identity(),
        NUM_STEPS,
        {"cond": (1.0,) * NUM_STEPS},
        (),
        {},
        {},
        {"plain": (0.0,) * 4 + (0.1,)},
    )
    path.write_text(json.dumps(calibration.to_dict()))
    return f"teacache:file={json.dumps(str(path))},force=true"


class FirstInput(BlockRunner):
    """What a family says that its first block's modulated input is, and what the first projection then gets."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.said: list[ModulatedInput] = []
        self.found: list[torch.Tensor] = []
        self.num_grid_tokens = 0
        self._pipeline = pipeline

    def run(
        self,
        blocks: Sequence[RunBlock],
        streams: Streams,
        step: StepInfo,
        num_grid_tokens: int,
        modulated_input: MakeModulatedInput | None = None,
    ) -> Streams:
        assert modulated_input is not None
        self.num_grid_tokens = num_grid_tokens
        self.said.append(modulated_input())
        projections = [
            module
            for name, module in self._pipeline.transformer.named_modules()
            if name.rpartition(".")[2] in ("qkv", "qkv_up", "qkv_gate")
        ]
        expected = len(self.said)

        def hook(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            if len(self.found) < expected:
                self.found.append(given[0].clone())

        handles = [module.register_forward_pre_hook(hook) for module in projections]
        try:
            return super().run(blocks, streams, step, num_grid_tokens, modulated_input)
        finally:
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("family", list(WRITERS))
def test_the_modulated_input_is_what_the_first_block_gets(tiny_folder_of: Callable[[str], Path], family: str) -> None:
    pipeline = load_pipeline(str(tiny_folder_of(family)), device="cpu")
    assert isinstance(pipeline, Pipeline)
    runner = FirstInput(pipeline)
    request = pipeline.resolve(dataclasses.replace(small_request(pipeline, 2), guidance_mode="two_pass"))
    with pipeline.hooks.holding("block_runner", runner):
        pipeline(request)
    assert len(runner.said) == len(runner.found) >= 2
    for said, found in zip(runner.said, runner.found, strict=True):
        if said.projection is not None:
            # Of the timestep alone, as TeaCache's authors do for Wan.
            assert said.values.shape[1] == said.projection.shape[1] == 1
            assert said.projection.shape[2] == 6 * said.values.shape[2]
        else:
            tokens = slice(runner.num_grid_tokens)
            torch.testing.assert_close(said.values[:, tokens], found[:, tokens], atol=1e-6, rtol=1e-6)
    assert not torch.equal(runner.said[0].values, runner.said[-1].values)
