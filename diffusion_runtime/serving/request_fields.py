"""Fields of requests over HTTP: what each is called, what it becomes, and which are refused by name.

The values of a generation are those of GenerationRequest, under their own names. This table adds what OpenAI's clients,
SGLang's and vLLM-Omni's send.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion_runtime.core.options import parse_scalar
from diffusion_runtime.errors import RequestError, nearest, shown
from diffusion_runtime.request.generation_request import INPUT_FIELDS, REQUEST_FIELDS, GenerationRequest
from diffusion_runtime.serving.api_errors import ApiError, invalid
from diffusion_runtime.serving.body import Body
from diffusion_runtime.serving.jobs import IMAGE, VIDEO
from diffusion_runtime.serving.settings import Limits

MAX_PROMPT = 32_000
MAX_IMAGES = 10
# Previews of a video, at most.
_VIDEO_PREVIEWS = 10
IMAGE_FORMATS = ("png", "webp", "jpeg")
# Fields of a request that name no file of this machine.
PLAIN_FIELDS = tuple(name for name in REQUEST_FIELDS if name not in (*INPUT_FIELDS, "prompt", "seed"))
# Other spellings of fields.
SPELLINGS = {
    "steps": "num_inference_steps",
    "cfg_scale": "guidance_scale",
    "num_outputs_per_prompt": "n",
    "attention_config": "attention",
    "attention_backend_override": "attention",
    "image_reference": "input_reference",
    "reference_url": "input_reference",
}
# Taken, and neither used nor kept: they say something of the user.
UNUSED = ("user", "safety_identifier", "moderation")
# Of clients that send them always; another value than these would be ignored.
ONLY: Mapping[str, tuple[Any, ...]] = {
    "quality": (None, "auto", "default", "standard"),
    "style": (None, "auto", "default", "vivid"),
    "background": (None, "auto", "default", "opaque"),
    "input_fidelity": (None, "auto", "high"),
    **dict.fromkeys(
        (
            "enable_teacache",
            "enable_cache_dit",
            "enable_frame_interpolation",
            "enable_upscaling",
            "profile",
            "progressive_mode",
            "enhance_prompt",
        ),
        (None, False),
    ),
}
_INSTEAD = {
    "enable_frame_interpolation": "interpolate",
    "enable_teacache": "step_cache",
    "enable_cache_dit": "step_cache",
}
_FORBIDDEN = re.compile(
    r"\w*_path|video_url|video_reference|output_\w*path|perf_dump\w*|save_\w+|file_id|model_dir|lora_dir"
)
_OWN = ("prompt", "model", "seed", "size", "preset", "attention", "lora", "generator_device", "n")
# Of the answer: what of a generation is counted or kept beside its file.
RECORDED = ("return_report", "return_density", "return_latents")
# What becomes of the files that clients send.
FILE_FIELDS: Mapping[str, Mapping[str, str]] = {
    VIDEO: {
        "input_reference": "image_path",
        "last_image": "last_image_path",
        "references": "references",
        "init_video": "init_path",
        "video": "video_path",
        "mask": "mask_path",
        "image_mask": "image_mask_path",
        "audio": "audio_path",
    },
    IMAGE: {"image": "image_path", "mask": "mask_path", "init_image": "init_path"},
}
# Of videos, those that may be videos or sounds; the others are images.
_OF_ANY_KIND = ("references", "init_video", "video", "mask", "audio")
_SEVERAL = ("image_path", "image_mask_path", "references")
_OF_VIDEOS = (*FILE_FIELDS[VIDEO], "return_previews", "stream")
_OF_IMAGES = (
    *FILE_FIELDS[IMAGE],
    *("response_format", "output_format", "output_compression", "stream", "partial_images", "wait"),
)
_FILES = tuple(dict.fromkeys(name for fields in FILE_FIELDS.values() for name in fields))
_PATH = re.compile(r"(?<![a-z_-])(?:--)?((?:[a-z]+[_-])+path)(?: FILE)?(?![a-z_-])")
# Texts in which the options of a method name a file.
_FILE_OPTION = re.compile(r"[:,]\s*\w*(file|path)\s*=", re.IGNORECASE)


@dataclass(kw_only=True)
class Draft:
    """A request as a client sent it, before the model has filled it in. requests: values of GenerationRequest, one of
    each image. loras: None for the server's default. images: contents by request field. options: of the answer, not
    of the generation. num_previews: estimates while it runs."""

    kind: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    preset: str | None = None
    attention: Any = None
    loras: list[dict[str, Any]] | None = None
    images: dict[str, list[bytes | str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    num_previews: int = 0
    warnings: list[str] = field(default_factory=list)

    def work(self) -> dict[str, Any]:
        """Return what the engine is asked to check."""
        loras = self.loras or []
        return {"requests": self.requests, "preset": self.preset, "attention": self.attention, "loras": loras}


def read_draft(kind: str, body: Body, model: str, limits: Limits) -> Draft:
    """Read a request for videos or images. Raises ApiError that names the field which is wrong, unknown, or would be
    ignored."""
    values = _renamed(body.values)
    _refuse_unknown(kind, {**values, **{SPELLINGS.get(name, name): None for name in body.files}}, body)
    reader = _Reader(values, is_form=body.is_form)
    draft = Draft(kind=kind)
    if reader.take("model", reader.text) not in (None, model, ""):
        raise ApiError(404, "model_not_found", f"model: this server has {shown(model)} alone", param="model")
    request: dict[str, Any] = {"prompt": checked_prompt(values.get("prompt"))}
    request |= _size(reader.take("size", reader.text))
    for name in PLAIN_FIELDS:
        if name not in values:
            continue
        value = reader.take(name, reader.of_kind(REQUEST_FIELDS[name].check.kind))
        if value is not None:
            request[name] = value
    for name, value in request.items():
        if isinstance(value, str):
            _check_text(name, value)
        if isinstance(value, str) and name != "prompt" and name != "negative_prompt" and _FILE_OPTION.search(value):
            raise invalid(name, f"{name}: a request names no file of the server; leave it out", "forbidden_parameter")
    if "num_frames" in request:
        # It says exactly what `seconds` says nearly.
        request.pop("seconds", None)
    if kind == IMAGE:
        if request.setdefault("num_frames", 1) != 1 or "seconds" in request:
            raise invalid("num_frames", "num_frames: an image has 1; videos are made by POST /v1/videos")
        request.pop("fps", None)
    draft.preset = reader.take("preset", reader.text)
    attention = reader.take("attention", _anything)
    draft.attention = _scalars(attention) if body.is_form else attention
    given = reader.take("lora", _anything)
    draft.loras = None if given is None else lora_choices(given)
    if reader.take("generator_device", reader.text) not in (None, "cpu"):
        draft.warnings.append("generator_device: the noise is drawn on the CPU, so that every device begins alike")
    num_images = reader.take("n", reader.whole)
    draft.requests = _with_seeds(kind, request, 1 if num_images is None else num_images, reader.take("seed", _anything))
    for name in RECORDED:
        recorded = reader.take(name, reader.boolean)
        draft.options[name] = name == "return_report" if recorded is None else recorded
    if kind == IMAGE:
        _read_image_options(draft, reader)
    elif reader.take("stream", reader.boolean):
        draft.options["stream"] = True
    elif reader.take("return_previews", reader.boolean):
        draft.num_previews = _VIDEO_PREVIEWS
    _take_images(draft, values, body.files)
    _check_types(draft, limits)
    return draft


def checked_prompt(value: Any) -> str:
    """Return a prompt. Raises ApiError for none, and for one that no tokenizer is made for."""
    if not isinstance(value, str) or not value.strip():
        raise invalid("prompt", f"prompt: expected a text of at least one word, got {shown(value)}")
    if len(value) > MAX_PROMPT:
        raise invalid("prompt", f"prompt: expected at most {MAX_PROMPT} characters, got {len(value)}")
    _check_text("prompt", value)
    return value


def checked_seed(value: Any) -> int:
    """Return a seed. Raises ApiError for what is no whole number."""
    return _Reader({}, is_form=True).whole("seed", value)


def _check_text(name: str, text: str) -> None:
    if "\x00" in text:
        raise invalid(name, f"{name}: expected a text without NUL, got one at character {text.index(chr(0))}")


def _read_image_options(draft: Draft, reader: _Reader) -> None:
    options = draft.options
    options["response_format"] = reader.take("response_format", reader.one_of("b64_json", "url")) or "b64_json"
    options["output_format"] = reader.take("output_format", reader.one_of(*IMAGE_FORMATS)) or "png"
    quality = reader.take("output_compression", reader.whole)
    if quality is not None and not 0 <= quality <= 100:
        raise invalid("output_compression", f"output_compression: expected 0 to 100, got {quality}")
    options["output_compression"] = 100 if quality is None else quality
    options["stream"] = bool(reader.take("stream", reader.boolean))
    options["wait"] = reader.take("wait", reader.boolean) is not False
    if options["stream"] and not options["wait"]:
        raise invalid("wait", "wait: a stream is waited for; leave it out, or read /v1/images/{id}/events")
    partial = reader.take("partial_images", reader.whole) or 0
    if not 0 <= partial <= 3:
        raise invalid("partial_images", f"partial_images: expected 0 to 3, got {partial}")
    if partial and not options["stream"] and options["wait"]:
        raise invalid("partial_images", "partial_images: they come with stream=true, or as events with wait=false")
    if options["stream"] and len(draft.requests) > 1:
        raise invalid("n", "n: a stream is of one image")
    draft.num_previews = partial


def in_clients_words(kind: str, text: str) -> str:
    """Return a message about the runtime's fields of files, or their flags, with those that a client sends."""
    sent = {field: name for name, field in FILE_FIELDS[kind].items()}
    return _PATH.sub(lambda found: sent.get(found[1].replace("-", "_"), found[0]), text)


def may_be_of_any_kind(kind: str, name: str) -> bool:
    """Return whether a file that a client sends may be an image, a video or a sound; elsewhere it is an image."""
    return kind == VIDEO and name in _OF_ANY_KIND


def _take_images(draft: Draft, values: Mapping[str, Any], files: Mapping[str, list[bytes]]) -> None:
    for name, target in {**FILE_FIELDS[VIDEO], **FILE_FIELDS[IMAGE]}.items():
        contents: list[bytes | str] = []
        for spelling in (name, *(other for other, means in SPELLINGS.items() if means == name)):
            contents += files.get(spelling, [])
        given = values.get(name)
        for each in given if isinstance(given, list) else [] if given is None else [given]:
            contents.append(_url_of(name, each))
        if len(contents) > 1 and target not in _SEVERAL:
            raise invalid(name, f"{name}: expected one file, got {len(contents)}")
        if contents:
            draft.images[target] = contents


def _url_of(name: str, value: Any) -> str:
    """Return the URL of an image in the forms that clients send."""
    if isinstance(value, Mapping):
        for key in value:
            if key not in ("image_url", "url", "type", "detail"):
                code = "unsupported_for_model" if key == "file_id" else "unknown_parameter"
                raise invalid(name, f"{name}: this server keeps no files; send the image itself, or image_url", code)
        value = value.get("image_url", value.get("url"))
        if isinstance(value, Mapping):
            value = value.get("url")
    if not isinstance(value, str) or not value.startswith(("data:", "https://", "http://")):
        raise invalid(name, f"{name}: expected the file, or {{image_url}} with data: or https://, got {shown(value)}")
    return value


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        own = SPELLINGS.get(name, name)
        if own in renamed:
            raise invalid(name, f"{name}: is another name of {own}, which is given too")
        renamed[own] = value
    return renamed


def _refuse_unknown(kind: str, values: Mapping[str, Any], body: Body) -> None:
    own = (*_OWN, *RECORDED, *PLAIN_FIELDS, *(_OF_VIDEOS if kind == VIDEO else _OF_IMAGES))
    for name, value in values.items():
        if name in own or name in UNUSED:
            continue
        if name in ONLY:
            if value not in ONLY[name] and not (body.is_form and value in ("false", "")):
                instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
                raise invalid(name, f"{name}: {shown(value)} would be ignored{instead}", "unsupported_for_model")
            continue
        if _FORBIDDEN.fullmatch(name):
            raise invalid(
                name, f"{name}: a request names no file or folder of the server; leave it out", "forbidden_parameter"
            )
        raise invalid(name[:80], f"unknown field {shown(name)}.{nearest(name, own)}", "unknown_parameter")
    for name in body.files:
        if SPELLINGS.get(name, name) not in _FILES:
            raise invalid(name[:80], f"{shown(name)}: expected no file", "unknown_parameter")


def _size(text: str | None) -> dict[str, int]:
    if text in (None, "auto"):
        return {}
    found = re.fullmatch(r"(\d{1,5})\s*[xX]\s*(\d{1,5})", str(text).strip())
    if found is None:
        raise invalid("size", f"size: expected WIDTHxHEIGHT or auto, got {shown(text)}")
    return {"width": int(found.group(1)), "height": int(found.group(2))}


def lora_choices(value: Any) -> list[dict[str, Any]]:
    """Return names and scales, of `["a"]`, `[{"name": "a", "scale": 0.5}]` or `{"a": 0.5}`."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping) and "name" not in value:
        value = [{"name": name, "scale": scale} for name, scale in value.items()]
    loras = []
    for each in value if isinstance(value, list) else [value]:
        given = {"name": each} if isinstance(each, str) else each
        if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
            raise invalid("lora", f"lora: expected names of /v1/models, got {shown(each)}")
        if set(given) - {"name", "scale"}:
            raise invalid("lora", "lora: expected name and scale; a request names no file", "forbidden_parameter")
        scale = _Reader({}, is_form=True).number("lora", given.get("scale", 1.0))
        loras.append({"name": given["name"], "scale": scale})
    if len(loras) > 8:
        raise invalid("lora", f"lora: expected at most 8, got {len(loras)}")
    return loras


def _with_seeds(kind: str, request: Mapping[str, Any], count: int, seed: Any) -> list[dict[str, Any]]:
    """Return one request of each image: its seed is the first one's and its index, or the list's own."""
    most = 1 if kind == VIDEO else MAX_IMAGES
    if not 1 <= count <= most:
        raise invalid("n", f"n: expected 1 to {most}, got {count}")
    number = _Reader({}, is_form=True).whole
    if isinstance(seed, list):
        if len(seed) != count:
            raise invalid("seed", f"seed: expected one number, or {count}, one of each image, got {len(seed)}")
        seeds = [number("seed", each) for each in seed]
    else:
        # Every answer says it, so that the same can be made again.
        first = secrets.randbelow(2**31) if seed in (None, -1, "-1", "") else number("seed", seed)
        seeds = [first + index for index in range(count)]
    return [{**request, "seed": each} for each in seeds]


def _check_types(draft: Draft, limits: Limits) -> None:
    """Check what GenerationRequest checks, and the limits as far as the request states values."""
    for request in draft.requests:
        try:
            GenerationRequest.from_dict(request)
        except RequestError as error:
            found = re.match(r"[a-z_0-9]+", str(error))
            raise invalid(None if found is None else found.group(), str(error)) from error
        check_limits(request, limits)


def check_limits(request: Mapping[str, Any], limits: Limits) -> None:
    """Raises ApiError for a request that is larger than the server allows."""
    height, width = request.get("height"), request.get("width")
    if height is not None and width is not None and height * width > limits.max_pixels:
        raise invalid("size", f"size: {width}x{height} is more than {limits.max_pixels} pixels, the server's limit")
    for name, most in (("num_frames", limits.max_frames), ("num_inference_steps", limits.max_steps)):
        value = request.get(name)
        if value is not None and value > most:
            raise invalid(name, f"{name}: expected at most {most}, the server's limit, got {value}")


def _scalars(value: Any, key: str = "backend") -> Any:
    """Return nested values of a form with texts as the numbers they spell; names of backends stay."""
    if isinstance(value, Mapping):
        return {name: _scalars(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_scalars(inner, key) for inner in value]
    is_number = isinstance(value, str) and key not in ("backend", "name", "steps", "layers", "chunks", "default")
    return parse_scalar(value) if is_number else value


def _anything(_name: str, value: Any) -> Any:
    return value


class _Reader:
    """Values of a body, taken by field and checked; the texts of a form are read as numbers where one is expected."""

    def __init__(self, values: Mapping[str, Any], *, is_form: bool) -> None:
        self._values = values
        self._is_form = is_form

    def take(self, name: str, read: Callable[[str, Any], Any]) -> Any:
        value = self._values.get(name)
        return None if value is None or (self._is_form and value == "") else read(name, value)

    def of_kind(self, kind: type) -> Callable[[str, Any], Any]:
        # A text field of GenerationRequest may be written as a list or a number (sigmas), which it reads itself.
        return {int: self.whole, float: self.number}.get(kind, _anything)

    def text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise invalid(name, f"{name}: expected a text, got {shown(value)}")
        return value

    def whole(self, name: str, value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value.strip()):
            return int(value)
        if type(value) is not int:
            raise invalid(name, f"{name}: expected a whole number, got {shown(value)}")
        return value

    def number(self, name: str, value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise invalid(name, f"{name}: expected a number, got {shown(value)}") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise invalid(name, f"{name}: expected a number, got {shown(value)}")
        return value

    def boolean(self, name: str, value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if value in ("true", "True", "1", "false", "False", "0"):
            return value in ("true", "True", "1")
        raise invalid(name, f"{name}: expected true or false, got {shown(value)}")

    def one_of(self, *names: str) -> Callable[[str, Any], str]:
        def read(name: str, value: Any) -> str:
            if value not in names:
                raise invalid(name, f"{name}: expected one of {', '.join(names)}, got {shown(value)}")
            return str(value)

        return read
