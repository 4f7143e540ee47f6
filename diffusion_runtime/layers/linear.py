"""Linear layers, whole or shared by processes, and the feed-forward network (MLP) of two of them, by oneDNN where that
is faster.

On a CPU torch writes the bias into the whole output before it multiplies, and reads everything again for a GELU. oneDNN
does both while it writes the product: the step of a small transformer gets 5 % shorter.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.kernels.activations.api import gelu_, silu_mul
from diffusion_runtime.kernels.fp8_rows.api import PRODUCT_DTYPE, QuantizedRows
from diffusion_runtime.kernels.implementation import fusion_is_on, has_shape_alone
from diffusion_runtime.layers.weight_share import WeightShare


def _find_onednn() -> Any:
    """torch's oneDNN linear with a fused activation, the one that torch.compile calls; None in builds without it."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


_onednn = _find_onednn()


class QuantizedTokens(NamedTuple):
    """The input of linear layers that multiply in 8 bits, quantised where it was made. rows: of all tokens, one after
    the other; shape: of the tensor that they represent, [..., in_features]."""

    rows: QuantizedRows
    shape: torch.Size

    @property
    def device(self) -> torch.device:
        return self.rows.values.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the products."""
        return PRODUCT_DTYPE


LinearInput: TypeAlias = torch.Tensor | QuantizedTokens


class Linear(nn.Linear):
    """x @ weight.T + bias.

    share: what of the weight this process holds where several share it (tensor parallel), None for all; in_features and
    out_features are those of what it holds. What subclasses compute otherwise is in the `product` methods: this
    process's part, before the processes sum or gather theirs.
    """

    share: WeightShare | None = None

    @property
    def num_shares(self) -> int:
        """Number of processes that share the weight."""
        return 1 if self.share is None else self.share.group.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return self._complete(self.product(x))

    def _complete(self, product: torch.Tensor) -> torch.Tensor:
        return product if self.share is None else self.share.complete(product)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """`forward` of this process's part."""
        if _runs_on_onednn(x):
            out: torch.Tensor = _onednn(x, self.weight, self.bias, "none", [], "")
            return out
        if x.dim() == 3 and self.bias is not None and not x.is_contiguous() and self.runs_in_parts(x):
            # Parts of longer samples: torch would add the bias in a pass of its own, 40 us for two samples of 4096 x
            # 3072 on an H200.
            out = x.new_empty(*x.shape[:2], self.out_features)
            for sample, target in zip(x, out, strict=True):
                torch.addmm(self.bias, sample, self.weight.t(), out=target)
            return out
        return F.linear(x, self.weight, self.bias)

    def forward_gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear layer, then the tanh form of GELU (Hendrycks and Gimpel, arXiv:1606.08415). Not of a layer
        whose product is a sum over processes."""
        if _runs_on_onednn(x):
            out: torch.Tensor = _onednn(x, self.weight, self.bias, "gelu", [], "tanh")
            return out
        if x.numel() > 0 and self.runs_in_parts(x):
            return self.forward_gelu_from(x, 0)
        return F.gelu(self.product(x), approximate="tanh")

    def forward_after_gelu(self, up: Linear, x: LinearInput) -> torch.Tensor:
        """This layer after the GELU of another one: self(gelu(up(x))). x may be quantised where `up` takes that."""
        return self._complete(self.product_after_gelu(up, x))

    def product_after_gelu(self, up: Linear, x: LinearInput) -> torch.Tensor:
        """`forward_after_gelu` of this process's part."""
        hidden = F.gelu(up(x), approximate="tanh") if isinstance(x, QuantizedTokens) else up.forward_gelu(x)
        return self.product(hidden)

    def forward_after_silu(self, gate: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """self(silu(gate) * features); both [..., in_features], and left as they are."""
        return self._complete(self.product_after_silu(gate, features))

    def product_after_silu(self, gate: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`forward_after_silu` of this process's part."""
        return self.product(silu_mul(gate, features, num_shares=self.num_shares))

    def forward_joined(
        self, first: torch.Tensor, second: torch.Tensor, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the layer to first [..., a] and, next to it, the tanh GELU of second [..., b], or silu(second) *
        features; a + b is in_features, and all are left as they are."""
        return self._complete(self.product_joined(first, second, features))

    def product_joined(
        self, first: torch.Tensor, second: torch.Tensor, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`forward_joined` of this process's part."""
        if features is None:
            second = F.gelu(second, approximate="tanh")
        else:
            second = silu_mul(second, features, num_shares=self.num_shares)
        return self.product(torch.cat([first, second], dim=-1))

    def forward_gelu_of_last(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Apply the layer to x, whose features from `start` on go through the tanh GELU first, in place."""
        return self._complete(self.product_gelu_of_last(x, start))

    def product_gelu_of_last(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """`forward_gelu_of_last` of this process's part."""
        gelu_(x[..., start:], num_shares=self.num_shares)
        return self.product(x)

    def forward_gelu_from(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Return the features from `start` on of forward_gelu. Needs `runs_in_parts`, and tokens."""
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if start:
            # Every view costs the host a microsecond.
            weight, bias = weight[start:], None if bias is None else bias[start:]
        if bias is None:
            return gelu_(F.linear(x, weight), num_shares=self.num_shares)
        # cuBLASLt computes the GELU, whose only form there is the tanh one, while it writes the product: apart it reads
        # and writes the widest tensor of a block once more.
        out: torch.Tensor = torch.ops.aten._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
        return out.view(*x.shape[:-1], -1)

    def forward_first(self, x: torch.Tensor, stop: int) -> torch.Tensor:
        """Return the features before `stop`: [..., in_features] to [..., stop]. Needs `runs_in_parts`."""
        return F.linear(x, self.weight[:stop], None if self.bias is None else self.bias[:stop])

    def forward_pair(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Apply the layer to both side by side, without a copy of either: [..., a] and [..., b], where a + b is
        in_features. Needs `runs_in_parts`; the sum of the first part is rounded once more."""
        weights = self.weight[:, : first.shape[-1]], self.weight[:, first.shape[-1] :]
        rows = first.flatten(0, -2)
        out = rows @ weights[0].t() if self.bias is None else torch.addmm(self.bias, rows, weights[0].t())
        product = out.addmm_(second.flatten(0, -2), weights[1].t()).view(*first.shape[:-1], -1)
        return self._complete(product)

    def forward_sum(self, x: torch.Tensor, other: Linear, y: torch.Tensor) -> torch.Tensor:
        """Return self(x) + other(y), whose sums over processes are one. x: [..., in_features], y: [...,
        other.in_features]; other: a layer without bias, of as many outputs."""
        rows, further = x.flatten(0, -2), y.flatten(0, -2)
        product = self.product(rows)
        if self.runs_in_parts(rows) and other.runs_in_parts(further):
            # The second product adds to the first while it is written.
            product.addmm_(further, other.weight.t())
        else:
            product = product.add_(other.product(further))
        return self._complete(product).view(*x.shape[:-1], -1)

    def takes_quantized(self, x: torch.Tensor) -> bool:  # noqa: ARG002 - of 8-bit layers
        """Return True if inputs like x may come as QuantizedTokens."""
        return False

    def runs_in_parts(self, x: torch.Tensor) -> bool:
        """Return True if products of parts of the weight, and cuBLASLt's operators, may replace the whole product: in
        half precision on a CUDA GPU, or where memory is planned for one, with weights of x's dtype. The operators have
        no backward; torch.compile has parts of its own."""
        return (
            not torch.compiler.is_dynamo_compiling()
            and (x.is_cuda or has_shape_alone(x))
            and torch.version.hip is None
            and x.dtype in (torch.bfloat16, torch.float16)
            and x.dtype == self.weight.dtype
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cuda")
            and fusion_is_on()
        )


def _runs_on_onednn(x: torch.Tensor) -> bool:
    # The operator has no backward, and torch.compile makes sizes constants with it.
    return (
        _onednn is not None
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and not torch.compiler.is_dynamo_compiling()
    )


class FeedForward(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU, or with is_exact the one that has the error function. out_dim:
    None is dim."""

    def __init__(
        self, dim: int, hidden_dim: int, out_dim: int | None = None, *, bias: bool = True, is_exact: bool = False
    ) -> None:
        super().__init__()
        self.is_exact = is_exact
        self.up = Linear(dim, hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, dim if out_dim is None else out_dim, bias=bias)

    def forward(self, x: LinearInput) -> torch.Tensor:
        """[..., dim] to [..., out_dim]. x may be quantised where `up` takes that."""
        if self.is_exact:
            out: torch.Tensor = self.down(F.gelu(self.up(x)))
            return out
        return self.down.forward_after_gelu(self.up, x)


class GatedFeedForward(nn.Module):
    """down(silu(a) * b), where a and b are the halves of up(x) (Shazeer, arXiv:2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.up = Linear(dim, 2 * hidden_dim, bias=bias)
        self.down = Linear(hidden_dim, dim, bias=bias)

    def forward(self, x: LinearInput) -> torch.Tensor:
        """[..., dim] to a new tensor like it. x may be quantised where `up` takes that."""
        gate, hidden = self.up(x).chunk(2, dim=-1)
        return self.down.forward_after_silu(gate, hidden)
