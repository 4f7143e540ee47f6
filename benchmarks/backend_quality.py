"""Quality of every attention backend that runs on this machine, on an embedded model, beside its time and density.

    python -m benchmarks.backend_quality --num-prompts 16 --output benchmarks/results/backend_quality.json
    python -m benchmarks.backend_quality --times --output times.json    # the CPU time of one clip of each, alone
    python -m benchmarks.backend_quality --device cuda --dtype bfloat16 --num-prompts 64 --output gpu.json
    python -m benchmarks.backend_quality --model emoji --preset default ... --output emoji.json
    python -m benchmarks.backend_quality --merge a.json gpu.json times.json --output FILE
    python -m benchmarks.backend_quality --show benchmarks/results/backend_quality.json     # as Markdown tables
    python -m benchmarks.backend_quality --write docs/quality.md     # those of the committed results, in a page

Each backend makes the same seeded prompts in self-attention, `torch_sdpa` first; cross-attention stays with
`torch_sdpa`. Recorded: prompt accuracy with its 95 % interval, the relative L2 distance of the final latents and the
PSNR of the frames from the first row's, the share of (query, key) pairs that self-attention computed, the median time
of denoising one clip, and with --times the process's CPU time of one clip, which other work on the machine changes
little. With --batch-size, for many prompts on a GPU, no time is kept. Rows are kept by model, device, dtype and preset,
so those of several machines stand in one file. A backend that cannot run here is a row with its reasons, which a merge
keeps until the same device has a figure. On a CPU the times say what the eager formulas of the sparse methods and of
int8 take there, which nobody chooses for speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.clip_quality import KINDS, Clips, generate_clips, quality_prompts, write_rows
from benchmarks.machine import describe_machine
from benchmarks.sparse_quality import SVG2, VMOBA, num_dense_calls, recorded_densities
from diffusion_runtime import AttentionConfig, AttentionSpec, BackendUnavailableError, load_pipeline
from diffusion_runtime.attention.backends.registry import available_names
from diffusion_runtime.core.hardware import resolve_device
from diffusion_runtime.models.sampling_presets import shipped_lora_of
from diffusion_runtime.quality.shapes.prompts import PROMPT_KINDS
from diffusion_runtime.quality.worlds import WORLDS

FIRST = "torch_sdpa"
RESULTS = Path(__file__).parent / "results" / "backend_quality.json"
# What a page says without rows of a GPU.
NO_GPU_RUN = (
    "On a GPU there is no run yet: `python -m benchmarks.backend_quality --device cuda --dtype bfloat16 "
    "--num-prompts 64 --output gpu.json`."
)
# Around the tables of a page.
BEGIN, END = "<!-- python -m benchmarks.backend_quality --write: begin -->", "<!-- end -->"
VMOBA_SMALL = {**VMOBA, "spatial_chunk_size": [2, 2], "st_chunk_size": [2, 4, 4]}
POOLED = {"tail": "pooled"}
# By what a table calls them: options under which a method leaves pairs out on a grid of 8 x 8 x 8 tokens, which the
# draft preset has. The other backends run with their defaults.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "sliding_tile_attn": {
        "window 4x4x3 of 2x2x2 tiles": {"tile_size": [2, 2, 2], "window": [4, 4, 3]},
        "window 3x3x3 of 2x2x2 tiles": {"tile_size": [2, 2, 2], "window": [3, 3, 3]},
        "window 3x3x3 of 2x2x2 tiles, pooled tail": {"tile_size": [2, 2, 2], "window": [3, 3, 3], **POOLED},
    },
    "sol_attn": {
        "top-k 0.25 of 2x4x4 tiles, no tail": {"tile_size": [2, 4, 4], "top_k": 0.25, "tail": "none"},
        "top-k 0.25 of 2x4x4 tiles, pooled tail": {"tile_size": [2, 4, 4], "top_k": 0.25},
    },
    "video_sparse_attn": {
        "sparsity 0.2": {"sparsity": 0.2},
        "sparsity 0.4": {"sparsity": 0.4},
        "sparsity 0.8": {"sparsity": 0.8},
        "sparsity 0.8, pooled tail": {"sparsity": 0.8, **POOLED},
    },
    "vmoba_attn": {
        "top-k 5, 10, 10": {**VMOBA_SMALL, "temporal_topk": 5, "spatial_topk": 10, "st_topk": 10},
        "top-k 3, 6, 6": {**VMOBA_SMALL, "temporal_topk": 3, "spatial_topk": 6, "st_topk": 6},
        "top-k 3, 6, 6, pooled tail": {**VMOBA_SMALL, "temporal_topk": 3, "spatial_topk": 6, "st_topk": 6, **POOLED},
    },
    "sparse_video_gen_2_attn": {
        **{f"top-p {top_p}": {**SVG2, "svg2_top_p_kmeans": top_p} for top_p in (0.98, 0.9)},
        "top-p 0.9, pooled tail": {**SVG2, "svg2_top_p_kmeans": 0.9, **POOLED},
    },
}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per backend and options, `torch_sdpa` first."""
    world = WORLDS[arguments.model]
    if (lacks := world.lacks()) is not None:
        raise SystemExit(f"--model {world.name}: {lacks}")
    prompts = quality_prompts(arguments.num_prompts, world.name, arguments.kinds)
    chosen = arguments.only or available_names()
    names = [FIRST, *(name for name in chosen if name != FIRST)]
    first: Clips | None = None
    used = resolve_device(arguments.device)
    device = str(describe_machine(used)["device"])
    needed = shipped_lora_of(arguments.preset, world.name)
    loras = [] if needed is None else [needed]

    def judge(wanted: Any, frames: Tensor) -> Any:
        return world.judge_on(used, wanted, frames)

    for backend, label, options in (
        (name, *setting)
        for name in names
        for setting in SETTINGS.get(name, {"": {}}).items()
        if name == FIRST or arguments.settings in setting[0]
    ):
        row: dict[str, Any] = {
            "model": world.name,
            "device": device,
            "dtype": arguments.dtype,
            "num_prompts": arguments.num_prompts,
            "backend": backend,
            "setting": label,
            "options": options,
        }
        attention = AttentionConfig(
            per_role={"self": AttentionSpec(backend, options), "cross": AttentionSpec("torch_sdpa")}
        )
        try:
            pipeline = load_pipeline(
                world.name, device=arguments.device, dtype=arguments.dtype, attention=attention, lora=loras
            )
        except BackendUnavailableError as error:
            yield {**row, "refused": [list(pair) for pair in error.reasons]}
            continue
        # One clip warms up: what is compiled or timed at a backend's first call is no part of its time.
        generate_clips(pipeline, prompts[:1], {}, preset=arguments.preset, judge=judge)
        if arguments.times:
            started = time.process_time()
            generate_clips(pipeline, prompts[:1], {}, preset=arguments.preset, judge=judge)
            yield {**row, "cpu_seconds": time.process_time() - started}
            continue
        with recorded_densities() as densities:
            clips = generate_clips(
                pipeline,
                prompts,
                {},
                preset=arguments.preset,
                batch_size=arguments.batch_size,
                judge=judge,
                kinds=arguments.kinds,
            )
        first = clips if first is None else first
        row |= {
            "implementation": implementations(clips),
            "density": density(clips, densities),
            **clips.beside(first),
        }
        if arguments.batch_size == 1:
            row["denoise_seconds"] = statistics.median(clips.denoise_seconds)
        print(line(row), flush=True)
        yield row


def implementations(clips: Clips) -> list[str]:
    """Who computed self-attention, as the report names it."""
    rows = [row for reports in clips.reports for report in reports for row in report.rows if row.role == "self"]
    return sorted({row.implementation for row in rows})


def density(clips: Clips, densities: list[float]) -> float:
    """Pairs of queries and keys that self-attention computed, over all of them."""
    dense_calls = num_dense_calls(clips)
    return (sum(densities) + dense_calls) / max(1, len(densities) + dense_calls)


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first document with the rows of all: what later ones say of the same device, dtype and setting is added.
    Reasons of a refusal stay where no document has a figure, and go where one has."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for document in documents:
        for row in document["rows"]:
            about = {"model": document["model"], "device": document["machine"]["device"], "dtype": document["dtype"]}
            row = {**about, "preset": document["preset"], **row}
            if "accuracy" in row:
                row = {"num_prompts": document["num_prompts"], **row}
            key = (*place_of(row), row["backend"], row["setting"])
            held = rows.setdefault(key, {})
            if "refused" in row and is_measured(held):
                continue
            held.update(row)
            if is_measured(held):
                held.pop("refused", None)
    places = dict.fromkeys(key[:4] for key in rows)
    order = [(name, label) for name in (FIRST, *available_names()) for label in SETTINGS.get(name, {"": {}})]
    machines = [each for document in documents for each in document.get("machines", [document["machine"]])]
    return {
        **documents[0],
        "machines": [machine for index, machine in enumerate(machines) if machine not in machines[:index]],
        "rows": [rows[*place, *key] for place in places for key in dict.fromkeys(order) if (*place, *key) in rows],
    }


def place_of(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """What rows of one table share."""
    return row["model"], row["device"], row["dtype"], row["preset"]


def is_measured(row: Mapping[str, Any]) -> bool:
    return "accuracy" in row or "cpu_seconds" in row


def tables(document: Mapping[str, Any]) -> str:
    """A Markdown table for each model, device, dtype and preset, under a line that names them."""
    rows = merged([document])["rows"]
    blocks = []
    for place in dict.fromkeys(map(place_of, rows)):
        own = [row for row in rows if place_of(row) == place]
        counts = sorted({row["num_prompts"] for row in own if "accuracy" in row})
        prompts = " and ".join(map(str, counts))
        header = "| backend | density | time | one object | two objects | latent distance | PSNR, dB |"
        title = f"`{place[0]}`, {place[1]}, {place[2]}, preset {place[3]}, {prompts} prompts of each kind:"
        refused = ", ".join(f"`{row['backend']}`" for row in own if "refused" in row)
        listed = ["", f"Refused there: {refused}."] if refused else []
        figures = [line(row) for row in own if is_measured(row)]
        blocks.append("\n".join([title, "", header, "|---|---|---|---|---|---|---|", *figures, *listed]))
    # On a CPU it runs in float32.
    if all(row["dtype"] == "float32" for row in rows):
        blocks.append(NO_GPU_RUN)
    return "\n\n".join(blocks)


def with_tables(page: str, document: Mapping[str, Any]) -> str:
    """A page of documentation with the tables between BEGIN and END."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(document)}\n{END}{rest.split(END)[1]}"


def line(row: Mapping[str, Any]) -> str:
    """A row of the Markdown table."""
    name = ", ".join(filter(None, [f"`{row['backend']}`", row["setting"]]))
    if "accuracy" not in row:
        return f"| {name} | | {row['cpu_seconds']:.1f} s | | | | |"
    joint = [row["accuracy"][kind]["joint"] for kind in ("one_object", "two_objects")]
    right = " | ".join(f"{each['rate']:.2f} ({each['low']:.2f}-{each['high']:.2f})" for each in joint)
    taken = ""
    if "cpu_seconds" in row:
        taken = f" {row['cpu_seconds']:.1f} s"
    elif "denoise_seconds" in row:
        taken = f" {row['denoise_seconds']:.3f} s"
    return (
        f"| {name} | {row['density']:.2f} |{taken} | {right} | {row['latent_relative_l2']:.3f} | {row['psnr_db']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(WORLDS), default="shapes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--preset", default="draft")
    parser.add_argument("--num-prompts", type=int, default=16, help="of each kind")
    parser.add_argument(
        "--kinds", nargs="+", choices=PROMPT_KINDS, default=KINDS, help="of prompts; those with held_out have no column"
    )
    parser.add_argument("--batch-size", type=int, default=1, help="clips at once: with more than one, none is timed")
    parser.add_argument("--only", nargs="+", choices=available_names(), help="these backends, beside the first")
    parser.add_argument("--settings", default="", help="of each backend, those whose label contains this")
    parser.add_argument("--times", action="store_true", help="the CPU time of one clip of each, and nothing else")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--merge", nargs="+", type=Path, help="join these files into --output instead of measuring")
    parser.add_argument("--show", type=Path, help="print this file as Markdown tables")
    parser.add_argument("--write", type=Path, help="put the tables of the committed results into this page")
    arguments = parser.parse_args()
    if arguments.batch_size < 1:
        parser.error(f"--batch-size: expected 1 or more, got {arguments.batch_size}")
    if arguments.times and arguments.batch_size > 1:
        parser.error("--times is of one clip; leave --batch-size out")
    if arguments.show:
        print(tables(json.loads(arguments.show.read_text())))
        return
    if arguments.write:
        document = json.loads(RESULTS.read_text())
        arguments.write.write_text(with_tables(arguments.write.read_text(), document))
        return
    if arguments.output is None:
        parser.error("--output FILE is missing")
    if arguments.merge:
        document = merged([json.loads(path.read_text()) for path in arguments.merge])
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        return
    about = {"model": arguments.model, "dtype": arguments.dtype, "preset": arguments.preset}
    write_rows(
        arguments,
        "diffusion_runtime.backend_quality/1",
        measure(arguments),
        **about,
        num_prompts=arguments.num_prompts,
    )


if __name__ == "__main__":
    main()
