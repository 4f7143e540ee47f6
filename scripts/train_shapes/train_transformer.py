"""Train the transformer and its text encoder together by flow matching on latents that are encoded as training goes on.

python -m scripts.train_shapes.train_transformer --vae vae.pt --minutes 17 --out $OUT
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from diffusion_runtime.quality.shapes.render import render_float
from scripts.train_shapes.architecture import (
    MAX_PROMPT_TOKENS,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    embed_prompts,
)
from scripts.train_shapes.attention import TrainingAttention
from scripts.train_shapes.clip_vae import WholeClipVae, channels_last, normalise_and_activate
from scripts.train_shapes.latent_pool import CAPTION_TOKENS, Encoder, LatentPool, TrainingBatch
from scripts.train_shapes.muon import Muon
from scripts.train_shapes.session import Average, Clock, Log, cosine


@dataclass(frozen=True)
class Bucket:
    """One static shape of a training step."""

    num_frames: int
    size: int
    batch: int
    share: float
    """How often a step has this shape, relative to the others."""
    shift: float
    """Timestep shift: latents of flat shapes repeat themselves so much that how many objects there are, and where, is
    decided at noise levels above 0.95; larger pictures repeat themselves more."""
    capacity: int
    """Clips kept in the pool."""
    encode_batch: int
    prompt_tokens: int = MAX_PROMPT_TOKENS

    @property
    def name(self) -> str:
        """Frames x size."""
        return f"{self.num_frames}x{self.size}"


BUCKETS = (
    Bucket(29, 256, 96, 0.66, 12.0, 16384, 64),
    Bucket(29, 256, 96, 0.04, 12.0, 0, 64, prompt_tokens=512),
    Bucket(29, 128, 256, 0.12, 8.0, 16384, 256),
    Bucket(29, 384, 36, 0.07, 15.0, 1536, 24),
    Bucket(1, 256, 384, 0.11, 6.0, 32768, 1024),
)
"""A capacity of 0 shares the pool of the bucket of the same shape."""
TOY_BUCKETS = (Bucket(9, 64, 8, 0.6, 3.0, 64, 16), Bucket(1, 64, 8, 0.4, 3.0, 32, 16))
TIMESTEP_SPREAD = 1.4
"""Standard deviation of the normal whose sigmoid, shifted, is the share of noise."""
FOREGROUND_WEIGHT = 3.0
FOREGROUND_BELOW = 0.5
"""Share of noise below which objects weigh more. Above it, where an object stands is still open, and a weight that
knows the answer would teach the model an average with more objects in it than there are: it then draws copies."""
CAPTION_DROPOUT = 0.1
REFRESH_EVERY = 8
"""Steps between two refreshes of one encode batch."""


def flow_matching_loss(
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    batch: TrainingBatch,
    bucket: Bucket,
    empty_ids: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The weighted loss, and the plain error per sample [B] for the log: the model predicts noise minus data."""
    device, count = generator.device, bucket.batch
    data = batch.latents.float()
    noise = torch.randn(data.shape, generator=generator, device=device)
    time_share = torch.sigmoid(TIMESTEP_SPREAD * torch.randn(count, generator=generator, device=device))
    time_share = bucket.shift * time_share / (1 + (bucket.shift - 1) * time_share)
    mixed = torch.lerp(data, noise, time_share[:, None, None, None, None])
    dropped = torch.rand(count, generator=generator, device=device) < CAPTION_DROPOUT
    token_ids = torch.where(dropped[:, None], empty_ids, batch.token_ids)
    text = embed_prompts(text_encoder, token_ids, bucket.prompt_tokens)
    predicted = transformer(mixed, time_share * 1000, text, return_dict=False)[0]
    error = (predicted.float() - (noise - data)) ** 2
    settled = (time_share < FOREGROUND_BELOW).float()[:, None, None, None, None]
    weights = 1 + FOREGROUND_WEIGHT * settled * batch.foreground
    loss = (error * weights).mean() / weights.float().mean()
    return loss, error.detach().mean(dim=(1, 2, 3, 4))


def split_parameters(
    transformer: WanTransformer3DModel, text_encoder: UMT5EncoderModel
) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices of the blocks (for Muon) and everything else (for AdamW)."""
    matrices = [
        parameter
        for name, parameter in transformer.blocks.named_parameters()
        if parameter.ndim == 2 and name.endswith("weight")
    ]
    chosen = {id(parameter) for parameter in matrices}
    everything = [*transformer.parameters(), *text_encoder.parameters()]
    return matrices, [parameter for parameter in everything if id(parameter) not in chosen]


def make_pools(buckets: tuple[Bucket, ...], encode: Encoder, device: str, seed: int) -> list[LatentPool]:
    """One pool a bucket, shared where the capacity is 0."""
    renderer = torch.compile(render_float, dynamic=True) if device == "cuda" else render_float
    tokenizer = build_tokenizer()
    pools: dict[tuple[int, int], LatentPool] = {}
    for index, bucket in enumerate(buckets):
        if bucket.capacity:
            pools[(bucket.num_frames, bucket.size)] = LatentPool(
                bucket.capacity,
                bucket.num_frames,
                bucket.size,
                encode=encode,
                renderer=renderer,
                tokenizer=tokenizer,
                seed=1000 * seed + index,
                device=device,
                two_object_fraction=0.65,
            )
    return [pools[(bucket.num_frames, bucket.size)] for bucket in buckets]


def initial_states(path: Path) -> dict[str, dict[str, Tensor]]:
    """States by part, of a transformer.pt or of an exported folder."""
    if not path.is_dir():
        states: dict[str, dict[str, Tensor]] = torch.load(path, map_location="cpu")
        return states
    return {
        "transformer": WanTransformer3DModel.from_pretrained(path / "transformer").state_dict(),
        "text_encoder": UMT5EncoderModel.from_pretrained(path / "text_encoder").state_dict(),
    }


def load_encoder(path: Path, device: str) -> Encoder:
    """Clips to normalised latents with a trained VAE: the mean of the posterior, none of its noise."""
    if path.is_dir():
        module = AutoencoderKLWan.from_pretrained(path / "vae", torch_dtype=torch.float32)
        latents_mean, latents_std = module.config.latents_mean, module.config.latents_std
    else:
        trained = torch.load(path, map_location="cpu")
        latents_mean, latents_std = trained["latents_mean"], trained["latents_std"]
        module = build_vae(latents_mean, latents_std)
        module.load_state_dict(trained["state"])
    module = module.to(device).requires_grad_(False)
    cuda = device == "cuda"
    if cuda:
        channels_last(module)
    vae = WholeClipVae(module, torch.compile(normalise_and_activate, dynamic=True) if cuda else normalise_and_activate)
    mean = torch.tensor(latents_mean, device=device).view(1, -1, 1, 1, 1)
    std = torch.tensor(latents_std, device=device).view(1, -1, 1, 1, 1)

    def encode(clip: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cuda):
            return (vae.encode(clip)[0].float() - mean) / std

    return encode


class TransformerTraining:
    """Transformer, text encoder, their optimizers and the average of their weights; `step` is one update."""

    def __init__(self, device: str, seed: int, init: Path | None, optimizer: str, muon_factor: float) -> None:
        torch.manual_seed(seed)
        self._device, self._muon_factor = device, muon_factor
        self._generator = torch.Generator(device).manual_seed(seed)
        tokenizer = build_tokenizer()
        self.transformer = build_transformer().to(device)
        self.text_encoder = build_text_encoder(len(tokenizer)).to(device)
        if init is not None:
            states = initial_states(init)
            self.transformer.load_state_dict(states["transformer"])
            self.text_encoder.load_state_dict(states["text_encoder"])
        self.transformer.set_attn_processor(TrainingAttention())
        if device == "cuda":
            self.transformer.compile_repeated_blocks(fullgraph=True)
        matrices, others = split_parameters(self.transformer, self.text_encoder)
        if optimizer == "adamw":
            matrices, others = [], [*matrices, *others]
        self._adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
        self._muon = Muon(matrices)
        self._parameters = [*self.transformer.parameters(), *self.text_encoder.parameters()]
        self._average = Average(self._parameters, decay=0.999)
        self._empty_ids = torch.zeros(CAPTION_TOKENS, dtype=torch.int64, device=device)
        self._empty_ids[0] = tokenizer.eos_token_id

    def step(self, bucket: Bucket, pool: LatentPool, rate: float) -> Tensor:
        """One update; the mean squared error of the prediction."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        batch = pool.draw(bucket.batch, self._generator)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            loss, error = flow_matching_loss(
                self.transformer, self.text_encoder, batch, bucket, self._empty_ids, self._generator
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._muon.step(rate * self._muon_factor)
        for parameter in self._parameters:
            parameter.grad = None
        self._average.update()
        return error.mean()

    def save(self, path: Path) -> None:
        """The averaged weights, bfloat16, written whole or not at all."""
        self._average.swap()
        states = {
            name: {key: value.detach().to("cpu", torch.bfloat16) for key, value in part.state_dict().items()}
            for name, part in (("transformer", self.transformer), ("text_encoder", self.text_encoder))
        }
        self._average.swap()
        torch.save(states, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", type=Path, required=True, help="vae.pt or exported folder")
    parser.add_argument("--minutes", type=float, default=17.0, help="wall minutes, preparation included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="transformer.pt or exported folder to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--peak", type=float, default=1.5e-3, help="AdamW's learning rate")
    parser.add_argument("--muon-factor", type=float, default=2.0, help="Muon's learning rate over AdamW's")
    parser.add_argument("--end", type=float, default=2e-5)
    parser.add_argument("--toy", action="store_true", help="tiny clips, for a dry run on a CPU")
    return parser.parse_args()


def main() -> None:
    """Fill the pools, train by the clock, save the averaged weights every minute and at the end."""
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.cache_size_limit = 64
    log, began, random = Log(arguments.out / "transformer_log.jsonl"), time.monotonic(), Random(arguments.seed)
    training = TransformerTraining(device, arguments.seed, arguments.init, arguments.optimizer, arguments.muon_factor)
    buckets = TOY_BUCKETS if arguments.toy else BUCKETS
    pools = make_pools(buckets, load_encoder(arguments.vae, device), device, arguments.seed + 1)
    for bucket, pool in zip(buckets, pools, strict=True):
        start = time.monotonic()
        for _ in range(bucket.capacity // bucket.encode_batch // 4):
            pool.refresh(bucket.encode_batch)
        log.write(event="pool", bucket=bucket.name, seconds=time.monotonic() - start)
    left = arguments.minutes * 60 - (time.monotonic() - began)
    clock = Clock(left)
    step, samples, saved, since = 0, 0, time.monotonic(), time.monotonic()
    errors: dict[str, list[Tensor]] = {}
    while not clock.is_over:
        index = random.choices(range(len(buckets)), [bucket.share for bucket in buckets])[0]
        bucket, pool = buckets[index], pools[index]
        if step % REFRESH_EVERY == 0:
            pool.refresh(bucket.encode_batch)
        rate = cosine(clock.progress, arguments.peak, arguments.end)
        errors.setdefault(bucket.name, []).append(training.step(bucket, pool, rate))
        step, samples = step + 1, samples + bucket.batch
        if step % 200 == 0:
            means = {name: round(torch.stack(values).mean().item(), 5) for name, values in errors.items()}
            speed = 5 * (time.monotonic() - since)
            log.write(step=step, samples=samples, seconds=clock.trained, lr=rate, error=means, ms=speed)
            errors, since = {}, time.monotonic()
        if time.monotonic() - saved > 60:
            training.save(arguments.out / "transformer.pt")
            saved = time.monotonic()
    training.save(arguments.out / "transformer.pt")
    log.write(event="end", step=step, samples=samples, seconds=clock.trained, wall=time.monotonic() - began)


if __name__ == "__main__":
    main()
