"""ControlNet from a folder of its own (`--controlnet-path`), as a component of the model's folder."""

from __future__ import annotations

from diffusion_runtime.core.model_folder import INDEX_FILE, AnyFolder, ModelFolder, read_index, read_json
from diffusion_runtime.errors import ConfigError, ModelLoadError, shown
from diffusion_runtime.untrusted.component_sizes import check_sizes
from diffusion_runtime.untrusted.files import check_place, user_path
from diffusion_runtime.weights.weight_files import check_quantization_config

COMPONENT = "controlnet"
_KEY, _FLAG = "controlnet_path", "--controlnet-path"


def with_controlnet(folder: ModelFolder, path: str | None, expected: str | None, family: str) -> ModelFolder:
    """Return the folder with a ControlNet from elsewhere; path None for the folder's own, or none.

    expected: the class of ControlNets for this family, None where it takes none. Raises ConfigError for a family
    without ControlNets and for a path that is none; ModelLoadError for a folder without config.json, and for a
    ControlNet of another class.
    """
    if path is None:
        return folder
    if expected is None:
        raise ConfigError(
            f"{_KEY}: {family} models run without a ControlNet in this version, qwen_image models with one; leave out "
            f"{_FLAG}, or put the ControlNet into the model's folder as {COMPONENT}/, name it and diffusers' pipeline "
            f"for it in {INDEX_FILE}, and say --backend diffusers --image-path FILE"
        )
    place = check_place(user_path(path, _KEY), _KEY)
    if (place / INDEX_FILE).exists():
        raise ModelLoadError(
            f"{_KEY}: {place} is the folder of a whole model: give {place / COMPONENT}, or --model-path"
        )
    if not (place / "config.json").is_file():
        raise ModelLoadError(
            f"{_KEY}: {place}: expected the folder of a ControlNet, with config.json and safetensors files; download "
            "the whole folder"
        )
    config = read_json(place / "config.json")
    found = config.get("_class_name")
    if found != expected:
        raise ModelLoadError(
            f"{_KEY}: {place} holds {shown(found)}, expected {shown(expected)}: use a ControlNet that was made for "
            f"{family} models"
        )
    check_sizes(config, place / "config.json")
    check_quantization_config(place, COMPONENT)
    return folder.with_parts({COMPONENT: place})


def has_controlnet(folder: AnyFolder, pipeline: str) -> bool:
    """Return whether a model has a ControlNet: by the class of its pipeline, or from elsewhere."""
    is_given = isinstance(folder, ModelFolder) and COMPONENT in folder.parts
    return is_given or read_index(folder).get("_class_name") == pipeline
