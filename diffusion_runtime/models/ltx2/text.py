"""LTX-2's text: every layer of Gemma 3, since LTX-2.5 of Gemma 4, brought together by connectors into one text for the
video and one for the sound.

The connectors are diffusers'. They pad a prompt to 1024 tokens with learned ones, so that the transformer attends to
all of them and has no padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffusion_runtime.core.model_folder import AnyFolder, read_config, read_index
from diffusion_runtime.decoders.autoencoder import DiffusersComponent
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.ltx2.config import read_transformer_config
from diffusion_runtime.text_encoders.gemma import GemmaEncoder, load_gemma
from diffusion_runtime.text_encoders.interface import Conditions, TextEncoder, TextStream

COMPONENT = "connectors"
# Since LTX-2.5, where a folder has it: the length of a video for a text of the connectors'.
DURATION_HEAD = DiffusersComponent("duration_head", "diffusers.pipelines.ltx2.duration_head", "LTX2DurationHead")
# They lie in the quantised files of transformers and text encoders.
CONNECTORS = DiffusersComponent(
    COMPONENT, "diffusers.pipelines.ltx2.connectors", "LTX2TextConnectors", reads_quantized=True
)
MAX_TOKENS = 1024


class LTX2TextEncoder(TextEncoder):
    """Gemma and the connectors as one: `embeddings` for the video, the first further stream for the sound.

    predict_seconds: (texts of a prompt for the video, for the sound, each [1, max_tokens, dim]) -> its length; None
    without a duration head.
    """

    library = "transformers"

    def __init__(
        self,
        gemma: GemmaEncoder,
        connectors: Any,
        predict_seconds: Callable[[torch.Tensor, torch.Tensor], float] | None = None,
    ) -> None:
        self.gemma = gemma
        self.connectors = connectors
        self._predict_seconds = predict_seconds
        self.max_tokens = gemma.max_tokens
        self.implementation = f"{gemma.implementation}; diffusers' {type(connectors).__name__}"

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Conditions:
        """Encode one prompt after the other: all layers of 1024 tokens take 0.4 GB in bfloat16."""
        encoded = [self.gemma.encode(prompt.strip()) for prompt in prompts]
        streams = [self._connect(states) for states, _ in encoded]
        rows = [row for _, row in encoded]
        lengths = (self.max_tokens,) * len(rows)
        predict = self._predict_seconds
        return Conditions(
            embeddings=torch.cat([video for video, _ in streams]),
            lengths=lengths,
            unknown_words=tuple(row.unknown_words for row in rows),
            num_cut_tokens=tuple(row.num_cut_tokens for row in rows),
            further=(TextStream(torch.cat([audio for _, audio in streams]), lengths),),
            seconds=() if predict is None else tuple(predict(*texts) for texts in streams),
        )

    def _connect(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the texts of one prompt, each [1, max_tokens, dim]. states: of GemmaEncoder.encode."""
        num_tokens = states.shape[0]
        padded = states.new_zeros(1, self.max_tokens, *states.shape[1:])
        mask = torch.zeros(1, self.max_tokens, dtype=torch.long, device=states.device)
        # At the end, where the connectors were trained to find it.
        padded[0, self.max_tokens - num_tokens :] = states
        mask[0, self.max_tokens - num_tokens :] = 1
        video, audio, _ = self.connectors(padded, mask, padding_side="left")
        return video, audio


def load_text_encoder(folder: AnyFolder, device: torch.device, dtype: torch.dtype) -> LTX2TextEncoder:
    """Load Gemma and the connectors of a diffusers folder. Raises ModelLoadError."""
    check_connectors(folder)
    gemma = load_gemma(folder, device, dtype, max_tokens=MAX_TOKENS)
    file = read_config(folder, COMPONENT)
    for key, default, expected in (
        ("caption_channels", 3840, gemma.dim),
        ("text_proj_in_factor", 49, gemma.num_states),
    ):
        value = file.whole_number(key, default)
        if value != expected:
            raise file.error(key, f"{expected}, as the text encoder beside it has", value)
    predict = _predict_seconds(folder) if has_duration_head(folder) else None
    return LTX2TextEncoder(gemma, CONNECTORS.load(folder, device, dtype), predict)


def has_duration_head(folder: AnyFolder) -> bool:
    return read_index(folder).get(DURATION_HEAD.name) not in (None, [None, None])


def _predict_seconds(folder: AnyFolder) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Return the function of the duration head, which is loaded when it is first called. It stays on the CPU in
    float32: it has 2 M parameters, and the length of a video does not depend on the device then."""
    cpu = torch.device("cpu")
    head = functools.cache(lambda: DURATION_HEAD.load(folder, cpu, torch.float32))
    return lambda video, audio: float(head()(video.to(cpu), audio.to(cpu)))


def check_connectors(folder: AnyFolder) -> None:
    """Check that the connectors fit the transformer and the length of a text, and a duration head the connectors.
    Raises ModelLoadError."""
    file, transformer = read_config(folder, COMPONENT), read_transformer_config(folder)
    if has_duration_head(folder):
        DURATION_HEAD.check(folder)
        head = read_config(folder, DURATION_HEAD.name)
        for stream, default in (("video", 4096), ("audio", 2048)):
            width = {"video": transformer.video, "audio": transformer.audio}[stream].text_dim
            if (value := head.whole_number(f"{stream}_cross_attention_dim", default)) != width:
                raise head.error(f"{stream}_cross_attention_dim", f"{width}, the width of that connector", value)
    for stream, text_dim in (("video", transformer.video.text_dim), ("audio", transformer.audio.text_dim)):
        num_heads = file.whole_number(f"{stream}_connector_num_attention_heads", 30)
        head_dim = file.whole_number(f"{stream}_connector_attention_head_dim", 128)
        if num_heads * head_dim != text_dim:
            key = "caption_channels" if transformer.projects_text else f"width of its {stream} stream"
            raise ModelLoadError(
                f"{file.path}: keys '{stream}_connector_num_attention_heads' ({num_heads}) and "
                f"'{stream}_connector_attention_head_dim' ({head_dim}): expected their product to be {text_dim}, the "
                f"transformer's {key}"
            )
        if file.flag("per_modality_projections", False):
            width = file.whole_number(f"{stream}_hidden_dim", {"video": 4096, "audio": 2048}[stream])
            if width != text_dim:
                raise file.error(f"{stream}_hidden_dim", f"{text_dim}, the width of that connector", width)
        key = f"{stream}_connector_num_learnable_registers"
        num_registers = file.values.get(key, 128)
        if num_registers is not None and MAX_TOKENS % file.whole_number(key, 128):
            raise file.error(key, f"a number that divides {MAX_TOKENS}", num_registers)
