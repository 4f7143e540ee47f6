"""Models that torch.compile compiled, attached to like others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_denoisers import forward, image_joint, video_cross, video_joint

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


# Compiled in place without fullgraph: test_attach.py. Blocks that diffusers compiled: below, with fullgraph.
@pytest.mark.parametrize(
    ("compile_model", "fullgraph"),
    [
        pytest.param(wrapped, False, marks=pytest.mark.slow),
        pytest.param(by_blocks, False, marks=pytest.mark.slow),
        (wrapped, True),
        pytest.param(by_blocks, True, marks=pytest.mark.slow),
        (block_by_block, True),
    ],
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
        assert handle.remarks == ()
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


def test_another_model_of_the_process_compiles_as_ever_while_one_is_attached() -> None:
    """It looks into the dispatcher's dictionaries, which hold what the attached model asks for."""
    torch._dynamo.reset()
    (attached, arguments), (other, _) = video_cross(), video_cross()
    expected = forward(other, arguments)
    with attach(attached, "torch_sdpa"):
        forward(attached, arguments)
        out = forward(torch.compile(other, backend="eager", fullgraph=True), arguments)
    assert relative_error(out, expected) < 1e-6


def counted(graphs: list[Any]) -> Callable[..., Any]:
    """A backend of torch.compile that keeps every graph."""

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return keep


@pytest.mark.parametrize("build", [video_cross, video_joint, image_joint])
def test_one_graph_per_kind_of_block_holds_our_attention(build: Callable[[], Any]) -> None:
    """By diffusers' dispatcher, with a mask, and by torch's function; over layers, steps and another attachment."""
    torch._dynamo.reset()
    model, arguments = build()
    with torch.no_grad(), attach(model, "reference") as handle:
        handle.set_step(0, 2)
        expected = forward(model, arguments)
        rows = handle.report().rows
    graphs: list[Any] = []
    by_blocks(model, backend=counted(graphs), fullgraph=True, dynamic=True)
    kinds = {type(module) for module in model.modules() if type(module).__name__ in model._repeated_blocks}
    for attachment in range(2):
        with torch.no_grad(), attach(model, "reference") as handle:
            assert handle.remarks == ()
            for step in range(2):
                handle.set_step(step, 2)
                assert relative_error(forward(model, arguments), expected) < 1e-5
            found = handle.report().rows
        assert sum(row.count for row in found) == 2 * sum(row.count for row in rows)
        assert [(row.role, row.backend, row.layers) for row in found] == [
            (row.role, row.backend, row.layers) for row in rows
        ], attachment
        assert len(graphs) == len(kinds)
    operators = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.diffusion_runtime.module_attention.default in operators


def in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


@pytest.mark.parametrize(
    ("compile_model", "is_attached_first"),
    [
        (wrapped, False),
        (in_place, True),
        (by_blocks, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((wrapped, True), (in_place, False), (by_blocks, True))
        ),
    ],
)
def test_a_whole_pipeline_keeps_its_graphs(
    compile_model: Callable[..., Any], is_attached_first: bool, tiny_wan_folder: Any
) -> None:
    """Each order and form, with fullgraph=True: no graph breaks, nothing new at other steps, and a choice by step."""
    from diffusers import WanPipeline

    choice = {"default": "torch_sdpa", "schedule": [{"steps": "0-0", "role": "self", "backend": "reference"}]}
    request = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3, "output_type": "latent"}

    def made(pipe: Any) -> torch.Tensor:
        return pipe("a red circle", generator=torch.Generator().manual_seed(0), **request).frames

    pipe = WanPipeline.from_pretrained(tiny_wan_folder)
    pipe.set_progress_bar_config(disable=True)
    with attach(pipe, choice) as handle:
        expected, rows = made(pipe), handle.report().rows
    torch._dynamo.reset()
    graphs: list[Any] = []

    def compiled() -> None:
        pipe.transformer = compile_model(pipe.transformer, backend=counted(graphs), fullgraph=True)

    if not is_attached_first:
        compiled()
    with attach(pipe, choice) as handle:
        if is_attached_first:
            compiled()
        found = made(pipe)
        report = handle.report()
        assert relative_error(found, expected) < 1e-5
        assert [(row.role, row.backend, row.count) for row in report.rows] == [
            (row.role, row.backend, row.count) for row in rows
        ]
        assert handle.remarks == ()
        num_graphs = len(graphs)
        made(pipe)
        assert len(graphs) == num_graphs
    operators = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.diffusion_runtime.module_attention.default in operators
