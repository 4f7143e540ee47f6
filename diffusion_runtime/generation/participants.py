"""Participants: subsystems that take part in a generation in addition to its mathematics, each called at its stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from diffusion_runtime.decoders.decoder_graphs import DecoderGraphs
from diffusion_runtime.kernels.implementation import eager_remark
from diffusion_runtime.layers.eight_bit_linear import ProductCounter
from diffusion_runtime.memory.device_memory import shortage_remark
from diffusion_runtime.memory.offloading import Offloading
from diffusion_runtime.report.attention_report import AttentionRecorder
from diffusion_runtime.startup.first_use import kernels_compiled

Timings = Mapping[str, float]


class Participant:
    """A subsystem that is told how far a generation is; each method does nothing unless a subclass overrides it.

    Methods that take the recorder may add to the generation's report; those that return timings add seconds by name.
    """

    def begin(self, recorder: AttentionRecorder) -> None:
        """Handle the start of a generation."""

    def after_text(self) -> None:
        """Handle the end of the text encoders."""

    def begin_again(self, recorder: AttentionRecorder) -> None:
        """Handle the start of the forward passes of a video's next segment, after decoding."""

    def before_image_encoder(self) -> None:
        """Make room for the image encoder, which is about to run."""

    def after_denoising(self, recorder: AttentionRecorder) -> Timings:
        """Handle the end of the forward passes, before decoding. Return seconds by name."""
        return {}

    def before_decoding(self) -> None:
        """Handle the start of decoding."""

    def finish(self, recorder: AttentionRecorder) -> Timings:
        """Handle the end of a generation. Return seconds by name."""
        return {}

    def abandon(self) -> None:
        """Release what a generation that failed has left on the device."""


class CountedProducts(Participant):
    """Count of the products of quantised linear layers."""

    def __init__(self, counter: ProductCounter) -> None:
        self._counter = counter

    def begin(self, recorder: AttentionRecorder) -> None:
        self._counter.start(recorder.record_product)

    def begin_again(self, recorder: AttentionRecorder) -> None:
        self._counter.start(recorder.record_product)

    def after_denoising(self, recorder: AttentionRecorder) -> Timings:
        self._counter.stop()
        return {}


class OffloadedParts(Participant):
    """Parts of the model that wait in the machine's memory."""

    def __init__(self, offloading: Offloading) -> None:
        self._offloading = offloading

    def after_text(self) -> None:
        self._offloading.leave_text_encoders()

    def before_image_encoder(self) -> None:
        # The text encoders, which are done, have its room.
        self._offloading.leave()

    def after_denoising(self, recorder: AttentionRecorder) -> Timings:
        return self._offloading.report(recorder.note)

    def abandon(self) -> None:
        self._offloading.leave()


class ShortageRemark(Participant):
    """Remark about a device whose memory was nearly full."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def finish(self, recorder: AttentionRecorder) -> Timings:
        if (remark := shortage_remark(self._device)) is not None:
            recorder.note(remark)
        return {}


class EagerLayers(Participant):
    """Remark on narrow layers, whose fused kernels are not compiled. widths: numbers of a token in the layers."""

    def __init__(self, device: torch.device, widths: Collection[int]) -> None:
        self._device, self._widths = device, widths

    def finish(self, recorder: AttentionRecorder) -> Timings:
        if (remark := eager_remark(self._device, self._widths)) is not None:
            recorder.note(remark)
        return {}


class CompileTime(Participant):
    """Seconds spent on compiling kernels at their first use."""

    def __init__(self) -> None:
        self._before = kernels_compiled()

    def begin(self, recorder: AttentionRecorder) -> None:
        del recorder
        self._before = kernels_compiled()

    def finish(self, recorder: AttentionRecorder) -> Timings:
        num_kernels, seconds = (now - before for now, before in zip(kernels_compiled(), self._before, strict=True))
        if not num_kernels:
            return {}
        recorder.note(f"first use: {num_kernels} kernels compiled in {seconds:.1f} s of this generation")
        return {"compile": seconds}


class ReplayedDecoder(Participant):
    """CUDA graphs of the decoder."""

    def __init__(self, graphs: DecoderGraphs) -> None:
        self._graphs = graphs

    def before_decoding(self) -> None:
        self._graphs.start()

    def finish(self, recorder: AttentionRecorder) -> Timings:
        recorder.record_decoder_graphs(self._graphs.report())
        return {}


class Participants(Participant):
    """Several participants as one, called in their order."""

    def __init__(self, several: Iterable[Participant]) -> None:
        self._several = tuple(several)

    def begin(self, recorder: AttentionRecorder) -> None:
        for each in self._several:
            each.begin(recorder)

    def after_text(self) -> None:
        for each in self._several:
            each.after_text()

    def begin_again(self, recorder: AttentionRecorder) -> None:
        for each in self._several:
            each.begin_again(recorder)

    def before_image_encoder(self) -> None:
        for each in self._several:
            each.before_image_encoder()

    def after_denoising(self, recorder: AttentionRecorder) -> Timings:
        return {name: seconds for each in self._several for name, seconds in each.after_denoising(recorder).items()}

    def before_decoding(self) -> None:
        for each in self._several:
            each.before_decoding()

    def finish(self, recorder: AttentionRecorder) -> Timings:
        return {name: seconds for each in self._several for name, seconds in each.finish(recorder).items()}

    def abandon(self) -> None:
        for each in self._several:
            each.abandon()
