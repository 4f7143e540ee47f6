"""Clips from references against diffusers' modular pipeline on tiny weights: transformer within 1e-5, latents within
1e-4; what a request with references may not say."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3Ref2VAPrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from family_parity import CPU, record_latents, relative
from PIL import Image
from sound_files import write_wave
from tables import table
from tiny_encoders import HIDDEN
from tiny_minimax_h3 import AUDIO_CHANNELS, CHANNELS, TINY_EDGES, TINY_SIZES

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, AttentionPolicy
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.denoising.noise import initial_noise
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.layers.embeddings import unpatchify
from diffusion_runtime.loading import inspect_pipeline, prepare
from diffusion_runtime.media.ffmpeg import find_ffmpeg
from diffusion_runtime.models.interface import DenoiserInputs, GivenMedia, ImageCondition
from diffusion_runtime.models.minimax_h3.geometry import MiniMaxH3Geometry
from diffusion_runtime.models.minimax_h3.transformer import MiniMaxH3Transformer
from diffusion_runtime.models.model_sources import open_workflow
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions

# What importing diffusers' modular pipelines says about packages that are not here; of torch, about its weight norm.
pytestmark = pytest.mark.filterwarnings("ignore")
PATCH, NUM_STEPS = (1, 2, 2), 3
SHORT, LONG = ClipSize(64, 96, 22, 24), ClipSize(96, 64, 39, 24)


@pytest.fixture(scope="module")
def transformer(tiny_minimax_h3_folder: Path) -> MiniMaxH3Transformer:
    folder = open_workflow(tiny_minimax_h3_folder, "ref2va")
    assert isinstance(folder, ModelFolder)
    model = family_for_folder(folder).describe(folder)
    loaded = model.load_transformer(model.build_transformer(AttentionPolicy(dtype=torch.float32)), CPU, torch.float32)
    assert isinstance(loaded, MiniMaxH3Transformer)
    return loaded


@pytest.fixture(scope="module")
def of_diffusers(tiny_minimax_h3_folder: Path) -> MiniMaxH3Transformer3DModel:
    folder = tiny_minimax_h3_folder / "transformer_ref"
    return MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.float32).eval()


# Kind, latent size of its pictures, moments of its sound.
IMAGE, TALL = ("image", (1, 4, 4), 0), ("image", (1, 8, 2), 0)
VIDEO, SILENT, LOUD = ("video", (7, 4, 6), 20), ("video", (12, 6, 4), 0), ("video", (7, 2, 4), 60)
SOUND = ("audio", None, 11)


def media_of(references: tuple[Any, ...]) -> tuple[GivenMedia, ...]:
    generator = torch.Generator().manual_seed(4)
    return tuple(
        GivenMedia(
            None if size is None else torch.randn(1, CHANNELS, *size, generator=generator),
            torch.randn(1, AUDIO_CHANNELS, moments, 2, generator=generator) if moments else None,
        )
        for _, size, moments in references
    )


def inputs(
    ours: MiniMaxH3Transformer, lengths: tuple[int, ...], size: ClipSize, references: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    generator, batch = torch.Generator().manual_seed(1), len(lengths)
    latents = torch.randn(batch, *ours.geometry.sample_shape(size), generator=generator)
    text = Conditions.of(torch.randn(batch, max(lengths), HIDDEN, generator=generator), lengths)
    text = dataclasses.replace(text, picture_ranges=((1, 3),))
    none = torch.empty(1, CHANNELS, 0, size.height // 16, size.width // 16)
    image = ImageCondition(none, media=media_of(references)).repeat(batch)
    timesteps = torch.linspace(937.3, 12.0, batch + 1)[:batch]
    return latents, timesteps, DenoiserInputs(text, size, image=image)


@torch.no_grad()
def run_theirs(
    model: MiniMaxH3Transformer3DModel,
    ours: MiniMaxH3Transformer,
    references: tuple[Any, ...],
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    given: DenoiserInputs,
) -> torch.Tensor:
    """One sample after the other, in the published order of the sequence and its clock."""
    found = []
    media = media_of(references)
    pictures = [each.pictures for each in media if each.pictures is not None]
    sounds = [each.sound.permute(0, 3, 2, 1).flatten(1, 2)[0] for each in media if each.sound is not None]
    kinds: Any = [SimpleNamespace(kind=kind, has_audio=moments > 0) for kind, _, moments in references]
    for index, length in enumerate(given.text.lengths):
        parts = ours.geometry.parts(latents[index : index + 1], given.size)
        assert parts.audio is not None
        video, sigma = parts.video, float(timesteps[index]) / 1000
        moments = parts.audio.permute(0, 3, 2, 1).flatten(1, 2)
        tags = torch.ones(length, dtype=torch.long)
        tags[1:3] = 0
        *layout, num_videos, num_sounds = MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
            tags, kinds, pictures, sounds, *video.shape[2:], moments.shape[1] // 2, PATCH, 2, 2, 0
        )
        positions, tags, videos, of_sounds, texts = layout
        of_video, of_audio = 1 - sigma, 1 - shifted(sigma, 3 / 12)
        times = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            videos, of_sounds, num_videos, num_sounds, length, of_video, of_audio, max(of_video, 0.999), 1.0
        )
        made, sound = model(
            torch.cat([patchify_video_latents(each, PATCH) for each in (*pictures, video)])[None],
            torch.cat([*sounds, moments[0]])[None],
            given.text.embeddings[index : index + 1, :length],
            *times,
            tags,
            positions,
            videos,
            of_sounds,
            texts,
            return_dict=False,
        )
        made = unpatchify(made[:, num_videos:], ours.geometry.grid(video.shape), PATCH, channels_first=True)
        of_sides = sound[:, num_sounds:].unflatten(1, (2, -1)).permute(0, 3, 2, 1)
        found.append(-ours.geometry.join(made, of_sides))
    return torch.cat(found)


@table(
    ("lengths", "size", "references"),
    [
        ((5,), SHORT, (IMAGE,)),
        ((4, 9), LONG, (VIDEO, TALL, SOUND)),
        ((7, 3), SHORT, (SOUND, IMAGE, SILENT, SOUND, LOUD, IMAGE)),
        ((6, 6), SHORT, (LOUD, VIDEO)),
    ],
)
def test_velocities_equal_those_of_diffusers(
    transformer: MiniMaxH3Transformer,
    of_diffusers: MiniMaxH3Transformer3DModel,
    lengths: tuple[int, ...],
    size: ClipSize,
    references: tuple[Any, ...],
) -> None:
    arguments = inputs(transformer, lengths, size, references)
    expected = run_theirs(of_diffusers, transformer, references, *arguments)
    assert relative(transformer(*arguments, AttentionContext()), expected) < 1e-5


@pytest.fixture(scope="module")
def ours(tiny_minimax_h3_folder: Path) -> Pipeline:
    return load_pipeline(str(tiny_minimax_h3_folder), device="cpu", workflow="ref2va")


@pytest.fixture(scope="module")
def theirs(tiny_minimax_h3_folder: Path) -> Any:
    """The pipeline, whose clips may be short."""
    import diffusers
    from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import MiniMaxH3Blocks
    from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class OfShortClips(diffusers.MiniMaxH3ModularPipeline):
        min_duration = 0.0

    folder = tiny_minimax_h3_folder
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer")
    marks = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    pipeline = OfShortClips(blocks=MiniMaxH3Blocks())
    parts = {
        name: getattr(diffusers, made_by).from_pretrained(folder / name)
        for name, made_by in (
            ("transformer_ref", "MiniMaxH3Transformer3DModel"),
            ("vae", "AutoencoderKLMiniMaxH3"),
            ("audio_vae", "AutoencoderKLMiniMaxH3Audio"),
            ("scheduler", "MiniMaxH3Scheduler"),
            ("audio_scheduler", "MiniMaxH3Scheduler"),
        )
    }
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
    pipeline.update_components(**parts, **TINY_EDGES, text_encoder=encoder, tokenizer=tokenizer)
    # transformers makes the processor of torchvision; these are what the pipeline takes of it.
    pipeline.processor = SimpleNamespace(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder / "processor"),
        video_processor=VideoProcessor(),
        create_mm_token_type_ids=lambda rows: [[1 + marks.index(i) if i in marks else 0 for i in row] for row in rows],
    )
    return pipeline


class VideoProcessor:
    """The patches of transformers' class, whose scaling needs torchvision: sizes of which none is needed."""

    temporal_patch_size = 2

    def __call__(self, *, videos: list[numpy.ndarray], **_: Any) -> dict[str, torch.Tensor]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

        patches, grids = [], []
        for video in videos:
            frames, height, width, _ = video.shape
            assert smart_resize(frames, height, width, 2, 32, 4096, 25165824) == (height, width)
            pixels = torch.from_numpy(video).permute(0, 3, 1, 2)[None].float().div(255).sub(0.5).div(0.5)
            made, *grid = Qwen3VLVideoProcessor.patchify(None, pixels, 16, 2, 2)
            patches.append(made[0])
            grids.append(grid)
        return {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}


def picture(path: Path, width: int, height: int) -> str:
    pixels = numpy.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)
    return str(path)


def video(path: Path, width: int, height: int, seconds: float, *, rate: int = 24, sound: int | None = None) -> str:
    """A moving test picture, without loss, so that every decoder gives the same; sound: its rate."""
    source = ["-f", "lavfi", "-i", f"testsrc=size={width}x{height}:rate={rate}"]
    heard = [] if sound is None else ["-f", "lavfi", "-i", f"sine=frequency=300:sample_rate={sound}"]
    codecs = ["-c:v", "libx264rgb", "-crf", "0", *([] if sound is None else ["-c:a", "flac"])]
    command = [find_ffmpeg(), "-v", "error", "-y", *source, *heard, "-t", str(seconds), *codecs, str(path)]
    subprocess.run(command, check=True)
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One with the name of another kind, to be told by its content."""
    folder = tmp_path_factory.mktemp("references")
    return {
        "wide": picture(folder / "wide.png", 150, 70),
        "tall": picture(folder / "tall.jpg.png", 40, 120),
        "loud": video(folder / "loud.mkv", 120, 80, 2, sound=22050),
        "silent": video(folder / "silent.mp4", 64, 96, 1),
        "fast": video(folder / "fast.mp4", 96, 64, 1, rate=30),
        "voice": write_wave(folder / "voice.wav", seconds=0.4, rate=16000),
        "music": write_wave(folder / "music.wav", seconds=2.0, rate=8000, pitch=200),
    }


def reference_of(path: str) -> Any:
    """What diffusers takes, read by ffmpeg here: its own reader needs another package."""
    from diffusers.modular_pipelines.minimax_h3 import (
        MiniMaxH3AudioReference,
        MiniMaxH3ImageReference,
        MiniMaxH3VideoReference,
    )

    if path.endswith(".png"):
        return MiniMaxH3ImageReference(image=Image.open(path).convert("RGB"))

    def decoded(*output: str) -> bytes:
        return subprocess.run([find_ffmpeg(), "-v", "error", "-i", path, *output, "-"], capture_output=True).stdout

    if path.endswith(".wav"):
        rate = 16000 if "voice" in path else 8000
        samples = numpy.frombuffer(decoded("-f", "f32le"), "<f4").reshape(-1, 2).T.copy()
        return MiniMaxH3AudioReference(audio=torch.from_numpy(samples), sample_rate=rate)
    width, height = {"loud": (120, 80), "silent": (64, 96), "fast": (96, 64)}[Path(path).stem]
    raw = numpy.frombuffer(decoded("-f", "rawvideo", "-pix_fmt", "rgb24"), numpy.uint8)
    frames = raw.reshape(-1, height, width, 3)
    sound = numpy.frombuffer(decoded("-f", "f32le"), "<f4").copy()[None] if "loud" in path else None
    return MiniMaxH3VideoReference(
        frames=frames,
        fps=30.0 if "fast" in path else 24.0,
        audio=None if sound is None else torch.from_numpy(sound),
        sample_rate=None if sound is None else 22050,
    )


def resampled_by_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchaudio is another package; its resampling is compared by itself."""
    import sys

    from diffusion_runtime.media.resampling import resampled

    def resample(rate: int, new_rate: int) -> Any:
        return lambda samples: resampled(samples, rate, new_rate)

    monkeypatch.setitem(sys.modules, "torchaudio", SimpleNamespace(transforms=SimpleNamespace(Resample=resample)))


@table("names", [("wide", "loud", "voice"), ("music", "silent", "tall", "fast", "wide")])
def test_a_clip_equals_that_of_diffusers(
    ours: Pipeline, theirs: Any, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    paths = tuple(files[name] for name in names)
    request = GenerationRequest(
        "a red circle of <Picture 1>", **TINY_SIZES, num_inference_steps=NUM_STEPS, seed=3, references=paths
    )
    size, geometry = SHORT, ours.rules.sampling.geometry
    assert isinstance(geometry, MiniMaxH3Geometry)
    kept = record_latents(monkeypatch)
    ours(request)
    noise = geometry.parts(initial_noise(geometry.sample_shape(size), [3]), size)
    assert noise.audio is not None
    resampled_by_diffusers(monkeypatch)
    state = theirs(
        prompt=request.prompt,
        **TINY_SIZES,
        references=[reference_of(path) for path in paths],
        num_inference_steps=NUM_STEPS + 1,
        latents=noise.video,
        audio_latents=noise.audio[0].permute(2, 0, 1),
        # Of the noise of the pictures.
        generator=torch.Generator().manual_seed(42),
        output_type="np",
    )
    found = geometry.parts(kept[-1], size)
    assert found.audio is not None
    for of_ours, of_theirs in (
        (found.video, state.get("latents")),
        (found.audio[0].permute(2, 0, 1), state.get("audio_latents")),
    ):
        assert (of_ours - of_theirs).norm() <= 1e-4 * of_theirs.norm()
    # The steps did something.
    assert (found.video - noise.video).abs().max() > 0.5


@table(
    ("names", "values", "told"),
    [
        ((), {}, "references: this model makes videos from references; give one: --reference FILE"),
        (("wide",) * 10, {}, "references .*: expected at most 9 images, got 10: use 9"),
        (("loud",) * 4, {}, "references .*: expected at most 3 videos, got 4: use 3"),
        (("voice", "music"), {}, "expected an image or a video with a sound, got sounds alone"),
        (("wide",) * 13, {}, "references .*: expected at most 12 files, got 13: use 12"),
        (("thin",), {}, "thin.png: expected sides of a ratio from 1:4 to 4:1, got 20 x 100 .*; crop it"),
        (("short",), {}, "short.mp4: expected 22 frames or more at 24 a second .*, got 12; give a longer"),
        (("renamed",), {}, "renamed.bin: its content is that of a .mp4 file; expected its name to end so"),
        (("text",), {}, "text.png: expected an image .*; its content is none of them"),
        (("wide",), {"image_path": "wide"}, "image_path: this model takes images as references"),
    ],
)
def test_what_a_request_with_references_may_not_say(
    ours: Pipeline, files: dict[str, str], tmp_path: Path, names: tuple[str, ...], values: dict[str, str], told: str
) -> None:
    wrong = {
        "thin": picture(tmp_path / "thin.png", 20, 100),
        "short": video(tmp_path / "short.mp4", 64, 64, 0.5),
        "renamed": str(tmp_path / "renamed.bin"),
        "text": str(tmp_path / "text.png"),
    }
    Path(wrong["renamed"]).write_bytes(Path(files["silent"]).read_bytes())
    Path(wrong["text"]).write_text("an image")
    paths = tuple({**files, **wrong}[name] for name in names)
    given: dict[str, Any] = {name: files[value] for name, value in values.items()}
    with pytest.raises(RequestError, match=told):
        ours.resolve(GenerationRequest("a star", **TINY_SIZES, references=paths, **given))


def test_a_prompt_that_names_other_references_is_said(ours: Pipeline, files: dict[str, str]) -> None:
    """The sound of a video is a sound too."""
    prompt = "<Picture 1>, <Picture 2> and <Picture 0> dance as in <Video 1>, and sing like <Audio 1> and <Audio 2>"
    asked = GenerationRequest(prompt, **TINY_SIZES, references=(files["wide"], files["loud"]))
    said = [each for each in ours.rules.unused(ours.resolve(asked)) if each.startswith("prompt: ")]
    assert [each.split(" is no reference: there are ") for each in said] == [
        ["prompt: <Picture 2>", "1 images, numbered from 1 in their order"],
        ["prompt: <Picture 0>", "1 images, numbered from 1 in their order"],
        ["prompt: <Audio 2>", "1 sounds, numbered from 1 in their order"],
    ]


def test_other_models_take_no_references(tiny_minimax_h3_folder: Path, files: dict[str, str]) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(tiny_minimax_h3_folder), device="cpu")).rules
    with pytest.raises(RequestError, match="references: this model takes no references, as minimax-h3-ref2va does"):
        rules.resolve(GenerationRequest("a star", **TINY_SIZES, references=(files["wide"],)))
    path = picture(Path(files["wide"]).with_name("long.png"), 150, 30)
    with pytest.raises(RequestError, match=r"image_path: .*: expected sides of a ratio from 1:4 to 4:1, got 150 x 30"):
        rules.resolve(GenerationRequest("a star", num_frames=22, image_path=path))


def test_a_workflow_that_the_family_does_not_have() -> None:
    with pytest.raises(ConfigError, match="workflow: 'ref2va': wan models have no such workflow; leave it out"):
        inspect_pipeline(RuntimeConfig("shapes", device="cpu", workflow="ref2va"))


def test_references_are_counted_and_shown(ours: Pipeline, files: dict[str, str], tiny_minimax_h3_folder: Path) -> None:
    """The plan of memory counts at least the rows that the pass has, and each is named."""
    media = ours.rules.inputs.media
    assert media is not None
    request = ours.resolve(
        GenerationRequest("a star", **TINY_SIZES, references=(files["loud"], files["wide"], files["voice"]))
    )
    condition = ours.parts.image_conditioner.condition(request, SHORT)
    found = [
        (None if each.pictures is None else each.pictures.shape[2:], 0 if each.sound is None else each.sound.shape[2])
        for each in condition.media
    ]
    shapes = media.shapes(request, SHORT)
    assert [(each.pictures, each.num_moments) for each in shapes] == found
    text = ours.parts.text_encoder.of_request(request).encode([request.prompt])
    # With room for a label of each, whose tokens are the tokenizer's.
    seen = sum(stop - start for start, stop in text.picture_ranges)
    assert sum(each.num_text_tokens for each in shapes) == seen + 8 * (len(text.picture_ranges) + len(shapes))
    lines = media.describe(request, SHORT)
    assert [line.partition(" /")[0] for line in lines] == ["1: video", "2: image", "3: sound"]
    assert "7 x 4 x 6 latents, 37 latents of sound a side: 116 tokens" in lines[0]
    prepared = prepare(RuntimeConfig(str(tiny_minimax_h3_folder), device="cpu", workflow="ref2va"))
    explained = explain(prepared, request)
    assert explained.references == tuple(lines)
    one = explain(prepared, dataclasses.replace(request, references=request.references[1:]))
    assert explained.num_text_tokens - one.num_text_tokens >= 116


def test_media_that_are_values_are_files_that_end_as_their_content(files: dict[str, str]) -> None:
    contents = [Path(files[name]).read_bytes() for name in ("voice", "wide", "silent")]
    request = GenerationRequest("a star", references=tuple(contents))  # type: ignore[arg-type]
    assert request.references is not None
    assert [Path(path).suffix for path in request.references] == [".wav", ".png", ".mp4"]
    assert all(str(each).startswith("data:sha256:") for each in request.recorded()["references"])
