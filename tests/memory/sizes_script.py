"""Generations of many sizes in one process, the first size once more at the end, each announced on standard output,
where oneDNN also says what it compiles; and how many tensors live, and how many of the package's own tables are kept.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from itertools import product

import torch

from diffusion_runtime import GenerationRequest, load_pipeline


def kept() -> list[int]:
    gc.collect()
    living = gc.get_objects()
    tables = [
        each.cache_info().currsize
        for each in living
        if type(each) is functools._lru_cache_wrapper and str(each.__module__).startswith("diffusion_runtime")
    ]
    return [sum(type(each) is torch.Tensor for each in living), max(tables)]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    sizes = list(product((32, 48, 64, 80), (32, 48, 64, 80)))
    pipelines = [load_pipeline(folder, device="cpu", attention=name) for name in (None, "video_sparse_attn")]
    for number, (height, width) in enumerate([*sizes, sizes[0]]):
        print(f"\nsize {number} {json.dumps(kept())}", flush=True)
        for pipeline in pipelines:
            pipeline(GenerationRequest("a star", height=height, width=width, num_frames=1, num_inference_steps=1))
    print(f"\nsize end {json.dumps(kept())}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
