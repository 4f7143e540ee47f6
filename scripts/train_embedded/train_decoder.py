"""Train the decoder alone: the encoder stays as it is, and with it the latents that the transformers were trained on.

python -m scripts.train_embedded.train_decoder --vae diffusion_runtime/assets/shapes_causal --seconds 240 --out decoder
python -m scripts.train_embedded.train_decoder --world emoji --vae vae.safetensors --seconds 500 --out decoder

The world `shapes` is trained on streams whose prompts change: an object whose colour is another from one frame to the
next. Another world is trained for the PSNR of its clips, from a pool and by CUDA graphs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from diffusion_runtime.quality.shapes.attributes import SceneAttributes
from scripts.shapes.long_reading import LongSettings, Prompt, read_stream
from scripts.shapes.long_scoring import score_streams
from scripts.shapes.render import render_slots
from scripts.shapes.streams import StreamBatch, StreamSettings, render_stream_slots, render_streams, sample_streams
from scripts.train_embedded.causal_pool import first_pixel_frames
from scripts.train_embedded.clip_vae import WholeClipVae, channels_last, normalise_and_activate, row_by_row
from scripts.train_embedded.contact_sheet import save_sheet
from scripts.train_embedded.decoder_graphs import DecoderGradients
from scripts.train_embedded.decoder_pool import DecoderPool
from scripts.train_embedded.export import load_vae
from scripts.train_embedded.session import Average, Clock, Log, cosine
from scripts.train_embedded.train_vae import (
    DRAFT_EVERY,
    MEASURED,
    check_reconstructions,
    clip_to_frames,
    loss_weights,
    measure_sharpness,
    reconstruction_loss,
    save_state,
    training_clips,
)
from scripts.train_embedded.vae_buckets import BUCKETS, TOY_BUCKETS, Bucket
from scripts.train_embedded.world import SHAPES, WORLDS, World

SWITCH_WEIGHTS = (0.1, 0.5, 0.25, 0.15)
"""Of motion, colour, shape and background: what a decoder can get wrong is what changes at once."""
STREAM_SHARE = 0.6
"""Of the steps: streams; the others are clips as the VAE was trained on."""
MIN_STREAM_FRAMES = 9
CLIPS_DECAY = 0.999
"""Of the average of the weights, where the decoder is trained for the PSNR of clips."""
LOG_EVERY = 50
"""Steps."""


def streams_with_switches(bucket: Bucket, generator: torch.Generator) -> StreamBatch:
    """Streams of a bucket's shape; nine of ten change what a decoder has to follow, at every second latent frame."""
    firsts = first_pixel_frames(1 + (bucket.num_frames - 1) // 4).tolist()
    settings = StreamSettings(0.4, 0.9, SWITCH_WEIGHTS, switch_frames=tuple(firsts[2::2]))
    return sample_streams(bucket.batch, generator, torch.arange(bucket.num_frames), settings)


class DecoderTraining:
    """The VAE whose decoder learns; `step` is one update."""

    def __init__(
        self, path: Path, device: str, seed: int, *, compiled: bool = False, world: World = SHAPES, decay: float = 0.998
    ) -> None:
        cuda = device == "cuda"
        torch.manual_seed(seed)
        self._device, self._generator = device, torch.Generator(device).manual_seed(seed)
        self.module = load_vae(path, world).float().to(device).requires_grad_(False)
        if cuda:
            channels_last(self.module)
        activate = (
            row_by_row(torch.compile(normalise_and_activate, dynamic=True)) if compiled else normalise_and_activate
        )
        self._render_slots = torch.compile(render_slots, dynamic=True) if compiled else render_slots
        self.vae = WholeClipVae(self.module, activate)
        self.parameters = [*self.module.decoder.parameters(), *self.module.post_quant_conv.parameters()]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=cuda)
        self.average = Average(self.parameters, decay=decay)

    @torch.no_grad()
    def _clips(self, bucket: Bucket, *, of_streams: bool) -> tuple[Tensor, Tensor]:
        if not of_streams:
            return training_clips(bucket, self._generator, self._render_slots)
        streams = streams_with_switches(bucket, self._generator)
        frames, covered = render_stream_slots(streams, bucket.size, self._render_slots)
        return frames.permute(0, 4, 1, 2, 3) * 2 - 1, covered.amax(dim=1)

    def step(self, bucket: Bucket, rate: float, *, of_streams: bool) -> Tensor:
        """One update at a learning rate; the loss."""
        clip, covered = self._clips(bucket, of_streams=of_streams)
        weights = loss_weights(clip, covered)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            with torch.no_grad():
                mean, log_variance = self.vae.encode(clip)
                mean, log_variance = mean.float(), log_variance.float().clamp(-20, 10)
                latents = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            decoded = self.vae.decode(latents)
        loss = reconstruction_loss(decoded, clip, weights)
        loss.backward()
        self.apply(rate)
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def apply(self, rate: float) -> Tensor:
        """Update weights and average by the gradients that there are, and keep these; their norm before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._optimizer.step()
        self.average.update()
        return norm

    def save(self, path: Path) -> None:
        """The averaged weights as a vae.pt; the statistics of the latents are those it began with."""
        self.average.swap()
        save_state(self.module, path, (self.module.config.latents_mean, self.module.config.latents_std))
        self.average.swap()


@torch.no_grad()
def check_switches(vae: WholeClipVae, device: str, count: int, sheet: Path | None = None) -> dict[str, object]:
    """How reconstructions of seeded streams with switches are read: 8 s of 256 x 256, one object."""
    readings, shown = [], []
    settings = StreamSettings(0.0, 1.0, SWITCH_WEIGHTS, switch_frames=(29, 37, 45))
    for seed in range(count):
        generator = torch.Generator().manual_seed(990_000 + seed)
        streams = sample_streams(1, generator, torch.arange(93), settings)
        clip = render_streams(streams, 256).to(device)
        mean, _ = vae.encode(clip.permute(0, 4, 1, 2, 3).float() / 127.5 - 1)
        frames = clip_to_frames(vae.decode(mean)).cpu()[0]
        prompts: list[tuple[int, SceneAttributes]] = streams.prompts_of(0)
        readings.append(read_stream(frames, [Prompt(*each) for each in prompts], LongSettings()))
        if seed < 6:
            start = prompts[1][0]
            shown.append(frames[start - 2 : start + 6])
    if sheet is not None:
        save_sheet(sheet, shown, num_columns=8)
    score = score_streams(readings)
    assert score.kept is not None, "every stream has a switch"
    assert score.followed is not None, "every stream has a switch"
    return {
        "streams": count,
        "windows": score.windows.rate,
        "followed": [score.followed.right, score.followed.total],
        "kept": [score.kept.right, score.kept.total],
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=tuple(WORLDS), default=SHAPES.name)
    parser.add_argument("--vae", type=Path, required=True, help="exported folder, vae.pt or 8-bit file to begin with")
    parser.add_argument("--seconds", type=float, required=True, help="wall seconds, with compiling and without checks")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="gets vae/ or vae.pt, and decoder_log.jsonl"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--check", type=int, default=48, metavar="STREAMS", help="read before and after; 0: none")
    parser.add_argument(
        "--batch-share", type=float, default=1.0, metavar="SHARE", help="of every batch; 0.125 is enough on a CPU"
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile, which takes minutes at first")
    parser.add_argument("--no-graph", action="store_true", help="launch every kernel of a step, of worlds but `shapes`")
    parser.add_argument("--toy", action="store_true", help="tiny clips, for a dry run on a CPU")
    return parser.parse_args()


def sharpness(
    vae: WholeClipVae,
    device: str,
    world: World,
    log: Log,
    event: str,
    buckets: tuple[Bucket, ...],
    sheets: Path | None = None,
) -> None:
    """Write the PSNR of seeded clips to the log, and a contact sheet per shape."""
    # Choosing kernels for a handful of batches would take longer than they do.
    torch.backends.cudnn.benchmark = False
    for bucket in buckets:
        sheet = sheets / f"decoder_{bucket.name}.png" if sheets is not None and bucket.num_frames > 1 else None
        log.write(event=event, bucket=bucket.name, **measure_sharpness(vae, device, world, bucket, sheet))
    torch.backends.cudnn.benchmark = True


def train_for_clips(arguments: argparse.Namespace, world: World, device: str, log: Log) -> None:
    """Train for the PSNR of clips by the clock; vae.pt is written every two minutes and at the end."""
    began = time.monotonic()
    compiled = device == "cuda" and not arguments.no_compile
    training = DecoderTraining(arguments.vae, device, arguments.seed, compiled=compiled, world=world, decay=CLIPS_DECAY)
    buckets = TOY_BUCKETS if arguments.toy else world.vae.decoder_buckets
    buckets = tuple(replace(each, batch=max(1, round(each.batch * arguments.batch_share))) for each in buckets)
    measured = (Bucket(5, 48, 32, 1.0),) if arguments.toy else MEASURED
    plain = WholeClipVae(training.module)
    sharpness(plain, device, world, log, "before", measured[:1])
    captured = device == "cuda" and not arguments.no_graph
    gradients = DecoderGradients(training.vae, training.parameters, buckets, device, captured=captured)
    pools = {each: DecoderPool(each, training.vae, world, device, arguments.seed + n) for n, each in enumerate(buckets)}
    for bucket, pool in pools.items():
        pool.fill()
        pool.draw(gradients.batches[bucket])
        gradients.capture(bucket)
        log.write(event="ready", bucket=bucket.name, captured=captured, seconds=time.monotonic() - began)
    clock, random = Clock(arguments.seconds - (time.monotonic() - began)), Random(arguments.seed)
    step, saved, since = 0, time.monotonic(), time.monotonic()
    values: list[Tensor] = []
    while not clock.is_over:
        bucket = random.choices(buckets, [bucket.share for bucket in buckets])[0]
        pools[bucket].draw(gradients.batches[bucket])
        psnr = gradients.compute(bucket)
        rate = cosine(clock.progress, arguments.peak, 1e-6)
        norm = training.apply(rate)
        step += 1
        if bucket is buckets[0]:
            values.append(torch.cat([psnr, norm[None]]))
        if step % LOG_EVERY == 0:
            psnr_now, things_now, norm_now = torch.stack(values).mean(dim=0).tolist()
            speed = 1000 * (time.monotonic() - since) / LOG_EVERY
            log.write(
                step=step, seconds=clock.trained, lr=rate, psnr=psnr_now, things=things_now, norm=norm_now, ms=speed
            )
            values, since = [], time.monotonic()
        if time.monotonic() - saved > DRAFT_EVERY:
            training.save(arguments.out / "vae.pt")
            saved = time.monotonic()
    training.save(arguments.out / "vae.pt")
    log.write(event="saved", step=step, seconds=clock.trained)
    training.average.swap()
    sharpness(plain, device, world, log, "after", measured, arguments.out)


def main() -> None:
    """Train by the clock, write the VAE, and say what reconstructions look like before and after."""
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / "decoder_log.jsonl")
    if WORLDS[arguments.world] is SHAPES:
        train_on_streams(arguments, device, log)
    else:
        train_for_clips(arguments, WORLDS[arguments.world], device, log)


def train_on_streams(arguments: argparse.Namespace, device: str, log: Log) -> None:
    """Train on streams and clips of `shapes` by the clock, and write vae/ in bfloat16."""
    compiled = device == "cuda" and not arguments.no_compile
    training = DecoderTraining(arguments.vae, device, arguments.seed, compiled=compiled)
    random = Random(arguments.seed)
    buckets = tuple(
        replace(each, batch=max(1, round(each.batch * arguments.batch_share)))
        for each in (TOY_BUCKETS if arguments.toy else BUCKETS)
        if each.size <= 256
    )
    if arguments.check:
        log.write(event="before", **check_switches(training.vae, device, arguments.check))
    # The check before is not training.
    began = time.monotonic()
    for bucket in buckets if device == "cuda" else ():
        # Compiles, and chooses kernels: 160 s of a first run on an H200.
        training.step(bucket, 0.0, of_streams=False)
        if bucket.num_frames >= MIN_STREAM_FRAMES:
            training.step(bucket, 0.0, of_streams=True)
    log.write(event="begin", seconds=time.monotonic() - began)
    left = arguments.seconds - (time.monotonic() - began)
    if left <= 0:
        raise SystemExit(f"--seconds {arguments.seconds:g} were over {-left:.0f} s before the first step")
    clock = Clock(left)
    step, losses = 0, []
    while not clock.is_over:
        bucket = random.choices(buckets, [bucket.share for bucket in buckets])[0]
        of_streams = bucket.num_frames >= MIN_STREAM_FRAMES and random.random() < STREAM_SHARE
        rate = cosine(clock.progress, arguments.peak, 1e-6)
        losses.append(training.step(bucket, rate, of_streams=of_streams))
        step += 1
        if step % LOG_EVERY == 0:
            log.write(step=step, seconds=clock.trained, lr=rate, loss=float(torch.stack(losses).mean()))
            losses = []
    training.average.swap()
    torch.nn.Module.to(training.module, dtype=torch.bfloat16)
    training.module.save_pretrained(arguments.out / "vae")
    log.write(event="saved", step=step, seconds=clock.trained)
    vae = WholeClipVae(load_vae(arguments.out).float().to(device))
    if arguments.check:
        log.write(event="after", **check_switches(vae, device, arguments.check, arguments.out / "switches.png"))
        log.write(event="clips", accuracy=check_reconstructions(vae, device, 29, 256, 64))


if __name__ == "__main__":
    main()
