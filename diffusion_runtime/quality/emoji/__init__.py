"""The world of the embedded model `emoji`: its vocabulary, captions, prompts, and the judge that reads a clip.

What draws clips for training is `scripts/emoji` of the repository.
"""
