"""Modular folders of diffusers: components in several repositories, read natively or by diffusers' ModularPipeline."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from plain_folders import write_plain
from tiny_encoders import HIDDEN, tiny_qwen3, tiny_t5
from tiny_models import write_tiny_wan
from tiny_qwen_image_21 import write_tiny_qwen_image_21

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.modular_folder import open_folder
from scripts.train_embedded.eight_bits import write_folder

pytestmark = pytest.mark.filterwarnings("ignore")
INDEX = "modular_model_index.json"


def as_modular(class_name: str, folder: Path, target: Path, **settings: Any) -> Path:
    """Write an ordinary folder as diffusers' modular class does; settings: of its config."""
    import diffusers

    pipeline = getattr(diffusers, class_name)(pretrained_model_name_or_path=str(folder))
    pipeline.load_components(dtype=torch.float32)
    pipeline.update_components(**settings)
    pipeline.save_pretrained(str(target))
    if (folder / "generation.json").exists():
        shutil.copy(folder / "generation.json", target)
    return target


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of an index: values, or of a component the keys of where it is."""
    index = json.loads((folder / INDEX).read_text())
    for name, change in changes.items():
        if isinstance(change, dict) and name in index:
            index[name][2].update(change)
        else:
            index[name] = change
    (folder / INDEX).write_text(json.dumps(index))


def frames(folder: str | Path, request: GenerationRequest, **options: Any) -> Any:
    return load_pipeline(str(folder), device="cpu", **options)(request).frames


@pytest.fixture
def z_image(tiny_folder_of: Callable[[str], Path], tmp_path: Path) -> Path:
    return as_modular("ZImageModularPipeline", tiny_folder_of("z_image"), tmp_path / "modular")


def small(**values: Any) -> GenerationRequest:
    return GenerationRequest("a red circle", height=32, width=32, num_inference_steps=2, seed=3, **values)


def test_a_native_model_by_its_modular_folder(tiny_folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Bit for bit what the ordinary folder makes, in float32; of one per way of naming the class and the settings."""
    sigmas = [1.0, 0.6, 0.3]
    turbo = write_tiny_qwen_image_21(tmp_path / "turbo", sample_sigmas=sigmas)
    for number, (folder, class_name, request) in enumerate(
        [
            (tiny_folder_of("z_image"), "ZImageModularPipeline", small()),
            (write_tiny_wan(tmp_path / "wan"), "WanModularPipeline", small(num_frames=5)),
            (
                tiny_folder_of("ltx2"),
                "LTX2ModularPipeline",
                GenerationRequest("a star", height=64, width=64, num_frames=9, num_inference_steps=2),
            ),
            (tiny_folder_of("hunyuan_video_15"), "HunyuanVideo15ModularPipeline", small(num_frames=5)),
            (turbo, "QwenImage21TurboModularPipeline", GenerationRequest("a star", height=64, width=64)),
        ]
    ):
        modular = as_modular(class_name, folder, tmp_path / str(number))
        pipeline = load_pipeline(str(modular), device="cpu")
        assert (pipeline(request).frames == frames(folder, request)).all(), class_name
        assert type(pipeline).__module__ == "diffusion_runtime.pipeline"
    assert pipeline.defaults["sigmas_before_shift"] == tuple(sigmas)
    assert pipeline.defaults["num_inference_steps"] == len(sigmas)


def test_guiders_are_defaults_or_an_error(z_image: Path, tmp_path: Path) -> None:
    from diffusers import AdaptiveProjectedGuidance, ClassifierFreeGuidance

    spec = {"pretrained_model_name_or_path": "ORG/NAME", "subfolder": "guider"}
    ClassifierFreeGuidance(guidance_scale=4.5).save_pretrained(z_image / "guider")
    edit(z_image, guider=["diffusers", "ClassifierFreeGuidance", spec])
    rules = inspect_pipeline(RuntimeConfig(str(z_image), device="cpu")).rules
    # Z-Image counts from the conditional prediction.
    assert rules.defaults["guidance_scale"] == 3.5
    ClassifierFreeGuidance(guidance_scale=4.5, stop=0.5).save_pretrained(z_image / "guider")
    with pytest.raises(ModelLoadError, match=r"guider_config\.json: key 'stop': expected 1\.0"):
        inspect_pipeline(RuntimeConfig(str(z_image), device="cpu"))
    AdaptiveProjectedGuidance().save_pretrained(z_image / "guider")
    edit(z_image, guider=["diffusers", "AdaptiveProjectedGuidance", spec])
    with pytest.raises(ModelLoadError, match="key 'guider': expected ClassifierFreeGuidance, got Adaptive"):
        inspect_pipeline(RuntimeConfig(str(z_image), device="cpu"))
    edit(z_image, guider=None, noise_offset=0.1)
    with pytest.raises(ModelLoadError, match=r"key 'noise_offset': 0\.1 is unknown"):
        inspect_pipeline(RuntimeConfig(str(z_image), device="cpu"))


def test_components_of_other_repositories(
    hub: SimpleNamespace,
    z_image: Path,
    tiny_folder_of: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a repository on the hub: its json when it is opened, its weights when they are read, and then no network."""
    parts = hub.root / "parts" / "all"
    shutil.copytree(z_image / "vae", parts / "vae")
    shutil.copytree(z_image / "transformer", hub.root / "parts" / "alone")
    shutil.copytree(z_image, hub.root / "owner" / "modular", ignore=shutil.ignore_patterns("vae", "transformer"))
    model = hub.root / "owner" / "modular"
    for component in ("scheduler", "text_encoder", "tokenizer"):
        edit(model, **{component: {"pretrained_model_name_or_path": "owner/modular"}})
    edit(model, vae={"pretrained_model_name_or_path": "parts/all"})
    edit(model, transformer={"pretrained_model_name_or_path": "parts/alone", "subfolder": ""})
    assert run(["info", str(model)]) == 0
    assert "AutoencoderKL parts/all/vae@main" in " ".join(capsys.readouterr().out.split())
    assert run(["info", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["elsewhere"] == ["transformer", "vae"]
    # A folder of that name here is not what the hub's index means.
    Path("parts/all").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        description = inspect_pipeline(RuntimeConfig("owner/modular", device="cpu"))
    assert f"vae comes from parts/all, commit {hub.commit_of('main')}" in caplog.text
    assert not list(hub.cache.rglob("*.safetensors"))
    assert description.to_dict()["model"]["commit"] == hub.commit_of("main")
    expected = frames(tiny_folder_of("z_image"), small())
    assert (frames("owner/modular", small()) == expected).all()
    assert len(list(hub.cache.rglob("*.safetensors"))) == 3
    shutil.rmtree(hub.cache)
    assert run(["models", "download", "owner/modular", "--dry-run", "--json"]) == 0
    names = {file["name"] for file in json.loads(capsys.readouterr().out)["files"]}
    assert {INDEX, "parts/alone/config.json", "parts/all/vae/diffusion_pytorch_model.safetensors"} <= names
    assert not list(hub.cache.rglob("*.safetensors"))
    assert run(["models", "download", "owner/modular"]) == 0
    hub.requests.clear()
    assert (frames("owner/modular", small(), offline=True) == expected).all()
    assert (frames("owner/modular", small(), backend="diffusers", offline=True).shape) == expected.shape
    assert hub.requests == []
    capsys.readouterr()
    assert run(["models", "list", "--cached", "--json"]) == 0
    rows = {row["model_path"]: row["runs"] for row in json.loads(capsys.readouterr().out)["models"]}
    assert rows["owner/modular"] == "native"
    for change, said in (
        ({"pretrained_model_name_or_path": str(z_image)}, "one repository of the hub may not name a place"),
        ({"pretrained_model_name_or_path": "../../all"}, "one repository of the hub may not name a place"),
        ({"pretrained_model_name_or_path": "parts/none"}, "there is no folder parts/none here and no such model"),
        ({"subfolder": "../vae"}, "expected a folder inside the repository, got '../vae'"),
        ({"subfolder": "/etc"}, "expected a folder inside the repository, got '/etc'"),
        ({"subfolder": "none"}, "there is no component in 'none'"),
        ({"revision": "v2"}, "parts/all has no revision v2"),
        ({"config": "x"}, "'config': 'x' is unknown here"),
    ):
        shutil.copytree(model, hub.root / "owner" / "edited", dirs_exist_ok=True)
        edit(hub.root / "owner" / "edited", vae=change)
        shutil.rmtree(hub.cache / "models--owner--edited", ignore_errors=True)
        with pytest.raises(ModelLoadError, match=said):
            inspect_pipeline(RuntimeConfig("owner/edited", device="cpu"))


def test_code_and_indexes_that_are_refused_or_ignored(
    z_image: Path, tiny_folder_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(tiny_folder_of("z_image"), whole)
    shutil.copy(z_image / INDEX, whole)

    def opened(folder: Path) -> ModelFolder:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            return open_folder(ModelFolder(folder))

    assert opened(whole).modular is None
    assert f"{INDEX} is ignored, model_index.json is used" in caplog.text
    ordinary = json.loads((whole / "model_index.json").read_text())
    (whole / "model_index.json").write_text(json.dumps({**ordinary, "_class_name": "ZImageModularPipeline"}))
    assert opened(whole).modular is not None
    assert f"model_index.json is ignored, {INDEX} is used" in caplog.text
    copy = Path(shutil.copytree(z_image, tmp_path / "copy"))
    assert opened(copy).digest == opened(z_image).digest, "wherever it is"
    edit(z_image, _blocks_class_name="ZImageCoreDenoiseStep")
    assert opened(z_image).read_json("model_index.json")["_class_name"] == "ZImageModularPipeline"
    assert "its blocks are 'ZImageCoreDenoiseStep', which no native model is" in caplog.text
    with pytest.raises(ModelLoadError, match="`--backend diffusers` runs the folder"):
        open_folder(ModelFolder(z_image), backend="native")
    edit(z_image, _class_name="ZImagePipeline")
    with pytest.raises(ModelLoadError, match="expected a modular pipeline of diffusers, got 'ZImagePipeline'"):
        opened(z_image)
    edit(z_image, _class_name="ZImageModularPipeline", scheduler=["my_code", "Scheduler", {}])
    assert "scheduler" not in opened(z_image).read_json("model_index.json"), "one that the pipeline is without"
    place = {"pretrained_model_name_or_path": "x", "subfolder": "scheduler"}
    edit(z_image, scheduler=[None, None, {**place, "type_hint": [None, None]}])
    assert "scheduler" not in opened(z_image).read_json("model_index.json"), "one without a class"
    assert "scheduler is left out: the index names no class of it" in caplog.text
    edit(z_image, scheduler=["my_code", "Scheduler", place])
    with pytest.raises(ModelLoadError, match="'my_code' is code that comes with the folder"):
        opened(z_image)
    (z_image / "modular_config.json").write_text('{"auto_map": {"ModularPipelineBlocks": "block.Block"}}')
    (z_image / "block.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelLoadError, match=r"code that comes with the folder \(auto_map\), and no such code is run"):
        opened(z_image)


def write_anima(folder: Path) -> Path:
    """Write the folder of a pipeline that is modular alone, and of a transformer that no family here loads."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        (text_encoder, tokenizer), (_, t5_tokenizer) = tiny_qwen3(), tiny_t5(64)
        pipeline = diffusers.AnimaModularPipeline()
        pipeline.update_components(
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            t5_tokenizer=t5_tokenizer,
            text_conditioner=diffusers.AnimaTextConditioner(
                HIDDEN, 16, 16, 1, 2, target_vocab_size=len(t5_tokenizer), min_sequence_length=8
            ),
            transformer=diffusers.CosmosTransformer3DModel(
                in_channels=4,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                text_embed_dim=16,
                adaln_lora_dim=4,
                max_size=(4, 16, 16),
                extra_pos_embed_type=None,
                # Its mask needs torchvision.
                concat_padding_mask=False,
            ),
            vae=diffusers.AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 2, 2, 2],
                num_res_blocks=1,
                temperal_downsample=[False, True, True],
                latents_mean=[0.0] * 4,
                latents_std=[1.0] * 4,
            ),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    pipeline.save_pretrained(str(folder))
    return folder


def test_components_in_8_bits_are_dequantised(z_image: Path) -> None:
    write_folder(z_image, z_image)
    found = load_pipeline(str(z_image), device="cpu", dtype="float32", backend="diffusers")(small())
    assert [note for note in found.attention_report.notes if note.startswith("transformer: stored as int8")]
    write_plain(z_image, z_image)
    assert (found.frames == frames(z_image, small(), dtype="float32", backend="diffusers")).all()


def test_a_modular_pipeline_alone_runs_as_diffusers_does(tmp_path: Path) -> None:
    import diffusers

    folder = write_anima(tmp_path / "anima")
    # diffusers' own pipeline, which is what models without a family here get.
    pipeline = load_pipeline(str(folder), device="cpu", attention="torch_sdpa", backend="diffusers")
    media = pipeline(small(negative_prompt="a star"))
    theirs = diffusers.AnimaModularPipeline(pretrained_model_name_or_path=str(folder))
    theirs.load_components(dtype=torch.float32)
    image = theirs(
        prompt="a red circle",
        negative_prompt="a star",
        height=32,
        width=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        output="images",
    )
    assert (media.frames == (numpy.asarray(image) * 255).round().astype(numpy.uint8)).all()
    assert media.recipe["model"]["family"] == "AnimaModularPipeline"
    rows = {row.role: row for row in media.attention_report.rows}
    # Two blocks, two steps, two guidance branches.
    assert {role: (row.backend, row.count) for role, row in rows.items()} == {
        "self": ("torch_sdpa", 8),
        "cross": ("torch_sdpa", 8),
    }
    for field, value in (("guidance_scale", 2.0), ("num_frames", 5), ("last_image_path", "x.png")):
        with pytest.raises(RequestError, match=f"{field}: AnimaModularPipeline"):
            pipeline.resolve(small(**{field: value}))
    edit(folder, noise_offset=0.1)
    with pytest.raises(ModelLoadError, match=r"key 'noise_offset': 0\.1 is unknown to its blocks"):
        load_pipeline(str(folder), device="cpu", backend="diffusers")
    edit(folder, _blocks_class_name="NoBlocks")
    with pytest.raises(ModelLoadError, match="has no NoBlocks"):
        load_pipeline(str(folder), device="cpu", backend="diffusers")
