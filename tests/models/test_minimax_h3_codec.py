"""MiniMax-H3's autoencoders against diffusers' modules: frames, sound, given images and sounds, files of all names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy_files
import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from diffusers.modular_pipelines.minimax_h3.encoders import encode_vae_condition
from fp8_products import dequantized_product
from safetensors.torch import load_file, save_file
from tables import table

from diffusion_runtime.attention import (
    AttentionConfig,
    AttentionPolicy,
    AttentionRecorder,
    measured_error,
    register_backend,
    unregister_backend,
)
from diffusion_runtime.attention.measured_error import sampled_squares
from diffusion_runtime.core.model_folder import ModelFolder
from diffusion_runtime.decoders import vit_video_decoder
from diffusion_runtime.decoders.decoder_memory import decoding_bytes
from diffusion_runtime.decoders.sample_decoder import Tiling
from diffusion_runtime.decoders.vit_video_decoder import clips_of, tiles_of_axis
from diffusion_runtime.errors import (
    BackendInaccurateError,
    BackendUnavailableError,
    ConfigError,
    ModelLoadError,
    RequestError,
)
from diffusion_runtime.layers import fp8_linear
from diffusion_runtime.layers.convolution import OneDnnConvolutions
from diffusion_runtime.memory.live_bytes import peak_bytes
from diffusion_runtime.models.minimax_h3 import codec
from diffusion_runtime.models.minimax_h3.family import FAMILY
from diffusion_runtime.weights.file_kinds import kind_of
from tests.attention.test_measured_error import Coarse

# Of torch, on how diffusers normalises weights.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"
STATISTICS = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 0.5, 0.7]}
HEADS, HEAD_DIM = 2, 16
VIDEO: dict[str, Any] = {
    "latent_channels": 4,
    "block_out_channels": (4, 4, 8, 8),
    "layers_per_block": 1,
    "spatial_downsample_factors": (2, 2, 2, 2),
    "temporal_downsample_factors": (1, 2, 2, 1),
    "norm_num_groups": 2,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": HEADS,
    "decoder_attention_head_dim": HEAD_DIM,
    "decoder_num_register_tokens": 2,
    **STATISTICS,
}
SOUND: dict[str, Any] = {
    "encoder_dim": 4,
    "encoder_rates": (2, 4, 4),
    "latent_dim": 64,
    "latent_channels": 4,
    "num_attention_heads": 2,
    "decoder_dim": 32,
    "decoder_rates": (4, 4, 2),
    "decoder_kernel_sizes": (8, 8, 4),
    **STATISTICS,
}


def with_random_weights(module: Any) -> Any:
    """Of a size that keeps every layer's part of the result well above rounding; norms around 1."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        spread = 0.3 if parameter.dim() < 2 or "weight_g" in name else parameter[0].numel() ** -0.5
        parameter.data = spread * torch.randn(parameter.shape, generator=generator) + (1.0 if is_norm else 0.0)
        if name.endswith("weight_g"):
            # Of the last one: hardly any sample is cut off at 1.
            parameter.data = (parameter.data + 1.0) * (0.05 if "conv_post" in name else 1.0)
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    place = tmp_path_factory.mktemp("minimax_h3")
    with_random_weights(AutoencoderKLMiniMaxH3(**VIDEO)).save_pretrained(place / "vae")
    with_random_weights(AutoencoderKLMiniMaxH3Audio(**SOUND)).save_pretrained(place / "audio_vae")
    index = {"vae": ["diffusers", "AutoencoderKLMiniMaxH3"], "audio_vae": ["diffusers", "AutoencoderKLMiniMaxH3Audio"]}
    (place / "model_index.json").write_text(json.dumps({"_class_name": "MiniMaxH3Pipeline", **index}))
    return ModelFolder(place)


@pytest.fixture(scope="module")
def video(folder: ModelFolder) -> Any:
    return AutoencoderKLMiniMaxH3.from_pretrained(str(folder / "vae"))


@pytest.fixture(scope="module")
def sound(folder: ModelFolder) -> Any:
    return AutoencoderKLMiniMaxH3Audio.from_pretrained(str(folder / "audio_vae"))


@pytest.fixture(scope="module")
def decoder(folder: ModelFolder) -> codec.MiniMaxH3Decoder:
    return codec.load_decoder(folder, CPU, torch.float32)


def raw_of(latents: torch.Tensor) -> torch.Tensor:
    """Latents [batch, channels, ..] without their normalisation."""
    mean, std = (torch.tensor(each).view(1, -1, *[1] * (latents.dim() - 2)) for each in STATISTICS.values())
    return latents * std + mean


@torch.inference_mode()
def frames_of(module: Any, latents: torch.Tensor) -> torch.Tensor:
    """As diffusers' pipeline makes them of latents."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1, 1) for each in (codec.IMAGENET_MEAN, codec.IMAGENET_STD))
    pixels = module.decode(raw_of(latents)).sample.float() * std + mean
    return pixels.clamp(0, 1).permute(0, 2, 3, 4, 1)


# Tiles as --vae-tiling says, and latent frames, height and width: one clip, two in tiles whose overlaps differ, an end
# that is no whole clip, the authors' tiles.
CASES = (
    ("auto", (7, 3, 2)),
    ("64:16", (12, 7, 6)),
    ("64:16", (9, 9, 2)),
    ("off", (3, 5, 2)),
    ("auto", (7, 18, 1)),
)


@table(("tiles", "shape"), CASES)
def test_frames_are_those_of_diffusers(
    decoder: codec.MiniMaxH3Decoder, video: Any, tiles: str, shape: tuple[int, int, int]
) -> None:
    latents = torch.randn(1, 4, *shape, generator=torch.Generator().manual_seed(1))
    size, overlap = (int(each) for each in tiles.split(":")) if ":" in tiles else (256, 64)
    video.enable_tiling(size, size, overlap, overlap)
    video.use_tiling = tiles != "off"
    expected = frames_of(video, latents)
    stream = decoder.in_tiles(tiles).stream(latents)
    chunks = list(stream.chunks)
    found = torch.cat(chunks, dim=1)
    assert found.shape == expected.shape
    assert stream.num_frames == expected.shape[1]
    assert [chunk.shape[1] for chunk in chunks[:-1]] == [17] * (len(chunks) - 1)
    assert float((found - expected).abs().max()) < 1e-5
    assert float(expected.std()) > 0.1


def test_tiles_cover_a_side_with_the_fewest_of_them() -> None:
    module = AutoencoderKLMiniMaxH3(**{**VIDEO, "block_out_channels": (2, 2, 2, 2)})
    for length in range(1, 90):
        ours = tiles_of_axis(length, 16, 4).times(16)
        starts, sizes, overlaps = module._split_tiles(16 * length, 256, 64)
        assert (list(ours.starts), [ours.size] * len(sizes), list(ours.overlaps)) == (starts, sizes, overlaps), length


def test_bfloat16_is_as_near_to_float32_as_that_of_diffusers(folder: ModelFolder, video: Any) -> None:
    """The residual stream, norms and scales stay float32, as diffusers loads them."""
    latents = torch.randn(1, 4, 7, 3, 2, generator=torch.Generator().manual_seed(1))
    video.enable_tiling(256, 256, 64, 64)
    exact = frames_of(video, latents)
    theirs = AutoencoderKLMiniMaxH3.from_pretrained(str(folder / "vae"), torch_dtype=torch.bfloat16)
    ours = codec.load_decoder(folder, CPU, torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in ours._autoencoder.state_dict().items()}
    assert dtypes == {name: tensor.dtype for name, tensor in theirs.state_dict().items() if name in dtypes}
    error, allowed = ((found - exact).abs().mean() for found in (ours.decode(latents), frames_of(theirs, latents)))
    assert 0 < error < 1.2 * allowed


@torch.inference_mode()
def test_sound_is_that_of_diffusers_in_pieces_too(decoder: codec.MiniMaxH3Decoder, sound: Any) -> None:
    latents = torch.randn(1, 4, 60, 2, generator=torch.Generator().manual_seed(1))
    expected = sound.decode(raw_of(latents[0].permute(2, 0, 1))).sample[:, 0]
    audio = decoder.decode_audio(latents)
    assert audio.sample_rate == 32000
    assert audio.samples.shape == (2, 60 * 32)
    assert float(expected.std()) > 0.02
    assert float((torch.from_numpy(audio.samples) - expected).abs().max()) < 1e-5
    network = decoder._audio_autoencoder
    raw = raw_of(latents[0].permute(2, 0, 1))
    assert float((network.decode(raw, 7) - expected).abs().max()) < 1e-5
    # The radius is exact: a latent that is no number spoils as many around it, and not one more.
    raw = torch.zeros(1, 4, 90)
    raw[:, :, 44] = float("nan")
    spoilt = network.decode(raw)[0].isnan().nonzero().flatten() // network.sizes.hop
    assert (44 - int(spoilt.min()), int(spoilt.max()) - 44) == (network.sizes.radius,) * 2


@torch.inference_mode()
def test_given_images_videos_and_sounds_are_encoded_as_by_diffusers(
    folder: ModelFolder, video: Any, sound: Any
) -> None:
    torch.manual_seed(0)
    video.enable_tiling(256, 256, 64, 64)
    ours = codec.MiniMaxH3Encoder(folder, CPU)
    for num_frames, height, width in ((1, 272, 32), (19, 32, 48)):
        frames = torch.randint(0, 256, (num_frames, height, width, 3), dtype=torch.uint8)
        pixels = frames.permute(3, 0, 1, 2)[None]
        with OneDnnConvolutions():
            expected = encode_vae_condition(video, pixels, codec.IMAGENET_MEAN, codec.IMAGENET_STD)
        found = ours.encode_frames(frames)
        assert found.shape == expected.shape
        # Rounded to float16 before they are normalised: almost all equal, the others by a place of it (2 of 168 once).
        assert float(((found - expected).abs() < 1e-6).float().mean()) > 0.97
        assert float((found - expected).abs().max()) < 5e-3
    encode, _ = codec.load_image_encoder(folder, CPU, torch.bfloat16)
    assert torch.equal(encode(frames[0]), ours.encode_frames(frames[:1]))
    encoder = codec.load_picture_encoder(folder, CPU)
    pixels = torch.randn(1, 3, 17, 64, 80)
    video.enable_tiling(48, 48, 16, 16)
    with OneDnnConvolutions():
        expected = video.encode(pixels).latent_dist
        mean, deviation = encoder.encode(pixels, Tiling(3, 2, 16))
    assert float((mean - expected.mean).abs().max()) < 1e-5
    assert float((deviation - expected.std).abs().max()) < 1e-5
    samples = torch.rand(2, 1001) * 2 - 1
    raw = raw_of(ours.encode_sound(samples)[0].permute(2, 0, 1))
    assert float((raw - sound.encode(samples[:, None]).latent_dist.mode()).abs().max()) < 1e-5


# Of diffusers' names the authors', but for what is not only renamed.
AUTHORS = (
    (r"^decoder\.proj_in\.", "decoder.x_embedder."),
    (r"\.to_out\.0\.", ".to_out."),
    (r"\.ff\.net\.0\.proj\.", ".ff.w1."),
    (r"\.ff\.net\.2\.", ".ff.w2."),
    (r"down_blocks\.(\d+)\.resnets\.", r"down.\1.block."),
    (r"down_blocks\.(\d+)\.downsamplers\.0\.", r"down.\1.downsample."),
    (r"conv_shortcut", "nin_shortcut"),
)


def as_authors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a video autoencoder as its authors' file holds them."""
    stored = {"decoder.mask_token": torch.zeros(1, 1, 32), "latents_mean": torch.zeros(4), "latents_std": torch.ones(4)}
    for name, tensor in state.items():
        if ".to_k." in name or ".to_v." in name:
            continue
        if ".to_q." in name:
            parts = [state[name.replace("to_q", f"to_{each}")].unflatten(0, (HEADS, HEAD_DIM)) for each in "qkv"]
            name, tensor = name.replace("to_q", "to_qkv"), torch.stack(parts, dim=1).flatten(0, 2)
        if ".net.0.proj." in name:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        for pattern, theirs in AUTHORS:
            name = re.sub(pattern, theirs, name)
        stored[name] = tensor.contiguous()
    return stored


def quantised(stored: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Its int8 ConvRot file, and the numbers that this stands for."""
    file, meant = dict(stored), dict(stored)
    for name in [each for each in stored if re.search(r"blocks\.\d+\.(attn\.to_\w+|ff\.w\d)\.weight", each)]:
        layer = comfy_files.int8(stored[name].double().numpy(), 16)
        module = name.removesuffix(".weight")
        file |= {f"{module}.{suffix}": tensor for suffix, tensor in layer.tensors.items()}
        file[f"{module}.comfy_quant"] = torch.tensor(list(json.dumps(layer.mark).encode()), dtype=torch.uint8)
        meant[name] = torch.from_numpy(layer.meant).float()
    return file, meant


def test_a_file_by_its_authors_names_holds_the_same_weights(folder: ModelFolder, tmp_path: Path) -> None:
    """As float32, and as int8 ConvRot, whose numbers are those of the file without quantisation that it stands for."""
    state = load_file(folder / "vae" / WEIGHTS)
    stored = as_authors(state)
    in_8_bits, meant = quantised(stored)
    assert kind_of(tuple(stored)) == kind_of(tuple(state)) == kind_of(tuple(in_8_bits)) is not None

    def loaded(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        place = tmp_path / name
        for part in ("vae", "audio_vae"):
            (place / part).mkdir(parents=True)
            (place / part / "config.json").write_text((folder / part / "config.json").read_text())
        (place / "model_index.json").write_text((folder / "model_index.json").read_text())
        save_file(tensors, place / "vae" / WEIGHTS)
        opened = ModelFolder(place)
        encoder = codec.load_picture_encoder(opened, CPU).state_dict()
        return {**codec.VIDEO_AUTOENCODER.load_decoder(opened, CPU, torch.float32).state_dict(), **encoder}

    expected, found = loaded(state, "diffusers"), loaded(stored, "authors")
    assert expected.keys() == found.keys() == {*state}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    plain, found = loaded(meant, "meant"), loaded(in_8_bits, "int8")
    assert all(torch.allclose(found[name], plain[name], atol=1e-6) for name in plain)
    assert not all(torch.equal(found[name], expected[name]) for name in expected)


def test_memory_of_decoding_is_planned(folder: ModelFolder) -> None:
    """At sizes where activations are large, within a third of what is alive at once."""
    settings = {**json.loads((folder / "vae" / "config.json").read_text()), "decoder_num_layers": 1}
    settings = {key: value for key, value in settings.items() if not key.startswith("_")}
    for shape, tiles in (((7, 24, 16), Tiling(8, 6, 16)), ((7, 12, 8), None)):
        module = codec.VIDEO_AUTOENCODER.decoding_half(settings)
        state = {
            name: torch.randn(tensor.shape).to(
                torch.float32 if codec.VIDEO_AUTOENCODER.stays_float32(name) else torch.bfloat16
            )
            for name, tensor in module.state_dict().items()
        }
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False)
        statistics = STATISTICS["latents_mean"], STATISTICS["latents_std"]
        attention = codec.attention_of(module.sizes, AttentionPolicy(dtype=torch.bfloat16))
        decoder = codec.VitVideoDecoder(module, *statistics, attention, tiles or Tiling(8, 6, 16))
        decoder = decoder.in_tiles("off" if tiles is None else "on")
        latents = torch.zeros(1, 4, *shape)
        planned = decoding_bytes(module, shape[1] * 16, shape[2] * 16, shape[0], tiling=tiles)
        alive = peak_bytes(lambda latents=latents, decoder=decoder: list(decoder.stream(latents).chunks), CPU)
        assert 0.75 < planned / alive < 1.33, (shape, planned, alive)


def test_too_few_latents_are_refused(decoder: codec.MiniMaxH3Decoder) -> None:
    with pytest.raises(RequestError, match="at least 3 latent frames, got 2; use 22"):
        clips_of(decoder._sizes, 2)


def test_the_attention_of_the_decoder_is_chosen_by_its_role(folder: ModelFolder) -> None:
    """A choice that cannot run fails before weights are read."""
    layers = codec.decoder_attention(folder, AttentionPolicy())
    assert [(each.layer.index, each.layer.role) for each in layers] == [
        (0, codec.DECODER_ROLE),
        (1, codec.DECODER_ROLE),
    ]
    chosen = AttentionPolicy(config=AttentionConfig(per_role={codec.DECODER_ROLE: "reference"}))
    for each in codec.decoder_attention(folder, chosen):
        assert each.backend_of(torch.empty(1, 1, HEADS, HEAD_DIM)) == "reference"
    with pytest.raises(BackendUnavailableError, match="fa3"):
        codec.decoder_attention(folder, AttentionPolicy(cli=AttentionConfig(per_role={codec.DECODER_ROLE: "fa3"})))


@pytest.fixture
def coarse() -> Iterator[type[Coarse]]:
    register_backend(Coarse)
    yield Coarse
    unregister_backend("coarse")


def test_a_rounded_backend_is_measured_once_in_every_block_of_a_clip(
    folder: ModelFolder, decoder: codec.MiniMaxH3Decoder, coarse: type[Coarse], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three clips in four tiles each, which come in batches."""
    measured: list[Any] = []
    monkeypatch.setattr(measured_error, "sampled_squares", lambda *a: measured.append(a) or sampled_squares(*a))
    monkeypatch.setattr(vit_video_decoder, "MAX_BATCH_BYTES", 1)
    policy = AttentionPolicy(config=AttentionConfig(per_role={codec.DECODER_ROLE: "coarse"}))
    recorder = AttentionRecorder()
    rounded = decoder.attending(codec.decoder_attention(folder, policy)).recording(recorder)
    assert "AutoencoderKLMiniMaxH3, coarse, in tiles" in rounded.implementation
    latents = torch.randn(1, 4, 12, 18, 18, generator=torch.Generator().manual_seed(0))
    for num_streams in (1, 2):
        list(rounded.stream(latents).chunks)
        assert len(measured) == 2 * num_streams
        # The second block's is not that of the first.
        assert not torch.equal(measured[-1][0].q, measured[-2][0].q)
    (row,) = recorder.report().errors
    assert (row.role, row.layers, row.steps) == (codec.DECODER_ROLE, "0-1", "")
    assert row.error == pytest.approx(0.05, rel=1e-3)
    assert str(row).endswith(f"layers 0-1 (the largest in layer {row.layer})")
    # Beyond the bound in the second block alone.
    monkeypatch.setattr(measured_error, "sampled_squares", lambda call, out: torch.tensor([call.layer.index, 1.0]))
    with pytest.raises(BackendInaccurateError, match=r"layer 1 \(vae.decoder.transformer_blocks.1.attn\)"):
        list(rounded.stream(latents).chunks)


Change = Callable[[dict[str, Any]], None]
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("vae", {"spatial_padding_mode": "zeros"}, "'spatial_padding_mode': expected 'reflect'"),
    ("vae", {"token_drop": 5}, "'token_drop': expected fewer latents than a clip has"),
    ("vae", {"decoder_rope_dim_ratio": 0.7}, "'decoder_rope_dim_ratio': expected a share of 16 channels"),
    ("vae", {"temporal_downsample_factors": [1, 2]}, "'temporal_downsample_factors': expected 4 numbers"),
    ("vae", {"latents_mean": [0.0]}, "'latents_mean': expected a list of 4 numbers"),
    ("vae", {"use_gate": True}, "'use_gate' is unknown to this runtime"),
    ("audio_vae", {"decoder_rates": [4, 4, 4]}, "'decoder_rates': expected a product of 32"),
    ("audio_vae", {"resblock_dilation_sizes": [[1, 3]]}, "'resblock_dilation_sizes': expected 3 lists"),
    ("audio_vae", {"sampling_rate": 0}, "'sampling_rate': expected a whole number"),
)


@table(("part", "change", "message"), REFUSED)
def test_settings_that_are_not_supported_are_refused_by_name(
    folder: ModelFolder, tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    for each in ("vae", "audio_vae"):
        (tmp_path / each).mkdir()
        values = json.loads((folder / each / "config.json").read_text())
        (tmp_path / each / "config.json").write_text(json.dumps({**values, **(change if each == part else {})}))
    (tmp_path / "model_index.json").write_text((folder / "model_index.json").read_text())
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        codec.check_decoding(ModelFolder(tmp_path))


def test_products_of_the_decoder_in_8_bits_stay_near_those_of_bfloat16(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with 8-bit products, from the numbers that these are of."""
    monkeypatch.setattr(fp8_linear, "product_refusal", lambda *_: None)
    monkeypatch.setattr(fp8_linear, "multiply_rows", dequantized_product)
    passes: list[torch.Size] = []
    own_pass = fp8_linear.quantize_rows
    monkeypatch.setattr(fp8_linear, "quantize_rows", lambda x, **kept: passes.append(x.shape) or own_pass(x, **kept))
    latents = torch.randn(1, 4, 7, 3, 2, generator=torch.Generator().manual_seed(1))
    exact, quick = (codec.load_decoder(folder, CPU, torch.bfloat16) for _ in range(2))
    expected = exact.decode(latents)
    made = quick.in_mode("fp8")
    num_weights = len(passes)
    assert num_weights == 2 * 6
    found = made.decode(latents)
    # A block's input is quantised once for q, k and v; then the outputs of attention, and what the network reads.
    assert len(passes) - num_weights == 2 * 3
    assert "fp8 products" in made.implementation
    assert "fp8" not in exact.implementation
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
    assert 1e-4 < float(error) < 0.05
    weight = made._autoencoder.decoder.transformer_blocks[0].attn.to_q.weight
    assert weight.dtype == torch.float8_e4m3fn


def test_a_device_without_8_bit_products_is_refused_before_the_weights() -> None:
    decoding = FAMILY.decoding
    decoding.check_mode("fp8", "minimax_h3")
    with pytest.raises(ConfigError, match="cpu has no 8-bit float products here; leave out --vae-decode"):
        decoding.check_products("fp8", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="modes exact and fp8"):
        decoding.check_mode("fast", "minimax_h3")
