"""Denoising that starts from a picture or a video: noised to the level of the first step (SDEdit, Meng et al.,
arXiv:2108.01073), and in part, where a mask says what is made anew (blended latent diffusion, Avrahami et al.,
arXiv:2206.02779)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.interface import Predict


@dataclass(frozen=True)
class InitialLatents:
    """Clean latents of a picture or a video, [1, channels, frames, height, width], normalised, or with their sound [1,
    *geometry.sample_shape]. mask: True where they are made anew, of a shape that expands to theirs; None for all of
    them. from_noise: whether the first step is given noise alone, whatever its level."""

    clean: torch.Tensor
    mask: torch.Tensor | None = None
    from_noise: bool = False

    def of_frames(self, frames: range) -> InitialLatents:
        """Return the latents of some frames, of a video without sound."""
        part = slice(frames.start, frames.stop)
        mask = None if self.mask is None else self.mask[:, :, part]
        return dataclasses.replace(self, clean=self.clean[:, :, part], mask=mask)

    def as_noised(self, prepare: Callable[[torch.Tensor], torch.Tensor]) -> InitialLatents:
        """Return the latents as steps start from them. prepare: may add what is denoised behind the clip, which is made
        anew."""
        clean, mask = prepare(self.clean), self.mask
        num_behind = clean.shape[1] - self.clean.shape[1]
        if mask is not None and num_behind:
            mask = torch.cat([mask, mask.new_ones(1, num_behind)], dim=1)
        return dataclasses.replace(self, clean=clean, mask=mask)

    def noised(self, noise: torch.Tensor, level: float) -> torch.Tensor:
        """Return the latents of the first step, which is at this noise level. noise: standard normal, of a batch."""
        return noise if self.from_noise else level * noise + (1 - level) * self.clean.to(noise)

    def kept(self, predict: Predict) -> Predict:
        """Return a prediction that leaves the rest of the latents as they are: there it is the velocity that leads to
        the clean ones, (x - x0) / sigma. A sampler takes x = (1 - sigma) * x0 + sigma * noise along it to the same
        noise at every later level, and to x0 at 0; fresh noise that it adds is noise of x0, too."""
        if self.mask is None:
            return predict
        clean, mask = self.clean, self.mask

        def with_rest(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
            assert step.sigma is not None
            made = predict(latents, step).to(latents.dtype)
            rest = (latents - clean.to(latents)) / step.sigma
            return torch.where(mask.to(latents.device), made, rest)

        return with_rest

    def settled(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents after the last step, with the rest without what rounding, or a sampler that ends above
        noise level 0, left in it."""
        if self.mask is None:
            return latents
        return torch.where(self.mask.to(latents.device), latents, self.clean.to(latents))
