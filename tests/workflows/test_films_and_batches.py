"""Videos, batches of pictures and sizes are taken as they are cut, or refused."""

from __future__ import annotations

from typing import Any

from tables import table
from workflows.comfy_graphs import node
from workflows.test_guidance_nodes import BOTH, SAMPLER, wan
from workflows.test_translation import Nodes, graph_of, refused, translated, verdicts

from diffusion_runtime.workflows.evaluation import Evaluation, Verdict
from diffusion_runtime.workflows.graph import Link
from diffusion_runtime.workflows.node_table import TABLE
from diffusion_runtime.workflows.reading import graph_of_document
from diffusion_runtime.workflows.settings import with_node_values
from diffusion_runtime.workflows.values import PictureValue

FILM: Nodes = {"30": ("LoadVideo", {"file": "a.mp4"}), "31": ("GetVideoComponents", {"video": ("30", 0)})}
PAIR: Nodes = {
    "30": ("LoadImage", {"image": "a.png"}),
    "31": ("LoadImage", {"image": "b.png"}),
    "32": ("BatchImagesNode", {"images.image0": ("30", 0), "images.image1": ("31", 0)}),
    "33": ("ImageFromBatch", {"image": ("32", 0), "batch_index": 0, "length": 1}),
}


def from_image(extra: Nodes, start: str) -> Nodes:
    """A video of Wan 2.1 whose first frame is of a node."""
    frames = {"width": 832, "height": 480, "length": 33, "batch_size": 1, "vae": ("3", 0), "start_image": (start, 0)}
    first = {"positive": ("4", 0), "negative": ("4", 1)}
    sampler = {**SAMPLER, **first, "model": ("1", 0), "latent_image": ("4", 2), "add_noise": "enable"}
    return wan(
        {
            "1": ("UNETLoader", {"unet_name": "wan2.1_i2v_480p_14B_fp16.safetensors"}),
            "4": ("WanImageToVideo", {**frames, **BOTH}),
            "9": ("KSamplerAdvanced", {**sampler, "start_at_step": 0, "end_at_step": 10000}),
            **extra,
        }
    )


def noised(extra: Nodes, start: str) -> Nodes:
    """Return the graph of Wan 2.1 from a node's pictures at half the noise."""
    sampler = {**SAMPLER, "seed": 3, "denoise": 0.5, "model": ("1", 0), "latent_image": ("4", 0)}
    changes = {"4": ("VAEEncode", {"pixels": (start, 0), "vae": ("3", 0)}), "9": ("KSampler", sampler)}
    return wan({**changes, **extra})


REFERENCES: Nodes = {
    "1": ("UNETLoader", {"unet_name": "minimax_h3_ref2va.safetensors"}),
    "4": ("MiniMaxH3ReferenceToVideo", {"prompt": "waves", "clip": ("2", 0), "ref_videos.video0": ("32", 0)}),
    "32": ("ImageFromBatch", {"image": ("31", 0), "batch_index": 0, "length": 9}),
    "7": ("BasicGuider", {"model": ("1", 0), "conditioning": ("4", 0)}),
    "10": ("RandomNoise", {"noise_seed": 1}),
    "11": ("KSamplerSelect", {"sampler_name": "euler"}),
    "12": ("BasicScheduler", {"model": ("1", 0), "scheduler": "simple", "steps": 4}),
    "9": ("SamplerCustomAdvanced", {"guider": ("7", 0), "sampler": ("11", 0), "sigmas": ("12", 0),
                                    "noise": ("10", 0), "latent_image": ("4", 1)}),
}  # fmt: skip


def levels(**nodes: Any) -> Nodes:
    """Noise levels of a node in place of the sampler's own."""
    guided = {**BOTH, "model": ("1", 0), "cfg": 4}
    return wan(
        {
            "10": ("RandomNoise", {"noise_seed": 1}),
            "11": ("KSamplerSelect", {"sampler_name": "euler"}),
            "12": ("BasicScheduler", {"model": ("1", 0), "scheduler": "simple", "steps": 4}),
            "14": ("CFGGuider", guided),
            "9": ("SamplerCustomAdvanced", {"guider": ("14", 0), "sampler": ("11", 0), "sigmas": ("13", 1),
                                            "noise": ("10", 0), "latent_image": ("4", 0)}),
            **{key.removeprefix("n"): value for key, value in nodes.items()},
        }
    )  # fmt: skip


def doubled(count: int) -> Nodes:
    """Batches of batches."""
    nodes: Nodes = {"30": ("LoadImage", {"image": "a.png"})}
    for index in range(count):
        before = (str(30 + index), 0)
        nodes[str(31 + index)] = ("BatchImagesNode", {"images.image0": before, "images.image1": before})
    return from_image(nodes, str(30 + count))


@table(
    "nodes, reason",
    [
        (from_image(FILM, "31"), "a video where one picture is taken"),
        (from_image({k: v for k, v in PAIR.items() if k != "33"}, "32"), "2 pictures where one is taken"),
        (from_image({}, "99"), "linked to node '99', and there is none"),
        (from_image(FILM, "30") | {"4": ("CLIPTextEncode", {"text": "a", "clip": ("2", 7)})}, "output 7 of CLIPLoader"),
        (from_image(doubled(40), "70"), "expected at most 1000 pictures"),
        (noised(FILM, "31"), "number of a video's frames is not known"),
        (wan(FILM | REFERENCES), "a video that is cut, as a reference"),
        (levels(n13=("SplitSigmas", {"sigmas": ("12", 0), "step": 9})), "0 noise levels; expected two or more"),
        (levels(n13=("SetFirstSigma", {"sigmas": ("12", 0), "sigma": 3.0}),
                n14=("CFGGuider", {**BOTH, "model": ("1", 0), "cfg": 1})) |
         {"9": ("SamplerCustom", {**BOTH, "model": ("1", 0), "cfg": 4, "noise_seed": 1, "add_noise": True,
                                  "sampler": ("11", 0), "sigmas": ("13", 0), "latent_image": ("4", 0)})},
         "a first noise level of 3"),
    ],
)  # fmt: skip
def test_what_no_request_says_is_refused(nodes: Nodes, reason: str) -> None:
    assert reason in refused(graph_of(nodes)).message()


def test_a_batch_is_cut_to_its_first_picture() -> None:
    assert translated(graph_of(from_image(PAIR, "33"))).request["image_path"] == "a.png"


def test_a_video_that_is_noised_in_part_has_as_many_frames_as_are_kept() -> None:
    cut: Nodes = {"32": ("ImageFromBatch", {"image": ("31", 0), "batch_index": 0, "length": 17})}
    cut["33"] = ("ImageFromBatch", {"image": ("32", 0), "batch_index": 0, "length": 40})
    found = translated(graph_of(noised(FILM | cut, "33"))).request
    assert (found["init_path"], found["num_frames"]) == ("a.mp4", 17)


def test_the_rate_of_a_video_that_is_read_is_not_the_files() -> None:
    cut: Nodes = {"32": ("ImageFromBatch", {"image": ("31", 0), "batch_index": 0, "length": 17})}
    nodes = noised(FILM | cut, "32") | {"21": ("CreateVideo", {"images": ("20", 0), "fps": ("31", 2)})}
    found = translated(graph_of(nodes))
    assert "fps" not in found.request
    assert verdicts(found)["21"] is Verdict.REPLACED


OLD = {
    "ResizeImageMaskNode": (["scale longer dimension", 1536, "area"], {"resize_type.longer_size": 1536}),
    "MiniMaxH3SigmaShift": ([10, 4], {"shift_video": 10, "shift_audio": 4}),
    "BlockSparseAttention": (["vsa", 20, 0, 1, "", 12288, 256], {"selection.keep_percent": 20, "min_tokens": 12288}),
    "SamplerER_SDE": (["ER-SDE", 3, 1, 1.05], {"max_stage": 3, "s_noise": 1.05}),
    "HunyuanVideo15ImageToVideo": ([1280, 720, 121, 1], {"width": 1280, "height": 720, "length": 121}),
    "WanAnimate2ToVideo": ([832, 480, 81, 1, 0, 1, 0, 1, 1], {"video_frame_offset": 0, "pose_strength": 1}),
}


def test_values_of_files_that_do_not_name_them() -> None:
    document = {"nodes": [node(index, kind, values) for index, (kind, (values, _)) in enumerate(OLD.items())]}
    graph = graph_of_document(document)
    for index, (_, expected) in enumerate(OLD.values()):
        assert expected.items() <= graph.nodes[str(index)].inputs.items()


def test_a_picture_is_resized_as_an_old_file_says() -> None:
    document = {"nodes": [node(1, "EmptyImage", [640, 320, 1, 0]), node(2, "ResizeImageMaskNode", ["scale total pixels",
                1, "area"], {"input": 1}), node(3, "VAEEncode", [], {"pixels": 2})],
                "links": [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]]}  # fmt: skip
    evaluation = Evaluation(graph_of_document(document), TABLE)
    picture = evaluation.output_of(Link("2", 0))
    assert isinstance(picture, PictureValue)
    # 1448.2 x 724.1 pixels are 2**20; latents of 16 pixels to a side.
    assert picture.size == (1448, 724)
    latent = evaluation.output_of(Link("3", 0))
    assert (latent.width, latent.height) == (1440, 720)
    assert "1440 x 720" in evaluation.findings["3"].remark


def test_a_cache_of_fewer_bits_is_replaced() -> None:
    for dtype, expected in (("default", Verdict.WITHOUT_EFFECT), ("fp8_e4m3fn", Verdict.REPLACED)):
        nodes = wan({"7": ("QwenImage21Cache", {"model": ("1", 0), "device": "auto", "dtype": dtype})}, "7")
        assert verdicts(translated(graph_of(nodes)))["7"] is expected


def test_a_bypassed_node_gives_each_output_its_own_input() -> None:
    nodes = wan({"7": ("LTXVConditioning", {**BOTH, "frame_rate": 25})})
    first, values = nodes["9"]
    nodes["9"] = (first, {**values, "positive": ("7", 0), "negative": ("7", 1)})
    changed = with_node_values(graph_of(nodes), ["7.mode=4"]).nodes["9"].inputs
    assert (changed["positive"], changed["negative"]) == (Link("5", 0), Link("6", 0))
    nodes["7"] = ("LoraLoader", {"model": ("1", 0), "clip": ("2", 0), "lora_name": "a.safetensors"})
    nodes["5"] = ("CLIPTextEncode", {"text": "waves", "clip": ("7", 1)})
    assert with_node_values(graph_of(nodes), ["7.mode=4"]).nodes["5"].inputs["clip"] == Link("2", 0)


def test_many_nodes_end() -> None:
    """Time grows with the number of nodes and links, not with its square or cube: 3,000 inputs of one node, 3,000 nodes
    behind 3,000 reroutes, and 3,000 nodes in a subgraph behind one of its inputs."""
    many = 3000
    wide = {str(index): ("PrimitiveInt", {"value": 1}) for index in range(many)}
    wide["x"] = ("ComfyMathExpression", {"expression": "a", **{f"values.v{key}": (key, 0) for key in list(wide)}})
    evaluation = Evaluation(graph_of(wide), TABLE)
    visited: list[str] = []
    plain = evaluation._links
    evaluation._links = lambda each: (visited.append(each.id), plain(each))[1]  # type: ignore[method-assign]
    evaluation.output_of(Link("x", 0))
    assert visited.count("x") <= 3
    chain = {"nodes": [node(index, "Reroute", [], {"": index}) for index in range(1, many)], "links": []}
    chain["links"] = [[index, index - 1, 0, index, 0, "*"] for index in range(1, many)]
    chain["nodes"] += [node(many + index, "PreviewAny", [], {"source": many}) for index in range(many)]
    chain["links"] += [[many, many - 1, 0, many, 0, "*"]]
    assert len(graph_of_document(chain).nodes) == many
    within = {
        "id": "sub",
        "inputs": [{"name": "amount", "type": "INT", "linkIds": list(range(many))}],
        "nodes": [node(index, "PrimitiveInt", [3], {"value*": index}) for index in range(many)],
        "links": [[index, -10, 0, index, 0, "INT"] for index in range(many)],
    }
    found = graph_of_document(
        {"nodes": [node(1, "sub", [], {"amount*": None})], "definitions": {"subgraphs": [within]}}
    )
    assert found.nodes["1:7"].inputs["value"] == 3
