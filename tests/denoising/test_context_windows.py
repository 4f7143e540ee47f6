"""Context windows: their plan, the weighted mean of their predictions, their noise."""

from __future__ import annotations

import itertools

import torch
from tables import table

from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.denoising.context_windows import WindowPlan, over_windows
from diffusion_runtime.denoising.noise import SampleNoise, initial_noise

PLANS = [(29, 8, 4), (29, 8, 0), (29, 8, 7), (10, 8, 4), (81, 21, 4), (9, 8, 5), (57, 3, 1)]


@table("frames, length, overlap", PLANS)
def test_windows_cover_the_clip_evenly_and_their_weights_sum_to_one(frames: int, length: int, overlap: int) -> None:
    plan = WindowPlan(frames, length, overlap)
    windows = list(plan)
    assert len(windows) == len(plan)
    assert {len(window) for window in windows} == {length}
    assert (windows[0].start, windows[-1].stop) == (0, frames)
    steps = [after.start - before.start for before, after in itertools.pairwise(windows)]
    assert max(steps) <= plan.stride
    assert max(steps) - min(steps) <= 1
    # One window fewer would share less.
    assert (len(plan) - 2) * plan.stride < frames - length
    total = torch.zeros(frames, dtype=torch.float64)
    for window, weights in zip(windows, plan.weights(), strict=True):
        assert bool((weights > 0).all())
        total[window.start : window.stop] += weights.double()
    assert torch.allclose(total, torch.ones_like(total), atol=1e-6)


def test_two_windows_fade_in_equal_steps() -> None:
    before, after = WindowPlan(12, 8, 4).weights()
    assert torch.allclose(before, torch.tensor([1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]))
    assert torch.allclose(after, before.flip(0))


@table("frames, length, overlap", [(29, 8, 4), (13, 6, 5)])
def test_the_prediction_is_the_weighted_mean_in_float64(frames: int, length: int, overlap: int) -> None:
    plan, generator = WindowPlan(frames, length, overlap), torch.Generator().manual_seed(3)
    latents = torch.randn((2, 4, frames, 3, 5), generator=generator)
    seen: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        """Differ at every place of a window, and depend on all its frames."""
        place = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype)[:, None, None]
        return torch.sin(3 * x + place) + x.mean(dim=2, keepdim=True) ** 2

    def predict(x: torch.Tensor, step: StepInfo) -> torch.Tensor:
        seen.append(step.window)
        return model(x)

    made = over_windows([predict] * len(plan), plan, latents.device)(latents, StepInfo(2, 9))
    assert seen == list(range(len(plan)))
    total, weight = torch.zeros_like(latents, dtype=torch.float64), torch.zeros(frames, dtype=torch.float64)
    windows = list(plan)
    for index, window in enumerate(windows):
        left = 0 if index == 0 else windows[index - 1].stop - window.start
        right = 0 if index == len(windows) - 1 else window.stop - windows[index + 1].start
        of_window = model(latents[:, :, window.start : window.stop].double())
        for place, frame in enumerate(window):
            own = min(1.0, (place + 1) / (left + 1), (length - place) / (right + 1))
            total[:, :, frame] += own * of_window[:, :, place]
            weight[frame] += own
    expected = total / weight[:, None, None]
    assert made.dtype == torch.float32
    assert float((made.double() - expected).abs().max()) < 1e-5


def test_repeated_noise_is_that_of_earlier_frames_in_another_order() -> None:
    noise = SampleNoise((4, 29, 2, 3), (5, 6)).draw_repeated(8, 4)
    assert torch.equal(noise[:, :, :8], initial_noise((4, 29, 2, 3), (5, 6))[:, :, :8])
    assert torch.equal(noise[1:], SampleNoise((4, 29, 2, 3), (6,)).draw_repeated(8, 4))
    moved = 0
    for sample, place in itertools.product(noise, range(8, 29, 4)):
        count = min(4, 29 - place)
        frames, before = sample[:, place : place + count], sample[:, place - 8 : place - 8 + count]
        found = [
            [torch.equal(frames[:, one], before[:, other]) for other in range(count)].index(True)
            for one in range(count)
        ]
        assert sorted(found) == list(range(count))
        moved += found != list(range(count))
    assert moved > 4


def test_what_a_layer_keeps_is_of_its_window() -> None:
    cache = RequestCache()
    first, second = (cache.of_layer(LayerInfo(3), StepInfo(window=window)) for window in (0, 1))
    assert first is not second
    assert cache.of_layer(LayerInfo(3), StepInfo(5, window=1)) is second
