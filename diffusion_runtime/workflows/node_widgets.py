"""Names of ComfyUI's widgets in the order in which the editor saves their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What the editor adds behind a seed: fixed, randomize, increment or decrement.
CONTROL = "control_after_generate"
# Nodes that only the editor has, or that compute nothing.
EDITOR_KINDS = frozenset({"MarkdownNote", "Note", "Reroute", "PrimitiveNode", "SetNode", "GetNode", "Label (rgthree)"})

_PART = "start_at_step end_at_step return_with_leftover_noise"
_SCAIL = "pose_strength pose_start pose_end video_frame_offset previous_frame_count replacement_mode"
_ANIMATE = "video_frame_offset pose_strength pose_start_percent pose_end_percent reference_image_strength"
_ORDER = f"""
BasicScheduler: scheduler steps denoise
BlockSparseAttention: selection selection.keep_percent start_percent end_percent dense_blocks min_tokens
BetaSamplingScheduler: steps alpha beta
CFGGuider: cfg
CFGNorm: strength pre_cfg
CFGZeroStarAndInit: use_zero_init zero_init_steps
CLIPLoader: clip_name type device
CLIPLoaderGGUF: clip_name type
CLIPTextEncode: text
CLIPTextEncodeFlux: clip_l t5xxl guidance
CLIPVisionEncode: crop
CLIPVisionLoader: clip_name
CheckpointLoaderSimple: ckpt_name
ComfyMathExpression: expression
ComfySwitchNode: switch
ConditioningSetTimestepRange: start end
ControlNetLoader: control_net_name
CreateVideo: fps bit_depth color_space
DualCLIPLoader: clip_name1 clip_name2 type device
DualCLIPLoaderGGUF: clip_name1 clip_name2 type
EasyCache: reuse_threshold start_percent end_percent verbose
EmptyFlux2LatentImage: width height batch_size
EmptyImage: width height batch_size color
EmptyHunyuanLatentVideo: width height length batch_size
EmptyHunyuanVideo15Latent: width height length batch_size
EmptyLTXVLatentVideo: width height length batch_size
EmptyLatentImage: width height batch_size
EmptySD3LatentImage: width height batch_size
Flux2Scheduler: steps width height
FluxGuidance: guidance
FluxKontextMultiReferenceLatentMethod: reference_latents_method
HunyuanVideo15ImageToVideo: width height length batch_size
ImageFromBatch: batch_index length
ImageScale: upscale_method width height crop
ImageScaleBy: upscale_method scale_by
ImageScaleToMaxDimension: upscale_method largest_size
ImageStitch: direction match_image_size spacing_width spacing_color
ImageScaleToTotalPixels: upscale_method megapixels resolution_steps
KSampler: seed {CONTROL} steps cfg sampler_name scheduler denoise
KSamplerAdvanced: add_noise noise_seed {CONTROL} steps cfg sampler_name scheduler {_PART}
KSamplerSelect: sampler_name
LTXAVTextEncoderLoader: text_encoder ckpt_name device
LTXVAddGuide: frame_idx strength
LTXVAudioVAELoader: ckpt_name
LTXVConditioning: frame_rate
LTXVDualCFGGuider: video_cfg audio_cfg
LTXVEmptyLatentAudio: frames_number frame_rate batch_size
LTXVImgToVideo: width height length batch_size strength
LTXVImgToVideoInplace: strength bypass
LTXVPreprocess: img_compression
LTXVScheduler: steps max_shift base_shift stretch terminal
LatentUpscaleModelLoader: model_name
LoadAudio: audio upload
LoadImage: image upload
LoadImageOutput: image
LoadImageMask: image channel upload
LoadVideo: file upload
LoraLoader: lora_name strength_model strength_clip
LoraLoaderModelOnly: lora_name strength_model
ManualSigmas: sigmas
MiniMaxH3ReferenceToVideo: prompt width height length ref_image_size
MiniMaxH3SigmaShift: shift_video shift_audio
ModelAttentionBackend: attention
ModelSamplingAuraFlow: shift sampling
ModelSamplingFlux: max_shift base_shift width height
ModelSamplingSD3: shift
PrimitiveBoolean: value
PrimitiveFloat: value
PrimitiveInt: value {CONTROL}
PrimitiveString: value
PrimitiveStringMultiline: value
RandomNoise: noise_seed {CONTROL}
ResolutionSelector: aspect_ratio megapixels multiple
SCAIL2ColoredMask: object_indices sort_by replacement_mode
SamplerCustom: add_noise noise_seed {CONTROL} cfg
SamplerER_SDE: solver_type max_stage eta s_noise
SamplerEulerAncestral: eta s_noise
SamplerLCM: s_noise s_noise_end noise_clip_std
SaveAnimatedWEBP: filename_prefix fps lossless quality method
SaveImage: filename_prefix
SaveVideo: filename_prefix format codec
SaveWEBM: filename_prefix codec fps crf
ScheduledCFGGuidance: cfg start_percent end_percent
SetFirstSigma: sigma
SkipLayerGuidanceDiT: double_layers single_layers scale start_percent end_percent rescaling_scale
SkipLayerGuidanceDiTSimple: double_layers single_layers start_percent end_percent
SolidMask: value width height
SplitSigmas: step
StringConcatenate: string_a string_b delimiter
StringReplace: string find replace
TextEncodeQwenImage21: prompt negative_prompt resolution
TextEncodeQwenImageEdit: prompt
TextEncodeQwenImageEditPlus: prompt
TripleCLIPLoader: clip_name1 clip_name2 clip_name3
TrimVideoLatent: trim_amount
TrimAudioDuration: start_index duration
UNETLoader: unet_name weight_dtype
UnetLoaderGGUF: unet_name
VAEDecodeTiled: tile_size overlap temporal_size temporal_overlap
VAELoader: vae_name
Wan22ImageToVideoLatent: width height length batch_size
WanAnimate2ToVideo: width height length batch_size {_ANIMATE}
WanFirstLastFrameToVideo: width height length batch_size
WanImageToVideo: width height length batch_size
WanSCAILToVideo: width height length batch_size {_SCAIL}
WanVaceToVideo: width height length batch_size strength
"""
# Of a choice that has values of its own, by what is chosen.
_RESIZE = {
    "scale dimensions": ("width", "height", "crop"),
    "scale by multiplier": ("multiplier",),
    "scale longer dimension": ("longer_size",),
    "scale shorter dimension": ("shorter_size",),
    "scale width": ("width",),
    "scale height": ("height",),
    "scale total pixels": ("megapixels",),
    "match size": ("crop",),
}
WIDGETS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(names.split()) for kind, _, names in (line.partition(": ") for line in _ORDER.strip().splitlines())
}


def widget_names(kind: str, own: Sequence[str], values: Sequence[Any]) -> Sequence[str]:
    """Return the names of a node's values in their order. own: the widgets that the file itself names, which an old
    file does in part, or not at all."""
    if kind == "ResizeImageMaskNode" and values and isinstance(values[0], str):
        return ("resize_type", *(f"resize_type.{name}" for name in _RESIZE.get(values[0], ())), "scale_method")
    known = WIDGETS.get(kind)
    if known is not None:
        return known
    named = []
    for name in own:
        # The editor adds one behind every seed.
        named += [name, CONTROL] if name in ("seed", "noise_seed") else [name]
    return named
