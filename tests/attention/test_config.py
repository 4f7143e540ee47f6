"""AttentionSpec, AttentionConfig and the one parser behind every form."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tables import table

from diffusion_runtime.attention import AttentionConfig, AttentionSpec, LayerInfo, StepInfo, register_role
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.attention.schedule import IndexRanges
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.core.options import FrozenMapping, build_options, check_options, parse_scalar
from diffusion_runtime.errors import ConfigError

CROSS_REFERENCE = {"default": {"backend": "torch_sdpa"}, "per_role": {"cross": {"backend": "reference"}}}


@table(
    ("spelling", "name"),
    [
        ("fa", "fa"),
        ("FLASH_ATTN", "fa"),
        ("flash", "fa"),
        ("Torch-SDPA", "torch_sdpa"),
        ("TORCH_SDPA", "torch_sdpa"),
        ("native", "torch_sdpa"),
        ("CUDNN_ATTN", "cudnn_attn"),
        ("FLASHINFER_ATTN", "flashinfer_attn"),
        ("SAGE_ATTN", "sage_attn"),
        ("sage", "sage_attn"),
        ("SAGE_ATTN_3", "sage_attn_3"),
        ("sliding-tile-attn", "sliding_tile_attn"),
        ("auto", "auto"),
        ("fa, torch_sdpa", "fa,torch_sdpa"),
    ],
)
def test_peers_spellings_become_canonical_names(spelling: str, name: str) -> None:
    assert AttentionSpec(spelling).name == name


@table(
    "form",
    [
        CROSS_REFERENCE,
        json.dumps(CROSS_REFERENCE),
        {"default": "torch_sdpa", "per_role": {"cross": "reference"}},
        {"default.backend": "torch_sdpa", "per_role.cross.backend": "reference"},
        "default.backend=torch_sdpa,per_role.cross.backend=reference",
        AttentionConfig(default="torch_sdpa", per_role={"cross": AttentionSpec("reference")}),  # type: ignore[arg-type]
    ],
)
def test_every_form_says_the_same(form: Any) -> None:
    assert AttentionConfig.parse(form).to_dict() == CROSS_REFERENCE


@table("name", ["choices.json", "choices.yaml", "choices.yml"])
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(CROSS_REFERENCE))
    assert AttentionConfig.parse(str(path)).to_dict() == CROSS_REFERENCE


def test_what_is_parsed_is_written_and_parsed_again(blocky: str) -> None:
    config = AttentionConfig.parse(
        {
            "default": "reference,torch_sdpa",
            "per_role": {"self": {"backend": blocky, "extra": {"sparsity": 0.9, "tile": [1, 2, 3]}}},
            "schedule": [{"steps": "0-3,-1", "layers": "-2--1", "role": "self", "backend": "torch_sdpa"}],
        }
    )
    assert AttentionConfig.parse(json.loads(json.dumps(config.to_dict()))) == config


def test_nothing_is_no_choice() -> None:
    assert AttentionConfig.parse(None) == AttentionConfig()
    assert AttentionConfig.parse("auto").default == AttentionSpec("auto")


def test_key_value_options_keep_their_types(blocky: str) -> None:
    parsed = AttentionConfig.parse("sparsity=1e-3,topk=-1,tile=[4,6,4],warm=false,mode=exact,path=a b.json")
    spec = AttentionSpec(blocky, parsed.default.options if parsed.default else {})
    assert dict(spec.options) == {
        "sparsity": 1e-3,
        "topk": -1,
        "tile": (4, 6, 4),
        "warm": False,
        "mode": "exact",
        "path": "a b.json",
    }


def test_a_role_may_contain_dots(blocky: str) -> None:
    register_role("ltx2.audio_to_video", "cross")
    register_role("test.extra_role", "self")
    config = AttentionConfig.parse(
        {
            "per_role.ltx2.audio_to_video.backend": "reference",
            "per_role.test.extra_role.backend": blocky,
            "per_role.test.extra_role.extra.sparsity": 0.25,
        }
    )
    assert config.per_role["ltx2.audio_to_video"] == AttentionSpec("reference")
    assert config.per_role["test.extra_role"] == AttentionSpec(blocky, {"sparsity": 0.25})


@table(
    ("form", "expected"),
    [
        ("torch_spda", "'torch_sdpa'"),
        ({"per_role": {"crss": "torch_sdpa"}}, r"per_role\.crss.*'cross'"),
        ({"per_role.selff.backend": "torch_sdpa"}, r"per_role\.selff.*'self'"),
        ({"defualt": {"backend": "torch_sdpa"}}, "'default'"),
        ({"default": {"bakend": "torch_sdpa"}}, "'backend'"),
        ({"default": {"backend": "blocky", "extra": {"sparsty": 0.5}}}, "options of blocky.*'sparsty'.*'sparsity'"),
        ({"default": {"backend": "blocky", "extra": {"topk": 1.5}}}, r"blocky\.topk: expected int, got 1\.5"),
        ({"default": {"backend": "blocky", "extra": {"topk": True}}}, r"blocky\.topk: expected int, got True"),
        ({"default": {"backend": "blocky", "extra": {"warm": 1}}}, r"blocky\.warm: expected bool"),
        ({"default": {"backend": "blocky", "extra": {"tile": [1, 2]}}}, r"blocky\.tile: expected tuple"),
        ({"default": {"backend": "blocky", "extra": {"mode": "slow"}}}, "one of 'fast', 'exact'"),
        ({"default": {"backend": "blocky", "extra": {"sparsity": 1.0}}}, r"\[0, 1\)"),
        ({"default": {"backend": "torch_sdpa", "extra": {"x": 1}}}, "no options"),
        ({"default": 3}, "default: expected"),
        ({"schedule": [{"steps": "3-1", "backend": "torch_sdpa"}]}, r"schedule\[0\]\.steps.*ends before"),
        ({"schedule": [{"steps": "a", "backend": "torch_sdpa"}]}, r"schedule\[0\]\.steps"),
        ({"schedule": [{"role": ["self"], "backend": "torch_sdpa"}]}, r"schedule\[0\]\.role: unknown attention role"),
        ({"schedule": [{"step": "1", "backend": "torch_sdpa"}]}, "'steps'"),
        ({"schedule": {"steps": "1"}}, "schedule: expected a list"),
        # Parsing takes 60 us for each: refused before.
        ({"schedule": [{"steps": "x"}] * 100_000}, "schedule: expected at most 1000 rules, got 100000"),
        ({"schedule": [{"steps": "0," * 5000, "backend": "reference"}]}, "at most 1000 ranges, got 5001"),
        ("{not json", "not valid JSON"),
        ("missing.yaml", "attention config: missing.yaml: no such file"),
        ("a=1,a=2", "given twice"),
        ({"default.backend": "torch_sdpa", "default": "reference"}, r"default\.backend is given twice in one mapping"),
        ({"per_role": {"self": "reference"}, "per_role.self.backend": "fa"}, r"per_role\.self\.backend is given twice"),
        ({"default": {"extra": {"a": 1}}, "default.extra.a": 2}, r"default\.extra\.a is given twice"),
        ("auto,torch_sdpa", "auto stands alone"),
        (7, "expected a mapping"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest(form: Any, expected: str, blocky: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        AttentionConfig.parse(form)


def test_nested_and_dotted_values_of_one_mapping_add_up(blocky: str) -> None:
    config = AttentionConfig.parse(
        {"default.extra.sparsity": 0.25, "default": blocky, "per_role.self.backend": blocky, "per_role": {"self": {}}}
    )
    assert config.default == AttentionSpec(blocky, {"sparsity": 0.25})
    assert config.per_role["self"].name == blocky


def test_options_for_several_backends_in_order(blocky: str) -> None:
    spec = AttentionSpec(f"{blocky},video_sparse_attn", {"topk": 2.0, "sparsity": 0.25, "dense_first_steps": "3"})
    assert dict(spec.options) == {"topk": 2, "sparsity": 0.25, "dense_first_steps": 3}
    assert spec.options_for(blocky) == {"topk": 2, "sparsity": 0.25}
    assert spec.options_for("video_sparse_attn") == {"sparsity": 0.25, "dense_first_steps": 3}
    for options, expected in (
        ({"topk": "many"}, r"blocky\.topk: expected int"),
        ({"dense_first_steps": -1}, "options of video_sparse_attn: dense_first_steps must be 0 or more, got -1"),
        ({"dense_lyers": "0"}, "options of blocky,video_sparse_attn: unknown option 'dense_lyers'.*'dense_layers'"),
    ):
        with pytest.raises(ConfigError, match=expected):
            AttentionSpec(f"{blocky},video_sparse_attn", options)


def test_a_backend_that_is_not_there_hides_no_mistake_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusion_runtime.attention.backends.registry.KNOWN_NAMES", ("later_attn",))
    with pytest.raises(ConfigError, match=r"video_sparse_attn: sparsity must lie in \[0, 1\], got 1.5"):
        AttentionSpec("later_attn,video_sparse_attn", {"sparsity": 1.5})
    # Nobody knows what a backend of a later version takes.
    assert dict(AttentionSpec("later_attn,video_sparse_attn", {"sparsity": 0.5, "speed": 3}).options) == {
        "sparsity": 0.5,
        "speed": 3,
    }


def test_an_option_that_needs_another_passes_beside_it() -> None:
    @dataclass(frozen=True)
    class Options:
        mode: str = "plain"
        size: int = 0

        def __post_init__(self) -> None:
            if self.mode == "sized" and self.size < 1:
                raise ValueError(f"mode sized needs a size of 1 or more, got {self.size}")

    assert check_options(Options, {"mode": "sized", "size": "2"}, "options") == {"mode": "sized", "size": 2}
    assert build_options(Options, {"mode": "sized", "size": "2"}, "options") == Options("sized", 2)
    for check in (check_options, build_options):
        with pytest.raises(ConfigError, match="options: mode sized needs a size of 1 or more, got 0"):
            check(Options, {"mode": "sized"}, "options")


@table("text", ["9" * 5000, "[" * 100_000, "1e999999", "{"])
def test_values_that_no_number_holds_are_an_error_and_no_crash(text: str, blocky: str) -> None:
    value = parse_scalar(text)
    with pytest.raises(ConfigError, match="topk: expected int"):
        AttentionSpec(blocky, {"topk": value})


def test_a_yaml_file_that_is_not_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="holds list, expected a mapping"):
        AttentionConfig.parse(str(path))


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = tmp_path / "evil.yaml"
    path.write_text(f"default: !!python/object/apply:os.system ['touch {marker}']\n")
    with pytest.raises(ConfigError, match="not valid"):
        AttentionConfig.parse(str(path))
    assert not marker.exists()


def test_specs_and_configs_are_values(blocky: str) -> None:
    assert hash(AttentionSpec(blocky, {"tile": [1, 2, 3]})) == hash(AttentionSpec(blocky, {"tile": (1, 2, 3)}))
    assert AttentionConfig.parse(CROSS_REFERENCE) == AttentionConfig.parse(json.dumps(CROSS_REFERENCE))
    assert hash(AttentionConfig.parse(CROSS_REFERENCE)) == hash(AttentionConfig.parse(json.dumps(CROSS_REFERENCE)))


@table("how", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_choices_are_copied_and_pickled_and_stay_frozen(how: Callable[[Any], Any], blocky: str) -> None:
    config = AttentionConfig.parse(
        {
            "default": {"backend": blocky, "extra": {"tile": [1, 2, 3]}},
            "per_role": {"cross": "reference"},
            "schedule": [{"steps": "0-3", "backend": "torch_sdpa"}],
        }
    )
    assert config.default is not None
    for value in (config, config.default, RuntimeConfig(attention=config, attention_override=config.default)):
        hash(config)
        assert how(value) == value
    copied = how(config)
    assert hash(copied) == hash(config)
    for mapping in (copied.default.options, copied.per_role):
        assert isinstance(mapping, FrozenMapping)
        with pytest.raises(TypeError):
            mapping["self"] = 1  # type: ignore[index]
    # A hash of text holds in one process alone.
    assert "_hash" not in vars(pickle.loads(pickle.dumps(config.default)))


@table(
    ("ranges", "held"),
    [
        (None, range(10)),
        ("0-3", range(4)),
        ("-1", [9]),
        ("-2--1", [8, 9]),
        ("8--1", [8, 9]),
        ("0-1,5", [0, 1, 5]),
        ([0, "7-8"], [0, 7, 8]),
        (3, [3]),
    ],
)
def test_ranges(ranges: Any, held: Any) -> None:
    parsed = IndexRanges.parse(ranges, "steps")
    assert [index for index in range(10) if parsed.contains(index, 10)] == list(held)


def test_a_rule_speaks_for_its_steps_and_layers() -> None:
    config = AttentionConfig.parse({"schedule": [{"steps": "0-1", "layers": "-1", "backend": "reference"}]})
    window = config.schedule[0].window
    last, first = LayerInfo(index=5, num_layers=6), LayerInfo(index=0, num_layers=6)
    assert window.holds(last, StepInfo(index=1, num_steps=8))
    assert not window.holds(last, StepInfo(index=2, num_steps=8))
    assert not window.holds(first, StepInfo(index=1, num_steps=8))


def test_a_rule_speaks_for_its_phase_and_chunks() -> None:
    written = [
        {"phase": "decode", "steps": "-1", "backend": "reference"},
        {"phase": "prefill", "chunks": "0-3,7", "backend": "reference"},
        {"steps": "-1", "backend": "reference"},
        {"backend": "reference"},
    ]
    config = AttentionConfig.parse({"schedule": written})
    assert AttentionConfig.parse(config.to_dict()) == config
    last, commit = StepInfo(3, 4, chunk=3), StepInfo(3, 4, chunk=3, phase="commit")
    # Steps are those of denoising; a commit comes after them.
    for step, held in ((last, [0, 2, 3]), (commit, [1, 3]), (dataclasses.replace(commit, chunk=4), [3])):
        assert [i for i, rule in enumerate(config.schedule) if rule.window.holds(LayerInfo(), step)] == held
    choices = AttentionPolicy(config=config, has_phases=True)
    assert set(choices.held_rules(LayerInfo(), 4)) == {((), (0, 2, 3)), ((), (3,)), ((), (1, 3))}
    for wrong, said in (
        ({"phase": "comit"}, "phase.*commit"),
        ({"chunks": "-2--1"}, "counted from the first"),
        ({"phase": "commit", "steps": "0"}, "is none of them"),
    ):
        with pytest.raises(ConfigError, match=said):
            AttentionConfig.parse({"schedule": [{**wrong, "backend": "reference"}]})
