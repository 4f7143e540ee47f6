"""The world of the embedded model `emoji`: its prompts, and the judge that reads a clip and compares it with one.

Captions name things, their motion, size and place, the scene and the time of day; the judge reads the same off a clip
with a small network of its own and never sees the prompt. What draws clips for training is `scripts/emoji`.
"""
