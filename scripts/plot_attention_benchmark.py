"""Draw docs/images/attention_gpu.png from benchmarks/results/attention_gpu.json, as `bench attention --plot` does.

python scripts/plot_attention_benchmark.py    # needs: pip install 'diffusion-runtime[plot]'
"""

from __future__ import annotations

import json
from pathlib import Path

from diffusion_runtime.benchmark.measurement import AttentionBenchmark, Measurement
from diffusion_runtime.benchmark.plot import plot_benchmark
from diffusion_runtime.benchmark.shapes import find_shapes

ROOT = Path(__file__).parents[1]
SHOWN = ("wan-1.3b-480p", "wan-14b-720p", "hunyuan-720p", "hunyuan-1.5", "qwen-image-1024", "flux-1024")


def main() -> None:
    bench = json.loads((ROOT / "benchmarks" / "results" / "attention_gpu.json").read_text())["bench"]
    shapes = {shape.name: shape for shape in find_shapes(SHOWN, small_by_default=False)}
    rows = tuple(
        Measurement(
            shapes[row["shape"]],
            row["backend"],
            row["state"],
            implementation=row["implementation"],
            samples=(row["milliseconds"],),
            matmul_tflops=row["matmul_tflops"],
        )
        for row in bench["rows"]
        if row["shape"] in shapes and row["milliseconds"] is not None and row["backend"] != "measured"
    )
    device, versions = bench["device"], bench["versions"]
    benchmark = AttentionBenchmark(device, versions, bench["dtype"], bench["matmul_size"], tuple(shapes.values()), rows)
    plot_benchmark(benchmark, ROOT / "docs" / "images" / "attention_gpu.png")


if __name__ == "__main__":
    main()
