"""Progressive resolution (arXiv:2605.18736): the first steps on latents of a half, a quarter, ... of height and width.

At high noise, the high frequencies of the latents are noise alone, whatever the model predicts. The size grows at the
first noise level at which they are not, by the power P(w) of the latents at the highest frequency w that the smaller
ones hold:

    sigma <= 1 / (1 + sqrt(delta / (P * (1 + P - delta)))),   P = A * w^-beta,   w = min(height, width) / 2
    X = DCT(x);   Y = sigma * eps, Y[:height, :width] = X;    x = inverse DCT(Y) * 2 / (1 + sigma)
    sigma = 2 * sigma / (1 + sigma)

The orthonormal DCT of a picture twice as high and wide has twice the values, and eps has not: what is added as noise is
too much of it for the picture, hence the step back ("rewind") to a higher noise level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import OnStep, Predict, Sampler, SamplerState
from diffusion_runtime.denoising.schedule_loop import ResumableScheduler, ScheduleSampler, go_on, steps_of
from diffusion_runtime.errors import RequestError
from diffusion_runtime.request.progressive_options import LatentSpectrum

# (shape of one sample) -> fresh standard normal noise [batch, *shape], float32.
DrawNoiseOf = Callable[[Sequence[int]], torch.Tensor]

# The shorter side of latents whose spectrum can be fitted: frequencies of one to four periods.
MIN_FITTED_SIZE = 8
# It converges to single precision in about ten.
_NUM_SCORING_STEPS = 30


@dataclass(frozen=True)
class Stage:
    """Consecutive steps of one size.

    first, end: the steps, end excluded. level: how often height and width are halved. sigma: the noise level of the
    first step, after the growth.
    """

    first: int
    end: int
    level: int
    sigma: float


def growth_level(spectrum: LatentSpectrum, delta: float, height: int, width: int) -> float:
    """Return the noise level from which on latents of height x width are too small. delta: above 0 and at most 0.5."""
    power = spectrum.power(min(height, width) / 2)
    signal = power * (1 + power - delta)
    # Without power at that frequency the size never has to grow.
    return 1 / (1 + math.sqrt(delta / signal)) if signal > 0 else 0.0


def rewound(sigma: float) -> float:
    """Return the noise level after latents at `sigma` have grown."""
    return 2 * sigma / (1 + sigma)


def plan_stages(sigmas: Sequence[float], growth_levels: Sequence[float]) -> tuple[Stage, ...]:
    """Return the steps by size. sigmas: of all steps, falling. growth_levels: of each size but the full one, smallest
    size first. A size may have no steps, where levels lie close together, or where the first step lies below.

    Raises RequestError where the steps end before the full size.
    """
    stages: list[Stage] = []
    first, level, start = 0, len(growth_levels), sigmas[0]
    for index, sigma in enumerate(sigmas):
        following, current = level, sigma
        while following and current <= growth_levels[len(growth_levels) - following]:
            following -= 1
            # Nothing grows before the first step: it starts on noise of that size.
            current = rewound(current) if index else current
        if following != level:
            stages += [Stage(first, index, level, start)] if index else []
            first, level, start = index, following, current
    if level:
        raise RequestError(
            f"progressive_resolution: the last size begins at a noise level of {growth_levels[-1]:.3g} or less, and "
            f"the last of {len(sigmas)} steps has {sigmas[-1]:.3g}; use more steps, fewer levels or a smaller delta"
        )
    return (*stages, Stage(first, len(sigmas), 0, start))


def grown(latents: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """Latents of twice the height and width at the noise level `rewound(sigma)`, in the dtype of `latents`.

    latents: [..., height, width] at sigma. noise: [..., 2 * height, 2 * width], standard normal.
    """
    height, width = latents.shape[-2:]
    # Apple's GPUs have no float64.
    precision = torch.float32 if latents.device.type == "mps" else torch.float64
    spectrum = sigma * noise.to(latents.device, precision)
    rows, columns = (dct_matrix(size, precision, latents.device) for size in (height, width))
    spectrum[..., :height, :width] = rows @ latents.to(precision) @ columns.T
    rows, columns = (dct_matrix(2 * size, precision, latents.device) for size in (height, width))
    return (rows.T @ spectrum @ columns * (2 / (1 + sigma))).to(latents.dtype)


def dct_matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[size, size]: D @ x is the orthonormal DCT-II of x, and D.T @ X its inverse."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.pi / size * (index[None, :] + 0.5) * index[:, None]) * math.sqrt(2 / size)
    matrix[0] *= math.sqrt(0.5)
    return matrix.to(device, dtype)


@dataclass(frozen=True)
class StageSampler:
    """The steps of one stage, whose scheduler is its own: a multistep solver knows nothing of the smaller latents.

    num_growths: how often height and width of the latents double before the first step.
    """

    sampler: ScheduleSampler
    stage: Stage
    num_growths: int

    def steps(self, device: torch.device) -> tuple[StepInfo, ...]:
        """Return the steps that `sample` gives to its prediction, as Sampler.steps."""
        return steps_of(self._scheduler(device)[0], self.sampler.num_steps, self._range)

    def grown(self, latents: torch.Tensor, draw_noise: DrawNoiseOf) -> torch.Tensor:
        """Return the latents of the stage before at the size and noise level of the first step."""
        for sigma in self._scheduler(latents.device)[1]:
            *others, height, width = latents.shape[1:]
            latents = grown(latents, draw_noise((*others, 2 * height, 2 * width)), sigma)
        return latents

    def start(self, latents: torch.Tensor) -> SamplerState:
        """Return the place before the first step of the stage. latents: `grown`."""
        return SamplerState(self.stage.first, latents.float())

    def run(
        self, state: SamplerState, predict: Predict, on_step: OnStep | None = None, end: int | None = None
    ) -> SamplerState:
        """Run the steps of the stage from a place on, those before step `end` where it comes first. Return the place
        behind, whose latents are clean ones in the last stage."""
        scheduler, _ = self._scheduler(state.latents.device)
        end = self.stage.end if end is None else min(end, self.stage.end)
        return go_on(scheduler, self.sampler.num_steps, state, predict, on_step, end)

    @property
    def _range(self) -> range:
        return range(self.stage.first, self.stage.end)

    def _scheduler(self, device: torch.device) -> tuple[ResumableScheduler, list[float]]:
        """Return a scheduler whose first step of the stage is at the noise level after the growths; the levels at which
        the latents grow."""
        scheduler = self.sampler.scheduler(device)
        levels = [float(scheduler.sigmas[self.stage.first])]
        for _ in range(self.num_growths):
            levels.append(rewound(levels[-1]))
        if self.num_growths:
            scheduler.sigmas[self.stage.first] = levels[-1]
            scheduler.timesteps[self.stage.first] = levels[-1] * scheduler.config.num_train_timesteps
        return scheduler, levels[:-1]


def stage_samplers(sampler: Sampler, stages: Sequence[Stage]) -> list[StageSampler]:
    """Return the samplers of planned stages, in their order; the first starts from noise of its size."""
    assert isinstance(sampler, ScheduleSampler), "request rules see to it"
    return [
        StageSampler(sampler, stage, before.level - stage.level)
        for before, stage in zip((stages[0], *stages), stages, strict=False)
    ]


def fit_spectrum(latents: torch.Tensor) -> LatentSpectrum:
    """Fit the spectrum of clean latents [samples, channels, frames, height, width], by maximum likelihood of normally
    distributed coefficients (Whittle 1953).

    Of the frequencies from one period over the shorter side to the highest one of that side, every one counts alike,
    in however many directions there are coefficients of it.
    """
    height, width = latents.shape[-2:]
    rows, columns = (dct_matrix(size, torch.float64, latents.device) for size in (height, width))
    power = (rows @ latents.double() @ columns.T).square().flatten(0, -3).mean(0).cpu()
    y, x = (torch.arange(size, dtype=torch.float64) / size for size in (height, width))
    # The k-th basis function of a side has k / 2 periods.
    frequency = (y[:, None].square() + x[None, :].square()).sqrt() * min(height, width) / 2
    used = (frequency >= 1) & (frequency <= min(height, width) / 2)
    frequency, power = frequency[used][:, None], power[used][:, None]
    weight = frequency.rsqrt()
    logarithms = torch.cat([torch.ones_like(frequency), frequency.log()], dim=1)
    # Fisher scoring: a regression of gamma distributed values with a logarithmic link.
    fitted = power.clamp(min=1e-12).log()
    for _ in range(_NUM_SCORING_STEPS):
        solution = torch.linalg.lstsq(weight * logarithms, weight * fitted).solution
        estimate = logarithms @ solution
        fitted = estimate + power / estimate.exp() - 1
    offset, slope = solution[:, 0].tolist()
    return LatentSpectrum(math.exp(offset), -slope)
