"""The fused kernels of transformer layers against their definitions in float64, under Triton's interpreter or on a GPU:
their error is bounded by the eager reference's own. Prints what went wrong.

TRITON_INTERPRET=1 python tests/kernels/fused_layer_cases.py
python tests/kernels/fused_layer_cases.py bfloat16
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from diffusion_runtime.core.block_geometry import BlockGeometry
from diffusion_runtime.core.packed_tokens import TAIL_ROWS
from diffusion_runtime.kernels.activations.api import gelu_, sigmoid_mul, silu_mul
from diffusion_runtime.kernels.block_packing import Averaged, TokenBlocks, row_width
from diffusion_runtime.kernels.fp8_rows import reference as fp8_reference
from diffusion_runtime.kernels.fp8_rows import triton as fp8_triton
from diffusion_runtime.kernels.modulated_norm.api import (
    Branch,
    Norm,
    add_branch_,
    modulated_norm,
    modulated_norm_fp8,
)
from diffusion_runtime.kernels.qk_norm_rope import block_order_triton
from diffusion_runtime.kernels.qk_norm_rope.api import norm_rope
from diffusion_runtime.kernels.qk_norm_rope.block_order import norm_rope_into_blocks

EPS = 1e-6
Tensors = dict[str, torch.Tensor]
# implementation -> what it computed; `exact` is the definition in float64.
Compute = Callable[[str], Tensors]
Case = tuple[str, Compute]


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def exact_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    for vector, combine in ((norm.weight, torch.mul), (norm.bias, torch.add)):
        x = x if vector is None else combine(x, vector.double())
    return x


def exact_sum(x: torch.Tensor, branch: Branch | None) -> torch.Tensor:
    """x + branch, rounded to x's dtype: what the norm after it reads."""
    if branch is None:
        return x.double()
    added = branch.values.double()
    if branch.norm is not None:
        added = exact_norm(added, branch.norm)
    if branch.gate is not None:
        added = added * branch.gate.double()[:, None]
    return x.double() + added


def norm_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """(batch, tokens, dim): several rows per program, rows of odd sizes, one row."""
    for batch, num_tokens, dim in ((1, 5, 7), (3, 9, 136), (2, 3, 1544), (2, 1, 64)):
        wide = torch.randn(2, batch, num_tokens + 4, dim, device=device).mul_(3).add_(0.5).to(dtype)
        x, values = wide[0][:, 2 : 2 + num_tokens], wide[1][:, 3 : 3 + num_tokens]
        rows = torch.randn(batch, 4 * dim, device=device)
        vectors = torch.randn(2, dim, device=device)
        for index, rows_dtype in enumerate((torch.float32, dtype)):
            gate, shift, scale, _ = rows.to(rows_dtype).chunk(4, dim=-1)
            weight = vectors[0].to(rows_dtype)
            rms = Norm("rms", EPS, weight.to(dtype))
            plain, layer = Norm("layer", EPS), Norm("layer", EPS, vectors[0], vectors[1])
            for name, norm, modulation, branch in (
                ("layer norm", plain, (shift, scale), None),
                ("layer norm, gated branch", plain, (shift, scale), Branch(values, gate)),
                ("layer norm with weights, gated branch", layer, (None, None), Branch(values, gate)),
                ("layer norm with weights, modulated", layer, (shift, scale), None),
                ("layer norm, scale alone", plain, (None, scale), Branch(values)),
                ("rms norm", Norm("rms", EPS), (shift, scale), Branch(values, gate)),
                ("rms norm with weights, branch normalised", rms, (None, scale), Branch(values, gate, rms)),
                ("rms norm with weights", rms, (None, None), Branch(values, None, rms)),
            ):
                if index == 0 or "weights" in name:
                    yield f"{name}, {tuple(x.shape)}", _norm_case(x, norm, modulation, branch)
            yield f"sum, {tuple(x.shape)}", _norm_case(x, None, (None, None), Branch(values, gate))
        yield f"fp8, {tuple(x.shape)}", _fp8_case(x, Norm("layer", EPS), rows.chunk(4, -1), values)


def _copied(branch: Branch | None) -> Branch | None:
    return None if branch is None else branch._replace(values=branch.values.clone())


def _norm_case(
    x: torch.Tensor,
    norm: Norm | None,
    modulation: tuple[torch.Tensor | None, torch.Tensor | None],
    branch: Branch | None,
) -> Compute:
    shift, scale = modulation

    def compute(implementation: str) -> Tensors:
        if implementation == "exact":
            total = exact_sum(x, branch)
            if norm is None:
                return {"x": total}
            out = exact_norm(total if branch is None else total.to(x.dtype).double(), norm)
            out = out if scale is None else out * (1 + scale.double()[:, None])
            return {"x": total, "out": out if shift is None else out + shift.double()[:, None]}
        # Between other rows, which must stay as they are, and so must the branch's.
        wide = torch.full_like(x, 7.0).repeat(1, 3, 1)
        mine = wide[:, x.shape[1] : 2 * x.shape[1]].copy_(x)
        if norm is None:
            assert branch is not None
            add_branch_(mine, _copied(branch), implementation=implementation)  # type: ignore[arg-type]
            result = {}
        else:
            target = torch.full_like(wide, 7.0)
            out = modulated_norm(
                mine,
                norm,
                shift=shift,
                scale=scale,
                branch=_copied(branch),
                out=target[:, : x.shape[1]] if shift is None else None,
                implementation=implementation,
            )
            result = {"out": out, "rows beside out": target[:, x.shape[1] :] - 7.0}
        mine = mine.clone()
        wide[:, x.shape[1] : 2 * x.shape[1]] = 7.0
        return {"x": mine, **result, "rows beside x": wide - 7.0}

    return compute


def _fp8_case(x: torch.Tensor, norm: Norm, rows: tuple[torch.Tensor, ...], values: torch.Tensor) -> Compute:
    gate, shift, scale, _ = rows

    def compute(implementation: str) -> Tensors:
        if implementation == "exact":
            total = exact_sum(x, Branch(values, gate)).to(x.dtype).double()
            out = exact_norm(total, norm) * (1 + scale.double()[:, None]) + shift.double()[:, None]
            out = out.flatten(0, 1)
            return {
                "out": out,
                "scales": out.abs().amax(-1, keepdim=True) / 448,
                "largest": torch.full((len(out),), 448),
            }
        sums = [x.clone(), x.clone()]
        found = modulated_norm_fp8(
            sums[0],
            norm,
            shift=shift,
            scale=scale,
            branch=Branch(values.clone(), gate),
            implementation=implementation,
        )
        assert found.values.dtype == torch.float8_e4m3fn
        # To the bit what two passes give, of either implementation.
        passed = modulated_norm(
            sums[1],
            norm,
            shift=shift,
            scale=scale,
            branch=Branch(values.clone(), gate),
            implementation=implementation,
        ).flatten(0, 1)
        quantize = (fp8_triton if implementation == "triton" else fp8_reference).quantize_rows
        apart = quantize(passed, gelu_from=None)
        pairs = zip((*found, sums[0]), (*apart, sums[1]), strict=True)
        unequal = [(a.float() != b.float()).sum() for a, b in pairs]
        wide = found.values.float()
        results = {"scales": found.scales, "largest": wide.abs().amax(-1), "unlike two passes": torch.stack(unequal)}
        # The interpreter's float8 loses the carry: 125 becomes 64.
        return results if is_interpreted() else {**results, "out": wide * found.scales}

    return compute


def rope_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for batch, num_tokens, num_heads, head_dim in ((2, 5, 3, 8), (1, 7, 4, 64), (3, 2, 5, 12), (1, 1, 1, 16)):
        shape = (batch, num_tokens, num_heads, head_dim // 2)
        angles = 3 * torch.randn(shape, device=device)
        table = torch.polar(torch.ones_like(angles), angles)
        product = 3 * torch.randn(batch, num_tokens, 3 * num_heads * head_dim + 16, device=device).to(dtype)
        for size in (head_dim, num_heads * head_dim):
            weights = tuple(torch.randn(2, size, device=device).to(dtype).unbind(0))
            for name, rotations in (
                ("for all", table[0, :, 0]),
                ("by sample", table[:, :, 0]),
                ("by head", table[:1]),
                ("by sample and head", table),
                ("none", None),
            ):
                # In place, q, k and v to another place, k and v there.
                for parts, used, outside in ((3, weights, False), (3, weights, True), (2, weights[1:], True)):
                    if outside and name.startswith("by sample"):
                        continue
                    # The interpreter takes a millisecond per token.
                    if is_interpreted() and num_tokens == 5:
                        continue
                    packed = product[..., 16 : 16 + parts * num_heads * head_dim]
                    packed = packed.unflatten(-1, (parts, num_heads, head_dim))
                    text = f"norm and rope, {tuple(packed.shape)}, weights {size}, rotations {name}, outside {outside}"
                    yield text, _rope_case(product, packed, used, rotations, outside)
                    if size != head_dim and num_tokens != 5:
                        # Heads of other processes, whose squares count.
                        means = 4.0 * torch.rand(batch, num_tokens, len(used), device=device) + 4.0
                        yield f"{text}, of more heads", _rope_case(product, packed, used, rotations, outside, means)


def _rope_case(
    product: torch.Tensor,
    packed: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    rotations: torch.Tensor | None,
    outside: bool,
    means: torch.Tensor | None = None,
) -> Compute:
    def compute(implementation: str) -> Tensors:
        if implementation == "exact":
            results = {}
            for index, x in enumerate(packed.double().unbind(2)):
                if index < len(weights):
                    whole = len(weights[index]) != x.shape[3]
                    norm = Norm("rms", EPS, weights[index])
                    if means is not None:
                        scale = (means[:, :, index].double() + EPS).rsqrt()[..., None, None]
                        x = x * scale * weights[index].double().view(x.shape[2:])
                    else:
                        x = exact_norm(x.flatten(2) if whole else x, norm).view(x.shape)
                    if rotations is not None:
                        turns = rotations if rotations.dim() == 4 else rotations.unsqueeze(-2)
                        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
                        x = torch.view_as_real(pairs * turns.to(torch.complex128)).flatten(-2)
                results[str(index)] = x
            return results
        copy = product.clone()
        mine = copy.as_strided(packed.shape, packed.stride(), packed.storage_offset())
        whole = torch.full_like(packed, 7.0).repeat(1, 3, 1, 1, 1) if outside else None
        place = slice(packed.shape[1], 2 * packed.shape[1])
        out = None if whole is None else whole[:, place]
        found = norm_rope(mine, weights, EPS, rotations, mean_squares=means, out=out, implementation=implementation)
        results = {str(index): part.clone() for index, part in enumerate(found)}
        if whole is not None:
            whole[:, place] = 7.0
            results["beside"] = whole - 7.0
        return results

    return compute


def block_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Ragged blocks, an empty one, text of unequal lengths behind them; heads that fill a power of two and not."""
    for batch, sizes, num_text, (num_heads, head_dim), averaged in (
        (2, (7, 0, 12, 3), 19, (3, 12), "qkv"),
        (1, (9, 4), 0, (2, 16), "qk"),
        (1, (5,), 3, (1, 64), "none"),
    ):
        num_grid = sum(sizes)
        num_tokens = num_grid + num_text
        lengths = torch.tensor([num_text - 2, num_text], dtype=torch.int32, device=device) if batch > 1 else None
        offsets = torch.tensor([0, *sizes], device=device).cumsum(0).to(torch.int32)
        order = torch.arange(num_tokens, dtype=torch.int32, device=device)
        geometry = BlockGeometry(order[None], offsets[None], max(sizes), is_identity=True)
        blocks = TokenBlocks(geometry, num_grid, lengths, averaged)  # type: ignore[arg-type]
        product = 3 * torch.randn(batch, num_tokens, 3 * num_heads * head_dim + 16, device=device).to(dtype)
        angles = 3 * torch.randn(batch, num_tokens, num_heads, head_dim // 2, device=device)
        table = torch.polar(torch.ones_like(angles), angles)
        # Over all heads of a token, as in Wan, and per head.
        for size, rotations in ((num_heads * head_dim, table[0, :, 0]), (head_dim, table)):
            weights = torch.randn(2, size, device=device).to(dtype)
            text = f"norm and rope into blocks, {batch} x {sizes} + {num_text}, weights {size}, {averaged}"
            yield text, _block_case(product, tuple(weights), rotations, blocks, (num_heads, head_dim))


def _block_case(
    product: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    rotations: torch.Tensor,
    blocks: TokenBlocks,
    heads: tuple[int, int],
) -> Compute:
    def packed(x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, heads, head_dim] as rows of 0 beside its own."""
        batch, num_tokens, num_heads, head_dim = x.shape
        x = x.transpose(1, 2).clone()
        if blocks.text_lengths is not None:
            for sample, length in enumerate(blocks.text_lengths.tolist()):
                x[sample, :, blocks.num_grid_tokens + length :] = 0
        wide = x.new_zeros(batch * num_heads * num_tokens + TAIL_ROWS, row_width(head_dim))
        wide[:-TAIL_ROWS, :head_dim] = x.reshape(-1, head_dim)
        return wide

    def compute(implementation: str) -> Tensors:
        mine = product.clone()[..., 16:].unflatten(-1, (3, *heads))
        averaged: dict[Averaged, str] = {"none": "", "qk": "qk", "qkv": "qkv"}
        if implementation == "exact":
            parts = _rope_case(product, mine, weights, rotations, outside=False)("exact")
            results = dict(zip("qkv", (packed(part) for part in parts.values()), strict=True))
            bounds = blocks.geometry.offsets[0].tolist()
            for name, part in zip(averaged[blocks.averaged], parts.values(), strict=False):
                means = [
                    part[:, start:stop].sum(1) / max(1, stop - start) for start, stop in itertools.pairwise(bounds)
                ]
                results[f"means of {name}"] = torch.stack(means, dim=2)
            return results
        # So few that a block takes several steps, and the text several programs.
        with mock.patch.object(block_order_triton, "STEP_NUMBERS", 128):
            found = norm_rope_into_blocks(mine, weights, EPS, rotations, blocks, implementation=implementation)
        results = {"q": found.q, "k": found.k, "v": found.v}
        means = dict(zip("qkv", (found.q_means, found.k_means, found.v_means), strict=True))
        assert [name for name, each in means.items() if each is not None] == list(averaged[blocks.averaged])
        return {**results, **{f"means of {name}": each for name, each in means.items() if each is not None}}

    return compute


def activation_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for shape in ((2, 3, 24), (1, 5, 2056)):
        product = 4 * torch.randn(*shape[:-1], 3 * shape[-1], device=device).to(dtype)
        for in_place in (False, True):

            def gated(implementation: str, product: torch.Tensor = product, in_place: bool = in_place) -> Tensors:
                if implementation == "exact":
                    gate, features, rest = product.double().chunk(3, dim=-1)
                    return {"out": gate * gate.sigmoid() * features, "beside": rest}
                copy = product.clone()
                gate, features, rest = copy.chunk(3, dim=-1)
                out = silu_mul(gate, features, in_place=in_place, implementation=implementation)
                assert (out.data_ptr() == gate.data_ptr()) == in_place
                return {"out": out, "beside": rest}

            yield f"silu, {shape}, in place {in_place}", gated

        def gated_by_sigmoid(implementation: str, product: torch.Tensor = product) -> Tensors:
            if implementation == "exact":
                gate, features, rest = product.double().chunk(3, dim=-1)
                return {"out": gate.sigmoid() * features, "beside": rest}
            gate, features, rest = product.clone().chunk(3, dim=-1)
            return {"out": sigmoid_mul(gate, features, implementation=implementation), "beside": rest}

        yield f"sigmoid, {shape}", gated_by_sigmoid

        def gelu(implementation: str, product: torch.Tensor = product) -> Tensors:
            if implementation == "exact":
                x = product.double().chunk(3, dim=-1)
                inner = (2 / torch.pi) ** 0.5 * (x[1] + 0.044715 * x[1] ** 3)
                return {"x": 0.5 * x[1] * (1 + inner.tanh()), "beside": x[2]}
            x = product.clone().chunk(3, dim=-1)
            gelu_(x[1], implementation=implementation)
            return {"x": x[1], "beside": x[2]}

        yield f"gelu, {shape}", gelu


def failures(dtype: torch.dtype, device: str) -> Iterator[str]:
    """A line for every result whose error is larger than 1.05 times the reference's and a tenth of a rounding of its
    largest number: a sum may lie between two numbers of the dtype, and go either way. Of means, a few numbers in all,
    half a rounding: the one that goes the other way may be the largest."""
    torch.manual_seed(0)
    allowance = max(1e-6, torch.finfo(dtype).eps / 10)
    for cases in (norm_cases, rope_cases, block_cases, activation_cases):
        for name, compute in cases(dtype, device):
            exact, expected, found = (compute(each) for each in ("exact", "reference", "triton"))
            for key, value in found.items():
                wanted = exact[key].to(device) if key in exact else torch.zeros_like(value).double()
                own, error = ((each[key].double() - wanted).abs().max().item() for each in (expected, found))
                margin = 5 * allowance if key.startswith("means") else allowance
                bound = 1.05 * own + margin * wanted.abs().max().item()
                if not error <= bound:
                    yield f"{name}, {dtype}: {key}: error {error:.3g}, bound {bound:.3g}"


if __name__ == "__main__":
    # bfloat16 is left to a GPU: the interpreter's is cut, not rounded. fused_family_cases.py has float32.
    for each in sys.argv[1:] or ("float16",):
        for line in failures(getattr(torch, each), "cpu" if is_interpreted() else "cuda"):
            print(line)
