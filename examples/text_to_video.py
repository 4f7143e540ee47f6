"""A video from a prompt, with a backend chosen by role, and a word on what ran.

python examples/text_to_video.py "a red circle moving left" [out.mp4]
"""

from __future__ import annotations

import sys

from diffusion_runtime import AttentionConfig, AttentionSpec, GenerationRequest, load_pipeline


def main(prompt: str, path: str = "text_to_video.mp4", model: str = "shapes") -> None:
    attention = AttentionConfig(default=AttentionSpec("auto"), per_role={"cross": "torch_sdpa"})
    pipeline = load_pipeline(model, attention=attention)
    media = pipeline(GenerationRequest(prompt=prompt, seed=1))
    print(media.save(path))
    print(media.attention_report, file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
