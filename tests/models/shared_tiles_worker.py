"""Two processes that share the tiles of a decoder; test_decoding_families.py runs it with a folder for results. Each
writes how many tiles it decoded of how many, and the largest difference to decoding alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks
from models.test_decoding_families import KINDS, TILINGS, autoencoder, random_latents

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionConfig,
    AttentionPolicy,
    AttentionResult,
    register_backend,
)
from diffusion_runtime.attention.layers import LocalAttention
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.video_decoder import VideoDecoder, by_factor, norm_fused
from diffusion_runtime.decoders.vit_decoder_network import VitDecoderSizes, VitVideoAutoencoder
from diffusion_runtime.decoders.vit_video_decoder import VitVideoDecoder
from diffusion_runtime.errors import BackendInaccurateError
from diffusion_runtime.parallel.collectives import RankGroup
from tests.attention.test_measured_error import Coarse

NUM_PROCESSES = 2
# Five latent frames are two tiles; 2 x 2 tiles in space, narrow ones at the ends.
SIZES = {"hunyuan": (5, 9, 8), "ltx2": (2, 7, 9)}


class OfOneProcess(Coarse):
    """Beyond its bound on one process."""

    name = "of_one_process"
    is_wrong = False

    def run(self, call: AttentionCall) -> AttentionResult:
        result = super().run(call)
        return result._replace(out=result.out * 1.3) if type(self).is_wrong else result


def clip_decoder(policy: AttentionPolicy) -> tuple[VitVideoAutoencoder, VitVideoDecoder]:
    sizes = VitDecoderSizes(4, 1, 2, 16, 2, 4, 12, 100.0, 1e-5, (4, 16), 17, 3)
    torch.manual_seed(0)
    module = VitVideoAutoencoder("AutoencoderKLMiniMaxH3", sizes).requires_grad_(False)
    attention, tiling = [LocalAttention(2, 16, policy=policy)], Tiling(3, 2, 16, is_default=True)
    return module, VitVideoDecoder(module, [0.0] * 4, [1.0] * 4, attention, tiling)


@torch.inference_mode()
def end_alike(group: RankGroup) -> list[str]:
    """Return how clips end whose attention is too inaccurate on the first process, on the second and on none."""
    register_backend(OfOneProcess)
    _, decoder = clip_decoder(AttentionPolicy(config=AttentionConfig.parse("of_one_process")))
    found = []
    for wrong in (0, 1, None):
        OfOneProcess.is_wrong = group.index == wrong
        try:
            found.append(str(sum(each.shape[1] for each in decoder.stream(torch.randn(1, 4, 12, 4, 5), group).chunks)))
        except BackendInaccurateError as error:
            found.append(str(error))
    return found


@torch.inference_mode()
def share_clips(group: RankGroup) -> list[Any]:
    """The same for a decoder whose tiles come in batches, two clips of 2 x 2."""
    module, decoder = clip_decoder(AttentionPolicy())
    tiles: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: tiles.append(len(inputs[0])))
    latents = torch.randn(1, 4, 12, 4, 5)
    alone = list(decoder.stream(latents).chunks)
    num_tiles = sum(tiles)
    tiles.clear()
    shared = list(decoder.stream(latents, group).chunks)
    difference = max(float((one - other).abs().max()) for one, other in zip(alone, shared, strict=True))
    return ["clips", num_tiles, sum(tiles), difference]


@torch.inference_mode()
def work(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), NUM_PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_PROCESSES)
    assert dist.group.WORLD is not None
    group, found = RankGroup.of(dist.group.WORLD), []
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
        found.append([kind, num_tiles, len(tiles), difference])
    found.append(share_clips(group))
    (folder / f"result-{rank}.json").write_text(json.dumps(found))
    (folder / f"ended-{rank}.json").write_text(json.dumps(end_alike(group)))
    # None may leave while another still reads from it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fork_ranks(lambda rank: work(rank, Path(sys.argv[1])), NUM_PROCESSES))
