"""Every declaration of every dense backend: proved or refused on this machine, and refused where it should be."""

from __future__ import annotations

import pytest
import torch
from attention_calls import attention_call
from dense_backends import COMPILED, DENSE, homes
from exact_attention import LAYOUTS, assert_is_exact, exact, random_mask, visible_by
from machines import EVERYTHING, cuda, other
from tables import table
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from diffusion_runtime.attention import attention, select_backend
from diffusion_runtime.attention.backends.capability import FEATURES
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.backends.torch_sdpa import lse_kernel
from diffusion_runtime.core.hardware import Hardware, detect_hardware
from diffusion_runtime.errors import BackendUnavailableError
from diffusion_runtime.kernels.block_sparse import flash4, triton

HOPPER = cuda((9, 0), *EVERYTHING)
HOMES = homes()


def refused(name: str, hardware: Hardware, **requirements: object) -> list[str]:
    """What selection says against an explicit choice; empty when it is taken."""
    arguments = {"head_dim": 64, "dtype": "bfloat16", "num_heads": 4, **requirements}
    try:
        # By name for the role: a general choice passes over a backend that does not read cached keys.
        decision = select_backend(device=hardware, config={"per_role": {"self": name}}, **arguments)  # type: ignore[arg-type]
    except BackendUnavailableError as error:
        return [reason for _, reason in error.reasons]
    assert decision.backend == name
    return []


def test_every_dense_backend_has_a_home() -> None:
    """Nothing to write here for a new one: a machine of a new kind, or a package's version, goes into machines.py."""
    assert {"torch_sdpa", "reference", "fa", "aiter"} <= set(DENSE)
    assert set(DENSE) == set(HOMES)


def block_mask_is_exact_or_refused(name: str) -> None:
    """A BlockMask as create_block_mask makes it, and one that lists full blocks alone, as NABLA does."""
    backend = find_backend(name)
    assert backend is not None
    hardware = detect_hardware("cpu")
    if "block_mask" not in backend.capability.features or hardware.platform not in backend.capability.platforms:
        assert refused(name, hardware, needs=("block_mask",))
        return
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 200, 4, 16)
    seen = torch.rand(200, 200) < 0.5
    table = (torch.rand(1, 4, 4, 4) < 0.5) | torch.eye(4, dtype=torch.bool)
    counts, indices = table.sum(-1).int(), table.int().argsort(dim=-1, descending=True).int()
    cases = [
        (create_block_mask(lambda _b, _h, i, j: seen[i, j], None, None, 200, 200, device="cpu"), seen[None, None]),
        (
            BlockMask.from_kv_blocks(
                torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=64, seq_lengths=(200, 200)
            ),
            table.repeat_interleave(64, -1).repeat_interleave(64, -2)[..., :200, :200],
        ),
    ]
    for blocks, mask in cases:
        options = backend.options_type()
        call = attention_call(q, k, v, options, block_mask=blocks)
        assert_is_exact(backend.run(call).out, None, exact(q, k, v, visible_by(None, 3, 200, False), 0.25, mask))


@table("name", sorted(set(DENSE) - COMPILED))
@table("feature", ["plain", *(feature for feature in FEATURES if feature != "cached_keys")])
def test_a_declared_feature_is_exact_here_or_refused_here(name: str, feature: str) -> None:
    backend, hardware = find_backend(name), detect_hardware("cpu")
    assert backend is not None
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 17, 4, 64)
    layout = LAYOUTS["prefix"] if feature == "key_padding" else None
    if feature == "gqa":
        k, v = k[:, :, :2], v[:, :, :2]
    if feature == "block_mask":
        block_mask_is_exact_or_refused(name)
        return
    mask = random_mask(feature == "boolean_mask", (3, 4, 17, 17)) if feature.endswith("_mask") else None
    arguments = {
        "backend": name,
        "layout": layout,
        "mask": mask,
        "causal": feature == "causal",
        "scale": 0.2 if feature == "scale" else None,
        "return_lse": feature == "lse",
        "gate": torch.rand_like(q) if feature == "gate" else None,
    }
    can = feature == "plain" or feature in backend.capability.features
    runs_here = hardware.platform in backend.capability.platforms
    if not (can and runs_here):
        why = "runs on" if not runs_here else f"cannot do {feature}"
        with pytest.raises(BackendUnavailableError, match=why):
            attention(q, k, v, **arguments)  # type: ignore[call-overload]
        return
    result = attention(q, k, v, **arguments)  # type: ignore[call-overload]
    out, lse = result if feature == "lse" else (result, None)
    visible = visible_by(layout, 3, 17, feature == "causal")
    expected = exact(q, k, v, visible, 0.2 if feature == "scale" else 0.125, mask)
    assert_is_exact(out, lse, expected, backend.error_bound or 1e-5)


@table("name", DENSE)
def test_features_dtypes_and_head_sizes_are_refused_at_home_where_they_are_not_declared(name: str) -> None:
    backend, home = find_backend(name), HOMES[name]
    assert backend is not None
    can = backend.capability.on_hardware(home)
    assert not refused(name, home)
    for feature in FEATURES:
        needs = () if feature == "gqa" else (feature,)
        said = refused(name, home, needs=needs, num_kv_heads=2 if feature == "gqa" else 4)
        assert [reason.split(":")[0] for reason in said] == (
            [] if feature in can.features else [f"cannot do {feature}"]
        )
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        assert bool(refused(name, home, dtype=dtype)) == (dtype not in can.dtypes)
    for head_dim in (4, 8, 64, 72, 96, 128, 160, 256, 264):
        assert bool(refused(name, home, head_dim=head_dim)) == (head_dim not in can.head_sizes)


@table(
    ("name", "hardware", "reason"),
    [
        ("fa2", cuda((7, 5), "flash-attn"), "needs sm_80 or newer, this is cuda sm_75"),
        ("fa2", cuda((9, 0), "flash-attn-4"), "'flash-attn' is not installed; fix: pip install flash-attn"),
        ("fa3", cuda((8, 9), "flash-attn-3"), "needs sm_90 or newer"),
        ("fa3", cuda((10, 0), "flash-attn-3"), "stops at sm_90, this is cuda sm_100"),
        ("fa4", cuda((8, 9), "flash-attn-4"), "needs sm_90 or newer"),
        ("fa4", cuda((13, 0), "flash-attn-4"), "stops at sm_121, this is cuda sm_130"),
        ("fa4", cuda((9, 0)), r"not installed; fix: pip install 'diffusion-runtime\[flash\]'"),
        ("fa4", other("rocm", "flash-attn-4"), "runs on cuda, not on rocm"),
        ("fa", cuda((9, 0)), r"FlashAttention is not installed; fix: pip install 'diffusion-runtime\[flash\]'"),
        ("fa", cuda((8, 6)), "FlashAttention is not installed; fix: pip install flash-attn"),
        (
            "fa",
            cuda((8, 6), "flash-attn-4"),
            "flash-attn-4 needs sm_90 or newer, this is .*fix: pip install flash-attn ",
        ),
        ("fa", cuda((13, 0), "flash-attn-4"), "flash-attn-4 stops at sm_121"),
        ("fa", other("mps"), "runs on cuda, rocm, not on mps"),
        ("cudnn_attn", cuda((7, 5)), "needs sm_80 or newer"),
        ("cudnn_attn", cuda((9, 0), cudnn=None), "torch has no cuDNN here; fix: pip install -U torch"),
        ("cudnn_attn", cuda((9, 0), cudnn=(8, 9)), "needs cuDNN 9.0 on this chip, torch has 8.9"),
        ("cudnn_attn", cuda((10, 0), cudnn=(9, 4)), "needs cuDNN 9.5 on this chip, torch has 9.4"),
        ("cudnn_attn", other("rocm"), "runs on cuda"),
        ("fp8_attn", cuda((8, 9), "nvidia-cudnn-frontend", "triton"), "needs sm_90 or newer"),
        ("fp8_attn", cuda((9, 0), "triton"), r"not installed; fix: pip install 'diffusion-runtime\[fp8\]'"),
        ("fp8_attn", cuda((9, 0), "nvidia-cudnn-frontend"), "quantising needs triton"),
        ("fp8_attn", other("rocm"), "runs on cpu, cuda, not on rocm"),
        (
            "flashinfer_attn",
            cuda((9, 0), "flashinfer-python", programs=()),
            "with nvcc, which is not here; fix: install",
        ),
        ("sage_attn", cuda((9, 0)), r"not installed; fix: pip install 'diffusion-runtime\[sage\]'"),
        ("sage_attn", cuda((9, 0), "sageattention"), "needs triton and does not bring it"),
        (
            "sage_attn",
            cuda((10, 0), "sageattention", "triton"),
            "has kernels for sm_80, sm_86, .*; fix: pip install sage",
        ),
        ("sage_attn_3", cuda((9, 0), "sageattn3"), "this is cuda sm_90"),
        ("sage_attn_3", cuda((10, 3), "sageattn3"), "has kernels for sm_100, sm_120, sm_121, this is cuda sm_103"),
        ("sage_attn_3", cuda((12, 0)), "not installed; fix: git clone"),
        (
            "xformers",
            cuda((9, 0), "xformers", "flash-attn-4"),
            "cannot be imported where flash-attn-4 is .*; fix: choose",
        ),
        ("xformers", cuda((7, 5), "xformers"), "needs sm_80 or newer"),
        ("video_sparse_attn", cuda((7, 5), *EVERYTHING), "needs sm_80 or newer, this is cuda sm_75"),
        ("video_sparse_attn", cuda((9, 0)), "its kernel on cuda needs triton"),
        (
            "vmoba_attn",
            other("rocm"),
            "its kernel on rocm needs triton; fix: pip install",
        ),
        ("flex_attn", cuda((9, 0)), "compiled with triton, which is not installed"),
        ("flex_attn", other("cpu"), "no C\\+\\+ compiler here; fix: apt-get install"),
        ("flex_attn", other("mps"), "not on mps"),
        ("aiter", cuda((9, 0), "amd-aiter"), "runs on rocm, not on cuda"),
        ("aiter", other("rocm"), "'amd-aiter' is not installed; fix: git clone"),
    ],
)
def test_a_machine_that_lacks_something_is_told_what(name: str, hardware: Hardware, reason: str) -> None:
    with pytest.raises(BackendUnavailableError, match=reason):
        select_backend(head_dim=64, dtype="bfloat16", device=hardware, num_heads=4, config=name)


@table(
    ("name", "hardware", "requirements"),
    [
        ("xformers", cuda((9, 0), "xformers", "flash-attn-4", "flash-attn"), {}),
        ("flashinfer_attn", cuda((9, 0), "flashinfer-python", programs=(), flashinfer_jit_cache="0.6.1"), {}),
        ("sage_attn", cuda((9, 0), "triton", sageattention="1.0.6"), {"dtype": "float32", "head_dim": 96}),
        ("sage_attn", cuda((10, 0), "triton", sageattention="1.0.6"), {}),
        ("sage_attn", cuda((9, 0), "triton", "sageattention"), {"head_dim": 72, "needs": ("lse",)}),
        ("cudnn_attn", cuda((9, 0), cudnn=(9, 10)), {"head_dim": 256}),
        ("cudnn_attn", cuda((8, 0), cudnn=(9, 1)), {"head_dim": 128}),
        ("fa4", cuda((10, 3), "flash-attn-4"), {"head_dim": 256}),
        ("fa4", cuda((12, 0), "flash-attn-4"), {"head_dim": 128, "needs": ("lse", "causal"), "num_kv_heads": 2}),
        ("fa4", cuda((12, 1), "flash-attn-4"), {"head_dim": 64}),
        ("sage_attn", cuda((12, 1), "triton", "sageattention"), {"head_dim": 128}),
        ("sage_attn_3", cuda((12, 1), "sageattn3"), {"head_dim": 128}),
        ("video_sparse_attn", other("rocm", "triton"), {}),
        ("video_sparse_attn", other("mps"), {}),
        ("flex_attn", cuda((9, 0), "triton"), {"needs": ("lse", "boolean_mask", "additive_mask")}),
        ("cudnn_attn", cuda((10, 0)), {"needs": ("boolean_mask",), "num_kv_heads": 2}),
    ],
)
def test_what_versions_and_chips_add(name: str, hardware: Hardware, requirements: dict[str, object]) -> None:
    assert not refused(name, hardware, **requirements)


@table(
    ("name", "hardware", "requirements"),
    [
        ("sage_attn", cuda((9, 0), "triton", sageattention="1.0.6"), {"head_dim": 72}),
        ("sage_attn", cuda((9, 0), "triton", sageattention="1.0.6"), {"needs": ("lse",)}),
        ("cudnn_attn", cuda((9, 0), cudnn=(9, 9)), {"head_dim": 256}),
        ("cudnn_attn", cuda((10, 0)), {"head_dim": 256}),
        ("fa4", cuda((10, 0), "flash-attn-4"), {"head_dim": 160}),
        ("fa4", cuda((12, 0), "flash-attn-4"), {"head_dim": 256}),
        # On a GPU nothing runs on the eager reference without a word.
        ("video_sparse_attn", cuda((9, 0), "triton"), {"dtype": "float64"}),
        ("flex_attn", other("cpu", programs=("g++",)), {"needs": ("lse",)}),
        ("flex_attn", other("cpu", programs=("g++",)), {"needs": ("boolean_mask",)}),
        ("fa", cuda((9, 0), *EVERYTHING), {"needs": ("boolean_mask",)}),
        ("flashinfer_attn", cuda((9, 0), *EVERYTHING), {"needs": ("additive_mask",)}),
        ("sage_attn", cuda((9, 0), *EVERYTHING), {"needs": ("boolean_mask",)}),
    ],
)
def test_what_versions_and_chips_take_away(name: str, hardware: Hardware, requirements: dict[str, object]) -> None:
    assert len(refused(name, hardware, **requirements)) == 1


@table("hardware", [HOPPER, cuda((10, 0), *EVERYTHING), other("rocm", *EVERYTHING), other("cpu")])
@table("mask", ["boolean_mask", "additive_mask"])
def test_a_call_with_a_mask_has_a_default_everywhere(hardware: Hardware, mask: str) -> None:
    decision = select_backend(head_dim=128, dtype="bfloat16", device=hardware, num_heads=4, needs=(mask, "key_padding"))
    backend = find_backend(decision.backend)
    assert backend is not None
    assert mask in backend.capability.on_hardware(hardware).features
    assert all(why == f"cannot do {mask}" for _, why in decision.rejected if "cannot do" in why)


@table(
    ("hardware", "block", "bound"),
    [
        (cuda((9, 0), "triton", sageattention="1.0.6"), 64, 0.03),
        (cuda((8, 6), "triton", sageattention="2.0.1"), 64, 0.03),
        # The number is that of builds before what hides the keys past the end, and of builds after it.
        (cuda((8, 6), "triton", sageattention="2.2.0+cu128"), 64, 0.03),
        (cuda((8, 6), "triton", sageattention="2.2.1"), 1, 0.03),
        (cuda((8, 0), "triton", sageattention="2.0.1"), 1, 0.03),
        # Kernels of their own, with values in fp8.
        (cuda((8, 9), "triton", sageattention="2.0.1"), 1, 0.06),
        (cuda((9, 0), "triton", sageattention="2.2.0"), 1, 0.06),
    ],
)
def test_what_sage_computes_right_and_how_well(hardware: Hardware, block: int, bound: float) -> None:
    backend = find_backend("sage_attn")
    assert backend is not None
    assert backend.capability.on_hardware(hardware).key_counts.block == block
    assert backend.error_bound_on(hardware) == bound


@table(
    ("hardware", "dtype", "head_dim", "has_bias", "kernel"),
    [
        (other("cpu"), torch.float32, 64, True, "flash"),
        (other("cpu"), torch.float64, 64, False, "math"),
        (cuda((9, 0)), torch.bfloat16, 64, False, "flash"),
        (cuda((9, 0)), torch.bfloat16, 64, True, "efficient"),
        (cuda((9, 0)), torch.float32, 64, False, "math"),
        (cuda((9, 0)), torch.bfloat16, 260, False, "math"),
        # torch's flash operator needs sm_80; a T4 has the efficient one, in float16.
        (cuda((7, 5)), torch.float16, 64, False, "efficient"),
        (cuda((7, 5)), torch.float16, 64, True, "efficient"),
        (cuda((7, 5)), torch.bfloat16, 64, False, "math"),
        (other("rocm"), torch.bfloat16, 64, False, "flash"),
        (other("mps"), torch.float16, 64, False, "math"),
    ],
)
def test_the_log_sum_exp_comes_from_an_operator_that_the_chip_has(
    hardware: Hardware, dtype: torch.dtype, head_dim: int, has_bias: bool, kernel: str
) -> None:
    assert lse_kernel(hardware, dtype, head_dim, has_bias) == kernel


def test_block_sparse_kernels_know_nvidias_chips_from_amds() -> None:
    """AMD's are numbered alike: gfx90a is 9.0, gfx942 is 9.4. A Hardware of ROCm has no capability."""
    chips = {"sm_75": cuda((7, 5)), "sm_80": cuda((8, 0)), "sm_90": cuda((9, 0)), "rocm": other("rocm")}
    assert [name for name, chip in chips.items() if triton.serves(chip)] == ["sm_80", "sm_90", "rocm"]
    assert [name for name, chip in chips.items() if triton.has_bulk_copies(chip)] == ["sm_90"]
    assert [name for name, chip in chips.items() if flash4.serves(chip)] == ["sm_90"]
