"""Nodes that make images and videos on a server."""

from __future__ import annotations

import base64
import io as streams
import json
import os
from typing import Any

import numpy
import torch
from comfy_api.latest import InputImpl, io
from PIL import Image

from .server_calls import KEY_VARIABLE, Address, made

CATEGORY = "diffusion-runtime"
ServerType = io.Custom("DIFFUSION_RUNTIME_SERVER")
AttentionType = io.Custom("DIFFUSION_RUNTIME_ATTENTION")


class Server(io.ComfyNode):
    """The address of a server."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffusionRuntimeServer",
            display_name="Server (diffusion-runtime)",
            category=CATEGORY,
            description=f"A server that `diffusion-runtime serve` started; its key is the variable {KEY_VARIABLE}.",
            inputs=[io.String.Input("url", default="http://127.0.0.1:8000")],
            outputs=[ServerType.Output(display_name="server")],
        )

    @classmethod
    def execute(cls, url: str) -> io.NodeOutput:
        return io.NodeOutput(Address.of(url, os.environ))


class AttentionChoice(io.ComfyNode):
    """Backends by role, their options and a schedule, as a request gives them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        help_of_names = "A backend, or several in order of preference; empty for the server's own choice."
        return io.Schema(
            node_id="DiffusionRuntimeAttention",
            display_name="Attention choice (diffusion-runtime)",
            category=CATEGORY,
            inputs=[
                io.String.Input("every_role", default="", tooltip=help_of_names),
                io.String.Input("self_attention", default="", tooltip=help_of_names),
                io.String.Input(
                    "self_options", default="", tooltip='Options of that backend as JSON: {"sparsity": 0.8}'
                ),
                io.String.Input("cross_attention", default="", tooltip=help_of_names),
                io.String.Input(
                    "schedule",
                    default="",
                    multiline=True,
                    tooltip='Rules as JSON: [{"steps": "0-1", "layers": "0-3", "backend": "torch_sdpa"}]',
                ),
            ],
            outputs=[AttentionType.Output(display_name="attention")],
        )

    @classmethod
    def execute(
        cls, every_role: str, self_attention: str, self_options: str, cross_attention: str, schedule: str
    ) -> io.NodeOutput:
        options, rules = parsed("self_options", self_options, dict), parsed("schedule", schedule, list)
        roles: dict[str, Any] = {"self": self_attention, "cross": cross_attention}
        per_role = {role: {"backend": name} for role, name in roles.items() if name}
        if options:
            if not self_attention:
                raise ValueError("self_options: expected self_attention beside it")
            per_role["self"]["extra"] = options
        whole = {"default": {"backend": every_role} if every_role else None, "per_role": per_role, "schedule": rules}
        return io.NodeOutput({name: value for name, value in whole.items() if value})


def parsed(name: str, text: str, kind: type[Any]) -> Any:
    """Return the value of a JSON text, None for an empty one. Raises ValueError that names the input."""
    if not text.strip():
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}: expected JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {'{...}' if kind is dict else '[...]'}, got {text.strip()[:80]}")
    return value


def _request_inputs() -> list[Any]:
    """Return the inputs that images and videos have in common."""
    own = "0: the model's own."
    return [
        ServerType.Input("server"),
        io.String.Input("prompt", multiline=True, default=""),
        io.String.Input("negative_prompt", multiline=True, default="", tooltip="Empty: the model's own."),
        io.Int.Input("width", default=0, min=0, max=8192, step=8, tooltip=own),
        io.Int.Input("height", default=0, min=0, max=8192, step=8, tooltip=own),
        io.Int.Input("steps", default=0, min=0, max=1000, tooltip=own),
        io.Float.Input("guidance", default=-1.0, min=-1.0, max=100.0, step=0.1, tooltip="-1: the model's own."),
        io.Int.Input("seed", default=0, min=0, max=2**63 - 1, control_after_generate=True),
        io.String.Input("preset", default="", tooltip="A preset of the model; empty for none."),
        io.String.Input("more", default="", multiline=True, tooltip='Other fields as JSON: {"flow_shift": 5.0}'),
        io.Image.Input("image", optional=True),
        AttentionType.Input("attention", optional=True),
    ]


def request_of(
    *,
    prompt: str,
    negative_prompt: str,
    width: int,
    height: int,
    steps: int,
    guidance: float,
    seed: int,
    preset: str,
    more: str,
    attention: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the body of a request, without what is the model's own."""
    named = {
        "negative_prompt": negative_prompt,
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        "preset": preset,
        "attention": attention,
    }
    values = {name: value for name, value in named.items() if value}
    if guidance >= 0:
        values["guidance_scale"] = guidance
    return {"prompt": prompt, "seed": seed, **values, **(parsed("more", more, dict) or {})}


def _made(server: Address, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Make a job with ComfyUI's progress bar and interrupt."""
    from comfy.model_management import throw_exception_if_processing_interrupted

    # The V3 interface has a call for it too (ComfyAPISync), which ComfyUI 0.3.64 offers without its `execution`.
    from comfy.utils import ProgressBar

    return made(server, path, body, ProgressBar(100).update_absolute, throw_exception_if_processing_interrupted)


class GenerateImage(io.ComfyNode):
    """Images of a server."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffusionRuntimeImage",
            display_name="Generate image (diffusion-runtime)",
            category=CATEGORY,
            inputs=[
                *_request_inputs(),
                io.Int.Input("count", default=1, min=1, max=10, optional=True),
                io.Mask.Input("mask", optional=True),
            ],
            outputs=[io.Image.Output(display_name="images"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls,
        server: Address,
        image: torch.Tensor | None = None,
        attention: dict[str, Any] | None = None,
        count: int = 1,
        mask: torch.Tensor | None = None,
        **values: Any,
    ) -> io.NodeOutput:
        body = {**request_of(attention=attention, **values), "n": count, "wait": False}
        if image is not None:
            body["image"] = [{"image_url": data_url(each)} for each in image]
        if mask is not None:
            body["mask"] = {"image_url": data_url(mask[0][..., None].expand(-1, -1, 3))}
        job = _made(server, "v1/images/generations" if image is None else "v1/images/edits", body)
        kept = [server.call("GET", f"v1/images/{job['id']}/content?variant={index}") for index in range(count)]
        return io.NodeOutput(torch.stack([pixels(each) for each in kept]), report_text(job))


class GenerateVideo(io.ComfyNode):
    """A video of a server, with its sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffusionRuntimeVideo",
            display_name="Generate video (diffusion-runtime)",
            category=CATEGORY,
            inputs=[
                *_request_inputs(),
                io.Int.Input("frames", default=0, min=0, max=100_000, optional=True, tooltip="0: the model's own."),
            ],
            outputs=[
                io.Video.Output(display_name="video"),
                io.Image.Output(display_name="frames"),
                io.Audio.Output(display_name="sound"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls,
        server: Address,
        image: torch.Tensor | None = None,
        attention: dict[str, Any] | None = None,
        frames: int = 0,
        **values: Any,
    ) -> io.NodeOutput:
        body = request_of(attention=attention, **values)
        if frames:
            body["num_frames"] = frames
        if image is not None:
            body["input_reference"] = [{"image_url": data_url(each)} for each in image]
        job = _made(server, "v1/videos", body)
        video = InputImpl.VideoFromFile(streams.BytesIO(server.call("GET", f"v1/videos/{job['id']}/content")))
        parts = video.get_components()
        return io.NodeOutput(video, parts.images, parts.audio, report_text(job))


def data_url(image: torch.Tensor) -> str:
    """Return a PNG of an image [height, width, 3] in [0, 1] as a data: URL."""
    content = streams.BytesIO()
    Image.fromarray((image[..., :3].cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy()).save(
        content, "PNG"
    )
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def pixels(content: bytes) -> torch.Tensor:
    """Return an image file as [height, width, 3] in [0, 1]."""
    with Image.open(streams.BytesIO(content)) as image:
        return torch.from_numpy(numpy.asarray(image.convert("RGB"), dtype=numpy.float32) / 255.0)


def report_text(job: dict[str, Any]) -> str:
    """Return what ran, a line per row of the attention report, and the seconds of each stage."""
    report = job["attention_report"] or {"rows": (), "notes": ()}
    rows = [
        f"{row['role']}: {row['backend']} ({row['implementation']}), {row['count']} calls, layers {row['layers']}, "
        f"steps {row['steps']}; {row['source']}: {row['reason']}"
        for row in report["rows"]
    ]
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in (job["timings"] or {}).items())
    return "\n".join([*rows, *report["notes"], *job["warnings"], stages, f"seed {job['seed']}"])
