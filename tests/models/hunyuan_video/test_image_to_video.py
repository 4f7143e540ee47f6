"""HunyuanVideo from an image against diffusers' HunyuanVideoImageToVideoPipeline: same folder, noise and image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import HunyuanVideoImageToVideoPipeline, HunyuanVideoTransformer3DModel
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import DEFAULT_PROMPT_TEMPLATE
from family_cases import changed
from family_parity import load_theirs, load_transformer, record_latents, relative
from PIL import Image
from safetensors.torch import save_file
from tiny_hunyuan_video import TINY_SIZES, write_tiny_hunyuan_video

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.hunyuan_video.family import FAMILY
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.text_encoders.offloaded import OffloadedTextEncoder

CONCAT, REPLACE = "latent_concat", "token_replace"
PROMPTS = ("a red circle moving left", "two objects: a blue star, and a green ring on a striped background.")
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    place = tmp_path_factory.mktemp("hunyuan_video")
    for kind in (CONCAT, REPLACE):
        # As published: the first release takes no guidance.
        write_tiny_hunyuan_video(
            place / kind, image_condition=kind, has_guidance=kind == REPLACE, num_layers=1, num_single_layers=1
        )
    return lambda kind: place / kind


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows, columns = numpy.mgrid[0:40, 0:60]
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.fromarray(numpy.stack([6 * rows, 4 * columns, 255 - 6 * rows], axis=-1).astype(numpy.uint8)).save(path)
    return str(path)


def request(image: str | None, **values: Any) -> GenerationRequest:
    fields = {"prompt": PROMPTS[0], **TINY_SIZES, "num_inference_steps": 3, "seed": 5, "image_path": image}
    return GenerationRequest(**(fields | values))


def load(folder: Path) -> Pipeline:
    ours = load_pipeline(str(folder), device="cpu")
    assert isinstance(ours, Pipeline)
    return ours


def template_of(pipeline: Any) -> dict[str, Any]:
    """Theirs, for 16 tokens of a picture instead of 576."""
    text = DEFAULT_PROMPT_TEMPLATE["template"].format("a")
    start = pipeline.tokenizer(text).input_ids.index(pipeline.text_encoder.config.image_token_index)
    places = {"image_emb_start": start, "image_emb_end": start + 16, "image_emb_len": 16}
    return {**DEFAULT_PROMPT_TEMPLATE, **places}


@pytest.mark.parametrize("kind", [CONCAT, REPLACE])
def test_a_generation_equals_diffusers(
    folder_of: FolderOf, kind: str, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch; and guidance by a negative prompt about a black image, of which diffusers makes one."""
    ours, theirs = load(folder_of(kind)), load_theirs(HunyuanVideoImageToVideoPipeline, folder_of(kind))
    kept, is_concat = record_latents(monkeypatch), kind == CONCAT
    expected: list[torch.Tensor] = []

    def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        expected.append(values["latents"].clone())
        return {}

    scale = "guidance_scale" if is_concat else "true_cfg_scale"
    batch = [request(image, prompt=prompt, seed=seed) for prompt, seed in zip(PROMPTS, (5, 6), strict=True)]
    guided = request(image, num_frames=5, negative_prompt="a yellow square", **{scale: 3.0})
    same = request(image, num_frames=5, negative_prompt=PROMPTS[0], guidance_mode="two_pass", **{scale: 3.0})
    for requests in (batch, [guided], [same]):
        first = ours.resolve(requests[0])
        kept.clear()
        media = ours.generate(requests)
        # Of what diffusers denoises for a model with the image beside its latents, it leaves 4 frames out.
        num_frames = first.num_frames + (4 if is_concat else 0)
        shape = (16, (num_frames - 1) // 4 + 1, first.height // 8, first.width // 8)
        noise = initial_noise(shape, [each.seed for each in requests])
        expected.clear()

        frames = theirs(
            image=[Image.open(image)] * len(requests),
            prompt=[each.prompt for each in requests] if requests is batch else first.prompt,
            negative_prompt=None if requests is batch else first.negative_prompt,
            height=first.height,
            width=first.width,
            num_frames=num_frames,
            num_inference_steps=3,
            guidance_scale=1.0 if is_concat else first.guidance_scale,
            true_cfg_scale=1.0 if requests is batch else 3.0,
            latents=noise,
            prompt_template=template_of(theirs),
            callback_on_step_end=keep,
            output_type="np",
        ).frames
        assert len(kept) == len(expected) == 3
        for found, other in zip(kept, expected, strict=True):
            # An image that is the first frame is put in its place at the end.
            one, other = (found, other) if is_concat else (found[:, :, 1:], other[:, :, 1:])
            assert found.shape[1:] == shape
            assert (one - other).norm() <= 1e-4 * other.norm()
        for item, of_theirs in zip(media, frames, strict=True):
            assert item.frames.shape == of_theirs.shape == (first.num_frames, first.height, first.width, 3)
            assert numpy.abs(item.frames / 255 - of_theirs).max() <= 2 / 255
            assert of_theirs.std() > 0.02
    libraries = {part.component: part.implementation for part in media[0].attention_report.libraries}
    assert libraries["vae encoder"] == "AutoencoderKLHunyuanVideo's encoder"


@pytest.mark.parametrize("kind", [CONCAT, REPLACE])
def test_a_forward_pass_equals_diffusers(folder_of: FolderOf, kind: str) -> None:
    ours = load_transformer(FAMILY, folder_of(kind))
    theirs = HunyuanVideoTransformer3DModel.from_pretrained(folder_of(kind) / "transformer").eval()
    generator = torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(2, *shape, generator=generator)  # noqa: E731
    latents, image, text, pooled = random(16, 3, 4, 6), random(16, 1, 4, 6), random(9, 24), random(32)
    timestep, lengths = torch.tensor([937.3, 12.0]), (9, 4)
    inputs = DenoiserInputs(
        Conditions.of(text, lengths, pooled=pooled), ClipSize(32, 48, 9, 24), 4.0, ImageCondition(image)
    )
    found = ours(latents, timestep, inputs, AttentionContext())
    whole = torch.cat([image, latents[:, :, 1:]], dim=2)
    if kind == CONCAT:
        beside = torch.zeros(2, 17, 3, 4, 6)
        beside[:, :16, :1], beside[:, 16, 0] = image, 1.0
        whole = torch.cat([latents, beside], dim=1)
    with torch.no_grad():
        expected = theirs(
            hidden_states=whole,
            timestep=timestep,
            encoder_hidden_states=text,
            encoder_attention_mask=(torch.arange(9)[None] < torch.tensor(lengths)[:, None]).float(),
            pooled_projections=pooled,
            guidance=torch.full((2,), 4000.0) if kind == REPLACE else None,
        ).sample
    assert relative(found, expected) < 1e-5


def test_the_conditions_are_what_diffusers_makes_of_prompt_and_image(folder_of: FolderOf, image: str) -> None:
    """And of a prompt that is too long, which diffusers takes alone; where the encoder waits, too."""
    theirs = load_theirs(HunyuanVideoImageToVideoPipeline, folder_of(REPLACE))
    encoder = FAMILY.describe(folder_of(REPLACE)).load_text_encoder(torch.device("cpu"), torch.float32)
    brought: list[int] = []
    waiting = OffloadedTextEncoder(encoder, lambda: brought.append(1))
    long = "a red circle and a blue star moving left , " * 30
    for prompt in (PROMPTS[0], PROMPTS[1], long):
        with torch.no_grad():
            expected, pooled, mask = theirs.encode_prompt(
                Image.open(image), prompt, prompt_template=template_of(theirs), image_embed_interleave=4
            )
        for each in (encoder, waiting):
            ours = each.of_pictures([image]).encode([prompt])
            assert ours.lengths == (int(mask.sum()),)
            assert relative(ours.embeddings, expected[:, : ours.lengths[0]]) < 1e-5
            assert relative(ours.pooled, pooled) < 1e-5
    assert brought
    # 300 words, of which 252 have room; the template's end has none.
    assert ours.remarks(0, long)[0].endswith(
        "too long for the language model, the last 48 tokens past 252 are cut off there"
    )
    pictured = encoder.of_pictures([image])
    marked = pictured.encode(["a <ima<image>ge>star", "a star"])
    assert relative(marked.embeddings[0], marked.embeddings[1]) < 1e-5
    both = pictured.encode(["a star"]), waiting.of_pictures([image]).of_negative().encode(["a star"])
    assert [each.lengths for each in both] == [(4 + 3,), (8 + 3,)]


def test_the_image_reaches_every_frame(folder_of: FolderOf, image: str, tmp_path: Path) -> None:
    other = tmp_path / "other.png"
    Image.new("RGB", (60, 40), (200, 30, 60)).save(other)
    for kind in (CONCAT, REPLACE):
        ours = load(folder_of(kind))
        one, another = (ours(request(path, num_inference_steps=1)).frames.astype(int) for path in (image, str(other)))
        assert numpy.abs(one - another).max(axis=(1, 2, 3)).min() > 2


def test_a_lora_of_another_kind_is_applied_without_the_patch_embedding(
    folder_of: FolderOf, image: str, tmp_path: Path
) -> None:
    tensors = {}
    for module, inputs, patch in (("x_embedder.proj", 16, (1, 2, 2)), ("transformer_blocks.0.attn.to_q", 32, ())):
        tensors[f"transformer.{module}.lora_A.weight"] = torch.ones(2, inputs, *patch)
        tensors[f"transformer.{module}.lora_B.weight"] = torch.ones(32, 2, *(1 for _ in patch))
    save_file(tensors, tmp_path / "t2v.safetensors")
    ours = load_pipeline(str(folder_of(CONCAT)), device="cpu", lora=[str(tmp_path / "t2v.safetensors")])
    remarks = " ".join(ours(request(image, num_frames=1, num_inference_steps=1)).attention_report.notes)
    assert "2 of its 4 keys were not applied: they are for the patch embedding of a model with other inputs" in remarks


def test_what_cannot_run_is_said_before_the_weights_load(folder_of: FolderOf) -> None:
    for kind, frames, scale in ((CONCAT, 125, 1.0), (REPLACE, 129, 6.0)):
        rules = inspect_pipeline(RuntimeConfig(str(folder_of(kind)), device="cpu")).rules
        assert (rules.defaults["num_frames"], rules.defaults["guidance_scale"]) == (frames, scale)
        with pytest.raises(RequestError, match="image_path: this model makes videos from an image; give one"):
            rules.resolve(request(None))
    transformer = folder_of(REPLACE) / "transformer" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(ModelLoadError, match="tensors for models that take the guidance scale as an input, which this"):
        inspect_pipeline(RuntimeConfig(str(folder_of(CONCAT)), device="cpu", transformer_path=str(transformer)))
    for file, values, told in (
        ("model_index.json", {"_class_name": "HunyuanVideoPipeline"}, "expected HunyuanVideoImageToVideoPipeline"),
        ("transformer/config.json", {"image_condition_type": "first"}, "expected null, latent_concat or token_replace"),
        ("transformer/config.json", {"in_channels": 33}, "expected 16 in_channels"),
        ("image_processor/preprocessor_config.json", {"do_resize": False}, "'do_resize': expected true"),
    ):
        with changed(folder_of(REPLACE), file, values), pytest.raises(ModelLoadError, match=told):
            inspect_pipeline(RuntimeConfig(str(folder_of(REPLACE)), device="cpu"))
    with changed(folder_of(REPLACE), "text_encoder/config.json", {"image_token_index": 1}):
        model = FAMILY.describe(folder_of(REPLACE))
        with pytest.raises(ModelLoadError, match="expected tokens <image>, number 1 as in text_encoder"):
            model.load_text_encoder(torch.device("cpu"), torch.float32)
