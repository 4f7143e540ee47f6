"""Cases of speed options that no other benchmark measures: a tiny decoder, and the encoding of a prompt that is kept.

    python -m benchmarks.speed_options --device cuda --output benchmarks/results/speed_options_gpu.json

The tiny decoder has the published shapes of taew2_1 (Wan 2.1) and random weights, beside Wan's own decoder, exact and
fast, on the same latents; it must give as many frames. A prompt is made twice by the embedded model, with another seed,
with and without kept encodings: the clips must be equal. Under a minute on one H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_gpu import decoders, random_autoencoder, random_latents
from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.decoders.tiny_decoder import TinyDecoder, TinyLatents, TinyNetwork

TAEW2_1 = (TinyLatents(16, (1, 2, 2), 1), (256, 128, 64, 64))
# Latents of 81 frames of 480 x 832, and what a CPU decodes in seconds.
LATENTS = {"cuda": (21, 60, 104), "cpu": (2, 6, 6)}
REPEATS = 3
PROMPT = "a red circle moving left"


def seconds_of(run: Callable[[], Any], device: str) -> float:
    """Median seconds of a call, after one that compiles."""
    run()
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


@torch.inference_mode()
def tiny_decoder(device: str) -> dict[str, Any]:
    """Seconds of one clip by each decoder."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    own = random_autoencoder("wan21", dtype, device, is_small=False)
    latents = random_latents(own, LATENTS["cpu" if device == "cpu" else "cuda"], dtype)
    tiny = TinyDecoder(TinyNetwork(*TAEW2_1).eval().to(device, dtype), "taew2_1, random")
    run: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        **{name: decode for name, decode in decoders(own).items() if name in ("exact", "fast")},
        "tiny": tiny.decode,
    }
    counts = {"tiny": run["tiny"](latents).shape[1], "fast": run["fast"](latents).shape[2]}
    assert len(set(counts.values())) == 1, counts
    seconds = {name: seconds_of(lambda decode=decode: decode(latents), device) for name, decode in run.items()}
    return {"case": "tiny decoder", "latents": list(latents.shape), "num_frames": counts["tiny"], "seconds": seconds}


def kept_encoding(device: str) -> dict[str, Any]:
    """Seconds of the text of a repeated prompt."""
    seconds, frames = {}, {}
    for name, keeps in (("off", False), ("on", True)):
        pipeline = load_pipeline(RuntimeConfig("shapes", device=device, encoding_cache=keeps))
        values = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 4}
        found = [pipeline(GenerationRequest(PROMPT, seed=seed, **values)) for seed in range(6)]
        seconds[name] = statistics.median(each.timings["text"] for each in found[1:])
        frames[name] = found[-1].frames
        pipeline.close()
    assert (frames["off"] == frames["on"]).all(), "a kept encoding made another clip"
    return {"case": "kept encoding, embedded model", "text_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for measure in (kept_encoding, tiny_decoder):
        rows.append(measure(arguments.device))
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "schema": "diffusion_runtime.speed_options/1",
        "machine": describe_machine(arguments.device),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
