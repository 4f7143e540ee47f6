"""An image from a prompt: a video model asked for one frame.

python examples/text_to_image.py "a blue star" [out.png]
"""

from __future__ import annotations

import sys

from diffusion_runtime import GenerationRequest, load_pipeline


def main(prompt: str, path: str = "text_to_image.png", model: str = "shapes") -> None:
    pipeline = load_pipeline(model)
    for seed in range(2):
        media = pipeline(GenerationRequest(prompt=prompt, num_frames=1, seed=seed))
        # A name that is taken gets a number, so nothing is overwritten.
        print(media.save(path, overwrite=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
