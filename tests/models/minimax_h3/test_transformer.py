"""The MiniMax-H3 transformer against diffusers' own on tiny weights, float32: within 1e-5 of the largest value; in one
file by its authors' names, and pruned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.loaders.single_file_utils import convert_minimax_h3_transformer_checkpoint_to_diffusers
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from family_parity import CPU, load_transformer, relative
from original_names import Tensors, minimax_h3_as_authors
from published_files import write_transformer_file
from safetensors.torch import load_file, save_file
from tables import table
from tiny_encoders import HIDDEN
from tiny_minimax_h3 import CHANNELS, tiny_transformer

from diffusion_runtime import RuntimeConfig
from diffusion_runtime.attention import AttentionContext, AttentionPolicy, StepInfo, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.denoising.flow_schedule import shifted
from diffusion_runtime.errors import ConfigError, ModelLoadError
from diffusion_runtime.layers.embeddings import unpatchify
from diffusion_runtime.layers.modulation_rows import plan_steps
from diffusion_runtime.models.found_files import with_found_files
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.minimax_h3.transformer import TEXT_ROLE, MiniMaxH3Transformer
from diffusion_runtime.models.recognised_files import recognise_transformer
from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
from diffusion_runtime.text_encoders.interface import Conditions
from diffusion_runtime.weights.lora.binding import bind
from diffusion_runtime.weights.lora.reading import read_lora_file
from diffusion_runtime.weights.transformer_files import TransformerFile

PATCH = (1, 2, 2)
# A picture of the prompt, whose tokens are those of a video to the modulation.
PICTURE = (1, 3)


@pytest.fixture(scope="module")
def ours(tiny_minimax_h3_folder: Path) -> MiniMaxH3Transformer:
    return load_transformer(family_for_folder(tiny_minimax_h3_folder), tiny_minimax_h3_folder)


@pytest.fixture(scope="module")
def theirs(tiny_minimax_h3_folder: Path) -> MiniMaxH3Transformer3DModel:
    folder = tiny_minimax_h3_folder / "transformer"
    return MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.float32).eval()


def inputs(
    ours: MiniMaxH3Transformer, lengths: tuple[int, ...], size: ClipSize, images: tuple[str, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, DenoiserInputs]:
    """images: of `first` and `last`."""
    generator, batch = torch.Generator().manual_seed(1), len(lengths)
    latents = torch.randn(batch, *ours.geometry.sample_shape(size), generator=generator)
    text = torch.randn(batch, max(lengths), HIDDEN, generator=generator)
    conditions = Conditions.of(text, lengths)
    image = None
    if images:
        conditions = dataclasses.replace(conditions, picture_ranges=(PICTURE,))
        shape = (1, CHANNELS, 1, size.height // 16, size.width // 16)
        first, last = (torch.randn(shape, generator=generator) for _ in range(2))
        image = ImageCondition(
            first if "first" in images else first[:, :, :0],
            further=(last,) if "last" in images else (),
            places=((1, 1.0),) if "last" in images else (),
        ).repeat(batch)
    timesteps = torch.linspace(937.3, 12.0, batch + 1)[:batch]
    return latents, timesteps, DenoiserInputs(conditions, size, image=image)


@torch.no_grad()
def run_theirs(
    model: MiniMaxH3Transformer3DModel,
    ours: MiniMaxH3Transformer,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    given: DenoiserInputs,
) -> torch.Tensor:
    """One sample after the other, in the published order of the sequence and its clock."""
    found = []
    for index, length in enumerate(given.text.lengths):
        parts = ours.geometry.parts(latents[index : index + 1], given.size)
        assert parts.audio is not None
        video, sigma = parts.video, float(timesteps[index]) / 1000
        moments = parts.audio.permute(0, 3, 2, 1).flatten(1, 2)
        tags = torch.ones(length, dtype=torch.long)
        for start, stop in given.text.picture_ranges:
            tags[start:stop] = 0
        image = given.image
        anchors = () if image is None else ("first",) * image.latents.shape[2] + ("last",) * len(image.further)
        images = [] if image is None else [each[:1] for each in image.references if each.shape[2]]
        *layout, num_videos, num_sounds = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            tags, *video.shape[2:], moments.shape[1] // 2, PATCH, 2, 2, 0, anchors
        )
        positions, tags, videos, sounds, texts = layout
        of_video, of_audio = 1 - sigma, 1 - shifted(sigma, 3 / 12)
        times = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            videos, sounds, num_videos, num_sounds, length, of_video, of_audio, max(of_video, 0.999), 1.0
        )
        rows = torch.cat([patchify_video_latents(each, PATCH) for each in (*images, video)])[None]
        pictures, sound = model(
            rows,
            moments,
            given.text.embeddings[index : index + 1, :length],
            *times,
            tags,
            positions,
            videos,
            sounds,
            texts,
            return_dict=False,
        )
        grid = ours.geometry.grid(video.shape)
        pictures = unpatchify(pictures[:, num_videos:], grid, PATCH, channels_first=True)
        found.append(-ours.geometry.join(pictures, sound.unflatten(1, (2, -1)).permute(0, 3, 2, 1)))
    return torch.cat(found)


SHORT, LONG = ClipSize(64, 96, 22, 24), ClipSize(96, 64, 39, 24)


@table(
    ("lengths", "size", "images"),
    [
        ((4,), SHORT, ()),
        ((3, 9), LONG, ()),
        ((7, 7), SHORT, ("first",)),
        ((3, 9), SHORT, ("last",)),
        ((9, 4), LONG, ("first", "last")),
    ],
)
def test_velocities_equal_those_of_diffusers(
    ours: MiniMaxH3Transformer,
    theirs: MiniMaxH3Transformer3DModel,
    lengths: tuple[int, ...],
    size: ClipSize,
    images: tuple[str, ...],
) -> None:
    arguments = inputs(ours, lengths, size, images)
    before = arguments[2].text.embeddings.clone()
    assert relative(ours(*arguments, AttentionContext()), run_theirs(theirs, ours, *arguments)) < 1e-5
    assert torch.equal(arguments[2].text.embeddings, before)


def test_steps_share_the_refined_text_and_rows_made_before(
    ours: MiniMaxH3Transformer, theirs: MiniMaxH3Transformer3DModel
) -> None:
    latents, _, given = inputs(ours, (5, 8), SHORT, ("first",))
    context = AttentionContext()
    steps = [StepInfo(index, 3, timestep=timestep) for index, timestep in enumerate((900.0, 500.0, 100.0))]
    plan_steps(context.state, steps)
    for step in steps:
        now = dataclasses.replace(context, step=step)
        arguments = latents, torch.full((2,), step.timestep or 0.0), given
        assert relative(ours(*arguments, now), run_theirs(theirs, ours, *arguments)) < 1e-5
    report = context.recorder.report()
    counts = {role: sum(row.count for row in report.rows if row.role == role) for role in ("self", TEXT_ROLE)}
    assert counts == {"self": 3 * 3, TEXT_ROLE: 2}
    notes = " ".join(report.notes)
    assert "video and sound: rows of 3 timesteps" in notes
    assert "given tokens: rows of 1 timestep" in notes


def test_padding_is_lengths_and_what_is_no_grid_is_text(ours: MiniMaxH3Transformer) -> None:
    seen: dict[str, TokenLayout] = {}

    def keep(module: AttentionLayer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        assert keywords.get("mask") is None
        seen[module.layer.name] = arguments[3].layout

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in ours.attention_layers()]
    ours(*inputs(ours, (3, 9), SHORT, ("last",)), AttentionContext())
    for handle in handles:
        handle.remove()
    assert seen["text_refiner.blocks.1.self_attention.attention"] == TokenLayout.text(9, (3, 9))
    # An image of 6 tokens, and 37 moments of sound on each side.
    lengths, segments = (80 + 3, 80 + 9), (6, 74, 9)
    joint = TokenLayout(
        (7, 2, 3), num_suffix_tokens=89, valid_lengths=lengths, text_segments=segments, num_given_tokens=80
    )
    assert seen["blocks.2.self_attention.attention"] == joint
    assert set(seen) <= {name for name, _ in ours.named_modules()}


# Of the table of pruned weights.
TABLE_SIZE, RANK = 9, 4


@pytest.fixture(scope="module")
def whole(tiny_minimax_h3_folder: Path) -> Tensors:
    return load_file(tiny_minimax_h3_folder / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def pruned(whole: Tensors) -> Tensors:
    """The same with a table of times, and modulations that are projections of it, as published files have them."""
    generator = torch.Generator().manual_seed(3)
    made = {name: each for name, each in minimax_h3_as_authors(whole).items() if "time_embedder" not in name}
    for name in [each for each in made if each.endswith("adaln_proj.linear.weight")]:
        made[name] = torch.randn(len(made[name]), RANK, generator=generator) / 4
    return made | {"adaln_t_table": torch.randn(TABLE_SIZE, RANK, generator=generator)}


def loaded(folder: Path, file: Path) -> Any:
    model = family_for_folder(ModelFolder(folder)).describe(ModelFolder(folder))
    model = model.with_transformer_files(
        [TransformerFile(str(file), "transformer_path", "transformer")], lora_names_of_families
    )
    model.weights.check(model.modules(model.build_transformer(AttentionPolicy())))
    return model.load_transformer(model.build_transformer(AttentionPolicy(dtype=torch.float32)), CPU, torch.float32)


class OfTable(torch.nn.Module):
    """The published formula: lines between the rows of a table at evenly spaced times."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(table)

    def forward(self, time: torch.Tensor) -> torch.Tensor:
        rows = []
        for each in time.double().tolist():
            place = min(max(each, 0.0), 1.0) * (TABLE_SIZE - 1)
            first = min(int(place), TABLE_SIZE - 2)
            rows.append(self.weight[first] + (place - first) * (self.weight[first + 1] - self.weight[first]))
        return torch.stack(rows)


def test_names_are_those_that_diffusers_converts(whole: Tensors) -> None:
    converted = convert_minimax_h3_transformer_checkpoint_to_diffusers(minimax_h3_as_authors(whole), {})
    assert converted.keys() == whole.keys()
    assert all(torch.equal(converted[name], each) for name, each in whole.items())


def test_pruned_weights_compute_their_formula(
    tiny_minimax_h3_folder: Path, pruned: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At other times than those of the table, with an image at its own; with a prefix and without."""
    theirs = tiny_transformer(time_embed_dim=RANK)
    own = {name: each for name, each in pruned.items() if name != "adaln_t_table"}
    theirs.load_state_dict(convert_minimax_h3_transformer_checkpoint_to_diffusers(own, {}), strict=False)
    theirs.time_embedder, theirs.time_proj = OfTable(pruned["adaln_t_table"]), torch.nn.Identity()
    for number, prefix in enumerate(("", "model.diffusion_model.")):
        file = tmp_path / f"{number}.safetensors"
        save_file({f"{prefix}{name}": each.contiguous() for name, each in pruned.items()}, file)
        ours = loaded(tiny_minimax_h3_folder, file)
        arguments = inputs(ours, (3, 9), SHORT, ("first",))
        found = ours(*arguments, AttentionContext())
        with monkeypatch.context() as patch:
            # There is no activation between the table and its projections.
            patch.setattr(
                "torch.nn.functional.silu",
                lambda each, inplace=False, _silu=F.silu: each if each.shape[-1] == RANK else _silu(each, inplace),
            )
            expected = run_theirs(theirs, ours, *arguments)
        assert relative(found, expected) < 1e-5


def test_a_pruned_file_of_the_published_size_is_recognised(tmp_path: Path) -> None:
    """One for requests with references has the same tensors, and is told by its name."""
    file = write_transformer_file(tmp_path / "minimax_h3_ref2va_pruned_bf16.safetensors", "minimax-h3", rank=8)
    recognised = recognise_transformer(file)
    assert recognised is not None
    assert (recognised.name, recognised.told_by) == ("minimax-h3-ref2va", "name")
    other = recognise_transformer(file.rename(tmp_path / "minimax_h3_fl2va_pruned_bf16.safetensors"))
    assert other is not None
    assert other.name == "minimax-h3"
    file = (tmp_path / "minimax_h3_fl2va_pruned_bf16.safetensors").rename(file)
    with pytest.raises(ConfigError, match="by its name it is the transformer_ref of minimax-h3, which takes other"):
        with_found_files(RuntimeConfig(str(file), like="minimax-h3"))


def test_a_table_that_is_none_is_a_tensor_of_another_model(
    tiny_minimax_h3_folder: Path, pruned: Tensors, tmp_path: Path
) -> None:
    save_file({**pruned, "adaln_t_table": torch.zeros(1, RANK)}, tmp_path / "one.safetensors")
    with pytest.raises(ModelLoadError, match="adaln_t_table"):
        loaded(tiny_minimax_h3_folder, tmp_path / "one.safetensors")


def _adapter(module: str, rows: int, columns: int, infix: str = "") -> Tensors:
    generator = torch.Generator().manual_seed(rows)
    down, up = (torch.randn(*size, generator=generator) / 8 for size in ((2, columns), (rows, 2)))
    return {f"{module}.lora_A{infix}.weight": down, f"{module}.lora_B{infix}.weight": up}


def test_a_lora_of_the_whole_model_is_applied_to_pruned_weights_but_for_its_modulation(
    tiny_minimax_h3_folder: Path, pruned: Tensors, tmp_path: Path
) -> None:
    save_file({name: each.contiguous() for name, each in pruned.items()}, tmp_path / "pruned.safetensors")
    query = _adapter("transformer_blocks.1.attn.to_q", 32, 24)
    save_file(
        {**query, **_adapter("transformer_blocks.1.adaln_proj.linear", 18 * 24, 20)}, tmp_path / "turbo.safetensors"
    )
    model = family_for_folder(ModelFolder(tiny_minimax_h3_folder)).describe(ModelFolder(tiny_minimax_h3_folder))
    file = TransformerFile(str(tmp_path / "pruned.safetensors"), "transformer_path", "transformer")
    model = model.with_transformer_files([file], lora_names_of_families)
    lora = bind(
        read_lora_file(str(tmp_path / "turbo.safetensors")),
        LoraConfig(str(tmp_path / "turbo.safetensors")),
        model.lora_target(lora_names_of_families),
    )
    assert lora.changed("transformer") == {"transformer_blocks.1.attn.to_q.weight"}
    assert any("the modulation of a model with another input of it" in str(each) for each in lora.remarks)


def test_fused_adapters_of_diffsynth_do_not_say_their_order(tiny_minimax_h3_folder: Path, tmp_path: Path) -> None:
    save_file(_adapter("blocks.0.attn.qkv_proj", 96, 24, ".default"), tmp_path / "fused.safetensors")
    model = family_for_folder(ModelFolder(tiny_minimax_h3_folder)).describe(ModelFolder(tiny_minimax_h3_folder))
    config = LoraConfig(str(tmp_path / "fused.safetensors"))
    with pytest.raises(ModelLoadError, match=r"DiffSynth-Studio .* does not say which. Write q, k and v apart"):
        bind(read_lora_file(config.path), config, model.lora_target(lora_names_of_families))
