"""Train the VAE on freshly rendered clips of mixed length and size, then measure its latents and its reconstructions.

python -m scripts.train_embedded.train_vae --world emoji --minutes 8.5 --out $OUT
torchrun --standalone --nproc-per-node 2 -m scripts.train_embedded.train_vae ...    # several GPUs
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion_runtime.quality.shapes.checker import check_clip
from diffusion_runtime.quality.shapes.scene import sample_scenes
from diffusion_runtime.quality.shapes.scoring import summarise
from scripts.shapes.render import render_float
from scripts.train_embedded.architecture import LATENT_CHANNELS, build_vae
from scripts.train_embedded.clip_vae import WholeClipVae, channels_last, normalise_and_activate, row_by_row
from scripts.train_embedded.contact_sheet import save_sheet
from scripts.train_embedded.export import load_vae
from scripts.train_embedded.ranks import GradientAverage, Ranks, join_ranks
from scripts.train_embedded.session import Average, Clock, Log, cosine
from scripts.train_embedded.vae_buckets import TOY_BUCKETS, Bucket, VaeRecipe
from scripts.train_embedded.world import SHAPES, WORLDS, World
from scripts.train_embedded.world_parts import Renderer

TWO_OBJECT_FRACTION = 0.7
GRADIENT_WEIGHT = 0.5
KL_WEIGHT = 1e-4
"""Per latent element against a loss per pixel: enough to keep the latents smooth, too little to blur."""
LOOK_EVERY, LOG_EVERY = 8, 100
"""Steps between two looks at the clock, and between two lines of the log."""
MEASURED = (Bucket(29, 256, 8, 1.0), Bucket(29, 128, 32, 1.0), Bucket(1, 256, 64, 1.0))
DRAFT_EVERY = 120.0
"""Seconds."""


def loss_weights(clip: Tensor, covered: Tensor, recipe: VaeRecipe = SHAPES.vae) -> Tensor:
    """[B, 1, T, H, W]: 1 on calm background; more near objects within four frames, on objects, and on edges."""
    frames = covered.shape[1]
    near = F.max_pool2d(covered.clamp(max=1), 8, stride=4, padding=2)
    near = F.max_pool3d(near[:, None], (9, 1, 1), stride=1, padding=(4, 0, 0))[:, 0]
    near = F.interpolate((near > 0.02).float(), scale_factor=4, mode="nearest")[:, None]
    change_x = (clip[..., 1:] - clip[..., :-1]).abs().amax(dim=1, keepdim=True)
    change_y = (clip[..., 1:, :] - clip[..., :-1, :]).abs().amax(dim=1, keepdim=True)
    edge = torch.maximum(F.pad(change_x, (0, 1)), F.pad(change_y, (0, 0, 0, 1))).clamp(max=1.0)
    edge = F.max_pool2d(edge.flatten(0, 1), 3, stride=1, padding=1)
    edge = edge.view(clip.shape[0], 1, frames, *clip.shape[-2:])
    objects = recipe.object_weight * covered.clamp(max=1)[:, None]
    return 1.0 + recipe.foreground_weight * near + objects + recipe.edge_weight * edge


def reconstruction_loss(decoded: Tensor, clip: Tensor, weights: Tensor) -> Tensor:
    """Weighted L1 + MSE of pixels, and L1 of the differences between neighbouring pixels (sharp edges)."""
    error = decoded.float() - clip
    pixel = ((error.abs() + error * error) * weights).mean() / weights.mean()
    slope_x = (error[..., 1:] - error[..., :-1]).abs() * weights[..., 1:]
    slope_y = (error[..., 1:, :] - error[..., :-1, :]).abs() * weights[..., 1:, :]
    return pixel + GRADIENT_WEIGHT * (slope_x.mean() + slope_y.mean()) / weights.mean()


def training_clips(
    bucket: Bucket, generator: torch.Generator, renderer: Renderer | None = None, world: World = SHAPES
) -> tuple[Tensor, Tensor]:
    """Clips [B, 3, T, H, W] in -1 to 1 (channels last in memory) and the objects' coverage [B, T, H, W]."""
    scenes = world.sample(bucket.batch, generator, TWO_OBJECT_FRACTION)
    frames, covered = (renderer or world.renderer(False))(scenes, bucket.num_frames, bucket.size)
    return frames.permute(0, 4, 1, 2, 3) * 2 - 1, covered.amax(dim=1)


def clip_to_frames(clip: Tensor) -> Tensor:
    """[B, 3, T, H, W] in -1 to 1 -> uint8 [B, T, H, W, 3]."""
    return ((clip.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


@torch.no_grad()
def measure_latents(
    vae: WholeClipVae, device: str, bucket: Bucket, batches: int, world: World = SHAPES
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation per channel of the posterior mean over seeded clips."""
    generator = torch.Generator(device).manual_seed(77)
    total, square, count = torch.zeros(LATENT_CHANNELS), torch.zeros(LATENT_CHANNELS), 0
    for _ in range(batches):
        mean, _ = vae.encode(training_clips(bucket, generator, world=world)[0])
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


@torch.no_grad()
def measure_sharpness(
    vae: WholeClipVae, device: str, world: World, bucket: Bucket, sheet: Path | None = None
) -> dict[str, float]:
    """PSNR in dB of reconstructions of seeded clips, never trained on: mean over clips, of their worst frames, and of
    the pixels where an object is."""
    generator = torch.Generator(device).manual_seed(99)
    whole, worst, inside, shown = [], [], [], []
    for _ in range(max(1, 64 // bucket.batch)):
        clip, covered = training_clips(bucket, generator, world=world)
        mean, _ = vae.encode(clip)
        error = ((vae.decode(mean).float().clamp(-1, 1) - clip) / 2) ** 2
        per_frame = error.mean(dim=(1, 3, 4))
        whole.append(-10 * torch.log10(per_frame.mean(dim=1)))
        worst.append(-10 * torch.log10(per_frame.amax(dim=1)))
        mask = (covered > 0.5).float()
        own = (error.mean(dim=1) * mask).sum(dim=(1, 2, 3)) / mask.sum(dim=(1, 2, 3)).clamp(min=1)
        inside.append(-10 * torch.log10(own.clamp(min=1e-6)))
        if not shown:
            pairs = zip(clip_to_frames(clip[:6]).cpu(), clip_to_frames(vae.decode(mean[:6])).cpu(), strict=True)
            shown = [each for pair in pairs for each in pair]
    if sheet is not None:
        save_sheet(sheet, shown, size=256)
    values = {"psnr": whole, "worst_frame": worst, "objects": inside}
    return {name: round(float(torch.cat(parts).mean()), 2) for name, parts in values.items()}


class VaeTraining:
    """The VAE, its optimizer and its data; `step` is one update."""

    def __init__(self, ranks: Ranks, seed: int, world: World = SHAPES, init: Path | None = None) -> None:
        device = ranks.device
        cuda = device == "cuda"
        torch.manual_seed(seed)
        self._device, self._world = device, world
        self._generator = torch.Generator(device).manual_seed(ranks.seed(seed))
        self.module = (build_vae(sizes=world.sizes) if init is None else load_vae(init, world)).to(device)
        if cuda:
            channels_last(self.module)
        compiled = row_by_row(torch.compile(normalise_and_activate, dynamic=True))
        activate = compiled if cuda else normalise_and_activate
        self._vae = WholeClipVae(self.module, activate)
        self._renderer = world.renderer(cuda)
        self._parameters = list(self.module.parameters())
        ranks.align(self._parameters)
        self._average_gradients = GradientAverage(self._parameters, ranks)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        self.average = Average(self._parameters, decay=0.998)

    def backward(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one batch; the reconstruction loss, the divergence, and the mean squared error."""
        with torch.no_grad():
            clip, covered = training_clips(bucket, self._generator, self._renderer, self._world)
            weights = loss_weights(clip, covered, self._world.vae)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            mean, log_variance = self._vae.encode(clip)
            mean, log_variance = mean.float(), log_variance.float().clamp(-20, 10)
            latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            decoded = self._vae.decode(latents)
        pixel = reconstruction_loss(decoded, clip, weights)
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
        (pixel + KL_WEIGHT * divergence).backward()
        squared = F.mse_loss(decoded.detach().float(), clip)
        return pixel.detach(), divergence.detach(), squared

    def warm_up(self, buckets: tuple[Bucket, ...], log: Log) -> None:
        """Compile and choose kernels for every shape, without an update."""
        for bucket in buckets:
            since = time.monotonic()
            loss, _, _ = self.backward(bucket)
            self._optimizer.zero_grad(set_to_none=True)
            log.write(event="warm", bucket=bucket.name, loss=float(loss), seconds=time.monotonic() - since)

    def step(self, bucket: Bucket, rate: float) -> dict[str, Tensor]:
        """One update; what to log."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        pixel, divergence, squared = self.backward(bucket)
        self._average_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.average.update()
        return {"loss": pixel, "kl": divergence, "norm": norm, "psnr": -10 * torch.log10(squared / 4)}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes")
    parser.add_argument("--minutes", type=float, default=10.5, help="wall minutes, compiling included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="vae.pt or 8-bit file to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--toy", action="store_true", help="tiny clips, for a dry run on a CPU")
    return parser.parse_args()


def train(
    training: VaeTraining,
    buckets: tuple[Bucket, ...],
    clock: Clock,
    ranks: Ranks,
    log: Log,
    arguments: argparse.Namespace,
) -> int:
    """Train until the first process's clock is over; it saves a draft every two minutes. Returns the steps."""
    random, progress, step, since, saved = Random(arguments.seed), 0.0, 0, time.monotonic(), time.monotonic()
    while True:
        if step % LOOK_EVERY == 0:
            progress = ranks.agree(clock.progress)
            if progress >= 1.0:
                return step
        bucket = random.choices(buckets, [bucket.share for bucket in buckets])[0]
        rate = cosine(progress, arguments.peak, 1e-5)
        measured = training.step(bucket, rate)
        step += 1
        if step % LOG_EVERY == 0:
            values = {name: value.item() for name, value in measured.items()}
            speed = 1000 * (time.monotonic() - since) / LOG_EVERY
            log.write(step=step, seconds=clock.trained, lr=rate, bucket=bucket.name, ms=speed, **values)
            since = time.monotonic()
        if ranks.is_first and time.monotonic() - saved > DRAFT_EVERY:
            training.average.swap()
            save_state(training.module, arguments.out / "vae_draft.pt", None)
            training.average.swap()
            saved = time.monotonic()


def main() -> None:
    """Train, measure, save `vae.pt` (float32 state and latent statistics)."""
    arguments = parse_arguments()
    world, began, ranks = WORLDS[arguments.world], time.monotonic(), join_ranks()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    log = Log(arguments.out / "vae_log.jsonl" if ranks.is_first else None)
    training = VaeTraining(ranks, arguments.seed, world, arguments.init)
    buckets = TOY_BUCKETS if arguments.toy else world.vae.buckets
    log.write(event="start", ranks=ranks.count, device=ranks.device, seconds=time.monotonic() - began)
    training.warm_up(buckets, log)
    log.write(event="compiled", seconds=time.monotonic() - began)
    clock = Clock(arguments.minutes * 60 - (time.monotonic() - began))
    step = train(training, buckets, clock, ranks, log, arguments)
    if ranks.is_first:
        training.average.swap()
        vae = WholeClipVae(training.module)
        save_and_measure(vae, log, arguments.out, ranks.device, step, clock.trained, world, toy=arguments.toy)
    ranks.leave()


def save_state(module: torch.nn.Module, path: Path, statistics: tuple[list[float], list[float]] | None) -> None:
    """float32 state, and the latents' mean and deviation per channel where they are measured."""
    state = {key: value.detach().cpu().contiguous().clone() for key, value in module.state_dict().items()}
    mean, std = statistics or (None, None)
    torch.save({"state": state, "latents_mean": mean, "latents_std": std}, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)


def save_and_measure(
    vae: WholeClipVae, log: Log, out: Path, device: str, step: int, seconds: float, world: World = SHAPES, *, toy: bool
) -> None:
    """Write vae.pt first, then the reconstruction scores."""
    # Choosing kernels for a handful of batches would take longer than they do.
    torch.backends.cudnn.benchmark = False
    statistics = Bucket(5, 48, 2, 1.0) if toy else Bucket(29, 256, 16, 1.0)
    mean, std = measure_latents(vae, device, statistics, 2 if toy else 16, world)
    save_state(vae.vae, out / "vae.pt", (mean, std))
    log.write(
        event="latents", step=step, seconds=seconds, mean=[round(x, 4) for x in mean], std=[round(x, 4) for x in std]
    )
    for bucket in TOY_BUCKETS[:1] if toy else MEASURED:
        sheet = out / f"vae_{bucket.name}.png" if bucket.num_frames > 1 else None
        log.write(event="sharpness", bucket=bucket.name, **measure_sharpness(vae, device, world, bucket, sheet))
    if world is not SHAPES:
        return
    sizes = [(5, 64, 8)] if toy else [(29, 256, 64), (29, 128, 64)]
    for num_frames, size, count in sizes:
        scores = check_reconstructions(vae, device, num_frames, size, count)
        log.write(event="reconstruction", num_frames=num_frames, size=size, accuracy=scores)


if __name__ == "__main__":
    main()
