"""What causal training rests on: the mask is the cache's window, the forward is the model's own, a checkpoint is all
there is to know, and what it holds runs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from diffusion_runtime import GenerationRequest, load_pipeline
from diffusion_runtime.denoising.dmd import DmdSampler
from scripts.shapes.streams import StreamSettings, render_stream_slots
from scripts.shapes.trajectories import SPEED_RANGE
from scripts.train_embedded import causal_pool
from scripts.train_embedded.architecture import TEXT_DIM, build_text_encoder, build_tokenizer
from scripts.train_embedded.causal_buckets import STAGES
from scripts.train_embedded.causal_export import export_streams
from scripts.train_embedded.causal_forward import FrameInputs, causal_forward
from scripts.train_embedded.causal_mask import ChunkMask, block_mask, dense_mask
from scripts.train_embedded.causal_objective import LATER_SHIFT, LATER_STEPS, CausalLoss, StepPlan, noise_levels
from scripts.train_embedded.causal_pool import StreamPool, StreamTrainingBatch
from scripts.train_embedded.causal_sampling import (
    Fp8Codes,
    KeyCache,
    Renoising,
    StreamSampler,
    StreamSampling,
    visible_frames,
)
from scripts.train_embedded.causal_train import SHAPES, make_pool, train
from scripts.train_embedded.causal_training import CausalTraining, build_models
from scripts.train_embedded.export import build_scheduler
from scripts.train_embedded.ranks import Ranks
from scripts.train_embedded.session import Clock, Log
from scripts.train_embedded.train_decoder import DecoderTraining
from scripts.train_embedded.train_transformer import load_encoder
from scripts.train_embedded.train_vae import Bucket
from tests.tables import table


def tiny_transformer(seed: int = 0) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.1)
    return transformer.eval()


def oracle(num_frames: int, chunk: int, span: int | None, sink: int) -> Tensor:
    """Which frame sees which, [clean | noisy], by the rule of a cache that holds a sink and the newest frames."""
    sees = torch.zeros(2 * num_frames, 2 * num_frames, dtype=torch.bool)
    for query in range(num_frames):
        first = query - query % chunk
        window = set(range(first)) if span is None else set(range(max(sink, first + chunk - (span - sink)), first))
        past = window | set(range(min(sink, first)))
        for key in range(num_frames):
            own = first <= key < first + chunk
            sees[query, key] = key in past or own
            sees[num_frames + query, key] = key in past
            sees[num_frames + query, num_frames + key] = own
    return sees


@table(
    ("num_frames", "chunk", "span", "sink"),
    [(6, 2, None, 0), (8, 2, 6, 2), (8, 2, 5, 1), (12, 4, 8, 1), (8, 8, None, 0), (6, 2, 2, 0), (5, 1, 3, 1)],
)
def test_the_mask_is_the_window_of_the_cache(num_frames: int, chunk: int, span: int | None, sink: int) -> None:
    mask, expected = ChunkMask(num_frames, chunk, span, sink), oracle(num_frames, chunk, span, sink)
    assert torch.equal(mask.frames(), expected)
    assert torch.equal(mask.tokens(3), expected.repeat_interleave(3, 0).repeat_interleave(3, 1))
    blocks = block_mask(mask, 3, "cpu")
    length = 6 * num_frames
    assert torch.equal(create_mask(blocks.mask_mod, 1, 1, length, length, device="cpu")[0, 0], mask.tokens(3))
    for first in range(0, num_frames, chunk):
        assert visible_frames(first, chunk, span, sink) == tuple(
            expected[num_frames + first, :num_frames].nonzero().flatten().tolist()
        )


def test_windows_smaller_than_sink_and_chunk_are_refused() -> None:
    with pytest.raises(ValueError, match="sink 2 plus chunk 4"):
        ChunkMask(8, 4, 5, 2)
    with pytest.raises(ValueError, match="whole number"):
        ChunkMask(9, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_forward_is_the_models_own_and_a_cache_computes_what_the_mask_does() -> None:
    """Clean chunks committed one after the other, and each noisy chunk against them, equal one pass of both."""
    transformer, generator = tiny_transformer(), torch.Generator().manual_seed(1)
    data, noisy = (torch.randn(2, 16, 6, 4, 4, generator=generator) for _ in range(2))
    text = torch.randn(2, 2, 7, TEXT_DIM, generator=generator)
    level, caption = torch.tensor([[900.0], [300.0]]).expand(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    positions = torch.tensor([0, 1, 40, 41, 42, 43])
    plan = ChunkMask(6, 2, 4, 2)
    with torch.no_grad():
        whole = FrameInputs(level, torch.arange(6), torch.zeros(2, 6, dtype=torch.int64))
        expected = transformer(noisy, level[:, 0], text[:, 0], return_dict=False)[0]
        torch.testing.assert_close(causal_forward(transformer, noisy, whole, text), expected, atol=1e-5, rtol=1e-5)
        assert float(expected.std()) > 0.1
        both = torch.cat([data, noisy], dim=2)
        frames = FrameInputs(torch.cat([0 * level, level], 1), positions.repeat(2), caption.repeat(1, 2))
        mask = dense_mask(plan, 4, "cpu")
        predicted = causal_forward(transformer, both, frames, text, mask=mask)
        flexible = causal_forward(transformer, both, frames, text, mask=block_mask(plan, 4, "cpu"))
        torch.testing.assert_close(flexible, predicted, atol=1e-5, rtol=1e-5)
        cache = KeyCache(num_tokens=4)
        for first in (0, 2, 4):
            cache.visible = visible_frames(first, 2, plan.span, plan.sink)
            own = slice(first, first + 2)
            for latents, timestep, keep, half in (
                (noisy, level, None, 6),
                (data, 0 * level, range(first, first + 2), 0),
            ):
                cache.keep = keep
                inputs = FrameInputs(timestep[:, own], positions[own], caption[:, own])
                out = causal_forward(transformer, latents[:, :, own], inputs, text, attend=cache.attend)
                wanted = predicted[:, :, half + first : half + first + 2]
                torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)


def test_streams_are_sampled_with_every_control_and_end_early() -> None:
    """Each control gives other later chunks and leaves the first alone; a stream that is stopped is a beginning."""
    torch.manual_seed(3)
    transformer = tiny_transformer()
    sampler = StreamSampler(
        transformer, build_text_encoder(len(build_tokenizer(streams=True))), build_tokenizer(streams=True), "cpu"
    )
    base = StreamSampling(size=32, first_steps=2, steps=1)
    prompts = [["a red circle"] * 4, ["a blue ring"] * 4]
    whole = sampler.sample(prompts, [1, 2], base)
    assert whole.shape == (2, 16, 8, 4, 4)
    asked: list[None] = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) == 3

    torch.testing.assert_close(sampler.sample(prompts, [1, 2], base, is_over), whole[:, :, :6], atol=0, rtol=0)
    distances = {}
    for change in (
        {"commits": False},
        {"commit_noise": 0.5},
        {"position_offset": 2},
        {"kv_cache_dtype": "fp8_e4m3"},
    ):
        other = sampler.sample(prompts, [1, 2], replace(base, **change))
        torch.testing.assert_close(other[:, :, :2], whole[:, :, :2], atol=0, rtol=0)
        distances[next(iter(change))] = float((other - whole)[:, :, 2:].norm() / whole[:, :, 2:].norm())
    # What 8 bits change is less than what is wrong.
    assert 0 < distances.pop("kv_cache_dtype") < 0.3 * min(distances.values()), distances


def test_8_bit_codes_are_within_half_a_step_and_saturate() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 50, 8, generator=generator) + 5
    codes = Fp8Codes(x, centred=True)
    error = (codes.decode(codes.encode(x)) - x).abs()
    spread = (x - x.mean(dim=2, keepdim=True)).abs()
    assert bool((error <= spread / 16 + 1e-3).all())
    assert float(error.max()) > 0.01
    far = codes.decode(codes.encode(x + 100)) - x.mean(dim=2, keepdim=True)
    assert torch.isfinite(far).all()
    assert float(far.max()) < 1.3 * float(spread.max())


def tiny_training(seed: int = 0) -> CausalTraining:
    torch.manual_seed(seed)
    return CausalTraining(tiny_transformer(), build_text_encoder(120), seed=seed)


def some_batch(seed: int) -> StreamTrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(4, 16, 1, 4, 4, generator=generator).expand(-1, -1, 4, -1, -1).contiguous()
    foreground = (torch.rand(4, 1, 4, 4, 4, generator=generator) < 0.3).to(torch.uint8)
    token_ids = torch.randint(1, 120, (4, 3, 40), generator=generator)
    return StreamTrainingBatch(latents, foreground, token_ids, torch.tensor([[0, 0, 1, 1]] * 4))


PLAN = StepPlan(torch.arange(4), 8.0, ChunkMask(4, 2), (True, True))


def test_the_loss_falls_and_a_resumed_training_is_the_one_that_went_on(tmp_path: Path) -> None:
    training, batch = tiny_training(), some_batch(0)
    errors = [float(training.step(batch, PLAN, 1e-2).later) for _ in range(16)]
    # On one machine these are always the same figures: 2.29, 2.28, ... 1.80, 1.77.
    assert sum(errors[-4:]) < 0.88 * sum(errors[:4]), errors
    training.save(tmp_path / "saved", seconds=1.0)
    resumed = tiny_training(seed=5)
    assert resumed.resume(tmp_path / "saved")["seconds"] == 1.0
    assert resumed.steps == 16
    for one in (training, resumed):
        for seed in range(2):
            one.step(some_batch(seed), PLAN, 1e-3)
    states = [
        [*one.transformer.parameters(), *one.text_encoder.parameters(), *one.average.values]
        for one in (training, resumed)
    ]
    assert all(torch.equal(here, there) for here, there in zip(*states, strict=True))
    part = next((tmp_path / "saved").glob("*.safetensors"))
    part.unlink()
    with pytest.raises(ValueError, match="checkpoint"):
        resumed.resume(tmp_path / "saved")


def test_two_calls_share_one_schedule_of_the_learning_rate(tmp_path: Path) -> None:
    class Recorder:
        steps, device, generator = 0, "cpu", torch.Generator()

        def __init__(self) -> None:
            self.rates: list[float] = []

        def step(self, batch: object, plan: StepPlan, rate: float) -> CausalLoss:
            self.rates.append(rate)
            self.steps += 1
            return CausalLoss(*torch.zeros(3))

        def save(self, folder: Path, **state: float) -> None:
            pass

    pool = make_pool(STAGES["toy"][2], load_encoder(SHAPES, "cpu"), "cpu", 0, StreamSettings())
    pool.fill(1.0)

    def rates(steps: int, begin: float, end: float) -> list[float]:
        recorder = Recorder()
        arguments = argparse.Namespace(
            schedule=(begin, end),
            seed=0,
            steps=steps,
            pause_file=None,
            save_every=9e9,
            refresh_every=9,
            log_every=99,
            peak=1.0,
            end=0.1,
            first_chunk_weight=2.0,
            as_shipped=0.0,
            at_steps=0.0,
            out=tmp_path,
        )
        train(recorder, [pool], Clock(9e9), Ranks(0, 1, "cpu"), Log(None), arguments)  # type: ignore[arg-type]
        return recorder.rates

    assert rates(8, 0.0, 1.0) == pytest.approx(rates(4, 0.0, 0.5) + rates(4, 0.5, 1.0))
    assert rates(4, 0.0, 0.5)[-1] > 0.6 > rates(4, 0.5, 1.0)[1]


def test_an_object_of_a_drifted_past_is_too_fast_or_too_slow_and_ends_where_it_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(causal_pool, "drifted", lambda streams, generator: seen.append(streams) or streams)
    for far, behind in ((False, 0), (True, 9)):
        pool = StreamPool(
            8,
            16,
            32,
            far=far,
            encode=lambda clip: clip[:, :, ::4].repeat(1, 6, 1, 1, 1)[:, :16, :, ::8, ::8],
            renderer=render_stream_slots,
            tokenizer=build_tokenizer(streams=True),
            seed=0,
            device="cpu",
            settings=StreamSettings(0.0, 0.0),
            drift=1.0,
        )
        streams = pool._sample(8)
        pool._drifted_past(streams)
        there, here = seen[-1].centre[:, behind:, 0], streams.centre[:, behind:, 0]
        assert torch.equal(there[::2], here[::2])
        # The last frames of every second pair of latent frames: its chunk begins behind them.
        torch.testing.assert_close(there[:, 12::16], here[:, 12::16])
        # As fast as the rest of its own pair, and not as the stream itself.
        travelled = (there[1::2, 12::16] - there[1::2, 5::16]).norm(dim=-1)
        wanted = (here[1::2, 12::16] - here[1::2, 5::16]).norm(dim=-1)
        moving = wanted > 0.15
        ratio = travelled[moving] / wanted[moving]
        assert len(ratio) >= 4
        assert 0.02 < float((ratio - 1).abs().max()) < 0.31
        steps = (there[:, 1:] - there[:, :-1]).norm(dim=-1)
        assert float(steps.max()) < 1.31 * SPEED_RANGE[1] * 2**0.5


def test_a_drifted_past_is_what_chunks_see_and_not_what_they_are_to_become() -> None:
    encode = load_encoder(SHAPES, "cpu")
    for bucket in STAGES["toy"][:2]:
        pool = make_pool(bucket, encode, "cpu", 0, StreamSettings(switch_share=0.0), drift=0.5)
        pool.fill(1.0)
        assert isinstance(pool.clips, StreamPool)
        latents, past = pool.clips._latents, pool.clips._past
        assert past is not None
        off = (past - latents).flatten(3).norm(dim=(1, 3)) / latents.flatten(3).norm(dim=(1, 3))
        assert float(off[:, :2].max()) == 0.0
        # Half of every refresh: of the first all that is behind the sink, of the second every other pair.
        assert (off > 0).tolist() == [
            [False, False, *6 * [True]],
            [*2 * [False, False, True, True]],
            *2 * [8 * [False]],
        ] * (len(off) // 4)
        assert 0.01 < float(off[::4, 2:].mean()) < 0.8
        drawn = pool.draw(torch.Generator().manual_seed(0))
        assert drawn.past is not None
        assert drawn.past.shape == drawn.latents.shape
    batch = some_batch(0)

    def loss(past: Tensor | None) -> float:
        training = tiny_training()
        return float(training.step(replace(batch, past=past), PLAN, 1e-3).later)

    same = loss(None)
    assert loss(batch.latents.clone()) == same
    assert loss(batch.latents + 1.0) != same


def test_shares_of_steps_are_as_streams_are_sampled() -> None:
    # Chunk, span and sink of what ships.
    for bucket in STAGES["toy"][:2]:
        plans = [bucket.plan(random, "cpu", as_shipped=0.5) for random in [Random(0)] for _ in range(200)]
        usual = [bucket.plan(random, "cpu") for random in [Random(0)] for _ in range(200)]
        shipped, before = (
            sum(
                plan.mask is not None and (plan.mask.chunk, plan.mask.span, plan.mask.sink) == (2, 6, 2)
                for plan in each
            )
            for each in (plans, usual)
        )
        assert 0.45 * 200 < shipped < 0.8 * 200
        assert before < 0.4 * 200
    # The noise levels of four steps at a shift of 5: those at which the model is asked.
    asked = build_scheduler("unipc", LATER_SHIFT)
    asked.set_timesteps(LATER_STEPS)
    generator = torch.Generator().manual_seed(0)
    levels = noise_levels(500, 4, 12.0, generator, at_steps=0.5)
    near = (levels[:, 1:, None] - asked.sigmas[:-1]).abs().amin(dim=-1) < 2e-3
    assert 0.4 < float(near.all(dim=1).float().mean()) < 0.6
    # First chunks have other steps.
    assert torch.equal(levels[:, 0], noise_levels(500, 4, 12.0, torch.Generator().manual_seed(0))[:, 0])


def test_pools_of_streams_hold_what_their_frames_show() -> None:
    encode = load_encoder(SHAPES, "cpu")
    near, far, begin, _ = STAGES["toy"]
    pool = make_pool(begin, encode, "cpu", 0, StreamSettings(around_weight=0.0))
    pool.fill(1.0)
    # Of its own around_weight: circles are there, though other streams have none.
    assert isinstance(pool.clips, StreamPool)
    said = build_tokenizer(streams=True).batch_decode(pool.clips._token_ids.flatten(0, 2))
    assert any("around" in text for text in said), said
    drawn = pool.draw(torch.Generator().manual_seed(0))
    assert drawn.latents.shape == (begin.batch, 16, 2, 4, 4)
    assert int(drawn.segment.max()) == 0
    assert begin.plan(Random(0), "cpu").mask is None
    for bucket in (near, far):
        pool = make_pool(bucket, encode, "cpu", 0, StreamSettings())
        pool.fill(1.0)
        batch = pool.draw(torch.Generator().manual_seed(0))
        assert batch.latents.shape == (bucket.batch, 16, 8, 4, 4)
        assert float(batch.latents.std()) > 0.3
        assert int(batch.segment.max()) <= 2
        assert bool((batch.segment.diff(dim=1) >= 0).all())
        assert isinstance(pool.clips, StreamPool)
        plan = bucket.plan(Random(0), "cpu")
        assert plan.mask is not None
        gaps = plan.positions.diff()
        assert bool((gaps > 0).all())
        assert (int(gaps.max()) > 1) == (bucket.kind == "far")
        assert plan.counted[0] or plan.mask.chunk > 2


def test_a_checkpoint_is_small_files_and_runs_once_exported(tmp_path: Path) -> None:
    transformer, text_encoder = build_models(SHAPES)
    training = CausalTraining(transformer, text_encoder, seed=0)
    training.save(tmp_path / "saved")
    sizes = [path.stat().st_size for path in (tmp_path / "saved").iterdir()]
    assert max(sizes) < 16 * 2**20
    assert len(sizes) <= 6
    # Adam's moments, which a new training has not, are 4.5 MB more.
    assert sum(sizes) < 58 * 2**20
    export_streams(tmp_path / "saved", tmp_path / "folder")
    pipeline = load_pipeline(str(tmp_path / "folder"), device="cpu", dtype="float32")
    media = pipeline(
        GenerationRequest("a red circle circling", num_frames=5, height=64, width=64, num_inference_steps=2)
    )
    assert media.frames.shape == (5, 64, 64, 3)
    assert float(media.frames.std()) > 1.0


def test_the_decoder_is_trained_alone() -> None:
    training = DecoderTraining(SHAPES, "cpu", 0)
    before = {name: value.clone() for name, value in training.module.state_dict().items()}
    losses = [training.step(Bucket(9, 32, 2, 1.0), 1e-3, of_streams=of_streams) for of_streams in (True, False, True)]
    assert all(bool(loss.isfinite()) and float(loss) > 0 for loss in losses)
    changed = {
        name.split(".")[0]
        for name, value in training.module.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"decoder", "post_quant_conv"}


def test_fresh_noise_is_added_as_by_the_package() -> None:
    """The levels of both, and a step from one to the next."""
    sampler, solver = DmdSampler(12, 20.0), Renoising(20.0, 12, "cpu")
    torch.testing.assert_close(
        solver.timesteps, torch.tensor([1000 * level for level in sampler.levels]), rtol=0, atol=1e-2
    )
    noise = torch.randn(1, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    drawn: list[Tensor] = []

    def draw() -> Tensor:
        drawn.append(torch.randn(noise.shape, generator=torch.Generator().manual_seed(len(drawn) + 1)))
        return drawn[-1]

    wanted = sampler.sample(noise, lambda x, step: 0.3 * x + step.timestep / 1000, draw_noise=draw)
    latents = noise
    for index, timestep in enumerate(solver.timesteps):
        fresh = drawn[index] if index < 11 else torch.zeros_like(noise)
        latents = solver.step(0.3 * latents + float(timestep) / 1000, index, latents, fresh)
    torch.testing.assert_close(latents, wanted, rtol=1e-4, atol=1e-4)
