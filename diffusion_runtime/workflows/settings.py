"""A workflow as settings: nodes that `--set` changes, its files below ComfyUI's folders, and config values."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion_runtime.errors import ConfigError, nearest, shown
from diffusion_runtime.models.comfyui_folders import LORAS, VARIABLE, model_roots, named_file
from diffusion_runtime.untrusted.document import DocumentError
from diffusion_runtime.untrusted.files import user_path
from diffusion_runtime.untrusted.json_text import parse_json
from diffusion_runtime.weights.weight_files import SUFFIXES
from diffusion_runtime.workflows.evaluation import Finding, Verdict
from diffusion_runtime.workflows.graph import Graph, Link, Node, WorkflowError
from diffusion_runtime.workflows.input_files import found_input
from diffusion_runtime.workflows.reading import folder_of, read_workflow
from diffusion_runtime.workflows.translation import Refusal, Translation, translate

_NODE_VALUE = re.compile(r"(\d+(?::\d+)*)\.([^=]+)=(.*)", re.DOTALL)
# Folders of ComfyUI that hold files of one kind.
_ALIKE = {"diffusion_models": ("diffusion_models", "unet"), "text_encoders": ("text_encoders", "clip")}
_MODES = (2, 4)


@dataclass(frozen=True)
class WorkflowSettings:
    """runtime, request: as a config file has them, with prompt, negative_prompt and seed as lists; notes: what is
    replaced, a line each; findings: of every node that counts."""

    runtime: Mapping[str, Any]
    request: Mapping[str, Any]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    not_reached: tuple[Node, ...]
    model: str


def is_node_value(text: str) -> bool:
    """Return whether a text of `--set` names an input of a node: `6.text=a cat`, `105:10.steps=8`."""
    return _NODE_VALUE.fullmatch(text) is not None


def with_node_values(graph: Graph, settings: Sequence[str]) -> Graph:
    """Return a graph in which inputs have the values of NODE.input=VALUE, which are JSON or a text; the input `mode` is
    2 to leave a node out and 4 to go around it. Raises WorkflowError for a node that there is none of."""
    nodes = dict(graph.nodes)
    for text in settings:
        found = _NODE_VALUE.fullmatch(text)
        if found is None:
            raise WorkflowError(f"--set {shown(text)}: expected NODE.input=VALUE, such as 6.text=hello")
        identity, name, raw = found.groups()
        if identity not in nodes:
            raise WorkflowError(f"--set {shown(text)}: the workflow has no node {identity}.{nearest(identity, nodes)}")
        value = _value(raw)
        if name == "mode":
            nodes = _with_mode(nodes, identity, value)
            continue
        node = nodes[identity]
        if name not in node.inputs:
            raise WorkflowError(
                f"--set {shown(text)}: {node} has no input {shown(name)}.{nearest(name, list(node.inputs))}"
            )
        nodes[identity] = dataclasses.replace(node, inputs={**node.inputs, name: value})
    return Graph(nodes)


def _value(raw: str) -> Any:
    try:
        return parse_json(raw)
    except DocumentError:
        return raw


def _with_mode(nodes: Mapping[str, Node], identity: str, mode: object) -> dict[str, Node]:
    if mode not in _MODES:
        raise WorkflowError(f"--set {identity}.mode: expected 2 (muted) or 4 (bypassed), got {shown(mode)}")
    passed: Sequence[Link | None] = _passed_on(nodes[identity]) if mode == 4 else []

    def changed(node: Node) -> Node:
        inputs = dict(node.inputs)
        for name, value in node.inputs.items():
            if isinstance(value, Link) and value.node == identity:
                inputs[name] = passed[value.output] if 0 <= value.output < len(passed) else None
        return dataclasses.replace(node, inputs={name: value for name, value in inputs.items() if value is not None})

    return {key: changed(node) for key, node in nodes.items() if key != identity}


# Inputs that a node has as outputs as well, in the order of its outputs.
_PASSED = (("model", "clip"), ("positive", "negative", "latent"))


def _passed_on(node: Node) -> Sequence[Link | None]:
    """Return what each output of a node is where it is bypassed: an input of the same kind. Kinds are not in this
    graph, and names stand for them."""
    links = {name: value for name, value in node.inputs.items() if isinstance(value, Link)}
    for names in _PASSED:
        if names[0] in links:
            return [links.get(name) for name in names]
    return list(links.values())[:1]


def input_places(path: str, models_dir: Sequence[str], settings: Sequence[str] = ()) -> tuple[Path, ...]:
    """Return the folders in which files of LoadImage are looked for, beside the workflow and ComfyUI's `input`, and the
    files that values of `--set` name."""
    own = folder_of(path)
    beside = [user_path(text, "models_dir") for text in models_dir]
    inputs = [place / "input" for folder in beside for place in (folder, folder.absolute().parent)]
    values = [found[3] for text in settings if (found := _NODE_VALUE.fullmatch(text))]
    given = [user_path(value, "--set", WorkflowError) for value in values if os.path.isfile(value)]
    return tuple(dict.fromkeys((own, *inputs, *given)))


def read_translation(
    path: str, settings: Sequence[str] = (), models_dir: Sequence[str] = (), prompt: str | None = None
) -> Translation | Refusal:
    """Return what a workflow's file asks for, with values of `--set`. Raises WorkflowError that names the file."""
    try:
        graph = with_node_values(read_workflow(path), settings)
        return translate(graph, input_places(path, models_dir, settings), prompt)
    except WorkflowError as error:
        text = str(error)
        raise WorkflowError(text if text.startswith("--workflow") else f"--workflow: {path}: {text}") from error


def workflow_settings(
    path: str,
    settings: Sequence[str] = (),
    models_dir: Sequence[str] = (),
    model_path: str | None = None,
    prompt: str | None = None,
) -> WorkflowSettings:
    """Return a workflow's file as settings. model_path: a model that is run in place of the workflow's files.

    Raises WorkflowError for nodes that are not supported and files that are not there, ConfigError for folders.
    """
    translation = read_translation(path, settings, models_dir, prompt)
    if isinstance(translation, Refusal):
        raise WorkflowError(f"--workflow: {path}: {translation.message()}")
    places = input_places(path, models_dir, settings)
    missing = [(node, name) for node, name in translation.inputs if found_input(name, places) is None]
    if missing:
        lines = [f"  {node}: {shown(name)}" for node, name in missing]
        where = ", ".join(map(str, places))
        node, _ = missing[0]
        raise WorkflowError(
            "\n".join([f"--workflow: {path}: files that it starts from are not in {where}:", *lines])
            + f"\ngive them by their path: --set {node.id}.{_input_of(node)}=FILE"
        )
    return settings_of(translation, models_dir, model_path, path)


def _input_of(node: Node) -> str:
    return next((name for name in ("image", "file", "audio") if name in node.inputs), "image")


def settings_of(
    translation: Translation, models_dir: Sequence[str], model_path: str | None = None, path: str = ""
) -> WorkflowSettings:
    """Return a translation as settings, its files below the folders of models. Raises ConfigError and ModelLoadError
    for files that are not there."""
    runtime = dict(translation.runtime)
    if model_path is not None:
        runtime = {name: value for name, value in runtime.items() if name != "like"} | {"model_path": model_path}
        notes = [f"the files of the workflow are left out: {model_path} runs in their place (--model-path)"]
    else:
        roots = model_roots(None, models_dir)
        if not roots:
            names = ", ".join(weights.file for weights in translation.files.values())
            raise ConfigError(
                f"models_dir: --workflow: {path}: names files below ComfyUI's folders of models ({names}); give "
                f"--models-dir ComfyUI/models, set {VARIABLE}, or run the published model with --model-path "
                f"{translation.model.name}"
            )
        for key, weights in translation.files.items():
            runtime[key] = _found(weights.file, key, roots, weights.folder)
        runtime["models_dir"] = list(models_dir)
        notes = []
    if translation.loras:
        roots = model_roots(None, models_dir)
        if not roots:
            names = ", ".join(dict.fromkeys(lora.file for lora, _ in translation.loras))
            raise ConfigError(
                f"models_dir: --workflow: {path}: names LoRA files below ComfyUI's folders of models ({names}); give "
                f"--models-dir ComfyUI/models, or set {VARIABLE}"
            )
        runtime["lora"] = [
            {"path": _found(lora.file, "lora.path", roots, LORAS), "scale": lora.scale, "component": component}
            for lora, component in translation.loras
        ]
    lists = ("prompt", "negative_prompt", "seed")
    request = {
        name: [value] if name in lists else value for name, value in translation.request.items() if value is not None
    }
    notes += [
        f"{finding.node}: replaced by {finding.remark}"
        for finding in translation.findings
        if finding.verdict is Verdict.REPLACED and "--output-path" not in finding.remark
    ]
    return WorkflowSettings(
        runtime, request, tuple(notes), translation.findings, translation.not_reached, translation.model.name
    )


def _found(file: str, key: str, roots: Sequence[Path], folder: str) -> str:
    """Return the path of a file of weights by the name that a node has. A workflow may be a stranger's: its names are
    files below these folders or of the current one, and never a path elsewhere or a name of the hub's. Raises
    WorkflowError, and what `named_file` raises."""
    name, folders = file.replace("\\", "/"), _ALIKE.get(folder, (folder,))
    if not name.endswith(SUFFIXES) or name.startswith(("/", "~", ".")) or ":" in name or ".." in Path(name).parts:
        raise WorkflowError(
            f"{key}: {shown(file)}: expected the name of a file below ComfyUI's {folder}, such as a.safetensors; put "
            "the file there, and name it: --set NODE.input=NAME"
        )
    for place in folders:
        found = named_file(name, key, roots, place, is_sure=place == folders[-1])
        if found is not None:
            return str(found)
    return name
