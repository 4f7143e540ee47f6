"""Our attention inside a diffusers script of your own: by role and by step, and taken out again.

python examples/attach_to_your_pipeline.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers "a red circle moving left" [out.gif]
"""

from __future__ import annotations

import sys

from diffusers import DiffusionPipeline

from diffusion_runtime import DiffusionRuntimeError, attach

# Tiles of the video attend to those around them, except in the first two steps.
ATTENTION = {
    "per_role": {"self": {"backend": "sliding_tile_attn", "extra": {"window": [3, 3, 3]}}, "cross": "torch_sdpa"},
    "schedule": [{"role": "self", "steps": "0-1", "backend": "torch_sdpa"}],
}


def main(model: str, prompt: str, path: str = "attached.gif", num_steps: str = "30") -> None:
    pipeline = DiffusionPipeline.from_pretrained(model, use_safetensors=True)
    with attach(pipeline, ATTENTION) as attached:
        frames = pipeline(prompt, num_inference_steps=int(num_steps), output_type="pil").frames[0]
        print(attached.report(), file=sys.stderr)
    # From here on the pipeline is as it was.
    frames[0].save(path, save_all=True, append_images=frames[1:])
    print(path)


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except DiffusionRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
