"""Attention calls as tests write them: q, k, v and whatever differs from the plain call."""

from __future__ import annotations

from typing import Any

import torch

from diffusion_runtime.attention.backends.interface import AttentionCall, NoOptions
from diffusion_runtime.attention.context import RequestCache
from diffusion_runtime.core.step_info import LayerInfo, StepInfo
from diffusion_runtime.parallel.interface import AttentionInputs


def attention_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: object = NoOptions(), **fields: Any
) -> AttentionCall:
    """fields: of AttentionCall or of its inputs. A state of its own for every call."""
    call = AttentionCall(AttentionInputs(q, k, v), options, LayerInfo(), StepInfo(), RequestCache())
    return with_fields(call, **fields)


def with_fields(call: AttentionCall, **fields: Any) -> AttentionCall:
    """The call with other fields, its own or its inputs'."""
    inputs = {name: value for name, value in fields.items() if name in AttentionInputs._fields}
    own = {name: value for name, value in fields.items() if name not in AttentionInputs._fields}
    return call._replace(inputs=call.inputs._replace(**inputs), **own)
