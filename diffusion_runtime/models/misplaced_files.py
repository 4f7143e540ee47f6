"""Files and folders that were given as a model and are a part of one: what they are, and the flags that take them."""

from __future__ import annotations

import shlex
from pathlib import Path

from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.models.comfyui_folders import CHECKPOINTS, PARTS, TRANSFORMERS
from diffusion_runtime.models.recognised_files import models_that_fit
from diffusion_runtime.models.weight_summary import holds_weights, summarise_weights
from diffusion_runtime.weights.weight_files import SUFFIXES, listed

# What takes a file of a component, by the component of its summary.
_FLAGS = {"vae": "--vae-path", "text_encoder": "--text-encoder-path", "image_encoder": "--image-encoder-path"}
# Folders in which a model may be one file.
_MODELS = (*TRANSFORMERS, *CHECKPOINTS)


def advice_for_file(path: Path) -> str:
    """Say what a safetensors or GGUF file is, and which flags take it, as a clause; from its head and the json in this
    package, without the network."""
    file = shlex.quote(str(path))
    try:
        if not holds_weights(str(path)):
            return f"it is a LoRA; write --model-path MODEL --lora {file}, with the model that it is for"
        summary = summarise_weights(path)
    except (ModelLoadError, ConfigError) as error:
        return f"it cannot be read ({error})"
    if summary.component in _FLAGS:
        flag = _FLAGS[summary.component]
        return f"it holds {summary.holds}; write --model-path MODEL {flag} {file}, with the model that it is for"
    if not summary.families:
        return (
            "its tensors are those of no family that is known here; give the folder of a diffusers model, which its "
            "authors publish as well"
        )
    family = " or ".join(summary.families)
    if models_that_fit(path):
        return (
            f"it holds a transformer of {family}; write --model-path {file}: its other parts are looked for around it"
        )
    return (
        f"it holds a transformer of {family}, of no published size that is known here; write --model-path {file} "
        "--like FOLDER, with the diffusers folder of its model, whose settings it runs with"
    )


def advice_for_comfyui(path: Path) -> str | None:
    """Say what to write for a folder of ComfyUI, or its `models`; None for any other folder."""
    folder = next((each for each in (path / "models", path) if _is_comfyui(each)), None)
    if folder is None:
        return None
    files = _files(folder, _MODELS)
    if not files:
        return f"it is a folder of ComfyUI without a transformer in {', '.join(_MODELS)}; give a name of `models`"
    more = f"; its transformers: {listed(file.name for file in files)}" if files[1:] else ""
    return (
        "it is a folder of ComfyUI, which holds the parts of models as files: write --model-path "
        f"{shlex.quote(str(files[0]))}{more}. Its other parts are found there too; `diffusion-runtime info FILE` says "
        "what a file is for"
    )


def _is_comfyui(folder: Path) -> bool:
    has_parts = any((folder / name).is_dir() for name in (*PARTS, "loras"))
    return has_parts and any((folder / name).is_dir() for name in _MODELS)


def _files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the weight files in folders of these names, two levels deep."""
    found = (path for name in names for pattern in ("*", "*/*") for path in sorted((folder / name).glob(pattern)))
    return [path for path in found if path.suffix in SUFFIXES and path.is_file()]
