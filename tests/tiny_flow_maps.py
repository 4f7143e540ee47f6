"""Tiny AnyFlow folders for tests: Wan flow maps, and the causal ones (AnyFlow-FAR)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_models import write_tiny_wan

AUTHORS = {"init_far_model": False, "init_flowmap_model": True, "chunk_partition": None, "full_chunk_limit": 3}
_SIZES = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_tiny_flow_map(folder: Path, *, is_far: bool = False, **config: Any) -> Path:
    """A tiny Wan folder whose transformer is a flow map. is_far: a causal one. config: further keys of it."""
    import torch
    from diffusers import AnyFlowFARTransformer3DModel, AnyFlowTransformer3DModel, FlowMapEulerDiscreteScheduler

    write_tiny_wan(folder)
    model_class = AnyFlowFARTransformer3DModel if is_far else AnyFlowTransformer3DModel
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = model_class(**{**_SIZES, **config})
        for name, parameter in model.named_parameters():
            # Norm weights of exactly one, small cross-attentions and small embeddings of r would hide what is left out.
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if ".attn2.to_out" in name or name.startswith("proj_out") or "delta_embedder" in name:
                parameter.mul_(3.0)
            if is_far and (".attn1.to_out" in name or "far_patch_embedding" in name):
                # So does a past that hardly counts.
                parameter.mul_(4.0)
    for old in (folder / "transformer").iterdir():
        old.unlink()
    model.save_pretrained(folder / "transformer")
    FlowMapEulerDiscreteScheduler(shift=5.0).save_pretrained(folder / "scheduler")
    change_json(
        folder / "model_index.json",
        _class_name="AnyFlowFARPipeline" if is_far else "AnyFlowPipeline",
        transformer=["diffusers", model_class.__name__],
        scheduler=["diffusers", "FlowMapEulerDiscreteScheduler"],
    )
    index = json.loads((folder / "model_index.json").read_text())
    dropped = ("transformer_2", "boundary_ratio", "expand_timesteps")
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if k not in dropped}))
    return folder


def with_authors_names(folder: Path, **config: Any) -> Path:
    """The same folder as the authors' own code writes it. config: of the transformer."""
    is_far = config.get("init_far_model") is True
    change_json(folder / "transformer" / "config.json", _class_name="FAR_Wan_Transformer3DModel", **AUTHORS | config)
    change_json(folder / "scheduler" / "scheduler_config.json", _class_name="FlowMapDiscreteScheduler")
    change_json(folder / "scheduler" / "scheduler_config.json", weight_type="beta08")
    change_json(
        folder / "model_index.json",
        _class_name="FARWanAnyFlowPipeline" if is_far else "WanAnyFlowPipeline",
        transformer=["far.models.transformer_far_wan_model", "FAR_Wan_Transformer3DModel"],
        scheduler=["far.schedulers.scheduling_flowmap_euler_discrete", "FlowMapDiscreteScheduler"],
    )
    return folder
