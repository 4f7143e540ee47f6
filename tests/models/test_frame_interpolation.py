"""Frame interpolation against a specification of its own in float64: the network of every version, files that are
recognised or refused, and clips whose frames in between are made as the decoder gives its frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from cli_support import command_process
from safetensors.torch import load_file, save_file
from saved_runs import assert_same, finished
from tables import table

from diffusion_runtime import GenerationRequest, Pipeline, RequestError, load_pipeline
from diffusion_runtime.cli.app import run
from diffusion_runtime.decoders.frame_interpolation import VERSIONS, FrameInterpolator, open_interpolation
from diffusion_runtime.decoders.interface import FrameStream
from diffusion_runtime.errors import ConfigError, DiffusionRuntimeError
from diffusion_runtime.generation.frame_decoding import interpolated
from diffusion_runtime.session.outputs import Outputs

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
SMALLEST = "4.22.lite"
# version -> widths of blocks, scales, channels inside the encoder, channels of features, padding.
PUBLISHED: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int]] = {
    "4.21, 4.22 or 4.23": ((256, 192, 96, 48), (8, 4, 2, 1), 32, 8, 32),
    "4.22.lite": ((192, 128, 64, 32), (8, 4, 2, 1), 16, 4, 32),
    "4.25 or 4.26": ((192, 128, 96, 64, 32), (16, 8, 4, 2, 1), 16, 4, 64),
    "4.25.lite": ((192, 128, 96, 64, 24), (32, 16, 8, 4, 1), 16, 4, 128),
    "4.25.heavy": ((384, 256, 192, 128, 64), (16, 8, 4, 2, 1), 16, 4, 64),
    "4.26.heavy": ((192, 128, 96, 64, 32), (16, 8, 4, 2, 1), 16, 16, 64),
}
# Numbers of all tensors together, as counted of the authors' files of 4.26.heavy, and for 4.26 of Comfy-Org's.
NUM_NUMBERS = {"4.26.heavy": 5_723_156, "4.25 or 4.26": 5_664_776}


def random_weights(version: str, *, blocks_hand_on: bool = True) -> Tensors:
    """Return weights by the names and shapes of the published files, of numbers that move pictures by some pixels."""
    widths, _, inside, features, _ = PUBLISHED[version]
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, *shape: int, is_transposed: bool = False) -> None:
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = (shape[1 if is_transposed else 0],)

    convolution("encode.cnn0", inside, 3, 3, 3)
    convolution("encode.cnn1", inside, inside, 3, 3)
    convolution("encode.cnn2", inside, inside, 3, 3)
    convolution("encode.cnn3", inside, features, 4, 4, is_transposed=True)
    for index, width in enumerate(widths):
        name = f"blocks.{index}"
        convolution(f"{name}.conv0.0.0", width // 2, 7 + 2 * features + (13 if index else 0), 3, 3)
        convolution(f"{name}.conv0.1.0", width, width // 2, 3, 3)
        for residual in range(8):
            convolution(f"{name}.convblock.{residual}.conv", width, width, 3, 3)
            shapes[f"{name}.convblock.{residual}.beta"] = (1, width, 1, 1)
        convolution(f"{name}.lastconv.0", width, 52 if blocks_hand_on else 24, 4, 4, is_transposed=True)
    generator = torch.Generator().manual_seed(0)

    def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        fan_in = (shape[0] * 16 if shape[-1] == 4 else shape[1] * 9) if len(shape) == 4 and shape[-1] > 1 else 25
        # Of the last convolution fewer, so that the flow is of a few pixels.
        return torch.randn(shape, generator=generator) * (2 / fan_in) ** 0.5 * (0.25 if "lastconv" in name else 1)

    return {name: numbers(name, shape) for name, shape in shapes.items()}


def resized(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Bilinear, with the centres of pixels at halves: a pixel of the result is at (i + 0.5) / factor - 0.5."""
    for dim in (2, 3):
        size = x.shape[dim]
        places = ((torch.arange(round(size * factor), dtype=x.dtype) + 0.5) / factor - 0.5).clamp(min=0)
        below = places.floor().long()
        above = (below + 1).clamp(max=size - 1)
        share = (places - below).view(-1, *([1] * (3 - dim)))
        x = x.index_select(dim, below) * (1 - share) + x.index_select(dim, above) * share
    return x


def warped(x: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
    """Each pixel from where the flow points, in pixels to the right and down, linearly, and within the picture."""
    height, width = x.shape[2:]
    columns = (torch.arange(width, dtype=x.dtype) + flow[0, 0]).clamp(0, width - 1)
    rows = (torch.arange(height, dtype=x.dtype)[:, None] + flow[0, 1]).clamp(0, height - 1)
    left, top = columns.floor().long(), rows.floor().long()
    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    across, down = columns - left, rows - top
    upper = x[0, :, top, left] * (1 - across) + x[0, :, top, right] * across
    lower = x[0, :, bottom, left] * (1 - across) + x[0, :, bottom, right] * across
    return (upper * (1 - down) + lower * down)[None]


def between(first: numpy.ndarray, second: numpy.ndarray, time: float, weights: Tensors, version: str) -> torch.Tensor:
    """The frame at a time between two as [3, height, width], by the published network, in float64."""
    widths, scales, _, _, multiple = PUBLISHED[version]
    w = {name: each.double() for name, each in weights.items()}
    height, width = first.shape[:2]

    def padded(frame: numpy.ndarray) -> torch.Tensor:
        picture = torch.from_numpy(frame).permute(2, 0, 1)[None].double() / 255
        bottom, right = (-(-size // multiple) * multiple - size for size in (height, width))
        return F.pad(picture, (0, right, 0, bottom))

    def convolved(x: torch.Tensor, name: str, **how: int) -> torch.Tensor:
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1, **how)

    def grown(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.conv_transpose2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride=2, padding=1)

    def leaky(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, 0.2 * x)

    def features(x: torch.Tensor) -> torch.Tensor:
        for name, stride in (("cnn0", 2), ("cnn1", 1), ("cnn2", 1)):
            x = leaky(convolved(x, f"encode.{name}", stride=stride))
        return grown(x, "encode.cnn3")

    one, two = padded(first), padded(second)
    of_one, of_two = features(one), features(two)
    times = torch.full_like(one[:, :1], time)
    flow: torch.Tensor | None = None
    read = [one, two, of_one, of_two, times]
    for index, (scale, _) in enumerate(zip(scales, widths, strict=True)):
        x = resized(torch.cat(read, 1), 1 / scale)
        if flow is not None:
            x = torch.cat([x, resized(flow, 1 / scale) / scale], 1)
        name = f"blocks.{index}"
        x = leaky(convolved(x, f"{name}.conv0.0.0", stride=2))
        x = leaky(convolved(x, f"{name}.conv0.1.0", stride=2))
        for each in range(8):
            x = leaky(convolved(x, f"{name}.convblock.{each}.conv") * w[f"{name}.convblock.{each}.beta"] + x)
        x = resized(F.pixel_shuffle(grown(x, f"{name}.lastconv.0"), 2), scale)
        added, mask, handed = x[:, :4] * scale, x[:, 4:5], x[:, 5:]
        flow = added if flow is None else flow + added
        warps = [warped(one, flow[:, :2]), warped(two, flow[:, 2:])]
        read = [*warps, warped(of_one, flow[:, :2]), warped(of_two, flow[:, 2:]), times, mask, handed]
    share = torch.sigmoid(mask)
    return (warps[0] * share + warps[1] * (1 - share))[0, :, :height, :width]


def file_of(folder: Path, weights: Tensors, name: str = "rife.safetensors") -> Path:
    save_file(weights, folder / name)
    return folder / name


def smooth_frames(number: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(number, 3, 5, 5, generator=generator)
    frames = F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1).permute(0, 2, 3, 1)
    return (frames * 255).round().to(torch.uint8)


@table("version", [version for version in PUBLISHED if version != "4.25.heavy"])
def test_every_version_computes_its_specification(version: str, tmp_path: Path) -> None:
    weights = random_weights(version)
    if version in NUM_NUMBERS:
        assert sum(each.numel() for each in weights.values()) == NUM_NUMBERS[version]
    found = open_interpolation(str(file_of(tmp_path, weights)))
    assert found.version == version
    assert found.num_bytes == 4 * sum(each.numel() for each in weights.values())
    interpolator = found.load(CPU)
    # Neither side is a multiple of what the coarsest block needs.
    first, second = smooth_frames(2, 37, 70)
    prepared = interpolator.prepare(first), interpolator.prepare(second)
    for time in (0.25, 0.5):
        expected = between(first.numpy(), second.numpy(), time, weights, version)
        made = interpolator.picture(*prepared, time)[0, :, :37, :70]
        assert (made.double() - expected).abs().max() < 1e-5
    # The pictures do move, and not both alike.
    assert (expected - torch.from_numpy(first.numpy()).permute(2, 0, 1) / 255).abs().mean() > 0.02
    pixels = interpolator.between(*prepared, 3, first)
    halfway = (expected * 255).clamp(0, 255).permute(1, 2, 0)
    assert pixels.shape == (3, 37, 70, 3)
    assert (pixels[1].double() - halfway).abs().max() < 0.51


@pytest.mark.slow
def test_the_widest_version_computes_its_specification(tmp_path: Path) -> None:
    test_every_version_computes_its_specification.table[0]("4.25.heavy", tmp_path)  # type: ignore[attr-defined]


def test_what_a_file_says_of_itself() -> None:
    assert set(VERSIONS) == set(PUBLISHED)
    for version, (widths, scales, inside, features, multiple) in PUBLISHED.items():
        shape = VERSIONS[version]
        assert (shape.widths, shape.scales, shape.encoder_width, shape.num_features) == (
            widths,
            scales,
            inside,
            features,
        )
        assert shape.multiple == multiple


def without(weights: Tensors, *names: str) -> Tensors:
    return {name: each for name, each in weights.items() if not name.startswith(names)}


WEIGHTS = random_weights(SMALLEST)
DAMAGED = WEIGHTS | {"encode.cnn0.bias": torch.full((16,), float("nan"))}
HOSTILE: list[tuple[str, Tensors, str]] = [
    ("of another network", {"decoder.weight": torch.zeros(1)}, "not the tensors of RIFE 4.x; known are 4.21"),
    ("a version whose features stay", random_weights(SMALLEST, blocks_hand_on=False), "4.13 to 4.20 and of 4.24"),
    ("before 4.13", without(WEIGHTS, "encode."), "no encoder of four convolutions"),
    ("other widths", {k: v[:8] for k, v in WEIGHTS.items()}, "a version of RIFE that is not computed here"),
    ("one is missing", without(WEIGHTS, "blocks.1.convblock.3.beta"), r"4.22.lite with .*blocks.1.convblock.3.beta"),
    ("one is unknown", WEIGHTS | {"blocks.9.beta": torch.zeros(1)}, r"4.22.lite with tensors .*blocks.9.beta"),
    ("another shape", WEIGHTS | {"encode.cnn1.bias": torch.zeros(17)}, "4.22.lite with tensors .*encode.cnn1.bias"),
    ("two spellings", WEIGHTS | {"block0.conv0.0.0.bias": torch.zeros(96)}, "two tensors are one"),
    ("integers", WEIGHTS | {"encode.cnn0.bias": torch.zeros(16, dtype=torch.int32)}, "expected tensors of F32"),
]


@table(("what", "weights", "message"), HOSTILE)
def test_other_files_are_refused_by_their_heads(what: str, weights: Tensors, message: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, {name: each.contiguous() for name, each in weights.items()})
    with pytest.raises(DiffusionRuntimeError, match=message):
        open_interpolation(str(path))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "none.safetensors", "none.safetensors"),
        (tmp_path / "flownet.pkl", "a pickle can run code .* models convert"),
        (tmp_path / "rife.gguf", "rife.gguf"),
    ):
        with pytest.raises(DiffusionRuntimeError, match=message):
            open_interpolation(str(path))
    with pytest.raises(DiffusionRuntimeError, match=r"'encode.cnn0.bias' holds NaN"):
        open_interpolation(str(file_of(tmp_path, DAMAGED))).load(CPU)
    whole = file_of(tmp_path, WEIGHTS).read_bytes()
    size = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8 : 8 + size])
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:-4])
    # A head that claims more numbers than its bytes, and one of a terabyte.
    head["encode.cnn0.bias"]["shape"] = [2**40]
    text = json.dumps(head).encode()
    lying = tmp_path / "lying.safetensors"
    lying.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    for path in (cut, lying):
        with pytest.raises(DiffusionRuntimeError, match="damaged"):
            open_interpolation(str(path))
    # Numbers that lead beyond float32 make no black frames.
    large = open_interpolation(str(file_of(tmp_path, {name: 1e30 * each for name, each in WEIGHTS.items()}))).load(CPU)
    frame = smooth_frames(1, 32, 32)[0]
    with pytest.raises(DiffusionRuntimeError, match="interpolate: a frame between two is not made of numbers"):
        large.between(large.prepare(frame), large.prepare(frame.flip(0)), 1, frame)
    changed = open_interpolation(str(file_of(tmp_path, WEIGHTS)))
    file_of(tmp_path, random_weights("4.25 or 4.26"))
    with pytest.raises(DiffusionRuntimeError, match="the file has changed since"):
        changed.load(CPU)


def test_the_authors_file_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {f"module.{name.replace('blocks.', 'block')}": each for name, each in WEIGHTS.items()}
    source, output = tmp_path / "flownet.pkl", tmp_path / "rife.safetensors"
    torch.save({**theirs, "module.caltime.0.weight": torch.zeros(3, 4)}, source)
    assert run(["models", "convert", str(source), str(output), "--as", "rife"]) == 0
    said = capsys.readouterr().out
    assert "left out: 1 tensors for training: caltime.0.weight" in said
    assert f"use: --interpolation-path {output} --interpolate 2 (rife 4.22.lite)" in said
    converted = load_file(output)
    assert converted.keys() == WEIGHTS.keys()
    assert all(torch.equal(converted[name], each) for name, each in WEIGHTS.items())
    torch.save(without(theirs, "module.encode.cnn1"), source)
    for arguments in ([str(tmp_path / "other.safetensors")], [str(tmp_path / "folder")]):
        assert run(["models", "convert", str(source), *arguments, "--as", "rife"]) != 0
    capsys.readouterr()
    for further, message in (
        ([], "for weights of RIFE --as rife"),
        (["--as", "riff", "--base", str(tmp_path)], "Did you mean 'rife'?"),
    ):
        assert run(["models", "convert", str(source), str(tmp_path / "two.safetensors"), *further]) != 0
        assert message in capsys.readouterr().err
    torch.save({**theirs, "module.blocks.0.lastconv.0.bias": torch.zeros(52)}, source)
    capsys.readouterr()
    assert run(["models", "convert", str(source), str(tmp_path / "two.safetensors"), "--as", "rife"]) != 0
    assert "two tensors are one by another spelling" in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["flownet.pkl", "rife.safetensors"]


@pytest.fixture(scope="module")
def weights_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of(tmp_path_factory.mktemp("weights"), WEIGHTS)


@pytest.fixture(scope="module")
def pipeline(tiny_wan_folder: Path, weights_file: Path) -> Pipeline:
    return load_pipeline(str(tiny_wan_folder), device="cpu", interpolation_path=str(weights_file))


def request(**values: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 2, "seed": 1}
    return GenerationRequest("a red circle moving left", **(fields | values))


def test_a_clip_has_frames_in_between_and_its_length(pipeline: Pipeline, weights_file: Path) -> None:
    plain = pipeline(request(fps=8))
    interpolator = open_interpolation(str(weights_file)).load(CPU)
    frames = torch.from_numpy(plain.frames)
    for multiple in (2, 4):
        written: list[numpy.ndarray] = []
        headers = []

        def open_sink(_: int, header: Any, headers: Any = headers, written: Any = written) -> Any:
            headers.append(header)
            return lambda chunk: written.append(chunk.copy())

        media = pipeline(request(fps=8, interpolate=multiple), open_sink=open_sink)
        assert (media.num_frames, media.fps) == (9 * multiple, 8 * multiple)
        assert (headers[0].num_frames, headers[0].fps) == (9 * multiple, 8 * multiple)
        # What is streamed is what is returned, and nothing waits for the whole clip.
        assert numpy.array_equal(numpy.concatenate(written), media.frames)
        assert max(map(len, written)) <= multiple
        assert numpy.array_equal(media.frames[::multiple], plain.frames)
        assert (media.frames[-multiple:] == plain.frames[-1]).all()
        prepared = [interpolator.prepare(frame) for frame in frames]
        for index in range(8):
            made = interpolator.between(prepared[index], prepared[index + 1], multiple - 1, frames[0])
            assert numpy.array_equal(media.frames[index * multiple + 1 : (index + 1) * multiple], made.numpy())
        assert f"interpolate: 9 frames at 8 a second become {9 * multiple} at {8 * multiple}, by RIFE 4.22.lite" in (
            media.attention_report.notes
        )
        assert media.recipe["request"]["interpolate"] == multiple
        assert "interpolation_path" in media.recipe["weights"]


def test_chunks_of_any_size_give_the_same_frames(pipeline: Pipeline) -> None:
    settings = pipeline.rules.settings(pipeline.resolve(request(interpolate=3)))
    frames = smooth_frames(7, 33, 40)
    interpolator = pipeline.parts.interpolator
    assert isinstance(interpolator, FrameInterpolator)
    made = []
    for sizes in ((7,), (1, 4, 2), (1,) * 7):
        stream = FrameStream(7, iter([chunk[None] for chunk in frames.split(list(sizes))]))
        found = interpolated(stream, settings, interpolator)
        made.append(torch.cat(list(found.chunks), dim=1))
        assert made[-1].shape[1] == found.num_frames == 21
    assert all(torch.equal(made[0], each) for each in made[1:])
    single = FrameStream(1, iter([frames[None, :1]]))
    assert interpolated(single, settings, interpolator) is single


def test_a_draft_is_finished_with_frames_in_between(pipeline: Pipeline, tmp_path: Path) -> None:
    whole = pipeline(request(interpolate=2))
    assert_same(finished(pipeline, request(interpolate=2), 1, tmp_path), whole)
    assert pipeline(request()).num_frames == 9


def test_what_cannot_be_interpolated_is_refused(pipeline: Pipeline, tiny_wan_folder: Path) -> None:
    with pytest.raises(RequestError, match="interpolate: expected a clip of two frames or more, got one"):
        pipeline.resolve(request(num_frames=1, interpolate=2))
    for wrong in (1, 5, 2.0):
        with pytest.raises(RequestError, match="interpolate: expected a whole number from 2 to 4"):
            request(interpolate=wrong)
    assert any(
        "--interpolate 2 makes frames between" in each for each in pipeline.rules.unused(pipeline.resolve(request()))
    )
    with pytest.raises(
        ConfigError, match=r"expected at most 50 frames per second, got 64; use webp or mp4, or --fps 12"
    ):
        Outputs.parse("x.gif", None).format_for(pipeline.resolve(request(interpolate=4, fps=16)))
    without_weights = load_pipeline(str(tiny_wan_folder), device="cpu")
    with pytest.raises(RequestError, match=r"interpolate: .*rife_v4.26.safetensors \(22.7 MB\) of https://huggingface"):
        without_weights.resolve(request(interpolate=2))


@pytest.mark.slow
def test_two_processes_make_the_same_frames(tiny_wan_folder: Path, weights_file: Path, tmp_path: Path) -> None:
    made = ["generate", "a star", "--model-path", str(tiny_wan_folder), "--height", "32", "--width", "32"]
    made += ["--num-frames", "5", "--num-inference-steps", "2", "--device", "cpu", "--format", "npy"]
    made += ["--interpolation-path", str(weights_file), "--interpolate", "2"]
    for name, further in (("one", []), ("two", ["--num-gpus", "2"])):
        result = command_process(*made, "-o", f"{name}/", *further, cwd=tmp_path)
        assert result.code == 0, result.err
    one, two = (numpy.load(tmp_path / name / "a-star-seed0.npy") for name in ("one", "two"))
    assert one.shape[0] == 10
    assert numpy.abs(one.astype(int) - two).max() <= 1
    given = ["--model-path", str(tiny_wan_folder), "--input", str(weights_file), "--device", "cpu"]
    verified = command_process("verify", "one/a-star-seed0.npy", *given, cwd=tmp_path)
    assert verified.code == 0, verified.err
    assert "reproduced" in verified.out + verified.err
