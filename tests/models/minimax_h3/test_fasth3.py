"""FastH3: a LoRA file of low rank, whole differences and gates that replace weights, run by Video Sparse Attention;
against diffusers' transformer with the merged weights and VSA-H3 by its formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import _apply_rotary_emb
from family_parity import CPU, relative
from safetensors.torch import load_file, save_file
from tables import table
from tiny_minimax_h3 import TINY_SIZES
from vsa_h3_oracle import vsa_h3_attention

from diffusion_runtime import GenerationRequest, RuntimeConfig, load_pipeline
from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, TokenLayout
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.part_schedules import with_carried_sound, with_scaled_sound, with_schedule_of_sound
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.explanation.explanation import explain
from diffusion_runtime.loading import prepare
from diffusion_runtime.models.minimax_h3.transformer import MiniMaxH3Transformer
from diffusion_runtime.models.registry import family_for_folder, lora_names_of_families
from diffusion_runtime.rules.batch_settings import BatchSettings
from diffusion_runtime.weights.lora.binding import bind_files
from tests.models.minimax_h3.test_transformer import LONG, SHORT, inputs, run_theirs

Tensors = dict[str, torch.Tensor]
SPARSITY, NUM_LAYERS = 0.6, 3
SPARSE = {"per_role": {"self": {"backend": "video_sparse_attn", "extra": {"sparsity": SPARSITY}}}}
GATES = [f"transformer_blocks.{index}.attn.to_gate_compress" for index in range(NUM_LAYERS)]


@pytest.fixture(scope="module")
def whole(tiny_minimax_h3_folder: Path) -> Tensors:
    return load_file(tiny_minimax_h3_folder / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def lora(whole: Tensors) -> Tensors:
    """As its authors write it: no alpha, and a change of every weight and bias."""
    generator = torch.Generator().manual_seed(5)
    made: Tensors = {}
    for name, each in whole.items():
        module, _, kind = name.rpartition(".")
        if each.dim() == 2:
            made[f"{module}.lora_A.weight"] = 0.3 * torch.randn(2, each.shape[1], generator=generator)
            made[f"{module}.lora_B.weight"] = 0.3 * torch.randn(each.shape[0], 2, generator=generator)
        else:
            made[f"{module}.diff{'_b' * (kind == 'bias')}"] = 0.1 * torch.randn(each.shape, generator=generator)
    made |= {f"{name}.set_weight": 0.5 * torch.randn(32, 24, generator=generator) for name in GATES}
    return made


def counts(tensors: Tensors) -> dict[str, str]:
    """Its metadata."""
    ends = {"low_rank_tensors": (".lora_A.weight", ".lora_B.weight"), "diff_tensors": (".diff", ".diff_b")}
    ends["set_weight_tensors"] = (".set_weight",)
    counted = {kind: str(sum(name.endswith(end) for name in tensors)) for kind, end in ends.items()}
    return {"format": "fastvideo-lora-v2", "finetuned_model": "FastVideo/FastVideo-FastH3-4-step-Preview-v1", **counted}


@pytest.fixture(scope="module")
def lora_file(lora: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("vsa-datafree") / "adapter_model.safetensors"
    save_file(lora, file, metadata=counts(lora))
    return file


def merged(whole: Tensors, lora: Tensors) -> Tensors:
    """The model's weights with the file's changes, and its gates."""
    made = dict(whole)
    for name, each in whole.items():
        module, _, kind = name.rpartition(".")
        if each.dim() == 2:
            made[name] = each + lora[f"{module}.lora_B.weight"] @ lora[f"{module}.lora_A.weight"]
        else:
            made[name] = each + lora[f"{module}.diff{'_b' * (kind == 'bias')}"]
    return made | {f"{name}.weight": lora[f"{name}.set_weight"] for name in GATES}


class ByFormula:
    """A processor of diffusers' attention that computes VSA-H3. The sequence is text, images, sound and the grid."""

    def __init__(self, gate: torch.Tensor, layout: TokenLayout) -> None:
        self.gate, self.layout = gate, layout

    def __call__(self, attn: Any, hidden: torch.Tensor, rotary_emb: Any = None, attention_mask: Any = None) -> Any:
        assert attention_mask is None
        q, k, v = (each(hidden).unflatten(-1, (attn.heads, -1)) for each in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (_apply_rotary_emb(each, *rotary_emb) for each in (attn.norm_q(q), attn.norm_k(k)))
        gate = torch.nn.functional.linear(hidden, self.gate).unflatten(-1, (attn.heads, -1))
        num_tiles = math.prod(-(-extent // 4) for extent in self.layout.grid)
        num_kept = max(1, math.ceil((1 - SPARSITY) * num_tiles))
        attended = vsa_h3_attention(q, k, v, gate, self.layout, (4, 4, 4), num_kept)
        return attn.to_out[0](attended.float().flatten(2))


@pytest.fixture(scope="module")
def theirs(tiny_minimax_h3_folder: Path, whole: Tensors, lora: Tensors) -> MiniMaxH3Transformer3DModel:
    folder = tiny_minimax_h3_folder / "transformer"
    model = MiniMaxH3Transformer3DModel.from_pretrained(folder, dtype=torch.float32).eval()
    gates = {f"{name}.weight" for name in GATES}
    model.load_state_dict({name: each for name, each in merged(whole, lora).items() if name not in gates})
    return model


def opened(folder: Path, *configs: LoraConfig) -> MiniMaxH3Transformer:
    model = family_for_folder(ModelFolder(folder)).describe(ModelFolder(folder))
    loras = bind_files(configs, model.lora_target(lora_names_of_families))
    policy = AttentionPolicy(config=AttentionConfig.parse(SPARSE), dtype=torch.float32, environment=None)
    loaded = model.load_transformer(model.build_transformer(policy), CPU, torch.float32, loras)
    assert isinstance(loaded, MiniMaxH3Transformer)
    return loaded


@table(("length", "size", "images"), [(4, LONG, ()), (9, SHORT, ("first", "last"))])
def test_velocities_equal_the_formula(
    tiny_minimax_h3_folder: Path,
    theirs: MiniMaxH3Transformer3DModel,
    lora: Tensors,
    lora_file: Path,
    length: int,
    size: ClipSize,
    images: tuple[str, ...],
) -> None:
    ours = opened(tiny_minimax_h3_folder, LoraConfig(str(lora_file)))
    assert ours.config.has_gate
    arguments = inputs(ours, (length,), size, images)
    grid = ours.geometry.grid(ours.geometry.parts(arguments[0], size).video.shape)
    num_sound = 2 * ours.geometry.audio_shape(size)[1]
    segments = (length, len(images) * grid[1] * grid[2], num_sound)
    layout = TokenLayout(grid, num_prefix_tokens=sum(segments), text_segments=segments)
    for block, gate in zip(theirs.transformer_blocks, GATES, strict=True):
        block.attn.set_processor(ByFormula(lora[f"{gate}.set_weight"], layout))
    assert relative(ours(*arguments, AttentionContext()), run_theirs(theirs, ours, *arguments)) < 1e-5


def test_a_folder_with_gates_equals_the_file(
    tiny_minimax_h3_folder: Path, whole: Tensors, lora: Tensors, lora_file: Path, tmp_path: Path
) -> None:
    """A batch of two prompts, by weights of a whole FastH3 in a folder, and by the LoRA."""
    folder = tmp_path / "fasth3"
    folder.mkdir()
    for each in tiny_minimax_h3_folder.iterdir():
        if each.name != "transformer":
            (folder / each.name).symlink_to(each)
    (folder / "transformer").mkdir()
    config = tiny_minimax_h3_folder / "transformer" / "config.json"
    (folder / "transformer" / "config.json").write_text(config.read_text())
    save_file(merged(whole, lora), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    models = opened(folder), opened(tiny_minimax_h3_folder, LoraConfig(str(lora_file)))
    arguments = inputs(models[0], (3, 9), SHORT, ("last",))
    found = [each(*arguments, AttentionContext()) for each in models]
    assert relative(*found) < 1e-6
    without = models[0]
    for block in without.blocks:
        block.self_attention.gate = None
    assert relative(without(*arguments, AttentionContext()), found[0]) > 1e-2


def test_a_pipeline_runs_it_and_says_what_it_replaces(tiny_minimax_h3_folder: Path, lora_file: Path) -> None:
    config = RuntimeConfig(str(tiny_minimax_h3_folder), device="cpu", attention=SPARSE, lora=[str(lora_file)])
    request = GenerationRequest("a red circle", **TINY_SIZES, seed=3)
    prepared = prepare(config)
    resolved = prepared.rules.resolve(request, "fasth3-4")
    assert (resolved.num_inference_steps, resolved.flow_shift) == (4, 12.0)
    told = f"{lora_file}: 3 of its tensors replace weights (.set_weight)"
    unread = "self: the weights of its 3 layers have trained gates, which torch_sdpa does not read"
    dense = prepare(dataclasses.replace(config, attention=None))
    assert any(each.startswith(unread) for each in dense.rules.unused(resolved))
    assert not any("trained gates" in each for each in prepared.rules.unused(resolved))
    remarks = explain(prepared, resolved).remarks
    assert told in remarks
    assert not any("no trained gate" in each for each in remarks)
    pipeline = prepared.load()
    media = pipeline(resolved)
    assert told in media.attention_report.notes
    rows = [row for row in media.attention_report.rows if row.role == "self"]
    assert sum(row.count for row in rows) == 4 * NUM_LAYERS
    assert all("block-sparse" in row.implementation for row in rows)
    # The gates are the file's alone.
    with pytest.raises(ModelLoadError, match="3 weights of the loaded model come from a LoRA file alone"):
        pipeline.set_loras([])
    assert (pipeline(resolved).frames == media.frames).all()
    plain = load_pipeline(str(tiny_minimax_h3_folder), device="cpu")
    with pytest.raises(ModelLoadError, match=r"3 weights are new to the loaded model: .* when the model is loaded"):
        plain.set_loras([str(lora_file)])


@table(
    ("changes", "scale", "told"),
    [
        ({}, 0.5, r"lora.scale: expected 1, got 0.5: 3 of its modules hold weights that replace"),
        ({GATES[0]: torch.ones(32, 25)}, 1.0, r"to_gate_compress is \[32, 24\], the LoRA's \[32, 25\]"),
        ({"transformer_blocks.9.attn.to_gate_compress": torch.ones(32, 24)}, 1.0, "1 of its .* modules are not in"),
        ({"transformer_blocks.0.attn.to_q": torch.ones(32, 24)}, 1.0, "set_weight, which replaces .* beside down, up"),
        ({GATES[1]: None}, 1.0, "set_weight_tensors: its metadata says '3', and it has 2: .* incomplete"),
    ],
)
def test_what_a_file_may_not_hold(
    tiny_minimax_h3_folder: Path, lora: Tensors, tmp_path: Path, changes: dict[str, Any], scale: float, told: str
) -> None:
    made = lora | {f"{name}.set_weight": each for name, each in changes.items()}
    made = {name: each for name, each in made.items() if each is not None}
    stated = counts(lora if None in changes.values() else made)
    save_file(made, tmp_path / "lora.safetensors", metadata=stated)
    with pytest.raises(ModelLoadError, match=told):
        opened(tiny_minimax_h3_folder, LoraConfig(str(tmp_path / "lora.safetensors"), scale=scale))


@table(("preset", "shift"), [("fasth3-4", 12.0), ("fasth3-8", 10.0)])
def test_both_schedules_equal_euler_steps_in_float64(tiny_minimax_h3_folder: Path, preset: str, shift: float) -> None:
    """Of a velocity that depends on what is noised, on the other part, and on both noise levels."""
    rules = prepare(RuntimeConfig(str(tiny_minimax_h3_folder), device="cpu")).rules
    request = rules.resolve(GenerationRequest("rain", **TINY_SIZES), preset)
    geometry, size = rules.sampling.geometry, ClipSize(64, 96, 22, 24)
    noise = torch.randn(1, *geometry.sample_shape(size), generator=torch.Generator().manual_seed(0))
    start = geometry.parts(noise, size)
    assert start.audio is not None

    def velocities(video: Any, audio: Any, level: float, of_sound: float) -> tuple[Any, Any]:
        return level - video + audio.mean(), 2 * of_sound - audio + video.mean() * level

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        parts, level = geometry.parts(latents, size), float(step.sigma or 0)
        of_sound = 3 * level / (shift + (3 - shift) * level)
        return geometry.join(*velocities(parts.video, parts.audio, level, of_sound))

    sampler = BatchSettings.of([request], rules.sampling).build_sampler()
    found = sampler.sample(noise, with_schedule_of_sound(predict, geometry, size, 3 / shift))
    # The published positions, one shift for each part, and steps to the next level.
    positions = {4: (999, 749, 500, 250), 8: (999, 874, 749, 624, 500, 375, 250, 125)}[int(preset[-1])]
    levels = [
        [each * t / (1000 + (each - 1) * t) for t in (*positions, 0)]
        for each in (shift, 3.0)  # s t / (1 + (s - 1) t) of t in thousandths
    ]
    video, audio = start.video.double(), start.audio.double()
    for index in range(len(positions)):
        of_video, of_audio = velocities(video, audio, levels[0][index], levels[1][index])
        video = video + (levels[0][index + 1] - levels[0][index]) * of_video
        audio = audio + (levels[1][index + 1] - levels[1][index]) * of_audio
    ended = geometry.parts(found, size)
    assert ended.audio is not None
    assert relative(ended.video, video) < 1e-5
    # Carried along the video's levels, the sound takes the same steps.
    begin = geometry.join(start.video, start.audio * (levels[0][0] / levels[1][0]))
    carried = sampler.sample(begin, with_carried_sound(predict, geometry, size, 3 / shift))
    own = geometry.parts(with_scaled_sound(carried, geometry, size, 3 / shift), size)
    assert own.audio is not None
    assert relative(own.audio, audio) < 1e-5
    assert relative(ended.audio, audio) < 1e-5
    assert relative(start.audio, audio) > 0.1


def test_a_weight_of_another_family_is_replaced_to_the_bit(
    tiny_folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """By its authors' names, as rows of a joined layer; numbers that a sum with the model's would round. What another
    file adds comes on top."""
    weight, bias = torch.full((64, 64), 1e-9 / 3), torch.full((64,), 1e-9 / 7)
    module = "diffusion_model.blocks.1.self_attn.v"
    added = {f"{module}.diff": torch.ones(64, 64), f"{module}.diff_b": torch.ones(64)}
    for name, tensors in (("set", {f"{module}.set_weight": weight, f"{module}.set_bias": bias}), ("more", added)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    folder = tiny_folder_of("wan")
    for names, more in ((("set",), 0.0), (("more", "set"), 1.0)):
        model = family_for_folder(ModelFolder(folder)).describe(ModelFolder(folder))
        configs = [LoraConfig(str(tmp_path / f"{name}.safetensors")) for name in names]
        loras = bind_files(configs, model.lora_target(lora_names_of_families))
        built = model.build_transformer(AttentionPolicy(dtype=torch.float32, environment=None))
        layer = model.load_transformer(built, CPU, torch.float32, loras).get_submodule("blocks.1.self_attention.qkv")
        assert torch.equal(layer.weight[128:], weight + more)
        assert torch.equal(layer.bias[128:], bias + more)


def test_two_files_may_not_replace_one_weight(tiny_minimax_h3_folder: Path, lora_file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.safetensors").symlink_to(lora_file)
    files = [LoraConfig(str(file)) for file in (lora_file, tmp_path / "other.safetensors")]
    with pytest.raises(ModelLoadError, match=r"both replace transformer_blocks\.0.attn.to_gate_compress.weight"):
        opened(tiny_minimax_h3_folder, *files)
