"""A video from a prompt, and a word on what ran. Every flag of `diffusion-runtime generate` is taken:

python examples/text_to_video.py --prompt "a fox running left in the snow" --seed 1 --output fox.mp4
python examples/text_to_video.py --model wan2.1-1.3b --num-frames 33 --attention-backend fa,torch_sdpa
python examples/text_to_video.py --attention-config.per_role.cross.backend torch_sdpa
"""

from __future__ import annotations

import sys

from diffusion_runtime import DiffusionRuntimeError, load_pipeline, parse_flags


def main() -> None:
    flags = parse_flags(prompt="a fox running left in the snow")
    pipeline = load_pipeline(flags.runtime)
    for request in flags.requests(pipeline):
        media = pipeline(request)
        # A name that is taken gets a number, so nothing is overwritten.
        print(media.save(flags.output_path or "text_to_video.mp4", overwrite=False))
        print(media.attention_report, file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except DiffusionRuntimeError as error:
        # The message says what was expected, and what to write.
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
