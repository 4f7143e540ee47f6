"""One of several processes that decode bands of rows: RANK SIZE STORE FOLDER... The first writes, by
folder, the largest difference of its modes, the error of float32 itself, and the difference of bands on their own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from diffusion_runtime.decoders.causal_decoder import ChannelsFirstDecoder
from diffusion_runtime.decoders.causal_video_decoder import CausalVideoDecoder, FusedDecoder
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.video_decoder import read_statistics, restore_by_config
from diffusion_runtime.models.wan.codec import AUTOENCODER, load_decoder
from diffusion_runtime.parallel.collectives import RankGroup
from diffusion_runtime.parallel.halo import band_of, gather_bands

CPU = torch.device("cpu")
# Rows that no number of processes divides.
NUM_ROWS = 7


def modes(folder: str, plain: LatentDecoder) -> list[LatentDecoder]:
    """Diffusers' module, and both decoders on its weights."""
    autoencoder = AUTOENCODER.load(Path(folder), CPU, torch.float32, left_out=("encoder", "quant_conv"))
    restore = restore_by_config(Path(folder), CPU)
    # On several processes sums may differ in their last bits, as a band's convolutions have another size.
    first = FusedDecoder(ChannelsFirstDecoder(autoencoder), 100.0, "channels first")
    return [plain, CausalVideoDecoder(autoencoder, restore, [first]), plain.fast()]


def main(rank: int, size: int, store: str, folders: list[str]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    group = RankGroup.of(dist.group.WORLD)
    for folder in folders:
        decoder = load_decoder(Path(folder), CPU, torch.float32)
        num_channels = len(read_statistics(Path(folder))[0])
        # Two latent frames: the first is decoded otherwise than those after it.
        shape = (1, num_channels, 2, NUM_ROWS, 3)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        own = latents[..., band_of(NUM_ROWS, group), :]
        bands = [banded.decode_band(own, group) for banded in modes(folder, decoder)]
        together = [gather_bands(band, 2, group, NUM_ROWS) for band in bands]
        for band, whole in zip(bands, together, strict=True):
            assert (gather_bands(band, 2, group) == whole).all()
        # Without its neighbours a band has visible seams.
        alone = gather_bands(decoder.decode(own), 2, group)
        if rank == 0:
            whole = decoder.decode(latents)
            exact = load_decoder(Path(folder), CPU, torch.float64).decode(latents.double())
            assert [frames.shape for frames in together] == [whole.shape] * len(together)
            difference = max((frames - whole).abs().max().item() for frames in together)
            print(difference, *((x - whole).abs().max().item() for x in (exact, alone)))
    # None may leave while another still reads from it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
