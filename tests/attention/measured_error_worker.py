"""Two processes that share a sequence and measure the error of 8-bit attention; test_measured_error.py runs it.

The second process's queries are such that its part alone is beyond the bound: both end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import fork_ranks

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, TokenLayout, USPAttention
from diffusion_runtime.errors import BackendInaccurateError
from diffusion_runtime.parallel.groups import ProcessMesh

LAYOUT = TokenLayout((2, 10, 20), num_suffix_tokens=8, valid_lengths=(5,))


def work(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, degrees in {"ulysses": {"ulysses_degree": 2}, "ring": {"ring_degree": 2}}.items():
        mesh = ProcessMesh.create(**degrees)
        policy = AttentionPolicy(config=AttentionConfig.parse("fp8_attn"), environment=None, mesh=mesh)
        layer = USPAttention(4, 64, policy=policy)
        generator = torch.Generator().manual_seed(rank)
        q, k, v = torch.randn(3, 1, 208, 4, 64, generator=generator)
        context = AttentionContext(LAYOUT, sharding=mesh.sharding)
        layer(q, k, v, context)
        lines = [str(context.recorder.report().errors[0].error)]
        # Sharp scores of two heads, which the second process computes, and of its own queries in a ring.
        sharp = q.clone()
        if name == "ulysses":
            sharp[:, :, 2:] *= 12
        elif rank == 1:
            sharp *= 12
        try:
            layer(sharp, k, v, AttentionContext(LAYOUT, sharding=mesh.sharding))
        except BackendInaccurateError as error:
            lines.append(str(error))
        (folder / f"{name}-{rank}.txt").write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fork_ranks(lambda rank: work(rank, Path(sys.argv[1])), 2))
