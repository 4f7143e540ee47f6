"""The whole generation against diffusers' own modular FLUX.3 pipelines: same folder, noise and prompts, float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from diffusers import (
    ClassifierFreeGuidance,
    Flux3DistilledModularPipeline,
    Flux3ModularPipeline,
    Flux3Transformer2DModel,
)
from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from family_parity import assert_equal_runs, record_latents, relative
from PIL import Image
from safetensors.torch import save_file
from tiny_flux3 import TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.models.flux3.editing import references
from diffusion_runtime.models.flux3.text import MAX_TOKENS
from diffusion_runtime.models.modular_folder import open_folder, parts_elsewhere
from diffusion_runtime.models.registry import family_for_folder

pytestmark = pytest.mark.filterwarnings("ignore")
# The second takes another multiple of 80 tokens.
PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background. " * 7)


@pytest.fixture(scope="module")
def base(tiny_folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, Any]:
    return pair(Flux3ModularPipeline, tiny_folder_of("flux3"), tmp_path_factory.mktemp("modular"))


@pytest.fixture(scope="module")
def distilled(tiny_flow_map: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pipeline, Any]:
    return pair(Flux3DistilledModularPipeline, tiny_flow_map, tmp_path_factory.mktemp("modular"))


def pair(modular_class: Any, folder: Path, target: Path) -> tuple[Pipeline, Any]:
    """Ours of the modular folder that theirs writes, and theirs."""
    blocks = getattr(diffusers, modular_class.default_blocks_name)()
    # It would rewrite the prompt.
    blocks.sub_blocks.pop("prompt_upsampler")
    theirs = modular_class(blocks=blocks, pretrained_model_name_or_path=str(folder))
    theirs.load_components(names=["scheduler", "vae", "text_encoder", "transformer"], dtype=torch.float32)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    # What the step calls of a processor: torchvision, which the real one prepares pictures by, is not needed.
    tokenizer.tokenizer = tokenizer
    # Its default is 16 pixels a token, of the published autoencoder.
    theirs.update_components(tokenizer=tokenizer, image_processor=Flux3ImageProcessor(vae_scale_factor=4))
    theirs.set_progress_bar_config(disable=True)
    del tokenizer.tokenizer
    theirs.save_pretrained(str(target))
    tokenizer.tokenizer = tokenizer
    ours = load_pipeline(str(target), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours, theirs


def request(**values: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompt": PROMPTS[0], **TINY_SIZES, "seed": 5, "num_inference_steps": 2, **values})


def compare(models: tuple[Pipeline, Any], wanted: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    ours, theirs = models
    asked = wanted[0]
    paths = [asked.image_path] if isinstance(asked.image_path, str) else list(asked.image_path or ())

    def run_one(item: GenerationRequest, noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        """Their pipeline takes one prompt, and has no callback: the scheduler's steps are kept."""
        latents: list[torch.Tensor] = []
        step, given = theirs.scheduler.step, {}

        def keep(*arguments: Any, **keywords: Any) -> Any:
            result = step(*arguments, **keywords)
            latents.append(result[0].mT.unflatten(2, noise.shape[2:]).clone())
            return result

        if hasattr(theirs, "guider"):
            theirs.update_components(guider=ClassifierFreeGuidance(guidance_scale=item.guidance_scale))
            given["negative_prompt"] = item.negative_prompt
        theirs.scheduler.step = keep
        try:
            images = theirs(
                prompt=item.prompt,
                image=[Image.open(path) for path in paths] or None,
                # As the request says them: what is left out follows from the images on both sides.
                height=asked.height,
                width=asked.width,
                num_inference_steps=item.num_inference_steps,
                latents=noise.squeeze(2).clone(),
                output_type="np",
                output="images",
                **given,
            )
        finally:
            del theirs.scheduler.step
        return latents, images[:, None]

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        each = [run_one(item, noise[index : index + 1]) for index, item in enumerate(resolved)]
        steps = [torch.cat(latents) for latents in zip(*(latents for latents, _ in each), strict=True)]
        return steps, numpy.concatenate([images for _, images in each])

    assert_equal_runs(ours, wanted, kept, run_theirs)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Neither of whole tokens."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, (height, width) in (("wide", (65, 86)), ("tall", (78, 67))):
        rows, columns = numpy.mgrid[0:height, 0:width]
        pixels = numpy.stack([3 * rows, 2 * columns, 255 - rows - columns], axis=-1).astype(numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return str(folder / "wide.png"), str(folder / "tall.png")


def test_the_base_model_equals_diffusers(base: Any, pictures: tuple[str, str], kept: list[torch.Tensor]) -> None:
    """Unequal prompts in one batch of two branches; several images, in either mode of guidance."""
    both = [request(prompt=prompt, seed=seed, negative_prompt="a star") for seed, prompt in enumerate(PROMPTS)]
    compare(base, both, kept)
    compare(base, [request(image_path=pictures, guidance_mode="two_pass", height=20, width=12)], kept)


def test_the_distilled_model_equals_diffusers(
    distilled: Any, pictures: tuple[str, str], kept: list[torch.Tensor]
) -> None:
    """Several images; an only one says the size, whose edges are its reflection."""
    compare(distilled, [request(prompt=prompt, image_path=pictures) for prompt in PROMPTS], kept)
    ours = distilled[0]
    resolved = ours.resolve(GenerationRequest("a star", image_path=pictures[0]))
    assert (resolved.height, resolved.width, resolved.num_inference_steps) == (68, 88, 16)
    # diffusers crops the output to the image then; here that is said.
    said = [
        [remark for remark in ours.rules.unused(ours.resolve(each)) if "edges are made of its reflection" in remark]
        for each in (resolved, request(image_path=pictures[0], height=64, width=64), request(image_path=pictures))
    ]
    assert list(map(len, said)) == [1, 0, 0]
    compare(distilled, [request(image_path=pictures[0], height=68, width=88)], kept)


def test_a_prompt_is_encoded_as_by_diffusers(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one and of two times 80 tokens, a mark of a picture alone, and longer than there is room for: what is cut is
    told."""
    ours, theirs = base
    assert ours.text_encoder.max_tokens == MAX_TOKENS
    monkeypatch.setattr(ours.text_encoder, "max_tokens", 170)
    prompts = [*PROMPTS, "<|image_pad|>", "a star " * 200]
    found = ours.text_encoder.encode(prompts)
    encode = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds
    for index, prompt in enumerate(prompts):
        plain = prompt.replace("<|image_pad|>", "")
        with torch.no_grad():
            expected = encode(theirs.text_encoder, theirs.tokenizer, plain, max_sequence_length=170)[0]
        assert relative(found.embeddings[index, : found.lengths[index]], expected) < 1e-5
    assert found.lengths == (80, 160, 80, 170)
    assert [count > 0 for count in found.num_cut_tokens] == [False, False, False, True]


def test_pixels_are_those_of_diffusers(tmp_path: Path) -> None:
    """Of an only image and of one among several; an only one of published sizes is as large as theirs."""
    processor, images, path = Flux3ImageProcessor(), references(16), tmp_path / "given.png"
    given = Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (70, 501, 3), dtype=numpy.uint8))
    given.save(path)
    for count, mode in ((1, "fill"), (2, "crop")):
        expected, _ = processor.preprocess(given, resize_mode=mode)
        found = images.among(count).pixels(str(path))
        assert found.shape == expected.shape, mode
        assert (found - expected).abs().max() < 1e-6
    alone = images.among(1)
    for height, width in ((2049, 2047), (4097, 1020), (2200, 2010), (900, 5000)):
        theirs = processor._resize_if_canvas_exceeds_area(Image.new("L", (width, height)))
        assert alone.scaled((height, width)) == theirs.size[::-1]
        assert alone.encoded_size((height, width)) == processor._get_canvas_height_width(*theirs.size[::-1])


def test_what_cannot_be_used_is_said_before_the_weights_load(
    tiny_flow_map: Path, pictures: tuple[str, str], tmp_path: Path
) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_flow_map), device="cpu")).rules
    Image.new("RGB", (63, 80)).save(tmp_path / "small.png")
    for given, told in (
        ({"image_path": pictures[:1] * 11}, "image_path: expected at most 10 images, got 11"),
        ({"image_path": str(tmp_path / "small.png")}, "small.png is 63 x 80 .*: expected sides of at least 64 pixels"),
        ({"guidance_scale": 4.0}, "guidance_scale"),
        ({"sampler": "unipc"}, "sampler: unipc does not integrate the mean velocity"),
    ):
        with pytest.raises(RequestError, match=told):
            rules.resolve(request(**given))


def test_explain_counts_what_is_computed_once(
    tiny_folder_of: Callable[[str], Path], tiny_flow_map: Path, pictures: tuple[str, str]
) -> None:
    """Blocks of text and references alone: apart from the steps in the base model, in every step of a flow map."""
    found = {}
    for name, folder in (("base", tiny_folder_of("flux3")), ("flow map", tiny_flow_map)):
        prepared = prepare(RuntimeConfig(str(folder), device="cpu"), is_dry_run=True)
        resolved = prepared.rules.resolve(request(image_path=pictures))
        found[name] = {part.name for part in explain(prepared, resolved).parts}
    own = {"attention, flux3.text_self", "attention, flux3.reference_self"}
    assert "prefill" in found["base"]
    assert not own & found["base"]
    assert own <= found["flow map"]
    assert "prefill" not in found["flow map"]


def test_the_prompt_upsampler_is_left_out_and_said(
    tiny_folder_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a modular folder, where it is in a repository of its own: nothing of that is asked for."""
    folder = Path(shutil.copytree(tiny_folder_of("flux3"), tmp_path / "modular"))
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").unlink()
    classes = {name: pair for name, pair in index.items() if isinstance(pair, list)}
    classes["prompt_upsampler"] = ["transformers", "Qwen3_5ForConditionalGeneration"]
    entries: dict[str, Any] = {
        name: [*pair, {"pretrained_model_name_or_path": "ORG/upsampler", "subfolder": name}]
        for name, pair in classes.items()
    }
    whole = {"_class_name": "Flux3ModularPipeline", **entries}
    (folder / "modular_model_index.json").write_text(json.dumps(whole))
    with caplog.at_level("INFO"):
        opened = open_folder(ModelFolder(folder), offline=True)
    assert "prompt_upsampler is left out" in caplog.text
    assert family_for_folder(opened).name == "flux3"
    assert parts_elsewhere(folder) == {}
    with pytest.raises(ModelLoadError, match="ORG/upsampler"):
        open_folder(ModelFolder(folder), backend="diffusers", offline=True)


def test_a_lora_equals_that_of_diffusers(
    base: Any, tiny_folder_of: Callable[[str], Path], kept: list[torch.Tensor], tmp_path: Path
) -> None:
    """On every linear map; the authors' names are compared in test_lora_names.py."""
    folder, generator = tiny_folder_of("flux3"), torch.Generator().manual_seed(0)
    theirs = Flux3Transformer2DModel.from_pretrained(folder / "transformer")
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, module in theirs.named_modules():
            if isinstance(module, torch.nn.Linear):
                down = torch.randn(3, module.in_features, generator=generator) / module.in_features**0.5
                up = 0.1 * torch.randn(module.out_features, 3, generator=generator)
                module.weight += up @ down
                tensors |= {f"transformer.{name}.lora_A.weight": down, f"transformer.{name}.lora_B.weight": up}
    save_file(tensors, tmp_path / "lora.safetensors")
    changed = Path(shutil.copytree(folder, tmp_path / "changed"))
    theirs.save_pretrained(changed / "transformer")
    made = []
    for ours in (
        load_pipeline(str(changed), device="cpu"),
        load_pipeline(str(folder), device="cpu", lora=[str(tmp_path / "lora.safetensors")]),
        base[0],
    ):
        kept.clear()
        ours(request(guidance_scale=1.0))
        made.append(kept[-1])
    assert relative(made[1], made[0]) < 1e-5 < 1e-3 < relative(made[2], made[0])
