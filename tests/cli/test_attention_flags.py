"""Every way to write an attention choice on the command line leads to the same value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffusion_runtime.attention.config import AttentionConfig
from diffusion_runtime.cli.attention_flags import AttentionFlags
from diffusion_runtime.errors import ConfigError

CHOICE = {"default": {"backend": "torch_sdpa"}, "per_role": {"cross": {"backend": "reference"}}}


def test_no_flag_says_nothing() -> None:
    assert AttentionFlags().collect() is None


@pytest.mark.parametrize(
    "flags",
    [
        AttentionFlags(config=json.dumps(CHOICE)),
        AttentionFlags(config='{"default": "TORCH_SDPA", "per_role": {"cross": "reference"}}'),
        AttentionFlags("torch_sdpa", entries=("per_role.cross.backend=reference",)),
        AttentionFlags("Torch-SDPA", entries=("per_role.cross=reference",)),
        AttentionFlags("torch_sdpa", config='{"per_role": {"cross": "reference"}}'),
        AttentionFlags(entries=("default.backend=torch_sdpa", "per_role.cross.backend=reference")),
        AttentionFlags(config=json.dumps(CHOICE | {"default": "reference"}), entries=("default.backend=torch_sdpa",)),
        AttentionFlags("torch_sdpa", entries=("per_role.cross.backend=torch_sdpa", "per_role.cross.backend=reference")),
    ],
)
def test_every_form_says_the_same(flags: AttentionFlags) -> None:
    assert flags.collect() == AttentionConfig.parse(CHOICE)


@pytest.mark.parametrize("name", ["choice.json", "choice.yaml"])
def test_a_file_says_the_same(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps(CHOICE))
    assert AttentionFlags(config=str(tmp_path / name)).collect() == AttentionConfig.parse(CHOICE)


def test_a_preference_keeps_its_order() -> None:
    config = AttentionFlags("fa,torch_sdpa").collect()
    assert config is not None
    assert config.default is not None
    assert config.default.candidates == ("fa", "torch_sdpa")


@pytest.mark.parametrize("text", ["a=1e-3,b=[4,6,4],c=true", '{"a": 0.001, "b": [4, 6, 4], "c": true}', "FILE"])
def test_options_without_a_backend_configure_what_a_lower_level_chose(tmp_path: Path, text: str) -> None:
    if text == "FILE":
        (tmp_path / "options.yaml").write_text("a: 0.001\nb: [4, 6, 4]\nc: true\n")
        text = str(tmp_path / "options.yaml")
    config = AttentionFlags(backend_config=text).collect()
    assert config is not None
    assert config.to_dict() == {"default": {"backend": "auto", "extra": {"a": 0.001, "b": [4, 6, 4], "c": True}}}


def test_options_for_a_role_go_on_top_of_the_backend_for_all() -> None:
    from diffusion_runtime.attention import select_backend

    options = {"backend_config": "min_tokens=7", "entries": ("per_role.self.extra.sparsity=0.9",)}
    config = AttentionFlags("video_sparse_attn", **options).collect()
    decision = select_backend("self", head_dim=64, dtype="float32", device="cpu", num_heads=2, cli=config)
    assert (decision.backend, decision.source) == ("video_sparse_attn", "cli")
    assert decision.options == {"sparsity": 0.9, "min_tokens": 7}


def test_of_flags_for_one_value_the_last_wins() -> None:
    entries = ("default.backend=fa", "default=torch_sdpa", "default.backend=reference")
    assert AttentionFlags(entries=entries).collect() == AttentionConfig("reference")
    config = AttentionFlags(config='{"default": "fa"}', entries=("default.backend=reference",)).collect()
    assert config == AttentionConfig("reference")


def test_dotted_options_take_their_types() -> None:
    entries = ("per_role.self.extra.a=-1", "per_role.self.extra.b=[4,6,4]", "per_role.self.extra.c=text")
    config = AttentionFlags(entries=entries).collect()
    assert config is not None
    assert dict(config.per_role["self"].options) == {"a": -1, "b": [4, 6, 4], "c": "text"}


@pytest.mark.parametrize(
    "flags",
    [
        AttentionFlags("torch_sdpa", entries=("default.backend=torch_sdpa",)),
        AttentionFlags("torch_sdpa", entries=("default=torch_sdpa",)),
        AttentionFlags("torch_sdpa", config='{"default": "torch_sdpa"}'),
    ],
)
def test_the_shorthand_excludes_a_second_default(flags: AttentionFlags) -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend and .* both set the default backend"):
        flags.collect()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (AttentionFlags("torch_spda"), "torch_sdpa"),
        (AttentionFlags(entries=("per_role.crss.backend=torch_sdpa",)), "cross"),
        (AttentionFlags("torch_sdpa", "speed=3"), "speed"),
        (AttentionFlags("torch_sdpa", "fast"), "expected key=value"),
        (AttentionFlags(config='{"defualt": {"backend": "torch_sdpa"}}'), "default"),
        (AttentionFlags(config="missing.yaml"), "missing.yaml: no such file"),
        (AttentionFlags(config="{broken"), "not valid JSON"),
    ],
)
def test_a_wrong_choice_names_the_nearest_right_one(flags: AttentionFlags, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        flags.collect()
