"""Every setting of the schedulers of a folder: diffusers' own numbers, or a refusal at load that names file and key."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_schedule import FlowSchedule, LinearSigmas
from diffusion_runtime.denoising.registry import build_sampler, check_settings
from diffusion_runtime.denoising.scheduler_config import SHIFT_KEY, SchedulerConfig, read_scheduler_config
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.published_folders import FOLDERS_FILE
from diffusion_runtime.request.samplers import SAMPLERS
from diffusion_runtime.untrusted.yaml_text import read_packaged_yaml

NUM_STEPS = 7
UNIPC: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 5.0,
}
EULER: dict[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
# Values of each setting: the first runs, as published folders have it; others are invalid, or belong to models that no
# published folder holds. The tests see to it that no setting of a class is missing here.
UNIPC_VALUES: dict[str, tuple[Any, ...]] = {
    "num_train_timesteps": (1000, 500, 1, 0, -3, 2.5, "many", None, 10**18, True),
    "beta_start": (0.0001, 0.5, 2.0, -1.0, "x", None),
    "beta_end": (0.02, 5.0, -1.0, "x", None),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2", "nonsense", 3, None),
    "trained_betas": (None, [0.1] * 1000, [], "x", {"a": 1}),
    "solver_order": (1, 2, 3, 0, -1, 10**9, "two", None),
    "prediction_type": ("flow_prediction", "epsilon", "sample", "v_prediction", "nonsense", None),
    "thresholding": (False, True, None),
    "dynamic_thresholding_ratio": (0.995, 2.0, -1.0, "x"),
    "sample_max_value": (1.0, 0.0, "x"),
    "predict_x0": (True, False, None),
    "solver_type": ("bh2", "bh1", "midpoint", "heun", "logrho", "nonsense", None),
    "lower_order_final": (True, False, None),
    "disable_corrector": ([], [0, 1], None, 5),
    "solver_p": (None, {"a": 1}, "DDIMScheduler"),
    "use_karras_sigmas": (False, True),
    "use_exponential_sigmas": (False, True),
    "use_beta_sigmas": (False, True),
    "use_flow_sigmas": (True, False, None),
    "flow_shift": (5.0, 1, 1e9, 0.0, -1.0, float("inf"), float("nan"), "x", None, True),
    "timestep_spacing": ("linspace", "leading", "trailing", "nonsense", None),
    "steps_offset": (0, 1, "x"),
    "final_sigmas_type": ("zero", "sigma_min", "nonsense", None),
    "rescale_betas_zero_snr": (False, True),
    "use_dynamic_shifting": (False, True),
    "time_shift_type": ("exponential", "nonsense"),
    "sigma_min": (None, 0.1, "x"),
    "sigma_max": (None, 0.9, "x"),
    "shift_terminal": (None, 0.1, 1.0, "x"),
    "from_the_future": (1, None),
}
EULER_VALUES: dict[str, tuple[Any, ...]] = {
    "num_train_timesteps": (1000, 500, 1, 0, 2.5, "many", None, 10**18),
    "shift": (3.0, 1, 1e9, 0.0, -1.0, float("inf"), float("nan"), "x", None),
    "use_dynamic_shifting": (False,),
    "base_shift": (0.5, None),
    "max_shift": (1.15, None),
    "base_image_seq_len": (256,),
    "max_image_seq_len": (4096,),
    "invert_sigmas": (False, True),
    "shift_terminal": (None, 0.1, 1.0, "x"),
    "use_karras_sigmas": (False, True),
    "use_exponential_sigmas": (False, True),
    "use_beta_sigmas": (False, True),
    "time_shift_type": ("exponential", "linear"),
    "stochastic_sampling": (False, True, None),
    "from_the_future": (1, None),
}


def velocity(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    return torch.sin(3 * latents) + 0.5 * latents * (timestep / 1000)


def start() -> torch.Tensor:
    return torch.randn(1, 4, 2, 3, 3, generator=torch.Generator().manual_seed(3))


def by_diffusers(values: dict[str, Any], sigmas: tuple[float, ...] | None) -> tuple[list[float], torch.Tensor]:
    scheduler = getattr(diffusers, values["_class_name"]).from_config(values)
    if sigmas is None:
        scheduler.set_timesteps(NUM_STEPS)
    else:
        scheduler.set_timesteps(sigmas=list(sigmas))
    scheduler.set_begin_index(0)
    latents = start()
    for timestep in scheduler.timesteps:
        latents = scheduler.step(velocity(latents, float(timestep)), timestep, latents, return_dict=False)[0]
    return scheduler.timesteps.tolist(), latents


def by_ours(folder: Path, sigmas: tuple[float, ...] | None) -> tuple[list[float], torch.Tensor]:
    config = read_scheduler_config(folder)
    assert config.sampler is not None
    check_settings(config.sampler, config.options_for(config.sampler), config.path)
    return run(config, config.defaults["flow_shift"], sigmas)


def run(
    config: SchedulerConfig, flow_shift: float, sigmas: tuple[float, ...] | None
) -> tuple[list[float], torch.Tensor]:
    assert config.sampler is not None
    timesteps: list[float] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.timestep is not None
        timesteps.append(step.timestep)
        return velocity(latents, step.timestep)

    sampler = build_sampler(config.sampler, NUM_STEPS, flow_shift, config.options_for(config.sampler), sigmas)
    return timesteps, sampler.sample(start(), predict)


def differences(
    folder: Path, base: dict[str, Any], key: str, value: Any, schedule: FlowSchedule, runs: bool
) -> str | None:
    """What is wrong with one value of one setting; None for diffusers' numbers and for a good refusal."""
    values, sigmas = {**base, key: value}, schedule.sigmas(NUM_STEPS)
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(values))
    try:
        timesteps, latents = by_ours(folder, sigmas)
    except ModelLoadError as error:
        if str(path) not in str(error) or key not in str(error):
            return f"the refusal does not name it: {error}"
        return f"is refused: {error}" if runs else None
    except Exception as error:
        return f"untyped: {error!r}"
    if key == "from_the_future":
        return "was not refused"
    expected_timesteps, expected = by_diffusers(values, sigmas)
    same = timesteps == expected_timesteps and torch.equal(latents, expected) and bool(latents.isfinite().all())
    return None if same else f"differs from diffusers by {(latents - expected).abs().max():g}"


@pytest.mark.filterwarnings("ignore")
@table(
    ("base", "table", "schedule"),
    [
        (UNIPC, UNIPC_VALUES, FlowSchedule()),
        (EULER, EULER_VALUES, FlowSchedule()),
        (EULER, EULER_VALUES, LinearSigmas()),
    ],
    ids=["unipc", "euler", "euler-evenly-falling"],
)
def test_a_setting_gives_diffusers_numbers_or_a_refusal(
    base: dict[str, Any], table: dict[str, tuple[Any, ...]], schedule: FlowSchedule, tmp_path: Path
) -> None:
    (tmp_path / "scheduler").mkdir()
    wrong = {
        f"{key}={str(value)[:40]}": found
        for key, several in table.items()
        for index, value in enumerate(several)
        if (found := differences(tmp_path, base, key, value, schedule, index == 0 and key != "from_the_future"))
        is not None
    }
    assert not wrong


@table(("base", "table"), [(UNIPC, UNIPC_VALUES), (EULER, EULER_VALUES)])
def test_no_setting_of_the_installed_class_is_missing_from_the_table(
    base: dict[str, Any], table: dict[str, tuple[Any, ...]]
) -> None:
    assert set(inspect.signature(getattr(diffusers, base["_class_name"])).parameters) <= set(table)
    assert set(SHIFT_KEY.values()) & set(table)


@pytest.mark.filterwarnings("ignore:__array__")
def test_published_folders_are_computed_as_diffusers_does(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    path, settings = tmp_path / "scheduler" / "scheduler_config.json", []
    for folder in read_packaged_yaml(FOLDERS_FILE).values():
        values = folder.get("scheduler/scheduler_config.json")
        # Flow maps: tests/models/wan/test_flow_map.py.
        if values is not None and values not in settings and "FlowMap" not in values["_class_name"]:
            settings.append(values)
    assert len(settings) >= 9
    for values in settings:
        path.write_text(json.dumps(values))
        config = read_scheduler_config(tmp_path)
        assert config.sampler is not None
        check_settings(config.sampler, config.options_for(config.sampler), config.path)
        diffusers_class = getattr(diffusers, SAMPLERS[config.sampler].scheduler_class or "")
        known = inspect.signature(diffusers_class).parameters
        plain = {key: value for key, value in config.values.items() if key in known} | {"use_dynamic_shifting": False}
        sigmas = None if config.sampler in ("unipc", "dpmpp_2m") else LinearSigmas().sigmas(NUM_STEPS)
        expected = by_diffusers({**plain, "_class_name": diffusers_class.__name__}, sigmas)
        shift = float(config.values.get(SHIFT_KEY[config.sampler], 1.0))
        found = run(config, shift, sigmas)
        assert found[0] == expected[0], values
        assert torch.equal(found[1], expected[1]), values
