"""The vector that conditions every block, against diffusers' classes for it."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import CombinedTimestepGuidanceTextProjEmbeddings, CombinedTimestepTextProjEmbeddings
from diffusers.models.normalization import AdaLayerNormSingle
from tables import table

from diffusion_runtime.layers.embeddings import ConditionEmbedding, TimestepModulation

NAMES = {"timestep": "timestep_embedder", "guidance": "guidance_embedder", "pooled": "text_embedder"}


@table("has_guidance", [True, False])
def test_the_sum_equals_diffusers(has_guidance: bool) -> None:
    torch.manual_seed(0)
    their_class = CombinedTimestepGuidanceTextProjEmbeddings if has_guidance else CombinedTimestepTextProjEmbeddings
    theirs = their_class(embedding_dim=24, pooled_projection_dim=10)
    ours = ConditionEmbedding(24, num_waves=256, pooled_dim=10, has_guidance=has_guidance)
    for name, module in ours.named_children():
        state = getattr(theirs, NAMES[name]).state_dict()
        renamed = {key.replace("linear_1", "up").replace("linear_2", "down"): value for key, value in state.items()}
        module.load_state_dict(renamed)
    timestep, pooled = torch.tensor([913.7, 4.25]), torch.randn(2, 10)
    scale = torch.full((2,), 3.3) * 1000
    with torch.no_grad():
        expected = theirs(timestep, scale, pooled) if has_guidance else theirs(timestep, pooled)
        found = ours(timestep, guidance=3.3, pooled=pooled)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_timestep_alone_takes_nothing_else() -> None:
    embedding = ConditionEmbedding(8, num_waves=16)
    timestep = torch.tensor([500.0])
    assert [name for name, _ in embedding.named_children()] == ["timestep"]
    with torch.no_grad():
        assert torch.equal(embedding(timestep), embedding(timestep, guidance=4.0, pooled=torch.randn(1, 3)))


def test_rows_of_the_timestep_equal_diffusers() -> None:
    torch.manual_seed(0)
    theirs = AdaLayerNormSingle(24)
    ours = TimestepModulation(256, 24, 6)
    state = {f"embedding.{key}": value for key, value in theirs.emb.timestep_embedder.state_dict().items()}
    state |= {f"projection.{key}": value for key, value in theirs.linear.state_dict().items()}
    ours.load_state_dict({key.replace("linear_1", "up").replace("linear_2", "down"): v for key, v in state.items()})
    timestep = torch.tensor([913.7, 4.25])
    with torch.no_grad():
        rows, embedded = theirs(timestep, {"resolution": None, "aspect_ratio": None}, 2, torch.float32)
        found, behind = ours(timestep)
    torch.testing.assert_close(found, rows.unflatten(1, (6, 24)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(behind, embedded, rtol=1e-6, atol=1e-6)
