"""The world of the embedded model `shapes`: its prompts, and the checker that reads a clip and judges it.

Captions name colour, shape, motion and background; the checker reads the same four off a clip and never sees the
prompt. What draws clips for training is `scripts/shapes/render.py` of the repository.
"""
