"""Loading: what is settled before any weight is read, and what a folder that cannot be used says."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import TINY_SIZES

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import (
    BackendUnavailableError,
    ConfigError,
    DiffusionRuntimeError,
    ModelLoadError,
    RequestError,
)
from diffusion_runtime.loading import inspect_pipeline, native_model, prepare
from diffusion_runtime.loading.native_model import PreparedModel

# A backend that no CPU has.
UNAVAILABLE = "fa"


def without_weights(folder: Path) -> Path:
    """The folder with every weight file and the tokenizer gone: whoever opens one fails."""
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    shutil.rmtree(folder / "tokenizer")
    return folder


LOADING = """
import json, sys
sys.path.insert(0, sys.argv[1])
from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.config import RuntimeConfig
from diffusion_runtime.errors import InstallationError
from diffusion_runtime.loading import inspect_pipeline
said = []
theirs = {"backend": "diffusers"}
for attempt in (lambda: load_pipeline(**theirs), lambda: inspect_pipeline(RuntimeConfig("shapes", **theirs))):
    try:
        attempt()
    except InstallationError as error:
        said.append(str(error))
# Needs neither, from the prompt to the frames.
small = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
pipeline = load_pipeline(device="cpu")
for sampler in ("unipc", "flow_match_euler"):
    assert pipeline(GenerationRequest("a red circle", sampler=sampler, **small)).frames.shape == (5, 32, 32, 3)
slow = ("diffusers", "transformers", "peft", "huggingface_hub", "torch._dynamo", "torch._inductor", "sympy", "triton")
# The memory plan, which every start on a GPU makes, runs a forward pass on the meta device.
load_pipeline(device="cpu", memory_limit="8GB", dtype="bfloat16")
imported = [name for name in slow if name in sys.modules]
print(json.dumps([said, imported]))
"""


def install(folder: Path, distribution: str, version: str, module: str, text: str) -> None:
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    path = folder.joinpath(*module.split("."))
    path.mkdir(parents=True)
    (path / "__init__.py").write_text(text)


def test_two_packages_that_keep_diffusers_from_being_imported_are_named_before_it_is(tmp_path: Path) -> None:
    """xformers looks for FlashAttention-2 in any package called flash_attn, and diffusers imports xformers.

    The embedded model needs neither diffusers nor transformers, and runs all the same."""
    install(tmp_path, "xformers", "0.0.35", "xformers.ops", "import flash_attn.flash_attn_interface")
    install(tmp_path, "flash-attn-4", "4.0.0b36", "flash_attn.cute", "")
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    assert len(said) == 2
    assert len(set(said)) == 1
    assert "No module named 'flash_attn.flash_attn_interface'; diffusers imports it wherever it is installed" in said[0]
    assert said[0].endswith("fix: pip uninstall xformers, which keeps the faster fa4; or pip uninstall flash-attn-4")
    assert not imported, "the embedded model's first command waits for their import"


# --- before the weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    [
        {"attention": UNAVAILABLE},
        {"attention_override": UNAVAILABLE},
        {"attention": {"per_role": {"cross": UNAVAILABLE}}},
        {"attention": {"schedule": [{"steps": "2--1", "backend": UNAVAILABLE}]}},
    ],
)
def test_a_choice_that_cannot_run_fails_before_any_weight_is_read(
    tiny_wan_copy: Callable[[], Path], choice: dict[str, Any]
) -> None:
    folder = without_weights(tiny_wan_copy())
    with pytest.raises(BackendUnavailableError) as caught:
        load_pipeline(str(folder), device="cpu", **choice)
    assert caught.value.reasons[0][0].startswith("fa")
    # The same folder without the choice gets as far as the files that are missing.
    with pytest.raises(ModelLoadError):
        load_pipeline(str(folder), device="cpu")


def test_the_environment_counts_like_a_config(
    tiny_wan_copy: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", UNAVAILABLE)
    with pytest.raises(BackendUnavailableError):
        load_pipeline(str(without_weights(tiny_wan_copy())), device="cpu")


@pytest.mark.parametrize(
    "choice", [{"attention": "torch_sdpaa"}, {"attention": {"per_role": {"slef": "torch_sdpa"}}}, {"dtype": "float33"}]
)
def test_a_wrong_value_fails_before_any_weight_is_read(
    tiny_wan_copy: Callable[[], Path], choice: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        load_pipeline(str(without_weights(tiny_wan_copy())), device="cpu", **choice)


def test_stages_are_said_in_order(tiny_wan_folder: Path) -> None:
    stages: list[str] = []
    load_pipeline(str(tiny_wan_folder), device="cpu", on_stage=stages.append)
    assert [stage.rpartition(" ")[2] for stage in stages] == ["attention", "encoder", "transformer", "decoder"]


def test_what_a_load_took_is_noted_in_parts_and_goes_with_the_first_generation(tiny_wan_folder: Path) -> None:
    pipeline = prepare(RuntimeConfig(str(tiny_wan_folder), device="cpu")).load()
    of_load = pipeline.load_timings
    assert set(of_load) == {"prepare", "read"}
    pipeline.note_load({"import": 1.0, "prepare": 2.0})
    request = GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=1, seed=1)
    first, second = pipeline(request).timings, pipeline(request).timings
    assert (first["import"], first["prepare"]) == (1.0, of_load["prepare"] + 2.0)
    assert not pipeline.load_timings
    assert second.keys() == first.keys() - {"import", "prepare", "read"}


def test_a_runtime_config_stands_alone(tiny_wan_folder: Path) -> None:
    config = RuntimeConfig(str(tiny_wan_folder), device="cpu", attention="reference")
    with pytest.raises(ConfigError, match="attention"):
        load_pipeline(config, attention="torch_sdpa")
    media = load_pipeline(config)(GenerationRequest("a red circle", **TINY_SIZES, num_inference_steps=1))
    assert {row.backend for row in media.attention_report.rows} == {"reference"}


# --- inspection -------------------------------------------------------------------------------------------------------


def test_a_description_needs_no_weights(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = without_weights(tiny_wan_copy())
    config = RuntimeConfig(str(folder), device="cpu", attention={"per_role": {"cross": "reference"}})
    description = inspect_pipeline(config)
    assert (description.folder, description.family) == (folder, "wan")
    assert (description.device, description.dtype) == ("cpu", "float32")
    assert [(row.role, row.when, row.layers, row.decision.backend) for row in description.attention] == [
        ("self", "always", (0, 1), "torch_sdpa"),
        ("cross", "always", (0, 1), "reference"),
    ]
    assert {item.component for item in description.libraries} == {"text_encoder", "vae"}
    assert description.rules.resolve(GenerationRequest("a red circle")).sampler == "unipc"
    with pytest.raises(RequestError, match="height"):
        description.rules.resolve(GenerationRequest("a red circle", height=33))


def test_a_schedule_is_described_rule_by_rule(tiny_wan_folder: Path) -> None:
    rules = {"schedule": [{"steps": "2--1", "layers": "1", "backend": "reference"}]}
    description = inspect_pipeline(RuntimeConfig(str(tiny_wan_folder), device="cpu", attention=rules))
    planned = {(row.role, row.layers, row.decision.backend) for row in description.attention}
    assert planned == {
        (role, layers, backend)
        for role in ("self", "cross")
        for layers, backend in (((0, 1), "torch_sdpa"), ((1,), "reference"))
    }


def test_a_description_is_plain_values_and_knows_its_model(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    config = RuntimeConfig(str(folder), device="cpu")
    first = inspect_pipeline(config).to_dict()
    assert json.loads(json.dumps(first)) == first
    assert inspect_pipeline(config).to_dict() == first
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(path.read_text().replace('"flow_shift": 3.0', '"flow_shift": 4.0'))
    assert inspect_pipeline(config).to_dict()["model"]["config_sha256"] != first["model"]["config_sha256"]


def test_the_scheduler_folder_goes_over_the_family_and_generation_json_over_both(
    tiny_wan_copy: Callable[[], Path],
) -> None:
    folder = tiny_wan_copy()
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 9.0}))

    def defaults() -> tuple[Any, Any, Any]:
        found = inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules.defaults
        return found["sampler"], found["flow_shift"], found["num_inference_steps"]

    assert defaults() == ("flow_match_euler", 9.0, 50)
    (folder / "generation.json").write_text('{"defaults": {"sampler": "unipc", "num_inference_steps": 7}}')
    assert defaults() == ("unipc", 9.0, 7)


# --- folders that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.safetensors",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_half_copied_folder_names_the_part(tiny_wan_copy: Callable[[], Path], name: str, damage: str) -> None:
    folder = tiny_wan_copy()
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(ModelLoadError) as caught:
        load_pipeline(str(folder), device="cpu")
    assert name.partition("/")[0] in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_pipeline(str(tmp_path / "nowhere"))


def test_an_unsupported_class_is_named(tiny_wan_copy: Callable[[], Path]) -> None:
    folder = tiny_wan_copy()
    path = folder / "model_index.json"
    path.write_text(path.read_text().replace("WanTransformer3DModel", "MochiTransformer3DModel"))
    with pytest.raises(DiffusionRuntimeError, match=r"MochiTransformer3DModel.*Supported: .*--backend diffusers"):
        load_pipeline(str(folder), device="cpu", backend="native")


class _Replies:
    """A world of one rank: rank 0 answers, another reads the answers in the order in which they were given."""

    place = SimpleNamespace(local_world_size=2)

    def __init__(self, given: list[str] | None = None) -> None:
        self.is_first = given is None
        self.texts: list[str] = [] if given is None else given

    def from_first(self, make: Callable[[], str]) -> str:
        if not self.is_first:
            return self.texts.pop(0)
        self.texts.append(make())
        return self.texts[-1]


@pytest.mark.parametrize("answer", [True, False])
def test_ranks_plan_alike_whatever_each_finds_free(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that plans where another does not asks the first one once more, and may decode in tiles alone."""
    prepared = prepare(RuntimeConfig("shapes", device="cpu"))
    assert isinstance(prepared, PreparedModel)
    requests = [prepared.rules.resolve(GenerationRequest("a red circle", height=32, width=32, num_frames=5))]
    plans, texts = [], list[str]()
    for rank in range(2):
        monkeypatch.setattr(native_model, "may_exceed_the_machine", lambda _, rank=rank: answer == (rank == 0))
        world: Any = _Replies(None if rank == 0 else texts)
        planned = dataclasses.replace(prepared, world=world).planned_to_load(requests)
        texts = list(world.texts)
        plans.append((planned.description.memory is None, planned.description.config.vae_tiling))
    assert plans == [(not answer, "auto")] * 2
    assert not texts


# --- a fresh process --------------------------------------------------------------------------------------------------

CHILD = """
import sys
from diffusion_runtime import GenerationRequest, load_pipeline
pipeline = load_pipeline(sys.argv[1], device="cpu")
pipeline(GenerationRequest("a red circle", height=32, width=32, num_frames=5, num_inference_steps=2))
heavy = {"scipy", "sklearn", "torchvision", "tensorflow", "pandas", "matplotlib", "imageio", "typer"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_a_generation_writes_nothing_and_imports_no_more_than_it_needs(tiny_wan_folder: Path) -> None:
    """Standard output is for results and standard error for our own words; libraries stay quiet on both."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, str(tiny_wan_folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
