"""Files of weights that a workflow names, by the option of RuntimeConfig that each is for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.workflows.evaluation import NotSupportedError
from diffusion_runtime.workflows.graph import Node
from diffusion_runtime.workflows.request_parts import RequestParts
from diffusion_runtime.workflows.sampler_stages import SAME_LEVEL, is_guided
from diffusion_runtime.workflows.values import (
    ClipValue,
    ConditioningValue,
    LatentValue,
    Lora,
    ModelValue,
    MovieValue,
    SkipValue,
    SparseValue,
    StageValue,
    VaeValue,
    ZeroStarValue,
)

# What nodes change of a model, which a request says for all stages.
_OF_BOTH = {"sparse": "sparse attention", "zero_star": "CFG-zero*", "skip": "skipped layers", "cast": "an 8-bit cast"}
_FEW_BITS = re.compile(r"fp8|fp4|int8|int4|mxfp|nf4|convrot|svdq|w4a|\.gguf$")
_NO_NODE = Node("", "", "", {})
_FAST = (
    "--quantization fp8: products of 8-bit floats too, with a scale per row of weights, which rounds by 2.6 % (rms) "
    "where the cast without scales rounds by 2.7 to 11 %"
)


def _without_node(value: object) -> object:
    if isinstance(value, SparseValue | ZeroStarValue | SkipValue):
        return dataclasses.replace(value, node=_NO_NODE)
    return isinstance(value, Node)


def add_files(parts: RequestParts, stages: Sequence[StageValue], latent: LatentValue) -> None:
    """Add the files of the transformers, text encoders and autoencoder, LoRAs and the attention of the transformers."""
    model = stages[0].guider.model
    parts.files["model_path"] = model.weights
    parts.runtime["like"] = parts.model.name
    is_two = len(stages) == 2 and stages[1].guider.model.weights.file != model.weights.file
    parts.loras += [(lora, "transformer" if is_two else "auto") for lora in model.loras]
    if is_two:
        parts.files["transformer_2_path"] = stages[1].guider.model.weights
        parts.loras += [(lora, "transformer_2") for lora in stages[1].guider.model.loras]
    elif len(stages) == 2 and _named(stages[1].guider.model.loras) != _named(model.loras):
        lora = next(iter((*stages[1].guider.model.loras, *model.loras)))
        raise NotSupportedError(
            "a LoRA of one stage alone: both stages run the same weights here; expected it in both, or in none: --set "
            f"{lora.node.id}.mode=4",
            lora.node,
        )
    for name, what in _OF_BOTH.items():
        # Each expert has nodes of its own.
        values = [_without_node(getattr(stage.guider.model, name)) for stage in stages]
        if values[0] != values[-1]:
            raise NotSupportedError(f"{what} of one stage alone; expected the same in both", stages[-1].node)
    if model.skip is not None and is_two:
        raise NotSupportedError("skipped layers beside two experts; expected one model", model.skip.node)
    if model.cast is not None and not _FEW_BITS.search(model.weights.file.lower()):
        parts.runtime["quantization"] = "fp8"
        parts.replaced(model.cast, _FAST)
    elif model.cast is not None:
        parts.replaced(model.cast, "the file's own numbers, which its name says are of 8 bits or fewer")
    if model.sparse is not None:
        parts.runtime["attention"] = _attention(model.sparse, stages[0])
    guider = stages[0].guider
    _check_clip(guider.positive.clip, model)
    if is_guided(guider) and guider.negative is not None and _files_of(guider.negative) != _files_of(guider.positive):
        raise NotSupportedError("another text encoder for the negative prompt; expected the same", guider.negative.node)
    _text_encoders(parts, guider.positive.clip)
    vae = latent.given.get("vae")
    if isinstance(vae, VaeValue) and vae.weights.folder == "vae":
        parts.files["vae_path"] = vae.weights


def _attention(sparse: SparseValue, stage: StageValue) -> dict[str, Any]:
    """Return the attention of a config. ComfyUI's start is a share of the schedule before its shift."""
    table = stage.guider.model.table
    if sparse.start > 0 and table is None:
        raise NotSupportedError("start_percent: the model's noise schedule depends on the size", sparse.node)
    level = 1.0 if table is None else shifted(1 - sparse.start, table.flow_shift)
    num_dense = sum(each > level + SAME_LEVEL for each in stage.sigmas.levels[:-1])
    extra: dict[str, Any] = {"sparsity": round(1 - sparse.keep, 6), "min_tokens": sparse.min_tokens}
    if num_dense:
        extra["dense_first_steps"] = num_dense
    return {"per_role": {"self": {"backend": "video_sparse_attn", "extra": extra}}}


def _check_clip(clip: ClipValue, model: ModelValue) -> None:
    """Raises NotSupportedError for a LoRA whose strength is another one in the text encoder."""
    scales = {lora.file: lora.scale for lora in model.loras}
    for lora in clip.loras:
        if scales.get(lora.file) != lora.scale:
            raise NotSupportedError(
                f"strength_clip: expected {scales.get(lora.file, 0):g}, that of the model, got {lora.scale:g}: a file "
                f"has one strength here; --set {lora.node.id}.strength_clip={scales.get(lora.file, 0):g}",
                lora.node,
            )


def _files_of(condition: ConditioningValue) -> list[tuple[str, float]]:
    """Return the files of a condition's text encoders, and their LoRAs."""
    return [(each.file, 1.0) for each in condition.clip.weights] + _named(condition.clip.loras)


def _named(loras: Sequence[Lora]) -> list[tuple[str, float]]:
    return [(lora.file, lora.scale) for lora in loras]


def _text_encoders(parts: RequestParts, clip: ClipValue) -> None:
    weights = [each for each in clip.weights if each.folder == "text_encoders"]
    if clip.weights[0].node.kind == "LTXAVTextEncoderLoader":
        # The other one is the checkpoint with the connectors.
        weights = weights[:1]
    second = parts.model.second_text
    for each in weights:
        is_second = second is not None and second in each.file.lower()
        key = "text_encoder_2_path" if is_second else "text_encoder_path"
        if key in parts.files:
            raise NotSupportedError(f"two files of one text encoder: {parts.files[key].file}, {each.file}", each.node)
        parts.files[key] = each


def add_sound(parts: RequestParts, output: MovieValue) -> None:
    """Add the file of the sound's autoencoder."""
    sound = output.sound
    assert sound is not None
    if sound.decoded is None:
        if parts.request.get("audio_path") is None and not parts.model.sound:
            parts.replaced(sound.node, "a file without sound: join them with ffmpeg -i VIDEO -i SOUND -c copy OUT")
        return
    vae = sound.decoded.given.get("audio_vae")
    if isinstance(vae, VaeValue) and vae.weights.folder == "vae":
        parts.files["audio_vae_path"] = vae.weights
