"""What transformers share that is not attention: positions, norms, modulation, embeddings, feed-forward."""
