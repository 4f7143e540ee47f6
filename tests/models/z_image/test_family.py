"""What a Z-Image folder says of the model before its distillation; what every folder says is in family_cases."""

from __future__ import annotations

import shutil
from pathlib import Path

from family_cases import SCHEDULER, change
from tables import table

from diffusion_runtime.models.registry import family_for_folder


@table(("flow_shift", "steps", "scale"), [(3.0, 8, 0.0), (6.0, 50, 4.0)])
def test_the_model_before_distillation_has_settings_of_its_own(
    tiny_z_image_folder: Path, tmp_path: Path, flow_shift: float, steps: int, scale: float
) -> None:
    """Z-Image-Turbo runs eight forward passes without guidance; Z-Image needs both more steps and guidance."""
    folder = Path(shutil.copytree(tiny_z_image_folder, tmp_path / "folder"))
    change(folder, SCHEDULER, {"shift": flow_shift})
    defaults = family_for_folder(folder).describe(folder).defaults
    assert (defaults["num_inference_steps"], defaults["guidance_scale"]) == (steps, scale)
