"""Attention benchmark: speed and error of every backend on this machine, at the shapes of real models."""
