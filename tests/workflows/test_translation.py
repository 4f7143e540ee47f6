"""Translation of workflows: what is taken, replaced, without effect or not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tables import table
from workflows.comfy_graphs import api_format, z_image

from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.workflows.evaluation import Verdict
from diffusion_runtime.workflows.graph import Graph, Link, WorkflowError
from diffusion_runtime.workflows.reading import graph_of_document
from diffusion_runtime.workflows.settings import read_translation, settings_of, with_node_values
from diffusion_runtime.workflows.translation import Refusal, Translation, translate

Nodes = dict[str, tuple[str, dict[str, Any]]]


def graph_of(nodes: Nodes) -> Graph:
    """inputs that are a pair of an id and an output are links."""
    document = {
        identity: {
            "class_type": kind,
            "inputs": {name: list(value) if isinstance(value, tuple) else value for name, value in inputs.items()},
        }
        for identity, (kind, inputs) in nodes.items()
    }
    return graph_of_document(document)


def translated(graph: Graph, prompt: str | None = None) -> Translation:
    found = translate(graph, prompt=prompt)
    assert isinstance(found, Translation), found.message()
    return found


def refused(graph: Graph) -> Refusal:
    found = translate(graph)
    assert isinstance(found, Refusal), found.request
    return found


def verdicts(found: Translation | Refusal) -> dict[str, Verdict]:
    return {each.node.id: each.verdict for each in found.findings}


def test_an_image_becomes_a_request() -> None:
    found = translated(graph_of_document(z_image()))
    # Shift 3 of 1, 0.75, 0.5 and 0.25.
    assert found.request.pop("sigmas") == pytest.approx([1.0, 0.9, 0.75, 0.5])  # type: ignore[attr-defined]
    # The model adds the scale, so that 1 is 0.
    assert found.request == {
        "prompt": "a cat",
        "seed": 7,
        "sampler": "flow_match_euler",
        "guidance_scale": 0,
        "width": 256,
        "height": 128,
        "noise": "comfyui",
    }
    files = {key: weights.file for key, weights in found.files.items()}
    assert files == {
        "model_path": "z_image_turbo_bf16.safetensors",
        "text_encoder_path": "qwen_3_4b.safetensors",
        "vae_path": "ae.safetensors",
    }
    assert found.runtime == {"like": "z-image-turbo"}
    assert {key for key, verdict in verdicts(found).items() if verdict is not Verdict.TAKEN} == {"20"}


@table(
    "changes, expected",
    [
        ({"sampler_name": "res_multistep"}, {"sampler": "res_multistep"}),
        ({"sampler_name": "lcm"}, {"sampler": "dmd"}),
        ({"sampler_name": "uni_pc", "steps": 3}, {"sampler": "unipc_sigma", "sigmas": [1.0, 0.9, 0.75]}),
        ({"scheduler": "linear_quadratic"}, {"sigmas": [1.0, 0.9875, 0.975, 0.725]}),
        ({"sampler_name": "er_sde", "steps": 2}, {"sigmas": [3 * 0.9999 / (1 + 2 * 0.9999), 0.75]}),
    ],
)
def test_samplers_and_schedules(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = translated(graph_of_document(z_image(**changes))).request
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, abs=1e-9) if isinstance(value, list) else value), name


@table(
    "changes, node_id, reason",
    [
        ({"sampler_name": "heun"}, "8", "sampler heun"),
        ({"scheduler": "karras"}, "8", "scheduler: karras"),
        ({"denoise": 0.5}, "8", "noise level of 0.75"),
        ({"steps": 0}, "8", "steps: expected 1"),
        ({"steps": 1e9}, "8", "steps: expected 1"),
        ({"cfg": "high"}, "8", "cfg: expected a number"),
    ],
)
def test_what_changes_the_picture_is_refused(changes: dict[str, Any], node_id: str, reason: str) -> None:
    found = refused(graph_of_document(z_image(**changes)))
    assert [each.node.id for each in found.reasons] == [node_id]
    assert reason in found.message()


def test_zeros_in_place_of_a_text_are_those_of_the_request_where_they_are_the_same() -> None:
    request = translated(graph_of_document(z_image(cfg=4))).request
    # As many of them as the text has tokens, which is the prompt itself.
    assert {name: request[name] for name in ("guidance_scale", "negative_prompt", "negative_encoding")} == {
        "guidance_scale": 3,
        "negative_prompt": "a cat",
        "negative_encoding": "zeros",
    }
    document = z_image(cfg=4)
    document["nodes"][0]["widgets_values"][0] = "krea2_turbo.safetensors"
    found = refused(graph_of_document(document))
    assert [each.node.id for each in found.reasons] == ["5"]
    assert "before other layers of this model's text" in found.message()


def test_a_picture_that_is_noised_in_part_is_what_denoising_starts_from() -> None:
    """ComfyUI's image to image: the last four of eight levels, from the picture of VAEEncode."""
    document = api_format(z_image(denoise=0.5))
    document["6"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["40", 0], "vae": ["3", 0]}}
    document["40"] = {"class_type": "LoadImage", "inputs": {"image": "cat.png"}}
    request = translated(graph_of_document(document)).request
    assert request["init_path"] == "cat.png"
    # Shift 3 of 0.5, 0.375, 0.25 and 0.125.
    assert request["sigmas"] == pytest.approx([0.75, 9 / 14, 0.5, 0.3])
    document["8"]["inputs"]["denoise"] = 1
    assert "init_path" not in translated(graph_of_document(document)).request


def test_names_that_a_workflow_makes_up_are_cut_in_messages() -> None:
    document = api_format(z_image(scheduler="k\x1b[31m" * 20_000))
    document["20"]["class_type"] = "SaveImage"
    document["1"]["inputs"]["unet_name"] = "z_image_" + "x" * 100_000
    said = refused(graph_of_document(document)).message()
    assert len(said) < 5000
    assert "\x1b" not in said


def test_a_shift_that_leaves_no_noise_level_is_refused() -> None:
    document = api_format(z_image())
    document["7"]["inputs"]["shift"] = 1e-20
    assert "shift: expected a number from 0.001 to 100" in refused(graph_of_document(document)).message()


def test_unknown_nodes_count_where_they_reach_an_output() -> None:
    document = api_format(z_image())
    document["90"] = {"class_type": "Unheard", "inputs": {"image": ["9", 0]}}
    found = translated(graph_of_document(document))
    assert [each.id for each in found.not_reached] == ["90"]
    document["20"]["inputs"]["images"] = ["90", 0]
    assert (
        "Unheard (node 90): no request stands for nodes of this class" in refused(graph_of_document(document)).message()
    )


def test_values_of_nodes_are_set_and_nodes_left_out() -> None:
    graph = graph_of_document(z_image())
    changed = with_node_values(graph, ["8.seed=9", "4.text=a dog", "7.mode=4"])
    found = translated(changed).request
    assert (found["seed"], found["prompt"]) == (9, "a dog")
    # Without the node, Z-Image's own shift, which is 3 too.
    assert found["sigmas"][2] == pytest.approx(0.75)
    assert changed.nodes["8"].inputs["model"] == Link("1", 0)
    for text, expected in (("99.a=1", "no node 99"), ("8.sead=1", "seed"), ("8.mode=7", "2 (muted)")):
        with pytest.raises(WorkflowError, match=expected.replace("(", r"\(").replace(")", r"\)")):
            with_node_values(graph, [text])


def test_a_prompt_takes_the_place_of_a_rewriter() -> None:
    document = api_format(z_image())
    document["40"] = {"class_type": "TextGenerate", "inputs": {"prompt": "a cat", "clip": ["2", 0]}}
    document["4"]["inputs"]["text"] = ["40", 0]
    graph = graph_of_document(document)
    assert "rewrites the prompt" in refused(graph).message()
    assert translated(graph, "a horse").request["prompt"] == "a horse"


def experts(**second: Any) -> Nodes:
    sampler = {"cfg": 3.5, "steps": 20, "sampler_name": "euler", "scheduler": "simple", "noise_seed": 3,
               "positive": ("8", 0), "negative": ("8", 1)}  # fmt: skip
    return {
        "1": ("UNETLoader", {"unet_name": "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"}),
        "2": ("UNETLoader", {"unet_name": "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors"}),
        "3": ("LoraLoaderModelOnly", {"model": ("1", 0), "lora_name": "high.safetensors", "strength_model": 0.5}),
        "4": ("ModelSamplingSD3", {"model": ("3", 0), "shift": 5.0}),
        "5": ("ModelSamplingSD3", {"model": ("2", 0), "shift": 5.0}),
        "6": ("CLIPLoader", {"clip_name": "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "type": "wan"}),
        "7": ("LoadImage", {"image": "start.png"}),
        "8": ("WanImageToVideo", {"positive": ("9", 0), "negative": ("10", 0), "vae": ("11", 0), "width": 640,
                                  "height": 384, "length": 82, "batch_size": 1, "start_image": ("7", 0)}),
        "9": ("CLIPTextEncode", {"text": "waves", "clip": ("6", 0)}),
        "10": ("CLIPTextEncode", {"text": "blurred", "clip": ("6", 0)}),
        "11": ("VAELoader", {"vae_name": "wan_2.1_vae.safetensors"}),
        "12": ("KSamplerAdvanced", {**sampler, "model": ("4", 0), "latent_image": ("8", 2), "start_at_step": 0,
                                    "end_at_step": 10, "add_noise": "enable",
                                    "return_with_leftover_noise": "enable"}),
        "13": ("KSamplerAdvanced", {**sampler, "model": ("5", 0), "latent_image": ("12", 0), "start_at_step": 10,
                                    "end_at_step": 10000, "add_noise": "disable",
                                    "return_with_leftover_noise": "disable", **second}),
        "14": ("VAEDecode", {"samples": ("13", 0), "vae": ("11", 0)}),
        "15": ("CreateVideo", {"images": ("14", 0), "fps": 16}),
        "16": ("SaveVideo", {"video": ("15", 0)}),
    }  # fmt: skip


def test_two_samplers_in_a_row_are_two_experts() -> None:
    found = translated(graph_of(experts(cfg=2.0)))
    request = found.request
    assert len(request["sigmas"]) == 20
    # The change lies between the tenth step and the eleventh: shift 5 of 0.55 and of 0.5.
    assert 5 / 6 < request["boundary_ratio"] < 5 * 0.55 / (1 + 4 * 0.55)
    assert (request["guidance_scale"], request["guidance_scale_2"], request["negative_prompt"]) == (3.5, 2.0, "blurred")
    # As ComfyUI rounds a length down to 4 n + 1.
    assert (request["num_frames"], request["fps"], request["image_path"]) == (81, 16, "start.png")
    assert found.files["transformer_2_path"].file == "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors"
    assert [(lora.file, lora.scale, component) for lora, component in found.loras] == [
        ("high.safetensors", 0.5, "transformer")
    ]
    assert [(each.id, name) for each, name in found.inputs] == [("7", "start.png")]


@table(
    "second, reason",
    [
        ({"start_at_step": 12}, "does not go on where the first one ends"),
        ({"add_noise": "enable"}, "does not go on where the first one ends"),
        ({"positive": ("10", 0)}, "another prompt for the second expert"),
        ({"sampler_name": "lcm"}, "another sampler for the second expert"),
        ({"end_at_step": 15, "return_with_leftover_noise": "enable"}, "expected 0"),
    ],
)
def test_other_pairs_of_samplers_are_refused(second: dict[str, Any], reason: str) -> None:
    assert reason in refused(graph_of(experts(**second))).message()


def test_two_samplers_of_one_model_are_one_run() -> None:
    nodes = experts()
    nodes["5"] = ("ModelSamplingSD3", {"model": ("3", 0), "shift": 5.0})
    kind, inputs = nodes["13"]
    nodes["13"] = (kind, {**inputs, "model": ("4", 0)})
    found = translated(graph_of(nodes))
    assert len(found.request["sigmas"]) == 20
    assert "boundary_ratio" not in found.request


def test_guidance_is_written_as_the_model_takes_it() -> None:
    nodes: Nodes = {
        "1": ("UNETLoader", {"unet_name": "flux1-dev.safetensors", "weight_dtype": "fp8_e4m3fn"}),
        "2": ("DualCLIPLoader", {"clip_name1": "t5xxl_fp16.safetensors", "clip_name2": "clip_l.safetensors"}),
        "3": ("VAELoader", {"vae_name": "ae.safetensors"}),
        "4": ("CLIPTextEncode", {"text": "a cat", "clip": ("2", 0)}),
        "5": ("FluxGuidance", {"conditioning": ("4", 0), "guidance": 3.0}),
        "6": ("EmptySD3LatentImage", {"width": 512, "height": 512, "batch_size": 1}),
        "7": ("RandomNoise", {"noise_seed": 4}),
        "8": ("BasicGuider", {"model": ("1", 0), "conditioning": ("5", 0)}),
        "9": ("KSamplerSelect", {"sampler_name": "euler"}),
        "10": ("BasicScheduler", {"model": ("1", 0), "scheduler": "simple", "steps": 4, "denoise": 1.0}),
        "11": ("SamplerCustomAdvanced", {"noise": ("7", 0), "guider": ("8", 0), "sampler": ("9", 0),
                                         "sigmas": ("10", 0), "latent_image": ("6", 0)}),
        "12": ("VAEDecodeTiled", {"samples": ("11", 0), "vae": ("3", 0)}),
        "13": ("SaveImage", {"images": ("12", 0)}),
    }  # fmt: skip
    found = translated(graph_of(nodes))
    assert found.request["guidance_scale"] == 3.0
    # e^1.15 of a half.
    assert found.request["sigmas"][2] == pytest.approx(3.158193 / 4.158193, abs=1e-6)
    assert found.files["text_encoder_path"].file == "clip_l.safetensors"
    assert found.files["text_encoder_2_path"].file == "t5xxl_fp16.safetensors"
    kinds = verdicts(found)
    assert kinds["1"] is kinds["12"] is Verdict.REPLACED


def test_a_size_holds_whole_latents() -> None:
    document = api_format(z_image())
    document["6"] = {"class_type": "EmptyFlux2LatentImage", "inputs": {"width": 1322, "height": 793, "batch_size": 1}}
    request = translated(graph_of_document(document)).request
    assert (request["width"], request["height"]) == (1312, 784)


def test_a_sound_is_kept_by_a_mask_of_0_alone() -> None:
    nodes: Nodes = {
        "1": ("CheckpointLoaderSimple", {"ckpt_name": "ltx-2.3-22b-distilled-fp8.safetensors"}),
        "2": ("LTXAVTextEncoderLoader", {"text_encoder": "gemma.safetensors", "ckpt_name": "ltx-2.3-22b.safetensors"}),
        "3": ("CLIPTextEncode", {"text": "a song", "clip": ("2", 0)}),
        "4": ("EmptyLTXVLatentVideo", {"width": 256, "height": 128, "length": 9, "batch_size": 1}),
        "5": ("LTXVAudioVAEEncode", {"audio": ("6", 0)}),
        "6": ("TrimAudioDuration", {"start_index": 0, "duration": 1, "audio": ("7", 0)}),
        "7": ("LoadAudio", {"audio": "song.wav"}),
        "8": ("SolidMask", {"value": 0, "width": 8, "height": 8}),
        "9": ("SetLatentNoiseMask", {"samples": ("5", 0), "mask": ("8", 0)}),
        "10": ("LTXVConcatAVLatent", {"video_latent": ("4", 0), "audio_latent": ("9", 0)}),
        "11": ("KSampler", {"model": ("1", 0), "positive": ("3", 0), "negative": ("3", 0), "latent_image": ("10", 0),
                            "seed": 3, "steps": 4, "cfg": 1, "sampler_name": "euler", "scheduler": "simple"}),
        "12": ("LTXVSeparateAVLatent", {"av_latent": ("11", 0)}),
        "13": ("VAEDecode", {"samples": ("12", 0), "vae": ("1", 2)}),
        "14": ("CreateVideo", {"images": ("13", 0), "fps": 25}),
        "15": ("SaveVideo", {"video": ("14", 0)}),
    }  # fmt: skip
    assert translated(graph_of(nodes)).request["audio_path"] == "song.wav"
    nodes["8"] = ("SolidMask", {"value": 1, "width": 8, "height": 8})
    assert "expected a mask of 0 over a sound" in refused(graph_of(nodes)).message()
    nodes["10"] = ("LTXVConcatAVLatent", {"video_latent": ("4", 0), "audio_latent": ("5", 0)})
    assert "a sound that is denoised" in refused(graph_of(nodes)).message()


def test_block_sparse_attention_is_chosen_with_the_steps_before_it_dense() -> None:
    document = api_format(z_image(steps=8))
    sparse = {"selection": "vsa", "selection.keep_percent": 10, "start_percent": 0.2, "end_percent": 1,
              "dense_blocks": "", "min_tokens": 12288, "model": ["7", 0]}  # fmt: skip
    document["50"] = {"class_type": "BlockSparseAttention", "inputs": sparse}
    document["8"]["inputs"]["model"] = ["50", 0]
    found = translated(graph_of_document(document))
    # Of the schedule before its shift 1 and 0.875 lie above 0.8.
    extra = {"sparsity": 0.9, "min_tokens": 12288, "dense_first_steps": 2}
    assert found.runtime["attention"] == {"per_role": {"self": {"backend": "video_sparse_attn", "extra": extra}}}
    assert verdicts(found)["50"] is Verdict.REPLACED
    for change in ({"end_percent": 0.8}, {"selection": "topk"}, {"dense_blocks": "0,1"}):
        document["50"]["inputs"] = {**sparse, **change}
        assert f"{next(iter(change))}: expected" in refused(graph_of_document(document)).message()


def test_workflows_that_generate_nothing() -> None:
    loaded = {"1": ("LoadImage", {"image": "a.png"})}
    with pytest.raises(WorkflowError, match="no node that writes a picture"):
        translate(graph_of(loaded))
    written: Nodes = {**loaded, "2": ("SaveImage", {"images": ("1", 0)})}
    assert "of no sampler" in refused(graph_of(written)).message()


def test_a_chain_of_ten_thousand_nodes_ends() -> None:
    nodes: Nodes = {"0": ("PrimitiveInt", {"value": 1})}
    nodes |= {str(index): ("PreviewAny", {"source": (str(index - 1), 0)}) for index in range(1, 10_000)}
    nodes["x"] = ("SaveImage", {"images": ("9999", 0)})
    assert "expected pictures or a video" in refused(graph_of(nodes)).message()


def test_a_name_in_a_workflow_is_a_file_below_its_folders(tmp_path: Path) -> None:
    """A workflow may be a stranger's: it reads no other file, and no LoRA of the hub. What the user names may lie
    anywhere."""
    nodes, secret = experts(), tmp_path / "secret.png"
    secret.touch()
    (tmp_path / "models" / "loras").mkdir(parents=True)
    for identity, key, model in (("1", "unet_name", None), ("3", "lora_name", "wan2.2-i2v-a14b")):
        kind, inputs = nodes[identity]
        for place in ("/etc/", "../", "hf://org/"):
            name = f"{place}wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"
            found = translated(graph_of({**nodes, identity: (kind, {**inputs, key: name})}))
            with pytest.raises(WorkflowError, match="expected the name of a file below ComfyUI's"):
                settings_of(found, [str(tmp_path / "models")], model)
    hub = translated(
        graph_of({**nodes, "3": ("LoraLoaderModelOnly", {"model": ("1", 0), "lora_name": "a/b/c.safetensors"})})
    )
    with pytest.raises(ModelLoadError, match=r"there is no .a/b/c\.safetensors. here"):
        settings_of(hub, [str(tmp_path / "models")], "wan2.2-i2v-a14b")
    for name in (str(secret), "../secret.png"):
        assert "outside of it" in refused(graph_of({**nodes, "7": ("LoadImage", {"image": name})})).message()
    file = tmp_path / "workflow.json"
    file.write_text(json.dumps({key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}))
    given = read_translation(str(file), [f"7.image={secret}"])
    assert isinstance(given, Translation)
    assert given.request["image_path"] == str(secret)
