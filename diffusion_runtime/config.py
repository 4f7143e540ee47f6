"""Load-time configuration of a pipeline: RuntimeConfig, ParallelConfig, LoraConfig. GenerationRequest holds call-time
values."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from diffusion_runtime.core.memory_size import parse_size
from diffusion_runtime.core.runtime_options import (
    ATTENTION,
    MACHINE,
    MODEL,
    OUTPUT,
    PARTS,
    QUANTIZATION,
    SPEED,
    TENSOR,
    WEIGHTS,
    WHAT,
    Count,
    Flag,
    Names,
    Number,
    OneOf,
    Other,
    Refusal,
    RuntimeOption,
    Size,
    Switch,
    Text,
    check_options,
    option,
    options_of,
)
from diffusion_runtime.core.spellings import own_name, resolve
from diffusion_runtime.errors import ConfigError, nearest, shown

DTYPES = ("auto", "float32", "bfloat16", "float16")
RUNTIME_BACKENDS = ("auto", "native", "diffusers")
# More processes than a cluster would use for one video; the seconds of a week.
MAX_PROCESSES = 4096
MAX_TIMEOUT = 7 * 24 * 3600
MAX_LORA_SCALE = 1e4
# More than any transformer has.
MAX_IGNORED_LAYERS = 10000
MAX_MODEL_FOLDERS = 64
# Of lists in lists, in keywords of a pipeline.
MAX_ARGUMENT_DEPTH = 4
ORDERS = ("ulysses_inside_ring", "ring_inside_ulysses")
VAE_DECODE_MODES = ("exact", "fast", "fp8")
QUANTIZATION_MODES = ("none", "fp8", "fp8-all", "int8")
VAE_TILING_CHOICES = ("auto", "on", "off")
# Pixels; the least is two latents of the coarsest decoder.
MIN_TILE, MAX_TILE = 64, 99999
_TILES = r"(6[4-9]|[7-9][0-9]|[1-9][0-9]{2,4})(?::([0-9]{1,5}))?"
COMPILE_MODES = ("off", "regional")
CUDA_GRAPH_MODES = ("auto", "off", "on")
OFFLOAD_MODES = ("auto", "none", "model", "layers")


def tile_pixels(choice: str) -> tuple[int, int | None]:
    """Return (size, overlap) of a value of RuntimeConfig.vae_tiling that names them; None for no overlap of its own."""
    size, _, overlap = choice.partition(":")
    return int(size), int(overlap) if overlap else None


@dataclass(frozen=True)
class Tiles:
    """The check of `vae_tiling`: one of VAE_TILING_CHOICES, or the size and overlap of tiles."""

    kind: ClassVar[Any] = str
    words: ClassVar[OneOf] = OneOf(VAE_TILING_CHOICES, ("off", "on"))

    def __call__(self, name: str, value: Any) -> Any:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(text, str) or not text[:1].isdigit():
            return self.words(name, value)
        if not re.fullmatch(_TILES, text):
            raise ConfigError(
                f"{name}: expected SIZE or SIZE:OVERLAP in pixels, from {MIN_TILE} to {MAX_TILE}, such as 512:64, or "
                f"one of {', '.join(VAE_TILING_CHOICES)}, got {shown(value)}"
            )
        size, overlap = tile_pixels(text)
        if (overlap or 0) > size // 2:
            raise ConfigError(f"{name}: expected an overlap of at most half the size, got {shown(text)}")
        return text

    def schema(self) -> dict[str, Any]:
        number = {"type": "integer", "minimum": MIN_TILE, "maximum": MAX_TILE}
        return {"anyOf": [self.words.schema(), {"type": "string", "pattern": f"^{_TILES}$"}, number]}


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism; their product is the number of processes.

    ulysses, ring: processes that share a sequence by heads, and by blocks of keys (sequence parallel). branches: 2 when
    the two guidance branches run on two groups of processes (CFG parallel), else 1. tensor: processes that share the
    weights (tensor parallel). ring_inside: neighbours by rank share keys, and not heads. reason: how they were chosen,
    for messages.
    """

    ulysses: int = 1
    ring: int = 1
    branches: int = 1
    ring_inside: bool = False
    reason: str = "one process"
    tensor: int = 1

    @property
    def num_processes(self) -> int:
        return self.ulysses * self.ring * self.branches * self.tensor

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a recipe."""
        values = {"num_processes": self.num_processes, **dataclasses.asdict(self)}
        del values["reason"]
        return values

    def __str__(self) -> str:
        tensor = f" x tensor parallel {self.tensor}" if self.tensor > 1 else ""
        return f"guidance branches {self.branches} x ulysses {self.ulysses} x ring {self.ring}{tensor}"


_PROCESSES = Count(MAX_PROCESSES, "processes")


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism of one generation; the product of the degrees is the number of processes.

    num_gpus: processes, one per device; None: the product of the degrees that are given, or all that torchrun started.
    ulysses_degree, ring_degree: processes that share a sequence by heads, and by blocks of keys; None: chosen.
    cfg_parallel: whether the two guidance branches run on two groups of processes; None: chosen.
    tensor_parallel_size: processes that share each weight of the transformer's blocks, and its heads; None: 1.
    order: which exchange happens between processes that are neighbours by rank, on the faster links.
    timeout: seconds that processes wait for one that does not move before the watchdog ends the run.
    """

    num_gpus: int | None = option(
        MACHINE,
        None,
        _PROCESSES,
        Flag("Number of GPUs (one process each); parallel degrees are chosen automatically.", "N"),
    )
    ulysses_degree: int | None = option(
        MACHINE, None, _PROCESSES, Flag("Sequence parallel: processes that share the heads.", "N")
    )
    ring_degree: int | None = option(
        MACHINE, None, _PROCESSES, Flag("Ring attention: processes that share the keys.", "N")
    )
    cfg_parallel: bool | None = option(
        MACHINE, None, Switch(is_optional=True), Flag("The two guidance branches on two groups of processes.")
    )
    tensor_parallel_size: int | None = option(
        MACHINE,
        None,
        _PROCESSES,
        Flag("Processes that share each weight and the heads, for models that one device cannot hold.", "N", TENSOR),
    )
    order: str = option(MACHINE, "ulysses_inside_ring", OneOf(ORDERS))
    timeout: float = option(MACHINE, 40.0, Number("seconds,", 1, MAX_TIMEOUT))

    def __post_init__(self) -> None:
        check_options(self, "parallel.")
        self._check_product(self.num_gpus)

    @property
    def num_processes(self) -> int:
        """Number of requested processes; 1 when none is requested."""
        return self._known_product if self.num_gpus is None else self.num_gpus

    @property
    def _known_product(self) -> int:
        sharers = (self.ulysses_degree or 1) * (self.ring_degree or 1)
        return sharers * (2 if self.cfg_parallel else 1) * self.num_weight_sharers

    @property
    def num_weight_sharers(self) -> int:
        """Processes that share each weight. Never more than one unless asked for: sharing the sequence communicates
        less."""
        return self.tensor_parallel_size or 1

    def with_world(self, num_processes: int) -> Self:
        """The same configuration for running processes. Raises ConfigError when it asks for another number of them."""
        if self.num_gpus not in (None, num_processes):
            raise ConfigError(
                f"parallel.num_gpus: {self.num_gpus} processes are asked for, {num_processes} were started; leave out "
                "--num-gpus, or start as many"
            )
        return dataclasses.replace(self, num_gpus=num_processes)

    def choose_degrees(self, num_heads: int, *, is_guided: bool) -> Degrees:
        """Every degree, with the open ones chosen. num_heads: of self-attention; is_guided: whether requests run two
        guidance branches.

        Guidance branches come first, because they communicate once per step only; then heads, as far as they divide;
        blocks of keys take the rest. Processes that share the weights are as many as asked for, and share the heads
        before the others do. Raises ConfigError for degrees that do not fit the processes or the heads.
        """
        num_processes = self.num_processes
        tensor = self.num_weight_sharers
        if num_heads % tensor:
            even = ", ".join(str(degree) for degree in divisors(num_heads))
            raise ConfigError(
                f"parallel.tensor_parallel_size: {tensor} processes cannot share {num_heads} attention heads evenly; "
                f"degrees that divide them: {even}. Share the sequence among the others with --ulysses-degree or "
                "--ring-degree"
            )
        num_heads //= tensor
        branches = self._choose_branches(num_processes, is_guided)
        sharers = num_processes // branches // tensor
        if self.ulysses_degree is not None:
            ulysses = self.ulysses_degree
        elif self.ring_degree is not None:
            ulysses = sharers // self.ring_degree
        else:
            ulysses = max(degree for degree in divisors(sharers) if num_heads % degree == 0)
        ring = sharers // ulysses
        if ulysses * ring * branches * tensor != num_processes or (self.ring_degree or ring) != ring:
            raise self._product_error(num_processes)
        if ulysses > num_heads:
            even = ", ".join(str(degree) for degree in divisors(num_heads))
            of_each = f" that each of {tensor} tensor parallel processes holds" if tensor > 1 else ""
            raise ConfigError(
                f"parallel.ulysses_degree: {ulysses} processes cannot share {num_heads} attention heads{of_each}; "
                f"valid degrees for this model: 1 to {num_heads}, best those that divide it: {even}. use --ring-degree "
                "for the others"
            )
        reason = self._reason(f"{num_heads} of {tensor * num_heads}" if tensor > 1 else str(num_heads), is_guided)
        return Degrees(ulysses, ring, branches, self.order == "ring_inside_ulysses", reason, tensor)

    def _choose_branches(self, num_processes: int, is_guided: bool) -> int:
        if self.cfg_parallel is not None:
            return 2 if self.cfg_parallel else 1
        is_possible = num_processes % (2 * self._known_product) == 0
        # Two given degrees leave no choice: the branches make up the rest of the product, or the product is wrong.
        return 2 if is_guided and is_possible else 1

    def _reason(self, num_heads: str, is_guided: bool) -> str:
        if self.num_processes == 1:
            return "one process"
        if None not in (self.ulysses_degree, self.ring_degree, self.cfg_parallel):
            return "as asked"
        guidance = "guidance is on" if is_guided else "guidance is off"
        return (
            f"chosen for {num_heads} heads, {guidance}; override with --ulysses-degree, --ring-degree or --cfg-parallel"
        )

    def _check_product(self, num_processes: int | None) -> None:
        if num_processes is None:
            return
        is_open = None in (self.ulysses_degree, self.ring_degree, self.cfg_parallel)
        fits = num_processes % self._known_product == 0 if is_open else num_processes == self._known_product
        if not fits:
            raise self._product_error(num_processes)

    def _product_error(self, num_processes: int) -> ConfigError:
        degrees = [("ulysses_degree", self.ulysses_degree), ("ring_degree", self.ring_degree)]
        if self.cfg_parallel is not None:
            degrees.append(("guidance branches", 2 if self.cfg_parallel else 1))
        degrees.append(("tensor_parallel_size", self.tensor_parallel_size))
        product = " x ".join(f"{name} {degree}" for name, degree in degrees if degree is not None)
        return ConfigError(
            f"parallel: {product} does not give {num_processes} processes; the product of ulysses_degree, "
            "ring_degree, tensor_parallel_size and 2 for cfg_parallel must be --num-gpus, or the number that torchrun "
            "started; a degree that is left out is chosen, tensor_parallel_size is 1"
        )


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# A branch, a tag, a pull request (refs/pr/1) or a commit.
REVISION = r"^(?!.*\.\.)[A-Za-z0-9_]([A-Za-z0-9_.-]|/(?!/)){0,199}$"
LORA_COMPONENTS = ("auto", "transformer", "transformer_2", "both")
# [hf://]ORG/NAME[/FILE]@REVISION: a LoRA of the hub.
_LORA_AT_REVISION = re.compile(r"((?:hf://)?[A-Za-z0-9_][\w.-]*/[\w.-]+(?:/[^@]+)?)@(.+)")


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA file that is merged into the transformer when it is loaded.

    path: a safetensors file of any trainer, a folder of PEFT's, or a file of the hub: `ORG/NAME`, `ORG/NAME/FILE` or
    `hf://ORG/NAME/FILE`, each also with `@REVISION`; what exists here is taken before the hub's. scale: the strength, a
    factor of all that it adds.
    component: in models with two transformers, which one it is for: `transformer` (high noise, the first steps),
    `transformer_2` (low noise) or `both`; `auto` follows the keys, and is an error where these do not say. revision: a
    branch, a tag or a commit of the hub's repository; None for its main branch, and for files here.
    """

    path: str
    scale: float = 1.0
    component: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f"lora.path: expected the path of a safetensors file, got {shown(self.path)}")
        match = None if os.path.exists(self.path) else _LORA_AT_REVISION.fullmatch(self.path)
        if match is not None and self.revision not in (None, match[2]):
            raise ConfigError(
                f"lora.revision: path says {shown(match[2])} and revision {shown(self.revision)}; give one of them"
            )
        if match is not None:
            object.__setattr__(self, "path", match[1])
            object.__setattr__(self, "revision", match[2])
        Text("a branch, a tag or a commit", REVISION, is_optional=True)("lora.revision", self.revision)
        is_number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not is_number or not -MAX_LORA_SCALE <= self.scale <= MAX_LORA_SCALE:
            raise ConfigError(
                f"lora.scale: expected a number from {-MAX_LORA_SCALE:g} to {MAX_LORA_SCALE:g}, got {shown(self.scale)}"
            )
        if self.component not in LORA_COMPONENTS:
            raise ConfigError(
                f"lora.component: unknown value {shown(self.component)}.{nearest(self.component, LORA_COMPONENTS)}"
            )

    @classmethod
    def parse(cls, value: object) -> Self:
        """A path, a (path, scale) pair, or a mapping of the fields. Raises ConfigError that names what is wrong."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping):
            known = [item.name for item in dataclasses.fields(cls)]
            for key in value:
                if key not in known:
                    raise ConfigError(f"lora: unknown key {shown(key)}.{nearest(key, known)}")
            if "path" not in value:
                raise ConfigError("lora: 'path' is missing; expected {path: FILE, scale: 1.0}")
            return cls(**value)
        if isinstance(value, Sequence) and len(value) == 2:
            return cls(*value)
        raise ConfigError(f"lora: expected a path, [path, scale] or {{path: FILE, scale: 1.0}}, got {shown(value)}")


# NAME@REVISION and OWNER/NAME@REVISION; a path that starts with a dot, a slash or a tilde is neither.
_AT_REVISION = re.compile(r"([A-Za-z0-9_][\w.-]*(?:/[\w.-]+)?)@(.+)")


def split_revision(model_path: str) -> tuple[str, str | None]:
    """`org/name@v1` as (`org/name`, `v1`); a path without a revision, or of something that is here, as it is."""
    match = _AT_REVISION.fullmatch(model_path)
    return (model_path, None) if match is None or os.path.exists(model_path) else (match[1], match[2])


VARIANT = r"^[A-Za-z0-9_-]{1,32}$"

_DECODES = Refusal(
    "vae_decode, vae_decoder, vae_tiling: diffusers' own pipeline decodes with its own module; leave out --vae-decode, "
    "--vae-decoder and --vae-tiling",
    "another decoder",
)
_OFFLOADS = Refusal(
    "offload, memory_limit: diffusers' own pipeline has its own, by pipeline.pipeline.enable_model_cpu_offload() in "
    "Python; leave out --offload and --memory-limit",
    "offloading",
    takes=("none",),
)
_READS_ITS_FOLDER = Refusal(
    "{name}: diffusers' own pipeline reads the weights of its folder; leave out {flag}, or --backend diffusers",
    "weights from elsewhere",
)


def _weights(help: str) -> Any:
    """Return the option of one part's weights from elsewhere."""
    check = Text("the path of a file or a folder", is_optional=True, none_word=True)
    return option(WEIGHTS, None, check, Flag(help, "PATH", PARTS), _READS_ITS_FOLDER)


def _own_dtype(name: str, value: Any) -> Any:
    dtype = own_name("dtype", Text()(name, value), DTYPES)
    # Any other name is for the device to refuse (core/hardware.py).
    if dtype not in DTYPES and (row := resolve("dtype", dtype)) is not None:
        raise ConfigError(f"{name}: {row.refusal}")
    return dtype


def _checked_parallel(name: str, value: Any) -> Any:
    if not isinstance(value, ParallelConfig):
        raise ConfigError(f"{name}: expected a ParallelConfig or a mapping, got {shown(value)}")
    return value


def _parsed_loras(name: str, value: Any) -> Any:
    if isinstance(value, str | Mapping | LoraConfig) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}: expected a list of files, got {shown(value)}")
    return tuple(LoraConfig.parse(each) for each in value)


def _plain_arguments(name: str, value: Any) -> dict[str, Any] | None:
    if not value and isinstance(value, Mapping | None):
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key.isidentifier() for key in value):
        raise ConfigError(f"{name}: expected keywords and their values, {{num_steps: 2}}, got {shown(value)}")
    for key, each in value.items():
        if not _is_plain(each):
            raise ConfigError(f"{name}.{key}: expected a number, a text, or a list of them, got {shown(each)}")
    return dict(value)


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list | tuple):
        return depth < MAX_ARGUMENT_DEPTH and all(_is_plain(each, depth + 1) for each in value)
    if isinstance(value, Mapping):
        keyed = all(isinstance(key, str) for key in value)
        return keyed and depth < MAX_ARGUMENT_DEPTH and all(_is_plain(each, depth + 1) for each in value.values())
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True)
class RuntimeConfig:
    """The model to load, the device, and the attention backends.

    model_path: `emoji` (the embedded model), a diffusers folder, or a hub id: `Wan-AI/Wan2.1-T2V-1.3B-Diffusers`, also
        with a revision: `org/name@v1`; or the file of a transformer or of a whole checkpoint (models/found_files.py).
    like: where model_path is one file of weights: the published model, hub id or diffusers folder whose settings it
        runs with; None recognises it. models_dir: folders in which its other parts are looked for; download: whether
        what is not found is downloaded.
    revision: which branch, tag or commit of a model on the hub; None for its main branch.
    offline: whether models are taken from the hub's cache alone, without asking the network.
    backend: `native` runs our own transformer, `diffusers` diffusers' own pipeline; `auto` is native where the model's
        class is one of ours, else diffusers.
    device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`, ...
    dtype: `auto` (bfloat16 on an accelerator, float32 on the CPU), `float32`, `bfloat16` or `float16`.
    attention: every form that AttentionConfig.parse takes; None leaves it to the environment and the platform.
    attention_override: the same, one level higher: the command line's choice.
    parallel: how the work is spread over processes.
    self_check: whether third-party attention kernels are compared with the definition on this machine's accelerator
        before the weights are read, once per version.
    transformer_path: a safetensors file, or a folder, with the transformer's weights instead of the model folder's.
        None or `none` for the folder's. transformer_2_path: weights of the second transformer, in models with two.
    controlnet_path: the folder of a ControlNet, with its config.json, for models that take one; None or `none` for the
        model folder's own, or none.
    vae_path, text_encoder_path, text_encoder_2_path: weights of the autoencoder and the text encoders: a safetensors
        file, by diffusers' and transformers' names or those of ComfyUI's files, or a folder; of text encoders also a
        GGUF file. mmproj_path: the half of that encoder that reads pictures, in GGUF too; by default the one file
        `*mmproj*.gguf` beside it. audio_vae_path, vocoder_path: weights of the audio autoencoder and the vocoder, in
        models that make sound. connectors_path, image_encoder_path: of LTX-2's connectors behind the text encoder, and
        of the encoder of first images.
    workflow: mode of a folder that holds several transformers, such as `ref2va` of MiniMax-H3, which makes clips from
        references; None for the first one, or that of the model's name. The flag also takes a workflow file of ComfyUI,
        which is translated to other options and a request before there is a config.
    variant: which of a folder's weights are read where there are several, such as `fp16` for
        `diffusion_pytorch_model.fp16.safetensors`; None for those without a variant, else what there is.
    upsampler_path: the folder or file of a latent upsampler, for models with a second stage: a generation is then made
        at half its height and width, upsampled, and refined at full size. None or `none` for one stage.
    interpolation_path: a safetensors file of RIFE, which makes the frames of `interpolate`. None or `none` for none.
    lora: files merged into the transformer, one after the other, each in any form LoraConfig.parse takes; held as
    LoraConfig values.
    vae_decode: `exact` decodes latents to the bits of diffusers' decoder; `fast` keeps the channels of a pixel together
        instead, which gives frames that differ by rounding; `fp8` multiplies in 8-bit floats (MiniMax-H3's decoder).
    vae_tiling: whether latents are decoded in tiles, which needs less memory; tiles of FLUX.1, FLUX.2 and Z-Image give
        the frames of a whole decode, to rounding, others overlap and are blended, and differ. `auto` does
        as the model's authors do, and takes tiles where a whole decode does not fit; `on` and `off` as they say;
        `SIZE` or `SIZE:OVERLAP` in tiles of that size, in pixels.
    vae_decoder: None or `none` for the model's own; `tiny`, or a safetensors file in TAEHV's format, for previews;
        `diffusion` for the one-step diffusion decoder of LTX-2.5's folder.
    quantization: `fp8` holds linear layers of the transformer's blocks as 8-bit floats with a scale per output row, and
        multiplies in 8 bits where the device can; `fp8-all` also those that a family keeps by default; `int8` holds
        the same layers as 8-bit integers, rotated in groups (ConvRot); `none`.
    quantization_ignored_layers: names or shell patterns of layers that stay as they are, such as `blocks.0.*`.
    compile: `regional` has torch.compile compile each kind of block of diffusers' transformers once, at the first step;
        `off`.
    cuda_graphs: `auto` replays forward passes of the transformer from CUDA graphs on a GPU, where launching kernels
        takes the host about as long as computing them takes the device; `on` wherever they can be replayed; `off`.
    offload: which weights wait in the machine's memory while they are not used: `none`; `model`, whole parts (text
        encoders, one of two transformers); `layers`, also the transformer's blocks, which are copied while the block
        before them computes; `auto`, the first of these that fits.
    memory_limit: what the process may take on its device, such as `12GB`; None for what is free there.
    encoding_cache: whether encodings of texts and images are kept for later requests, in at most 256 MiB of the
        machine's memory.
    pipeline_arguments: further keywords of the call of diffusers' own pipeline, by name: numbers, texts and lists of
        them, which its signature is to take; None for none.
    """

    model_path: str = option(
        MODEL,
        "emoji",
        Text(),
        Flag(
            "emoji (embedded), a name of `models`, a diffusers folder, a hub id, or one file of weights.",
            "MODEL",
            WHAT,
        ),
    )
    like: str | None = option(
        MODEL,
        None,
        Text("a name of `models`, a hub id or a diffusers folder", is_optional=True),
        Flag(
            "Of a model that is one file: the published model it is a version of, or a diffusers folder.",
            "MODEL",
            PARTS,
        ),
    )
    models_dir: Any = option(
        MACHINE,
        (),
        Names("folders of models", MAX_MODEL_FOLDERS),
        Flag(
            "Where the other parts of such a file are looked for, such as ComfyUI/models; again for several.",
            "FOLDER",
            PARTS,
        ),
    )
    download: bool = option(
        MACHINE,
        False,
        Switch(),
        Flag("Download what such a file lacks from the hub.", panel=PARTS),
    )
    backend: str = option(
        MODEL,
        "auto",
        OneOf(RUNTIME_BACKENDS),
        Flag("Implementation: native, diffusers (its own pipeline) or auto.", "NAME"),
    )
    device: str = option(MACHINE, "auto", Text(), Flag("auto, cpu, cuda, cuda:1, mps, ...", "NAME", order=-1))
    dtype: str = option(MODEL, "auto", Other(_own_dtype), Flag("auto, float32, bfloat16 or float16.", "NAME", order=-1))
    attention: Any = option(ATTENTION, None, None)
    attention_override: Any = option(ATTENTION, None, None)
    parallel: ParallelConfig = option(MACHINE, ParallelConfig, Other(_checked_parallel))
    transformer_path: str | None = _weights("Transformer weights: a file or a folder; none: the model's own.")
    transformer_2_path: str | None = _weights("Weights of the second transformer, in models with two.")
    controlnet_path: str | None = _weights("Folder of a ControlNet, for models that take one.")
    vae_path: str | None = _weights("Autoencoder weights: Wan2.1_VAE, ae.safetensors, ...")
    audio_vae_path: str | None = _weights("Weights of the audio autoencoder.")
    vocoder_path: str | None = _weights("Vocoder weights; may be the file of --audio-vae-path.")
    text_encoder_path: str | None = _weights("Text encoder weights: umt5_xxl_fp16, ...")
    text_encoder_2_path: str | None = _weights("Weights of the second text encoder, in models with two.")
    connectors_path: str | None = _weights("Weights of LTX-2's text connectors.")
    image_encoder_path: str | None = _weights("Image encoder weights: clip_vision_h, ...")
    mmproj_path: str | None = _weights("GGUF of the half of the text encoder that reads pictures.")
    variant: str | None = option(
        OUTPUT,
        None,
        Text("a name such as fp16 or bf16", VARIANT, is_optional=True, none_word=True),
        Flag("Which of a folder's weights: fp16 for model.fp16.safetensors.", "NAME", PARTS),
    )
    workflow: str | None = option(
        OUTPUT,
        None,
        Text("the name of a workflow, such as ref2va", is_optional=True, none_word=True),
        Flag("Mode of a folder with several transformers: ref2va of MiniMax-H3; or a FILE of ComfyUI.", "NAME", PARTS),
        Refusal(
            "{name}: {value}: diffusers' own pipeline chooses its components by itself; leave out {flag}, or --backend "
            "diffusers"
        ),
    )
    upsampler_path: str | None = option(
        OUTPUT,
        None,
        Text("the path of a folder or file", is_optional=True, none_word=True),
        Flag("Folder or file of a latent upsampler: half the size first, then refined at full size.", "PATH"),
        Refusal(
            "{name}: diffusers' own pipelines have no second stage in one call; leave out {flag}, or --backend "
            "diffusers"
        ),
    )
    interpolation_path: str | None = option(
        WEIGHTS,
        None,
        Text("the path of a safetensors file", is_optional=True, none_word=True),
        Flag("RIFE weights for --interpolate, a .safetensors file. See docs/upscaling.md.", "FILE", PARTS),
        Refusal("{name}: frames of diffusers' own pipelines are not interpolated; leave out {flag}"),
    )
    lora: Any = option(OUTPUT, (), Other(_parsed_loras))
    self_check: bool = option(
        MACHINE,
        True,
        Switch(),
        Flag(
            "On an accelerator, compare third-party kernels with the definition before loading, once per version.",
            order=1,
        ),
    )
    vae_decode: str = option(
        OUTPUT,
        "exact",
        OneOf(VAE_DECODE_MODES),
        Flag("exact (diffusers' bits), fast (to rounding), fp8.", "MODE", bench_help="Of ours: exact, fast, fp8."),
        _DECODES,
    )
    vae_tiling: str = option(
        OUTPUT,
        "auto",
        Tiles(),
        Flag("Decode in tiles: auto, on (less memory), off, SIZE or SIZE:OVERLAP in pixels.", "CHOICE"),
        _DECODES,
    )
    vae_decoder: str | None = option(
        OUTPUT,
        None,
        Text("tiny, diffusion or the path of a safetensors file", is_optional=True, none_word=True),
        Flag("Previews: tiny, or a TAEHV file; diffusion: LTX-2.5's; none: the model's own.", "NAME|FILE"),
        _DECODES,
    )
    quantization: str = option(
        OUTPUT,
        "none",
        OneOf(QUANTIZATION_MODES, ("none",), "quantization"),
        Flag(
            "none, fp8, fp8-all or int8. See docs/quantization.md.",
            "MODE",
            QUANTIZATION,
            bench_help="Of ours: none, fp8, fp8-all, int8.",
        ),
        Refusal(
            "{name}: {value}: diffusers' own pipeline has its own way to quantise, a quantization_config in the "
            "folder; leave out {flag}"
        ),
    )
    quantization_ignored_layers: Any = option(
        OUTPUT,
        (),
        Names("names or patterns of layers", MAX_IGNORED_LAYERS),
        Flag(
            "Layers that stay as they are, by name or pattern (blocks.0.*); again for several.",
            "NAME",
            panel=QUANTIZATION,
        ),
    )
    compile: str = option(
        OUTPUT,
        "off",
        OneOf(COMPILE_MODES, ("off",)),
        Flag(
            "With --backend diffusers, compile each kind of block once: off, regional.",
            "MODE",
        ),
    )
    cuda_graphs: str = option(
        SPEED,
        "auto",
        OneOf(CUDA_GRAPH_MODES, ("off", "on")),
        Flag(
            "Replay launch-bound forward passes (CUDA graphs): auto, off, on.",
            "MODE",
            bench_help="Of ours: auto, off, on.",
        ),
        Refusal(
            "{name}: {value}: diffusers' own pipeline runs its model as it is; leave out {flag}, or use --backend "
            "native where the model has a family here",
            "CUDA graphs",
            takes=("off",),
        ),
    )
    offload: str = option(
        MACHINE,
        "auto",
        OneOf(OFFLOAD_MODES),
        Flag(
            "Which weights wait in the machine's memory: auto, none, model, layers. See docs/memory.md.",
            "MODE",
            bench_help="Of a folder's weights: auto, none, model, layers.",
        ),
        _OFFLOADS,
    )
    memory_limit: str | None = option(
        MACHINE,
        None,
        Size(),
        Flag("Device memory limit, e.g. 12GB.", "SIZE", bench_help="Of ours, as in generate."),
        _OFFLOADS,
    )
    encoding_cache: bool = option(
        MACHINE,
        True,
        Switch(),
        Flag("Keep encodings of texts and images for later requests."),
        Refusal("{name}: diffusers' own pipeline keeps none; leave out {flag}", takes=(False,)),
    )
    # Set by `--set pipeline.NAME=value`.
    pipeline_arguments: Any = option(OUTPUT, None, Other(_plain_arguments))
    revision: str | None = option(
        MODEL,
        None,
        Text("a branch, a tag or a commit", REVISION, is_optional=True),
        Flag("Branch, tag or commit of a hub model; also --model-path ORG/NAME@REV.", "REV", WHAT),
    )
    offline: bool = option(
        SPEED,
        False,
        Switch(),
        Flag("Offline: use local folders and the hub cache only.", panel=WHAT),
    )

    def __post_init__(self) -> None:
        self._split_model_path()
        check_options(self)
        if self.vae_decoder is not None and self.vae_decode != "exact":
            raise ConfigError(
                "vae_decode: fast is a mode of the model's own decoder, and vae_decoder names another one"
            )
        if self.vae_decoder is not None and self.vae_tiling not in ("auto", "off"):
            raise ConfigError(
                f"vae_tiling: {self.vae_tiling} is for the model's own decoder, and vae_decoder names another one"
            )
        if self.quantization_ignored_layers and self.quantization == "none":
            raise ConfigError(
                "quantization_ignored_layers: nothing is quantised; add quantization: fp8, or leave it out"
            )

    def _split_model_path(self) -> None:
        if isinstance(self.model_path, str):
            path, revision = split_revision(self.model_path)
            if revision is not None and self.revision not in (None, revision):
                raise ConfigError(
                    f"revision: model_path says {shown(revision)} and revision {shown(self.revision)}; give one of them"
                )
            object.__setattr__(self, "model_path", path)
            object.__setattr__(self, "revision", revision if revision is not None else self.revision)

    @property
    def asks_to_offload(self) -> bool:
        """True where weights are to wait in the machine's memory, or the device's is limited."""
        return self.offload in ("model", "layers") or self.memory_limit is not None

    @property
    def memory_limit_bytes(self) -> int | None:
        """`memory_limit` in bytes."""
        return None if self.memory_limit is None else parse_size(self.memory_limit, "memory_limit")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The configuration a mapping describes. Raises ConfigError that names an unknown key and the nearest one."""
        known = [item.name for item in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"runtime: unknown key {shown(key)}.{nearest(key, known)}")
        plain = dict(values)
        if isinstance(plain.get("parallel"), Mapping):
            plain["parallel"] = _parallel_from_dict(plain["parallel"])
        return cls(**plain)


@functools.cache
def runtime_options() -> dict[str, RuntimeOption]:
    """The declaration of every option of RuntimeConfig, by name."""
    return options_of(RuntimeConfig)


def benchmark_options() -> list[str]:
    """The options that `bench generate` takes and records: of the transformer, then of the decoder."""
    names = [name for name, each in runtime_options().items() if each.flag is not None and each.flag.bench_help]
    return sorted(names, key=lambda name: name.startswith("vae_"))


@functools.cache
def weight_paths() -> tuple[str, ...]:
    """The options that name weights from elsewhere than the model's folder."""
    return tuple(name for name, option in runtime_options().items() if option.is_weight_path)


def _parallel_from_dict(values: Mapping[str, Any]) -> ParallelConfig:
    known = [item.name for item in dataclasses.fields(ParallelConfig)]
    for key in values:
        if key not in known:
            raise ConfigError(f"parallel: unknown key {shown(key)}.{nearest(key, known)}")
    return ParallelConfig(**values)
