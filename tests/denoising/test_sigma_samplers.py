"""k-diffusion's samplers against their definitions, written out here in float64 by sigma and the data's estimate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch
from tables import table

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.registry import build_sampler

SHAPE = (4, 2, 3, 5)
LEVELS = {
    "four": (1.0, 0.9, 0.7, 0.35),
    "eight": (0.9999, 0.97, 0.93, 0.87, 0.76, 0.61, 0.42, 0.2),
    "one": (1.0,),
    "two": (1.0, 0.5),
}
Model: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
Draw: TypeAlias = Callable[[], torch.Tensor]


def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    return torch.sin(2 * x) + 0.5 * x * sigma


def model(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return the data as x - sigma v."""
    return x - sigma * velocity(x, sigma)


def logarithm(sigma: float) -> float:
    return -math.log(sigma)


def dpmpp_2m(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    old = None
    for index, (sigma, after) in enumerate(zip(sigmas, [*sigmas[1:], 0.0], strict=True)):
        data = model(x, sigma)
        if after == 0:
            return data
        step = logarithm(after) - logarithm(sigma)
        used = data
        if old is not None:
            ratio = (logarithm(sigma) - logarithm(sigmas[index - 1])) / step
            used = (1 + 1 / (2 * ratio)) * data - 1 / (2 * ratio) * old
        x = after / sigma * x - math.expm1(-step) * used
        old = data
    raise AssertionError


def res_multistep(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    old = None
    for index, (sigma, after) in enumerate(zip(sigmas, [*sigmas[1:], 0.0], strict=True)):
        data = model(x, sigma)
        if after == 0 or old is None:
            x = x + (x - data) / sigma * (after - sigma)
        else:
            step = logarithm(after) - logarithm(sigma)
            place = (logarithm(sigmas[index - 1]) - logarithm(sigma)) / step
            one = math.expm1(-step) / -step
            two = (one - 1) / -step
            x = math.exp(-step) * x + step * ((one - two / place) * data + two / place * old)
        old = data
    return x


def euler(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    for sigma, after in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        x = x + (x - model(x, sigma)) / sigma * (after - sigma)
    return x


def euler_ancestral(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    for sigma, after in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        data = model(x, sigma)
        if after == 0:
            return data
        down = after * (1 + (after / sigma - 1))
        x = down / sigma * x + (1 - down / sigma) * data
        x = (1 - after) / (1 - down) * x
        x = x + draw() * (after**2 - down**2 * (1 - after) ** 2 / (1 - down) ** 2) ** 0.5
    raise AssertionError


def er_sde(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    sigmas = [min(sigmas[0], 1 - 1e-4), *sigmas[1:], 0.0]
    lambdas = [sigma / (1 - sigma) for sigma in sigmas]

    def scaler(value: torch.Tensor) -> torch.Tensor:
        return value * ((value**0.3).exp() + 10)

    def at(value: float) -> float:
        return float(scaler(torch.tensor(value, dtype=torch.float64)))

    data_before, slope_before = None, None
    for index in range(len(sigmas) - 1):
        data = model(x, sigmas[index])
        if sigmas[index + 1] == 0:
            return data
        here, there = lambdas[index], lambdas[index + 1]
        alpha, ratio = 1 - sigmas[index + 1], at(there) / at(here)
        x = alpha / (1 - sigmas[index]) * ratio * x + alpha * (1 - ratio) * data
        if data_before is not None:
            width = there - here
            points = there + torch.arange(200, dtype=torch.float64) * (-width / 200)
            slope = (data - data_before) / (here - lambdas[index - 1])
            summed = float((1 / scaler(points)).sum()) * (-width / 200)
            x = x + alpha * (width + summed * at(there)) * slope
            if slope_before is not None:
                summed = float(((points - here) / scaler(points)).sum()) * (-width / 200)
                bend = (slope - slope_before) / ((here - lambdas[index - 2]) / 2)
                x = x + alpha * (width**2 / 2 + summed * at(there)) * bend
            slope_before = slope
        x = x + alpha * draw() * (there**2 - here**2 * ratio**2) ** 0.5
        data_before = data
    raise AssertionError


def dpmpp_sde(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    sigmas = [min(sigmas[0], 1 - 1e-4), *sigmas[1:], 0.0]

    def snr(sigma: float) -> float:
        return math.log((1 - sigma) / sigma)

    def move(x: torch.Tensor, data: torch.Tensor, start: float, end: float, noise: torch.Tensor) -> torch.Tensor:
        one, two = math.exp(-snr(start)), math.exp(-snr(end))
        up = min(two, (two**2 * (one**2 - two**2) / one**2) ** 0.5)
        step = -math.log((two**2 - up**2) ** 0.5) - snr(start)
        alpha = 1 - end
        return alpha / (1 - start) * math.exp(-step) * x - alpha * math.expm1(-step) * data + alpha * noise * up

    for sigma, after in itertools.pairwise(sigmas):
        data = model(x, sigma)
        if after == 0:
            return data
        middle = 1 / (1 + math.exp((snr(sigma) + snr(after)) / 2))
        first, second = draw(), draw()
        ahead = move(x, data, sigma, middle, first)
        widths = (sigma - middle, middle - after)
        path = (first * widths[0] ** 0.5 + second * widths[1] ** 0.5) / (sigma - after) ** 0.5
        # Half-way, the second estimate alone counts (r = 1/2).
        x = move(x, model(ahead, middle), sigma, after, path)
    raise AssertionError


def unipc_sigma(x: torch.Tensor, sigmas: Sequence[float], draw: Draw) -> torch.Tensor:
    """bh1 in the scaled variable x / sqrt(1 + sigma**2), with its alpha and standard deviation."""
    times = [*sigmas, 0.001]
    count = len(sigmas)

    def alpha(sigma: float) -> float:
        return (1 / (sigma**2 + 1)) ** 0.5

    def deviation(sigma: float) -> float:
        return (1 - alpha(sigma) ** 2) ** 0.5

    def predicted(scaled: torch.Tensor, sigma: float) -> torch.Tensor:
        return model(scaled / alpha(sigma), sigma)

    def coefficients(order: int, index: int) -> tuple[list[float], torch.Tensor, torch.Tensor, float]:
        step = logarithm(times[index]) - logarithm(times[index - 1])
        places = [(logarithm(times[index - 1 - k]) - logarithm(times[index - 1])) / step for k in range(1, order)]
        rows, sides, phi, factorial = [], [], math.expm1(-step) / -step - 1, 1
        for power in range(order):
            rows.append([place**power for place in [*places, 1.0]])
            sides.append(phi * factorial / -step)
            factorial *= power + 2
            phi = phi / -step - 1 / factorial
        matrix = torch.tensor(rows, dtype=torch.float64)
        return places, matrix, torch.tensor(sides, dtype=torch.float64), step

    x = x * alpha(times[0])
    data = [predicted(x, times[0])]
    highest = max(min(3, count - 1), 1)
    for index in range(1, count + 1):
        order = min(highest, index, count + 1 - index)
        places, matrix, sides, step = coefficients(order, index)
        after, now = alpha(times[index]), times[index - 1]
        base = deviation(times[index]) / deviation(now) * x - after * math.expm1(-step) * data[-1]
        slopes = [(data[-1 - k] - data[-1]) / places[k - 1] for k in range(1, order)]
        found = base
        if order == 2:
            found = base - after * -step * 0.5 * slopes[0]
        elif order == 3:
            weights = torch.linalg.solve(matrix[:-1, :-1], sides[:-1])
            found = base - after * -step * sum(w * slope for w, slope in zip(weights, slopes, strict=True))
        if index < count:
            there = predicted(found, times[index])
            weights = torch.tensor([0.5]) if order == 1 else torch.linalg.solve(matrix, sides)
            terms = [*slopes, there - data[-1]]
            found = base - after * -step * sum(w * term for w, term in zip(weights, terms, strict=True))
            data.append(there)
        x = found
    return x / alpha(times[-1]) / (1 - 0.001)


DEFINITIONS = {
    "dpmpp_2m_sigma": dpmpp_2m,
    "flow_match_euler": euler,
    "res_multistep": res_multistep,
    "euler_ancestral": euler_ancestral,
    "er_sde": er_sde,
    "dpmpp_sde": dpmpp_sde,
    "unipc_sigma": unipc_sigma,
}


@table("name", DEFINITIONS)
@table("levels", LEVELS)
def test_latents_are_those_of_the_definition(name: str, levels: str) -> None:
    """1e-5 of the largest value: latents are float32 at each prediction."""
    sigmas, ours, theirs = LEVELS[levels], SampleNoise(SHAPE, [5]), SampleNoise(SHAPE, [5])
    if name in ("er_sde", "dpmpp_sde") and sigmas[0] == 1.0:
        sigmas = (0.9999, *sigmas[1:])

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.sigma is not None
        return velocity(latents.double(), step.sigma)

    sampler = build_sampler(name, len(sigmas), 1.0, {}, sigmas)
    found = sampler.sample(ours.draw(), predict, draw_noise=ours.draw)
    expected = DEFINITIONS[name](theirs.draw().double(), sigmas, lambda: theirs.draw().double())
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("name", ["er_sde", "dpmpp_sde"])
def test_a_first_level_of_one_is_moved_below_it(name: str) -> None:
    steps = build_sampler(name, 2, 1.0, {}, (1.0, 0.5)).steps(torch.device("cpu"))
    assert steps[0].sigma == 1 - 1e-4
    # Half-way in the logarithm of the signal-to-noise ratio.
    assert [step.index for step in steps] == ([0, 0, 1] if name == "dpmpp_sde" else [0, 1])
