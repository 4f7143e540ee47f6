"""Chunked denoising: the video of a causal model, chunk after chunk, around the transformer and its key-value cache."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch

from diffusion_runtime.attention.cache.frame_cache import FrameCache
from diffusion_runtime.attention.cache.kinds import StoreKind
from diffusion_runtime.attention.cache.passes import CachePasses
from diffusion_runtime.attention.cache.plan import CachePlan
from diffusion_runtime.attention.cache.store import KeyStore
from diffusion_runtime.attention.cached_calls import CACHED_KEYS
from diffusion_runtime.attention.context import AttentionContext, RequestCache
from diffusion_runtime.attention.forward_plans import VideoPlans
from diffusion_runtime.core.step_info import StepInfo
from diffusion_runtime.denoising.chunk_samplers import (
    ChunkedVideo,
    ChunkSampler,
    CleanChunk,
    Commit,
    HistoryCommit,
    PerChunkSampler,
)
from diffusion_runtime.denoising.chunks import Chunk, ChunkPlan, guided_frames, is_rolling, window_of
from diffusion_runtime.denoising.cuda_graphs.forward_graphs import GraphedForward
from diffusion_runtime.denoising.dmd import DmdSampler
from diffusion_runtime.denoising.interface import OnStep, Predict, Sampler
from diffusion_runtime.denoising.noise import ChunkNoise
from diffusion_runtime.denoising.prompt_times import chunk_at, first_frame
from diffusion_runtime.denoising.rolling_window import RollingWindowSampler
from diffusion_runtime.errors import ConfigError, RequestError
from diffusion_runtime.generation.latent_denoiser import LatentDenoiser, check_finite
from diffusion_runtime.models.interface import DenoiserInputs
from diffusion_runtime.report.attention_report import AttentionRecorder, CacheRow
from diffusion_runtime.text_encoders.interface import Conditions


@dataclass(frozen=True)
class ChunkedDenoiser:
    """From the conditions of a batch to its clean latents, chunk by chunk. denoiser: of the same settings."""

    denoiser: LatentDenoiser

    def denoise(
        self,
        text: Mapping[str, Conditions],
        seeds: Sequence[int],
        on_step: OnStep,
        encode: Callable[[str], Mapping[str, Conditions]],
    ) -> torch.Tensor:
        """Return the latents of all chunks together, as LatentDenoiser.denoise does. encode: encodes a prompt of the
        requests' prompt_switches, the same for all samples."""
        settings = self.denoiser.settings
        # By the chunk that begins at the frame.
        switches = {int(at): prompt for at, prompt in settings.shared.prompt_switches or ()}
        made = []
        with self.stream(settings.chunking.plan, text, seeds, on_step) as stream:
            for chunk in settings.chunking.plan:
                prompt = switches.get(first_frame(chunk, settings.sampling.geometry.temporal_factor))
                if prompt is not None:
                    stream.switch_text(encode(prompt), mode=settings.shared.switch_mode)
                made.append(next(stream).latents)
            stream.report()
        return torch.cat(made, dim=2)

    def stream(
        self, chunks: ChunkPlan, text: Mapping[str, Conditions], seeds: Sequence[int], on_step: OnStep | None = None
    ) -> ChunkStream:
        """Return the chunks one after the other, each made when it is asked for. chunks: how the video is cut, which
        may have no end. on_step: after every denoising step, with the latents of its chunk."""
        denoiser, settings = self.denoiser, self.denoiser.settings
        channels, _, height, width = settings.sizes.sample_shape(settings.size)
        later = {
            chunk_at(frame, chunks, settings.sampling.geometry.temporal_factor): seed
            for frame, seed in settings.shared.seed_switches or ()
        }
        noise = ChunkNoise((channels, height, width), seeds, later)
        sampler = settings.build_sampler()
        inputs = denoiser.inputs_of(text, settings.size, settings.shared)
        guided = guided_frames(settings.shared, chunks)
        experts = frozenset(experts_by_step(sampler, denoiser.transformer.expert_at))
        forward = _FrameForward(denoiser, settings.chunking.cache_passes(chunks), inputs, experts, guided)
        commit = Commit(forward, noise, settings.shared.commit_noise or 0.0, settings.chunking.num_steps_of_chunk)
        if (history := settings.sampling.history) is not None:
            commit = HistoryCommit(commit, forward.compress, history)
        initial = denoiser.initial_latents()
        video = ChunkedVideo(chunks, forward, noise, commit, denoiser.device, on_step, initial)
        if not is_rolling(settings.shared):
            return ChunkStream(
                denoiser, video, forward, PerChunkSampler(sampler, video, settings.build_sampler(chunk=0))
            )
        assert isinstance(sampler, DmdSampler), "request rules see to it"
        return ChunkStream(denoiser, video, forward, RollingWindowSampler(sampler, video))


class ChunkStream(Iterator[CleanChunk]):
    """The clean chunks of one video, float32, [batch, channels, frames, height, width]. A chunk is committed when the
    next one is asked for, so that it can be shown before, and the last one is not. A context manager, whose end gives
    back what CUDA graphs and forks hold of the cache. Raises DiffusionRuntimeError when a chunk is not finite, and what
    the transformer raises. ChunkedDenoiser.stream makes one.
    """

    def __init__(
        self, denoiser: LatentDenoiser, video: ChunkedVideo, forward: _FrameForward, sampler: ChunkSampler
    ) -> None:
        """forward: that of the video, which the sampler goes through."""
        denoiser.recorder.distinguish_phases()
        self._denoiser = denoiser
        self._forward = forward
        self._video = video
        self._sampler = sampler
        self._num_shared_bytes = 0
        self._uncommitted: CleanChunk | None = None
        self._num_made = 0
        # Clean chunks whose keys are there.
        self._recent: deque[CleanChunk] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No further chunk will be asked for."""
        self._forward.end_graphs()
        self._forward.release()

    def check_fork(self) -> None:
        """Raises ConfigError where CUDA graphs hold the cache, RequestError for a rolling window and when the last
        chunk has been made."""
        if self._denoiser.graphs is not None:
            raise ConfigError(
                "fork: CUDA graphs read the cache of one video where it lies; expected cuda_graphs='off', got graphs; "
                "load the model with cuda_graphs='off' (--cuda-graphs off)"
            )
        if not self._sampler.can_fork:
            raise RequestError(
                "fork: a rolling window holds chunks of which some steps are done; expected chunk_schedule "
                "'sequential', got 'rolling'; use chunk_schedule='sequential' (--chunk-schedule sequential)"
            )
        if self._sampler.is_done:
            raise RequestError(
                "fork: expected a video with a chunk to come, got one whose last chunk has been made; fork it earlier, "
                "or give more num_frames (--num-frames, --seconds)"
            )

    def fork(self, recorder: AttentionRecorder, seed: int | None = None) -> ChunkStream:
        """Return another stream with the same chunks so far that continues by itself; the last chunk is committed. Keys
        in pages are shared until either stream writes to them, others are copied. recorder: of what it computes. seed:
        of the noise from the next chunk on, None for the same.

        Raises what `check_fork` raises, before any work.
        """
        self.check_fork()
        self.commit()
        denoiser = dataclasses.replace(self._denoiser, recorder=recorder)
        forward, noise = self._forward.fork(denoiser), self._video.noise
        if seed is not None:
            noise = noise.with_seed(self._sampler.next_index, seed)
        commit = self._video.commit.fork(forward, forward.compress, noise)
        video = dataclasses.replace(self._video, forward=forward, commit=commit, noise=noise)
        twin = ChunkStream(denoiser, video, forward, self._sampler.fork(video))
        twin._recent.extend(self._recent)
        twin._num_made = self._num_made
        self._num_shared_bytes = twin._num_shared_bytes = self._forward.num_shared_bytes
        return twin

    def __next__(self) -> CleanChunk:
        if self._sampler.is_done:
            raise StopIteration
        self.commit()
        clean = self._sampler.next_chunk()
        check_finite(clean.latents, self._denoiser.dtype)
        self._uncommitted = clean
        self._num_made += 1
        self._recent.append(clean)
        while self._recent and self._recent[0].chunk.frames.stop <= self._forward.oldest_frame:
            self._recent.popleft()
        return clean

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache on this process, all layers, branches and experts together."""
        return self._forward.num_bytes

    @property
    def num_shared_bytes(self) -> int:
        """Bytes of num_bytes that are shared with forks, counted whole."""
        return self._forward.num_shared_bytes

    def commit(self) -> None:
        """Leave the final keys of the chunk that came last, where that has not been done."""
        clean, self._uncommitted = self._uncommitted, None
        if clean is not None:
            self._sampler.commit(clean)

    def switch_text(self, text: Mapping[str, Conditions], mode: str | None = None) -> None:
        """Use another prompt from the next chunk on. text: by guidance branch.

        mode: one of SWITCH_MODES. recache, which None is as well: the keys of the frames in sight, but for the sink's,
        are recomputed under the new prompt (LongLive's KV-recache, arXiv:2509.22622), chunk by chunk as they were.
        recache_at_once: in one pass in which these frames see each other both ways, as LongLive's code does. keep: they
        stay those of the prompt before.
        """
        self.commit()
        self._forward.set_text(text, self._num_made or None)
        if mode == "keep" or not self._recent:
            return
        in_one_pass = mode == "recache_at_once"
        first = self._forward.oldest_frame
        window, end = self._forward.passes.window, self._recent[-1].chunk.frames.stop
        if window.span is not None and self._denoiser.settings.sampling.history is None:
            first = max(first, end - (window.span - window.sink))
        in_ring = [_from_frame(clean, first) for clean in self._recent]
        in_ring = [clean for clean in in_ring if clean.chunk.frames]
        if in_one_pass and in_ring:
            frames = range(in_ring[0].chunk.frames.start, in_ring[-1].chunk.frames.stop)
            whole = torch.cat([clean.latents for clean in in_ring], dim=2)
            in_ring = [CleanChunk(Chunk(in_ring[-1].chunk.index, frames), whole)]
        if in_ring:
            self._video.commit.again(in_ring)

    def report(self) -> None:
        """Tell the recorder what the cache was, and what was replayed."""
        self._forward.report_graphs()
        settings, forward = self._denoiser.settings, self._forward
        passes, window = forward.passes, window_of(settings.shared)
        self._denoiser.recorder.record_cache(
            CacheRow(
                chunk_frames=settings.chunking.plan.chunk_frames,
                window_frames=window.span,
                sink_frames=window.sink,
                cached_frames=passes.num_slots,
                compressed_frames=passes.num_compressed,
                positions=forward.positions,
                num_bytes=forward.most_bytes,
                num_commits=forward.num_commits,
                dtype=settings.shared.kv_cache_dtype or "auto",
                num_saturated=forward.num_saturated,
                page_size=settings.shared.page_size,
                num_shared_bytes=self._num_shared_bytes,
            )
        )


class _FrameForward:
    """A pass of the transformer over some frames of the video, guided, with the cache as it is then.

    passes: what each reads and writes of it. inputs: by guidance branch, until set_text. experts: those that see
    committed frames. guided_frames: latent frames of the chunks with guidance, None for all: the unconditional branch
    has stores for these alone, until they are denoised.
    """

    def __init__(
        self,
        denoiser: LatentDenoiser,
        passes: CachePasses,
        inputs: dict[str, DenoiserInputs],
        experts: frozenset[int],
        guided_frames: int | None,
    ) -> None:
        settings = denoiser.settings
        self.passes = passes
        self.positions = settings.shared.positions or "absolute"
        self.num_commits = 0
        self._make_store = StoreKind(settings.shared.kv_cache_dtype == "fp8_e4m3", settings.shared.page_size)
        self._denoiser = denoiser
        self._inputs = inputs
        self._state = RequestCache()
        self._cache: FrameCache | None = None
        self._placed: tuple[Hashable, FrameCache] | None = None
        self._transformer_pass = denoiser.forward_of()
        self._plans = VideoPlans()
        self._experts = experts
        self._guided_frames = guided_frames
        self._uncond_tokens = None if guided_frames is None else passes.capacity_for(guided_frames)
        # The first chunk of the prompt; None for the video's first prompt.
        self._switched_at: int | None = None
        self._bytes_while_guided = 0
        self._saturated_while_guided = 0
        self._guided = self._of_prompt()

    @property
    def oldest_frame(self) -> int:
        """The first frame behind the sink whose keys are there; those before gave their slots away."""
        return self.passes.oldest_frame

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self._stores())

    @property
    def most_bytes(self) -> int:
        """The most that was allocated at a time: while chunks are guided there are two branches, later one."""
        return max(self.num_bytes, self._bytes_while_guided)

    @property
    def num_saturated(self) -> int:
        """Numbers in all stores that were too large for their dtype."""
        return self._saturated_while_guided + sum(store.num_saturated for store in self._stores())

    @property
    def num_shared_bytes(self) -> int:
        """Bytes of all stores that are shared with forks."""
        return sum(store.num_shared_bytes for store in self._stores())

    def fork(self, denoiser: LatentDenoiser) -> _FrameForward:
        """Return the forward pass of another video that continues here. What depends on the prompt is recomputed."""
        twin = _FrameForward(denoiser, self.passes.fork(), dict(self._inputs), self._experts, self._guided_frames)
        twin._switched_at = self._switched_at
        twin._state.adopt(self._state, CACHED_KEYS, lambda store: cast(KeyStore, store).fork())
        return twin

    def release(self) -> None:
        """Give back what forks share of the cache."""
        for store in self._stores():
            store.release()

    def _stores(self) -> list[KeyStore]:
        return [cast(KeyStore, store) for store in self._state.find_all(CACHED_KEYS)]

    def report_graphs(self) -> None:
        """Tell the recorder what was replayed from CUDA graphs, where there are any."""
        if isinstance(self._transformer_pass, GraphedForward):
            self._transformer_pass.report()

    def end_graphs(self) -> None:
        """Let go of the graphs that hold the cache."""
        if isinstance(self._transformer_pass, GraphedForward):
            self._transformer_pass.end_video()

    def set_text(self, text: Mapping[str, Conditions], switched_at: int | None) -> None:
        """Other conditions from the next pass on. Nothing but the keys is kept of the text before. switched_at: the
        first chunk denoised under them; None before the video's first one, whose prompt they then are."""
        before, self._state = self._state, RequestCache()
        self._state.adopt(before, CACHED_KEYS)
        settings = self._denoiser.settings
        self._inputs.update(self._denoiser.inputs_of(text, settings.size, settings.shared))
        self._switched_at = switched_at
        self._guided = self._of_prompt()

    def _of_prompt(self) -> Predict:
        """Return the guided prediction of a prompt, which knows what was measured since it was given."""
        denoiser, inputs = self._denoiser, self._inputs
        return denoiser.guided(denoiser.predict_of(self._transformer_pass, inputs, self._context), inputs["cond"])

    def __call__(self, latents: torch.Tensor, frames: range, step: StepInfo) -> torch.Tensor:
        """Run a pass over frames. A commit runs every expert that denoises later chunks, as each has a cache of its
        own; the first chunk's experts may differ."""
        return self._pass(latents, self.passes.plan(frames, step.phase), step)

    def compress(self, latents: torch.Tensor, frames: range, step: StepInfo) -> torch.Tensor:
        """Run the pass of a commit in large patches."""
        return self._pass(latents, self.passes.plan(frames, "compress"), step)

    def _end_guidance(self) -> None:
        """Let go of the unconditional branch's own keys, which are not read again: which chunks have them depends on
        their places in the video alone, whatever prompts come."""
        stores = [cast(KeyStore, store) for store in self._state.find_all(CACHED_KEYS, "uncond")]
        if not stores:
            return
        self._bytes_while_guided = self.num_bytes
        self._saturated_while_guided += sum(store.num_saturated for store in stores)
        for store in stores:
            store.release()
        self._state.drop_branch("uncond")
        if isinstance(self._transformer_pass, GraphedForward):
            self._transformer_pass.end_branch("uncond")

    def _pass(self, latents: torch.Tensor, plan: CachePlan, step: StepInfo) -> torch.Tensor:
        settings = self._denoiser.settings
        if not settings.guidance.has_both_branches(step):
            self._end_guidance()
        if step.phase == "denoise":
            step = settings.guidance.with_shared_keys(step, self._switched_at)
            assert step.timestep is not None
            expert = self._denoiser.transformer.expert_at(step.timestep)
            return self._run(latents, plan, dataclasses.replace(step, expert=expert))
        self.num_commits += 1
        for expert in sorted(self._experts):
            velocity = self._run(latents, plan, dataclasses.replace(step, expert=expert))
        return velocity

    def _run(self, latents: torch.Tensor, plan: CachePlan, step: StepInfo) -> torch.Tensor:
        """Guided, with the positions of the plan's frames, which are made once per chunk."""
        key = (plan.frames, plan.tokens_per_frame, plan.key_frames, step.expert)
        if self._placed is None or self._placed[0] != key:
            cache = FrameCache(plan, self.positions, self._make_store, uncond_tokens=self._uncond_tokens)
            sharding = self._denoiser.mesh.sharding
            placed = self._denoiser.transformer.with_positions(cache, latents.shape, sharding, step.expert)
            if self._denoiser.graphs is not None:
                placed = dataclasses.replace(placed, plan=plan.with_write_index(self._denoiser.device))
            self._placed = key, placed
        found = self._placed[1]
        # The phase is not that of the pass it was made for.
        index = found.plan.write_index
        self._cache = dataclasses.replace(found, plan=dataclasses.replace(plan, write_index=index))
        return self._guided(latents, step)

    def _context(self) -> AttentionContext:
        """Return the context of the transformer's next pass, which may be one of two guidance branches."""
        self._plans.start_pass()
        return self._denoiser.context_of(self._state, cache=self._cache, plans=self._plans)


def experts_by_step(sampler: Sampler, expert_at: Callable[[float], int]) -> tuple[int, ...]:
    """Return the expert of each step of a sampler, in order; of all steps in one where there is one expert. expert_at:
    of a timestep."""
    if expert_at(0.0) == expert_at(1000.0):
        return (expert_at(0.0),)
    found: list[int] = []

    def predict(latents: torch.Tensor, step: StepInfo) -> torch.Tensor:
        assert step.timestep is not None
        found.append(expert_at(step.timestep))
        return torch.zeros_like(latents)

    # The levels are the same whatever is denoised.
    one = torch.zeros(1, 1, 1, 1, 1)
    sampler.sample(one, predict, draw_noise=lambda: one)
    return tuple(found)


def _from_frame(clean: CleanChunk, first: int) -> CleanChunk:
    """Return the frames of a chunk from one of the video on."""
    num_gone = max(0, first - clean.chunk.frames.start)
    return CleanChunk(Chunk(clean.chunk.index, clean.chunk.frames[num_gone:]), clean.latents[:, :, num_gone:])
