"""Files and folders that were given as a model and are a part of one: what they are, and the flags that take them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.models.recognised_files import models_that_fit
from diffusion_runtime.models.weight_summary import holds_weights, summarise_weights
from diffusion_runtime.weights.transformer_files import SUFFIXES
from diffusion_runtime.weights.weight_files import listed

# What takes a file of a component, by the component of its summary.
_FLAGS = {"vae": "--vae-path", "text_encoder": "--text-encoder-path", "image_encoder": "--image-encoder-path"}
# Folders of ComfyUI's models: those of transformers and whole checkpoints, and of the other parts.
_TRANSFORMERS = ("diffusion_models", "unet", "checkpoints")
_PARTS = {"vae": "--vae-path", "text_encoders": "--text-encoder-path", "clip": "--text-encoder-path"}
_MAX_NAMES = 4


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
    names = models_that_fit(path)
    family = " or ".join(summary.families)
    if not names:
        return (
            f"it holds a transformer of {family}, of no published size that is known here; write --model-path FOLDER "
            f"--transformer-path {file}, with the diffusers folder of its model"
        )
    others = f" (it fits {listed(names[1:])} as well)" if names[1:] else ""
    return f"it holds a transformer of {family}; write --model-path {names[0]} --transformer-path {file}{others}"


def advice_for_comfyui(path: Path) -> str | None:
    """Say what to write for a folder of ComfyUI, or its `models`; None for any other folder."""
    folder = next((each for each in (path / "models", path) if _is_comfyui(each)), None)
    if folder is None:
        return None
    files = _files(folder, _TRANSFORMERS)
    parts: Mapping[str, str] = {
        flag: shlex.quote(str(found[0])) for name, flag in _PARTS.items() if (found := _files(folder, (name,)))
    }
    if not files:
        return f"it is a folder of ComfyUI without a transformer in {', '.join(_TRANSFORMERS)}; give a name of `models`"
    names = models_that_fit(files[0])
    beside = "".join(f" {flag} {file}" for flag, file in parts.items())
    more = f"; its transformers: {listed(file.name for file in files)}" if files[1:] else ""
    return (
        "it is a folder of ComfyUI, which holds the parts of models as files: write --model-path "
        f"{names[0] if names else 'MODEL'} --transformer-path {shlex.quote(str(files[0]))}{more}. Its other parts may "
        f"be read from there too:{beside or ' --vae-path, --text-encoder-path'}; `diffusion-runtime info FILE` says "
        "what a file is for"
    )


def _is_comfyui(folder: Path) -> bool:
    has_parts = any((folder / name).is_dir() for name in (*_PARTS, "loras"))
    return has_parts and any((folder / name).is_dir() for name in _TRANSFORMERS)


def _files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Return the weight files in folders of these names, two levels deep."""
    found = (path for name in names for pattern in ("*", "*/*") for path in sorted((folder / name).glob(pattern)))
    return [path for path in found if path.suffix in SUFFIXES and path.is_file()]
