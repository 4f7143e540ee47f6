"""Our transformer against diffusers' LTX2VideoTransformer3DModel on the same weights, float32 on the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from family_parity import CPU, relative, write_plain_scheduler
from safetensors.torch import save_file
from tables import table
from tiny_encoders import HIDDEN
from tiny_ltx2 import AUDIO_BINS, AUDIO_CHANNELS, LTX23, LTX25, VIDEO_CHANNELS, random_transformer

from diffusion_runtime.attention import AttentionConfig, AttentionContext, AttentionPolicy, TokenLayout
from diffusion_runtime.attention.layers import AttentionLayer
from diffusion_runtime.config import LoraConfig
from diffusion_runtime.core.latent_geometry import ClipSize
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.errors import RequestError
from diffusion_runtime.models.interface import DenoiserInputs, ImageCondition
from diffusion_runtime.models.ltx2.family import FAMILY
from diffusion_runtime.models.ltx2.transformer import LTX2Transformer
from diffusion_runtime.models.registry import family_for_folder
from diffusion_runtime.text_encoders.interface import Conditions, TextStream
from diffusion_runtime.weights.lora.binding import bind
from diffusion_runtime.weights.lora.reading import read_lora_file

NUM_TEXT_TOKENS = 9
SQUARE, WIDE, IMAGE = ClipSize(64, 64, 9, 24), ClipSize(64, 128, 17, 30), ClipSize(96, 64, 1, 8)
ROLES = ("self", "cross", "ltx2.audio_self", "ltx2.audio_cross", "ltx2.audio_to_video", "ltx2.video_to_audio")
VARIANTS: dict[str, dict[str, Any]] = {
    "halves turn": {},
    "neighbours turn": {"rope_type": "interleaved"},
    "other widths, other positions": {
        "num_attention_heads": 3,
        "attention_head_dim": 12,
        "cross_attention_dim": 36,
        "audio_num_attention_heads": 3,
        "audio_attention_head_dim": 10,
        "audio_cross_attention_dim": 30,
        "rope_double_precision": False,
        "rope_theta": 500.0,
        "causal_offset": 0,
        "pos_embed_max_pos": 10,
        "base_width": 1024,
        "audio_hop_length": 200,
        "norm_eps": 1e-4,
        "audio_ff_bias": False,
    },
    "LTX-2.3": LTX23,
    "LTX-2.5": LTX25,
}


@dataclass(frozen=True)
class Inputs:
    """What one forward pass gets. lengths: real tokens of each prompt; what lies behind them is noise on purpose."""

    video: torch.Tensor
    audio: torch.Tensor
    timestep: torch.Tensor
    text: torch.Tensor
    audio_text: torch.Tensor
    lengths: tuple[int, ...]
    size: ClipSize

    @property
    def latents(self) -> torch.Tensor:
        return torch.cat([self.video.flatten(1), self.audio.flatten(1)], dim=1)

    def conditions(self) -> Conditions:
        stream = TextStream(self.audio_text, self.lengths)
        return Conditions.of(self.text, self.lengths, further=[stream])


def make_inputs(
    size: ClipSize = WIDE, lengths: Sequence[int] = (5, 9), text_dims: tuple[int, int] = (HIDDEN, HIDDEN)
) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    batch = len(lengths)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    return Inputs(
        noise(VIDEO_CHANNELS, (size.num_frames - 1) // 8 + 1, size.height // 32, size.width // 32),
        noise(AUDIO_CHANNELS, round(size.num_frames / size.fps * 25), AUDIO_BINS),
        torch.linspace(937.3, 12.0, batch + 1)[:batch],
        noise(NUM_TEXT_TOKENS, text_dims[0]),
        noise(NUM_TEXT_TOKENS, text_dims[1]),
        tuple(lengths),
        size,
    )


def text_dims(name: str) -> tuple[int, int]:
    """Of the texts of a variant: without a projection in the transformer, those of the streams."""
    return (HIDDEN, HIDDEN) if VARIANTS[name].get("use_prompt_embeddings", True) else (32, 16)


def write_rest(folder: Path) -> None:
    """What the family reads beside the transformer's folder."""
    configs = {
        "vae": {"latent_channels": VIDEO_CHANNELS},
        "audio_vae": {"latent_channels": AUDIO_CHANNELS, "mel_bins": 4 * AUDIO_BINS},
    }
    for name, values in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    index = {"_class_name": "LTX2Pipeline", "transformer": ["diffusers", "LTX2VideoTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    write_plain_scheduler(folder)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            path = folders[name] = tmp_path_factory.mktemp("ltx2")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                random_transformer(**VARIANTS[name]).save_pretrained(path / "transformer", max_shard_size="100KB")
            write_rest(path)
        return folders[name]

    return folder


def load_ours(folder: Path, dtype: torch.dtype = torch.float32, attention: Any = None) -> LTX2Transformer:
    model = family_for_folder(folder).describe(folder)
    policy = AttentionPolicy(dtype=dtype, config=AttentionConfig.parse(attention))
    transformer = model.load_transformer(model.build_transformer(policy), CPU, dtype)
    assert isinstance(transformer, LTX2Transformer)
    return transformer


def load_theirs(folder: Path, dtype: torch.dtype = torch.float32) -> LTX2VideoTransformer3DModel:
    return LTX2VideoTransformer3DModel.from_pretrained(folder / "transformer", dtype=dtype).eval()


def run_ours(
    model: LTX2Transformer,
    inputs: Inputs,
    context: AttentionContext | None = None,
    text: Conditions | None = None,
    image: ImageCondition | None = None,
) -> torch.Tensor:
    whole = DenoiserInputs(text=inputs.conditions() if text is None else text, size=inputs.size, image=image)
    return model(inputs.latents, inputs.timestep, whole, AttentionContext() if context is None else context)


@torch.no_grad()
def run_theirs(
    model: LTX2VideoTransformer3DModel, inputs: Inputs, dtype: torch.dtype = torch.float32, **changes: Any
) -> torch.Tensor:
    """Their velocities as one flat tensor like ours."""
    mask = (torch.arange(NUM_TEXT_TOKENS)[None] < torch.tensor(inputs.lengths)[:, None]).long()
    frames, height, width = inputs.video.shape[2:]
    video, audio = model(
        hidden_states=inputs.video.flatten(2).transpose(1, 2).to(dtype),
        audio_hidden_states=inputs.audio.transpose(1, 2).flatten(2).to(dtype),
        encoder_hidden_states=inputs.text.to(dtype),
        audio_encoder_hidden_states=inputs.audio_text.to(dtype),
        timestep=inputs.timestep,
        sigma=inputs.timestep,
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        num_frames=frames,
        height=height,
        width=width,
        fps=float(inputs.size.fps),
        audio_num_frames=inputs.audio.shape[2],
        use_cross_timestep=True,
        return_dict=False,
        **changes,
    )
    moments = audio.unflatten(2, (AUDIO_CHANNELS, AUDIO_BINS)).transpose(1, 2)
    return torch.cat([video.transpose(1, 2).flatten(1), moments.flatten(1)], dim=1)


def both_parts(out: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    num_video = inputs.video[0].numel()
    return out[:, :num_video], out[:, num_video:]


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, inputs: Inputs) -> None:
    """Each stream by itself: the larger one would hide the other."""
    assert ours.shape == theirs.shape == inputs.latents.shape
    for found, expected in zip(both_parts(ours, inputs), both_parts(theirs, inputs), strict=True):
        assert relative(found, expected) < 1e-5


# --- parity -----------------------------------------------------------------------------------------------------------


@table("name", VARIANTS)
def test_forward_equals_diffusers(folder_of: Callable[[str], Path], name: str) -> None:
    folder = folder_of(name)
    ours, theirs = load_ours(folder), load_theirs(folder)
    for size in (SQUARE, WIDE, IMAGE):
        for lengths in ((4,), (5, 9), (2, 3)):
            inputs = make_inputs(size, lengths, text_dims(name))
            before = [tensor.clone() for tensor in (inputs.text, inputs.audio_text)]
            assert_equal(run_ours(ours, inputs), run_theirs(theirs, inputs), inputs)
            after = (inputs.text, inputs.audio_text)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@table("name", ["halves turn", "LTX-2.3"])
def test_a_given_sound_is_at_timestep_0_as_diffusers_freezes_it(folder_of: Callable[[str], Path], name: str) -> None:
    folder, inputs = folder_of(name), make_inputs(text_dims=text_dims(name))
    sound = torch.randn(inputs.audio.shape, generator=torch.Generator().manual_seed(2))
    no_image = torch.empty(*inputs.video.shape[:2], 0, *inputs.video.shape[3:])
    ours = run_ours(load_ours(folder), inputs, image=ImageCondition(no_image, sound=sound))
    still = torch.zeros_like(inputs.timestep)
    frozen = dataclasses.replace(inputs, audio=sound)
    theirs = run_theirs(load_theirs(folder), frozen, audio_timestep=still, audio_sigma=still)
    assert_equal(ours, theirs, inputs)


def test_every_condition_reaches_both_streams(folder_of: Callable[[str], Path]) -> None:
    """Otherwise the comparisons above could not tell whether one of them went astray."""
    ours = load_ours(folder_of("halves turn"))
    inputs = make_inputs(SQUARE, (5,))
    out = run_ours(ours, inputs)
    tensors = {name: getattr(inputs, name) for name in ("video", "audio", "timestep", "text", "audio_text")}
    changes: dict[str, dict[str, Any]] = {name: {name: tensor * 0.9} for name, tensor in tensors.items()}
    changes["lengths"] = {"lengths": (4,)}
    # As many moments of sound as before, at another time of the video.
    changes["fps"] = {"size": ClipSize(64, 64, 9, 25)}
    for change in changes.values():
        other = Inputs(**{**tensors, "lengths": inputs.lengths, "size": inputs.size, **change})
        changed = run_ours(ours, other)
        for found, before in zip(both_parts(changed, inputs), both_parts(out, inputs), strict=True):
            assert relative(found, before) > 1e-4


def test_bfloat16_is_as_exact_as_diffusers(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("halves turn")
    inputs = make_inputs(WIDE)
    reference = run_theirs(load_theirs(folder), inputs)
    theirs = run_theirs(load_theirs(folder, torch.bfloat16), inputs, torch.bfloat16)
    ours = load_ours(folder, torch.bfloat16)
    for name, parameter in ours.named_parameters():
        assert FAMILY.weights.stays_float32(name) == (parameter.dtype == torch.float32)
    out = run_ours(ours, inputs)
    assert out.dtype == torch.float32
    for found, other, expected in zip(*(both_parts(x, inputs) for x in (out, theirs, reference)), strict=True):
        assert relative(found, expected) < 1.5 * relative(other, expected) < 0.3


def test_a_lora_on_rows_that_change_their_order_equals_diffusers(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Rows of q and k are put in pairs after loading: what is merged into them must be put so, too."""
    folder = folder_of("halves turn")
    theirs = load_theirs(folder)
    plain = run_theirs(theirs, make_inputs())
    tensors, generator = {}, torch.Generator().manual_seed(3)
    for part in ("attn1.to_q", "audio_attn1.to_k", "audio_to_video_attn.to_k", "video_to_audio_attn.to_q"):
        linear = theirs.get_submodule(f"transformer_blocks.1.{part}")
        down = torch.randn(2, linear.in_features, generator=generator)
        up = torch.randn(linear.out_features, 2, generator=generator)
        name = f"transformer.transformer_blocks.1.{part}"
        tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        linear.weight.data.add_(0.5 * up @ down)
    save_file(tensors, tmp_path / "lora.safetensors")
    model = family_for_folder(folder).describe(folder)
    file = read_lora_file(str(tmp_path / "lora.safetensors"))
    lora = bind(file, LoraConfig("lora", scale=0.5), model.lora_target(lambda: ()))
    empty = model.build_transformer(AttentionPolicy(dtype=torch.float32))
    ours = model.load_transformer(empty, CPU, torch.float32, [lora])
    assert isinstance(ours, LTX2Transformer)
    expected = run_theirs(theirs, make_inputs())
    assert relative(plain, expected) > 1e-2
    assert_equal(run_ours(ours, make_inputs()), expected, make_inputs())


# --- attention --------------------------------------------------------------------------------------------------------


def test_layouts_say_what_the_keys_are_and_no_mask_reaches_a_layer(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("halves turn"))
    seen: dict[str, set[TokenLayout]] = {role: set() for role in ROLES}

    def keep(module: AttentionLayer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert options.get("mask") is None
        seen[module.layer.role].add(arguments[3].layout)

    for layer in ours.attention_layers():
        layer.register_forward_pre_hook(keep, with_kwargs=True)
    run_ours(ours, make_inputs(WIDE, (5, 3)))
    grid, sound = TokenLayout((3, 2, 4)), TokenLayout.text(14)
    # The longest prompt has 5 tokens of the 9 there is room for: the rest is cut off before the first layer.
    text = TokenLayout.text(5, (5, 3))
    expected = dict(zip(ROLES, (grid, text, sound, text, sound, grid), strict=True))
    assert seen == {role: {layout} for role, layout in expected.items()}


def test_a_sparse_backend_that_keeps_everything_equals_dense(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("halves turn")
    inputs = make_inputs(WIDE)
    sparse = load_ours(folder, attention={"backend": "video_sparse_attn", "extra": {"sparsity": 0.0}})
    context = AttentionContext()
    assert_equal(run_ours(sparse, inputs, context), run_ours(load_ours(folder), inputs), inputs)
    backends = {row.role: row.backend for row in context.recorder.report().rows}
    assert backends == {role: "video_sparse_attn" if role == "self" else "torch_sdpa" for role in ROLES}


# --- what is kept between steps ---------------------------------------------------------------------------------------


@table("name, is_kept", [("halves turn", True), ("LTX-2.3", False), ("LTX-2.5", True)])
def test_keys_of_the_text_are_computed_once_per_request_and_branch(
    folder_of: Callable[[str], Path], name: str, is_kept: bool
) -> None:
    """Bit-equal with passes that each compute their own, at three timesteps of two branches."""
    ours, inputs = load_ours(folder_of(name)), make_inputs(SQUARE, (5, 3), text_dims(name))
    texts = {"cond": inputs.conditions(), "uncond": make_inputs(SQUARE, (2, 9), text_dims(name)).conditions()}
    num_products = 0

    def count(*_: Any) -> None:
        nonlocal num_products
        num_products += 1

    for block in ours.all_blocks():
        block.video.cross_attention.kv.register_forward_pre_hook(count)
        block.audio.cross_attention.kv.register_forward_pre_hook(count)
    kept = AttentionContext()
    for index in range(3):
        at = dataclasses.replace(inputs, timestep=inputs.timestep * (1 - 0.3 * index))
        for branch, text in texts.items():
            step = StepInfo(index=index, num_steps=3, branch=branch)
            before = num_products
            out = run_ours(ours, at, dataclasses.replace(kept, step=step), text)
            assert num_products - before == (0 if is_kept and index else 2 * 2)
            assert torch.equal(out, run_ours(ours, at, AttentionContext(step=step), text))


def test_what_does_not_fit_is_named(folder_of: Callable[[str], Path]) -> None:
    ours = load_ours(folder_of("halves turn"))
    inputs = make_inputs(SQUARE)
    with pytest.raises(RequestError, match="two text embeddings"):
        run_ours(ours, inputs, text=Conditions.of(inputs.text, inputs.lengths))
    whole = DenoiserInputs(text=inputs.conditions(), size=SQUARE)
    with pytest.raises(RequestError, match=r"expected \[batch, 120\] .* 9 frames of 64 x 64 at 24 .* got \[2, 119\]"):
        ours(inputs.latents[:, :-1], inputs.timestep, whole, AttentionContext())
