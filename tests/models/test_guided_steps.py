"""Guidance of some steps, CFG-zero* and zeros in place of the negative prompt, in whole generations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tables import table
from tiny_families import small_request

from diffusion_runtime import Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pipeline(tiny_folder_of: Callable[[str], Path]) -> Pipeline:
    loaded = load_pipeline(str(tiny_folder_of("krea2")), device="cpu", dtype="float32")
    assert isinstance(loaded, Pipeline)
    return loaded


@table(
    ("values", "passes", "said"),
    [
        # Of two branches one after the other, in four steps.
        ({}, 8, ()),
        ({"guidance_start": 0.25, "guidance_stop": 0.5}, 5, ("guidance from 0.25 to 0.5 of the steps",)),
        ({"zero_init_steps": 1}, 6, ("the first step changes nothing",)),
        ({"cfg_zero_star": "on"}, 8, ("with its velocity scaled",)),
        ({"cfg_zero_star": "comfyui"}, 8, ("with what it predicts to be clean scaled",)),
        ({"negative_encoding": "zeros"}, 8, ("zeros in place of the encoded negative prompt",)),
        ({"cfg_zero_star": "off", "zero_init_steps": 0, "guidance_start": 0.0, "guidance_stop": 1.0}, 8, ()),
    ],
)
def test_a_generation_runs_and_says_them(
    pipeline: Pipeline, values: dict[str, Any], passes: int, said: tuple[str, ...]
) -> None:
    plain = dataclasses.replace(
        small_request(pipeline, 4), guidance_scale=3.0, guidance_mode="two_pass", negative_prompt="blurry"
    )
    ran: list[str] = []
    hook = pipeline.transformer.register_forward_pre_hook(lambda *_: ran.append(""))
    media = pipeline(dataclasses.replace(plain, **values))
    hook.remove()
    assert len(ran) == passes
    assert all(each in str(media.attention_report) for each in said)
    differs = (pipeline(plain).frames != media.frames).any()
    assert bool(differs) == bool(said)


def test_wrong_values_are_refused_before_anything_runs(tiny_folder_of: Callable[[str], Path]) -> None:
    config = RuntimeConfig(str(tiny_folder_of("krea2")), device="cpu")
    prepared = inspect_pipeline(config)
    plain = dataclasses.replace(small_request(load_pipeline(config), 4), guidance_scale=3.0)
    for values, told in (
        (
            {"guidance_start": 0.5, "guidance_stop": 0.5},
            "guidance_stop: expected more than guidance_start, 0.5, got 0.5",
        ),
        ({"guidance_start": 0.8}, "none of 4 steps is from 0.8 to 1, of which the last one begins at 0.75"),
        ({"zero_init_steps": 4}, "zero_init_steps: expected fewer than the 4 steps, got 4"),
        ({"cfg_zero_star": "yes"}, "cfg_zero_star: unknown value 'yes'"),
        ({"negative_encoding": "zero"}, "negative_encoding: unknown value 'zero'"),
        ({"guidance_start": 1.5}, "guidance_start: expected a number from 0 to 1"),
    ):
        with pytest.raises(RequestError, match=told):
            prepared.rules.resolve(dataclasses.replace(plain, **values))
    unguided = prepared.rules.resolve(dataclasses.replace(plain, guidance_scale=0.0, guidance_start=0.5))
    assert any("guidance_start: 0.5 is not used" in each for each in prepared.rules.unused(unguided))
