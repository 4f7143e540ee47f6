"""Regional compilation of blocks of our own: graphs, recompilations, what is counted, and what is left behind."""

from __future__ import annotations

import copy
import functools
import gc
import shutil
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from diffusion_runtime.attention import AttentionContext, LocalAttention, StepInfo
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.diffusers_bridge.compiled_blocks import CompileCost, CompiledBlocks
from diffusion_runtime.errors import ConfigError


class Block(nn.Module):
    """x += out(attention(qkv(x))); eps: a number of the module, which a graph holds as a constant."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.eps = 1e-6
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.attention = LocalAttention(2, 16, layer=LayerInfo(index, 3, "self", f"blocks.{index}"))

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        q, k, v = self.qkv(x + self.eps).unflatten(-1, (3, 2, 16)).unbind(2)
        return x.add_(self.out(self.attention(q, k, v, context).flatten(2)))


class Model(nn.Module):
    """Three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index) for index in range(3))

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        for block in self.blocks:
            block(x, context)
        return x


def run(model: Model, num_tokens: int, seed: int, *, batch: int = 1, step: int = 0) -> torch.Tensor:
    x = torch.randn(batch, num_tokens, 32, generator=torch.Generator().manual_seed(seed))
    context = AttentionContext(TokenLayout.text(num_tokens), StepInfo(step, 4, timestep=1000.0 - step))
    with torch.inference_mode():
        return model(x, context)


def compiled_model(backend: str = "aot_eager") -> tuple[Model, CompiledBlocks, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    blocks = CompiledBlocks(backend)
    blocks.compile_blocks(model.blocks)
    return model, blocks, functools.partial(run, plain)


def test_one_graph_serves_layers_steps_seeds_and_lengths() -> None:
    model, blocks, expected = compiled_model()
    for num_tokens, seed, step in ((7, 0, 0), (7, 0, 1), (12, 1, 2), (5, 2, 3), (64, 3, 0)):
        found = run(model, num_tokens, seed, step=step)
        torch.testing.assert_close(found, expected(num_tokens, seed, step=step), atol=1e-6, rtol=1e-6)
    assert (blocks.num_blocks, blocks.num_graphs) == (3, 1)
    # One sample is a constant of its graph; all larger batches share another.
    for batch in (2, 3, 2):
        found = run(model, 9, 4, batch=batch)
        torch.testing.assert_close(found, expected(9, 4, batch=batch), atol=1e-6, rtol=1e-6)
    assert blocks.num_graphs == 2
    assert run(model, 11, 5).shape == (1, 11, 32)
    assert blocks.num_graphs == 2


def test_every_call_is_counted_with_its_layer_and_step() -> None:
    model, blocks, _ = compiled_model("eager")
    cost = CompileCost(blocks)
    context = AttentionContext(step=StepInfo(1, 4))
    with torch.inference_mode():
        model(torch.randn(1, 6, 32), context)
    (row,) = context.recorder.report().rows
    assert (row.count, row.layers, row.steps, row.role) == (3, "0-2", "1", "self")
    timings = cost.report(context.recorder)
    assert timings == {"compile": blocks.seconds}
    assert blocks.seconds > 0
    again = CompileCost(blocks)
    assert again.report(context.recorder) == {"compile": 0.0}
    assert context.recorder.report().notes[0].startswith("compile: 3 blocks, 1 graph compiled in ")
    assert context.recorder.report().notes[1] == "compile: 3 blocks, nothing compiled anew"
    assert CompileCost(None).report(context.recorder) == {}


def test_models_of_one_process_have_graphs_of_their_own_and_leave_nothing() -> None:
    """torch refuses a function its ninth graph, and keeps those of code objects that live."""
    gone = []
    for number in range(10):
        model, blocks, _ = compiled_model("eager")
        run(model, 4, number)
        assert blocks.num_graphs == 1
        gone.append(weakref.ref(model.blocks[0]))
    del model, blocks
    gc.collect()
    assert [reference() for reference in gone] == [None] * 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_inductor_computes_the_same(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # A precompiled header takes half a minute, which pays after many kernels.
    inductor = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(inductor, "cpp_cache_precompile_headers", False, raising=False)
    model, blocks, expected = compiled_model("inductor")
    for num_tokens in (7, 12):
        torch.testing.assert_close(run(model, num_tokens, 1), expected(num_tokens, 1), atol=1e-5, rtol=1e-5)
    assert blocks.num_graphs == 1


def test_compiled_blocks_refuse_a_copy_that_would_run_the_originals_weights() -> None:
    model = Model().requires_grad_(False)
    CompiledBlocks("eager").compile_blocks(model.blocks)
    with pytest.raises(ConfigError, match="cannot be copied; load the copy without compile"):
        copy.deepcopy(model)
