"""The attention of text encoders: `per_role.text_encoder.backend` as transformers' own `attn_implementation`.

A text encoder is a model of transformers, which has implementations of its own; a backend's name selects the one that
calls the same kernels. Without a named backend nothing is chosen, and transformers takes sdpa.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.attention.backends.refusals import refusals
from diffusion_runtime.attention.backends.requirements import dtype_name
from diffusion_runtime.attention.config import StatedChoice
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.roles import TEXT_ENCODER
from diffusion_runtime.errors import BackendUnavailableError, ModelLoadError
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.offloaded import encoders_of

# Backend here -> transformers' name for it, and the attribute by which a class declares that it has it.
_IMPLEMENTATIONS = {
    "torch_sdpa": ("sdpa", "_supports_sdpa"),
    "reference": ("eager", None),
    "fa2": ("flash_attention_2", "_supports_flash_attn"),
    "fa3": ("flash_attention_3", "_supports_flash_attn"),
    "flex_attn": ("flex_attention", "_supports_flex_attn"),
}
# What transformers takes by default, where a class has it; every class of text encoders that is read here does.
DEFAULT = "sdpa"


@dataclass(frozen=True)
class EncoderAttention:
    """Attention of text encoders. implementation: transformers' name; reason: the choice that names it."""

    implementation: str
    reason: str


def choose_encoder_attention(policy: AttentionPolicy, classes: Mapping[str, str | None]) -> EncoderAttention | None:
    """Choose the attention of text encoders; None where no choice names one.

    classes: of each text encoder of the model, its class of transformers; None for a module of ours, which computes
    torch's scaled_dot_product_attention and nothing else. Of several backends the first that every encoder has and the
    machine can run is taken. Raises BackendUnavailableError with the reasons where there is none.
    """
    stated = _stated(policy)
    if stated is None:
        return None
    source, choice = stated
    refused: list[tuple[str, str]] = []
    for name in choice.spec.candidates:
        reasons = _refusals(name, policy, classes)
        if not reasons:
            return EncoderAttention(_IMPLEMENTATIONS[name][0], f"{source}: {choice.key} says {choice.spec.name}")
        refused += [(name, reason) for reason in reasons]
    usable = [name for name in _IMPLEMENTATIONS if not _refusals(name, policy, classes)]
    lines = [f"  {name}: {reason}" for name, reason in refused]
    raise BackendUnavailableError(
        "\n".join(
            [
                f"no attention of the choice can run in the text encoders ({source}, {choice.key}):",
                *lines,
                f"  usable here for them: {', '.join(usable)}. Choose one of them, or none for the encoders' default.",
            ]
        ),
        refused,
    )


def _stated(policy: AttentionPolicy) -> tuple[str, StatedChoice] | None:
    """Return the highest level that names a backend for text encoders, ignoring choices for every role."""
    found = [
        ("force", StatedChoice(choice.spec, True, "force_attention_backend"))
        for choice in reversed(policy.forced)
        if choice.role == TEXT_ENCODER
    ]
    found += [
        (source, StatedChoice(level.per_role[TEXT_ENCODER], True, f"per_role.{TEXT_ENCODER}"))
        for source, level in (("cli", policy.cli), ("config", policy.config))
        if TEXT_ENCODER in level.per_role
    ]
    return next((each for each in found if each[1].spec.candidates), None)


def _refusals(name: str, policy: AttentionPolicy, classes: Mapping[str, str | None]) -> list[str]:
    if name not in _IMPLEMENTATIONS:
        known = ", ".join(f"{ours} ({theirs})" for ours, (theirs, _) in _IMPLEMENTATIONS.items())
        return [f"transformers has no attention of that kind; it has {known}"]
    implementation, attribute = _IMPLEMENTATIONS[name]
    lacking = []
    for component, class_name in classes.items():
        if class_name is None and name != "torch_sdpa":
            lacking.append(f"{component} is a module of this runtime, which computes torch_sdpa alone")
        elif class_name is not None and attribute is not None and not _has(class_name, attribute):
            lacking.append(f"{component}: transformers' {class_name} has no {implementation}")
    if lacking:
        return lacking
    # A common head size: transformers does not specify which it takes.
    requirements = AttentionRequirements(
        TEXT_ENCODER, "self", 64, dtype_name(policy.dtype), policy.hardware, num_heads=1, num_kv_heads=1
    )
    return refusals(name, requirements)


def _has(class_name: str, attribute: str) -> bool:
    """Return whether a class of transformers declares an implementation. Imports it, which takes seconds."""
    import transformers

    found = getattr(transformers, class_name, None)
    # A class that is found elsewhere is checked when it is loaded.
    return found is None or bool(getattr(found, attribute, False))


def use_attention(encoder: TextEncoder, chosen: EncoderAttention) -> TextEncoder:
    """Set the chosen attention in each transformers model of the encoder, and return the encoder."""
    for part in encoders_of(encoder):
        models = [value for value in vars(part).values() if hasattr(value, "set_attn_implementation")]
        set_implementation(models, chosen.implementation)
        if models and hasattr(part, "implementation"):
            # The part after a semicolon is diffusers'.
            _, mark, rest = part.implementation.partition(";")
            part.implementation = chosen.implementation + mark + rest
    encoder.chosen = chosen.reason
    if encoder.library == "transformers":
        _, mark, rest = encoder.implementation.partition(";")
        encoder.implementation = chosen.implementation + mark + rest
    return encoder


def set_implementation(models: Sequence[Any], implementation: str) -> None:
    """Set the implementation. Raises ModelLoadError where transformers sets another one than requested."""
    for model in models:
        model.set_attn_implementation(implementation)
        if model.config._attn_implementation != implementation:
            raise ModelLoadError(
                f"text encoder: {type(model).__name__} runs {model.config._attn_implementation} where {implementation} "
                "was chosen; this version of transformers cannot set it: leave out per_role.text_encoder"
            )
