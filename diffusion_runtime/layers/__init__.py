"""Building blocks of transformers other than attention kernels: RoPE, norms, adaLN modulation, embeddings,
feed-forward."""
