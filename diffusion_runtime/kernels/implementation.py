"""Choice between the eager reference and Triton for the fused kernels of a transformer's layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

import torch

from diffusion_runtime.errors import ConfigError
from diffusion_runtime.startup.first_use import NARROW
from diffusion_runtime.startup.importing import import_failure

IMPLEMENTATIONS = ("reference", "triton")
# `reference` runs every fused kernel as its eager formula, for comparisons and bug reports; `triton` compiles those of
# narrow layers too.
_SETTINGS = ("auto", "reference", "triton")
VARIABLE = "DIFFUSION_FUSED_KERNELS"
NEEDS_CUDA = "needs a CUDA GPU"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Read once, as by Triton: a CPU asks at every call, and a look at the environment takes a microsecond.
is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def fusion_is_on() -> bool:
    """Return True if the environment leaves the choice open. Raises ConfigError for an unknown value."""
    return _setting() != "reference"


def _setting() -> str:
    value = os.environ.get(VARIABLE, "auto")
    if value not in _SETTINGS:
        raise ConfigError(f"{VARIABLE}: expected auto, reference or triton, got {value!r}")
    return value


def is_narrow(width: int) -> bool:
    """Return True if a layer is too narrow to repay compiling a kernel on a GPU. width: of its tokens in the
    whole layer, so that the choice is the same however many processes share it. Raises ConfigError as fusion_is_on
    does."""
    if width > NARROW or torch.compiler.is_dynamo_compiling() or is_interpreted:
        return False
    return _setting() != "triton"


def leaves_eager(x: torch.Tensor, width: int) -> bool:
    """Return True if a call of `auto` on a GPU is computed by its eager formula, since its layer is_narrow. On the meta
    device, where memory is planned, it has its shape alone as any other: eager formulas import torch's compiler there,
    for seconds."""
    return x.is_cuda and is_narrow(width)


def eager_remark(device: torch.device, widths: Iterable[int]) -> str | None:
    """Return what a request's report says of layers of these widths; None where none of them leaves_eager. Of the model
    and not of its calls: a request whose passes are all replayed from CUDA graphs has none."""
    if device.type != "cuda" or not any(map(is_narrow, widths)):
        return None
    return (
        f"fused kernels: eager formulas in layers of at most {NARROW} numbers per token, which repay no compiling "
        f"({VARIABLE}=triton compiles them)"
    )


def runs_in_triton(implementation: str, refusal: str | None) -> bool:
    """Return True if a call goes to Triton. implementation: `auto`, or one of IMPLEMENTATIONS. refusal: why Triton
    cannot.

    Raises ConfigError for an unknown implementation, and for `triton` where it cannot run.
    """
    if implementation == "auto":
        return refusal is None and fusion_is_on()
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation: expected auto, {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    if implementation == "triton" and refusal is not None:
        raise ConfigError(f"implementation 'triton' cannot run here: {refusal}; use auto")
    return implementation == "triton"


def has_shape_alone(x: torch.Tensor) -> bool:
    """Return True if a call is on the meta device, where memory is planned: there a fused kernel allocates its result
    alone, as Triton does on a GPU, without the temporaries of its eager formula."""
    return x.is_meta and fusion_is_on() and not torch.compiler.is_dynamo_compiling()


def may_run_on(device: torch.device) -> bool:
    """Return True if Triton computes on such devices: CUDA, and others under its interpreter."""
    return device.type == "cuda" or is_interpreted


def refusal_of(*tensors: torch.Tensor | None) -> str | None:
    """Return why Triton cannot compute with these tensors, the first of which is the main one, or None."""
    if torch.compiler.is_dynamo_compiling():
        return "is fused by torch.compile, which traces the eager formula"
    x = tensors[0]
    assert x is not None
    if not may_run_on(x.device):
        return NEEDS_CUDA
    if x.is_cuda:
        reason = _device_refusal(x.device)
        if reason is not None:
            return reason
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            return f"takes bfloat16, float16 and float32, not {tensor.dtype}"
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return "takes rows whose numbers lie side by side"
        if tensor.device != x.device:
            return f"takes tensors of one device, got {x.device} and {tensor.device}"
        if records and tensor.requires_grad:
            return "computes no gradients"
    return None


@functools.cache
def _device_refusal(device: torch.device) -> str | None:
    failure = import_failure("triton")
    if failure is not None:
        return f"needs Triton: {failure}"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    return None
