"""The whole generation against diffusers' own HunyuanVideo15Pipeline and HunyuanVideo15ImageToVideoPipeline: same
folder, noise, prompts and image, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from family_parity import CPU, assert_equal_runs, load_theirs, record_latents, relative
from PIL import Image
from tables import table
from tiny_hunyuan_video_15 import TINY_SIZES, write_tiny_hunyuan_video_15

from diffusion_runtime import GenerationRequest, Pipeline, load_pipeline
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.hunyuan_video_15.codec import load_decoder, load_image_conditioner
from diffusion_runtime.models.hunyuan_video_15.text import glyph_text

# The second one has text to write in both kinds of quotation marks.
PROMPTS = ("a red circle moving left", 'two objects: a blue star, and a "green ring" on a striped “background”.')
NEGATIVE_PROMPTS = ('a yellow "square"', "")


@pytest.fixture(scope="module")
def text_pair(text_to_video: Path) -> tuple[Pipeline, Any]:
    """Our pipeline and diffusers' on one folder."""
    return load_pipeline(str(text_to_video), device="cpu"), load_diffusers(HunyuanVideo15Pipeline, text_to_video)


@pytest.fixture(scope="module")
def image_pair(image_to_video: Path) -> tuple[Pipeline, Any]:
    """The same for videos that start from an image."""
    theirs = load_diffusers(HunyuanVideo15ImageToVideoPipeline, image_to_video)
    return load_pipeline(str(image_to_video), device="cpu"), theirs


def load_diffusers(pipeline_class: Any, folder: Path) -> Any:
    theirs = load_theirs(pipeline_class, folder)
    # Their decoder fails on more than one video at a time.
    theirs.vae.enable_slicing()
    return theirs


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the clip's size, so that nothing has to be cut off or scaled."""
    pixels = numpy.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=numpy.uint8)
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    size = (TINY_SIZES["width"], TINY_SIZES["height"])
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def compare(pair: tuple[Pipeline, Any], requests: list[GenerationRequest], kept: list[torch.Tensor]) -> None:
    ours, theirs = pair

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        first, latents = resolved[0], []
        sized: dict[str, Any] = {"height": first.height, "width": first.width}
        if first.image_path is not None:
            sized = {"image": Image.open(first.image_path)}
        guider, step = theirs.guider, theirs.scheduler.step
        # It takes no callback, and its guidance scale is a component of its own.
        theirs.guider = guider.new(guidance_scale=first.guidance_scale)
        theirs.scheduler.step = lambda *arguments, **options: kept_step(step(*arguments, **options))

        def kept_step(result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            latents.append(result[0].clone())
            return result

        try:
            frames = theirs(
                prompt=[request.prompt for request in resolved],
                negative_prompt=[request.negative_prompt for request in resolved],
                num_frames=first.num_frames,
                num_inference_steps=first.num_inference_steps,
                latents=noise.clone(),
                output_type="np",
                **sized,
            ).frames
        finally:
            theirs.guider, theirs.scheduler.step = guider, step
        return latents, frames

    assert_equal_runs(ours, requests, kept, run_theirs)


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"prompt": PROMPTS[0], **TINY_SIZES, "num_inference_steps": 3, "seed": 5}
    return GenerationRequest(**(fields | values))


def batch(**values: Any) -> list[GenerationRequest]:
    pairs = zip(PROMPTS, NEGATIVE_PROMPTS, (5, 6), strict=True)
    return [request(prompt=prompt, negative_prompt=other, seed=seed, **values) for prompt, other, seed in pairs]


@pytest.mark.parametrize("num_frames", [1, 9])
def test_one_request(text_pair: tuple[Pipeline, Any], our_latents: list[torch.Tensor], num_frames: int) -> None:
    compare(text_pair, [request(num_frames=num_frames)], our_latents)


@pytest.mark.parametrize("guidance_mode", ["batched", "two_pass"])
def test_a_batch_of_unequal_prompts(
    text_pair: tuple[Pipeline, Any], our_latents: list[torch.Tensor], guidance_mode: str
) -> None:
    compare(text_pair, batch(guidance_mode=guidance_mode), our_latents)


def test_without_guidance(text_pair: tuple[Pipeline, Any], our_latents: list[torch.Tensor]) -> None:
    compare(text_pair, batch(guidance_scale=1.0), our_latents)


def test_a_video_that_starts_from_an_image(
    image_pair: tuple[Pipeline, Any], our_latents: list[torch.Tensor], picture: Path
) -> None:
    compare(image_pair, [request(prompt=PROMPTS[1], image_path=str(picture))], our_latents)


def test_a_batch_of_videos_that_start_from_an_image(
    image_pair: tuple[Pipeline, Any], our_latents: list[torch.Tensor], picture: Path
) -> None:
    compare(image_pair, batch(image_path=str(picture), guidance_scale=2.0), our_latents)


def test_a_step_distilled_model_is_told_where_each_step_leads(
    tmp_path: Path, our_latents: list[torch.Tensor], picture: Path
) -> None:
    """MeanFlow: diffusers' pipeline gives the transformer the next timestep, and 0 at the last step."""
    folder = write_tiny_hunyuan_video_15(tmp_path / "m", starts_from_image=True, use_meanflow=True)
    ours = load_pipeline(str(folder), device="cpu")
    resolved = ours.resolve(request(num_inference_steps=None, image_path=str(picture)))
    assert ours.rules.sampling_preset(resolved) == "step-distill-8"
    assert (resolved.num_inference_steps, resolved.flow_shift, resolved.guidance_scale) == (8, 7.0, 1.0)
    # Their scheduler has the folder's shift.
    asked = request(prompt=PROMPTS[1], image_path=str(picture), flow_shift=5.0)
    compare((ours, load_diffusers(HunyuanVideo15ImageToVideoPipeline, folder)), [asked], our_latents)


def test_the_image_is_what_their_encoders_make_of_it(
    image_to_video: Path, image_pair: tuple[Pipeline, Any], picture: Path
) -> None:
    _, theirs = image_pair
    image = Image.open(picture)
    size = ClipSize(image.height, image.width, 9, 24)
    ours = load_image_conditioner(image_to_video, CPU, torch.float32).encode(torch.from_numpy(numpy.array(image)), size)
    with torch.no_grad():
        tokens = theirs.encode_image(image, 1, CPU, torch.float32)
        latents = theirs._get_image_latents(theirs.vae, theirs.video_processor, image, image.height, image.width, CPU)
    assert ours.embeddings is not None
    assert relative(ours.embeddings, tokens) < 1e-5
    assert relative(ours.latents, latents) < 1e-5


def test_prompts_image_guidance_and_seed_matter(
    image_pair: tuple[Pipeline, Any], picture: Path, tmp_path: Path
) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    ours, _ = image_pair
    other_picture = tmp_path / "other.png"
    Image.open(picture).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(other_picture)
    values: list[dict[str, Any]] = [
        {},
        {"prompt": PROMPTS[1]},
        {"prompt": PROMPTS[1].replace('"', "")},
        {"negative_prompt": NEGATIVE_PROMPTS[0]},
        {"guidance_scale": 2.0},
        {"image_path": str(other_picture)},
        {"seed": 6},
    ]
    frames = [ours(request(**({"image_path": str(picture)} | changed))).frames.astype(int) for changed in values]
    for index, first in enumerate(frames):
        assert all(numpy.abs(first - other).max() > 1 for other in frames[index + 1 :])


def test_an_image_that_is_missing_or_too_many_is_said(
    text_pair: tuple[Pipeline, Any], image_pair: tuple[Pipeline, Any], picture: Path
) -> None:
    with pytest.raises(RequestError, match="image_path: this model makes videos from an image"):
        image_pair[0](request())
    with pytest.raises(RequestError, match="image_path: this model makes videos from text alone"):
        text_pair[0](request(image_path=str(picture)))


@table(
    ("prompt", "written"),
    [
        ("no quotation marks", ""),
        ('one "open', ""),
        ('"a b" and “c”', 'Text "a b". Text "c". '),
        ('"a" then "a" again', 'Text "a". '),
        ('nothing in ""', 'Text "". '),
    ],
)
def test_text_in_quotation_marks_is_found(prompt: str, written: str) -> None:
    from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts

    assert glyph_text(prompt) == written == (extract_glyph_texts(prompt) or "")


def test_a_long_prompt_and_a_long_text_to_write_are_cut_where_diffusers_cuts_them(
    text_pair: tuple[Pipeline, Any],
) -> None:
    ours, theirs = text_pair
    prompts = ['"' + "abcdefgh " * 40 + '"', "a red circle and a blue star moving left , " * 120]
    conditions = ours.text_encoder.encode(prompts)
    # 1200 words and 3 tokens of the template's end, in room for 1000.
    assert conditions.lengths[1] == 1000
    assert conditions.num_cut_tokens == (0, 203)
    assert conditions.further[0].lengths == (256, 0)
    # `Text "`, 360 letters, `". ` and the end: 370 bytes in room for 256.
    *_, of_byt5 = conditions.remarks(0, prompts[0])
    assert of_byt5.endswith("too long for ByT5, the last 114 tokens past 256 are cut off there")
    with torch.no_grad():
        tokens, mask, glyphs, glyph_mask = theirs.encode_prompt(prompts, batch_size=2, device=CPU)
    assert mask.sum(1).tolist() == list(conditions.lengths)
    assert glyph_mask.sum(1).tolist() == [256, 0]
    assert relative(conditions.embeddings[1], tokens[1]) < 1e-5
    assert relative(conditions.further[0].embeddings[0], glyphs[0]) < 1e-5


def test_large_clips_are_decoded_in_tiles(text_to_video: Path) -> None:
    """288 pixels: two tiles in width."""
    theirs = AutoencoderKLHunyuanVideo15.from_pretrained(text_to_video / "vae").eval()
    latents = torch.randn(1, 8, 2, 4, 72, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = theirs.decode(latents / 0.8).sample
        theirs.enable_tiling()
        tiled = theirs.decode(latents / 0.8).sample
    assert relative(whole, tiled) > 1e-3
    frames = load_decoder(text_to_video, CPU, torch.float32).decode(latents)
    assert frames.shape == (1, 5, 16, 288, 3)
    assert relative(frames, (tiled * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 4, 1)) < 1e-4
