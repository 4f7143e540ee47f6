"""CUDA graphs: forward passes of a transformer that are launch-bound, captured once and replayed."""
