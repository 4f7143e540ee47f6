"""Denoising: initial noise, samplers (which own the loop), noise schedules, and guidance around the prediction."""
