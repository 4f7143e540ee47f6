"""Every flag of `generate`, declared once: name, help, panel. Names and types only; nothing is decided here."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import typer

WHAT = "What to make"
SIZE = "Size and steps"
ATTENTION = "Attention"
WHERE = "Where it runs"
OUTPUT = "Output"


def _flag(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar, show_default=False)


Prompts: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="What to show, in quotes.", show_default=False)
]
Prompt: TypeAlias = Annotated[
    list[str] | None, _flag(WHAT, "The prompt as a flag; give it again for several.", "--prompt", metavar="TEXT")
]
PromptFile: TypeAlias = Annotated[
    str | None,
    _flag(WHAT, "One prompt a line; # starts a comment; - reads standard input.", "--prompt-file", metavar="FILE"),
]
NegativePrompt: TypeAlias = Annotated[
    list[str] | None,
    _flag(
        WHAT, "What to steer away from: once for all prompts, or once a prompt.", "--negative-prompt", metavar="TEXT"
    ),
]
ImagePath: TypeAlias = Annotated[
    str | None,
    _flag(WHAT, "The image a video starts from, for models that take one.", "--image-path", metavar="FILE"),
]
Seed: TypeAlias = Annotated[
    list[str] | None,
    _flag(WHAT, "7, or several: 1,2 or 1-4 or the flag again. Each prompt is made with each.", "--seed", metavar="N"),
]
ModelPath: TypeAlias = Annotated[
    str | None,
    _flag(
        WHAT, "shapes (embedded), a name of `models`, a diffusers folder, or a hub id.", "--model-path", metavar="MODEL"
    ),
]
LoraPath: TypeAlias = Annotated[
    list[str] | None,
    _flag(WHAT, "A LoRA in diffusers' format, merged at load; again for several.", "--lora-path", metavar="FILE"),
]
LoraScale: TypeAlias = Annotated[
    list[float] | None, _flag(WHAT, "How strongly; once a file, in their order.", "--lora-scale", metavar="X")
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
    str | None, _flag(SIZE, "draft, default, large, or one of --config.", "--preset", metavar="NAME")
]
Height: TypeAlias = Annotated[int | None, _flag(SIZE, "Pixels.", "--height", metavar="N")]
Width: TypeAlias = Annotated[int | None, _flag(SIZE, "Pixels.", "--width", metavar="N")]
NumFrames: TypeAlias = Annotated[int | None, _flag(SIZE, "1 makes an image.", "--num-frames", metavar="N")]
Fps: TypeAlias = Annotated[int | None, _flag(SIZE, "Frames a second of the file.", "--fps", metavar="N")]
NumInferenceSteps: TypeAlias = Annotated[
    int | None, _flag(SIZE, "Denoising steps.", "--num-inference-steps", metavar="N")
]
GuidanceScale: TypeAlias = Annotated[
    float | None, _flag(SIZE, "How strongly to follow the prompt; 1 turns it off.", "--guidance-scale", metavar="X")
]
TrueCfgScale: TypeAlias = Annotated[
    float | None,
    _flag(
        SIZE,
        "Guidance by a second branch, for models that take --guidance-scale as an input.",
        "--true-cfg-scale",
        metavar="X",
    ),
]
GuidanceScale2: TypeAlias = Annotated[
    float | None,
    _flag(
        SIZE,
        "Guidance of the expert for low noise, in models with two; a --guidance-scale alone is that of both.",
        "--guidance-scale-2",
        metavar="X",
    ),
]
FlowShift: TypeAlias = Annotated[
    float | None, _flag(SIZE, "Shift of the noise schedule towards high noise.", "--flow-shift", metavar="X")
]
Sampler: TypeAlias = Annotated[str | None, _flag(SIZE, "flow_match_euler or unipc.", "--sampler", metavar="NAME")]
GuidanceMode: TypeAlias = Annotated[
    str | None,
    _flag(SIZE, "batched, or two_pass: half the memory, same result.", "--guidance-mode", metavar="NAME"),
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
AttentionConfigText: TypeAlias = Annotated[
    str | None,
    _flag(
        ATTENTION,
        "Default, per role and schedule, as JSON or a file. Single values: see below.",
        "--attention-config",
        metavar="JSON|FILE",
    ),
]
SelfCheck: TypeAlias = Annotated[
    bool | None,
    _flag(
        ATTENTION,
        "On an accelerator, compare third-party kernels with the definition before loading, once per version.",
        "--self-check/--no-self-check",
    ),
]
# What dotted attention flags are rewritten to (dotted_flags.py).
AttentionEntries: TypeAlias = Annotated[list[str] | None, typer.Option("--dotted-attention", hidden=True)]

Device: TypeAlias = Annotated[str | None, _flag(WHERE, "auto, cpu, cuda, cuda:1, mps, ...", "--device", metavar="NAME")]
Dtype: TypeAlias = Annotated[str | None, _flag(WHERE, "auto, float32, bfloat16 or float16.", "--dtype", metavar="NAME")]
RuntimeBackend: TypeAlias = Annotated[
    str | None, _flag(WHERE, "Who runs the model: auto, native, diffusers.", "--backend", metavar="NAME")
]
NumGpus: TypeAlias = Annotated[
    int | None, _flag(WHERE, "Processes, one a device; degrees are chosen.", "--num-gpus", metavar="N")
]
UlyssesDegree: TypeAlias = Annotated[
    int | None, _flag(WHERE, "Processes that share the heads.", "--ulysses-degree", metavar="N")
]
RingDegree: TypeAlias = Annotated[
    int | None, _flag(WHERE, "Processes that share the keys.", "--ring-degree", metavar="N")
]
CfgParallel: TypeAlias = Annotated[
    bool | None, _flag(WHERE, "Guidance branches on two groups.", "--cfg-parallel/--no-cfg-parallel")
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
DryRun: TypeAlias = Annotated[bool, _flag(OUTPUT, "Say what would run; load no weights, write nothing.", "--dry-run")]
Quiet: TypeAlias = Annotated[bool, _flag(OUTPUT, "Errors only, and the paths.", "--quiet", "-q")]
Verbose: TypeAlias = Annotated[bool, _flag(OUTPUT, "Everything, tracebacks included.", "--verbose", "-v")]
