"""Attention that is chosen, never guessed: layers, layouts, choices, selection and the report of what ran."""

from __future__ import annotations

from diffusion_runtime.attention.backends.capability import Capability, HeadSizes, KeyCounts
from diffusion_runtime.attention.backends.interface import AttentionCall, AttentionResult, Availability, Backend
from diffusion_runtime.attention.backends.registry import register_backend, unregister_backend
from diffusion_runtime.attention.catalogue import BackendInfo, list_backends, select_backend
from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.force import force_attention_backend
from diffusion_runtime.attention.functional import attention, plan_attention
from diffusion_runtime.attention.layers import LocalAttention, UlyssesAttention, USPAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.roles import register_role
from diffusion_runtime.attention.select import Decision
from diffusion_runtime.attention.sparse.interface import SparseBackend, SparseOptions, plan_of_call
from diffusion_runtime.attention.sparse.tiles import tiles_of
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.core.token_layout import TokenLayout
from diffusion_runtime.kernels.block_sparse.plan import SparsePlan
from diffusion_runtime.report.attention_report import AttentionRecorder, AttentionReport, LibraryAttention, ReportRow

__all__ = [
    "AttentionCall",
    "AttentionConfig",
    "AttentionContext",
    "AttentionPolicy",
    "AttentionRecorder",
    "AttentionReport",
    "AttentionResult",
    "AttentionSpec",
    "Availability",
    "Backend",
    "BackendInfo",
    "Capability",
    "Decision",
    "HeadSizes",
    "KeyCounts",
    "LayerInfo",
    "LibraryAttention",
    "LocalAttention",
    "ReportRow",
    "RequestCache",
    "SparseBackend",
    "SparseOptions",
    "SparsePlan",
    "StepInfo",
    "TokenLayout",
    "USPAttention",
    "UlyssesAttention",
    "attention",
    "force_attention_backend",
    "list_backends",
    "plan_attention",
    "plan_of_call",
    "register_backend",
    "register_role",
    "select_backend",
    "tiles_of",
    "unregister_backend",
]
