"""The SCAIL-2 transformer and its sampling as its authors have them, in plain float64 operations: an oracle, as
diffusers has no classes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

Weights = Mapping[str, torch.Tensor]
# (red, green, blue) of white and the six colours, in the order of a mask's channels.
COLORS = ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1))


def mask_latents(pixels: torch.Tensor) -> torch.Tensor:
    """[3, frames, height, width] in [-1, 1] to [28, latent frames, height / 8, width / 8]."""
    _, frames, height, width = pixels.shape
    levels = pixels * 127.5 + 127.5
    rows = []
    for frame in range(frames):
        planes = []
        for color in COLORS:
            fits = torch.ones(height, width, dtype=torch.bool)
            for channel, is_on in enumerate(color):
                fits &= (levels[channel, frame] > 225 + 1e-4) == bool(is_on)
            planes.append(fits.double().view(height // 8, 8, width // 8, 8).mean(dim=(1, 3)))
        rows.append(torch.stack(planes))
    rows = [rows[0]] * 3 + rows
    return torch.stack([torch.cat(rows[first : first + 4]) for first in range(0, len(rows), 4)], dim=1)


def rotations(times: Sequence[int], rows: Sequence[int], columns: Sequence[int], head_dim: int) -> torch.Tensor:
    """[times, rows, columns, head_dim / 2], complex128: a third of the pairs for columns, one for rows, the rest for
    time."""
    third = head_dim // 2 // 3
    counts = (head_dim // 2 - 2 * third, third, third)
    box = torch.empty(len(times), len(rows), len(columns), head_dim // 2, dtype=torch.complex128)
    for a, time in enumerate(times):
        for b, row in enumerate(rows):
            for c, column in enumerate(columns):
                angles = [
                    place * 10000.0 ** (-2 * pair / (2 * count))
                    for place, count in zip((time, row, column), counts, strict=True)
                    for pair in range(count)
                ]
                box[a, b, c] = torch.polar(torch.ones(len(angles)).double(), torch.tensor(angles).double())
    return box


def specified(
    w: Weights,
    config: Mapping[str, Any],
    x: torch.Tensor,
    timestep: float,
    text: torch.Tensor,
    clip: torch.Tensor,
    *,
    driving: torch.Tensor,
    driving_mask: torch.Tensor,
    images: torch.Tensor,
    image_masks: torch.Tensor,
    known: int = 0,
    replaces: bool = False,
) -> torch.Tensor:
    """The velocity of one sample, float64.

    x: [16, T, H, W], its first `known` frames clean. text: [text_len, text_dim], zeros behind the prompt. clip: tokens
    of the image encoder. driving: [16, T, H / 2, W / 2]; images: [16, N, H, W], the first image last; masks of these
    with 28 channels.
    """
    w = {name: each.double() for name, each in w.items()}
    dim, heads, eps = config["dim"], config["num_heads"], config["eps"]
    head_dim = dim // heads

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def layer_norm(x: torch.Tensor, name: str = "", width: int = dim, eps: float = eps) -> torch.Tensor:
        return F.layer_norm(x, (width,), w.get(f"{name}.weight"), w.get(f"{name}.bias"), eps)

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    def conv(name: str, x: torch.Tensor) -> torch.Tensor:
        out = F.conv3d(x[None].double(), w[f"{name}.weight"], w[f"{name}.bias"], stride=(1, 2, 2))
        return out[0].flatten(1).T

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(len(each), heads, head_dim) for each in (q, k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    _, frames, height, width = x.shape
    ones = torch.ones_like(x[:4])
    own = torch.cat([x, torch.cat([ones[:, :known], torch.zeros_like(ones[:, known:])], dim=1)])
    given = torch.cat([images, torch.ones_like(images[:4])])
    beside = torch.cat([driving, torch.ones_like(driving[:4])])
    # Images, the clip, whose own mask is empty, and the driving video.
    count = images.shape[1]
    masks = torch.cat([image_masks, torch.zeros(28, frames, height, width)], dim=1)
    tokens = conv("patch_embedding", torch.cat([given, own], dim=1)) + conv("patch_embedding_mask", masks)
    tokens = torch.cat([tokens, conv("patch_embedding_pose", beside) + conv("patch_embedding_mask", driving_mask)])
    shift, rows, columns = (count - 1 if replaces else count), height // 2, width // 2
    times = range(shift, shift + frames)
    low = 120 if replaces else 0
    wide = rotations(times, range(rows), range(120, 120 + columns), head_dim)
    wide = (wide[:, ::2, ::2] + wide[:, 1::2, ::2] + wide[:, ::2, 1::2] + wide[:, 1::2, 1::2]) / 4
    turns = [
        rotations(range(count), range(low, low + rows), range(columns), head_dim),
        rotations(times, range(rows), range(columns), head_dim),
        wide,
    ]
    turn = torch.cat([each.flatten(0, 2) for each in turns])[:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(len(x), heads, head_dim // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(1)

    half = config["freq_dim"] // 2
    phase = timestep * 10000.0 ** (-torch.arange(half).double() / half)
    time = linear(
        "time_embedding.2", F.silu(linear("time_embedding.0", torch.cat([phase.cos(), phase.sin()]).float().double()))
    )
    six = linear("time_projection.1", F.silu(time)).view(6, dim)
    context = linear("text_embedding.2", F.gelu(linear("text_embedding.0", text.double()), approximate="tanh"))
    seen = layer_norm(clip.double(), "img_emb.proj.0", 1280, 1e-5)
    seen = linear("img_emb.proj.3", F.gelu(linear("img_emb.proj.1", seen)))
    seen = layer_norm(seen, "img_emb.proj.4", dim, 1e-5)
    for index in range(config["num_layers"]):
        block = f"blocks.{index}"
        e = w[f"{block}.modulation"][0] + six
        y, a = layer_norm(tokens) * (1 + e[1]) + e[0], f"{block}.self_attn"
        q, k = (turned(rms(linear(f"{a}.{name}", y), f"{a}.norm_{name}")) for name in "qk")
        tokens = tokens + linear(f"{a}.o", attend(q, k, linear(f"{a}.v", y))) * e[2]
        y, a = layer_norm(tokens, f"{block}.norm3"), f"{block}.cross_attn"
        q = rms(linear(f"{a}.q", y), f"{a}.norm_q")
        of_text = attend(q, rms(linear(f"{a}.k", context), f"{a}.norm_k"), linear(f"{a}.v", context))
        of_image = attend(q, rms(linear(f"{a}.k_img", seen), f"{a}.norm_k_img"), linear(f"{a}.v_img", seen))
        tokens = tokens + linear(f"{a}.o", of_text + of_image)
        y = layer_norm(tokens) * (1 + e[4]) + e[3]
        tokens = tokens + linear(f"{block}.ffn.2", F.gelu(linear(f"{block}.ffn.0", y), approximate="tanh")) * e[5]
    shift_, scale = w["head.modulation"][0] + time
    first = count * rows * columns
    out = linear("head.head", layer_norm(tokens) * (1 + scale) + shift_)[first : first + frames * rows * columns]
    out = out.view(frames, rows, columns, 1, 2, 2, -1).permute(6, 0, 3, 1, 4, 2, 5)
    return out.reshape(-1, frames, height, width)


def sampled(
    predict: Callable[[torch.Tensor, float], torch.Tensor],
    scheduler: Any,
    noise: torch.Tensor,
    num_steps: int,
    history: torch.Tensor | None = None,
) -> torch.Tensor:
    """Denoise with one of diffusers' schedulers; `history`, clean latents of the first frames, is put in before and
    after every step."""

    def with_history(latents: torch.Tensor) -> torch.Tensor:
        return latents if history is None else torch.cat([history, latents[:, history.shape[1] :]], dim=1)

    scheduler.set_timesteps(num_steps)
    latents = with_history(noise)
    for timestep in scheduler.timesteps:
        velocity = predict(latents, float(timestep)).float()
        latents = with_history(scheduler.step(velocity[None], timestep, latents[None], return_dict=False)[0][0])
    return latents
