"""Nodes of SCAIL-2: a clip by images, a driving video and masks in colours. What segments the masks is no node here:
they come as files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.values import (
    ConditioningValue,
    LatentValue,
    MaskValue,
    PictureValue,
    VaeValue,
    VisionValue,
)


def _colored_masks(call: Call) -> tuple[Any, ...]:
    """SCAIL2ColoredMask, of what SAM 3 finds, which is not looked at."""
    call.replaced("files of the masks, which nothing here segments: --mask-path and --image-mask-path")
    return MaskValue(call.node), MaskValue(call.node)


def _clip(call: Call) -> tuple[Any, ...]:
    positive = call.of("positive", ConditioningValue)
    negative = call.maybe("negative", ConditioningValue) or positive
    replaces = call.flag("replacement_mode")
    given: dict[str, Any] = {"character_mode": "replace" if replaces else "animate"}
    for name, plain in (("pose_strength", 1), ("pose_start", 0), ("pose_end", 1), ("video_frame_offset", 0)):
        if call.number(name, plain) != plain:
            call.refuse(f"{name}: expected {plain}, got {call.number(name, plain):g}")
    if call.maybe("previous_frames", PictureValue) is not None:
        call.refuse(
            "previous_frames: a further clip that goes on behind another; a request makes several by itself "
            "(--num-frames 157): run the first clip alone"
        )
    masks = (("pose_video_mask", "mask_path"), ("reference_image_mask", "image_mask_path"))
    for name, field in (("pose_video", "video_path"), ("reference_image", "image_path"), *masks):
        value = call.raw(name)
        if isinstance(value, PictureValue):
            given[field] = value.parts or value
        elif value is not None and not isinstance(value, MaskValue):
            call.refuse(f"{name}: expected pictures of it")
    if replaces:
        call.replaced("the image as it is, where ComfyUI makes it black outside of its mask")
    if (seen := call.maybe("clip_vision_output", VisionValue)) is not None:
        given["vision"] = seen
    call.maybe("vae", VaeValue)
    latent = LatentValue(
        call.node,
        call.size("width", 512),
        call.size("height", 896),
        call.size("length", 81),
        call.whole("batch_size", 1),
        given,
    )
    return positive, negative, latent, 0


TABLE: Mapping[str, NodeClass] = {
    # The mode counts alone: without tracks, and so without the model of them and its texts.
    "SCAIL2ColoredMask": NodeClass(_colored_masks, wanted=lambda *_: ("replacement_mode",)),
    "WanSCAILToVideo": NodeClass(_clip),
}
