"""Nodes of latents: empty ones, those of pictures and sounds, upsampled, in parts, and decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.values import (
    LatentValue,
    MaskValue,
    PictureValue,
    SoundValue,
    Unknown,
    UpsamplerValue,
    VaeValue,
)

# Pixels to a side of what models take: one latent, in two by two of them.
_ENCODED = 16


def _encode(call: Call) -> tuple[Any, ...]:
    picture = call.of("pixels", PictureValue)
    call.maybe("vae", VaeValue)
    width: int | Unknown
    height: int | Unknown
    unknown = Unknown("the size is that of a picture that is not here")
    width, height = unknown, unknown
    if picture.size is not None:
        width, height = (max(side // _ENCODED, 1) * _ENCODED for side in picture.size)
        if (width, height) != picture.size:
            call.replaced(f"the size {width} x {height}: a multiple of {_ENCODED}, where ComfyUI crops to one of 8")
    frames: int | Unknown = 1
    if picture.is_film:
        frames = picture.num_frames or Unknown("the number of a video's frames is not known before it is read")
    return (LatentValue(call.node, width, height, frames, start=picture),)


def _empty(pixels: int, frames: str | None = None) -> Callable[[Call], tuple[Any, ...]]:
    """pixels: width and height of one latent, of which ComfyUI takes as many as fit into a size."""

    def whole(side: int | Unknown) -> int | Unknown:
        return side if isinstance(side, Unknown) else max(side // pixels, 1) * pixels

    def run(call: Call) -> tuple[Any, ...]:
        return (
            LatentValue(
                call.node,
                whole(call.size("width", 1024)),
                whole(call.size("height", 1024)),
                1 if frames is None else call.size(frames, 25),
                call.whole("batch_size", 1),
            ),
        )

    return run


def _empty_sound(call: Call) -> tuple[Any, ...]:
    return (LatentValue(call.node, 0, 0, call.size("frames_number", 97), is_sound=True),)


def _encoded_sound(call: Call) -> tuple[Any, ...]:
    sound = call.of("audio", SoundValue)
    return (LatentValue(call.node, 0, 0, is_sound=True, given={"audio_path": sound}),)


def _solid_mask(call: Call) -> tuple[Any, ...]:
    return (MaskValue(call.node, value=float(call.number("value", 1.0))),)


def _masked(call: Call) -> tuple[Any, ...]:
    """SetLatentNoiseMask: a sound whose mask is 0 stays as it is."""
    latent, mask = call.of("samples", LatentValue), call.of("mask", MaskValue)
    if not latent.is_sound or mask.value != 0:
        call.refuse("a part of the latents that is denoised alone; expected a mask of 0 over a sound, which keeps it")
    return (dataclasses.replace(latent, given={**latent.given, "kept": True}),)


def _with_sound(call: Call) -> tuple[Any, ...]:
    video, sound = call.of("video_latent", LatentValue), call.of("audio_latent", LatentValue)
    return (dataclasses.replace(video, sound=sound),)


def _apart(call: Call) -> tuple[Any, ...]:
    both = call.of("av_latent", LatentValue)
    return both, dataclasses.replace(both, is_sound=True)


def _upsampled(call: Call) -> tuple[Any, ...]:
    latent, upsampler = call.of("samples", LatentValue), call.of("upscale_model", UpsamplerValue)
    double = [side if isinstance(side, Unknown) else 2 * side for side in (latent.width, latent.height)]
    given = {key: value for key, value in latent.given.items() if key != "frames"}
    return (
        dataclasses.replace(
            latent, width=double[0], height=double[1], given=given, stage=None, upscaled=(latent, upsampler.weights)
        ),
    )


def _decode(call: Call) -> tuple[Any, ...]:
    latent, vae = call.of("samples", LatentValue), call.of("vae", VaeValue)
    if call.node.kind == "VAEDecodeTiled":
        call.replaced("tiles of the size that --vae-tiling chooses, with the model's own overlap")
    known = isinstance(latent.width, int) and isinstance(latent.height, int)
    size = (latent.width, latent.height) if known else None
    latent = dataclasses.replace(latent, given={**latent.given, "vae": vae})
    return (PictureValue(call.node, decoded=latent, size=size),)  # type: ignore[arg-type]


def _decode_sound(call: Call) -> tuple[Any, ...]:
    latent = call.of("samples", LatentValue)
    vae = call.maybe("audio_vae", VaeValue) or call.maybe("vae", VaeValue)
    latent = dataclasses.replace(latent, given={**latent.given, "audio_vae": vae})
    return (SoundValue(call.node, decoded=latent),)


def _without_references(call: Call) -> tuple[Any, ...]:
    """TrimVideoLatent: the latent frames of references, which come first, are cut off."""
    latent, amount = call.of("samples", LatentValue), call.whole("trim_amount", 0)
    before = latent.given.get("num_before", 0)
    if amount != before:
        call.refuse(f"trim_amount: expected {before}, the latent frames that come before the video's, got {amount}")
    return (latent,)


TABLE: Mapping[str, NodeClass] = {
    "VAEEncode": NodeClass(_encode),
    "EmptyLatentImage": NodeClass(_empty(8)),
    "EmptySD3LatentImage": NodeClass(_empty(8)),
    "EmptyFlux2LatentImage": NodeClass(_empty(16)),
    "EmptyHunyuanLatentVideo": NodeClass(_empty(8, "length")),
    "EmptyHunyuanVideo15Latent": NodeClass(_empty(16, "length")),
    "EmptyLTXVLatentVideo": NodeClass(_empty(32, "length")),
    "LTXVEmptyLatentAudio": NodeClass(_empty_sound),
    "SolidMask": NodeClass(_solid_mask),
    "SetLatentNoiseMask": NodeClass(_masked),
    "LTXVAudioVAEEncode": NodeClass(_encoded_sound),
    "LTXVConcatAVLatent": NodeClass(_with_sound),
    "LTXVSeparateAVLatent": NodeClass(_apart),
    "LTXVLatentUpsampler": NodeClass(_upsampled),
    "VAEDecode": NodeClass(_decode),
    "VAEDecodeTiled": NodeClass(_decode),
    "VAEDecodeAudio": NodeClass(_decode_sound),
    "LTXVAudioVAEDecode": NodeClass(_decode_sound),
    "TrimVideoLatent": NodeClass(_without_references),
}
