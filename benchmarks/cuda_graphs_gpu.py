"""CUDA graphs on one GPU: the embedded model's whole generation by stage, and small images of models at real size.

    python -m benchmarks.cuda_graphs_gpu --output cuda_graphs_gpu.json [--only shapes,decoder,z_image] [--device cpu]

`shapes`: 29 frames of 256 x 256, 12 steps, warm, without writing a file, by `--cuda-graphs off`, `auto` and `on`, by
turns; frames and counts of calls are compared first. `decoder`: its decoder alone, eager and replayed, with kernel
launches and the time that kernels take. The others: forwards of 256 x 256 pixels at the model's real size
with random weights (no download), eager and replayed, with the milliseconds of the host. `--device cpu` runs every path
at tiny sizes, with recorded operators in the place of graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.families.step import FamilyStep
from benchmarks.fused_kernels_gpu import STEPS, TINY_STEPS, build
from benchmarks.machine import describe_machine
from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext, AttentionRecorder, RequestCache, StepInfo
from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.denoising.cuda_graphs.capture import Capture, CudaCapture
from diffusion_runtime.denoising.cuda_graphs.captured_forward import ForwardPass
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.models.interface import DenoiserInputs

MODES = ("off", "auto", "on")
BAR_S, AIM_S = 0.12, 0.08
SMALL_GRID = 256
TINY = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 5}


def capture_for(device: torch.device) -> Capture:
    if device.type == "cuda":
        return CudaCapture(device)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    recorded: Capture = importlib.import_module("recorded_capture").RecordedCapture()
    return recorded


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    synchronize(device)
    begin = time.perf_counter()
    result = run()
    synchronize(device)
    return time.perf_counter() - begin, result


def load(device: torch.device, mode: str) -> Pipeline:
    # The mode is asked for in Python where recorded operators stand for graphs: on a CPU `on` is refused.
    pipeline = load_pipeline("shapes", device=str(device), cuda_graphs=mode if device.type == "cuda" else "auto")
    assert isinstance(pipeline, Pipeline)
    if device.type != "cuda" and mode != "off":
        graphs = ForwardGraphs(capture_for(device), is_probed=mode == "auto")
        decoder_graphs = DecoderGraphs(capture_for(device))
        decoder = pipeline.decoder.with_graphs(decoder_graphs)
        pipeline.parts = dataclasses.replace(
            pipeline.parts, graphs=graphs, decoder_graphs=decoder_graphs, decoder=decoder
        )
    return pipeline


def whole_generations(device: torch.device, repeats: int) -> dict[str, Any]:
    """Medians of whole generations and of their stages, in seconds."""
    pipelines = {mode: load(device, mode) for mode in MODES}
    request = GenerationRequest("a red circle moving left", seed=1, **({} if device.type == "cuda" else TINY))
    # The decoder's first latent frame is captured in the third.
    warm = [
        {mode: pipeline(dataclasses.replace(request, seed=seed)) for mode, pipeline in pipelines.items()}
        for seed in range(4)
    ]
    is_equal = all(
        (made[mode].frames == made["off"].frames).all()
        and made[mode].attention_report.rows == made["off"].attention_report.rows
        for made in warm
        for mode in MODES
    )
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    stages: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for repeat in range(repeats):
        again = dataclasses.replace(request, seed=4 + repeat)
        for mode, pipeline in pipelines.items():
            spent, media = seconds_of(lambda p=pipeline, r=again: p(r), device)
            seconds[mode].append(spent)
            stages[mode].append(dict(media.timings))
    reports = {mode: warm[-1][mode].attention_report for mode in MODES}
    replays = {mode: (report.graphs, report.decoder_graphs) for mode, report in reports.items()}
    medians = {mode: statistics.median(several) for mode, several in seconds.items()}
    return {
        "case": "shapes",
        "size": list(warm[-1]["off"].frames.shape),
        "correct": is_equal,
        "seconds": medians,
        "stages": {
            mode: {name: statistics.median(each[name] for each in several) for name in several[0]}
            for mode, several in stages.items()
        },
        "graphs": {
            mode: [None if each is None else dataclasses.asdict(each) for each in found]
            for mode, found in replays.items()
        },
        "bar_s": BAR_S,
        "aim_s": AIM_S,
        "meets_bar": medians["auto"] <= BAR_S,
    }


def decoding(device: torch.device, repeats: int) -> dict[str, Any]:
    """The embedded model's decoder with and without graphs: milliseconds, launches, kernels' own milliseconds."""
    plain = load(device, "off").decoder
    graphs = DecoderGraphs(capture_for(device))
    decoders = {"eager": plain, "graph": plain.with_graphs(graphs)}
    latents = torch.randn(1, 16, *((8, 32, 32) if device.type == "cuda" else (2, 4, 4)))
    for _ in range(4):
        graphs.start()
        found = {kind: decoder.decode(latents) for kind, decoder in decoders.items()}
    report = graphs.report()
    row: dict[str, Any] = {
        "case": "decoder",
        "implementation": plain.implementation,
        "frames": list(found["eager"].shape[1:]),
        "correct": bool(torch.equal(found["eager"], found["graph"])) and report.num_replayed == report.num_forwards,
        "graphs": dataclasses.asdict(report),
    }
    times: dict[str, list[float]] = {kind: [] for kind in decoders}
    for _ in range(repeats):
        for kind, decoder in decoders.items():
            times[kind].append(seconds_of(lambda d=decoder: d.decode(latents), device)[0])
    row["ms"] = {kind: 1000 * statistics.median(several) for kind, several in times.items()}
    for kind, decoder in decoders.items():
        row[f"{kind}_profile"] = profile_of(lambda d=decoder: d.decode(latents), device)
    return row


def profile_of(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What the host launched, and the time of all kernels together; operators in their place on a CPU."""
    cuda = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, *cuda]) as profiler:
        run()
        synchronize(device)
    events = profiler.key_averages()
    launched = {event.key: event.count for event in events if "Launch" in event.key}
    kernels = sum(event.self_device_time_total for event in events) / 1000
    operators = sum(event.count for event in events if event.key.startswith("aten::"))
    return {"launches": launched, "kernels_ms": kernels, "operators": operators}


@torch.inference_mode()
def small_image(name: str, step: FamilyStep, device: torch.device, repeats: int) -> dict[str, Any]:
    """Forwards of a small image, eager and replayed by turns, in milliseconds."""
    model = build(step, device, torch.bfloat16, None)
    latents, timestep, inputs = step.make_inputs(device, torch.bfloat16).ours
    if device.type == "cuda":
        latents, inputs = smaller(latents, inputs)
    graphs = ForwardGraphs(capture_for(device), is_probed=False)
    passes = Passes(latents, timestep, inputs)
    recorder = AttentionRecorder()
    graphed = graphs.of_generation(model, recorder, read=model.read_inputs, refusal=model.replay_refusal())
    runs: dict[str, Callable[[int], torch.Tensor]] = {
        "eager": lambda index: passes.at(index).run(model),
        "graph": lambda index: graphed(passes.at(index)),
    }
    for index in range(3):
        found = {kind: run(index) for kind, run in runs.items()}
    is_equal = bool(torch.equal(found["eager"], found["graph"]))
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    hosts: dict[str, list[float]] = {kind: [] for kind in runs}
    for repeat in range(repeats):
        for kind, run in runs.items():
            times[kind].append(seconds_of(lambda r=run, i=repeat: r(3 + i), device)[0])
            begin = time.perf_counter()
            run(3 + repeat)
            hosts[kind].append(time.perf_counter() - begin)
            synchronize(device)
    graphed.report()
    replayed = recorder.report().graphs
    return {
        "case": name,
        "latents": list(latents.shape),
        "correct": is_equal and replayed is not None and replayed.num_replayed > repeats,
        "ms": {kind: 1000 * statistics.median(several) for kind, several in times.items()},
        "host_ms": {kind: 1000 * statistics.median(several) for kind, several in hosts.items()},
        "graphs": None if replayed is None else dataclasses.asdict(replayed),
    }


class Passes:
    """Forward passes of the steps of one request."""

    def __init__(self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs) -> None:
        self._latents, self._timestep, self._inputs = latents, timestep, inputs
        self._state = RequestCache()

    def at(self, index: int) -> ForwardPass:
        context = AttentionContext(step=StepInfo(index, 1000), state=self._state)
        return ForwardPass(self._latents, self._timestep * 0.99**index, self._inputs, context)


def smaller(latents: torch.Tensor, inputs: DenoiserInputs) -> tuple[torch.Tensor, DenoiserInputs]:
    """Latents and inputs of an image of 256 x 256 pixels, cut out of those of 1024 x 1024."""
    factor = inputs.size.height // SMALL_GRID
    height, width = (side // factor for side in latents.shape[-2:])
    size = dataclasses.replace(inputs.size, height=inputs.size.height // factor, width=inputs.size.width // factor)
    return latents[..., :height, :width].contiguous(), dataclasses.replace(inputs, size=size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--only", default="shapes,decoder,z_image,flux1", help=f"shapes, decoder, and of {','.join(STEPS)}"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    result: dict[str, Any] = {"machine": describe_machine(arguments.device), "rows": [], "failures": {}}
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in arguments.only.split(","):
        if name == "shapes":
            cases[name] = lambda: whole_generations(device, arguments.repeats)
        elif name == "decoder":
            cases[name] = lambda: decoding(device, arguments.repeats)
        elif device.type == "cuda":
            cases[name] = lambda n=name: small_image(n, STEPS[n], device, arguments.repeats)
    if device.type == "cpu":
        for step in TINY_STEPS:
            cases[step.name] = lambda s=step: small_image(s.name, s, device, arguments.repeats)
    for name, run in cases.items():
        try:
            row = run()
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            if not row["correct"]:
                result["failures"][name] = "frames, velocities or counts are not those of eager passes"
        except Exception as error:
            traceback.print_exc()
            result["failures"][name] = f"{type(error).__name__}: {error}"
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if result["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
