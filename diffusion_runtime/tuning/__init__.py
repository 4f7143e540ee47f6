"""Tuning: which layers and steps may be how sparse under a quality budget, measured and verified (`tune`)."""
