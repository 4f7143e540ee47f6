"""Nodes of prompts and conditions, and those that make latents of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.picture_nodes import pictures_of
from diffusion_runtime.workflows.values import (
    ClipValue,
    ConditioningValue,
    LatentValue,
    PictureValue,
    SoundValue,
    Unknown,
    VaeValue,
    VisionValue,
)

_FRAMES = "length"


def _text(call: Call) -> tuple[Any, ...]:
    return (ConditioningValue(call.node, call.text("text"), call.of("clip", ClipValue)),)


def _zeroed(call: Call) -> tuple[Any, ...]:
    return (dataclasses.replace(call.of("conditioning", ConditioningValue), zeroed=call.node),)


def _in_time(call: Call) -> tuple[Any, ...]:
    """ConditioningSetTimestepRange: ComfyUI predicts 0 for a condition outside of its range."""
    conditioning = call.of("conditioning", ConditioningValue)
    if call.number("start", 0.0) > 0 or call.number("end", 1.0) < 1:
        call.refuse(
            "start, end: expected 0 and 1: a prompt of some steps alone is not supported; guidance of some steps is "
            "--guidance-start and --guidance-stop"
        )
    call.without_effect("of all steps")
    return (conditioning,)


def _guidance(call: Call) -> tuple[Any, ...]:
    conditioning = call.of("conditioning", ConditioningValue)
    return (dataclasses.replace(conditioning, guidance=float(call.number("guidance", 3.5))),)


def _flux_text(call: Call) -> tuple[Any, ...]:
    """Two texts: of CLIP, which sees the whole, and of T5."""
    of_clip, of_t5 = call.text("clip_l"), call.text("t5xxl")
    if of_clip != of_t5:
        call.refuse("clip_l, t5xxl: expected one prompt for both text encoders; write the same into both")
    clip = call.of("clip", ClipValue)
    return (ConditioningValue(call.node, of_t5, clip, guidance=float(call.number("guidance", 3.5))),)


def _edit_text(*names: str) -> Callable[[Call], tuple[Any, ...]]:
    def run(call: Call) -> tuple[Any, ...]:
        pictures = [picture for name in names if (picture := call.maybe(name, PictureValue)) is not None]
        clip = call.of("clip", ClipValue)
        if pictures and call.maybe("vae", VaeValue) is None:
            call.refuse("vae: nothing is linked: pictures that the text encoder alone sees; expected a VAE")
        return (ConditioningValue(call.node, call.text("prompt"), clip, references=pictures_of(call, pictures)),)

    return run


def _qwen_21(call: Call) -> tuple[Any, ...]:
    clip, pictures = call.of("clip", ClipValue), pictures_of(call, call.named_like("images.", PictureValue))
    texts = call.text("prompt"), call.text("negative_prompt")
    positive, negative = (ConditioningValue(call.node, text, clip, references=pictures) for text in texts)
    resolution = call.whole("resolution", 1024)
    side: int | Unknown = Unknown("the size is that of the first picture at the node's resolution")
    if not pictures:
        side = resolution or 1024
    given = {"resolution": resolution}
    return positive, negative, LatentValue(call.node, side, side, given=given, start=pictures[0] if pictures else None)


def _reference(call: Call) -> tuple[Any, ...]:
    conditioning, latent = call.of("conditioning", ConditioningValue), call.maybe("latent", LatentValue)
    if latent is None:
        call.without_effect("no latent is linked")
        return (conditioning,)
    if latent.start is None:
        call.refuse("latent: expected one of a picture (VAEEncode)")
    references = pictures_of(call, [*conditioning.references, latent.start])
    return (dataclasses.replace(conditioning, references=references),)


def _references(call: Call) -> tuple[Any, ...]:
    """ReferenceMultiLatent: pictures as references of both conditions."""
    positive, negative = _both(call)
    pictures = pictures_of(call, call.named_like("images.", PictureValue))
    call.maybe("vae", VaeValue)
    if pictures:
        call.replaced("references at the size of the model's own pipeline")
    side = Unknown("the size is that of the first picture at the node's resolution")
    latent = LatentValue(call.node, side, side, start=pictures[0] if pictures else None)
    given = [dataclasses.replace(each, references=(*each.references, *pictures)) for each in (positive, negative)]
    return (*given, latent)


def _reference_method(call: Call) -> tuple[Any, ...]:
    method = call.text("reference_latents_method", "offset")
    if method not in ("index", "index_timestep_zero", "offset", "uxo/uno"):
        call.refuse(f"reference_latents_method: {method} is not known")
    call.replaced("the places that the model's own pipeline gives to references")
    return (call.of("conditioning", ConditioningValue),)


def _vision(call: Call) -> tuple[Any, ...]:
    encoder = call.of("clip_vision", VisionValue)
    return (dataclasses.replace(encoder, picture=call.of("image", PictureValue)),)


def _sized(call: Call) -> dict[str, Any]:
    return {
        "width": call.size("width", 832),
        "height": call.size("height", 480),
        "frames": call.size(_FRAMES, 81),
        "batch": call.whole("batch_size", 1),
    }


def _both(call: Call) -> tuple[ConditioningValue, ConditioningValue]:
    positive = call.of("positive", ConditioningValue)
    return positive, call.maybe("negative", ConditioningValue) or positive


def _from_frames(first: str, last: str | None, *visions: str) -> Callable[[Call], tuple[Any, ...]]:
    """Return a node that makes a video from its first frame, and perhaps its last."""

    def run(call: Call) -> tuple[Any, ...]:
        positive, negative = _both(call)
        given: dict[str, Any] = {}
        for name, field in ((first, "image_path"), (last, "last_image_path")):
            picture = None if name is None else call.maybe(name, PictureValue)
            if picture is not None:
                given[field] = picture
        seen = [vision for name in visions if (vision := call.maybe(name, VisionValue)) is not None]
        if seen:
            given["vision"] = seen[0]
        return positive, negative, LatentValue(call.node, given=given, **_sized(call))

    return run


def _vace(call: Call) -> tuple[Any, ...]:
    positive, negative = _both(call)
    given: dict[str, Any] = {}
    for name, field in (("control_video", "video_path"), ("reference_image", "image_path")):
        if (picture := call.maybe(name, PictureValue)) is not None:
            given[field] = picture
    if call.maybe("control_masks", object) is not None:
        call.refuse("control_masks: masks that nodes compute are no file; give one with --mask-path, and bypass them")
    if (strength := call.number("strength", 1.0)) != 1.0:
        given["conditioning_scale"] = float(strength)
    # A reference is a latent frame before the video's, which TrimVideoLatent cuts off, and the model's pipeline too.
    given["num_before"] = int("image_path" in given)
    return positive, negative, LatentValue(call.node, given=given, **_sized(call)), given["num_before"]


def _animate(call: Call) -> tuple[Any, ...]:
    positive, negative = _both(call)
    given: dict[str, Any] = {}
    for name, field in (("reference_image", "image_path"), ("pose_video", "video_path")):
        if (picture := call.maybe(name, PictureValue)) is not None:
            given[field] = picture
    for name, plain in (("pose_strength", 1), ("pose_start_percent", 0), ("pose_end_percent", 1),
                        ("reference_image_strength", 1), ("video_frame_offset", 0)):  # fmt: skip
        if call.number(name, plain) != plain:
            call.refuse(f"{name}: expected {plain}, got {call.number(name, plain):g}")
    if call.maybe("continue_motion", PictureValue) is not None:
        call.refuse("continue_motion: a video in several windows that follow each other; one window is made at once")
    return positive, negative, LatentValue(call.node, given=given, **_sized(call)), 0, 0, 0


def _minimax(call: Call) -> tuple[Any, ...]:
    positive = ConditioningValue(call.node, call.text("prompt"), call.of("clip", ClipValue))
    given: dict[str, Any] = {}
    for name, field in (("first_frame", "image_path"), ("last_frame", "last_image_path")):
        if (picture := call.maybe(name, PictureValue)) is not None:
            given[field] = picture
    return positive, LatentValue(call.node, given=given, **_sized(call))


def _minimax_references(call: Call) -> tuple[Any, ...]:
    positive = ConditioningValue(call.node, call.text("prompt"), call.of("clip", ClipValue))
    pictures = pictures_of(call, call.named_like("ref_images.", PictureValue))
    films = call.named_like("ref_videos.", PictureValue)
    sounds = call.named_like("ref_audios.", SoundValue)
    if call.named_like("ref_video_audios.", SoundValue):
        call.replaced("the sound of the reference video's own file")
    if (size := call.text("ref_image_size", "match")) != "match":
        call.replaced(f"references at the size of the model's pipeline, in place of ref_image_size {size}")
    given = {"references": (*pictures, *films, *sounds)}
    return positive, LatentValue(call.node, given=given, **_sized(call))


def _ltx_rate(call: Call) -> tuple[Any, ...]:
    positive, negative = _both(call)
    rate = float(call.number("frame_rate", 25.0))
    return dataclasses.replace(positive, fps=rate), dataclasses.replace(negative, fps=rate)


def _with_frame(latent: LatentValue, at: int, picture: PictureValue, strength: float) -> LatentValue:
    frames = (*latent.given.get("frames", ()), (at, picture, strength))
    return dataclasses.replace(latent, given={**latent.given, "frames": frames})


def _ltx_inplace(call: Call) -> tuple[Any, ...]:
    latent = call.of("latent", LatentValue)
    if call.flag("bypass") or call.number("strength", 1.0) == 0:
        call.without_effect("its switch is off")
        return (latent,)
    return (_with_frame(latent, 0, call.of("image", PictureValue), float(call.number("strength", 1.0))),)


def _ltx_from_image(call: Call) -> tuple[Any, ...]:
    positive, negative = _both(call)
    latent = LatentValue(call.node, **_sized(call))
    picture = call.of("image", PictureValue)
    return positive, negative, _with_frame(latent, 0, picture, float(call.number("strength", 1.0)))


def _ltx_guide(call: Call) -> tuple[Any, ...]:
    positive, negative = _both(call)
    latent, picture = call.of("latent", LatentValue), call.of("image", PictureValue)
    if picture.is_film:
        call.refuse("image: a video as a guide (an IC-LoRA's control); a request takes images at frames")
    if call.maybe("iclora_parameters", object) is not None:
        call.refuse("iclora_parameters: IC-LoRA is not supported here")
    at = call.whole("frame_idx", 0)
    if at < 0:
        if isinstance(latent.frames, Unknown):
            call.refuse("frame_idx: counted from the end of a video whose length is not known")
        at += latent.frames
    if at <= 0:
        call.replaced("the first latent frame, where diffusers' pipeline has an image at frame 0")
    strength = float(call.number("strength", 1.0))
    return positive, negative, _with_frame(latent, max(at, 0), picture, strength)


def _ltx_cropped(call: Call) -> tuple[Any, ...]:
    positive, negative = _both(call)
    return positive, negative, call.of("latent", LatentValue)


def _first_frame(call: Call) -> tuple[Any, ...]:
    given: dict[str, Any] = {}
    if (picture := call.maybe("start_image", PictureValue)) is not None:
        given["image_path"] = picture
    call.maybe("vae", VaeValue)
    return (LatentValue(call.node, given=given, **_sized(call)),)


def _rewritten(call: Call) -> tuple[Any, ...]:
    call.refuse(
        "a language model that rewrites the prompt; turn its switch off (`workflow explain` shows the switches: --set "
        "NODE.value=false), or give the prompt on the command line"
    )


TABLE: Mapping[str, NodeClass] = {
    "CLIPTextEncode": NodeClass(_text),
    "CLIPTextEncodeFlux": NodeClass(_flux_text),
    "ConditioningZeroOut": NodeClass(_zeroed),
    "ConditioningSetTimestepRange": NodeClass(_in_time),
    "FluxGuidance": NodeClass(_guidance),
    "TextEncodeQwenImageEdit": NodeClass(_edit_text("image")),
    "TextEncodeQwenImageEditPlus": NodeClass(_edit_text("image1", "image2", "image3")),
    "TextEncodeQwenImage21": NodeClass(_qwen_21),
    "ReferenceLatent": NodeClass(_reference),
    "ReferenceMultiLatent": NodeClass(_references),
    "FluxKontextMultiReferenceLatentMethod": NodeClass(_reference_method),
    "CLIPVisionEncode": NodeClass(_vision),
    "WanImageToVideo": NodeClass(_from_frames("start_image", None, "clip_vision_output")),
    "WanFirstLastFrameToVideo": NodeClass(
        _from_frames("start_image", "end_image", "clip_vision_start_image", "clip_vision_end_image")
    ),
    "HunyuanVideo15ImageToVideo": NodeClass(_from_frames("start_image", None, "clip_vision_output")),
    "Wan22ImageToVideoLatent": NodeClass(_first_frame),
    "WanVaceToVideo": NodeClass(_vace),
    "WanAnimate2ToVideo": NodeClass(_animate),
    "MiniMaxH3ImageToVideo": NodeClass(_minimax),
    "MiniMaxH3ReferenceToVideo": NodeClass(_minimax_references),
    "LTXVConditioning": NodeClass(_ltx_rate),
    "LTXVImgToVideoInplace": NodeClass(_ltx_inplace),
    "LTXVImgToVideo": NodeClass(_ltx_from_image),
    "LTXVAddGuide": NodeClass(_ltx_guide),
    "LTXVCropGuides": NodeClass(_ltx_cropped),
    "TextGenerate": NodeClass(_rewritten),
    "TextGenerateLTX2Prompt": NodeClass(_rewritten),
}
