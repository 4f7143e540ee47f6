"""Images from a prompt: a video model is asked for one frame. Every flag of `diffusion-runtime generate` is taken:

python examples/text_to_image.py --prompt "a whale" --seed 1-4 --output whale.png
python examples/text_to_image.py --model flux.1-schnell --height 512 --width 512 --num-inference-steps 4
"""

from __future__ import annotations

import dataclasses
import sys

from diffusion_runtime import DiffusionRuntimeError, load_pipeline, parse_flags


def main() -> None:
    flags = parse_flags(prompt="a whale")
    pipeline = load_pipeline(flags.runtime)
    for request in flags.requests(pipeline):
        media = pipeline(dataclasses.replace(request, num_frames=1))
        # A name that is taken gets a number, so nothing is overwritten.
        print(media.save(flags.output_path or "text_to_image.png", overwrite=False))
        print(media.attention_report, file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except DiffusionRuntimeError as error:
        # The message says what was expected, and what to write.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
