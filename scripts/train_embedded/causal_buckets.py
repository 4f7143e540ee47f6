"""The steps of causal training: clips, streams and far streams, the chunks and windows of each, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from scripts.train_embedded.causal_mask import ChunkMask
from scripts.train_embedded.causal_objective import StepPlan
from scripts.train_embedded.causal_pool import SINK_FRAMES

CHUNKS = {2: 0.5, 4: 0.3, 8: 0.2}
"""Latent frames per chunk, and how often."""
WINDOWS: dict[int, tuple[tuple[int | None, int], ...]] = {
    2: ((None, 0), (8, 1), (6, 2), (8, 2), (10, 2)),
    4: ((None, 0), (8, 1), (10, 2)),
    8: ((None, 0), (12, 2)),
}
"""(span, sink) by the frames of a chunk; None: everything."""
FAR_WINDOWS: dict[int, tuple[tuple[int, int], ...]] = {
    2: ((6, 2), (8, 2), (10, 2)),
    4: ((8, 2), (10, 2)),
    8: ((12, 2),),
}
SHIPPED = (2, 6, 2)
"""Chunk, span and sink of `shapes-causal`."""
NO_PAST = 0.05
"""Share of steps in which no chunk sees another."""
LAST_POSITION = 4096


@dataclass(frozen=True)
class CausalBucket:
    """One static shape of a training step."""

    kind: str
    """`clip`: one chunk, of clips of 29 frames that do not go on; `near` and `far`: streams, see causal_pool.py;
    `first`: the first chunk of streams alone, many at once, since of a stream's chunks it is one and of a stream's
    mistakes the most."""
    num_latents: int
    size: int
    batch: int
    share: float
    """How often a step has this shape, relative to the others."""
    first_shift: float
    capacity: int
    """Clips kept in the pool."""
    encode_batch: int
    around: float | None = None
    """Weight of the motion "around" among this bucket's streams; None: that of all."""

    @property
    def name(self) -> str:
        return f"{self.kind}{self.num_latents}x{self.size}"

    @property
    def num_frames(self) -> int:
        return 1 + 4 * (self.num_latents - 1)

    def plan(self, random: Random, device: str, as_shipped: float = 0.0) -> StepPlan:
        """How one step reads its batch: chunk, window, positions. as_shipped: share of steps with those of SHIPPED."""
        positions = torch.arange(self.num_latents)
        if self.kind in ("clip", "first"):
            return StepPlan(positions.to(device), self.first_shift)
        sizes = [chunk for chunk in CHUNKS if self.num_latents % chunk == 0 and chunk < self.num_latents]
        chunk = random.choices(sizes, [CHUNKS[size] for size in sizes])[0]
        shipped = as_shipped > 0 and random.random() < as_shipped
        chunk = SHIPPED[0] if shipped else chunk
        if self.kind == "far":
            span, sink = SHIPPED[1:] if shipped else random.choice(FAR_WINDOWS[chunk])
            # As far as the stream was long when it came here, an hour at most, and near more often than far.
            positions[SINK_FRAMES:] += round(LAST_POSITION ** random.random())
            # Chunks whose past was never encoded: they begin in the first frames behind the sink.
            counted = tuple(
                first + chunk <= SINK_FRAMES or first >= SINK_FRAMES + 2 for first in range(0, self.num_latents, chunk)
            )
        else:
            span, sink = SHIPPED[1:] if shipped else random.choice(WINDOWS[chunk])
            if random.random() < NO_PAST:
                span, sink = chunk, 0
            positions += random.choice((0, random.randrange(LAST_POSITION)))
            counted = (True,) * (self.num_latents // chunk)
        mask = ChunkMask(self.num_latents, chunk, span, sink)
        return StepPlan(positions.to(device), self.first_shift, mask, counted)


STAGES = {
    "small": (
        CausalBucket("near", 16, 128, 96, 0.44, 8.0, 12288, 96),
        CausalBucket("far", 16, 128, 96, 0.32, 8.0, 8192, 96),
        CausalBucket("clip", 8, 256, 96, 0.24, 12.0, 12288, 64),
    ),
    "mixed": (
        CausalBucket("near", 16, 256, 24, 0.34, 12.0, 4096, 24),
        CausalBucket("far", 16, 256, 24, 0.24, 12.0, 3072, 24),
        CausalBucket("near", 16, 128, 96, 0.14, 8.0, 8192, 96),
        CausalBucket("far", 16, 128, 96, 0.10, 8.0, 6144, 96),
        CausalBucket("clip", 8, 256, 96, 0.18, 12.0, 12288, 64),
    ),
    "long": (
        CausalBucket("near", 16, 256, 24, 0.28, 12.0, 4096, 24),
        CausalBucket("far", 16, 256, 24, 0.26, 12.0, 3072, 24),
        CausalBucket("first", 2, 256, 192, 0.18, 12.0, 12288, 192, around=7.4),
        CausalBucket("near", 16, 128, 96, 0.09, 8.0, 8192, 96),
        CausalBucket("far", 16, 128, 96, 0.08, 8.0, 6144, 96),
        CausalBucket("first", 2, 128, 512, 0.05, 8.0, 12288, 512, around=7.4),
        CausalBucket("clip", 8, 256, 96, 0.06, 12.0, 12288, 64),
    ),
    "laptop": (
        CausalBucket("near", 8, 128, 4, 0.6, 8.0, 64, 4),
        CausalBucket("far", 8, 128, 4, 0.4, 8.0, 64, 4),
    ),
    "toy": (
        CausalBucket("near", 8, 32, 2, 0.5, 3.0, 8, 4),
        CausalBucket("far", 8, 32, 2, 0.3, 3.0, 8, 4),
        CausalBucket("first", 2, 32, 4, 0.2, 3.0, 8, 4, around=7.4),
        CausalBucket("clip", 4, 32, 4, 0.2, 3.0, 8, 4),
    ),
}
"""Buckets by the name of a stage: `small` and `mixed` on a GPU, one after the other, with as few shapes as may be,
since each is compiled; `long`: `mixed` with first chunks, for several GPUs; `laptop`: a look at the direction on a CPU;
`toy`: a dry run in seconds."""
