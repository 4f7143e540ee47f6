"""Every option and request field says what resume, `--from` and `tune` do with it; none of them keeps a list beside."""

from __future__ import annotations

import dataclasses
import inspect
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import process_environment

from diffusion_runtime.cli.generate import generate
from diffusion_runtime.cli.settings import _REPEATED_RUNTIME
from diffusion_runtime.config import ParallelConfig, RuntimeConfig, runtime_options, weight_paths
from diffusion_runtime.core.runtime_options import options_of
from diffusion_runtime.loading import load_pipeline
from diffusion_runtime.request.fields import RequestField
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.session.resume import output_identity

ROOT = Path(__file__).parents[2]
# Another valid value of each option whose value resume compares.
OTHERS: dict[str, Any] = {
    "variant": "fp16",
    "upsampler_path": "elsewhere",
    "lora": [{"path": "a.safetensors"}],
    "vae_decode": "fast",
    "vae_tiling": "on",
    "vae_decoder": "tiny",
    "quantization": "fp8",
    "quantization_ignored_layers": ["blocks.0.*"],
    "compile": "regional",
    **dict.fromkeys(weight_paths(), "elsewhere"),
}


def test_every_option_is_declared_and_resume_compares_what_changes_the_output() -> None:
    options = runtime_options()
    assert list(options) == [field.name for field in dataclasses.fields(RuntimeConfig)]
    before = {"runtime": dataclasses.asdict(RuntimeConfig())}
    compared = set()
    for name, option in options.items():
        if not option.changes_output:
            assert option.recorded_as is None, name
        elif option.recorded_as is None:
            compared.add(name)
            changed = {"runtime": {**before["runtime"], name: OTHERS.get(name, "another value")}}
            assert output_identity(changed) != output_identity(before), name
        else:
            assert option.recorded_as in output_identity(before), name
    assert OTHERS.keys() <= compared
    # Chosen for the machine: the same frames, in the same order of sums or as on another device.
    machine = {"device", "parallel", "self_check", "offload", "memory_limit", "cuda_graphs", "offline"}
    assert not any(options[name].changes_output for name in machine)


def test_what_is_repeated_and_what_names_weights() -> None:
    options = runtime_options()
    assert set(_REPEATED_RUNTIME) == {name for name, option in options.items() if option.repeated_by_from}
    # What changes the output is repeated, or the same command would make something else.
    assert all(option.repeated_by_from for option in options.values() if option.changes_output)
    assert all(option.changes_output for option in options.values() if option.is_weight_path)
    paths = {name for name in options if name.endswith("_path")} - {"model_path", "upsampler_path"}
    assert set(weight_paths()) == paths


def test_every_request_field_is_declared_and_compared() -> None:
    request = GenerationRequest(prompt="a circle").to_dict()
    for field in dataclasses.fields(GenerationRequest):
        declared = RequestField.of(field.metadata)
        assert field.name in request, field.name
        if declared.is_of_chunks:
            assert declared.refusal is not None, field.name


# An option that is declared and nothing else, in a process of its own: RuntimeConfig is replaced before what reads it
# is imported.
DECLARED = """
from dataclasses import dataclass
from diffusion_runtime import config
from diffusion_runtime.core.runtime_options import OUTPUT, Flag, OneOf, Refusal, option

@dataclass(frozen=True)
class Extended(config.RuntimeConfig):
    grain: str = option(
        OUTPUT, "none", OneOf(("none", "film"), ("none",)), Flag("Grain of the frames.", "KIND", bench_help="Of ours."),
        Refusal("{name}: {value}: there is none; leave out {flag}"),
    )

Extended.__doc__ = f"{config.RuntimeConfig.__doc__} grain: the grain of the frames."
config.RuntimeConfig = Extended

import pytest
from diffusion_runtime.benchmark.generation import _SETTINGS
from diffusion_runtime.cli.app import run
from diffusion_runtime.cli.config_file import FileConfig
from diffusion_runtime.cli.config_schema import config_schema
from diffusion_runtime.cli.generate import flags_of, generate
from diffusion_runtime.cli.settings import Flags, _build_runtime
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.loading.preparation import _runtime_config
from diffusion_runtime.rules.combinations import check_pipeline_options, pipeline_combinations
from diffusion_runtime.session.resume import output_identity
from diffusion_runtime.tuning.result import written_options

film = Extended(grain="film")
for verb in ("generate", "explain", "compare", "tune", "bench generate"):
    assert run([*verb.split(), "--help"]) == 0
assert run(["explain", "--grain", "flim"]) == 2
given = {name: each.default for name, each in generate.__signature__.parameters.items()}
typed = flags_of({**given, "grain": "film"})
assert typed.runtime["grain"] == "film"
assert _build_runtime(typed, FileConfig(), {}) == film
assert _build_runtime(Flags(), FileConfig({"grain": "film"}), {}) == film
assert Extended(grain=False).grain == "none"
schema = config_schema()["properties"]["runtime"]["properties"]["grain"]
assert schema["description"] == "The grain of the frames."
assert schema["anyOf"] == [{"enum": ["none", "film", False]}, {"type": "null"}]
assert output_identity({"runtime": {"grain": "film"}}) != output_identity({"runtime": {}})
assert _build_runtime(Flags(), FileConfig(), {"runtime": {"grain": "film"}}) == film
assert written_options(film) == {"grain": "film"}
assert _runtime_config(film.model_path, {"grain": "film"}) == film
assert "grain" in _SETTINGS
assert pipeline_combinations()[-1].pair == ("diffusers' own pipeline", "`grain`")
with pytest.raises(ConfigError, match="^grain: film: there is none; leave out --grain$"):
    check_pipeline_options(film)
"""


def test_an_option_that_is_declared_has_its_flag_check_schema_and_effects(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DECLARED], cwd=tmp_path, env=process_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--grain") == 5
    assert "grain: unknown value 'flim'. Did you mean 'film'?" in done.stderr


def test_every_option_has_a_check_and_a_flag_where_one_is_declared() -> None:
    flags = inspect.signature(generate).parameters
    for config in (RuntimeConfig, ParallelConfig):
        for name, declared in options_of(config).items():
            assert (name in flags) == (declared.flag is not None) or name == "lora", name
            assert declared.check is not None or declared.recorded_as == "attention", name
            default = getattr(config(), name)
            assert declared.check is None or declared.check(name, default) == default, name


def test_load_pipeline_shows_every_option() -> None:
    shown = inspect.signature(load_pipeline).parameters
    options = {name: each.default for name, each in runtime_options().items() if name not in ("model_path", "parallel")}
    assert {name: shown[name].default for name in options} == options
    assert set(shown) - set(options) == {"model", "on_stage", "world"}
    with pytest.raises(TypeError, match="unexpected keyword argument 'vae_decod'"):
        load_pipeline("shapes", vae_decod="fast")  # type: ignore[call-arg]
    written = runpy.run_path(str(ROOT / "scripts" / "write_load_options.py"))["file_text"]()
    file = ROOT / "diffusion_runtime" / "loading" / "load_options.py"
    assert file.read_text() == written, "python scripts/write_load_options.py"


def test_an_option_is_named_where_it_is_declared_and_where_it_is_used() -> None:
    """Fourteen files named this one: a list of options in each place that took or showed them."""
    package = ROOT / "diffusion_runtime"
    naming = [path for path in sorted(package.rglob("*.py")) if "memory_limit" in path.read_text()]
    assert [str(path.relative_to(package)) for path in naming] == [
        "config.py",
        "loading/later_requests.py",
        # Written by scripts/write_load_options.py.
        "loading/load_options.py",
        "loading/memory_planning.py",
        "loading/preparation.py",
    ]
