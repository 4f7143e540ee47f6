"""Train the VAE on freshly rendered clips of mixed length and size, then measure its latents and its reconstructions.

python -m scripts.train_shapes.train_vae --minutes 10.5 --out $OUT
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.checker import check_clip
from diffusion_runtime.quality.shapes.scene import SceneBatch, SceneSettings, sample_scenes
from diffusion_runtime.quality.shapes.scoring import summarise
from scripts.shapes.render import render_float
from scripts.train_shapes.architecture import LATENT_CHANNELS, build_vae
from scripts.train_shapes.clip_vae import WholeClipVae, channels_last, normalise_and_activate
from scripts.train_shapes.contact_sheet import save_sheet
from scripts.train_shapes.session import Average, Clock, Log, cosine


@dataclass(frozen=True)
class Bucket:
    """One static shape of training clips."""

    num_frames: int
    size: int
    batch: int
    share: float
    """How often it is drawn, relative to the others."""

    @property
    def name(self) -> str:
        """Frames x size."""
        return f"{self.num_frames}x{self.size}"


BUCKETS = (
    Bucket(29, 256, 8, 0.34),
    Bucket(17, 192, 24, 0.20),
    Bucket(29, 128, 32, 0.24),
    Bucket(9, 256, 24, 0.12),
    Bucket(1, 256, 128, 0.06),
    Bucket(9, 384, 10, 0.04),
)
Compilable = TypeVar("Compilable", bound=Callable[..., object])
Renderer = Callable[[SceneBatch, int, int], tuple[Tensor, Tensor]]
TOY_BUCKETS = (Bucket(5, 48, 2, 0.5), Bucket(9, 32, 2, 0.5))
FOREGROUND_WEIGHT = 10.0
EDGE_WEIGHT = 6.0
GRADIENT_WEIGHT = 0.5
KL_WEIGHT = 1e-4
"""Per latent element against a loss per pixel: enough to keep the latents smooth, too little to blur."""


def loss_weights(clip: Tensor, covered: Tensor) -> Tensor:
    """[B, 1, T, H, W]: 1 on calm background, more where an object is or was within four frames, more on edges."""
    frames = covered.shape[1]
    near = F.max_pool2d(covered.clamp(max=1), 8, stride=4, padding=2)
    near = F.max_pool3d(near[:, None], (9, 1, 1), stride=1, padding=(4, 0, 0))[:, 0]
    near = F.interpolate((near > 0.02).float(), scale_factor=4, mode="nearest")[:, None]
    change_x = (clip[..., 1:] - clip[..., :-1]).abs().amax(dim=1, keepdim=True)
    change_y = (clip[..., 1:, :] - clip[..., :-1, :]).abs().amax(dim=1, keepdim=True)
    edge = torch.maximum(F.pad(change_x, (0, 1)), F.pad(change_y, (0, 0, 0, 1))).clamp(max=1.0)
    edge = F.max_pool2d(edge.flatten(0, 1), 3, stride=1, padding=1)
    edge = edge.view(clip.shape[0], 1, frames, *clip.shape[-2:])
    return 1.0 + FOREGROUND_WEIGHT * near + EDGE_WEIGHT * edge


def reconstruction_loss(decoded: Tensor, clip: Tensor, weights: Tensor) -> Tensor:
    """Weighted L1 + MSE of pixels, and L1 of the differences between neighbouring pixels (sharp edges)."""
    error = decoded.float() - clip
    pixel = ((error.abs() + error * error) * weights).mean() / weights.mean()
    slope_x = (error[..., 1:] - error[..., :-1]).abs() * weights[..., 1:]
    slope_y = (error[..., 1:, :] - error[..., :-1, :]).abs() * weights[..., 1:, :]
    return pixel + GRADIENT_WEIGHT * (slope_x.mean() + slope_y.mean()) / weights.mean()


def training_clips(
    bucket: Bucket, generator: torch.Generator, renderer: Renderer = render_float
) -> tuple[Tensor, Tensor]:
    """Clips [B, 3, T, H, W] in -1 to 1 (channels last in memory) and the objects' coverage [B, T, H, W]."""
    scenes = sample_scenes(bucket.batch, generator, SceneSettings(two_object_fraction=0.7))
    frames, covered = renderer(scenes, bucket.num_frames, bucket.size)
    return frames.permute(0, 4, 1, 2, 3) * 2 - 1, covered


def clip_to_frames(clip: Tensor) -> Tensor:
    """[B, 3, T, H, W] in -1 to 1 -> uint8 [B, T, H, W, 3]."""
    return ((clip.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


@torch.no_grad()
def measure_latents(vae: WholeClipVae, device: str, bucket: Bucket, batches: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the posterior mean over seeded clips."""
    generator = torch.Generator(device).manual_seed(77)
    total, square, count = torch.zeros(LATENT_CHANNELS), torch.zeros(LATENT_CHANNELS), 0
    for _ in range(batches):
        mean, _ = vae.encode(training_clips(bucket, generator)[0])
        flat = mean.float().transpose(0, 1).flatten(1)
        total, square = total + flat.sum(1).cpu(), square + (flat**2).sum(1).cpu()
        count += flat.shape[1]
    average = total / count
    return average.tolist(), (square / count - average**2).clamp(min=1e-8).sqrt().tolist()


@torch.no_grad()
def check_reconstructions(
    vae: WholeClipVae, device: str, num_frames: int, size: int, count: int, sheet: Path | None = None
) -> dict[str, dict[str, float]]:
    """The checker's accuracy on reconstructions of seeded clips, half of them with two objects."""
    generator = torch.Generator(device).manual_seed(99)
    verdicts = []
    for first in range(0, count, 8):
        scenes = sample_scenes(min(8, count - first), generator)
        frames, _ = render_float(scenes, num_frames, size)
        mean, _ = vae.encode(frames.permute(0, 4, 1, 2, 3) * 2 - 1)
        decoded = clip_to_frames(vae.decode(mean)).cpu()
        verdicts += [check_clip(says, clip) for says, clip in zip(scenes.attributes(), decoded, strict=True)]
        if first == 0 and sheet is not None:
            truth = (frames * 255).round().to(torch.uint8).cpu()
            save_sheet(sheet, [clip for pair in zip(truth[:6], decoded[:6], strict=True) for clip in pair])
    return summarise(verdicts).to_dict()


class VaeTraining:
    """The VAE, its optimizer and its data; `step` is one update."""

    def __init__(self, device: str, seed: int) -> None:
        cuda = device == "cuda"
        torch.manual_seed(seed)
        self._device, self._generator = device, torch.Generator(device).manual_seed(seed)
        self.module = build_vae().to(device)
        if cuda:
            channels_last(self.module)

        def compiled(function: Compilable) -> Compilable:
            return torch.compile(function, dynamic=True) if cuda else function  # type: ignore[return-value]

        self._vae = WholeClipVae(self.module, compiled(normalise_and_activate))
        self._renderer, self._weigh = compiled(render_float), compiled(loss_weights)
        self._measure = compiled(reconstruction_loss)
        self._parameters = list(self.module.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        self.average = Average(self._parameters, decay=0.998)

    def backward(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Gradients of one batch; the reconstruction loss and the divergence."""
        with torch.no_grad():
            clip, covered = training_clips(bucket, self._generator, self._renderer)
            weights = self._weigh(clip, covered)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            mean, log_variance = self._vae.encode(clip)
            mean, log_variance = mean.float(), log_variance.float().clamp(-20, 10)
            latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            decoded = self._vae.decode(latents)
        pixel = self._measure(decoded, clip, weights)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        (pixel + KL_WEIGHT * divergence).backward()
        return pixel.detach(), divergence.detach()

    def warm_up(self, buckets: tuple[Bucket, ...]) -> None:
        """Compile and choose kernels for every shape, without an update."""
        for bucket in buckets:
            self.backward(bucket)
            self._optimizer.zero_grad(set_to_none=True)

    def step(self, bucket: Bucket, rate: float) -> dict[str, Tensor]:
        """One update; what to log."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        pixel, divergence = self.backward(bucket)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.average.update()
        return {"loss": pixel, "kl": divergence, "norm": norm}


def main() -> None:
    """Train, measure, save `vae.pt` (float32 state and latent statistics)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.5, help="wall minutes, compiling included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--toy", action="store_true", help="tiny clips, for a dry run on a CPU")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    log = Log(arguments.out / "vae_log.jsonl")
    began = time.monotonic()
    training, random = VaeTraining(device, arguments.seed), Random(arguments.seed)
    buckets = TOY_BUCKETS if arguments.toy else BUCKETS
    training.warm_up(buckets)
    log.write(event="compiled", seconds=time.monotonic() - began)
    left = arguments.minutes * 60 - (time.monotonic() - began)
    clock = Clock(left)
    step, since = 0, time.monotonic()
    while not clock.is_over:
        bucket = random.choices(buckets, [bucket.share for bucket in buckets])[0]
        rate = cosine(clock.progress, arguments.peak, 1e-5)
        measured = training.step(bucket, rate)
        step += 1
        if step % 100 == 0:
            values = {name: value.item() for name, value in measured.items()}
            speed = 10 * (time.monotonic() - since)
            log.write(step=step, seconds=clock.trained, lr=rate, bucket=bucket.name, ms=speed, **values)
            since = time.monotonic()
    training.average.swap()
    save_and_measure(WholeClipVae(training.module), log, arguments.out, device, step, clock.trained, toy=arguments.toy)


def save_and_measure(
    vae: WholeClipVae, log: Log, out: Path, device: str, step: int, seconds: float, *, toy: bool
) -> None:
    """Write vae.pt first, then the reconstruction scores."""
    statistics = Bucket(5, 48, 2, 1.0) if toy else Bucket(29, 256, 16, 1.0)
    mean, std = measure_latents(vae, device, statistics, 2 if toy else 16)
    state = {key: value.detach().cpu().contiguous().clone() for key, value in vae.vae.state_dict().items()}
    torch.save({"state": state, "latents_mean": mean, "latents_std": std}, out / "vae.pt")
    log.write(
        event="latents", step=step, seconds=seconds, mean=[round(x, 4) for x in mean], std=[round(x, 4) for x in std]
    )
    sizes = [(5, 64, 8)] if toy else [(29, 256, 64), (29, 128, 64)]
    for num_frames, size, count in sizes:
        sheet = out / f"vae_{num_frames}x{size}.png" if size <= 256 and num_frames > 1 else None
        scores = check_reconstructions(vae, device, num_frames, size, count, sheet)
        log.write(event="reconstruction", num_frames=num_frames, size=size, accuracy=scores)


if __name__ == "__main__":
    main()
