"""Config files with flags at the top, as SGLang's are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tables import table

from diffusion_runtime.cli.config_file import read_config
from diffusion_runtime.errors import ConfigError


def test_flags_at_the_top_are_taken_for_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "flat.yaml"
    path.write_text(
        "model-path: shapes\nprompt: a star\nnum_inference_steps: 4\nsize: 64*32\nsp-degree: 2\nattention-backend: fa\n"
        "enable-cpu-offload: true\nenable-torch-compile: false\ndtype: bf16\n"
    )
    config = read_config(str(path))
    assert config.request == {"prompt": ["a star"], "num_inference_steps": 4, "width": 64, "height": 32}
    attention = config.runtime["attention"]
    assert attention.default.name == "fa" if hasattr(attention, "default") else attention
    assert {key: value for key, value in config.runtime.items() if key != "attention"} == {
        "model_path": "shapes",
        "parallel": {"ulysses_degree": 2},
        "offload": "model",
        "dtype": "bf16",
    }


def test_a_sparsity_at_the_top_is_that_of_the_backend(tmp_path: Path) -> None:
    path = tmp_path / "flat.yaml"
    for text in ("VSA_sparsity: 0.75", "attention-backend: vsa\nattention-backend-config: sparsity=0.75"):
        path.write_text(f"model-path: shapes\n{text}\n")
        spec = read_config(str(path)).runtime["attention"].default
        assert (spec.name, spec.options) == ("video_sparse_attn", {"sparsity": 0.75}), text


def test_every_flag_that_is_refused_is_named_at_once(tmp_path: Path) -> None:
    """With SGLang's own example, whose precisions and folder have no counterpart in a file."""
    path = tmp_path / "flat.yaml"
    path.write_text("model_path: x\noutput_path: outputs/\nsp_size: 2\nvae_precision: fp16\nvae_sp: true\nfps: 24\n")
    with pytest.raises(ConfigError) as failure:
        read_config(str(path))
    lines = str(failure.value).removeprefix(f"{path}: ").splitlines()
    assert [line.strip().split(":")[0] for line in lines] == [
        "unknown section or flag 'output_path'",
        "--vae-precision",
        "--vae-sp",
    ]


@table(
    ("content", "said"),
    [
        ("host: 0.0.0.0", "--host: it is a flag of `serve`"),
        ("model-path: x\nmodel: y", "'model': model_path is given twice"),
        ("size: large", "size: expected a value such as 832*480"),
        ("enable-cpu-offload: 3", "expected true or false"),
        ("seconds: 1\nsedd: 3", "unknown section or flag 'sedd'. Did you mean 'seed'"),
        # The command's own flags are typed: a file of a stranger names no program and no place to write to.
        ("seed: 1\noutput-path: x.mp4", "'output-path': it is typed alone; write --output-path"),
        ("seed: 1\nimport: x.py", "unknown section or flag 'import'"),
        ("import: x.py", "unknown section 'import'"),
    ],
)
def test_other_flags_are_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "flat.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as failure:
        read_config(str(path))
    assert said in str(failure.value)
