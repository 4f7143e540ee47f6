"""Models that torch.compile compiled, attached to like others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_denoisers import forward, video_cross

from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.errors import BackendUnavailableError

SPARSE = {
    "per_role": {"self": {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [3, 1, 1]}}}
}


def wrapped(model: Any, **options: Any) -> Any:
    return torch.compile(model, **options)


def by_blocks(model: Any, **options: Any) -> Any:
    model.compile_repeated_blocks(**options)
    return model


def block_by_block(model: Any, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)
    return model


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


# Compiled in place without fullgraph: test_attach.py.
@pytest.mark.parametrize(
    ("compile_model", "fullgraph"),
    [(wrapped, False), (by_blocks, False), (wrapped, True), (by_blocks, True), (block_by_block, True)],
)
def test_a_compiled_model_is_attached_to_like_others(compile_model: Callable[..., Any], fullgraph: bool) -> None:
    torch._dynamo.reset()
    model, arguments = video_cross()
    with attach(model, SPARSE) as handle:
        handle.set_step(0, 1)
        sparse = forward(model, arguments)
    model = compile_model(model, backend="eager", fullgraph=fullgraph)
    # With a pipeline around it, as a user has it.
    pipeline = SimpleNamespace(components={"transformer": model})
    before = forward(model, arguments)
    with attach(pipeline, "reference") as handle:
        for num_passes in (1, 2):
            assert relative_error(forward(model, arguments), before) < 1e-5
            assert handle.report().num_calls == 4 * num_passes
        assert bool(handle.remarks) == fullgraph
        assert handle.modules[0].found.path == "blocks.0.attn1"
    assert torch.equal(forward(model, arguments), before)
    with attach(pipeline, SPARSE) as handle:
        handle.set_step(0, 1)
        assert relative_error(forward(model, arguments), sparse) < 1e-5
        assert {row.backend for row in handle.report().rows if row.role == "self"} == {"sliding_tile_attn"}
    assert torch.equal(forward(model, arguments), before)


def test_what_is_compiled_is_refused_like_others() -> None:
    model, arguments = video_cross()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    before = compiled.__dict__["forward"]
    with pytest.raises(BackendUnavailableError, match="fa"):
        attach(compiled, "fa")
    attach(compiled, "reference").detach()
    assert compiled.__dict__["forward"] is before
    assert forward(compiled, arguments).isfinite().all()


def test_compiled_parts_are_not_compiled_again_for_each_module() -> None:
    """dynamo compiles once for each class of processor; one of its own for each module would end its patience."""
    torch._dynamo.reset()
    model, arguments = video_cross()
    by_blocks(model, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(3):
            with attach(model, "reference"):
                forward(model, arguments)
