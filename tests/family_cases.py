"""What tests that hold for every family read: one case per family, of its tiny folder and of what it may not say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = "transformer/config.json"
EULER_SIGMAS = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class Refusal:
    """Values that a json file may not hold, and what the error says (a regular expression). `...` takes a key out."""

    values: Mapping[str, Any]
    told: str
    file: str = CONFIG


def in_file(file: str, told: str, **values: Any) -> Refusal:
    return Refusal(values, told, file)


def missing(*keys: str) -> tuple[Refusal, ...]:
    """Keys of the transformer that have no default."""
    return tuple(Refusal({key: ...}, rf"{CONFIG}: key '{key}' is missing") for key in keys)


def misfits(*values: tuple[str, Any]) -> tuple[Refusal, ...]:
    """Values of the transformer's keys that are of another type or of a model that this runtime has not."""
    return tuple(Refusal({key: value}, rf"{CONFIG}: key '{key}': expected .*, got ") for key, value in values)


def latents_of(width: int) -> dict[str, Any]:
    """An autoencoder that fits itself and no transformer of another width."""
    return {"z_dim": width, "latents_mean": [0.0] * width, "latents_std": [1.0] * width}


def change(folder: Path, file: str, values: Mapping[str, Any]) -> Path:
    """Set keys of a json file; `...` takes a key out. Returns the folder."""
    path = folder / file
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    return folder


@contextmanager
def changed(folder: Path, file: str, values: Mapping[str, Any]) -> Iterator[None]:
    """As `change`, and as it was behind it."""
    before = (folder / file).read_text()
    change(folder, file, values)
    try:
        yield
    finally:
        (folder / file).write_text(before)


@dataclass(frozen=True)
class FamilyCase:
    """geometry: channels, pixels per latent, frames per latent, patch. sigmas: of four steps at shift 1, where the
    folder's scheduler is Euler's. flow_shift: of the folder; None where it follows the size.

    filled: fields that the model's defaults fill and others leave open.

    layers: the number of attention layers per role; one_of: of how many a layer says it is one, where that is another
    number; runs_once: roles that run once per request and branch; of_images: roles that run for images alone;
    decoder_roles: of attention in the decoder. text_modules: what projects the text, once as well.

    refusals: found by reading json alone, without a weight; text_refusals: by loading the text encoder; text_files:
    each is needed for that, with what is said without it. other_size: values of the transformer that its weights do not
    fit, and what the error says of them.
    """

    geometry: tuple[int, int, int, tuple[int, int, int]]
    layers: Mapping[str, int]
    refusals: tuple[Refusal, ...]
    other_size: tuple[Mapping[str, Any], tuple[str, ...]]
    embeds_guidance: bool = False
    takes_image: bool = False
    filled: frozenset[str] = frozenset()
    sigmas: tuple[float, ...] | None = EULER_SIGMAS
    flow_shift: float | None = None
    text_refusals: tuple[Refusal, ...] = ()
    text_files: tuple[tuple[str, str], ...] = ()
    text_modules: tuple[str, ...] = ("text_embedding",)
    one_of: Mapping[str, int] = field(default_factory=dict)
    runs_once: frozenset[str] = frozenset()
    of_images: frozenset[str] = frozenset()
    decoder_roles: frozenset[str] = frozenset()


SCHEDULER = "scheduler/scheduler_config.json"
VAE = "vae/config.json"
INDEX = "model_index.json"
CONDITIONER = "text_conditioner/config.json"
EXPERTS = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}

_STATISTICS = ("latents_mean", "latents_std")
LTX2_SOUND_ROLES = ("ltx2.audio_self", "ltx2.audio_cross", "ltx2.audio_to_video", "ltx2.video_to_audio")

FAMILIES = {
    "wan": FamilyCase(
        geometry=(16, 8, 4, (1, 2, 2)),
        flow_shift=3.0,
        layers={"self": 2, "cross": 2},
        sigmas=None,
        refusals=(
            *missing("patch_size", "num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim"),
            *missing("text_dim", "freq_dim"),
            *misfits(("patch_size", [1, 2]), ("patch_size", 2), ("num_layers", 0), ("num_layers", "2")),
            *misfits(("attention_head_dim", 15), ("freq_dim", 7), ("ffn_dim", 1.5), ("eps", "small")),
            *misfits(("cross_attn_norm", 1), ("qk_norm", "rms_norm")),
            # Image to video: channels beside the latents, and tokens of an image encoder.
            Refusal({"in_channels": 36}, "'_class_name': expected WanImageToVideoPipeline, got 'WanPipeline'"),
            in_file(INDEX, r"16 in_channels has no room for an image", _class_name="WanImageToVideoPipeline"),
            Refusal({"in_channels": 48}, r"'in_channels' \(48\) .* expected equal .* 4 of a mask and 16 of encoded"),
            *misfits(("out_channels", 17), ("added_kv_proj_dim", 65), ("pos_embed_seq_len", 514)),
            Refusal({"image_dim": 24}, "keys 'image_dim' and 'added_kv_proj_dim' belong together.* 24 and None"),
            Refusal({"image_dim": 24, "added_kv_proj_dim": 64}, "key 'image_dim': expected null where in_channels"),
            # Two experts and the boundary between them belong together.
            Refusal(EXPERTS, "model_index.json: keys 'transformer_2' and 'boundary_ratio'", INDEX),
            in_file(INDEX, "model_index.json: keys 'transformer_2' and 'boundary_ratio'", boundary_ratio=0.875),
            *(
                Refusal(
                    {**EXPERTS, "boundary_ratio": value},
                    "key 'boundary_ratio': expected a number between 0 and 1",
                    INDEX,
                )
                for value in (0, 1, 1.5, -0.1)
            ),
            Refusal(
                {**EXPERTS, "boundary_ratio": 0.9, "expand_timesteps": True},
                "key 'expand_timesteps': expected false in a model of two experts",
                INDEX,
            ),
            Refusal(latents_of(48), "vae/config.json: key 'z_dim': expected 16", VAE),
        ),
        other_size=(
            {"ffn_dim": 100, "num_layers": 3},
            ("blocks.2.attn1.to_q.weight", "blocks.0.ffn.net.0.proj.weight is [96, 64], expected [100, 64]"),
        ),
    ),
    "flux1": FamilyCase(
        geometry=(4, 2, 1, (1, 2, 2)),
        layers={"self": 4},
        embeds_guidance=True,
        refusals=(
            *missing("in_channels", "num_layers", "num_single_layers", "attention_head_dim", "joint_attention_dim"),
            *misfits(("patch_size", 2), ("in_channels", 18), ("num_layers", "2"), ("guidance_embeds", 1)),
            *misfits(("axes_dims_rope", [4, 6, 8]), ("axes_dims_rope", [5, 5, 6]), ("axes_dims_rope", [16])),
            Refusal(
                {"in_channels": 96, "out_channels": 16}, r"'in_channels' \(96\) and 'out_channels' \(16\): expected 16"
            ),
            Refusal({"out_channels": 32}, r"key 'out_channels': expected 16 \(in_channels\) or less, got 32"),
            in_file(INDEX, "expected 32 in_channels for FluxControlPipeline", _class_name="FluxControlPipeline"),
            in_file(INDEX, "expected 48 in_channels for FluxFillPipeline", _class_name="FluxFillPipeline"),
            Refusal({"guidance_embed": True}, "'guidance_embed' is unknown .* Did you mean 'guidance_embeds'"),
            in_file(VAE, "vae/config.json: key 'latent_channels': expected 4", latent_channels=16),
            in_file(SCHEDULER, "max_image_seq_len: expected more than base_image_seq_len", max_image_seq_len=100),
            in_file(SCHEDULER, "base_shift: expected a number, got 'half'", base_shift="half"),
            in_file(SCHEDULER, "time_shift_type: expected one of", time_shift_type="cubic"),
        ),
        other_size=(
            {"num_single_layers": 3, "pooled_projection_dim": 24},
            (
                "single_transformer_blocks.2.norm.linear.weight",
                "text_embedder.linear_1.weight is [32, 32], expected [32, 24]",
            ),
        ),
    ),
    "longcat_image": FamilyCase(
        geometry=(4, 2, 1, (1, 2, 2)),
        layers={"self": 4},
        refusals=(
            *missing("in_channels", "num_layers", "num_single_layers", "attention_head_dim", "joint_attention_dim"),
            *misfits(("patch_size", 2), ("in_channels", 18), ("axes_dims_rope", [4, 6, 8])),
            # Of FLUX.1's transformer; this one has neither.
            Refusal({"guidance_embeds": False}, "key 'guidance_embeds' is unknown to this runtime"),
            Refusal({"out_channels": 16}, "key 'out_channels' is unknown to this runtime"),
            in_file(INDEX, "expected LongCatImagePipeline", _class_name="LongCatImageEditPipeline"),
        ),
        other_size=({"num_single_layers": 3}, ("single_transformer_blocks.2.norm.linear.weight",)),
    ),
    "flux2": FamilyCase(
        geometry=(8, 4, 1, (1, 1, 1)),
        layers={"self": 4},
        embeds_guidance=True,
        takes_image=True,
        refusals=(
            *(
                Refusal({key: value}, rf"{CONFIG}: key.*'{key}'.*{told}")
                for key, value, told in (
                    ("patch_size", 2, "expected 1"),
                    ("in_channels", 6, "a multiple of 4"),
                    ("out_channels", 16, "expected 8, in_channels: a transformer that takes latents alone"),
                    ("axes_dims_rope", [4, 4, 4, 2], "even numbers whose sum is attention_head_dim, 16"),
                    ("axes_dims_rope", [8, 8], "a list of 4 whole numbers"),
                    ("timestep_guidance_channels", 31, "an even number"),
                    ("guidance_embeds", False, r"expected true in a folder of FLUX.2 \[dev\]"),
                )
            ),
            in_file(VAE, "expected 2, a quarter of the transformer's in_channels", latent_channels=4),
            in_file(VAE, r"expected \[2, 2\]", patch_size=[1, 1]),
            in_file(INDEX, "no native model for what that pipeline", _class_name="Flux2KleinInpaintPipeline"),
            in_file(INDEX, r"expected false in a folder of FLUX.2 \[klein\]", _class_name="Flux2KleinPipeline"),
        ),
        other_size=({"num_single_layers": 3}, ("single_transformer_blocks.2.attn.to_qkv_mlp_proj.weight",)),
        text_refusals=(
            Refusal(
                {"joint_attention_dim": 64}, "48 numbers per token, and the transformer takes joint_attention_dim, 64"
            ),
            in_file("text_encoder/config.json", "model_type: expected 'mistral3', got 'llama'", model_type="llama"),
        ),
    ),
    "flux3": FamilyCase(
        geometry=(8, 4, 1, (1, 1, 1)),
        flow_shift=6.93,
        layers={"flux3.text_self": 2, "flux3.reference_self": 2, "self": 5},
        one_of={"flux3.text_self": 5, "flux3.reference_self": 5},
        runs_once=frozenset({"flux3.text_self"}),
        of_images=frozenset({"flux3.reference_self"}),
        takes_image=True,
        refusals=(
            *(
                Refusal({key: value}, rf"{CONFIG}: key '{key}': .*{told}")
                for key, value, told in (
                    ("in_channels", 6, "a multiple of 4"),
                    ("cond_in_channels", 16, "expected 8, in_channels"),
                    ("axes_dims_rope", [4, 4, 4, 2], "even numbers whose sum is attention_head_dim, 16"),
                    ("timestep_channels", 31, "an even number"),
                    ("flow_map", True, "expected false in a folder whose model_index.json says Flux3Pipeline"),
                )
            ),
            in_file(VAE, "expected 2, a quarter of the transformer's in_channels", latent_channels=4),
            in_file(VAE, r"expected \[2, 2\]", patch_size=[1, 1]),
            in_file(INDEX, "expected false|no native model for what that pipeline", _class_name="Flux2KleinPipeline"),
        ),
        other_size=({"num_single_layers": 4}, ("single_transformer_blocks.3.attn.to_q.weight",)),
        text_refusals=(
            Refusal(
                {"joint_attention_dim": 64}, "128 numbers per token, and the transformer takes joint_attention_dim, 64"
            ),
            in_file("text_encoder/config.json", "model_type: expected 'qwen3_vl', got 'llama'", model_type="llama"),
        ),
    ),
    "qwen_image": FamilyCase(
        geometry=(4, 4, 1, (1, 2, 2)),
        layers={"self": 3},
        refusals=(
            *missing("in_channels", "out_channels", "num_layers", "joint_attention_dim"),
            *misfits(("patch_size", 1), ("num_layers", 0), ("guidance_embeds", True), ("zero_cond_t", 1)),
            *misfits(("axes_dims_rope", [4, 6, 8]), ("axes_dims_rope", [5, 5, 6])),
            *misfits(("use_additional_t_cond", True), ("use_layer3d_rope", True)),
            Refusal({"in_channels": 32}, r"'in_channels' \(32\) and 'out_channels' \(4\)"),
            in_file(
                INDEX,
                "model_index.json: key '_class_name': expected QwenImagePipeline",
                _class_name="QwenImageInpaintPipeline",
            ),
            Refusal(latents_of(16), "vae/config.json: key 'z_dim': expected 4", VAE),
        ),
        other_size=(
            {"num_layers": 4, "joint_attention_dim": 24},
            ("transformer_blocks.3.img_mod.1.weight", "txt_norm.weight is [32], expected [24]"),
        ),
    ),
    "qwen_image_21": FamilyCase(
        geometry=(6, 16, 1, (1, 1, 1)),
        layers={"self": 3},
        refusals=(
            *missing("num_layers"),
            *misfits(("patch_size", 2), ("num_layers", 0), ("causal_condition", False), ("mlp_ratio", 0)),
            *misfits(("axes_dims_rope", [4, 6, 8]), ("axes_dims_rope", [5, 5, 6])),
            Refusal({"out_channels": 12}, "'out_channels': expected 6, in_channels: a transformer that takes latents"),
            Refusal({"zero_cond_t": True}, "key 'zero_cond_t'"),
            in_file(
                INDEX,
                "model_index.json: key '_class_name': expected QwenImage21Pipeline",
                _class_name="QwenImageEditPipeline",
            ),
            in_file(INDEX, "model_index.json: key 'sample_sigmas': expected a list of noise levels", sample_sigmas=8),
            in_file(VAE, "vae/config.json: key 'out_channels': expected 4, red, green", out_channels=5),
            Refusal(latents_of(16), "vae/config.json: key 'z_dim': expected 6", VAE),
        ),
        other_size=(
            {"num_layers": 4, "context_in_dim": 24},
            ("transformer_blocks.3.attn.to_q.weight", "txt_in.text_norm.weight is [32], expected [24]"),
        ),
        text_refusals=(in_file("text_encoder/config.json", "model_type: expected 'qwen3_vl'", model_type="qwen3"),),
        text_files=(("processor/tokenizer.json", r"processor/\S+ is missing"),),
    ),
    "hunyuan_video": FamilyCase(
        geometry=(16, 8, 4, (1, 2, 2)),
        flow_shift=7.0,
        layers={"hunyuan_video.text_refiner": 2, "self": 4},
        text_modules=("refiner.projection",),
        embeds_guidance=True,
        refusals=(
            *missing("in_channels", "num_layers", "num_attention_heads", "attention_head_dim", "text_embed_dim"),
            *missing("rope_axes_dim"),
            *misfits(("patch_size", 0), ("num_single_layers", "2"), ("mlp_ratio", "four"), ("guidance_embeds", 1)),
            *misfits(("qk_norm", "layer_norm"), ("rope_axes_dim", [4, 6])),
            *misfits(("rope_axes_dim", [4, 6, 8]), ("rope_axes_dim", [5, 5, 6])),
            Refusal({"image_condition_type": "token_replace"}, "expected HunyuanVideoImageToVideoPipeline"),
            Refusal({"image_condition_type": "latent_concat"}, r"'in_channels' \(16\).* expected 33 in_channels"),
            Refusal({"in_channels": 33}, r"'in_channels' \(33\).* expected 16 in_channels"),
            in_file(SCHEDULER, "use_dynamic_shifting", use_dynamic_shifting=True),
            in_file(VAE, "vae/config.json: key 'latent_channels': expected 16", latent_channels=32),
        ),
        other_size=(
            {"mlp_ratio": 3.0, "num_layers": 3},
            (
                "transformer_blocks.2.attn.to_q.weight",
                "transformer_blocks.0.ff.net.0.proj.weight is [128, 32], expected [96, 32]",
            ),
        ),
        text_refusals=(
            in_file("text_encoder/config.json", "model_type: expected 'llama', got 'umt5'", model_type="umt5"),
        ),
        text_files=(
            ("text_encoder/config.json", "text_encoder/config.json"),
            ("text_encoder/model.safetensors", "text_encoder"),
            ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
            ("text_encoder_2/config.json", "text_encoder_2/config.json"),
            ("tokenizer_2/tokenizer.json", "tokenizer_2/vocab.json is missing"),
        ),
    ),
    "hunyuan_video_15": FamilyCase(
        geometry=(8, 4, 4, (1, 1, 1)),
        flow_shift=5.0,
        layers={"hunyuan_video_15.text_refiner": 2, "self": 2},
        text_modules=("text.refiner.projection", "text.glyphs"),
        refusals=(
            *missing("in_channels", "out_channels", "num_layers", "text_embed_dim", "text_embed_2_dim"),
            *missing("image_embed_dim"),
            *misfits(("in_channels", 8), ("patch_size", 0), ("mlp_ratio", "four"), ("qk_norm", "layer_norm")),
            *misfits(("rope_axes_dim", [4, 6, 8]), ("rope_axes_dim", [5, 5, 6])),
            *misfits(("task_type", "upscale"), ("use_meanflow", "yes")),
            in_file(VAE, "vae/config.json: key 'latent_channels': expected 8", latent_channels=32),
            in_file(
                INDEX,
                "key '_class_name': expected HunyuanVideo15Pipeline or",
                _class_name="HunyuanVideo15UpscalePipeline",
            ),
        ),
        other_size=(
            {"mlp_ratio": 3.0, "num_layers": 3},
            (
                "transformer_blocks.2.attn.to_q.weight",
                "transformer_blocks.0.ff.net.0.proj.weight is [128, 32], expected [96, 32]",
            ),
        ),
        text_files=(
            ("text_encoder/config.json", "text_encoder/config.json"),
            ("tokenizer/tokenizer.json", "tokenizer/vocab.json is missing"),
            ("text_encoder_2/model.safetensors", "text_encoder_2"),
            ("tokenizer_2/tokenizer_config.json", "tokenizer_2/tokenizer_config.json is missing"),
        ),
    ),
    "ltx2": FamilyCase(
        geometry=(6, 32, 8, (1, 1, 1)),
        takes_image=True,
        filled=frozenset({"image_crf"}),
        layers=dict.fromkeys(("self", "cross", *LTX2_SOUND_ROLES), 2),
        text_modules=("video.text_embedding", "audio.text_embedding"),
        refusals=(
            *missing("in_channels", "audio_in_channels", "num_layers", "num_attention_heads", "caption_channels"),
            *misfits(("patch_size", 2), ("audio_patch_size", 2), ("qk_norm", "layer_norm"), ("rope_type", "spiral")),
            *misfits(("vae_scale_factors", [8, 32]), ("attention_head_dim", 15), ("cross_attention_dim", 16)),
            *misfits(("audio_cross_attention_dim", 32), ("out_channels", 12), ("norm_elementwise_affine", True)),
            # Between 2.0 and 2.3, and other types.
            *misfits(
                ("ff_bias", 1), ("use_prompt_adaln_single", "no"), ("audio_cross_attn_mod", True), ("gated_attn", 1)
            ),
            Refusal(
                {"audio_num_attention_heads": 4, "audio_attention_head_dim": 4},
                "key 'audio_num_attention_heads': expected 2, num_attention_heads, got 4",
            ),
            in_file(
                INDEX, "expected LTX2Pipeline or .* got 'LTX2InContextPipeline'", _class_name="LTX2InContextPipeline"
            ),
            in_file(VAE, "vae/config.json: key 'latent_channels': expected 6", latent_channels=32),
            in_file(VAE, "key 'timestep_conditioning': expected false", timestep_conditioning=True),
            in_file(VAE, "key 'decoder_inject_noise'", decoder_inject_noise=[False, True, False, False]),
            in_file(
                "audio_vae/config.json",
                r"audio_vae/config.json: keys 'latent_channels' \(2\) and 'mel_bins' \(64\)",
                mel_bins=64,
            ),
            in_file(INDEX, "key 'vocoder': expected LTX2Vocoder or LTX2Vo.*, got Other", vocoder=["ltx2", "Other"]),
        ),
        other_size=(
            {"caption_channels": 16, "num_layers": 3},
            (
                "transformer_blocks.2.scale_shift_table",
                "caption_projection.linear_1.weight is [32, 32], expected [32, 16]",
            ),
        ),
        text_refusals=(
            in_file(
                "text_encoder/config.json",
                "model_type: expected 'gemma3' or 'gemma3_text' or 'gemma4_unified' or .*, got 'gemma4'",
                model_type="gemma4",
            ),
            *(
                Refusal({key: value}, told, "connectors/config.json")
                for key, value, told in (
                    ("caption_channels", 31, "key 'caption_channels': expected 32"),
                    ("text_proj_in_factor", 49, "key 'text_proj_in_factor': expected 4"),
                    ("audio_connector_attention_head_dim", 8, r"_dim' \(8\): expected their product to be 32"),
                    ("video_connector_num_learnable_registers", 100, "expected a number that divides 1024"),
                )
            ),
        ),
        text_files=(
            ("text_encoder/config.json", "text_encoder/config.json"),
            ("text_encoder/model.safetensors", "text_encoder"),
            ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
            ("connectors/config.json", "connectors/config.json"),
            ("connectors/diffusion_pytorch_model.safetensors", "connectors"),
        ),
    ),
    "ltx_video": FamilyCase(
        geometry=(6, 32, 8, (1, 1, 1)),
        takes_image=True,
        filled=frozenset({"decode_timestep", "decode_noise_scale"}),
        layers={"self": 2, "cross": 2},
        refusals=(
            *missing("in_channels", "num_layers", "num_attention_heads", "attention_head_dim", "caption_channels"),
            *missing("cross_attention_dim"),
            *misfits(("patch_size", 2), ("patch_size_t", 2), ("qk_norm", "layer_norm"), ("attention_bias", False)),
            *misfits(
                ("attention_head_dim", 15), ("cross_attention_dim", 16), ("out_channels", 12), ("num_layers", "2")
            ),
            in_file(INDEX, "expected LTXPipeline or .* got 'LTXLatentUpsam", _class_name="LTXLatentUpsamplePipeline"),
            in_file(VAE, "vae/config.json: key 'latent_channels': expected 6", latent_channels=32),
            in_file(VAE, "key 'timestep_conditioning': expected true or false", timestep_conditioning=1),
            in_file(VAE, "vae/config.json: AutoencoderKLLTXVideo refuses these", spatio_temporal_scaling=[True]),
        ),
        other_size=(
            {"caption_channels": 16, "num_layers": 3},
            (
                "transformer_blocks.2.scale_shift_table",
                "caption_projection.linear_1.weight is [32, 32], expected [32, 16]",
            ),
        ),
        text_refusals=(
            in_file("text_encoder/config.json", "model_type: expected 't5', got 'umt5'", model_type="umt5"),
        ),
        text_files=(
            ("text_encoder/config.json", "text_encoder/config.json"),
            ("text_encoder/model.safetensors", "text_encoder"),
            ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
        ),
    ),
    "z_image": FamilyCase(
        geometry=(4, 2, 1, (1, 2, 2)),
        flow_shift=3.0,
        layers={"z_image.text_refiner": 2, "self": 4},
        one_of={"z_image.text_refiner": 4},
        runs_once=frozenset({"z_image.text_refiner"}),
        refusals=tuple(
            Refusal({key: value}, rf"{CONFIG}: key '{key}'.*{told}")
            for key, value, told in (
                ("all_patch_size", [4], r"expected \[2\], the only value"),
                ("siglip_feat_dim", 1152, "expected null, the only value"),
                ("qk_norm", False, "expected true"),
                ("n_kv_heads", 1, "expected n_heads, 3"),
                ("axes_dims", [4, 6, 8], "even numbers whose sum is the head size, 16"),
                ("dim", 50, "a multiple of n_heads, 3"),
            )
        ),
        other_size=({"n_layers": 3}, ("layers.2.attention.to_q.weight",)),
    ),
    "krea2": FamilyCase(
        geometry=(4, 4, 1, (1, 2, 2)),
        layers={"krea2.text_layers": 2, "krea2.text_refiner": 2, "self": 3},
        runs_once=frozenset({"krea2.text_layers", "krea2.text_refiner"}),
        refusals=(
            *misfits(("num_layers", 0), ("in_channels", 18), ("num_key_value_heads", 3)),
            *misfits(("text_num_key_value_heads", 3), ("axes_dims_rope", [4, 6, 8]), ("timestep_embed_dim", 15)),
            Refusal(
                {"text_hidden_dim": 30}, "key 'text_num_attention_heads': expected a divisor of text_hidden_dim, 30"
            ),
            Refusal({"out_channels": 16}, "key 'out_channels'"),
            in_file(INDEX, "model_index.json: key 'patch_size': expected 2, .* got 1", patch_size=1),
            in_file(
                INDEX,
                "'text_encoder_select_layers': expected the numbers of 3 layers .* num_text_layers, got",
                text_encoder_select_layers=[1, 2],
            ),
            in_file(INDEX, "'text_encoder_select_layers': expected the", text_encoder_select_layers=[1, 2, "last"]),
            in_file(INDEX, "key 'is_distilled': expected true or false", is_distilled="yes"),
            Refusal(latents_of(16), "vae/config.json: key 'z_dim': expected 4", VAE),
        ),
        other_size=({"num_layers": 4}, ("transformer_blocks.3.attn.to_q.weight",)),
        text_refusals=(
            in_file("text_encoder/config.json", "model_type: expected 'qwen3_vl'", model_type="qwen3"),
            in_file(INDEX, "num_hidden_layers: expected more than 3", text_encoder_select_layers=[1, 2, 3]),
        ),
        text_files=(("tokenizer/tokenizer.json", r"tokenizer/\S+ is missing"),),
    ),
    "anima": FamilyCase(
        geometry=(4, 4, 1, (1, 2, 2)),
        flow_shift=3.0,
        layers={"anima.text_self": 2, "anima.text_states": 2, "self": 3, "cross": 3},
        text_modules=(),
        runs_once=frozenset({"anima.text_self", "anima.text_states"}),
        refusals=(
            *misfits(("num_layers", 0), ("out_channels", 3), ("attention_head_dim", 10), ("patch_size", [1, 1, 1])),
            *misfits(("rope_scale", [1.0, 4.0]), ("rope_scale", [1.0, 0.0, 4.0]), ("concat_padding_mask", 1)),
            *misfits(("extra_pos_embed_type", "learnable"), ("use_crossattn_projection", True)),
            *misfits(("img_context_dim_in", 1152), ("controlnet_block_every_n", 7)),
            Refusal(
                {"text_embed_dim": 48}, "key 'text_embed_dim': expected 40, target_dim of text_conditioner, got 48"
            ),
            Refusal({"qk_norm": "rms_norm"}, "key 'qk_norm' is unknown to this runtime"),
            in_file(CONDITIONER, "key 'model_dim': expected an even number for each of num_att", model_dim=50),
            in_file(CONDITIONER, "key 'use_layer_norm': expected false, the only value", use_layer_norm=True),
            in_file(CONDITIONER, "key 'use_self_attention': expected true, the only", use_self_attention=False),
            in_file(SCHEDULER, "use_dynamic_shifting: expected False for a anima", use_dynamic_shifting=True),
            in_file(INDEX, "expected AnimaPipeline, got 'Cosmos2TextToImage", _class_name="Cosmos2TextToImagePipeline"),
            Refusal(latents_of(16), "vae/config.json: key 'z_dim': expected 4", VAE),
        ),
        other_size=({"num_layers": 4}, ("transformer_blocks.3.attn1.to_q.weight",)),
        text_refusals=(
            in_file("text_encoder/config.json", "model_type: expected 'qwen3'", model_type="llama"),
            in_file(CONDITIONER, "its states are 32 wide, and the text conditioner takes source_dim", source_dim=48),
            in_file(CONDITIONER, r"t5_tokenizer: has \d+ tokens", target_vocab_size=20),
        ),
        text_files=(("t5_tokenizer/tokenizer.json", r"t5_tokenizer/\S+ is missing"),),
    ),
    "moss_image": FamilyCase(
        geometry=(8, 4, 1, (1, 1, 1)),
        flow_shift=5.0,
        # Its levels follow from the number of steps and the shift together.
        sigmas=None,
        layers={"moss_image.text_refiner": 2, "self": 3},
        runs_once=frozenset({"moss_image.text_refiner"}),
        refusals=(
            *misfits(("num_layers", 0), ("dim", 36), ("num_heads", 0), ("freq_dim", 15), ("latent_channels", 6)),
            *misfits(("rope_base", "large"), ("text_dim", 1.5)),
            Refusal({"patch_size": 1}, "key 'patch_size' is unknown to this runtime"),
            in_file(SCHEDULER, "training_shift: expected a number above 0, got 0", training_shift=0),
            in_file(VAE, "vae/config.json: key 'latent_channels': expected 2", latent_channels=16),
            in_file(INDEX, "expected MOSSImagePipeline, got 'MOSSImageEdit", _class_name="MOSSImageEditPipeline"),
        ),
        other_size=({"num_layers": 4}, ("layers.3.proj.q.weight",)),
        text_refusals=(
            in_file("text_encoder/config.json", "model_type: expected 'qwen3_5'", model_type="qwen3"),
            Refusal({"text_dim": 48}, "its states are 32 wide, and the transformer takes text_dim, 48"),
        ),
        text_files=(("tokenizer/tokenizer.json", r"tokenizer/\S+ is missing"),),
    ),
    "minimax_h3": FamilyCase(
        geometry=(6, 16, 4, (1, 2, 2)),
        takes_image=True,
        flow_shift=12.0,
        layers={"self": 3, "minimax_h3.text_refiner": 2},
        runs_once=frozenset({"minimax_h3.text_refiner"}),
        decoder_roles=frozenset({"minimax_h3.video_decoder"}),
        refusals=(
            *misfits(("patch_size", [1, 1, 1]), ("num_layers", 0), ("attention_head_dim", 10), ("freq_dim", 31)),
            *misfits(("norm_eps", "small"), ("ffn_dim", 1.5), ("num_refiner_layers", -1), ("rope_freq_dim", 0)),
            Refusal({"rope_freq_dim": 3}, "key 'attention_head_dim': expected 18, 6 x rope_freq_dim, or more, got 16"),
            in_file(INDEX, "expected MiniMaxH3Pipeline, got 'MiniMaxM2Pipeline'", _class_name="MiniMaxM2Pipeline"),
            in_file(
                VAE, "key 'latent_channels': expected 6", latent_channels=2, **dict.fromkeys(_STATISTICS, [1.0] * 2)
            ),
            in_file(
                "audio_vae/config.json",
                "key 'latent_channels': expected 5",
                latent_channels=4,
                **dict.fromkeys(_STATISTICS, [1.0] * 4),
            ),
            in_file("audio_vae/config.json", "'sampling_rate': expected 8000, 40 x encoder_r", sampling_rate=32000),
            in_file("audio_scheduler/scheduler_config.json", "key 'shift': expected a number above 0, got 0", shift=0),
            in_file(SCHEDULER, "scheduler_config.json: key 'shift' is missing", shift=...),
        ),
        other_size=(
            {"num_layers": 4, "ffn_dim": 48},
            (
                "transformer_blocks.3.adaln_proj.linear.weight",
                "ff.net.0.proj.weight is [80, 24], expected [96, 24]",
            ),
        ),
        text_refusals=(in_file("text_encoder/config.json", "expected 'qwen3_vl', got 'qwen3'", model_type="qwen3"),),
        text_files=(
            ("text_encoder/config.json", "text_encoder/config.json"),
            ("text_encoder/model.safetensors", "text_encoder"),
            ("tokenizer/tokenizer.json", "tokenizer/vocab.json is missing"),
        ),
    ),
    "scail_2": FamilyCase(
        geometry=(16, 8, 4, (1, 2, 2)),
        takes_image=True,
        filled=frozenset({"segment_frames", "segment_overlap", "character_mode"}),
        flow_shift=3.0,
        layers={"self": 2, "cross": 2, "wan.image_cross": 2},
        sigmas=None,
        refusals=(
            *misfits(("patch_size", [2, 2, 2]), ("num_layers", 0), ("dim", 66), ("freq_dim", 7), ("ffn_dim", 1.5)),
            *misfits(("in_dim", 16), ("in_dim", 36), ("mask_dim", 21), ("text_len", 0), ("eps", "small")),
            *misfits(("model_type", "t2v"), ("pose_rope_shift", [0, 0, 60]), ("qk_norm", False)),
            in_file(INDEX, "expected SCAIL2Pipeline, got 'SCAILPipeline'", _class_name="SCAILPipeline"),
            Refusal(latents_of(48), "vae/config.json: key 'z_dim': expected 16", VAE),
        ),
        other_size=(
            {"ffn_dim": 100, "num_layers": 3},
            ("blocks.2.self_attn.q.weight", "blocks.0.ffn.0.weight is [96, 64], expected [100, 64]"),
        ),
    ),
    "wan_animate_2": FamilyCase(
        geometry=(16, 8, 4, (1, 2, 2)),
        takes_image=True,
        filled=frozenset({"segment_frames", "segment_overlap"}),
        flow_shift=5.0,
        layers={"self": 2, "cross": 2, "wan_animate_2.reference": 2},
        sigmas=None,
        refusals=(
            *misfits(("patch_size", [2, 2, 2]), ("num_layers", 0), ("dim", 66), ("freq_dim", 7), ("ffn_dim", 1.5)),
            *misfits(("in_dim", 16), ("in_dim", 32), ("text_len", 0), ("use_img_emb", 1), ("eps", "small")),
            *misfits(("refer_offset_t", -2), ("refer_offset_w", 512), ("refer_stride", 0)),
            in_file(INDEX, "expected WanAnimate2Pipeline or WanAn", _class_name="WanAnimatePipeline"),
            Refusal(latents_of(48), "vae/config.json: key 'z_dim': expected 16", VAE),
        ),
        other_size=(
            {"ffn_dim": 100, "num_layers": 3},
            ("blocks.2.self_attn.to_q.weight", "blocks.0.ffn.0.weight is [96, 64], expected [100, 64]"),
        ),
    ),
}
