"""configs/*.yaml against the families: each published model has one, and it says what the family would do by itself."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import pytest
import yaml
from cli_support import REPOSITORY
from PIL import Image
from tiny_families import WRITERS
from tiny_flow_maps import write_tiny_flow_map
from tiny_flux1 import write_tiny_flux1
from tiny_flux2 import write_tiny_flux2_klein
from tiny_flux3 import write_tiny_flux3
from tiny_hunyuan_video import write_tiny_hunyuan_video
from tiny_krea2 import write_tiny_krea2
from tiny_ltx2 import write_tiny_ltx2
from tiny_ltx_video import write_tiny_ltx_video
from tiny_models import write_tiny_wan
from tiny_moss_image import write_tiny_moss_image
from tiny_qwen_image import write_tiny_qwen_image
from tiny_scail_2 import write_tiny_scail_2
from tiny_seedvr2 import write_tiny_seedvr2
from tiny_wan_animate_2 import write_tiny_wan_animate_2
from tiny_z_image import write_tiny_z_image

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.models.model_sources import EMBEDDED_FOLDERS
from diffusion_runtime.models.published import published_models
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.request.layers import layered

# What importing diffusers' pipelines says about packages that are not here, and about guiders.
pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = {model.name: model for model in published_models() if model.model_path not in EMBEDDED_FOLDERS}
# A folder whose settings are of the published one's kind; the others' are as their family's first.
KINDS: dict[str, Callable[[Path], Path]] = {
    **dict.fromkeys(("anyflow-1.3b", "anyflow-14b"), write_tiny_flow_map),
    **dict.fromkeys(("anyflow-far-1.3b", "anyflow-far-14b"), partial(write_tiny_flow_map, is_far=True)),
    "wan2.2-ti2v-5b": partial(write_tiny_wan, takes_image=True),
    "wan2.1-vace-1.3b": partial(write_tiny_wan, condition="control"),
    "wan2.1-vace-14b": partial(write_tiny_wan, condition="control"),
    "wan2.2-t2v-a14b": partial(write_tiny_wan, boundary_ratio=0.875),
    "wan2.2-i2v-a14b": partial(write_tiny_wan, boundary_ratio=0.9, condition="clip"),
    "wan2.1-i2v-14b-480p": partial(write_tiny_wan, condition="clip and tokens"),
    "wan2.1-i2v-14b-720p": partial(write_tiny_wan, condition="clip and tokens"),
    "wan2.1-flf2v-14b-720p": partial(write_tiny_wan, condition="clip and tokens of two images"),
    "flux.1-schnell": partial(write_tiny_flux1, embeds_guidance=False, shifts_by_size=False),
    "flux.1-canny-dev": partial(write_tiny_flux1, pipeline_class="FluxControlPipeline", condition_channels=4),
    "flux.1-depth-dev": partial(write_tiny_flux1, pipeline_class="FluxControlPipeline", condition_channels=4),
    "flux.1-fill-dev": partial(write_tiny_flux1, pipeline_class="FluxFillPipeline", condition_channels=8),
    "flux.1-kontext-dev": partial(write_tiny_flux1, pipeline_class="FluxKontextPipeline"),
    "z-image": partial(write_tiny_z_image, flow_shift=6.0),
    "hunyuan-video-i2v": partial(write_tiny_hunyuan_video, image_condition="token_replace"),
    "hunyuan-video-i2v-33ch": partial(write_tiny_hunyuan_video, image_condition="latent_concat", has_guidance=False),
    "qwen-image-edit": partial(write_tiny_qwen_image, edits="QwenImageEditPipeline"),
    "qwen-image-edit-2509": partial(write_tiny_qwen_image, edits="QwenImageEditPlusPipeline"),
    "ltx-video-0.9.0": partial(write_tiny_ltx_video, decodes_at_a_timestep=False),
    **dict.fromkeys(
        ("ltx-video-0.9.7-dev", "ltx-video-0.9.7-distilled", "ltx-video-0.9.8-distilled"),
        partial(write_tiny_ltx_video, takes_conditions=True),
    ),
    "qwen-image-edit-2511": partial(write_tiny_qwen_image, edits="QwenImageEditPlusPipeline"),
    **dict.fromkeys(("ltx-2.3", "ltx-2.3-distilled"), partial(write_tiny_ltx2, is_ltx23=True)),
    "krea-2-turbo": partial(write_tiny_krea2, is_distilled=True),
    "ltx-2.5": partial(write_tiny_ltx2, is_ltx25=True),
    "flux.2-klein-4b": partial(write_tiny_flux2_klein, is_distilled=True),
    "flux.2-klein-base-4b": write_tiny_flux2_klein,
    "flux.2-klein-base-9b": write_tiny_flux2_klein,
    "flux.2-klein-9b": partial(write_tiny_flux2_klein, is_distilled=True),
    "flux.2-klein-9b-kv": partial(write_tiny_flux2_klein, caches_references=True),
    "flux.3-image-klein": partial(write_tiny_flux3, flow_map=True),
    "wan2.2-animate-2-14b-distilled": partial(write_tiny_wan_animate_2, distilled=True),
    "scail-2-14b": write_tiny_scail_2,
    "seedvr2-3b": write_tiny_seedvr2,
    "seedvr2-7b": partial(write_tiny_seedvr2, is_large=True),
    **dict.fromkeys(("moss-image-sft", "moss-image-base"), partial(write_tiny_moss_image, num_layers=23)),
}
# Where a file and its family differ, for a reason that stands in the file. HunyuanVideo-1.5 takes its size and its
# scale from its folder, which is tiny here: its files are compared with the family's own.
OTHER = {
    # A folder runs its own shift, a name that of the authors: test_authors_settings.py.
    "wan2.1-1.3b": {"flow_shift", "guidance_scale"},
    "wan2.1-14b": {"flow_shift"},
    "wan2.1-vace-1.3b": {"flow_shift"},
    "wan2.1-vace-14b": {"flow_shift"},
    "wan2.2-i2v-a14b": {"flow_shift"},
    "wan2.2-t2v-a14b": {"height", "width", "flow_shift"},
    "wan2.1-i2v-14b-720p": {"height", "width"},
    "wan2.1-flf2v-14b-720p": {"height", "width"},
    "ltx-video-0.9.0": {"height", "width"},
    "qwen-image-2.1-turbo": {"sigmas", "num_inference_steps"},
    # Its folder says nothing that FLUX.1 Canny's does not.
    "flux.1-depth-dev": {"num_inference_steps", "guidance_scale"},
    "hunyuan-video-1.5-t2v": {"height", "width", "guidance_scale"},
    "hunyuan-video-1.5-i2v": {"height", "width", "guidance_scale"},
    # A distilled folder is known by its name.
    # Those of LTX-2.3 that is not distilled are the family's.
    **dict.fromkeys(
        ("ltx-2.3-distilled", "ltx-2.5"),
        frozenset(
            "sigmas num_inference_steps guidance_scale audio_guidance_scale stg_scale modality_scale "
            "guidance_rescale".split()
        ),
    ),
    **dict.fromkeys(
        ("fasth3-4-step", "fasth3-8-step"), frozenset({"sigmas_before_shift", "num_inference_steps", "flow_shift"})
    ),
    "ltx-video-0.9.7-distilled": {"sigmas", "num_inference_steps", "guidance_scale"},
    "ltx-video-0.9.8-distilled": {"sigmas", "num_inference_steps", "guidance_scale"},
}


def settings(name: str) -> dict[str, object]:
    content = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    request = dict(content["request"])
    # Long lists of what to avoid are their authors', and no default of anybody's.
    request.pop("negative_prompt", None)
    return request


def test_every_file_is_of_a_published_model() -> None:
    names = {path.stem for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert names == {*MODELS, *EMBEDDED_FOLDERS}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_says_what_its_family_does(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    folder = (KINDS.get(name) or WRITERS[model.family])(tmp_path / "model")
    family = family_for_folder(folder)
    assert family.name == model.family
    defaults = family.describe(folder).defaults
    for key, value in settings(name).items():
        if key in OTHER.get(name, ()):
            assert (
                name.startswith(("wan", "ltx", "flux.1", "qwen-image-2.1-", "fasth3"))
                or value == family.requests.defaults[key]
            )
            continue
        assert value == defaults[key], key


def test_a_name_stands_for_the_hub_id_with_its_settings(
    tiny_wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, *others: object) -> Path:
        asked.append(repository)
        return tiny_wan_folder

    monkeypatch.setattr("diffusion_runtime.models.model_sources._download", download)
    monkeypatch.chdir(tmp_path)
    by_name = prepare(RuntimeConfig("wan2.1-1.3b")).rules
    by_id = prepare(RuntimeConfig("Wan-AI/Wan2.1-T2V-1.3B-Diffusers")).rules
    assert set(asked) == {"Wan-AI/Wan2.1-T2V-1.3B-Diffusers"}
    assert by_name.resolve(GenerationRequest("a star")).negative_prompt.startswith("色调艳丽")
    assert by_name.resolve(GenerationRequest("a star"), preset="draft").num_frames == 33
    assert by_id.resolve(GenerationRequest("a star")).negative_prompt == ""
    # A folder of that name comes first, as it is.
    asked.clear()
    shutil.copytree(tiny_wan_folder, "wan2.1-1.3b")
    assert "draft" not in prepare(RuntimeConfig("wan2.1-1.3b")).rules.presets
    assert asked == []


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_presets_are_some_that_the_published_model_makes(name: str, tmp_path: Path) -> None:
    """By the rule of the published folders: 16 or 32 pixels, and frames by the autoencoder's factor."""
    content = yaml.safe_load((REPOSITORY / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    multiple = 32 if name in ("wan2.2-ti2v-5b", "scail-2-14b") or name.startswith("ltx") else 16
    rules = inspect_pipeline(
        RuntimeConfig(str((KINDS.get(name) or WRITERS[MODELS[name].family])(tmp_path / "m")))
    ).rules
    for preset in ({}, *content.get("presets", {}).values()):
        # Of two blocks.
        tiny = {"stg_blocks": (0,)} if "stg_blocks" in rules.defaults else {}
        request = GenerationRequest(prompt="a star", **layered(settings(name), preset, tiny))
        of_references = rules.inputs.references is not None and rules.inputs.references.sized_by is not None
        restores = rules.sampling.restoration is not None
        follows = of_references or restores or rules.inputs.size_of_image is not None
        assert (request.height is None) == (request.width is None)
        assert follows or request.height is not None
        image = tmp_path / "image.png"
        Image.new("RGB", (request.width or 640, request.height or 480), "white").save(image)
        video = numpy.zeros((request.num_frames or 1, 8, 8, 3), dtype=numpy.uint8)
        numpy.save(tmp_path / "video.npy", video)
        files = {"video_path": tmp_path / "video.npy"}
        if "image_mask_path" in rules.inputs.needed:
            # In the colours of characters.
            numpy.save(tmp_path / "mask.npy", video + numpy.array((0, 0, 255), dtype=numpy.uint8))
            Image.new("RGB", (request.width or 640, request.height or 480), "blue").save(tmp_path / "mask.png")
            files |= {"mask_path": tmp_path / "mask.npy", "image_mask_path": tmp_path / "mask.png"}
        wanted = {"image_path"} if restores else rules.inputs.needed
        needed = {name: files.get(name, image) for name in wanted}
        resolved = rules.resolve(dataclasses.replace(request, **{name: str(path) for name, path in needed.items()}))
        assert resolved.height % multiple == resolved.width % multiple == 0
