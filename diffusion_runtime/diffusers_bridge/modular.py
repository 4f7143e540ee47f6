"""Modular pipelines of diffusers (ModularPipeline): their interface by the inputs of their blocks, loading, the call.

No code of a folder is run: blocks and components are classes of diffusers and transformers, and every component is read
from a place that is known here (models/modular_folder.py).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from diffusion_runtime.core.model_folder import INDEX_FILE, ModelFolder
from diffusion_runtime.diffusers_bridge.frames import PICTURE_FIELDS
from diffusion_runtime.diffusers_bridge.pipeline_interface import PipelineInterface
from diffusion_runtime.errors import ModelLoadError, nearest, shown

_logger = logging.getLogger("diffusion_runtime.diffusers_bridge")
_SOUND = "audio"


def is_modular_class(found: Any) -> bool:
    import diffusers

    return inspect.isclass(found) and issubclass(found, diffusers.ModularPipeline)


def modular_pipeline(pipeline_class: Any, folder: ModelFolder) -> Any:
    """Build a modular pipeline with the settings of its folder, without its components. Raises ModelLoadError for
    blocks that diffusers does not have, and for settings and components that the blocks do not know."""
    import diffusers

    assert folder.modular is not None
    where, index = folder / INDEX_FILE, folder.modular.index
    blocks = folder.modular.blocks
    if blocks is not None and getattr(diffusers, blocks, None) is None:
        raise ModelLoadError(f"{where}: key '_blocks_class_name': diffusers {diffusers.__version__} has no {blocks}")
    entries = {name: _entry(folder / name, value) if _is_pair(value) else value for name, value in index.items()}
    pipeline = pipeline_class(modular_config_dict={**entries, "_blocks_class_name": blocks})
    known = {**pipeline._component_specs, **pipeline._config_specs}
    for name, value in index.items():
        if name in known or name.startswith("_"):
            continue
        if not _is_pair(value):
            raise ModelLoadError(
                f"{where}: key {shown(name)}: {shown(value)} is unknown to its blocks.{nearest(name, known)}"
            )
        _logger.info("%s: %s is ignored: the blocks of %s take none", where, name, pipeline_class.__name__)
    return pipeline


def modular_interface(pipeline: Any) -> PipelineInterface:
    """Return the interface of a modular pipeline: the inputs and outputs of its blocks."""
    blocks = pipeline.blocks
    inputs = [each for each in blocks.inputs if each.name is not None]
    # What one block makes for another is called an input too, where some way through the blocks leaves the first out.
    made = {each.name for each in blocks.intermediate_outputs}
    needed = {each.name for each in inputs if each.required} - made
    outputs = tuple(each.name for each in blocks.outputs if each.name in (*PICTURE_FIELDS, _SOUND))
    return PipelineInterface(
        name=type(pipeline).__name__,
        parameters={each.name: inspect.Parameter.empty if each.name in needed else each.default for each in inputs},
        needed=tuple(each.name for each in inputs if each.name in needed),
        output=outputs,
        annotations={each.name: each.type_hint for each in inputs if each.type_hint is not None},
    )


def load_modular(
    pipeline_class: Any,
    folder: ModelFolder,
    dtype: torch.dtype,
    variant: str | None,
    given: Mapping[str, torch.nn.Module],
) -> Any:
    """Load a modular pipeline with all components of its folder; `given` are loaded already. Raises what diffusers and
    transformers raise."""
    pipeline = modular_pipeline(pipeline_class, folder)
    pipeline.register_components(**given)
    for name in pipeline.pretrained_component_names:
        if name in given:
            continue
        spec = pipeline.get_component_spec(name)
        if spec.pretrained_model_name_or_path is None:
            continue
        options: dict[str, Any] = {"local_files_only": True}
        if spec.type_hint.__module__.partition(".")[0] == "transformers":
            options["trust_remote_code"] = False
        if issubclass(spec.type_hint, torch.nn.Module):
            options |= {"dtype": dtype, "use_safetensors": True, "variant": variant}
        pipeline.register_components(**{name: spec.load(**options)})
    _hide_progress_bars(pipeline._blocks)
    return pipeline


def _hide_progress_bars(blocks: Any) -> None:
    """Turn off the bars of loops among blocks, at any depth: the pipeline itself reaches its own alone."""
    for block in blocks.sub_blocks.values():
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
        _hide_progress_bars(block)


def run_pipeline(pipeline: Any, arguments: Mapping[str, Any], interface: PipelineInterface) -> Any:
    """Call a pipeline of either kind; of a modular one, return its outputs as fields, and not its inputs of like
    names."""
    if not is_modular_class(type(pipeline)):
        return pipeline(**arguments)
    outputs = list(interface.output or ())
    return SimpleNamespace(**pipeline(output=outputs, **arguments))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def _entry(place: Any, pair: list[str]) -> list[Any]:
    """Return a component's entry of modular_model_index.json, for its place on this machine."""
    source = {"pretrained_model_name_or_path": str(place.parent), "subfolder": place.name}
    return [*pair, {**source, "type_hint": pair, "revision": None, "variant": None}]
