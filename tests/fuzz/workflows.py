"""Workflow files: changed values, changed bytes, chains and cycles of thousands of nodes, code in expressions."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
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
        self._plain = [z_image(), api_format(z_image()), _sized()]

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
        kind = random.randrange(8)
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
        document = random.choice(self._plain)
        for _ in range(random.choice((1, 1, 3, 10))):
            document = mutate_value(random, document)
        return document, "changed values"


def _sized() -> dict[str, Any]:
    """The image with its size from an expression."""
    document = api_format(z_image())
    document["40"] = {"class_type": "ComfyMathExpression", "inputs": {"expression": "a * 64", "values.a": 4}}
    document["6"]["inputs"]["width"] = ["40", 1]
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
