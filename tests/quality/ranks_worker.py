"""One of two processes that train together; test_ranks.py starts them and gives a folder for the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from scripts.shapes.streams import StreamSettings
from scripts.train_embedded.architecture import build_transformer
from scripts.train_embedded.buckets import Bucket
from scripts.train_embedded.causal_buckets import CausalBucket
from scripts.train_embedded.causal_train import make_pool, train
from scripts.train_embedded.causal_training import CausalTraining, build_models
from scripts.train_embedded.ranks import GradientAverage, Ranks, join_ranks
from scripts.train_embedded.session import Clock, Log
from scripts.train_embedded.train_transformer import TransformerTraining, load_encoder, make_pools

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


CAUSAL_BUCKET = CausalBucket("first", 2, 32, 2, 1.0, 3.0, 4, 4)


def causal_weights(folder: Path, ranks: Ranks) -> tuple[int, list[torch.Tensor]]:
    """Steps and weights of a causal training on data of this process's own, whose clock is not the others'."""
    torch.manual_seed(ranks.rank)
    training = CausalTraining(*build_models(ASSETS), seed=3, ranks=ranks)
    pool = make_pool(CAUSAL_BUCKET, load_encoder(ASSETS, "cpu"), "cpu", ranks.seed(7), StreamSettings())
    pool.fill(1.0)
    arguments = argparse.Namespace(
        schedule=(0.0, 1.0),
        seed=0,
        steps=0,
        pause_file=None,
        save_every=0.2,
        refresh_every=8,
        log_every=4,
        peak=1e-3,
        end=1e-5,
        first_chunk_weight=2.0,
        as_shipped=0.0,
        at_steps=0.0,
        out=folder / f"causal{ranks.rank}",
    )
    train(training, [pool], Clock(0.5 + 60 * ranks.rank), ranks, Log(None), arguments)
    return training.steps, [parameter.detach() for parameter in training.transformer.parameters()]


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
