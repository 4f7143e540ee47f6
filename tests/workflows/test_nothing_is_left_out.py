"""Nothing is left out: what changes a result and no request says is an error, wherever in a workflow it stands."""

from __future__ import annotations

from typing import Any

from tables import table
from workflows.comfy_graphs import api_format, z_image
from workflows.test_guidance_nodes import UP_TO_3, then, wan
from workflows.test_translation import Nodes, experts, graph_of, refused, translated, verdicts

from diffusion_runtime.workflows.evaluation import Verdict
from diffusion_runtime.workflows.reading import graph_of_document


def written(kind: str, **inputs: Any) -> dict[str, Any]:
    """An image behind a node between decoding and writing."""
    document = api_format(z_image())
    document["40"] = {"class_type": kind, "inputs": inputs}
    document["20"]["inputs"]["images"] = ["40", 0]
    return document


@table(
    "document, node_id, reason",
    [
        (written("ImageScaleBy", image=["9", 0], scale_by=2), "40", "resized: leave that out, --set 40.mode=4"),
        (written("ImageStitch", image1=["9", 0], image2=["9", 0]), "40", "two pictures beside each other"),
        (written("ImageBatch", image1=["9", 0], image2=["9", 0]), "9", "2 results in one file"),
    ],
)
def test_results_that_are_changed(document: dict[str, Any], node_id: str, reason: str) -> None:
    found = refused(graph_of_document(document))
    assert [each.node.id for each in found.reasons] == [node_id]
    assert reason in found.message()


def test_a_picture_that_nothing_is_stitched_to_is_that_picture() -> None:
    assert translated(graph_of_document(written("ImageStitch", image1=["9", 0]))).request["prompt"] == "a cat"


LORA = ("LoraLoader", {"model": ("1", 0), "clip": ("2", 0), "lora_name": "a.safetensors", "strength_model": 0.5})


def with_lora(strength_clip: float) -> Nodes:
    kind, inputs = LORA
    return wan(
        {
            "7": (kind, {**inputs, "strength_clip": strength_clip}),
            "5": ("CLIPTextEncode", {"text": "waves", "clip": ("7", 1)}),
            "6": ("CLIPTextEncode", {"text": "blurred", "clip": ("7", 1)}),
        },
        "7",
    )


def edited(**changes: Any) -> Nodes:
    """An edited image of Qwen-Image. changes: of the negative condition's node."""
    seen = {"clip": ("2", 0), "vae": ("3", 0), "image1": ("8", 0)}
    return wan(
        {
            "1": ("UNETLoader", {"unet_name": "qwen_image_edit_2511_bf16.safetensors"}),
            "4": ("EmptySD3LatentImage", {"width": 512, "height": 512, "batch_size": 1}),
            "8": ("LoadImage", {"image": "cat.png"}),
            "5": ("TextEncodeQwenImageEditPlus", {**seen, "prompt": "a hat"}),
            "6": ("TextEncodeQwenImageEditPlus", {**seen, "prompt": "", **changes}),
            "22": ("SaveImage", {"images": ("20", 0)}),
        }
    )


@table(
    "nodes, node_id, reason",
    [
        (with_lora(1.0), "7", "strength_clip: expected 0.5, that of the model, got 1"),
        (wan({"6": ("CLIPTextEncode", {"text": "", "clip": ("8", 0)}),
              "8": ("CLIPLoader", {"clip_name": "t5.safetensors"})}),
         "6", "another text encoder for the negative prompt"),
        (edited(vae=None), "6", "vae: nothing is linked: pictures that the text encoder alone sees"),
        (edited(image1=None), "6", "the negative condition has other pictures"),
        (experts(sampler_name="lcm"), "13", "another sampler for the second expert"),
    ],
)  # fmt: skip
def test_conditions_and_samplers_that_differ(nodes: Nodes, node_id: str, reason: str) -> None:
    found = refused(graph_of(nodes))
    assert [each.node.id for each in found.reasons] == [node_id]
    assert reason in found.message()


def test_what_is_the_same_is_translated() -> None:
    found = translated(graph_of(with_lora(0.5)))
    assert [(lora.file, lora.scale) for lora, _ in found.loras] == [("a.safetensors", 0.5)]
    assert translated(graph_of(edited())).request["image_path"] == "cat.png"


def test_what_one_of_two_experts_has_alone_is_refused() -> None:
    nodes = experts()
    nodes["24"] = ("CFGZeroStar", {"model": ("4", 0)})
    kind, inputs = nodes["12"]
    nodes["12"] = (kind, {**inputs, "model": ("24", 0)})
    assert "CFG-zero* of one stage alone" in refused(graph_of(nodes)).message()
    # With a node of its own for each it is of both.
    nodes["25"] = ("CFGZeroStar", {"model": ("5", 0)})
    kind, inputs = nodes["13"]
    nodes["13"] = (kind, {**inputs, "model": ("25", 0)})
    found = translated(graph_of(nodes))
    assert found.request["cfg_zero_star"] == "comfyui"
    # The second expert alone has guidance.
    nodes["12"] = (nodes["12"][0], {**nodes["12"][1], "cfg": 1})
    assert translated(graph_of(nodes)).request["cfg_zero_star"] == "comfyui"


def test_first_steps_without_velocity_are_of_each_sampler() -> None:
    node = ("CFGZeroStarAndInit", {"model": ("1", 0), "use_zero_init": True, "zero_init_steps": 0})
    nodes = wan(then(model=("7", 0)) | {"7": node}, "7", **UP_TO_3)
    assert "the first steps of each sampler" in refused(graph_of(nodes)).message()


def test_a_film_of_ten_bits_is_one_of_eight() -> None:
    found = translated(graph_of(wan({"21": ("CreateVideo", {"images": ("20", 0), "fps": 16, "bit_depth": 10})})))
    assert verdicts(found)["21"] is Verdict.REPLACED
