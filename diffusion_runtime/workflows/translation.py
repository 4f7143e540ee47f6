"""Translation of a workflow: from what its output node shows back to one request, and the files of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.workflows.evaluation import Evaluation, Finding, NotSupportedError, Verdict
from diffusion_runtime.workflows.graph import Graph, Link, Node, WorkflowError
from diffusion_runtime.workflows.known_models import KnownModel
from diffusion_runtime.workflows.node_table import TABLE
from diffusion_runtime.workflows.picture_nodes import OUTPUTS, PREVIEWS
from diffusion_runtime.workflows.request_parts import RequestParts
from diffusion_runtime.workflows.values import (
    Lora,
    MovieValue,
    PictureValue,
    Weights,
)
from diffusion_runtime.workflows.workflow_request import request_of_outputs


@dataclass(frozen=True)
class Translation:
    """A request, and what becomes of each node.

    model: the published one that the transformer's file is of. request, runtime: values of GenerationRequest and
    RuntimeConfig; files: names of files by the option of RuntimeConfig that they are for; inputs: request fields with
    names of files that are to be found. not_reached: nodes that no output needs.
    """

    model: KnownModel
    request: Mapping[str, Any]
    runtime: Mapping[str, Any]
    files: Mapping[str, Weights]
    loras: tuple[tuple[Lora, str], ...]
    inputs: tuple[tuple[Node, str], ...]
    findings: tuple[Finding, ...]
    not_reached: tuple[Node, ...]


@dataclass(frozen=True)
class Refusal:
    """Nodes that are not supported, with reasons, which stand in the way."""

    findings: tuple[Finding, ...]
    not_reached: tuple[Node, ...]

    @property
    def reasons(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.verdict is Verdict.NOT_SUPPORTED)

    def message(self) -> str:
        lines = [f"  {each.node}: {each.remark}" for each in self.reasons[:20]]
        more = [] if len(self.reasons) <= 20 else [f"  and {len(self.reasons) - 20} more"]
        return "\n".join([f"{len(self.reasons)} of its nodes change the result and are not supported:", *lines, *more])


def translate(graph: Graph, places: Sequence[Path] = (), prompt: str | None = None) -> Translation | Refusal:
    """Return what a workflow asks for, or what stands in the way. places: folders of input files. prompt: in place of
    the workflow's own, whose nodes are then not looked at. Raises WorkflowError for a graph without an output, or with
    cycles."""
    if prompt is not None:
        graph = _with_prompt(graph, prompt)
    evaluation = Evaluation(graph, TABLE, tuple(places))
    outputs = _outputs_of(graph)
    found = []
    for node in outputs:
        evaluation.output_of(Link(node.id, 0))
        link = next((each for each in node.inputs.values() if isinstance(each, Link)), None)
        value = None if link is None else evaluation.output_of(link)
        if isinstance(value, PictureValue | MovieValue):
            found.append((node, value))
    translated: RequestParts | None = None
    if not evaluation.refused:
        try:
            translated = request_of_outputs(evaluation, found)
        except NotSupportedError as error:
            evaluation.refuse(error.node or outputs[0], str(error))
    findings = tuple(evaluation.findings.values())
    not_reached = tuple(node for node in graph.nodes.values() if node.id not in evaluation.findings)
    if evaluation.refused or translated is None:
        if not evaluation.refused:
            evaluation.refuse(outputs[0], "nothing that is made reaches it")
        return Refusal(tuple(evaluation.findings.values()), not_reached)
    return Translation(
        translated.model,
        translated.request,
        translated.runtime,
        translated.files,
        tuple(translated.loras),
        tuple(translated.inputs),
        findings,
        not_reached,
    )


def _outputs_of(graph: Graph) -> list[Node]:
    for kinds in (OUTPUTS, PREVIEWS):
        found = [node for node in graph.nodes.values() if node.kind in kinds]
        if found:
            return found
    raise WorkflowError(f"it has no node that writes a picture or a video: expected {', '.join(OUTPUTS)}")


def _with_prompt(graph: Graph, prompt: str) -> Graph:
    """Return a graph whose positive conditions have another text."""
    names = {"CLIPTextEncode": ("text",), "CLIPTextEncodeFlux": ("clip_l", "t5xxl")}
    positive = _positive_texts(graph)
    nodes = dict(graph.nodes)
    for identity in positive:
        node = nodes[identity]
        texts = dict.fromkeys(names.get(node.kind, ("prompt",)), prompt)
        nodes[identity] = dataclasses.replace(node, inputs={**node.inputs, **texts})
    return Graph(nodes)


_GUIDERS = ("CFGGuider", "LTXVDualCFGGuider", "ScheduledCFGGuidance")
_TEXT_KINDS = ("CLIPTextEncode", "CLIPTextEncodeFlux", "TextEncodeQwenImageEdit", "TextEncodeQwenImageEditPlus",
               "TextEncodeQwenImage21", "MiniMaxH3ImageToVideo", "MiniMaxH3ReferenceToVideo")  # fmt: skip


def _positive_texts(graph: Graph) -> set[str]:
    """Return the ids of nodes of texts that reach a `positive` or an only `conditioning` of a sampler or guider."""
    waiting = []
    for node in graph.nodes.values():
        if node.kind in ("KSampler", "KSamplerAdvanced", "SamplerCustom") or node.kind in _GUIDERS:
            waiting.append(node.inputs.get("positive"))
        elif node.kind == "BasicGuider":
            waiting.append(node.inputs.get("conditioning"))
    found: set[str] = set()
    seen: set[str] = set()
    while waiting:
        link = waiting.pop()
        if not isinstance(link, Link) or link.node in seen or link.node not in graph.nodes:
            continue
        seen.add(link.node)
        node = graph.nodes[link.node]
        if node.kind in _TEXT_KINDS:
            found.add(node.id)
        elif "positive" in node.inputs:
            waiting.append(node.inputs["positive"])
        else:
            waiting += [value for name, value in node.inputs.items() if name in ("conditioning", "on_true", "on_false")]
    return found
