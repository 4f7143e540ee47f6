"""GenerationRequest: the values of one generation (call time). Never merged with RuntimeConfig (load time)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Self

from diffusion_runtime.core.options import MethodText
from diffusion_runtime.core.runtime_options import WHAT
from diffusion_runtime.errors import RequestError, nearest, shown
from diffusion_runtime.request.fields import (
    ANY_GUIDANCE,
    ATTENTION_GUIDANCE,
    GUIDANCE,
    GUIDED_CHUNKS,
    IMAGES,
    NEGATIVE_TEXT,
    NO_CONTROLNET,
    NO_EXPERTS,
    NO_INITIAL,
    NO_PREDICTED_LENGTH,
    NO_PROMPT,
    NO_RESTORATION,
    NO_RIFLEX,
    NO_SEGMENTS,
    NO_SOUND,
    NO_SPATIO_TEMPORAL,
    NO_UPSAMPLER,
    NO_WINDOWS,
    OWN_NAME,
    PLACED_IMAGES,
    SHIFT,
    VIDEO,
    Blocks,
    ByRole,
    Count,
    ImageFile,
    InputFile,
    Levels,
    MaskFile,
    MediaFiles,
    Number,
    OneOf,
    RequestField,
    Scales,
    SeedNumber,
    Seeds,
    SoundFile,
    Text,
    VideoFile,
    request_field,
)
from diffusion_runtime.request.frame_conditions import FrameCondition, FrameConditions, keyframes_between
from diffusion_runtime.request.given_images import recorded_images
from diffusion_runtime.request.interpolation import MAX_MULTIPLE, NO_INTERPOLATION
from diffusion_runtime.request.layers import SamplerName, layered
from diffusion_runtime.request.progressive_options import ProgressiveSettings
from diffusion_runtime.request.prompt_switches import (
    SWITCH_MODES,
    PromptSwitch,
    PromptSwitches,
    SeedSwitch,
    SeedSwitches,
)
from diffusion_runtime.request.samplers import SAMPLERS as REGISTERED_SAMPLERS
from diffusion_runtime.request.step_cache_options import StepCacheSettings

# What the frame positions of cached keys count (attention/cache/frame_cache.py).
CHUNK_SCHEDULES = ("sequential", "rolling")
POSITIONS = ("absolute", "window")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
GUIDANCE_MODES = ("batched", "two_pass")
ZERO_STAR = ("on", "comfyui", "off")
NEGATIVE_ENCODINGS = ("text", "zeros")
SAMPLERS = tuple(REGISTERED_SAMPLERS)
NOISES = ("own", "comfyui")
SECOND_STAGE_SAMPLERS = ("flow_match_euler", "euler_ancestral")
# In the order of the components of Wan 2.2's folders.
EXPERTS = ("high_noise", "low_noise")
CONTEXT_NOISES = ("repeated", "random")
COLOR_CORRECTIONS = ("lab", "wavelet", "adain", "none")
CHARACTER_MODES = ("animate", "replace")

# Kinds of fields: of a prompt; with the same name in diffusers; against overexposure; of spatio-temporal guidance; of
# pictures with sound; of a second stage; of a predicted length; of a file or how it counts; of a ControlNet; of causal
# models; at a time of the video; of models that restore one; of
# segments; of context windows; of RIFLEx.
_prompt_field = partial(request_field, panel=WHAT, differs_in_batch=True, repeatable=True)
_same_field = partial(request_field, pipeline_parameters=OWN_NAME)
_guidance_field = partial(request_field, used_with=GUIDANCE)
_rescale_field = partial(_same_field, used_with=ANY_GUIDANCE, off=0.0)
_nag_field = partial(request_field, refusal=NO_PROMPT)
_stg_field = partial(_same_field, refusal=NO_SPATIO_TEMPORAL, off=0.0)
_sound_field = partial(_same_field, refusal=NO_SOUND, off=1.0)
_second_stage_field = partial(request_field, refusal=NO_UPSAMPLER, off=0.0)
_length_field = partial(_same_field, refusal=NO_PREDICTED_LENGTH)
_input_field = partial(request_field, panel=WHAT)
_controlnet_field = partial(_same_field, refusal=NO_CONTROLNET)
_chunk_field = partial(request_field, is_of_chunks=True)
_switch_field = partial(_chunk_field, panel=WHAT)
_restoration_field = partial(request_field, refusal=NO_RESTORATION)
_segment_field = partial(request_field, refusal=NO_SEGMENTS)
_window_field = partial(request_field, refusal=NO_WINDOWS)
_riflex_field = partial(request_field, refusal=NO_RIFLEX)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how to turn it into frames. None means: as the model's own defaults say.

    Each field is declared here and nowhere else: flags, checks, the rules of a batch and what a diffusers pipeline is
    given follow from its RequestField. Raises RequestError that names a field with a value it cannot have.
    """

    prompt: str = _prompt_field(
        "The prompt as a flag; give it again for several.",
        Text(needs_words=True),
        pipeline_parameters=OWN_NAME,
        default=MISSING,
    )
    negative_prompt: str | None = _prompt_field(
        "What to steer away from: once for all prompts, or once per prompt.",
        Text(),
        pipeline_parameters=OWN_NAME,
        used_with=NEGATIVE_TEXT,
        is_filled=True,
    )
    # Pixels; the model says which multiples it needs.
    height: int | None = _same_field("Pixels.", Count(), is_filled=True)
    width: int | None = _same_field("Pixels.", Count(), is_filled=True)
    # 1 is an image; video models need 1 plus a multiple of their temporal factor.
    num_frames: int | None = request_field(
        "1 makes an image.", Count(), pipeline_parameters=("num_frames", "video_length", "frames"), is_filled=True
    )
    # The length of the video, which becomes num_frames when the request is resolved.
    seconds: float | None = request_field(
        "The length of the video in seconds, in place of --num-frames.", Number(minimum=0.01)
    )
    # The bounds of a length that the model chooses for the prompt, where nothing says one. num_frames of a resolved
    # request is then the longest.
    min_seconds: float | None = _length_field(
        "The least length that a model chooses for the prompt, where neither --num-frames nor --seconds is given.",
        Number(minimum=0.01),
    )
    max_seconds: float | None = _length_field(
        "The greatest length that a model chooses for the prompt.", Number(minimum=0.01)
    )
    fps: int | None = request_field(
        "Frames per second of the file.",
        Count(),
        pipeline_parameters=("frame_rate", "fps"),
        used_with=VIDEO,
        is_filled=True,
    )
    # Frames of the file for each of the model's (decoders/frame_interpolation.py), in as many seconds; None is one.
    interpolate: int | None = request_field(
        "Frames of the file for each one that the model makes, 2 to 4, in as many seconds: RIFE, with "
        "--interpolation-path.",
        Count(2, MAX_MULTIPLE),
        refusal=NO_INTERPOLATION,
    )
    num_inference_steps: int | None = _same_field("Denoising steps.", Count(), is_filled=True)
    # The steps of all stages after which the latents are left, to be finished later (generation/saved_latents.py).
    stop_after_step: int | None = request_field(
        "Stop after so many steps: the file is a preview, and `finish` goes on from --save-latents.", Count()
    )
    # Classifier-free guidance; 1 or less runs no negative branch. A model that was distilled from guidance takes it as
    # an input instead, and runs one branch.
    guidance_scale: float | None = _same_field(
        "How strongly to follow the prompt; 1 turns it off.", Number(), is_filled=True
    )
    # Classifier-free guidance of such a model, on top; 1 or less runs no negative branch.
    true_cfg_scale: float | None = _same_field(
        "Guidance by a second branch, for models that take --guidance-scale as an input.",
        Number(),
        refusal="this model's classifier-free guidance is guidance_scale; write --guidance-scale {value}",
    )
    # guidance_scale of the second expert, at low noise; None is the same.
    guidance_scale_2: float | None = _same_field(
        "Guidance of the expert for low noise, in models with two; a --guidance-scale alone is that of both.",
        Number(),
        refusal="this model has one expert, and guidance_scale is its scale; leave it out",
    )
    # The noise level, 0 to 1, from which up the expert for high noise predicts; None is as the folder says.
    boundary_ratio: float | None = request_field(
        "Noise level, 0 to 1, from which up the expert for high noise predicts, in models with two.",
        Number(minimum=0.001, maximum=0.999),
        refusal=NO_EXPERTS,
    )
    # One expert for every step; None is both, each at its noise levels.
    expert: str | None = request_field(
        f"{EXPERTS[0]} or {EXPERTS[1]}: every step by this expert alone, in models with two.",
        OneOf(EXPERTS),
        refusal=NO_EXPERTS,
    )
    # Steps from start on and before stop have guidance, shares of all steps; the others run the prompt's branch alone.
    guidance_start: float | None = _guidance_field(
        "Share of the steps, 0 to 1, from which on there is guidance; the others run the prompt alone.",
        Number(maximum=1.0),
        off=0.0,
    )
    guidance_stop: float | None = _guidance_field(
        "Share of the steps before which there is guidance.", Number(maximum=1.0), off=1.0
    )
    # CFG-zero* (denoising/zero_star.py): the unconditional branch scaled to be nearest to the conditional one; None is
    # off. First steps whose velocity is 0; None is 0.
    cfg_zero_star: str | None = _guidance_field(
        "on: CFG-zero*, the negative branch scaled to be nearest to the prompt's; comfyui: as its node CFGZeroStar "
        "computes that; or off. See docs/few_steps.md.",
        OneOf(ZERO_STAR),
        off="off",
    )
    zero_init_steps: int | None = request_field(
        "First steps that change nothing (zero-init of CFG-zero*), of which its authors take 4 %.",
        Count(minimum=0),
        off=0,
    )
    # What the second branch is given of the negative prompt; None is text.
    negative_encoding: str | None = request_field(
        "text, or zeros: in place of the encoded negative prompt, as ComfyUI's ConditioningZeroOut has it.",
        OneOf(NEGATIVE_ENCODINGS),
        used_with=NEGATIVE_TEXT,
        off="text",
    )
    # The share of the guided velocity that is brought to the conditional one's deviation; None is 0.
    guidance_rescale: float | None = _rescale_field(
        "Share of the guided velocity, 0 to 1, that is rescaled against overexposure.",
        Number(maximum=1.0),
        refusal="this model's guidance is not rescaled; leave it out",
    )
    # Normalized attention guidance, away from the negative prompt within attention (attention/normalized_guidance.py),
    # with guidance by a second branch or without; None and 1 are none. All three: a number, or pairs of an attention
    # role and a number.
    nag_scale: float | tuple[tuple[str, float], ...] | None = _nag_field(
        "Guidance away from the negative prompt within attention (NAG), for models without guidance too; 1 is none; "
        "one number, or one by attention role: cross=5,default=3.",
        ByRole(Number(minimum=1.0)),
        off=1.0,
    )
    # How much longer than without a token's result may become; None is 2.5. The share of the guided result; None is
    # 0.25.
    nag_tau: float | tuple[tuple[str, float], ...] | None = _nag_field(
        "How much longer --nag-scale may make the attention of a token, or that by role; left out, 2.5.",
        ByRole(Number(minimum=0.01)),
        used_with=ATTENTION_GUIDANCE,
    )
    nag_alpha: float | tuple[tuple[str, float], ...] | None = _nag_field(
        "Share of the guided attention in the result, 0 to 1, or that by role; left out, 0.25.",
        ByRole(Number(maximum=1.0)),
        used_with=ATTENTION_GUIDANCE,
    )
    # Spatio-temporal guidance, away from a prediction without self-attention in some blocks; None and 0 are none. The
    # blocks are counted from 0.
    stg_scale: float | None = _stg_field(
        "Spatio-temporal guidance, away from a prediction without self-attention in --stg-blocks; 0 is none.", Number()
    )
    stg_blocks: tuple[int, ...] | None = _stg_field(
        "Blocks of --stg-scale, counted from 0: 28.", Blocks(), pipeline_parameters=("spatio_temporal_guidance_blocks",)
    )
    # Skip-layer guidance, away from a prediction without some blocks, which are counted from 0: that of the negative
    # prompt, or with a scale one more of the prompt. Steps from start on and before stop have it, shares of all steps.
    skip_layers: tuple[int, ...] | None = request_field(
        "Blocks that the prediction of the negative prompt leaves out, counted from 0: 22.", Blocks()
    )
    skip_layer_scale: float | None = request_field(
        "Scale of one more prediction, of the prompt without --skip-layers, in its place; 0 is none.", Number()
    )
    skip_layer_start: float | None = request_field(
        "Share of the steps after which --skip-layers counts.", Number(maximum=1.0)
    )
    skip_layer_stop: float | None = request_field(
        "Share of the steps before which it counts; 0 turns it off.", Number(maximum=1.0)
    )
    # Modality guidance, away from a prediction whose pictures and sound do not attend to each other; None and 1 are
    # none.
    modality_scale: float | None = _sound_field(
        "Guidance towards pictures and sound that belong together; 1 is none.", Number()
    )
    # Guidance of the sound, where it is another than that of the pictures; None is the same.
    audio_guidance_scale: float | None = _sound_field("--guidance-scale of the sound; left out, the same.", Number())
    audio_stg_scale: float | None = _stg_field("--stg-scale of the sound; left out, the same.", Number())
    audio_modality_scale: float | None = _sound_field("--modality-scale of the sound; left out, the same.", Number())
    audio_guidance_rescale: float | None = _rescale_field(
        "--guidance-rescale of the sound; left out, the same.", Number(maximum=1.0), refusal=NO_SOUND
    )
    flow_shift: float | None = request_field(
        "Shift of the noise schedule towards high noise.", Number(minimum=1e-3), used_with=SHIFT, is_filled=True
    )
    # Noise levels of the steps as they run, for models distilled to some of their own: from 1 or less down, without the
    # 0 behind the last step. They say the number of steps, and no flow shift is applied.
    sigmas: tuple[float, ...] | None = request_field(
        "Noise level of every step, as it runs: 1,0.757,0.522. No flow shift is applied.", Levels()
    )
    # The same before the flow shift: sigma = s * t / (1 + (s - 1) * t).
    sigmas_before_shift: tuple[float, ...] | None = request_field(
        "The same before the flow shift, which is applied to them: 1,0.75,0.5,0.25.", Levels()
    )
    # The noise level of the last step, to which some models stretch the schedule; None is as the folder says, 0 off.
    shift_terminal: float | None = request_field(
        "Noise level of the last step, to which the schedule is stretched; 0 turns it off.",
        Number(maximum=0.999),
        used_with=SHIFT,
    )
    # Noise levels of a second stage at full size, after latents of half the height and width were upsampled. The first
    # is what they are noised to.
    second_stage_sigmas: tuple[float, ...] | None = _second_stage_field(
        "Noise level of every step of a second stage, with --upsampler-path: 0.909375,0.725,0.421875.", Levels()
    )
    # Whatever sampler the first stage has: the levels of a second one are its authors', for Euler steps.
    second_stage_sampler: str | None = _second_stage_field(
        f"Sampler of a second stage: {' or '.join(SECOND_STAGE_SAMPLERS)}.",
        SamplerName(SECOND_STAGE_SAMPLERS),
        off=None,
    )
    # Of the noise that the second stage begins with; None is what the first one's generator gives next.
    second_stage_seed: int | None = _second_stage_field(
        "Seed of the second stage's noise; the first one's generator goes on by default.", SeedNumber(), off=None
    )
    # How strongly the images of frame_conditions count in the second stage; None is as in the first.
    second_stage_strength: float | None = _second_stage_field(
        "How strongly the images of --condition-at count in the second stage, 0 to 1; as in the first by default.",
        Number(maximum=1.0),
        used_with=PLACED_IMAGES,
        off=None,
    )
    # What upsampled latents become before they are noised: each channel's mean and deviation those of the first stage's
    # (AdaIN), and large values made smaller.
    adain_factor: float | None = _second_stage_field(
        "How far each channel of upsampled latents gets the mean and deviation it had before, 0 to 1.",
        Number(maximum=1.0),
    )
    tone_map_compression_ratio: float | None = _second_stage_field(
        "How much large values of upsampled latents are compressed, 0 to 1.", Number(maximum=1.0)
    )
    sampler: str | None = request_field(
        f"{', '.join(SAMPLERS[:-1])} or {SAMPLERS[-1]}.", SamplerName(REGISTERED_SAMPLERS), is_filled=True
    )
    guidance_mode: str | None = request_field(
        "batched, or two_pass: half the memory, same result.", OneOf(GUIDANCE_MODES), used_with=GUIDANCE, is_filled=True
    )
    # Which steps may be left out (step_cache_options.py), with its options behind a colon; None computes every step.
    step_cache: str | None = request_field(
        f"Reuse steps that change little: {', '.join(StepCacheSettings.methods)}; options behind a colon, "
        "easycache:threshold=0.1. See docs/faster.md.",
        MethodText(StepCacheSettings, metavar="CACHE"),
    )
    # Early steps on smaller latents (progressive_options.py); None runs every step at full size.
    progressive_resolution: str | None = request_field(
        f"Run early steps at half the height and width: {', '.join(ProgressiveSettings.methods)}; options "
        "behind a colon, dct:delta=0.05. See docs/faster.md.",
        MethodText(ProgressiveSettings),
    )
    # Models that make a longer video in segments (denoising/segments.py), in frames of the video.
    segment_frames: int | None = _segment_field(
        "Frames of a longer video that are made together, in a segment.", Count()
    )
    segment_overlap: int | None = _segment_field("Frames that a segment shares with the one before.", Count(minimum=0))
    # Of the segments from the first on, so that one of them is made anew; those behind have the request's.
    segment_seeds: tuple[int, ...] | None = _segment_field(
        "A seed for each segment from the first on: 7,9,7; left out, and behind them, it is --seed.", Seeds()
    )
    # Clips longer than trained: predicted in overlapping windows (denoising/context_windows.py), in frames of the
    # video; or at once, with one frequency of the positions lowered (layers/riflex.py), counted from 1, the quickest.
    context_frames: int | None = _window_field(
        "Frames of a context window: a longer clip is predicted in overlapping windows. See docs/longer_clips.md.",
        Count(),
    )
    context_overlap: int | None = _window_field(
        "Frames that neighbouring context windows share, or more; left out, half of a window.", Count(minimum=0)
    )
    context_noise: str | None = _window_field(
        "repeated (the default): behind the first context window, the noise before is repeated in another order "
        "(FreeNoise); or random.",
        OneOf(CONTEXT_NOISES),
        off="random",
    )
    riflex: str | None = _riflex_field(
        "on lowers one frequency of the positions in time, for clips longer than trained; or off.",
        OneOf(("on", "off")),
        off="off",
    )
    riflex_index: int | None = _riflex_field(
        "Index of the frequency that --riflex lowers, from 1; left out, the model's.", Count()
    )
    # Models that make a video chunk by chunk (causal); a first_chunk_ field that is None is as of the other chunks.
    chunk_frames: int | None = _chunk_field(
        "Latent frames per chunk, in models that make a video chunk by chunk.", Count()
    )
    first_chunk_frames: int | None = _chunk_field(
        "Latent frames of the first chunk, where it has another number.", Count()
    )
    first_chunk_steps: int | None = _chunk_field(
        "Denoising steps of the first chunk, where it has another number.", Count()
    )
    first_chunk_flow_shift: float | None = _chunk_field(
        "Noise schedule shift of the first chunk, where it has another one.", Number(minimum=1e-3), used_with=SHIFT
    )
    first_chunk_sampler: str | None = _chunk_field(
        "Sampler of the first chunk, where it has another one. Without it --sampler is of every chunk.",
        SamplerName(REGISTERED_SAMPLERS),
    )
    guided_chunks: int | None = _chunk_field(
        "Chunks with guidance, from the first; later ones go on without it. Default: all.", Count(), used_with=GUIDANCE
    )
    guided_switch_chunks: int | None = _chunk_field(
        "Chunks with guidance from every new prompt on, where --guided-chunks has ended; 0 is none.",
        Count(minimum=0),
        used_with=GUIDED_CHUNKS,
        off=0,
    )
    chunk_schedule: str | None = _chunk_field(
        "sequential: one chunk after the other; rolling: as many at once as there are steps, each a step "
        "behind the one before it (Rolling Forcing).",
        OneOf(CHUNK_SCHEDULES),
    )
    kv_window: int | None = _chunk_field(
        "Latent frames in sight, the chunk's own and the sink included (key-value cache); 0 is all.", Count(minimum=0)
    )
    kv_sink: int | None = _chunk_field(
        "First latent frames of the video that stay in sight (attention sink).", Count(minimum=0)
    )
    commit_noise: float | None = _chunk_field(
        "Noise level, 0 to 1, at which a finished chunk's keys are computed (context noise).", Number(maximum=0.999)
    )
    positions: str | None = _chunk_field(
        "Frame positions of cached keys: absolute (in the video) or window (among those in sight).", OneOf(POSITIONS)
    )
    kv_cache_dtype: str | None = _chunk_field(
        "Committed keys and values are stored in: auto (as computed) or fp8_e4m3 (8 bits). See docs/causal_video.md.",
        OneOf(KV_CACHE_DTYPES),
    )
    # Tokens of a page of cached keys; None keeps them in a row.
    page_size: int | None = _chunk_field(
        "Tokens of a page of cached keys; divides a latent frame. See docs/causal_video.md.", Count(minimum=1)
    )
    # Other prompts on the way, (frame, prompt) each; a time as "5s" becomes the first frame of a chunk when the request
    # is resolved.
    prompt_switches: tuple[PromptSwitch, ...] | None = _switch_field(
        "Another prompt from a time of the video on: --at 5s 'a blue star'; again for further ones.",
        PromptSwitches(),
        flag="--at",
        refusal="this model makes a clip at once, of one prompt; leave --at out or use --model-path shapes-causal",
    )
    # The same of seeds: the noise of the chunks from there on, as in a fork of a stream.
    seed_switches: tuple[SeedSwitch, ...] | None = _switch_field(
        "Another seed from a time of the video on: --seed-at 5s 7; again for further ones.",
        SeedSwitches(),
        flag="--seed-at",
        refusal="this model makes a clip at once, of one seed; leave --seed-at out or use --model-path shapes-causal",
    )
    switch_mode: str | None = _chunk_field(
        "Cached keys at a new prompt: recache, recache_at_once (in one pass), or keep.", OneOf(SWITCH_MODES)
    )
    # The share of the steps after which the second branch of guidance is no longer computed; None or 1 computes all.
    cfg_gate: float | None = request_field(
        "Share of the steps, 0 to 1, after which the last difference of the guidance branches is reused.",
        Number(maximum=1.0),
        used_with=GUIDANCE,
    )
    # Of decoders that finish the denoising: the timestep in [0, 1] at which they decode, and how much noise is mixed
    # into the latents before; None is the same amount.
    decode_timestep: float | None = _same_field(
        "Noise level that the decoder is told of, 0 to 1, for decoders that take one.",
        Number(maximum=1.0),
        refusal="this model's decoder takes no noise level; leave it out",
    )
    decode_noise_scale: float | None = _same_field(
        "Share of noise that such a decoder's latents get, 0 to 1; left out, it is --decode-timestep.",
        Number(maximum=1.0),
        refusal="this model's decoder takes no noise; leave it out",
    )
    # The image that a video starts from, or those to edit; None is text alone.
    image_path: str | tuple[str, ...] | None = _input_field(
        "The image a video starts from, or to edit; again for each further one, where a model takes several.",
        ImageFile(several=True),
        pipeline_parameters=("image", "control_image", "reference_images"),
        refusal="this model makes {product} from text alone; leave it out",
    )
    last_image_path: str | None = _input_field(
        "The image a video ends with, for models that take one beside --image-path.",
        ImageFile(),
        pipeline_parameters=("last_image",),
        refusal="this model takes no image to end with; leave it out",
    )
    frame_conditions: tuple[FrameCondition, ...] | None = _input_field(
        "An image at a frame of the video, counted from 0, and how strongly it counts, 0 to 1: "
        "48:middle.png@0.8; again for further ones.",
        FrameConditions(),
        flag="--condition-at",
        refusal="this model takes no images at frames of their own; leave --condition-at out",
    )
    # Frames from one keyframe that the model makes beside the video to the next; None makes none.
    keyframe_interval: int | None = request_field(
        "Frames from one keyframe to the next, 24 or 32, of those that LTX-2.5 makes beside the video for its detail.",
        Count(),
        refusal="this model makes no keyframes beside a video, as LTX-2.5 does; leave it out",
    )
    # What the video shows or sounds like, in an order that the prompt can refer to: <Picture 1>, <Audio 1>, <Video 1>.
    references: tuple[str, ...] | None = _input_field(
        "An image, a video or a sound that the video refers to; again for each further one, in the order that counts.",
        MediaFiles(),
        flag="--reference",
        refusal="this model takes no references, as minimax-h3-ref2va does, or a folder of MiniMax-H3 with --workflow "
        "ref2va; leave --reference out",
    )
    video_path: str | None = _input_field(
        "A control video (depth, pose, edges), one to make parts of anew (--mask-path), or to restore.",
        VideoFile(),
        pipeline_parameters=("video", "control_video", "conditioning_frames"),
        refusal="this model takes no control video; leave it out",
    )
    # What denoising starts from in place of noise alone (denoising/initial_latents.py): never a condition of the model,
    # as the fields above are. None begins with noise.
    init_path: str | None = _input_field(
        "A picture or a video to start from, noised to --strength: image to image, video to video.",
        VideoFile(),
        refusal=NO_INITIAL,
    )
    # The share of the steps that run, the last ones. None beside init_path: sigmas that begin below 1 say it.
    strength: float | None = request_field(
        "How much of --init-path is made anew: this share of the steps runs, 0 to 1; 1 is noise alone. Default: 0.6.",
        Number(maximum=1.0),
        panel=WHAT,
        pipeline_parameters=OWN_NAME,
    )
    # Of models that restore a video (models/video_restoration.py): the first frame of the file that is read, and how
    # the colours of the file are kept.
    video_first_frame: int | None = _restoration_field(
        "The first frame of --video-path that is restored, counted from 0.", Count(minimum=0)
    )
    color_correction: str | None = _restoration_field(
        f"How the colours of the video are kept: {', '.join(COLOR_CORRECTIONS[:-1])} or {COLOR_CORRECTIONS[-1]}.",
        OneOf(COLOR_CORRECTIONS),
    )
    # The sound that a video is made for; None is one of the model's own, where it makes any.
    audio_path: str | None = _input_field(
        "The sound a video is made for (speech, music), for models that make pictures and sound together.",
        SoundFile(),
        refusal="this model takes no sound; leave it out",
    )
    # The constant rate factor of H.264 that the images are compressed with before they are encoded, as the videos that
    # the model was trained on are; 0 leaves them as they are.
    image_crf: int | None = _same_field(
        "H.264 quality (CRF, 1 to 51) to which images are compressed before the model sees them; 0: not.",
        Count(minimum=0, maximum=51),
        refusal="this model compresses no images; leave it out",
        used_with=IMAGES,
    )
    # The mask of a part of the image or of the control video, of its size, for models that are made for it; for others
    # of a part of init_path. White is what is made anew.
    mask_path: str | None = _input_field(
        "The mask of --init-path (inpainting), or of --image-path or --video-path in models that take one with it: "
        "white is made anew.",
        MaskFile(),
        pipeline_parameters=("mask_image", "mask", "mask_video", "control_mask"),
        refusal="this model takes no mask; leave it out",
    )
    # The masks of the images of image_path, one for each in their order, of their sizes, in the colours of characters.
    image_mask_path: str | tuple[str, ...] | None = _input_field(
        "The mask of --image-path, in the colours of characters, for models that animate them; again for each further "
        "image.",
        ImageFile(several=True),
        refusal="this model takes no masks in the colours of characters, as SCAIL-2 does; leave it out",
    )
    # What becomes of the characters of a driving video.
    character_mode: str | None = request_field(
        "animate: the characters of the images move as in --video-path; replace: they take the place of its own.",
        OneOf(CHARACTER_MODES),
        refusal="this model animates no characters by masks, as SCAIL-2 does; leave it out",
        off=CHARACTER_MODES[0],
    )
    # How much the control blocks add, one number or one for each; None is 1.
    conditioning_scale: float | tuple[float, ...] | None = _input_field(
        "How strongly a control image or video counts; one number, or one for each control block.",
        Scales(),
        pipeline_parameters=("conditioning_scale", "controlnet_conditioning_scale"),
        refusal="this model has no control blocks; leave it out",
    )
    # Where in the steps a ControlNet counts, from 0 to 1; None is all of them.
    control_guidance_start: float | None = _controlnet_field(
        "Part of the steps, 0 to 1, after which a ControlNet begins to count.", Number(0.0, 1.0)
    )
    control_guidance_end: float | None = _controlnet_field(
        "Part of the steps after which a ControlNet counts no more.", Number(0.0, 1.0)
    )
    # How noise follows from the seed (denoising/noise.py); None is own.
    noise: str | None = request_field(
        "own, or comfyui: numbers as its samplers draw them on a CPU for this seed. See docs/workflows.md.",
        OneOf(NOISES),
        refusal="the order of numbers in ComfyUI's latents of this model is not known here; leave it out",
        off="own",
    )
    # Of the CPU generator that draws the noise, so that every device starts alike.
    seed: int = _prompt_field(
        "7, or several: 1,2 or 1-4 or the flag again. Each prompt is made with each.", SeedNumber(), default=0
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, declared = getattr(self, item.name), RequestField.of(item.metadata)
            if value is None and item.default is None:
                continue
            value = declared.check.read(value)
            object.__setattr__(self, item.name, value)
            if value is None and item.default is None:
                continue
            declared.check(item.name, value)
        if self.sigmas is not None and self.sigmas_before_shift is not None:
            raise RequestError(
                "sigmas, sigmas_before_shift: expected one of them, got both; sigmas are the noise levels that run, "
                "sigmas_before_shift those that flow_shift is applied to"
            )
        if self.seconds is not None and self.num_frames is not None:
            raise RequestError("seconds, num_frames: expected one of them, got both; each says how long the video is")

    @property
    def generated_keyframes(self) -> tuple[int, ...]:
        """The frames of the video at which keyframes are made beside it, of a resolved request."""
        return keyframes_between(self.num_frames or 1, self.keyframe_interval, self.frame_conditions)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """This request with every None replaced by the value of the same name in `defaults`; as in `layered`, a
        guidance_scale of its own stands for both experts, a sampler for every chunk, and its noise levels go with its
        number of steps."""
        own = {name: value for name, value in self.to_dict().items() if value is not None}
        missing = {name: value for name, value in layered(defaults, own).items() if name not in own}
        return dataclasses.replace(self, **missing)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them, for a recipe."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def recorded(self) -> dict[str, Any]:
        """Return `to_dict` as recipes hold it: images that were values by their digests, fetched ones by address."""
        values = self.to_dict()
        return {**values, **{name: recorded_images(values[name]) for name in INPUT_FIELDS}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The request a mapping describes. Raises RequestError that names an unknown key and the nearest valid one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise RequestError(f"request: unknown key {shown(key)}.{nearest(key, known)}")
        if "prompt" not in values:
            raise RequestError("request: 'prompt' is missing")
        return cls(**values)


# By name, in the order of the class.
REQUEST_FIELDS: Mapping[str, RequestField] = MappingProxyType(
    {item.name: RequestField.of(item.metadata) for item in dataclasses.fields(GenerationRequest)}
)


def _fields_of(*checks: type) -> tuple[str, ...]:
    return tuple(name for name, declared in REQUEST_FIELDS.items() if isinstance(declared.check, checks))


# The fields that name an image, a video or its mask, and any file, in the order of the class.
IMAGE_FIELDS = _fields_of(ImageFile)
VIDEO_FIELDS = _fields_of(VideoFile, MaskFile)
INPUT_FIELDS = _fields_of(ImageFile, InputFile)
# Those of a second stage.
OF_SECOND_STAGE = tuple(name for name, declared in REQUEST_FIELDS.items() if declared.refusal == NO_UPSAMPLER)


def image_paths(request: GenerationRequest, field: str) -> tuple[str, ...]:
    """The paths of the files that a request names in one of INPUT_FIELDS, in their order."""
    return paths_of(field, getattr(request, field))


def paths_of(field: str, value: Any) -> tuple[str, ...]:
    """Return the paths in the value of one of INPUT_FIELDS, in their order."""
    if value is None:
        return ()
    if isinstance(REQUEST_FIELDS[field].check, FrameConditions):
        return tuple(path for _, path, _ in value)
    return (value,) if isinstance(value, str) else tuple(value)


def too_many_images(field: str, paths: Sequence[str], expected: int) -> str:
    """For a RequestError: how many images a field may name, and which it names."""
    given, but_one = ", ".join(map(shown, paths)), "all but one" if expected == 1 else f"all but {expected}"
    noun = {"video_path": "video", "init_path": "picture or video", "audio_path": "sound file"}.get(field, "image")
    several = f"one {noun}" if expected == 1 else f"at most {expected} {noun}s"
    return f"{field}: expected {several}, got {len(paths)}: {given}; leave {but_one} out"


def request_field_types() -> dict[str, type]:
    """Name and plain type (str, int, float) of every field, for code that parses text into one."""
    return {name: declared.check.kind for name, declared in REQUEST_FIELDS.items()}


def is_set(request: GenerationRequest, name: str) -> bool:
    """Return whether a request says anything of a field."""
    return bool(getattr(request, name) != UNSET[name])


# What every field is in a request that sets none.
UNSET = GenerationRequest("-").to_dict()
