"""Decoding of MiniMax-H3 on one GPU: 5 s of 1344 x 768 and its sound; diffusers' modules beside it where installed.

    python -m benchmarks.minimax_h3_decode_gpu --output benchmarks/results/minimax_h3_decode_gpu.json
    python -m benchmarks.minimax_h3_decode_gpu --small          # tiny sizes, on a CPU if there is no GPU

Random weights of the published shapes, made on the device. Correctness comes first, at tiny sizes with several tiles
and clips: in float32, bfloat16 and, on a GPU, float16 against diffusers' module in float64 on the CPU, or where that is
not installed our own in float32 there. Then seconds and peak memory, weights included: frames left on the device, and
frames as a file's bytes on the CPU. `batches` has the same for other bounds of a batch's memory.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.empty_modules import empty_modules
from diffusion_runtime.core.model_folder import ConfigFile
from diffusion_runtime.decoders import vit_video_decoder
from diffusion_runtime.decoders.clip_encoder import ClipEncoder
from diffusion_runtime.decoders.vit_video_decoder import decoding_bytes, decoding_operations
from diffusion_runtime.generation.frame_decoding import to_pixels
from diffusion_runtime.models.minimax_h3 import codec
from diffusion_runtime.models.random_weights import draw_weight

VIDEO_ENCODER_PARTS = ("encoder", "quant_conv")
MEASURED = ("frames_on_device", "frames_as_bytes", "sound")
# Height, width, frames.
PUBLISHED_SIZE, SMALL_SIZE, CPU_SIZE = (768, 1344, 124), (272, 272, 39), (272, 32, 39)
SMALL: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": [8, 8, 8, 8, 16, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 64,
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.0, 2.0, 0.5, 0.7],
}
SMALL_SOUND: dict[str, Any] = {
    "encoder_dim": 4,
    "latent_dim": 64,
    "latent_channels": 4,
    "num_attention_heads": 2,
    "decoder_dim": 128,
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.0, 2.0, 0.5, 0.7],
}
PUBLISHED: dict[str, Any] = {"latents_mean": [0.0] * 24, "latents_std": [1.0] * 24}
PUBLISHED_SOUND: dict[str, Any] = {"latents_mean": [0.0] * 32, "latents_std": [1.0] * 32}
# Relative error of frames before the last clamp, and of samples.
BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}
BATCH_GIB = (0.5, 1.0, 4.0)


def random_state(module: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return random numbers for every tensor of a module, float32, in the order of a published file."""
    state = {}
    for name, tensor in module.state_dict().items():
        state[name] = torch.empty(tensor.shape, device=device)
        draw_weight(name, state[name])
        if name.endswith(".filter"):
            state[name].fill_(1 / 12)
        if ".scale" in name:
            # Large enough that every block counts.
            state[name].mul_(10)
    return state


def filled(
    component: Any, settings: dict[str, Any], state: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the decoding half on a device with these numbers, as loading fills it. state: on the CPU."""
    module = component.decoding_half(settings)
    own = {
        name: state[name].to(device, torch.float32 if component.stays_float32(name) else dtype, copy=True)
        for name in module.state_dict()
    }
    if component.arrange is not None:
        for name, values in own.items():
            component.arrange(module, name, values)
    module.load_state_dict(own, assign=True)
    return module.requires_grad_(False).eval()


def make_decoder(
    settings: tuple[dict[str, Any], dict[str, Any]],
    states: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> codec.MiniMaxH3Decoder:
    video, sound = settings
    autoencoder = filled(codec.VIDEO_AUTOENCODER, video, states[0], device, dtype)
    return codec.MiniMaxH3Decoder(
        autoencoder,
        (video["latents_mean"], video["latents_std"]),
        codec.attention_of(autoencoder.sizes, AttentionPolicy(device=str(device), dtype=dtype)),
        filled(codec.AUDIO_AUTOENCODER, sound, states[1], device, torch.float32),
        (sound["latents_mean"], sound["latents_std"]),
        32000,
    )


def diffusers_module(
    component: Any,
    settings: dict[str, Any],
    state: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    encoder: Iterable[str],
) -> Any:
    """Return diffusers' module without its encoder, with numbers in the dtypes that its loading gives them."""
    import importlib

    made_by = getattr(importlib.import_module(component.module), component.class_name)
    with torch.device("meta"):
        module = made_by(**settings)
    for part in encoder:
        setattr(module, part, None)
    own = {
        name: value.to(
            device, torch.float32 if component.stays_float32(name) and dtype != torch.float64 else dtype, copy=True
        )
        for name, value in state.items()
    }
    module.load_state_dict(own, assign=True)
    # Frequencies of rotary positions are computed, not read.
    if hasattr(module.decoder, "rope"):
        rope = module.decoder.rope
        head_dim = settings.get("decoder_attention_head_dim", 64)
        module.decoder.rope = type(rope)(int(head_dim * 0.75)).to(device)
    return module.requires_grad_(False).eval()


def half_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return float16 on a GPU, and nothing on a CPU, which takes minutes for it."""
    return (torch.float16,) if device.type == "cuda" else ()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


def check(device: torch.device, has_diffusers: bool) -> list[dict[str, Any]]:
    """Compare tiny decoders on the device with the reference. Raises SystemExit for one that is too far."""
    cpu = torch.device("cpu")
    settings = (SMALL, SMALL_SOUND)
    halves = [
        each.decoding_half(values)
        for each, values in zip((codec.VIDEO_AUTOENCODER, codec.AUDIO_AUTOENCODER), settings, strict=True)
    ]
    states = tuple(random_state(half, cpu) for half in halves)
    height, width, frames = SMALL_SIZE if device.type == "cuda" else CPU_SIZE
    latents = torch.randn(1, 4, halves[0].sizes.shared_latents + frames // 17 * 5, height // 16, width // 16)
    sound = torch.randn(1, 4, 33, 2)
    if has_diffusers:
        reference = "diffusers float64 CPU"
        video = diffusers_module(codec.VIDEO_AUTOENCODER, SMALL, states[0], cpu, torch.float64, VIDEO_ENCODER_PARTS)
        audio = diffusers_module(
            codec.AUDIO_AUTOENCODER, SMALL_SOUND, states[1], cpu, torch.float64, codec.AUDIO_ENCODER_PARTS
        )
        with torch.inference_mode():
            raw = video.decode(denormalised(latents.double(), SMALL)).sample
            expected_sound = audio.decode(denormalised(sound[0].permute(2, 0, 1).double(), SMALL_SOUND)).sample[:, 0]
        expected = as_frames(raw)
    else:
        reference = "this runtime float32 CPU"
        decoder = make_decoder(settings, states, cpu, torch.float32)
        expected = decoder.decode(latents)
        expected_sound = torch.from_numpy(decoder.decode_audio(sound).samples)
    rows = []
    for dtype in (torch.float32, torch.bfloat16, *half_of(device)):
        name = str(dtype).removeprefix("torch.")
        with exact_products(dtype == torch.float32):
            decoder = make_decoder(settings, states, device, dtype)
            error = relative(decoder.decode(latents) - 0.5, expected - 0.5)
            error_sound = relative(torch.from_numpy(decoder.decode_audio(sound).samples), expected_sound)
        rows.append({"dtype": name, "reference": reference, "frames": error, "sound": error_sound})
        print(f"correct {name}: frames {error:.1e} sound {error_sound:.1e} against {reference}", flush=True)
        # Sound is always float32; the products of its convolutions may be TF32.
        if not (error < BOUNDS[name] and error_sound < BOUNDS["float32" if dtype == torch.float32 else "float16"]):
            raise SystemExit(f"{name}: wrong: {rows[-1]}")
    return rows


class exact_products:
    """Without TF32 inside, if `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __enter__(self) -> None:
        self.before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        if self.enabled:
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = self.before


def move(state: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in state.items()}


def denormalised(latents: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    shape = (1, -1, *[1] * (latents.dim() - 2))
    mean, std = (
        torch.tensor(settings[f"latents_{name}"], dtype=latents.dtype, device=latents.device).view(shape)
        for name in ("mean", "std")
    )
    return latents * std + mean


def as_frames(raw: torch.Tensor) -> torch.Tensor:
    mean, std = (
        torch.tensor(each, dtype=raw.dtype, device=raw.device).view(1, 3, 1, 1, 1)
        for each in (vit_video_decoder.IMAGENET_MEAN, vit_video_decoder.IMAGENET_STD)
    )
    return (raw * std + mean).clamp(0, 1).permute(0, 2, 3, 4, 1)


def measure(run: Callable[[], object], device: torch.device, repeats: int, warmups: int = 1) -> dict[str, Any]:
    """Return seconds by the clock, the device waited for, and the peak of torch's allocator, weights included."""
    for _ in range(warmups):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    row = {"seconds": round(statistics.median(times), 4), "all_seconds": [round(each, 4) for each in times]}
    if device.type == "cuda":
        row |= {
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
            "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 3),
        }
    return row


def decode_on_device(decoder: codec.MiniMaxH3Decoder, latents: torch.Tensor) -> None:
    for _ in decoder.stream(latents).chunks:
        pass


def decode_to_bytes(decoder: codec.MiniMaxH3Decoder, latents: torch.Tensor) -> None:
    position = 0
    for chunk in decoder.stream(latents).chunks:
        to_pixels(chunk[0], position)
        position += chunk.shape[1]


def time_ours(
    settings: tuple[dict[str, Any], dict[str, Any]],
    states: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    latents: torch.Tensor,
    sound: torch.Tensor,
    dtype: torch.dtype,
    repeats: int,
) -> dict[str, Any]:
    decoder = make_decoder(settings, states, latents.device, dtype)
    device, name = latents.device, str(dtype).removeprefix("torch.")
    autoencoder, shape = decoder._autoencoder, tuple(latents.shape[2:])
    tiling = codec.tiling(autoencoder)
    row: dict[str, Any] = {
        "dtype": name,
        "implementation": decoder.implementation,
        "teraflop": decoding_operations(autoencoder, shape, tiling) / 1e12,
        "planned_activations_gb": decoding_bytes(autoencoder, shape, tiling) / 1e9,
        "weights_gb": sum(x.nbytes for x in autoencoder.state_dict().values()) / 1e9,
        "sound_weights_gb": sum(x.nbytes for x in decoder._audio_autoencoder.state_dict().values()) / 1e9,
        "frames_on_device": measure(lambda: decode_on_device(decoder, latents), device, repeats),
        "frames_as_bytes": measure(lambda: decode_to_bytes(decoder, latents), device, repeats),
        "sound": measure(lambda: decoder.decode_audio(sound), device, repeats, warmups=2),
    }
    row["teraflop_per_second"] = round(row["teraflop"] / row["frames_on_device"]["seconds"], 1)
    print(f"ours {name}", json.dumps(row), flush=True)
    bound, row["batches"] = vit_video_decoder.MAX_BATCH_BYTES, {}
    try:
        for gib in BATCH_GIB if dtype == torch.bfloat16 and device.type == "cuda" else ():
            vit_video_decoder.MAX_BATCH_BYTES = int(gib * 2**30)
            row["batches"][str(gib)] = measure(lambda: decode_on_device(decoder, latents), device, 1)
            print("batch", gib, "GiB", row["batches"][str(gib)], flush=True)
    finally:
        vit_video_decoder.MAX_BATCH_BYTES = bound
    return row


def time_diffusers(
    settings: tuple[dict[str, Any], dict[str, Any]],
    states: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    latents: torch.Tensor,
    sound: torch.Tensor,
    repeats: int,
) -> dict[str, Any]:
    device = latents.device
    video = diffusers_module(
        codec.VIDEO_AUTOENCODER, settings[0], states[0], device, torch.bfloat16, VIDEO_ENCODER_PARTS
    )
    audio = diffusers_module(
        codec.AUDIO_AUTOENCODER, settings[1], states[1], device, torch.float32, codec.AUDIO_ENCODER_PARTS
    )
    raw, sides = denormalised(latents, settings[0]), denormalised(sound[0].permute(2, 0, 1), settings[1])

    @torch.inference_mode()
    def decode() -> torch.Tensor:
        return as_frames(video.decode(raw).sample.float())

    @torch.inference_mode()
    def decode_sound() -> torch.Tensor:
        return audio.decode(sides).sample

    row = {
        "dtype": "bfloat16",
        "frames_on_device": measure(decode, device, repeats),
        "sound": measure(decode_sound, device, repeats, warmups=2),
    }
    print("diffusers", json.dumps(row), flush=True)
    return row


def time_encoder(settings: dict[str, Any], size: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Time the encoder of pictures, float32, on an image and on two clips."""
    with empty_modules():
        encoder = ClipEncoder(codec.encoder_sizes(ConfigFile(Path("vae"), settings)))
    encoder.load_state_dict(random_state(encoder, device), assign=True)
    encoder.requires_grad_(False).eval()
    height, width, _ = size
    tiling = codec.tiling(codec.VIDEO_AUTOENCODER.decoding_half(settings))
    row = {}
    for frames in (1, 22):
        pixels = torch.randn(1, 3, frames, height, width, device=device)

        @torch.inference_mode()
        def encode(pixels: torch.Tensor = pixels) -> object:
            return encoder.encode(pixels, tiling)

        row[f"{frames} frames"] = measure(encode, device, 1)
    print("encoder", json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(os.environ.get("OUT", ".")) / "minimax_h3_decode_gpu.json"
    parser.add_argument("--output", type=Path, default=out)
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    has_diffusers = importlib.util.find_spec("diffusers") is not None
    document: dict[str, Any] = {
        "schema": "diffusion_runtime.minimax_h3_decode_gpu/1",
        "machine": describe_machine(device),
        "correct": check(device, has_diffusers),
    }

    def save(**values: Any) -> None:
        document.update(values)
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    save()
    settings = (SMALL, SMALL_SOUND) if arguments.small else (PUBLISHED, PUBLISHED_SOUND)
    size = PUBLISHED_SIZE if not arguments.small else SMALL_SIZE if device.type == "cuda" else CPU_SIZE
    height, width, frames = size
    halves = [
        each.decoding_half(values)
        for each, values in zip((codec.VIDEO_AUTOENCODER, codec.AUDIO_AUTOENCODER), settings, strict=True)
    ]
    channels = halves[0].sizes.latent_channels, halves[1].sizes.latent_channels
    num_latents = (frames - 5) // 17 * 5 + 2
    latents = torch.randn(1, channels[0], num_latents, height // 16, width // 16, device=device)
    sound = torch.randn(1, channels[1], round(frames / 24 * 40), 2, device=device)
    save(size={"height": height, "width": width, "frames": frames, "sound_latents": sound.shape[2]})
    ours = []
    # On the host: what is measured is a decoder alone on the device.
    states = tuple(move(random_state(half, device), torch.device("cpu")) for half in halves)
    for dtype in (torch.bfloat16, *half_of(device)):
        gc.collect()
        ours.append(time_ours(settings, states, latents, sound, dtype, arguments.repeats))
        save(ours=ours)
        gc.collect()
        if dtype == torch.bfloat16 and has_diffusers:
            save(diffusers=time_diffusers(settings, states, latents, sound, 1))
    save(encoder=time_encoder(settings[0], size, device))
    for row in [*ours, *([{"dtype": "diffusers", **document["diffusers"]}] if "diffusers" in document else [])]:
        print(row["dtype"], *(f"{key} {row[key]}" for key in MEASURED if key in row))


if __name__ == "__main__":
    main()
