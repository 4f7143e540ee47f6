"""Train the embedded model to go on: causal, chunk by chunk, on streams with prompts that change.

python -m scripts.train_embedded.causal_train --stage small --seconds 480 --out $OUT
python -m scripts.train_embedded.causal_train --stage mixed --seconds 480 --resume FOLDER --out $OUT
torchrun --standalone --nproc-per-node 4 -m scripts.train_embedded.causal_train --stage long --seconds 480 --out $OUT

See CAUSAL.md for the order, and for what each stage is.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from scripts.shapes.render import render_slots
from scripts.shapes.streams import StreamSettings, render_stream_slots
from scripts.train_embedded.architecture import build_tokenizer
from scripts.train_embedded.causal_buckets import STAGES, CausalBucket
from scripts.train_embedded.causal_objective import FIRST_CHUNK_WEIGHT
from scripts.train_embedded.causal_pool import StreamPool, StreamTrainingBatch
from scripts.train_embedded.causal_training import CausalTraining, build_models
from scripts.train_embedded.latent_pool import Encoder, LatentPool
from scripts.train_embedded.ranks import Ranks, join_ranks
from scripts.train_embedded.session import Clock, Log, cosine
from scripts.train_embedded.switch_weights import add_switch_weights
from scripts.train_embedded.train_transformer import load_encoder

SHAPES = Path("diffusion_runtime/assets/shapes")
TWO_OBJECTS_IN_CLIPS = 0.6
REFRESH_EVERY = 8
"""Steps between two refreshes of one encode batch."""
AGREE_EVERY = 8
"""Steps between two readings of the first process's clock by all: each waits for the device."""


@dataclass(frozen=True)
class Pool:
    """The clips of one bucket."""

    bucket: CausalBucket
    clips: StreamPool | LatentPool

    def fill(self, share: float) -> None:
        """Encode a share of the capacity, one encode batch at least."""
        for _ in range(max(1, round(self.bucket.capacity * share / self.bucket.encode_batch))):
            self.clips.refresh(self.bucket.encode_batch)

    def draw(self, generator: torch.Generator) -> StreamTrainingBatch:
        drawn = self.clips.draw(self.bucket.batch, generator)
        return drawn if isinstance(drawn, StreamTrainingBatch) else StreamTrainingBatch.of_clips(drawn)


def make_pool(
    bucket: CausalBucket, encode: Encoder, device: str, seed: int, settings: StreamSettings, drift: float = 0.0
) -> Pool:
    """An empty pool of a bucket. settings: of its streams, unless it is of clips; drift: see StreamPool."""
    if bucket.around is not None:
        settings = replace(settings, around_weight=bucket.around)
    renderer = torch.compile(render_slots, dynamic=True) if device == "cuda" else render_slots
    tokenizer = build_tokenizer(streams=True)
    if bucket.kind == "clip":
        clips: StreamPool | LatentPool = LatentPool(
            bucket.capacity,
            bucket.num_frames,
            bucket.size,
            encode=encode,
            renderer=renderer,
            tokenizer=tokenizer,
            seed=seed,
            device=device,
            two_object_fraction=TWO_OBJECTS_IN_CLIPS,
        )
    else:
        clips = StreamPool(
            bucket.capacity,
            bucket.num_latents,
            bucket.size,
            far=bucket.kind == "far",
            encode=encode,
            renderer=functools.partial(render_stream_slots, render=renderer),
            tokenizer=tokenizer,
            seed=seed,
            device=device,
            settings=settings,
            # A first chunk has no past.
            drift=0.0 if bucket.kind == "first" else drift,
        )
    return Pool(bucket, clips)


def train(
    training: CausalTraining, pools: list[Pool], clock: Clock, ranks: Ranks, log: Log, arguments: argparse.Namespace
) -> None:
    """Train until the first process's clock is over, or for --steps; save every --save-every seconds and at the end."""
    # The same bucket and the same plan everywhere: a step is as long as that of the slowest process.
    random, since = Random(arguments.seed + training.steps), time.monotonic()
    began, progress, saved = training.steps, 0.0, time.monotonic()
    errors: dict[str, list[Tensor]] = {}

    def is_paused() -> bool:
        # All wait, or none: one that waits alone would keep the others in an exchange until it times out.
        return ranks.agree(float(arguments.pause_file.exists())) > 0

    while True:
        done = training.steps - began
        if arguments.pause_file is not None and done % AGREE_EVERY == 0:
            clock.wait_while(is_paused)
        # All stop at one step and save at one step: the others' clocks began earlier or later than the first's.
        if arguments.steps:
            progress = done / arguments.steps
        elif done % AGREE_EVERY == 0:
            progress = ranks.agree(clock.progress)
        if progress >= 1.0:
            break
        if done % AGREE_EVERY == 0 and ranks.agree(float(time.monotonic() - saved > arguments.save_every)):
            training.save(arguments.out, seconds=round(clock.trained, 1))
            saved = time.monotonic()
        pool = random.choices(pools, [each.bucket.share for each in pools])[0]
        if done % arguments.refresh_every == 0:
            pool.clips.refresh(pool.bucket.encode_batch)
        begin, end = arguments.schedule
        rate = cosine(begin + (end - begin) * progress, arguments.peak, arguments.end)
        plan = replace(
            pool.bucket.plan(random, training.device, arguments.as_shipped),
            first_weight=arguments.first_chunk_weight,
            at_steps=arguments.at_steps,
        )
        loss = training.step(pool.draw(training.generator), plan, rate)
        for part, error in (("first", loss.first), ("later", loss.later)):
            errors.setdefault(f"{pool.bucket.name}.{part}", []).append(error)
        if training.steps % arguments.log_every == 0:
            means = {name: round(float(torch.stack(each).nanmean()), 5) for name, each in sorted(errors.items())}
            speed = 1000 * (time.monotonic() - since) / arguments.log_every
            apart = training.align()
            log.write(step=training.steps, seconds=clock.trained, lr=rate, ms=speed, apart=apart, error=means)
            errors, since = {}, time.monotonic()
    training.save(arguments.out, seconds=round(clock.trained, 1))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=tuple(STAGES), required=True)
    parser.add_argument("--seconds", type=float, required=True, help="wall seconds, preparation and saving included")
    parser.add_argument("--steps", type=int, default=0, help="train for as many steps instead, whatever the clock says")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, default=SHAPES, help="exported folder to begin with")
    parser.add_argument("--vae", type=Path, default=SHAPES, help="exported folder whose VAE encodes")
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint to go on from, instead of --init")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--end", type=float, default=1e-5)
    parser.add_argument(
        "--schedule",
        type=float,
        nargs=2,
        default=(0.0, 1.0),
        metavar=("FROM", "TO"),
        help="the part of the learning rate's schedule, 0 to 1, that this call covers: 0 0.5, then --resume with 0.5 1",
    )
    parser.add_argument(
        "--around",
        type=float,
        default=StreamSettings.around_weight,
        metavar="WEIGHT",
        help="of streams of one object that circle; the other motions add up to 7.4 with the usual --bounce",
    )
    parser.add_argument(
        "--bounce",
        type=float,
        default=StreamSettings.bounce_weight,
        metavar="WEIGHT",
        help="of streams of one object that go back and forth, and of those that go up and down",
    )
    parser.add_argument(
        "--switches", type=float, default=StreamSettings.switch_share, metavar="SHARE", help="of streams with a switch"
    )
    add_switch_weights(parser)
    parser.add_argument(
        "--as-shipped",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of steps with the chunk, window and sink that shapes-causal has; the others draw theirs",
    )
    parser.add_argument(
        "--at-steps",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of samples whose later chunks are at the noise levels of the four sampling steps alone",
    )
    parser.add_argument(
        "--two-objects", type=float, default=StreamSettings.two_object_fraction, metavar="SHARE", help="of streams"
    )
    parser.add_argument(
        "--drift",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of streams whose past is a little off in size, shade and speed, behind the sink",
    )
    parser.add_argument(
        "--first-chunk-weight",
        type=float,
        default=FIRST_CHUNK_WEIGHT,
        metavar="WEIGHT",
        help="of the first chunk's error, which decides where an object is and which way it goes",
    )
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="adamw: cheaper on a CPU")
    parser.add_argument("--muon-factor", type=float, default=2.0, help="Muon's learning rate over AdamW's")
    parser.add_argument("--decay", type=float, default=0.999, help="of the average of the weights")
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--log-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--refresh-every", type=int, default=REFRESH_EVERY, metavar="STEPS")
    parser.add_argument(
        "--fill",
        type=float,
        metavar="SHARE",
        help="of each pool, before the first step; default: 0.25 divided by the processes, at least 0.08",
    )
    parser.add_argument("--no-compile", action="store_true", help="run the blocks without torch.compile")
    parser.add_argument("--pause-file", type=Path, help="wait between steps while it is there, off the clock")
    parser.add_argument("--compile-cache", type=Path, help="file of what torch.compile made: read, and written")
    arguments = parser.parse_args()
    if not 0 <= arguments.schedule[0] < arguments.schedule[1] <= 1:
        parser.error(
            f"--schedule: two shares, rising, from 0 to 1, got {' '.join(map('{:g}'.format, arguments.schedule))}"
        )
    for name in ("drift", "two_objects", "switches", "as_shipped", "at_steps", "fill"):
        share = getattr(arguments, name)
        if share is not None and not 0 <= share <= 1:
            parser.error(f"--{name.replace('_', '-')}: a share from 0 to 1, got {share:g}")
    weights = {"around": [arguments.around], "bounce": [arguments.bounce]}
    for name, values in weights.items():
        if not all(0 <= weight < math.inf for weight in values):
            parser.error(f"--{name}: weights from 0 on, got {' '.join(map('{:g}'.format, values))}")
    return arguments


def main() -> None:
    """Fill the pools, train by the clock, save every two minutes and at the end."""
    arguments = parse_arguments()
    began, ranks = time.monotonic(), join_ranks()
    device = ranks.device
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.cache_size_limit = 64
    cache = arguments.compile_cache
    if cache is not None and cache.is_file():
        torch.compiler.load_cache_artifacts(cache.read_bytes())
    torch.manual_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.out / "causal_log.jsonl" if ranks.is_first else None)
    compiled = device == "cuda" and not arguments.no_compile
    training = CausalTraining(
        *build_models(None if arguments.resume else arguments.init),
        seed=arguments.seed,
        ranks=ranks,
        optimizer=arguments.optimizer,
        muon_factor=arguments.muon_factor,
        decay=arguments.decay,
        compiled=compiled,
    )
    state = training.resume(arguments.resume) if arguments.resume else {}
    log.write(event="start", device=device, ranks=ranks.count, stage=arguments.stage, compiled=compiled, **state)
    encode = load_encoder(arguments.vae, device)
    streams = StreamSettings(
        arguments.two_objects,
        arguments.switches,
        tuple(arguments.switch_weights),
        around_weight=arguments.around,
        bounce_weight=arguments.bounce,
    )
    pools = []
    for index, bucket in enumerate(STAGES[arguments.stage]):
        start = time.monotonic()
        seed = ranks.seed(1000 * (arguments.seed + training.steps) + index)
        pool = make_pool(bucket, encode, device, seed, streams, arguments.drift)
        pool.fill(max(0.08, 0.25 / ranks.count) if arguments.fill is None else arguments.fill)
        pools.append(pool)
        log.write(event="pool", bucket=bucket.name, seconds=time.monotonic() - start)
    left = ranks.agree(arguments.seconds - (time.monotonic() - began))
    if left <= 0 and not arguments.steps:
        raise SystemExit(f"--seconds {arguments.seconds:g} were over {-left:.0f} s before the first step")
    clock = Clock(max(left, 1.0))
    train(training, pools, clock, ranks, log, arguments)
    if ranks.is_first and cache is not None and (made := torch.compiler.save_cache_artifacts()) is not None:
        cache.write_bytes(made[0])
        log.write(event="compile cache", bytes=len(made[0]))
    log.write(event="end", step=training.steps, seconds=clock.trained, wall=time.monotonic() - began)
    ranks.leave()


if __name__ == "__main__":
    main()
