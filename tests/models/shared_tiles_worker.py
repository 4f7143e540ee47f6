"""One of several processes that share the tiles of a decoder: RANK SIZE STORE. Each writes how many tiles it decoded of
how many, and the largest difference to decoding alone."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from models.test_decoding_families import KINDS, TILINGS, autoencoder, random_latents

from diffusion_runtime.decoders.video_decoder import VideoDecoder, by_factor, norm_fused
from diffusion_runtime.parallel.collectives import RankGroup

# Five latent frames are two tiles; 2 x 2 tiles in space, narrow ones at the ends.
SIZES = {"hunyuan": (5, 9, 8), "hunyuan 1.5": (2, 4, 7), "ltx2": (2, 7, 9)}


@torch.inference_mode()
def main(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    group = RankGroup.of(dist.group.WORLD)
    for kind, shape in SIZES.items():
        module = autoencoder(kind)
        tiles: list[int] = []

        def network(module: Any, raw: torch.Tensor, kind: str = kind, tiles: list[int] = tiles) -> torch.Tensor:
            tiles.append(raw.shape[2])
            frames: torch.Tensor = KINDS[kind][2](module, raw)
            return frames

        decoders = norm_fused(module, network, 8 if kind == "ltx2" else 4)
        decoder = VideoDecoder(module, by_factor(1.0), decoders, TILINGS[kind]).in_tiles("on")
        latents = random_latents(module, *shape)
        alone = list(decoder.stream(latents).chunks)
        num_tiles = len(tiles)
        tiles.clear()
        shared = list(decoder.stream(latents, group).chunks)
        assert [each.shape for each in shared] == [each.shape for each in alone]
        difference = max(float((one - other).abs().max()) for one, other in zip(alone, shared, strict=True))
        print(kind.replace(" ", "_"), num_tiles, len(tiles), difference)
    # None may leave while another still reads from it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
