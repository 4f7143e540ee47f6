"""The SeedVR2 transformer on our attention layers, for inference (arXiv:2506.05301).

    noise, condition, mask -> patches -+-> blocks of windowed attention with the text -> (norm) -> patches of velocity
    text ------------------------------+

Video and text attend to each other within windows of the grid (windows.py); every window has all of the text, whose
output is the mean of what it is in each. All blocks have one modulation of the timestep, to which each adds a table.
In the first blocks the text has weights of its own, in the others of the 3B model those of the video.

Shapes in this file: B batch, S grid tokens, L text tokens, D width (num_heads * head_dim).
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from diffusion_runtime.attention.context import AttentionContext
from diffusion_runtime.attention.layers import AttentionLayer, LocalAttention
from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.core.block_stack import ModulatedInput, overwriting
from diffusion_runtime.core.latent_geometry import LatentGeometry
from diffusion_runtime.core.step_info import LayerInfo
from diffusion_runtime.core.token_layout import Extent, TokenLayout
from diffusion_runtime.kernels.modulated_norm.api import Branch, Norm, add_branch_, modulated_norm
from diffusion_runtime.layers.embeddings import patchify, timestep_waves, unpatchify
from diffusion_runtime.layers.linear import FeedForward, GatedFeedForward, Linear
from diffusion_runtime.layers.modulation import norm_for
from diffusion_runtime.layers.norm import RMSNorm
from diffusion_runtime.layers.prompt_cache import cached_for_prompt, cached_for_request
from diffusion_runtime.layers.rope import norm_and_rotate
from diffusion_runtime.memory.waiting_weights import held_weights
from diffusion_runtime.models.interface import DenoiserInputs, DiffusionTransformer
from diffusion_runtime.models.seedvr2.config import NUM_WAVES, PATCH, SeedVR2Config
from diffusion_runtime.models.seedvr2.positions import rotations_of_groups, text_rotations
from diffusion_runtime.models.seedvr2.windows import WindowGroup, WindowPlan, grouped_windows, order_of

# Windows are no grid of the video: backends that choose among keys of a grid skip the role.
ROLE = "seedvr2.window"
# Shift, scale and gate of attention and of the feed-forward network.
_NUM_ROWS = 6
_SCALES = (1, 4)
# Of the groups of a plan, in their order.
Contexts: TypeAlias = tuple[AttentionContext, ...]


class SeedVR2Stream(nn.Module):
    """The layers of one block that read one stream, of video or of text. has_end: whether it goes on behind the
    attention."""

    def __init__(self, config: SeedVR2Config, *, has_end: bool = True, is_modulated: bool = True) -> None:
        super().__init__()
        self.norm = Norm("rms", config.eps)
        self.qkv = Linear(config.dim, 3 * config.inner_dim, bias=False)
        self.norm_q = RMSNorm(config.head_dim, config.eps)
        self.norm_k = RMSNorm(config.head_dim, config.eps)
        self.table = nn.Parameter(torch.zeros(_NUM_ROWS * config.dim)) if is_modulated else None
        self.out = Linear(config.inner_dim, config.dim) if has_end else None
        self.feed_forward: nn.Module | None = None
        if has_end:
            kind = GatedFeedForward if config.is_gated else FeedForward
            self.feed_forward = kind(config.dim, config.ffn_dim)

    def rows(self, time: torch.Tensor) -> torch.Tensor:
        """Return shift, scale and gate of attention, then of the feed-forward network, float32 [6, B, D]; a scale of 0
        changes nothing. time: [B, 6, D]."""
        assert self.table is not None
        rows = time + self.table.view(_NUM_ROWS, -1)
        rows[:, _SCALES] -= 1.0
        return rows.transpose(0, 1)


class SeedVR2Block(nn.Module):
    """Attention within windows and a feed-forward network, each after a norm. text: None where the text has the video's
    layers. is_last: nothing reads the text behind its attention; is_still: it is not modulated there."""

    def __init__(self, config: SeedVR2Config, index: int, policy: AttentionPolicy) -> None:
        super().__init__()
        self.is_last = index == config.num_layers - 1
        self.is_still = self.is_last and config.ends_still
        self.is_shifted = index % 2 == 1
        self.video = SeedVR2Stream(config)
        self.text = (
            SeedVR2Stream(config, has_end=not self.is_last, is_modulated=not self.is_still)
            if index < config.num_own_layers
            else None
        )
        layer = LayerInfo(index, config.num_layers, ROLE, f"blocks.{index}.attention")
        self.attention: AttentionLayer = LocalAttention(config.num_heads, config.head_dim, layer=layer, policy=policy)

    def forward(
        self,
        x: torch.Tensor,
        text: torch.Tensor,
        time: torch.Tensor,
        plans: tuple[WindowPlan, WindowPlan],
        turns: torch.Tensor | None,
        contexts: tuple[Contexts, Contexts],
    ) -> None:
        """Run the block; x [B, S, D] and text [B, L, D] are overwritten. time: [B, 6, D], float32. plans: of windows as
        they are and shifted; contexts: of their groups. turns: rotations of the text, None for none."""
        of_text = self.video if self.text is None else self.text
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.video.rows(time)
        rows = (None,) * _NUM_ROWS if self.is_still else of_text.rows(time).unbind()
        product = self.video.qkv(norm_for((self.video.qkv,), x, self.video.norm, shift=shift, scale=scale))
        further = of_text.qkv(norm_for((of_text.qkv,), text, of_text.norm, shift=rows[0], scale=rows[1]))
        attended, of_words = self._attend(
            product, further, of_text, plans[self.is_shifted], turns, contexts[self.is_shifted]
        )
        assert self.video.out is not None
        _end(x, self.video, Branch(self.video.out(attended), gate), ffn_shift, ffn_scale, ffn_gate)
        if not self.is_last:
            assert of_text.out is not None
            _end(text, of_text, Branch(of_text.out(of_words), rows[2]), rows[3], rows[4], rows[5])

    def _attend(
        self,
        product: torch.Tensor,
        further: torch.Tensor,
        of_text: SeedVR2Stream,
        plan: WindowPlan,
        turns: torch.Tensor | None,
        contexts: Contexts,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the tokens of video and text attended to, [B, S, heads * head_dim] and [B, L, ...].

        product, further: q, k and v of video and text, one after the other in the last dimension.
        """
        layer, batch = self.attention, product.shape[0]
        packed = torch.unflatten(product, -1, (3, layer.num_heads, -1)).index_select(1, plan.order)
        norms, shares = (self.video.norm_q, self.video.norm_k), layer.num_shares
        video = norm_and_rotate(packed, norms, plan.rotations, num_shares=shares)
        packed_words = torch.unflatten(further, -1, (3, layer.num_heads, -1))
        words = norm_and_rotate(packed_words, (of_text.norm_q, of_text.norm_k), turns, num_shares=shares)
        num_words, start = further.shape[1], 0
        # In the order of windows.
        out = product.new_empty(*packed.shape[:2], *packed.shape[3:])
        of_words = torch.zeros(words[0].shape, dtype=torch.float32, device=product.device)
        for group, context in zip(plan.groups, contexts, strict=True):
            stop = start + group.num_tokens
            own = [_side_by_side(each[:, start:stop], group, text) for each, text in zip(video, words, strict=True)]
            attended = layer(*own, context)
            size = attended.shape[1] - num_words
            out[:, start:stop] = attended[:, :size].reshape(batch, -1, *attended.shape[2:])
            if not self.is_last:
                of_words += torch.unflatten(attended[:, size:], 0, (batch, group.number)).sum(1, dtype=torch.float32)
            start = stop
        of_words = of_words.div_(plan.num_windows).to(product.dtype)
        return out.index_select(1, plan.back).flatten(2), of_words.flatten(2)

    def modulated_input(self, x: torch.Tensor, time: torch.Tensor) -> ModulatedInput:
        """Return the input of the first block after modulation, which TeaCache compares."""
        shift, scale, *_ = self.video.rows(time)
        return ModulatedInput(modulated_norm(x, self.video.norm, shift=shift, scale=scale))


def _end(
    x: torch.Tensor,
    stream: SeedVR2Stream,
    branch: Branch,
    shift: torch.Tensor | None,
    scale: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> None:
    """Add the attention's branch and the feed-forward network's to x, in place."""
    feed_forward: Any = stream.feed_forward
    normalized = norm_for((feed_forward.up,), x, stream.norm, shift=shift, scale=scale, branch=branch)
    add_branch_(x, Branch(feed_forward(normalized), gate))


def _contexts_of(plan: WindowPlan, num_words: int, context: AttentionContext) -> Contexts:
    """Return the contexts of a plan's groups, made before the blocks: a compiled block makes none."""
    layouts = (TokenLayout(group.shape, num_suffix_tokens=num_words) for group in plan.groups)
    return tuple(context.with_layout(layout) for layout in layouts)


def _side_by_side(tokens: torch.Tensor, group: WindowGroup, text: torch.Tensor) -> torch.Tensor:
    """Return windows as a batch, each with the text behind it: [B * windows, tokens + L, heads, head_dim]. tokens: [B,
    windows * tokens, heads, head_dim]; text: [B, L, heads, head_dim]."""
    windows = torch.unflatten(tokens, 1, (group.number, -1))
    words = text[:, None].expand(-1, group.number, -1, -1, -1)
    return torch.cat([windows, words], dim=2).flatten(0, 1)


class SeedVR2Transformer(DiffusionTransformer):
    """The whole denoiser."""

    def __init__(self, config: SeedVR2Config, geometry: LatentGeometry, policy: AttentionPolicy) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        # Two hidden layers.
        self.time_in = Linear(NUM_WAVES, config.dim)
        self.time_hidden = Linear(config.dim, config.dim)
        self.time_out = Linear(config.dim, _NUM_ROWS * config.dim)
        self.patch_embedding = Linear(config.patch_channels_in, config.dim)
        self.text_embedding = Linear(config.text_dim, config.dim)
        self.blocks = nn.ModuleList(SeedVR2Block(config, index, policy) for index in range(config.num_layers))
        self.out_norm = RMSNorm(config.dim, config.eps) if config.has_out_norm else None
        # Shift and scale.
        self.out_table = nn.Parameter(torch.zeros(2 * config.dim)) if config.has_out_norm else None
        self.out = Linear(config.dim, config.patch_channels)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def replay_refusal(self) -> str:
        return "a clip has one forward pass of its size"

    @torch.no_grad()
    def forward(
        self, latents: torch.Tensor, timestep: torch.Tensor, inputs: DenoiserInputs, context: AttentionContext
    ) -> torch.Tensor:
        """Return the velocity. inputs.image: latents of the video to restore and the mask, [B, channels + 1, ...]."""
        assert inputs.image is not None, "the rules of requests ask for a video"
        dtype, grid = self.out.weight.dtype, self.geometry.grid(latents.shape)
        given = torch.cat([latents.to(dtype), inputs.image.latents.to(latents.device, dtype)], dim=1)
        x = self.patch_embedding(patchify(given, PATCH, channels_first=False))
        words = inputs.text.embeddings
        # Blocks overwrite it.
        text = cached_for_prompt("text", words, context, lambda: self.text_embedding(words.to(dtype))).clone()
        time = self._time(timestep)
        num_words = text.shape[1]
        plans, turns = cached_for_request(
            "windows", (grid, num_words), context, lambda: self._plans(grid, num_words, latents.device)
        )
        contexts = tuple(_contexts_of(plan, num_words, context) for plan in plans)
        blocks = (overwriting(block, time, plans, turns, contexts) for block in self.blocks)
        first, entering = self.blocks[0], x
        assert isinstance(first, SeedVR2Block)

        def modulated_input() -> ModulatedInput:
            with held_weights(first):
                return first.modulated_input(entering, time)

        x, _ = context.run_blocks(list(blocks), (x, text), math.prod(grid), modulated_input)
        tokens = self.out(x if self.out_norm is None else self._finished(x, time))
        return unpatchify(tokens, grid, PATCH).to(latents.dtype)

    def _time(self, timestep: torch.Tensor) -> torch.Tensor:
        """Return the modulation of the timestep for every block, float32 [B, 6, D]."""
        # Sines come first here.
        waves = timestep_waves(timestep, NUM_WAVES).roll(NUM_WAVES // 2, dims=-1)
        hidden = F.silu(self.time_in(waves.to(self.out.weight.dtype)))
        # The rows of a channel are next to each other.
        rows: torch.Tensor = self.time_out(F.silu(self.time_hidden(hidden))).float()
        # Kernels read rows without gaps.
        return torch.unflatten(rows, -1, (-1, _NUM_ROWS)).transpose(1, 2).contiguous()

    def _finished(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return x after the last norm, which has the timestep's shift and scale of attention, as in training."""
        assert self.out_norm is not None
        assert self.out_table is not None
        shift, scale = (time[:, :2] + self.out_table.view(2, -1)).unbind(1)
        return modulated_norm(x, self.out_norm.as_norm, shift=shift, scale=scale - 1.0)

    def _plans(
        self, grid: Extent, num_words: int, device: torch.device
    ) -> tuple[tuple[WindowPlan, WindowPlan], torch.Tensor | None]:
        """Return the plans of windows as they are and shifted, and the rotations of the text."""
        head_dim, places = self.config.head_dim, num_words if self.config.turns_text else None
        plans = []
        for is_shifted in (False, True):
            found = grouped_windows(grid, is_shifted=is_shifted)
            groups = [group for group, _ in found]
            if device.type == "meta":
                tokens = math.prod(grid)
                order = back = torch.empty(tokens, dtype=torch.int64, device=device)
                rotations = torch.empty(tokens, head_dim // 2, dtype=torch.complex64, device=device)
            else:
                order = order_of(grid, found)
                back = order.argsort().to(device)
                order, rotations = order.to(device), rotations_of_groups(groups, head_dim, places).to(device)
            plans.append(WindowPlan(order, back, tuple(groups), rotations))
        turns = None if places is None else text_rotations(places, head_dim, device)
        return (plans[0], plans[1]), turns
