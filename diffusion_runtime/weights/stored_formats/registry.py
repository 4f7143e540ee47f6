"""Every stored format that a mark of ComfyUI can name."""

from __future__ import annotations

from collections.abc import Mapping

from diffusion_runtime.weights.stored_formats.awq_w4a16 import AwqW4A16
from diffusion_runtime.weights.stored_formats.convrot_w4a4 import ConvRotW4A4
from diffusion_runtime.weights.stored_formats.float8 import Float8
from diffusion_runtime.weights.stored_formats.int8 import Int8
from diffusion_runtime.weights.stored_formats.interface import StoredFormat
from diffusion_runtime.weights.stored_formats.mxfp8 import Mxfp8
from diffusion_runtime.weights.stored_formats.nvfp4 import Nvfp4
from diffusion_runtime.weights.stored_formats.svdquant_w4a4 import SvdQuantW4A4

_FORMATS: tuple[type[StoredFormat], ...] = (Float8, Int8, Nvfp4, Mxfp8, ConvRotW4A4, SvdQuantW4A4, AwqW4A16)
# By the `format` of a mark.
FORMATS: Mapping[str, type[StoredFormat]] = {name: each for each in _FORMATS for name in each.names}
