"""One of two processes that train together; test_ranks.py starts them and gives a folder for the results."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from scripts.train_shapes.architecture import build_text_encoder, build_transformer
from scripts.train_shapes.buckets import Bucket
from scripts.train_shapes.causal_mask import ChunkMask
from scripts.train_shapes.causal_objective import StepPlan
from scripts.train_shapes.causal_pool import StreamTrainingBatch
from scripts.train_shapes.causal_training import CausalTraining
from scripts.train_shapes.ranks import GradientAverage, Ranks, join_ranks
from scripts.train_shapes.train_transformer import TransformerTraining, load_encoder, make_pools

ASSETS = Path(__file__).parents[2] / "diffusion_runtime/assets/shapes"
BUCKETS = (Bucket(5, 64, 4, 1.0, 3.0, 16, 8),)


def squared_error_gradients(rows: slice, ranks: Ranks) -> list[torch.Tensor]:
    """Averaged gradients of a seeded transformer on these rows of a seeded batch of four."""
    torch.manual_seed(0)
    transformer = build_transformer()
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    latents, text, wanted = torch.randn(4, 16, 2, 4, 4), torch.randn(4, 6, 128), torch.randn(4, 16, 2, 4, 4)
    predicted = transformer(
        latents[rows], torch.tensor([50.0, 300.0, 600.0, 950.0])[rows], text[rows], return_dict=False
    )[0]
    (predicted - wanted[rows]).square().mean().backward()
    parameters = list(transformer.parameters())
    GradientAverage(parameters, ranks)()
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def causal_weights(folder: Path, ranks: Ranks) -> list[torch.Tensor]:
    """The weights of a causal training after two steps on data of this process's own, with a checkpoint in between."""
    torch.manual_seed(ranks.rank)
    training = CausalTraining(build_transformer(), build_text_encoder(120), seed=3, ranks=ranks)
    plan = StepPlan(torch.arange(4), 8.0, ChunkMask(4, 2), (True, True))
    for _ in range(2):
        batch = StreamTrainingBatch(
            torch.randn(2, 16, 4, 4, 4),
            torch.zeros(2, 1, 4, 4, 4, dtype=torch.uint8),
            torch.randint(1, 120, (2, 3, 40)),
            torch.zeros(2, 4, dtype=torch.int64),
        )
        training.step(batch, plan, 1e-2)
        training.save(folder / f"causal{ranks.rank}")
    return [parameter.detach() for parameter in training.transformer.parameters()]


def main() -> None:
    """Write what this process has after the exchange."""
    torch.set_num_threads(1)
    folder, ranks = Path(sys.argv[1]), join_ranks()
    gradients = squared_error_gradients(slice(2 * ranks.rank, 2 * ranks.rank + 2), ranks)
    training = TransformerTraining(ranks, 3, None, "muon", 2.0)
    before = [parameter.detach().clone() for parameter in training.transformer.parameters()]
    (pool,) = make_pools(BUCKETS, load_encoder(ASSETS, "cpu"), "cpu", ranks.seed(5))
    pool.refresh(8)
    # The last step has no auxiliary losses: the heads are without gradients then.
    errors = [float(training.step(BUCKETS[0], pool, 1e-3, auxiliary).error.mean()) for auxiliary in (1.0, 0.5, 0.0)]
    weights = [*training.transformer.parameters(), *training.text_encoder.parameters(), *training.heads.parameters()]
    result = {
        "gradients": gradients,
        "before": before,
        "weights": [parameter.detach() for parameter in weights],
        "errors": errors,
        "agreed": ranks.agree(0.25 + ranks.rank),
        "count": ranks.count,
        "causal": causal_weights(folder, ranks),
        "apart": training.align(),
        "apart_before": ranks.align([torch.full((3,), float(ranks.rank))]),
    }
    torch.save(result, folder / f"rank{ranks.rank}.pt")
    ranks.leave()


if __name__ == "__main__":
    main()
