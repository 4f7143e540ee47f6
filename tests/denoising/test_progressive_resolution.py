"""Progressive resolution: the transform, the noise level at which the size grows, the stages, whole loops."""

from __future__ import annotations

import math

import pytest
import torch
from staged_sampling import sample_in_stages
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.flow_match_euler import FlowMatchEulerSampler
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.progressive_resolution import (
    Stage,
    dct_matrix,
    fit_spectrum,
    grown,
    growth_level,
    plan_stages,
    rewound,
)
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.denoising.unipc import UniPCSampler
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.progressive_options import LatentSpectrum, ProgressiveSettings

WAN = LatentSpectrum(219.484718, 2.422687)
CPU = torch.device("cpu")


def dct_by_definition(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal DCT-II of [height, width], term by term (Ahmed et al. 1974)."""
    height, width = x.shape
    out = torch.zeros_like(x)
    for i in range(height):
        for j in range(width):
            total = 0.0
            for y in range(height):
                for z in range(width):
                    rows = math.cos(math.pi * (2 * y + 1) * i / (2 * height))
                    total += float(x[y, z]) * rows * math.cos(math.pi * (2 * z + 1) * j / (2 * width))
            scales = [math.sqrt((1 if k == 0 else 2) / n) for k, n in ((i, height), (j, width))]
            out[i, j] = scales[0] * scales[1] * total
    return out


def test_the_transform_is_the_orthonormal_dct() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows, columns = (dct_matrix(size, torch.float64, CPU) for size in x.shape)
    transformed = rows @ x @ columns.T
    assert (transformed - dct_by_definition(x)).abs().max() < 1e-12
    assert (rows.T @ transformed @ columns - x).abs().max() < 1e-12


def test_growth_keeps_the_low_frequencies_and_fills_the_others_with_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    small, noise = (torch.randn(2, 3, *size, dtype=torch.float64, generator=generator) for size in ((4, 5), (8, 10)))
    sigma = 0.7
    large = grown(small, noise, sigma)
    for sample, channel in ((0, 0), (1, 2)):
        found = dct_by_definition(large[sample, channel]) * (1 + sigma) / 2
        expected = sigma * noise[sample, channel].clone()
        expected[:4, :5] = dct_by_definition(small[sample, channel])
        assert (found - expected).abs().max() < 1e-12


def test_growth_moves_to_the_higher_noise_level() -> None:
    """Data, on smaller latents and on larger ones, is (1 - sigma) of them; noise is sigma of them."""
    sigma = 0.6
    no_noise = torch.zeros(1, 1, 32, 32, dtype=torch.float64)
    data = grown(torch.full((1, 1, 16, 16), (1 - sigma) * 3.0, dtype=torch.float64), no_noise, sigma)
    assert (data - (1 - rewound(sigma)) * 3.0).abs().max() < 1e-12
    generator = torch.Generator().manual_seed(0)
    small, fresh = (torch.randn(1, 64, n, n, dtype=torch.float64, generator=generator) for n in (16, 32))
    assert float(grown(sigma * small, fresh, sigma).std()) == pytest.approx(rewound(sigma), rel=0.01)


def test_the_published_noise_levels_and_shares_of_steps() -> None:
    """Wan 2.1 at 480 x 832, shift 5: 44, 64 and 72 % of the steps at half size (arXiv:2605.18736)."""
    sigmas = FlowMatchEulerSampler(100, 5.0).scheduler(CPU).sigmas[:100].tolist()
    for delta, expected, share in ((0.01, 0.864, 44), (0.05, 0.737, 64), (0.1, 0.660, 72)):
        level = growth_level(WAN, delta, 30, 52)
        assert level == pytest.approx(expected, abs=5e-4)
        assert plan_stages(sigmas, [level])[0].end == pytest.approx(share, abs=1.01)


@table(
    ("sigmas", "growth_levels", "expected"),
    [
        ((1.0, 0.8, 0.5), (), [Stage(0, 3, 0, 1.0)]),
        ((1.0, 0.8, 0.5), (0.8,), [Stage(0, 1, 1, 1.0), Stage(1, 3, 0, 1.6 / 1.8)]),
        ((1.0, 0.9, 0.5), (0.91, 0.6), [Stage(0, 1, 2, 1.0), Stage(1, 2, 1, 1.8 / 1.9), Stage(2, 3, 0, 1 / 1.5)]),
        # Both sizes grow at once where the level after the first growth is low enough for the second.
        ((1.0, 0.2), (0.9, 0.6), [Stage(0, 1, 2, 1.0), Stage(1, 2, 0, rewound(rewound(0.2)))]),
        # The first step is at the full size already.
        ((0.5, 0.25), (0.6,), [Stage(0, 2, 0, 0.5)]),
    ],
)
def test_stages(sigmas: tuple[float, ...], growth_levels: tuple[float, ...], expected: list[Stage]) -> None:
    stages = plan_stages(sigmas, growth_levels)
    assert [(stage.first, stage.end, stage.level) for stage in stages] == [
        (stage.first, stage.end, stage.level) for stage in expected
    ]
    assert [stage.sigma for stage in stages] == pytest.approx([stage.sigma for stage in expected])


def test_steps_that_end_before_the_full_size_are_refused() -> None:
    with pytest.raises(RequestError, match=r"noise level of 0\.3 or less, and the last of 3 steps has 0\.5; use more"):
        plan_stages((1.0, 0.8, 0.5), (0.3,))


@table("sampler", [FlowMatchEulerSampler(10, 3.0), UniPCSampler(10, 3.0)], ids=["flow_match_euler", "unipc"])
def test_a_straight_flow_ends_at_the_data(sampler: ScheduleSampler) -> None:
    """At every size; each prediction is told the noise level that its latents have."""
    sigmas = sampler.scheduler(CPU).sigmas[:10].tolist()
    stages = plan_stages(sigmas, (0.9, 0.7))
    noise = SampleNoise((2, 1, 4, 6), [3, 4])
    seen: list[tuple[int, tuple[int, ...], float, float | None]] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        seen.append((step.index, tuple(latents.shape[-2:]), step.sigma, step.timestep))
        return (latents - 2.0) / step.sigma

    latents = sample_in_stages(sampler, stages, noise.draw(), [predict] * len(stages), noise.draw_of)
    assert latents.shape == (2, 2, 1, 16, 24)
    assert (latents - 2.0).abs().max() < 1e-3
    assert [index for index, *_ in seen] == list(range(10))
    for stage in stages:
        of_stage = seen[stage.first : stage.end]
        assert {size for _, size, *_ in of_stage} == {(16 >> stage.level, 24 >> stage.level)}
        assert of_stage[0][2] == pytest.approx(stage.sigma, rel=1e-6)
        assert of_stage[0][3] == pytest.approx(1000 * stage.sigma, abs=1)


def test_a_multistep_solver_starts_anew_where_the_size_grows() -> None:
    """The first step after it is of first order: from sigma to the next level along the velocity of that step."""
    sampler, noise = UniPCSampler(10, 3.0), SampleNoise((2, 1, 4, 4), [3])
    stages = plan_stages(sampler.scheduler(CPU).sigmas[:10].tolist(), (0.8,))
    entered: dict[int, torch.Tensor] = {}
    left: dict[int, torch.Tensor] = {}

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        entered[step.index] = latents
        return latents.tanh()

    sample_in_stages(
        sampler, stages, noise.draw(), [predict, predict], noise.draw_of, lambda step, x: left.update({step.index: x})
    )
    first = stages[1].first
    following = float(sampler.scheduler(CPU).sigmas[first + 1])
    expected = entered[first] + (following - stages[1].sigma) * entered[first].tanh()
    assert (left[first] - expected).abs().max() < 1e-5


def test_the_fit_finds_the_spectrum_of_noise_made_with_it() -> None:
    spectrum = LatentSpectrum(50.0, 2.0)
    height, width = 24, 32
    rows, columns = (dct_matrix(size, torch.float64, CPU) for size in (height, width))
    y, x = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    frequencies = (y.square() + x.square()).sqrt().double() * height / 2
    amplitudes = (spectrum.A * frequencies.clamp(min=0.5) ** -spectrum.beta).sqrt()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 64, 4, height, width, dtype=torch.float64, generator=generator)
    found = fit_spectrum(rows.T @ (amplitudes * noise) @ columns)
    assert pytest.approx(spectrum.A, rel=0.1) == found.A
    assert found.beta == pytest.approx(spectrum.beta, rel=0.05)


@table(
    ("text", "message"),
    [
        ("dtc", r"progressive_resolution: unknown value 'dtc'.*'dct'"),
        ("dct:level=2", r"progressive_resolution: dct: unknown option 'level'.*'levels'"),
        ("dct:levels=4", r"dct: levels: expected a whole number from 0 to 3, got 4"),
        ("dct:levels=x", r"progressive_resolution: dct.levels: expected int, got 'x'"),
        ("dct:delta=0", r"dct: delta: expected a number above 0 and at most 0.5, got 0"),
        ("dct:delta=nan", r"progressive_resolution: dct.delta: expected float, got 'nan'"),
        ("dct:A=3", "dct: A, beta: expected both or none"),
        ("dct:A=-3,beta=2", "dct: A: expected a number above 0 and at most 1e6, got -3"),
        ("dct:A=3,beta=1e6", "dct: beta: expected a number above 0 and at most 100, got 1e"),
        ("dct:delta", r"progressive_resolution: dct: expected key=value"),
        ("none:delta=0.1", "none takes no options"),
    ],
)
def test_settings_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ProgressiveSettings.parse(text)


def test_settings_are_read_back_from_their_text() -> None:
    settings = ProgressiveSettings.parse("dct: delta=0.05")
    assert settings is not None
    assert ProgressiveSettings.parse(settings.text) == settings
    assert ProgressiveSettings.parse(settings.with_spectrum(WAN).text) == settings.with_spectrum(WAN)
    assert ProgressiveSettings.parse("none") is ProgressiveSettings.parse("dct:levels=0") is None
