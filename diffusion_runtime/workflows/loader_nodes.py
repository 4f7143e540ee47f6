"""Nodes that name files of weights, and those that change a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from diffusion_runtime.denoising.named_schedules import NoiseTable
from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.values import (
    ClipValue,
    Lora,
    ModelValue,
    SparseValue,
    Unknown,
    UpsamplerValue,
    VaeValue,
    VisionValue,
    Weights,
)

# Casts to 8-bit floats without scales; of weights whose deviation is 0.05 to 0.005, the root mean square of the
# rounding is 2.7 to 11 % with e4m3fn, and 5.3 % with e5m2.
_ROUNDING = {"fp8_e4m3fn": "2.7 to 11 %", "fp8_e4m3fn_fast": "2.7 to 11 %", "fp8_e5m2": "5.3 %"}
_FAST = "fp8_e4m3fn_fast"
_MAX_LORAS = 1000


def _weights(call: Call, name: str, folder: str) -> Weights:
    file = call.text(name)
    if not file:
        call.refuse(f"{name}: expected the name of a file, got an empty text")
    return Weights(call.node, file, folder)


def _transformer(name: str) -> Callable[[Call], tuple[Any, ...]]:
    def run(call: Call) -> tuple[Any, ...]:
        cast = call.text("weight_dtype", "default")
        if cast in _ROUNDING and cast != _FAST:
            call.replaced(
                f"the file's own numbers, with products of 16 bits as in ComfyUI: the cast to {cast} would round the "
                f"weights of a 16-bit file by {_ROUNDING[cast]} (rms), and --quantization fp8 by 2.6 %"
            )
        elif cast not in ("default", _FAST):
            call.refuse(f"weight_dtype: expected default or {', '.join(_ROUNDING)}, got {cast}")
        weights = _weights(call, name, "diffusion_models")
        return (ModelValue(weights, cast=call.node if cast == _FAST else None),)

    return run


def _checkpoint(call: Call) -> tuple[Any, ...]:
    weights = _weights(call, "ckpt_name", "checkpoints")
    return ModelValue(weights), ClipValue((weights,)), VaeValue(weights)


def _clip(*names: str) -> Callable[[Call], tuple[Any, ...]]:
    def run(call: Call) -> tuple[Any, ...]:
        return (ClipValue(tuple(_weights(call, name, "text_encoders") for name in names), call.text("type")),)

    return run


def _vae(call: Call) -> tuple[Any, ...]:
    return (VaeValue(_weights(call, "vae_name", "vae")),)


def _sound_vae(call: Call) -> tuple[Any, ...]:
    return (VaeValue(_weights(call, "ckpt_name", "checkpoints")),)


def _vision(call: Call) -> tuple[Any, ...]:
    return (VisionValue(_weights(call, "clip_name", "clip_vision")),)


def _upsampler(call: Call) -> tuple[Any, ...]:
    return (UpsamplerValue(_weights(call, "model_name", "latent_upscale_models")),)


def _lora(call: Call) -> tuple[Any, ...]:
    model, clip = call.maybe("model", ModelValue), call.maybe("clip", ClipValue)
    file, scale = call.text("lora_name"), float(call.number("strength_model", 1.0))
    of_clip = float(call.number("strength_clip", scale)) if clip is not None else scale
    lora = Lora(call.node, file, scale)
    if max(len(each.loras) if each is not None else 0 for each in (model, clip)) >= _MAX_LORAS:
        call.refuse(f"expected at most {_MAX_LORAS} LoRA files")
    if model is not None and scale == 0 and (clip is None or of_clip == 0):
        call.without_effect("its strength is 0")
        return (model, clip)
    changed_clip = (
        None if clip is None else dataclasses.replace(clip, loras=(*clip.loras, Lora(call.node, file, of_clip)))
    )
    return (None if model is None else dataclasses.replace(model, loras=(*model.loras, lora)), changed_clip)


def _shifted(call: Call) -> tuple[Any, ...]:
    model = call.of("model", ModelValue)
    shift = float(call.number("shift", 3.0))
    if not 0.001 <= shift <= 100:
        call.refuse(f"shift: expected a number from 0.001 to 100, got {shift:g}")
    return (dataclasses.replace(model, table=NoiseTable(shift, 1000), shift_of=call.node),)


def _shifted_by_size(call: Call) -> tuple[Any, ...]:
    model, width, height = call.of("model", ModelValue), call.size("width", 1024), call.size("height", 1024)
    if isinstance(width, Unknown) or isinstance(height, Unknown):
        call.refuse("width, height: the noise schedule depends on the size of a picture that is not here")
    high, low = call.number("max_shift", 1.15), call.number("base_shift", 0.5)
    slope = (high - low) / (4096 - 256)
    mu = width * height / 256 * slope + low - slope * 256
    if not -10 < mu < 10:
        call.refuse(f"max_shift, base_shift: lead to a shift of e^{mu:.3g}")
    return (dataclasses.replace(model, table=NoiseTable(math.exp(mu), 10_000), shift_of=call.node),)


def _shifted_with_sound(call: Call) -> tuple[Any, ...]:
    model = call.of("model", ModelValue)
    shift = float(call.number("shift_video", 12.0))
    if not 0.001 <= shift <= 100:
        call.refuse(f"shift_video: expected a number from 0.001 to 100, got {shift:g}")
    audio = float(call.number("shift_audio", 3.0))
    return (dataclasses.replace(model, table=NoiseTable(shift, 1000), shift_of=call.node, audio_shift=audio),)


def _passed(remark: str) -> Callable[[Call], tuple[Any, ...]]:
    """Return a node that gives its model on, and changes speed or memory alone."""

    def run(call: Call) -> tuple[Any, ...]:
        if (dtype := call.text("dtype", "default")) != "default":
            call.replaced(f"keys in the model's own number format, in place of {dtype}")
        call.without_effect(remark)
        return (call.of("model", ModelValue),)

    return run


def _attention(call: Call) -> tuple[Any, ...]:
    call.replaced(f"the attention that --attention-backend chooses, in place of {call.text('attention', 'default')}")
    return (call.of("model", ModelValue),)


def _block_sparse(call: Call) -> tuple[Any, ...]:
    model = call.of("model", ModelValue)
    for name, plain in (("selection", "vsa"), ("dense_blocks", "")):
        if call.text(name, plain) != plain:
            call.refuse(f"{name}: expected {plain or 'nothing'}, got {call.text(name)}")
    if call.number("end_percent", 1.0) != 1:
        call.refuse("end_percent: expected 1: sparse attention here runs to the last step")
    keep, start = float(call.number("selection.keep_percent", 10.0)) / 100, float(call.number("start_percent", 0.0))
    if not 0 < keep < 1 or not 0 <= start < 1:
        call.refuse("selection.keep_percent, start_percent: expected shares of 100 and of 1")
    sparse = SparseValue(call.node, keep, start, call.whole("min_tokens", 0))
    call.replaced(
        f"video_sparse_attn at sparsity {1 - keep:g} (docs/few_steps.md#fasth3), with FastVideo's blocks; extra_tokens "
        "and sink_conditioning have no counterpart"
    )
    return (dataclasses.replace(model, sparse=sparse),)


def _easy_cache(call: Call) -> tuple[Any, ...]:
    call.refuse("ComfyUI's EasyCache counts its threshold otherwise than --step-cache easycache; bypass the node, and "
                "give that flag")  # fmt: skip


TABLE: Mapping[str, NodeClass] = {
    "UNETLoader": NodeClass(_transformer("unet_name")),
    "UnetLoaderGGUF": NodeClass(_transformer("unet_name")),
    "CheckpointLoaderSimple": NodeClass(_checkpoint),
    "CLIPLoader": NodeClass(_clip("clip_name")),
    "CLIPLoaderGGUF": NodeClass(_clip("clip_name")),
    "DualCLIPLoader": NodeClass(_clip("clip_name1", "clip_name2")),
    "DualCLIPLoaderGGUF": NodeClass(_clip("clip_name1", "clip_name2")),
    "LTXAVTextEncoderLoader": NodeClass(_clip("text_encoder", "ckpt_name")),
    "VAELoader": NodeClass(_vae),
    "LTXVAudioVAELoader": NodeClass(_sound_vae),
    "CLIPVisionLoader": NodeClass(_vision),
    "LatentUpscaleModelLoader": NodeClass(_upsampler),
    "LoraLoader": NodeClass(_lora),
    "LoraLoaderModelOnly": NodeClass(_lora),
    "ModelSamplingSD3": NodeClass(_shifted),
    "ModelSamplingAuraFlow": NodeClass(_shifted),
    "ModelSamplingFlux": NodeClass(_shifted_by_size),
    "MiniMaxH3SigmaShift": NodeClass(_shifted_with_sound),
    "QwenImage21Cache": NodeClass(_passed("keeps keys of the references; the same numbers, and kept here too")),
    "WanAnimate2Cache": NodeClass(_passed("keeps keys of the reference; the same numbers, and kept here too")),
    "FluxKVCache": NodeClass(_passed("keeps keys of the references")),
    "ModelAttentionBackend": NodeClass(_attention),
    "BlockSparseAttention": NodeClass(_block_sparse),
    "EasyCache": NodeClass(_easy_cache),
}
