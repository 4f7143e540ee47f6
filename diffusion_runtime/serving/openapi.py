"""OpenAPI: the fields of requests as a schema, from the same declarations that read them."""

from __future__ import annotations

from typing import Any

from diffusion_runtime.request.generation_request import REQUEST_FIELDS
from diffusion_runtime.serving.jobs import IMAGE, VIDEO
from diffusion_runtime.serving.request_fields import (
    FILE_FIELDS,
    IMAGE_FORMATS,
    MAX_IMAGES,
    MAX_PROMPT,
    PLAIN_FIELDS,
    in_clients_words,
)

_NAMES = {VIDEO: "VideoRequest", IMAGE: "ImageRequest"}
_TYPES = {int: "integer", float: "number", str: "string"}


def request_body(kind: str) -> dict[str, Any]:
    """Return the OpenAPI extra of a route that takes a request for videos or images."""
    content = {"schema": {"$ref": f"#/components/schemas/{_NAMES[kind]}"}}
    types = ("application/json", "multipart/form-data")
    return {"requestBody": {"required": True, "content": dict.fromkeys(types, content)}}


def request_schemas() -> dict[str, Any]:
    """Return the schemas that `request_body` refers to, by name."""
    plain = {"type": "object", "required": ["prompt"], "additionalProperties": False}
    return {name: {**plain, "properties": _properties(kind)} for kind, name in _NAMES.items()}


def _files(kind: str) -> dict[str, Any]:
    """Return the properties of the files that a request may bring."""
    how = "A file, or an object with image_url: data: or https://."
    return {
        name: {"description": f"{in_clients_words(kind, REQUEST_FIELDS[target].help).replace('--', '')} {how}"}
        for name, target in FILE_FIELDS[kind].items()
    }


def _properties(kind: str) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "prompt": {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT},
        "model": {"type": "string"},
        "size": {"type": "string", "description": "WIDTHxHEIGHT, or auto."},
        "seed": {"description": "A whole number, or one of each image; drawn where it is left out."},
        "preset": {"type": "string", "description": "A preset of the model; see /v1/models."},
        "attention": {"description": "Attention of this request: names, or default, per_role and schedule."},
        "lora": {"description": "Names of /v1/models, or objects with name and scale."},
        "return_report": {"type": "boolean", "default": True},
        "return_density": {
            "type": "boolean",
            "default": False,
            "description": "Count the share of pairs by layer and step, for the report; calls wait for the device.",
        },
        "return_latents": {
            "type": "boolean",
            "default": False,
            "description": "Keep a sample of the latents after every step, as the variant `latents` of a video.",
        },
    }
    for name in PLAIN_FIELDS:
        declared = REQUEST_FIELDS[name]
        properties[name] = {"type": _TYPES.get(declared.check.kind, "string"), "description": declared.help}
    if kind == VIDEO:
        previews = {"type": "boolean", "default": False, "description": "Estimates, as events of the video."}
        stream = {
            "type": "boolean",
            "default": False,
            "description": "Frames as events while they are made (causal models).",
        }
        return {**properties, **_files(kind), "return_previews": previews, "stream": stream}
    return {
        **properties,
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_IMAGES},
        **_files(kind),
        "response_format": {"enum": ["b64_json", "url"]},
        "output_format": {"enum": list(IMAGE_FORMATS)},
        "output_compression": {"type": "integer", "minimum": 0, "maximum": 100},
        "stream": {"type": "boolean"},
        "wait": {"type": "boolean", "default": True, "description": "False: answer with the job, at once."},
        "partial_images": {"type": "integer", "minimum": 0, "maximum": 3},
    }
