"""Attention of this package in a model of ComfyUI's own, by `optimized_attention_override`; each call is counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from comfy_api.latest import io

from .nodes import CATEGORY, AttentionType

AttachedType = io.Custom("DIFFUSION_RUNTIME_ATTACHED")
_KEY = "optimized_attention_override"


class Override:
    """What ComfyUI calls in place of its attention function. attention: as of AttentionChoice. calls: by role and what
    computed them; of several names, the first one that takes a call."""

    def __init__(self, attention: Mapping[str, Any]) -> None:
        from diffusion_runtime.attention.backends.registry import find_backend
        from diffusion_runtime.attention.config import AttentionConfig, AttentionSpec

        if attention.get("schedule"):
            raise ValueError("attention: ComfyUI does not say which layer calls; leave the schedule out")
        # Names and options are checked here, before a sampler runs.
        AttentionConfig.parse(dict(attention))
        given = {"": attention.get("default"), **attention.get("per_role", {})}
        self._specs = {role: AttentionSpec.parse(spec) for role, spec in given.items() if spec is not None}
        self.calls: Counter[tuple[str, str]] = Counter()
        self._taken: dict[Hashable, str] = {}
        for spec in self._specs.values():
            for name in spec.candidates:
                backend = find_backend(name)
                if backend is not None and backend.capability.needs_grid:
                    raise ValueError(
                        f"attention: {name} needs the grid of the tokens, which ComfyUI does not tell; choose a dense "
                        "backend, such as torch_sdpa"
                    )

    def __call__(
        self,
        function: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """Compute one call. q: [batch, seq, heads * head_dim], or with skip_reshape [batch, heads, seq, head_dim];
        k and v likewise. Returns q's first form, or with skip_output_reshape its second one.

        Raises BackendUnavailableError and ConfigError.
        """
        q_rows, k_rows, v_rows = (_rows(each, heads, q, is_split=skip_reshape) for each in (q, k, v))
        role = "self" if q_rows.shape[1] == k_rows.shape[1] else "cross"
        spec = self._specs.get(role, self._specs.get(""))
        if spec is None or more.get("low_precision_attention") is False:
            self.calls[role, "ComfyUI's own"] += 1
            shaped = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return function(q, k, v, heads, mask=mask, attn_precision=attn_precision, **shaped, **more)
        name, out = self._computed(role, spec, q_rows, k_rows, v_rows, _mask(mask, q_rows), more.get("scale"))
        self.calls[role, name] += 1
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _computed(
        self,
        role: str,
        spec: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
    ) -> tuple[str, torch.Tensor]:
        """Return the name of the backend that took a call, and its output. Raises as `attention` does."""
        from diffusion_runtime.attention import attention
        from diffusion_runtime.attention.config import AttentionSpec
        from diffusion_runtime.errors import BackendUnavailableError

        kind = role, q.shape, k.shape, v.shape, q.dtype, mask is None
        for name in (self._taken[kind],) if kind in self._taken else spec.candidates:
            with contextlib.suppress(BackendUnavailableError):
                own = AttentionSpec(name, spec.options_for(name))
                out = attention(q, k, v, backend=own, mask=mask, scale=scale)
                self._taken[kind] = name
                return name, out
        # `auto`, or names of which none takes the call: this raises, with the reasons of all.
        return spec.name, attention(q, k, v, backend=spec, mask=mask, scale=scale)

    def report(self) -> str:
        """Return the calls so far, one line for each role and backend."""
        lines = [f"{role}: {backend}, {count} calls" for (role, backend), count in sorted(self.calls.items())]
        return "\n".join(lines) or "no attention call came: the model does not ask for an override, or has not run"


def _rows(values: torch.Tensor, heads: int, q: torch.Tensor, *, is_split: bool) -> torch.Tensor:
    """Return [batch, seq, heads, head_dim]; keys and values may have fewer heads than q."""
    if is_split:
        return values.transpose(1, 2)
    return values.unflatten(-1, (-1, q.shape[-1] // heads))


def _mask(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Return [batch or 1, heads or 1, seq_q or 1, seq_k]. mask: that, or without heads, or without batch and heads."""
    if mask is None:
        return None
    if mask.ndim == 2:
        mask = mask[None]
    mask = mask[:, None] if mask.ndim == 3 else mask
    return mask if mask.dtype == torch.bool else mask.to(q.dtype)


class AttachAttention(io.ComfyNode):
    """A model whose attention calls go to a backend of this package."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffusionRuntimeAttach",
            display_name="Attach attention (diffusion-runtime)",
            category=CATEGORY,
            description="Runs in this process; the package diffusion-runtime must be installed here.",
            inputs=[io.Model.Input("model"), AttentionType.Input("attention")],
            outputs=[io.Model.Output(display_name="model"), AttachedType.Output(display_name="attached")],
        )

    @classmethod
    def execute(cls, model: Any, attention: Mapping[str, Any]) -> io.NodeOutput:
        if not attention:
            raise ValueError("attention: expected a backend, got no choice at all")
        attached, override = model.clone(), Override(attention)
        # A copy: clones of ComfyUI share what is inside.
        options = dict(attached.model_options.get("transformer_options", {}))
        if options.get(_KEY) is not None:
            raise ValueError("model: another node has replaced its attention already; take the model before that node")
        attached.model_options = {**attached.model_options, "transformer_options": {**options, _KEY: override}}
        return io.NodeOutput(attached, override)


class AttentionReport(io.ComfyNode):
    """The calls that an attached model made, behind its sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DiffusionRuntimeReport",
            display_name="Attention report (diffusion-runtime)",
            category=CATEGORY,
            inputs=[
                AttachedType.Input("attached"),
                io.Latent.Input("latent", tooltip="Of the sampler, which runs first."),
            ],
            outputs=[io.Latent.Output(display_name="latent"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, attached: Override, latent: Any) -> io.NodeOutput:
        report = attached.report()
        # ComfyUI keeps the attached model from one run of a workflow to the next.
        attached.calls.clear()
        return io.NodeOutput(latent, report)
