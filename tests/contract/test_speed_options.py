"""The table of speed options in docs/faster.md: figures out of the measurements, and every option is in it."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest

from diffusion_runtime import GenerationRequest
from diffusion_runtime.attention.backends.registry import available_names
from diffusion_runtime.config import runtime_options
from diffusion_runtime.request.step_cache_options import StepCacheSettings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faster.md"
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "write_speed_table.py"))
# Options that say what is made, of which weights, and where.
NOT_ABOUT_SPEED = {
    *("model_path", "like", "models_dir", "download", "backend", "device", "dtype", "attention", "attention_override"),
    *("variant", "workflow", "upsampler_path", "lora", "self_check", "pipeline_arguments", "revision", "offline"),
    *(name for name, option in runtime_options().items() if option.is_weight_path),
}
REQUEST_FIELDS = {"num_inference_steps", "step_cache", "cfg_gate", "progressive_resolution", "guidance_mode"}


def test_the_table_is_what_was_measured() -> None:
    assert SCRIPT["START"] + SCRIPT["table"]() + SCRIPT["END"] in PAGE.read_text(encoding="utf-8"), (
        "python scripts/write_speed_table.py"
    )


def test_every_case_is_one() -> None:
    for row in SCRIPT["declared"]()["rows"]:
        assert SCRIPT["speed_up"](row) > SCRIPT["LEAST"], f"{row['option']} is not faster: remove it with its code"
        assert SCRIPT["is_of_the_machine"](row["file"]) or "CPU" in row["case"], row["option"]
        assert row["case"]
        assert row["loses"]


def test_every_option_is_in_it() -> None:
    declared = SCRIPT["declared"]()
    named = [name for row in declared["rows"] for name in row["covers"]]
    others = [name for other in declared["others"] for name in other["names"]]
    assert not set(named) & set(others)
    own = {*runtime_options()} - NOT_ABOUT_SPEED
    expected = {*available_names(), *StepCacheSettings.methods, *own, *REQUEST_FIELDS}
    assert not expected - {*named, *others}, "scripts/speed_options.yaml says nothing of these"
    fields = {field.name for field in dataclasses.fields(GenerationRequest)}
    known = {*available_names(), *StepCacheSettings.methods, *runtime_options(), *fields, "preset"}
    assert not {*named, *others} - known, "scripts/speed_options.yaml names what is not here"


def test_a_path_leads_to_one_figure() -> None:
    content = {"rows": [{"name": "a", "ms": 2.0}, {"name": "b", "ms": 1.0}, {"name": "b", "ms": 3.0}]}
    assert SCRIPT["found"](content, ["rows", {"name": "a"}, "ms"]) == 2.0
    for path in (["rows", {"name": "b"}, "ms"], ["rows", {"name": "c"}, "ms"], ["lines"]):
        with pytest.raises(KeyError):
            SCRIPT["found"](content, path)
