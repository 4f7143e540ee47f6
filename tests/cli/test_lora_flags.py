"""--lora-path and --lora-scale."""

from __future__ import annotations

import pytest

from diffusion_runtime.cli.settings import pair_loras
from diffusion_runtime.errors import UsageError


def test_scales_go_with_the_files_in_their_order() -> None:
    assert pair_loras(["a", "b"], [0.5]) == [{"path": "a", "scale": 0.5}, {"path": "b", "scale": 1.0}]
    assert pair_loras([], []) is None


def test_a_scale_without_a_file_is_an_error() -> None:
    with pytest.raises(UsageError, match="--lora-scale is given 2 times for 1 --lora-path"):
        pair_loras(["a"], [1.0, 2.0])
