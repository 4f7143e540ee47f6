"""Small workflows in the editor's format, as ComfyUI saves them."""

from __future__ import annotations

from typing import Any


def node(
    identity: int, kind: str, values: Any = (), inputs: dict[str, int] | None = None, **more: Any
) -> dict[str, Any]:
    """inputs: link by name; a name with a star is a widget's."""
    entries = []
    for name, link in (inputs or {}).items():
        entry: dict[str, Any] = {"name": name.removesuffix("*"), "type": "*", "link": link}
        if name.endswith("*"):
            entry["widget"] = {"name": name.removesuffix("*")}
        entries.append(entry)
    values = values if isinstance(values, dict) else list(values)
    return {"id": identity, "type": kind, "mode": 0, "inputs": entries, "outputs": [], "widgets_values": values, **more}


def z_image(**changes: Any) -> dict[str, Any]:
    """An image of Z-Image-Turbo; changes: of the sampler's widgets."""
    sampler = {
        "seed": 7,
        "control_after_generate": "fixed",
        "steps": 4,
        "cfg": 1,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1,
        **changes,
    }
    return {
        "nodes": [
            node(1, "UNETLoader", ["z_image_turbo_bf16.safetensors", "default"]),
            node(2, "CLIPLoader", ["qwen_3_4b.safetensors", "lumina2", "default"]),
            node(3, "VAELoader", ["ae.safetensors"]),
            node(4, "CLIPTextEncode", ["a cat"], {"clip": 10}),
            node(5, "ConditioningZeroOut", [], {"conditioning": 11}),
            node(6, "EmptySD3LatentImage", [256, 128, 1]),
            node(7, "ModelSamplingAuraFlow", [3], {"model": 12}),
            node(
                8, "KSampler", list(sampler.values()), {"model": 13, "positive": 14, "negative": 15, "latent_image": 16}
            ),
            node(9, "VAEDecode", [], {"samples": 17, "vae": 18}),
            node(20, "SaveImage", ["z"], {"images": 19}),
            node(30, "MarkdownNote", ["words"]),
        ],
        "links": [
            [10, 2, 0, 4, 0, "CLIP"],
            [11, 4, 0, 5, 0, "CONDITIONING"],
            [12, 1, 0, 7, 0, "MODEL"],
            [13, 7, 0, 8, 0, "MODEL"],
            [14, 4, 0, 8, 1, "CONDITIONING"],
            [15, 5, 0, 8, 2, "CONDITIONING"],
            [16, 6, 0, 8, 3, "LATENT"],
            [17, 8, 0, 9, 0, "LATENT"],
            [18, 3, 0, 9, 1, "VAE"],
            [19, 9, 0, 20, 0, "IMAGE"],
        ],
    }


def api_format(document: dict[str, Any]) -> dict[str, Any]:
    """The same in the API's format, of a document without subgraphs and special nodes."""
    from diffusion_runtime.workflows.graph import Link
    from diffusion_runtime.workflows.reading import graph_of_document

    graph = graph_of_document(document)
    return {
        each.id: {
            "class_type": each.kind,
            "inputs": {key: list(value) if isinstance(value, Link) else value for key, value in each.inputs.items()},
        }
        for each in graph.nodes.values()
    }


# One step of a subgraph around a node that doubles its first input, with its widget shown outside.
def with_subgraph(values: Any, **instance: Any) -> dict[str, Any]:
    return {
        "nodes": [
            node(1, "PrimitiveInt", [5, "fixed"]),
            node(50, "sub", values, {"amount": 1}, **instance),
            node(60, "PreviewAny", [], {"source": 2}),
        ],
        "links": [[1, 1, 0, 50, 0, "INT"], [2, 50, 0, 60, 0, "INT"]],
        "definitions": {
            "subgraphs": [
                {
                    "id": "sub",
                    "inputs": [
                        {"name": "amount", "type": "INT", "linkIds": [7]},
                        {"name": "text", "type": "STRING", "linkIds": [8]},
                    ],
                    "nodes": [node(10, "ComfyMathExpression", ["a * 2"], {"values.a": 7, "expression*": 8})],
                    "links": [
                        {"id": 7, "origin_id": -10, "origin_slot": 0, "target_id": 10, "target_slot": 0},
                        {"id": 8, "origin_id": -10, "origin_slot": 1, "target_id": 10, "target_slot": 1},
                        {"id": 9, "origin_id": 10, "origin_slot": 1, "target_id": -20, "target_slot": 0},
                    ],
                }
            ]
        },
    }
