"""`bench step` on a GPU: replayed steps have the velocities of eager ones, to the bit."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime.benchmark.step import StepChoice, StepEffort, benchmark_step
from diffusion_runtime.benchmark.step_model import open_step_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("attention", ["torch_sdpa", None])
def test_replayed_modes(attention: str | None) -> None:
    modes = ("eager", "graphs", "fp8", "fp8+graphs")
    choice = StepChoice(modes, with_diffusers=False, attention=attention)
    effort = StepEffort(num_samples=3, matmul_size=1024)
    result = benchmark_step(open_step_model("shapes"), choice, torch.device("cuda"), torch.bfloat16, effort)
    rows = {row.name: row for row in result.rows}
    assert [row.state for row in result.rows] == ["measured"] * 4, rows
    assert rows["ours, graphs"].difference == 0
    assert rows["ours, fp8+graphs"].difference == rows["ours, fp8"].difference
    for name in ("ours, graphs", "ours, fp8+graphs"):
        shares = rows[name].shares
        assert shares is not None
        assert min(shares.attention, shares.linear) > 0
