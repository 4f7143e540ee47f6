"""Hashes of latents and frames for a fixed seed, for refactors that must not change them.

    python scripts/output_hashes.py > before.txt      # on the commit before
    python scripts/output_hashes.py | diff before.txt -

The embedded model with every sparse method and sampler, one tiny pipeline per family (random weights), one of them
through diffusers' own pipeline, and the embedded model on two and three processes. Takes two minutes on two CPU cores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy  # noqa: E402
import torch  # noqa: E402
from tiny_families import WRITERS, small_request  # noqa: E402

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline  # noqa: E402

SMALL: dict[str, Any] = {"height": 128, "width": 128, "num_frames": 9, "num_inference_steps": 3, "seed": 7}
PROMPT = "a red circle moving left"
# Options under which each method is sparse on a grid as small as this one.
SPARSE: dict[str, dict[str, Any]] = {
    "sliding_tile_attn": {"window": [1, 3, 3], "tile_size": [1, 2, 2]},
    "video_sparse_attn": {"sparsity": 0.5},
    "vmoba_attn": {
        "moba_threshold": 0.25,
        "spatial_chunk_size": [2, 2],
        "st_chunk_size": [1, 2, 2],
        "first_full_step": 0,
        "first_full_layer": 0,
    },
    "sparse_video_gen_2_attn": {"svg2_num_q_centroids": 6, "svg2_num_k_centroids": 15, "svg2_top_p_kmeans": 0.5},
}


class RecordingDecoder:
    """A decoder that keeps what it is given."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.latents: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def for_request(self, request: GenerationRequest) -> Any:
        self._decoder = self._decoder.for_request(request)
        return self

    def stream(self, latents: torch.Tensor) -> Any:
        self.latents.append(latents)
        return self._decoder.stream(latents)


def digest(*arrays: numpy.ndarray[Any, Any]) -> str:
    """The first 16 digits of a SHA-256 over all bytes."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(numpy.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def hashes(pipeline: Any, request: GenerationRequest) -> str:
    """Of latents, where the pipeline is native, and of frames."""
    if not isinstance(pipeline, Pipeline):
        return f"frames {digest(pipeline(request).frames)}"
    recording = RecordingDecoder(pipeline.decoder)
    pipeline.parts = dataclasses.replace(pipeline.parts, decoder=recording)
    frames = pipeline(request).frames
    pipeline.parts = dataclasses.replace(pipeline.parts, decoder=recording._decoder)
    return f"latents {digest(*(x.float().numpy() for x in recording.latents))} frames {digest(frames)}"


def on_processes(num_processes: int, folder: Path) -> str:
    """Of the frames that the command writes when so many processes share the sequence."""
    path = folder / f"{num_processes}.npy"
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "diffusion_runtime", "generate", PROMPT, "--device", "cpu", *sizes]
    command += ["--model-path", "shapes", "--num-gpus", str(num_processes), "-o", str(path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=600)
    return f"frames {digest(numpy.load(path))}"


def main() -> None:
    """One line per case on standard output."""
    torch.set_num_threads(1)

    def say(case: str, result: str) -> None:
        print(f"{case:34} {result}", flush=True)

    request = GenerationRequest(prompt=PROMPT, **SMALL)
    pipeline = load_pipeline("shapes", device="cpu")
    say("shapes", hashes(pipeline, request))
    for mode in ("two_pass", "batched"):
        guided = GenerationRequest(prompt=PROMPT, **{**SMALL, "guidance_scale": 3.0, "guidance_mode": mode})
        say(f"shapes, {mode}", hashes(pipeline, guided))
    for sampler in ("unipc", "flow_match_euler"):
        say(f"shapes, {sampler}", hashes(pipeline, GenerationRequest(prompt=PROMPT, **SMALL, sampler=sampler)))
    for backend, options in SPARSE.items():
        sparse = load_pipeline("shapes", device="cpu", attention={"default": {"backend": backend, "extra": options}})
        say(f"shapes, {backend}", hashes(sparse, request))
    with tempfile.TemporaryDirectory() as folder:
        for family, write in WRITERS.items():
            tiny = load_pipeline(str(write(Path(folder) / family)), device="cpu")
            say(family, hashes(tiny, small_request(tiny)))
        passthrough = load_pipeline(str(Path(folder) / "wan"), device="cpu", backend="diffusers")
        sizes: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2, "seed": 3}
        say("wan, diffusers' pipeline", hashes(passthrough, GenerationRequest(prompt=PROMPT, **sizes)))
        for num_processes in (2, 3):
            say(f"shapes on {num_processes} processes", on_processes(num_processes, Path(folder)))


if __name__ == "__main__":
    main()
