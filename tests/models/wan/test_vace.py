"""Wan VACE against diffusers' WanVACEPipeline on tiny weights: control video, mask, reference images, two experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from diffusers import WanVACEPipeline, WanVACETransformer3DModel
from family_cases import changed
from family_parity import CPU, assert_equal_runs, load_theirs, load_transformer, record_latents, relative
from graphed_forwards import run_request, with_other_text
from offloaded_pipelines import StrictTransfers, load_offloaded
from PIL import Image
from recorded_capture import RecordedCapture
from safetensors.torch import save_file
from tiny_models import write_tiny_wan

from diffusion_runtime import GenerationRequest, Pipeline, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionContext, token_order
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.token_layout import RASTER
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import ForwardGraphs
from diffusion_runtime.errors import ModelLoadError, RequestError
from diffusion_runtime.loading import inspect_pipeline
from diffusion_runtime.media.clips import read_clip
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.wan.family import FAMILY
from diffusion_runtime.models.wan.weights import transformer_pieces
from diffusion_runtime.text_encoders.interface import Conditions

HEIGHT, WIDTH, FRAMES = 32, 48, 9
PLAIN = {"condition": "control", "num_layers": 3, "vae": "plain"}
# diffusers' pipeline takes the size of a latent for another one in the quick autoencoder.
QUICK = {"condition": "control", "num_layers": 3}
TWO_EXPERTS = {"condition": "control", "boundary_ratio": 0.9, "vae": "plain"}
FolderOf = Callable[[Mapping[str, Any]], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    folders: dict[str, Path] = {}

    def folder(kind: Mapping[str, Any]) -> Path:
        name = str(kind)
        if name not in folders:
            folders[name] = write_tiny_wan(tmp_path_factory.mktemp("vace") / "model", **kind)
        return folders[name]

    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A control video, masks of it and reference images, by name."""
    folder = tmp_path_factory.mktemp("inputs")
    frames, rows, columns = numpy.mgrid[0:FRAMES, 0:HEIGHT, 0:WIDTH]
    video = numpy.stack([5 * rows + 9 * frames, 4 * columns, 255 - rows * frames], axis=-1).astype(numpy.uint8)
    numpy.save(folder / "video.npy", video)
    anew = numpy.where((columns > 4 * frames) & (rows > 6), 255, 0).astype(numpy.uint8)
    numpy.save(folder / "mask.npy", numpy.repeat(anew[..., None], 3, axis=-1))
    Image.fromarray(anew[0]).save(folder / "still.png")
    Image.fromarray(video[0, :, :33]).save(folder / "tall.png")
    Image.fromarray(video[3, :20]).save(folder / "wide.png")
    return {path.stem: str(path) for path in folder.iterdir()}


@pytest.fixture
def our_latents(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    return record_latents(monkeypatch)


def request(**values: Any) -> GenerationRequest:
    sizes = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": 3}
    fields = {"prompt": "a red circle moving left", "negative_prompt": "a star", **sizes, "guidance_scale": 4.0}
    return GenerationRequest(**(fields | values))


def load(folder: Path, **how: Any) -> Pipeline:
    pipeline = load_pipeline(str(folder), device="cpu", **how)
    assert isinstance(pipeline, Pipeline)
    return pipeline


def their_inputs(given: GenerationRequest) -> dict[str, Any]:
    """The files of a request as diffusers' pipeline takes them."""
    paths = (given.image_path,) if isinstance(given.image_path, str) else given.image_path or ()
    inputs: dict[str, Any] = {"reference_images": [Image.open(path).convert("RGB") for path in paths] or None}
    if given.video_path is not None:
        inputs["video"] = [Image.fromarray(frame) for frame in read_clip(given.video_path, "", FRAMES, HEIGHT, WIDTH)]
    if given.mask_path is not None:
        count = 1 if given.mask_path.endswith("png") else FRAMES
        masks = read_clip(given.mask_path, "", count, HEIGHT, WIDTH, grey=True)
        inputs["mask"] = [Image.fromarray(mask) for mask in masks] * (FRAMES // count)
    scale = given.conditioning_scale
    return {
        **inputs,
        "conditioning_scale": 1.0 if scale is None else list(scale) if isinstance(scale, tuple) else scale,
    }


CASES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "all of it": (PLAIN, {"video": "video", "mask": "mask", "images": ("tall", "wide"), "scale": (0.7, 1.6)}),
    "a still mask": (PLAIN, {"video": "video", "mask": "still", "scale": 0.8}),
    "an image, two experts": (TWO_EXPERTS, {"images": ("wide",)}),
}


def named(files: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a case names, as fields of a request."""
    found = {f"{key}_path": files[given[key]] for key in ("video", "mask") if key in given}
    images = {"image_path": tuple(files[name] for name in given["images"])} if "images" in given else {}
    return {**found, **images, "conditioning_scale": given.get("scale")}


@pytest.mark.parametrize("name", CASES)
def test_a_generation_equals_diffusers(
    folder_of: FolderOf, files: dict[str, str], our_latents: list[torch.Tensor], name: str
) -> None:
    kind, given = CASES[name]
    folder = folder_of(kind)
    second = {"guidance_scale_2": 2.5} if kind is TWO_EXPERTS else {}
    asked = request(**named(files, given), **second)
    ours, theirs = load(folder), load_theirs(WanVACEPipeline, folder)
    num_before = len(given.get("images", ()))

    def run_theirs(resolved: list[GenerationRequest], noise: torch.Tensor) -> tuple[list[torch.Tensor], numpy.ndarray]:
        (first,), latents = resolved, []

        def keep(_: Any, __: int, ___: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            latents.append(values["latents"].clone())
            return {}

        frames = theirs(
            **their_inputs(first),
            prompt=first.prompt,
            negative_prompt=first.negative_prompt,
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=first.num_inference_steps,
            guidance_scale=first.guidance_scale,
            guidance_scale_2=first.guidance_scale_2,
            latents=noise.clone(),
            max_sequence_length=ours.text_encoder.max_tokens,
            callback_on_step_end=keep,
            output_type="np",
        ).frames
        return latents, frames

    assert_equal_runs(ours, [asked], our_latents, run_theirs, num_frames_before=num_before)


def test_the_same_through_diffusers_own_pipeline(folder_of: FolderOf, files: dict[str, str]) -> None:
    """--backend diffusers gives it the same files."""
    folder = folder_of(PLAIN)
    asked = request(**named(files, {"video": "video", "mask": "still", "images": ("wide",), "scale": 0.8}))
    theirs = load_pipeline(str(folder), device="cpu", backend="diffusers")
    with changed(folder, "generation.json", {"max_text_tokens": 512}):
        ours = load(folder)(asked).frames.astype(int)
    assert numpy.abs(theirs(asked).frames - ours).max() <= 2
    rules = theirs.rules
    with pytest.raises(RequestError, match="last_image_path: WanVACEPipeline takes no such value"):
        rules.resolve(request(last_image_path=files["wide"]))


def test_every_input_matters(folder_of: FolderOf, files: dict[str, str], our_latents: list[torch.Tensor]) -> None:
    """Ten times as much as the comparisons above allow, or they could not tell whether one of them went astray."""
    ours = load(folder_of(QUICK))
    given = named(files, {"video": "video", "mask": "mask", "images": ("tall", "wide")})
    others = (
        given,
        {**given, "video_path": None, "mask_path": None},
        {**given, "mask_path": None},
        {**given, "mask_path": files["still"]},
        {**given, "video_path": files["still"]},
        {**given, "image_path": given["image_path"][::-1]},
        {**given, "conditioning_scale": (1.0, 0.5)},
        {**given, "conditioning_scale": 0.5},
    )
    clips = []
    for fields in others:
        ours(request(**fields, num_inference_steps=1, guidance_scale=1.0))
        clips.append(our_latents[-1])
    for index, first in enumerate(clips):
        for second in clips[index + 1 :]:
            assert (second - first).norm() > 1e-3 * first.norm()


def control_inputs(grid: tuple[int, int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Latents, timesteps and inputs of our transformer, and the keyword arguments of theirs for the same step."""
    generator = torch.Generator().manual_seed(1)
    latents, control = (torch.randn(2, channels, *grid, generator=generator) for channels in (16, 96))
    text, timestep = torch.randn(2, 24, 32, generator=generator), torch.tensor([937.3, 12.0])
    size, asked = ClipSize(8 * grid[1], 8 * grid[2], 4 * grid[0] - 3, 16), request(conditioning_scale=(0.5, 1.5))
    inputs = DenoiserInputs(Conditions.of(text), size, image=ImageCondition(control), request=asked)
    theirs = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "control_hidden_states": control,
        "control_hidden_states_scale": torch.tensor([0.5, 1.5]),
        "return_dict": False,
    }
    return (latents, timestep, inputs), theirs


def test_a_forward_pass_equals_diffusers(folder_of: FolderOf) -> None:
    folder = folder_of(PLAIN)
    ours = load_transformer(FAMILY, folder)
    theirs = WanVACETransformer3DModel.from_pretrained(folder / "transformer").eval()
    for grid in ((1, 4, 4), (3, 6, 8)):
        given, their_arguments = control_inputs(grid)
        before = given[0].clone(), given[2].image.latents.clone()
        found = ours(*given, AttentionContext())
        with torch.no_grad():
            assert relative(found, theirs(**their_arguments)[0]) < 1e-5
        assert torch.equal(given[0], before[0])
        assert torch.equal(given[2].image.latents, before[1])
    # In bfloat16 what stays float32 is what does in diffusers.
    halved = load_transformer(FAMILY, folder, torch.bfloat16)
    stored = WanVACETransformer3DModel.from_pretrained(folder / "transformer", dtype=torch.bfloat16)
    dtypes = {key: value.dtype for key, value in stored.state_dict().items()}
    pieces = dict(transformer_pieces(halved.config))
    for key, value in halved.state_dict().items():
        assert {dtypes.pop(piece.name) for piece in pieces[key]} == {value.dtype}, key
    assert not dtypes


@pytest.mark.slow
def test_control_blocks_attend_in_roles_of_their_own(
    folder_of: FolderOf, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"per_role": {"wan.control_self": "reference", "wan.control_cross": "reference"}, "default": "torch_sdpa"}
    ours = load(folder_of(QUICK), attention=plan)
    asked = request(**named(files, {"video": "video", "images": ("wide",)}), guidance_mode="two_pass")
    media = ours(asked)
    rows = {(row.role, row.backend): row.count for row in media.attention_report.rows}
    assert rows == {
        ("self", "torch_sdpa"): 18,
        ("cross", "torch_sdpa"): 18,
        ("wan.control_self", "reference"): 12,
        ("wan.control_cross", "reference"): 12,
    }
    assert [part.component for part in media.attention_report.libraries][-1] == "vae"
    assert "vae encoder" in [part.component for part in media.attention_report.libraries]
    # The two streams go through step caches.
    for cache in ("easycache:threshold=0,force=true", "dbcache:F=1,R=0,W=0,force=true"):
        assert numpy.array_equal(ours(dataclasses.replace(asked, step_cache=cache)).frames, media.frames)


def test_sparse_layers_and_offloaded_blocks_compute_the_same(folder_of: FolderOf, files: dict[str, str]) -> None:
    folder = folder_of(QUICK)
    asked = request(**named(files, {"video": "video"}), num_inference_steps=2)
    expected = load(folder)(asked).frames
    transfers = StrictTransfers()
    streamed = load_offloaded(str(folder), "layers", {"transformer": 1}, transfers)
    assert streamed.parts.offloading is not None
    for part in streamed.parts.offloading.parts:
        transfers.hide(part.arena.bytes)
    assert any(part.stream is not None for part in streamed.parts.offloading.parts)
    assert numpy.array_equal(streamed(asked).frames, expected)
    # The control's tokens stand in the order of the tiles as well, where all layers agree on one.
    tiles = {"backend": "sliding_tile_attn", "extra": {"window": [1, 3, 3], "tile_size": [2, 2, 3]}}
    given, _ = control_inputs((3, 8, 10))
    sparse = load(folder, attention={"per_role": {"self": tiles}})
    context = AttentionContext()
    in_tiles = sparse.transformer(*given, context)
    assert any("tiles of 2 x 2 x 3" in note for note in context.recorder.report().notes)
    with mock.patch.object(token_order, "shared_tile", return_value=RASTER):
        assert relative(sparse.transformer(*given, AttentionContext()), in_tiles) < 1e-5
    whole = load(folder).transformer
    assert relative(whole(*given, AttentionContext()), in_tiles) > 1e-3
    # Replayed forward passes of equal inputs, scale and all, are those of one graph; of another scale of another one.
    graphs, inputs = ForwardGraphs(RecordedCapture()), given[2]
    other = dataclasses.replace(inputs, request=dataclasses.replace(inputs.request, conditioning_scale=0.25))
    for asked_for, num_graphs in ((inputs, 1), (with_other_text(inputs, 0.7), 1), (other, 2)):
        found, report = run_request(whole, asked_for, graphs, sample_shape=given[0].shape)
        eager, _ = run_request(whole, asked_for, None, sample_shape=given[0].shape)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, eager, strict=True))
        assert report.graphs is not None
        assert (report.graphs.num_graphs, report.graphs.num_replayed > 0) == (num_graphs, True)


def test_lora_files_of_vace_and_of_text_to_video(folder_of: FolderOf, tmp_path: Path) -> None:
    """Merged weights are theirs; a model without control blocks says what it did not apply."""
    folder = folder_of(QUICK)
    theirs = WanVACETransformer3DModel.from_pretrained(folder / "transformer").eval()
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear) and "condition_embedder" not in name:
            down = torch.randn(2, module.in_features, generator=generator) / module.in_features**0.5
            up = 0.1 * torch.randn(module.out_features, 2, generator=generator)
            module.weight.data += up @ down
            # Two of them by their authors' names.
            stored = {"vace_blocks.0.proj_in": "before_proj", "vace_blocks.1.proj_out": "after_proj"}.get(name)
            prefix = f"diffusion_model.{name if stored is None else name.rpartition('.')[0] + '.' + stored}"
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    path = str(tmp_path / "lora.safetensors")
    save_file(tensors, path)
    given, their_arguments = control_inputs((3, 4, 4))
    found = load(folder, lora=[path]).transformer(*given, AttentionContext())
    with torch.no_grad():
        assert relative(found, theirs(**their_arguments)[0]) < 1e-5
    plain = str(write_tiny_wan(tmp_path / "plain", num_layers=3))
    rules = inspect_pipeline(RuntimeConfig(plain, device="cpu", lora=[path])).rules
    (remark,) = (remark for lora in rules.loras for remark in lora.remarks)
    assert "the control blocks of VACE" in remark


def test_what_cannot_control_a_clip_is_said_before_the_weights_load(
    folder_of: FolderOf, files: dict[str, str], tmp_path: Path
) -> None:
    video, mask = {"video_path": files["video"]}, {"mask_path": files["mask"]}
    small, thin = tmp_path / "small.png", tmp_path / "thin.png"
    Image.new("L", (24, 16)).save(small)
    Image.new("RGB", (7, 64)).save(thin)
    short, black = tmp_path / "short.npy", tmp_path / "black.npy"
    numpy.save(short, numpy.zeros((7, HEIGHT, WIDTH, 3), numpy.uint8))
    numpy.save(black, numpy.full((FRAMES, HEIGHT, WIDTH, 3), 100, numpy.uint8))
    rules = inspect_pipeline(RuntimeConfig(str(folder_of(QUICK)), device="cpu")).rules
    for given, told in (
        (mask, "mask_path: a mask says what of a control video is made anew; give the video: --video-path FILE"),
        ({**video, "mask_path": str(black)}, "mask_path: .*black.npy is black, so that nothing would be made anew"),
        ({"video_path": str(short)}, r"short.npy has 7 frames, the clip 9; give a longer one, or --num-frames 5"),
        (
            {**video, "mask_path": str(small)},
            r"small.png is 24 x 16 .*, the control video 48 x 32; a mask has the size",
        ),
        ({**video, "mask_path": str(short)}, "mask_path: .*short.npy has 7 frames, the clip 9"),
        ({**video, "height": 64}, r"video.npy is 48 x 32 \(width x height\), the clip 48 x 64: the ratio"),
        ({"image_path": str(thin)}, r"thin.png is 7 x 64 .*: too narrow; crop it"),
        ({"image_path": (files["wide"],) * 17}, "image_path: expected at most 16 images, got 17"),
        ({"conditioning_scale": (1.0, 2.0, 3.0)}, "conditioning_scale: expected one number, or 2, one for each"),
        ({"last_image_path": files["wide"]}, "last_image_path: this model takes no image to end with"),
        ({"video_path": "none.mp4"}, "video_path: none.mp4: no such file"),
    ):
        with pytest.raises(RequestError, match=told):
            rules.resolve(request(**given))
    longer = rules.resolve(request(**video, num_frames=5))
    assert rules.unused(longer) == (f"video_path: {files['video']}: its first 5 frames are used",)
    still = rules.resolve(request(video_path=files["still"], mask_path=files["still"]))
    assert rules.unused(still) == (
        f"video_path: {files['still']}: it has one frame, which stands for every frame of the clip",
    )
    others = inspect_pipeline(RuntimeConfig("shapes", device="cpu")).rules
    for given, told in (
        (video, "video_path: this model takes no control video; leave it out"),
        (mask, "mask_path: a mask says what of a picture or a video is made anew; give that: --init-path FILE"),
        ({"conditioning_scale": 1.0}, "conditioning_scale: this model has no control blocks; leave it out"),
    ):
        with pytest.raises(RequestError, match=told):
            others.resolve(request(**given))


def test_what_a_folder_with_control_blocks_may_not_say_is_named(folder_of: FolderOf) -> None:
    folder, config = folder_of(QUICK), "transformer/config.json"
    for file, values, told in (
        (config, {"vace_layers": [1, 2]}, "key 'vace_layers': expected a list of rising block numbers from 0, below 3"),
        (config, {"vace_layers": [0, 3]}, "key 'vace_layers'"),
        (config, {"vace_layers": [0, 2, 1]}, "key 'vace_layers'"),
        (config, {"vace_layers": 2}, "key 'vace_layers'"),
        (config, {"vace_in_channels": 97}, "key 'vace_in_channels': expected 96: 16 of what is kept"),
        (config, {"in_channels": 36}, "key 'in_channels': expected 16"),
        (config, {"image_dim": 24, "added_kv_proj_dim": 64}, "key 'image_dim'"),
        (
            "model_index.json",
            {"_class_name": "WanPipeline"},
            "key '_class_name': expected WanVACEPipeline, got 'WanPip",
        ),
    ):
        with changed(folder, file, values), pytest.raises(ModelLoadError, match=told):
            FAMILY.open(folder)
    assert FAMILY.open(folder).load_image_conditioner(CPU, torch.float32).fast().libraries
