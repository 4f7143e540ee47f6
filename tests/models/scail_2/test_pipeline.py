"""Animations of SCAIL-2 against the specification, with parts of transformers and diffusers, on tiny weights: latents
within 1e-4, frames alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from offloaded_pipelines import StrictTransfers, load_offloaded
from PIL import Image
from safetensors.torch import load_file
from tables import table
from tiny_scail_2 import CONFIG, MAX_TEXT_TOKENS, TINY_SIZES, write_tiny_scail_2

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.errors import RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.models.character_masks import MaskedDrivingVideo, covering

from .specification import mask_latents, sampled, specified

pytestmark = pytest.mark.filterwarnings("ignore")
HEIGHT, WIDTH = TINY_SIZES["height"], TINY_SIZES["width"]
COLORS = numpy.array([(255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0), (255, 255, 0)], numpy.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_scail_2(tmp_path_factory.mktemp("scail") / "model")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Pipeline:
    loaded = load_pipeline(str(folder), device="cpu")
    assert isinstance(loaded, Pipeline)
    return loaded


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A driving video of 14 frames and two images with their masks, of the clip's size and wider, by name."""
    place = tmp_path_factory.mktemp("inputs")
    for name, columns in (("", WIDTH), ("wide_", 131)):
        frames, rows, across = numpy.mgrid[0:14, 0:HEIGHT, 0:columns]
        video = numpy.stack([5 * rows + 9 * frames, 3 * across + 7 * frames, 255 - rows * frames // 4], axis=-1)
        numpy.save(place / f"{name}video.npy", video.astype(numpy.uint8))
        numpy.save(place / f"{name}video_mask.npy", COLORS[(rows // 11 + across // 13 + frames // 3) % 6])
        for index in range(2):
            random = numpy.random.default_rng(index).integers(0, 256, (6, 9, 3), dtype=numpy.uint8)
            Image.fromarray(random).resize((columns, HEIGHT)).save(place / f"{name}image{index}.png")
            Image.fromarray(COLORS[(rows[0] // 7 + across[0] // (9 + index)) % 6]).save(
                place / f"{name}mask{index}.png"
            )
    Image.new("RGB", (WIDTH, HEIGHT), "white").save(place / "white.png")
    numpy.save(place / "black.npy", numpy.zeros((14, HEIGHT, WIDTH, 3), numpy.uint8))
    return {path.stem: str(path) for path in place.iterdir()}


def request(files: dict[str, str], **values: Any) -> GenerationRequest:
    fields = {
        "prompt": "a red  circle moving left",
        "negative_prompt": "a star",
        "image_path": files["image0"],
        "image_mask_path": files["mask0"],
        "video_path": files["video"],
        "mask_path": files["video_mask"],
        "num_inference_steps": 3,
        "guidance_scale": 3.0,
        "seed": 5,
    }
    return GenerationRequest(**{**fields, **TINY_SIZES, **values})


class Theirs:
    """The published pipeline on the parts of a folder."""

    def __init__(self, folder: Path) -> None:
        import diffusers
        from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

        self.folder = folder
        self.text_encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.clip = CLIPVisionModel.from_pretrained(folder / "image_encoder", dtype=torch.float32)
        self.vae = diffusers.AutoencoderKLWan.from_pretrained(folder / "vae")
        self.weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        shape = (1, -1, 1, 1, 1)
        self.mean, self.std = (
            torch.tensor(each).view(shape) for each in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )

    def text(self, prompt: str) -> torch.Tensor:
        words = self.tokenizer(" ".join(prompt.split()), return_tensors="pt")
        embedded = self.text_encoder(**{name: words[name] for name in ("input_ids", "attention_mask")})[0][0]
        return F.pad(embedded, (0, 0, 0, MAX_TEXT_TOKENS - len(embedded)))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return ((self.vae.encode(pixels[None]).latent_dist.mode() - self.mean) / self.std)[0]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        frames: torch.Tensor = self.vae.decode(latents[None] * self.std + self.mean, return_dict=False)[0][0]
        return frames.clamp(-1, 1)

    def tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        scaled = F.interpolate(pixels[None], size=(224, 224), mode="bicubic", align_corners=False)
        mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (self.MEAN, self.STD))
        seen = self.clip((scaled * 0.5 + 0.5 - mean) / std, output_hidden_states=True).hidden_states
        return seen[-2][0]

    MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

    @torch.no_grad()
    def __call__(self, asked: GenerationRequest, segment: int, overlap: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The latents of every segment, and the frames."""
        from diffusers import UniPCMultistepScheduler

        def images(field: Any) -> list[torch.Tensor]:
            paths = (field,) if isinstance(field, str) else field
            return [scaled(numpy.array(Image.open(path).convert("RGB")))[:, None] for path in paths]

        pictures, masks = images(asked.image_path), images(asked.image_mask_path)
        # Further images before the first.
        order = [*range(1, len(pictures)), 0]
        given = {
            "images": torch.cat([self.encode(pictures[index]) for index in order], dim=1),
            "image_masks": torch.cat([mask_latents(masks[index]) for index in order], dim=1),
        }
        tokens = self.tokens(pictures[0][:, 0])
        texts = [self.text(each or "") for each in (asked.prompt, asked.negative_prompt)]
        video, mask = (scaled(numpy.load(str(path))) for path in (asked.video_path, asked.mask_path))
        assert asked.num_frames is not None
        assert asked.num_inference_steps is not None
        generator, found, frames = torch.Generator().manual_seed(asked.seed), [], []
        for start in range(0, asked.num_frames - overlap, segment - overlap):
            halves = [
                F.interpolate(each[:, start : start + segment], scale_factor=0.5, mode="bilinear", align_corners=False)
                for each in (video, mask)
            ]
            driving = {"driving": self.encode(halves[0]), "driving_mask": mask_latents(halves[1])}
            history = self.encode(frames[-1][:, -overlap:]) if frames else None
            known = 0 if history is None else history.shape[1]
            noise = torch.randn(1, 16, (segment - 1) // 4 + 1, HEIGHT // 8, WIDTH // 8, generator=generator)[0]

            def predict(latents: torch.Tensor, time: float, of: Any = driving, known: int = known) -> torch.Tensor:
                cond, uncond = (
                    specified(
                        self.weights,
                        CONFIG,
                        latents,
                        time,
                        text,
                        tokens,
                        **given,
                        **of,
                        known=known,
                        replaces=asked.character_mode == "replace",
                    )
                    for text in texts
                )
                return uncond + (asked.guidance_scale or 1.0) * (cond - uncond)

            scheduler = UniPCMultistepScheduler.from_pretrained(self.folder / "scheduler")
            found.append(sampled(predict, scheduler, noise, asked.num_inference_steps, history))
            frames.append(self.decode(found[-1]))
        whole = torch.cat([frames[0], *(each[:, overlap:] for each in frames[1:])], dim=1)
        return found, whole.permute(1, 2, 3, 0) * 0.5 + 0.5


def scaled(pixels: Any) -> torch.Tensor:
    return torch.from_numpy(pixels).float().div(127.5).sub(1).movedim(-1, 0)


CASES: dict[str, dict[str, Any]] = {
    "animated": {},
    "replaced, two images, two segments that share five frames": {
        "character_mode": "replace",
        "image_path": ("image0", "image1"),
        "image_mask_path": ("mask0", "mask1"),
        "num_frames": 13,
        "segment_frames": 9,
        "num_inference_steps": 2,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_generation_equals_the_specification(folder: Path, ours: Pipeline, files: dict[str, str], name: str) -> None:
    values = dict(CASES[name])
    for field in ("image_path", "image_mask_path"):
        if field in values:
            values[field] = tuple(files[each] for each in values[field])
    asked = request(files, **values)
    length = asked.segment_frames or TINY_SIZES["num_frames"]
    expected, frames = Theirs(folder)(asked, length, 5 if asked.segment_frames else 0)
    found = ours.latents(asked)
    for each, other in zip(found.split(expected[0].shape[1], dim=2), expected, strict=True):
        assert (each[0] - other).norm() <= 1e-4 * other.norm()
    media = ours(asked)
    assert numpy.abs(media.frames / 255 - frames.numpy()).max() <= 2 / 255
    assert media.frames.std() > 5
    if len(expected) > 1:
        assert "made in 2 segments of 9 frames, each from the last 5 frames of the one before" in str(
            media.attention_report
        )


def test_batches_and_offloaded_parts_equal_single_runs(folder: Path, ours: Pipeline, files: dict[str, str]) -> None:
    other = {"prompt": "a star", "negative_prompt": "", "seed": 6}
    requests = [request(files), request(files, **other)]
    alone = [ours(each).frames for each in requests]
    for values in ({}, {"guidance_mode": "two_pass"}):
        batch = ours.generate([dataclasses.replace(each, **values) for each in requests])
        for one, made in zip(alone, batch, strict=True):
            assert numpy.abs(one.astype(int) - made.frames.astype(int)).max() <= 1
    transfers = StrictTransfers()
    offloaded = load_offloaded(str(folder), "layers", {"transformer": 1}, transfers)
    assert offloaded.parts.offloading is not None
    for part in offloaded.parts.offloading.parts:
        transfers.hide(part.arena.bytes)
    # The plan of the test stands, whatever a request with files takes.
    with mock.patch.object(type(offloaded.parts.memory), "make_room"):
        assert numpy.array_equal(offloaded(requests[0]).frames, alone[0])


def test_the_middle_of_wider_files_is_used(ours: Pipeline, files: dict[str, str], tmp_path: Path) -> None:
    wide = {name: path for name, path in files.items() if name.startswith("wide_")}
    fitting = {}
    for name, path in wide.items():
        place = tmp_path / Path(path).name
        if place.suffix == ".npy":
            frames = [covering(Image.fromarray(frame), HEIGHT, WIDTH) for frame in numpy.load(path)]
            numpy.save(place, numpy.stack([numpy.asarray(frame) for frame in frames]))
        else:
            covering(Image.open(path), HEIGHT, WIDTH).save(place)
        fitting[name] = str(place)
    runs = [
        request(of, image_path=of["wide_image0"], image_mask_path=of["wide_mask0"], video_path=of["wide_video"],
                mask_path=of["wide_video_mask"], num_inference_steps=1, guidance_scale=1.0)
        for of in ({**files, **wide}, {**files, **fitting})
    ]  # fmt: skip
    assert torch.equal(*(ours.latents(each) for each in runs))
    said = ours.rules.unused(ours.resolve(runs[0]))
    assert any("its middle, 96 x 64, is used" in each for each in said)


@table(("columns", "rows"), [(101, 64), (131, 47), (64, 100), (190, 130), (96, 64)])
def test_a_picture_is_scaled_as_torchvision_does(columns: int, rows: int) -> None:
    # Of a contrast whose overshoot nothing cuts.
    pixels = numpy.random.default_rng(0).integers(80, 176, (rows, columns, 3), dtype=numpy.uint8)
    found = numpy.asarray(covering(Image.fromarray(pixels), HEIGHT, WIDTH))
    wider = columns / rows > WIDTH / HEIGHT
    size = (HEIGHT, int(columns * HEIGHT / rows)) if wider else (int(rows * WIDTH / columns), WIDTH)
    whole = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    whole = F.interpolate(whole, size=size, mode="bicubic", antialias=True).round().clamp(0, 255)[0]
    top, left = (size[0] - HEIGHT) // 2, (size[1] - WIDTH) // 2
    expected = whole[:, top : top + HEIGHT, left : left + WIDTH].permute(1, 2, 0).numpy()
    assert numpy.abs(found - expected).max() <= 1


@table(
    ("values", "told"),
    [
        ({"image_path": None}, "image_path: this model makes videos from an image; give one: --image-path FILE"),
        ({"image_mask_path": None}, "image_mask_path: this model needs a mask of the image, blue, .*--image-mask-path"),
        ({"video_path": None}, "video_path: this model moves characters as in a video; give one: --video-path FILE"),
        ({"mask_path": None}, "mask_path: this model needs a mask of the video, .*: --mask-path FILE"),
        ({"num_frames": 17}, "video.npy has 14 frames, the clip 17; give a longer one, or --num-frames 13"),
        ({"num_frames": 8}, "num_frames: expected a multiple of 4 plus 1, got 8; use 5 or 9"),
        ({"num_frames": 1}, "num_frames: expected 5 or more for a video, got 1"),
        ({"height": 80}, "height: expected a multiple of 32, got 80; use 64 or 96"),
        ({"width": 112}, "width: expected a multiple of 32, got 112; use 96 or 128"),
        (
            {"num_frames": 13, "segment_frames": 9, "segment_overlap": 4},
            "segment_overlap: .* plus 1, got 4; use 1 or 5",
        ),
        ({"num_frames": 13, "segment_frames": 9, "segment_overlap": 1}, "whole segments, 9 .*, got 13; use 9 or 17"),
        ({"image_path": ("image0", "image1")}, "image_mask_path: expected 2, one for each image in their order, got 1"),
        ({"image_path": ("image0",) * 9}, "image_path: expected at most 8 images, got 9"),
        ({"image_mask_path": "wide_mask0"}, "wide_mask0.png is 131 x 64 .*, its image .* 96 x 64; a mask has the size"),
        (
            {"image_mask_path": "white"},
            "white.png marks no character: expected blue, .*; black and white are backg",
        ),
        ({"mask_path": "black"}, "mask_path: .*black.npy marks no character"),
        ({"mask_path": "video"}, "mask_path: .*video.npy is no mask: [0-9]+ % of its pixels have the colour of one"),
        ({"image_path": "mask0", "image_mask_path": "image0"}, "image_mask_path: .*image0.png is no mask"),
        ({"mask_path": "wide_video_mask"}, "wide_video_mask.npy is 131 x 64 .*, its video .* 96 x 64"),
        (
            {"mask_path": "mask0"},
            "mask_path: .*mask0.png has one frame; give a video of the masks of the driving video",
        ),
        ({"video_path": "image0"}, "image0.png has one frame; give a video of the motion"),
        ({"character_mode": "swap"}, "character_mode: unknown value 'swap'"),
        ({"conditioning_scale": 0.5}, "conditioning_scale"),
        ({"init_path": "image0"}, "init_path"),
    ],
)
def test_what_a_request_may_not_say(folder: Path, files: dict[str, str], values: dict[str, Any], told: str) -> None:
    def found(value: Any) -> Any:
        return tuple(map(found, value)) if isinstance(value, tuple) else files.get(value, value)

    rules = inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules
    with pytest.raises(RequestError, match=told):
        rules.resolve(request(files, **{name: found(value) for name, value in values.items()}))


def test_a_size_follows_from_the_image(folder: Path, files: dict[str, str], tmp_path: Path) -> None:
    rules = inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules
    Image.new("RGB", (40, 60)).save(tmp_path / "upright.png")
    Image.fromarray(COLORS[numpy.ones((60, 40), int)]).save(tmp_path / "mask.png")
    upright = {"image_path": str(tmp_path / "upright.png"), "image_mask_path": str(tmp_path / "mask.png")}
    for values, expected in (({}, (512, 896)), (upright, (896, 512))):
        resolved = rules.resolve(request(files, height=None, width=None, **values))
        assert (resolved.height, resolved.width) == expected


def test_the_defaults_are_those_of_the_authors_program(folder: Path, files: dict[str, str]) -> None:
    """generate.py of zai-org/SCAIL-2, branch wan-scail2."""
    rules = inspect_pipeline(RuntimeConfig(str(folder), device="cpu")).rules
    asked = {"image_path": "image0", "image_mask_path": "mask0", "video_path": "video", "mask_path": "video_mask"}
    resolved = rules.resolve(
        GenerationRequest("-", num_frames=13, **{name: files[each] for name, each in asked.items()})
    )
    found = (resolved.num_inference_steps, resolved.guidance_scale, resolved.flow_shift, resolved.sampler)
    assert found == (40, 5.0, 3.0, "unipc")
    assert (resolved.segment_frames, resolved.segment_overlap, resolved.fps) == (81, 5, 16)
    assert (resolved.negative_prompt, resolved.character_mode) == ("", "animate")
    assert (resolved.height, resolved.width) == (512, 896)


def test_memory_is_planned_for_the_shapes_of_the_condition(ours: Pipeline, files: dict[str, str]) -> None:
    several = {"image_path": (files["image0"], files["image1"]), "image_mask_path": (files["mask0"], files["mask1"])}
    asked = ours.resolve(request(files, num_frames=9, **several))
    size = ours.rules.settings(asked).size
    control = ours.rules.sampling.control
    assert isinstance(control, MaskedDrivingVideo)
    found = ours.parts.image_conditioner.condition(asked, size)
    assert [tuple(each.shape[1:]) for each in found.further] == list(control.further_shapes(asked, size))
    assert tuple(found.latents.shape) == (1, 20, 3, HEIGHT // 8, WIDTH // 8)
