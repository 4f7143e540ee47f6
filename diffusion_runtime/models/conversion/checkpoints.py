"""The causal Wan 2.1 checkpoints that are published as pickles, and the settings that each was trained with.

A settings table and nothing else: the contents of a folder's transformer/config.json and generation.json. Names there
are FastVideo's, as the family reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# FastVideo's names: a Wan transformer that makes videos chunk by chunk, and the pipeline of few re-noised steps.
CAUSAL_CLASS, FEW_STEP_PIPELINE, PIPELINE = "CausalWanTransformer3DModel", "WanCausalDMDPipeline", "WanPipeline"
# The gates of Video Sparse Attention, which only checkpoints that were trained with it have.
OPTIONAL_PART = ".to_gate_compress."
LORA_KEYS = ("generator_lora", "lora")
MODEL_KEYS = ("generator_ema", "generator", "model", "state_dict")
"""Of training checkpoints, the one to generate with first: the average of the weights."""


@dataclass(frozen=True)
class CausalCheckpoint:
    """A published checkpoint. steps: noise levels of the denoising passes of a chunk, 1 to 0, before the flow shift;
    frames are latent.

    chunk_frames: of a chunk; window: in sight of a chunk, itself included, -1 for the whole cache of `cache_frames`;
    sink: first frames that stay in sight. keys: of the file, first choice first.
    """

    name: str
    title: str
    source: str
    steps: tuple[float, ...]
    flow_shift: float
    window: int = -1
    sink: int = 0
    chunk_frames: int = 3
    cache_frames: int = 21
    first_chunk_is_one: bool = False
    pipeline: str = FEW_STEP_PIPELINE
    keys: tuple[str, ...] = MODEL_KEYS

    def transformer_settings(self) -> dict[str, Any]:
        """Return the settings of transformer/config.json in addition to a plain Wan's."""
        return {
            "_class_name": CAUSAL_CLASS,
            "num_frames_per_block": self.chunk_frames,
            "independent_first_frame": self.first_chunk_is_one,
            "sliding_window_num_frames": self.cache_frames,
            "local_attn_size": self.window,
            "sink_size": self.sink,
            "rope_cache_policy": "absolute",
        }

    def request_values(self) -> dict[str, Any]:
        """Return the defaults of generation.json: 81 frames at 480p as trained, no guidance."""
        return {
            "height": 480,
            "width": 832,
            "num_frames": 81,
            "fps": 16,
            "sampler": "dmd",
            "num_inference_steps": len(self.steps),
            "sigmas_before_shift": list(self.steps),
            "flow_shift": self.flow_shift,
            "guidance_scale": 1.0,
        }


_SELF_FORCING_STEPS = (1.0, 0.75, 0.5, 0.25)

CHECKPOINTS: Mapping[str, CausalCheckpoint] = MappingProxyType(
    {
        each.name: each
        for each in (
            CausalCheckpoint(
                "causvid",
                "CausVid, autoregressive, 3 steps",
                "tianweiy/CausVid, configs of Wan: denoising_step_list 1000, 757, 522, not warped",
                # Unchanged: the list names timesteps after the shift of 8.
                (1.0, 0.757, 0.522),
                flow_shift=1.0,
                pipeline=PIPELINE,
                keys=("generator", *MODEL_KEYS),
            ),
            CausalCheckpoint(
                "self-forcing",
                "Self-Forcing, 4 steps",
                "guandeh17/Self-Forcing, configs/self_forcing_dmd.yaml: 1000, 750, 500, 250, warped by shift 5",
                _SELF_FORCING_STEPS,
                flow_shift=5.0,
            ),
            CausalCheckpoint(
                "longlive",
                "LongLive 1, 4 steps, a window of 12 frames and a sink of 3",
                "NVlabs/LongLive v1.0, configs/longlive_inference.yaml: local_attn_size 12, sink_size 3",
                _SELF_FORCING_STEPS,
                flow_shift=5.0,
                window=12,
                sink=3,
                # The base of its LoRA is in `generator`.
                keys=("generator", *MODEL_KEYS),
            ),
        )
    }
)
"""By the name that `--as` takes."""
