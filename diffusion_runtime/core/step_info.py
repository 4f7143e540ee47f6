"""StepInfo, LayerInfo: the denoising step and the layer that an attention call belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Of the conditional prediction with a part of the model left out: some blocks (skip-layer guidance) or their
# self-attention (spatio-temporal guidance), or attention between pictures and sound (modality guidance).
PERTURBED, ISOLATED = "perturbed", "isolated"
BRANCHES = ("cond", "uncond", "both", PERTURBED, ISOLATED)
PHASES = ("denoise", "commit")


@dataclass(frozen=True)
class LayerInfo:
    """index of num_layers: the transformer block; role: what the attention relates, such as `self` or `cross`;
    name: the module's path in its model, for messages. phase: the only one of PHASES in which it runs, None for any."""

    index: int = 0
    num_layers: int = 1
    role: str = "self"
    name: str = ""
    phase: str | None = None


@dataclass(frozen=True)
class StepInfo:
    """Position of a call in the denoising loop.

    timestep: the model's own time, usually in [0, 1000]; sigma: the noise level in [0, 1].
    branch: `cond`, `uncond`, `both` when guidance runs them as one batch, PERTURBED or ISOLATED.
    expert: which transformer, for models that have more than one.
    next_timestep: that of the step after it, 0 at the last one; an input of MeanFlow models (timestep_r;
    arXiv:2505.13447).
    chunk: which chunk of a video that is made chunk by chunk; index and num_steps count within it. phase: `denoise`, or
    `commit` for the pass over clean frames that leaves their final keys in the cache, and for the one that computes a
    prefix (attention/cache/prefix.py). frame_timesteps: of each latent frame of the pass, where they differ, as in a
    rolling window; None where timestep is that of all. shares_keys: whether the unconditional branch goes on from the
    cached keys of the conditional one, since it has none of its own. skipped_blocks: indices of the blocks that take no
    part in the pass (skip-layer guidance). window: which context window of the clip the pass is over.
    """

    index: int = 0
    num_steps: int = 1
    timestep: float | None = None
    sigma: float | None = None
    branch: str = "cond"
    expert: int = 0
    next_timestep: float | None = None
    chunk: int = 0
    phase: Literal["denoise", "commit"] = "denoise"
    frame_timesteps: tuple[float, ...] | None = None
    shares_keys: bool = False
    skipped_blocks: tuple[int, ...] = ()
    window: int = 0
