"""Settings that diffusers' multistep solvers have in common, as far as ours compute what they compute."""

from __future__ import annotations

from collections.abc import Mapping

from diffusion_runtime.untrusted.known_settings import (
    Allows,
    either,
    is_false,
    is_nothing,
    is_number,
    is_positive,
    is_true,
    whole,
)

# Setting -> the values with which the noise levels are the shifted ones of flow matching, and data is predicted.
MULTISTEP_SETTINGS: Mapping[str, Allows] = {
    "num_train_timesteps": whole(2, 100_000),
    "prediction_type": either("flow_prediction"),
    "use_flow_sigmas": is_true,
    "predict_x0": is_true,
    "final_sigmas_type": either("zero"),
    # What would change the schedule or the prediction.
    "thresholding": is_false,
    "use_karras_sigmas": is_false,
    "use_exponential_sigmas": is_false,
    "use_beta_sigmas": is_false,
    "rescale_betas_zero_snr": is_false,
    "solver_p": is_nothing,
    "trained_betas": is_nothing,
    # What nothing reads with those values.
    "beta_start": is_positive,
    "beta_end": is_positive,
    "beta_schedule": either("linear", "scaled_linear", "squaredcos_cap_v2"),
    "dynamic_thresholding_ratio": is_number,
    "sample_max_value": is_number,
    "steps_offset": either(0),
    "timestep_spacing": either("linspace", "leading", "trailing"),
}
