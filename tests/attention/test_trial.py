"""Packages that import and cannot compute: compiled kernels are tried by one small call when a choice settles."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import kernel_packages
import pytest
import torch
from machines import cuda, other

from diffusion_runtime.attention import list_backends, select_backend
from diffusion_runtime.attention.backends import packages, sage_attn, xformers
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.startup.importing import import_failure

CACHES = (packages._failure, import_failure, sage_attn._kernel, xformers._operators)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The CPU stands for the device with the chip that a test makes up."""
    monkeypatch.setattr(packages, "device_with_chip", lambda hardware: torch.device("cpu"))
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)
    monkeypatch.setenv("DIFFUSION_RUNTIME_CACHE", str(tmp_path))
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


def here(hardware: Hardware) -> Hardware:
    return Hardware(
        *(hardware.platform, hardware.device_name, hardware.capability, hardware.cudnn, hardware.torch_version),
        *(hardware.packages, hardware.programs),
        is_here=True,
    )


def put(monkeypatch: pytest.MonkeyPatch, name: str, module: types.ModuleType) -> None:
    if "." in name:
        parent = types.ModuleType(name.partition(".")[0])
        setattr(parent, name.rpartition(".")[2], module)
        monkeypatch.setitem(sys.modules, parent.__name__, parent)
    monkeypatch.setitem(sys.modules, name, module)


def raising(module: types.ModuleType, function: str, error: Exception) -> types.ModuleType:
    def raise_it(*args: object, **kwargs: object) -> object:
        raise error

    setattr(module, function, raise_it)
    return module


def test_xformers_without_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """xformers 0.0.35 with torch 2.11: its module imports, and every call raises."""
    said = NotImplementedError("No operator found for `memory_efficient_attention_forward` with inputs:\n  query")
    module = raising(kernel_packages.xformers_ops(), "memory_efficient_attention_forward", said)
    put(monkeypatch, "xformers.ops", module)
    hopper = here(cuda((9, 0), "xformers"))
    reason = (
        "package 'xformers' 0.0.35 is installed and cannot compute on cuda sm_90, torch 2.13.0: NotImplementedError: "
        "No operator found for `memory_efficient_attention_forward` with inputs:"
    )
    with pytest.raises(BackendUnavailableError) as refused:
        select_backend(head_dim=64, dtype="bfloat16", num_heads=4, device=hopper, config="xformers")
    ((_, said_reason),) = refused.value.reasons
    assert said_reason.startswith(reason + "; fix: install it again for this torch and CUDA")
    (listed,) = [info for info in list_backends(hopper) if info.name == "xformers"]
    assert (listed.usable, listed.reason) == (False, reason)
    assert "xformers" not in str(refused.value).splitlines()[-1]


def test_xformers_whose_import_was_swallowed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernel_packages.xformers_ops()
    del module.memory_efficient_attention_forward
    put(monkeypatch, "xformers.ops", module)
    hopper = here(cuda((9, 0), "xformers"))
    (reason,) = refusals("xformers", AttentionRequirements("self", "self", 64, "bfloat16", hopper, 4, 4))
    assert "cannot be imported: module 'xformers.ops' has no 'memory_efficient_attention_forward'" in reason


@pytest.mark.parametrize(
    ("chip", "error"),
    [
        ((9, 0), AssertionError("SM90 kernel is not available. make sure you GPUs with compute capability 9.0.")),
        ((12, 1), ValueError("Unsupported CUDA architecture: sm121")),
    ],
)
def test_sage_2_without_kernels_of_this_chip_is_refused(
    monkeypatch: pytest.MonkeyPatch, chip: tuple[int, int], error: Exception
) -> None:
    """A build for other chips imports: it swallows what is missing and asserts at the call."""
    put(monkeypatch, "sageattention", raising(kernel_packages.sageattention_2(), "sageattn", error))
    monkeypatch.setattr(sage_attn.importlib.metadata, "version", lambda name: "2.2.0")
    hardware = here(cuda(chip, "sageattention", "triton"))
    (reason,) = refusals("sage_attn", AttentionRequirements("self", "self", 128, "bfloat16", hardware, 4, 4))
    assert f"cannot compute on cuda sm_{chip[0]}{chip[1]}, torch 2.13.0: {type(error).__name__}: {error}" in reason


def test_kernels_that_compute_are_taken_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "xformers.ops", kernel_packages.xformers_ops())
    backend = find_backend("xformers")
    assert backend is not None
    calls: list[AttentionCall] = []
    run = type(backend).run

    def counting(self: object, call: AttentionCall) -> AttentionResult:
        calls.append(call)
        return run(self, call)  # type: ignore[arg-type]

    monkeypatch.setattr(type(backend), "run", counting)
    hopper = here(cuda((9, 0), "xformers"))
    # Transformers are built on the meta device, where nothing would be computed.
    with torch.device("meta"):
        for head_dim, dtype in [(64, "bfloat16"), (64, "bfloat16"), (128, "float16"), (64, "bfloat16")]:
            assert refusals("xformers", AttentionRequirements("self", "self", head_dim, dtype, hopper, 4, 4)) == []
    assert [(call.q.shape[3], str(call.q.dtype)) for call in calls] == [(64, "torch.bfloat16"), (128, "torch.float16")]
    assert {call.q.device.type for call in calls} == {"cpu"}


@pytest.mark.parametrize(
    ("name", "hardware", "module", "stand_in"),
    [
        ("fa4", cuda((9, 0), "flash-attn-4"), "flash_attn.cute", kernel_packages.flash_attn_cute),
        ("flashinfer_attn", cuda((9, 0), "flashinfer-python"), "flashinfer", kernel_packages.flashinfer),
        (
            "sage_attn",
            cuda((9, 0), "triton", sageattention="1.0.6"),
            "sageattention",
            kernel_packages.sageattention_1,
        ),
        ("aiter", other("rocm", "amd-aiter"), "aiter", lambda: kernel_packages.aiter(False)),
    ],
)
def test_what_compiles_at_its_first_call_is_imported_and_not_called(
    monkeypatch: pytest.MonkeyPatch, name: str, hardware: Hardware, module: str, stand_in: object
) -> None:
    put(monkeypatch, module, stand_in())  # type: ignore[operator]
    backend = find_backend(name)
    assert backend is not None
    monkeypatch.setattr(type(backend), "run", lambda *_: pytest.fail("it was called"))
    assert refusals(name, AttentionRequirements("self", "self", 64, "bfloat16", here(hardware), 4, 4)) == []


def test_nothing_is_imported_or_called_for_a_machine_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "xformers.ops", types.ModuleType("xformers.ops"))
    elsewhere = cuda((9, 0), "xformers")
    assert refusals("xformers", AttentionRequirements("self", "self", 64, "bfloat16", elsewhere, 4, 4)) == []
