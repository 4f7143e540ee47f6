"""The fused kernels of transformer layers: Triton against float64, and what the choice between the two depends on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from kernels import fused_family_cases, fused_layer_cases
from tiny_families import WRITERS
from triton_interpreter import interpret, needs_triton

from diffusion_runtime import Pipeline, load_pipeline
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.kernels import implementation
from diffusion_runtime.kernels.activations import triton as activations_triton
from diffusion_runtime.kernels.activations.api import gelu_, sigmoid_mul, silu_mul
from diffusion_runtime.kernels.fp8_rows import triton as fp8_triton
from diffusion_runtime.kernels.fp8_rows.api import quantize_gated_rows, quantize_joined_rows, quantize_rows
from diffusion_runtime.kernels.implementation import VARIABLE, fusion_is_on
from diffusion_runtime.kernels.launches import Launch, LaunchCache, kind_of
from diffusion_runtime.kernels.modulated_norm import api as norm_api
from diffusion_runtime.kernels.modulated_norm import triton as norm_triton
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm, modulated_norm_fp8
from diffusion_runtime.kernels.modulated_norm.reference import NormCall
from diffusion_runtime.kernels.qk_norm_rope import triton as rope_triton
from diffusion_runtime.kernels.qk_norm_rope.api import norm_rope
from diffusion_runtime.kernels.qk_norm_rope.reference import NormRopeCall
from diffusion_runtime.layers.linear import Linear

LAYER = Norm("layer", 1e-6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REMAINING = "from kernels import fused_family_cases\nfused_family_cases.print_failures(fused_family_cases.REMAINING)"


@needs_triton
@pytest.mark.parametrize(
    "cases",
    [
        "fused_layer_cases.py",
        "fused_family_cases.py",
        pytest.param(REMAINING, id="other families", marks=pytest.mark.slow),
    ],
)
def test_triton_under_its_interpreter_is_as_exact_as_the_references(cases: str) -> None:
    script = Path(__file__).with_name(cases) if cases.endswith(".py") else cases
    assert interpret(script).strip() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_on_a_gpu_is_as_exact_as_the_references(dtype: torch.dtype) -> None:
    assert list(fused_layer_cases.failures(dtype, "cuda")) == []


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    x, rows = torch.randn(2, 64, 256, device="cuda").bfloat16(), torch.randn(2, 256, device="cuda")
    packed, weight = torch.randn(2, 64, 3, 2, 128, device="cuda"), torch.ones(128, device="cuda")
    for attempt in ("compiles", "checked"):
        torch.cuda.set_sync_debug_mode("error" if attempt == "checked" else "default")
        try:
            modulated_norm(x, LAYER, shift=rows, scale=rows, branch=Branch(x.clone(), rows), implementation="triton")
            norm_rope(packed, [weight, weight], 1e-6, None, implementation="triton")
            silu_mul(x, x, implementation="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_in_the_epilogue_is_the_tanh_form(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Linear(256, 512).to("cuda", dtype).requires_grad_(False)
    x = torch.randn(2, 300, 256, device="cuda").mul_(4).to(dtype)[:, 3:]
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    exact = F.gelu(exact, approximate="tanh")
    with torch.no_grad():
        assert layer.runs_in_parts(x)
        found = layer.forward_gelu(x)
        part = layer.forward_gelu_from(x, 128)
    # With gradients it is torch's own.
    expected = layer.forward_gelu(x)
    own, error = ((each.double() - exact).norm() for each in (expected, found))
    assert error <= 1.05 * own
    assert found.shape == (2, 297, 512)
    torch.testing.assert_close(part, found[..., 128:])
    assert layer.forward_gelu(x[:, :0]).shape == (2, 0, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_parts_on_a_gpu(dtype: torch.dtype) -> None:
    assert list(part_failures(dtype, "cuda", lambda layer, x: layer.runs_in_parts(x))) == []


def test_products_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Linear, "runs_in_parts", lambda *_: True)
    assert list(part_failures(torch.bfloat16, "cpu", lambda *_: True)) == []


@pytest.mark.parametrize("family", ["flux1", "flux2"])
def test_single_stream_blocks_in_parts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_pipeline(str(WRITERS[family](tmp_path / family)), device="cpu", dtype="float32")
    assert isinstance(pipeline, Pipeline)
    expected = fused_family_cases.velocity(pipeline, "cpu", torch.float32, with_image=False)
    calls: list[int] = []
    whole = Linear.forward_pair
    monkeypatch.setattr(Linear, "forward_pair", lambda *arguments: calls.append(1) or whole(*arguments))
    monkeypatch.setattr(Linear, "runs_in_parts", lambda *_: True)
    found = fused_family_cases.velocity(pipeline, "cpu", torch.float32, with_image=False)
    assert calls
    # torch's own GELU of the operator on a CPU is the exact one.
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def part_failures(
    dtype: torch.dtype, device: str, runs_in_parts: Callable[[Linear, torch.Tensor], bool]
) -> Iterator[str]:
    """A line for every product in parts that is further from float64 than 1.05 times the whole product is; a sum that
    is rounded once more may be off by 1.6 times as much (the root of 2, and 1.502 was seen)."""
    torch.manual_seed(0)
    for bias in (True, False):
        layer = Linear(96, 64, bias=bias).to(device, dtype).requires_grad_(False)
        wide = torch.randn(2, 21, 192, device=device).to(dtype)
        # Samples that are parts of longer ones, and rows that are parts of wider ones.
        for name, x in (("whole", wide[..., :96].contiguous()), ("tokens", wide[:, 4:, :96]), ("rows", wide[..., 96:])):
            exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
            own = (F.linear(x.contiguous(), layer.weight, layer.bias).double() - exact).norm()
            with torch.no_grad():
                if not runs_in_parts(layer, x):
                    yield f"{name}: does not run in parts"
                found = {
                    "all": (layer(x), exact, 1.05),
                    "first": (layer.forward_first(x, 24), exact[..., :24], 1.05),
                    "pair": (layer.forward_pair(x[..., :32], x[..., 32:]), exact, 1.6),
                }
            for what, (value, wanted, factor) in found.items():
                error = (value.double() - wanted).norm()
                if value.shape != wanted.shape or not error <= factor * own:
                    yield f"{name}, bias {bias}, {what}: error {float(error):.3g} of {float(own):.3g}"


def test_launches_that_repeat_skip_tritons_dispatch() -> None:
    launched: list[tuple[object, ...]] = []

    class Compiled:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *arguments: launched.append(("compiled", grid, arguments))

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., Compiled]:
            return lambda *arguments, **constants: launched.append(("triton", grid, arguments, constants)) or Compiled()

    cache, storage = LaunchCache(), torch.zeros(65)
    aligned, beside, half = storage[:64], storage[1:], storage[:64].half()

    def launch(*tensors: torch.Tensor) -> None:
        key = tuple(map(kind_of, tensors))
        cache.run(key, tensors, lambda: Launch(Kernel(), (2, 1, 1), (5, 0.5), {"DIM": 8, "KIND": "rms"}, 4))

    for tensors in ((aligned, aligned), (aligned, storage[:64]), (aligned, beside), (half, aligned), (half, aligned)):
        launch(*tensors)
    # Another dtype or another alignment is another compiled kernel.
    assert [call[0] for call in launched] == ["triton", "compiled", "triton", "triton", "compiled"]
    assert launched[0][1:] == ((2, 1, 1), (aligned, aligned, 5, 0.5), {"DIM": 8, "KIND": "rms", "num_warps": 4})
    _, grid, arguments = launched[1]
    assert grid == (2, 1, 1)
    # Pointers as addresses, numbers, then the constants in the signature's order, as a compiled kernel takes them.
    assert arguments[:2] == (aligned.data_ptr(), aligned.data_ptr())  # type: ignore[index]
    assert arguments[2:] == (5, 0.5, 8, "rms")  # type: ignore[index]


def test_a_call_like_an_earlier_one_skips_its_checks_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the compiled kernels, so that launches are counted where there is no GPU."""
    launched: list[str] = []

    class Compiled:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_: launched.append("repeated")

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., Compiled]:
            return lambda *_, **__: launched.append("first") or Compiled()

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(implementation, "is_interpreted", True)
    for module, name in (
        (norm_triton, "modulated_norm"),
        (rope_triton, "norm_rope"),
        (activations_triton, "activate"),
        (fp8_triton, "quantize_rows"),
    ):
        kernels = importlib.import_module(f"{module.__name__}_kernels")
        monkeypatch.setattr(kernels, name, Kernel())
        monkeypatch.setattr(module, "_launches", LaunchCache())

    def kinds(run: Callable[[], object]) -> list[str]:
        launched.clear()
        run()
        return list(launched)

    x, rows, packed, weight = torch.ones(2, 3, 8), torch.ones(2, 8), torch.ones(2, 3, 3, 2, 4), torch.ones(4)
    turns = torch.ones(3, 2, dtype=torch.complex64)
    calls: dict[str, Callable[[], object]] = {
        "norm": lambda: modulated_norm(x, LAYER, shift=rows, branch=Branch(x, rows)),
        "sum": lambda: add_branch_(x, Branch(x, rows)),
        "rope": lambda: norm_rope(packed, [weight], 1e-6, turns),
        "silu": lambda: silu_mul(x, x),
        "sigmoid": lambda: sigmoid_mul(x, x),
        "gelu": lambda: gelu_(x),
        "norm to fp8": lambda: modulated_norm_fp8(x, LAYER, shift=rows, branch=Branch(x, rows)),
        "fp8": lambda: quantize_rows(x),
        "fp8 of SiLU": lambda: quantize_gated_rows(x, x),
        "fp8 of two": lambda: quantize_joined_rows(x, x),
    }
    with torch.no_grad():
        for name, call in calls.items():
            assert kinds(call) == ["first"], name
            assert kinds(call) == ["repeated"], name
        # What a key says: shapes, dtypes, strides, alignment, epsilon. What it does not: the implementation.
        others: dict[str, Callable[[], object]] = {
            "epsilon": lambda: modulated_norm(x, Norm("layer", 1e-5), shift=rows, branch=Branch(x, rows)),
            "no gate": lambda: modulated_norm(x, LAYER, shift=rows, branch=Branch(x)),
            "scale, not shift": lambda: modulated_norm(x, LAYER, scale=rows, branch=Branch(x, rows)),
            "out": lambda: modulated_norm(x, LAYER, shift=rows, branch=Branch(x, rows), out=torch.ones(2, 3, 8)),
            "dtype": lambda: add_branch_(x.half(), Branch(x, rows)),
            "strides": lambda: add_branch_(x, Branch(torch.ones(2, 6, 8)[:, ::2], rows)),
            "alignment": lambda: add_branch_(x, Branch(torch.ones(49)[1:].view(2, 3, 8), rows)),
            "no rotation": lambda: norm_rope(packed, [weight], 1e-6, None),
            "in place": lambda: silu_mul(x, x, in_place=True),
            "fp8 of a norm": lambda: modulated_norm_fp8(x, Norm("rms", 1e-6), shift=rows, branch=Branch(x, rows)),
            "fp8 with GELU": lambda: quantize_rows(x, gelu_from=2),
        }
        for name, call in others.items():
            assert kinds(call) == ["first"], name
        # A cache that another thread starts over in between.
        cache = norm_triton._launches
        found = cache.repeat
        monkeypatch.setattr(cache, "repeat", lambda *arguments: (found(*arguments), cache._launches.clear())[0])
        assert kinds(calls["norm"]) == ["repeated"]
        assert kinds(calls["norm"]) == ["first"]
        monkeypatch.setattr(cache, "repeat", found)
        with pytest.raises(ConfigError, match="expected rows of shift"):
            modulated_norm(x, LAYER, shift=rows[:1], branch=Branch(x, rows))
        with pytest.raises(ConfigError, match=r"expected weights \[4\] or \[8\]"):
            norm_rope(packed, [torch.ones(3)], 1e-6, turns)
        assert kinds(lambda: gelu_(x, implementation="reference")) == []
        monkeypatch.setenv(VARIABLE, "reference")
        assert [kinds(call) for call in calls.values()] == [[]] * len(calls)
        monkeypatch.delenv(VARIABLE)
    # Gradients are the reference's.
    grown = torch.ones(2, 3, 8, requires_grad=True)
    assert kinds(lambda: silu_mul(grown, grown)) == []


@pytest.mark.gpu
def test_calls_that_repeat_compute_their_own_tensors() -> None:
    """A compiled kernel that is launched without Triton's dispatch reads and writes the tensors of its call."""
    weight = torch.randn(2, 128, device="cuda").bfloat16()
    for _ in range(3):
        x, rows = torch.randn(2, 64, 256, device="cuda").bfloat16(), torch.randn(2, 256, device="cuda")
        packed = torch.randn(2, 64, 3, 2, 128, device="cuda").bfloat16()
        results = []
        for each in ("reference", "triton"):
            branch, own = Branch(x.clone(), rows), packed.clone()
            norm = modulated_norm(x.clone(), LAYER, shift=rows, scale=rows, branch=branch, implementation=each)
            parts = norm_rope(own, tuple(weight), 1e-6, None, implementation=each)
            results.append([norm, *parts, silu_mul(x, norm, implementation=each)])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_every_family_on_a_gpu_computes_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert list(fused_family_cases.failures("cuda", torch.float32, 1e-5)) == []
    assert list(fused_family_cases.failures("cuda", torch.bfloat16, 2e-2)) == []


def test_the_environment_forces_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert fusion_is_on()
    monkeypatch.setenv(VARIABLE, "reference")
    assert not fusion_is_on()
    # So that auto would take it, were it not for the variable.
    monkeypatch.setattr(implementation, "is_interpreted", True)
    monkeypatch.setattr(norm_triton, "modulated_norm", lambda *_: pytest.fail("Triton was called"))
    modulated_norm(torch.randn(1, 2, 8), LAYER)
    monkeypatch.setenv(VARIABLE, "tritn")
    with pytest.raises(ConfigError, match="DIFFUSION_FUSED_KERNELS: expected auto, reference or triton, got 'tritn'"):
        modulated_norm(torch.randn(1, 2, 8), LAYER)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is a GPU's."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(("dim", "is_eager"), [(384, True), (385, False)])
def test_a_narrow_layer_on_a_gpu_compiles_nothing_unless_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, dim: int, is_eager: bool
) -> None:
    monkeypatch.setattr(implementation, "is_interpreted", False)
    monkeypatch.delenv(VARIABLE, raising=False)
    torch.manual_seed(0)
    x, asked = torch.randn(1, 2, dim), []
    monkeypatch.setattr(norm_api.triton, "repeat", lambda call: asked.append(call) or call.x)
    gpu = x.as_subclass(OnGpu)
    torch.testing.assert_close(
        modulated_norm(gpu, LAYER).as_subclass(torch.Tensor),
        F.layer_norm(x, (dim,)) if is_eager else x,
        rtol=1e-5,
        atol=1e-6,
    )
    on_gpu, on_cpu = (implementation.eager_remark(torch.device(kind), (dim, 4096)) for kind in ("cuda", "cpu"))
    assert (len(asked), on_gpu is not None, on_cpu) == ((0, True, None) if is_eager else (1, False, None))
    monkeypatch.setenv(VARIABLE, "triton")
    modulated_norm(gpu, LAYER)
    monkeypatch.delenv(VARIABLE)
    # A CPU compiles nothing.
    modulated_norm(x, LAYER)
    assert len(asked) == (2 if is_eager else 3)


@pytest.mark.parametrize(("apply", "widest"), [(sigmoid_mul, 384), (silu_mul, 4 * 384)])
def test_gates_of_narrow_layers_are_eager(
    monkeypatch: pytest.MonkeyPatch, apply: Callable[..., torch.Tensor], widest: int
) -> None:
    """A gate of attention has a layer's width, one within its feed-forward network four times that."""
    monkeypatch.setattr(implementation, "is_interpreted", False)
    monkeypatch.delenv(VARIABLE, raising=False)
    asked: list[int] = []
    monkeypatch.setattr(activations_triton, "repeat", lambda gate, *_: asked.append(gate.shape[-1]) or gate)
    for dim in (widest, widest + 4):
        gate = torch.randn(1, 2, dim).as_subclass(OnGpu)
        apply(gate, gate)
    assert asked == [widest + 4]


def test_what_triton_cannot_compute_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(1, 2, 16), torch.ones(16)
    packed, product = torch.randn(1, 2, 3, 2, 8), torch.randn(1, 2, 3, 3, 8)[..., :2, :].transpose(2, 3)
    assert norm_triton.refusal(NormCall(x, LAYER)) == "needs a CUDA GPU"
    with pytest.raises(ConfigError, match="implementation 'triton' cannot run here: needs a CUDA GPU; use auto"):
        modulated_norm(x, LAYER, implementation="triton")
    with pytest.raises(ConfigError, match="expected auto, reference, triton, got 'cuda'"):
        silu_mul(x, x, implementation="cuda")
    monkeypatch.setattr(implementation, "is_interpreted", True)
    assert norm_triton.refusal(NormCall(x, LAYER)) is None
    refused = {
        "rows of up to 8192, not 8200": norm_triton.refusal(NormCall(torch.empty(1, 1, 8200), LAYER)),
        "side by side": norm_triton.refusal(NormCall(x, LAYER, branch=Branch(x.mT.contiguous().mT))),
        "not torch.float64": norm_triton.refusal(NormCall(x, Norm("rms", 1e-6, weight.double()))),
        "computes no gradients": rope_triton.refusal(NormRopeCall(packed, [weight[:8].requires_grad_()], 1e-6, None)),
        "heads side by side": rope_triton.refusal(NormRopeCall(product, [torch.ones(8)], 1e-6, None)),
        "16384 numbers per token, not 70 heads of 256": rope_triton.refusal(
            NormRopeCall(torch.empty(1, 1, 1, 70, 256), [torch.ones(256)], 1e-6, None)
        ),
        "complex64": rope_triton.refusal(
            NormRopeCall(packed, [torch.ones(8)], 1e-6, torch.ones(2, 4, dtype=torch.complex128))
        ),
        "evenly apart": activations_triton.refusal(torch.randn(2, 5, 16)[:, :3], torch.randn(2, 3, 16)),
    }
    for expected, found in refused.items():
        assert found is not None, expected
        assert expected in found
    with torch.no_grad():
        assert rope_triton.refusal(NormRopeCall(packed, [torch.ones(8, requires_grad=True)], 1e-6, None)) is None


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, rows, packed = torch.randn(2, 3, 8), torch.randn(2, 8), torch.randn(2, 3, 3, 2, 8)
    with pytest.raises(ConfigError, match=r"expected rows of shift, scale and gate \(2, 8\) .* got \(1, 8\)"):
        modulated_norm(x, LAYER, shift=rows[:1], scale=rows)
    with pytest.raises(ConfigError, match=r"branch and out like x \(2, 3, 8\), got \(2, 2, 8\)"):
        add_branch_(x, Branch(x[:, :2]))
    with pytest.raises(ConfigError, match=r"expected 8 weights, got \(7,\)"):
        modulated_norm(x, Norm("rms", 1e-6, torch.ones(7)))
    with pytest.raises(ConfigError, match="expected an RMSNorm with weight"):
        add_branch_(x, Branch(x, None, LAYER))
    with pytest.raises(ConfigError, match=r"expected weights \[8\] or \[16\]"):
        norm_rope(packed, [torch.ones(12)], 1e-6, None)
    with pytest.raises(ConfigError, match="expected 1 or 2 weights for 3 parts, got 0"):
        norm_rope(packed, [], 1e-6, None)
    with pytest.raises(ConfigError, match=r"expected \(3, 4\), \(2, 3, 4\) or \(2, 3, 2, 4\)"):
        norm_rope(packed, [torch.ones(8)], 1e-6, torch.ones(4, 4, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="out like the product"):
        norm_rope(packed, [torch.ones(8)], 1e-6, None, out=packed[:, :2])
    with pytest.raises(ConfigError, match="expected gate and features alike"):
        silu_mul(x, x[:, :2])


def test_sequences_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rows, packed = torch.randn(2, 0, 8), torch.randn(2, 8), torch.randn(2, 0, 3, 2, 8)
    for interpreted in (False, True):
        monkeypatch.setattr(implementation, "is_interpreted", interpreted)
        assert modulated_norm(x, LAYER, shift=rows, scale=rows, branch=Branch(x, rows)).shape == (2, 0, 8)
        assert add_branch_(x, Branch(x, rows)) is x
        turns = torch.ones(0, 4, dtype=torch.complex64)
        assert [part.shape for part in norm_rope(packed, [torch.ones(8)], 1e-6, turns)] == [(2, 0, 2, 8)] * 3
        assert silu_mul(x, x).shape == sigmoid_mul(x, x).shape == (2, 0, 8)


def test_rows_of_zeros_are_quantised_to_zeros() -> None:
    found = modulated_norm_fp8(torch.zeros(1, 2, 8), Norm("rms", 1e-6))
    assert found.scales.isfinite().all()
    assert found.values.float().eq(0).all()


def test_gradients_go_through_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "is_interpreted", True)
    x, weight = torch.randn(1, 3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    modulated_norm(x, Norm("layer", 1e-6, weight)).square().sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().max()) > 0
