"""A published model's pipeline with random weights at its real sizes: nothing is downloaded, and pictures are noise.

The transformer and the decoder compute what they would with real weights. Text conditions are random, of the length
that an ordinary prompt has for this model; the text encoder is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from diffusion_runtime.benchmark.sample_images import wanted_images
from diffusion_runtime.benchmark.step_model import StepModel, open_step_model, published_files
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import INDEX_FILE
from diffusion_runtime.decoders.interface import LatentDecoder
from diffusion_runtime.decoders.shared_decoder import SharedDecoder
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.generation.parts import PipelineParts
from diffusion_runtime.loading.cuda_graphs import make_decoder_graphs, make_graphs
from diffusion_runtime.loading.interface import InspectableModel, OnStage
from diffusion_runtime.loading.preparation import prepare
from diffusion_runtime.memory.device_memory import use_expandable_segments
from diffusion_runtime.models.interface import ImageCondition, ImageConditioner
from diffusion_runtime.models.published_folders import write_folder
from diffusion_runtime.models.random_weights import draw_weight, fill_randomly
from diffusion_runtime.parallel.world import World
from diffusion_runtime.pipeline import Pipeline
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.weights.tensor_files import write_tensors


class RandomConditions(TextEncoder):
    """Random conditions in place of a text encoder's, the same for the same number of texts."""

    max_tokens = 1
    library = "none"
    implementation = "random conditions"

    def __init__(self, opened: StepModel, device: torch.device, dtype: torch.dtype) -> None:
        self._opened = opened
        self.device = device
        self._dtype = dtype

    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Return random conditions for as many prompts; their texts are not read."""
        batch = dataclasses.replace(self._opened, batch=len(prompts))
        return batch.inputs(self.device, self._dtype).ours[2].text


def random_pipeline(
    name: str,
    config: RuntimeConfig,
    on_stage: OnStage,
    changes: Mapping[str, Mapping[str, object]] | None = None,
    world: World | None = None,
) -> Pipeline:
    """Build the pipeline of a name of `models` or a hub id. config: of the run; its model_path is not read. changes: of
    the folder's json by file, such as sizes that a CPU computes. world: as of load_pipeline; every process gets the
    same numbers, or its part of them.

    Raises ConfigError for a name of nothing and for weights that are to be offloaded, and what `prepare` raises for
    choices that cannot run here.
    """
    if config.asks_to_offload:
        flag = "--memory-limit" if config.offload in ("auto", "none") else f"--offload {config.offload}"
        raise ConfigError(
            f"{flag}: the random weights of {name} stay on the device; leave it out, or give a folder with weights"
        )
    changes = changes or {}
    files = {path: {**values, **changes.get(path, {})} for path, values in published_files(name).items()}
    opened = open_step_model(
        name, changes=changes.get("transformer/config.json", {}), index_changes=changes.get(INDEX_FILE, {})
    )
    # Not inference mode: threads that read weights are not in it, and could not write to tensors made in it.
    with _temporary_folder(world) as temporary, torch.no_grad():
        folder = temporary
        if world is None or world.is_first:
            write_folder(folder, files)
        if world is not None:
            world.wait_for_all()
        prepared = prepare(dataclasses.replace(config, model_path=str(folder), backend="native"), world).inspectable
        if prepared is None:
            raise ConfigError(f"{name}: no native model runs it")
        device, dtype = prepared.device, prepared.dtype
        # As a model that is loaded: what is timed waits for the device's memory as that does.
        use_expandable_segments(device)
        on_stage(f"building the transformer of {name}")
        transformer = fill_randomly(prepared.model, prepared.transformer, device, dtype)
        on_stage(f"building the decoder of {name}")
        decoder = random_decoder(prepared, folder, world)
        conditioner = None
        if wanted_images(prepared.rules):
            on_stage(f"building the image encoder of {name}")
            conditioner = _random_conditioner(prepared, opened)
        if world is not None:
            world.wait_for_all()
    parts = PipelineParts(
        text_encoder=RandomConditions(opened, device, dtype),
        transformer=transformer,
        decoder=decoder,
        load_image_conditioner=lambda: _loaded(conditioner),
        products=prepared.quantization.counter,
        graphs=make_graphs(prepared.description.config, device, False, None if world is None else world.group),
        decoder_graphs=make_decoder_graphs(prepared.description.config, device) if world is None else None,
    )
    recipe = prepared.description.to_dict()
    return Pipeline(parts, prepared.rules, device=device, dtype=dtype, recipe=recipe, mesh=prepared.mesh)


@contextlib.contextmanager
def _temporary_folder(world: World | None) -> Iterator[Path]:
    """Context manager: one folder for all processes, so that a decoder of gigabytes is written once."""
    if world is not None and not world.is_first:
        yield Path(world.from_first(str))
        return
    with tempfile.TemporaryDirectory(prefix="diffusion_runtime_bench_") as temporary:
        if world is not None:
            world.from_first(lambda: temporary)
        yield Path(temporary)


class RandomImages(ImageConditioner):
    """Random conditions in place of an image's, of a model with an image encoder in addition to its autoencoder."""

    def __init__(self, opened: StepModel, device: torch.device, dtype: torch.dtype) -> None:
        self._opened = opened
        self._device = device
        self._dtype = dtype

    def condition(self, request: GenerationRequest, size: ClipSize) -> ImageCondition:  # noqa: ARG002
        """Return a random condition; the image is not read."""
        inputs = dataclasses.replace(self._opened, size=size, batch=1).inputs(self._device, self._dtype).ours[2]
        assert inputs.image is not None
        return inputs.image


def _random_conditioner(prepared: InspectableModel, opened: StepModel) -> ImageConditioner:
    """Return the autoencoder's encoder with the weights that `random_decoder` wrote, or random conditions of a model
    whose image goes through another encoder as well."""
    model = prepared.model
    if model.family.text.shapes(model.folder, model.config).image is not None:
        return RandomImages(opened, prepared.device, prepared.dtype)
    conditioner = model.load_image_conditioner(prepared.device, prepared.dtype)
    return conditioner.fast() if prepared.description.config.vae_decode == "fast" else conditioner


def _loaded(conditioner: ImageConditioner | None) -> ImageConditioner:
    if conditioner is None:
        raise ConfigError("image_path: this pipeline was built without an encoder of images")
    return conditioner


def random_decoder(prepared: InspectableModel, folder: Path, world: World | None = None) -> LatentDecoder:
    """Loaded from files of random numbers, as the real one is from its own. folder: where they are written, by the
    first process of a world."""
    if world is None or world.is_first:
        _write_decoder(prepared, folder)
    if world is not None:
        world.wait_for_all()
    decoder = prepared.model.load_decoder(prepared.device, prepared.dtype)
    decoder = decoder.in_mode(prepared.description.config.vae_decode)
    return decoder if world is None else SharedDecoder(decoder, world)


def _write_decoder(prepared: InspectableModel, folder: Path) -> None:
    for component in prepared.model.family.files.diffusers_components:
        if not (folder / component.name / "config.json").is_file():
            continue
        module = component.build(folder)
        # Buffers are statistics, such as variances, of which random numbers would be none.
        dtypes = {key: prepared.dtype if x.is_floating_point() else x.dtype for key, x in module.state_dict().items()}
        tensors = {key: torch.ones(x.shape, dtype=dtypes[key]) for key, x in module.state_dict().items()}
        for key, tensor in tensors.items():
            if key.endswith(".filter"):
                # A low-pass filter keeps the mean. Of ones, sound grows twelvefold per upsampling until it overflows.
                tensor.div_(tensor.shape[-1])
        for key, _ in module.named_parameters():
            draw_weight(key, tensors[key], prepared.device)
        write_tensors(folder / component.name / "diffusion_pytorch_model.safetensors", tensors)
