"""Flags with a path in their name."""

from __future__ import annotations

import pytest

from diffusion_runtime.cli.flag_syntax import rewrite_dotted_flags
from diffusion_runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "rewritten"),
    [
        (["--request.height", "128"], ["--set", "request.height=128"]),
        (["--request.height=128"], ["--set", "request.height=128"]),
        (["--runtime.dtype", "float32", "a prompt"], ["--set", "runtime.dtype=float32", "a prompt"]),
        (
            ["--attention-config.per_role.ltx2.audio_to_video.backend", "fa"],
            ["--dotted-attention", "per_role.ltx2.audio_to_video.backend=fa"],
        ),
        (
            ["--diffusion-attention-config.per_role.self.extra.scale=-1.5"],
            ["--dotted-attention", "per_role.self.extra.scale=-1.5"],
        ),
        (["--attention-config.default.extra.k", "-1"], ["--dotted-attention", "default.extra.k=-1"]),
        (["--attention-config.default.extra.k", "a=b"], ["--dotted-attention", "default.extra.k=a=b"]),
        (["--attention_config.default.backend", "fa"], ["--dotted-attention", "default.backend=fa"]),
        (["--prompt", "v1.5", "--height=1"], ["--prompt", "v1.5", "--height=1"]),
        (["--", "--request.height", "1"], ["--", "--request.height", "1"]),
        (["--no. This is a prompt"], ["--no. This is a prompt"]),
    ],
)
def test_dotted_flags_are_rewritten(typed: list[str], rewritten: list[str]) -> None:
    assert rewrite_dotted_flags(typed) == rewritten


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--reqest.height", "1"], "no such option: --reqest.height. Did you mean request"),
        (["--request.height"], "--request.height needs a value"),
        (["--request.", "1"], "missing after the dot"),
    ],
)
def test_a_dotted_flag_that_cannot_be_is_an_error(typed: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rewrite_dotted_flags(typed)
