"""Workflow files: changed values, changed bytes, chains and cycles of thousands of nodes, nodes and links that are
gone, code in expressions; of small workflows and of ComfyUI's own templates."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fuzz.hostile_values import mutate_bytes, mutate_value, strange_value, to_json
from fuzz.runner import command
from workflows.comfy_graphs import api_format, node, with_subgraph, z_image

EXPRESSIONS = (
    "__import__('os').system('touch pwned')",
    "open('pwned', 'w')", "a.__class__", "9**9**9", "(" * 900, "1/0", "a" * 5000,
    "(lambda: 1)()", "exec('x')", "[0] * 10**9", "1e308 * 10", "max(" + "1," * 900 + "1)", "-" * 1900 + "1", "2**64**2",
)  # fmt: skip

# Of comfyui-workflow-templates-json: two experts, two stages with sound, edited images, references, skipped layers.
TEMPLATES = (
    "video_wan2_2_14B_i2v", "video_ltx2_3_i2v", "image_qwen_image_edit_2511", "video_minimax_h3_r2v",
    "flux_kontext_dev_basic", "image_moss_image_base_t2i", "video_wan_vace_flf2v", "video_wan_animate2_distilled",
)  # fmt: skip
_MOST_BYTES = 300_000


@dataclass(frozen=True)
class WorkflowCase:
    arguments: tuple[str, ...]
    change: str

    def __str__(self) -> str:
        return f"{list(self.arguments)!r}: {self.change}"

    def run(self) -> str | None:
        what = command(self.arguments)
        return "an expression ran" if Path("pwned").exists() else what


class Workflows:
    """See fuzz.runner.Kind."""

    def __init__(self, folder: Path, *, is_quick: bool) -> None:
        self._most = 2_000 if is_quick else 12_000
        self._plain = [z_image(), api_format(z_image()), _sized(), _guided()]
        self._templates = _templates()

    def warm_up(self) -> None:
        Path("w.json").write_bytes(to_json(z_image()))
        command(("workflow", "explain", "w.json"))

    def case(self, random: random.Random, folder: Path) -> WorkflowCase:
        document, change = self._document(random)
        name = random.choice(("w.json", "w.json", "w.png", "w.mp4"))
        content = to_json(document)
        if random.random() < 0.2:
            content, change = mutate_bytes(random, content), f"{change}, changed bytes"
        if name == "w.mp4":
            content = b"\0\0\0\x18ftypisom" + b"\0" * 12 + b"workflow\0" + content
        elif name == "w.png":
            packed = b"workflow\0" + content
            content = b"\x89PNG\r\n\x1a\n" + len(packed).to_bytes(4, "big") + b"tEXt" + packed + b"\0" * 4
        (folder / name).write_bytes(content)
        more = random.choice(((), ("--json",), ("--set", "8.steps=1e99"), ("--set", "8.mode=4"), ("a prompt",)))
        verb = ("generate", "--workflow", name, "--dry-run") if random.random() < 0.1 else ("workflow", "explain", name)
        return WorkflowCase((*verb, *more), f"{change}: {str(document)[:200]}")

    def _document(self, random: random.Random) -> tuple[Any, str]:
        kind = random.randrange(10)
        if kind == 0:
            expression = random.choice(EXPRESSIONS)
            return _with_expression(expression), f"expression {expression[:40]!r}"
        if kind == 1:
            return _chain(random.randrange(self._most), closes=random.random() < 0.5), "a chain"
        if kind == 2:
            document = with_subgraph([])
            for _ in range(random.randrange(4)):
                document["definitions"]["subgraphs"][0]["nodes"].append(node(random.randrange(99), "sub"))
            return document, "subgraphs within themselves"
        if kind == 3:
            return _other_links(random, json.loads(json.dumps(random.choice(self._plain)))), "other links"
        if kind == 4:
            return _without_some(random, json.loads(json.dumps(random.choice(self._templates)))), "nodes that are gone"
        document = random.choice(self._plain if kind < 8 else self._templates)
        for _ in range(random.choice((1, 1, 3, 10))):
            document = mutate_value(random, document)
            # One more change may repeat it a hundred times, and the reader's own limit is 16 MB.
            if len(to_json(document)) > _MOST_BYTES:
                break
        return document, "changed values"


def _templates() -> list[dict[str, Any]]:
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "templates"
    return [json.loads((folder / f"{name}.json").read_text()) for name in TEMPLATES]


def _without_some(random: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Nodes or links left out, of the workflow and of its subgraphs, whose other ends stay."""
    for graph in (document, *document.get("definitions", {}).get("subgraphs", ())):
        for name in ("nodes", "links"):
            graph[name] = [each for each in graph[name] if random.random() > 0.05]
    return document


def _sized() -> dict[str, Any]:
    """The image with its size from an expression."""
    document = api_format(z_image())
    document["40"] = {"class_type": "ComfyMathExpression", "inputs": {"expression": "a * 64", "values.a": 4}}
    document["6"]["inputs"]["width"] = ["40", 1]
    return document


def _guided() -> dict[str, Any]:
    """Nodes that change guidance, and a second sampler that goes on without it."""
    document = api_format(z_image(cfg=4))
    skipped = {"double_layers": "9, 10", "single_layers": "", "scale": 2.5, "start_percent": 0.1, "end_percent": 0.4}
    document["41"] = {"class_type": "SkipLayerGuidanceDiT", "inputs": {"model": ["7", 0], **skipped}}
    init = {"use_zero_init": True, "zero_init_steps": 0}
    document["42"] = {"class_type": "CFGZeroStarAndInit", "inputs": {"model": ["41", 0], **init}}
    document["1"]["inputs"] = {"unet_name": "wan2.1_t2v_14B_fp16.safetensors", "weight_dtype": "fp8_e4m3fn_fast"}
    plain = {name: value for name, value in document["8"]["inputs"].items() if name not in ("seed", "denoise")}
    plain |= {"model": ["42", 0], "noise_seed": 3, "start_at_step": 0, "end_at_step": 2, "add_noise": "enable",
              "return_with_leftover_noise": "enable"}  # fmt: skip
    document["8"] = {"class_type": "KSamplerAdvanced", "inputs": plain}
    behind = {**plain, "cfg": 1, "start_at_step": 2, "end_at_step": 9, "add_noise": "disable", "latent_image": ["8", 0]}
    document["43"] = {"class_type": "KSamplerAdvanced", "inputs": behind}
    document["9"]["inputs"]["samples"] = ["43", 0]
    return document


def _with_expression(expression: str) -> dict[str, Any]:
    document = _sized()
    document["40"]["inputs"]["expression"] = expression
    return document


def _chain(length: int, *, closes: bool) -> dict[str, Any]:
    """Many nodes in a row, the last of which leads back to the first in a cycle."""
    document = api_format(z_image())
    for index in range(length):
        source = ["1", 0] if index == 0 else [f"c{index - 1}", 0]
        document[f"c{index}"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": source, "shift": 3}}
    if length:
        document["7"]["inputs"]["model"] = [f"c{length - 1}", 0]
        if closes:
            document["c0"]["inputs"]["model"] = [f"c{length - 1}", 0]
    return document


def _other_links(random: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Links to other nodes, to themselves, and to outputs that there are none of."""
    nodes = document.get("nodes")
    if nodes is None:
        for each in document.values():
            for name in list(each["inputs"]):
                if random.random() < 0.3:
                    slot = random.choice((0, 1, -1, 10**9))
                    each["inputs"][name] = [random.choice(list(document)), slot]
        return document
    for link in document["links"]:
        if random.random() < 0.3:
            link[random.randrange(5)] = random.choice((0, 1, 5, 8, -10, -20, 10**9, strange_value(random)))
    return document
