"""Nodes of numbers and texts: primitives, switches, expressions, sizes. They decide what other nodes are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from diffusion_runtime.workflows.arithmetic import Number, evaluate
from diffusion_runtime.workflows.evaluation import Call, NodeClass
from diffusion_runtime.workflows.graph import Node
from diffusion_runtime.workflows.values import PictureValue, Unknown

# A prompt has a few thousand.
_MAX_TEXT = 100_000


def _primitive(call: Call) -> tuple[Any, ...]:
    return (call.raw("value"),)


def _whole(call: Call) -> tuple[Any, ...]:
    return (call.size("value", 0),)


def _sides(node: Node, values: Mapping[str, Any]) -> tuple[str, ...]:
    del node
    chosen = "on_true" if values.get("switch") is True or values.get("switch") == 1 else "on_false"
    return ("switch", chosen)


def _switch(call: Call) -> tuple[Any, ...]:
    on = call.flag("switch")
    return (call.raw("on_true" if on else "on_false"),)


def _expression(call: Call) -> tuple[Any, ...]:
    names: dict[str, Number] = {}
    for name in call.values:
        if not name.startswith("values."):
            continue
        value = call.raw(name)
        if isinstance(value, Unknown):
            return (value, value, value)
        if isinstance(value, int | float):
            names[name.removeprefix("values.")] = value
    result = evaluate(call.text("expression"), names)
    return (float(result), int(result), bool(result))


def _concatenate(call: Call) -> tuple[Any, ...]:
    joined = call.text("delimiter").join((call.text("string_a"), call.text("string_b")))
    if len(joined) > _MAX_TEXT:
        call.refuse(f"expected at most {_MAX_TEXT} characters, got {len(joined)}")
    return (joined,)


def _replace(call: Call) -> tuple[Any, ...]:
    text, find, replace = call.text("string"), call.text("find"), call.text("replace")
    if text.count(find) * len(replace) + len(text) > _MAX_TEXT:
        call.refuse(f"expected at most {_MAX_TEXT} characters")
    return (text.replace(find, replace),)


def _preview(call: Call) -> tuple[Any, ...]:
    call.without_effect("shows a value")
    return (call.raw("source"),)


def _resolution(call: Call) -> tuple[Any, ...]:
    """ComfyUI's ResolutionSelector: a size of so many megapixels (2**20 each), both sides multiples of a number."""
    ratio = call.text("aspect_ratio", "1:1").partition(" ")[0].split(":")
    if len(ratio) != 2 or not all(each.isdigit() and 0 < int(each) < 1000 for each in ratio):
        call.refuse(f"aspect_ratio: expected one such as 16:9, got {call.text('aspect_ratio')}")
    across, down = int(ratio[0]), int(ratio[1])
    multiple = max(call.whole("multiple", 8), 1)
    scale = math.sqrt(max(call.number("megapixels", 1.0), 0.0) * 2**20 / (across * down))
    return tuple(max(round(each * scale / multiple) * multiple, multiple) for each in (across, down))


def _picture_size(call: Call) -> tuple[Any, ...]:
    picture = call.of("image", PictureValue)
    count: int | Unknown = 1
    if picture.is_film:
        count = picture.num_frames or Unknown("the number of a video's frames is not known before it is read")
    if picture.size is None:
        unknown = Unknown(f"the size of {picture.file or 'a picture'} is not known before the file is there")
        return (unknown, unknown, count)
    return (*picture.size, count)


def _convert(call: Call) -> tuple[Any, ...]:
    value = call.raw("value")
    if isinstance(value, Unknown):
        return (value, value)
    number = call.number("value", 0)
    return (float(number), int(number))


TABLE: Mapping[str, NodeClass] = {
    "PrimitiveBoolean": NodeClass(_primitive),
    "PrimitiveFloat": NodeClass(_primitive),
    "PrimitiveInt": NodeClass(_whole),
    "PrimitiveString": NodeClass(_primitive),
    "PrimitiveStringMultiline": NodeClass(_primitive),
    "ComfySwitchNode": NodeClass(_switch, wanted=_sides),
    "ComfyMathExpression": NodeClass(_expression),
    "ComfyNumberConvert": NodeClass(_convert),
    "StringConcatenate": NodeClass(_concatenate),
    "StringReplace": NodeClass(_replace),
    "PreviewAny": NodeClass(_preview),
    "ResolutionSelector": NodeClass(_resolution),
    "GetImageSize": NodeClass(_picture_size),
}
