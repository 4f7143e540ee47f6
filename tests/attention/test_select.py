"""Selection: force > command line > config > environment > platform, with every reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tables import table

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionSpec,
    Availability,
    Backend,
    Capability,
    Decision,
    list_backends,
    register_role,
    select_backend,
)
from diffusion_runtime.attention.backends import registry
from diffusion_runtime.attention.backends.capability import AttentionRequirements
from diffusion_runtime.core.hardware import Hardware
from diffusion_runtime.errors import BackendUnavailableError, ConfigError

CPU = Hardware(torch_version="2.13.0")
H200 = Hardware("cuda", "NVIDIA H200", (9, 0), (9, 15), "2.11.0")
B200 = Hardware("cuda", "NVIDIA B200", (10, 0), (9, 15), "2.11.0")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND", raising=False)


def choose(role: str = "self", hardware: Hardware = CPU, **levels: Any) -> Decision:
    arguments = {"head_dim": 64, "dtype": torch.float32, "num_heads": 4, **levels}
    return select_backend(role, device=hardware, **arguments)


def test_the_highest_level_wins(monkeypatch: pytest.MonkeyPatch, blocky: str) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    levels = {"forced": blocky, "cli": "reference", "config": "torch_sdpa"}
    seen = []
    for level in ("forced", "cli", "config", None):
        decision = choose(**levels)
        seen.append((decision.source, decision.backend))
        levels.pop(level or "", None)
    assert seen == [("force", "blocky"), ("cli", "reference"), ("config", "torch_sdpa"), ("environment", "reference")]
    monkeypatch.delenv("DIFFUSION_ATTENTION_BACKEND")
    assert (choose().source, choose().backend) == ("platform", "torch_sdpa")


def test_the_environment_stands_below_the_configs_default_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    config = AttentionConfig(per_role={"cross": AttentionSpec("torch_sdpa")})
    assert choose("cross", config=config).source == "config"
    assert choose("self", config=config).source == "environment"
    assert choose("self", config={"default": "torch_sdpa"}).source == "config"


def test_the_environment_is_silent_where_the_config_has_a_default(monkeypatch: pytest.MonkeyPatch, blocky: str) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    assert choose("cross", config=blocky).source == "platform"


def test_a_wrong_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "nonsense")
    with pytest.raises(ConfigError, match="DIFFUSION_ATTENTION_BACKEND: unknown attention backend 'nonsense'"):
        choose()


def test_exact_role_then_category_then_default() -> None:
    register_role("ltx2.audio_to_video", "cross")
    register_role("ltx2.video_to_audio", "cross")
    config = {"default": "torch_sdpa", "per_role": {"cross": "reference", "ltx2.audio_to_video": "torch_sdpa"}}
    assert choose("self", config=config).backend == "torch_sdpa"
    assert choose("ltx2.video_to_audio", config=config).backend == "reference"
    assert choose("ltx2.audio_to_video", config=config).backend == "torch_sdpa"


def test_levels_do_not_mix_fields(blocky: str) -> None:
    config = {"default": {"backend": blocky, "extra": {"sparsity": 0.9}}}
    assert choose(config=config).options == {"sparsity": 0.9}
    assert choose(config=config, cli=blocky).options == {}


@table("level", ["cli", "config"])
@table("entry", ["auto", {"extra": {}}, {"backend": "auto"}])
def test_auto_is_no_choice(level: str, entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the platform's default: `reference` is what nobody gets who does not ask for it."""
    decision = choose(**{level: {"default": "reference", "per_role": {"self": entry}}})
    assert (decision.backend, decision.source, decision.reason) == ("reference", level, "default says reference")
    assert choose(cli="auto", config="reference").source == "config"
    assert choose(**{level: {"default": "auto", "per_role": {"self": "auto"}}}).source == "platform"
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    assert choose(**{level: {"default": "auto"}}).source == "environment"


@table("level", ["cli", "config"])
def test_options_for_a_role_configure_what_its_level_chooses_below(level: str, blocky: str) -> None:
    register_role("test.clips", "self")
    entries = {"test.clips": {"extra": {"topk": 9}}, "self": {"extra": {"sparsity": 0.9, "topk": 1}}}
    choice = {"default": {"backend": blocky, "extra": {"sparsity": 0.1, "warm": False}}, "per_role": entries}
    found = {role: choose(role, **{level: choice}) for role in ("self", "test.clips", "cross")}
    assert (found["self"].backend, found["self"].source) == ("blocky", level)
    assert found["self"].options == {"sparsity": 0.9, "topk": 1, "warm": False}
    assert found["test.clips"].options == {"sparsity": 0.9, "topk": 9, "warm": False}
    assert (found["cross"].backend, found["cross"].options) == ("torch_sdpa", {})
    # The category's choice comes before the default, with the exact role's options on top.
    closer = {**choice, "per_role": {**entries, "self": {"backend": "reference"}}}
    with pytest.raises(ConfigError, match=r"per_role\.test\.clips: options of reference: unknown option 'topk'"):
        choose("test.clips", **{level: closer})


def test_options_for_a_role_that_its_backend_does_not_have_are_an_error(blocky: str) -> None:
    """Unlike general options, which may be meant for the roles that a general choice does serve."""
    config = {"default": blocky, "per_role": {"cross": {"extra": {"sparsity": 0.9}}}}
    with pytest.raises(ConfigError, match=r"per_role\.cross: options of torch_sdpa: unknown option 'sparsity'"):
        choose("cross", config=config)
    assert choose("cross", cli="sparsity=0.9", config=blocky).backend == "torch_sdpa"


def test_a_general_choice_passes_over_roles_it_is_not_made_for(blocky: str) -> None:
    decision = choose("cross", cli=blocky, config="reference")
    assert (decision.backend, decision.source) == ("reference", "config")
    assert decision.rejected == [("blocky", "default: not made for role 'cross', the next choice decides")]
    assert choose("self", cli=blocky, config="reference").backend == "blocky"


@table("level", ["cli", "config"])
def test_the_same_choice_by_name_is_an_error(blocky: str, level: str) -> None:
    with pytest.raises(BackendUnavailableError, match="serves self attention, not role 'cross'"):
        choose("cross", **{level: {"per_role": {"cross": blocky}}})


def test_an_explicit_choice_fails_with_every_reason(blocky: str) -> None:
    with pytest.raises(BackendUnavailableError) as failure:
        choose(config=blocky, hardware=H200, head_dim=300, dtype="float16", needs=("lse",))
    reasons = dict.fromkeys(reason for _, reason in failure.value.reasons)
    assert list(reasons) == [
        "runs on cpu, not on cuda",
        "takes bfloat16, float32, not float16",
        "takes head sizes 8 to 128, multiples of 8, not 300",
        "cannot do lse",
    ]
    assert "usable here for this role: torch_sdpa, reference" in str(failure.value)


def test_where_nothing_can_run_every_reason_is_said(blocky: str) -> None:
    """In place of an empty list: as for a causal model over a ring."""
    with pytest.raises(BackendUnavailableError) as failure:
        choose(config=blocky, needs=("gate", "cached_keys"))
    said = str(failure.value)
    assert "usable here" not in said
    assert "no backend can serve this role here. What stands in the way of those that lack least:" in said
    assert re.search(r"reference.*: cannot do gate", said)


def test_a_missing_package_says_what_to_type(absent: str) -> None:
    with pytest.raises(BackendUnavailableError, match="is not installed; fix: pip install absent"):
        choose(cli=absent)


class Raises(Capability):
    """A capability whose author did not think of every machine."""

    def refusals(self, requirements: AttentionRequirements) -> list[str]:
        raise KeyError(requirements.hardware.platform)

    def serves(self, requirements: AttentionRequirements) -> bool:
        raise KeyError("roles")


def raising_probe(self: Backend, hardware: Hardware) -> Availability:
    raise OSError("libbroken.so: cannot open\nwith details")


@table(
    ("member", "value", "said"),
    [
        ("probe", raising_probe, "OSError: libbroken.so: cannot open"),
        ("capability", Raises(), "KeyError: 'cpu'"),
    ],
)
def test_a_backend_that_raises_when_it_is_asked_is_refused(
    absent: str, monkeypatch: pytest.MonkeyPatch, member: str, value: object, said: str
) -> None:
    backend = registry.find_backend(absent)
    monkeypatch.setattr(type(backend), member, value)
    with pytest.raises(BackendUnavailableError) as failure:
        choose(config=absent)
    assert failure.value.reasons == ((absent, f"{type(backend).__module__}.AbsentBackend cannot be asked: {said}"),)
    # Others are suggested, and neither a list of names nor the platform's default stumbles over it.
    assert "usable here for this role: torch_sdpa, reference" in str(failure.value)
    decision = choose(config=f"{absent},reference")
    assert (decision.backend, decision.rejected) == ("reference", list(failure.value.reasons))
    assert choose().backend == "torch_sdpa"
    (listed,) = [info for info in list_backends("cpu") if info.name == absent]
    assert not listed.usable
    assert f"cannot be asked: {said}" in listed.reason


def test_a_backend_whose_own_file_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OWN_MODULES, "later_attn", "diffusion_runtime.attention.backends.later")
    monkeypatch.setattr(registry, "_broken", {})
    said = "its module cannot be imported: ModuleNotFoundError: No module named 'diffusion_runtime.attention.backends"
    for level in ({"config": "later_attn"}, {"config": {"per_role": {"self": "later_attn"}}}):
        with pytest.raises(BackendUnavailableError, match=said):
            choose(**level)
    (listed,) = [info for info in list_backends("cpu") if info.name == "later_attn"]
    assert listed.reason.startswith(said)


def test_grouped_queries_are_a_need(blocky: str) -> None:
    with pytest.raises(BackendUnavailableError, match="cannot do gqa"):
        choose(config=blocky, num_kv_heads=2)


def test_an_order_of_preference(absent: str, blocky: str) -> None:
    decision = choose(cli=f"{absent},{blocky},torch_sdpa")
    assert decision.backend == "blocky"
    assert [name for name, _ in decision.rejected] == ["absent"]
    with pytest.raises(BackendUnavailableError, match=r"(?s)absent: .*blocky: takes head sizes"):
        choose(cli=f"{absent},{blocky}", head_dim=300)


def test_a_backend_that_this_version_lacks_is_unavailable_not_substituted(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name of the contract whose backend comes with a later version.
    monkeypatch.setattr(registry, "KNOWN_NAMES", (*registry.KNOWN_NAMES, "later_attn"))
    with pytest.raises(BackendUnavailableError, match="later_attn: this version does not have it"):
        choose(cli="later_attn")


def test_options_without_a_backend_configure_what_a_lower_level_chose(
    blocky: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = choose(cli="sparsity=0.75", config={"default": {"backend": blocky, "extra": {"topk": 5}}})
    assert (decision.source, decision.options) == ("config", {"topk": 5, "sparsity": 0.75})
    with pytest.raises(ConfigError, match="unknown option 'sparsity'"):
        choose(cli="sparsity=0.75", config="torch_sdpa")
    # The sparse choice does not serve cross-attention; its options are no mistake there.
    assert choose("cross", cli="sparsity=0.75", config=blocky).backend == "torch_sdpa"
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", blocky)
    layered = choose(cli="sparsity=0.75", forced={"backend": "auto", "extra": {"topk": 9, "sparsity": 0.1}})
    assert (layered.source, layered.options) == ("environment", {"topk": 9, "sparsity": 0.1})


# --- what serves the dense calls of a sparse choice -------------------------------------------------------------------

STA = {"backend": "sliding_tile_attn", "extra": {"window": [1, 1, 1]}}


@table(
    ("levels", "expected"),
    [
        ({"cli": STA}, ("torch_sdpa", "platform")),
        ({"config": {"default": "reference", "per_role": {"self": STA}}}, ("reference", "config")),
        ({"cli": STA, "config": "reference"}, ("reference", "config")),
        ({"forced": STA, "cli": "reference", "config": "torch_sdpa"}, ("reference", "cli")),
        ({"cli": "sliding_tile_attn,reference"}, ("reference", "cli")),
        ({"cli": "reference", "config": {"per_role": {"self": STA}}}, None),
        ({"cli": "sliding_tile_attn,video_sparse_attn,reference"}, ("reference", "cli")),
        ({"cli": "auto", "config": {"per_role": {"self": STA}}}, ("torch_sdpa", "platform")),
    ],
)
def test_dense_calls_of_a_sparse_choice_follow_the_choices_below_it(
    levels: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    dense = choose(**levels).dense
    assert (None if dense is None else (dense.backend, dense.source)) == expected


def test_the_environment_is_asked_for_dense_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "reference")
    for levels in ({"cli": STA}, {"config": {"per_role": {"self": STA}}}):
        dense = choose(**levels).dense
        assert dense is not None
        assert (dense.backend, dense.source) == ("reference", "environment")


def test_options_of_the_lower_choice_go_with_it_and_what_cannot_run_is_said(absent: str, blocky: str) -> None:
    lower = {"backend": f"{absent},{blocky}", "extra": {"sparsity": 0.25}}
    dense = choose(cli=STA, config=lower).dense
    assert dense is not None
    assert (dense.backend, dense.options) == ("blocky", {"sparsity": 0.25})
    assert dense.rejected == [("absent", "default: package 'absent' is not installed; fix: pip install absent")]
    # Padding is a need of the call, which blocky cannot meet.
    padded = choose(cli=STA, config=lower, needs=("key_padding",)).dense
    assert padded is not None
    assert (padded.backend, padded.source) == ("torch_sdpa", "platform")
    assert padded.reason.endswith("not blocky, default: cannot do key_padding")


def test_selection_is_pure(blocky: str) -> None:
    config = {"default": {"backend": blocky, "extra": {"sparsity": 0.9}}}
    assert choose(config=config) == choose(config=config)


@table(
    ("hardware", "candidates"),
    [(H200, ["fa"]), (B200, ["cudnn_attn", "flashinfer_attn", "fa4"]), (CPU, [])],
)
def test_the_platform_default_says_what_it_passed(hardware: Hardware, candidates: list[str]) -> None:
    decision = choose(hardware=hardware)
    assert decision.backend == "torch_sdpa"
    assert list(dict.fromkeys(name for name, _ in decision.rejected)) == candidates


def test_log_lines() -> None:
    assert choose(cli="reference").log_line("self", CPU) == "Using attention backend 'reference' for role=self (cli)"
    line = choose("cross").log_line("cross", CPU)
    assert line == "Defaulting to attention backend 'torch_sdpa' for role=cross (cpu, torch 2.13.0)"


def test_unknown_role_and_need() -> None:
    with pytest.raises(ConfigError, match=r"'crss'.*'cross'"):
        choose("crss")
    with pytest.raises(ConfigError, match=r"'lsee'.*'lse'"):
        choose(needs=("lsee",))
