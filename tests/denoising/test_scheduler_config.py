"""Reading a model folder's scheduler settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tables import table

from diffusion_runtime.denoising.scheduler_config import read_scheduler_config
from diffusion_runtime.errors import ModelLoadError

UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.42.1",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 5.0,
    "num_train_timesteps": 900,
    "solver_order": 3,
}
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 8.0}


def write(folder: Path, values: Any) -> Path:
    (folder / "scheduler").mkdir()
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / "scheduler" / "scheduler_config.json").write_text(text)
    return folder


@table(
    ("values", "sampler", "flow_shift"),
    [(UNIPC, "unipc", 5.0), (EULER, "flow_match_euler", 8.0), (EULER | {"shift": 2}, "flow_match_euler", 2.0)],
)
def test_the_class_picks_the_sampler_and_its_shift(
    tmp_path: Path, values: dict[str, Any], sampler: str, flow_shift: float
) -> None:
    config = read_scheduler_config(write(tmp_path, values))
    assert config.defaults == {"sampler": sampler, "flow_shift": flow_shift}


def test_a_missing_shift_is_the_class_default(tmp_path: Path) -> None:
    config = read_scheduler_config(write(tmp_path, {"_class_name": "FlowMatchEulerDiscreteScheduler"}))
    assert config.defaults["flow_shift"] == 1.0


def test_options_go_to_their_own_class_and_training_timesteps_to_every_one(tmp_path: Path) -> None:
    config = read_scheduler_config(write(tmp_path, UNIPC))
    assert config.options_for("unipc") == {
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "num_train_timesteps": 900,
        "solver_order": 3,
    }
    assert config.options_for("flow_match_euler") == {"num_train_timesteps": 900}


def test_another_class_has_no_default_and_its_error_names_both(tmp_path: Path) -> None:
    config = read_scheduler_config(write(tmp_path, {"_class_name": "DDIMScheduler", "num_train_timesteps": 1000}))
    assert config.defaults == {}
    assert config.options_for("unipc") == {"num_train_timesteps": 1000}
    message = str(config.unknown_class_error())
    assert all(name in message for name in ("DDIMScheduler", "UniPCMultistepScheduler", "FlowMatchEulerDiscrete"))


@table(
    ("values", "told"),
    [
        ("{", "JSON"),
        ("[1]", "json object"),
        ({"shift": 1.0}, "_class_name"),
        (UNIPC | {"prediction_type": "epsilon"}, "prediction_type"),
        ({"_class_name": "UniPCMultistepScheduler"}, "prediction_type"),
        (UNIPC | {"use_flow_sigmas": False}, "use_flow_sigmas"),
        (EULER | {"stochastic_sampling": True}, "stochastic_sampling"),
        (EULER | {"shift": "three"}, "shift"),
        (EULER | {"shift": None}, "shift"),
        (UNIPC | {"num_train_timesteps": 0}, "num_train_timesteps"),
    ],
)
def test_what_cannot_be_used_is_a_load_error_that_names_it(tmp_path: Path, values: Any, told: str) -> None:
    with pytest.raises(ModelLoadError, match=told) as caught:
        read_scheduler_config(write(tmp_path, values))
    assert "scheduler_config.json" in str(caught.value)


def test_a_missing_file_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is missing; a diffusers model folder has it"):
        read_scheduler_config(tmp_path)
