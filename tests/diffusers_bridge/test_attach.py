"""Our attention inside diffusers' models: the same numbers, everything reached, everything put back."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tables import table
from tiny_denoisers import EVERY, forward, image_linear, image_text_first, video_cross, video_joint, video_packed

from diffusion_runtime.attention import force_attention_backend
from diffusion_runtime.diffusers_bridge.attach import attach
from diffusion_runtime.errors import BackendUnavailableError, ConfigError


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


# What Mochi says about its own autocast in float32.
@pytest.mark.filterwarnings("ignore:In CPU autocast")
@table("name", EVERY)
def test_the_same_numbers_as_diffusers_and_everything_put_back(name: str) -> None:
    build, num_reached, num_modules = EVERY[name]
    model, arguments = build()
    processors = {path: getattr(module, "processor", None) for path, module in model.named_modules()}
    weights = list(model.state_dict())
    before = forward(model, arguments)
    for backend in ("torch_sdpa", "reference"):
        with attach(model, backend) as handle:
            assert relative_error(forward(model, arguments), before) < 1e-5
            assert list(model.state_dict()) == weights
            assert (handle.num_reached, handle.num_modules) == (num_reached, num_modules)
            rows = [row for row in handle.report().rows if row.kind == "softmax"]
            assert {row.backend for row in rows} == {backend}
            assert handle.report().num_calls >= num_reached
    assert torch.equal(forward(model, arguments), before)
    assert all(getattr(module, "processor", None) is processors[path] for path, module in model.named_modules())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@table("padding", ["right", "left", "middle"])
@table("build", [video_joint, video_packed, image_text_first])
def test_padding_anywhere(build: Any, padding: str) -> None:
    model, arguments = build(padding=padding)
    before = forward(model, arguments)
    with attach(model, "reference"):
        assert relative_error(forward(model, arguments), before) < 1e-5
        # The padding is really read: other text behind it changes nothing that is seen.
        mask = next(value for key, value in arguments.items() if "mask" in key)
        noise = torch.where(mask.bool()[:, :, None], 0.0, 100.0)
        other = {**arguments, "encoder_hidden_states": arguments["encoder_hidden_states"] + noise}
        if build is not video_joint:  # which pools the text without regard to the mask
            changed = forward(model, other)
            assert relative_error(changed, before) < 1e-3


def test_masks_are_read_once_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusion_runtime.diffusers_bridge import masks

    read = []
    original = masks.read_mask
    monkeypatch.setattr(masks, "read_mask", lambda mask, shape: (read.append(shape), original(mask, shape))[1])
    for build in (video_packed, EVERY["HunyuanVideo15Transformer3DModel"][0]):
        model, arguments = build()
        with attach(model, "torch_sdpa"):
            forward(model, arguments)
            # Two blocks each; the refiner of the second model has a mask of its own.
            assert len(read) == len(set(read))
            forward(model, arguments)
        assert len(read) == 2 * len(set(read))
        read.clear()


def test_two_models_with_different_choices_at_once() -> None:
    (first, inputs), (second, other_inputs) = video_cross(), video_joint()
    third, third_inputs = video_packed()
    expected = [forward(first, inputs), forward(second, other_inputs)]
    third_before = forward(third, third_inputs)
    with attach(first, "reference") as one, attach(second, "torch_sdpa") as two:
        assert relative_error(forward(first, inputs), expected[0]) < 1e-5
        assert relative_error(forward(second, other_inputs), expected[1]) < 1e-5
        assert {row.backend for row in one.report().rows} == {"reference"}
        assert {row.backend for row in two.report().rows} == {"torch_sdpa"}
        calls = one.report().num_calls + two.report().num_calls
        assert torch.equal(forward(third, third_inputs), third_before)
        assert one.report().num_calls + two.report().num_calls == calls
        one.detach()
        assert torch.equal(forward(first, inputs), expected[0])
        assert {row.backend for row in two.report().rows} == {"torch_sdpa"}


def test_other_threads_keep_their_attention_while_an_attached_module_runs() -> None:
    (first, inputs), (second, other) = video_cross(), video_packed()
    expected = forward(second, other)
    seen: list[torch.Tensor] = []

    def elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=lambda: seen.append(forward(second, other)))
        thread.start()
        thread.join()

    hook = first.blocks[0].attn1.to_q.register_forward_hook(elsewhere)
    with attach(first, "reference") as handle:
        forward(first, inputs)
        assert handle.report().num_calls == 4
    hook.remove()
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model, arguments = video_cross()
    before = forward(model, arguments)
    model.compile(backend="eager")
    with attach(model, "reference") as handle:
        for num_passes in (1, 2):
            assert relative_error(forward(model, arguments), before) < 1e-5
            assert handle.report().num_calls == 4 * num_passes
    assert torch.equal(forward(model, arguments), before)
    assert handle.report().num_calls == 8


def test_a_shared_processor_serves_each_module_for_itself() -> None:
    (first, inputs), (second, other) = video_cross(), video_cross()
    processor = first.blocks[0].attn1.processor
    for module in (*first.blocks, *second.blocks):
        module.attn1.set_processor(processor)
    expected = forward(second, other)
    with attach(first, "reference") as handle:
        forward(first, inputs)
        calls = handle.report().num_calls
        assert torch.equal(forward(second, other), expected)
        assert handle.report().num_calls == calls
    assert first.blocks[0].attn1.processor is processor


def test_nothing_stays_after_an_exception() -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    model, arguments = video_cross()
    before = forward(model, arguments)
    active = _AttentionBackendRegistry.get_active_backend()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].attn1.to_out[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), attach(model, "reference"):
        forward(model, arguments)
    hook.remove()
    q = torch.randn(1, 2, 4, 16)
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q))
    assert torch.equal(forward(model, arguments), before)
    assert _AttentionBackendRegistry.get_active_backend() == active


def test_a_choice_of_diffusers_own_backend_on_the_processors_survives() -> None:
    model, arguments = video_cross()
    processor = model.blocks[0].attn1.processor
    processor._attention_backend = "_native_math"
    before = forward(model, arguments)
    with attach(model, "reference") as handle:
        assert relative_error(forward(model, arguments), before) < 1e-5
        assert handle.report().num_calls == 4
    assert processor._attention_backend == "_native_math"
    assert model.blocks[0].attn1.processor is processor


class SlottedProcessor:
    """A processor of somebody's own, whose instances have no __dict__."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 0.2

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        projections = (attn.to_q, attn.to_k, attn.to_v)
        q, k, v = (layer(hidden_states).unflatten(-1, (2, 16)).transpose(1, 2) for layer in projections)
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)


def test_a_processor_with_slots() -> None:
    model, arguments = video_cross()
    mine = SlottedProcessor()
    model.blocks[0].attn1.processor = mine
    before = forward(model, arguments)
    with attach(model, "reference") as handle:
        assert relative_error(forward(model, arguments), before) < 1e-5
        assert {row.backend for row in handle.report().rows} == {"reference"}
    assert model.blocks[0].attn1.processor is mine


class UncopiedProcessor(SlottedProcessor):
    def __copy__(self) -> Any:
        raise RuntimeError("one of a kind")


def test_a_model_is_whole_again_when_attaching_breaks_off() -> None:
    model, arguments = video_cross()
    model.blocks[1].attn1.processor = UncopiedProcessor()
    before = [block.attn1.processor for block in model.blocks]
    with pytest.raises(RuntimeError, match="one of a kind"):
        attach(model, "reference")
    assert [block.attn1.processor for block in model.blocks] == before
    model.blocks[1].attn1.processor = before[0]
    with attach(model, "reference"):
        forward(model, arguments)


def test_processors_that_were_set_in_between_stay() -> None:
    model, _ = video_cross()
    handle = attach(model, "reference")
    mine = type(model.blocks[0].attn2.processor)()
    model.blocks[0].attn2.set_processor(mine)
    handle.detach()
    handle.detach()
    assert model.blocks[0].attn2.processor is mine


def test_roles_and_layers() -> None:
    model, arguments = video_cross()
    config = {
        "per_role": {"cross": "reference"},
        "schedule": [{"layers": "1", "role": "self", "backend": "reference"}],
    }
    with attach(model, config) as handle:
        handle.set_step(0, 2)
        forward(model, arguments)
        rows = {(row.role, row.backend): row.layers for row in handle.report().rows}
    assert rows == {("self", "torch_sdpa"): "0", ("cross", "reference"): "0-1", ("self", "reference"): "1"}


def test_a_forced_backend_comes_first() -> None:
    model, arguments = video_cross()
    with attach(model, "torch_sdpa") as handle, force_attention_backend("reference", role="cross"):
        forward(model, arguments)
        assert {(row.role, row.backend) for row in handle.report().rows} == {
            ("self", "torch_sdpa"),
            ("cross", "reference"),
        }


def test_some_reached_is_a_warning_that_lists_the_others(caplog: pytest.LogCaptureFixture) -> None:
    model, arguments = image_linear()
    with caplog.at_level(logging.WARNING), attach(model, "torch_sdpa") as handle:
        forward(model, arguments)
    [record] = [record.getMessage() for record in caplog.records]
    assert "2 of 4" in record
    assert "transformer_blocks.0.attn1 (SanaLinearAttnProcessor2_0 computes attention by hand)" in record
    assert [other.path for other in handle.others] == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert record in handle.report().notes
    # Linear attention is counted too, as what it is.
    rows = {(row.role, row.backend, row.kind): row.count for row in handle.report().rows}
    assert rows == {("self", "diffusers", "linear"): 2, ("cross", "torch_sdpa", "softmax"): 2}
    kinds = {row.role: row.to_dict().get("kind") for row in handle.report().rows}
    assert kinds == {"self": "linear", "cross": None}


def test_none_reached_is_an_error() -> None:
    model, _ = image_linear()
    for block in model.transformer_blocks:
        block.attn2.set_processor(type(block.attn1.processor)())
    with pytest.raises(BackendUnavailableError, match="none of the 4 attention modules"):
        attach(model, "torch_sdpa")


def test_what_cannot_be_attached_is_refused_and_changes_nothing() -> None:
    model, arguments = video_cross()
    before = forward(model, arguments)
    with pytest.raises(ConfigError, match="no attention module"):
        attach(torch.nn.Linear(2, 2), "torch_sdpa")
    with pytest.raises(ConfigError, match="expected a diffusers pipeline or a torch module, got str"):
        attach("a model", "torch_sdpa")
    with pytest.raises(BackendUnavailableError, match="fa"):
        attach(model, {"per_role": {"cross": "fa"}})
    with pytest.raises(ConfigError, match=r"have no attention role 'ltx2.audio_to_video'; theirs, .*: cross, self$"):
        attach(model, {"per_role": {"ltx2.audio_to_video": "reference"}})
    with pytest.raises(ConfigError, match="unknown attention backend"):
        attach(model, "flesh")
    with attach(model, "torch_sdpa"), pytest.raises(ConfigError, match="attached already"):
        attach(model, "reference")
    assert torch.equal(forward(model, arguments), before)


def test_a_model_in_training_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = video_cross()
    with caplog.at_level(logging.WARNING):
        for trains in (False, True):
            model.train(trains).requires_grad_(trains)
            with attach(model, "torch_sdpa"):
                pass
    (said,) = caplog.messages
    assert said.startswith("attach: in training mode: ")
    assert "sparse backends compute no gradients and refuse inputs that require them" in said


def test_training_with_dropout_is_refused() -> None:
    model, arguments = video_cross()
    processor = model.blocks[0].attn1.processor

    class Dropping(type(processor)):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
            q = attn.to_q(hidden_states)[:, None]
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[:, 0]

    model.blocks[0].attn1.set_processor(Dropping())
    with attach(model, "torch_sdpa"), pytest.raises(ConfigError, match=r"blocks.0.attn1.*dropout"):
        forward(model, arguments)
