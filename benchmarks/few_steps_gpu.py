"""Whole generations of few-step Wan at real sizes on one GPU: text to frames, warm, random weights.

    python -m benchmarks.few_steps_gpu --output benchmarks/results/few_steps_gpu.json [--only 1.3b]

Text encoder (UMT5-XXL, 512 tokens), denoising with the sampler and the noise levels of the preset, decoding (exact and
fast, 81 frames of 480 x 832), each on random weights of the published shapes: what they compute is noise, how long it
takes is not. Correctness of the parts is tested elsewhere; here the attention report must name the backend asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import UMT5Config, UMT5EncoderModel

from benchmarks.decode_gpu import decoders, random_autoencoder, random_latents
from benchmarks.families import wan
from benchmarks.families.step import FamilyStep
from benchmarks.families_gpu import DTYPE, build_ours, build_theirs, free
from benchmarks.machine import describe_machine
from diffusion_runtime.attention import AttentionContext, AttentionRecorder, RequestCache, StepInfo
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.noise import SampleNoise
from diffusion_runtime.denoising.registry import build_sampler
from diffusion_runtime.models.interface import DiffusionTransformer
from diffusion_runtime.models.sampling_presets import presets_of

REPEATS = 3
VSA = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.8}}}}
CONFIG_14B = {**wan.STEPS[0].config, "num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824}
STEP_14B = dataclasses.replace(wan.STEPS[0], name="Wan 2.2 A14B, 480 x 832, 81 frames", config=CONFIG_14B)
# (preset, step, transformers, what chooses self-attention)
CASES: dict[str, tuple[str, FamilyStep, int, Sequence[Any]]] = {
    "1.3b": ("fastwan-3", wan.STEPS[0], 1, (None, VSA)),
    "a14b": ("lightning-4", STEP_14B, 2, (None,)),
}
# Above it the expert for high noise computes.
BOUNDARY = 0.875


def seconds_of(run: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median seconds of a call, after one that compiles and fills tables."""
    run()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_text() -> float:
    config = UMT5Config(
        vocab_size=256384,
        d_model=4096,
        d_kv=64,
        d_ff=10240,
        num_layers=24,
        num_heads=64,
        feed_forward_proj="gated-gelu",
    )
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    model = model.to(DTYPE).to_empty(device="cuda").eval()
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    ids = torch.randint(3, 1000, (1, 512), device="cuda")
    return seconds_of(lambda: model(ids))


def time_decode() -> dict[str, float]:
    autoencoder = random_autoencoder("wan21", DTYPE, "cuda", is_small=False)
    latents = random_latents(autoencoder, (21, 60, 104), DTYPE)
    run = decoders(autoencoder)
    return {name: seconds_of(lambda name=name: run[name](latents)) for name in ("diffusers", "exact", "fast")}


def denoiser(models: Sequence[DiffusionTransformer], step: FamilyStep, preset: str) -> Callable[[], AttentionRecorder]:
    """Denoises once; the recorder says what attention ran."""
    request = next(each.request for each in presets_of("wan") if each.name == preset)
    shift = request.get("flow_shift", 1.0)
    levels = request.get("sigmas") or [shifted(t, shift) for t in request["sigmas_before_shift"]]
    device = torch.device("cuda")
    latents, _, inputs = step.make_inputs(device, DTYPE).ours

    def run() -> AttentionRecorder:
        recorder, cache = AttentionRecorder(), RequestCache()

        def predict(x: torch.Tensor, info: StepInfo) -> torch.Tensor:
            assert info.timestep is not None
            timestep = torch.full(x.shape[:1], info.timestep, device=device)
            model = models[0 if info.timestep >= 1000 * BOUNDARY else -1]
            info = dataclasses.replace(info, expert=0 if model is models[0] else 1)
            velocity: torch.Tensor = model(
                x.to(DTYPE), timestep, inputs, AttentionContext(step=info, state=cache, recorder=recorder)
            )
            return velocity

        noise = SampleNoise(tuple(latents.shape[1:]), [0])
        sampler = build_sampler(str(request["sampler"]), len(levels), 1.0, {}, tuple(levels))
        made = sampler.sample(noise.draw().to(device), predict, None, noise.draw)
        assert made.shape == latents.shape
        return recorder

    return run


def measure(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    text, decode = time_text(), time_decode()
    print(
        f"text {text:.3f} s, decode " + ", ".join(f"{name} {value:.3f} s" for name, value in decode.items()), flush=True
    )
    for name in names:
        preset, step, num_models, choices = CASES[name]
        for choice in choices:
            models = []
            for _ in range(num_models):
                state = dict(build_theirs(step, torch.device("cuda")).state_dict())
                models.append(build_ours(step, choice, state, torch.device("cuda"), takes=True))
                del state
                free()
            run = denoiser(models, step, preset)
            seconds = seconds_of(run)
            used = next(row.backend for row in run().report().rows if row.role == "self")
            if choice is not None and used != VSA["per_role"]["self"]["backend"]:
                raise ValueError(f"{used} ran instead of what was chosen")
            row = {"model": step.name, "preset": preset, "self_attention": used, "choice": choice, "text_seconds": text}
            row |= {"denoise_seconds": seconds, "decode_seconds": decode}
            row |= {"total_seconds": {kind: text + seconds + value for kind, value in decode.items()}}
            totals = ", ".join(f"{kind} {value:.2f} s" for kind, value in row["total_seconds"].items())
            print(f"{step.name}, {preset}, {used}: denoise {seconds:.3f} s; text to frames: {totals}", flush=True)
            del models, run
            free()
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.few_steps_gpu/1",
        "machine": describe_machine("cuda"),
        "rows": [],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode():
        for row in measure(arguments.only):
            document["rows"].append(row)
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
