"""Platform defaults: every row of the documented matrix, as candidates and as what is taken of them."""

from __future__ import annotations

import logging

import pytest
import torch
from machines import EVERYTHING, cuda, other
from tables import table

from diffusion_runtime.attention import AttentionConfig, AttentionPolicy, Decision, LocalAttention, select_backend
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.fa4 import FlashAttention4
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.layer_decisions import first_imports
from diffusion_runtime.attention.select import platform_candidates
from diffusion_runtime.core.hardware import PLATFORMS, Hardware
from diffusion_runtime.errors import BackendUnavailableError

FLASH = ("fa", "torch_sdpa")
BLACKWELL = ("cudnn_attn", "flashinfer_attn", "fa4", "torch_sdpa")
WITHOUT_CUDNN = ("flashinfer_attn", "fa4", "torch_sdpa")
SDPA = ("torch_sdpa",)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)


def default_on(hardware: Hardware, *, head_dim: int = 128, dtype: str = "bfloat16") -> Decision:
    return select_backend(head_dim=head_dim, dtype=dtype, device=hardware, num_heads=12)


@table(
    ("capability", "candidates"),
    [
        ((7, 0), SDPA),
        ((7, 5), SDPA),
        ((8, 0), FLASH),
        ((8, 6), FLASH),
        ((8, 9), FLASH),
        ((9, 0), FLASH),
        ((10, 0), BLACKWELL),
        ((10, 1), BLACKWELL),
        ((10, 3), BLACKWELL),
        ((11, 0), BLACKWELL),
        ((12, 0), BLACKWELL),
        ((12, 1), BLACKWELL),
    ],
)
def test_candidates_by_chip(capability: tuple[int, int], candidates: tuple[str, ...]) -> None:
    assert platform_candidates(cuda(capability)) == candidates


@table(
    ("cudnn", "candidates"),
    [
        ((9, 15), BLACKWELL),
        ((9, 5), BLACKWELL),
        ((9, 4), WITHOUT_CUDNN),
        ((8, 9), WITHOUT_CUDNN),
        (None, WITHOUT_CUDNN),
    ],
)
def test_candidates_by_cudnn(cudnn: tuple[int, int] | None, candidates: tuple[str, ...]) -> None:
    assert platform_candidates(cuda((10, 0), cudnn=cudnn)) == candidates
    # Below Blackwell cuDNN is never a default.
    assert platform_candidates(cuda((9, 0), cudnn=cudnn)) == FLASH


@table(("platform", "candidates"), [("rocm", FLASH), ("mps", SDPA), ("npu", SDPA), ("xpu", SDPA), ("cpu", SDPA)])
def test_candidates_off_cuda(platform: str, candidates: tuple[str, ...]) -> None:
    assert platform_candidates(other(platform)) == candidates


def test_every_platform_is_in_the_matrix_and_ends_with_what_always_runs() -> None:
    for platform in PLATFORMS:
        assert platform_candidates(other(platform))[-1] == "torch_sdpa"


def test_no_default_refuses_every_call_of_its_chip() -> None:
    """A name in the order that a chip can never have is a step that does not exist."""
    always_refused = []
    for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]:
        hardware = cuda(capability, *EVERYTHING)
        requirements = AttentionRequirements("self", "self", 64, "bfloat16", hardware, num_heads=8, num_kv_heads=8)
        for name in platform_candidates(hardware):
            always_refused += [(capability, name, reason) for reason in refusals(name, requirements)]
    assert always_refused == []


@table(
    ("hardware", "taken", "version"),
    [
        (cuda((7, 5), *EVERYTHING), "torch_sdpa", ""),
        (cuda((8, 0)), "torch_sdpa", ""),
        (cuda((8, 0), "flash-attn"), "fa", "fa2 2.8.3"),
        (cuda((8, 0), "flash-attn-4"), "torch_sdpa", ""),
        (cuda((8, 9), *EVERYTHING), "fa", "fa2 2.8.3"),
        (cuda((9, 0)), "torch_sdpa", ""),
        (cuda((9, 0), "flash-attn"), "fa", "fa2 2.8.3"),
        (cuda((9, 0), "flash-attn", "flash-attn-3"), "fa", "fa3 3.0.0b1"),
        (cuda((9, 0), *EVERYTHING), "fa", "fa4 4.0.0b36"),
        (cuda((9, 0), "flashinfer-python", "xformers", "sageattention", "triton"), "torch_sdpa", ""),
        (cuda((10, 0)), "cudnn_attn", ""),
        (cuda((10, 3), *EVERYTHING), "cudnn_attn", ""),
        (cuda((10, 0), *EVERYTHING, cudnn=(9, 4)), "flashinfer_attn", ""),
        (cuda((10, 0), *EVERYTHING, cudnn=(9, 4), programs=()), "fa4", ""),
        (cuda((10, 0), "flash-attn-4", cudnn=None), "fa4", ""),
        (cuda((10, 0), "flash-attn", cudnn=None), "torch_sdpa", ""),
        (cuda((12, 0), *EVERYTHING), "cudnn_attn", ""),
        (cuda((12, 0), "flash-attn-4", cudnn=(9, 4)), "fa4", ""),
        (cuda((12, 1), "flash-attn-4", cudnn=None), "fa4", ""),
        (cuda((12, 1), "flashinfer-python", cudnn=None), "flashinfer_attn", ""),
        (other("rocm"), "torch_sdpa", ""),
        (other("rocm", "flash-attn"), "fa", "fa2 2.8.3"),
        (other("rocm", "flash-attn-4", "amd-aiter"), "torch_sdpa", ""),
        (other("mps", *EVERYTHING), "torch_sdpa", ""),
        (other("npu", *EVERYTHING), "torch_sdpa", ""),
        (other("xpu", *EVERYTHING), "torch_sdpa", ""),
        (other("cpu", *EVERYTHING), "torch_sdpa", ""),
    ],
)
def test_what_is_taken(hardware: Hardware, taken: str, version: str) -> None:
    from diffusion_runtime.attention.backends.registry import find_backend

    decision = default_on(hardware)
    assert (decision.backend, decision.source) == (taken, "platform")
    passed = platform_candidates(hardware)
    assert list(dict.fromkeys(name for name, _ in decision.rejected)) == list(passed[: passed.index(taken)])
    backend = find_backend(taken)
    assert backend is not None
    if version:
        assert backend.probe(hardware).version == version


@table(
    ("hardware", "head_dim", "dtype", "taken", "reason"),
    [
        (cuda((9, 0), *EVERYTHING), 128, "float32", "torch_sdpa", "takes bfloat16, float16, not float32"),
        (
            cuda((9, 0), *EVERYTHING),
            512,
            "bfloat16",
            "torch_sdpa",
            "takes head sizes 8 to 256, multiples of 8",
        ),
        (cuda((10, 0), *EVERYTHING), 256, "bfloat16", "flashinfer_attn", "takes head sizes 8 to 128"),
        (cuda((10, 0), *EVERYTHING), 160, "bfloat16", "torch_sdpa", "takes head sizes 8, 16, 24"),
    ],
)
def test_a_default_passes_what_a_layer_cannot_have(
    hardware: Hardware, head_dim: int, dtype: str, taken: str, reason: str
) -> None:
    decision = default_on(hardware, head_dim=head_dim, dtype=dtype)
    assert decision.backend == taken
    assert any(reason in why for _, why in decision.rejected), decision.rejected


def test_the_generation_follows_the_head_size() -> None:
    from diffusion_runtime.attention.backends.fa import fastest_generation

    both = cuda((10, 0), "flash-attn", "flash-attn-4")
    taken = [fastest_generation(both, head_dim) for head_dim in (64, 160, 256, 264)]
    assert [None if generation is None else generation.name for generation in taken] == ["fa4", "fa2", "fa4", None]
    assert select_backend(head_dim=160, dtype="bfloat16", device=both, num_heads=8, config="fa").backend == "fa"
    with pytest.raises(BackendUnavailableError, match="fa4 takes head sizes"):
        select_backend(head_dim=160, dtype="bfloat16", device=cuda((10, 0), "flash-attn-4"), num_heads=8, config="fa")


@table(
    ("hardware", "taken", "versions"),
    [
        (cuda((9, 0), *EVERYTHING), "fa", "Hopper, cuda sm_90, torch 2.13.0, flash-attn-4 4.0.0b36"),
        (cuda((8, 6), "flash-attn"), "fa", "Ampere, cuda sm_86, torch 2.13.0, flash-attn 2.8.3"),
        (cuda((10, 0)), "cudnn_attn", "Blackwell, cuda sm_100, torch 2.13.0, cuDNN 9.15"),
        (
            cuda((10, 0), *EVERYTHING, cudnn=(9, 4)),
            "flashinfer_attn",
            "Blackwell, cuda sm_100, torch 2.13.0, flashinfer-python 0.6.1",
        ),
        (
            cuda((10, 3), "flash-attn-4", cudnn=None),
            "fa4",
            "Blackwell, cuda sm_103, torch 2.13.0, flash-attn-4 4.0.0b36",
        ),
        (cuda((9, 0), cudnn=(9, 8)), "torch_sdpa", "Hopper, cuda sm_90, torch 2.13.0, cuDNN 9.8"),
        (cuda((9, 0), cudnn=None), "torch_sdpa", "Hopper, cuda sm_90, torch 2.13.0"),
        (other("rocm", "flash-attn"), "fa", "rocm, torch 2.13.0, flash-attn 2.8.3"),
        (other("cpu"), "torch_sdpa", "cpu, torch 2.13.0"),
    ],
)
def test_a_default_is_announced_with_the_versions_it_rests_on(hardware: Hardware, taken: str, versions: str) -> None:
    line = f"Defaulting to attention backend '{taken}' for role=self ({versions})"
    assert default_on(hardware).log_line("self", hardware).partition(";")[0] == line


def test_a_default_says_what_of_its_chip_cannot_run() -> None:
    cases = [
        (cuda((9, 0)), "; fa cannot run here"),
        (cuda((10, 0), cudnn=(9, 4)), "; flashinfer_attn, fa4 cannot run here"),
        (cuda((10, 0)), ""),
        (other("cpu"), ""),
    ]
    lines = [default_on(hardware).log_line("self", hardware) for hardware, _ in cases]
    assert [line.partition(")")[2] for line in lines] == [end for _, end in cases]


def test_a_narrow_layer_takes_no_default_that_compiles_and_says_so() -> None:
    """By the layer's width on all processes, so that a first command and later ones compute alike."""

    def decision(hardware: Hardware, num_heads: int, cli: str | None = None) -> Decision:
        policy = AttentionPolicy(
            cli=AttentionConfig.parse(cli), device="cuda", dtype=torch.bfloat16, environment=None, planned_on=hardware
        )
        return LocalAttention(num_heads, 64, policy=policy).decisions.possible[0][1]

    hopper = cuda((9, 0), "flash-attn-4")
    narrow = decision(hopper, 4)
    assert narrow.backend == "torch_sdpa"
    line = narrow.log_line("self", hopper)
    assert line.endswith("; fa: passed over as a default, a layer of at most 384 numbers per token repays no compiling")
    assert [name for name, _ in narrow.rejected] == ["fa"]
    assert decision(hopper, 6).backend == "torch_sdpa"
    assert decision(hopper, 7).backend == "fa"
    assert decision(hopper, 4, "fa").backend == "fa"
    # Its kernels came compiled; and what is not installed is not passed over.
    assert decision(cuda((9, 0), "flash-attn"), 4).backend == "fa"
    assert decision(cuda((9, 0)), 4).log_line("self", cuda((9, 0))).endswith("; fa cannot run here")


def test_log_lines_name_the_platform_and_its_versions(caplog: pytest.LogCaptureFixture) -> None:
    hopper = cuda((9, 0), *EVERYTHING)
    assert default_on(hopper).log_line("self", hopper) == (
        "Defaulting to attention backend 'fa' for role=self (Hopper, cuda sm_90, torch 2.13.0, flash-attn-4 4.0.0b36)"
    )
    chosen = select_backend(head_dim=128, dtype="bfloat16", device=hopper, num_heads=8, cli="fa2")
    assert chosen.log_line("cross", hopper) == "Using attention backend 'fa2' for role=cross (cli)"
    here = AttentionPolicy(device="cpu", dtype=torch.float32)
    caplog.set_level(logging.INFO, "diffusion_runtime.attention")
    for _ in range(3):
        here.announce(default_on(here.hardware, dtype="float32"), "self")
    version = torch.__version__.partition("+")[0]
    assert caplog.messages == [f"Defaulting to attention backend 'torch_sdpa' for role=self (cpu, torch {version})"]


def test_what_first_calls_import_is_imported_ahead_once_per_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper, imported = cuda((9, 0), "flash-attn-4"), []
    monkeypatch.setattr(FlashAttention4, "first_call_functions", lambda self: imported.append(self.name))
    policy = AttentionPolicy(device="cuda", dtype=torch.bfloat16, environment=None, planned_on=hopper)
    layers = [LocalAttention(heads, 64, policy=policy).decisions for heads in (12, 16, 4)]
    found = first_imports(layers)
    assert len(found) == 1, "fa serves two layers, and torch_sdpa the narrow one"
    for each in found:
        each()
    assert imported == ["fa4"]
