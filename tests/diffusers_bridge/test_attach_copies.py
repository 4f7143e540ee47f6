"""Copies of an attached model, threads, and exceptions: never half attached, always detachable."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tables import table
from tiny_denoisers import EVERY, forward, video_cross

from diffusion_runtime.diffusers_bridge.attach import attach, plan_attachment
from diffusion_runtime.errors import ConfigError


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class AttendingBlock(torch.nn.Module):
    """A module that attends in its own forward, without a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, 2, 16)).movedim(-3, 0).transpose(2, 3)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OwnModel(torch.nn.Module):
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.block = AttendingBlock()

    def forward(self, x: torch.Tensor, return_dict: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out


@table("make_copy", [copy.deepcopy, pickled, saved])
@table("name", ["WanTransformer3DModel", "own"])
def test_a_copy_of_an_attached_model_is_detached(name: str, make_copy: Any) -> None:
    model, arguments = (OwnModel(), {"x": torch.randn(1, 5, 32)}) if name == "own" else EVERY[name][0]()
    before = forward(model, arguments)
    with attach(model, "reference") as handle:
        forward(model, arguments)
        num_calls = handle.report().num_calls
        other = make_copy(model)
        assert torch.equal(forward(other, arguments), before)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        changed = forward(other, arguments)
        assert relative_error(changed, before) > 1e-2
        assert handle.report().num_calls == num_calls
        # It can be attached to by itself, and it is a copy of nothing that is attached.
        with attach(other, "reference") as second:
            assert relative_error(forward(other, arguments), changed) < 1e-5
            assert second.report().num_calls == num_calls
        assert relative_error(forward(model, arguments), before) < 1e-5
        assert handle.report().num_calls == 2 * num_calls
    assert torch.equal(forward(other, arguments), changed)
    assert torch.equal(forward(model, arguments), before)


def test_a_model_is_attached_once_whoever_comes_first() -> None:
    model, arguments = video_cross()
    before = forward(model, arguments)
    planned = [plan_attachment(model, "reference") for _ in range(2)]
    planned[0].take_modules()
    with pytest.raises(ConfigError, match="attached already"):
        planned[1].take_modules()
    planned[1].detach()
    forward(model, arguments)
    assert planned[0].report().num_calls == 4
    planned[0].detach()
    assert torch.equal(forward(model, arguments), before)


def test_threads_that_attach_at_once() -> None:
    model, arguments = video_cross()
    before = forward(model, arguments)
    handles: list[Any] = []
    refused: list[ConfigError] = []
    start = threading.Barrier(4)

    def run() -> None:
        start.wait()
        try:
            handles.append(attach(model, "reference"))
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(handles), len(refused)) == (1, 3)
    handles[0].detach()
    assert torch.equal(forward(model, arguments), before)


def test_each_thread_is_in_a_forward_pass_of_its_own() -> None:
    """Another size in another thread, in the middle of a pass: the grid of one is not that of the other."""
    model, arguments = video_cross((3, 4, 4))
    other = {**arguments, "hidden_states": torch.randn(1, 4, 2, 4, 8)}
    sparse = {"backend": "sliding_tile_attn", "extra": {"tile_size": [1, 2, 2], "window": [3, 1, 1]}}
    with attach(model, {"per_role": {"self": sparse}}) as handle:
        handle.set_step(0, 1)
        expected, expected_other = forward(model, arguments), forward(model, other)
        seen: list[torch.Tensor] = []

        def elsewhere(*_: Any) -> None:
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=lambda: seen.append(forward(model, other)))
                thread.start()
                thread.join()

        hook = model.blocks[0].attn1.to_q.register_forward_hook(elsewhere)
        assert torch.equal(forward(model, arguments), expected)
        hook.remove()
    assert torch.equal(seen[0], expected_other)


@table("error", [ValueError, KeyboardInterrupt])
def test_an_exception_within_a_pass_leaves_it_usable_and_detachable(error: type[BaseException]) -> None:
    model, arguments = video_cross()
    before = forward(model, arguments)

    def fail(*_: Any) -> None:
        raise error

    with attach(model, "reference") as handle:
        hook = model.blocks[1].attn1.to_out[0].register_forward_hook(fail)
        with pytest.raises(error):
            forward(model, arguments)
        hook.remove()
        handle.start_report()
        assert relative_error(forward(model, arguments), before) < 1e-5
        assert handle.report().num_calls == 4
    assert torch.equal(forward(model, arguments), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
