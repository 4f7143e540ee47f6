"""SCAIL-2's templates: the first clip is translated, with masks that come as files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tables import table

from diffusion_runtime.workflows.evaluation import Verdict
from diffusion_runtime.workflows.graph import Graph
from diffusion_runtime.workflows.reading import graph_of_document, read_workflow
from diffusion_runtime.workflows.settings import with_node_values
from diffusion_runtime.workflows.translation import Refusal, Translation, translate

TEMPLATE = "video_wan21_scail2_character_replacement{}.json"
# The file that joins the first clip and the one behind it.
FIRST = "271.mode=2"


def template(kind: str = "", *settings: str) -> Graph:
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "templates" / TEMPLATE.format(kind)
    return with_node_values(read_workflow(str(path)), settings)


def translated(graph: Graph) -> Translation:
    found = translate(graph)
    assert isinstance(found, Translation), found.message()
    return found


@table(("kind", "file"), [("", "fp16"), ("_int8", "int8_convrot")])
def test_the_first_clip_of_a_template_is_a_request(kind: str, file: str) -> None:
    found = translated(template(kind, FIRST))
    request = dict(found.request)
    assert "in a neat" in request["prompt"] or "pulled back" in request["prompt"]
    expected = {
        "width": 896,
        "height": 512,
        # Of one widget, which the node that cuts the video shares with the one that counts.
        "num_frames": 81,
        "guidance_scale": 1,
        "sampler": "flow_match_euler",
        "character_mode": "replace",
        "noise": "comfyui",
    }
    assert {name: request.get(name) for name in expected} == expected
    # Six steps at the model's own shift of 8: the node that sets 5 is behind the one that spaces them.
    levels = [8 * each / (1 + 7 * each) for each in (1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)]
    assert request["sigmas"] == pytest.approx(levels, abs=2e-3)
    assert Path(request["image_path"]).suffix == ".png"
    assert Path(request["video_path"]).suffix == ".mp4"
    assert not {"mask_path", "image_mask_path", "fps"} & request.keys()
    assert found.model.name == "scail-2-14b"
    files = {key: weights.file for key, weights in found.files.items()}
    assert files["model_path"] == f"wan2.1_14B_SCAIL_2_{file}.safetensors"
    assert files["image_encoder_path"] == "clip_vision_h.safetensors"
    assert [lora.scale for lora, _ in found.loras] == [1, 0.8]
    remarks = {each.node.kind: each.remark for each in found.findings if each.verdict is Verdict.REPLACED}
    assert "--mask-path and --image-mask-path" in remarks["SCAIL2ColoredMask"]
    assert "SAM3_VideoTrack" not in {each.node.kind for each in found.findings}


def test_a_template_with_both_clips_is_refused() -> None:
    found = translate(template())
    assert isinstance(found, Refusal)
    assert "ColorTransfer" in found.message()


MASKS = {"pose_video_mask": ["video mask", 0], "reference_image_mask": ["image mask", 0]}


def clip(**inputs: Any) -> Graph:
    """A clip of files; inputs: of its node."""
    given = {"positive": ["text", 0], "negative": ["text", 0], "vae": ["vae", 0], "pose_video": ["film", 0]}
    given |= {"reference_image": ["image", 0], "width": 512, "height": 512, "length": 17, "batch_size": 1, **inputs}
    sampler = {"seed": 1, "steps": 4, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    nodes: dict[str, tuple[str, dict[str, Any]]] = {
        "model": ("UNETLoader", {"unet_name": "wan2.1_14B_SCAIL_2_fp16.safetensors"}),
        "clip": ("CLIPLoader", {"clip_name": "umt5_xxl_fp16.safetensors", "type": "wan"}),
        "vae": ("VAELoader", {"vae_name": "wan_2.1_vae.safetensors"}),
        "text": ("CLIPTextEncode", {"text": "a dancer", "clip": ["clip", 0]}),
        "image": ("LoadImage", {"image": "a.png"}),
        "other": ("LoadImage", {"image": "b.png"}),
        "several": ("BatchImagesNode", {"images.image0": ["image", 0], "images.image1": ["other", 0]}),
        "image mask": ("LoadImage", {"image": "a_mask.png"}),
        "video": ("LoadVideo", {"file": "v.mp4"}),
        "film": ("GetVideoComponents", {"video": ["video", 0]}),
        "mask": ("LoadVideo", {"file": "m.mp4"}),
        "video mask": ("GetVideoComponents", {"video": ["mask", 0]}),
        "scail": ("WanSCAILToVideo", given),
        "sampled": (
            "KSampler",
            {"model": ["model", 0], "positive": ["scail", 0], "negative": ["scail", 1], "latent_image": ["scail", 2]}
            | sampler,
        ),
        "decoded": ("VAEDecode", {"samples": ["sampled", 0], "vae": ["vae", 0]}),
        "movie": ("CreateVideo", {"images": ["decoded", 0], "fps": 16}),
        "saved": ("SaveVideo", {"video": ["movie", 0]}),
    }
    # The API's format has numbers for names.
    numbers = {name: str(index) for index, name in enumerate(nodes, 1)}

    def value(given: Any) -> Any:
        return [numbers[given[0]], given[1]] if isinstance(given, list) else given

    return graph_of_document(
        {
            numbers[name]: {"class_type": kind, "inputs": {key: value(each) for key, each in of_node.items()}}
            for name, (kind, of_node) in nodes.items()
        }
    )


def test_masks_of_files_and_several_images_are_taken() -> None:
    found = translated(clip(**MASKS)).request
    assert (found["mask_path"], found["image_mask_path"]) == ("m.mp4", "a_mask.png")
    assert (found["image_path"], found["video_path"], found["character_mode"]) == ("a.png", "v.mp4", "animate")
    assert found["fps"] == 16
    assert translated(clip(**MASKS, reference_image=["several", 0])).request["image_path"] == ["a.png", "b.png"]


@table(
    ("inputs", "told"),
    [
        ({"pose_strength": 0.5}, "pose_strength: expected 1, got 0.5"),
        ({"pose_start": 0.2}, "pose_start: expected 0, got 0.2"),
        ({"video_frame_offset": 76}, "video_frame_offset: expected 0, got 76"),
        ({"previous_frames": ["film", 0]}, "previous_frames: a further clip that goes on behind another"),
        ({"pose_video_mask": ["vae", 0]}, "pose_video_mask: expected pictures of it"),
        ({"batch_size": 2}, "batch_size: expected 1, got 2"),
    ],
)
def test_what_no_request_says_is_refused(inputs: dict[str, Any], told: str) -> None:
    found = translate(clip(**inputs))
    assert isinstance(found, Refusal), found.request
    assert told in found.message()
