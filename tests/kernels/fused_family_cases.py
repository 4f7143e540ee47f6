"""One forward of every family's tiny transformer with the fused kernels and without, under Triton's interpreter or on a
GPU. Prints what differs, and what Triton refused to compute.

TRITON_INTERPRET=1 PYTHONPATH=tests python tests/kernels/fused_family_cases.py
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tiny_families import WRITERS, small_request

from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.kernels.activations import triton as activations_triton
from diffusion_runtime.kernels.implementation import VARIABLE
from diffusion_runtime.kernels.modulated_norm import triton as norm_triton
from diffusion_runtime.kernels.qk_norm_rope import triton as rope_triton
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.text_encoders.interface import TextStream

# Tokens of the two samples; the interpreter takes milliseconds for each of them.
LENGTHS = (3, 2)
# In every run: rows of modulation per sample and per token beside cross-attention (wan), blocks of two streams and of
# one, and a refiner (hunyuan_video), two streams of unequal widths with gates of heads (ltx2).
INTERPRETED = ("wan", "hunyuan_video", "ltx2")
# Left to a GPU: blocks of hunyuan_video's kinds, or tokens that take the interpreter 7 s.
ON_A_GPU = ("qwen_image", "hunyuan_video_15", "flux1", "flux2", "z_image")
# Whose transformers take no latents without what comes of a file.
OF_FILES = ("wan_animate_2", "scail_2", "seedvr2")
REMAINING = tuple(family for family in WRITERS if family not in (*INTERPRETED, *ON_A_GPU, *OF_FILES))


def velocity(pipeline: Pipeline, device: str, dtype: torch.dtype, with_image: bool) -> torch.Tensor:
    """Of two samples at unequal timesteps, with texts of unequal lengths. with_image: the first frame at timestep 0."""
    generator = torch.Generator().manual_seed(1)
    num_frames = small_request(pipeline).num_frames
    assert num_frames is not None
    # LTX-2's decoder takes no smaller pictures.
    side = 64 if pipeline.rules.sampling.geometry.makes_sound else 32
    size = ClipSize(side, side, num_frames, 24)
    latents = torch.randn(2, *pipeline.rules.sampling.geometry.sample_shape(size), generator=generator).to(device)
    text = pipeline.text_encoder.encode(("a red circle", "a blue square"))
    further = tuple(TextStream(_cut(stream.embeddings), LENGTHS) for stream in text.further)
    text = dataclasses.replace(text, embeddings=_cut(text.embeddings), lengths=LENGTHS, further=further).to(
        torch.device(device), dtype
    )
    image = ImageCondition(latents[:, :, :1]) if with_image else None
    guidance = 3.5 if pipeline.rules.sampling.embeds_guidance else None
    inputs = DenoiserInputs(text, size, guidance=guidance, image=image)
    timestep = torch.tensor([937.3, 474.65], device=device)
    found: torch.Tensor = pipeline.transformer(latents, timestep, inputs, AttentionContext(step=StepInfo(0, 2)))
    return found.double()


def _cut(embeddings: torch.Tensor) -> torch.Tensor:
    """As many tokens as LENGTHS has, drawn anew: an encoder may give fewer."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, max(LENGTHS), embeddings.shape[2], generator=generator)


def failures(device: str, dtype: torch.dtype, bound: float, without: Collection[str] = ()) -> Iterator[str]:
    """A line for every family whose velocities differ by more than `bound` (relative L2), for every one that reached
    no kernel, and for every call that Triton refused. without: families that are passed over."""
    refused: set[str] = set()
    calls = [0]

    def watch(module: ModuleType) -> None:
        original = module.refusal

        def refusal(*arguments: Any) -> str | None:
            reason: str | None = original(*arguments)
            calls[0] += reason is None
            refused.update([] if reason is None else [f"{module.__name__}: {reason}"])
            return reason

        module.refusal = refusal  # type: ignore[attr-defined]

    for module in (norm_triton, rope_triton, activations_triton):
        watch(module)
    with tempfile.TemporaryDirectory() as folder:
        for family, write in WRITERS.items():
            if family in without or family in OF_FILES:
                continue
            pipeline = load_pipeline(str(write(Path(folder) / family)), device=device, dtype=str(dtype).split(".")[1])
            assert isinstance(pipeline, Pipeline)
            for with_image in (False, True) if family == "wan" else (False,):
                os.environ[VARIABLE] = "reference"
                expected = velocity(pipeline, device, dtype, with_image)
                # Tiny transformers are too narrow for `auto` on a GPU.
                os.environ[VARIABLE] = "triton"
                calls[0] = 0
                refused.clear()
                found = velocity(pipeline, device, dtype, with_image)
                difference = float((found - expected).norm() / expected.norm())
                if not difference <= bound or calls[0] == 0:
                    yield f"{family}, {dtype}: relative difference {difference:.3g}, {calls[0]} calls of Triton"
                yield from (f"{family}: {reason}" for reason in sorted(refused))


def print_failures(families: Collection[str]) -> None:
    for line in failures("cpu", torch.float32, 1e-5, without=WRITERS.keys() - set(families)):
        print(line)


if __name__ == "__main__":
    print_failures(INTERPRETED)
