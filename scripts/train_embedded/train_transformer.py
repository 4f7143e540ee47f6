"""Train the transformer and its text encoder together by flow matching on latents that are encoded as training goes on.

python -m scripts.train_embedded.train_transformer --vae vae.pt --minutes 17 --out $OUT
torchrun --standalone --nproc-per-node 4 -m scripts.train_embedded.train_transformer ...    # several GPUs
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from scripts.train_embedded.architecture import (
    build_text_encoder,
    build_tokenizer,
    build_transformer,
)
from scripts.train_embedded.attention import TrainingAttention, faster_kernel
from scripts.train_embedded.auxiliary import AuxiliaryHeads, ScoreLog, fade
from scripts.train_embedded.buckets import TOY_BUCKETS, Bucket
from scripts.train_embedded.clip_vae import WholeClipVae, channels_last, normalise_and_activate
from scripts.train_embedded.eight_bits import load_parts
from scripts.train_embedded.export import load_component, load_vae
from scripts.train_embedded.latent_pool import Encoder, LatentPool
from scripts.train_embedded.muon import Muon
from scripts.train_embedded.objective import StepLoss, training_loss
from scripts.train_embedded.ranks import GradientAverage, Ranks, join_ranks
from scripts.train_embedded.session import Average, Clock, Log, cosine
from scripts.train_embedded.world import CAPTION_TOKENS, SHAPES, WORLDS, World

REFRESH_EVERY = 8
"""Steps between two looks at the clock; and, unless --refresh-every says otherwise, between two refreshes of one encode
batch."""
LOG_EVERY, TOY_LOG_EVERY = 200, 20


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


def make_pools(
    buckets: tuple[Bucket, ...], encode: Encoder, device: str, seed: int, world: World = SHAPES
) -> list[LatentPool]:
    """One pool a bucket, shared where the capacity is 0."""
    renderer = world.renderer(device == "cuda")
    tokenizer = build_tokenizer(world.words())
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
                two_object_fraction=world.two_object_fraction,
                world=world,
            )
    return [pools[(bucket.num_frames, bucket.size)] for bucket in buckets]


def initial_states(path: Path) -> dict[str, dict[str, Tensor]]:
    """States by part, of a transformer.pt, of an 8-bit file or of an exported folder."""
    if path.suffix == ".safetensors":
        return load_parts(path)
    if not path.is_dir():
        states: dict[str, dict[str, Tensor]] = torch.load(path, map_location="cpu")
        return states
    return {
        "transformer": load_component(path, WanTransformer3DModel).state_dict(),
        "text_encoder": load_component(path, UMT5EncoderModel).state_dict(),
    }


def load_encoder(path: Path, device: str, world: World = SHAPES) -> Encoder:
    """Clips to normalised latents with a trained VAE: the mean of the posterior, none of its noise."""
    module = load_vae(path, world)
    latents_mean, latents_std = module.config.latents_mean, module.config.latents_std
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

    def __init__(
        self, ranks: Ranks, seed: int, init: Path | None, optimizer: str, muon_factor: float, world: World = SHAPES
    ) -> None:
        torch.manual_seed(seed)
        device = ranks.device
        self._ranks, self._device, self._muon_factor = ranks, device, muon_factor
        self._generator = torch.Generator(device).manual_seed(ranks.seed(seed))
        tokenizer = build_tokenizer(world.words())
        self.transformer = build_transformer(world.sizes).to(device)
        self.text_encoder = build_text_encoder(len(tokenizer), world.sizes).to(device)
        if init is not None:
            states = initial_states(init)
            self.transformer.load_state_dict(states["transformer"])
            self.text_encoder.load_state_dict(states["text_encoder"])
        self.heads = AuxiliaryHeads(
            world.sizes.text_dim,
            self.transformer.proj_out.in_features,
            tuple(map(len, world.vocabulary.values())),
            world.hidden_block,
        ).to(device)
        if init is not None and "heads" in states:
            self.heads.load_state_dict(states["heads"])
        self._parameters = [*self.transformer.parameters(), *self.text_encoder.parameters()]
        self._trained = [*self._parameters, *self.heads.parameters()]
        ranks.align(self._trained)
        self.transformer.set_attn_processor(TrainingAttention())
        if device == "cuda":
            self.transformer.compile_repeated_blocks(fullgraph=True)
        matrices, others = split_parameters(self.transformer, self.text_encoder)
        if optimizer == "adamw":
            matrices, others = [], [*matrices, *others]
        others = [*others, *self.heads.parameters()]
        self._adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
        self._muon = Muon(matrices)
        self._average_gradients = GradientAverage(self._trained, ranks)
        self._average = Average(self._parameters, decay=0.999)
        self._empty_ids = torch.zeros(CAPTION_TOKENS, dtype=torch.int64, device=device)
        self._empty_ids[0] = tokenizer.eos_token_id

    def step(self, bucket: Bucket, pool: LatentPool, rate: float, auxiliary: float) -> StepLoss:
        """One update on this process's own batch and the others'; `auxiliary` 0 to 1 fades the auxiliary losses."""
        for group in self._adamw.param_groups:
            group["lr"] = rate
        batch = pool.draw(bucket.batch, self._generator)
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda"):
            loss = training_loss(
                self.transformer,
                self.text_encoder,
                self.heads,
                batch,
                self._empty_ids,
                self._generator,
                shift=bucket.shift,
                prompt_tokens=bucket.prompt_tokens,
                auxiliary=auxiliary,
            )
        loss.total.backward()
        self._average_gradients()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._muon.step(rate * self._muon_factor)
        for parameter in self._trained:
            parameter.grad = None
        self._average.update()
        return loss

    def align(self) -> float:
        """Make the weights equal on all processes; how far apart they were."""
        return self._ranks.align(self._trained)

    def save(self, path: Path) -> None:
        """The averaged weights and the heads of the auxiliary losses, bfloat16, written whole or not at all."""
        self._average.swap()
        states = {
            name: {key: value.detach().to("cpu", torch.bfloat16) for key, value in part.state_dict().items()}
            for name, part in (
                ("transformer", self.transformer),
                ("text_encoder", self.text_encoder),
                ("heads", self.heads),
            )
        }
        self._average.swap()
        torch.save(states, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=tuple(WORLDS), default="shapes")
    parser.add_argument("--vae", type=Path, required=True, help="vae.pt or exported folder")
    parser.add_argument("--minutes", type=float, default=17.0, help="wall minutes, preparation included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="transformer.pt, 8-bit file or exported folder to go on from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    parser.add_argument("--peak", type=float, default=1.5e-3, help="AdamW's learning rate")
    parser.add_argument("--muon-factor", type=float, default=2.0, help="Muon's learning rate over AdamW's")
    parser.add_argument("--end", type=float, default=2e-5)
    parser.add_argument("--late", action="store_true", help="the mixture of shapes at the end, from the start on")
    parser.add_argument(
        "--refresh-every", type=int, default=REFRESH_EVERY, help="steps between two batches of new clips in the pools"
    )
    parser.add_argument("--keep-auxiliary", action="store_true", help="do not fade the auxiliary losses: more follows")
    parser.add_argument("--toy", action="store_true", help="tiny clips, for a dry run on a CPU")
    return parser.parse_args()


def fill(buckets: tuple[Bucket, ...], pools: list[LatentPool], log: Log) -> None:
    """A quarter of each pool, one encode batch at least."""
    for bucket, pool in zip(buckets, pools, strict=True):
        start = time.monotonic()
        for _ in range(max(1, bucket.capacity // bucket.encode_batch // 4) if bucket.capacity else 0):
            pool.refresh(bucket.encode_batch)
        log.write(event="pool", bucket=bucket.name, seconds=time.monotonic() - start)


def train(
    training: TransformerTraining,
    buckets: tuple[Bucket, ...],
    pools: list[LatentPool],
    clock: Clock,
    ranks: Ranks,
    log: Log,
    arguments: argparse.Namespace,
) -> tuple[int, int]:
    """Train until the first process's clock is over; it alone saves, every minute and at the end.

    Returns the number of steps, and of samples over all processes.
    """
    random, progress = Random(arguments.seed), 0.0
    attributes = tuple(WORLDS[arguments.world].vocabulary)
    step, samples, saved, since = 0, 0, time.monotonic(), time.monotonic()
    errors: dict[str, list[Tensor]] = {}
    scores, log_every = ScoreLog(attributes), TOY_LOG_EVERY if arguments.toy else LOG_EVERY
    while True:
        mixed = 1.0 if arguments.late else progress
        index = random.choices(range(len(buckets)), [bucket.share_at(mixed) for bucket in buckets])[0]
        bucket, pool = buckets[index], pools[index]
        if step % REFRESH_EVERY == 0:
            progress = ranks.agree(clock.progress)
            if progress >= 1.0:
                break
        if step % arguments.refresh_every == 0:
            pool.refresh(bucket.encode_batch)
        rate = cosine(progress, arguments.peak, arguments.end)
        loss = training.step(bucket, pool, rate, 1.0 if arguments.keep_auxiliary else fade(progress))
        errors.setdefault(bucket.name, []).append(loss.error.mean())
        scores.add(loss.scores)
        step, samples = step + 1, samples + bucket.batch * ranks.count
        if step % log_every == 0:
            means = {name: round(torch.stack(values).mean().item(), 5) for name, values in errors.items()}
            apart = training.align()
            speed = 1000 * (time.monotonic() - since) / log_every
            log.write(
                step=step,
                samples=samples,
                seconds=clock.trained,
                lr=rate,
                error=means,
                ms=speed,
                apart=apart,
                **scores.take(),
            )
            errors, since = {}, time.monotonic()
        if ranks.is_first and time.monotonic() - saved > 60:
            training.save(arguments.out / "transformer.pt")
            saved = time.monotonic()
    if ranks.is_first:
        training.save(arguments.out / "transformer.pt")
    return step, samples


def main() -> None:
    """Fill the pools, train by the clock, save the averaged weights every minute and at the end."""
    arguments = parse_arguments()
    world = WORLDS[arguments.world]
    began, ranks = time.monotonic(), join_ranks()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.cache_size_limit = 64
    log = Log(arguments.out / "transformer_log.jsonl" if ranks.is_first else None)
    log.write(event="start", ranks=ranks.count, device=ranks.device)
    training = TransformerTraining(
        ranks, arguments.seed, arguments.init, arguments.optimizer, arguments.muon_factor, world
    )
    buckets = TOY_BUCKETS if arguments.toy else world.buckets
    if ranks.device == "cuda":
        log.write(event="attention", ms=faster_kernel((buckets[0].batch, world.sizes.num_heads, 2048, 64)))
    encode = load_encoder(arguments.vae, ranks.device, world)
    pools = make_pools(buckets, encode, ranks.device, ranks.seed(arguments.seed + 1), world)
    fill(buckets, pools, log)
    clock = Clock(arguments.minutes * 60 - (time.monotonic() - began))
    step, samples = train(training, buckets, pools, clock, ranks, log, arguments)
    log.write(event="end", step=step, samples=samples, seconds=clock.trained, wall=time.monotonic() - began)
    ranks.leave()


if __name__ == "__main__":
    main()
