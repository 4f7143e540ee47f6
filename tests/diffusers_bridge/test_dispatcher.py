"""diffusers' own attention backends, behind a check of what they would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffusion_runtime.diffusers_bridge.dispatcher import checked_function
from diffusion_runtime.errors import BackendUnavailableError


def test_masks_that_diffusers_backends_would_get_wrong() -> None:
    """What reaches a backend of diffusers' is right for it, or the call is refused."""
    q = torch.zeros(2, 4, 1, 8)
    right, left = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]).bool(), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]).bool()
    nothing, square = torch.ones(2, 4).bool(), torch.ones(4, 4).tril().bool()[None, None]
    got: list[Any] = []

    def run(name: str, mask: torch.Tensor) -> Any:
        function: Callable[..., Any] = checked_function(name, lambda **arguments: got.append(arguments["attn_mask"]))
        function(query=q, key=q, value=q, attn_mask=mask)
        return got[-1]

    for name in ("flash", "flash_varlen", "sage", "xformers", "flex"):
        assert run(name, nothing) is None
        assert run(name, torch.zeros(2, 1, 1, 4)) is None
    for mask in (right, left, square):
        assert run("native", mask) is mask
        assert run("_native_cudnn", mask) is mask
    assert run("flash_varlen", right) is right
    assert run("sage_varlen", right[:, None, None]).shape == (2, 1, 1, 4)
    assert run("xformers", left) is left
    assert run("flex", left[:, None, None]).shape == (2, 1, 1, 4)
    refused = [
        ("flash", right, "takes no mask"),
        ("flash_varlen", left, "first keys"),
        ("flash_varlen", square, "first keys"),
        ("sage_varlen", torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]]).bool(), "first keys"),
        ("xformers", left[:, None, None], "ignores a boolean mask"),
        ("flex", right, "hides queries"),
    ]
    for name, mask, reason in refused:
        with pytest.raises(BackendUnavailableError, match=reason):
            run(name, mask)
