"""One denoising step of every family at its real size, for benchmarks/families_gpu.py."""
