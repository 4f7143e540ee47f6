"""The benchmark of attention: real shapes, right before fast, and what a row says of a backend that is not."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exact_attention import exact, relative_error

from diffusion_runtime.attention import (
    AttentionCall,
    AttentionResult,
    Availability,
    Backend,
    Capability,
    TokenLayout,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.backends.reference import ReferenceBackend, reference_attention
from diffusion_runtime.benchmark.accuracy import ExactRows, error_bound
from diffusion_runtime.benchmark.attention import Effort, benchmark_attention, check_backends, default_backends
from diffusion_runtime.benchmark.measurement import AttentionBenchmark, Measurement
from diffusion_runtime.benchmark.plot import plot_benchmark
from diffusion_runtime.benchmark.shapes import LARGE_SHAPES, AttentionShape, embedded_shapes, find_shapes
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

SMALL = AttentionShape("small", "a shape of the tests", TokenLayout((2, 8, 8)), num_heads=2, head_dim=64)
PADDED = dataclasses.replace(SMALL, name="padded", layout=TokenLayout((1, 4, 4), 16, 0, valid_lengths=(7, 16)), batch=2)
CROSS = dataclasses.replace(SMALL, name="cross", layout=TokenLayout.text(24, (5,)), num_queries=100)


class Faulty(Backend):
    """A tenth too large in every score, except for q whose batch is not 1, for which it raises."""

    name = "faulty"
    summary = "a backend of the tests"
    capability = Capability(features=frozenset({"key_padding"}))

    def probe(self, hardware: Hardware) -> Availability:
        return Availability("1")

    def run(self, call: AttentionCall) -> AttentionResult:
        if call.q.shape[0] > 1:
            raise OSError("libfaulty.so: cannot open shared object file")
        scale = 1.1 * call.q.shape[3] ** -0.5
        return AttentionResult(reference_attention(call.q, call.k, call.v, scale=scale)[0], None, "faulty kernel")


class Quantised(Faulty):
    """The same, and says so."""

    name = "quantised"
    lossless = False
    error_bound = 0.2


class Infinite(Faulty):
    name = "infinite"

    def run(self, call: AttentionCall) -> AttentionResult:
        return AttentionResult(call.q * math.inf, None, "infinite kernel")


class Tiring(Faulty):
    """Right, until its fourth call."""

    name = "tiring"
    calls = 0

    def run(self, call: AttentionCall) -> AttentionResult:
        type(self).calls += 1
        if self.calls > 3:
            raise OSError("out of handles")
        return AttentionResult(reference_attention(call.q, call.k, call.v)[0], None, "tiring kernel")


class Absent(Faulty):
    name = "absent_attn"

    def probe(self, hardware: Hardware) -> Availability:
        return Availability(None, "package 'absent' is not installed", "pip install absent")


@pytest.fixture(autouse=True)
def faulty() -> Iterator[None]:
    Tiring.calls = 0
    backends = (Faulty, Quantised, Infinite, Tiring, Absent)
    for backend in backends:
        register_backend(backend)
    yield
    for backend in backends:
        unregister_backend(backend.name)


def bench(*names: str, shapes: tuple[AttentionShape, ...] = (SMALL,), seconds: float = 60.0) -> AttentionBenchmark:
    effort = Effort(num_rounds=3, deadline=time.monotonic() + seconds, matmul_size=64)
    return benchmark_attention(shapes, names, torch.device("cpu"), torch.float32, effort)


def row(benchmark: AttentionBenchmark, backend: str, shape: AttentionShape = SMALL) -> Measurement:
    found = benchmark.find(shape.name, backend)
    assert found is not None
    return found


def test_a_row_has_times_rates_error_and_what_ran() -> None:
    result = bench("torch_sdpa", "reference")
    fast = row(result, "torch_sdpa")
    assert (fast.state, fast.implementation, len(fast.samples)) == ("measured", "flash", 3)
    assert fast.bound == 2e-5
    assert fast.error is not None
    assert 0 < fast.error < 2e-5
    assert fast.milliseconds == sorted(fast.samples)[1]
    # 4 x queries x keys x heads x head size.
    assert fast.tflops == pytest.approx(4 * 128 * 128 * 2 * 64 / fast.milliseconds / 1e9)
    assert fast.share_of_matmul == pytest.approx(fast.tflops / fast.matmul_tflops)
    assert row(result, "reference").matmul_tflops == fast.matmul_tflops
    assert result.exit_code == 0
    assert [item.milliseconds for item in result.of_shape(SMALL)] == sorted(
        item.milliseconds for item in result.measurements
    )  # type: ignore[type-var]


def test_wrong_results_are_said_and_not_timed() -> None:
    result = bench("torch_sdpa", "faulty", "infinite", "quantised")
    wrong = row(result, "faulty")
    assert (wrong.state, wrong.samples, wrong.implementation) == ("wrong", (), "faulty kernel")
    assert wrong.error is not None
    assert wrong.reason == f"the error {wrong.error:.1e} is above the bound 2.0e-05"
    assert (row(result, "infinite").state, row(result, "infinite").error) == ("wrong", None)
    assert row(result, "quantised").state == "measured"
    assert row(result, "torch_sdpa").state == "measured"
    assert result.exit_code == 1


def test_what_raises_and_what_cannot_are_rows_too() -> None:
    result = bench("torch_sdpa", "faulty", "vmoba_attn", shapes=(PADDED, CROSS))
    failed = row(result, "faulty", PADDED)
    assert (failed.state, failed.reason) == ("failed", "OSError: libfaulty.so: cannot open shared object file")
    refused = row(result, "vmoba_attn", CROSS)
    assert (refused.state, refused.samples) == ("refused", ())
    assert "serves self attention, not role 'cross'" in refused.reason
    assert bench("vmoba_attn", shapes=(CROSS,)).exit_code == 0


def test_one_that_raises_while_it_is_timed_is_a_row_and_the_others_are_timed() -> None:
    result = bench("tiring", "torch_sdpa")
    broken = row(result, "tiring")
    assert (broken.state, broken.reason, broken.samples) == ("failed", "OSError: out of handles", ())
    assert len(row(result, "torch_sdpa").samples) == 3
    assert result.exit_code == 1


def test_a_sparse_backend_has_an_error_and_no_bound() -> None:
    sparse = row(bench("video_sparse_attn"), "video_sparse_attn")
    assert (sparse.state, sparse.bound) == ("measured", None)
    assert sparse.error is not None


def test_padding_is_not_seen_and_not_counted() -> None:
    result = bench("torch_sdpa", "reference", shapes=(PADDED, CROSS))
    assert {item.state for item in result.measurements} == {"measured"}
    assert PADDED.num_operations == 4 * 32 * ((7 + 16) + (16 + 16)) * 2 * 64
    assert CROSS.num_operations == 4 * 100 * 5 * 2 * 64


def test_when_the_time_is_up_shapes_are_skipped() -> None:
    result = bench("torch_sdpa", shapes=(SMALL, CROSS), seconds=-1.0)
    assert [(item.state, item.reason) for item in result.measurements] == [
        ("skipped", "the time limit was reached")
    ] * 2
    assert result.exit_code == 0


def test_by_default_every_dense_one_that_is_usable_and_fast() -> None:
    names, left_out = default_backends(detect_hardware("cpu"))
    assert {"torch_sdpa", "faulty", "quantised"} <= set(names)
    assert not {"reference", "measured", "flex_attn", "video_sparse_attn", "absent_attn"} & set(names)
    assert dict(left_out)["absent_attn"] == "package 'absent' is not installed"
    assert "fa" in dict(left_out)
    assert "--backends reference" in dict(left_out)["reference"]


def test_one_that_was_asked_for_and_cannot_run_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match="absent' is not installed; fix: pip install absent") as raised:
        check_backends(["torch_sdpa", "absent_attn", "fa"], detect_hardware("cpu"))
    assert [name for name, _ in raised.value.reasons] == ["fa", "absent_attn"]
    check_backends(["torch_sdpa", "measured", "vmoba_attn"], detect_hardware("cpu"))


@pytest.mark.parametrize("shape", [SMALL, PADDED, CROSS], ids=lambda shape: shape.name)
def test_the_error_is_that_of_float64_attention(shape: AttentionShape) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape.batch, seq, 4, 64) for seq in (shape.seq_q, shape.seq_k, shape.seq_k))
    k, v = k[:, :, :2], v[:, :, :2]
    rows = ExactRows(q, k, v, shape.layout)
    visible = torch.zeros(shape.batch, shape.seq_q, shape.seq_k, dtype=torch.bool)
    for sample in range(shape.batch):
        for start, stop in shape.layout.key_ranges(sample):
            visible[sample, :, start:stop] = True
    expected, _ = exact(q, k, v, visible, 0.125)
    assert rows.error_of(expected) < 1e-14
    # The same for every query, so that it does not matter which are looked at.
    assert rows.error_of(1.1 * expected) == pytest.approx(0.1)
    assert relative_error(1.1 * expected, expected) == pytest.approx(0.1)


def test_bounds() -> None:
    assert error_bound(ReferenceBackend(), torch.bfloat16, Hardware()) == 1e-2
    assert error_bound(Quantised(), torch.bfloat16, Hardware()) == 0.2
    assert error_bound(Quantised(), torch.float64, Hardware()) == 0.2


@pytest.mark.parametrize(
    ("name", "tokens", "heads"),
    [
        ("wan-1.3b-480p", 32760, 12),
        ("wan-14b-720p", 75600, 40),
        ("hunyuan-720p", 118800 + 256, 24),
        ("hunyuan-1.5", 25996, 16),
        ("qwen-image-1024", 4096 + 256, 24),
        ("flux-1024", 4096 + 512, 24),
    ],
)
def test_large_shapes(name: str, tokens: int, heads: int) -> None:
    (shape,) = find_shapes([name], small_by_default=True)
    assert (shape.seq_q, shape.seq_k, shape.num_heads, shape.head_dim) == (tokens, tokens, heads, 128)
    assert not shape.is_small


def test_the_padded_figure_has_156_padded_keys() -> None:
    (shape,) = find_shapes(["hunyuan-1.5"], small_by_default=True)
    assert shape.layout.key_ranges(0) == ((0, 25996 - 156),)


def test_the_embedded_model_brings_its_own_shapes() -> None:
    shapes = embedded_shapes()
    said = [(shape.name, shape.seq_q, shape.seq_k, shape.num_heads, shape.head_dim) for shape in shapes]
    assert said == [
        ("shapes-draft", 512, 512, 4, 64),
        ("shapes-default", 2048, 2048, 4, 64),
        ("shapes-large", 4608, 4608, 4, 64),
        ("shapes-cross", 4608, 64, 4, 64),
    ]
    assert all(shape.is_small for shape in shapes)
    assert find_shapes([], small_by_default=True) == shapes
    assert find_shapes(["all"], small_by_default=True) == (*shapes, *LARGE_SHAPES)
    assert find_shapes([], small_by_default=False) == (*shapes, *LARGE_SHAPES)


def test_an_unknown_shape_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'flux'\. Did you mean 'flux-1024'"):
        find_shapes(["small", "flux"], small_by_default=True)


def test_everything_is_plain_values() -> None:
    values = json.loads(
        json.dumps(bench("torch_sdpa", "faulty", "infinite", shapes=(SMALL, PADDED)).to_dict(), allow_nan=False)
    )
    assert (values["schema"], values["benchmark"], values["exit_code"]) == ("diffusion_runtime.bench/1", "attention", 1)
    assert [shape["name"] for shape in values["shapes"]] == ["small", "padded"]
    first = values["rows"][0]
    assert first["fastest_milliseconds"] <= first["milliseconds"] <= first["slowest_milliseconds"]
    assert values["shapes"][1]["valid_lengths"] == [7, 16]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "bench.png"
    plot_benchmark(bench("torch_sdpa", "reference", "faulty", shapes=(SMALL, PADDED, CROSS)), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    # Nothing was measured: still a picture, and no error.
    plot_benchmark(bench("vmoba_attn", shapes=(CROSS,)), path)
