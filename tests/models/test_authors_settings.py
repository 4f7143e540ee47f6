"""Published models by name against what their authors' own programs run, field by field; and the page that says where a
folder and its authors differ."""

# Wan's negative prompts are Chinese.
# ruff: noqa: RUF001

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import REPOSITORY
from PIL import Image

from diffusion_runtime import GenerationRequest
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.denoising.schedule_loop import ScheduleSampler
from diffusion_runtime.loading.model_rules import request_rules_of
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS, find_configs
from diffusion_runtime.models.published import published_models
from diffusion_runtime.models.published_folders import published_folders
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.rules.request_rules import RequestRules

PAGE = REPOSITORY / "docs" / "few_steps.md"
SECTION = "## Published models: their folders and their authors"
HEADER = ("model", "its folder, by hub id or path", "its authors", "by name")
WAN_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，"
    "残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，"
    "三条腿，背景人很多，倒着走"
)
SIZES_480P = frozenset({(480, 832), (832, 480)})
SIZES = SIZES_480P | {(720, 1280), (1280, 720)}
QWEN_SIZES = frozenset({(1328, 1328), (928, 1664), (1664, 928), (1104, 1472), (1472, 1104), (1056, 1584), (1584, 1056)})


@dataclass(frozen=True)
class Authors:
    """What the authors' program runs without further arguments. origin: repository at a commit, and files. sizes:
    (height, width) that it takes, None for any. boundary: from which share of the noise the first expert predicts.
    presets: of published.yaml by name, where they say other values for the preset's size."""

    origin: str
    values: Mapping[str, Any]
    sizes: frozenset[tuple[int, int]] | None = None
    boundary: float | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


WAN21 = "Wan-Video/Wan2.1 at 9737cba9: generate.py, wan/configs"
WAN22 = "Wan-Video/Wan2.2 at 42bf4cfa: wan/configs/wan_{}.py, shared_config.py"
BFL = "black-forest-labs/flux at 802fb471: src/flux/{}"
BFL3 = "black-forest-labs/flux-3-image-klein in November 2026: README.md"
QWEN = "QwenLM/Qwen-Image at 6b5e1f5c: README.md"
ANIMA = "comfyui-workflow-templates-json 0.1.123: image_anima_base_v1"
MOSS = "sglang 0.5.23: configs/sample/moss_image.py, of OpenMOSS-Team/MOSS-Image-Base at 355120bd"
KREA2 = "krea-ai/krea-2 at db3984fb: README.md"
LTXV = "Lightricks/LTX-Video at 5260738e: configs/{}, ltx_video/inference.py"
LTX2 = "Lightricks/LTX-2 at 400fd310: packages/ltx-pipelines/src/ltx_pipelines/utils/constants.py"
CLIP = {"num_frames": 81, "fps": 16, "sampler": "unipc", "negative_prompt": WAN_NEGATIVE}
ANY_STEP = Authors(
    "NVlabs/AnyFlow at 03f546f5: app.py",
    {"height": 480, "width": 832, "num_frames": 81, "fps": 16, "num_inference_steps": 4, "negative_prompt": ""},
    SIZES_480P,
)
LTX_VIDEO = {"height": 704, "width": 1216, "num_frames": 121, "fps": 30, "decode_timestep": 0.05}
LTX_VIDEO |= {
    "decode_noise_scale": 0.025,
    "negative_prompt": "worst quality, inconsistent motion, blurry, jittery, distorted",
}
LTXV_2B = {**LTX_VIDEO, "num_inference_steps": 40, "guidance_scale": 3.0, "guidance_rescale": 0.7}
LTXV_DISTILLED = {**LTX_VIDEO, "guidance_scale": 1.0, "num_inference_steps": 7}
LTX_TWO = {"height": 512, "width": 768, "num_frames": 121, "fps": 24, "image_crf": 33}
LTX_TWO_GUIDED = {
    **LTX_TWO,
    **{"guidance_scale": 3.0, "stg_scale": 1.0, "guidance_rescale": 0.7, "modality_scale": 3.0},
    "audio_guidance_scale": 7.0,
}
QWEN_EDIT = {"num_inference_steps": 40, "guidance_scale": 4.0, "negative_prompt": " "}

AUTHORS: dict[str, Authors] = {
    # Its README recommends this scale and a shift of 8 to 12 for 1.3 B; the program itself starts from 5 and 5.
    "wan2.1-1.3b": Authors(
        f"{WAN21}, README.md",
        {"num_inference_steps": 50, "guidance_scale": 6.0, "flow_shift": 8.0, **CLIP},
        SIZES_480P,
    ),
    "wan2.1-14b": Authors(
        WAN21,
        {"num_inference_steps": 50, "guidance_scale": 5.0, "flow_shift": 5.0, **CLIP},
        SIZES,
        presets={"large": {"flow_shift": 5.0}},
    ),
    "wan2.1-vace-1.3b": Authors(
        WAN21, {"num_inference_steps": 50, "guidance_scale": 5.0, "flow_shift": 16.0, **CLIP}, SIZES_480P
    ),
    "wan2.1-vace-14b": Authors(
        WAN21,
        {"num_inference_steps": 50, "guidance_scale": 5.0, "flow_shift": 16.0, **CLIP},
        SIZES,
        presets={"large": {"flow_shift": 16.0}},
    ),
    "wan2.1-i2v-14b-480p": Authors(
        WAN21,
        {"num_inference_steps": 40, "guidance_scale": 5.0, "flow_shift": 3.0, **CLIP}
        | {"negative_prompt": f"镜头晃动，{WAN_NEGATIVE}"},
        SIZES,
    ),
    "wan2.1-i2v-14b-720p": Authors(
        WAN21,
        {"num_inference_steps": 40, "guidance_scale": 5.0, "flow_shift": 5.0, **CLIP}
        | {"negative_prompt": f"镜头晃动，{WAN_NEGATIVE}"},
        SIZES,
        presets={"draft": {"flow_shift": 3.0}},
    ),
    "wan2.1-flf2v-14b-720p": Authors(
        WAN21,
        {"num_inference_steps": 50, "guidance_scale": 5.0, "flow_shift": 16.0, **CLIP}
        | {"negative_prompt": f"镜头切换，镜头晃动，{WAN_NEGATIVE}"},
        SIZES,
        presets={"draft": {"flow_shift": 16.0}},
    ),
    "wan2.2-ti2v-5b": Authors(
        WAN22.format("ti2v_5B"),
        {"num_inference_steps": 50, "guidance_scale": 5.0, "flow_shift": 5.0, **CLIP, "num_frames": 121, "fps": 24},
        frozenset({(704, 1280), (1280, 704)}),
    ),
    "wan2.2-t2v-a14b": Authors(
        WAN22.format("t2v_A14B"),
        # sample_guide_scale is (low noise, high noise) there.
        {"num_inference_steps": 40, "guidance_scale": 4.0, "guidance_scale_2": 3.0, "flow_shift": 12.0, **CLIP},
        SIZES,
        boundary=0.875,
        presets={"draft": {"flow_shift": 12.0}},
    ),
    "wan2.2-i2v-a14b": Authors(
        WAN22.format("i2v_A14B"),
        {"num_inference_steps": 40, "guidance_scale": 3.5, "guidance_scale_2": 3.5, "flow_shift": 5.0, **CLIP},
        SIZES,
        boundary=0.9,
        presets={"draft": {"flow_shift": 5.0}},
    ),
    **dict.fromkeys(("anyflow-1.3b", "anyflow-14b", "anyflow-far-1.3b", "anyflow-far-14b"), ANY_STEP),
    "z-image-turbo": Authors(
        "Tongyi-MAI/Z-Image at c7ec1357: inference.py, src/config",
        {"height": 1024, "width": 1024, "num_inference_steps": 8, "guidance_scale": 0.0, "flow_shift": 3.0},
    ),
    # Steps alone: the model came after this program.
    "z-image": Authors("Tongyi-MAI/Z-Image at c7ec1357: README.md", {"num_inference_steps": 50}),
    "krea-2-turbo": Authors(KREA2, {"num_inference_steps": 8, "guidance_scale": 0.0, "flow_shift": math.exp(1.15)}),
    "anima-base": Authors(ANIMA, {"num_inference_steps": 30, "guidance_scale": 4.0, "flow_shift": 3.0}),
    **dict.fromkeys(
        ("moss-image-sft", "moss-image-base"),
        Authors(
            MOSS,
            {
                **{"num_inference_steps": 50, "guidance_scale": 3.0, "flow_shift": 5.0},
                **{"skip_layers": (22,), "skip_layer_start": 0.01},
            },
        ),
    ),
    "krea-2-raw": Authors(KREA2, {"num_inference_steps": 52, "guidance_scale": 3.5}),
    # One default for several models; until June 2025 it was 3.5, as diffusers' is.
    "flux.1-dev": Authors(BFL.format("cli.py"), {"num_inference_steps": 50, "guidance_scale": 2.5}),
    "flux.1-schnell": Authors(BFL.format("cli.py"), {"num_inference_steps": 4, "flow_shift": 1.0}),
    "flux.1-canny-dev": Authors(BFL.format("cli_control.py"), {"num_inference_steps": 50, "guidance_scale": 30.0}),
    "flux.1-depth-dev": Authors(BFL.format("cli_control.py"), {"num_inference_steps": 50, "guidance_scale": 10.0}),
    "flux.1-fill-dev": Authors(BFL.format("cli_fill.py"), {"num_inference_steps": 50, "guidance_scale": 30.0}),
    "flux.1-kontext-dev": Authors(BFL.format("cli_kontext.py"), {"num_inference_steps": 30, "guidance_scale": 2.5}),
    "flux.2-dev": Authors(
        "black-forest-labs/flux2 at ab7cca68: scripts/cli.py", {"num_inference_steps": 50, "guidance_scale": 4.0}
    ),
    "flux.3-image-klein": Authors(BFL3, {"num_inference_steps": 16}),
    "flux.3-image-klein-base": Authors(BFL3, {"num_inference_steps": 50, "guidance_scale": 4.0}),
    "longcat-image": Authors(
        "meituan-longcat/LongCat-Image at 39fd2251: README.md",
        {"height": 768, "width": 1344, "num_inference_steps": 50, "guidance_scale": 4.0},
    ),
    "qwen-image": Authors(QWEN, {"num_inference_steps": 50, "guidance_scale": 4.0, "negative_prompt": " "}, QWEN_SIZES),
    "qwen-image-edit": Authors(QWEN, {**QWEN_EDIT, "num_inference_steps": 50}),
    "qwen-image-edit-2509": Authors(QWEN, QWEN_EDIT),
    "qwen-image-edit-2511": Authors(QWEN, QWEN_EDIT),
    "hunyuan-video": Authors(
        "Tencent-Hunyuan/HunyuanVideo at fa14b001: hyvideo/config.py, sample_video.py",
        {"height": 720, "width": 1280, "num_frames": 129, "fps": 24, "num_inference_steps": 50}
        | {"guidance_scale": 6.0, "flow_shift": 7.0},
    ),
    # Its README's stable videos; 17 for much motion, which the program starts from.
    "hunyuan-video-i2v": Authors(
        "Tencent-Hunyuan/HunyuanVideo-I2V at 1481c1d5: README.md (--i2v-stability)",
        {"num_frames": 129, "num_inference_steps": 50, "guidance_scale": 6.0, "flow_shift": 7.0},
    ),
    **dict.fromkeys(
        ("hunyuan-video-1.5-t2v", "hunyuan-video-1.5-i2v"),
        Authors(
            "Tencent-Hunyuan/HunyuanVideo-1.5 at 60783e70: hyvideo/commons/__init__.py, generate.py, README.md",
            {"num_frames": 121, "fps": 24, "num_inference_steps": 50, "guidance_scale": 6.0, "flow_shift": 5.0},
        ),
    ),
    # Guidance as at its release (9ce438b8) was a scale of 4 alone.
    "ltx-2": Authors(LTX2, {**LTX_TWO_GUIDED, "num_inference_steps": 40, "stg_blocks": (29,)}),
    "ltx-2.3": Authors(LTX2, {**LTX_TWO_GUIDED, "num_inference_steps": 30, "stg_blocks": (28,)}),
    "ltx-2.3-distilled": Authors(
        LTX2,
        {**LTX_TWO, "sigmas": (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875), "guidance_scale": 1.0},
    ),
    "ltx-video-0.9.0": Authors(LTXV.format("ltxv-2b-0.9.yaml"), LTXV_2B),
    "ltx-video-0.9.1": Authors(LTXV.format("ltxv-2b-0.9.1.yaml"), LTXV_2B),
    "ltx-video-0.9.7-dev": Authors(
        LTXV.format("ltxv-13b-0.9.7-dev.yaml (at 93af686)"), {**LTX_VIDEO, "num_inference_steps": 30}
    ),
    **dict.fromkeys(
        ("ltx-video-0.9.7-distilled", "ltx-video-0.9.8-distilled"),
        Authors(LTXV.format("ltxv-13b-0.9.8-distilled.yaml"), LTXV_DISTILLED),
    ),
}
# Nothing of these is in a program of their authors that could be read; of SeedVR2 and SCAIL-2, whose requests name a
# video, what is there is compared in tests/models/seedvr2 and tests/models/scail_2.
UNREAD = {
    *("flux.2-klein-4b", "flux.2-klein-base-4b", "flux.2-klein-9b", "flux.2-klein-9b-kv", "flux.2-klein-base-9b"),
    *("qwen-image-2.1", "qwen-image-2.1-turbo", "hunyuan-video-i2v-33ch", "ltx-2.5", "minimax-h3", "minimax-h3-ref2va"),
    *("wan2.2-animate-2-14b", "wan2.2-animate-2-14b-distilled", "scail-2-14b"),
    *("seedvr2-3b", "seedvr2-7b", "fasth3-4-step", "fasth3-8-step"),
}
# What runs by name and is not the authors': each has a reason on the page.
OTHERS_RUN: dict[str, AbstractSet[str]] = {
    "flux.1-dev": {"guidance_scale"},
    "ltx-2": {
        "guidance_scale",
        "stg_scale",
        "guidance_rescale",
        "modality_scale",
        "audio_guidance_scale",
        "stg_blocks",
    },
    **dict.fromkeys(
        ("ltx-video-0.9.0", "ltx-video-0.9.1"),
        frozenset({"height", "width", "num_frames", "fps", "num_inference_steps", "guidance_rescale"}),
    ),
    "ltx-video-0.9.7-dev": {"height", "width", "num_frames", "fps"},
    **dict.fromkeys(
        ("ltx-video-0.9.7-distilled", "ltx-video-0.9.8-distilled"),
        frozenset({"height", "width", "num_frames", "fps", "num_inference_steps", "negative_prompt"}),
    ),
}
# LTX-Video 0.9.0's decoder takes no noise, and has no fields for it.
NOT_TAKEN = {"ltx-video-0.9.0": {"decode_timestep", "decode_noise_scale"}}
MODELS = {model.name: model for model in published_models() if model.model_path not in EMBEDDED_FOLDERS}


@functools.cache
def rules_of(model_path: str) -> RequestRules:
    """The rules of requests, without a transformer: test_published_folders.py builds each."""
    config = RuntimeConfig(model_path, device="cpu", offline=True)
    found = find_configs(model_path, offline=True)
    folder = ModelFolder(found.path, found.downloads_gb, is_packaged=found.is_packaged)
    return request_rules_of(family_for_folder(folder).open(folder), config)


def resolved(rules: RequestRules, folder: Path, preset: str | None = None) -> GenerationRequest:
    """A prompt, and the images that the model needs."""
    image = folder / "image.png"
    if not image.exists():
        Image.new("RGB", (832, 480), "white").save(image)
    sizes = (
        {}
        if "image_path" not in rules.inputs.needed or rules.inputs.references is not None
        else {"height": 480, "width": 832}
    )
    sizes = sizes if rules.inputs.size_of_image is None else {}
    return rules.resolve(
        GenerationRequest("a", **sizes, **dict.fromkeys(rules.inputs.needed, str(image))),
        preset,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def requests_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Of each model in AUTHORS, the request values by its hub id and by its name."""
    folder = tmp_path_factory.mktemp("images")

    def values(model_path: str) -> Mapping[str, Any]:
        rules = rules_of(model_path)
        # Sizes of images' models are what a request without any is given.
        return {**resolved(rules, folder).to_dict(), **{k: rules.defaults.get(k) for k in ("height", "width")}}

    return {name: (values(MODELS[name].model_path), values(name)) for name in AUTHORS}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_every_published_model_is_compared_or_named() -> None:
    assert {*AUTHORS, *UNREAD} == {*MODELS}
    assert not UNREAD & {*AUTHORS}


def test_a_name_runs_what_its_authors_run(
    requests_by: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> None:
    wrong = []
    for name, authors in AUTHORS.items():
        _, by_name = requests_by[name]
        taken = {key: value for key, value in authors.values.items() if key not in NOT_TAKEN.get(name, ())}
        differs = {key for key, value in taken.items() if by_name[key] != plain(value)}
        if differs != OTHERS_RUN.get(name, set()):
            wrong.append((name, {key: (by_name[key], taken[key]) for key in differs ^ OTHERS_RUN.get(name, set())}))
        if authors.sizes is not None and (by_name["height"], by_name["width"]) not in authors.sizes:
            wrong.append((name, {"size": (by_name["height"], by_name["width"])}))
    assert wrong == []


def test_presets_for_other_sizes_have_the_authors_values_of_these(tmp_path: Path) -> None:
    for name, authors in AUTHORS.items():
        for preset, values in authors.presets.items():
            request = {**MODELS[name].request, **MODELS[name].presets[preset]}
            rules = rules_of(name)
            image = tmp_path / f"{name}.png"
            Image.new("RGB", (request["width"], request["height"]), "white").save(image)
            asked = GenerationRequest("a", **dict.fromkeys(rules.inputs.needed, str(image)))  # type: ignore[arg-type]
            found = rules.resolve(asked, preset)
            assert {key: getattr(found, key) for key in values} == values, (name, preset)
            assert authors.sizes is None or (found.height, found.width) in authors.sizes


def test_experts_change_where_the_authors_change_them() -> None:
    """Of the steps, not of the boundary alone: the shift decides how many each expert makes."""
    folders = published_folders()
    shares = {}
    for name, authors in AUTHORS.items():
        if authors.boundary is None:
            continue
        index = folders[MODELS[name].model_path.rpartition("/")[2]]["model_index.json"]
        assert index["boundary_ratio"] == authors.boundary
        request = MODELS[name].request
        rules = rules_of(name)
        settings = BatchSettings.of([_without_image(rules, request)], rules.sampling)
        sampler = settings.build_sampler()
        assert isinstance(sampler, ScheduleSampler)
        timesteps = sampler.scheduler(torch.device("cpu")).timesteps
        shares[name] = (int((timesteps >= 1000 * authors.boundary).sum()), len(timesteps))
    assert shares == {"wan2.2-t2v-a14b": (26, 40), "wan2.2-i2v-a14b": (15, 40)}


def _without_image(rules: RequestRules, request: Mapping[str, Any]) -> GenerationRequest:
    return GenerationRequest("a").with_defaults(request).with_defaults(rules.defaults)


def differences(
    requests_by: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> Iterator[tuple[str, str, str, str]]:
    """The rows of the page: the values that are not the same in all three. Negative prompts stand in its text."""
    for name, authors in AUTHORS.items():
        by_id, by_name = requests_by[name]
        compared = authors.values.keys() - {"negative_prompt", *NOT_TAKEN.get(name, ())}
        three = [by_id, {key: plain(value) for key, value in authors.values.items()}, by_name]
        keys = [
            key for key in authors.values if key in compared and not three[0][key] == three[1][key] == three[2][key]
        ]
        if keys:
            folder, own, run = (", ".join(f"{key} {_shown(values[key])}" for key in keys) for values in three)
            yield name, folder, own, {folder: "the folder's", own: "the authors'"}.get(run, run)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{each:g}" for each in value)
    return "none" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def test_the_page_names_every_difference(
    requests_by: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip("` ") for cell in row) for row in rows if not set(row[0]) <= {"-", "|"}]
    expected = list(differences(requests_by))
    table = "\n".join(f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in expected)
    assert cells == [HEADER, *expected], f"the table of docs/few_steps.md is to be\n{table}"
