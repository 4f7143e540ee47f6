"""The Wan family: its settings, and how the parts of a Wan folder are built and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from diffusion_runtime.attention.policy import AttentionPolicy
from diffusion_runtime.errors import ModelLoadError
from diffusion_runtime.models.checkpoint import Checkpoint, WeightChange, load_weights
from diffusion_runtime.models.folder import INDEX_FILE, read_json
from diffusion_runtime.models.interface import DiffusionTransformer, LatentDecoder, LatentGeometry, ModelFamily
from diffusion_runtime.models.wan import codec
from diffusion_runtime.models.wan.config import GATE, read_geometry, read_transformer_config
from diffusion_runtime.models.wan.transformer import WanTransformer
from diffusion_runtime.models.wan.weights import IGNORED_SUFFIXES, stays_float32, transformer_pieces
from diffusion_runtime.text_encoders.interface import TextEncoder
from diffusion_runtime.text_encoders.umt5 import load_umt5


class WanFamily(ModelFamily):
    """Wan text-to-video with one transformer."""

    name = "wan"
    transformer_classes = ("WanTransformer3DModel",)
    roles = (("self", "self"), ("cross", "cross"))
    # 480p as in Wan 2.1's own examples: flow shift 3 and guidance 5 to 6 for 1.3B, five seconds at 16 frames a second.
    defaults: ClassVar[Mapping[str, Any]] = {
        "negative_prompt": "",
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "fps": 16,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "flow_shift": 3.0,
        "sampler": "unipc",
        "guidance_mode": "batched",
    }

    def geometry(self, folder: Path) -> LatentGeometry:
        return read_geometry(folder)

    def build_transformer(self, folder: Path, policy: AttentionPolicy) -> WanTransformer:
        _refuse_other_pipelines(folder)
        config = read_transformer_config(folder)
        with torch.device("meta"):
            return WanTransformer(config, read_geometry(folder), policy)

    def load_text_encoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        return load_umt5(folder, device, dtype)

    def load_transformer(
        self,
        folder: Path,
        transformer: DiffusionTransformer,
        device: torch.device,
        dtype: torch.dtype,
        changes: Sequence[WeightChange] = (),
    ) -> WanTransformer:
        assert isinstance(transformer, WanTransformer)
        with Checkpoint(folder / "transformer", changes=changes) as checkpoint:
            if any(f".{GATE}." in name for name in checkpoint.shapes):
                transformer.add_gates()
            load_weights(
                transformer,
                checkpoint,
                transformer_pieces(transformer.config),
                device,
                dtype,
                stays_float32=stays_float32,
                ignored=lambda name: name.endswith(IGNORED_SUFFIXES),
            )
        return transformer

    def load_decoder(self, folder: Path, device: torch.device, dtype: torch.dtype) -> LatentDecoder:
        return codec.load_decoder(folder, device, dtype)


def _refuse_other_pipelines(folder: Path) -> None:
    """Running one expert of two, or one timestep where each token has its own, would make noise without a word."""
    path = folder / INDEX_FILE
    index = read_json(path)
    for key in ("transformer_2", "boundary_ratio"):
        if index.get(key) not in (None, [None, None]):
            raise ModelLoadError(
                f"{path}: key {key!r} is {index[key]!r}: this model has two transformers, and this version runs models "
                "that have one"
            )
    if index.get("expand_timesteps"):
        raise ModelLoadError(
            f"{path}: key 'expand_timesteps' is true: this model has a timestep for every token (Wan 2.2 TI2V), and "
            "this version runs models with one timestep for all"
        )
