"""Encodes prompts that are known before a model is loaded while its transformer is read."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from diffusion_runtime.core.device_guard import device_guard
from diffusion_runtime.request.generation_request import GenerationRequest
from diffusion_runtime.startup import startup_is_on
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder
from diffusion_runtime.text_encoders.offloaded import modules_of

# Devices on which two threads may compute at once.
DEVICES = ("cpu", "cuda")


class _StoppedError(Exception):
    """Ends the thread at the next module that is called."""


class EncodingAhead(TextEncoder):
    """`encoder`, whose `texts` a thread encodes from now on; the first call with the same texts gets its result.

    The thread makes the call that `encode` would make, on the same device and stream, so that the numbers are the same.
    Any call waits for it first: an encoder is used by one thread at a time. What the thread raises is raised by the
    call with the same texts.
    """

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], device: torch.device) -> None:
        self._encoder = encoder
        self._texts = tuple(texts)
        self._device = device
        self._found: Conditions | None = None
        self._failure: Exception | None = None
        self._is_stopped, self._is_done = threading.Event(), threading.Event()
        self._describe()
        # A daemon that is stopped as the interpreter ends: a load that fails at any point waits for no prompt, and no
        # thread is left inside torch, which would abort the process.
        self._thread = threading.Thread(target=self._run, name="encoding-ahead", daemon=True)
        atexit.register(self.stop)
        self._thread.start()

    def of_pictures(self, paths: Sequence[str]) -> TextEncoder:
        self._wait()
        return self._or_self(self._encoder.of_pictures(paths))

    def of_request(self, request: GenerationRequest) -> TextEncoder:
        self._wait()
        return self._or_self(self._encoder.of_request(request))

    def of_negative(self) -> TextEncoder:
        self._wait()
        return self._or_self(self._encoder.of_negative())

    def encode(self, prompts: Sequence[str]) -> Conditions:
        self._wait()
        found, failure, is_asked = self._found, self._failure, tuple(prompts) == self._texts
        # Returned once: a model is kept for hours, its first prompt need not be.
        self._found = self._failure = None
        if is_asked and failure is not None:
            raise failure
        try:
            return found if is_asked and found is not None else self._encoder.encode(prompts)
        finally:
            # Encoding may find that the encoder's kernels must not be used here.
            self._describe()

    def forget(self) -> None:
        """Drop what was found: the encoder's weights are about to change."""
        self._wait()
        self._found = self._failure = None

    def stop(self) -> None:
        """End the thread at the next module that the encoder calls, and wait until it has ended."""
        self._is_stopped.set()
        self._is_done.wait()
        self._thread.join()

    def _or_self(self, encoder: TextEncoder) -> TextEncoder:
        return self if encoder is self._encoder else encoder

    def _describe(self) -> None:
        encoder = self._encoder
        self.max_tokens, self.chosen = encoder.max_tokens, encoder.chosen
        self.library, self.implementation = encoder.library, encoder.implementation

    def _wait(self) -> None:
        try:
            # Not `join`: a signal during it makes Python before 3.13 take a running thread for one that has ended.
            self._is_done.wait()
        except BaseException:
            # Ctrl-C: a process does not end before its threads have.
            self.stop()
            raise
        self._thread.join()

    def _run(self) -> None:
        # Any module, not only layers: on a CPU one of 67 M numbers takes 5 s for 1,800 tokens.
        modules = dict.fromkeys(part for module in modules_of(self._encoder) for part in module.modules())
        hooks = [module.register_forward_pre_hook(self._check) for module in modules]
        try:
            with torch.inference_mode(), device_guard(self._device):
                self._found = self._encoder.encode(self._texts)
        except _StoppedError:
            # A later call with the same texts encodes them then.
            pass
        except Exception as error:
            self._failure = error
        finally:
            for hook in hooks:
                hook.remove()
            # It would keep the encoder's weights for as long as the process runs.
            atexit.unregister(self.stop)
            self._is_done.set()

    def _check(self, _module: nn.Module, _inputs: object) -> None:
        if self._is_stopped.is_set():
            raise _StoppedError


@contextlib.contextmanager
def encoding_ahead(encoder: TextEncoder, texts: Sequence[str], device: torch.device) -> Iterator[TextEncoder]:
    """Context manager: give the encoder, which encodes `texts` while the block runs; without texts, on devices of one
    thread, and where start-time measures are off, the encoder alone. A block that raises, Ctrl-C included, ends the
    encoding."""
    if not texts or device.type not in DEVICES or not startup_is_on():
        yield encoder
        return
    ahead = EncodingAhead(encoder, texts, device)
    try:
        yield ahead
    except BaseException:
        ahead.stop()
        raise
