"""Real allocation failures become DeviceMemoryError; other errors stay what they are."""

from __future__ import annotations

import pytest
import torch

from diffusion_runtime.errors import DeviceMemoryError
from diffusion_runtime.memory.device_memory import explain_memory_shortage

# Beyond what a 64-bit process can address, so that no machine has it, however it overcommits.
FAR_TOO_MUCH = 2**49


def test_a_cpu_tensor_that_does_not_fit() -> None:
    with (
        pytest.raises(DeviceMemoryError, match=r"not enough memory while decoding: .*Use less\.") as caught,
        explain_memory_shortage("decoding", "Use less."),
    ):
        torch.empty(FAR_TOO_MUCH)
    assert caught.value.exit_code == 4
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_python_memory_that_does_not_fit() -> None:
    with pytest.raises(DeviceMemoryError, match="loading"), explain_memory_shortage("loading", "Use less."):
        bytearray(FAR_TOO_MUCH)


def test_an_accelerator_that_is_full() -> None:
    with pytest.raises(DeviceMemoryError, match="Tried to allocate"), explain_memory_shortage("generating", ""):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("shapes differ"), ValueError("memory")])
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, explain_memory_shortage("generating", ""):
        raise error
    assert caught.value is error
