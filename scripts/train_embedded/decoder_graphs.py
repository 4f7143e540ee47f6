"""Gradients of a decoder from pooled clips: one CUDA graph per shape, since launches took longer than their kernels.

The loss is the negative PSNR itself, of whole clips and of the pixels where a thing is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from scripts.train_embedded.clip_vae import WholeClipVae
from scripts.train_embedded.decoder_pool import DecoderBatch, empty_batch
from scripts.train_embedded.vae_buckets import Bucket

THINGS_SHARE = 0.3
"""Weight of the things' decibels beside those of the whole clip, in which a thing is a small part."""
FLOOR = 1e-6
"""Added to squared errors in units of the full range: no gain past 60 dB, and no logarithm of 0."""
WARM_UPS = 3
"""Steps before the capture: they compile, choose kernels and reserve work spaces."""


def decibels(decoded: Tensor, frames: Tensor, things: Tensor) -> tuple[Tensor, Tensor]:
    """Return the PSNR of each clip and of the pixels of its things, each [B], in dB.

    decoded: [B, 3, T, H, W] in -1 to 1, not clamped; frames: [B, T, H, W, 3] uint8; things: [B, T, H, W] bool.
    """
    wanted = frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1
    error = ((decoded.float() - wanted) / 2).square().mean(dim=1)
    whole = error.mean(dim=(1, 2, 3))
    inside = (error * things).sum(dim=(1, 2, 3)) / things.sum(dim=(1, 2, 3)).clamp(min=1)
    return -10 * torch.log10(whole + FLOOR), -10 * torch.log10(inside + FLOOR)


class DecoderGradients:
    """Writes gradients of one batch of a bucket into the parameters' own; captured as CUDA graphs or not.

    batches: by bucket, the tensors to fill before `compute`.
    """

    def __init__(
        self, vae: WholeClipVae, parameters: Sequence[Tensor], buckets: Sequence[Bucket], device: str, *, captured: bool
    ) -> None:
        self._vae, self._device = vae, device
        self.batches = {bucket: empty_batch(bucket.batch, bucket, device) for bucket in buckets}
        # Made once, in the order of the weights: a graph adds to these addresses.
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._psnr = torch.zeros(2, device=device)
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self._captured = captured
        self._memory = torch.cuda.graph_pool_handle() if captured else None

    def capture(self, bucket: Bucket) -> None:
        """Run a bucket's batch, and record it where graphs are wanted; the batch must be filled."""
        if not self._captured:
            self._run(self.batches[bucket])
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run(self.batches[bucket])
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Graphs share memory: nothing but what was made before them is read after a replay.
        with torch.cuda.graph(graph, pool=self._memory):
            self._run(self.batches[bucket])
        self._graphs[bucket] = graph

    def compute(self, bucket: Bucket) -> Tensor:
        """Replace the gradients by those of the bucket's batch; the PSNR of clips and of things, [2] dB."""
        if self._captured:
            self._graphs[bucket].replay()
        else:
            self._run(self.batches[bucket])
        return self._psnr.clone()

    def _run(self, batch: DecoderBatch) -> None:
        torch._foreach_zero_(self._gradients)
        # A cache of weights in bfloat16 would outlive a capture.
        with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._device == "cuda", cache_enabled=False):
            decoded = self._vae.decode(batch.latents)
        whole, things = (each.mean() for each in decibels(decoded, batch.frames, batch.things))
        # Natural logarithms, so that the gradient is that of the relative error.
        (-(whole + THINGS_SHARE * things) * (math.log(10) / 10)).backward()
        with torch.no_grad():
            self._psnr.copy_(torch.stack([whole, things]))
