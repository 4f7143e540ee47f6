"""The JSON Schema of config files: as committed, and equal to what --config accepts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cli_support import REPOSITORY, Command, process_environment
from warm_python import run_python

from diffusion_runtime.cli import config_file
from diffusion_runtime.cli.config_file import SCHEMA_FILE
from diffusion_runtime.errors import ConfigError
from diffusion_runtime.untrusted.yaml_text import read_yaml_file

# What a key may be tried with, whatever its type.
ANY_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 7, -1, 4096, 4097, 10**6, 10**6 + 1, 2**63 - 1, 2**63, 0.5, -0.5, 1.5, 1e4, 1e7),
    *("", " ", "word", "none", "auto", "on", "off", "native", "12GB", "12", "12 gib", "0.9,0.5", "1-4", "fp16", "a b"),
    *([], ["word"], [""], [0.9, 0.5], [1, 2], ["word", 0.5], [["word", 0.5]], [3.0, -1.0], [None], [{}]),
    *({}, {"word": 1}, {"path": "word"}, {"path": "word", "scale": 2, "component": "both"}, {"num_gpus": 2}),
    *({"timeout": 0}, {"order": "word"}, {"cfg_parallel": True}, [{"path": ""}], [{"path": "x", "scale": 1e5}]),
    *(
        "unipc",
        "two_pass",
        "easycache",
        "easycache:threshold=0.1",
        "teacache : x",
        "dct",
        "dct:delta=0.05",
        "wan2.1-1.3b",
    ),
)
ATTENTION_VALUES: tuple[Any, ...] = (
    *(
        "auto",
        "fa",
        "FLASH_ATTN",
        "vsa",
        "fa,torch_sdpa",
        "torch-sdpa",
        "no_such",
        "default.backend=fa",
        '{"default": "fa"}',
    ),
    {"default": "fa", "per_role": {"cross": "torch_sdpa", "ltx2.audio_to_video": {"name": "fa"}}, "schedule": []},
    {"default": {"backend": "video_sparse_attn", "extra": {"sparsity": 0.5}}},
    {"default": {"backend": "video_sparse_attn", "extra": {"sparsity": "0.5"}}},
    {"default": {"backend": "video_sparse_attn", "extra": {"sparsity": "x"}}},
    {"default": {"backend": "vsa", "options": {"sparse": 0.5}}},
    {"default": {"backend": "vmoba", "extra": {"st_chunk_size": [4, 6, 4], "moba_select_mode": "topk"}}},
    {"default": {"backend": "vmoba", "extra": {"st_chunk_size": [4, 6]}}},
    {"default": {"backend": "vmoba", "extra": {"moba_select_mode": "most"}}},
    {"default": {"backend": "torch_sdpa", "extra": {"sparsity": 0.5}}},
    {"default": {"backend": "fa", "name": "fa"}},
    {"default": {"backend": "fa", "sparsity": 1}},
    {"default.backend": "vsa", "default.extra.sparsity": 0.5},
    {"per_role.cross.backend": "fa"},
    {"per_role": {"no_such_role": "fa"}},
    {"per_role": None, "schedule": None, "default": None},
    {"backend": "vsa", "extra": {"sparsity": 0.5}},
    {"backend": "vsa", "default": "fa"},
    {"sparsity": 0.5},
    {"sparsity": {"x": 1}},
    {"schedule": [{"steps": "0-1", "layers": "0,-1", "backend": "torch_sdpa"}]},
    {"schedule": [{"steps": [0, "2-3"], "role": "self", "backend": "torch_sdpa"}]},
    {"schedule": [{"steps": "first", "backend": "torch_sdpa"}]},
    {"schedule": [{"role": "nobody", "backend": "torch_sdpa"}]},
    {"schedule": [{"steps": True, "backend": "torch_sdpa"}]},
    {"schedule": {"steps": 1}},
)


def only_the_runtime_refuses(key: str, value: Any) -> bool:
    """A text with a syntax of its own, a whole number with a point, and what another key must stand beside."""
    if key == "attention":
        return isinstance(value, str) and any(c in value for c in ",-ABG")
    if key in ("sigmas", "sigmas_before_shift", "second_stage_sigmas"):
        return value == "12"
    if key in ("nag_scale", "nag_tau", "nag_alpha"):
        return isinstance(value, str)
    return (isinstance(value, float) and value.is_integer()) or (key, value) == ("step_cache", "teacache : x")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    text = SCHEMA_FILE.read_text(encoding="utf-8")
    # In a process of its own: other tests register roles and backends.
    script = "from diffusion_runtime.cli.config_schema import schema_text; print(schema_text(), end='')"
    made = run_python("-c", script, cwd=REPOSITORY, env=process_environment())
    assert text == made.stdout, f"run: python scripts/write_configs.py {made.stderr}"
    found: dict[str, Any] = json.loads(text)
    jsonschema.Draft7Validator.check_schema(found)
    return found


def test_every_committed_config_fits_and_names_it(schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft7Validator(schema)
    for path in (REPOSITORY / "configs").glob("*.yaml"):
        assert [error.message for error in checker.iter_errors(read_yaml_file(path))] == [], path.name
        place = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / place).resolve() == SCHEMA_FILE


def documents(schema: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """A key with a value of its own kind or of another, for every key of every section."""
    for section in ("runtime", "request"):
        for key in (*schema["properties"][section]["properties"], "no_such_key", "attention_override"):
            values = (*ANY_VALUES, *(ATTENTION_VALUES if key == "attention" else ()))
            for value in values:
                yield key, value, {section: {key: value}}
    for key, value in itertools.product(schema["definitions"]["preset"]["properties"], (None, 1, "word", [1])):
        yield key, value, {"presets": {"mine": {key: value}}}
    for document in (
        {"runtime": {"quantization_ignored_layers": ["a"], "quantization": "fp8"}},
        {},
        {"runtime": None, "request": None, "presets": None},
        {"more": 1},
        {"runtime": []},
    ):
        yield "", None, document
    for presets in ({"mine": None}, {"mine": {"prompt": "x"}}, {"mine": {"seed": 1}}, {"mine": {"steps": 1}}):
        yield "", None, {"presets": presets}


def reads(document: dict[str, Any], file: Path) -> bool:
    """Whether --config takes it. One key of a section goes to the reader's own check, without a file."""
    section, values = next(iter(document.items()), ("", None))
    try:
        if section == "runtime" and isinstance(values, dict):
            config_file._check_runtime(values, section)
        elif section == "request" and isinstance(values, dict):
            config_file._check_request(values, section)
        else:
            file.write_text(json.dumps(document), encoding="utf-8")
            config_file.read_config(str(file))
    except ConfigError:
        return False
    return True


def test_it_accepts_what_the_config_reader_accepts(schema: dict[str, Any], tmp_path: Path) -> None:
    """In both directions, but for what only the runtime can know."""
    checker = jsonschema.Draft7Validator(schema)
    wrong = []
    for key, value, document in documents(schema):
        is_read, fits = reads(document, tmp_path / "config.yaml"), checker.is_valid(document)
        # A list of nothing is a value that is left out.
        if is_read != fits and not (fits and only_the_runtime_refuses(key, value)) and value != [None]:
            wrong.append(f"the {'runtime' if fits else 'schema'} alone refuses {document}")
    assert wrong == []


def test_the_command_prints_it(command: Command) -> None:
    shown = command("config", "schema")
    assert (shown.code, shown.out) == (0, SCHEMA_FILE.read_text(encoding="utf-8"))
