"""A numeric self-test of one backend: everything it declares, on small inputs, against the definition in float64."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from diffusion_runtime.attention.backends.calling import run_backend
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Backend
from diffusion_runtime.attention.backends.registry import find_backend
from diffusion_runtime.attention.catalogue import usual_head_sizes
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.attention.measured_error import ROUNDING_BOUNDS
from diffusion_runtime.attention.roles import role_category
from diffusion_runtime.attention.self_test_cases import BATCH, CASES, NUM_HEADS, SelfTestCase, case_with_keys
from diffusion_runtime.attention.sparse.interface import SparseBackend
from diffusion_runtime.core.hardware import DTYPES, Hardware, detect_hardware
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.block_sparse.reference import block_sparse_reference
from diffusion_runtime.parallel.interface import AttentionInputs
from diffusion_runtime.startup.importing import raised_line

# Past the steps and layers that sparse methods keep dense at first.
_LAYER, _STEP = LayerInfo(1, 8), StepInfo(20, 50)


@dataclass(frozen=True)
class SelfTest:
    """One case of one backend in one dtype and head size; `backend` is its canonical name."""

    backend: str
    case: SelfTestCase
    dtype: str
    head_dim: int

    @property
    def title(self) -> str:
        return f"{self.case.name}, {self.dtype}, head size {self.head_dim}"


@dataclass(frozen=True)
class SelfTestResult:
    """error: |out - exact| / |exact| in the Frobenius norm, or the largest difference of the log-sum-exp where that is
    too large; None when there is no finite result. bound: what error may be. implementation: who computed it, as the
    backend states. problem: why the test failed, empty when it passed."""

    test: SelfTest
    error: float | None
    bound: float
    implementation: str
    problem: str
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.problem

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.test.backend,
            "case": self.test.case.name,
            "dtype": self.test.dtype,
            "head_dim": self.test.head_dim,
            "passed": self.passed,
            "error": self.error,
            "bound": self.bound,
            "implementation": self.implementation,
            "problem": self.problem,
            "seconds": self.seconds,
        }


def planned_tests(name: str, hardware: Hardware) -> tuple[SelfTest, ...]:
    """Return the tests of `name` on `hardware`: every case its capability admits in the platform's usual dtype and the
    first head size, and the plain case in its other dtypes and another head size. Empty when nothing can run."""
    backend = find_backend(name)
    if backend is None:
        return ()
    can = backend.capability.on_hardware(hardware)
    usual = "float32" if hardware.platform == "cpu" else "bfloat16"
    dtypes = [dtype for dtype in (usual, *DTYPES) if dtype in can.dtypes]
    sizes = usual_head_sizes(can.head_sizes)
    wanted = [SelfTest(name, case, dtypes[0], sizes[0]) for case in CASES if dtypes]
    wanted += [SelfTest(name, CASES[0], dtypes[0], size) for size in sizes[1:] if dtypes]
    wanted += [SelfTest(name, CASES[0], dtype, sizes[0]) for dtype in dict.fromkeys(dtypes) if dtype != dtypes[0]]
    return tuple(test for test in wanted if not backend.capability.refusals(_requirements(test, hardware)))


def tests_of_use(
    name: str,
    hardware: Hardware,
    *,
    head_dim: int,
    dtype: str,
    categories: Collection[str],
    needs: Collection[str],
    num_keys: Collection[int],
) -> tuple[SelfTest, ...]:
    """Return the tests of `name` for a model that uses it for roles of `categories`, with the features `needs` at most.

    num_keys: numbers of keys of its self-attention, in addition to those of the cases. Empty when nothing can run.
    """
    backend = find_backend(name)
    if backend is None:
        return ()
    cases = [*CASES, *(case_with_keys(number) for number in num_keys)]
    used = [case for case in cases if role_category(case.role) in categories and case.needs <= set(needs)]
    wanted = [SelfTest(name, case, dtype, head_dim) for case in used]
    return tuple(test for test in wanted if not backend.capability.refusals(_requirements(test, hardware)))


def run_self_test(test: SelfTest, device: str | torch.device) -> SelfTestResult:
    """Run one test on `device`. Whatever the backend raises is the result's problem; nothing is raised."""
    backend = find_backend(test.backend)
    assert backend is not None, "a planned test has a backend"
    inputs, bound = _Inputs.draw(test), _bound(test, backend.error_bound)
    started = time.perf_counter()
    implementation, error = "", None
    try:
        bound = _bound(test, backend.error_bound_on(detect_hardware(str(device))))
        with quiet_log():
            call = inputs.call(backend, torch.device(device))
            result = run_backend(backend, call)
            implementation = result.implementation
            error, problem = _judge(
                inputs,
                _definition(backend, call, inputs),
                call,
                result,
                (bound, max(bound, backend.lse_error_bound or 0.0)),
            )
    except Exception as raised:  # whatever a kernel or its package raises
        problem = raised_line(raised)
    seconds = time.perf_counter() - started
    return SelfTestResult(test, error, bound, implementation, problem, seconds)


def device_answers(device: str | torch.device) -> bool:
    """Return whether the device still works. After an illegal memory access every later call of the process fails."""
    try:
        return bool(torch.ones(2, device=device).sum().item() == 2)
    except Exception:
        return False


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Silence about choices and schedules while attention is only tried out."""
    logger = logging.getLogger("diffusion_runtime.attention")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def attention_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + bias) v in float64. visible: bool [batch, 1 or heads, seq_q, seq_k]; bias: fits it.

    Returns out like q and lse [batch, heads, seq_q]; a query that sees nothing gets 0 and -inf.
    """
    repeats = q.shape[2] // k.shape[2]
    q_bhsd = q.double().transpose(1, 2) * (q.shape[3] ** -0.5 if scale is None else scale)
    k_bhsd, v_bhsd = (x.double().transpose(1, 2).repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q_bhsd @ k_bhsd.transpose(-1, -2) + (0.0 if bias is None else bias.double())
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return (weights @ v_bhsd).transpose(1, 2), lse


@dataclass(frozen=True)
class _Inputs:
    """q, k, v of one test on the CPU, [batch, seq, heads, head_dim]. Padded keys hold numbers that would show.

    mask: boolean [batch, 1, seq_q, seq_k], additive [1, heads, seq_q, seq_k], or None; it hides every key of a query.
    """

    test: SelfTest
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def draw(cls, test: SelfTest) -> _Inputs:
        generator = torch.Generator().manual_seed(0)
        case, dtype = test.case, getattr(torch, test.dtype)
        num_keys = case.layout.num_tokens
        num_queries = case.num_queries
        shapes = [(num_queries, NUM_HEADS), (num_keys, case.num_kv_heads), (num_keys, case.num_kv_heads)]
        q, k, v = (torch.randn(BATCH, *shape, test.head_dim, generator=generator).to(dtype) for shape in shapes)
        padded = ~_visible_keys(case.layout)
        k[padded], v[padded] = 30.0, 30.0
        mask = None
        if case.needs & {"boolean_mask", "block_mask"}:
            mask = torch.rand(BATCH, 1, num_queries, num_keys, generator=generator) < 0.5
            mask[:, :, 3] = False
        elif "additive_mask" in case.needs:
            mask = torch.randn(1, NUM_HEADS, num_queries, num_keys, generator=generator).to(dtype)
            mask = mask.masked_fill(mask > 1, float("-inf"))
            mask[:, 1, 3] = float("-inf")
        return cls(test, q, k, v, mask)

    def call(self, backend: Backend, device: torch.device) -> AttentionCall:
        case = self.test.case
        in_blocks = "block_mask" in case.needs
        q, k, v = (x.to(device, copy=True) for x in (self.q, self.k, self.v))
        return AttentionCall(
            AttentionInputs(
                q,
                k,
                v,
                case.layout,
                gate=torch.zeros_like(q) if "gate" in case.needs else None,
                mask=None if self.mask is None or in_blocks else self.mask.to(device),
            ),
            options=backend.options_type(**backend.self_test_options),
            layer=LayerInfo(_LAYER.index, _LAYER.num_layers, case.role),
            step=_STEP,
            state=RequestCache(),
            scale=case.scale,
            causal="causal" in case.needs,
            return_lse="lse" in case.needs,
            block_mask=None if self.mask is None or not in_blocks else _in_blocks(self.mask.to(device)),
        )


def _in_blocks(mask: torch.Tensor) -> BlockMask:
    """mask: bool [batch, 1, seq_q, seq_k]"""

    def is_seen(batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask[batch, 0, query, key]

    return create_block_mask(is_seen, mask.shape[0], None, mask.shape[2], mask.shape[3], device=mask.device)


def _visible_keys(layout: TokenLayout) -> torch.Tensor:
    """bool [batch, seq_k]."""
    visible = torch.zeros(BATCH, layout.num_tokens, dtype=torch.bool)
    for sample in range(BATCH):
        for start, stop in layout.key_ranges(sample):
            visible[sample, start:stop] = True
    return visible


def _definition(backend: Backend, call: AttentionCall, inputs: _Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result and log-sum-exp, float64 on the CPU: of the pairs of a sparse backend's own plan, else of all
    that is not padding."""
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.test.case.scale
    if isinstance(backend, SparseBackend):
        # A state of its own: the plan of a first call, as the run's was.
        plan = backend.plan(call._replace(state=RequestCache())).to("cpu")
        if plan.pooled_tail:
            return block_sparse_reference(q.double(), k.double(), v.double(), plan, scale=call.softmax_scale)
        visible = plan.to_dense_mask()
    else:
        visible = _visible_keys(inputs.test.case.layout)[:, None, None, :].expand(-1, 1, q.shape[1], -1)
        visible = visible.tril() if call.causal else visible
    bias = None
    if inputs.mask is not None and inputs.mask.dtype == torch.bool:
        visible = visible & inputs.mask
    else:
        bias = inputs.mask
    return attention_by_definition(q, k, v, visible, scale, bias)


def _judge(
    inputs: _Inputs,
    definition: tuple[torch.Tensor, torch.Tensor],
    call: AttentionCall,
    result: AttentionResult,
    bounds: tuple[float, float],
) -> tuple[float | None, str]:
    """(error, problem) of a result. definition: the exact result and log-sum-exp; bounds: of the errors of both."""
    bound, lse_bound = bounds
    q, k, v = inputs.q, inputs.k, inputs.v
    if result.out.shape != q.shape or result.out.dtype != q.dtype:
        found = f"{list(result.out.shape)} {result.out.dtype}"
        return None, f"the result is {found}, expected {list(q.shape)} {q.dtype}"
    if any(not torch.equal(used.cpu(), given) for used, given in ((call.q, q), (call.k, k), (call.v, v))):
        return None, "it changes q, k or v, which belong to the caller"
    exact, exact_lse = definition
    error = float((result.out.cpu().double() - exact).norm() / exact.norm())
    if not math.isfinite(error):
        return None, "the result holds numbers that are not finite"
    if error > bound:
        return error, f"the error {error:.1e} is above the bound {bound:.1e}"
    if not call.return_lse:
        return error, ""
    if result.lse is None or result.lse.shape != exact_lse.shape:
        shape = "missing" if result.lse is None else str(list(result.lse.shape))
        return None, f"the log-sum-exp is {shape}, expected {list(exact_lse.shape)}"
    lse, empty = result.lse.cpu().double(), exact_lse == float("-inf")
    if not torch.equal(lse == float("-inf"), empty):
        return None, "the log-sum-exp is not -inf where, and only where, a query sees no key"
    lse_error = float((lse - exact_lse)[~empty].abs().max())
    if not lse_error <= lse_bound:
        finite = lse_error if math.isfinite(lse_error) else None
        return finite, f"the log-sum-exp is off by {lse_error:.1e}, above the bound {lse_bound:.1e}"
    return error, ""


def _bound(test: SelfTest, by_design: float | None) -> float:
    return max(ROUNDING_BOUNDS[test.dtype], by_design or 0.0)


def _requirements(test: SelfTest, hardware: Hardware) -> AttentionRequirements:
    return AttentionRequirements(
        role=test.case.role,
        category=role_category(test.case.role),
        head_dim=test.head_dim,
        dtype=test.dtype,
        hardware=hardware,
        num_heads=NUM_HEADS,
        num_kv_heads=test.case.num_kv_heads,
        needs=test.case.needs,
    )
