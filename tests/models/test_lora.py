"""LoRA files in diffusers' format: merged at load, against diffusers on tiny weights, and switched afterwards."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cli_support import process_environment
from denoiser_inputs import text_inputs
from diffusers import WanPipeline
from safetensors.torch import save_file
from tiny_models import write_tiny_wan
from warm_python import run_python

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.attention import AttentionContext, StepInfo
from diffusion_runtime.config import LoraConfig, RuntimeConfig
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.weights.lora.reading import read_lora_file

ROOT = Path(__file__).parents[2]
WIDTH, RANK = 64, 4
# As lora_switch_script.py asks for it.
SWITCHED = GenerationRequest(
    "a ring", height=32, width=64, num_frames=5, num_inference_steps=2, guidance_scale=1.0, sampler="dmd", seed=3
)
MODULES = ("blocks.0.attn1.to_q", "blocks.1.attn1.to_out.0", "blocks.0.attn2.to_v", "blocks.1.ffn.net.2")


def lora_tensors(prefix: str = "transformer.", seed: int = 0, rank: int = RANK) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in MODULES:
        width = 96 if name.endswith("net.2") else WIDTH
        tensors[f"{prefix}{name}.lora_A.weight"] = 0.3 * torch.randn(rank, width, generator=generator)
        tensors[f"{prefix}{name}.lora_B.weight"] = 0.3 * torch.randn(WIDTH, rank, generator=generator)
    return tensors


def write(path: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = None) -> str:
    metadata = None if settings is None else {"format": "pt", "lora_adapter_metadata": json.dumps(settings)}
    save_file(dict(tensors), path, metadata=metadata)
    return str(path)


def velocity(transformer: Any, *, ours: bool, expert: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, 2, 4, 6, generator=generator)
    text = torch.randn(1, 7, 32, generator=generator)
    timestep = torch.tensor([700.0])
    if ours:
        return transformer(latents, timestep, text_inputs(text), AttentionContext(step=StepInfo(expert=expert)))
    with torch.no_grad():
        return transformer(latents, timestep, text, return_dict=False)[0]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("component", ["transformer_2.", "transformer.transformer_2."], ids=["own", "named"])
def test_a_component_that_the_model_has_not_is_named(tiny_wan_folder: Path, tmp_path: Path, component: str) -> None:
    """It changed nothing, without a word, and the recipe listed the file."""
    prefix = component.rpartition("transformer_2.")[0]
    path = write(tmp_path / "second.safetensors", lora_tensors(prefix or "transformer_2."))
    lora = LoraConfig(path, component="transformer_2")
    with pytest.raises(ModelLoadError, match="this LoRA is for transformer_2, and the model has transformer") as caught:
        inspect_pipeline(RuntimeConfig(str(tiny_wan_folder), device="cpu", lora=(lora,)))
    assert path in str(caught.value)


@pytest.mark.parametrize("settings", [None, {"transformer.lora_alpha": 10, "transformer.r": RANK}], ids=["no", "alpha"])
def test_two_files_with_scales_equal_diffusers(
    tiny_wan_folder: Path, tmp_path: Path, settings: dict[str, Any] | None
) -> None:
    if settings is not None:
        settings = {**settings, "transformer.target_modules": list(MODULES)}
    first = write(tmp_path / "first.safetensors", lora_tensors(), settings)
    second = write(tmp_path / "second.safetensors", lora_tensors(seed=2, rank=2))
    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32)
    plain = velocity(theirs.transformer, ours=False)
    with warnings.catch_warnings():
        # peft remarks that a model gets a second adapter.
        warnings.simplefilter("ignore")
        theirs.load_lora_weights(first, adapter_name="first")
        theirs.load_lora_weights(second, adapter_name="second")
    theirs.set_adapters(["first", "second"], [0.8, -0.5])
    expected = velocity(theirs.transformer, ours=False)
    ours = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[(first, 0.8), {"path": second, "scale": -0.5}])
    assert relative(plain, expected) > 1e-2
    assert relative(velocity(ours.transformer, ours=True), expected) < 1e-5


def test_keys_without_a_component_alphas_and_biases(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """Merged by hand: alpha / rank in front, and the bias of the upper map."""
    name = MODULES[0]
    tensors = {key: value for key, value in lora_tensors("").items() if name in key}
    tensors[f"{name}.alpha"] = torch.tensor(2.0)
    tensors[f"{name}.lora_B.bias"] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(7))
    path = write(tmp_path / "plain.safetensors", tensors)
    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32).transformer
    linear = theirs.get_submodule(name)
    with torch.no_grad():
        factor = 0.7 * 2.0 / RANK
        linear.weight += factor * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        linear.bias += factor * tensors[f"{name}.lora_B.bias"]
    ours = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[(path, 0.7)])
    assert relative(velocity(ours.transformer, ours=True), velocity(theirs, ours=False)) < 1e-5


ADAPTER = {"r": RANK, "lora_alpha": 12, "alpha_pattern": {"to_q": 2, "blocks.1.attn1.to_k": 6}}


@pytest.mark.parametrize("whole", [True, False], ids=["save_lora_weights", "save_lora_adapter"])
def test_files_that_peft_wrote_keep_their_alphas(tiny_wan_folder: Path, tmp_path: Path, whole: bool) -> None:
    """diffusers' two ways of saving: keys and settings with the component's name in front, and without."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model_state_dict

    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32)
    transformer = theirs.transformer
    transformer.add_adapter(PeftConfig(target_modules=["to_q", "to_k"], init_lora_weights=False, **ADAPTER))
    expected = velocity(transformer, ours=False)
    if whole:
        WanPipeline.save_lora_weights(
            tmp_path,
            transformer_lora_layers=get_peft_model_state_dict(transformer),
            transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
        )
    else:
        transformer.save_lora_adapter(tmp_path)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    ours = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[str(path)])
    assert relative(velocity(ours.transformer, ours=True), expected) < 1e-5
    factors = {module.name: module.weight[0].factor for module in read_lora_file(str(path)).modules}
    assert factors["blocks.0.attn1.to_k"] == 12 / RANK
    assert factors["blocks.1.attn1.to_k"] == 6 / RANK
    assert factors["blocks.1.attn2.to_q"] == 2 / RANK


def test_a_file_for_each_expert(tmp_path: Path) -> None:
    folder = write_tiny_wan(tmp_path / "experts", boundary_ratio=0.9)
    path = write(tmp_path / "a.safetensors", lora_tensors())
    plain = load_pipeline(str(folder), device="cpu").transformer
    changed = load_pipeline(str(folder), device="cpu", lora=[{"path": path, "component": "transformer_2"}]).transformer
    assert torch.equal(velocity(changed, ours=True, expert=0), velocity(plain, ours=True, expert=0))
    assert relative(velocity(changed, ours=True, expert=1), velocity(plain, ours=True, expert=1)) > 1e-2


def test_the_recipe_says_which_files_are_in(tiny_wan_folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", lora_tensors())
    recipe = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[(path, 0.5)]).recipe
    assert list(recipe["runtime"]["lora"]) == [{"path": path, "scale": 0.5, "component": "auto"}]
    assert RuntimeConfig.from_dict(recipe["runtime"]).lora == (LoraConfig(path, 0.5),)


# --- other files for a loaded model -----------------------------------------------------------------------------------


def weights_of(pipeline: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in pipeline.transformer.state_dict().items()}


@pytest.mark.parametrize("experts", [False, True], ids=["one", "experts"])
def test_switching_is_bit_for_bit_a_fresh_load(tmp_path: Path, experts: bool) -> None:
    """From a file to another, to both, to none; in bfloat16, where a difference of a difference would show."""
    folder = write_tiny_wan(tmp_path / "model", **({"boundary_ratio": 0.9} if experts else {}))
    component = "transformer_2" if experts else "auto"
    one = {"path": write(tmp_path / "one.safetensors", lora_tensors()), "component": component}
    two = {
        "path": write(tmp_path / "two.safetensors", lora_tensors(seed=2, rank=2)),
        "scale": 0.5,
        "component": component,
    }
    how: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16"}
    pipeline = load_pipeline(str(folder), **how, lora=[one])
    parameters = {name: value.data_ptr() for name, value in pipeline.transformer.named_parameters()}
    for loras in ([two], [one, two], [], [one]):
        pipeline.set_loras(loras)
        fresh = load_pipeline(str(folder), **how, lora=loras)
        found, expected = weights_of(pipeline), weights_of(fresh)
        assert all(torch.equal(found[name], expected[name]) for name in expected), loras
        assert pipeline.recipe == fresh.recipe
    # The weights stay where they are.
    assert {name: value.data_ptr() for name, value in pipeline.transformer.named_parameters()} == parameters


@pytest.mark.gpu
def test_switching_on_a_gpu_is_bit_for_bit_a_fresh_load(tiny_wan_folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "one.safetensors", lora_tensors())
    pipeline = load_pipeline(str(tiny_wan_folder), device="cuda", dtype="bfloat16")
    for loras in ([path], [(path, 0.3)], []):
        pipeline.set_loras(loras)
        expected = weights_of(load_pipeline(str(tiny_wan_folder), device="cuda", dtype="bfloat16", lora=loras))
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(pipeline).items())


def test_files_that_cannot_be_used_leave_the_model_as_it_was(tiny_wan_folder: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu", dtype="float16")
    before = weights_of(pipeline)
    for scale, told in ((1.0, "the LoRA's"), (1e4, "with its LoRA holds")):
        wide = {key: value.repeat(1, 2) if "lora_A" in key else value for key, value in lora_tensors().items()}
        tensors = wide if scale == 1.0 else {key: 100 * value for key, value in lora_tensors().items()}
        path = write(tmp_path / "bad.safetensors", tensors)
        with pytest.raises(ModelLoadError, match=told):
            pipeline.set_loras([(path, scale)])
        assert all(torch.equal(before[name], value) for name, value in weights_of(pipeline).items())
        assert list(pipeline.recipe["runtime"]["lora"]) == []


def test_a_distilled_file_with_many_steps_is_a_remark(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """By a preset where one is known for it, else by what its name says; and no longer when it is switched off."""
    known = write(tmp_path / "wan_lightning_4steps.safetensors", lora_tensors())
    unknown = write(tmp_path / "hyper_4steps.safetensors", lora_tensors())
    pipeline = load_pipeline(str(tiny_wan_folder), device="cpu", lora=[unknown])
    settings: dict[str, Any] = {"height": 16, "width": 16, "num_frames": 1, "guidance_scale": 1.0}

    def notes(num_steps: int) -> str:
        media = pipeline(GenerationRequest("a ring", num_inference_steps=num_steps, **settings))
        return " ".join(media.attention_report.notes)

    assert "4 steps without guidance" in notes(9)
    assert "num_inference_steps 4 and guidance_scale 1" in notes(9)
    assert "4 steps" not in notes(2)
    pipeline.set_loras([known])
    assert "use --preset lightning-4" in notes(9)
    assert "a preset made for it" not in notes(9)
    pipeline.set_loras([])
    assert "lightning" not in notes(9)


@pytest.mark.slow
def test_switching_on_two_processes_equals_one(tmp_path: Path) -> None:
    """With the same files on both, refused alike, and handed on to a rank that follows; other files end the run."""
    folder, out = write_tiny_wan(tmp_path / "model"), tmp_path / "differ"
    out.mkdir()
    lora = write(tmp_path / "one.safetensors", {key: 20 * value for key, value in lora_tensors().items()})
    environment = process_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    script = Path(__file__).with_name("lora_switch_script.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finished = run_python(*launcher, script, folder, lora, out, env=environment, max_ranks=2)
    assert sorted(finished.stdout.splitlines()) == ["rank 0: refused bad", "rank 1: refused bad"], finished.stderr
    assert finished.returncode != 0
    assert "as rank 0 has it, got" in finished.stderr
    for name, loras in (("with", [(lora, 0.5)]), ("bad", [(lora, 0.5)]), ("without", [])):
        expected = load_pipeline(str(folder), device="cpu", lora=loras)(SWITCHED).frames.astype(int)
        assert abs(numpy.load(out / f"{name}.npy").astype(int) - expected).max() <= 1, name
    changed = abs(numpy.load(out / "with.npy").astype(int) - numpy.load(out / "without.npy").astype(int)).max()
    assert changed > 10


# --- bad input --------------------------------------------------------------------------------------------------------


def test_odd_settings_are_refused(tmp_path: Path) -> None:
    for settings, told in (
        ({"transformer.alpha_pattern": {"(": 2}}, "alpha_pattern: '\\('"),
        ({"transformer.alpha_pattern": [1]}, "expected names with numbers"),
        ({"transformer.lora_alpha": "much"}, "lora_alpha: expected a number, got 'much'"),
        ({"transformer.use_dora": True}, "use_dora: expected magnitudes"),
    ):
        path = write(tmp_path / "odd.safetensors", lora_tensors(), settings)
        with pytest.raises(ModelLoadError, match=told):
            read_lora_file(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        read_lora_file(str(tmp_path / "none.safetensors"))
    (tmp_path / "a.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="a pickle can run code"):
        read_lora_file(str(tmp_path / "a.bin"))
    path = Path(write(tmp_path / "a.safetensors", lora_tensors()))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"a.safetensors"):
        read_lora_file(str(path))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("a.safetensors", "expected a list of files"),
        ([3], "expected a path"),
        ([{"path": "a", "strength": 1}], "unknown key 'strength'"),
        ([{"scale": 1}], "'path' is missing"),
        ([("a", "strong")], "lora.scale: expected a number"),
        ([("a", float("inf"))], "lora.scale: expected a number"),
        ([{"path": "a", "component": "vae"}], "lora.component: unknown value 'vae'"),
    ],
)
def test_a_wrong_choice_is_named(value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RuntimeConfig(lora=value)


@pytest.mark.filterwarnings("ignore")
def test_what_is_advised_for_oft_works(tiny_wan_folder: Path, tmp_path: Path) -> None:
    """merge_and_unload, save_pretrained, --transformer-path."""
    from peft import OFTConfig, get_peft_model

    theirs = WanPipeline.from_pretrained(tiny_wan_folder, dtype=torch.float32).transformer
    config = OFTConfig(r=0, oft_block_size=8, target_modules=["to_q"], init_weights=False)
    adapted = get_peft_model(theirs, config)
    adapted.save_pretrained(str(tmp_path / "oft"))
    how = {"device": "cpu", "dtype": "float32"}
    with pytest.raises(ModelLoadError, match=r"are of OFT, .*merge_and_unload\(\), then save_pretrained\(FOLDER\)"):
        load_pipeline(str(tiny_wan_folder), lora=[str(tmp_path / "oft")], **how)
    merged = adapted.merge_and_unload()
    merged.save_pretrained(str(tmp_path / "merged"))
    ours = load_pipeline(str(tiny_wan_folder), transformer_path=str(tmp_path / "merged"), **how)
    assert relative(velocity(ours.transformer, ours=True), velocity(merged, ours=False)) < 1e-5
