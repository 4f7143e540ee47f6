"""Models that start from images, edit them, or read a control or a sound, on a GPU against themselves on the CPU.

The tiny folders are written by diffusers, and its encoders make the conditions; without it the tests are skipped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from sound_files import write_wave

pytest.importorskip("diffusers")

import tiny_flux1
import tiny_flux2
import tiny_hunyuan_video
import tiny_hunyuan_video_15
import tiny_ltx2
import tiny_ltx_video
import tiny_qwen_image
import tiny_qwen_image_21
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.models.flux1 import editing as flux1_editing
from diffusion_runtime.models.qwen_image import editing
from diffusion_runtime.models.qwen_image_21 import editing as qwen_21_editing
from diffusion_runtime.profiling.instruments import watched_latents

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
WAN_SIZES = {"height": 32, "width": 48, "num_frames": 9}
# Of the tiny autoencoder of FLUX.1, 2 x 2 pixels a latent.
MASK_CHANNELS = 4
# One unit in the last of bfloat16's 8 bits: fused kernels round in another order, 1.0 to 1.8 % in a whole forward with
# random weights (docs/gpu_execution.md), where the eager formulas on a CPU may happen to round next to nothing.
ONE_ROUNDING = 2**-7
# Pictures to edit are scaled to a megapixel; here to as many pixels less.
SMALLER = 256


@dataclass(frozen=True)
class Case:
    """write: its folder. inputs: request field -> the name of a file of `inputs`, or several. values: further ones of
    the request."""

    write: Callable[[Path], Path]
    sizes: Mapping[str, int]
    inputs: Mapping[str, Any]
    values: Mapping[str, Any]


def flux1(pipeline_class: str, condition_channels: int = 0) -> Callable[[Path], Path]:
    return lambda path: tiny_flux1.write_tiny_flux1(
        path, pipeline_class=pipeline_class, condition_channels=condition_channels
    )


def wan(**kind: Any) -> Callable[[Path], Path]:
    return lambda path: write_tiny_wan(path, **kind)


def qwen_controlnet(path: Path) -> Path:
    """With a ControlNet of one block."""
    from diffusers import QwenImageControlNetModel

    folder = tiny_qwen_image.write_tiny_qwen_image(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = QwenImageControlNetModel(
            in_channels=4 * tiny_qwen_image.CHANNELS,
            out_channels=tiny_qwen_image.CHANNELS,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=tiny_qwen_image.HIDDEN,
            axes_dims_rope=(4, 6, 6),
        )
        for name, parameter in net.named_parameters():
            # What diffusers starts from zero would hide the control.
            if name.startswith("controlnet_"):
                torch.nn.init.normal_(parameter, std=0.3)
    net.save_pretrained(folder / "controlnet")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "QwenImageControlNetPipeline", "controlnet": ["diffusers", "QwenImageControlNetModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


GUIDED = {"guidance_scale": 3.0, "negative_prompt": "a star"}
LTX2_SIZES = {**tiny_ltx2.TINY_SIZES, "num_frames": 17}
CASES: Mapping[str, Case] = {
    "hunyuan i2v, latent concat": Case(
        lambda path: tiny_hunyuan_video.write_tiny_hunyuan_video(
            path, image_condition="latent_concat", has_guidance=False
        ),
        tiny_hunyuan_video.TINY_SIZES,
        {"image_path": "image"},
        {},
    ),
    "hunyuan i2v, token replace": Case(
        lambda path: tiny_hunyuan_video.write_tiny_hunyuan_video(
            path, image_condition="token_replace", num_layers=1, num_single_layers=1
        ),
        tiny_hunyuan_video.TINY_SIZES,
        {"image_path": "image"},
        {},
    ),
    "hunyuan 1.5 i2v": Case(
        lambda path: tiny_hunyuan_video_15.write_tiny_hunyuan_video_15(path, starts_from_image=True),
        tiny_hunyuan_video_15.TINY_SIZES,
        {"image_path": "image"},
        {},
    ),
    "kontext": Case(flux1("FluxKontextPipeline"), tiny_flux1.TINY_SIZES, {"image_path": "image"}, {}),
    "fill": Case(
        flux1("FluxFillPipeline", tiny_flux1.CHANNELS + MASK_CHANNELS),
        tiny_flux1.TINY_SIZES,
        {"image_path": "image", "mask_path": "mask"},
        {},
    ),
    "flux control": Case(
        flux1("FluxControlPipeline", tiny_flux1.CHANNELS), tiny_flux1.TINY_SIZES, {"image_path": "image"}, {}
    ),
    "flux.2 editing": Case(tiny_flux2.write_tiny_flux2, tiny_flux2.TINY_SIZES, {"image_path": ("image", "other")}, {}),
    "klein editing": Case(tiny_flux2.write_tiny_flux2_klein, tiny_flux2.TINY_SIZES, {"image_path": "image"}, GUIDED),
    "klein kv": Case(
        lambda path: tiny_flux2.write_tiny_flux2_klein(path, caches_references=True),
        tiny_flux2.TINY_SIZES,
        {"image_path": ("image", "other")},
        {},
    ),
    "qwen edit": Case(
        lambda path: tiny_qwen_image.write_tiny_qwen_image(path, edits="QwenImageEditPipeline"),
        tiny_qwen_image.TINY_SIZES,
        {"image_path": "image"},
        GUIDED,
    ),
    "qwen edit plus": Case(
        lambda path: tiny_qwen_image.write_tiny_qwen_image(path, edits="QwenImageEditPlusPipeline"),
        tiny_qwen_image.TINY_SIZES,
        {"image_path": ("image", "other")},
        GUIDED,
    ),
    "qwen 2.1 editing": Case(
        lambda path: tiny_qwen_image_21.write_tiny_qwen_image_21(path, sees=True),
        tiny_qwen_image_21.TINY_SIZES,
        {"image_path": ("image", "other")},
        GUIDED,
    ),
    "qwen controlnet": Case(qwen_controlnet, tiny_qwen_image.TINY_SIZES, {"image_path": "image"}, GUIDED),
    "ltx-2 keyframes": Case(
        tiny_ltx2.write_tiny_ltx2,
        LTX2_SIZES,
        {"frame_conditions": ((0, "image", 1.0), (12, "other", 0.6))},
        GUIDED,
    ),
    "ltx-2 sound": Case(tiny_ltx2.write_tiny_ltx2, LTX2_SIZES, {"audio_path": "sound", "image_path": "image"}, GUIDED),
    "ltx-video i2v": Case(
        tiny_ltx_video.write_tiny_ltx_video, tiny_ltx_video.TINY_SIZES, {"image_path": "image"}, GUIDED
    ),
    "wan 2.1 i2v": Case(wan(condition="clip and tokens"), WAN_SIZES, {"image_path": "image"}, GUIDED),
    "wan 2.2 i2v": Case(wan(condition="clip", boundary_ratio=0.9), WAN_SIZES, {"image_path": "image"}, GUIDED),
    "wan flf2v": Case(
        wan(condition="clip and tokens of two images"),
        WAN_SIZES,
        {"image_path": "image", "last_image_path": "other"},
        GUIDED,
    ),
    "wan vace": Case(
        wan(condition="control", num_layers=3, vae="plain"),
        WAN_SIZES,
        {"video_path": "video", "image_path": "other"},
        GUIDED,
    ),
}


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = editing.scaled_to
    monkeypatch.setattr(qwen_21_editing, "AREA", editing.AREA // SMALLER)
    monkeypatch.setattr(flux1_editing, "TRAINED_SIZES", ((32, 48), (48, 32)))
    monkeypatch.setattr(editing, "scaled_to", lambda area, size: scaled(area // SMALLER, size))


def write_inputs(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """Two images and a mask of the ratio of what is made, of 64 pixels or more a side; a control video of its size, and
    a sound."""
    factor = -(-64 // min(sizes["height"], sizes["width"]))
    height, width = factor * sizes["height"], factor * sizes["width"]
    rows, columns = numpy.mgrid[0:height, 0:width]
    pixels = numpy.stack([200 * rows // height, 250 * columns // width, 255 - rows], axis=-1).astype(numpy.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    Image.fromarray(pixels[::-1, :, ::-1].copy()).save(folder / "other.png")
    Image.fromarray(numpy.where(rows > height // 2, 255, 0).astype(numpy.uint8)).save(folder / "mask.png")
    small = pixels[::factor, ::factor]
    numpy.save(folder / "video.npy", numpy.stack([numpy.roll(small, 3 * step, 1) for step in range(9)]))
    write_wave(folder / "sound.wav", seconds=3)
    return {path.stem: str(path) for path in folder.iterdir() if path.is_file()}


def request_of(case: Case, files: Mapping[str, str]) -> GenerationRequest:
    def named(value: Any) -> Any:
        if isinstance(value, str):
            return files[value]
        return tuple((each[0], files[each[1]], each[2]) if isinstance(each, tuple) else files[each] for each in value)

    inputs = {field: named(value) for field, value in case.inputs.items()}
    steps = {"num_inference_steps": 3, "seed": 5}
    return GenerationRequest("a red circle", **case.sizes, **steps, **inputs, **case.values)


def latents_of(folder: Path, request: GenerationRequest, device: str, **how: Any) -> torch.Tensor:
    """After every step, [steps, ...], float32 on the CPU."""
    pipeline = load_pipeline(str(folder), device=device, **how)
    assert isinstance(pipeline, Pipeline)
    kept: list[torch.Tensor] = []
    with watched_latents(pipeline, lambda _, latents: kept.append(latents.detach().float().cpu().clone())):
        pipeline(request)
    pipeline.close()
    return torch.stack(kept)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CASES)
def test_latents_on_a_gpu_are_those_on_the_cpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 to 2e-4; in bfloat16, with the backend that is chosen by itself, as near to float32 as bfloat16 on the
    CPU is, twice over, and one rounding."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    case = CASES[name]
    if name.startswith("ltx-2"):
        # Its condition images are compressed as a frame of H.264.
        pytest.importorskip("imageio_ffmpeg")
    folder = case.write(tmp_path / "model")
    (tmp_path / "inputs").mkdir()
    request = request_of(case, write_inputs(tmp_path / "inputs", case.sizes))
    exact = {"dtype": "float32", "attention": "torch_sdpa"}
    expected = latents_of(folder, request, "cpu", **exact)
    assert len(expected) == 3
    assert relative(latents_of(folder, request, "cuda", **exact), expected) <= 2e-4
    rounding = relative(latents_of(folder, request, "cpu", dtype="bfloat16", attention="torch_sdpa"), expected)
    assert relative(latents_of(folder, request, "cuda", dtype="bfloat16"), expected) <= 2 * rounding + ONE_ROUNDING
    shutil.rmtree(folder)
