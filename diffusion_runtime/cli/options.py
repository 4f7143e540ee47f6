"""The flags of `generate`, declared once: name, help, panel. Those of request fields follow from GenerationRequest; the
others stand here. Names and types only; nothing is decided here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

import typer

from diffusion_runtime.cli.imported_files import import_files
from diffusion_runtime.errors import OutputError, RequestError
from diffusion_runtime.request.fields import SIZE, WHAT
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS

ATTENTION = "Attention"
WHERE = "Where it runs"
PARTS = "Parts from elsewhere"
# Panels of their own: beside flags in pairs (--x/--no-x) the longest names do not fit into 80 columns.
QUANTIZATION = "8-bit linear layers"
TENSOR = "Tensor parallel"
OUTPUT = "Output"
STREAMING = "While it is made"
PHASES = "Attention by phase (docs/causal_video.md)"


def _flag(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


Prompts: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="What to show, in quotes.", show_default=False)
]
PromptFile: TypeAlias = Annotated[
    str | None,
    _flag(
        WHAT,
        "One prompt per line (- reads standard input), or rows of request fields: .jsonl, .csv.",
        "--prompt-file",
        metavar="FILE",
    ),
]
ModelPath: TypeAlias = Annotated[
    str | None,
    _flag(
        WHAT, "shapes (embedded), a name of `models`, a diffusers folder, or a hub id.", "--model-path", metavar="MODEL"
    ),
]
Revision: TypeAlias = Annotated[
    str | None,
    _flag(WHAT, "Branch, tag or commit of a hub model; also --model-path ORG/NAME@REV.", "--revision", metavar="REV"),
]
Offline: TypeAlias = Annotated[
    bool | None, _flag(WHAT, "Ask no network: models come from folders and the hub's cache.", "--offline/--no-offline")
]
LoraPath: TypeAlias = Annotated[
    list[str] | None,
    _flag(WHAT, "A LoRA file; again for several. See --lora.", "--lora-path", metavar="FILE"),
]
Lora: TypeAlias = Annotated[
    list[str] | None,
    _flag(
        WHAT,
        "A LoRA file of any trainer, with its strength: FILE@0.8; again for several. For one of two transformers: "
        "transformer_2=FILE.",
        "--lora",
        metavar="FILE",
    ),
]
LoraScale: TypeAlias = Annotated[
    list[float] | None, _flag(WHAT, "Its strength; one per --lora-path, in their order.", "--lora-scale", metavar="X")
]
FromFile: TypeAlias = Annotated[
    str | None, _flag(WHAT, "Repeat a generated file; other flags override it.", "--from", metavar="FILE")
]
ConfigPath: TypeAlias = Annotated[
    str | None,
    _flag(WHAT, "YAML with runtime:, request: and presets:.", "--config", metavar="FILE"),
]
SetValues: TypeAlias = Annotated[
    list[str] | None,
    _flag(
        WHAT,
        "Set one value of the config: request.height=128. Also as a flag: --request.height 128.",
        "--set",
        metavar="KEY=VALUE",
    ),
]

Preset: TypeAlias = Annotated[
    str | None,
    _flag(
        SIZE,
        "fast (4 steps), draft, default, large, few-step settings of `models`, or one of --config.",
        "--preset",
        metavar="NAME",
    ),
]

AttentionBackend: TypeAlias = Annotated[
    str | None,
    _flag(
        ATTENTION,
        "A backend, or several in order of preference: fa,torch_sdpa. It runs or the command fails before loading.",
        "--attention-backend",
        metavar="NAMES",
    ),
]
AttentionBackendConfig: TypeAlias = Annotated[
    str | None,
    _flag(
        ATTENTION,
        "Its options: key=value,... or JSON, or a JSON or YAML file.",
        "--attention-backend-config",
        metavar="OPTIONS",
    ),
]
PrefillAttentionBackend: TypeAlias = Annotated[
    str | None,
    _flag(
        PHASES,
        "Of commits, which leave the final keys of a chunk; its options: --prefill-attention-backend-config.",
        "--prefill-attention-backend",
        metavar="NAME",
    ),
]
# Too long for a help of 80 columns, which names them beside their backends.
PrefillAttentionBackendConfig: TypeAlias = Annotated[
    str | None, typer.Option("--prefill-attention-backend-config", hidden=True)
]
DecodeAttentionBackend: TypeAlias = Annotated[
    str | None,
    _flag(
        PHASES,
        "Of the denoising steps of each chunk; its options: --decode-attention-backend-config.",
        "--decode-attention-backend",
        metavar="NAME",
    ),
]
DecodeAttentionBackendConfig: TypeAlias = Annotated[
    str | None, typer.Option("--decode-attention-backend-config", hidden=True)
]
AttentionConfigText: TypeAlias = Annotated[
    str | None,
    _flag(
        ATTENTION,
        "Default, per role and schedule, as JSON or a file. Single values: see below.",
        "--attention-config",
        metavar="JSON|FILE",
    ),
]
ImportFiles: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Run a Python file of yours first, which registers a backend; again for several.",
        rich_help_panel=ATTENTION,
        metavar="FILE.py",
        show_default=False,
        callback=import_files,
    ),
]
SelfCheck: TypeAlias = Annotated[
    bool | None,
    _flag(
        WHERE,
        "On an accelerator, compare third-party kernels with the definition before loading, once per version.",
        "--self-check/--no-self-check",
    ),
]
# What dotted attention flags are rewritten to (flag_syntax.py).
AttentionEntries: TypeAlias = Annotated[list[str] | None, typer.Option("--dotted-attention", hidden=True)]

Device: TypeAlias = Annotated[str | None, _flag(WHERE, "auto, cpu, cuda, cuda:1, mps, ...", "--device", metavar="NAME")]
Dtype: TypeAlias = Annotated[str | None, _flag(WHERE, "auto, float32, bfloat16 or float16.", "--dtype", metavar="NAME")]
RuntimeBackend: TypeAlias = Annotated[
    str | None,
    _flag(WHERE, "Implementation: native, diffusers (its own pipeline) or auto.", "--backend", metavar="NAME"),
]
VaeDecode: TypeAlias = Annotated[
    str | None, _flag(WHERE, "exact: diffusers' bits; fast: differs by rounding.", "--vae-decode", metavar="MODE")
]
VaeTiling: TypeAlias = Annotated[
    str | None, _flag(WHERE, "Decode in blended tiles: auto, on (less memory), off.", "--vae-tiling", metavar="CHOICE")
]
VaeDecoder: TypeAlias = Annotated[
    str | None,
    _flag(
        WHERE,
        "For previews: tiny, or a TAEHV file in safetensors; none: the model's own.",
        "--vae-decoder",
        metavar="tiny|FILE",
    ),
]
TransformerPath: TypeAlias = Annotated[
    str | None,
    _flag(
        PARTS,
        "The transformer's weights from a file or a folder; none: the model's own.",
        "--transformer-path",
        metavar="PATH",
    ),
]
UpsamplerPath: TypeAlias = Annotated[
    str | None,
    _flag(
        WHERE,
        "Folder of a latent upsampler: half the size first, then refined at full size.",
        "--upsampler-path",
        metavar="PATH",
    ),
]
Transformer2Path: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "The same for the second transformer of two.", "--transformer-2-path", metavar="PATH"),
]
ControlnetPath: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "Folder of a ControlNet, for models that take one.", "--controlnet-path", metavar="PATH"),
]
VaePath: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "The same for the autoencoder: Wan2.1_VAE, ae.safetensors, ...", "--vae-path", metavar="PATH"),
]
AudioVaePath: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "The same for the sound's autoencoder.", "--audio-vae-path", metavar="PATH"),
]
VocoderPath: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "The same for the vocoder, which may be in the same file.", "--vocoder-path", metavar="PATH"),
]
TextEncoderPath: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "The same for the text encoder: umt5_xxl_fp16, ...", "--text-encoder-path", metavar="PATH"),
]
TextEncoder2Path: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "The same for the second text encoder of two.", "--text-encoder-2-path", metavar="PATH"),
]
Variant: TypeAlias = Annotated[
    str | None,
    _flag(PARTS, "Which of a folder's weights: fp16 for model.fp16.safetensors.", "--variant", metavar="NAME"),
]
Quantization: TypeAlias = Annotated[
    str | None,
    _flag(QUANTIZATION, "none, fp8, fp8-all or int8. See docs/quantization.md.", "--quantization", metavar="MODE"),
]
QuantizationIgnoredLayers: TypeAlias = Annotated[
    list[str] | None,
    _flag(
        QUANTIZATION,
        "Layers that stay as they are, by name or pattern (blocks.0.*); again for several.",
        "--quantization-ignored-layers",
        metavar="NAME",
    ),
]
Compile: TypeAlias = Annotated[
    str | None,
    _flag(WHERE, "Compile each kind of block once (torch.compile): off, regional.", "--compile", metavar="MODE"),
]
CudaGraphs: TypeAlias = Annotated[
    str | None,
    _flag(WHERE, "Replay launch-bound forward passes (CUDA graphs): auto, off, on.", "--cuda-graphs", metavar="MODE"),
]
Offload: TypeAlias = Annotated[
    str | None,
    _flag(
        WHERE,
        "Which weights wait in the machine's memory: auto, none, model, layers. See docs/memory.md.",
        "--offload",
        metavar="MODE",
    ),
]
MemoryLimit: TypeAlias = Annotated[
    str | None, _flag(WHERE, "What to take on the device at most: 12GB.", "--memory-limit", metavar="SIZE")
]
NumGpus: TypeAlias = Annotated[
    int | None, _flag(WHERE, "Processes, one per device; degrees are chosen.", "--num-gpus", metavar="N")
]
UlyssesDegree: TypeAlias = Annotated[
    int | None, _flag(WHERE, "Sequence parallel: processes that share the heads.", "--ulysses-degree", metavar="N")
]
RingDegree: TypeAlias = Annotated[
    int | None, _flag(WHERE, "Ring attention: processes that share the keys.", "--ring-degree", metavar="N")
]
CfgParallel: TypeAlias = Annotated[
    bool | None,
    _flag(WHERE, "The two guidance branches on two groups of processes.", "--cfg-parallel/--no-cfg-parallel"),
]
TensorParallelSize: TypeAlias = Annotated[
    int | None,
    _flag(
        TENSOR,
        "Processes that share each weight and the heads, for models that one device cannot hold.",
        "--tensor-parallel-size",
        metavar="N",
    ),
]

OutputPath: TypeAlias = Annotated[
    str | None,
    _flag(OUTPUT, "A file with extension, or a folder. Default: outputs/", "--output-path", "-o", metavar="PATH"),
]
Format: TypeAlias = Annotated[
    str | None, _flag(OUTPUT, "mp4, gif, webp, png, npy; wav is the sound alone.", "--format", metavar="NAME")
]
Json: TypeAlias = Annotated[bool, _flag(OUTPUT, "One JSON object on standard output.", "--json")]
Resume: TypeAlias = Annotated[
    bool, _flag(OUTPUT, "Continue a run that was interrupted: make what is missing.", "--resume")
]
PlanFor: TypeAlias = Annotated[
    str | None,
    _flag(
        OUTPUT,
        "With --dry-run: plan for a GPU that is not here: h100, 4090, ... See docs/memory.md.",
        "--plan-for",
        metavar="NAME",
    ),
]
DryRun: TypeAlias = Annotated[bool, _flag(OUTPUT, "Show what would run; load no weights, write nothing.", "--dry-run")]
Profile: TypeAlias = Annotated[
    str | None,
    _flag(
        OUTPUT, "Trace of the first request, for Perfetto. See docs/instruments.md.", "--profile", metavar="FILE.json"
    ),
]
Stream: TypeAlias = Annotated[
    str | None,
    _flag(
        STREAMING,
        "Write an mp4 that can be watched while it is made; - is standard output. For causal models; see "
        "docs/causal_video.md.",
        "--stream",
        metavar="FILE.mp4",
    ),
]
Interactive: TypeAlias = Annotated[
    bool,
    _flag(
        STREAMING,
        "With --stream: a line on standard input is the prompt from the next chunk on. Without a length, until the "
        "input ends.",
        "--interactive",
    ),
]
AttentionPlot: TypeAlias = Annotated[
    str | None,
    _flag(
        OUTPUT,
        "A picture of the density of attention by layer and step, and of one plan. See docs/instruments.md.",
        "--attention-plot",
        metavar="FILE.png",
    ),
]
Quiet: TypeAlias = Annotated[bool, _flag(OUTPUT, "Errors only, and the paths.", "--quiet", "-q")]
Verbose: TypeAlias = Annotated[bool, _flag(OUTPUT, "Everything, tracebacks included.", "--verbose", "-v")]
LogFormat: TypeAlias = Annotated[
    str | None,
    _flag(OUTPUT, "Of standard error: text, or json, one object per line.", "--log-format", metavar="NAME"),
]


@dataclass(frozen=True)
class PromptFlags:
    """Where prompts come from, beside --prompt."""

    prompts: Prompts = None
    prompt_file: PromptFile = None


@dataclass(frozen=True)
class SourceFlags:
    """The model, and where other values come from."""

    model_path: ModelPath = None
    revision: Revision = None
    offline: Offline = None
    lora: Lora = None
    lora_path: LoraPath = None
    lora_scale: LoraScale = None
    from_file: FromFile = None
    config: ConfigPath = None
    set_values: SetValues = None
    preset: Preset = None


@dataclass(frozen=True)
class RunFlags:
    """How attention is chosen, where it runs, and what is written and reported."""

    attention_backend: AttentionBackend = None
    attention_backend_config: AttentionBackendConfig = None
    attention_config: AttentionConfigText = None
    prefill_attention_backend: PrefillAttentionBackend = None
    prefill_attention_backend_config: PrefillAttentionBackendConfig = None
    decode_attention_backend: DecodeAttentionBackend = None
    decode_attention_backend_config: DecodeAttentionBackendConfig = None
    attention_entry: AttentionEntries = None
    import_files: ImportFiles = None
    device: Device = None
    dtype: Dtype = None
    backend: RuntimeBackend = None
    transformer_path: TransformerPath = None
    transformer_2_path: Transformer2Path = None
    controlnet_path: ControlnetPath = None
    vae_path: VaePath = None
    audio_vae_path: AudioVaePath = None
    vocoder_path: VocoderPath = None
    text_encoder_path: TextEncoderPath = None
    text_encoder_2_path: TextEncoder2Path = None
    variant: Variant = None
    upsampler_path: UpsamplerPath = None
    vae_decode: VaeDecode = None
    vae_tiling: VaeTiling = None
    vae_decoder: VaeDecoder = None
    quantization: Quantization = None
    quantization_ignored_layers: QuantizationIgnoredLayers = None
    compile: Compile = None
    cuda_graphs: CudaGraphs = None
    offload: Offload = None
    memory_limit: MemoryLimit = None
    num_gpus: NumGpus = None
    ulysses_degree: UlyssesDegree = None
    ring_degree: RingDegree = None
    cfg_parallel: CfgParallel = None
    tensor_parallel_size: TensorParallelSize = None
    self_check: SelfCheck = None
    output_path: OutputPath = None
    file_format: Format = None
    as_json: Json = False
    dry_run: DryRun = False
    plan_for: PlanFor = None
    resume: Resume = False
    profile: Profile = None
    stream: Stream = None
    interactive: Interactive = False
    attention_plot: AttentionPlot = None
    quiet: Quiet = False
    verbose: Verbose = False
    log_format: LogFormat = None


# Those of RunFlags that are about the files of one generation, which verbs that write none do not take.
OUTPUT_FLAGS = (
    "output_path",
    "file_format",
    "resume",
    "dry_run",
    "plan_for",
    "profile",
    "stream",
    "interactive",
    "attention_plot",
)


def is_of_clips(option: str | None) -> bool:
    """Whether `generate` alone has this option, as it alone writes clips: -o, --resume, --attention-plot, ..."""
    hints = get_type_hints(RunFlags, include_extras=True)
    # In an annotation typer keeps the first name of an option in the place of a default.
    declared = (get_args(hints[name])[1] for name in OUTPUT_FLAGS)
    return any(option in (each.default, *each.param_decls) for each in declared)


def parameters_of(flags: type) -> list[inspect.Parameter]:
    """The flags of one of the classes above, as parameters of a verb."""
    hints = get_type_hints(flags, include_extras=True)
    return [_parameter(item.name, hints[item.name], item.default) for item in fields(flags)]


def request_parameters(panel: str) -> list[inspect.Parameter]:
    """The flags of the request fields of one panel; None is a flag that was not given. Those of files are lists as
    well: the last of several would hide the others."""
    parameters = []
    for name, declared in REQUEST_FIELDS.items():
        if declared.panel == panel:
            flag = declared.flag or f"--{name.replace('_', '-')}"
            kind: Any = list[str] if declared.repeatable or name in INPUT_FIELDS else declared.check.kind
            option = _flag(panel, declared.help, flag, metavar=declared.check.metavar)
            if kind in (int, float):
                option.parser = _number_parser(flag, kind, declared.check)
            parameters.append(_parameter(name, Annotated[kind | None, option], None))
    return parameters


def _number_parser(flag: str, kind: type[int | float], check: Callable[[str, object], None]) -> Callable[[str], Any]:
    """Of the number of a request field. What is none is refused in the field's words: the parser's own say neither
    what was typed nor what may be."""

    def parse(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            try:
                check("", text)
            except RequestError as error:
                raise typer.BadParameter(str(error).removeprefix(": "), param_hint=f"'{flag}'") from None
            raise

    return parse


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def html_option(text: str) -> Any:
    """The annotation of --html: a file that a page is written to."""
    return Annotated[
        Path | None,
        typer.Option(
            "--html", help=text, metavar="FILE.html", rich_help_panel=OUTPUT, show_default=False, parser=_html_path
        ),
    ]


def _html_path(text: str) -> Path:
    """Raises OutputError for the name of a folder, whose slash a Path does not keep."""
    if text.endswith(("/", os.sep)):
        raise OutputError(f"--html {text}: it is a folder; give the name of a file in it")
    return Path(text)
