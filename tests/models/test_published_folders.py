"""Every key of published folders is honoured or known to change nothing, and another one ends a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_configs import PUBLISHED, write_published
from tables import table

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.loading.native_model import PreparedModel
from diffusion_runtime.models.registry import family_for_folder

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")

# Read by transformers, which keeps every key.
LIBRARY_FILES = ("text_encoder", "tokenizer", "image_encoder", "feature_extractor", "image_processor", "processor")


def dry_run(folder: Path, workflow: str | None = None) -> str:
    return inspect_pipeline(RuntimeConfig(str(folder), device="cpu", dtype="bfloat16", workflow=workflow)).family


# Parameters of the transformers; those of Wan 2.2 A14B are two.
NUM_PARAMETERS = {
    "Wan2.1-T2V-1.3B-Diffusers": 1_418_996_800,
    "Wan2.1-T2V-14B-Diffusers": 14_288_491_584,
    "AnyFlow-Wan2.1-T2V-1.3B-Diffusers": 1_421_752_384,
    "AnyFlow-Wan2.1-T2V-14B-Diffusers": 14_316_026_944,
    "AnyFlow-FAR-Wan2.1-1.3B-Diffusers": 1_422_147_136,
    "AnyFlow-FAR-Wan2.1-14B-Diffusers": 14_317_342_784,
    "Wan2.1-VACE-1.3B-diffusers": 2_153_972_032,
    "Wan2.1-VACE-14B-diffusers": 17_337_592_896,
    "Wan2.2-T2V-A14B-Diffusers": 2 * 14_288_491_584,
    "Wan2.2-TI2V-5B-Diffusers": 4_999_787_712,
    "Wan2.2-I2V-A14B-Diffusers": 2 * 14_288_901_184,
    "Wan2.1-I2V-14B-480P-Diffusers": 16_394_878_784,
    "Wan2.1-I2V-14B-720P-Diffusers": 16_394_878_784,
    "Wan2.1-FLF2V-14B-720P-diffusers": 16_395_536_704,
    **dict.fromkeys(("Wan2.2-Animate-2-14B-Diffusers", "Wan2.2-Animate-2-14B-Distilled-Diffusers"), 16_394_878_784),
    "HunyuanVideo": 12_821_012_544,
    "HunyuanVideo-I2V": 12_821_012_544,
    "HunyuanVideo-I2V-33ch": 12_810_991_680,
    "HunyuanVideo-1.5-Diffusers-480p_t2v": 8_326_608_160,
    "HunyuanVideo-1.5-Diffusers-480p_i2v": 8_326_608_160,
    "Qwen-Image": 20_430_401_088,
    "Qwen-Image-Edit": 20_430_401_088,
    "Qwen-Image-Edit-2509": 20_430_401_088,
    "Qwen-Image-Edit-2511": 20_430_401_088,
    "Qwen-Image-2.1": 7_115_124_736,
    "Qwen-Image-2.1-Turbo": 7_115_124_736,
    "FLUX.1-dev": 11_901_408_320,
    "FLUX.1-Canny-dev": 11_901_604_928,
    "FLUX.1-Depth-dev": 11_901_604_928,
    "FLUX.1-Fill-dev": 11_902_391_360,
    "FLUX.1-Kontext-dev": 11_901_408_320,
    "FLUX.1-schnell": 11_891_178_560,
    "FLUX.2-dev": 32_223_281_152,
    "FLUX.2-klein-4B": 3_875_544_576,
    "FLUX.2-klein-9B": 9_078_581_248,
    "FLUX.2-klein-9b-kv": 9_078_581_248,
    "FLUX.2-klein-base-4B": 3_875_544_576,
    "FLUX.2-klein-base-9B": 9_078_581_248,
    "flux-3-image-klein": 5_548_681_984,
    "flux-3-image-klein-base": 5_538_458_368,
    "LTX-2": 18_876_174_592,
    **dict.fromkeys(("LTX-2.3-Diffusers", "LTX-2.3-Distilled-Diffusers"), 18_988_838_144),
    # Without the biases of the video's feed-forward networks. The embedding of generated keyframes is not counted.
    "LTX-2.5-Diffusers": 18_988_838_144 - 48 * (16384 + 4096) + 4096,
    **dict.fromkeys(("LTX-Video", "LTX-Video-0.9.1"), 1_923_385_472),
    **dict.fromkeys(
        ("LTX-Video-0.9.7-dev", "LTX-Video-0.9.7-distilled", "LTX-Video-0.9.8-13B-distilled"), 13_042_569_344
    ),
    "LongCat-Image": 6_270_668_864,
    "MiniMax-H3": 33_122_992_896,
    **dict.fromkeys(("FastVideo-FastH3-4-step-Preview-v1-VSA-DataFree", "FastVideo-FastH3-8-Step-V2"), 35_049_751_296),
    "Anima-Base-v1.0-Diffusers": 2_091_068_928,
    **dict.fromkeys(("MOSS-Image-SFT", "MOSS-Image-Base"), 5_082_308_608),
    "Z-Image-Turbo": 6_154_908_736,
    "Z-Image": 6_154_908_736,
    **dict.fromkeys(("Krea-2-Turbo", "Krea-2-Raw"), 12_820_073_036),
    # Of the 7B model without what its last block has of the text behind its attention, which nothing reads.
    "SCAIL-2": 16_395_544_384,
    "SeedVR2-3B": 3_391_475_776,
    "SeedVR2-7B": 8_154_654_784,
}

# The sampling presets of those that are recognised as of few steps.
RECOGNISED = {
    "FLUX.1-schnell": "schnell",
    "FLUX.2-klein-4B": "klein-4",
    "FLUX.2-klein-9B": "klein-4",
    "FLUX.2-klein-9b-kv": "klein-4",
    "flux-3-image-klein": "klein-16",
    "Z-Image-Turbo": "turbo-8",
    "Krea-2-Turbo": "turbo-8",
    "FastVideo-FastH3-4-step-Preview-v1-VSA-DataFree": "fasth3-4",
    "FastVideo-FastH3-8-Step-V2": "fasth3-8",
}


def test_every_published_folder_has_a_size() -> None:
    assert set(NUM_PARAMETERS) == set(PUBLISHED) > set(RECOGNISED)


@table(("name", "num_parameters"), NUM_PARAMETERS.items(), NUM_PARAMETERS)
def test_a_published_folder_is_understood_and_builds_without_memory(
    name: str, num_parameters: int, tmp_path: Path
) -> None:
    folder = write_published(tmp_path, name)
    prepared = prepare(RuntimeConfig(str(folder), device="cpu", dtype="bfloat16"), is_dry_run=True)
    assert isinstance(prepared, PreparedModel)
    assert prepared.description.family == family_for_folder(folder).name
    parameters = list(prepared.transformer.parameters())
    assert sum(parameter.numel() for parameter in parameters) == num_parameters
    assert all(parameter.is_meta for parameter in parameters)
    few_steps = prepared.rules.preset_rules.few_steps
    assert (few_steps and few_steps.presets[0].name) == RECOGNISED.get(name)


@table("name", PUBLISHED)
def test_a_key_that_nobody_knows_ends_a_dry_run(name: str, tmp_path: Path) -> None:
    write_published(tmp_path, name)
    for file, values in PUBLISHED[name].items():
        # LTX-2.5's second decoder is read with --vae-decoder diffusion alone; FastVideo's file is no config.
        if file.startswith((*LIBRARY_FILES, "diffusion_decoder/", "fastvideo_inference.json")):
            continue
        (tmp_path / file).write_text(json.dumps({**values, "a_key_of_the_future": 1}))
        # Of a transformer that takes the place of the first one.
        workflow = "ref2va" if file.startswith("transformer_ref/") else None
        with pytest.raises(ModelLoadError, match="'a_key_of_the_future'") as caught:
            dry_run(tmp_path, workflow)
        assert str(tmp_path / file) in str(caught.value)
        (tmp_path / file).write_text(json.dumps(values))


def test_a_decoder_of_another_class_ends_a_dry_run(tmp_path: Path) -> None:
    write_published(tmp_path, "Z-Image")
    index = {**PUBLISHED["Z-Image"]["model_index.json"], "vae": ["diffusers", "AutoencoderTiny"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="key 'vae': expected AutoencoderKL, got AutoencoderTiny"):
        dry_run(tmp_path)


@table(
    ("name", "pipeline"),
    [
        ("Wan2.1-T2V-1.3B-Diffusers", "WanVideoToVideoPipeline"),
        ("HunyuanVideo", "HunyuanSkyreelsImageToVideoPipeline"),
        ("LTX-2", "LTX2InContextPipeline"),
    ],
)
def test_a_folder_of_another_pipeline_is_refused_with_what_runs_it(name: str, pipeline: str, tmp_path: Path) -> None:
    write_published(tmp_path, name)
    index = {**PUBLISHED[name]["model_index.json"], "_class_name": pipeline}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=rf"key '_class_name'.* got '{pipeline}'.*`--backend diffusers` runs it"):
        dry_run(tmp_path)


@table(
    ("name", "changes"),
    [
        # Wan 2.1 Fun-Control: a control video beside the image.
        ("Wan2.1-T2V-1.3B-Diffusers", {"in_channels": 48}),
        # SkyReels.
        ("HunyuanVideo", {"in_channels": 32}),
        ("FLUX.1-dev", {"in_channels": 384, "out_channels": 64}),
        ("FLUX.2-dev", {"in_channels": 256, "out_channels": 128}),
        ("Qwen-Image", {"in_channels": 128}),
    ],
)
def test_a_checkpoint_with_an_image_as_input_is_refused_with_what_runs_it(
    name: str, changes: dict[str, object], tmp_path: Path
) -> None:
    write_published(tmp_path, name)
    values = {**PUBLISHED[name]["transformer/config.json"], **changes}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"transformer/config.json: key.*`--backend diffusers` runs"):
        dry_run(tmp_path)
