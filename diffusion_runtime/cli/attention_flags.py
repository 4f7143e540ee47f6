"""Attention flags of the command line, collected into one AttentionConfig; its parser decides what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusion_runtime.diffusers_bridge.dispatcher_names import dispatcher_name
from diffusion_runtime.errors import ConfigError, shown

if TYPE_CHECKING:
    from diffusion_runtime.attention.config import AttentionConfig


@dataclass(frozen=True)
class PhaseFlags:
    """A backend and its options for one phase of a model with a key-value cache, as they were typed."""

    backend: str | None = None
    backend_config: str | None = None

    def over(self, other: PhaseFlags) -> PhaseFlags:
        """A backend means no options of the other's; options alone are laid over its own."""
        return (
            self if self.backend is not None else PhaseFlags(other.backend, self.backend_config or other.backend_config)
        )

    def rules(self, phase: str, flag: str) -> list[dict[str, Any]]:
        """The schedule rule that they stand for; none where none was typed. Raises ConfigError."""
        if self == PhaseFlags():
            return []
        rule: dict[str, Any] = {"phase": phase, "backend": self.backend or "auto"}
        if self.backend_config is not None:
            rule["extra"] = _options(self.backend_config, f"{flag}-config")
        return [rule]


@dataclass(frozen=True)
class AttentionFlags:
    """Attention flags as they were typed. entries: `per_role.cross.backend=fa` and the like, in order, the last wins.
    prefill, decode: backends of commits and of denoising."""

    backend: str | None = None
    backend_config: str | None = None
    config: str | None = None
    entries: Sequence[str] = ()
    prefill: PhaseFlags = PhaseFlags()
    decode: PhaseFlags = PhaseFlags()

    def collect(self) -> AttentionConfig | str | None:
        """The command line's own level; None when no flag was given. Raises ConfigError.

        A name of diffusers' own, given alone, stays a name: what it means depends on who runs the model.
        """
        if self == AttentionFlags():
            return None
        if self == AttentionFlags(self.backend) and dispatcher_name(self.backend) is not None:
            return self.backend
        from diffusion_runtime.attention.config import AttentionConfig

        config = AttentionConfig.parse(self.config)
        dotted = split_entries(self.entries)
        if self.backend is not None:
            self._refuse_second_default(config, dotted)
            dotted["default.backend"] = self.backend
        if self.backend_config is not None:
            dotted["default.extra"] = _options(self.backend_config, "--attention-backend-config")
        phases = self.prefill.rules("commit", "--prefill-attention-backend")
        phases += self.decode.rules("denoise", "--decode-attention-backend")
        config = overlay_attention(config, dotted)
        # Behind the rules that were written out: those may name steps and layers.
        return config.with_values({"schedule": [*config.schedule, *phases]} if phases else {})

    def _refuse_second_default(self, config: AttentionConfig, dotted: Mapping[str, Any]) -> None:
        in_entries = any(key in dotted for key in ("default", "default.backend", "default.name"))
        in_config = config.default is not None and bool(config.default.candidates)
        if in_entries or in_config:
            other = "--attention-config.default.backend" if in_entries else "the default of --attention-config"
            raise ConfigError(f"--attention-backend and {other} both set the default backend; give one of them")


def _options(text: str, flag: str) -> Mapping[str, Any]:
    from diffusion_runtime.attention.config import parse_text

    options = parse_text(text, flag)
    if not isinstance(options, Mapping):
        raise ConfigError(f"{flag}: expected key=value,..., JSON, or a .json or .yaml file, got {shown(text)}")
    return options


def split_entries(entries: Sequence[str]) -> dict[str, Any]:
    """`["per_role.cross.extra.window=[4,6]"]` as `{"per_role.cross.extra.window": [4, 6]}`. Raises ConfigError."""
    from diffusion_runtime.core.options import parse_scalar

    dotted: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not key:
            raise ConfigError(f"attention: expected PATH=VALUE, got {shown(entry)}")
        # Behind those before it, whichever way they spell the same value: the last wins.
        dotted.pop(key, None)
        dotted[key] = text if key.rpartition(".")[2] in ("backend", "name") else parse_scalar(text)
    return dotted


def overlay_attention(config: Any, dotted: Mapping[str, Any]) -> AttentionConfig:
    """`config`, in any form that AttentionConfig.parse takes, with values at dotted paths set on top."""
    from diffusion_runtime.attention.config import AttentionConfig

    return AttentionConfig.parse(config).with_values(dotted)
