"""What a step of causal training minimises: the flow-matching error of noisy chunks that see clean ones (teacher
forcing), whose clean past carries errors as it does when generating.

A chunk's own noise level is independent of the others'. Errors of the past are the model's own (error recycling): what
it gets wrong when it predicts data from a little noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from transformers import UMT5EncoderModel

from scripts.train_embedded.architecture import MAX_PROMPT_TOKENS, embed_prompts
from scripts.train_embedded.causal_forward import FrameInputs, Mask, RunBlock, causal_forward, run_masked_block
from scripts.train_embedded.causal_mask import ChunkMask, dense_mask
from scripts.train_embedded.causal_pool import StreamTrainingBatch
from scripts.train_embedded.objective import CAPTION_DROPOUT, FOREGROUND_BELOW, FOREGROUND_WEIGHT, TIMESTEP_SPREAD

LATER_SHIFT = 5.0
"""Timestep shift of chunks after the first: where objects are is known from the chunks before."""
LATER_STEPS = 4
"""Sampling steps of chunks after the first, as `shapes-causal` has them."""
FIRST_CHUNK_WEIGHT = 2.0
"""Of the first chunk's error: it is one of eight, and alone in being made of nothing."""
BANK_SHARE = 0.5
"""Share of samples whose past carries errors of the bank; the others' carries normal noise."""
NOISE_RANGE = (0.02, 0.1)
BANK_BELOW = 0.7
"""Noise level below which a prediction's error is kept: above it, a prediction is an average of what may come."""


class ErrorBank:
    """Errors of the model's predictions of data, by the shape of the clip: the newest `capacity` of each."""

    def __init__(self, capacity: int = 128, added_per_step: int = 8) -> None:
        self._capacity, self._added = capacity, added_per_step
        self._errors: dict[torch.Size, Tensor] = {}
        self._count: dict[torch.Size, int] = {}

    def add(self, errors: Tensor) -> None:
        """Keep the first few samples of [B, C, F, h, w]."""
        shape = errors.shape[1:]
        if shape not in self._errors:
            self._errors[shape] = torch.zeros(self._capacity, *shape, dtype=errors.dtype, device=errors.device)
            self._count[shape] = 0
        for one in errors[: self._added].detach():
            self._errors[shape][self._count[shape] % self._capacity] = one
            self._count[shape] += 1

    def draw(self, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Random errors of the shape [B, C, F, h, w]; None before there are any."""
        held = min(self._count.get(shape[1:], 0), self._capacity)
        if not held:
            return None
        rows = torch.randint(held, (shape[0],), generator=generator, device=generator.device)
        return self._errors[shape[1:]][rows]

    def clear(self) -> None:
        """Forget everything: the bank is no part of a checkpoint."""
        self._errors, self._count = {}, {}


@dataclass(frozen=True)
class StepPlan:
    """How one step reads its batch."""

    positions: Tensor
    """[F] int64: where each latent frame stands in the stream."""
    first_shift: float
    """Timestep shift of the first chunk: as of a clip of this size."""
    mask: ChunkMask | None = None
    """None: the whole clip is one chunk, without a clean half."""
    counted: tuple[bool, ...] = (True,)
    """Per chunk, whether its error counts."""
    first_weight: float = FIRST_CHUNK_WEIGHT
    """Of the first chunk's error."""
    at_steps: float = 0.0
    """Share of samples whose later chunks have noise levels of the LATER_STEPS sampling steps alone."""


@dataclass(frozen=True)
class CausalLoss:
    """The losses of one batch."""

    total: Tensor
    first: Tensor
    """Squared error of first chunks, and of later ones, for the log; nan where there are none."""
    later: Tensor


def noise_levels(
    count: int,
    num_chunks: int,
    first_shift: float,
    generator: torch.Generator,
    later_shift: float = LATER_SHIFT,
    at_steps: float = 0.0,
) -> Tensor:
    """[B, num_chunks] in 0 to 1, independent. at_steps: see StepPlan."""
    device = generator.device
    level = torch.sigmoid(TIMESTEP_SPREAD * torch.randn(count, num_chunks, generator=generator, device=device))
    if at_steps:
        at = torch.randint(1, LATER_STEPS + 1, (count, num_chunks), generator=generator, device=device) / LATER_STEPS
        chosen = torch.rand(count, 1, generator=generator, device=device) < at_steps
        level[:, 1:] = torch.where(chosen, at, level)[:, 1:]
    shift = torch.full((num_chunks,), later_shift, device=device)
    shift[0] = first_shift
    return shift * level / (1 + (shift - 1) * level)


def with_errors(data: Tensor, bank: ErrorBank, generator: torch.Generator) -> Tensor:
    """The clean half as it is when generating: [B, C, F, h, w] with errors of the bank, or normal noise."""
    device, count = generator.device, data.shape[0]
    low, high = NOISE_RANGE
    scale = low + (high - low) * torch.rand(count, 1, 1, 1, 1, generator=generator, device=device)
    added = scale * torch.randn(data.shape, generator=generator, device=device)
    drawn = bank.draw(data.shape, generator)
    from_bank = torch.rand(count, generator=generator, device=device) < BANK_SHARE
    if drawn is not None:
        added = torch.where(from_bank[:, None, None, None, None], drawn.to(added.dtype), added)
    return data + added


def causal_loss(
    transformer: WanTransformer3DModel,
    text_encoder: UMT5EncoderModel,
    batch: StreamTrainingBatch,
    plan: StepPlan,
    empty_ids: Tensor,
    bank: ErrorBank,
    generator: torch.Generator,
    *,
    run: RunBlock = run_masked_block,
    make_mask: Callable[[ChunkMask, int, str], Mask] = dense_mask,
) -> CausalLoss:
    """The weighted loss of a model that predicts noise minus data. Errors of its predictions go into the bank.

    run, make_mask: compiled blocks take `block_mask`, eager ones `dense_mask`.
    """
    data = batch.latents.float()
    device, (count, _, num_frames, height, width) = generator.device, data.shape
    chunk = num_frames if plan.mask is None else plan.mask.chunk
    num_chunks = num_frames // chunk
    noise = torch.randn(data.shape, generator=generator, device=device)
    level = noise_levels(count, num_chunks, plan.first_shift, generator, at_steps=plan.at_steps)
    level = level.repeat_interleave(chunk, dim=1)
    wide = level[:, None, :, None, None]
    mixed = torch.lerp(data, noise, wide)
    # A chunk has the caption that holds when it begins.
    caption = batch.segment[:, ::chunk].repeat_interleave(chunk, dim=1)
    dropped = torch.rand(count, generator=generator, device=device) < CAPTION_DROPOUT
    token_ids = torch.where(dropped[:, None, None], empty_ids, batch.token_ids)
    text = embed_prompts(text_encoder, token_ids.flatten(0, 1), MAX_PROMPT_TOKENS).unflatten(0, token_ids.shape[:2])
    latents, timestep, positions, mask = mixed, level, plan.positions, None
    if plan.mask is not None:
        seen = data if batch.past is None else batch.past.float()
        latents = torch.cat([with_errors(seen, bank, generator), mixed], dim=2)
        timestep = torch.cat([torch.zeros_like(level), level], dim=1)
        positions, caption = positions.repeat(2), caption.repeat(1, 2)
        _, patch_h, patch_w = transformer.config.patch_size
        mask = make_mask(plan.mask, height // patch_h * (width // patch_w), str(device))
    frames = FrameInputs(1000 * timestep, positions, caption)
    predicted = causal_forward(transformer, latents, frames, text, mask=mask, run=run)[:, :, -num_frames:].float()
    if plan.mask is not None:
        missed = mixed - wide * predicted.detach() - data
        bank.add(missed * (wide < BANK_BELOW))
    error = (predicted - (noise - data)) ** 2
    # A chunk in which the picture changes after it has begun shows what its caption does not say.
    last = batch.segment[:, chunk - 1 :: chunk].repeat_interleave(chunk, dim=1)
    counted = torch.tensor(plan.counted, device=device).repeat_interleave(chunk)
    counted = ((caption[:, -num_frames:] == last) & counted).float()[:, None, :, None, None]
    weights = counted * (1 + FOREGROUND_WEIGHT * (wide < FOREGROUND_BELOW) * batch.foreground)
    weights[:, :, :chunk] *= plan.first_weight if num_chunks > 1 else 1.0
    total = (error * weights).sum() / (weights.sum() * error.shape[1]).clamp(min=1.0)
    with torch.no_grad():
        per_frame = error.mean(dim=(1, 3, 4)) * counted[:, 0, :, 0, 0]
        seen = counted[:, 0, :, 0, 0]
        first = per_frame[:, :chunk].sum() / seen[:, :chunk].sum()
        later = per_frame[:, chunk:].sum() / seen[:, chunk:].sum()
    return CausalLoss(total, first, later)
